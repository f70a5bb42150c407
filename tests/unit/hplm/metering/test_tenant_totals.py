"""Counters and histograms by tenant label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from hplm.metering.busiest import MOST_CHANGES
from hplm.metering.tenant_totals import FAMILIES, OTHER, Series, TenantTotals, TextEvent

TENANTS = st.sampled_from(["", *(f"t{number}" for number in range(8))])
EVENTS = st.lists(
    st.builds(
        TextEvent,
        TENANTS,
        st.sampled_from(["queue", "compute", "whole", "whole"]),
        st.sampled_from([0.0, 0.0025, 0.004, 0.3, 11.0]),
        st.sampled_from(["ok", "queue_full"]),
    ),
    max_size=30,
)
# Events, then whether a turn ends.
STEPS = st.lists(st.tuples(EVENTS, st.booleans()), max_size=20)


def texts_of(series: Mapping[Series, float]) -> Counter[str]:
    """Texts by label."""
    counted: Counter[str] = Counter()
    for each, value in series.items():
        if each.metric == "hplm_tenant_texts_total":
            counted[dict(each.labels)["tenant"]] += int(value)
    return counted


@given(steps=STEPS, most=st.integers(0, 3))
def test_no_counter_ever_goes_down_and_no_text_counts_twice(
    steps: list[tuple[list[TextEvent], bool]], most: int
) -> None:
    totals, highest, whole = TenantTotals("plot", most), dict[Series, float](), 0
    for events, ends_turn in steps:
        totals.add(events)
        if ends_turn:
            totals.end_turn()
        whole += sum(event.kind == "whole" for event in events)
        shown = totals.series()
        for series, value in shown.items():
            # Also for a label that was gone meanwhile.
            assert value >= highest.get(series, 0.0)
            highest[series] = value
        assert len(texts_of(shown)) <= most + MOST_CHANGES + 1
    assert sum(texts_of(highest).values()) == whole


def test_a_tenant_counts_under_its_label_only_while_it_has_one() -> None:
    totals = TenantTotals("plot", 1)
    first, second = TextEvent("first", "whole", 0.1, "ok"), TextEvent("second", "whole", 0.1, "ok")
    totals.add([first, second, first])
    assert texts_of(totals.series()) == {"first": 2, OTHER: 1}
    totals.add([second] * 9)
    totals.end_turn()
    totals.add([first, second])
    assert texts_of(totals.series()) == {"first": 2, "second": 1, OTHER: 11}
    totals.end_turn()
    assert texts_of(totals.series()) == {"second": 1, OTHER: 11}
    totals.add([first] * 99)
    totals.end_turn()
    totals.end_turn()
    totals.add([first])
    assert texts_of(totals.series()) == {"first": 3, OTHER: 110}


def test_buckets_hold_the_texts_of_the_buckets_before() -> None:
    totals = TenantTotals("upper", 5)
    totals.add([TextEvent("acme", "compute", seconds) for seconds in (0.0025, 0.003, 0.2, 99.0)])
    values = {
        dict(series.labels).get("le", series.metric.rpartition("_")[2]): value
        for series, value in totals.series().items()
    }
    assert values["0.0025"] == 1
    assert values["0.005"] == 2
    assert values["0.25"] == 3
    assert values["10"] == 3
    assert values["+Inf"] == values["count"] == 4
    assert values["sum"] == 99.2055


def test_hashes_hide_names() -> None:
    totals = TenantTotals("upper", 5, "hash")
    totals.add([TextEvent("acme", "whole", 0.1, "ok")])
    (label,) = texts_of(totals.series()).keys() - {OTHER}
    assert len(label) == 12
    assert "acme" not in label


def test_a_tenant_with_the_name_of_the_rest_has_its_own_label() -> None:
    totals = TenantTotals("upper", 5)
    totals.add([TextEvent(OTHER, "whole", 0.1, "ok"), TextEvent("", "whole", 0.1, "ok")])
    assert texts_of(totals.series()) == {"other (tenant)": 1, OTHER: 1}


def test_every_metric_has_a_description() -> None:
    totals = TenantTotals("upper", 5)
    totals.add([TextEvent("acme", kind, 0.1, "ok") for kind in ("queue", "look_up", "compute", "whole")])
    assert {series.metric for series in totals.series()} == set(FAMILIES)
