"""Links, files, verbs, options, exit codes and variables in the documentation exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click

from clowder_aimage import errors
from clowder_aimage.cli.main import cli
from tests.docs.document import GUIDES, PROSE, ROOT, Document
from tests.process import run

ENVIRONMENT = Document(ROOT / "docs" / "environment.md")
DOCUMENTS = [Document(path) for path in PROSE]
PACKAGE = ROOT / "clowder_aimage"
# Hosts of package registries: the documentation and the scripts work with any mirror of them.
HOSTS = [
    "py" + "pi.",
    "python" + "hosted.",
    "deb." + "debian",
    "debian" + ".org",
    "archive." + "ubuntu",
    "npm" + "js.",
    "crates" + ".io",
    "conda" + ".anaconda",
]
ELSEWHERE = ["/" + "work/", "/" + "root/", "/" + "home/"]  # paths of somebody's machine


def verbs(command: click.Command, name: str = "aimage") -> Iterator[tuple[str, click.Command]]:
    """Every command of the tree with its full name."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None, child
            yield from verbs(found, f"{name} {child}")


VERBS = dict(verbs(cli))


def options(command: click.Command) -> set[str]:
    """All spellings of all options that are shown, ``--help`` included."""
    found = set()
    for parameter in command.get_params(click.Context(command)):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def mentioned(text: str) -> set[str]:
    """Options that a text speaks of."""
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*(?![\w])", text))


def test_every_option_typed_in_the_documentation_exists() -> None:
    known = set().union(*(options(command) for command in VERBS.values()))
    for path in GUIDES:
        document = Document(path)
        for command in document.commands:
            for part in re.split(r"[|;&]+", command.text):
                if part.split()[:1] == ["aimage"]:
                    unknown = {o for o in mentioned(part) if o.startswith("--")} - known
                    assert not unknown, f"{document.name}, line {command.line}: {sorted(unknown)}"


def test_every_exit_code_is_documented() -> None:
    table = ENVIRONMENT.section("Exit codes")
    codes = {0, 130} | {
        value.exit_code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.AImageError)
    }
    for code in codes:
        assert re.search(rf"^\| {code} \|", table, re.MULTILINE), f"exit code {code}"


def test_every_environment_variable_is_documented() -> None:
    paths = [*(PACKAGE / "cli").rglob("*.py"), PACKAGE / "config/user_directory.py"]
    source = "".join(path.read_text("utf-8") for path in paths)
    read = set(re.findall(r'(?:environ\.get\(|envvar=)"([A-Z_]+)"', source))
    assert read
    table = ENVIRONMENT.section("Environment variables")
    assert not {name for name in read if f"`{name}`" not in table}


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in document.links:
            assert _leads_somewhere(document, link), f"{document.name}: {link}"


def _leads_somewhere(document: Document, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return link.startswith("https://")
    path, _, anchor = link.partition("#")
    target = document.path.parent / path if path else document.path
    return target.exists() and (not anchor or anchor in Document(target).anchors)


def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        missing = [span for span in document.spans if _is_path(span) and not _exists(span)]
        assert not missing, f"{document.name} names files that do not exist: {missing}"


def _is_path(span: str) -> bool:
    """Return whether it names a file of this project, by its first directory or its ending."""
    if re.fullmatch(r"[\w./*-]+", span) is None or span.startswith(("/", "..")):
        return False
    first, slash, _ = span.partition("/")
    if slash:
        return first not in ("", ".") and any((b / first).is_dir() for b in (ROOT, PACKAGE))
    return span.endswith((".py", ".md", ".yml", ".service")) or span == "Makefile"


def _exists(span: str) -> bool:
    outputs = ("demo-output", "build", "dist")
    if span.partition("/")[0] in outputs:
        return True
    return any(list(base.glob(span.rstrip("/"))) for base in (ROOT, PACKAGE))


def _texts() -> Iterator[Path]:
    """Return the files of the project: those that git tracks or would add, else the documents."""
    done = run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
    )
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    paths = [ROOT / name for name in names] if done.returncode == 0 else PROSE
    return (path for path in paths if path.is_file() and path.stat().st_size < 1 << 20)


def test_no_package_registry_and_no_path_of_a_machine_is_named() -> None:
    found = []
    for path in _texts():
        try:
            text = path.read_text("utf-8").lower()
        except UnicodeDecodeError:
            continue
        words = HOSTS + (ELSEWHERE if path.suffix == ".md" else [])
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found


def test_no_example_uses_the_port_of_airplay() -> None:
    """The AirPlay receiver of macOS listens on port 5000."""
    taken = re.compile(r"\b(?:localhost|127\.0\.0\.1):5000\b")
    assert not [doc.name for doc in map(Document, GUIDES) if taken.search(doc.text)]
