"""The programs of docs/weights.md, one after the other, as a reader would run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.model.model_blobs import FolderStore, into_layout
from tests.model.random_model import pack
from tests.process import run

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
EXPECTED = """(128, 128) Quantization(
float32 torch.float32
'' uint32 (128, 32)
'.scale' float32 (128, 2)
'.bias' float32 (128, 2)
mlx.core.bfloat16
torch.Size([16, 16, 3, 3])
"""


@pytest.mark.integration
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    blobs = FolderStore(tmp_path / "blobs")
    blobs.root.mkdir()
    into_layout(blobs, pack(blobs, {"transformer": "int8"}), tmp_path / "store", "tiny")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    done = run([sys.executable, "-c", program], cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    for line in EXPECTED.splitlines():
        assert line in done.stdout, done.stdout
