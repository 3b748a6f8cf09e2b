"""create and convert with other weight types."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.importer.valued import ValuedModel, as_dtype, bf16_values, make_valued, transformer
from tests.process import Aimage, run

MIB = 1024 * 1024


@pytest.fixture
def model(tmp_path: Path) -> ValuedModel:
    return make_valued(tmp_path / "model", "F32")


def test_the_summary_lists_casts_and_quantization(
    aimage: Callable[..., Aimage], model: ValuedModel
) -> None:
    here = aimage()
    done = here("create", "m", model.directory, "--quantize", "int8")
    first, second, third = done.err.splitlines()
    assert first.startswith("m:latest: 39 tensors (154 thousand parameters) and 9 files, ")
    assert first.endswith("0 of 48 blobs (0 B) were in the store already")
    assert second.startswith(
        "transformer: 23 of 34 tensors are int8 in groups of 64; not quantized"
    )
    assert "3 (embedder), 2 (final layer), 2 (norm)" in second
    assert third == "the weights take 342 kB less than before"


def test_the_summary_of_dtype_auto(aimage: Callable[..., Aimage], model: ValuedModel) -> None:
    here = aimage()
    done = here("create", "m", model.directory, "--dtype", "auto")
    assert "39 tensors stored as BF16, without loss: their values are BF16" in done.err
    done = here("convert", "m", "n", "--dtype", "auto")
    assert "no F32 tensor has only BF16 values: all are stored unchanged" in done.err
    assert done.line == here("tag", "m", "o").line
    done = here("convert", "m", "p", "--dtype", "f32")
    assert "39 tensors stored as F32 instead of BF16" in done.err
    assert "the weights take 307 kB more than before" in done.err


def test_the_json_summary_equals_the_text(
    aimage: Callable[..., Aimage], model: ValuedModel
) -> None:
    here = aimage()
    arguments = ("--quantize", "transformer=int4,text_encoder=int8", "--group-size", "32")
    done = here("create", "m", model.directory, *arguments, "--dtype", "bf16", "--json", "-q")
    value = done.value
    assert (value["tensors"], value["files"]) == (39, 9)
    # 11 of the transformer, 3 of the text encoder and the VAE: quantized tensors are not cast
    assert value["cast"] == [{"from": "F32", "to": "BF16", "tensors": 15}]
    assert value["quantization"]["transformer"]["type"] == "int4"
    assert value["quantization"]["text_encoder"] == {
        "type": "int8",
        "group_size": 32,
        "tensors": 1,
        "kept": {"embedder": 1, "norm": 2},
    }
    shown = here("show", "m", "--json").value["layers"]
    weights = sum(data_size(here.store, layer) for layer in shown if "tensor" in str(layer))
    assert value["saved"] == 4 * value["parameters"] - weights
    plain = here("create", "plain", model.directory, "--json", "-q").value
    assert not plain.keys() & {"quantization", "cast", "saved", "ignored"}


def data_size(store: Path, layer: Any) -> Any:
    """Return the bytes of a layer's weights, without the header."""
    path = store / "blobs" / "sha256" / layer["digest"].removeprefix("sha256:")
    with path.open("rb") as file:
        return layer["size"] - 8 - int.from_bytes(file.read(8), "little")


def test_tensors_that_are_quantized_are_not_counted_as_cast(
    aimage: Callable[..., Aimage], model: ValuedModel
) -> None:
    here = aimage()
    done = here("create", "m", model.directory, "--quantize", "int8", "--dtype", "f16")
    assert "16 tensors stored as F16 instead of F32" in done.err
    assert "transformer: 23 of 34 tensors are int8" in done.err


def test_convert_prints_the_same_digest_as_create(
    aimage: Callable[..., Aimage], model: ValuedModel
) -> None:
    here = aimage()
    here("create", "plain", model.directory, "-q")
    done = here("convert", "plain", "team/small:int8", "--quantize", "q8")
    assert done.line == here("create", "m", model.directory, "--quantize", "int8", "-q").line
    assert done.err.startswith("team/small:int8: 39 tensors")
    names = [row["reference"] for row in here("ls", "--json").value]
    assert names == ["m:latest", "plain:latest", "team/small:int8"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--quantize", "vae=int8"), 2, "the vae cannot be quantized"),
        (("--quantize", "int5"), 2, "use int4, int8, nvfp4, mxfp8, q8, fp4, q4, fp8"),
        (("--quantize", "int8", "--group-size", "128"), 2, "no tensor of the transformer"),
        (("--group-size", "64"), 2, "a group size requires a quantization"),
        (("--dtype", "fp8"), 2, "use f32, f16, bf16 or auto"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_and_nothing_is_written(
    aimage: Callable[..., Aimage],
    model: ValuedModel,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    here = aimage()
    assert said in here("create", "m", model.directory, *arguments, code=code).err
    assert not here.store.exists()
    here("create", "plain", model.directory, "-q")
    assert said in here("convert", "plain", "m", *arguments, code=code).err
    assert [row["reference"] for row in here("ls", "--json").value] == ["plain:latest"]


def test_invalid_options_of_convert_are_refused(
    aimage: Callable[..., Aimage], model: ValuedModel
) -> None:
    here = aimage()
    here("create", "plain", model.directory, "-q")
    digest = here("convert", "plain", "q", "--quantize", "int8", "-q").line
    assert "the conversion changes nothing" in here("convert", "plain", "m", code=2).err
    assert "already quantized" in here("convert", "q", "m", "--quantize", "int8", code=2).err
    assert here("convert", "absent", "m", "--dtype", "bf16", code=3).out == ""
    assert "digest" in here("convert", "plain", f"m@{digest}", "--dtype", "bf16", code=2).err


def make_pickled(model: ValuedModel) -> None:
    model.weights("transformer").unlink()
    model.write("transformer/weights.bin", b"\x80\x02.")


@pytest.mark.parametrize(
    ("spoil", "said", "code"),
    [
        (make_pickled, "is pickled", 1),
        (lambda m: os.truncate(m.weights("transformer"), 3000), "is damaged", 5),
    ],
    ids=["pickled", "truncated"],
)
def test_an_incomplete_directory_is_refused(
    aimage: Callable[..., Aimage],
    model: ValuedModel,
    spoil: Callable[[Any], Any],
    said: str,
    code: int,
) -> None:
    here = aimage()
    spoil(model)
    assert said in here("create", "m", model.directory, "--quantize", "int8", code=code).err
    assert not here.store.exists()


def test_weights_without_quantization_parameters_are_refused(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    tensors = as_dtype(transformer(), "BF16") | {
        "layers.0.x.weight": ("U32", (4, 8), bytes(128)),
        "layers.0.x.scales": ("BF16", (4, 1), bytes(8)),
        "layers.0.x.biases": ("BF16", (4, 1), bytes(8)),
    }
    model = make_valued(tmp_path / "model", transformer=tensors)
    here = aimage()
    done = here("create", "m", model.directory, code=5)
    assert "config.json has no bits and group_size for it" in done.err
    assert not here.store.exists()


def test_a_value_too_large_for_f16_is_refused(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    values = transformer()
    values["x_pad_token"][0, 0] = 1e9
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, "F32"))
    here = aimage()
    done = here("create", "m", model.directory, "--dtype", "f16", code=1)
    assert "1 value of transformer/x_pad_token cannot be stored as F16 (maximum 65504)" in done.err
    assert "use bf16" in done.err
    assert not here.store.exists()


# -- memory

PEAK = """
import pathlib, resource, sys
import mlx.core, numpy
from clowder_aimage.cli.main import cli
from clowder_aimage import rederive
from clowder_aimage.importer import blob_encoder, precision, quantizer

def peak():
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # what getrusage says on Linux begins with the peak of the parent
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
cli.main(sys.argv[1:], standalone_mode=False)
print(f"grew by {peak() - before}", file=sys.stderr)
"""


def grown(here: Aimage, model: ValuedModel, *options: Any) -> int:
    """Return the memory that creating ``model`` takes beyond the libraries."""
    return measure_growth(here, "create", "m", model.directory, *options)


def measure_growth(here: Aimage, *words: Any) -> int:
    """Return the memory that a verb takes beyond the libraries."""
    arguments = ("--store", here.store, "-q", *words)
    done = run(
        [sys.executable, "-c", PEAK, *map(str, arguments)],
        text=True,
        env=here.env(),
        check=True,
    )
    return int(done.stderr.rpartition("grew by ")[2])


@pytest.mark.integration
@pytest.mark.parametrize("options", [("--dtype", "f16"), ("--quantize", "int8")], ids=str)
def test_memory_hardly_grows_with_the_number_of_threads(
    aimage: Callable[..., Aimage], tmp_path: Path, options: tuple[str, str]
) -> None:
    """Each thread has a buffer of 1 MiB, and all share one budget for casting and quantizing."""
    large = np.tile(bf16_values("large", (64, 1024)), (16, 1)) * np.float32(1.01)
    tensors = as_dtype({f"layers.{n}.large.weight": large + n for n in range(64)}, "F32")
    model = make_valued(tmp_path / "model", transformer=tensors)
    here = aimage()
    assert grown(here, model, *options, "--jobs", 64) < 160 * MIB


@pytest.mark.integration
@pytest.mark.parametrize("options", [(), ("--quantize", "int8"), ("--dtype", "bf16")], ids=str)
def test_memory_does_not_grow_with_the_model(
    aimage: Callable[..., Aimage], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Two matrices of 128 MiB as F32: neither is loaded as a whole."""
    large = np.tile(bf16_values("large", (64, 1024)), (512, 1))
    tensors = as_dtype({f"layers.{n}.large.weight": large + n for n in range(2)}, "F32")
    model = make_valued(tmp_path / "model", transformer=tensors)
    here = aimage()
    assert grown(here, model, *options) < 64 * MIB
    assert here("show", "m", "--json").value["config"]["parameters"] > 2 * large.size


@pytest.mark.integration
def test_memory_of_a_derivation_does_not_grow_with_the_model(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    """Two matrices of 128 MiB as F32: neither is loaded as a whole to compute it again."""
    large = np.tile(bf16_values("large", (64, 1024)), (512, 1))
    tensors = as_dtype({f"layers.{n}.large.weight": large + n for n in range(2)}, "F32")
    model = make_valued(tmp_path / "model", transformer=tensors)
    here = aimage()
    here("create", "m", model.directory, "-q")
    here("convert", "m", "d", "--quantize", "int8", "-q")
    assert measure_growth(here, "verify", "d", "--rederive") < 64 * MIB
