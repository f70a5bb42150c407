"""How the learning rate goes in every training: up for a short while, then down to zero."""

from __future__ import annotations


def triangle(step: int, steps: int, warmup_share: float) -> float:
    """The rate at a step, from 0 on, as a share of the highest; `warmup_share` of the steps go before that."""
    warmup = max(1, int(steps * warmup_share))
    return min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup)))
