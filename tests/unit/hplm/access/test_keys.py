"""The text of a key."""

from __future__ import annotations

import base64
import hashlib
import re
import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hplm.access.keys import checked_key, from_header, header_of, new_key, parse
from hplm.errors import ConfigError

ID = "abcdefgh234567ab"
SECRET = "A" * 41 + "-_"


def test_a_key_has_a_prefix_80_public_bits_and_256_secret_bits() -> None:
    key = new_key()
    assert re.fullmatch("hplm_[a-z2-7]{16}_[A-Za-z0-9_-]{43}", key.text())
    assert len(base64.b32decode(key.id.upper())) == 10
    assert len(base64.urlsafe_b64decode(key.secret + b"=")) == 32


def test_two_keys_differ_in_id_and_secret() -> None:
    keys = [new_key() for _ in range(100)]
    assert len({key.id for key in keys}) == len({key.secret for key in keys}) == 100


def test_the_text_of_a_key_is_parsed_to_the_same_key() -> None:
    key = new_key()
    assert parse(key.text().encode()) == key
    assert key.sha256() == hashlib.sha256(key.secret).digest()


@given(st.binary(max_size=100))
@example(f"hplm_{ID}_{SECRET}".encode())
@example(f"hplm_{ID}_{SECRET}\n".encode())
@example(f"HPLM_{ID}_{SECRET}".encode())
@example(f"hplm_{ID}_{SECRET}A".encode())
def test_what_is_parsed_is_the_text_of_a_key_and_nothing_else_is(raw: bytes) -> None:
    key = parse(raw)
    is_key = re.fullmatch(rb"hplm_[a-z2-7]{16}_[A-Za-z0-9_-]{43}", raw) is not None
    assert (key is not None) == is_key
    assert key is None or key.text().encode() == raw


@given(st.integers(0, 64), st.binary(min_size=1, max_size=1))
def test_a_key_with_another_byte_is_another_key_or_none(place: int, byte: bytes) -> None:
    raw = f"hplm_{ID}_{SECRET}".encode()
    changed = raw[:place] + byte + raw[place + 1 :]
    assert (parse(changed) == parse(raw)) == (changed == raw)


def test_no_secret_is_in_what_python_prints_of_a_key() -> None:
    key = new_key()
    shown = f"{key!r} {key!s} {key}"
    try:
        raise ValueError(key)
    except ValueError as error:
        shown += "".join(traceback.format_exception(error))
    assert key.id in shown
    assert key.secret.decode() not in shown


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b"Bearer k", b"k"),
        (b"bearer  k ", b"k"),
        (b"Bearer k\r\n", b"k"),
        (b"Basic k", b""),
        (b"Bearer", b""),
        (b"Bearer a b", b""),
        (b"", b""),
    ],
)
def test_a_header_gives_the_text_after_bearer(header: bytes, key: bytes) -> None:
    assert from_header(header) == key


def test_a_clients_header_is_read_back() -> None:
    key = new_key()
    assert from_header(header_of(key.text())["authorization"].encode()) == key.text().encode()


@pytest.mark.parametrize("wrong", ["", "sk-secret", f"hplm_{ID}_ {SECRET}", f"hplm_{ID}_{SECRET[:-1]}é", 7])
def test_a_key_of_another_form_is_refused_without_showing_it(wrong: str) -> None:
    with pytest.raises(ConfigError, match="hplm key create") as caught:
        checked_key(wrong)
    assert not wrong or str(wrong) not in str(caught.value)


def test_a_key_loses_white_space_at_its_ends() -> None:
    text = new_key().text()
    assert header_of(f" {text}\r\n") == header_of(text)
