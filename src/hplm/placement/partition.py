"""Cuts a model's layers into the stages of a pipeline (AlpaServe 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from hplm.errors import ConfigError

# The number of layers of each stage, `[stages]`, each 1 or more.
Cut: TypeAlias = "tuple[int, ...]"
# Relative difference of two sums of the same times that were added in different orders, at most.
_ROUNDING = 1e-9


def balanced_cut(layer_s: Sequence[float], stages: int, send_s: float = 0.0) -> Cut:
    """Return the cut whose slowest stage is quickest; of several such cuts, the most even one.

    `layer_s` are the seconds of each layer. Every stage but the last takes `send_s` more, to send its result to the next. The
    most even cut has the least sum of squared stage times.
    """
    _check(len(layer_s), stages)
    return _balanced_cut(tuple(layer_s), stages, send_s)


@lru_cache(maxsize=4096)
def _balanced_cut(layer_s: tuple[float, ...], stages: int, send_s: float) -> Cut:
    slowest_s, _ = _best(layer_s, stages, send_s, lambda earlier, last_s: max(earlier, last_s), math.inf)
    limit_s = slowest_s * (1 + _ROUNDING)
    _, cut = _best(layer_s, stages, send_s, lambda earlier, last_s: earlier + last_s**2, limit_s)
    return cut


def _best(
    layer_s: tuple[float, ...], stages: int, send_s: float, join: Callable[[float, float], float], limit_s: float
) -> tuple[float, Cut]:
    """Return the least value of a cut whose stages all take `limit_s` at most, and that cut.

    This is the paper's dynamic programme: F(s, k) = min over i of join(F(s - 1, i - 1), latency(i, k)). F(s, k) is the value of
    the best cut of the layers 1 to k into s stages. With join = max it is the time of the slowest stage.
    """
    layers = len(layer_s)
    before = list(accumulate(layer_s, initial=0.0))
    # values[k] is F(s, k) of the s stages so far. first_of[s - 1][k] is the number of layers before the last of them.
    values = [0.0] + [math.inf] * layers
    first_of = []
    for stage in range(1, stages + 1):
        more_s = send_s if stage < stages else 0.0
        best, first = [math.inf] * (layers + 1), [0] * (layers + 1)
        for k in range(stage, layers + 1):
            for i in range(k - 1, stage - 2, -1):
                last_s = before[k] - before[i] + more_s
                if last_s > limit_s:
                    break
                value = join(values[i], last_s)
                if value < best[k]:
                    best[k], first[k] = value, i
        values = best
        first_of.append(first)
    bounds = [layers]
    for first in reversed(first_of):
        bounds.append(first[bounds[-1]])
    return values[layers], tuple(stop - start for start, stop in pairwise(reversed(bounds)))


def even_cut(layers: int, stages: int, first: int = 0, last: int = 0) -> Cut:
    """Return the cut that gives each stage the same number of layers, as people cut models by hand.

    The first `first` and the last `last` layers, such as the embedding and the head, are not counted: they go to the first and
    to the last stage. If the others cannot be divided evenly, stages differ by one layer.
    """
    counted = layers - first - last
    _check(counted, stages)
    bounds = [counted * stage // stages for stage in range(stages + 1)]
    cut = [stop - start for start, stop in pairwise(bounds)]
    cut[0] += first
    cut[-1] += last
    return tuple(cut)


def stage_layers(cut: Cut) -> list[range]:
    """Return the numbers of the layers of each stage."""
    return [range(start, stop) for start, stop in pairwise(accumulate(cut, initial=0))]


def stage_seconds(layer_s: Sequence[float], cut: Cut, send_s: float = 0.0) -> tuple[float, ...]:
    """Return the seconds of each stage of a cut, `send_s` of every stage but the last included."""
    if sum(cut) != len(layer_s):
        raise ConfigError(f"a cut of {len(layer_s)} layers was expected, got {cut}, which has {sum(cut)}")
    seconds = [sum(layer_s[layer] for layer in layers) for layers in stage_layers(cut)]
    return tuple(second + (send_s if number < len(cut) - 1 else 0.0) for number, second in enumerate(seconds))


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ConfigError(f"1 to {layers} stages were expected for {layers} layers, got {stages}")
