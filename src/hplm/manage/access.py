"""Checks the key of each manage request, and notes each request in the audit log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hplm.access.gate import SERVER, is_server
from hplm.access.key_ring import REFUSED_ACTION, KeyRing
from hplm.access.proof import Prover
from hplm.access.roles import allows
from hplm.core import wire
from hplm.errors import ForbiddenError, HplmError, InternalError, UnknownJobError
from hplm.manage import requests
from hplm.manage.audit_log import AuditLog
from hplm.manage.rights import RIGHTS, bases_of, is_change, subject_of, uses_paths
from hplm.registry.access import audit
from hplm.registry.records import PLAN


@dataclass(frozen=True)
class Caller:
    """The sender of a manage request: the public id, role and tenant of its key. All are None if the server needs no keys."""

    key_id: str | None = None
    role: str | None = None
    tenant: str | None = None


ANYONE = Caller()
# A command on the store itself: whoever can write the store needs no key.
LOCAL = Caller(role="local")
# `hplm serve` itself, which asks whether the manager answers.
SERVER_CALLER = Caller(SERVER, "read")
# The subject of such a question.
PROBED = f"job:{wire.NO_JOB}"


@dataclass
class Note:
    """The action and subject of a request under way, as far as they are known, and the details of what it changed."""

    action: str = "?"
    subject: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class ManageAccess:
    """Decides which manage requests are answered. Safe to use from several threads."""

    def __init__(self, ring: KeyRing | None, log: AuditLog, prover: Prover | None = None) -> None:
        """Check keys by `ring`. If it is None, the server needs no keys, and each request is allowed.

        `prover` checks the proofs of `hplm serve` itself.
        """
        self._ring, self._log, self._prover = ring, log, prover

    def start(self) -> None:
        """Start to follow the registry's keys."""
        if self._ring is not None:
            self._ring.start()

    def close(self) -> None:
        """Write what is left of the audit log, and stop following the keys."""
        self._log.close()
        if self._ring is not None:
            self._ring.close()

    def refresh(self) -> None:
        """Hear of keys that this process has just created or revoked, without waiting for the next poll."""
        if self._ring is not None:
            self._ring.refresh()

    def admit(self, key: bytes) -> Caller:
        """Return the caller that a key belongs to, before the request is read.

        Raises ForbiddenError if a key is needed and this one is not valid.
        """
        if self._ring is None:
            return ANYONE
        if self._prover is not None and is_server(self._prover, key):
            return SERVER_CALLER
        try:
            found = self._ring.holder(key)
        except ForbiddenError as error:
            self._log.note(None, None, audit.REFUSED_ACTION, "", error.code, is_change=False)
            raise
        return Caller(found.id, found.role, found.tenant)

    @contextmanager
    def noting(self, caller: Caller) -> Iterator[Note]:
        """Note the request that the block answers, with its outcome.

        Questions of readiness are not noted: they come every second, and would crowd out all other entries.
        """
        note = Note()
        outcome = InternalError.code
        try:
            yield note
            outcome = "ok"
        except HplmError as error:
            outcome = error.code
            raise
        finally:
            if note.subject != PROBED or caller not in (ANYONE, SERVER_CALLER):
                # Without the subject, which a refused caller chooses freely, a flood of refused requests is one entry.
                subject = "" if outcome == ForbiddenError.code else note.subject
                changed = outcome == "ok" and is_change(note.action)
                self._log.note(
                    caller.key_id, caller.role, note.action, subject, outcome, note.details, is_change=changed
                )

    def note_unread(self, caller: Caller, error: HplmError) -> None:
        """Note a request that was refused before it was read, though its key is valid."""
        if caller != SERVER_CALLER:
            self._log.note(caller.key_id, caller.role, Note.action, Note.subject, error.code, is_change=False)

    def check(self, caller: Caller, note: Note, action: str, request: requests.ManageRequest) -> None:
        """Write the request into its note. Raises ForbiddenError if the caller's key does not allow the request."""
        note.action, note.subject = action, subject_of(request)
        if caller.role is None or caller == LOCAL:
            return
        # A tenant chooses neither files of the server nor domains: both may be those of other tenants.
        is_foreign = caller.tenant is not None and (uses_paths(request) or getattr(request, "domain", None) is not None)
        if is_foreign or not allows(caller.role, caller.tenant, RIGHTS[action], getattr(request, "tenant", None)):
            raise ForbiddenError(REFUSED_ACTION)


def check_bases(caller: Caller, request: requests.ManageRequest, is_on: Callable[[str], bool]) -> None:
    """Raise ForbiddenError if a tenant's key names a base that its tenant is not on: `is_on` tells.

    `is_on` is not called for an operator's key.
    """
    if caller.tenant is not None and not all(map(is_on, bases_of(request))):
        raise ForbiddenError(REFUSED_ACTION)


def check_job(caller: Caller, subject: Callable[[], str]) -> None:
    """Raise ForbiddenError if a tenant's key asks for a job of another subject, or for a job that does not exist.

    `subject` returns the subject of the job or raises UnknownJobError. It is not called for an operator's key.
    """
    if caller.tenant is None:
        return
    try:
        is_own = subject().removeprefix(PLAN) == f"tenant:{caller.tenant}"
    except UnknownJobError:
        is_own = False
    if not is_own:
        raise ForbiddenError(REFUSED_ACTION)
