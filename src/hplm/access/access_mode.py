"""How a serving process knows whether requests need a key: variables of its environment.

`hplm serve --keys` sets them for Triton and the worker process. Whoever starts `tritonserver` alone sets the mode and the
secret. The folder is only for servers that `hplm serve` starts: it is in memory, and serving processes write into it what
`hplm serve` records in the registry.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hplm.access.proof import SECRET_BYTES
from hplm.errors import ConfigError

MODE_VARIABLE = "HPLM_ACCESS"
SECRET_VARIABLE = "HPLM_PROOF_SECRET"
FOLDER_VARIABLE = "HPLM_ACCESS_FOLDER"
OPEN, KEYS = "open", "keys"


@dataclass(frozen=True)
class AccessMode:
    """Whether requests need a key. With keys, `proof_secret` has the 32 bytes with which stages sign and check proofs.

    `folder` is the folder in memory that serving processes share with `hplm serve`, None without one.
    """

    proof_secret: bytes | None = field(default=None, repr=False)
    folder: Path | None = None

    @property
    def needs_keys(self) -> bool:
        """Whether each request needs a key."""
        return self.proof_secret is not None


def access_mode(environment: Mapping[str, str] = os.environ) -> AccessMode:
    """Return the mode that the environment sets. Raises ConfigError, which shows no secret."""
    mode = environment.get(MODE_VARIABLE, OPEN)
    if mode not in (OPEN, KEYS):
        raise ConfigError(f"{MODE_VARIABLE} must be {OPEN!r} or {KEYS!r}, got {mode!r}")
    if mode == OPEN:
        return AccessMode()
    try:
        secret = bytes.fromhex(environment.get(SECRET_VARIABLE, ""))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{MODE_VARIABLE} is {KEYS!r}, so {SECRET_VARIABLE} must be {2 * SECRET_BYTES} hex digits, the same for all "
            f"processes of one start and drawn anew at each start (`openssl rand -hex {SECRET_BYTES}`); "
            "`hplm serve --keys` sets both"
        )
    folder = environment.get(FOLDER_VARIABLE)
    return AccessMode(secret, Path(folder) if folder else None)


def keys_environment(folder: Path | None = None) -> dict[str, str]:
    """Return the variables of one start that needs keys, with a new secret."""
    shared = {} if folder is None else {FOLDER_VARIABLE: str(folder)}
    return {MODE_VARIABLE: KEYS, SECRET_VARIABLE: secrets.token_hex(SECRET_BYTES), **shared}
