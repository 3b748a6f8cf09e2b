"""``create`` of models of the Hugging Face hub: from its cache, and from a hub on loopback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clowder_aimage.content.file_system import Space
from clowder_aimage.importer import hub_model
from clowder_aimage.importer.hub_model import HubModel, HubName, find_model
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.hub import Hub, serving_hub
from tests.importer.formats_gguf import gguf
from tests.process import Aimage

pytest.importorskip("huggingface_hub")
NAME = "Org/Tiny-Image.1"
SMALL = {"a.gguf": gguf()}
VARIABLES = ("HF_", "HUGGING", "TRANSFORMERS_")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub() as made:
        yield made


@pytest.fixture
def here(
    hub: Hub, aimage: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Aimage:
    """Return the command line with a cache of its own, and the hub on loopback."""
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)
    made = aimage()
    made.environment |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": hub.address}
    return made


def cache_of(here: Aimage, repository: str = NAME) -> Path:
    return Path(here.environment["HF_HUB_CACHE"]) / f"models--{repository.replace('/', '--')}"


def source_of(here: Aimage, name: str = "x") -> object:
    return read_aimage(ImageLayout(here.store), Reference.parse(name)).aimage.properties["source"]


def without_extra(here: Aimage, tmp_path: Path) -> Aimage:
    """Make huggingface_hub impossible to import, in a child process."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "huggingface_hub.py").write_text(
        "raise ModuleNotFoundError('gone', name='huggingface_hub')"
    )
    path = f"{tmp_path / 'blocked'}:{Path(__file__).parents[2]}"
    return Aimage(here.home, here.store, here.environment | {"PYTHONPATH": path})


# -- fetched


def test_a_model_is_fetched_packed_and_found_again_without_the_hub(
    here: Aimage, hub: Hub, abridged: Path
) -> None:
    commit = hub.add(NAME, abridged)
    done = here("create", "x", NAME)
    assert done.line.startswith("sha256:")
    assert f"fetching {NAME}: 11 files, " in done.err
    assert f"https://huggingface.co/{NAME}/tree/{commit}" in done.err
    assert source_of(here) == f"https://huggingface.co/{NAME}/tree/{commit}"
    assert hub.fetched() == set(hub.repositories[NAME])
    assert any("aimage/" in agent for agent in hub.agents)
    hub.requests.clear()
    again = here("create", "y", f"hf://{NAME}")
    assert again.line == done.line
    assert hub.requests == []
    assert "fetching" not in again.err


def test_the_layers_are_those_of_the_directory(here: Aimage, hub: Hub, abridged: Path) -> None:
    hub.add(NAME, abridged)
    here("create", "x", NAME, "-q")
    here("create", "local", abridged, "-q")
    store = ImageLayout(here.store)
    fetched, local = (read_aimage(store, Reference.parse(name)).aimage for name in ("x", "local"))
    assert fetched.layers == local.layers
    assert "source" not in local.properties


@pytest.mark.parametrize(
    "form",
    [
        f"hf://{NAME}",
        f"hf.co/{NAME}",
        f"huggingface.co/{NAME}",
        f"https://huggingface.co/{NAME}",
        f"https://huggingface.co/{NAME}/",
        f"https://huggingface.co/{NAME}/tree/main",
        f"https://hf.co/{NAME}?library=diffusers",
        f"{NAME}@main",
        f"hf://{NAME}@{{commit}}",
        f"https://huggingface.co/{NAME}/tree/{{commit}}",
    ],
)
def test_forms_of_the_name(form: str, here: Aimage, hub: Hub) -> None:
    commit = hub.add(NAME, SMALL)
    here("create", "x", form.format(commit=commit), "-q")
    assert source_of(here) == f"https://huggingface.co/{NAME}/tree/{commit}"


def test_a_commit_of_the_cache_stays_after_the_branch_moved(
    here: Aimage, hub: Hub, abridged: Path
) -> None:
    first = hub.add(NAME, abridged)
    one = here("create", "x", NAME, "-q").line
    files = hub.repositories[NAME]
    second = hub.add(NAME, files | {"README.md": b"---\nlicense: mit\n---\n"})
    assert here("create", "x", f"{NAME}@{first}", "-q").line == one
    assert here("create", "y", f"{NAME}@{second}", "-q").line != one
    assert source_of(here, "y") == f"https://huggingface.co/{NAME}/tree/{second}"


def test_duplicates_and_what_is_not_packed_are_not_fetched(
    here: Aimage, hub: Hub, abridged: Path
) -> None:
    hub.add(NAME, abridged)
    files = hub.repositories[NAME]
    files["assets/picture.png"] = bytes(1000)
    wanted = set(files)
    weights = files["vae/diffusion_pytorch_model.safetensors"]
    files |= {
        ".gitattributes": b"x",
        "all-in-one.safetensors": weights,
        "text_encoder/model.fp16.safetensors": weights,
        "transformer/diffusion_pytorch_model.bin": b"\x80\x02",
        "transformer/flax_model.msgpack": b"x",
        "vae/diffusion_pytorch_model.fp16.safetensors": weights,
        "vae/model.onnx": b"x",
    }
    left_out = {file["path"] for file in here("create", "x", NAME, "--json").value["leftOut"]}
    assert hub.fetched() == wanted
    assert left_out == files.keys() - wanted


def test_quiet_prints_the_digest_alone_and_json_prints_json(
    here: Aimage, hub: Hub, abridged: Path
) -> None:
    hub.add(NAME, abridged)
    quiet = here("create", "x", NAME, "-q")
    assert quiet.err == ""
    shutil.rmtree(cache_of(here))
    done = here("create", "y", NAME, "--json")
    events = [json.loads(line) for line in done.err.splitlines()]
    total = sum(len(data) for data in hub.repositories[NAME].values())
    index = len(hub.repositories[NAME]["model_index.json"])
    (plan,) = [each for each in events if each.get("task") == "fetching" and "size" in each]
    assert plan["event"] == "plan"
    assert plan["size"] == total - index
    assert done.value["digest"] == quiet.line


def test_a_source_that_is_given_is_kept(here: Aimage, hub: Hub, abridged: Path) -> None:
    hub.add(NAME, abridged)
    here("create", "x", NAME, "-q", "--source", "https://example.com/model")
    assert source_of(here) == "https://example.com/model"


def test_a_part_that_is_missing_is_fetched(here: Aimage, hub: Hub, abridged: Path) -> None:
    commit = hub.add(NAME, abridged)
    here("create", "x", NAME, "-q")
    lost = cache_of(here) / "snapshots" / commit / "vae" / "diffusion_pytorch_model.safetensors"
    lost.resolve().unlink()
    lost.unlink()
    hub.requests.clear()
    assert "1 file," in here("create", "y", NAME).err
    assert hub.fetched() == {"vae/diffusion_pytorch_model.safetensors"}


def test_shared_blobs_of_the_cache_are_followed(here: Aimage, hub: Hub, abridged: Path) -> None:
    """huggingface_hub 2 keeps large files once for all repositories."""
    commit = hub.add(NAME, abridged)
    digest = here("create", "x", NAME, "-q").line
    cache = cache_of(here).parent
    link = cache_of(here) / "snapshots" / commit / "vae" / "diffusion_pytorch_model.safetensors"
    blob, shared = cache_of(here) / "blobs" / link.resolve().name, cache / "blobs" / "ab" / "abcd"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to("../../blobs/ab/abcd")
    assert "outside the model directory" in here("create", "y", NAME, code=1).err
    (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    assert here("create", "y", NAME, "-q").line == digest
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    assert "outside the model directory" in here("create", "y", NAME, code=1).err


# -- one file of a repository


def test_one_file_of_a_repository(here: Aimage, hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/quants", {"a-Q4.gguf": gguf(), "b-Q8.gguf": gguf() + bytes(32)})
    done = here("create", "x", "org/quants", code=2)
    assert "org/quants holds 2 models: a-Q4.gguf, b-Q8.gguf" in done.err
    assert "hf://org/quants/a-Q4.gguf" in done.err
    assert hub.fetched() == set()
    here("create", "x", "hf://org/quants/a-Q4.gguf", "-q")
    assert hub.fetched() == {"a-Q4.gguf"}
    assert source_of(here) == f"https://huggingface.co/org/quants/blob/{commit}/a-Q4.gguf"
    here("create", "y", "https://huggingface.co/org/quants/blob/main/a-Q4.gguf", "-q")
    done = here("create", "x", "hf://org/quants/c.gguf", code=3)
    assert "org/quants has no file c.gguf" in done.err


# -- from the cache alone


def cached(here: Aimage, abridged: Path, commit: str = "a" * 40) -> Path:
    """Put the model into the cache as older versions of huggingface_hub leave it."""
    home = cache_of(here)
    shutil.copytree(abridged, home / "snapshots" / commit)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    return home / "snapshots" / commit


def test_a_cached_model_needs_neither_the_extra_nor_the_hub(
    here: Aimage, hub: Hub, abridged: Path, tmp_path: Path
) -> None:
    cached(here, abridged)
    bare = without_extra(here, tmp_path)
    bare("create", "x", NAME, "-q")
    assert source_of(here) == f"https://huggingface.co/{NAME}/tree/{'a' * 40}"
    assert hub.requests == []


def test_without_the_extra_nothing_is_fetched(
    here: Aimage, hub: Hub, abridged: Path, tmp_path: Path
) -> None:
    bare = without_extra(here, tmp_path)
    done = bare("create", "x", NAME, code=2)
    assert "needs the extra [hf]" in done.err
    assert "[hf]'" in done.err.splitlines()[-1]
    (cached(here, abridged) / "vae" / "config.json").unlink()
    done = bare("create", "x", NAME, code=2)
    assert "config.json is missing; fetching a model needs the extra [hf]" in done.err
    assert not here.store.exists()


def test_offline_uses_the_cache_or_says_what_is_missing(
    here: Aimage, hub: Hub, abridged: Path
) -> None:
    here.environment["HF_HUB_OFFLINE"] = "1"
    done = here("create", "x", NAME, code=3)
    assert f"{NAME} is not in the Hugging Face cache" in done.err
    assert "HF_HUB_OFFLINE" in done.err
    snapshot = cached(here, abridged)
    here("create", "x", NAME, "-q")
    (snapshot / "transformer" / "config.json").unlink()
    assert "config.json is missing" in here("create", "y", NAME, code=3).err
    assert hub.requests == []


def test_an_older_cache_is_used_when_the_hub_is_away(
    here: Aimage, hub: Hub, abridged: Path
) -> None:
    cached(here, abridged)
    hub.status = 503
    here("create", "x", NAME, "-q")
    assert source_of(here) == f"https://huggingface.co/{NAME}/tree/{'a' * 40}"


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_places_of_the_cache(variable: str, here: Aimage, abridged: Path, tmp_path: Path) -> None:
    del here.environment["HF_HUB_CACHE"]
    here.environment |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": "", variable: str(tmp_path)}
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    place = tmp_path / below.get(variable, ".cache/huggingface/hub")
    shutil.copytree(abridged, place / "models--org--m" / "snapshots" / "abcdef")
    (place / "models--org--m" / "blobs").mkdir()
    here("create", "x", "org/m@abcdef", "-q")


# -- refused


def test_a_path_that_exists_wins(here: Aimage, hub: Hub, abridged: Path) -> None:
    shutil.copytree(abridged, here.home / NAME)
    here("create", "x", NAME, "-q")
    assert hub.requests == []
    done = here("create", "x", "Org/other", code=3)
    assert "Org/other does not exist" in done.err
    assert hub.requests == []


def test_an_unknown_repository(here: Aimage, hub: Hub) -> None:
    done = here("create", "x", "no/such", code=3)
    assert "no/such not found, neither here nor on the Hugging Face hub" in done.err
    assert "HF_TOKEN" in done.err
    assert not here.store.exists()


def test_an_unknown_revision(here: Aimage, hub: Hub, abridged: Path) -> None:
    hub.add(NAME, abridged)
    done = here("create", "x", f"{NAME}@v9", code=3)
    assert f"{NAME} has no revision v9" in done.err


def test_a_private_repository_needs_a_token(here: Aimage, hub: Hub) -> None:
    hub.add(NAME, SMALL)
    hub.private.add(NAME)
    assert "HF_TOKEN" in here("create", "x", NAME, code=3).err
    here.environment["HF_TOKEN"] = hub.token
    here("create", "x", NAME, "-q")


def test_a_gated_repository(here: Aimage, hub: Hub) -> None:
    hub.add(NAME, SMALL)
    hub.gated.add(NAME)
    done = here("create", "x", NAME, code=4)
    assert f"{NAME} requires a token, and its terms to be accepted" in done.err
    assert f"https://huggingface.co/{NAME}" in done.err
    here.environment["HF_TOKEN"] = hub.token
    here("create", "x", NAME, "-q")


@pytest.mark.parametrize(("status", "code"), [(403, 4), (500, 1), (503, 1)])
def test_the_hub_answers_with_an_error(
    status: int, code: int, here: Aimage, hub: Hub, abridged: Path
) -> None:
    hub.add(NAME, abridged)
    hub.status = status
    done = here("create", "x", NAME, code=code)
    assert f"{status}" in done.err
    assert NAME in done.err


def test_a_hub_that_drips_is_given_up(
    here: Aimage, hub: Hub, abridged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, abridged)
    hub.is_slow = True
    monkeypatch.setattr(hub_model, "_MIN_SECONDS", 0.2)
    done = here("create", "x", NAME, code=1)
    assert "the Hugging Face hub does not answer in time (0 s)" in done.err
    hub.is_over.set()


def test_no_network(here: Aimage) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{probe.getsockname()[1]}"
        done = here("create", "x", NAME, code=1)
    assert f"{NAME} cannot be fetched: the Hugging Face hub does not answer" in done.err


def test_no_room_in_the_cache(
    here: Aimage, hub: Hub, abridged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, abridged)
    space = Space(10**6, 10**6 - 9999, 9999)
    monkeypatch.setattr(hub_model, "measure_space", lambda _: space)
    done = here("create", "x", NAME, code=6)
    assert "0.00 GB are free" in done.err
    assert "HF_HUB_CACHE" in done.err
    assert hub.fetched() == {"model_index.json"}


def test_a_disk_that_fills_up(
    here: Aimage, hub: Hub, abridged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add(NAME, abridged)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert f"no space left for {NAME} in" in here("create", "x", NAME, code=6).err
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # no error of the hub, the network or the disk
        here("create", "x", NAME)


def test_the_bytes_that_arrive_are_counted(
    here: Aimage, hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in here.environment.items():
        monkeypatch.setenv(name, value)
    hub.add(NAME, tiny)
    plans: list[HubModel] = []
    counts: list[int] = []
    parsed = HubName.parse(NAME)
    assert parsed is not None
    found = find_model(parsed, ModelForm(), "1", plans.append, counts.append)
    assert sum(counts) == plans[0].size == found.size > 10**6
    assert min(counts) > 0


@pytest.mark.parametrize(
    "path",
    ["hf://", "hf://one", "hf://a/b@", "hf://a/../b", "https://huggingface.co/datasets/a/b"],
)
def test_addresses_that_name_no_model(path: str, here: Aimage, hub: Hub) -> None:
    done = here("create", "x", path, code=2)
    assert "does not name a model of the Hugging Face hub" in done.err
    assert hub.requests == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pytorch_model.bin": b"x", "config.json": b"{}"}, "pytorch_model.bin is pickled"),
        ({"README.md": b"x"}, "holds no model in a format that can be packed"),
        ({"model_index.json": b"[]"}, "model_index.json is not a JSON object"),
    ],
)
def test_a_repository_without_a_model(
    files: dict[str, bytes], said: str, here: Aimage, hub: Hub
) -> None:
    hub.add("org/odd", files)
    done = here("create", "x", "org/odd", code=5 if "JSON" in said else 1)
    assert said in done.err
    assert not here.store.exists()


@pytest.mark.parametrize(
    "name",
    [
        "hf.co/black-forest-labs/FLUX.1-dev",
        "hf://black-forest-labs/FLUX.1-dev",
        "https://huggingface.co/black-forest-labs/FLUX.1-dev",
    ],
)
def test_a_model_of_the_hub_is_no_reference(name: str, here: Aimage) -> None:
    done = here("pull", name, code=2)
    assert "lower case" not in done.err
    assert "aimage create NAME hf://black-forest-labs/FLUX.1-dev" in done.err
