"""Proofs: how an inner stage knows that one of our first stages has checked the request's key.

A first stage signs the tenant, what it will call (`subject`: the id of the tenant's version, or the name of the base if no
version is known yet) and the time. The secret is drawn at each start of the server and never leaves its processes.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable

from hplm.errors import ForbiddenError

# Seconds for which a proof is valid: a request may wait that long between two stages.
VALID_S = 600.0
# Seconds that the clock may step back between the signing and the check.
CLOCK_STEP_S = 5.0
SECRET_BYTES = 32
_TIME_BYTES = 8
PROOF_CHARACTERS = 54  # base64 of 8 bytes of time and 32 bytes of HMAC
REFUSED = "this model answers only calls of the server's own first stage; call the model that clients call"


class Prover:
    """Signs and checks proofs with the secret of one start. Its `repr` does not show the secret."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """`secret` has 32 bytes; `clock` returns unix seconds."""
        assert len(secret) == SECRET_BYTES
        self._secret, self._clock = secret, clock

    def sign(self, tenant: str, subject: str) -> bytes:
        """Return the proof, ASCII, for a call about a tenant's version or a base."""
        made = round(self._clock() * 1e6).to_bytes(_TIME_BYTES, "big")
        return base64.urlsafe_b64encode(made + self._mac(made, tenant, subject)).rstrip(b"=")

    def check(self, proof: bytes, tenant: str, subject: str) -> float:
        """Return when `sign` made the proof for this tenant and subject, in unix seconds.

        Raises ForbiddenError for any other bytes, and for a proof that is older than 10 minutes.
        """
        try:
            raw = base64.b64decode(proof + b"=" * (-len(proof) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        made, mac = raw[:_TIME_BYTES], raw[_TIME_BYTES:]
        is_signed = hmac.compare_digest(mac, self._mac(made, tenant, subject))
        made_s = int.from_bytes(made, "big") / 1e6
        age_s = self._clock() - made_s
        if not (is_signed and -CLOCK_STEP_S <= age_s <= VALID_S):
            raise ForbiddenError(REFUSED)
        return made_s

    def _mac(self, made: bytes, tenant: str, subject: str) -> bytes:
        # Names hold no zero byte, so no two pairs of a tenant and a subject give the same message.
        message = b"\0".join((made, tenant.encode(), subject.encode()))
        return hmac.digest(self._secret, message, "sha256")
