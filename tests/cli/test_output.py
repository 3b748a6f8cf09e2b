"""Output: no text of strangers makes a line, or moves the cursor of a terminal."""

from __future__ import annotations

import json

import pytest

from clowder_aimage.cli.console import output

EVIL = "a\nb\r\x1b[2J\x9b2J\u2028\u202e\ud800\U000e0001\x7f"


def test_a_text_is_one_line_and_several_are_given_one_by_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for lines, count in (
        (EVIL, 1),
        ([EVIL, EVIL], 2),
        (output.format_table([("A", "B"), (EVIL, EVIL)]), 2),
    ):
        output.print_result({}, lines)
        out = capsys.readouterr().out
        assert out.count("\n") == count
        assert out.replace("\n", "").isprintable()


def test_json_is_printable_and_keeps_its_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "wants_json", lambda: True)
    output.print_result({EVIL: [EVIL, "é 雪"]}, "")
    out = capsys.readouterr().out
    assert out[:-1].isprintable() and "é 雪" in out
    assert json.loads(out) == {EVIL: [EVIL, "é 雪"]}


def test_notes_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    output.note(EVIL)
    assert capsys.readouterr().err.replace("\n", "").isprintable()
