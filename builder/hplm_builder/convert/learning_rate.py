"""The learning rate of every training: it rises for a short while, then falls to zero."""

from __future__ import annotations


def triangle(step: int, steps: int, warmup_share: float) -> float:
    """Return the rate at a step, counted from 0, as a share of the highest rate. It rises for `warmup_share` of the steps."""
    warmup = max(1, int(steps * warmup_share))
    return min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup)))
