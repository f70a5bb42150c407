"""Lines that tell people how a tenant's adapter was chosen, and what simple baselines have on the same dev examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The baselines of `baseline_scores` in words.
BASELINES = {"constant": "one answer to everything", "head": "a head over frozen layers"}


def width_and_baselines(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for a tenant's card or a job's result, none for a tenant of an older release."""
    if width := about.get("adapter_width"):
        why = about.get("width_why")
        yield f"adapter: {width}" + (f"; {why}" if why else "")
    if scores := about.get("baseline_scores"):
        # A newer server may have other baselines.
        named = (f"{BASELINES.get(name, name)} {score:.3f}" for name, score in scores.items())
        yield f"baselines on dev: {', '.join(named)}"
