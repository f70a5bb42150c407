"""The server under attack: its ports, models, tenants and keys, and its processes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hplm.access.keys import new_key
from hplm.access.roles import OperatorRole, Scope
from hplm.core import wire
from hplm.core.roles import models_of, served_bases
from hplm.errors import ConfigError
from hplm.quotas.limits import Limits
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.runtime.process import stat_of
from hplm.store.layout import Store
from hplm.triton.launcher.ports import Ports
from hplm.triton.workarounds.dead_stubs import stubs_over
from hplm_loadtest.benchmarks.attacks.model_inputs import ModelInputs
from hplm_loadtest.benchmarks.served_repository import read_repository, tenants_by_texts

# Tenants of a base that ask, and tenants that no request may name with right.
CALLERS, STRANGERS = 4, 4
# Limits that no attack reaches, so that an attack on the default limit does not refuse the good requests.
AMPLE = Limits(requests_per_s=1e6, tokens_per_s=1e9, concurrent=100_000)
# Seconds until every process has heard of a new key: each polls the registry five times a second.
KEYS_ARE_KNOWN_S = 1.5
EXPIRED_S = 1.0


@dataclass(frozen=True)
class Caller:
    """A tenant with a key: the model of its base, and the labels that an answer may have."""

    tenant: str
    model: str
    key: str = field(repr=False)
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Keys:
    """Keys other than those of the callers. All texts."""

    operators: Mapping[str, str] = field(repr=False)  # by role
    managing: Mapping[str, str] = field(repr=False)  # of tenants that may manage themselves
    revoked: Mapping[str, str] = field(repr=False)
    expired: Mapping[str, str] = field(repr=False)
    of_strangers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Target:
    """A running server with keys. `victims` are tenants that attacks may change or delete; they have no key to infer."""

    ports: Ports
    models: Path
    store: Store
    logs: Sequence[Path]
    inputs: Mapping[str, ModelInputs]
    callers: Sequence[Caller]
    keys: Keys
    victims: Sequence[str]

    @classmethod
    def prepare(
        cls, ports: Ports, models: Path, store: Store, logs: Sequence[Path], victims: Sequence[str] = ()
    ) -> Target:
        """Make keys in the registry of a running server, read what it serves, and wait until the keys are known.

        The callers are the first tenants of single texts of each base. By default the last tenants are the victims. Raises
        ConfigError if a base has too few tenants.
        """
        with closing(Registry.open(store)) as registry:

            def add(tenant: str | None, role: Scope | OperatorRole, expires_s: float | None = None) -> str:
                key = new_key()
                registry.add_key(AccessKey(key.id, tenant, role, key.sha256(), time.time(), expires_s))
                return key.text()

            callers, strangers, last = [], [], []
            for base in served_bases(models):
                single = [name for name in tenants_by_texts(models, base.name)[0] if name not in victims]
                count = min(CALLERS, max(1, len(single) - 1))
                callers += [
                    Caller(name, base.name, add(name, "infer"), labels)
                    for name, labels in _labels(models, base.name, single[:count]).items()
                ]
                strangers += single[count : count + STRANGERS]
                last += single[count + STRANGERS :][-STRANGERS:]
            if len(callers) < 2 or not strangers:
                raise ConfigError(f"the attacks need at least three tenants of single texts, see {models}")
            own = callers[0].tenant
            revoked = {caller.tenant: add(caller.tenant, "infer") for caller in callers}
            for key in revoked.values():
                registry.revoke_key(key.split("_")[1], time.time())
            keys = Keys(
                {role: add(None, role) for role in ("read", "manage", "admin")},
                {own: add(own, "manage")},
                revoked,
                {caller.tenant: add(caller.tenant, "infer", time.time() - EXPIRED_S) for caller in callers},
                {name: add(name, "infer") for name in strangers},
            )
            for name in (*(caller.tenant for caller in callers), *strangers):
                registry.set_limits(name, AMPLE)
        inputs = {name: ModelInputs.ask(ports.http_url, name) for name in models_of(models)}
        time.sleep(KEYS_ARE_KNOWN_S)
        return cls(ports, models, store, logs, inputs, callers, keys, tuple(victims or last))

    @property
    def secrets(self) -> list[bytes]:
        """The secrets of all keys, which no answer and no log may hold."""
        held = self.keys
        named = (held.operators, held.managing, held.revoked, held.expired, held.of_strangers)
        texts = [*(caller.key for caller in self.callers), *(key for keys in named for key in keys.values())]
        return [text.split("_", 2)[2].encode() for text in texts]

    @property
    def names(self) -> list[bytes]:
        """The names of tenants that an answer may hold only if its request does."""
        return [name.encode() for name in (*(caller.tenant for caller in self.callers), *self.keys.of_strangers)]

    def callers_of(self, model: str) -> list[Caller]:
        """Return the tenants that a model may answer: all for a model that routes, else those of its base."""
        own = [caller for caller in self.callers if re.fullmatch(f"{caller.model}(_[a-z]+)?", model)]
        return own or list(self.callers)

    def values(self, model: str, caller: Caller, text: str) -> dict[str, bytes]:
        """Return the values of the BYTES inputs of a good request."""
        if wire.REQUEST in (tensor.name for tensor in self.inputs[model].inputs):
            return {wire.REQUEST: b'{"action": "tenant.list", "limit": 3}'}
        return {wire.TEXT: text.encode(), wire.TENANT: caller.tenant.encode()}

    def processes(self) -> dict[str, int]:
        """Return the process ids of Triton and of its stubs. Several stubs of a model are numbered."""
        stubs = stubs_over(self.models)
        found = {
            f"{model} {number}" if len(pids) > 1 else model: pid
            for model, pids in sorted(stubs.items())
            for number, pid in enumerate(sorted(pids), 1)
        }
        return {"Triton": int(stat_of(next(iter(found.values())))[1]), **found} if found else {}


def _labels(models: Path, base: str, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    with read_repository(models, base).open_tenants() as (bank, tenants):
        return {tenant.name: tuple(bank.card(tenant).labels) for tenant in tenants if tenant.name in names}


@dataclass(frozen=True)
class Footprint:
    """The memory and the number of open files of a process."""

    rss_bytes: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Return the footprint of a process. Raises OSError if the process is gone."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(pages * 4096, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


def shared_memory_bytes(pids: Sequence[int]) -> int:
    """Return the memory of all files in /dev/shm that the processes map, each file once."""
    sizes: dict[str, int] = {}
    for pid in pids:
        for path in set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())):
            with suppress(OSError):
                sizes[path] = Path(path).stat().st_blocks * 512
    return sum(sizes.values())
