"""The tiny model in a scripted registry, whose blobs a test may hold back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clowder_aimage.create import create
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.scripted import Answer, Seen, serving

TINY = Path(__file__).parent.parent / "examples" / "tiny"


@dataclass
class ModelScript:
    """A script that serves a model.

    ``names`` are the layers by digest, ``asked`` those that were requested. A function in
    ``answers`` is called when its layer is requested; it may wait, and return another answer.
    """

    manifest: bytes
    blobs: dict[str, bytes]
    names: dict[str, str]
    asked: list[str] = field(default_factory=list)
    answers: dict[str, Callable[[], Answer | None]] = field(default_factory=dict)

    @classmethod
    def of_tiny(cls, root: Path) -> ModelScript:
        """Create the model in a store in ``root``."""
        store, name = ImageLayout(root / "store"), Reference.parse("model")
        create(store, name, TINY)
        stored = read_aimage(store, name)
        blobs = {f"sha256:{path.name}": path.read_bytes() for path in root.glob("store/blobs/*/*")}
        names = {str(layer.descriptor.digest): layer.name for layer in stored.aimage.layers}
        return cls(stored.manifest.raw, blobs, names)

    def __call__(self, seen: Seen) -> Answer:
        name = self.names.get(seen.path.rpartition("/")[2], "")
        if "/blobs/" in seen.path:
            self.asked.append(name)
            if (answer := self.answers.get(name, lambda: None)()) is not None:
                return answer
        return serving(self.manifest, self.blobs)(seen)

    def last(self, component: str) -> str:
        """Return the name of the last layer of a component."""
        return [name for name in self.names.values() if name.startswith(f"{component}/")][-1]

    def size(self, name: str) -> int:
        """Return the size of the layer ``name`` in bytes."""
        return next(len(self.blobs[digest]) for digest, each in self.names.items() if each == name)
