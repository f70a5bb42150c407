from __future__ import annotations

from pathlib import Path

from hplm_loadtest.workloads.texts import lines


def test_a_text_of_a_file_ends_with_its_line_and_not_at_a_separator_within(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffgood\u2028film\r\n\n bad\x0cfilm \n".encode())
    assert lines(file) == ["good\u2028film", "bad\x0cfilm"]
