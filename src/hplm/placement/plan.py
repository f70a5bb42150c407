"""A plan: which bases run on which devices of which nodes, cut how, and what was predicted. A readable, frozen JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hplm.core.settings import parse_settings
from hplm.errors import ConfigError

# Changed when a plan's fields change their meaning.
PLAN_VERSION = 1


@dataclass(frozen=True)
class PlannedNode:
    """A machine of the plan, see `hplm.placement.cluster.Node`. `address` is `HOST:PORT` of its server's HTTP port."""

    name: str
    devices: int
    device_bytes: int
    host_cache_bytes: int = 0
    address: str = ""


@dataclass(frozen=True)
class PlannedBase:
    """A base in a group. `cut`: the number of layers of each stage. `stage_ms`: milliseconds of each stage for a request."""

    base: str
    cut: tuple[int, ...]
    stage_ms: tuple[float, ...]


@dataclass(frozen=True)
class PlannedGroup:
    """Devices of one node (numbered within it), one for each stage, and the bases that they serve."""

    node: str
    devices: tuple[int, ...]
    bases: tuple[PlannedBase, ...]


@dataclass(frozen=True)
class TenantRule:
    """Which nodes answer a tenant. `hot`: nodes of tenants that several nodes keep in their host caches.

    Each other tenant is kept by the node that the proxy's consistent hash of its name gives. `load_factor`: the proxy sends
    a request to the next node when a node has more than so many percent of the mean load (`hash-balance-factor`).
    `weights`: the proxy's weight of each node; a node that is not named has weight 1. The proxy must give the node at
    position i of the plan's nodes the server id i + 1, because the hash depends on it.
    """

    hot: dict[str, tuple[str, ...]] = field(default_factory=dict)
    load_factor: int = 150
    weights: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Assumptions:
    """The workload that a plan was made for: requests/s by base, cv of the gaps, deadline in ms by base, tokens a request."""

    rates: dict[str, float]
    cv: float
    deadline_ms: dict[str, float]
    tokens: int
    source: str


@dataclass(frozen=True)
class Prediction:
    """What the simulator predicts: the share of requests in time, by base too, and the busy share of each group."""

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

    `check` is None until `hplm place check` has run: the prediction is unchecked.
    """

    nodes: tuple[PlannedNode, ...]
    groups: tuple[PlannedGroup, ...]
    tenants: TenantRule
    assumptions: Assumptions
    prediction: Prediction
    algorithm: str
    survives_any_node: bool = False
    check: CheckResult | None = None
    version: int = PLAN_VERSION

    def to_json(self) -> str:
        """Return the plan as JSON text that people can read."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan. Raises ConfigError, which names the file, if it is no plan of this version."""
        try:
            values: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a plan ({error}): `hplm place plan` writes one") from error
        if isinstance(values, dict) and values.get("version") != PLAN_VERSION:
            raise ConfigError(
                f"{path}: a plan of version {PLAN_VERSION} was expected, got {values.get('version')!r}: make it again "
                "with `hplm place plan`"
            )
        return parse_settings(cls, values, str(path))
