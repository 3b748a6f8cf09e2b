"""verify: check every byte of a layout against its digest, and repair it from registries."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from clowder_aimage.content import Rate, copy, plan_copy
from clowder_aimage.content.open_directory import move
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.fsck import Fsck, FsckProblem, FsckReport
from clowder_aimage.layout.lock import translate_store_errors
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository

_REPAIRED = ("damaged", "missing")


def verify(
    layout: ImageLayout,
    references: Sequence[Reference] = (),
    *,
    on_plan: Callable[[int], None] = lambda _: None,
    on_read: Callable[[int], None] = lambda _: None,
) -> FsckReport:
    """Check the content of ``references``, or the whole layout. Raises NotFoundError."""
    if references:
        roots = [(str(reference), layout.resolve(reference)) for reference in references]
    else:
        roots = [(name or str(root.digest), root) for name, root in layout.iter_entries()]
    with layout.lease() as lease:
        check = Fsck(layout, roots, lease, on_plan=on_plan, on_read=on_read)
        report = check.run(loose=not references)
    if not references:
        report.problems += [
            FsckProblem("document", f"index.json, entry {position}", message)
            for position, message in layout.iter_malformed()
        ]
        report.problems = _drop_removed(layout, roots, report.problems)
    return report


def _drop_removed(
    layout: ImageLayout, roots: Sequence[tuple[str, Descriptor]], problems: list[FsckProblem]
) -> list[FsckProblem]:
    """Drop problems of names that were removed during the check."""
    if not any(problem.kind == "missing" for problem in problems):
        return problems
    current = {(name or str(root.digest), root.digest) for name, root in layout.iter_entries()}
    removed = {name for name, root in roots if (name, root.digest) not in current}
    return [p for p in problems if p.kind != "missing" or not set(p.names) <= removed]


def repair(
    layout: ImageLayout, report: FsckReport, connection: ClientOptions
) -> list[tuple[FsckProblem, AImageError | None]]:
    """Fetch damaged and missing blobs again, from the registries in the names that need them.

    Write permissions of blobs are removed. A damaged blob is moved aside, and restored if an intact
    one cannot be fetched. A blob that no name needs is removed.

    Returns:
        Each such problem, and the error if it could not be repaired, else None.
    """
    problems = [problem for problem in report.problems if problem.kind in _REPAIRED]
    for path in report.writable:
        # The mode of another user's file cannot be set.
        with contextlib.suppress(OSError):
            path.chmod(path.stat().st_mode & 0o444)
    aside: dict[FsckProblem, Path] = {}
    failed: dict[str, AImageError] = {}
    try:
        for problem in problems:
            # A blob of the right size counts as stored, and would not be fetched again.
            if problem.kind == "damaged":
                aside[problem] = _move_aside(layout, problem)
        for name in sorted({name for problem in problems for name in problem.names}):
            digests = {Digest.parse(problem.what) for problem in problems if name in problem.names}
            try:
                _fetch(layout, name, connection, digests)
            except AImageError as error:
                failed[name] = error
    finally:
        outcome = [(problem, _find_error(layout, problem, failed)) for problem in problems]
        for problem, failure in outcome:
            with translate_store_errors(layout.root):
                if problem in aside and failure is None:
                    aside[problem].unlink(missing_ok=True)
                elif problem in aside and aside[problem].exists():
                    move(aside[problem], _build_path(layout, problem))
    return outcome


def _build_path(layout: ImageLayout, problem: FsckProblem) -> Path:
    digest = Digest.parse(problem.what)
    return Path(layout.root, "blobs", digest.algorithm, digest.encoded)


def _move_aside(layout: ImageLayout, problem: FsckProblem) -> Path:
    path = _build_path(layout, problem)
    aside = layout.root / ".aimage" / f"damaged.{path.name}.{secrets.token_hex(8)}"
    with translate_store_errors(layout.root):
        aside.parent.mkdir(exist_ok=True)
        # The blob of a read-only store is not moved.
        with contextlib.suppress(FileNotFoundError):
            move(path, aside)
    return aside


def _fetch(
    layout: ImageLayout, name: str, connection: ClientOptions, digests: Collection[Digest]
) -> None:
    """Fetch blobs of the stored manifest of a name; a partial AImage stays partial."""
    reference = Reference.parse(name)
    if reference.registry is None:
        message = f"{name} has no registry host to fetch it from"
        raise NotFoundError(message, hint="create or pull it again")
    pinned = replace(reference, digest=layout.resolve(reference).digest)
    limit = connection.limit(reference.registry)
    with Repository(pinned, connection) as source:
        copy(
            source,
            pinned,
            layout,
            concurrency=connection.compute_connections(reference.registry),
            rate=Rate(limit) if limit else None,
            is_named=False,
            # The plan is of the whole index: the blob may belong to any of its manifests.
            plan=plan_copy(source, source.resolve(pinned)).select(digests),
        )


def _find_error(
    layout: ImageLayout, problem: FsckProblem, failed: dict[str, AImageError]
) -> AImageError | None:
    if _build_path(layout, problem).is_file() or not problem.names:
        # Repaired, or not needed by a name: then the damaged file is removed.
        return None
    errors = (failed[name] for name in problem.names if name in failed)
    return next(errors, NotFoundError(f"cannot fetch {problem.what}"))
