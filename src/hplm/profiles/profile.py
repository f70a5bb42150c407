"""The measured profile of a base on one machine: times by tokens and texts, memory, and times of loading."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from hplm.core.settings import parse_settings
from hplm.errors import ConfigError


@dataclass(frozen=True)
class Conditions:
    """The machine and the settings that decide how fast an encode stage computes. Times hold under these conditions only.

    `fingerprint` is the base's. `processor` and `cores` are those that a process may use. `device` is `cpu` or the name of the
    GPU. `threads` are those of the encode stage's products. `reduced_size` is the bottleneck of an adapter slot.
    """

    fingerprint: str
    processor: str
    cores: int
    device: str
    dtype: str
    quantization: str
    threads: int
    batching: str
    reduced_size: int

    @property
    def digest(self) -> str:
        """12 hex digits. Equal conditions have equal digests."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Timing:
    """The median milliseconds of a batch of `texts` texts of `tokens` tokens each, special tokens included."""

    texts: int
    tokens: int
    ms: float


@dataclass(frozen=True)
class LayerTiming:
    """The median milliseconds of each computed layer of a batch of `texts` texts of `tokens` tokens each."""

    texts: int
    tokens: int
    ms: tuple[float, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes that a served base needs.

    `weights`: the layers as they are computed. `adapter`: one tenant in an adapter slot. `slots`: all adapter slots. `tables`:
    the files of the root's table, which processes share. `waiting_token`: a token of a text that waits for the encode stage.
    `look_up_process` and `encode_process` are the resident bytes of the stages' processes, 0 if no server was measured.
    """

    weights: int
    adapter: int
    slots: int
    tables: int
    waiting_token: int
    look_up_process: int = 0
    encode_process: int = 0


@dataclass(frozen=True)
class Profile:
    """A measurement of a base under `conditions`, at `measured_at` (UTC, ISO 8601).

    `kind` is `full` if a Triton server answered the requests of `request`. It is `quick` if the stages' times were added in one
    process, without a server. `look_up` has texts whose n-grams no table holds, `known` has texts that were looked up before.
    `encode` has the batches of the encode stage, `layers` the layers of some of these batches. `request` has whole requests,
    one at a time. `load_s`: seconds until a server answers. `tenant_load_ms`: a tenant from disk to host memory. `swap_ms`: an
    adapter from host memory to its slot. Both are None if no tenant was measured.
    """

    base: str
    conditions: Conditions
    measured_at: str
    kind: Literal["full", "quick"]
    look_up: tuple[Timing, ...]
    known: tuple[Timing, ...]
    encode: tuple[Timing, ...]
    layers: tuple[LayerTiming, ...]
    request: tuple[Timing, ...]
    memory: Memory
    load_s: float | None = None
    tenant_load_ms: float | None = None
    swap_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("request", "look_up", "known", "encode"):
            alone = [timing.tokens for timing in getattr(self, name) if timing.texts == 1]
            if not alone or alone != sorted(set(alone)):
                raise ConfigError(f"{name}: texts of ascending lengths were expected, got lengths {alone}")
        if not all(0 < timing.ms < math.inf for timing in (*self.request, *self.look_up, *self.known, *self.encode)):
            raise ConfigError("finite times above 0 ms were expected")

    def latency_ms(self, tokens: int, new_share: float = 1.0, students: int = 1) -> float:
        """Return the milliseconds of a request of one text of `tokens` tokens, while no other request runs.

        `students` is the number of students that answer it. Each computes the text, so the encode stage takes at most the time
        of a text of so many times the tokens.

        `new_share` is the share of the text's n-grams that are neither in a table nor remembered, 0 to 1. By default all are
        new, which costs most; it makes no difference to a whole base. Between two measured lengths the time is interpolated.
        Below the shortest length it is that length's time. Beyond the longest length it rises as between the two longest.
        A longer text never takes less time.
        """
        new_ms, look_up_ms, known_ms, encode_ms = (
            interpolate(rising([(timing.tokens, timing.ms) for timing in timings if timing.texts == 1]), tokens)
            for timings in (self.request, self.look_up, self.known, self.encode)
        )
        encoded = rising([(timing.tokens, timing.ms) for timing in self.encode if timing.texts == 1])
        more_ms = interpolate(encoded, tokens * students) - encode_ms
        return more_ms + max(encode_ms, new_ms - (1 - new_share) * max(0.0, look_up_ms - known_ms))

    def cost_samples(self) -> list[tuple[int, int, float]]:
        """Return the encode stage's batches as samples of a cost model: tokens, sum of squared lengths, seconds."""
        return [
            (timing.texts * timing.tokens, timing.texts * timing.tokens**2, timing.ms / 1000) for timing in self.encode
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the profile in JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def from_json(cls, values: Any, where: str) -> Profile:
        """Parse `to_json`. Raises ConfigError, which names `where`."""
        return parse_settings(cls, values, where)


def rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return points whose values never fall: neighbours that fall get their mean (isotonic regression).

    A busy machine may slow the measurement of a short text more than that of a longer text.
    """
    # Runs of points with one value: the value, and the number of points.
    runs: list[tuple[float, int]] = []
    for _, value in points:
        count = 1
        while runs and runs[-1][0] > value:
            before, before_count = runs.pop()
            value = (before * before_count + value * count) / (before_count + count)
            count += before_count
        runs.append((value, count))
    values = [value for value, count in runs for _ in range(count)]
    return [(x, value) for (x, _), value in zip(points, values, strict=True)]


def interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """Return the value at `x` of the line through ascending points.

    Below the first point the value is the first one. Beyond the last point the last slope goes on.
    """
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    if x <= first_x or len(points) == 1:
        return first_y
    for (left_x, left_y), (right_x, right_y) in pairwise(points):
        if x <= right_x:
            return left_y + (right_y - left_y) * (x - left_x) / (right_x - left_x)
    before_x, before_y = points[-2]
    return last_y + (last_y - before_y) * (x - last_x) / (last_x - before_x)
