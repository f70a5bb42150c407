"""Queueing theory of two models on two devices (AlpaServe 3.4): mean latencies, and the overheads that a pipeline may have.

Requests arrive as a Poisson process, and a request takes a fixed time: each queue is M/D/1. `rate_per_s` is the rate of both
models together. `latency_s` is the time D of a request on one device. All functions raise ConfigError if a queue would grow for
ever.
"""

from __future__ import annotations

import math

from hplm.errors import ConfigError


def wait_s(rate_per_s: float, service_s: float) -> float:
    """Return the mean seconds that a request waits in an M/D/1 queue: rate * D^2 / (2 * (1 - rate * D))."""
    utilisation = rate_per_s * service_s
    if not 0 <= utilisation < 1:
        raise ConfigError(f"a utilisation from 0 to below 1 was expected, got {utilisation:g}")
    return utilisation * service_s / (2 * (1 - utilisation))


def simple_latency_s(rate_per_s: float, latency_s: float, share: float = 0.5) -> float:
    """Return the mean latency if each model has a device of its own (W_simple). `share` of the requests are for one model."""
    if not 0 <= share <= 1:
        raise ConfigError(f"a share from 0 to 1 was expected, got {share:g}")
    shares = share, 1 - share
    return latency_s + sum(part * wait_s(part * rate_per_s, latency_s) for part in shares)


def pipeline_latency_s(rate_per_s: float, total_s: float, slowest_s: float) -> float:
    """Return the mean latency if both models share a pipeline (W_pipeline).

    `total_s` (D_s) is the time of a request through all stages, `slowest_s` (D_m) that of the slowest stage.
    """
    return total_s + wait_s(rate_per_s, slowest_s)


def largest_communication_overhead(utilisation: float) -> float:
    """Return the largest alpha with W_pipeline <= W_simple, where D_s = 2 D_m = alpha D (Fig. 10).

    `utilisation` is the rate times D, above 0 and below 2, because there are two devices. With w = W_simple / D, alpha is the
    smaller root of 3 u alpha^2 - (8 + 4 u w) alpha + 8 w = 0.
    """
    u, w = utilisation, _simple_in_latencies(utilisation)
    middle = 8 + 4 * u * w
    # Written so that a small utilisation does not subtract nearly equal numbers.
    return 16 * w / (middle + math.sqrt(middle**2 - 96 * u * w))


def largest_uneven_overhead(utilisation: float) -> float:
    """Return the largest beta with W_pipeline <= W_simple, where D_s = D and D_m = beta D / 2 (Fig. 10).

    With v = W_simple / D - 1, beta is the positive root of u beta^2 + 4 u v beta - 8 v = 0.
    """
    u, v = utilisation, _simple_in_latencies(utilisation) - 1
    return (-4 * u * v + math.sqrt((4 * u * v) ** 2 + 32 * u * v)) / (2 * u)


def _simple_in_latencies(utilisation: float) -> float:
    if not 0 < utilisation < 2:
        raise ConfigError(f"a utilisation of two devices above 0 and below 2 was expected, got {utilisation:g}")
    return simple_latency_s(utilisation, 1.0)
