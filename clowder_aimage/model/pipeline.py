"""The interface of image pipelines: requests come in, steps and pictures come out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from clowder_aimage.model.rounding import EAGER

# A worker without numpy stores models and still parses requests
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
    from clowder_aimage.content.store import BlobFiles
    from clowder_aimage.dialect.aimage import AImage
    from clowder_aimage.generation.request import GenerateRequest
# In the order of their use; adapters that are packed with a model first
COMPONENTS = ("adapters", "text_encoder", "transformer", "vae")


@dataclass(frozen=True, slots=True, eq=False)
class PictureInput:
    """The picture that a request begins with, at its size, its mask, and other pictures.

    pixels, control: RGB (height, width, 3), uint8. mask: (height, width), uint8; from 128 on it is
    painted. references: RGB of any size.
    """

    pixels: npt.NDArray[np.uint8] | None = None
    mask: npt.NDArray[np.uint8] | None = None
    control: npt.NDArray[np.uint8] | None = None
    references: tuple[npt.NDArray[np.uint8], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StoredControlNet:
    """An AImage with a control network in ``component``; ``name`` is for errors."""

    files: BlobFiles
    aimage: AImage
    name: str
    component: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """The end of step ``index`` of ``total`` (1 to total), for picture ``picture`` (0 to n - 1).

    ``done``: the steps of all pictures so far; 0 for pictures that are made one after another.
    """

    index: int
    total: int
    picture: int
    done: int = 0

    def __post_init__(self) -> None:
        if not self.done:
            object.__setattr__(self, "done", self.picture * self.total + self.index)


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """A preview of picture ``picture``: smaller RGB ``pixels`` (height, width, 3), uint8.

    ``number`` counts the previews of a picture from 0.
    """

    pixels: npt.NDArray[np.uint8]
    number: int
    picture: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A finished picture: RGB ``pixels`` of shape (height, width, 3), uint8.

    ``batch``: the most forward passes that were computed at once, of which a picture with guidance
    has two. ``forward``: the form in which layers were computed, one of ``rounding``.
    """

    pixels: npt.NDArray[np.uint8]
    seed: int
    picture: int = 0
    batch: int = 1
    forward: str = EAGER

    @property
    def width(self) -> int:
        """Return the width in pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """Return the height in pixels."""
        return int(self.pixels.shape[0])


class Pipeline(Protocol):
    """A loaded model, used only on the thread that loaded it."""

    @property
    def library(self) -> Any:
        """The library that computes its networks: an ``ArrayLibrary``."""
        ...

    def generate(
        self, request: GenerateRequest, pictures: PictureInput | None = None
    ) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels the generation.

        ``pictures`` are those of a request with an image.

        Raises:
            UsageError: Immediately, if this model does not support the request.
        """
        ...

    def open(
        self, request: GenerateRequest, pictures: PictureInput | None = None
    ) -> Generator[Any, None, None]:
        """Yield as ``generate``; and passes, which ``compute`` computes before the next event.

        So the pictures of several requests are made in turns. Raises as ``generate``.
        """
        ...

    def compute(self, steps: Sequence[Any]) -> None:
        """Compute passes that pictures wait for, those of several at once if it pays."""
        ...

    def complete(self, events: Generator[Any, None, None]) -> Generator[PipelineEvent, None, None]:
        """Yield the events of ``open``, and compute the passes in between."""
        ...

    def set_memory(
        self,
        policy: str,
        memory: int | None,
        total: int | None = None,
        *,
        text_encoder: str | None = None,
        limit: int | None = None,
        is_last: bool = False,
    ) -> None:
        """Set the memory for this process and that of the device; see ``MemoryBudget``.

        The policies of all networks and of the text encoder are keep, release, or auto.
        """
        ...

    def set_share(self, memory: int | None) -> None:
        """Change the memory for this process; it holds from the next request."""
        ...

    def check(self, request: GenerateRequest, pictures: PictureInput | None = None) -> None:
        """Reject a request, or its picture, that this model does not support; change nothing.

        Raises UsageError.
        """
        ...

    def list_warnings(self, request: GenerateRequest) -> list[str]:
        """Return sentences about parameters without effect in a request. Raises as ``check``."""
        ...

    def preload(self, request: GenerateRequest) -> str:
        """Load all networks if they can stay in memory while the request's pictures are made.

        Returns a description of the memory. Raises as ``ModelWeights.apply`` does.
        """
        ...

    def sleep(self) -> None:
        """Release all that the device has; ``preload`` or a request loads it again."""
        ...

    def copy_to_host(self, room: int, is_stopped: Callable[[], bool]) -> None:
        """Copy weights to ``room`` bytes of the machine's memory, for a load that is faster."""
        ...

    def prepare(self, request: GenerateRequest) -> None:
        """Encode the texts of the next request. Raises as ``generate`` does."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that adapters may change, by ``component/name``."""
        ...

    def use_adapters(self, uses: Sequence[tuple[LoadedAdapter, float]]) -> None:
        """Use these adapters, each with a strength, and no others from now on."""
        ...

    def use_control(self, stored: StoredControlNet) -> None:
        """Use a control network for requests that name one, from now on.

        Raises:
            UsageError: The family of the model has none.
            FormatError: The network is of another base model, or damaged.
        """
        ...


PipelineEvent = Step | Preview | Image
