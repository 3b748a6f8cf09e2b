"""Short names of models: the index of names, its choice, and what is fetched."""

from __future__ import annotations

import json
import os
import pty
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from clowder_aimage import Store
from clowder_aimage.cli.console import column
from clowder_aimage.cli.create import named_model
from clowder_aimage.cli.verbs import serve
from clowder_aimage.cli.worker import model_argument
from clowder_aimage.client.short_name import obtain
from clowder_aimage.config.name_index import read_index
from clowder_aimage.engine import machine
from clowder_aimage.engine.settings import Settings
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from clowder_aimage.validate import validate_file
from tests.hub import Hub, serving_hub
from tests.importer.formats_gguf import gguf
from tests.process import PROGRAM, Aimage, spawn_at
from tests.scripted_worker import Asked, Says, ScriptedWorker, line, says

pytest.importorskip("huggingface_hub")
REPOSITORY = "Org/Small"
ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "examples/shapes/model"
LISTED = f"""
models:
  small:
    kind: text
    hub: {REPOSITORY}
    license: MIT
    variants:
      - {{name: large, memory: 3 GB}}
      - {{name: middle, memory: 2 GB}}
      - {{name: little, memory: 1 GB}}
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub() as made:
        made.add(REPOSITORY, {"a.gguf": gguf(), "b.txt": b"more"})
        yield made


@pytest.fixture
def here(
    hub: Hub, aimage: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Aimage:
    """Return the command line with names of its own, a hub on loopback, and 2.5 GB of memory."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "read_available_memory", lambda: 2_500_000_000)
    made = aimage()
    made.environment |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": hub.address}
    write_names(made, LISTED)
    return made


def write_names(here: Aimage, text: str, file: str = "names.yaml") -> Path:
    path = here.home / "config/aimage" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(here: Aimage) -> list[str]:
    return [row["reference"] for row in here("ls", "--json").value]


# -- the question


def test_without_a_terminal_the_command_with_yes_is_printed(here: Aimage, hub: Hub) -> None:
    done = here("run", "small", "why is", "it?", "--max-tokens", 3, code=2)
    assert "to fetch it without asking: aimage run --yes small 'why is' 'it?' --max-tokens 3" in (
        done.err
    )
    done = here("--store", "other", "pull", "small", code=2)
    assert "aimage pull --yes --store other small" in done.err
    done = here("run", "small", "x", "-u", "me", "-p", "secret", code=2)
    assert "secret" not in done.err
    assert hub.fetched() == set() and not here.store.exists()


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 0), ("n", 1)])
def test_a_terminal_is_asked(
    here: Aimage, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), platform="linux")
    monkeypatch.setattr(named_model, "sys", terminal)
    done = here("pull", "small", stdin=f"{answer}\n", code=code)
    assert "Fetch middle (" in done.err and "as small:latest? [Y/n]" in done.err
    assert ("nothing was fetched" in done.err) == bool(code)
    assert names(here) == ([] if code else ["small:latest"])


def test_an_interrupted_question_ends_its_line(
    here: Aimage, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(text: str, **_: object) -> bool:
        click.echo(f"{text} [Y/n]: ", nl=False, err=True)
        raise click.Abort

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), platform="linux")
    monkeypatch.setattr(named_model, "sys", terminal)
    monkeypatch.setattr(click, "confirm", interrupt)
    monkeypatch.setattr(column, "get_width", lambda: 40)
    done = here("pull", "small", code=130)
    assert done.err.endswith(" [Y/n]: \naimage: interrupted\n")
    assert hub.fetched() == set() and not here.store.exists()
    # The sentences around the table are divided between words.
    assert "\nmiddle fits in the 2.5 GB of memory that\nare free\n" in done.err


@pytest.mark.integration
def test_declining_on_a_terminal_fetches_nothing(here: Aimage) -> None:
    master, slave = pty.openpty()
    child = spawn_at(slave, [*PROGRAM, "pull", "small"], env=here.env(), cwd=here.home)
    shown = b""
    while b"/" not in shown.rpartition(b"as small:latest? [")[2]:
        shown += os.read(master, 4096)
    os.write(master, b"n\n")
    assert child.wait() == 1
    os.close(master)
    assert not here.store.exists()


def test_yes_fetches_what_fits_and_the_next_run_asks_nobody(here: Aimage, hub: Hub) -> None:
    done = here("pull", "small", "--yes")
    assert "* " in done.err and "middle fits in the 2.5 GB of memory that are free" in done.err
    assert "license: MIT" in done.err and f"hf://{REPOSITORY}" in done.err
    assert here("pull", "small", "--json").value["digest"] == done.line
    hub.requests.clear()
    # It can be used without names, hub and question.
    write_names(here, "{")
    assert here("show", "small", "--json").value["digest"] == done.line
    assert hub.requests == []


def test_a_dry_run_fetches_nothing(here: Aimage, hub: Hub) -> None:
    size = len(gguf()) + len(b"more")
    value = here("pull", "small", "--dry-run", "--json").value
    assert value == {"reference": "small:latest", "variant": "middle", "download": size}
    assert hub.fetched() == set()


# -- the choice


@pytest.mark.parametrize(
    ("memory", "name", "chosen", "text"),
    [
        (9, "small", "large", "large fits in the 9 GB"),
        (1, "small", "little", "little fits in the 1 GB"),
        (0.5, "small", "little", "little needs 1 GB and does not fit in the 500 MB"),
        (1, "small:large", "large", "large needs 3 GB and does not fit in the 1 GB"),
        (None, "small", "large", "large is chosen: the free memory is unknown"),
    ],
)
def test_the_variant_is_the_first_that_fits_or_the_one_of_the_tag(
    here: Aimage,
    monkeypatch: pytest.MonkeyPatch,
    memory: float | None,
    name: str,
    chosen: str,
    text: str,
) -> None:
    free = None if memory is None else int(memory * 1e9)
    monkeypatch.setattr(machine, "read_available_memory", lambda: free)
    monkeypatch.setattr(machine, "read_memory_limit", lambda: None)
    done = here("pull", name, "--dry-run", "--json")
    assert done.value["variant"] == chosen
    assert text in json.loads(done.err.splitlines()[0])["message"]


def test_a_variant_keeps_its_tag_and_serves_the_bare_name(here: Aimage, hub: Hub) -> None:
    done = here("pull", "small:little", "-y", "-q")
    assert names(here) == ["small:little"]
    hub.requests.clear()
    assert "small:little in the store is used" in here.attempt("run", "small", "x").err
    assert here("pull", "small:little", "-q").line == done.line
    assert hub.requests == []


@pytest.mark.integration
def test_an_image_model_is_fetched_quantized_and_run_and_then_run_from_the_store(
    here: Aimage, hub: Hub
) -> None:
    hub.add("Org/Picture", SHAPES)
    variant = "{name: int8, quantize: int8}"
    write_names(
        here, f"models: {{drawn: {{kind: image, hub: Org/Picture, variants: [{variant}]}}}}"
    )
    command = ("run", "drawn", "two red circles", "--steps", 1, "--size", "32x32", "--local")
    done = here(*command, "--yes", "-o", "a.png")
    assert done.line == "a.png" and (here.home / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "int8 is chosen: the memory of int8 is unknown" in done.err
    stored = read_aimage(ImageLayout(here.store), Reference.parse("drawn"))
    assert "int8" in {layer.dtype for layer in stored.aimage.layers}
    hub.requests.clear()
    assert here(*command, "-o", "b.png").line == "b.png"
    assert hub.requests == []


def test_options_of_the_other_kind_are_refused_before_the_question(here: Aimage, hub: Hub) -> None:
    done = here("run", "small", "x", "--steps", 1, "-y", code=2)
    assert "--steps applies to pictures" in done.err
    done = here("pull", "small", "--variant", "little", "-y", code=2)
    assert "--variant applies to registries" in done.err and "small:little" in done.err
    assert hub.requests == []


# -- names


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("pull", "smal"), 2, "has no registry host"),
        (("pull", "smal"), 2, "did you mean small?"),
        (("pull", "z-image-turb"), 2, "did you mean z-image-turbo?"),
        (("run", "flux2-klein", "x"), 3, "did you mean flux2-klein-4b?"),
        (("pull", "quite-another"), 2, "use a name with a host"),
        (("run", "quite-another", "x"), 3, "not found in the store"),
        (("pull", "small:huge", "-y"), 3, "small has no variant huge"),
        (("pull", "small:huge", "-y"), 3, "choose one: large, middle, little"),
    ],
)
def test_unknown_names(
    here: Aimage, hub: Hub, arguments: tuple[str, ...], code: int, text: str
) -> None:
    assert text in here(*arguments, code=code).err
    assert hub.requests == []


def test_a_name_in_the_store_precedes_the_index(here: Aimage, hub: Hub, tiny: Path) -> None:
    own = here("create", "z-image-turbo", tiny, "--whole-files", "-q").line
    done = here("pull", "z-image-turbo", "-y")
    assert done.line == own and "is in the store already" in done.err
    assert "z-image-turbo" not in names(here) and hub.requests == []


def test_the_names_of_the_package_are_known_and_replaced_by_the_user(here: Aimage) -> None:
    done = here("pull", "z-image-turbo", code=2)
    assert "hf://Tongyi-MAI/Z-Image-Turbo" in done.err and "license: unknown" in done.err
    path = write_names(here, LISTED.replace("small:", "z-image-turbo:"))
    done = here("pull", "z-image-turbo", "--dry-run")
    assert f"hf://{REPOSITORY}" in done.err and f"from {path}" in done.err


def test_the_list_of_the_package_is_valid_and_documented(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = ROOT / "clowder_aimage/config/names.yaml"
    document = validate_file(file)
    assert (document.schema, document.violations) == ("names", [])
    page = (ROOT / "docs/names.md").read_text("utf-8")
    for name, model in read_index().models.items():
        listed = ", ".join(f"`{variant.name}`" for variant in model.variants)
        assert f"| `{name}` | {listed} |" in page


def test_a_worker_that_has_the_name_precedes_the_index(
    here: Aimage, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_argument, "find_default_worker", lambda _: (None, True))
    assert "not found in the store" in here("run", "small", "x", "-y", code=3).err
    assert hub.requests == []


# -- other verbs, and workers

PULLED = """
models:
  small:
    kind: image
    variants:
      - {name: large, reference: "r.example/s:large", memory: 3 GB, download: 3 GB, size: 3 GB}
      - {name: little, reference: "r.example/s:v1", memory: 1 GB, download: 1 GB, size: 1 GB}
"""
DIGEST = f"sha256:{'a' * 64}"
PULL = ("/api/pull", {"model": "r.example/s:v1"})
COPY = ("/api/copy", {"source": "r.example/s:v1", "destination": "small:latest"})


def test_embed_asks_as_run_does(here: Aimage, hub: Hub) -> None:
    done = here("embed", "small", "a", code=2)
    assert "to fetch it without asking: aimage embed --yes small a" in done.err
    write_names(here, LISTED.replace("text", "image"))
    assert "small computes no embeddings" in here("embed", "small", "a", "-y", code=2).err
    assert hub.fetched() == set()


def test_the_enhancer_may_be_a_short_name(here: Aimage, hub: Hub) -> None:
    here("create", "shapes", SHAPES, "-q")
    command = ("run", "shapes", "a", "--local", "--enhancer", "small", "--steps", 1)
    assert "fetching small:latest (" in here(*command, code=2).err
    # A language model of random bytes was packed and cannot be loaded.
    assert "license: MIT" in here(*command, "--yes", code=1).err
    assert "small:latest" in names(here)


def test_a_worker_starts_with_the_short_names_of_its_settings(
    here: Aimage, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[object]()

    def start(config: Settings, *_: object, **__: object) -> None:
        started.append((config.default_model, config.enhancer, config.wanted))

    monkeypatch.setattr(serve, "run_server", start)
    command = ("serve", "--default-model", "small", "--enhancer", "small:little", "--wanted", "x")
    # A service warns, and starts.
    here(*command)
    assert started == [("small", "small:little", ("x",))] and hub.requests == []
    here(*command, "--yes")
    assert started[1:] == [("small:latest", "small:little", ("x",))]
    assert names(here) == ["small:latest", "small:little"]
    write_names(here, LISTED.replace("text", "image"))
    here("rm", "small:little")
    assert "small is not a language model" in here(*command, "--yes", code=2).err


@pytest.fixture
def worker(here: Aimage) -> Iterator[ScriptedWorker]:
    """Return a worker without models that pulls any, and has 2 GB of memory."""

    def respond(asked: Asked) -> Says:
        if asked.path == "/v1/store":
            return says({"memory": {"available": 2_000_000_000}})
        if asked.path == "/api/pull":
            return Says([line(status="success")])
        if asked.path == "/api/copy":
            return says({})
        if asked.path == "/api/tags":
            return says({"models": [{"name": "small:latest", "digest": DIGEST, "size": 1}]})
        return says({"error": "refused"}, 400)

    scripted = ScriptedWorker(respond)
    scripted.missing = {"small:latest", "small:large", "small:little", "small:middle"}
    here.environment["AIMAGE_HOST"] = scripted.host
    with scripted.running():
        yield scripted


def list_changes(worker: ScriptedWorker) -> list[tuple[str, object]]:
    return [(asked.path, asked.value) for asked in worker.asked if asked.method == "POST"]


@pytest.mark.parametrize(
    ("arguments", "yes"),
    [
        (("run", "--remote", "small", "x"), "run --yes --remote small x"),
        (("pull", "--remote", "small"), "pull --yes --remote small"),
        (("batch", "a.jsonl"), "batch --yes a.jsonl"),
    ],
    ids=["run", "pull", "batch"],
)
def test_a_worker_pulls_the_variant_that_fits_its_memory(
    here: Aimage, worker: ScriptedWorker, arguments: tuple[str, ...], yes: str
) -> None:
    write_names(here, PULLED)
    request = {"custom_id": "a", "url": "/v1/images/generations", "body": {"model": "small"}}
    (here.home / "a.jsonl").write_text(json.dumps(request) + "\n")
    done = here(*arguments, code=2)
    assert f"to fetch it without asking: aimage {yes}" in done.err
    assert "little fits in the 2 GB of memory that are free" in done.err
    assert list_changes(worker) == []
    here(*arguments, "--yes", code=0 if arguments[0] == "pull" else 2)
    assert list_changes(worker)[:2] == [PULL, COPY]
    # It is not asked for again.
    worker.missing.clear()
    worker.asked.clear()
    assert "needs a confirmation" not in here.attempt(*arguments).err
    assert PULL not in list_changes(worker)


def test_what_a_worker_cannot_pull_is_said_before_a_request(
    here: Aimage, worker: ScriptedWorker, hub: Hub
) -> None:
    done = here("run", "small", "x", "-y", code=3)
    assert "does not fetch models of the Hugging Face hub" in done.err
    assert "fetch it on the machine of the worker: aimage pull small:latest" in done.err
    write_names(here, PULLED)
    assert (
        "--stop applies to language models"
        in here("run", "small", "x", "-y", "--stop", "a", code=2).err
    )
    request = {"custom_id": "a", "url": "/v1/embeddings", "body": {"model": "small"}}
    (here.home / "a.jsonl").write_text(json.dumps(request) + "\n")
    assert (
        "small is an image model, and a a request to /v1/embeddings"
        in here("batch", "a.jsonl", "-y", code=2).err
    )
    assert list_changes(worker) == [] and hub.requests == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("models:\n  a: [", "line 3"),
        ("models:\n  a:\n    hub: x/y\n", "line 2: 'variants' is a required property"),
        ("models:\n  a:\n    hub: x/y\n    variants:\n      - {name: latest}\n", "line 5"),
        ("models:\n  A:\n    hub: x/y\n    variants: [{name: b}]\n", "line 2: 'A' is not valid"),
        ("models:\n  a:\n    variants: [{name: b}]\n", "line 3: the variant b has no reference"),
        ("models:\n  a:\n    hub: x/y\n    variants:\n    - {name: b, quantize: int3}", "line 5"),
        ("models:\n  a:\n    hub: x/y\n    variants: [{name: b}, {name: b}]", "two variants b"),
        ("modles: {}\n", "did you mean 'models'?"),
    ],
)
def test_a_damaged_list_is_refused_with_its_line(here: Aimage, text: str, fault: str) -> None:
    path = write_names(here, text)
    done = here("pull", "small", code=2)
    assert f"cannot use {path}" in done.err and fault in done.err
    # Names with a registry do not need it.
    assert str(path) not in here.attempt("pull", "localhost:1/a/b").err


def test_the_list_is_validated_by_its_schema(here: Aimage) -> None:
    path = write_names(here, LISTED)
    assert "names" in here("validate", path).out
    path.write_text(LISTED.replace("MIT", "[]"))
    assert ":6:" in here("validate", path, code=5).out


# -- registries


def test_names_of_a_registry_are_added_and_replace_none(
    here: Aimage, pushed: str, hub: Hub
) -> None:
    host, _, rest = pushed.partition("/")
    lists = {"shared": rest, "z-image-turbo": rest}
    configuration = {"registries": {"default": host}, "names": lists}
    path = write_names(here, json.dumps(configuration), "config.json")
    done = here("pull", "shared", "--yes")
    assert done.line == here("resolve", pushed).line
    assert names(here) == [pushed, "shared:latest"]
    done = here("pull", "z-image-turbo", code=2)
    assert f"warning: the name z-image-turbo in {path} is ignored" in done.err
    assert "hf://Tongyi-MAI/Z-Image-Turbo" in done.err
    assert "names.shared" in here("config", "show").out
    assert hub.requests == []


def test_the_default_registry_precedes_the_names_of_the_package(
    here: Aimage, pushed: str, repository: str, hub: Hub
) -> None:
    there = here("copy", pushed, f"{repository}/z-image-turbo:latest", "-q").line
    configuration = {"registries": {"default": repository}}
    write_names(here, json.dumps(configuration), "config.json")
    assert here("pull", "z-image-turbo", "-q").line == there
    assert names(here) == ["z-image-turbo:latest"]
    # What the user lists precedes it.
    assert f"hf://{REPOSITORY}" in here("pull", "small", "--dry-run").err


def test_a_variant_of_a_registry_is_pulled_and_the_hub_not_asked(
    here: Aimage, pushed: str, hub: Hub
) -> None:
    packed = f"- {{name: packed, reference: '{pushed}'}}\n      - {{name: large"
    write_names(here, LISTED.replace("- {name: large", packed).replace("memory: 3", "download: 3"))
    assert here("pull", "small:packed", "-y", "-q").line == here("resolve", pushed).line
    assert names(here) == [pushed, "small:packed"]
    assert hub.requests == []


# -- the hub


def test_a_hub_that_is_away_and_a_gated_repository(here: Aimage, hub: Hub) -> None:
    hub.status = 503
    done = here("pull", "small", "-y", code=1)
    assert "answered 503" in done.err and "the same command resumes" in done.err
    here.environment["HF_HUB_OFFLINE"] = "1"
    assert "unset it to fetch the model" in here("pull", "small", "-y", code=3).err
    del here.environment["HF_HUB_OFFLINE"]
    hub.status = 0
    hub.gated.add(REPOSITORY)
    done = here("pull", "small", "-y", code=4)
    assert "hf auth login" in done.err and f"https://huggingface.co/{REPOSITORY}" in done.err
    here.environment["HF_TOKEN"] = hub.token
    here("pull", "small", "-y", "-q")


def test_an_incomplete_download_is_resumed(here: Aimage, hub: Hub) -> None:
    digest = here("pull", "small", "-y", "-q").line
    here("rm", "small", "-q")
    (missing,) = Path(here.environment["HF_HUB_CACHE"]).rglob("snapshots/*/b.txt")
    missing.unlink()
    hub.requests.clear()
    done = here("pull", "small", "-y")
    assert "fetching Org/Small: 1 file, 4 B" in done.err
    assert done.line == digest and hub.fetched() <= {"b.txt"}


# -- Python


def test_python_obtains_a_model_without_a_question(
    here: Aimage, hub: Hub, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = f"- {{name: packed, reference: '{pushed}'}}\n      - {{name: large"
    write_names(here, LISTED.replace("- {name: large", packed))
    for name, value in here.env().items():
        monkeypatch.setenv(name, value)
    store = Store(here.store)
    digest = obtain("small:packed", store=store)
    assert digest == here("resolve", pushed).line and hub.requests == []
    # A variant in the store serves the bare name.
    assert obtain("small", store=store) == digest
    other = obtain("small:little", store=store)
    assert {"small:packed", "small:little"} <= set(names(here))
    hub.requests.clear()
    assert obtain("small:little", store=store) == other and hub.requests == []
    with pytest.raises(NotFoundError, match="neither in the store nor a short name"):
        obtain("smal", store=store)
