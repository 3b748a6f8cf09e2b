"""Files are created, linked and renamed by one module, and by the exceptions named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import clowder_aimage

ROOT = Path(clowder_aimage.__file__).parent
# Calls that create a file or change a name, by a path that may lead elsewhere meanwhile
OS = {"link", "symlink", "rename", "renames", "replace", "mkfifo", "mknod", "truncate"}
FLAGS = {"O_CREAT", "O_TRUNC"}
SHUTIL = {"copy", "copy2", "copyfile", "copytree", "move", "rmtree", "unpack_archive"}
METHODS = {"write_text", "write_bytes", "symlink_to", "hardlink_to", "touch", "extractall"}
TEMPORARY = {"mkdtemp", "mkstemp", "mktemp", "TemporaryDirectory", "NamedTemporaryFile"}
CALLS = OS | SHUTIL | METHODS | TEMPORARY | {"open", "FileIO"}
# Modules, and why they may
EXCEPTIONS = {
    "content/open_directory.py": "the module that does it",
    "content/file_system.py": "O_CREAT with O_EXCL: an empty file, to test locks",
    "layout/lock.py": "O_CREAT with O_NOFOLLOW, in .aimage of a store, which only its users write",
    "layout/ingest_directory.py": "O_CREAT with O_EXCL, there",
    "layout/shared_ingest.py": "O_CREAT with O_EXCL, there",
    "layout/ingest.py": "O_CREAT with O_EXCL or O_NOFOLLOW, there; renames by rename_opened",
    "model/llama/gguf_layers.py": "links in a new directory of mode 0700, removed after the load",
    "model/llama/temporary_directory.py": "a new directory of mode 0700, removed with its context",
    "model/llama/server.py": "a log and a socket in a new directory of mode 0700, removed",
    "cli/verbs/batch.py": "adds lines to the file of results, which the user names",
    "cli/verbs/registry.py": "a new directory of mode 0700 for metrics, removed at the end",
    "cli/verbs/serve.py": "mkdtemp: creates an empty directory and removes it",
}


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines of calls that create files or change names, with the calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FLAGS:
            yield node.lineno, node.attr
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in _hidden(node))
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ""
        # Writing the source of every call again would take most of the time
        if (name or getattr(function, "id", "")) not in CALLS:
            continue
        of = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        plain = ast.unparse(function)
        if (
            (of == "os" and name in OS)
            or (of == "shutil" and name in SHUTIL)
            or name in METHODS
            or (name or plain) in TEMPORARY
        ):
            yield node.lineno, plain
        elif name in ("rename", "replace") and len(node.args) == 1 and not node.keywords:
            if not of.endswith(("progress", "bar")):
                yield node.lineno, plain  # of a Path; str.replace has two arguments
        elif _opens(node, plain, name, of):
            yield node.lineno, plain


def _opens(node: ast.Call, plain: str, name: str, of: str) -> bool:
    """Return whether the call opens a file for writing."""
    if plain == "os.open":  # a file that a link leads to
        text = ast.unparse(node)
        is_safe = any(word in text for word in ("O_NOFOLLOW", "os.devnull", "'/dev/tty'"))
        return ("O_WRONLY" in text or "O_RDWR" in text) and not is_safe
    if plain not in ("open", "io.open", "io.FileIO", "FileIO") and name != "open":
        return False
    mode = node.args[0 if name == "open" and of != "io" else 1 : 2]
    mode += [word.value for word in node.keywords if word.arg == "mode"]
    is_writing = any(isinstance(x, ast.Constant) and _writes(x.value) for x in mode)
    return is_writing and "devnull" not in ast.unparse(node)


def _hidden(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the imports under which a call would not be seen by its name."""
    for one in node.names:
        module = getattr(node, "module", None)
        known = {"os": OS | FLAGS | {"open"}, "shutil": SHUTIL}
        known |= {"io": {"open", "FileIO"}, "tarfile": {"open"}, "tempfile": TEMPORARY}
        names = known.get(module or "", set())
        if (module is None and one.name in known and one.asname) or one.name in names:
            yield f"import {one.name}"


def _writes(mode: object) -> bool:
    return isinstance(mode, str) and len(mode) < 5 and not {*"wxa+"}.isdisjoint(mode)


def test_only_one_module_writes_files() -> None:
    found = [
        f"{name}:{line}: {call}; use content/open_directory.py or content/atomic_file.py"
        for path in sorted(ROOT.rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in EXCEPTIONS
        for line, call in writes(ast.parse(path.read_bytes()))
    ]
    assert found == []


def test_the_exceptions_are_needed() -> None:
    assert [x for x in EXCEPTIONS if not [*writes(ast.parse((ROOT / x).read_bytes()))]] == []


def test_each_way_to_write_is_found() -> None:
    source = """
open(p, "w"); open(p, mode="xb"); p.open("a"); p.write_text("x"); p.write_bytes(b""); p.touch()
os.link(a, b); os.symlink(a, b); os.rename(a, b); os.replace(a, b); p.rename(q); p.replace(q)
os.open(p, os.O_CREAT); shutil.copy(a, b); shutil.move(a, b); shutil.rmtree(a); io.FileIO(p, "r+")
tempfile.mkdtemp(); TemporaryDirectory()
import os as o; import shutil as s; from os import link; from shutil import copy as c
import tempfile as t; from io import FileIO as F; tarfile.open(p, "w"); os.open(p, os.O_RDWR)
open(p); open(p, "rb"); p.open(); p.open("rb"); "a".replace("b", "c"); os.open(p, os.O_RDONLY)
"""
    lines = [line for line, _ in writes(ast.parse(source))]
    assert [lines.count(n) for n in range(2, 9)] == [6, 6, 5, 2, 4, 4, 0]
