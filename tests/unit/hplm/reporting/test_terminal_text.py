from __future__ import annotations

import json

import pytest

from hplm.reporting.terminal_text import visible


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "\x9b", "\u202e", "\u2028", "\udcff", "\r"])
def test_what_steers_a_terminal_or_has_no_encoding_is_written_as_json_writes_it(text: str) -> None:
    shown = visible(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert json.loads(f'"{shown}"') == text


@pytest.mark.parametrize("text", ["a\tb\nc", "caf\u00e9 \U0001f642"])
def test_other_text_stays(text: str) -> None:
    assert visible(text) == text


def test_in_a_line_neither_tabs_nor_ends_of_lines_stay() -> None:
    assert visible("a\tb\nc", is_line=True) == r"a\u0009b\u000ac"
