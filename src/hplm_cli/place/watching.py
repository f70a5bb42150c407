"""Compares a plan's assumptions with what its nodes measured, and says when a new plan would win."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hplm_builder.placement.observed_load import Observed
from hplm_builder.placement.plan_build import nodes_of, placement_of, stage_times_of, with_one_cut
from hplm_builder.placement.planned_workload import planned_requests
from hplm_builder.placement.planning import search_options

from hplm.placement.plan import Plan
from hplm.placement.search.enumeration import search
from hplm.placement.simulation import simulate
from hplm.runtime.local_http import LOCAL_HTTP

# Seconds for a metrics page.
PAGE_S = 10.0
# A new plan wins if it answers so much more of the requests in time: less is within the error of a prediction.
LEAST_GAIN = 0.01
# Requests a second below which a base counts as idle.
IDLE_RATE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """A plan under the observed load: the predicted share in time, and that of the best other placement."""

    observed: Observed
    kept: float
    best: float

    @property
    def wins(self) -> bool:
        """Whether a new plan would be worth it."""
        return self.best - self.kept >= LEAST_GAIN


def metrics_page(url: str) -> str | None:
    """Return the page of a node, None if the node does not answer."""
    try:
        with LOCAL_HTTP.open(urllib.request.Request(url), timeout=PAGE_S) as reply:
            return str(reply.read().decode(errors="replace"))
    except (urllib.error.URLError, OSError, ValueError):
        return None


def judge(plan: Plan, observed: Observed, most_stages: int) -> Verdict:
    """Simulate a plan and a new search under the observed load. Deadlines stay those of the plan."""
    assumed = plan.assumptions
    rates = {base: rate for base, rate in observed.rates.items() if rate > IDLE_RATE}
    if not rates:
        return Verdict(observed, 1.0, 1.0)
    load = replace(assumed, rates=rates, trace="", cv=assumed.cv if observed.cv is None else observed.cv)
    requests = planned_requests(load)
    stage_times = stage_times_of(plan)
    kept = simulate(placement_of(plan), stage_times, requests).attainment
    options = search_options(most_stages, survive_any_node=plan.survives_any_node)
    nodes = nodes_of(plan)
    found = search(plan.models, nodes.cluster(), requests, options, stage_times=stage_times)
    other = simulate(with_one_cut(found.placement, nodes), stage_times, requests).attainment
    return Verdict(observed, kept, max(kept, other))


def verdict_lines(plan: Plan, verdict: Verdict) -> Iterator[str]:
    """Yield a verdict in words."""
    observed, assumed = verdict.observed, plan.assumptions
    for base, rate in observed.rates.items():
        planned = assumed.rates.get(base, 0.0)
        yield f"{base}: {rate:.3g} requests/s in the last {observed.seconds:.0f} s, the plan assumes {planned:.3g}"
    cv = "unknown: too few requests" if observed.cv is None else f"{observed.cv:.2f}"
    yield f"burstiness (cv): {cv}, the plan assumes {assumed.cv:.2f}"
    yield f"answered: {observed.answered:.2%}; the plan predicted {plan.prediction.attainment:.2%} in time"
    yield f"under this load the plan would answer {verdict.kept:.2%} in time, a new plan {verdict.best:.2%}"
    if verdict.wins:
        rates = " ".join(f"--rate {base}={rate:.3g}" for base, rate in observed.rates.items() if rate > IDLE_RATE)
        cv_option = "" if observed.cv is None else f" --cv {observed.cv:.2g}"
        yield f"a new plan wins by {verdict.best - verdict.kept:.2%}: `hplm place plan {rates}{cv_option} ...`"
    else:
        yield "keep the plan"
