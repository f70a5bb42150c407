"""The load of nodes, read from their metrics pages."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_builder.placement.observed_load import LoadWindow, served_bases_on, texts_of_bases

from hplm.errors import DataError
from hplm.workloads.arrivals import GammaArrivals

LINE = (
    'hplm_tenant_texts_total{{model_instance="{process}",stage="{stage}",tenant="films",outcome="{outcome}"}} {count}\n'
)


def page(*rows: tuple[str, str, str, float]) -> str:
    """A metrics page with rows of process, stage, outcome and count."""
    return "# HELP hplm_tenant_texts_total Texts\n" + "".join(
        LINE.format(process=process, stage=stage, outcome=outcome, count=count)
        for process, stage, outcome, count in rows
    )


def test_the_stages_of_a_base_count_each_of_its_texts_once() -> None:
    text = page(
        ("hbert_plot_0_0", "plot", "deadline_unmeetable", 1),
        ("hbert_upper_0_0", "upper", "ok", 10),
        ("hbert_upper_0_1", "upper", "ok", 20),
        ("mpnet_upper_1_0_0", "layers", "deadline_unmeetable", 3),
        ("mpnet_upper_2_0_0", "upper", "ok", 5),
        ("whole_upper_0_0", "upper", "ok", 7),
        ("hplm_0_0", "route", "ok", 42),
        ("other_upper_0_0", "upper", "ok", 9),
    )
    counts = texts_of_bases(text, ["hbert", "mpnet", "whole"])
    by_base = {
        base: sum(n for (name, _, _), n in counts.items() if name == base) for base in ("hbert", "mpnet", "whole")
    }
    assert by_base == {"hbert": 31, "mpnet": 8, "whole": 7}
    assert sum(counts.values()) == 46


def test_the_rates_of_a_window_are_those_of_all_nodes() -> None:
    window = LoadWindow(["hbert"], 100.0)
    for now_s, count in ((0.0, 1000), (10.0, 1050), (20.0, 1100)):
        pages = {node: page(("hbert_upper_0_0", "upper", "ok", count)) for node in ("east", "west")}
        window.add(pages, now_s)
    observed = window.observed(["east", "west"])
    assert observed.seconds == 20.0
    assert observed.rates == {"hbert": 10.0}
    assert observed.answered == 1.0


def test_a_counter_of_a_process_that_started_again_goes_on_from_zero() -> None:
    window = LoadWindow(["hbert"], 100.0)
    for now_s, count in ((0.0, 1000), (10.0, 30)):
        window.add({"east": page(("hbert_upper_0_0", "upper", "ok", count))}, now_s)
    assert window.observed(["east"]).rates == {"hbert": 3.0}


def test_looks_that_are_older_than_the_window_are_forgotten() -> None:
    window = LoadWindow(["hbert"], 20.0)
    for now_s, count in ((0.0, 0), (10.0, 1000), (20.0, 1010), (30.0, 1020), (40.0, 1030)):
        window.add({"east": page(("hbert_upper_0_0", "upper", "ok", count))}, now_s)
    assert window.observed(["east"]).rates == {"hbert": 1.0}


def test_refused_texts_count_as_requests_that_were_not_answered() -> None:
    window = LoadWindow(["hbert"], 100.0)
    for now_s, count in ((0.0, 0), (10.0, 30)):
        rows = [("hbert_upper_0_0", "upper", "ok", 2 * count), ("hbert_plot_0_0", "plot", "queue_full", count)]
        window.add({"east": page(*rows)}, now_s)
    assert window.observed(["east"]).answered == pytest.approx(2 / 3)
    assert window.observed(["east"]).rates == {"hbert": 9.0}


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_the_burstiness_is_estimated_from_counts(cv: float) -> None:
    times = GammaArrivals(20.0, cv).times(7200.0, np.random.default_rng(0))
    window = LoadWindow(["hbert"], 7200.0)
    for now_s in np.arange(0.0, 7200.0, 15.0).tolist():
        count = int(np.searchsorted(times, now_s))
        window.add({"east": page(("hbert_upper_0_0", "upper", "ok", count))}, now_s)
    assert window.observed(["east"]).cv == pytest.approx(cv, rel=0.15)


def test_a_node_whose_pages_were_missing_does_not_make_the_load_look_bursty() -> None:
    times = GammaArrivals(20.0, 1.0).times(7200.0, np.random.default_rng(0))
    window = LoadWindow(["hbert"], 7200.0)
    for look, now_s in enumerate(np.arange(0.0, 7200.0, 15.0).tolist()):
        pages = {"east": page(("hbert_upper_0_0", "upper", "ok", int(np.searchsorted(times, now_s))))}
        # Looks 100 to 139 find one node only.
        window.add({**pages, **({} if 100 <= look < 140 else {"west": pages["east"]})}, now_s)
    observed = window.observed(["east", "west"])
    # Both nodes count the same texts, which doubles the variance of a Poisson process.
    assert observed.cv == pytest.approx(2**0.5, rel=0.15)
    assert observed.rates["hbert"] == pytest.approx(40.0, rel=0.05)


def test_few_requests_tell_no_burstiness() -> None:
    window = LoadWindow(["hbert"], 100.0)
    for now_s, count in ((0.0, 0), (10.0, 1)):
        window.add({"east": page(("hbert_upper_0_0", "upper", "ok", count))}, now_s)
    assert window.observed(["east"]).cv is None


def test_a_node_without_two_pages_at_the_end_gives_no_load() -> None:
    window = LoadWindow(["hbert"], 100.0)
    ok = page(("hbert_upper_0_0", "upper", "ok", 10))
    window.add({"east": ok}, 0.0)
    with pytest.raises(DataError, match=r"no data: .* east gave none or the first only"):
        window.observed(["east"])
    window.add({"east": ok, "west": ok}, 10.0)
    with pytest.raises(DataError, match="west gave none or the first only"):
        window.observed(["east", "west"])
    window.add({"east": ok}, 20.0)
    with pytest.raises(DataError, match="west gave none"):
        window.observed(["east", "west"])
    # Two pages, and no texts between them.
    assert window.observed(["east"]).answered is None


def test_texts_of_a_pause_that_is_longer_than_the_window_are_not_those_of_the_window() -> None:
    window = LoadWindow(["hbert"], 100.0)
    counts = {0.0: 0, 10.0: 10, 500.0: 100_000, 510.0: 100_010}
    for now_s, count in counts.items():
        window.add({"west": page(), "east": page(("hbert_upper_0_0", "upper", "ok", count))}, now_s)
        for pause_s in range(20, 500, 10) if now_s == 10.0 else ():
            window.add({"west": page()}, float(pause_s))
    assert window.observed(["east"]).rates["hbert"] == pytest.approx(0.1)


def test_a_page_names_the_bases_that_its_node_serves() -> None:
    idle = "# HELP hplm_plot_waiting Requests\nhplm_plot_waiting 0\n"
    assert served_bases_on(idle, ["hbert"]) == set()
    loaded = idle + 'nv_inference_request_success{model="hbert",version="1"} 0\n'
    assert served_bases_on(loaded, ["hbert", "mpnet"]) == {"hbert"}
    assert served_bases_on(page(("mpnet_upper_0_0", "upper", "ok", 1)), ["hbert", "mpnet"]) == {"mpnet"}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many"])
def test_a_count_that_is_none_is_refused(value: str) -> None:
    line = LINE.format(process="hbert_upper_0_0", stage="upper", outcome="ok", count=value)
    with pytest.raises(DataError, match="a count of texts was expected"):
        texts_of_bases(line, ["hbert"])
