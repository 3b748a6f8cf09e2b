"""The pages of the site that are generated, and links between pages of different places."""

from __future__ import annotations

import importlib.util
import json
import re
from types import ModuleType
from typing import Any

import pytest

import clowder_aimage
from tests.docs.document import ROOT, Document
from tests.docs.test_docs_names import VERBS, mentioned, options

pytest.importorskip("hatchling", reason="hatchling is not installed")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "mkdocs_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def references(hooks: ModuleType) -> dict[str, str]:
    found: dict[str, str] = hooks.references()
    return found


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("contributing.md", "[a](docs/cli.md#run)", "[a](cli.md#run)"),
        ("contributing.md", "![a](docs/shapes.png)", "![a](shapes.png)"),
        ("cli.md", "[a](../README.md)", "[a](index.md)"),
        ("cli.md", "[a](../LICENSE)", "[a](files/LICENSE)"),
        ("adr/0003-dependencies.md", "[a](../cli.md)", "[a](../cli.md)"),
        ("adr/0003-dependencies.md", "[a](../../README.md)", "[a](../index.md)"),
        ("deploy.md", "[`a`](kubernetes/node)", "`a`"),
        (
            "deploy.md",
            "[a](#tests) [b](https://example.com)",
            "[a](#tests) [b](https://example.com)",
        ),
        ("cli.md", "```\n[a](../LICENSE)\n```", "```\n[a](../LICENSE)\n```"),
    ],
)
def test_a_link_leads_to_its_place_in_the_site(
    hooks: ModuleType, page: str, link: str, expected: str
) -> None:
    assert hooks.rewritten(link, page) == expected


def test_files_that_pages_link_to_are_in_the_site(hooks: ModuleType) -> None:
    assert {"LICENSE", "deploy/docker/Dockerfile"} <= hooks.copies()
    assert all((ROOT / name).is_file() for name in hooks.copies())


def test_the_generated_files_are_up_to_date(hooks: ModuleType) -> None:
    generated = hooks.generated().items()
    outdated = [str(p.relative_to(ROOT)) for p, text in generated if p.read_text("utf-8") != text]
    assert not outdated, f"python docs/mkdocs_hooks.py writes them: {', '.join(outdated)}"


def test_every_verb_and_option_is_in_the_reference() -> None:
    page = Document(ROOT / "docs" / "cli.md")
    missing = [verb for verb in VERBS if f"\n## {verb}\n" not in page.text]
    assert not missing, f"python docs/mkdocs_hooks.py writes docs/cli.md: {', '.join(missing)}"
    shared = page.section("Options of every verb") + page.section("Registry options")
    for verb, command in VERBS.items():
        own = options(command) - {"-h", "--help"}
        assert not own - mentioned(page.section(verb) + shared), verb


def test_every_route_is_in_the_generated_reference(
    hooks: ModuleType, references: dict[str, str]
) -> None:
    for path in hooks.openapi()["paths"]:
        assert path in references["reference/api.md"]


def test_every_key_of_the_configuration_is_in_the_generated_reference(
    references: dict[str, str],
) -> None:
    schema = json.loads((ROOT / "schemas" / "config.schema.json").read_text("utf-8"))
    text = references["reference/configuration.md"]
    for value in (schema, *schema["$defs"].values()):
        for key in value.get("properties", ()):
            assert f"\n| `{key}` | " in text


def test_every_public_name_is_in_the_generated_reference(references: dict[str, str]) -> None:
    text = references["reference/python.md"]
    for name in clowder_aimage.__all__:
        place = "clowder_aimage.errors" if name == "AImageError" else f".{name}\n"
        assert place in text


@pytest.fixture(scope="module")
def navigation(hooks: ModuleType) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text("utf-8"))
    found: list[dict[str, Any]] = hooks.on_config(yaml.safe_load(text))["nav"]
    return found


def test_every_page_has_one_place_in_the_navigation(
    hooks: ModuleType, navigation: list[dict[str, Any]]
) -> None:
    pages = re.findall(r'"([^"]+\.md)"', json.dumps(navigation))
    docs = ROOT / "docs"
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(pages) == sorted({*there, *hooks.PAGES.values(), *hooks.references()})


def test_the_navigation_begins_at_home_and_has_few_entries(
    navigation: list[dict[str, Any]],
) -> None:
    assert navigation[0] == {"Home": "index.md"}
    assert len(navigation) <= 7


def test_the_home_page_opens_with_pictures_and_leads_four_readers_on() -> None:
    page = Document(ROOT / "docs" / "index.md")
    opening, _, rest = page.text.partition("\n## ")
    assert opening.count("![") >= 2
    ways = re.findall(
        r"^- \*\*\[(I .*?)\]\((.*?)\)\*\*$", page.section("Four ways in"), re.MULTILINE
    )
    assert len(ways) == len({target for _, target in ways}) == 4
    assert "```console" in rest


def test_the_readme_is_short() -> None:
    page = Document(ROOT / "README.md")
    assert len(page.text.encode()) <= 6000
    assert page.text.count("![") == 1
    assert len(re.findall(r"^\| .* \| \[.*\)", page.section("Read on"), re.MULTILINE)) == 6


def test_a_screenshot_has_a_twin_in_the_dark_scheme(hooks: ModuleType) -> None:
    text = hooks.with_dark_screenshots(
        "![a](page-make-light.png) ![b](shapes.png) ![c](no-light.png)"
    )
    assert text == (
        "![a](page-make-light.png#only-light)![a](page-make-dark.png#only-dark)"
        " ![b](shapes.png) ![c](no-light.png)"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "--dtype auto -q",
            '<span class="option">--dtype</span> auto <span class="option">-q</span>',
        ),
        ("GET /v1/models", "GET /v1/<wbr>models"),
        ("[a\\|b]", "[a|<wbr>b]"),
        ("guidance_scale", "guidance_<wbr>scale"),
        ("a-b 0.5 1e-4", "a-b 0.5 1e-4"),
    ],
)
def test_code_breaks_at_separators_and_not_in_an_option(
    hooks: ModuleType, code: str, expected: str
) -> None:
    html = hooks.on_page_content(f"<p><code>{code}</code> --x</p>", None, None, None)
    assert html == f"<p><code>{expected}</code> --x</p>"


@pytest.mark.parametrize(
    ("text", "is_request"),
    [
        ('<script src="https://unpkg.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
        ("@import 'https://fonts.example/css';", True),
        ('<a href="https://example.com">x</a><script src="assets/x.js"></script>', False),
    ],
)
def test_requests_to_other_hosts_are_found(hooks: ModuleType, text: str, is_request: bool) -> None:
    assert bool(hooks._REQUEST.search(text)) is is_request
