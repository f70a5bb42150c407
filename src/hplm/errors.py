"""All errors that a user can meet, in one tree:

    HplmError                      code on the wire        Triton / exit status
    |- RequestError                (an infer request is at fault)
    |  |- EmptyTextError           EMPTY_TEXT              INVALID_ARG
    |  |- TextEncodingError        TEXT_NOT_UTF8           INVALID_ARG
    |  |- TextTooLargeError        TEXT_TOO_LARGE          INVALID_ARG
    |  |- TextCountError           TEXT_COUNT              INVALID_ARG
    |  |- TenantNameError          BAD_TENANT_NAME         INVALID_ARG
    |  |- UnknownTenantError       UNKNOWN_TENANT          NOT_FOUND
    |  |- HiddenStatesError        BAD_HIDDEN_STATES       INVALID_ARG
    |  |- BadInputError            BAD_INPUT               INVALID_ARG
    |  |- ForbiddenError           FORBIDDEN               INVALID_ARG
    |- ServerError                 (the server cannot answer now)
    |  |- UnreachableError         UNREACHABLE             UNAVAILABLE
    |  |- InternalError            INTERNAL                INTERNAL
    |  |- QueueFullError           QUEUE_FULL              UNAVAILABLE
    |  |- QuotaError               QUOTA                   UNAVAILABLE
    |  |- DeadlineError            DEADLINE_UNMEETABLE     UNAVAILABLE
    |  |- CancelledError           CANCELLED               UNAVAILABLE
    |  |- StoppingError            STOPPING                UNAVAILABLE
    |  |- StageDownError           STAGE_DOWN              UNAVAILABLE
    |- ArtifactError               (a file is at fault)
    |  |- CorruptArtifactError     CORRUPT_ARTIFACT        INTERNAL
    |  |- WrongBaseError           WRONG_BASE              INTERNAL
    |  |- MissingArtifactError     MISSING_ARTIFACT        INTERNAL
    |  |- StoreUnavailableError    STORE_UNAVAILABLE       UNAVAILABLE
    |- RegistryError               (the registry cannot be used)
    |  |- RegistryUnavailableError REGISTRY_UNAVAILABLE    UNAVAILABLE
    |  |- CorruptRegistryError     CORRUPT_REGISTRY        INTERNAL
    |  |- MissingRegistryError     MISSING_REGISTRY        INTERNAL
    |- ManageError                 (a manage request is at fault, or cannot be done)
    |  |- UnknownDomainError       UNKNOWN_DOMAIN          NOT_FOUND
    |  |- UnknownVersionError      UNKNOWN_VERSION         NOT_FOUND
    |  |- UnknownJobError          UNKNOWN_JOB             NOT_FOUND
    |  |- UploadError              BAD_UPLOAD              INVALID_ARG
    |  |- UnknownUploadError       UNKNOWN_UPLOAD          NOT_FOUND
    |  |- UnknownKeyError          UNKNOWN_KEY             NOT_FOUND
    |  |- DomainInUseError         DOMAIN_IN_USE           INVALID_ARG
    |  |- ConflictError            CONFLICT                INVALID_ARG
    |  |- AlreadyThereError        ALREADY_EXISTS          INVALID_ARG
    |  |- LeaseLostError           LEASE_LOST              INVALID_ARG
    |  |- BadManageRequestError    BAD_MANAGE_REQUEST      INVALID_ARG
    |  |- CorpusTooSmallError      CORPUS_TOO_SMALL        INVALID_ARG
    |  |- ContractError            CONTRACT_REFUSED        INVALID_ARG
    |  |- JobCancelledError        JOB_CANCELLED           INVALID_ARG
    |  |- WorkerLostError          WORKER_LOST             INTERNAL
    |- ConfigError                 BAD_CONFIG              INTERNAL
    |- DataError                   BAD_DATA                INVALID_ARG
    |- DownloadError               DOWNLOAD_FAILED         UNAVAILABLE
    |- TritonNotFoundError         TRITON_NOT_FOUND        UNAVAILABLE
    |- StartError                  START_FAILED            UNAVAILABLE
    `- TritonEndedError            TRITON_ENDED            UNAVAILABLE

On the wire an error is `CODE: message`. The client turns it back into an error of the same class.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from hplm.core.characters import shown

Status = Literal["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "INTERNAL"]


class HplmError(Exception):
    """Base of all errors. Each leaf sets `code`; `status` is the Triton status that the error has on the wire."""

    code: ClassVar[str] = ""
    status: ClassVar[Status] = "INTERNAL"

    def __str__(self) -> str:
        # A message may repeat names and labels from a file, with characters that cannot be seen.
        return shown(super().__str__())

    def wire(self) -> str:
        """Return `CODE: message`, the form of the error on the wire."""
        return f"{self.code}: {self}"


class RequestError(HplmError):
    """The request is at fault; sending it again unchanged cannot help."""

    status: ClassVar[Status] = "INVALID_ARG"


class EmptyTextError(RequestError):
    code = "EMPTY_TEXT"


class TextEncodingError(RequestError):
    code = "TEXT_NOT_UTF8"


class TextTooLargeError(RequestError):
    code = "TEXT_TOO_LARGE"


class TextCountError(RequestError):
    """The request has neither one text nor a pair, or the tenant was trained on the other of the two."""

    code = "TEXT_COUNT"


class TenantNameError(RequestError):
    code = "BAD_TENANT_NAME"


class UnknownTenantError(RequestError):
    code = "UNKNOWN_TENANT"
    status = "NOT_FOUND"


class HiddenStatesError(RequestError):
    code = "BAD_HIDDEN_STATES"


class BadInputError(RequestError):
    """A tensor of the request has a name, dtype or shape that the model does not take."""

    code = "BAD_INPUT"


class ForbiddenError(RequestError):
    """The key does not allow the request, or the operator's settings or a proxy before the server do not.

    The message is the same for an unknown tenant and for a missing, wrong, revoked or expired key. Triton has no status 401
    or 403, so the status is 400.
    """

    code = "FORBIDDEN"


class ServerError(HplmError):
    """The request is valid, but the server cannot answer it now."""

    status: ClassVar[Status] = "UNAVAILABLE"


class UnreachableError(ServerError):
    code = "UNREACHABLE"


class InternalError(ServerError):
    code = "INTERNAL"
    status = "INTERNAL"


class QueueFullError(ServerError):
    """Too many requests wait already, of this tenant or of all tenants; try again later."""

    code = "QUEUE_FULL"


class QuotaError(ServerError):
    """The tenant has used up a quota; the message says which, and `wait_s` after how many seconds to try again.

    Triton has no status 429, so the status is 503.
    """

    code = "QUOTA"

    @classmethod
    def after(cls, quota: str, wait_s: float) -> QuotaError:
        """Return the error for a quota, such as "requests/s", that has room again after `wait_s` seconds."""
        return cls(f"the tenant's quota of {quota} is used up; try again in {max(wait_s, 0.001):.3f} s")

    @property
    def wait_s(self) -> float | None:
        """Seconds after which to try again; None if the message has none."""
        found = re.search(r"try again in (\d+\.\d+) s", str(self))
        return None if found is None else float(found[1])


class DeadlineError(ServerError):
    """The deadline is past or cannot be met, so the request was not computed; or the client stopped waiting after it."""

    code = "DEADLINE_UNMEETABLE"


class CancelledError(ServerError):
    """The client no longer waits for the answer."""

    code = "CANCELLED"


class StoppingError(ServerError):
    """The server is shutting down."""

    code = "STOPPING"


class StageDownError(ServerError):
    """The process of a stage has died; `hplm serve` loads its model again within seconds."""

    code = "STAGE_DOWN"


class ArtifactError(HplmError):
    """A file of the store is at fault."""


class CorruptArtifactError(ArtifactError):
    code = "CORRUPT_ARTIFACT"


class WrongBaseError(ArtifactError):
    code = "WRONG_BASE"


class MissingArtifactError(ArtifactError):
    code = "MISSING_ARTIFACT"


class StoreUnavailableError(ArtifactError):
    """The store's disk is full, read-only or gone, or the system has no memory or files left. A later try may succeed."""

    code = "STORE_UNAVAILABLE"
    status = "UNAVAILABLE"


# Errors that may pass: a disk or a process may get room again, a disk may come back or accept writes again. A file that is
# missing or forbidden stays so.
PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)


class RegistryError(HplmError):
    """The registry cannot be used. Tenants that the server knows already are still served."""


class RegistryUnavailableError(RegistryError):
    """The registry is locked, unreachable, read-only or of another version, or its disk is full. A later try may succeed."""

    code = "REGISTRY_UNAVAILABLE"
    status = "UNAVAILABLE"


class CorruptRegistryError(RegistryError):
    code = "CORRUPT_REGISTRY"


class MissingRegistryError(RegistryError):
    code = "MISSING_REGISTRY"


class ManageError(HplmError):
    """A manage request is at fault, came too late, or is not allowed."""

    status: ClassVar[Status] = "INVALID_ARG"


class UnknownDomainError(ManageError):
    """The domain or the base does not exist."""

    code = "UNKNOWN_DOMAIN"
    status = "NOT_FOUND"


class UnknownVersionError(ManageError):
    code = "UNKNOWN_VERSION"
    status = "NOT_FOUND"


class UnknownJobError(ManageError):
    code = "UNKNOWN_JOB"
    status = "NOT_FOUND"


class UnknownUploadError(ManageError):
    code = "UNKNOWN_UPLOAD"
    status = "NOT_FOUND"


class UnknownKeyError(ManageError):
    code = "UNKNOWN_KEY"
    status = "NOT_FOUND"


class DomainInUseError(ManageError):
    """Tenants or other domains use the domain. The message names them, so it is for operators only."""

    code = "DOMAIN_IN_USE"


class ConflictError(ManageError):
    """The state that the request started from has changed meanwhile: read it again, then decide."""

    code = "CONFLICT"


class AlreadyThereError(ManageError):
    code = "ALREADY_EXISTS"


class LeaseLostError(ManageError):
    """Another worker process has the job by now, or the job has ended: stop, and publish nothing."""

    code = "LEASE_LOST"


class BadManageRequestError(ManageError):
    code = "BAD_MANAGE_REQUEST"


class UploadError(ManageError):
    """The uploaded bytes differ from what the upload announced."""

    code = "BAD_UPLOAD"


class CorpusTooSmallError(ManageError):
    code = "CORPUS_TOO_SMALL"


class ContractError(ManageError):
    """The accuracy or latency that a tenant asked for cannot be promised. The message has the nearest offer."""

    code = "CONTRACT_REFUSED"


class JobCancelledError(ManageError):
    code = "JOB_CANCELLED"


class WorkerLostError(ManageError):
    """The worker process of the job died several times."""

    code = "WORKER_LOST"
    status = "INTERNAL"


class ConfigError(HplmError):
    code = "BAD_CONFIG"


class DataError(HplmError):
    """Labelled data or a corpus cannot be used in this form."""

    code = "BAD_DATA"
    status = "INVALID_ARG"


class DownloadError(HplmError):
    code = "DOWNLOAD_FAILED"
    status = "UNAVAILABLE"


class TritonNotFoundError(HplmError):
    code = "TRITON_NOT_FOUND"
    status = "UNAVAILABLE"


class StartError(HplmError):
    code = "START_FAILED"
    status = "UNAVAILABLE"


class TritonEndedError(HplmError):
    """Triton, or a process that it started, has been killed or has crashed before Triton was ready. A restart may help."""

    code = "TRITON_ENDED"
    status = "UNAVAILABLE"


def check_ending(name: str, endings: tuple[str, ...]) -> None:
    """Raise DataError if a file's name has none of the endings, which name the format."""
    if not name.lower().endswith(endings):
        raise DataError(f"{name}: the ending must be one of {', '.join(endings)}")


def unreadable(name: str, error: OSError) -> HplmError:
    """Return the error for data that cannot be read: DataError, or StoreUnavailableError if `error` may pass.

    Raise it from `error`.
    """
    kind = StoreUnavailableError if error.errno in PASSING else DataError
    return kind(f"{name} cannot be read: {error.strerror}")


def unusable(problem: str, error: OSError) -> ArtifactError:
    """Return the error for a file of the store: CorruptArtifactError, or StoreUnavailableError if `error` may pass.

    Raise it from `error`.
    """
    if error.errno in PASSING:
        return StoreUnavailableError(f"{problem} now ({error}); try again")
    return CorruptArtifactError(f"{problem} ({error})")


def leaves(root: type[HplmError] = HplmError) -> Iterator[type[HplmError]]:
    """Yield every error class that has no subclasses; only these are raised."""
    for child in root.__subclasses__():
        if child.__subclasses__():
            yield from leaves(child)
        else:
            yield child


def about_text(error: HplmError, index: int, count: int) -> HplmError:
    """Return the error of text `index` of a request. It names the text if the request has several (`count`)."""
    return error if count == 1 else type(error)(f"text {index + 1} of {count}: {error}")


def from_wire(message: str) -> HplmError | None:
    """Return the typed error of a wire message, None if the message has no code of hplm.

    Triton may put its own words before the code ("in ensemble 'hbert', ..."), so the code is searched for.
    """
    found = [(position, leaf) for leaf in leaves() if (position := message.find(f"{leaf.code}: ")) >= 0]
    if not found:
        return None
    position, leaf = min(found, key=lambda pair: pair[0])
    return leaf(message[position + len(leaf.code) + 2 :])


def from_stored(error: Mapping[str, str]) -> HplmError:
    """Return the typed error that a job ended with, from its `code` and `message`."""
    text = f"{error['code']}: {error['message']}"
    return from_wire(text) or InternalError(text)
