"""The stores of this user: their content, access, file system and free space."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.cli.console.output import format_count, format_size
from clowder_aimage.cli.console.remedy import REMEDIES
from clowder_aimage.cli.console.store_limit import WORDS, describe
from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck
from clowder_aimage.content.file_system import (
    Limit,
    Space,
    collect_limits,
    find_existing,
    measure_space,
)
from clowder_aimage.content.mount import Mount, find_mount
from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_completeness, is_partial, suggest_completion
from clowder_aimage.layout.limit import find_limits
from clowder_aimage.layout.lock import VERSION
from clowder_aimage.oci import Descriptor, Reference

# Bytes: most models are larger, and nothing can be pulled.
_LITTLE, _NONE = 5 * 10**9, 10**8
# Incomplete names that are shown.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The facts of the file system of a store; ``limits`` is None if they cannot be tried."""

    mount: Mount
    limits: set[Limit] | None
    space: Space | None
    is_writable: bool

    @classmethod
    def inspect(cls, root: Path) -> FileSystem:
        """Return the facts of the file system of a store, which need not exist."""
        with collect_limits():
            space = measure_space(root)
        is_writable = os.access(find_existing(root), os.W_OK | os.X_OK)
        return cls(find_mount(root), find_limits(root), space, is_writable)


@dataclass(frozen=True, slots=True)
class StoreCheck(MachineCheck):
    """``list_stores`` may raise UsageError: this user has none."""

    name = "store"
    list_stores: Callable[[], Sequence[Path]]
    inspect: Callable[[Path], FileSystem] = field(default=FileSystem.inspect)

    def run(self) -> Iterator[Finding]:
        for number, root in enumerate(self.list_stores()):
            system = self.inspect(root)
            yield from _judge_content(root, system, is_written=number == 0)
            yield from _judge_file_system(root, system)
            if number == 0:
                yield _judge_space(root, system.space)


def _judge_content(root: Path, system: FileSystem, *, is_written: bool) -> Iterator[Finding]:
    facts: dict[str, Any] = {"store": str(root), "writable": system.is_writable}
    if not os.path.lexists(root):
        if system.is_writable:
            yield Finding(Level.OK, f"{root} does not exist yet", facts=facts)
        else:
            message = f"{root} does not exist and cannot be created"
            yield Finding(Level.ERROR, message, REMEDIES["store_permissions"], facts)
        return
    layout = ImageLayout(root)
    names = list(layout.list_tags())
    facts |= {"version": VERSION, "names": len(names)}
    access = "writable" if system.is_writable else "read-only"
    message = f"{root}: {access}, version {VERSION}, {format_count(len(names), 'name')}"
    if system.is_writable or not is_written:
        yield Finding(Level.OK, message, facts=facts)
    else:
        advice = f"nothing can be pulled into it; {REMEDIES['store_permissions']}"
        yield Finding(Level.WARNING, message, advice, facts)
    yield from _judge_names(layout, names)


def _judge_names(layout: ImageLayout, names: list[tuple[str, Descriptor]]) -> Iterator[Finding]:
    incomplete, partial = list[tuple[str, Descriptor]](), list[str]()
    for name, descriptor in names:
        try:
            if check_completeness(layout, descriptor).is_complete:
                continue
        except AImageError as error:
            yield Finding.of_error(error, "aimage verify --repair")
            continue
        if is_partial(layout, descriptor):
            partial.append(name)
        else:
            incomplete.append((name, descriptor))
    if partial:
        message = f"{format_count(len(partial), 'name')} pulled in part, as requested"
        yield Finding(Level.OK, message, facts={"partial": partial})
    for name, descriptor in incomplete[:_SHOWN]:
        reference = Reference.parse(name)
        advice = suggest_completion(layout, reference, descriptor)
        text = REMEDIES["repair_or_remove"].format(reference=name)
        if "remedy" in advice:
            text = REMEDIES[advice["remedy"]].format_map(advice)
        yield Finding(Level.WARNING, f"{name} is incomplete", text, {"incomplete": name})
    if left := [name for name, _ in incomplete[_SHOWN:]]:
        message = f"{format_count(len(left), 'more name')} incomplete"
        yield Finding(Level.WARNING, message, "aimage verify --repair", {"incomplete": left})


def _judge_file_system(root: Path, system: FileSystem) -> Iterator[Finding]:
    mount = system.mount
    kind = (mount.type or "unknown") + (", of a network" if mount.is_network else "")
    limits = {limit for limit in system.limits or () if limit in WORDS}
    facts: dict[str, Any] = {"store": str(root), "type": mount.type or None}
    facts["network"] = mount.is_network
    facts["limits"] = None if system.limits is None else sorted(system.limits)
    message = f"file system: {kind}"
    if not limits:
        yield Finding(Level.OK, message, facts=facts)
        return
    advice = "aimage df" if Limit.HOST_LOCKS not in limits else REMEDIES["single_writer"]
    yield Finding(Level.WARNING, f"{message}, {describe(limits)}", advice, facts)


def _judge_space(root: Path, space: Space | None) -> Finding:
    if space is None:
        return Finding(Level.OK, "free space: unknown", facts={"free": None})
    message = f"free space: {format_size(space.free)} of {format_size(space.total)}"
    facts = {"store": str(root), "free": space.free, "total": space.total}
    advice = "aimage gc --dry-run, or choose another disk with --store"
    if space.free < _NONE:
        return Finding(Level.ERROR, f"{message}: the disk is full", advice, facts)
    if space.free < _LITTLE:
        return Finding(Level.WARNING, f"{message}: too little for most models", advice, facts)
    return Finding(Level.OK, message, facts=facts)
