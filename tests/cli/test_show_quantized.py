"""show lists the quantization of components, and omits it without quantization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.cli.verbs.show import _format_quantization
from tests.importer.valued import make_valued
from tests.process import Aimage


def rows(text: str) -> dict[str, str]:
    """Return the lines of the component table by their first word."""
    table = text[text.index("COMPONENT") :].splitlines()
    return {line.split()[0]: line for line in table}


def test_show_lists_the_quantization_of_components(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    here, model = aimage(), make_valued(tmp_path / "model", "F32")
    here("create", "m", model.directory, "--quantize", "transformer=int8,text_encoder=int4")
    found = rows(here("show", "m").out)
    assert found["COMPONENT"].split()[2:] == ["TENSORS", "SIZE", "QUANTIZED"]
    assert found["transformer"].endswith("kB   int8 (23 of 34 tensors)")
    assert found["text_encoder"].endswith("kB  int4 (1 of 4 tensors)")
    assert found["vae"].endswith("B")
    column = found["COMPONENT"].index("QUANTIZED")
    assert found["transformer"].index("int8") == found["text_encoder"].index("int4") == column
    facts = here("show", "m", "--json").value["config"]["components"]
    assert facts["transformer"]["quantization"]["tensors"] == 23


def test_show_omits_quantization_of_plain_models(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    here, model = aimage(), make_valued(tmp_path / "model", "F32")
    here("create", "m", model.directory)
    found = rows(here("show", "m").out)
    assert found["COMPONENT"].split()[1:] == ["CLASS", "TENSORS", "SIZE"]
    assert "QUANTIZED" not in here("show", "m", "--layers").out


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({}, ""),
        ({"quantization": "int8"}, ""),
        ({"quantization": {"type": "int8", "tensors": "3"}, "tensors": 9}, "int8"),
        ({"quantization": {"type": "mixed", "tensors": 3}, "tensors": []}, "mixed (3 tensors)"),
        ({"quantization": {"type": "a\nb", "tensors": 3}, "tensors": 3}, "a b (3 of 3 tensors)"),
    ],
)
def test_show_accepts_configs_without_quantization_details(part: dict[str, Any], said: str) -> None:
    assert _format_quantization(part) == said
