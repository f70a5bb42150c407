"""Typed settings: frozen dataclasses, read once from JSON. A key that is unknown, missing or of a wrong type is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import types
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hplm.core.names import check_name
from hplm.errors import ConfigError, TenantNameError

Settings = TypeVar("Settings")

# Bytes of an upload's chunk. It is sent as base64 in one JSON request, and the manager takes requests of at most 12 MiB.
MOST_CHUNK_BYTES = 8 << 20
# Limits of a tenant's weight. With extreme floats a share would be infinite or zero.
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
# The hidden size over a narrow adapter's bottleneck, as in HMI. A wide adapter is as wide as the adapter slots.
REDUCTION_FACTOR = 16
# How wide a new tenant's adapter is; with `auto` the tenant's dev examples choose.
AdapterWidth = Literal["auto", "narrow", "wide"]
# What is done with a window that no table has.
Miss = Literal["backoff", "compute"]
# Number format of matrix products, if it differs from the rest of the model.
Quantization = Literal["none", "int8"]
# How the texts of a batch are laid out in one tensor, see `hplm.engine.layouts`.
Batching = Literal["packed", "naive", "turbo", "concat", "slotted"]

# What metrics call a tenant: by its name, or by a hash of the name.
TenantLabel = Literal["name", "hash"]
# The most tenants with a label of their own in the metrics of a stage: each takes up to about 70 time series.
MOST_METRIC_TENANTS = 1000

# The `lower_form` of a base without lower layers.
WHOLE = "whole"


@dataclass(frozen=True)
class BaseConfig:
    """The shape of a base, of an `architecture` of `hplm.models.architectures`.

    A base is hierarchical or whole. In a whole base, `lower_form` is WHOLE: all layers are upper layers, which read word
    embeddings, and `window`, `window_layers` and `lower_layers` are 1, 0 and 0. It has `token_types` rows of token types,
    0 if the model has none. The position embeddings of a hierarchical base hold the first type.

    The lower encoder of a hierarchical base has the form `lower_form`, see `hplm.models.lower`. `window` is n of its n-grams,
    and for each n-gram it gives `vectors_per_ngram` vectors. `window_layers` is its number of layers or blocks. It replaces
    `lower_layers` layers of the original, `window_layers` if 0.
    `relative_buckets`: number of distances that change attention scores, in a model such as MPNet; else 0.
    `adapter_layers`: how many of the last layers have an adapter; 0 for all upper layers.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    window_layers: int
    upper_layers: int
    max_tokens: int
    vectors_per_ngram: int
    window: int = 3
    layer_norm_eps: float = 1e-12
    pad_id: int = 0
    relative_buckets: int = 0
    architecture: str = "bert"
    lower_layers: int = 0
    lower_form: str = "windows"
    adapter_layers: int = 0
    token_types: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "vocab_size", "hidden_size", "num_heads", "intermediate_size", "upper_layers")
        at_least(self, 3, "max_tokens")
        at_least(self, 0, "lower_layers", "adapter_layers", "token_types")
        if self.adapter_layers > self.upper_layers:
            raise ConfigError(
                f"adapter_layers must be at most upper_layers, {self.upper_layers}, got {self.adapter_layers}"
            )
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.is_whole:
            for key, value in (("window", 1), ("vectors_per_ngram", 1), ("window_layers", 0), ("lower_layers", 0)):
                if getattr(self, key) != value:
                    raise ConfigError(f"{key} of a whole base must be {value}, got {getattr(self, key)}")
        else:
            at_least(self, 1, "window_layers")
            if not 2 <= self.window <= 8:
                raise ConfigError(f"window must be 2 to 8, got {self.window}")
            if self.token_types:
                raise ConfigError(f"token_types must be 0 unless the base is whole, got {self.token_types}")
        if not 1 <= self.vectors_per_ngram <= self.window:
            raise ConfigError(f"vectors_per_ngram must be 1 to window, {self.window}, got {self.vectors_per_ngram}")
        if self.relative_buckets % 4 or not 0 <= self.relative_buckets < 512:
            raise ConfigError(f"relative_buckets must be a multiple of 4 below 512, got {self.relative_buckets}")

    @property
    def is_whole(self) -> bool:
        """Whether all layers of the model are computed, so that the base has neither lower layers nor tables."""
        return self.lower_form == WHOLE

    @property
    def adapted_layers(self) -> int:
        """The number of layers that have an adapter. The layers are the last ones."""
        return self.adapter_layers or self.upper_layers

    @property
    def original_layers(self) -> int:
        """The number of layers of the model that the base was converted from."""
        return (self.lower_layers or self.window_layers) + self.upper_layers

    def reduced_size(self, reduction_factor: int) -> int:
        """Return the bottleneck of adapters with this reduction factor."""
        return max(1, self.hidden_size // reduction_factor)


@dataclass(frozen=True)
class Metering:
    """How a stage counts by tenant: the busiest `tenants` have labels of their own, of the form `label`."""

    tenants: int
    label: TenantLabel


@dataclass(frozen=True)
class StageSettings:
    """Settings that both stages have. Paths are relative to the folder of the settings file.

    `stage_layers` has the number of layers of each encode stage; it is empty if a single encode stage computes all layers.
    `docs/settings.md` has the meaning of every key of this module's settings files. A test holds its defaults and ranges.
    """

    store: str
    base: str
    _: KW_ONLY
    registry: str = ""
    num_threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Quantization = "none"
    verify: bool = True
    batch_requests: int = 64
    queue_capacity: int = 4096
    default_deadline_s: float = 30.0
    tenant_weights: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    exclusive_lock: str = ""
    metric_tenants: int = 20
    tenant_label: TenantLabel = "name"
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.stage_layers and (len(self.stage_layers) < 2 or min(self.stage_layers) < 1):
            raise ConfigError(
                "stage_layers must be the number of layers of each of two or more encode stages, or empty for a single "
                f"encode stage, got {list(self.stage_layers)}"
            )
        at_least(self, 1, "batch_requests", "queue_capacity")
        at_least(self, 0, "num_threads")
        _within(self, "metric_tenants", 0, MOST_METRIC_TENANTS)
        _positive(self, "default_deadline_s")
        _weights(self.tenant_weights)

    @property
    def metering(self) -> Metering:
        """How the stage counts by tenant."""
        return Metering(self.metric_tenants, self.tenant_label)

    @property
    def encode_stages(self) -> int:
        """The number of encode stages that a text passes one after another."""
        return max(1, len(self.stage_layers))


@dataclass(frozen=True)
class LookupSettings(StageSettings):
    """Settings of the `plot` backend, besides those of both stages.

    `quantization` int8 computes windows that no table has with 8-bit products, see `hplm.engine.kernels.int8`.
    """

    table: str
    miss: Miss = "compute"
    overlay_windows: int = 65_536
    most_domains: int = 16
    max_text_bytes: int = 65_536
    batch_tokens: int = 2048
    batch_every_ms: float = 7.0
    reserve_s: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "overlay_windows", "most_domains", "max_text_bytes", "batch_tokens")
        at_least(self, 0, "reserve_s")
        _within(self, "batch_every_ms", 0, 100)


@dataclass(frozen=True)
class EncodeSettings(StageSettings):
    """Settings of the `upper` backend, besides those of both stages.

    If `num_slots` is None, `hplm.engine.adapter_slots.choose_slots` chooses by the device. `fine_prefetch` is HMI 6.2.
    `batch_rows` and `row_tokens` are TCB's B and L. `policy_settings` are the arguments of a policy of `hplm.scheduling`.
    `quantization` int8 computes the layers' products with 8-bit integers, see `hplm.engine.kernels.int8`.
    `students_*` are the rules of `hplm.scheduling.student_number`. `stage` is the number of this encode stage, from 1 on.
    `stage_cores` has the cores to which the processes of each encode stage are pinned; it is empty if they are not pinned.
    """

    num_slots: int | None = None
    reduction_factor: int = 4
    host_cache_mb: int = 2048
    coarse_prefetch: bool | None = None
    fine_prefetch: bool = True
    batching: Batching = "packed"
    policy: str = "das"
    policy_settings: dict[str, Any] = field(default_factory=dict)
    batch_rows: int = 8
    row_tokens: int = 128
    starve_after_s: float = 2.0
    compute_nice: int = -20
    pad_to: int = 0
    students_fall_batches: float = 1.0
    students_quiet_s: float = 2.0
    students_rise_share: float = 0.7
    stage: int = 1
    stage_cores: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.stage <= self.encode_stages:
            raise ConfigError(
                f"stage must be the number of an encode stage, 1 to {self.encode_stages}, got {self.stage}"
            )
        if self.stage_cores and (
            len(self.stage_cores) != self.encode_stages
            or not all(cores and min(cores) >= 0 for cores in self.stage_cores)
        ):
            raise ConfigError(
                f"stage_cores must have numbers of cores for each of {self.encode_stages} encode stages, or be empty, got "
                f"{[list(cores) for cores in self.stage_cores]}"
            )
        at_least(self, 0, "pad_to")
        if self.num_slots is not None:
            at_least(self, 2, "num_slots")
        at_least(self, 1, "reduction_factor", "host_cache_mb", "batch_rows", "row_tokens")
        _within(self, "compute_nice", -20, 19)
        _positive(self, "starve_after_s", "students_fall_batches", "students_quiet_s")
        _within(self, "students_rise_share", 0.01, 1)

    @property
    def layers(self) -> range | None:
        """The layers that this encode stage computes, None for all."""
        if not self.stage_layers:
            return None
        first = sum(self.stage_layers[: self.stage - 1])
        return range(first, first + self.stage_layers[self.stage - 1])

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores to which this encode stage is pinned, empty if it is not pinned."""
        return self.stage_cores[self.stage - 1] if self.stage_cores else ()


@dataclass(frozen=True)
class ManagedBase:
    """How a manager trains tenants and domains of one base.

    `domain` is that of a request that names none. `miss` is the look-up stage's setting: tenants are trained on the vectors
    that they will be served, but in floats if serving uses int8. `reduction_factor` is the upper stage's setting: wide
    adapters are as wide as it allows, narrow adapters at most as wide as REDUCTION_FACTOR allows.
    """

    domain: str
    miss: Miss = "compute"
    # An export writes the upper stage's value. Older exports did not, and had slots of this width.
    reduction_factor: int = REDUCTION_FACTOR

    def __post_init__(self) -> None:
        at_least(self, 1, "reduction_factor")


@dataclass(frozen=True)
class ManagerSettings:
    """Settings of the `manager` backend. `store` is relative to the folder of the settings file.

    `base` is the base of a request that names none; `domain`, `miss` and `reduction_factor` are its settings, see ManagedBase.
    `bases` has the same three settings for each further base that the repository serves.
    """

    store: str
    base: str
    domain: str
    registry: str = ""
    allow_paths: bool = False
    data_root: str = ""
    max_upload_bytes: int = 256 << 20
    max_uploads_bytes: int = 4 << 30
    upload_chunk_bytes: int = 4 << 20
    max_data_bytes: int = 64 << 20
    min_corpus_tokens: int = 50_000
    keep_versions: int = 3
    miss: Miss = ManagedBase.miss
    reduction_factor: int = ManagedBase.reduction_factor
    bases: dict[str, Any] = field(default_factory=dict)
    worker: bool = True

    def __post_init__(self) -> None:
        at_least(self, 1, "max_upload_bytes", "max_uploads_bytes", "upload_chunk_bytes", "max_data_bytes")
        at_least(self, 1, "min_corpus_tokens", "keep_versions", "reduction_factor")
        if self.upload_chunk_bytes > MOST_CHUNK_BYTES:
            raise ConfigError(f"upload_chunk_bytes must be at most {MOST_CHUNK_BYTES}, got {self.upload_chunk_bytes}")
        if (self.allow_paths or self.data_root) and not Path(self.data_root).is_absolute():
            raise ConfigError(f"data_root must be the absolute path of the folder for files, got {self.data_root!r}")
        if self.base in self.bases:
            raise ConfigError(f"bases: {self.base!r} is the default base, whose settings stand beside `base`")
        _ = self.managed

    @cached_property
    def managed(self) -> dict[str, ManagedBase]:
        """The settings of each base that the repository serves, the default base first."""
        default = ManagedBase(self.domain, self.miss, self.reduction_factor)
        further = {base: parse_settings(ManagedBase, values, f"bases: {base}") for base, values in self.bases.items()}
        return {self.base: default, **further}


@dataclass(frozen=True)
class RouteSettings:
    """Settings of the `route` backend. `store` is relative to the folder of the settings file.

    `models` has the name of the model that serves each base. `queue_capacity`, `calls` and `call_texts` are for each model.
    """

    store: str
    models: dict[str, Any]
    registry: str = ""
    queue_capacity: int = 4096
    gather_ms: float = 2.0
    call_texts: int = 64
    calls: int = 8
    metric_tenants: int = StageSettings.metric_tenants
    tenant_label: TenantLabel = StageSettings.tenant_label

    @property
    def metering(self) -> Metering:
        """How the stage counts by tenant."""
        return Metering(self.metric_tenants, self.tenant_label)

    def __post_init__(self) -> None:
        _within(self, "metric_tenants", 0, MOST_METRIC_TENANTS)
        for base, model in self.models.items():
            if not isinstance(model, str) or not model:
                raise ConfigError(f"models: the model of base {base!r} must be a name, got {reprlib.repr(model)}")
        at_least(self, 1, "queue_capacity")
        _within(self, "gather_ms", 0, 100)
        _within(self, "call_texts", 1, 64)
        _within(self, "calls", 1, 64)


@dataclass(frozen=True)
class CascadeSettings(RouteSettings):
    """Settings of the `cascade` backend: those of `route`, and `levels`.

    `levels` has the name of the model of each base that decides whether a text is re-routed. A base of several encode stages
    cannot decide, so it has none. A base has `calls` to its model for tenants without a plan, and as many to its model as a
    level, so there are fewer calls than those of `route`.
    """

    calls: int = 4
    levels: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        are_names = all(isinstance(model, str) and model for model in self.levels.values())
        if not are_names or not self.levels.keys() <= self.models.keys():
            raise ConfigError(f"levels: names of models for bases of models were expected, got {self.levels!r:.200}")


def _positive(settings: object, *keys: str) -> None:
    for key in keys:
        if not (value := getattr(settings, key)) > 0:
            raise ConfigError(f"{key} must be above 0, got {value}")


def _weights(weights: dict[str, Any]) -> None:
    for tenant, weight in weights.items():
        try:
            check_name(tenant)
        except TenantNameError as error:
            raise ConfigError(f"tenant_weights: {reprlib.repr(tenant)} names no tenant: {error}") from None
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ConfigError(
                f"tenant_weights: the weight of {tenant!r} must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:,.0f}, "
                f"got {reprlib.repr(weight)}"
            )


def at_least(settings: object, least: int, *keys: str) -> None:
    """Raise ConfigError if one of the settings `keys` is below `least`."""
    for key in keys:
        if (value := getattr(settings, key)) < least:
            raise ConfigError(f"{key} must be at least {least}, got {value}")


def _within(settings: object, key: str, least: float, most: float) -> None:
    if not least <= (value := getattr(settings, key)) <= most:
        raise ConfigError(f"{key} must be {least:g} to {most:g}, got {value}")


def parse_settings(kind: type[Settings], values: Any, where: str) -> Settings:
    """Build settings of `kind` from JSON values. Raises ConfigError naming `where` and the key."""
    assert dataclasses.is_dataclass(kind)
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected an object, got {type(values).__name__}")
    fields = {known.name: known for known in dataclasses.fields(kind)}
    hints = _hints(kind)
    for key in values:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {reprlib.repr(key)}; known are {', '.join(fields)}")
    built = {key: _built(value, hints[key], where, key) for key, value in values.items()}
    missing = [
        name
        for name, known in fields.items()
        if known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


# The types of a dataclass's fields. Cached, because a backlog is parsed twenty times a second.
_hints = cache(get_type_hints)


def load_settings(kind: type[Settings], path: Path) -> Settings:
    """Read settings of `kind` from a JSON file. Raises ConfigError naming the file and the key."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: `hplm build export --models MODELS` writes model folders with their settings"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    return parse_settings(kind, values, str(path))


def _built(value: Any, hint: Any, where: str, key: str) -> Any:
    """Return a JSON value as its field holds it: objects become settings of their own, lists become tuples."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return parse_settings(hint, value, f"{where}: {key}")
    if _is_optional(hint) and value is not None:
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
        return _built(value, hint, where, key)
    if get_origin(hint) is tuple and isinstance(value, list):
        each_hint = get_args(hint)[0]
        # Numbers are looked at together: of a backlog there are a hundred, twenty times a second.
        if each_hint in (int, float) and {*map(type, value)} <= {int, each_hint}:
            return tuple(value)
        return tuple(_built(each, each_hint, where, key) for each in value)
    if not _fits(value, hint):
        raise ConfigError(f"{where}: {key} must be {_type_name(hint)}, got {reprlib.repr(value)}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if _is_optional(hint):
        return value is None
    if hint is float:
        # Python's JSON reader accepts NaN and Infinity.
        return (isinstance(value, float) and math.isfinite(value)) or _fits(value, int)
    hint = get_origin(hint) or hint
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _is_optional(hint: Any) -> bool:
    """Return whether a type is `X | None`. Python has two classes for it, one of them for Literals."""
    return get_origin(hint) in (types.UnionType, Union)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return "a list" if get_origin(hint) is tuple else str(getattr(hint, "__name__", hint))
