"""verify --rederive: compute an AImage again from its parent, as a statement says that it was made.

The plan is that of the verb that makes such an AImage. Its blobs are encoded again and compared, a
buffer at a time for conversions, a tensor at a time for fused adapters; none is stored. Nothing in
a statement is believed: it says what to compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clowder_aimage.adapt import Used, plan_combination, plan_fusion
from clowder_aimage.content import Lease, Source
from clowder_aimage.content.gate import unchecked
from clowder_aimage.content.verified_reader import verify
from clowder_aimage.create import plan_convert
from clowder_aimage.dialect import DEFAULT, DIALECTS, AImage
from clowder_aimage.errors import (
    AImageError,
    ContentError,
    FormatError,
    NoMemoryError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from clowder_aimage.formats import lora
from clowder_aimage.generation.request import LoraUse
from clowder_aimage.importer import CreatePlan
from clowder_aimage.importer.blob_comparison import (
    LayerDifference,
    OnCompared,
    find_blob_difference,
    find_structural_difference,
    list_computed,
)
from clowder_aimage.importer.enhancer_plan import plan_enhancer
from clowder_aimage.importer.stated_recipe import name_specification, restore_recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import lease_aimage, open_complete
from clowder_aimage.layout.stored_aimage import StoredAImage, lease_manifest, read_aimage
from clowder_aimage.model.adapter_source import (
    AdapterEntry,
    AdapterFinder,
    find_packed_adapter,
)
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.trust.lineage import (
    Derivation,
    Operation,
    UsedAdapter,
    list_statements,
    read_statement,
)

STORE, REGISTRY = "store", "registry"
# Chooses which of the computed layers are compared
Choose = Callable[[Sequence[str]], Collection[str]]


@dataclass(frozen=True, slots=True)
class RederiveOptions:
    """Options of a check.

    ``choose`` returns the names to compute of the layers that the recipe changes, without the files
    that it adds; None computes all. What needs no weights is compared of all layers. ``adapters``
    are found by their digests if the store lacks them. ``pull`` are the options with which a
    missing parent is pulled.
    """

    choose: Choose | None = None
    adapters: Sequence[AdapterEntry] = ()
    threads: int | None = None
    pull: PullOptions = field(default_factory=PullOptions)
    on_plan: Callable[[int], None] = lambda _: None  # bytes
    on_compared: OnCompared = lambda _: None


@dataclass(frozen=True, slots=True)
class RederivedStatement:
    """A statement and what came of it.

    ``place`` is where the parent was found: STORE or REGISTRY. ``compared`` are the layers that
    were computed. ``difference`` is None if all are as stated.
    """

    statement: Digest
    derivation: Derivation
    place: str
    compared: tuple[str, ...]
    difference: LayerDifference | None

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        value = {"statement": str(self.statement), **self.derivation.to_json()}
        value |= {"parent": str(self.derivation.parent), "parentFrom": self.place}
        value |= {"compared": [*self.compared], "isDerived": self.difference is None}
        return value | ({"difference": self.difference.to_json()} if self.difference else {})


@dataclass(frozen=True, slots=True)
class RederiveReport:
    """The results of all statements about a manifest.

    ``problems`` are the statements that cannot be computed, with the errors.
    """

    subject: Descriptor
    statements: tuple[RederivedStatement, ...]
    problems: tuple[tuple[Digest, AImageError], ...]

    @property
    def is_derived(self) -> bool:
        """Return True if there are statements, and each of them holds."""
        holds = all(result.difference is None for result in self.statements)
        return bool(self.statements) and holds and not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "digest": str(self.subject.digest),
            "isDerived": self.is_derived,
            "statements": [result.to_json() for result in self.statements],
            "problems": [
                {"statement": str(digest), "error": error.message}
                for digest, error in self.problems
            ],
        }


def rederive(
    layout: ImageLayout,
    reference: Reference,
    connection: ClientOptions | None,
    options: RederiveOptions,
) -> RederiveReport:
    """Compute the AImage ``reference`` of the store again, for each statement about it.

    Statements are those in the store or else, with a ``connection``, in its registry, where a
    missing parent is looked for, too.

    Raises:
        NotFoundError: It is not in the store.
        FormatError: It is not an AImage, or has too many statements.
        VerificationError: It has no statement.
        UsageError: A package is not installed.
        NoMemoryError: A tensor does not fit in memory.
        UnauthorizedError, NetworkError, RegistryError: The registry does not answer.
    """
    with layout.lease() as lease:
        # What is checked need not be trusted. Its parent is decided about as any AImage.
        with unchecked():
            lease_manifest(layout, reference, lease)
            stored = read_aimage(layout, reference)
        lease_aimage(stored, lease)
        registry = _find_registry(reference, connection)
        statements = _read_statements(layout, stored, registry)
        if not statements:
            raise VerificationError(
                f"no statement says from which AImage {reference} was made", remedy="rederive"
            )
        results, problems = list[RederivedStatement](), list[tuple[Digest, AImageError]]()
        for digest, derivation in statements:
            try:
                if isinstance(derivation, ContentError):
                    raise derivation
                check = _Check(layout, lease, stored, derivation, registry, options)
                results.append(check.run(digest))
            except (ContentError, NotFoundError) as error:
                # Of this machine, and not of the statement
                if isinstance(error, NoMemoryError) or error.remedy == "install_extra":
                    raise
                problems.append((digest, error))
    return RederiveReport(stored.descriptor, tuple(results), tuple(problems))


@dataclass(frozen=True, slots=True)
class _Registry:
    """The repository of an AImage: where its statements, and perhaps its parent, are."""

    reference: Reference
    connection: ClientOptions


def _find_registry(reference: Reference, connection: ClientOptions | None) -> _Registry | None:
    if connection is None:
        return None
    expanded = connection.expand(reference)
    return None if expanded.registry is None else _Registry(expanded, connection)


def _read_statements(
    layout: ImageLayout, stored: StoredAImage, registry: _Registry | None
) -> list[tuple[Digest, Derivation | ContentError]]:
    """Return the statements in the store or else in the registry; errors of malformed ones."""
    if found := _read_all_statements(layout, stored.descriptor.digest):
        return found
    if registry is None:
        return []
    with Repository(registry.reference, registry.connection) as repository:
        return _read_all_statements(repository, stored.descriptor.digest)


def _read_all_statements(
    source: Source, subject: Digest
) -> list[tuple[Digest, Derivation | ContentError]]:
    statements = list[tuple[Digest, Derivation | ContentError]]()
    for entry in list_statements(source, subject):
        try:
            statements.append((entry.digest, read_statement(source, entry, subject)))
        except NotFoundError:
            # Registries may list what was deleted
            continue
        except ContentError as error:
            statements.append((entry.digest, error))
    return statements


@dataclass(slots=True)
class _Check:
    """The check of one statement about the AImage ``stored``."""

    layout: ImageLayout
    lease: Lease
    stored: StoredAImage
    derivation: Derivation
    registry: _Registry | None
    options: RederiveOptions

    def run(self, statement: Digest) -> RederivedStatement:
        """Return the result. Raises NotFoundError, ContentError: it cannot be computed."""
        self._check_specification()
        parent, place = self._open_parent()
        plan, sources = self._plan(parent)
        computed = list_computed(plan.layers)
        if self.options.choose is not None:
            # A file that the recipe adds is small, and says nothing about the tensors.
            only = self.options.choose([planned.name for planned in computed if planned.chunks])
            computed = [each for each in computed if not each.chunks or each.name in only]
        difference = find_structural_difference(plan.layers, self.stored.aimage)
        if difference is None:
            self.options.on_plan(sum(planned.size for planned in computed))
            difference = find_blob_difference(
                computed,
                self.stored.aimage,
                self.layout,
                sources,
                threads=self.options.threads,
                on_compared=self.options.on_compared,
            )
        if difference is None:
            difference = self._find_other_difference(plan, parent)
        names = tuple(planned.name for planned in computed)
        return RederivedStatement(statement, self.derivation, place, names, difference)

    def _check_specification(self) -> None:
        derivation = self.derivation
        known = name_specification(derivation.recipe)
        if derivation.specification != known:
            raise FormatError(
                f"it was made by the specification {derivation.specification}, and this version "
                f"computes {known}: a few values would differ",
                hint=f"compute it by {derivation.tool}, or on the machine that made it",
            )

    def _open_parent(self) -> tuple[StoredAImage, str]:
        """Return the parent, complete and leased, and where it was found."""
        digest = self.derivation.parent
        if digest == self.stored.descriptor.digest:
            raise FormatError("it states that the AImage is its own parent")
        with contextlib.suppress(NotFoundError):
            return self._open(digest), STORE
        hint = "pull or create the parent, then try again"
        missing = NotFoundError(f"the parent {digest} is not complete in the store", hint=hint)
        if self.registry is None:
            raise missing
        reference = self.registry.reference.with_digest(digest)
        try:
            pull(reference, self.layout, self.registry.connection, self.options.pull)
        except NotFoundError:
            missing.message = (
                f"the parent {digest} is neither complete in the store, nor in {reference.name}"
            )
            raise missing from None
        return self._open(digest), REGISTRY

    def _open(self, digest: Digest) -> StoredAImage:
        """Return an AImage by its digest, complete and leased. Raises NotFoundError."""
        reference = Reference(None, "parent", None, digest)
        for name, entry in self.layout.iter_candidates(reference):
            # A policy judges it by its names.
            with contextlib.suppress(UsageError):
                if entry.digest == digest and name:
                    reference = replace(Reference.parse(name), digest=digest)
                    break
        return open_complete(self.layout, reference, self.lease)

    def _plan(self, parent: StoredAImage) -> tuple[CreatePlan, Mapping[str, Sequence[Descriptor]]]:
        """Return the plan of the verb, and the blobs that its layers are computed from."""
        recipe = self.derivation.recipe
        match recipe.operation:
            case Operation.FUSE:
                return self._plan_fusion(parent)
            case Operation.ADAPT:
                return plan_combination(parent, self._find_adapters()), {}
            case Operation.EXTRACT:
                weights = None if recipe.weights is None else self._open_other(recipe.weights)
                model = weights.aimage if weights else None
                label = str(self.derivation.parent)
                enhancer = plan_enhancer(self.layout, parent.aimage, label, model, label)
                return enhancer.plan, {}
        conversion = restore_recipe(recipe)
        conversion.check_tools()
        plan = plan_convert(
            self.layout,
            parent,
            conversion,
            is_attached=recipe.is_variant,
            threads=self.options.threads,
            checks_fit=self.options.choose is None,
        )
        return plan, {}

    def _plan_fusion(
        self, parent: StoredAImage
    ) -> tuple[CreatePlan, Mapping[str, Sequence[Descriptor]]]:
        recipe = self.derivation.recipe
        values = None if recipe.weights is None else self._open_other(recipe.weights)
        label = Reference(None, "parent", None, self.derivation.parent)
        fusion = plan_fusion(self.layout, parent, label, self._find_adapters(), values)
        sources: dict[str, list[Descriptor]] = {}
        for stored in filter(None, (parent, values)):
            for layer in stored.aimage.layers:
                sources.setdefault(layer.name, []).append(layer.descriptor)
        return fusion.plan, sources

    def _open_other(self, digest: Digest) -> StoredAImage:
        try:
            return self._open(digest)
        except NotFoundError:
            raise NotFoundError(
                f"the AImage {digest}, whose weights were used, is not complete in the store",
                hint="pull or create it, then try again",
            ) from None

    def _find_adapters(self) -> list[Used]:
        return [
            (self._find_adapter(used), used.strength) for used in self.derivation.recipe.adapters
        ]

    def _find_adapter(self, used: UsedAdapter) -> AdapterEntry:
        """Return an adapter by its digest: an explicit one, one of the store, or a packed file."""
        for entry in self.options.adapters:
            if entry.digest == used.digest:
                return replace(entry, name=used.name)
        finder = AdapterFinder(self.layout, self._open_adapter)
        with contextlib.suppress(NotFoundError):
            found = finder.find(LoraUse("adapter", digest=str(used.digest)))
            return replace(found, name=used.name)
        if (packed := self._find_packed(used)) is not None:
            return packed
        raise NotFoundError(
            f"the adapter {used.name[:200]} ({used.digest}) is not in the store",
            remedy="adapter_file",
        )

    def _open_adapter(self, reference: Reference) -> StoredAImage:
        stored = open_complete(self.layout, reference, self.lease)
        for layer in stored.aimage.layers:
            with self.layout.open(layer.descriptor) as file:
                verify(file, layer.descriptor)
        return stored

    def _find_packed(self, used: UsedAdapter) -> AdapterEntry | None:
        """Return an adapter that was a file, and is packed beside the model."""
        aimage = self.stored.aimage
        for layer in aimage.layers:
            if layer.descriptor.digest == used.digest and self.layout.exists(layer.descriptor):
                folder = layer.name.rpartition("/")[0]
                if (packed := find_packed_adapter(aimage, self.layout, folder)) is not None:
                    facts = lora.read_facts(packed.path)
                    return replace(packed, name=used.name, metadata=facts)
        return None

    def _find_other_difference(
        self, plan: CreatePlan, parent: StoredAImage
    ) -> LayerDifference | None:
        """Compare the config and the manifest, after all layers."""
        aimage = self.stored.aimage
        if plan.config != aimage.config:
            return LayerDifference("config", _compare_configs(plan.config, aimage.properties))
        is_extracted = self.derivation.recipe.operation is Operation.EXTRACT
        dialect = DIALECTS[DEFAULT] if is_extracted else parent.dialect
        manifest, _ = dialect.write(AImage(plan.config, aimage.layers, plan.subject))
        if manifest.digest != self.stored.descriptor.digest:
            return LayerDifference("manifest", "its annotations or its subject differ")
        return None


def _compare_configs(planned: bytes, actual: Mapping[str, Any]) -> str:
    """Return the first field that differs."""
    expected = AImage(planned, ()).properties
    for key in sorted(expected.keys() | actual.keys()):
        if expected.get(key) != actual.get(key):
            return f"its field {key[:100]!r} differs"
    return "its bytes differ"
