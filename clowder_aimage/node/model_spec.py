"""The specification of a model in the desired state (schemas/desired.schema.json)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.document import schema
from clowder_aimage.document.yaml import Path, format_position
from clowder_aimage.engine.admission import ALWAYS, FOR_EVER, IF_MISSING, NEVER
from clowder_aimage.engine.settings import parse_duration
from clowder_aimage.errors import AImageError, FormatError
from clowder_aimage.layout.layout import index_name
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.oci.reference import DEFAULT_TAG

HINT = "schemas/desired.schema.json defines the entries"
REFRESH = 300.0  # seconds
POLICIES = {"Never": NEVER, "IfNotPresent": IF_MISSING, "Always": ALWAYS}
POLICY_NAMES = {word: name for name, word in POLICIES.items()}
_WORDS = POLICIES | {word: word for word in POLICIES.values()}
_MIN_REFRESH = 1.0  # seconds
_MAX_REFRESH = 100 * 365 * 86400.0
# With the adapters of a model.
_SHARED = ("pullPolicy", "priority", "pin", "refresh")
# The first of them in the text is reported.
_MAX_VIOLATIONS = 20

PlacedSpec = tuple["ModelSpec", Callable[[], str]]
"""A spec, and a function that returns its position in the files."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that this node must have. Equality ignores ``origin``.

    ``reference`` includes the ``digest``, if any. ``policy`` is one of the engine's pull policies,
    by default as in Kubernetes. Models of higher ``priority`` are pulled first. ``components`` are
    sorted; none means all. ``refresh`` is in seconds, FOR_EVER for never. ``origin`` is the name
    of the file. Raises FormatError if there is no registry or the digest is not ``digest``.
    """

    reference: Reference
    digest: Digest | None = None
    policy: str = ""
    priority: int = 0
    pin: bool = False
    components: tuple[str, ...] = ()
    refresh: float = REFRESH
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        reference, digest = self.reference, self.digest or self.reference.digest
        if reference.registry is None:
            raise FormatError(f"cannot pull {reference}: the name has no registry")
        if reference.digest not in (None, digest):
            raise FormatError(f"the digest in {reference} is not {digest}")
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "reference", replace(reference, digest=digest))
        object.__setattr__(self, "policy", self.policy or choose_default_policy(self.reference))
        object.__setattr__(self, "components", tuple(sorted(set(self.components))))

    @property
    def name(self) -> str:
        """The reference as text, with its tag and digest if it has both."""
        return str(self.reference)

    @property
    def is_moving(self) -> bool:
        """Return True if the tag can move to another manifest."""
        return self.digest is None and self.refresh != FOR_EVER

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a file that specifies this model."""
        return {
            "ref": self.name,
            **({"digest": str(self.digest)} if self.digest else {}),
            "pullPolicy": POLICY_NAMES[self.policy],
            "priority": self.priority,
            "pin": self.pin,
            "components": list(self.components),
            "refresh": 0 if self.refresh == FOR_EVER else self.refresh,
        }


def choose_default_policy(reference: Reference) -> str:
    """Return the default policy of an entry (Kubernetes, "Default image pull policy")."""
    is_moving = reference.digest is None and reference.tag in (None, DEFAULT_TAG)
    return ALWAYS if is_moving else IF_MISSING


def parse_specs(document: object, origin: str = "") -> tuple[ModelSpec, ...]:
    """Return the distinct specs in a document; empty for None. Raises FormatError."""
    return deduplicate(iter_specs(document, origin, origin, lambda _: 0))


def iter_specs(
    document: object, origin: str, file: str, line: Callable[[Path], int]
) -> Iterator[PlacedSpec]:
    """Yield the specs in a document (schemas/desired.schema.json). Raises FormatError.

    ``line`` returns the line of a value, 0 if unknown; ``file`` is the name used in messages.
    """
    entry_list = [] if document is None else document
    violations = [
        (line(violation.path) or line(violation.path[:1]), violation.path, violation.message)
        for violation in islice(schema.iter_violations("desired", entry_list), _MAX_VIOLATIONS)
    ]
    if violations or not isinstance(entry_list, list):
        at, path, message = min(violations, key=lambda violation: violation[0])
        raise FormatError(
            f"{format_position(file, at)}: {_describe_path(path)}{message}", hint=HINT
        )
    for number, entry in enumerate(entry_list):
        try:
            specs = [
                _parse_spec(violation, origin) for violation in (entry, *_iter_adapters(entry))
            ]
        except AImageError as error:
            raise FormatError(
                f"{format_position(file, line((number,)))}: "
                f"{_describe_path((number,))}{error.message}",
                hint=error.hint or HINT,
            ) from None
        for spec in specs:
            yield spec, partial(lambda number: format_position(origin, line((number,))), number)


def deduplicate(specs: Iterable[PlacedSpec]) -> tuple[ModelSpec, ...]:
    """Return the distinct specs, one for each name in the store (``index_name``).

    Raises FormatError with both positions if two specs of one model differ.
    """
    by_name: dict[str, PlacedSpec] = {}
    for spec, locate in specs:
        name = index_name(spec.reference)
        earlier, locate_earlier = by_name.setdefault(name, (spec, locate))
        if earlier != spec:
            raise FormatError(
                f"conflicting entries for {name} in {locate_earlier()} and in {locate()}: "
                + _describe_difference(earlier, spec),
                hint="remove one of them, or make them equal",
            )
    return tuple(spec for spec, _ in by_name.values())


def _describe_path(path: Path) -> str:
    """Return the entry that a path points into, and the part of it, for messages."""
    if not path:
        return ""
    inner = "/".join(str(key + 1 if isinstance(key, int) else key) for key in path[1:])[:100]
    shown = f", {inner if inner.isprintable() else ascii(inner)}" if inner else ""
    return f"entry {int(path[0]) + 1}{shown}: "


def _iter_adapters(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a model's adapters, with the properties that they share with it."""
    shared = {key: entry[key] for key in _SHARED if key in entry}
    for text in entry.get("loras", ()):
        yield {"ref": text, **shared}


def _parse_spec(entry: dict[str, Any], origin: str) -> ModelSpec:
    """Return the spec of a schema-valid entry. Raises FormatError or UsageError."""
    text, digest = entry["ref"], entry.get("digest")
    if digest is not None and "@" not in text:
        # Without a tag, so that no default tag is added.
        text = f"{text}@{digest}"
    return ModelSpec(
        reference=Reference.parse(text),
        digest=None if digest is None else Digest.parse(digest),
        policy=_WORDS.get(entry.get("pullPolicy", ""), ""),
        priority=entry.get("priority", 0),
        pin=entry.get("pin", False),
        components=tuple(map(check_name, entry.get("components", ()))),
        refresh=_refresh(entry.get("refresh", REFRESH)),
        origin=origin,
    )


def _refresh(value: object) -> float:
    try:
        seconds = parse_duration(value)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"refresh: {error}") from None
    if seconds == 0 or seconds > _MAX_REFRESH:
        return FOR_EVER
    if seconds < _MIN_REFRESH:
        raise FormatError(f"refresh: {value!r} is less than 1 second; 0 disables it")
    return seconds


def _describe_difference(spec: ModelSpec, other_spec: ModelSpec) -> str:
    """Return the first different key of two specs, with both values."""
    entry, other_entry = (
        {"digest": None} | compared.to_json() | {"ref": ""} for compared in (spec, other_spec)
    )
    key = next(key for key in entry if entry[key] != other_entry[key])
    return f"{key} is {json.dumps(entry[key])} and {json.dumps(other_entry[key])}"
