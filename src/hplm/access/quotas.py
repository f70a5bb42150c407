"""The quotas of tenants as a stage uses them: take before a request is answered, correct, and end."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hplm.access.limit_book import LimitBook
from hplm.errors import (
    BadInputError,
    CancelledError,
    ConfigError,
    DeadlineError,
    HplmError,
    QuotaError,
    RequestError,
)
from hplm.quotas.limits import NOTHING, Limits, Use
from hplm.quotas.quota_file import QuotaFile, is_in_use
from hplm.runtime.process import SHARED_MEMORY, numbered
from hplm.store.layout import Store

# The variable by which `hplm serve` names the file to its stages. So quotas outlive a Triton that is started again.
FILE_VARIABLE = "HPLM_QUOTA_FILE"
# Prefix of the names of these files in shared memory.
PREFIX = "hplm-quotas-"
# Seconds after its making during which a file without users is left, because its server may be about to start.
YOUNG_S = 600.0
# A charge as one of our models writes it to another.
_CHARGE = re.compile(r"([0-9]{1,6})(r?)", re.ASCII)
# In English text. Tokens are charged by this estimate, because the number of tokens is known only after tokenising.
BYTES_PER_TOKEN = 4


class TextCost(NamedTuple):
    """One text of a request: its tenant, and its tokens by an estimate."""

    tenant: str
    tokens: int


class Charge(NamedTuple):
    """The tokens that a quota was charged for a text before the text was tokenised.

    `is_repeated`: the text may have been tokenised, and the charge corrected, in a call that failed for another text.
    """

    tokens: int
    is_repeated: bool = False

    @classmethod
    def parse(cls, written: str) -> Charge:
        """Return the charge that `str` has written. Raises BadInputError."""
        if (found := _CHARGE.fullmatch(written)) is None:
            raise BadInputError(
                "the parameter of requests among the server's models is malformed; clients must not set it"
            )
        return cls(int(found[1]), bool(found[2]))

    def __str__(self) -> str:
        return f"{self.tokens}{'r' * self.is_repeated}"


class _Share(NamedTuple):
    """The part of one tenant's quotas that a request holds."""

    tenant: str
    limits: Limits
    use: Use


class Held:
    """The part of quotas that a request holds until the request has its answer, or until another stage has it."""

    def __init__(self, file: QuotaFile, shares: Sequence[_Share], clock: Callable[[], float]) -> None:
        self._file, self._shares, self._clock = file, shares, clock

    def end(self, answer: object) -> None:
        """End the request. An error that is not the client's own fault gives back what the request was charged.

        A missed deadline gives nothing back: the client chose it, and the estimate may have been corrected since, so that
        late requests would fill the tenant's bucket.
        """
        is_refunded = isinstance(answer, HplmError) and not isinstance(
            answer, RequestError | CancelledError | DeadlineError
        )
        for share in self._shares:
            refund = share.use if is_refunded else NOTHING
            self._file.end(share.tenant, share.limits, self._clock(), refund)

    def hand_on(self) -> None:
        """End the request here. It counts as under way until the next stage takes it over, see `Quotas.take_over`."""
        for share in self._shares:
            self._file.hand_on(share.tenant, self._clock())


class Quotas:
    """The quotas of a store on one server. Safe to use from several threads.

    Raises RegistryError on construction. Methods that charge raise ConfigError if the file of quotas cannot be made.
    """

    def __init__(self, store: Store, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """The file at `path` is made with the first request that is limited."""
        self._clock = clock
        self._book = LimitBook(store)
        self._path = path
        self._opened: QuotaFile | None = None
        self._opening = threading.Lock()

    def start(self) -> None:
        """Begin to follow the limits in the registry."""
        self._book.start()

    def close(self) -> None:
        """End the thread. The file stays open, because answers may still be under way."""
        self._book.close()

    @property
    def _file(self) -> QuotaFile:
        if (opened := self._opened) is not None:
            return opened
        with self._opening:
            if self._opened is None:
                try:
                    self._opened = QuotaFile(self._path)
                except OSError as error:
                    raise ConfigError(
                        f"the file of quotas {self._path} cannot be made ({error}): free shared memory, or set "
                        f"{FILE_VARIABLE} to another path"
                    ) from error
            return self._opened

    def take(self, texts: Sequence[TextCost]) -> Held | None:
        """Take a client's request of one or several texts; None if nothing is limited. The caller ends what it gets.

        Raises QuotaError, and takes nothing then. The texts of a tenant are one request.
        """
        return self._take(_tokens_by_tenant(texts), lambda _: False)

    def take_over(self, tokens: Mapping[str, int]) -> Held | None:
        """Take a request over that the stage before has handed on; None if nothing is limited. The caller ends what it gets.

        `tokens` has the tokens of each tenant's texts. A request that no stage has handed on is one of a client that calls
        this stage itself. It is taken as in `take`.
        """
        return self._take(tokens, lambda tenant: self._file.take_over(tenant, self._clock()))

    def _take(self, tokens_by_tenant: Mapping[str, int], is_taken: Callable[[str], bool]) -> Held | None:
        shares: list[_Share] = []
        for tenant, tokens in tokens_by_tenant.items():
            if (limits := self._book.of(tenant)) is None:
                continue
            refusal = None if is_taken(tenant) else self._file.take(tenant, limits, tokens, self._clock())
            if refusal is not None:
                for share in shares:
                    self._file.end(share.tenant, share.limits, self._clock(), share.use)
                raise QuotaError.after(*refusal)
            shares.append(_Share(tenant, limits, Use(1.0, tokens)))
        return Held(self._file, shares, self._clock) if shares else None

    def correct(self, tenant: str, charge: Charge, tokens: int) -> None:
        """Charge the tokens of a text that was tokenised in place of `charge`. A repeated charge gives nothing back."""
        if (limits := self._book.of(tenant)) is None or limits.tokens_per_s is None:
            return
        difference = tokens - charge.tokens
        if charge.is_repeated:
            difference = max(0, difference)
        if difference:
            self._file.spend(tenant, limits, Use(0.0, difference), self._clock())


def estimated_tokens(texts: Sequence[bytes], most: int) -> int:
    """Return an estimate of the tokens of a text or pair, from its bytes. Texts are cut at `most` tokens."""
    return min(most, sum(len(part) // BYTES_PER_TOKEN + 1 for part in texts) + 1)


def open_quotas(store: Store, server: int) -> Quotas:
    """Return the quotas of a stage of a Triton process `server`. Raises RegistryError."""
    named = os.environ.get(FILE_VARIABLE)
    return Quotas(store, Path(named) if named else file_of(store, numbered(server)))


def file_of(store: Store, name: str) -> Path:
    """Return the path of the file of a store and a server's `name`."""
    key = hashlib.sha256(os.fsencode(f"{store.root}\0{store.registry}")).hexdigest()[:16]
    return SHARED_MEMORY / f"{PREFIX}{os.geteuid()}-{name}-{key}"


def remove_dead_files(folder: Path) -> None:
    """Remove this user's files of quotas that no process uses. Servers that were killed have left them."""
    for path in folder.glob(f"{PREFIX}{os.geteuid()}-*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > YOUNG_S and not is_in_use(path):
                path.unlink()


def _tokens_by_tenant(texts: Sequence[TextCost]) -> Mapping[str, int]:
    tokens: dict[str, int] = {}
    for text in texts:
        tokens[text.tenant] = tokens.get(text.tenant, 0) + text.tokens
    return tokens
