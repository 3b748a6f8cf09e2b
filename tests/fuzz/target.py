"""Targets of the fuzzers: each makes one case from a random generator."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np

from clowder_aimage.adapter.names import split_name
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.adapter.writer import DIALECTS as DIALECT_NAMES
from clowder_aimage.adapter.writer import convert_adapter
from clowder_aimage.api import model_list
from clowder_aimage.api.model_catalog import ModelCatalog
from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.api.ollama import generate as ollama_generate
from clowder_aimage.api.ollama import routes as ollama_routes
from clowder_aimage.api.ollama.text_body import OllamaChatBody, OllamaPromptBody
from clowder_aimage.api.picture.request import read_request
from clowder_aimage.api.request_body import ModelBody, check_fields, read_object
from clowder_aimage.api.text.request import ChatRequest, CompletionRequest, TextBody
from clowder_aimage.dialect import DIALECTS, detect
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import AImageError, FormatError
from clowder_aimage.formats import gguf_header, lora
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.flow.tokenizer import Tokenizer
from clowder_aimage.model.picture import encode_picture
from clowder_aimage.node.spec_files import read_directory
from clowder_aimage.oci import Manifest, Reference, mediatype, read_json
from clowder_aimage.oci.manifest import parse_document
from clowder_aimage.registry.credential_trace import CredentialTrace
from clowder_aimage.registry.docker_config import find_credential, read_config, read_source
from clowder_aimage.registry.host_settings import read_settings
from clowder_aimage.tensor import read_header
from tests.adapter.vectors import safetensors, tiny_shapes, vectors_for
from tests.cli.test_node_status import NODE, model
from tests.conftest import TINY
from tests.fuzz.damage import VALUES, damage_bytes, damage_json, damage_text, encoded
from tests.hostile.hostile_world import described, entry, plant, write_index
from tests.importer.conftest import Model
from tests.importer.formats_gguf import gguf
from tests.model.model_blobs import import_directory
from tests.process import Aimage, Done
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.scripted_worker import Asked, Says, ScriptedWorker
from tests.vectors import vector

Document = tuple[dict[str, Any], dict[str, Any]]  # a manifest and its config
DESIRED = """\
models:
  - ref: registry.example.com/team/shapes:v1
    priority: 5
    keep: 2h
    components: [vae]
"""
CONFIGURATION = {
    "registries": {"h.io": {"mirrors": ["m.io"], "limitRate": "5MiB", "chunkSize": "1MiB"}},
    "serve": {"addr": "127.0.0.1:5005"},
}
CREDENTIALS = {"auths": {"h.io": {"auth": "YTpi"}, "h.io/team": {"identitytoken": "x"}}}
FORBIDDEN = {chr(code) for code in (*range(32), *range(127, 160))} - {"\n", "\t"}
FORBIDDEN |= set("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class World:
    """A home directory with a store, and a small model directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.aimage = Aimage(home, home / "store", {"NO_COLOR": "1"})
        self.model = Model(home / "model", home / "store").fill()
        self.model.create("base")
        self.layout = ImageLayout(home / "store")

    def verb(self, *arguments: object) -> Done:
        """Run a verb; what it prints must be safe for a terminal."""
        done = self.aimage.attempt(*arguments)
        assert done.code in (0, 1, 2, 3, 4, 5, 6), done
        found = FORBIDDEN & set(done.out + done.err)
        assert not found, f"{arguments} printed {found}: {done}"
        assert "Traceback" not in done.err, done.err
        return done

    def documents(self) -> list[Document]:
        """Return manifests and configs in all dialects."""
        stored = read_aimage(self.layout, Reference.parse("base"))
        found = []
        for name in ("clowder", "ollama", "modelpack", "container"):
            manifest, config = DIALECTS[name].write(stored.aimage)
            found.append((json.loads(manifest.raw), json.loads(config)))
        for name in ("docker-model", "kitops", "modelpack", "ollama-gguf"):
            found.append((vector.value(name), vector.value(f"{name}-config")))
        return found


class Target(ABC):
    """Something that reads from outside."""

    share = 1  # of the cases of a run, relative to the other targets

    def __init__(self, world: World) -> None:
        self.world = world

    @abstractmethod
    def case(self, rng: random.Random) -> None:
        """Make one case. Raises an exception if it is a finding."""

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free what the target started."""


def permitted(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Call a function, which may raise an error for users."""
    with contextlib.suppress(AImageError, ApiError):
        function(*arguments, **options)


class Parsers(Target):
    """Parsers of documents and headers, from bytes."""

    share = 60

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._documents = world.documents()
        self._file = world.home / "parsed"
        self._desired = world.home / "desired"
        self._desired.mkdir()
        self._header = world.model.weights("transformer").read_bytes()
        self._gguf = gguf()

    def case(self, rng: random.Random) -> None:
        kind = rng.randrange(8)
        if kind < 4:
            manifest, config = rng.choice(self._documents)
            raw = encoded(rng, damage_json(rng, manifest))
            permitted(self._dialect, raw, encoded(rng, damage_json(rng, config)))
        elif kind == 4:
            permitted(parse_document, encoded(rng, damage_json(rng, vector.value("oci-index"))))
            permitted(read_json, damage_bytes(rng, json.dumps(VALUES[:9]).encode()), "it")
        elif kind == 5:
            for read, good in ((read_header, self._header), (gguf_header.read_header, self._gguf)):
                data = damage_bytes(rng, good)
                permitted(read, io.BytesIO(data), len(data))
        elif kind == 6:
            text = damage_text(rng, DESIRED) if rng.random() < 0.5 else None
            raw = encoded(rng, damage_json(rng, {"models": [{"ref": "h.io/a:b", "keep": "2h"}]}))
            (self._desired / "a.yaml").write_bytes(
                raw if text is None else text.encode("utf-8", "surrogatepass")
            )
            permitted(read_directory, self._desired)
        else:
            self._file.write_bytes(encoded(rng, damage_json(rng, CONFIGURATION)))
            permitted(read_settings, self._file)
            self._file.write_bytes(encoded(rng, damage_json(rng, CREDENTIALS)))
            permitted(read_config, self._file)
            trace = CredentialTrace("h.io", lambda _: None)
            find_credential([read_source(self._file, trace)], "h.io", "team/x", trace)

    @staticmethod
    def _dialect(raw: bytes, config: bytes) -> None:
        manifest = Manifest.parse(raw)
        found = detect(manifest).read(manifest, config)
        json.dumps(found.properties)


class Adapters(Target):
    """Adapters, which are described, read and written in another dialect."""

    share = 10

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._shapes = tiny_shapes()
        self._vectors = vectors_for(self._shapes)
        found = (split_name(name) for one in self._vectors for name in one.tensors)
        self._stems = sorted({"", "x", *(split[0] for split in found if split)})
        suffixes = {name.rpartition("to_q")[2] for one in self._vectors for name in one.tensors}
        self._suffixes = sorted({"weight", ".oft_blocks", ".lora_mid.weight", *suffixes})
        self._path = world.home / "adapter_model.safetensors"

    def case(self, rng: random.Random) -> None:
        one = rng.choice(self._vectors)
        tensors = dict(one.tensors)
        for _ in range(rng.randrange(4) if tensors else 0):
            self._damage(rng, tensors)
        config = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2}} | dict(one.config or {})
        stated = {"lora_adapter_metadata": json.dumps(damage_json(rng, config))}
        metadata = {key: text for key, text in stated.items() if rng.random() < 0.2}
        with contextlib.suppress(FormatError):  # a name that no file has
            raw = safetensors(tensors, metadata)
            self._path.write_bytes(damage_bytes(rng, raw) if rng.random() < 0.1 else raw)
        beside = self._path.with_name("adapter_config.json")
        beside.unlink(missing_ok=True)
        if rng.random() < 0.5:
            beside.write_bytes(encoded(rng, damage_json(rng, config)))
        shapes = rng.choice((self._shapes, None))
        with np.errstate(all="ignore"):
            permitted(lora.take, self._path)
            permitted(read_adapter, self._path, self._shapes, label="it", base="base")
            dialect = rng.choice(sorted(DIALECT_NAMES))
            permitted(self._convert, dialect, shapes)

    def _convert(self, dialect: str, shapes: Any) -> None:
        converted = convert_adapter(self._path, dialect, label="it", shapes=shapes)
        written = self._path.with_name("written.safetensors")
        written.write_bytes(b"".join(converted.encode()))
        try:
            read_adapter(written, self._shapes, label="it", base="it", config=converted.config)
        except AImageError:
            if shapes is not None:  # what fits the base still fits it
                raise AssertionError("a converted adapter cannot be read") from None

    def _damage(self, rng: random.Random, tensors: dict[str, Any]) -> None:
        name = rng.choice(sorted(tensors))
        shape = tensors[name].shape
        match rng.randrange(5):
            case 0 if len(tensors) > 1:
                del tensors[name]
            case 1:
                renamed = rng.choice(self._stems) + rng.choice(self._suffixes)
                tensors[renamed] = tensors[name]
            case 2:
                sides = [rng.choice((0, 1, 2, 3, 4, 48, 144)) for _ in range(rng.randrange(5))]
                tensors[name] = np.zeros(sides, tensors[name].dtype)
            case 3:
                value = rng.choice((0, 1, -1, 1e38, np.nan, np.inf))
                tensors[name] = np.full(shape, value, rng.choice(("f4", "f8")))
            case _:
                tensors[name] = np.zeros(shape, rng.choice(("f2", "i8", "u1")))


class Documents(Target):
    """AImages in a store: listed and described by verbs and by the worker's API."""

    share = 10

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._documents = world.documents()
        self._store = world.home / "documents"
        shutil.copytree(world.home / "store", self._store)
        self._aimage = Aimage(world.home, self._store, {"NO_COLOR": "1"})

    def case(self, rng: random.Random) -> None:
        manifest, config = rng.choice(self._documents)
        raw = encoded(rng, damage_json(rng, config) if rng.random() < 0.7 else config)
        plant(self._store, raw)
        manifest = {**manifest, "config": {**manifest["config"], **_content(raw)}}
        if rng.random() < 0.6:
            manifest = damage_json(rng, manifest)
        data = encoded(rng, manifest)
        plant(self._store, data)
        name = rng.choice(("x:latest", "x:latest", "evil:1\nfake:latest", "x\u202e:y"))
        write_index(self._store, entry(data, "x:latest"), entry(data, name))
        world: Any = SimpleNamespace(aimage=self._aimage)
        verb = rng.choice(
            (["ls"], ["show", "x"], ["show", "x", "--json"], ["du"], ["ls", "--json"])
        )
        World.verb(world, *verb)
        self._describe(ImageLayout(self._store))

    @staticmethod
    def _describe(layout: ImageLayout) -> None:
        reference = Reference.parse("x:latest")
        settings = SimpleNamespace(aliases={})
        service: Any = SimpleNamespace(
            store=layout,
            settings=settings,
            resolve_reference=Reference.parse,
            adapters=SimpleNamespace(list_files=list),
            descriptions=ModelDescriptions(layout),
        )
        for each in model_list.list_entries(layout):
            permitted(lambda one: json.dumps(ollama_routes._describe_entry(service, one)), each)
        permitted(lambda: json.dumps(_shown(service, reference)))
        permitted(lambda: json.dumps(ModelCatalog(service).list_all()))


def _shown(service: Any, reference: Reference) -> object:
    item = model_list.find_entry(service.store, reference)
    return item and ollama_routes._describe_model(service, item)


def _content(data: bytes) -> dict[str, Any]:
    found = described(data)
    return {key: found[key] for key in ("digest", "size")}


class Requests(Target):
    """Bodies of requests for pictures, in both forms."""

    share = 20
    IMAGE: ClassVar[dict[str, Any]] = {
        "prompt": "a fox",
        "model": "tiny",
        "size": "64x64",
        "n": 1,
        "seed": 7,
        "steps": 2,
        "response_format": "b64_json",
        "quality": "low",
        "stream": False,
        "guidance": 1.5,
        "cache_threshold": 0.1,
        "output_format": "webp",
        "output_compression": 50,
        "user": "me",
        "background": "auto",
    }
    GENERATE: ClassVar[dict[str, Any]] = {
        "model": "tiny",
        "prompt": "a fox",
        "width": 64,
        "height": 64,
        "steps": 2,
        "seed": 1,
        "keep_alive": "5m",
        "stream": True,
        "options": {"seed": 3, "num_ctx": 2048},
    }
    CALL: ClassVar[dict[str, Any]] = {"name": "look", "arguments": '{"at": 1}'}
    USE: ClassVar[dict[str, Any]] = {"function": CALL | {"arguments": {"at": 1}}}
    CHAT: ClassVar[dict[str, Any]] = {
        "model": "words",
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "ann"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"a": {}}}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
        "stop": ["x", "y"],
        "n": 2,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {},
    }
    TEXTS: ClassVar[dict[Any, dict[str, Any]]] = {
        ChatRequest: CHAT,
        CompletionRequest: {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1, "seed": -1},
        OllamaChatBody: {
            "messages": [
                {"role": "user", "content": "hello", "images": []},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": CALL | {"arguments": {"at": 1}}}],
                },
            ],
            "format": {"type": "object"},
            "think": "low",
            "options": {"num_predict": 3, "stop": "x", "repeat_penalty": 1.5},
        },
        OllamaPromptBody: {"prompt": "a", "system": "b", "raw": False, "format": "json"},
    }

    def case(self, rng: random.Random) -> None:
        raw = encoded(rng, damage_json(rng, self.IMAGE))
        strict = rng.random() < 0.2
        permitted(lambda: read_request(read_object(raw), strict=strict))
        raw = encoded(rng, damage_json(rng, self.GENERATE))
        permitted(
            lambda: check_fields(read_object(raw), ollama_generate.OllamaPictureBody).with_options()
        )
        permitted(lambda: check_fields(read_object(raw), ModelBody))
        kind, body = rng.choice([*self.TEXTS.items()])
        raw = encoded(rng, damage_json(rng, body))
        is_openai = issubclass(kind, TextBody)
        permitted(
            lambda: getattr(
                check_fields(read_object(raw), kind), "build_requests" if is_openai else "request"
            )()
        )


class Pictures(Target):
    """PNG files given to ``replay``."""

    share = 2

    def __init__(self, world: World) -> None:
        import numpy as np

        super().__init__(world)
        digest = str(world.layout.resolve(Reference.parse("base")).digest)
        self._pixels = np.zeros((16, 16, 3), dtype=np.uint8)
        self._facts = {
            "reference": "base",
            "digest": digest,
            "prompt": "a fox",
            "dtype": "float32",
            "width": 16,
            "height": 16,
            "steps": 1,
            "seed": 7,
            "guidance": 1.0,
            "guidance_end": 0.5,
            "shift": 3.0,
        }

    def case(self, rng: random.Random) -> None:
        facts = damage_json(rng, self._facts) if rng.random() < 0.7 else self._facts
        text = json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace").decode()
        shown = json.loads(text)
        kind = rng.choice(("png", "jpeg", "webp"))
        data = encode_picture(self._pixels, shown if isinstance(shown, dict) else {}, kind)
        path = self.world.home / "damaged"
        path.write_bytes(damage_bytes(rng, data) if rng.random() < 0.6 else data)
        self.world.verb("replay", path)


class Tokenizers(Target):
    """Files of tokenizers and chat templates, with a prompt."""

    share = 2

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._store, self._aimage = import_directory(TINY, world.home / "tiny")
        folder = TINY / "tokenizer"
        self._files = {path.name: path.read_text() for path in folder.iterdir()}

    def case(self, rng: random.Random) -> None:
        changed = {}
        for name in rng.sample(sorted(self._files), rng.randrange(1, 3)):
            text = self._files[name]
            if name.endswith(".json"):
                changed[f"tokenizer/{name}"] = encoded(rng, self._damaged(rng, json.loads(text)))
            else:
                changed[f"tokenizer/{name}"] = damage_text(rng, text).encode("utf-8", "replace")
        layers = [layer for layer in self._aimage.layers if layer.name not in changed]
        for name, data in changed.items():
            layers.append(Layer(self._store.add(mediatype.AIMAGE_FILE, data), name))
        aimage = AImage(self._aimage.config, tuple(layers))
        permitted(lambda: Tokenizer.load(self._store, aimage).encode("a fox aaaaaaaaaaaa! 中文"))

    @staticmethod
    def _damaged(rng: random.Random, document: Any) -> Any:
        """Change anything but the vocabulary, which is most of the document."""
        model = document.get("model") if isinstance(document, dict) else None
        if not isinstance(model, dict):
            return damage_json(rng, document)
        kept = {key: model.pop(key) for key in ("vocab", "merges") if key in model}
        changed = damage_json(rng, document)
        if isinstance(changed, dict) and isinstance(changed.get("model"), dict):
            changed["model"] = kept | changed["model"]
        return changed


class Directories(Target):
    """Model directories given to ``create``."""

    share = 2

    def case(self, rng: random.Random) -> None:
        directory = self.world.home / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.world.model.directory, directory)
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        for path in rng.sample(paths, rng.randrange(1, 3)):
            data = path.read_bytes()
            if path.suffix == ".json" and rng.random() < 0.8:
                path.write_bytes(encoded(rng, damage_json(rng, json.loads(data))))
            else:
                path.write_bytes(damage_bytes(rng, data))
        self.world.verb("create", "-q", "made", directory)


def model_entry(expiry: str | None) -> dict[str, Any]:
    """Return an entry of ollama's lists of models."""
    return {
        "name": "a:b",
        "model": "a:b",
        "digest": "0" * 64,
        "size": 5,
        "size_vram": 5,
        "details": {"family": "z"},
        "modified_at": "2026-01-01T00:00:00Z",
        **({"expires_at": expiry} if expiry else {}),
    }


class Workers(Target):
    """Answers of a worker and a node to the verbs that ask them."""

    share = 2
    ANSWERS: ClassVar[dict[str, Any]] = {
        "/api/ps": {"models": [model_entry("2026-01-01T00:00:00Z")]},
        "/api/tags": {"models": [model_entry(None), model_entry(None)]},
        "/v1/node": NODE | {"models": [model(), model("h.io/b:v1", "pulling", total=5)]},
    }
    VERBS = (["ps"], ["ls", "--remote"], ["node", "status"], ["stop", "a"], ["rm", "a", "--remote"])

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rng = random.Random()
        self._stack = contextlib.ExitStack()
        worker = self._stack.enter_context(ScriptedWorker(self._answer).running())
        environment = {"NO_COLOR": "1", "AIMAGE_HOST": worker.host}
        self._world: Any = SimpleNamespace(
            aimage=Aimage(world.home, world.home / "store", environment)
        )

    def case(self, rng: random.Random) -> None:
        self._rng = rng
        World.verb(self._world, *rng.choice(self.VERBS), *rng.choice(([], ["--json"])))

    def _answer(self, asked: Asked) -> Says:
        rng = self._rng
        good = self.ANSWERS.get(asked.path, {"status": "success"})
        body = encoded(rng, damage_json(rng, good))
        status = rng.choice((200, 200, 200, 200, 400, 404, 500, 503))
        return Says([body], status, {"Content-Type": "application/json"})

    def close(self) -> None:
        self._stack.close()


class Registries(Target):
    """Answers of a registry to the verbs that ask it."""

    share = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rng = random.Random()
        self._documents = world.documents()
        self._stack = contextlib.ExitStack()
        self._registry = self._stack.enter_context(ScriptedRegistry(self._answer).running())

    def case(self, rng: random.Random) -> None:
        self._rng = rng
        name = f"{self._registry.host}/a/b:v1"
        self._is_intact = rng.random() < 0.5
        self._manifest, self._config = rng.choice(self._documents)
        config = json.dumps(self._config).encode()
        self._manifest["config"] = {**self._manifest["config"], **_content(config)}
        verbs = (
            *(
                ["tags", name.removesuffix(":v1")],
                ["resolve", name],
                ["show", "--remote", name],
                ["referrers", name],
                ["adapters", name],
                ["show", "--remote", "--card", name],
            ),
            *(["repo", "ls", self._registry.host], ["pull", name], ["copy", name, "other"]),
        )
        self.world.verb(*rng.choice(verbs), *rng.choice(([], ["--json"])))

    def _answer(self, seen: Seen) -> Answer:
        rng = self._rng
        manifest, config = self._manifest, self._config
        kind = manifest.get("mediaType") or mediatype.OCI_MANIFEST
        good: Any = manifest
        if "/tags/" in seen.path:
            good, kind = {"name": "a/b", "tags": ["v1", "v2"]}, "application/json"
        elif "/_catalog" in seen.path:
            good, kind = {"repositories": ["a/b", "c"]}, "application/json"
        elif "/referrers/" in seen.path:
            listed = {**described(b"x", kind), "artifactType": "a/b", "annotations": {"a": "b"}}
            good, kind = {"schemaVersion": 2, "manifests": [listed]}, mediatype.OCI_INDEX
        elif "/blobs/" in seen.path:
            good, kind = config, "application/octet-stream"
        is_graph = "/manifests/" in seen.path or "/blobs/" in seen.path
        if is_graph and self._is_intact:
            return Answer(headers={"Content-Type": kind}, body=json.dumps(good).encode())
        body = encoded(rng, damage_json(rng, good) if rng.random() < 0.8 else good)
        if rng.random() < 0.1:
            errors = {"errors": [{"code": "DENIED", "message": "no", "detail": None}]}
            status = rng.choice((400, 403, 404, 500))
            return Answer(status, body=encoded(rng, damage_json(rng, errors)))
        headers = {"Content-Type": kind}
        if rng.random() < 0.2:
            name = rng.choice(("Docker-Content-Digest", "Link", "Content-Type", "Location"))
            value = str(rng.choice(VALUES))[:200].encode("latin-1", "ignore").decode("latin-1")
            headers[name] = "".join(c for c in value if c not in "\r\n\0")
        return Answer(headers=headers, body=body)

    def close(self) -> None:
        self._stack.close()


PATHS = (
    *("/v2/", "/v2/_catalog", "/v2/a/tags/list", "/v2/a/manifests/v1", "/v2/a/blobs/uploads/"),
    *(f"/v2/a/blobs/sha256:{'0' * 64}", f"/v2/a/referrers/sha256:{'0' * 64}", "/metrics"),
    *("/v1/models", "/v1/models/base", "/api/tags", "/api/ps", "/api/show", "/api/delete"),
    *("/api/copy", "/content/", "/readyz", "/v1/images/generations", "/api/generate", "/docs"),
)
METHODS = ("GET", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW")


def draw_request(rng: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """Return the method, path, body and headers of a damaged request."""
    path = rng.choice(PATHS)
    if rng.random() < 0.5:
        path = damage_text(rng, path)
    if rng.random() < 0.3:
        path += "?" + damage_text(rng, "n=5&last=a&digest=sha256:0&mount=x&from=y")
    headers = {"Content-Type": rng.choice(("application/json", mediatype.OCI_MANIFEST, "a"))}
    if rng.random() < 0.3:
        name = rng.choice(("Range", "Content-Range", "Accept", "Authorization", "Origin"))
        text = damage_text(rng, rng.choice(("bytes=0-5", "0-5", "a/b;q=1", "Bearer x")))
        headers[name] = "".join(c for c in text if " " <= c <= "~")
    body = encoded(rng, damage_json(rng, rng.choice((Requests.IMAGE, {"model": "base"}))))
    return rng.choice(METHODS), quote(path, "/?&=:%", errors="replace"), body, headers


class Servers(Target):
    """Requests to a registry and a worker, which must not answer 500."""

    share = 4

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._children = [
            world.aimage.start(*verb, "--addr", "127.0.0.1:0", "--log-level", "error")
            for verb in (("registry", "serve"), ("serve",))
        ]
        self._hosts = []
        for child in self._children:
            assert child.stdout is not None
            self._hosts.append(child.stdout.readline().strip().removeprefix("http://"))

    def case(self, rng: random.Random) -> None:
        import http.client

        method, path, body, headers = draw_request(rng)
        connection = http.client.HTTPConnection(rng.choice(self._hosts), timeout=30)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            assert answer.status != 500, f"{method} {path!r}: {text[:500]}"
        except http.client.HTTPException as error:
            raise AssertionError(f"{path!r}: {error!r}") from error
        finally:
            connection.close()

    def close(self) -> None:
        for child in self._children:
            child.terminate()
            _, err = child.communicate(timeout=60)
            assert "Traceback" not in err, err


TARGETS: dict[str, type[Target]] = {
    each.__name__.lower(): each
    for each in (
        *(Parsers, Documents, Requests, Pictures, Tokenizers, Directories, Workers, Registries),
        *(Servers, Adapters),
    )
}
