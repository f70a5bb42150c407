"""Every benchmark result has the same form, and its tables fit a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, Report, machine, plain, writable


@pytest.mark.parametrize(
    ("better", "value", "met"), [("lower", 1.0, True), ("lower", 3.0, False), ("higher", 3.0, True)]
)
def test_a_goal_is_met_by_its_value_and_by_nothing_else(better: str, value: float, met: bool) -> None:
    assert Goal("g", "text", 2.0, value, "ms", better).met is met  # type: ignore[arg-type]


def test_a_result_file_has_the_one_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goal = Goal("g", "text", 2.0, 1.5, "ms", "lower")
    Report("name", {"threads": 1}, [{"a": 1.0}], [goal]).publish(tmp_path / "r" / "name.json")
    written = json.loads((tmp_path / "r" / "name.json").read_text())
    assert list(written) == ["name", "command", "machine", "settings", "rows", "goals"]
    assert written["goals"] == [{"id": "g", "text": "text", "goal": 2.0, "value": 1.5, "unit": "ms", "met": True}]
    assert "met: text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cpuinfo", "shown"),
    [
        (
            "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n",
            "AMD EPYC (cpu family 26, model 2)",
        ),
        ("model name\t: ARMv8: a\n", "ARMv8: a"),
        ("processor\t: 0\n", ""),
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, shown: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    assert (machine()["cpu"] == shown) == bool(shown)


def test_a_figure_that_nobody_has_is_null_not_invalid_json(tmp_path: Path) -> None:
    Report("name", {}, [{"p99_ms": float("inf"), "mean_ms": float("nan")}]).publish(tmp_path / "name.json")
    assert json.loads((tmp_path / "name.json").read_text())["rows"] == [{"p99_ms": None, "mean_ms": None}]


@pytest.mark.parametrize("name", ["", "/dev/full", "file/r.json", "x" * 300])
def test_a_place_that_no_report_can_be_written_to_is_refused_before_and_costs_no_table_after(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--json: .* cannot be written"):
        writable(tmp_path / name)
    with pytest.raises(ConfigError, match=r"--json: .* cannot be written"):
        Report("name", {}, [{"figure": 1}]).publish(tmp_path / name)
    assert "figure" in capsys.readouterr().out


def test_a_place_that_a_report_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    assert writable(None) is None
    assert writable(tmp_path / "r" / "new.json") == tmp_path / "r" / "new.json"
    assert not list((tmp_path / "r").iterdir())
    (tmp_path / "old.json").write_text("{}")
    writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "{}"
    (tmp_path / "link.json").symlink_to("target.json")
    writable(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert not (tmp_path / "target.json").exists()


def test_few_rows_of_many_figures_are_shown_a_figure_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"who": name, **{f"figure_{i}": i for i in range(12)}} for name in ("first", "second")]
    Report("name", {}, rows).publish(None)
    assert "figure_11" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [1, 6], ids=["a-figure-a-line", "a-row-a-line"])
def test_a_terminal_of_80_columns_shows_figures_and_names_uncut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    keys = (
        "batch_rows",
        "row_tokens",
        "length_variance",
        "offered_per_s",
        "utility_per_s",
        "in_time",
        "kept_up",
        "lost",
    )
    policies = ("fcfs", "sjf", "edf", "das", "slotted_das")
    figures = {**dict.fromkeys(keys, 0.1234), "spread": "19.91-19.95"}
    Report("name", {}, [{"policy": policy, **figures} for policy in policies * settings]).publish(None)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    if settings == 1:
        assert {*policies, *keys} <= {*shown.split()}
        assert shown.count("19.91-19.95") == 5


def test_words_that_rich_takes_for_markup_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Report("odd", {}, [{"class": "[/b]", "[red]": "[bold]x"}]).publish(None)
    shown = capsys.readouterr().out
    for word in ("[/b]", "[red]", "[bold]x"):
        assert word in shown


def test_rows_whose_first_column_differs_have_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"requests_of": "all", "p50_ms": 1, "lost": 0}, {"seconds": "0-6", "p50_ms": 1, "lost": 0}]
    Report("name", {}, rows).publish(None)
    assert capsys.readouterr().out.split().count("name") == 2


def test_rows_of_another_kind_have_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"who": "first", "rate": 1, "unit": "s"},
        {"why": "because"},
        {"who": "second", "rate": 2, "spread": "1-3", "unit": "s"},
    ]
    Report("name", {}, rows).publish(None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "name" in line] == [["name"], ["name"]]
    # Neither table has a column that only the other one needs.
    assert any({"who", "rate", "spread"} <= {*line.split()} for line in lines)
    assert not any("who" in line and "why" in line for line in lines)
    first, second = (next(i for i, line in enumerate(lines) if word in line) for word in ("first", "second"))
    assert second == first + 1


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (16430.4, "16,430"),
        (16430, "16,430"),
        (9999.7, "10,000"),
        (1e7, "10,000,000"),
        (1234.5678, "1,235"),
        (12.3456, "12.35"),
        (0.99, "0.99"),
        (-0.000012345678, "-0.00001235"),
        (0.0, "0"),
        (60.0, "60"),
        (1e300, "1e+300"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_for_people_has_separators_and_no_exponent(value: float, written: str) -> None:
    assert plain(value) == written


def test_a_report_shows_large_counts_as_plain_digits(capsys: pytest.CaptureFixture[str]) -> None:
    goal = Goal("lost", "requests lost", 0, 16430, "requests", "lower")
    Report("name", {}, [{"requests": 1234567, "offered_per_s": 16430.7, "is_good": True}], [goal]).publish(None)
    shown = capsys.readouterr().out
    assert "requests lost: 16,430 requests (goal 0)" in shown
    assert {"1,234,567", "16,431", "True"} <= {*shown.split()}
