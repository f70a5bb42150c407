"""The options that describe a workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.errors import ConfigError, DataError
from hplm_cli.place.workload_options import assumed_workload, changed_workload, deadlines_ms, numbers_by_base
from tests.triton.placement import making

MODELS = [making.served("hbert"), making.served("mpnet", 4)]
DEADLINES = {"hbert": 100.0, "mpnet": 200.0}


def test_each_base_has_its_number() -> None:
    assert numbers_by_base("--rate", ["hbert=4", "mpnet=0.5"]) == {"hbert": 4.0, "mpnet": 0.5}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["4"], "one BASE=NUMBER for each base"),
        (["hbert=4", "hbert=5"], "one BASE=NUMBER for each base"),
        (["hbert=-1"], "a number above 0"),
        (["hbert=many"], "a number above 0"),
        (["other=1"], "a base of hbert, mpnet"),
    ],
)
def test_a_number_that_is_wrong_is_refused_with_the_option(values: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"--rate: {said}"):
        numbers_by_base("--rate", values, ["hbert", "mpnet"])


def test_a_deadline_is_of_one_base_or_of_all_or_five_times_the_latency() -> None:
    assert deadlines_ms(["300", "mpnet=50"], MODELS, {}) == {"hbert": 300.0, "mpnet": 50.0}
    assert deadlines_ms(None, MODELS, {"mpnet": 2.0}) == {"hbert": 100.0, "mpnet": 210.0}
    with pytest.raises(ConfigError, match="one deadline for all bases"):
        deadlines_ms(["300", "400"], MODELS, {})


def test_rates_and_cv_make_a_workload() -> None:
    assumed = assumed_workload(MODELS, {"hbert": 4.0}, 2.5, None, DEADLINES, 32, 60.0, 7, {})
    assert (assumed.rates, assumed.cv, assumed.duration_s, assumed.seed) == ({"hbert": 4.0}, 2.5, 60.0, 7)


def test_a_trace_has_its_own_rate_and_cv(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP\n" + "\n".join(str(second / 4) for second in range(401)))
    assumed = assumed_workload(MODELS, {}, None, trace, DEADLINES, 32, None, None, {})
    assert assumed.rates == pytest.approx({"hbert": 2.0, "mpnet": 2.0})
    assert assumed.duration_s == pytest.approx(100.0)
    assert assumed.cv < 0.1
    with pytest.raises(ConfigError, match="--cv is not for a trace"):
        assumed_workload(MODELS, {}, 2.0, trace, DEADLINES, 32, None, None, {})


def test_a_malformed_trace_is_refused_with_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP\n1\nsoon\n")
    with pytest.raises(DataError, match=f"{trace}, line 3"):
        assumed_workload(MODELS, {}, None, trace, DEADLINES, 32, None, None, {})


def test_without_rates_or_a_trace_there_is_no_workload() -> None:
    with pytest.raises(ConfigError, match="give --rate BASE=N"):
        assumed_workload(MODELS, {}, None, None, DEADLINES, 32, None, None, {})


def test_what_is_not_changed_stays() -> None:
    assumed = making.make_plan().assumptions
    changed = changed_workload(assumed, rates={"hbert": 3.0}, cv=4.0, deadline_ms={"hbert": 9.0}, seconds=5.0, seed=1)
    assert (changed.rates, changed.cv, changed.deadline_ms) == ({"hbert": 3.0}, 4.0, {"hbert": 9.0})
    assert (changed.duration_s, changed.seed, changed.tokens) == (5.0, 1, assumed.tokens)
    assert changed_workload(assumed) == assumed
