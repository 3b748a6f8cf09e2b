"""Run a sample of mutants of a package against its tests: ``python -m tests.mutation``.

Each mutant is one change of the syntax tree (a comparison, an operator, a constant, a condition, a
returned value) in a copy of the checkout. A suite kills a mutant if it fails on it. The same
seed draws the same locations in the same source.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.process import run

ROOT = Path(__file__).parent.parent
TIMEOUT = 120  # timeout in seconds of one mutant's tests; a mutant that hangs counts as killed
COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


def sites(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the number of each node that can be changed, in walking order, and the change."""
    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield number, "comparison"
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            yield number, "operator"
        elif isinstance(node, ast.BoolOp):
            yield number, "and/or"
        elif isinstance(node, ast.If | ast.IfExp):
            yield number, "condition"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield number, "constant"


def mutate(tree: ast.Module, number: int) -> tuple[str, int]:
    """Change node ``number`` of the tree in place; return the changed source and its line."""
    node = list(ast.walk(tree))[number]
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = COMPUTED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant):
        node.value += 1  # type: ignore[operator]
    return ast.unparse(ast.fix_missing_locations(tree)), getattr(node, "lineno", 0)


def draw(package: Path, count: int, seed: int) -> list[tuple[Path, int, str]]:
    """Return a sample of locations: file, node number, kind of change."""
    found = [
        (path, number, kind)
        for path in sorted(package.rglob("*.py"))
        for number, kind in sites(ast.parse(path.read_text("utf-8")))
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def is_killed(checkout: Path, tests: list[str]) -> bool:
    """Return whether the tests fail on the checkout."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = run(
            [*command, "-m", "not integration and not slow", *tests],
            cwd=checkout,
            timeout=TIMEOUT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    """Print each surviving mutant and the number of those killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a package below clowder_aimage, such as tensor")
    parser.add_argument("tests", nargs="+", help="files or folders of tests")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory) / "checkout"
        shutil.copytree(
            ROOT, checkout, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
        )
        if is_killed(checkout, options.tests):
            sys.exit("the tests fail without a mutant")
        package = checkout / "clowder_aimage" / options.package
        sample = draw(package, options.count, options.seed)
        killed = 0
        for path, number, kind in sample:
            source = path.read_text("utf-8")
            changed, line = mutate(copy.deepcopy(ast.parse(source)), number)
            path.write_text(changed, "utf-8")
            if is_killed(checkout, options.tests):
                killed += 1
            else:
                print(f"survived: {path.relative_to(checkout)}:{line} ({kind})", flush=True)
            path.write_text(source, "utf-8")
    print(f"{options.package}: {killed} of {len(sample)} mutants killed")


if __name__ == "__main__":
    main()
