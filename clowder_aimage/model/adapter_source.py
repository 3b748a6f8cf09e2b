"""Adapters and control networks of requests: read from the store or from a directory."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect.aimage import AImage, Layer, check_name
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
    VerificationError,
)
from clowder_aimage.formats import controlnet, lora
from clowder_aimage.generation.request import MAX_STRENGTH, Adapters, GenerateRequest, LoraUse
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.lora_text import list_missing_words
from clowder_aimage.model.pipeline import StoredControlNet
from clowder_aimage.oci import Digest, Reference, read_json

# A worker without numpy stores models, so these are not imported at run time
if TYPE_CHECKING:
    from clowder_aimage.adapter.adapter import Adapter
    from clowder_aimage.adapter.loaded_adapter import AdapterCache, LoadedAdapter

SUFFIX = ".safetensors"
# Bytes of loaded adapters that stay in memory
MEMORY = 2 << 30
PICKLED = (".pt", ".pth", ".ckpt", ".bin")
# Adapters that are packed with a model have names in this directory
OWN = "adapters/"
_CONFIG = "adapter_config.json"
_WEIGHTS = f"adapter_model{SUFFIX}"
_MAX_CONFIG = 1 << 20  # bytes
# Longer lists are words of the training, not triggers
_MAX_WORDS = 8
# Files of a directory
_MAX_LISTED = 1000

OpenStored = Callable[[Reference], StoredAImage]


ReadConfig = Callable[[], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter: the file of its weights, its metadata (of its AImage's config), peft's config.

    ``name`` is recorded in pictures, ``digest`` that of the manifest, or of a file.
    """

    name: str
    digest: Digest
    path: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)
    read_config: ReadConfig = lambda: None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Return the content of ``adapter_config.json``, or None. Raises FormatError."""
        return self.read_config()

    @property
    def words(self) -> tuple[str, ...]:
        """Return the trigger words."""
        listed = self.metadata.get("triggerWords")
        return tuple(map(str, listed[:_MAX_WORDS])) if isinstance(listed, list) else ()

    def resolve_strength(self, requested: float | None) -> float:
        """Return the requested strength, else the recommended one, else 1."""
        recommended = self.metadata.get("weight")
        if not isinstance(recommended, int | float) or abs(recommended) > MAX_STRENGTH:
            recommended = 1.0
        return float(recommended) if requested is None else requested

    def use(self, strength: float | None) -> LoraUse:
        """Return a use of the adapter; None selects the recommended strength."""
        return LoraUse(self.name, self.resolve_strength(strength), str(self.digest))


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A file in a directory of adapters: its name, time of change (seconds), and metadata."""

    name: str
    changed: float
    metadata: Mapping[str, Any]
    path: Path


def is_adapter(aimage: AImage) -> bool:
    """Return True if an AImage is an adapter."""
    return aimage.properties.get("format") == "lora"


def is_path(text: str) -> bool:
    """Return True if the beginning or the end of a text shows that it is a path."""
    has_directory = text.startswith(("/", "./", "../", "~"))
    return has_directory or text.endswith((SUFFIX, *PICKLED)) or os.path.isfile(text)  # noqa: PTH113


def find_in_directory(directory: Path, name: str) -> Path | None:
    """Return a file of a directory; None if it is missing or a link leads outside."""
    try:
        check_name(name)
        root = directory.resolve()
        path = (root / f"{name.removesuffix(SUFFIX)}{SUFFIX}").resolve()
        is_inside = path.is_relative_to(root) and stat.S_ISREG(path.stat().st_mode)
    except (FormatError, OSError, RuntimeError, ValueError):
        # A loop of links, or a long name
        return None
    return path if is_inside else None


@dataclass(slots=True)
class AdapterFinder:
    """Adapters by name: files, if ``has_files``; a ``directory`` of files; AImages.

    ``open_stored`` returns an AImage that is complete in ``store``, and may pull it. A digest of a
    file is computed once, until the file changes. A use may name a file without its directory.
    """

    store: BlobFiles
    open_stored: OpenStored
    directory: Path | None = None
    has_files: bool = False
    _digests: dict[tuple[Path, int, int, int], Digest] = field(default_factory=dict)
    _paths: dict[tuple[str, str | None], Path] = field(default_factory=dict)
    _facts: dict[tuple[Path, float], Mapping[str, Any]] = field(default_factory=dict)

    def find(self, use: LoraUse) -> AdapterEntry:
        """Return the adapter of a use.

        Raises:
            NotFoundError: There is none with this name.
            UsageError: The name is invalid, or that of another kind of AImage.
            VerificationError: The file is not the one with the digest of the use.
            FormatError: Its metadata or its config is invalid.
        """
        # A recorded name has no directory: the path of an earlier use completes it
        path = self._paths.get((use.model, use.digest)) or self._find_path(use.model)
        if path is None:
            return self._open_stored(use)
        adapter = self._read_file(path, self._name(use.model, path))
        self._paths[adapter.name, str(adapter.digest)] = path
        if use.digest not in (None, str(adapter.digest)):
            raise VerificationError(
                f"{use.model} is not the adapter that was used: its digest is {adapter.digest}, "
                f"not {use.digest}"
            )
        return adapter

    def find_all(self, request: GenerateRequest, base: AImage | None = None) -> list[AdapterEntry]:
        """Return the adapters of a request, including adapters that are packed with the model.

        Raises as ``find``; an error has the index of its adapter as a fact.
        """

        def find(use: LoraUse) -> AdapterEntry:
            packed = find_packed_adapter(base, self.store, use.model) if base is not None else None
            return packed or self.find(use)

        return list(_act_on_each(request.adapters.loras, find))

    def fetch(self, request: GenerateRequest) -> None:
        """Find the adapters and ControlNet of a request. Raises as ``find``, ``find_control``."""
        for use in request.adapters.loras:
            if not use.model.startswith(OWN):
                self.find(use)
        if request.control.network is not None:
            find_control(request.control.network, self.open_stored)

    def resolve(
        self, request: GenerateRequest, base: AImage, files: BlobFiles, *, adds_words: bool = False
    ) -> tuple[GenerateRequest, Sequence[str]]:
        """Return a request with the digests and strengths of its adapters, and the words it lacks.

        These are trigger words of its adapters, and of those that the model (``base``, ``files``)
        has for all requests; they are added to the prompt with ``adds_words``. Raises as
        ``find_all``, ``list_packed_adapters``.
        """
        adapters = self.find_all(request, base)
        uses = zip(adapters, request.adapters.loras, strict=True)
        resolved = Adapters(tuple(adapter.use(use.strength) for adapter, use in uses))
        packed = (adapter for adapter, _ in list_packed_adapters(files, base))
        triggers = [word for adapter in (*packed, *adapters) for word in adapter.words]
        words, prompt = list_missing_words(request.prompt, triggers), request.prompt
        if adds_words:
            words, prompt = [], ", ".join(filter(None, [prompt, *words]))
        return replace(request, prompt=prompt, adapters=resolved), words

    def is_file(self, name: str) -> bool:
        """Return True if a name is that of a file."""
        return self._find_path(name) is not None

    def list_files(self) -> list[AdapterFile]:
        """Return the adapters in the directory, by name."""
        readable = (self.find_file(name) for name in self._list_names())
        return [file for file in readable if file is not None]

    def find_file(self, name: str) -> AdapterFile | None:
        """Return a file in the directory; None if there is none, or its header is damaged."""
        if (path := self._find_in_directory(name)) is None:
            return None
        try:
            changed = path.stat().st_mtime
            key = path, changed
            if key not in self._facts:
                self._facts[key] = lora.read_facts(path)
        except (OSError, AImageError):
            return None
        return AdapterFile(name, changed, self._facts[key], path)

    def _list_names(self) -> list[str]:
        """Return at most 1,000 names in the directory; links to directories are left out."""
        if self.directory is None:
            return []
        names = list[str]()
        for folder, folders, files in os.walk(self.directory):
            folders.sort()
            base = Path(folder).relative_to(self.directory)
            names += [
                (base / name).as_posix().removesuffix(SUFFIX)
                for name in sorted(files)
                if name.endswith(SUFFIX)
            ]
            if len(names) >= _MAX_LISTED:
                break
        return sorted(names[:_MAX_LISTED])

    def _find_path(self, name: str) -> Path | None:
        if (in_directory := self._find_in_directory(name)) is not None:
            return in_directory
        path = os.path.expanduser(name)  # noqa: PTH111 - pathlib's raises for unknown users
        within = os.path.join(path, _WEIGHTS)  # noqa: PTH118
        path = within if os.path.isfile(within) else path  # noqa: PTH113
        if not self.has_files or not (is_path(name) or name.endswith("/")):
            return None
        if path.endswith(PICKLED):
            message = f"{name} may contain code (pickle), which is not run"
            raise UsageError(message, hint="convert the adapter to safetensors")
        if not os.path.isfile(path):  # noqa: PTH113 - pathlib's raises for a long name
            raise NotFoundError(f"adapter not found: there is no file {name[:1000]}")
        return Path(path)

    def _find_in_directory(self, name: str) -> Path | None:
        return None if self.directory is None else find_in_directory(self.directory, name)

    def _name(self, text: str, path: Path) -> str:
        """Return the recorded name of a file: without directories of this machine."""
        stated = Path(text)
        is_local = stated.is_absolute() or text.startswith("~") or ".." in stated.parts
        return path.name if is_local else text

    def _read_file(self, path: Path, name: str) -> AdapterEntry:
        try:
            file = path.stat()
            key = path, file.st_ino, file.st_size, file.st_mtime_ns
            if key not in self._digests:
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                self._digests[key] = Digest("sha256", digest)
        except OSError as error:
            raise StoreError(f"cannot read {name}: {error.strerror or error}") from None
        try:
            facts = lora.read_facts(path)
        except FormatError as error:
            # Callers of a worker must not see the path
            error.message = error.message.replace(str(path), name)
            raise
        beside = path.with_name(_CONFIG)
        is_peft = path.name == _WEIGHTS and beside.is_file()
        read = partial(_read_beside, beside, name) if is_peft else None
        return _make_adapter(name, self._digests[key], path, facts, read)

    def _open_stored(self, use: LoraUse) -> AdapterEntry:
        try:
            reference = Reference.parse(use.model)
        except UsageError as error:
            message = f"adapter {use.model[:200]!r} not found{self._describe_other_places()}"
            raise NotFoundError(message, hint=error.message) from None
        if use.digest is not None:
            reference = replace(reference, tag=None, digest=Digest.parse(use.digest))
        try:
            stored = self.open_stored(reference)
        except NotFoundError as error:
            error.message = f"adapter {error.message}{self._describe_other_places()}"
            if reference.tag and reference.tag.isdecimal():
                error.hint = f"{reference.tag} is a tag here; a strength has a point: {use.model}.0"
                error.remedy = ""
            raise
        return self._of(stored, use.model)

    def _describe_other_places(self) -> str:
        places = ["a file"] if self.has_files else []
        places += ["in the directory of adapters"] if self.directory else []
        return f"; it is not {' or '.join(places)} either" if places else ""

    def _of(self, stored: StoredAImage, name: str) -> AdapterEntry:
        aimage = stored.aimage
        layers = [layer for layer in aimage.layers if layer.name.endswith(SUFFIX)]
        if not is_adapter(aimage) or len(layers) != 1:
            kind = aimage.properties.get("format") or aimage.properties.get("pipeline")
            about = f" ({str(kind)[:60]})" if kind else ""
            raise UsageError(f"{name} is not an adapter, but another AImage{about}")
        path = self.store.find_path(layers[0].descriptor)
        facts = aimage.properties.get("adapter")
        read = _build_reader(self.store, aimage.find(_CONFIG))
        return _make_adapter(name, stored.descriptor.digest, path, facts, read)


def find_packed_adapter(base: AImage, files: BlobFiles, name: str) -> AdapterEntry | None:
    """Return the adapter ``adapters/NAME`` that was packed with a model; None for another name."""
    if not name.startswith(OWN):
        return None
    weights = [
        layer
        for layer in base.list_layers(OWN.removesuffix("/"))
        if layer.name.startswith(f"{name}/") and layer.name.endswith(SUFFIX)
    ]
    if len(weights) != 1:
        return None
    (layer,) = weights
    facts_by_name = base.properties.get("adapters")
    facts = facts_by_name.get(name.removeprefix(OWN)) if isinstance(facts_by_name, dict) else None
    read = _build_reader(files, base.find(f"{name}/{_CONFIG}"))
    return _make_adapter(
        name, layer.descriptor.digest, files.find_path(layer.descriptor), facts, read
    )


def list_packed_adapters(files: BlobFiles, base: AImage) -> list[tuple[AdapterEntry, float]]:
    """Return the adapters that are packed with a model for all requests, and their strengths.

    Raises FormatError: one of them is not in the AImage.
    """
    pairs = []
    for use in base.properties.get("loras", ()):
        name, strength = f"{OWN}{use['adapter']}", float(use["strength"])
        if (adapter := find_packed_adapter(base, files, name)) is None:
            raise FormatError(f"the AImage has no adapter {use['adapter'][:200]!r}, which it uses")
        pairs.append((adapter, strength))
    return pairs


class AdapterSource:
    """The adapters of a loaded model, with a cache of the most recently used.

    files: of the model ``base`` and the adapters packed with it. shapes: return the
    shapes of its tensors, by ``component/name``. Used on the thread of the model.
    """

    def __init__(
        self,
        finder: AdapterFinder | None,
        files: BlobFiles,
        base: StoredAImage,
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        cache: AdapterCache | None = None,
    ) -> None:
        from clowder_aimage.adapter.loaded_adapter import AdapterCache

        self._finder, self._files = finder, files
        self._base, self._shapes = base.aimage, shapes
        self._own = list_packed_adapters(files, base.aimage)
        self._name = str(base.aimage.properties.get("name") or base.descriptor.digest.short)
        self._cache = cache or AdapterCache(MEMORY)

    def open_variant(self, stored: StoredAImage) -> AdapterSource:
        """Return the source of another AImage of the same networks, with the same cache."""
        return AdapterSource(self._finder, self._files, stored, self._shapes, self._cache)

    def open(self, uses: Sequence[LoraUse]) -> list[tuple[LoadedAdapter, float]]:
        """Return the adapters and their strengths.

        Raises as ``AdapterFinder.find`` and ``read_adapter``; an error has the index of its
        adapter as a fact.
        """
        packed = [(self._load(adapter), strength) for adapter, strength in self._own]
        return [*packed, *_act_on_each(uses, self._open)]

    def _open(self, use: LoraUse) -> tuple[LoadedAdapter, float]:
        adapter = find_packed_adapter(self._base, self._files, use.model)
        if adapter is None:
            if self._finder is None:
                raise NotFoundError(f"adapter {use.model[:200]!r} not found")
            adapter = self._finder.find(use)
        return self._load(adapter), adapter.resolve_strength(use.strength)

    def _load(self, adapter: AdapterEntry) -> LoadedAdapter:
        from clowder_aimage.adapter.reader import read_adapter

        def read() -> Adapter:
            try:
                return read_adapter(
                    adapter.path,
                    self._shapes(),
                    label=adapter.name,
                    base=self._name,
                    config=adapter.config,
                )
            except OSError as error:
                message = f"cannot read {adapter.name}: {error.strerror or error}"
                raise StoreError(message) from None

        # The digest is that of the weights alone for a file: another config is another adapter
        config = json.dumps(adapter.config, sort_keys=True) if adapter.config else ""
        return self._cache.get(f"{adapter.digest} {config}", read)


def is_controlnet(aimage: AImage) -> bool:
    """Return True if an AImage is a control network."""
    return aimage.properties.get("architecture") == controlnet.CLASS


def find_control(name: str, open_stored: OpenStored) -> StoredAImage:
    """Return a control network by its reference.

    Raises:
        NotFoundError: There is none. Also as ``open_stored``.
        UsageError: The reference is invalid, or that of something else.
    """
    try:
        stored = open_stored(Reference.parse(name))
    except NotFoundError as error:
        error.message = f"ControlNet {error.message}"
        raise
    if not is_controlnet(stored.aimage):
        properties = stored.aimage.properties
        kind = properties.get("format") or properties.get("pipeline")
        about = f" ({str(kind)[:60]})" if kind else ""
        raise UsageError(f"{name} is not a ControlNet, but another AImage{about}")
    return stored


class ControlSource:
    """The control networks of a loaded model, with a cache of the last one.

    ``open_stored`` returns an AImage that is complete in ``files``, and may pull it.
    """

    def __init__(self, files: BlobFiles, open_stored: OpenStored) -> None:
        self._files, self._open_stored = files, open_stored
        self._last: tuple[str, StoredControlNet] | None = None

    def name(self, name: str) -> str:
        """Return the reference with the digest of the network. Raises as ``find_control``."""
        digest = find_control(name, self._open_stored).descriptor.digest
        return str(Reference.parse(name.partition("@")[0]).with_digest(digest))

    def open(self, name: str) -> StoredControlNet:
        """Return a control network, the same one while it is used. Raises as ``find_control``."""
        stored = find_control(name, self._open_stored)
        key = str(stored.descriptor.digest)
        if self._last is None or self._last[0] != key:
            control = StoredControlNet(self._files, stored.aimage, name)
            self._last = key, control
        return self._last[1]


def _act_on_each(uses: Sequence[LoraUse], act: Callable[[LoraUse], Any]) -> Iterator[Any]:
    for index, use in enumerate(uses):
        try:
            yield act(use)
        except AImageError as error:
            error.facts.setdefault("adapter", str(index))
            raise


def _make_adapter(
    name: str, digest: Digest, path: Path, facts: object, read: ReadConfig | None
) -> AdapterEntry:
    checked_facts = facts if isinstance(facts, dict) else {}
    return AdapterEntry(name, digest, path, checked_facts, read or (lambda: None))


def _build_reader(files: BlobFiles, layer: Layer | None) -> ReadConfig | None:
    """Return a reader of ``adapter_config.json``, or None without the file."""
    if layer is None:
        return None

    def read() -> Mapping[str, Any]:
        with files.open(layer.descriptor) as stream:
            return _parse_config(read_all(stream, layer.descriptor, _MAX_CONFIG), _CONFIG)

    return read


def _read_beside(path: Path, name: str) -> Mapping[str, Any]:
    try:
        return _parse_config(path.read_bytes(), f"{_CONFIG} of {name}")
    except OSError as error:
        raise StoreError(f"cannot read {_CONFIG} of {name}: {error.strerror or error}") from None


def _parse_config(data: bytes, label: str) -> Mapping[str, Any]:
    value = read_json(data, label, _MAX_CONFIG)
    if not isinstance(value, dict):
        raise FormatError(f"{label} is not a JSON object")
    return value
