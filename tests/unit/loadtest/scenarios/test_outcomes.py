"""A run counts latency from the planned time, loses nothing silently, and says when its generator fell behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hplm_loadtest.cli.loadtest import judge
from hplm_loadtest.scenarios.outcomes import (
    ANSWERED,
    NO_ANSWER,
    NOT_SENT,
    Recorder,
    Run,
    joined,
    kind_of,
)
from hplm_loadtest.scenarios.result_rows import combine_rounds, combine_runs, kept_up_goal, load_goals
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import HplmError, InternalError, ServerError, leaves
from tests.doubles import ManualClock

CODES = st.sampled_from([ANSWERED, NO_ANSWER, NOT_SENT, *(leaf.code for leaf in leaves())])


def run_of(lags_s: list[float], took_s: float = 0.01, codes: list[str] | None = None) -> Run:
    """Make a run of requests planned a second apart, sent with these lags, each done `took_s` later."""
    planned = np.arange(len(lags_s), dtype=np.float64)
    sent = planned + np.array(lags_s)
    none = np.full(len(planned), np.nan)
    return Run(float(len(planned)), planned, sent, sent + took_s, codes or [ANSWERED] * len(planned), none)


def test_latency_counts_from_the_planned_time() -> None:
    clock = ManualClock(100.0)
    recorder = Recorder(np.array([0.0, 1.0]), np.array([np.nan, np.nan]), 2.0, clock=clock)
    clock.now_s = 100.5
    recorder.sent(0)
    clock.now_s = 100.6
    recorder.done(0, ANSWERED)
    assert recorder.latency_s(0) == pytest.approx(0.6)
    clock.now_s = 101.0
    recorder.sent(1)
    clock.now_s = 101.2
    recorder.done(1, ANSWERED)
    run = recorder.run(2)
    np.testing.assert_allclose(run.latency_s, [0.6, 0.2])
    np.testing.assert_allclose(run.lag_s, [0.5, 0.0], atol=1e-9)


def test_a_request_without_an_answer_is_lost() -> None:
    recorder = Recorder(np.zeros(3), np.full(3, np.nan), 1.0, clock=ManualClock(100.0))
    recorder.sent(0)
    recorder.sent(1)
    recorder.done(1, ANSWERED)
    run = recorder.run(3)
    assert run.kinds == {"lost": 2, "answered": 1}
    assert run.row()["errors"] == {NO_ANSWER: 2}


def test_a_run_cut_short_counts_what_was_sent_until_then() -> None:
    clock = ManualClock(100.0)
    recorder = Recorder(np.arange(10.0), np.full(10, np.nan), 10.0, clock=clock)
    recorder.sent(0)
    recorder.done(0, ANSWERED)
    clock.now_s = 102.0
    run = recorder.run(1)
    assert len(run) == 1
    assert run.duration_s == pytest.approx(2.0)
    # The time spent waiting for late answers does not count.
    clock.now_s = 130.0
    assert recorder.run(1, ended_s=2.0).duration_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("late", "kept_up"), [(0, True), (1, True), (2, False), (50, False)], ids=["none", "1%", "2%", "half"]
)
def test_a_generator_kept_up_if_99_of_100_requests_were_sent_on_time(late: int, kept_up: bool) -> None:
    run = run_of([0.5] * late + [0.004] * (100 - late))
    assert run.kept_up is kept_up
    assert run.row()["kept_up"] == pytest.approx(1 - late / 100)


def test_a_request_never_sent_is_infinitely_late() -> None:
    run = run_of([0.0] * 10 + [float("nan")], codes=[ANSWERED] * 10 + [NO_ANSWER])
    assert not run.kept_up
    assert run.row()["lag_p99_ms"] == np.inf
    assert run.kinds["lost"] == 1


def test_a_request_not_sent_because_of_a_slow_server_is_lost_but_the_generator_kept_up() -> None:
    run = run_of([0.0] * 10 + [float("nan")], codes=[ANSWERED] * 10 + [NOT_SENT])
    assert run.kept_up
    assert run.row()["lag_p99_ms"] == 0
    assert run.kinds["lost"] == 1
    none_sent = run_of([float("nan")], codes=[NOT_SENT])
    assert none_sent.row()["kept_up"] == 1


def test_a_loss_in_one_round_counts() -> None:
    rounds = [{"lost": lost, "kept_up": kept, "p50_ms": lost} for lost, kept in ((0.0, 1.0), (0.0, 0.5), (500.0, 1.0))]
    assert combine_rounds(rounds) == {"lost": 500, "kept_up": 0.5, "p50_ms": 0}


@given(st.lists(st.floats(0.001, 60), min_size=1, max_size=200))
def test_percentiles_of_a_run_without_losses_equal_those_of_numpy(took_s: list[float]) -> None:
    run = run_of([0.0] * len(took_s))
    run = replace(run, done_s=run.planned_s + np.array(took_s))
    for percent in (50, 95, 99):
        assert run.percentile_ms(percent) == pytest.approx(1000 * np.percentile(run.latency_s, percent))


@given(st.lists(CODES, min_size=1, max_size=50))
def test_every_request_is_of_exactly_one_kind(codes: list[str]) -> None:
    run = run_of([0.0] * len(codes), codes=codes)
    row = run.row()
    assert sum(run.kinds.values()) == len(codes)
    assert len(run.latency_s) == codes.count(ANSWERED) == run.kinds["answered"]
    assert sum(row["errors"].values()) == row["refused"] + row["failed"] + row["lost"]
    assert row["mean_ms"] > 0
    assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]


def test_losing_or_failing_a_request_makes_no_percentile_better() -> None:
    """Lost and failed requests count as infinite waits; refused requests do not count as waits."""
    took_s = np.linspace(0.01, 0.99, 99)
    whole = run_of([0.0] * 99)
    whole = replace(whole, done_s=whole.sent_s + took_s)
    for code in (NO_ANSWER, NOT_SENT, "UNREACHABLE", "INTERNAL"):
        row = replace(whole, codes=[ANSWERED] * 49 + [code] * 50).row()
        assert row["p50_ms"] == row["p95_ms"] == row["p99_ms"] == row["mean_ms"] == np.inf
    few = replace(whole, codes=[ANSWERED] * 97 + ["INTERNAL"] * 2).row()
    assert few["p50_ms"] == pytest.approx(whole.row()["p50_ms"]) == pytest.approx(500)
    assert few["p95_ms"] == pytest.approx(whole.row()["p95_ms"])
    assert few["p99_ms"] == np.inf
    # The percentile falls exactly on the last answered request.
    assert replace(whole, codes=[ANSWERED] * 50 + [NO_ANSWER] * 49).row()["p50_ms"] == pytest.approx(500)
    refused = replace(whole, codes=[ANSWERED] * 49 + ["QUEUE_FULL"] * 50).row()
    assert (refused["p50_ms"], refused["refused"]) == (pytest.approx(250), 50)


def test_refusals_failures_and_losses_are_different_kinds() -> None:
    for leaf in leaves(HplmError):
        wanted = "refused" if leaf.status == "UNAVAILABLE" else "failed"
        assert kind_of(leaf.code) == ("lost" if leaf.code == "UNREACHABLE" else wanted)
    assert kind_of("UNKNOWN_TENANT") == "failed"
    assert kind_of(InternalError.code) == "failed"
    assert issubclass(InternalError, ServerError)
    assert kind_of("SOMETHING_NEW") == "failed"


def test_goodput_counts_answers_within_their_deadline() -> None:
    run = run_of([0.0, 0.0, 0.5, 0.0], took_s=0.1)
    deadlines = np.array([0.2, 0.05, 0.2, np.nan])
    timed = Run(run.duration_s, run.planned_s, run.sent_s, run.done_s, run.codes, deadlines)
    assert timed.in_time == 2
    assert timed.row()["in_time"] == 0.5
    lengths = np.array([2, 4, 5, 10])
    assert timed.utility_per_s(lengths, deadlines) == pytest.approx((1 / 2 + 1 / 10) / timed.duration_s)
    assert timed.utility_per_s(lengths, 0.7) == pytest.approx((1 / 2 + 1 / 4 + 1 / 5 + 1 / 10) / timed.duration_s)
    assert timed.row()["goodput_per_s"] == pytest.approx(2 / 4)


def test_a_selection_is_a_run_of_its_own() -> None:
    run = run_of([0.0, 0.3, 0.0], codes=[ANSWERED, "INTERNAL", ANSWERED])
    chosen = run.select(np.array([False, True, False]))
    assert chosen.codes == ["INTERNAL"]
    np.testing.assert_allclose(chosen.lag_s, [0.3])


def test_a_part_of_a_runs_time_is_a_run_of_that_time() -> None:
    part = run_of([0.0, 0.0, 0.3, 0.0, 0.0, 0.0], took_s=0.5, codes=[ANSWERED] * 3 + ["QUEUE_FULL"] * 3).between(2, 4)
    assert part.planned_s.tolist() == [0, 1]
    row = part.row()
    assert (row["requests"], row["offered_per_s"], row["goodput_per_s"], row["refused"]) == (2, 1, 0.5, 1)
    assert row["p50_ms"] == pytest.approx(800)


def test_answers_after_the_plan_lower_the_goodput() -> None:
    run = run_of([0.0] * 4, took_s=4.0)
    assert run.span_s == pytest.approx(7.0)
    assert run.row()["goodput_per_s"] == pytest.approx(4 / 7)


def test_a_good_load_prints_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(run_of([0.0] * 100))
    assert capsys.readouterr().err == ""


LATE = [0.0] * 50 + [0.1] * 50


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(LATE), "the load generator fell behind: 50.0 % of the requests were sent more than 20 ms late. "),
        (
            run_of(LATE, codes=[*["QUEUE_FULL"] * 60, *[ANSWERED] * 40]),
            "the server fell behind: of 100 requests 60 refused. Lower the rate",
        ),
        (run_of(LATE, took_s=7.5), "the server fell behind: half of its answers took more than 7.5 s. Lower the rate"),
        (
            replace(run_of(LATE, codes=[*["QUEUE_FULL"] * 60, *[ANSWERED] * 40]), generator_s=99.0),
            "the load generator fell behind: 50.0 % of the requests were sent more than 20 ms late; of 100 requests 60 ref",
        ),
        (
            run_of([0.0] * 2000, took_s=30.0, codes=[*[NOT_SENT] * 1200, *["UNREACHABLE"] * 3, *[ANSWERED] * 797]),
            "the server fell behind: of 2,000 requests 1,200 not sent because too many were under way, 3 lost; half",
        ),
        (
            run_of([0.0] * 100, codes=[*["UNREACHABLE"] * 60, *[ANSWERED] * 40]),
            "of 100 requests 60 lost: the row `errors` has their codes",
        ),
        (run_of([0.0] * 2, codes=[ANSWERED, NO_ANSWER]), "of 2 requests 1 lost: the row `errors` has their codes"),
        (
            run_of([0.0] * 2, codes=[ANSWERED, "TEXT_COUNT"]),
            "of 2 requests 1 failed: tenants of pairs take two texts, so name tenants by --models",
        ),
    ],
    ids=[
        "sent-late",
        "sent-late-and-refused",
        "sent-late-and-answered-late",
        "generator-without-time-left",
        "too-many-under-way",
        "nobody-there",
        "stopped",
        "pairs",
    ],
)
def test_a_bad_load_prints_one_line_that_names_one_side(
    run: Run, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not judge(run)
    printed = capsys.readouterr().err
    assert printed.startswith(f"hplm loadtest: {words}")
    assert printed.count("\n") == 1
    assert ("generator fell behind" in printed) + ("server fell behind" in printed) == (run.fell_behind is not None)


def test_a_server_that_refuses_is_named_but_the_load_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(run_of([0.0] * 100, codes=[*["QUEUE_FULL"] * 2, *[ANSWERED] * 98]))
    assert "the server fell behind: of 100 requests 2 refused. " in capsys.readouterr().err


def test_a_load_without_any_answer_is_not_good() -> None:
    assert not judge(run_of([0.0] * 100, codes=["QUEUE_FULL"] * 100))


def test_one_round_in_which_the_generator_fell_behind_spoils_a_point() -> None:
    point = combine_rounds(
        [{"rate": 1.0, "kept_up": 1.0}, {"rate": 3.0, "kept_up": 0.97}, {"rate": 2.0, "kept_up": 1.0}]
    )
    assert point == {"rate": 2.0, "kept_up": 0.97}
    assert not kept_up_goal("x", [{"kept_up": 1.0}, point]).met


def test_rounds_become_one_row_of_medians_sums_and_the_worst() -> None:
    runs = [run_of([0.0] * 10, took_s=took) for took in (0.01, 0.03, 0.02)]
    runs.append(run_of([0.1] * 10, took_s=0.01, codes=["UNREACHABLE", *[ANSWERED] * 9]))
    row = combine_runs(runs)
    assert row["requests"] == 40
    assert row["p50_ms"] == pytest.approx(25)
    assert row["lost"] == 1
    assert row["errors"] == {"UNREACHABLE": 1}
    assert row["kept_up"] == 0
    lost, on_time = load_goals("x", [row])
    assert not lost.met
    assert not on_time.met


def test_runs_of_several_generators_are_joined_by_their_common_clock() -> None:
    def part(sent_s: list[float], done_s: list[float], codes: list[str]) -> Run:
        seconds = np.array(sent_s)
        return Run(done_s[-1], seconds, seconds, np.array(done_s), codes, np.full(len(codes), np.nan), 0.5)

    late = 100.25, part([0.0, 1.0], [1.0, 2.0], [ANSWERED, "LATE"])
    run = joined([late, (100.0, part([0.0], [3.0], [ANSWERED]))])
    assert (run.duration_s, run.generator_s) == (3.0, 1.0)
    assert run.sent_s.tolist() == run.planned_s.tolist() == [0.25, 1.25, 0.0]
    assert run.done_s.tolist() == [1.25, 2.25, 3.0]
    assert list(run.codes) == [ANSWERED, "LATE", ANSWERED]
