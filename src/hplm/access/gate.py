"""The gate of a stage: decides whether the texts of a request may be answered, before anything else looks at them.

A first stage is the stage that a client calls. Its gate checks the key of each text's tenant, or a proof of another stage
of this server. An inner stage takes proofs only. A proof is a `hplm.access.proof` behind the public id of the key, so that
an inner stage refuses it as soon as the key is revoked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.access.access_mode import AccessMode, access_mode
from hplm.access.key_ring import REFUSED, KeyRing
from hplm.access.keys import HEADER, ID_CHARACTERS, from_header
from hplm.access.proof import PROOF_CHARACTERS, Prover
from hplm.errors import ForbiddenError, about_text
from hplm.store.layout import Store

# The key id of what `hplm serve` itself asks, which has no key. It counts for no tenant.
SERVER = "-" * ID_CHARACTERS
# Bytes of a proof on the wire: the key's id and the proof itself.
PROOF_BYTES = ID_CHARACTERS + PROOF_CHARACTERS
NO_PROOF = bytes(PROOF_BYTES)
# What a proof is about if the tenant's version is not known yet.
TEXTS = "texts"
# What a proof is about with which `hplm serve` asks the manager. The proof names no tenant.
MANAGE = "manage"
# The scheme of the header `authorization` in which `hplm serve` sends a proof. Clients send `Bearer KEY`.
_SCHEME = b"Proof "


@dataclass(frozen=True)
class Credentials:
    """The header `authorization` of a request, and a key or a proof for each text; None if the tensor is missing.

    A proof counts before a key, and a key before the header.
    """

    header: bytes = b""
    keys: Sequence[bytes] | None = None
    proofs: Sequence[bytes] | None = None


class Gate(ABC):
    """Decides which requests a stage may answer. Safe to use from several threads."""

    @property
    @abstractmethod
    def needs_keys(self) -> bool:
        """Whether each request needs a key."""

    @abstractmethod
    def start(self) -> None:
        """Begin to follow the registry."""

    @abstractmethod
    def close(self) -> None:
        """End the thread that follows the registry."""

    @property
    @abstractmethod
    def failures(self) -> int:
        """The number of polls of the registry that failed or took too long."""

    @abstractmethod
    def admit(self, tenants: Sequence[bytes], shown: Credentials) -> list[str]:
        """Return the id of each text's key, for `sign`; `tenants` has the tenant of each text.

        Raises ForbiddenError, which names the first text that is refused if there are several.
        """

    @abstractmethod
    def admit_inner(
        self,
        tenants: Sequence[bytes],
        versions: Sequence[int],
        proofs: Sequence[bytes] | None,
        *,
        is_inner: bool = False,
    ) -> list[str]:
        """Return the id of each text's key, see `admit`.

        Raises ForbiddenError unless each text has a proof of `sign` for its tenant, version and `is_inner`.
        """

    @abstractmethod
    def sign(self, key_id: str, tenant: str, version: int | None = None, *, is_inner: bool = False) -> bytes:
        """Return the proof, PROOF_BYTES long, that `key_id` was admitted for a text of a tenant.

        Without `version` the proof is for a first stage, else for the inner stages of this version. `is_inner`: another model
        of this server has asked for the text, and counts it. A client must not claim that, so it is signed too.
        """


class OpenGate(Gate):
    """The gate of a server without keys: it admits every request."""

    needs_keys = False
    failures = 0

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def admit(self, tenants: Sequence[bytes], shown: Credentials) -> list[str]:
        return [""] * len(tenants)

    def admit_inner(
        self,
        tenants: Sequence[bytes],
        versions: Sequence[int],
        proofs: Sequence[bytes] | None,
        *,
        is_inner: bool = False,
    ) -> list[str]:
        return [""] * len(tenants)

    def sign(self, key_id: str, tenant: str, version: int | None = None, *, is_inner: bool = False) -> bytes:
        return NO_PROOF


class KeyGate(Gate):
    """The gate of a server whose requests need keys. Raises RegistryError if the keys cannot be read on construction."""

    needs_keys = True

    def __init__(self, ring: KeyRing, prover: Prover) -> None:
        self.ring = ring
        self._prover = prover

    def start(self) -> None:
        self.ring.start()

    def close(self) -> None:
        self.ring.close()

    @property
    def failures(self) -> int:
        return self.ring.failures

    def admit(self, tenants: Sequence[bytes], shown: Credentials) -> list[str]:
        count = len(tenants)
        proofs, keys = shown.proofs, shown.keys
        if proofs is None and keys is None:
            if shown.header.startswith(_SCHEME):
                proofs = [shown.header[len(_SCHEME) :]] * count
            else:
                keys = [from_header(shown.header)] * count
        key_ids = []
        for index, raw in enumerate(tenants):
            tenant = _text_of(raw)
            try:
                if proofs is not None:
                    key_ids.append(self._proven(proofs[index], tenant, TEXTS))
                else:
                    assert keys is not None
                    key_ids.append(self.ring.check(keys[index], tenant))
            except ForbiddenError as error:
                raise about_text(error, index, count) from None
        return key_ids

    def admit_inner(
        self,
        tenants: Sequence[bytes],
        versions: Sequence[int],
        proofs: Sequence[bytes] | None,
        *,
        is_inner: bool = False,
    ) -> list[str]:
        key_ids = []
        for index, (raw, version) in enumerate(zip(tenants, versions, strict=True)):
            try:
                proof = NO_PROOF if proofs is None else proofs[index]
                key_ids.append(self._proven(proof, _text_of(raw), _version_subject(version, is_inner)))
            except ForbiddenError as error:
                raise about_text(error, index, len(tenants)) from None
        return key_ids

    def sign(self, key_id: str, tenant: str, version: int | None = None, *, is_inner: bool = False) -> bytes:
        subject = TEXTS if version is None else _version_subject(version, is_inner)
        return key_id.encode() + self._prover.sign(tenant, _subject(key_id, subject))

    def _proven(self, raw: bytes, tenant: str, subject: str) -> str:
        """Return the id of the key that a proof names. Raises ForbiddenError if the proof is not valid, or the key is gone."""
        key_id, signed = _text_of(raw[:ID_CHARACTERS]), raw[ID_CHARACTERS:]
        made_s = self._prover.check(signed, tenant, _subject(key_id, subject))
        if key_id != SERVER and self.ring.is_gone(key_id, made_s):
            raise ForbiddenError(REFUSED)
        return key_id


def open_gate(store: Store, mode: AccessMode | None = None) -> Gate:
    """Return the gate of a stage over a store, by default as this process's environment says.

    Raises ConfigError if the environment is wrong, RegistryError if the keys cannot be read.
    """
    mode = access_mode() if mode is None else mode
    return (
        OpenGate()
        if mode.proof_secret is None
        else KeyGate(KeyRing(store, folder=mode.folder), Prover(mode.proof_secret))
    )


def proof_rows(proofs: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Return proofs as the tensor PROOF, `[texts, PROOF_BYTES]`."""
    return np.frombuffer(b"".join(proofs), np.uint8).reshape(len(proofs), PROOF_BYTES)


def server_proof(mode: AccessMode, tenant: str, subject: str) -> bytes | None:
    """Return the proof with which `hplm serve` itself asks for a tenant's answer; None if no key is needed.

    The proof is valid for 10 minutes. `subject` is TEXTS, MANAGE without a tenant, or a tenant's version for inner stages.
    """
    if mode.proof_secret is None:
        return None
    return SERVER.encode() + Prover(mode.proof_secret).sign(tenant, _subject(SERVER, subject))


def server_header(mode: AccessMode, tenant: str) -> dict[str, str]:
    """Return the header with a proof of `server_proof` for TEXTS, empty if no key is needed."""
    proof = server_proof(mode, tenant, TEXTS)
    return {} if proof is None else {HEADER: (_SCHEME + proof).decode()}


def is_server(prover: Prover, key: bytes) -> bool:
    """Return whether a manage request has a proof of `server_proof` for MANAGE in place of a key: `hplm serve` itself asks."""
    if not key.startswith(SERVER.encode()):
        return False
    try:
        prover.check(key[ID_CHARACTERS:], "", _subject(SERVER, MANAGE))
    except ForbiddenError:
        return False
    return True


def _version_subject(version: int, is_inner: bool) -> str:
    return f"{version} inner" if is_inner else str(version)


def _subject(key_id: str, subject: str) -> str:
    return f"{key_id} {subject}"


def _text_of(raw: bytes) -> str:
    """Return bytes of a client as text. Bytes that are no UTF-8 give a text that is no name."""
    return raw.decode("utf-8", "replace")
