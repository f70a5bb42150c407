"""Every error a user can meet, one tree:

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
    |- ServerError                 (the server cannot answer now)
    |  |- UnreachableError         UNREACHABLE             UNAVAILABLE
    |  |- InternalError            INTERNAL                INTERNAL
    |  |- QueueFullError           QUEUE_FULL              UNAVAILABLE
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
    |- ManageError                 (a manage request is at fault, or who asks)
    |  |- UnknownDomainError       UNKNOWN_DOMAIN          NOT_FOUND
    |  |- UnknownVersionError      UNKNOWN_VERSION         NOT_FOUND
    |  |- UnknownJobError          UNKNOWN_JOB             NOT_FOUND
    |  |- UploadError              BAD_UPLOAD              INVALID_ARG
    |  |- UnknownUploadError       UNKNOWN_UPLOAD          NOT_FOUND
    |  |- DomainInUseError         DOMAIN_IN_USE           INVALID_ARG
    |  |- ConflictError            CONFLICT                INVALID_ARG
    |  |- AlreadyThereError        ALREADY_EXISTS          INVALID_ARG
    |  |- LeaseLostError           LEASE_LOST              INVALID_ARG
    |  |- BadManageRequestError    BAD_MANAGE_REQUEST      INVALID_ARG
    |  |- ForbiddenError           FORBIDDEN               INVALID_ARG
    |  |- CorpusTooSmallError      CORPUS_TOO_SMALL        INVALID_ARG
    |  |- JobCancelledError        JOB_CANCELLED           INVALID_ARG
    |  |- WorkerLostError          WORKER_LOST             INTERNAL
    |- ConfigError                 BAD_CONFIG              INTERNAL
    |- DataError                   BAD_DATA                INVALID_ARG
    |- DownloadError               DOWNLOAD_FAILED         UNAVAILABLE
    |- TritonNotFoundError         TRITON_NOT_FOUND        UNAVAILABLE
    |- StartError                  START_FAILED            UNAVAILABLE
    `- TritonEndedError            TRITON_ENDED            UNAVAILABLE

On the wire an error is `CODE: message`; the client turns it back into the same class.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

Status = Literal["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "INTERNAL"]


class HplmError(Exception):
    """Base of all errors. Leaves set `code`; `status` is the Triton status it travels with."""

    code: ClassVar[str] = ""
    status: ClassVar[Status] = "INTERNAL"

    def wire(self) -> str:
        """`CODE: message`, the form in which Triton carries it."""
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
    """Neither a text nor a pair, or one of them where the tenant was trained on the other."""

    code = "TEXT_COUNT"


class TenantNameError(RequestError):
    code = "BAD_TENANT_NAME"


class UnknownTenantError(RequestError):
    code = "UNKNOWN_TENANT"
    status = "NOT_FOUND"


class HiddenStatesError(RequestError):
    code = "BAD_HIDDEN_STATES"


class BadInputError(RequestError):
    """A tensor's name, dtype or shape is not the model's."""

    code = "BAD_INPUT"


class ServerError(HplmError):
    """The request is fine, the server cannot answer it now."""

    status: ClassVar[Status] = "UNAVAILABLE"


class UnreachableError(ServerError):
    code = "UNREACHABLE"


class InternalError(ServerError):
    code = "INTERNAL"
    status = "INTERNAL"


class QueueFullError(ServerError):
    """Too much waits already, of this tenant or of all; try again later."""

    code = "QUEUE_FULL"


class DeadlineError(ServerError):
    """The deadline is past, or cannot be met: it was not computed. Or the client waits no longer after its deadline."""

    code = "DEADLINE_UNMEETABLE"


class CancelledError(ServerError):
    """Nobody waits for the answer any more."""

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
    """The store's disk is full, read-only or away, or the system has no memory left to open it: trying again may help."""

    code = "STORE_UNAVAILABLE"
    status = "UNAVAILABLE"


# Of a disk or a process: it may have room, be there, or take writes again. A file that is missing or forbidden stays so.
PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)


class RegistryError(HplmError):
    """The registry cannot be used; serving goes on with what it knows."""


class RegistryUnavailableError(RegistryError):
    """Locked, unreachable, read-only, of another version, or its disk is full: trying again may help."""

    code = "REGISTRY_UNAVAILABLE"
    status = "UNAVAILABLE"


class CorruptRegistryError(RegistryError):
    code = "CORRUPT_REGISTRY"


class MissingRegistryError(RegistryError):
    code = "MISSING_REGISTRY"


class ManageError(HplmError):
    """A manage request is at fault, or came too late, or who asks may not."""

    status: ClassVar[Status] = "INVALID_ARG"


class UnknownDomainError(ManageError):
    """There is no such domain, or no such base."""

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


class DomainInUseError(ManageError):
    """Tenants or other domains stand on the domain; the message names them, so it is for operators only."""

    code = "DOMAIN_IN_USE"


class ConflictError(ManageError):
    """What the request started from was changed meanwhile; look again, then decide."""

    code = "CONFLICT"


class AlreadyThereError(ManageError):
    code = "ALREADY_EXISTS"


class LeaseLostError(ManageError):
    """The job is another worker's by now, or has ended: stop, publish nothing."""

    code = "LEASE_LOST"


class BadManageRequestError(ManageError):
    code = "BAD_MANAGE_REQUEST"


class UploadError(ManageError):
    """What was uploaded is not what was announced."""

    code = "BAD_UPLOAD"


class ForbiddenError(ManageError):
    """The operator's settings, or whoever guards the server, do not allow it."""

    code = "FORBIDDEN"


class CorpusTooSmallError(ManageError):
    code = "CORPUS_TOO_SMALL"


class JobCancelledError(ManageError):
    code = "JOB_CANCELLED"


class WorkerLostError(ManageError):
    """The job's worker died, several times."""

    code = "WORKER_LOST"
    status = "INTERNAL"


class ConfigError(HplmError):
    code = "BAD_CONFIG"


class DataError(HplmError):
    """Labelled data or a corpus cannot be used as it is."""

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
    """Triton has ended by itself after it was ready."""

    code = "TRITON_ENDED"
    status = "UNAVAILABLE"


def check_ending(name: str, endings: tuple[str, ...]) -> None:
    """Raises DataError for a file whose name has none of the endings, which say the format."""
    if not name.lower().endswith(endings):
        raise DataError(f"{name}: the ending must be one of {', '.join(endings)}")


def unreadable(name: str, error: OSError) -> HplmError:
    """The error of data that cannot be read: theirs, or of the disk where that may pass. Raise it from `error`."""
    kind = StoreUnavailableError if error.errno in PASSING else DataError
    return kind(f"{name} cannot be read: {error.strerror}")


def unusable(said: str, error: OSError) -> ArtifactError:
    """The error of a file of the store: its own, or of the disk or process where that may pass. Raise it from `error`."""
    if error.errno in PASSING:
        return StoreUnavailableError(f"{said} now ({error}); try again")
    return CorruptArtifactError(f"{said} ({error})")


def leaves(root: type[HplmError] = HplmError) -> Iterator[type[HplmError]]:
    """Every error class that is raised, that is, without sub-classes."""
    for child in root.__subclasses__():
        if child.__subclasses__():
            yield from leaves(child)
        else:
            yield child


def about_text(error: HplmError, index: int, count: int) -> HplmError:
    """The error of text `index` of the `count` of a request, which says so where there are several."""
    return error if count == 1 else type(error)(f"text {index + 1} of {count}: {error}")


def from_wire(message: str) -> HplmError | None:
    """The typed error of a wire message, or None where it carries no code of ours.

    Triton may put words of its own in front ("in ensemble 'hbert', ..."), so the code is looked for, not expected first.
    """
    found = [(position, leaf) for leaf in leaves() if (position := message.find(f"{leaf.code}: ")) >= 0]
    if not found:
        return None
    position, leaf = min(found, key=lambda pair: pair[0])
    return leaf(message[position + len(leaf.code) + 2 :])


def from_stored(error: Mapping[str, str]) -> HplmError:
    """The typed error that a job ended with, of its `code` and `message`."""
    text = f"{error['code']}: {error['message']}"
    return from_wire(text) or InternalError(text)
