"""Record the outputs of diffusers for tests/model/test_oracle.py, from examples/tiny.

Run ``python tests/parity/record.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.model.model_oracle import CASES  # noqa: E402
from tests.parity.compare import theirs  # noqa: E402
from tests.parity.make_model import reference  # noqa: E402


def main() -> None:
    pipeline = reference(HERE.parents[1] / "examples" / "tiny")
    folder = HERE.parent / "model" / "oracle"
    folder.mkdir(exist_ok=True)
    for name, request in CASES.items():
        outputs = theirs(pipeline, request)
        np.savez_compressed(folder / f"{name.replace(' ', '-')}.npz", **outputs)


if __name__ == "__main__":
    main()
