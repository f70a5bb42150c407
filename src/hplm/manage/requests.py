"""Manage requests: JSON objects with an `action`, parsed strictly into frozen classes, one for each set of keys.

{"action": "tenant.create", "tenant": "acme", "data": {"train": {"upload": "u1"}}}
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hplm.access.roles import OperatorRole, Scope
from hplm.core.columns import Columns
from hplm.core.names import check_name_of
from hplm.core.settings import parse_settings
from hplm.errors import BadManageRequestError, ConfigError
from hplm.manage.request_parts import (
    MOST_STUDENTS,
    DataFiles,
    PretrainSettings,
    Source,
    StudentOptions,
    Target,
    TuneSettings,
    between,
    check_id,
)
from hplm.quotas.limits import Limits
from hplm.registry.records import JobState
from hplm.tasks.task_loader import task_named

MOST_LEVELS = 4  # of a cascade; the number of combinations that are tried doubles with each
MOST_DEV_FILES = 16  # most files of labelled examples to compare a domain on
MOST_LISTED = 1000  # most entries of one listing
LEAST_RATE, MOST_RATE = 0.01, 1e9  # requests or tokens a second of a limit
MOST_CONCURRENT = 1_000_000  # requests at the same time of a limit
MOST_INTEGER = 1 << 62  # largest size or offset of a file
MOST_EXPIRY_S = 100 * 365 * 86_400.0  # longest life of a key that expires
MOST_VERSION = (1 << 31) - 1  # the largest number that PostgreSQL's column holds
_PART_OF_A_NAME = re.compile(r"[a-z0-9_.-]{0,64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_KEY_ID = re.compile(r"[a-z2-7]{16}")
_SUBJECT = re.compile(r"[A-Za-z0-9:/_.-]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ManageRequest:
    """A manage request. Checks the names and ids that it holds."""

    def __post_init__(self) -> None:
        for key in ("base", "domain", "parent", "tenant"):
            if (name := getattr(self, key, None)) is not None:
                check_name_of(key, name)
        for key in ("job", "upload"):
            if (value := getattr(self, key, None)) is not None:
                check_id(key, value)
        for key in ("prefix", "after"):
            if not _PART_OF_A_NAME.fullmatch(getattr(self, key, "")):
                raise ConfigError(f"{key} must be a part of a name")
        between("limit", getattr(self, "limit", None), 1, MOST_LISTED)


@dataclass(frozen=True)
class FineTune(ManageRequest):
    """A request to train a new tenant over the current version of a domain, or a tenant's next version, whose labels stay.

    `columns` names the columns of all files. `drop_uploads`: the uploads are dropped when the job ends, however it ends.
    With `publish` "anyway" an update publishes also a version that is no better on dev.
    A tenant with `levels`, the names of bases from small to large, gets a cascade for its `target`. A tenant with `students`
    gets students over the trunk `base`.
    """

    tenant: str
    data: DataFiles
    columns: Columns = field(default_factory=Columns)
    domain: str | None = None
    base: str | None = None
    levels: tuple[str, ...] | None = None
    target: Target = field(default_factory=Target)
    students: StudentOptions | None = None
    task: str | None = None
    settings: TuneSettings = field(default_factory=TuneSettings)
    publish: Literal["better", "anyway"] = "better"
    dry_run: bool = False
    drop_uploads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task is not None:
            task_named(self.task)
        for level in self.levels or ():
            check_name_of("levels", level)
        if self.levels is not None and not 1 <= len({*self.levels}) == len(self.levels) <= MOST_LEVELS:
            raise ConfigError(f"levels must be 1 to {MOST_LEVELS} different bases, got {', '.join(self.levels)}")
        if self.levels is not None and self.base is not None:
            raise ConfigError("give `levels` for a cascade or `base` for a tenant over one base, not both")


@dataclass(frozen=True)
class Retarget(ManageRequest):
    """A request to select a tenant's cascade again for another target, without training."""

    tenant: str
    target: Target


@dataclass(frozen=True)
class OfTenant(ManageRequest):
    """A request about a tenant over one base. Without `base`, show means the default base and delete means all bases."""

    tenant: str
    base: str | None = None


@dataclass(frozen=True)
class RollBackTenant(ManageRequest):
    """A request to serve older versions over all bases of a tenant, up to `version`; by default before its last publication."""

    tenant: str
    version: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        between("version", self.version, 1, MOST_VERSION)


@dataclass(frozen=True)
class LeastStudents(ManageRequest):
    """A request to answer each text of a tenant by at least so many of its students, without training."""

    tenant: str
    least: int

    def __post_init__(self) -> None:
        super().__post_init__()
        between("least", self.least, 1, MOST_STUDENTS)


@dataclass(frozen=True)
class ListTenants(ManageRequest):
    prefix: str = ""
    after: str = ""
    limit: int = 100


@dataclass(frozen=True)
class Pretrain(ManageRequest):
    """A request to pretrain a new domain below `parent` or the root, or a domain's next version, whose parent stays.

    `dev` are files of labelled examples, on which the job measures whether the domain helps.
    """

    domain: str
    corpus: Source
    dev: tuple[Source, ...] = ()
    base: str | None = None
    parent: str | None = None
    settings: PretrainSettings = field(default_factory=PretrainSettings)
    dry_run: bool = False
    drop_uploads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.dev) > MOST_DEV_FILES:
            raise ConfigError(f"dev must be at most {MOST_DEV_FILES} files, got {len(self.dev)}")


@dataclass(frozen=True)
class OfDomain(ManageRequest):
    domain: str
    base: str | None = None


@dataclass(frozen=True)
class ListDomains(ManageRequest):
    base: str | None = None


@dataclass(frozen=True)
class ListBases(ManageRequest):
    pass


@dataclass(frozen=True)
class OfJob(ManageRequest):
    job: str


@dataclass(frozen=True)
class ListJobs(ManageRequest):
    states: tuple[JobState, ...] | None = None
    limit: int = 100


@dataclass(frozen=True)
class StartUpload(ManageRequest):
    """Announces a file of `bytes` with the checksum `sha256`. The ending of `name` says the format."""

    bytes: int
    sha256: str
    name: str

    def __post_init__(self) -> None:
        between("bytes", self.bytes, 1, MOST_INTEGER)
        if not _DIGEST.fullmatch(self.sha256):
            raise ConfigError("sha256 must be 64 hex digits in lower case")
        if not _FILE_NAME.fullmatch(self.name):
            raise ConfigError("name is 1 to 100 letters, digits, '-', '_' or '.', and starts with a letter or digit")


@dataclass(frozen=True)
class UploadChunk(ManageRequest):
    """A piece of an upload from byte `offset` on; `data` is base64."""

    upload: str
    offset: int
    data: str

    def __post_init__(self) -> None:
        super().__post_init__()
        between("offset", self.offset, 0, MOST_INTEGER)

    @property
    def raw(self) -> bytes:
        """Return the bytes of the piece. Raises BadManageRequestError."""
        try:
            return base64.b64decode(self.data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadManageRequestError(f"upload.chunk: data is not base64: {error}") from None


@dataclass(frozen=True)
class OfUpload(ManageRequest):
    upload: str


@dataclass(frozen=True)
class ListUploads(ManageRequest):
    after: str = ""
    limit: int = 100


@dataclass(frozen=True)
class CreateKey(ManageRequest):
    """A request for a new key: a tenant's key with a `scope`, `infer` by default, or an operator's key with a role.

    The key expires after `expires_in_s` seconds, by default never.
    """

    tenant: str | None = None
    scope: Scope | None = None
    operator: OperatorRole | None = None
    expires_in_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tenant is None) == (self.operator is None):
            raise ConfigError("give a `tenant` for a tenant's key, or the role `operator` for an operator's key")
        if self.operator is not None and self.scope is not None:
            raise ConfigError("`scope` is for a tenant's key; an operator's key has the role `operator`")
        between("expires_in_s", self.expires_in_s, 1.0, MOST_EXPIRY_S)


@dataclass(frozen=True)
class ListKeys(ManageRequest):
    tenant: str | None = None
    after: str = ""
    limit: int = 100


@dataclass(frozen=True)
class OfKey(ManageRequest):
    """A request about the key with the public id `key`."""

    key: str

    def __post_init__(self) -> None:
        if not _KEY_ID.fullmatch(self.key):
            raise ConfigError("key must be the public id of a key: the part between `hplm_` and the second `_`")


@dataclass(frozen=True)
class LimitTenant(ManageRequest):
    """A request to set all limits of a tenant, or without `tenant` the default of all tenants. Limits left out are removed.

    A request without limits only asks for them, unless it has `clear`, which removes all.
    """

    tenant: str | None = None
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    concurrent: int | None = None
    clear: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        between("requests_per_s", self.requests_per_s, LEAST_RATE, MOST_RATE)
        between("tokens_per_s", self.tokens_per_s, LEAST_RATE, MOST_RATE)
        between("concurrent", self.concurrent, 1, MOST_CONCURRENT)
        if self.clear and not self.limits.is_none:
            raise ConfigError("`clear` removes all limits: give either limits or `clear`")

    @property
    def limits(self) -> Limits:
        """The limits that the request gives."""
        return Limits(self.requests_per_s, self.tokens_per_s, self.concurrent)


@dataclass(frozen=True)
class ListAudit(ManageRequest):
    """A request for entries of the audit log, newest first: those of a `key` or `subject`, and older than entry `before`."""

    key: str | None = None
    subject: str | None = None
    before: int | None = None
    limit: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        between("before", self.before, 1, MOST_INTEGER)
        for value in (self.key, self.subject):
            if value is not None and not _SUBJECT.fullmatch(value):
                raise ConfigError("key and subject are written as the audit log shows them")


def parse_request(raw: bytes, actions: Mapping[str, type[ManageRequest]]) -> tuple[str, ManageRequest]:
    """Return which of the `actions` the JSON in `raw` asks for, and its request.

    Raises BadManageRequestError, which says what was expected and what came, or TenantNameError.
    """
    try:
        values = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadManageRequestError(f"the request is not JSON: {error}"[:200]) from None
    if not isinstance(values, dict):
        raise BadManageRequestError(f"a request is a JSON object, got {type(values).__name__}")
    action = values.pop("action", None)
    if not isinstance(action, str) or action not in actions:
        raise BadManageRequestError(f"`action` must be one of {', '.join(actions)}")
    try:
        return action, parse_settings(actions[action], values, action)
    except ConfigError as error:
        raise BadManageRequestError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number here")
