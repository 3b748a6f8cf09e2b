"""Rules of the source that no other tool enforces: language, imports, one place for each."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from clowder_aimage.cli.console.remedy import REMEDIES

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "clowder_aimage"
PAGE_FILES = ("*.js", "*.css", "lang/*.js")
RIDDLE = re.compile(r"(What|Whether|Who|Whoever|Which|That|How|Where)\b")
COMMAND = re.compile(
    r"(?<![\w-])--[a-z][a-z-]+|\baimage [a-z]{2,}\b"
    r"|\bAIMAGE_(HOST|TOKEN|STORE)\b|\b(pip install|skopeo copy)\b"
)
NETWORK = {"http.client", "socket", "urllib.request"}
CHANGING = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear")


def floor(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Free the trees, which are half a million objects."""
    yield
    parse.cache_clear()


class Trees(Mapping[Path, ast.Module]):
    """The modules of a directory that match ``pattern``. Each is parsed when it is first read."""

    def __init__(self, directory: Path, pattern: str = "") -> None:
        self._paths = sorted(
            path for path in directory.rglob("*.py") if re.search(pattern, path.read_text("utf-8"))
        )

    def __getitem__(self, path: Path) -> ast.Module:
        return parse(path)

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


TREES = Trees(PACKAGE)


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield getattr(node, "lineno", 1), text


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return strings other than docstrings and arguments of the program's own commands."""
    told = set[int]()
    # A statement comes before its value
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            told.add(id(node.value))
        elif isinstance(node, ast.Constant) and type(node.value) is str and id(node) not in told:
            yield node.lineno, node.value


def test_no_docstring_begins_with_a_question_word() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text.splitlines()[0]}"
        for directory in (PACKAGE, TESTS)
        for path, tree in Trees(directory, rf"[\"']{RIDDLE.pattern}").items()
        for line, text in documented(tree)
        if RIDDLE.match(text)
    ]
    assert not found, "\n".join(found)


def test_no_text_below_the_command_line_names_an_option_or_a_verb() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in Trees(PACKAGE, r"--[a-z]|\baimage\b|AIMAGE_|pip|skopeo")
        if floor(path) != "cli" and path.name != "user_directory.py"
        for line, text in strings(TREES[path])
        if COMMAND.search(text)
    ]
    assert not found, "\n".join(found)


def test_similar_names_are_found_and_missing_extras_reported_by_one_module_each() -> None:
    def find(pattern: str) -> list[str]:
        paths = PACKAGE.rglob("*.py")
        return [path.name for path in paths if re.search(pattern, path.read_text("utf-8"))]

    assert find(r"\bdifflib\b") == ["similarity.py"]
    assert find(r"install the extra|needs? the extra \[") == ["errors.py"]


def test_the_page_has_no_vague_names_and_no_inline_code() -> None:
    paths = [path for pattern in PAGE_FILES for path in (PACKAGE / "page").glob(pattern)]
    assert paths
    words = re.compile(r"\b(manager|util|helper|handler|provider)s?\b|\bstyle=\"|innerHTML", re.I)
    assert not [path.name for path in paths if words.search(path.read_text("utf-8"))]


def test_sockets_are_used_by_registry_http_and_the_worker_client_alone() -> None:
    allowed = {"registry", "http"}
    modules = {PACKAGE / "engine" / "worker_client.py", PACKAGE / "content" / "timed_response.py"}
    found = []
    for path, tree in Trees(PACKAGE, r"\b(http|socket|urllib)\b").items():
        if floor(path) in allowed or path in modules:
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [f"{path.relative_to(PACKAGE)}: {name}" for name in names if name in NETWORK]
    assert not found


def test_what_strangers_write_goes_through_one_place() -> None:
    """Templates are rendered, texts encoded and results printed by one module each."""
    own = {
        r"jinja2\.(sandbox|Environment|Template\b)|jinja2[\w.]* import .*Environment": {
            "document/template.py"
        },
        r"^(import|from) tokenizers": {"model/tokenizer_backend.py"},
        # Documents of strangers are read by strict_json.py; others read what this program wrote,
        # or are named with a reason
        r"json\.loads?\(|JSONDecoder\(|from json import": {
            "cli/console/installation.py",
            "engine/frame.py",
            "layout/digest_scan.py",  # looks for digests only
            "model/text/tool_call_format.py",  # looks for the end of a call only
            "registry/docker_config.py",  # the user's
            "document/schema.py",
            "document/strict_json.py",
            "tensor/header.py",  # strict, with limits of its own
            "validate.py",  # after strict_json.py, for the place of an error
        },
        r"urlopen\(|ClientSession\(|HTTPS?Connection\(|PoolManager\(|create_connection\(": {
            "registry/peer.py",
            "registry/connection.py",  # with deadlines
            "registry/connection_pool.py",  # of these connections
        },
        r"basicConfig|StreamHandler|FileHandler|print_exc": {
            "engine/process.py",  # one line each, to the worker's log
            "http/log.py",  # the filter
        },
        r"click\.s?echo\(|\bprint\(|stdout\.write": {
            "cli/console/output.py",
            "cli/console/progress.py",  # messages, printable
            "cli/main.py",  # errors
            "cli/verbs/completion.py",  # of this program
            "cli/verbs/manifest.py",  # a document, printable
            "cli/verbs/save.py",  # an event
        },
    }
    for pattern, places in own.items():
        found = {
            path.relative_to(PACKAGE).as_posix()
            for path in TREES
            if re.search(pattern, path.read_text("utf-8"), re.MULTILINE)
        }
        assert found == places, pattern


def changed_fields(kind: ast.ClassDef) -> Iterator[str]:
    """Return statements of a class that change one of its own fields, or what is in it."""
    for node in ast.walk(kind):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [*node.targets]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in CHANGING else []
        if any(ast.unparse(one).lstrip("(").startswith("self.") for one in targets):
            yield ast.unparse(node)


def test_what_is_called_frozen_changes_nothing_of_itself() -> None:
    """A list in a frozen value is state that nobody looks for there."""
    # It keeps what it derives from its bytes
    derived = {("dialect/aimage.py", "self._derived[key] = derive()")}
    found = {
        (path.relative_to(PACKAGE).as_posix(), text)
        for path, tree in Trees(PACKAGE, r"frozen=True").items()
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        and any("frozen=True" in ast.unparse(one) for one in kind.decorator_list)
        for text in changed_fields(kind)
    }
    assert found == derived


def test_children_of_tests_are_started_by_one_module() -> None:
    """It gives them default signals and ends them with the test."""
    found = []
    programs = ("process.py", "deploy/confined.py", "cli/every_verb.py")
    for path, tree in Trees(TESTS, r"\bsubprocess\b").items():
        if str(path.relative_to(TESTS)) in programs:  # the last two run apart from pytest
            continue
        for node in ast.walk(tree):
            text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.ImportFrom):
                text = f"{node.module}."
            if text.startswith("subprocess."):
                found.append(f"{path.relative_to(TESTS)}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_every_remedy_is_in_the_table_and_used() -> None:
    used = set()
    for tree in Trees(PACKAGE, r"\bremedy\b").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                used |= {
                    value.value
                    for key, value in pairs
                    if isinstance(key, ast.Constant)
                    and key.value == "remedy"
                    and isinstance(value, ast.Constant)
                }
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                used |= {
                    one.value
                    for one in ast.walk(node.value)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value
                }
    assert used == set(REMEDIES)
