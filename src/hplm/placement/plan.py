"""A plan: which bases run on which devices of which nodes, cut how, and what was predicted. A readable, frozen JSON file."""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hplm.core.names import check_name_of
from hplm.core.settings import parse_settings
from hplm.errors import ConfigError
from hplm.placement.served_model import ServedModel

# The host is a name, an IPv4 address, or an IPv6 address in brackets.
_ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
# Changed when a plan's fields change their meaning.
PLAN_VERSION = 1


@dataclass(frozen=True)
class PlannedNode:
    """A machine of the plan, see `hplm.placement.cluster.Node`. `address` is `HOST:PORT` of its server's HTTP port, or empty.

    `cores` are the cores of each device, or else `gpus` the number of each device's GPU. `grpc_port` and `health_port` 0 mean
    as `hplm serve` chooses them: the HTTP port + 1 and + 3.
    """

    name: str
    devices: int
    device_bytes: int
    host_cache_bytes: int = 0
    address: str = ""
    cores: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[int, ...] = ()
    grpc_port: int = 0
    health_port: int = 0

    def __post_init__(self) -> None:
        # It is the name of a folder, and of a server in the proxy's configuration.
        check_name_of("name of a node", self.name)
        if (named := self.cores or self.gpus) and len(named) != self.devices:
            raise ConfigError(
                f"node {self.name!r}: cores or a GPU for each of {self.devices} devices were expected, got {len(named)}"
            )
        check_address(self.address, self.grpc_port, self.health_port)

    @property
    def host(self) -> str:
        """The host of `address`, an IPv6 address without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def ports(self) -> dict[str, int]:
        """The ports of the node's server: http, grpc, metrics, health. The node must have an address."""
        http_port = int(self.address.rpartition(":")[2])
        return {
            "http": http_port,
            "grpc": self.grpc_port or http_port + 1,
            "metrics": http_port + 2,
            "health": self.health_port or http_port + 3,
        }


def check_address(address: str, *ports: int) -> None:
    """Raise ConfigError if the address of a node, or a further port of it, is none. An empty address and port 0 are not set."""
    found = _ADDRESS.fullmatch(address)
    # The server's further ports follow the port for HTTP.
    if address and not (found and 0 < int(found[2]) < 65533 and _is_ipv6_or_name(found[1])):
        raise ConfigError(
            f"address: HOST:PORT was expected, such as 10.0.0.1:8000 or [fd00::1]:8000, port below 65533, got {address!r}"
        )
    for port in ports:
        if not 0 <= port < 65536:
            raise ConfigError(f"a port from 1 to 65535 was expected, got {port}")


def _is_ipv6_or_name(host: str) -> bool:
    if not host.startswith("["):
        return True
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class PlannedBase:
    """A base in a group. `cut`: the number of layers of each stage. `stage_ms`: milliseconds of each stage for a request."""

    base: str
    cut: tuple[int, ...]
    stage_ms: tuple[float, ...]


@dataclass(frozen=True)
class PlannedGroup:
    """Devices of one node, one for each stage, and their bases. A device's number counts within the node."""

    node: str
    devices: tuple[int, ...]
    bases: tuple[PlannedBase, ...]


@dataclass(frozen=True)
class TenantRule:
    """The rule that gives each tenant its nodes. `hot`: tenants that several nodes keep in their host caches, and these nodes.

    The proxy's consistent hash of its name gives each other tenant one node. `load_factor`: if a node has more than this
    percentage of the mean load, the proxy sends the request to the next node (`hash-balance-factor`).
    `weights`: the proxy's weight of each node; a node that is not named has weight 1. The proxy must give the node at
    position i of the plan's nodes the server id i + 1, because the hash depends on it.
    """

    hot: dict[str, tuple[str, ...]] = field(default_factory=dict)
    load_factor: int = 150
    weights: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # JSON has lists.
        object.__setattr__(self, "hot", {tenant: tuple(nodes) for tenant, nodes in self.hot.items()})


@dataclass(frozen=True)
class Assumptions:
    """The workload that a plan was made for: requests/s by base, cv of the gaps, deadline in ms by base, tokens a request.

    `trace` is the CSV file whose arrivals were replayed; if it is empty, the gaps were drawn (Gamma). `duration_s` and `seed`
    are those of the simulated workload. `outside_ms` is the time of a request of each base outside of the placed stages: of the
    client, Triton and the look-up stage.
    """

    rates: dict[str, float]
    cv: float
    deadline_ms: dict[str, float]
    tokens: int
    source: str
    trace: str = ""
    duration_s: float = 600.0
    seed: int = 0
    outside_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = {"cv": self.cv, "duration_s": self.duration_s, "tokens": self.tokens}
        _check_numbers(
            {**positive, **{f"deadline_ms of {base}": ms for base, ms in self.deadline_ms.items()}}, above_0=True
        )
        _check_numbers(
            {**self.rates, **{f"outside_ms of {base}": ms for base, ms in self.outside_ms.items()}}, above_0=False
        )
        if missing := sorted(self.rates.keys() - self.deadline_ms.keys()):
            raise ConfigError(f"deadline_ms of base {missing[0]!r} was expected, got none")


def _check_numbers(values: Mapping[str, Any], *, above_0: bool) -> None:
    for name, value in values.items():
        if not (isinstance(value, int | float) and 0 <= value < math.inf and (value or not above_0)):
            raise ConfigError(
                f"{name}: a finite number {'above' if above_0 else 'not below'} 0 was expected, got {value!r:.50}"
            )


@dataclass(frozen=True)
class Prediction:
    """The simulator's prediction: the share of requests in time, of all and by base, and the busy share of each group."""

    attainment: float
    of_base: dict[str, float]
    busy: tuple[float, ...]
    requests: int


@dataclass(frozen=True)
class CheckResult:
    """A check of the prediction by `hplm place check`: predicted and measured share of requests in time, at a time (UTC)."""

    at: str
    predicted: float
    measured: float
    requests: int
    where: str

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured)


@dataclass(frozen=True)
class Plan:
    """A placement to serve. `survives_any_node`: each base is still served if any one node fails.

    `check` is None until `hplm place check` has run: the prediction is unchecked. `models` are the measured bases that the
    plan was made from, and `bytes_per_s` is `Cluster.bytes_per_s`, None if it is without limit: a plan is simulated again
    without its store.
    """

    nodes: tuple[PlannedNode, ...]
    groups: tuple[PlannedGroup, ...]
    tenants: TenantRule
    assumptions: Assumptions
    prediction: Prediction
    algorithm: str
    models: tuple[ServedModel, ...] = ()
    bytes_per_s: float | None = None
    survives_any_node: bool = False
    check: CheckResult | None = None
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        layers = {model.name: len(model.layer_s) for model in self.models}
        for number, group in enumerate(self.groups, 1):
            for base in group.bases:
                expected = layers.get(base.base, sum(base.cut))
                if len(base.cut) != len(group.devices) or min(base.cut, default=0) < 1 or sum(base.cut) != expected:
                    raise ConfigError(
                        f"group {number}, base {base.base!r}: a stage of 1 layer or more on each of {len(group.devices)} "
                        f"devices was expected, {expected} layers in all, got the cut {list(base.cut)}"
                    )

    def to_json(self) -> str:
        """Return the plan as JSON text that people can read."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan. Raises ConfigError, which names the file, if it is no plan of this version."""
        try:
            values: Any = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as a plan ({error}): `hplm place plan` writes one") from error
        if isinstance(values, dict) and values.get("version") != PLAN_VERSION:
            raise ConfigError(
                f"{path}: a plan of version {PLAN_VERSION} was expected, got {values.get('version')!r}: make it again "
                "with `hplm place plan`"
            )
        return parse_settings(cls, values, str(path))
