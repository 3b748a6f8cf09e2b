"""Mean states of tiny encoders by transformers, kept in tests/text/encoder_vectors.json.

``python -m tests.parity.encoder_vectors`` writes the file.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from tests.text.tiny_encoder import KINDS, make_config, make_weights, write_json

FILE = Path(__file__).parents[1] / "text" / "encoder_vectors.json"
VOCABULARY, POSITIONS = 50, 200
# Tokens, among them the one for padding
TEXTS = [[2, 7, 1, 9, 3], [2, *range(4, 44), 3], [2, *(5 + (3 * n) % 40 for n in range(170)), 3]]


def compute_means(kind: str) -> list[list[float]]:
    """Return the mean of the last hidden states of each text."""
    import torch
    import transformers

    config = make_config(kind, VOCABULARY) | {"max_position_embeddings": POSITIONS}
    with tempfile.TemporaryDirectory() as name:
        write_json(Path(name) / "config.json", config)
        save_file(make_weights(kind, config, 0), Path(name) / "model.safetensors")
        network: Any = transformers.AutoModel.from_pretrained(name, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [network(torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    return [[round(value, 6) for value in state.mean(0).tolist()] for state in states]


if __name__ == "__main__":
    means = {kind: compute_means(kind) for kind in KINDS}
    lines = [f"{json.dumps(kind)}: {json.dumps(rows)}" for kind, rows in means.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
