// OpenAI's SDK for node, which makes the calls that it reads from stdin: one JSON object a line.
// The first argument is the directory with node_modules, the second the worker's URL.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const require = createRequire(`${process.argv[2]}/package.json`);
const { default: OpenAI, toFile } = require("openai");
const client = new OpenAI({ baseURL: `${process.argv[3]}/v1`, apiKey: "none", maxRetries: 0 });

async function opened(path) {
  return toFile(readFileSync(path), "picture.png", { type: "image/png" });
}

const texts = { chat: client.chat.completions, completions: client.completions, embeddings: client.embeddings };

async function call({ name, files = {}, arguments: given }) {
  if (texts[name]) {
    const made = await texts[name].create(given);
    return given.stream ? await collected(made) : made;
  }
  const entries = Object.entries(files).map(async ([key, path]) => [key, await opened(path)]);
  const answer = await client.images[name]({ ...given, ...Object.fromEntries(await Promise.all(entries)) });
  if (!given.stream) return answer.data;
  return collected(answer);
}

async function collected(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

for await (const line of createInterface({ input: process.stdin })) {
  let said;
  try {
    said = { made: await call(JSON.parse(line)) };
  } catch (error) {
    said = { status: error.status, code: error.code, param: error.param, message: error.message };
  }
  console.log(JSON.stringify(said));
}
