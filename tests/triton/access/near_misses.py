"""Keys that are nearly right: each must be refused."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping

from hypothesis import strategies as st

from hplm.access.gate import PROOF_BYTES, SERVER
from hplm.access.keys import new_key, parse

_BASE64URL = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


def _flipped(text: str, rng: random.Random, first: int, last: int) -> str:
    """Return the text with one bit of a character changed, between two positions."""
    at = rng.randrange(first, last)
    return text[:at] + chr(ord(text[at]) ^ (1 << rng.randrange(7))) + text[at + 1 :]


def _other_letter(text: str, rng: random.Random, first: int, last: int) -> str:
    """Return the text with one character changed to another that a secret may have."""
    at = rng.randrange(first, last)
    return text[:at] + rng.choice(_BASE64URL.replace(text[at], "")) + text[at + 1 :]


def _same_bytes(text: str, rng: random.Random) -> str:
    """Return the key with another last character that decodes to the same 256 bits: base64url has two bits more."""
    at = _BASE64URL.index(text[-1])
    return text[:-1] + _BASE64URL[at & ~3 | (at + rng.randrange(1, 4)) & 3]


def _secret_at(text: str) -> int:
    return text.index("_", len("hplm_")) + 1


def _sha256(text: str) -> str:
    """Return the key with the checksum of its secret in place of the secret: whoever reads the registry knows it."""
    key = parse(text.encode())
    assert key is not None
    return f"{text[: _secret_at(text)]}{key.sha256().hex()[:43]}"


# How a right key is made wrong. Each change gives another text than the key.
CHANGES: Mapping[str, Callable[[str, random.Random], str]] = {
    "one bit of the secret": lambda key, rng: _flipped(key, rng, _secret_at(key), len(key)),
    "one bit of the id": lambda key, rng: _flipped(key, rng, len("hplm_"), _secret_at(key) - 1),
    "one bit of the prefix": lambda key, rng: _flipped(key, rng, 0, len("hplm_")),
    "one letter of the secret": lambda key, rng: _other_letter(key, rng, _secret_at(key), len(key)),
    "same bytes, other letter": _same_bytes,
    "truncated": lambda key, rng: key[: rng.randrange(len(key))],
    "begins later": lambda key, rng: key[rng.randrange(1, len(key)) :],
    "longer": lambda key, rng: key + rng.choice(("A", "=", "==", "\0", "-", key)),
    "upper case": lambda key, rng: key.upper(),
    "lower case": lambda key, rng: key.lower(),
    "swapped case": lambda key, rng: key.swapcase(),
    "a space within": lambda key, rng: (lambda at: f"{key[:at]} {key[at:]}")(rng.randrange(1, len(key))),
    "secret reversed": lambda key, rng: key[: _secret_at(key)] + key[_secret_at(key) :][::-1],
    "random secret": lambda key, rng: key[: _secret_at(key)] + new_key().secret.decode(),
    "unknown id": lambda key, rng: f"hplm_{new_key().id}_{key[_secret_at(key) :]}",
    "checksum of the secret": lambda key, rng: _sha256(key),
    "id alone": lambda key, rng: key[: _secret_at(key)],
    "secret alone": lambda key, rng: key[_secret_at(key) :],
    "a pattern": lambda key, rng: rng.choice(
        (key[: _secret_at(key)] + "*", "*", "%", ".*", key[: _secret_at(key)] + "." * 43)
    ),
    "empty": lambda key, rng: rng.choice(("", " ", "Bearer", "null", "None", "undefined", "true")),
    "a forged proof": lambda key, rng: (SERVER + "".join(rng.choices(_BASE64URL, k=PROOF_BYTES)))[:PROOF_BYTES],
}


def near_misses(key: str) -> st.SearchStrategy[str]:
    """Draw a key that was made wrong. A change may leave a key without letters as it is."""
    wrong = st.builds(lambda name, rng: CHANGES[name](key, rng), st.sampled_from(sorted(CHANGES)), st.randoms())
    return wrong.filter(lambda made: made != key)
