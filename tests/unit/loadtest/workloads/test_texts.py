from __future__ import annotations

from pathlib import Path

from hplm_loadtest.workloads.texts import read_lines


def test_a_text_of_a_file_is_a_whole_line_with_its_unicode_separators(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffgood\u2028film\r\n\n bad\x0cfilm \n".encode())
    assert read_lines(file) == ["good\u2028film", "bad\x0cfilm"]
