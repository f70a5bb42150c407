"""Settings are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm import config
from hplm.config import BaseConfig, PlotSettings, UpperSettings
from hplm.errors import ConfigError
from tests import tiny

GOOD = {"store": "s", "base": "b", "table": "t"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mis": "compute"}, "unknown key 'mis'"),
        ({"miss": "guess"}, "one of 'backoff', 'compute'"),
        ({"num_threads": "two"}, "num_threads must be int"),
        ({"num_threads": True}, "num_threads must be int"),
        ({"overlay_windows": 0}, "overlay_windows must be at least 1"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.parse(PlotSettings, {**GOOD, **change}, "here")


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="missing base"):
        config.parse(UpperSettings, {"store": "s"}, "here")


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match=r"settings\.json"):
        config.load(PlotSettings, tmp_path / "settings.json")


def test_a_base_whose_heads_do_not_divide_it_is_refused() -> None:
    values = {**vars(tiny.config()), "num_heads": 5}
    with pytest.raises(ConfigError, match="multiple of num_heads"):
        BaseConfig(**values)
