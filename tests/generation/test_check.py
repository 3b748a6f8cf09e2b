"""The check of parameters, and the words of its errors."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, MaxLen, MinLen, MultipleOf

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import check, describe, parse
from clowder_aimage.generation.parameter import ValueType, Words

COUNT = Annotated[int, Ge(1), Le(1000), Words("Steps.")]
SIDE = Annotated[int, Ge(16), Le(8192), MultipleOf(16)]
SCALE = Annotated[float | None, Ge(0.5), Le(1000)]
PART = Annotated[float, Gt(0), Le(1)]
NAME = Annotated[str, MinLen(1), MaxLen(4)]
NOTE = Annotated[str, MaxLen(4)]
FIT = Literal["crop", "pad"]
PIXELS = Annotated[int, Ge(0), Le(9)]
SIDES = tuple[PIXELS, PIXELS]
LIST = Annotated[tuple[str, ...], MaxLen(2)]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (COUNT, "a whole number from 1 to 1000"),
        (SIDE, "a multiple of 16 from 16 to 8192"),
        (SCALE, "a number from 0.5 to 1000"),
        (PART, "a number above 0, up to 1"),
        (NAME, "text of 1 to 4 characters"),
        (NOTE, "text of at most 4 characters"),
        (bool, "true or false"),
        (FIT, "one of crop, pad"),
        (SIDES, "2 whole numbers from 0 to 9"),
        (LIST, "a list of at most 2"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert describe(ValueType.of(annotation)) == words


@pytest.mark.parametrize(
    ("annotation", "stated", "value"),
    [
        (COUNT, 8, 8),
        (COUNT, 8.0, 8),
        (SCALE, 3, 3.0),
        (SCALE, None, None),
        (PART, 1, 1.0),
        (FIT, "pad", "pad"),
        (SIDES, [1, 2.0], (1, 2)),
        (LIST, [], ()),
        (bool, True, True),
    ],
)
def test_values_are_returned_as_their_type(annotation: Any, stated: Any, value: Any) -> None:
    checked = check("x", stated, ValueType.of(annotation))
    assert checked == value and type(checked) is type(value)


@pytest.mark.parametrize(
    ("annotation", "stated", "shown", "mistake"),
    [
        (COUNT, 0, ", not 0", "value"),
        (COUNT, 1001, ", not 1001", "value"),
        (COUNT, 1 << 81, "", "value"),
        (COUNT, 8.5, ", not 8.5", "type"),
        (COUNT, True, "", "type"),
        (COUNT, "8", "", "type"),
        (COUNT, None, "", "type"),
        (SIDE, 40, ", not 40", "value"),
        (SCALE, math.nan, "", "value"),
        (SCALE, math.inf, "", "value"),
        (SCALE, -math.inf, "", "value"),
        (SCALE, 10**400, "", "type"),
        (PART, 0.0, ", not 0.0", "value"),
        (NAME, "", "", "value"),
        (NAME, "abcde", "", "value"),
        (FIT, "bend", "", "value"),
        (FIT, 3, ", not 3", "type"),
        (bool, 1, ", not 1", "type"),
        (SIDES, [1], "", "type"),
        (SIDES, "1,2", "", "type"),
        (LIST, ["a", "b", "c"], "", "value"),
    ],
)
def test_wrong_values_are_refused(annotation: Any, stated: Any, shown: str, mistake: str) -> None:
    accepted = ValueType.of(annotation)
    with pytest.raises(UsageError) as caught:
        check("x", stated, accepted)
    assert caught.value.message == f"x must be {describe(accepted)}{shown}"
    assert caught.value.facts == {"parameter": "x", "mistake": mistake}


def test_items_are_checked() -> None:
    with pytest.raises(UsageError, match="x must be a whole number from 0 to 9, not 10"):
        check("x", (1, 10), ValueType.of(SIDES))
    with pytest.raises(UsageError, match="x must be text"):
        check("x", ("a", 3), ValueType.of(LIST))
    with pytest.raises(UsageError, match="not valid Unicode"):
        check("x", "\ud800", ValueType.of(NAME))


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (COUNT, "8", 8),
        (COUNT, "-8", -8),
        (COUNT, "8.0", 8.0),
        (COUNT, "eight", "eight"),
        (COUNT, "1_000", "1_000"),
        (COUNT, "٨", "٨"),
        (COUNT, "9" * 401, "9" * 401),
        (SCALE, "1e3", 1000.0),
        (SCALE, "nan", "nan"),
        (bool, "true", True),
        (bool, "Off", False),
        (bool, "maybe", "maybe"),
        (NAME, "8", "8"),
        (SIDES, "1, 2", (1, 2)),
    ],
)
def test_texts_are_parsed(annotation: Any, text: str, value: Any) -> None:
    parsed = parse(text, ValueType.of(annotation))
    assert parsed == value and type(parsed) is type(value)
