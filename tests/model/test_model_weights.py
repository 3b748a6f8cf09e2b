"""Weights from blobs: strict, checked before they are read, within few open files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import FormatError, ModelError, NotFoundError
from clowder_aimage.model.backend import Conv2d, Linear, Network, mx
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import mediatype
from clowder_aimage.tensor import encode_header
from tests.model.model_blobs import FolderStore
from tests.process import run

Arrays = Mapping[str, np.ndarray]
DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8"}


class Net(Network):
    """A linear layer and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Linear(3, 2)
        self.conv = Conv2d(4, 5, 3)

    @staticmethod
    def sanitize(name: str) -> str:
        return name.removeprefix("model.")


def arrays() -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    shapes = {
        "model.fc.weight": (2, 3),
        "model.fc.bias": (2,),
        "model.conv.weight": (5, 4, 3, 3),
        "model.conv.bias": (5,),
    }
    return {name: random.rand(*shape).astype(np.float32) for name, shape in shapes.items()}


def packed(folder_store: FolderStore, tensors: Arrays, key: str = "{name}") -> AImage:
    """Return an AImage with one component, ``net``."""
    layers = [Layer(folder_store.add(mediatype.AIMAGE_FILE, b'{"a": 1}'), "net/config.json")]
    for name, value in tensors.items():
        dtype = DTYPES[value.dtype.name]
        header = encode_header([(key.format(name=name), dtype, value.shape)])
        blob = folder_store.add(mediatype.AIMAGE_SAFETENSORS, header + value.tobytes())
        layers.append(Layer(blob, f"net/{name}", dtype, value.shape))
    return AImage(b"{}", tuple(layers))


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


@pytest.mark.parametrize("key", ["{name}", "net/{name}", "data"])
def test_values_arrive_in_the_layout_of_mlx(folder_store: FolderStore, key: str) -> None:
    tensors = arrays()
    weights = ModelWeights.open(folder_store, packed(folder_store, tensors, key), "net")
    net = Net()
    assert weights.apply(net) == ()
    assert weights.keys() == tuple(tensors)
    assert weights.config == {"a": 1}
    assert (np.array(net.fc.weight) == tensors["model.fc.weight"]).all()
    expected = tensors["model.conv.weight"].transpose(0, 2, 3, 1)
    assert (np.array(net.conv.weight) == expected).all()


def test_a_blob_with_two_candidates_is_refused(folder_store: FolderStore) -> None:
    tensors = arrays()
    aimage = packed(folder_store, tensors)
    bias = tensors["model.fc.bias"]
    header = encode_header([("data", "F32", (2,)), ("model.fc.bias", "F32", (2,))])
    blob = folder_store.add(
        mediatype.AIMAGE_SAFETENSORS, header + (bias * 0).tobytes() + bias.tobytes()
    )
    crowded = swap(aimage, Layer(blob, "net/model.fc.bias", "F32", (2,)))
    with pytest.raises(FormatError, match=r"^net/model\.fc\.bias: the blob also contains data$"):
        ModelWeights.open(folder_store, crowded, "net").apply(Net())


def test_casting_and_skipping(folder_store: FolderStore) -> None:
    tensors = {name: value.astype(np.float16) for name, value in arrays().items()}
    tensors["model.last.weight"] = np.zeros((1,), np.int8)
    weights = ModelWeights.open(folder_store, packed(folder_store, tensors), "net")
    net = Net()
    skipped = weights.apply(net, skip=lambda name: "last" in name, dtype=mx.float32)
    assert skipped == ("model.last.weight",)
    assert net.fc.weight.dtype == mx.float32
    assert weights.get_quantization("model.fc.weight") is None


def swap(aimage: AImage, layer: Layer) -> AImage:
    return AImage(
        aimage.config, tuple(layer if item.name == layer.name else item for item in aimage.layers)
    )


def test_names_must_fit_exactly(folder_store: FolderStore) -> None:
    tensors = arrays()
    less = {name: value for name, value in tensors.items() if name != "model.fc.bias"}
    with pytest.raises(ModelError, match=r"missing tensors fc\.bias"):
        ModelWeights.open(folder_store, packed(folder_store, less), "net").apply(Net())
    more = tensors | {"model.fc.extra": np.zeros((1,), np.float32)}
    with pytest.raises(ModelError, match=r"unexpected tensors model\.fc\.extra"):
        ModelWeights.open(folder_store, packed(folder_store, more), "net").apply(Net())
    wrapped = {f"_orig_mod.{name}": value for name, value in tensors.items()}
    with pytest.raises(ModelError, match=r"a wrapper has changed the names .*_orig_mod\.model"):
        ModelWeights.open(folder_store, packed(folder_store, wrapped), "net").apply(Net())
    twice = tensors | {"fc.bias": tensors["model.fc.bias"]}
    with pytest.raises(ModelError, match=r"duplicate tensors for fc\.bias"):
        ModelWeights.open(folder_store, packed(folder_store, twice), "net").apply(Net())


def test_shapes_must_fit_exactly(folder_store: FolderStore) -> None:
    tensors = arrays() | {"model.conv.weight": np.zeros((5, 3, 3, 4), np.float32)}
    with pytest.raises(ModelError, match=r"requires shape \[5, 4, 3, 3\].*has \[5, 3, 3, 4\]"):
        ModelWeights.open(folder_store, packed(folder_store, tensors), "net").apply(Net())


def test_a_failed_load_leaves_the_module_alone(folder_store: FolderStore) -> None:
    net = Net()
    before = np.array(net.fc.weight)
    tensors = arrays() | {"model.conv.bias": np.zeros((6,), np.float32)}
    with pytest.raises(ModelError):
        ModelWeights.open(folder_store, packed(folder_store, tensors), "net").apply(net)
    assert (np.array(net.fc.weight) == before).all()


def lying(layer: Layer, **changes: object) -> Layer:
    fields = {"dtype": layer.dtype, "shape": layer.shape} | changes
    return Layer(layer.descriptor, layer.name, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"dtype": "BF16"}, {"shape": (3, 2)}])
def test_layer_with_false_type_or_shape_is_refused(
    folder_store: FolderStore, changes: dict[str, object]
) -> None:
    aimage = packed(folder_store, arrays())
    layer = lying(aimage.get_layer("net/model.fc.weight"), **changes)
    with pytest.raises(FormatError, match=r"fc\.weight: the blob contains F32 \[2, 3\]"):
        ModelWeights.open(folder_store, swap(aimage, layer), "net").apply(Net())


def test_layer_without_type_and_shape_is_read(folder_store: FolderStore) -> None:
    aimage = packed(folder_store, arrays())
    layer = lying(aimage.get_layer("net/model.fc.weight"), dtype=None, shape=None)
    ModelWeights.open(folder_store, swap(aimage, layer), "net").apply(Net())


BAD_BLOBS = {
    "not safetensors": b"hello",
    "another tensor": encode_header([("other", "F32", (2,))]) + bytes(8),
    "truncated": encode_header([("model.fc.bias", "F32", (2,))]) + bytes(7),
    "a hole": encode_header([("model.fc.bias", "F32", (2,))]).replace(b"[0,8]", b"[4,12]")
    + bytes(12),
}


@pytest.mark.parametrize("data", BAD_BLOBS.values(), ids=BAD_BLOBS.keys())
def test_malformed_blobs_are_refused(folder_store: FolderStore, data: bytes) -> None:
    aimage = packed(folder_store, arrays())
    blob = folder_store.add(mediatype.AIMAGE_SAFETENSORS, data)
    layer = Layer(blob, "net/model.fc.bias", "F32", (2,))
    with pytest.raises(FormatError, match=r"net/model\.fc\.bias"):
        ModelWeights.open(folder_store, swap(aimage, layer), "net").apply(Net())


def test_integer_weights_are_refused(folder_store: FolderStore) -> None:
    tensors = arrays() | {"model.fc.bias": np.zeros((2,), np.int8)}
    with pytest.raises(ModelError, match="type I8"):
        ModelWeights.open(folder_store, packed(folder_store, tensors), "net").apply(Net())


def test_missing_components_and_blobs_are_errors(folder_store: FolderStore) -> None:
    aimage = packed(folder_store, arrays())
    with pytest.raises(ModelError, match=r"vae/config\.json not found"):
        ModelWeights.open(folder_store, aimage, "vae")
    with pytest.raises(ModelError, match="no tensors found for net"):
        ModelWeights.open(folder_store, AImage(b"{}", aimage.layers[:1]), "net")
    weights = ModelWeights.open(folder_store, aimage, "net")
    folder_store.find_path(aimage.layers[1].descriptor).unlink()
    with pytest.raises(NotFoundError):
        weights.apply(Net())


FEW_FILES = """
import resource, sys
from pathlib import Path
import numpy as np
sys.path[:0] = {path!r}
from tests.model.test_model_weights import FolderStore, packed
from clowder_aimage.model.backend import Network, mx
from clowder_aimage.model.weights import ModelWeights

class Wide(Network):
    def __init__(self):
        super().__init__()
        self.all = [mx.zeros((4,)) for _ in range(600)]
    def sanitize(self, name):
        return name

tensors = {{f"all.{{i}}": np.full((4,), i, np.float32) for i in range(600)}}
folder_store = FolderStore(Path({root!r}))
aimage = packed(folder_store, tensors)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
mx.async_eval = lambda _: None  # nothing is read before it must be: as on the slowest disk
wide = Wide()
ModelWeights.open(folder_store, aimage, "net").apply(wide)
assert [int(value[3]) for value in wide.all] == list(range(600))
"""


def test_600_tensors_with_256_open_files(tmp_path: Path) -> None:
    program = FEW_FILES.format(path=[str(Path(__file__).parents[2]), *sys.path], root=str(tmp_path))
    done = run([sys.executable, "-c", program], text=True)
    assert done.returncode == 0, done.stderr


PEAK = """
import resource, sys
from pathlib import Path
import numpy as np
sys.path[:0] = {path!r}
from tests.model.test_model_weights import FolderStore, packed
from clowder_aimage.model import array
from clowder_aimage.model.backend import mx
from clowder_aimage.model.weights import ModelWeights

def peak():
    if sys.platform == "linux":  # where getrusage goes on from the peak of the parent
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024)

MIB = 1024 * 1024
array.CHUNK_BYTES, array.PENDING_BYTES = 8 * MIB, 16 * MIB
folder_store = FolderStore(Path({root!r}))
layers = ()
for index in range(64):
    tensors = {{f"{{index}}": np.full((1024, 1024), index, np.float32)}}
    aimage = packed(folder_store, tensors)
    layers = (*layers, aimage.layers[1])
weights = ModelWeights.open(folder_store, type(aimage)(b"{{}}", (aimage.layers[0], *layers)), "net")
mx.eval(mx.ones((8,)).astype(mx.bfloat16))
before = peak()
weights.load(mx.bfloat16)
assert float(weights["63"][5, 5]) == 63
print(peak() - before)
"""


@pytest.mark.integration
def test_the_peak_is_the_model_and_a_chunk(tmp_path: Path) -> None:
    """256 MiB of float32 to 128 MiB of bfloat16, with at most 16 MiB of float32 under way."""
    program = PEAK.format(path=[str(Path(__file__).parents[2]), *sys.path], root=str(tmp_path))
    done = run([sys.executable, "-c", program], text=True)
    assert done.returncode == 0, done.stderr
    assert 112 < float(done.stdout) < 128 + 16 * 1.5 + 16


def test_any_thread_may_load(folder_store: FolderStore) -> None:
    """One at a time, each with arrays of its own; evaluated ones may be handed on."""
    tensors = arrays()
    aimage = packed(folder_store, tensors)
    found: list[mx.array] = []

    def load() -> None:
        weights = ModelWeights.open(folder_store, aimage, "net")
        weights.load(mx.float32)
        found.append(weights["model.fc.weight"])
        found.append(mx.contiguous(weights["model.conv.weight"] * 2))
        mx.eval(found)

    for _ in range(2):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert len(found) == 4
    for one, other in zip(found[:2], found[2:], strict=True):
        assert (np.array(one) == np.array(other)).all()
    assert (np.array(found[0]) == tensors["model.fc.weight"]).all()
