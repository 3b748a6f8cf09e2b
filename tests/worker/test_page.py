"""The page's files: how they are served, what they may do, and that they are whole."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Gt, Le

pytest.importorskip("mlx.core")
pytest.importorskip("aiohttp")

from clowder_aimage.api import page_parameter
from clowder_aimage.api.page import DIRECTORY, POLICY
from clowder_aimage.cli.verbs.serve import open_page
from clowder_aimage.generation.parameter import Words, list_parameters
from clowder_aimage.generation.request import MAX_TEXT, ParameterLocation, map_parameter_locations
from tests.process import Aimage
from tests.worker.conftest import LocalWorker, answer_to

VENDOR = DIRECTORY / "vendor"
OWN = sorted(path for path in DIRECTORY.rglob("*.[jc]s*") if path.parent != VENDOR)
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def ask(url: str, **headers: str) -> tuple[int, Any, bytes]:
    return answer_to(urllib.request.Request(url, headers=headers))


def test_a_browser_gets_the_page_and_others_a_line(worker: LocalWorker) -> None:
    status, headers, body = ask(worker.url, **BROWSER)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body == (DIRECTORY / "index.html").read_bytes()
    assert headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    assert headers["Vary"] == "Accept, Accept-Encoding"
    assert ask(worker.url)[2] == b"aimage is running"


def test_files_are_compressed_and_revalidated(worker: LocalWorker) -> None:
    url = f"{worker.url}/page/main.js"
    status, headers, body = ask(url, **{"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    assert gzip.decompress(body) == (DIRECTORY / "main.js").read_bytes() == ask(url)[2]
    assert headers["Cache-Control"] == "no-cache"
    status, again, body = ask(url, **{"If-None-Match": headers["ETag"]})
    assert (status, body, again["ETag"]) == (304, b"", headers["ETag"])
    assert ask(url, **{"If-None-Match": '"other"'})[0] == 200


@pytest.mark.parametrize(
    "name", ["../api/page.py", "..%2fapi%2fpage.py", "vendor/vendor.json", "none.js", "index.html/"]
)
def test_other_files_are_not_served(worker: LocalWorker, name: str) -> None:
    assert ask(f"{worker.url}/page/{name}")[0] == 404


def test_a_worker_without_the_page_serves_none(empty: LocalWorker) -> None:
    other = empty.start("--no-page")
    assert ask(other.url, **BROWSER)[2] == b"aimage is running"
    assert ask(f"{other.url}/page/main.js")[0] == 404


def test_the_page_is_opened_at_the_first_address_of_a_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url))
    thread = open_page(["unix:/run/aimage.sock", "http://127.0.0.1:11434"])
    assert thread is not None
    thread.join(60)
    assert opened == ["http://127.0.0.1:11434"]
    assert open_page(["unix:/run/aimage.sock"]) is None
    done = Aimage(tmp_path, tmp_path / "store")("serve", "--open", "--no-page", code=2)
    assert "--open requires the page" in done.err


def test_a_client_learns_what_its_token_allows(empty: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {'a' * 16}\ninfer {'i' * 16}\n")
    tokens.chmod(0o600)
    other = empty.start("--token-file", tokens, "--default-model", "shapes")
    known = {"version": empty.get("/v1/worker")["version"]}
    assert other.get("/v1/worker") == known | {"scope": None}
    assert other.get("/v1/worker", Authorization="Bearer wrong") == known | {"scope": None}
    facts: dict[str, Any] = {"default_model": "shapes", "enhancer": None, "batches": []}
    for scope in ("admin", "infer"):
        found = other.get("/v1/worker", Authorization=f"Bearer {scope[0] * 16}")
        assert found == known | facts | {"scope": scope}


def test_a_model_states_its_defaults(worker: LocalWorker) -> None:
    (model,) = worker.get("/v1/models")["data"]
    names = {"width", "height", "steps", "guidance", "guidance_end", "cache_threshold"}
    assert model["defaults"].keys() == names
    assert (
        model["defaults"]["steps"] == worker.get(f"/v1/models/{model['id']}")["defaults"]["steps"]
    )


def test_the_parameters_are_a_module_that_is_revalidated(worker: LocalWorker) -> None:
    url = f"{worker.url}/page/{page_parameter.NAME}"
    status, headers, body = ask(url, **{"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    assert gzip.decompress(body).decode() == page_parameter.render_module(map_parameter_locations())
    assert ask(url, **{"If-None-Match": headers["ETag"]})[0] == 304


def described(module: str, name: str) -> Any:
    """Return what a module says of a parameter."""
    found = re.search(rf"^  {name}: (.*),$", module, re.M)
    assert found, name
    return json.loads(found[1])


def test_the_module_has_the_kinds_and_bounds_of_parameters() -> None:
    module = page_parameter.render_module(map_parameter_locations())
    expected: dict[str, dict[str, Any]] = {
        "width": {"kind": "whole", "least": 16, "most": 8192, "step": 16, "ofModel": True},
        "seed": {"kind": "digits", "most": str((1 << 64) - 1)},
        "strength": {"kind": "number", "above": 0, "most": 1, "isOptional": True},
        "previews": {"kind": "whole", "field": "partial_images", "default": 0},
        "fit": {"kind": "one", "of": ["crop", "pad", "stretch"]},
        "references": {"kind": "list", "of": {"kind": "digest"}, "most": 4},
        "expand": {"of": {"kind": "whole", "least": 0, "most": 4096}, "least": 4, "most": 4},
        "feather": {"group": "input", "most": 256, "usual": [0, 64]},
    }
    for name, some in expected.items():
        found = described(module, name)
        assert found | some == found, name
    assert described(module, "loras")["of"]["of"]["strength"]["least"] == -100


def test_a_parameter_that_is_added_is_in_the_module() -> None:
    @dataclass(frozen=True)
    class More:
        noise_scale: Annotated[float, Gt(0), Le(2), Words("More noise.", field="noise")] = 1.0

    (added,) = list_parameters(More)
    location = ParameterLocation("sampling", added)
    module = page_parameter.render_module({**map_parameter_locations(), "noise_scale": location})
    assert described(module, "noise_scale") == {
        "group": "sampling",
        "kind": "number",
        "above": 0,
        "most": 2,
        "field": "noise",
        "help": "More noise.",
        "default": 1.0,
    }


# -- the source


def test_the_libraries_are_those_of_their_packages() -> None:
    packages = json.loads((VENDOR / "vendor.json").read_text("utf-8"))
    sums = {file["name"]: file["sha256"] for each in packages for file in each["files"]}
    licences = {each["licence"] for each in packages}
    assert {path.name for path in VENDOR.iterdir()} == {*sums, *licences, "vendor.json"}
    for name, digest in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    assert {each["spdx"] for each in packages} <= {"MIT", "Apache-2.0"}


def imports() -> Iterator[tuple[Path, str]]:
    for path in DIRECTORY.rglob("*.js"):
        for found in re.findall(r'(?:from|import) ?\(?["\']([^"\']+)["\']', path.read_text()):
            yield path, found


def is_served(path: Path) -> bool:
    return path.is_file() or path == DIRECTORY / page_parameter.NAME


def graph(path: Path, found: set[str]) -> set[str]:
    """Add the modules that a module imports before it runs."""
    name = path.relative_to(DIRECTORY).as_posix()
    if name not in found:
        found.add(name)
        if name == page_parameter.NAME:  # which is made
            return found
        for other in re.findall(r"""\bfrom ?["']([^"']+)["']""", path.read_text("utf-8")):
            graph((path.parent / other).resolve(), found)
    return found


@pytest.mark.parametrize("language", ["en", "de"])
def test_the_page_stays_small(worker: LocalWorker, language: str) -> None:
    """All that it loads by itself in a language, with the headers of the responses.

    ``benchmarks/page.py`` measures it in a browser.
    """
    modules = {f"lang/{language}.js"}
    for part in ("main", "gallery", "models", "chat"):
        graph(DIRECTORY / f"{part}.js", modules)
    others = {path.name for path in DIRECTORY.glob("*.*") if path.suffix in (".css", ".svg")}
    size = 0
    for name in ("index.html", *others, *modules):
        _, headers, body = ask(f"{worker.url}/page/{name}", **{"Accept-Encoding": "gzip"})
        size += len(body) + len(bytes(headers))
    assert 100_000 < size < 155_000


def test_the_index_names_the_modules_that_are_needed_first() -> None:
    """So that the browser asks for them at once instead of one after another."""
    index = (DIRECTORY / "index.html").read_text("utf-8")
    named = re.findall(r'rel="modulepreload" href="/page/([^"]+)"', index)
    assert len(named) == len(set(named))
    assert {*named, "main.js"} == graph(DIRECTORY / "main.js", set())


def test_files_refer_to_files_of_the_page_only() -> None:
    for path, name in imports():
        assert name.startswith("."), f"{path}: {name}"
        assert is_served(path.parent / name), f"{path}: {name}"
    index = (DIRECTORY / "index.html").read_text()
    named = re.findall(r'(?:href|src)="([^"]+)"', index)
    assert named
    assert all(is_served(DIRECTORY / name.removeprefix("/page/")) for name in named)
    assert "<style" not in index
    assert not re.search(r"<script(?! type=\"module\" src)", index)
    for path in OWN:
        found = re.findall(
            r"https?://(?!www\.w3\.org|localhost|HOST|127\.0\.0\.1)[^\s'\"`)]+", path.read_text()
        )
        assert not found, f"{path}: {found}"


# A literal bound: of a control's attribute, of a property, or of a length
BOUND = re.compile(
    r"""\b(?:min|max|maxlength|least|most|above)\b(?:=["'$]?\{?|:\s*)-?\d"""
    r"""|\bpattern=["'][^"']*\{\d|\bstep=["'$]?\{?(?:16|32)\b"""
)
# Ranges of other things: the parts of two pictures, the place in a list of scales
OTHER_RANGES = {"compare.js": 2, "make_size.js": 1}


def test_no_module_of_the_page_has_bounds_of_parameters() -> None:
    """They are those of ``parameters.js``."""
    locations = map_parameter_locations().values()
    limits = [location.parameter.type.bounds.get("le", 0) for location in locations]
    large = "|".join(str(limit) for limit in {MAX_TEXT, *limits} if limit > 1000)
    found = {}
    for path in DIRECTORY.glob("*.js"):
        source = path.read_text("utf-8")
        if count := len(BOUND.findall(source) + re.findall(rf"\b({large})\b", source)):
            found[path.name] = count
    assert found == OTHER_RANGES


def texts(language: str) -> dict[str, str]:
    source = (DIRECTORY / "lang" / f"{language}.js").read_text("utf-8")
    found = re.findall(r"""^  '([\w.-]+)':\s*(?:'((?:[^'\\]|\\.)*)'|"([^"]*)"),$""", source, re.M)
    assert len(found) == len(re.findall(r"^  '", source, re.M)), "a text is not read"
    assert len({key for key, *_ in found}) == len(found), "a key occurs twice"
    return {key: one or other for key, one, other in found}


def test_every_text_is_in_both_languages_with_the_same_values() -> None:
    """English labels and hints of parameters may be their names and help."""
    english, german = texts("en"), texts("de")
    derived = {
        f"{kind}.{name}" for kind in ("setting", "hint") for name in map_parameter_locations()
    }
    assert not english.keys() - german.keys()
    assert german.keys() - english.keys() <= derived
    for key, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(
            re.findall(r"\{\w+\}", german[key])
        ), key
    same = [key for key in english if english[key] == german[key]]
    assert len(same) < len(english) / 6, same


def test_every_text_that_is_used_exists() -> None:
    english = texts("en")
    sources = [path.read_text("utf-8") for path in OWN if path.suffix == ".js"]
    used = {key for text in sources for key in re.findall(r"\bt\(\s*'([^']+)'", text)}
    assert used
    assert not used - english.keys()
