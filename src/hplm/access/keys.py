"""The text of an access key: `hplm_<id>_<secret>`.

The id is public: 16 characters of base32 in lower case (80 random bits). The secret is 43 characters of base64url (256
random bits). The registry holds the id and the SHA-256 of the secret, so that nobody can read a secret from it. The
prefix makes a leaked key recognisable.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass, field

from hplm.errors import ConfigError

PREFIX = "hplm"
ID_BYTES, SECRET_BYTES = 10, 32
ID_CHARACTERS = 16
# The header that carries a key. Triton forwards it to a model as a parameter of this name.
HEADER = "authorization"
# The environment variable from which commands and scripts take a key.
KEY_VARIABLE = "HPLM_KEY"
_KEY = re.compile(rb"hplm_([a-z2-7]{16})_([A-Za-z0-9_-]{43})")
_BEARER = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Key:
    """A key. Its `repr` and `str` show the public id only; `text` returns the whole key."""

    id: str
    secret: bytes = field(repr=False)

    def text(self) -> str:
        """Return the whole key, which the tenant sends with each request. Show it once and never store it."""
        return f"{PREFIX}_{self.id}_{self.secret.decode()}"

    def sha256(self) -> bytes:
        """Return the SHA-256 of the secret, 32 bytes, as the registry holds it."""
        return hashlib.sha256(self.secret).digest()


def new_key() -> Key:
    """Return a random key."""
    key_id = base64.b32encode(secrets.token_bytes(ID_BYTES)).decode().lower()
    return Key(key_id, secrets.token_urlsafe(SECRET_BYTES).encode())


def parse(raw: bytes) -> Key | None:
    """Return the key of a text; None if the text has not the form of a key. Never raises."""
    match = _KEY.fullmatch(raw)
    return None if match is None else Key(match[1].decode(), match[2])


def from_header(value: bytes) -> bytes:
    """Return the text of the key in a header `authorization: Bearer KEY`; empty if the header has another form."""
    match = _BEARER.fullmatch(value.strip())
    return b"" if match is None else match[1]


def header_of(key: str) -> dict[str, str]:
    """Return the header that carries a key. Raises ConfigError, which does not show the value, if it is not a key."""
    return {HEADER: f"Bearer {checked_key(key)}"}


def checked_key(key: str) -> str:
    """Return a key without white space at its ends. Raises ConfigError, which does not show the value, if it is no key."""
    key = key.strip() if isinstance(key, str) else key
    if not isinstance(key, str) or not key.isascii() or parse(key.encode()) is None:
        raise ConfigError(
            f"the key has not the form {PREFIX}_ID_SECRET: copy all {len(new_key().text())} characters that "
            "`hplm key create` printed"
        )
    return key
