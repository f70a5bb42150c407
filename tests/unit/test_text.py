"""Text in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.errors import CorruptArtifactError, EmptyTextError, TextEncodingError, TextTooLargeError
from hplm.nn.base import Base
from hplm.text import TextEncoder, check_not_empty, decode_utf8


def test_a_long_text_is_cut_and_says_so(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 6)
    short, long = encoder.encode(["the red cat", "the red cat runs over the river"])
    assert (len(short.ids), short.truncated) == (5, False)
    assert (len(long.ids), long.truncated) == (6, True)
    assert long.ids[-1] == short.ids[-1]  # [SEP] is kept
    assert long.tokens[-1].tolist()[2] == -1


def test_offsets_count_characters_not_bytes(tiny_base: Base) -> None:
    encoded = TextEncoder(tiny_base.tokenizer_path, 40).encode(["ÄÖ cat"])[0]
    assert encoded.tokens[-2].tolist()[:2] == [3, 6]


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", EmptyTextError),
        (b" \n\t", EmptyTextError),
        (b"caf\xe9", TextEncodingError),
        (b"x" * 1001, TextTooLargeError),
    ],
)
def test_bad_bytes_get_their_own_error(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_utf8(raw, 1000)


def test_a_text_of_control_characters_is_empty(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 40)
    with pytest.raises(EmptyTextError):
        check_not_empty(encoder.encode(["\x01\x02"])[0])


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CorruptArtifactError, match=r"tokenizer\.json"):
        TextEncoder(path, 40)
