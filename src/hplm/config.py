"""Typed settings: frozen dataclasses read once from JSON; an unknown, missing or ill-typed key is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hplm.errors import ConfigError

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class BaseConfig:
    """The shape of a converted base. `window` is n of the n-grams; `window_layers` may exceed the layers it replaces."""

    name: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    window_layers: int
    upper_layers: int
    max_tokens: int
    window: int = 3
    layer_norm_eps: float = 1e-12
    pad_id: int = 0

    def __post_init__(self) -> None:
        for key in ("vocab_size", "hidden_size", "num_heads", "intermediate_size", "window_layers", "upper_layers"):
            _at_least(self, key, 1)
        _at_least(self, "max_tokens", 3)
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if not 2 <= self.window <= 8:
            raise ConfigError(f"window must be 2 to 8, got {self.window}")

    @property
    def left(self) -> int:
        """Tokens of a window before its centre: window t covers tokens t - left ... t - left + window - 1."""
        return (self.window - 1) // 2


@dataclass(frozen=True)
class PlotSettings:
    """Of the `plot` backend. Paths are relative to the folder of the settings file.

    `num_threads` 0: chosen from the machine. For measuring: `trace`, a file for the stage's spans; `exclusive_lock`, a
    file whose lock is held while computing, so that stages that name the same one never compute at the same time.
    """

    store: str
    base: str
    table: str
    miss: Literal["backoff", "compute"] = "compute"
    overlay_windows: int = 65_536
    max_text_bytes: int = 65_536
    num_threads: int = 0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    verify: bool = True
    batch_tokens: int = 2048
    batch_requests: int = 64
    queue_capacity: int = 4096
    default_deadline_s: float = 30.0
    trace: str = ""
    exclusive_lock: str = ""

    def __post_init__(self) -> None:
        for key in ("overlay_windows", "max_text_bytes", "batch_tokens", "batch_requests", "queue_capacity"):
            _at_least(self, key, 1)
        _at_least(self, "num_threads", 0)
        _above(self, "default_deadline_s", 0)


@dataclass(frozen=True)
class UpperSettings:
    """Of the `upper` backend. Paths are relative to the folder of the settings file.

    Adapters: `num_slots` counts the identity slot, `reduction_factor` bounds an adapter's size, `host_cache_mb` is the
    memory for loaded tenants. `coarse_prefetch` fills slots for waiting requests while a batch computes, `fine_prefetch`
    fills layer i + 1 while layer i computes (HMI 6.2).

    Scheduling: `policy` with its `policy_settings` (see `hplm.scheduling`); a batch is `batch_rows` rows of `row_tokens`
    tokens (TCB's B and L; `packed` has one row of both multiplied) and at most `batch_requests` requests. A request
    without a deadline of its own has `default_deadline_s`. `tenant_weights` give shares, 1 where not named. Requests that
    waited `starve_after_s` go first whatever the policy says.

    `num_threads` 0: chosen from the machine. For measuring: `pad_to`, at least this many tokens a row in mode `naive`;
    `trace` and `exclusive_lock` as in PlotSettings.
    """

    store: str
    base: str
    num_slots: int = 64
    reduction_factor: int = 16
    host_cache_mb: int = 1024
    coarse_prefetch: bool = True
    fine_prefetch: bool = True
    batching: Literal["packed", "naive", "turbo", "concat", "slotted"] = "packed"
    policy: str = "das"
    policy_settings: dict[str, Any] = field(default_factory=dict)
    batch_rows: int = 8
    row_tokens: int = 128
    batch_requests: int = 64
    queue_capacity: int = 4096
    default_deadline_s: float = 30.0
    starve_after_s: float = 2.0
    tenant_weights: dict[str, Any] = field(default_factory=dict)
    num_threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    verify: bool = True
    pad_to: int = 0
    trace: str = ""
    exclusive_lock: str = ""

    def __post_init__(self) -> None:
        _at_least(self, "pad_to", 0)
        _at_least(self, "num_slots", 2)
        for key in (
            "reduction_factor",
            "host_cache_mb",
            "batch_rows",
            "row_tokens",
            "batch_requests",
            "queue_capacity",
        ):
            _at_least(self, key, 1)
        _at_least(self, "num_threads", 0)
        for key in ("default_deadline_s", "starve_after_s"):
            _above(self, key, 0)
        for tenant, weight in self.tenant_weights.items():
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
                raise ConfigError(f"tenant_weights: the weight of {tenant!r} must be a number above 0, got {weight!r}")


def _above(settings: object, key: str, bound: float) -> None:
    if not (value := getattr(settings, key)) > bound:
        raise ConfigError(f"{key} must be above {bound:g}, got {value}")


def _at_least(settings: object, key: str, least: int) -> None:
    if (value := getattr(settings, key)) < least:
        raise ConfigError(f"{key} must be at least {least}, got {value}")


def parse(kind: type[Settings], values: Any, where: str) -> Settings:
    """Build settings of `kind` from JSON values. Raises ConfigError naming `where` and the key."""
    assert dataclasses.is_dataclass(kind)
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected an object, got {type(values).__name__}")
    fields = {known.name: known for known in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}; known are {', '.join(fields)}")
        if not _fits(value, hints[key]):
            raise ConfigError(f"{where}: {key} must be {_words(hints[key])}, got {value!r}")
    missing = [
        name
        for name, known in fields.items()
        if known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def load(kind: type[Settings], path: Path) -> Settings:
    """Read settings of `kind` from a JSON file. Raises ConfigError naming the file and the key."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    return parse(kind, values, str(path))


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    hint = get_origin(hint) or hint
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _words(hint: Any) -> str:
    return (
        f"one of {', '.join(map(repr, get_args(hint)))}"
        if get_origin(hint) is Literal
        else str(getattr(hint, "__name__", hint))
    )
