"""The Python interface to models that generate pictures (docs/python.md)."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from clowder_aimage.client import (
    Name,
    OnProgress,
    ProgressCounter,
    Registry,
    Store,
    to_connection,
    to_reference,
)
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from clowder_aimage.content import Lease
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.generation.keywords import PictureKeywords
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.layout.stored_aimage import StoredAImage
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.pictures.input_file import InputFile
    from clowder_aimage.registry import ClientOptions


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A generated picture: RGB ``pixels`` (height, width, 3), its seed, and how it was made."""

    pixels: npt.NDArray[np.uint8]
    seed: int
    facts: Mapping[str, Any] = field(repr=False)

    def encode(self, kind: str = "png") -> bytes:
        """Return the bytes of a file: png, jpeg or webp."""
        from clowder_aimage.model.picture import encode_picture

        return encode_picture(self.pixels, self.facts, kind)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a .png, .jpg or .webp file and return its path. Raises UsageError for others."""
        from clowder_aimage.content.atomic_file import write_file

        path = Path(path)
        kind = path.suffix.lower().removeprefix(".").replace("jpg", "jpeg")
        if kind not in ("png", "jpeg", "webp"):
            raise UsageError(f"only .png, .jpg and .webp files can be written, not {path.name}")
        write_file(path, self.encode(kind), durable=False)
        return path


# Single pictures of a request. Others are references.
_SINGLE = ("image", "mask", "control")

if TYPE_CHECKING:
    PictureSource = Picture | bytes | str | os.PathLike[str] | npt.ArrayLike


class Model:
    """A loaded model. Use it on the thread that loaded it, and close it, or use ``with``."""

    def __init__(
        self,
        reference: Reference,
        loaded: RunnableModel,
        finder: AdapterFinder,
        inputs: PictureFiles,
        resources: ExitStack,
    ) -> None:
        self.reference = reference
        self._finder = finder
        self._inputs = inputs
        self._loaded = loaded
        self._resources = resources

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lease of the model's blobs, so that gc may remove them."""
        self._resources.close()

    def generate(
        self,
        prompt: str,
        *,
        image: PictureSource | None = None,
        mask: PictureSource | None = None,
        control: PictureSource | None = None,
        references: Sequence[PictureSource] = (),
        loras: Sequence[str | tuple[str, float]] = (),
        progress: OnProgress | None = None,
        **parameters: Unpack[PictureKeywords],
    ) -> list[Picture]:
        """Generate pictures of a prompt, with the seeds ``seed``, ``seed + 1`` and so on.

        None stands for the default of the model; the seed is random. ``image`` is the picture to
        start from, ``mask`` (or "alpha") is white in the painted area, ``control`` guides a
        ControlNet, and ``references`` are the pictures that a model edits: each a ``Picture``, the
        bytes of a file, an array, a path, a URL or the name of an artifact. ``loras`` are adapters:
        names of AImages or files, or pairs of them and their strengths. ``progress`` is called with
        the steps done and their total. The other parameters are those of ``PictureKeywords``.

        Raises:
            UsageError: The model does not support these parameters, or a picture cannot be read.
            NotFoundError: A picture does not exist, or an adapter or ControlNet is in neither the
                store nor the registry.
            FormatError: An adapter or ControlNet is damaged, or for another model.
        """
        from clowder_aimage.generation.request import GenerateRequest, LoraUse
        from clowder_aimage.generation.seed import read_seed
        from clowder_aimage.pictures.input_kind import own_sized

        pairs = [(lora, None) if isinstance(lora, str) else lora for lora in loras]
        sources = {"image": image, "mask": mask, "control": control}
        sources |= {f"reference {number}": source for number, source in enumerate(references, 1)}
        values: dict[str, Any] = {"seed": secrets.randbits(32)}
        stated = {**parameters, "seed": read_seed(parameters.get("seed"))}
        values |= {name: value for name, value in stated.items() if value is not None}
        with self._inputs.store.lease() as lease:
            digests, first_file = self._inputs.keep(lease, sources, values)
            uses = tuple(LoraUse(*pair) for pair in pairs)
            draft = GenerateRequest.draft(prompt, **values | digests, loras=uses)
            base, files = self._loaded.stored.aimage, self._finder.store
            request = own_sized(draft, first_file).apply_defaults(base)
            request, _ = self._finder.resolve(request, base, files)
            return self._generate(request, ProgressCounter(progress))

    def _generate(self, request: GenerateRequest, counter: ProgressCounter) -> list[Picture]:
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.model.pipeline import Image, Step

        events, total = self._loaded.generate(request), request.sampling.steps * request.output.n
        counter.begin(total)
        metadata = describe_picture(self.reference, self._loaded, request)
        pictures = []
        with closing(events):
            for event in events:
                if isinstance(event, Image):
                    pictures.append(
                        Picture(event.pixels, event.seed, metadata | {"seed": event.seed})
                    )
                elif isinstance(event, Step):
                    # With an image there are fewer steps.
                    if total != (total := event.total * request.output.n):
                        counter.begin(total)
                    counter.advance(1)
        return pictures


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """The pictures that requests begin with, kept in ``store``."""

    store: ImageLayout
    connect: Callable[[], ClientOptions]

    def keep(
        self,
        lease: Lease,
        sources: Mapping[str, PictureSource | None],
        values: Mapping[str, Any],
    ) -> tuple[dict[str, Any], InputFile | None]:
        """Keep pictures by the names of their parameters; return their digests, and the first.

        Raises UsageError, and as ``InputSource.read``.
        """
        from clowder_aimage.generation.request import ALPHA
        from clowder_aimage.pictures.input import check_mask, keep

        fields = dict[str, Any]()
        expand, is_tiled = values.get("expand"), values.get("upscale") is not None
        stated = {name: source for name, source in sources.items() if source is not None}
        if isinstance(mask := stated.get("mask"), str) and mask == ALPHA:
            fields["mask"] = stated.pop("mask")
        data = {name: self._read(source, name) for name, source in stated.items()}
        if mask is not None and "image" in data and not (expand or is_tiled):
            check_mask(data["image"], data.get("mask"))
        files = {name: keep(self.store, lease, data[name], f"the {name}") for name in data}
        digests = {name: str(file.descriptor.digest) for name, file in files.items()}
        single = {name: digests.pop(name) for name in _SINGLE if name in digests}
        fields |= {**single, "references": tuple(digests.values())}
        names = [name for name in ("image", *digests, "control") if name in files]
        if expand and values.keys() & {"width", "height"}:
            raise UsageError("expand determines the size: omit width and height")
        return fields, files[names[0]] if names else None

    def _read(self, source: PictureSource, label: str) -> bytes:
        """Return the bytes of a picture file."""
        from clowder_aimage.pictures.input import encode_array
        from clowder_aimage.pictures.input_source import InputSource

        if isinstance(source, bytes):
            return source
        if isinstance(source, Picture):
            return source.encode()
        if isinstance(source, str | os.PathLike):
            reader = InputSource(self.store, self.connect, hosts=None, has_files=True)
            return reader.read(os.fspath(source), label)
        return encode_array(source, f"the {label}")


def load(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: OnProgress | None = None,
) -> Model:
    """Load a model, and pull it first if the store lacks it.

    ``backend`` is mlx or torch; the default depends on the installed extras and the GPU. ``dtype``
    is float32 or bfloat16; the default depends on the device. ``device`` is one of torch, such as
    cuda:1. ``progress`` is called as by ``pull``. Warns (RuntimeWarning) of a GPU that cannot be
    used.

    Raises:
        UsageError: The extra of the backend is not installed, the type is unknown, or there is no
            such device.
        NotFoundError: The AImage is in neither the store nor the registry. Also as ``pull``.
        ModelError: It cannot be run.
    """
    try:
        from clowder_aimage import generate
        from clowder_aimage.engine import machine
        from clowder_aimage.engine.local_fetch import fetch
        from clowder_aimage.generation.request import GenerateRequest
        from clowder_aimage.model.adapter_source import AdapterFinder
        from clowder_aimage.model.flow.memory_budget import KEEP
        from clowder_aimage.model.library_choice import TorchTuning, choose_library
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clowder_aimage"):
            raise
        message = "running a model needs the extra [mlx]"
        raise UsageError(message, remedy="install_extra", extra="mlx") from None
    tuning = TorchTuning(device=device)
    choose_library(backend, tuning)
    reference, layout = to_reference(name), (store or Store()).layout
    with ExitStack() as stack:
        lease = stack.enter_context(layout.lease())
        connect = cache(partial(to_connection, reference, registry))
        # A name of another registry is refused at once.
        if registry is not None:
            connect()
        counter = ProgressCounter(progress)
        on_event = counter.on_event
        with fetch(layout, reference, connect, lease, on_event=on_event) as fetched:
            finder = AdapterFinder(layout, partial(_open, layout, lease, connect), has_files=True)
            options: dict[str, Any] = {"backend": backend, "dtype": dtype, "finder": finder}
            options["tuning"] = tuning
            loaded = generate.load(fetched.files, fetched.stored, **options)
            if loaded.warning:
                warnings.warn(loaded.warning, RuntimeWarning, stacklevel=2)
            loaded.pipeline.set_memory(
                KEEP, None, loaded.device_memory or machine.read_memory_limit()
            )
            loaded.preload(GenerateRequest.draft().apply_defaults(fetched.stored.aimage))
            fetched.end()
        inputs = PictureFiles(layout, connect)
        return Model(reference, loaded, finder, inputs, stack.pop_all())


def _open(
    layout: ImageLayout, lease: Lease, connect: Callable[[], ClientOptions], reference: Reference
) -> StoredAImage:
    """Return an adapter; pull it if the store lacks it. Raises as ``pull``."""
    from clowder_aimage.model.runnable import open_runnable
    from clowder_aimage.pull import pull

    try:
        return open_runnable(layout, reference, lease)
    except NotFoundError:
        if connect().expand(reference).registry is None:
            raise
    return open_runnable(layout, pull(reference, layout, connect()).name, lease)
