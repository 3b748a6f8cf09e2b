"""Makes the helpers of tests/model and examples/shapes importable here."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "model"), str(ROOT / "examples" / "shapes")]
