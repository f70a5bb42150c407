"""Arrivals have the rate, order and unevenness that their names promise."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError, DataError
from hplm.workloads.arrivals import (
    Arrivals,
    BurstArrivals,
    GammaArrivals,
    MmppArrivals,
    PeriodicArrivals,
    PoissonArrivals,
    RampArrivals,
    Seconds,
    TraceArrivals,
)
from hplm.workloads.traces import load_trace

RATES = st.floats(0.1, 300)
ARRIVALS = st.one_of(
    st.builds(PoissonArrivals, RATES),
    st.builds(GammaArrivals, RATES, st.floats(0.2, 8)),
    st.builds(PeriodicArrivals, st.integers(1, 200), st.floats(0.1, 20)),
    st.builds(MmppArrivals, st.tuples(RATES, st.floats(0, 50)), st.tuples(st.floats(0.1, 5), st.floats(0.1, 5))),
    st.builds(RampArrivals, RATES, st.floats(0, 300)),
    st.builds(BurstArrivals, st.integers(1, 20), st.floats(0, 1), st.floats(0.1, 3), st.integers(1, 20)),
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def cv(times: Seconds) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of 2000 unordered arrivals with gamma gaps, in both forms of time stamps of Azure's traces."""
    times = GammaArrivals(5, 2).times(400, rng(7))
    stamps = [str(np.datetime64("2023-11-16T18:15:46") + np.timedelta64(int(t * 1e9), "ns")) for t in times]
    lines = [stamp.replace("T", " ") + ("+00:00" if i % 2 else "") for i, stamp in enumerate(stamps)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens", *(f"{line},374" for line in reversed(lines))]) + "\n")
    return path


@given(ARRIVALS, st.floats(0.1, 5), st.integers(0, 99))
def test_times_rise_and_stay_within_the_run(arrivals: Arrivals, duration_s: float, seed: int) -> None:
    times = arrivals.times(duration_s, rng(seed))
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration_s))
    np.testing.assert_array_equal(times, arrivals.times(duration_s, rng(seed)))


@pytest.mark.parametrize(
    "arrivals",
    [
        PoissonArrivals(50),
        GammaArrivals(50, 0.5),
        GammaArrivals(50, 3),
        PeriodicArrivals(100, 2),
        RampArrivals(10, 90),
        BurstArrivals(1000, 0.1, 2, 20),
    ],
)
def test_the_number_of_arrivals_is_near_the_expected_number(arrivals: Arrivals) -> None:
    assert arrivals.expected_count(400) == 20_000
    assert len(arrivals.times(400, rng())) == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        (PoissonArrivals(50), "50 requests/s, independent of each other (Poisson)"),
        (GammaArrivals(50, 4), "50 requests/s, gaps with a coefficient of variation of 4 (gamma)"),
        (PeriodicArrivals(100, 20), "100 senders, a request of each every 20 s"),
        (RampArrivals(5, 100), "a ramp from 5 to 100 requests/s"),
        (BurstArrivals(), "250 senders, one started every 0.05 s, 50 requests of each, one every 1.2 s"),
        (TraceArrivals(Path("/a/b/trace.csv"), 20), "trace.csv at 20 requests/s, burstiness 1"),
    ],
)
def test_a_workload_describes_itself_in_words_without_a_folder(arrivals: Arrivals, words: str) -> None:
    assert str(arrivals) == words


@pytest.mark.parametrize("cv", [0.5, 1, 4])
def test_a_load_with_gamma_gaps_starts_in_the_middle_of_a_gap(cv: float) -> None:
    """If the load started with a request, an uneven load would start with a burst."""
    random = rng()
    runs = [GammaArrivals(2, cv).times(10, random) for _ in range(4000)]
    assert np.mean([len(times) for times in runs]) == pytest.approx(20, rel=0.08)
    assert np.mean([np.count_nonzero(times < 1) for times in runs]) == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("wanted", [0.5, 1, 3])
def test_gamma_gaps_have_the_coefficient_of_variation_asked_for(wanted: float) -> None:
    assert cv(GammaArrivals(50, wanted).times(2000, rng())) == pytest.approx(wanted, rel=0.05)


def test_poisson_gaps_have_a_coefficient_of_variation_of_one() -> None:
    assert cv(PoissonArrivals(50).times(2000, rng())) == pytest.approx(1, rel=0.03)


def test_periodic_senders_keep_their_phase() -> None:
    times = PeriodicArrivals(30, 2.0).times(6.0, rng())
    assert len(times) == 90
    first, second, third = times.reshape(3, 30)
    np.testing.assert_allclose(second - first, 2.0)
    np.testing.assert_allclose(third - second, 2.0)


@pytest.mark.parametrize(("first", "last"), [(10.0, 90.0), (90.0, 10.0), (50.0, 50.0), (0.0, 100.0), (100.0, 0.0)])
def test_a_ramp_goes_from_its_first_rate_to_its_last(first: float, last: float) -> None:
    times = RampArrivals(first, last).times(400, rng())
    counts, _ = np.histogram(times, bins=4, range=(0, 400))
    middle = first + (last - first) * np.array([1, 3, 5, 7]) / 8
    np.testing.assert_allclose(counts / 100, middle, rtol=0.12, atol=1)


def test_a_burst_has_the_arrivals_of_the_paper() -> None:
    burst = BurstArrivals()
    times = burst.times(burst.duration_s, rng())
    assert len(times) == 250 * 50
    assert times[-1] == pytest.approx(249 * 0.05 + 49 * 1.2)
    np.testing.assert_allclose(times[:25], np.sort(np.concatenate([np.arange(25) * 0.05, [1.2]]))[:25])


def test_a_trace_as_recorded_is_only_rescaled(trace: Path) -> None:
    times = TraceArrivals(trace, rate_per_s=100).times(200, rng())
    assert len(times) == pytest.approx(20_000, rel=0.02)
    assert cv(times) == pytest.approx(2, rel=0.2)


def test_burstiness_spreads_or_gathers_a_trace_at_the_same_rate(trace: Path) -> None:
    runs = {power: TraceArrivals(trace, 100, power).times(200, rng()) for power in (0.0, 0.5, 1.0, 1.5)}
    variations = [cv(times) for times in runs.values()]
    assert variations[0] == pytest.approx(0, abs=1e-6)
    assert variations == sorted(variations)
    for times in runs.values():
        assert len(times) == pytest.approx(20_000, rel=0.03)


@pytest.mark.parametrize(
    "stamps",
    [
        ["1700000000", "1700000001", "1700000003", "1700000004.5"],
        ["0", "1e0", "3", "4.5"],
        ["1700000000000000000", "1700000001000000000", "1700000003000000000", "1700000004500000000"],
        ["2024-05-10", "2024-05-10T00:00:01Z", "2024-05-09 22:00:03-02:00", "2024-05-10 05:30:04.5000000+0530"],
        ["2024-05-10 02:00+02", "2024-05-10 00:00:01+00:00", "2024-05-10 00:00:03", " 2024-05-09 23:59:04.50-00:01"],
        [
            "0001-01-01 00:00:00+23:59",
            "0001-01-01 00:00:01+23:59",
            "0001-01-01 00:00:03+23:59",
            "0001-01-01 00:00:04.5+23:59",
        ],
    ],
    ids=["unix-seconds", "from-0", "nanoseconds", "offsets", "mixed", "long-ago"],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte-order-mark"])
def test_a_trace_has_the_gaps_of_its_time_stamps(tmp_path: Path, stamps: list[str], mark: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([mark + "TIMESTAMP", *stamps]), encoding="utf-8")
    for burstiness in (0.5, 1.0, 2.0):
        times = TraceArrivals(path, rate_per_s=10, burstiness=burstiness).times(30, rng())
        assert np.all(np.diff(times) > 0)
        gaps = np.diff(times)[:3]
        np.testing.assert_allclose(np.sort(gaps / gaps.min()), np.array([1, 1.5, 2]) ** burstiness, rtol=1e-3)


def written(path: Path, stamps: Iterable[object]) -> Path:
    path.write_text("TIMESTAMP\n" + "\n".join(map(str, stamps)))
    return path


@pytest.mark.parametrize(
    "stamps",
    [
        [0.1 * i + 2_592_000 * (i >= 7804) for i in range(8000)],
        [0, *(1_700_000_000 + 0.1 * i for i in range(8000))],
        [0] * 7804 + [1] * 195 + [2],
    ],
    ids=["a-pause-of-30-days", "a-stray-0", "thousands-at-once"],
)
def test_a_run_has_as_many_arrivals_as_rate_and_duration_say_whatever_the_trace(
    tmp_path: Path, stamps: list[float]
) -> None:
    path = written(tmp_path / "trace.csv", stamps)
    for seed in range(30):
        times = TraceArrivals(path, 2.0).times(5.0, rng(seed))
        assert len(times) == 10
        assert np.all((times >= 0) & (times < 5.0))
    assert np.mean([len(TraceArrivals(path, 0.1).times(5.0, rng(seed))) for seed in range(400)]) == pytest.approx(
        0.5, abs=0.1
    )


@pytest.mark.parametrize(
    ("stamps", "unit"),
    [
        ([1_700_000_000 + i for i in range(9)], "dates or Unix seconds"),
        ([1_700_000_000_000 + 1000 * i for i in range(9)], "Unix milliseconds"),
        ([0, *(1_700_000_000_000_000 + 1_000_000 * i for i in range(9))], "Unix microseconds"),
        ([1_700_000_000_000_000_000 + 1_000_000_000 * i for i in range(9)], "Unix nanoseconds"),
        ([f"2023-11-16 00:00:0{i}" for i in range(9)], "dates or Unix seconds"),
        (["9999-12-31 23:59:58", "9999-12-31 23:59:59"], "dates or Unix seconds"),
        (range(9), "seconds"),
    ],
)
def test_the_size_of_time_stamps_tells_their_unit(tmp_path: Path, stamps: Iterable[object], unit: str) -> None:
    recorded = load_trace(written(tmp_path / "trace.csv", stamps))
    assert recorded.unit == unit
    assert recorded.usual_gap_s == pytest.approx(1.0)
    assert f"read as {unit}" in next(recorded.lines())


@pytest.mark.parametrize(
    ("stamps", "words"),
    [
        ([7 * i for i in range(500)], ["500 arrivals in 3,493 s, 0.1429 requests/s", "142.9 requests/s if its time"]),
        ([0, *(1_700_000_000.5 + i / 9 for i in range(500))], ["the gap after arrival 1 is", "100% of the trace: remove"]),
        ([0.5 + 2000 * i for i in range(9)], ["0.0005 requests/s is unlikely"]),
        ([1e-7 * i for i in range(9)], ["10,000,000 requests/s is unlikely"]),
        ([3.5, 1.5, 2.5], ["the usual gap is 1 s, the largest 1 s", "lines were out of order and were sorted"]),
    ],
    ids=["milliseconds", "stray", "slow", "fast", "out-of-order"],
)  # fmt: skip
def test_what_looks_wrong_in_a_trace_is_told(tmp_path: Path, stamps: list[float], words: list[str]) -> None:
    text = "\n".join(load_trace(written(tmp_path / "trace.csv", stamps)).lines())
    assert all(part in text for part in words), text


def test_a_usual_trace_is_told_without_a_warning(tmp_path: Path, trace: Path) -> None:
    assert len(list(load_trace(trace).lines())) == 1


def test_arrivals_and_stays_without_end_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"may be .* arrivals, 20,000,000 were expected at most"):
        GammaArrivals(1e6, 1e3).times(60.0, rng())
    with pytest.raises(ConfigError, match="60,000,000,000 stays, 1,000,000 were expected"):
        MmppArrivals((5.0, 80.0), (1e-9, 1e-9)).times(60.0, rng())


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\r\nTimestamp;Tokens\r\n0,5;1\r\n1,5;1\r\n3;1\r\n5;1\r\n",
        'timestamp\n"1.000,5"\n"1.001,5"\n1.003\n1.005\n',
        "Tokens\ttimeStamp\u200b\n1\t0.5\n1\t1.5\n1\t3\n1\t5\n",
        "TIMESTAMP;N\n2023-11-16 18:15:46,5;1\n2023-11-16 18:15:47,5;1\n2023-11-16 18:15:49;1\n2023-11-16 18:15:51;1\n",
    ],
    ids=["separator", "decimal-comma", "tabs", "dates"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_trace_from_a_spreadsheet_is_read(tmp_path: Path, content: str, encoding: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content.encode(encoding))
    assert load_trace(path).times_s.tolist() == [0.0, 1.0, 2.5, 4.5]


@pytest.mark.parametrize(
    "stamp",
    ["now", "today", "nan", "-inf", "1e21", "10000-01-01", "2023-13-01", "2023-11-16 25:00:00", "2023-11-16+24:00"],
)
def test_a_bad_time_stamp_is_refused_with_its_line(tmp_path: Path, stamp: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"TIMESTAMP\n2023-11-16 18:15:46\n{stamp}\n")
    with pytest.raises(DataError, match=r"bad\.csv, line 3: .* is no time"):
        TraceArrivals(path, 10).times(1, rng())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("TIME\n1\n", "no column TIMESTAMP"),
        ("TIMESTAMP\n2023-11-16 18:15:46\n", "holds 1 arrivals"),
        ("TIMESTAMP\n2023-11-16 18:15:46\n2023-11-16 18:15:46\n", "holds 2 arrivals"),
        ("TIMESTAMP\nyesterday\n", "bad.csv, line 2: 'yesterday' is no time"),
        ("TIMESTAMP,N\n2023-11-16 18:15:46,1\n\n,2\n2023-11-16 18:15:48,3\n", "bad.csv, line 4: '' is no time"),
        ("N,TIMESTAMP\n1,2023-11-16 18:15:46\n2\n", "bad.csv, line 3: '' is no time"),
        ("TIMESTAMP\n0,5\n1,5\n", "bad.csv, line 2 has 2 columns, the header has 1: numbers with decimal commas need"),
        ('TIMESTAMP\n"1,500"\n"2,500"\n', "bad.csv, line 2: '1,500' is no time"),
        ("TIMESTAMP\n2023-11-16 18:15:46\nNaT\n", "bad.csv, line 3: 'NaT' is no time"),
    ],
    ids=["no-column", "one-row", "one-instant", "no-time", "empty", "short-row", "comma", "ambiguous", "not-a-time"],
)
def test_a_bad_trace_is_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        TraceArrivals(path, 10).times(1, rng())


def test_a_missing_trace_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv cannot be read"):
        TraceArrivals(tmp_path / "nowhere.csv", 10).times(1, rng())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_not_positive_and_finite_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="rate_per_s"):
        PoissonArrivals(value)
    with pytest.raises(ConfigError, match="cv"):
        GammaArrivals(1, value)


def test_a_ramp_without_arrivals_is_refused() -> None:
    for pair in ((0, 0), (-1, 5), (5, float("inf")), (float("nan"), 5)):
        with pytest.raises(ConfigError, match="ramp"):
            RampArrivals(*pair)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_negative_or_infinite_stagger_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="stagger"):
        BurstArrivals(stagger_s=value)
