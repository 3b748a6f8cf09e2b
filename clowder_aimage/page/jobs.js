// Jobs of the worker: what they do, how far they are, and what came of them.

import { html, signal, useEffect } from './html.js';
import { call } from './api.js';
import { Bar, IconButton } from './controls.js';
import { Icon } from './icons.js';
import { bytes, duration, moment, quoted, t, worded } from './lang.js';
import { refresh } from './refresh.js';
import { notice, online, scopes } from './state.js';
import { look } from './stock.js';

const PAUSE = 700; // milliseconds between two questions while a job runs

/** The jobs, the latest first, as `GET /v1/jobs` lists them; null until it has answered. */
export const jobs = signal(null);

const isActive = (job) => job.status === 'queued' || job.status === 'running';
const reasonOf = ({ error }) => worded(error.code, error.message);

/** Ask for the jobs; say which have ended since the last answer, and which a restart has ended. */
export async function findJobs() {
  const before = (jobs.value ?? []).filter(isActive);
  const { data } = await call('GET', '/v1/jobs');
  jobs.value = data;
  const now = new Map(data.map((job) => [job.id, job]));
  const over = before.filter((job) => !now.has(job.id) || !isActive(now.get(job.id)));
  for (const job of over) tell(now.get(job.id), job);
  if (over.length) await Promise.all([look(), refresh()]);
}

function tell(job, before) {
  const name = before.target;
  if (!job) notice(t('jobs.gone', { name }), { kind: 'bad' });
  else if (job.status === 'done') notice(t('jobs.made', { name }), { kind: 'good' });
  else if (job.status === 'failed') notice(t('jobs.failed', { name, reason: reasonOf(job) }), { kind: 'bad' });
}

/** Begin a job. Throws ApiError. */
export async function beginJob(fields) {
  const job = await call('POST', '/v1/jobs', { body: fields });
  jobs.value = [job, ...(jobs.value ?? [])];
  return job;
}

async function end(job) {
  try {
    await call('DELETE', `/v1/jobs/${job.id}`);
    await findJobs();
  } catch (error) {
    notice(error.message, { kind: 'bad' });
  }
}

let timer = 0;

/** Ask again while a job is active. */
async function follow() {
  clearTimeout(timer);
  await findJobs().catch(() => (jobs.value ??= [])); // a lost connection is shown
  if ((jobs.value ?? []).some(isActive)) timer = setTimeout(follow, PAUSE);
}

/** The list of jobs; nothing without any, or without the right to begin one. */
export function Jobs() {
  const active = (jobs.value ?? []).filter(isActive).length;
  useEffect(() => void (scopes.value.admin && follow()), [scopes.value.admin, online.value, active]);
  if (!scopes.value.admin || !jobs.value?.length) return null;
  return html`<section class="panel models-jobs" aria-labelledby="models-jobs">
    <h2 id="models-jobs">${t('jobs.title')}</h2>
    <ul class="models-job-list">${jobs.value.map((job) => html`<${Job} key=${job.id} job=${job} />`)}</ul>
  </section>`;
}

function Job({ job }) {
  const label = t(isActive(job) ? 'jobs.cancel' : 'jobs.forget', { name: job.target });
  return html`<li class="models-job">
    <div class="models-line">
      <span class="models-name">${job.target}</span>
      <span class=${`models-state models-state-${job.status}`}>
        ${job.status === 'done' && html`<${Icon} name="check" size=${14} />`}
        ${job.status === 'failed' && html`<${Icon} name="warning" size=${14} />`}${t(`jobs.status.${job.status}`)}
      </span>
      <${IconButton} icon="close" label=${label} onClick=${() => end(job)} />
    </div>
    <p class="dim">${t(`jobs.kind.${job.kind}`, { model: job.model })}</p>
    <${Outcome} job=${job} />
  </li>`;
}

function Outcome({ job }) {
  if (job.status === 'queued') return html`<p class="dim">${t('jobs.waiting')}</p>`;
  if (job.status === 'running') return html`<${Stage} job=${job} />`;
  if (job.error) return html`<p class="field-error">${reasonOf(job)}</p>`;
  const { size, new: added, remark } = job.result ?? {};
  if (size === undefined) return html`<p class="dim">${moment(Date.parse(job.ended))}</p>`;
  const seconds = (Date.parse(job.ended) - Date.parse(job.started)) / 1000;
  return html`<p class="dim">${t('jobs.result', { size: bytes(size), added: bytes(added), time: duration(seconds) })}</p>
    ${remark && html`<p class="dim">${quoted(remark)}</p>`}`;
}

function Stage({ job }) {
  const stage = t(`jobs.stage.${job.stage ?? 'begin'}`);
  const share = job.total ? Math.min(1, job.completed / job.total) : null;
  const text = job.total ? t('jobs.progress', { stage, done: bytes(job.completed), total: bytes(job.total) }) : stage;
  return html`<${Bar} value=${share} label=${t('jobs.of', { name: job.target })} text=${text} /><p class="dim">${text}</p>`;
}
