"""Compares a plan's assumptions with what its nodes measured, and says when a new plan would win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hplm_builder.placement.observed_load import Observed, served_bases_on
from hplm_builder.placement.plan_build import nodes_of, placement_of, stage_times_of, with_one_cut
from hplm_builder.placement.planned_workload import MOST_REQUESTS, planned_requests
from hplm_builder.placement.planning import search_options

from hplm.errors import DataError, HplmError
from hplm.placement.plan import Plan
from hplm.placement.search.enumeration import search
from hplm.placement.simulation import simulate
from hplm.runtime.local_http import fetch_page

# Seconds for a metrics page.
PAGE_S = 10.0
# A new plan wins if it answers so much more of the requests in time: less is within the error of a prediction.
LEAST_GAIN = 0.01
# Requests of a simulation at least.
LEAST_REQUESTS = 1000
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


@dataclass(frozen=True)
class Look:
    """The metrics pages of nodes at a time, and why a node has none, by address. `bases`: the bases that the pages have."""

    pages: dict[str, str]
    missing: dict[str, HplmError]
    bases: frozenset[str]


def look(urls: Sequence[str], bases: Sequence[str]) -> Look:
    """Fetch the metrics page of each node. A node without one of `bases` is missing."""
    pages: dict[str, str] = {}
    missing: dict[str, HplmError] = {}
    served: set[str] = set()
    for url in urls:
        try:
            page = fetch_page(url, timeout_s=PAGE_S)
            if not (on_page := served_bases_on(page, bases)):
                raise DataError(f"the page of a node with a base of {', '.join(bases)} was expected, and it has none")
        except DataError as error:
            missing[url] = DataError(f"{url}: {error}")
        except HplmError as error:
            missing[url] = error
        else:
            pages[url] = page
            served |= on_page
    return Look(pages, missing, frozenset(served))


def first_look(urls: Sequence[str], plan: Plan) -> Look:
    """Fetch the metrics page of each node. Raises the error of a node without one, and DataError if no node has a base."""
    placed = sorted({base.base for group in plan.groups for base in group.bases})
    first = look(urls, list(plan.assumptions.rates))
    for error in first.missing.values():
        raise error
    if absent := [base for base in placed if base not in first.bases]:
        raise DataError(
            f"the page of a node with base {', '.join(absent)} was expected too: give --metrics for each node of the plan"
        )
    return first


def judge(plan: Plan, observed: Observed, most_stages: int) -> Verdict:
    """Simulate a plan and a new search under the observed load. Deadlines stay those of the plan.

    Raises DataError if there was no load.
    """
    assumed = plan.assumptions
    rates = {base: rate for base, rate in observed.rates.items() if rate > IDLE_RATE}
    if not rates:
        raise DataError(
            f"no data: requests were expected, and the nodes had none or next to none in the last {observed.seconds:.0f} s"
        )
    # A share of few requests says little, and a simulation of too many takes too long.
    total = sum(rates.values())
    duration_s = min(max(assumed.duration_s, LEAST_REQUESTS / total), MOST_REQUESTS / 2 / total)
    cv = assumed.cv if observed.cv is None else observed.cv
    requests = planned_requests(replace(assumed, rates=rates, trace="", cv=cv, duration_s=duration_s))
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
    answered = "no requests" if observed.answered is None else f"{observed.answered:.2%}"
    yield f"answered: {answered}; the plan predicted {plan.prediction.attainment:.2%} in time"
    yield f"under this load the plan would answer {verdict.kept:.2%} in time, a new plan {verdict.best:.2%}"
    if verdict.wins:
        rates = " ".join(f"--rate {base}={rate:.3g}" for base, rate in observed.rates.items() if rate > IDLE_RATE)
        cv_option = "" if observed.cv is None else f" --cv {observed.cv:.2g}"
        yield f"a new plan wins by {verdict.best - verdict.kept:.2%}: `hplm place plan {rates}{cv_option} ...`"
    else:
        yield "keep the plan"
