"""Settings are refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from hplm.core.settings import (
    BaseConfig,
    EncodeSettings,
    LookupSettings,
    ManagedBase,
    ManagerSettings,
    RouteSettings,
    load_settings,
    parse_settings,
)
from hplm.errors import ConfigError
from hplm.models import device
from hplm.models.device import choose_threads, count_cores
from hplm.runtime.memory import count_memory
from tests import tiny

GOOD = {"store": "s", "base": "b", "table": "t"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mis": "compute"}, "unknown key 'mis'"),
        ({"miss": "guess"}, "one of 'backoff', 'compute'"),
        ({"num_threads": "two"}, "num_threads must be int"),
        ({"num_threads": True}, "num_threads must be int"),
        ({"num_threads": -1}, "num_threads must be at least 0"),
        ({"overlay_windows": 0}, "overlay_windows must be at least 1"),
        ({"batch_every_ms": -1.0}, "batch_every_ms must be 0 to 100"),
        ({"reserve_s": -0.1}, "reserve_s must be at least 0"),
        ({"batch_every_ms": float("nan")}, "batch_every_ms must be float, got nan"),
        ({"reserve_s": float("nan")}, "reserve_s must be float, got nan"),
        ({"reserve_s": float("inf")}, "reserve_s must be float, got inf"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings(LookupSettings, {**GOOD, **change}, "here")


def test_a_quantization_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of 'none', 'int8'"):
        parse_settings(EncodeSettings, {"store": "s", "base": "b", "quantization": "int4"}, "here")


def test_a_priority_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="compute_nice must be -20 to 19"):
        parse_settings(EncodeSettings, {"store": "s", "base": "b", "compute_nice": -21}, "here")


def test_a_manager_of_before_goes_by_the_width_that_its_server_had() -> None:
    assert parse_settings(ManagerSettings, {"store": "s", "base": "b", "domain": "d"}, "here").reduction_factor == 16


def test_a_reduction_factor_that_cannot_be_is_refused_by_the_upper_stage_and_the_manager() -> None:
    manager = {"store": "s", "base": "b", "domain": "d"}
    for settings, given in ((EncodeSettings, {"store": "s", "base": "b"}), (ManagerSettings, manager)):
        with pytest.raises(ConfigError, match="reduction_factor must be at least 1"):
            parse_settings(settings, {**given, "reduction_factor": 0}, "here")


def test_a_manager_has_the_settings_of_each_base() -> None:
    manager = {"store": "s", "base": "small", "domain": "d", "miss": "backoff", "bases": {"big": {"domain": "wide"}}}
    parsed = parse_settings(ManagerSettings, manager, "here")
    assert parsed.managed == {"small": ManagedBase("d", "backoff"), "big": ManagedBase("wide")}


@pytest.mark.parametrize(
    ("bases", "words"),
    [
        ({"small": {"domain": "d"}}, "bases: 'small' is the default base"),
        ({"big": {"domain": "d", "mis": "compute"}}, "bases: big: unknown key 'mis'"),
        ({"big": {}}, "bases: big: missing domain"),
        ({"big": {"domain": "d", "reduction_factor": 0}}, "reduction_factor must be at least 1"),
        ({"big": "d"}, "bases: big"),
    ],
)
def test_a_base_that_a_manager_cannot_train_for_is_refused(bases: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings(ManagerSettings, {"store": "s", "base": "small", "domain": "d", "bases": bases}, "here")


@pytest.mark.parametrize(
    "weight", [0, -1.0, float("nan"), float("inf"), True, "three", 1e306, pytest.param(10**400, id="huge"), 1e-320]
)
def test_a_share_that_cannot_be_is_refused_in_both_stages(weight: object) -> None:
    for settings, given in ((LookupSettings, GOOD), (EncodeSettings, {"store": "s", "base": "b"})):
        with pytest.raises(ConfigError, match="the weight of 'acme' must be a number from 1e-06 to 1,000,000, got "):
            parse_settings(settings, {**given, "tenant_weights": {"acme": weight}}, "here")


@pytest.mark.parametrize("weight", [1e-6, 1, 1e6])
def test_the_largest_and_the_smallest_share_are_taken(weight: float) -> None:
    given = {"store": "s", "base": "b", "tenant_weights": {"acme": weight}}
    assert parse_settings(EncodeSettings, given, "here").tenant_weights == {"acme": weight}


@pytest.mark.parametrize("name", ["Acme", "acme/2", "", "a" * 10_000], ids=["upper-case", "slash", "empty", "long"])
def test_a_share_of_a_tenant_that_cannot_be_is_refused_in_both_stages(name: str) -> None:
    for settings, given in ((LookupSettings, GOOD), (EncodeSettings, {"store": "s", "base": "b"})):
        with pytest.raises(ConfigError, match=r"here: tenant_weights: .*a tenant name is 1 to 64 lower-case") as caught:
            parse_settings(settings, {**given, "tenant_weights": {"acme": 2, name: 1}}, "here")
        assert len(str(caught.value)) < 300


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="missing base"):
        parse_settings(EncodeSettings, {"store": "s"}, "here")


@pytest.mark.parametrize("model", [1, "", None, ["hbert"]])
def test_the_model_of_a_base_that_is_no_name_is_refused_with_the_base(model: object) -> None:
    with pytest.raises(ConfigError, match="the model of base 'minilm' must be a name"):
        parse_settings(RouteSettings, {"store": "s", "models": {"minilm": model}}, "here")


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match=r"settings\.json"):
        load_settings(LookupSettings, tmp_path / "settings.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 5}, "multiple of num_heads"),
        ({"window": 1}, "window must be 2 to 8"),
        ({"relative_buckets": 6}, "relative_buckets must be a multiple of 4"),
        ({"relative_buckets": -4}, "relative_buckets must be a multiple of 4"),
        ({"relative_buckets": 512}, "relative_buckets must be a multiple of 4 below 512"),
    ],
)
def test_a_base_that_cannot_be_is_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BaseConfig(**{**vars(tiny.config()), **change})


def documented_settings() -> list[tuple[type, dict[str, tuple[str, str]]]]:
    """Return, for each kind of settings, the default and the range that docs/settings.md has for each key."""
    page = (Path(__file__).parents[4] / "docs" / "settings.md").read_text()
    parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    every = parts["All models"]
    both = every + parts["Both stages"]
    of_kind = {
        LookupSettings: both + parts["`hbert_plot`"],
        EncodeSettings: both + parts["`hbert_upper`"],
        ManagerSettings: every + parts["`manager`"],
        RouteSettings: every + parts["`hplm`"],
    }
    row = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", flags=re.MULTILINE)
    return [
        (kind, {key: (default, range_) for key, default, range_ in row.findall(part)}) for kind, part in of_kind.items()
    ]


def test_every_setting_is_in_the_documents_with_its_default() -> None:
    for kind, rows in documented_settings():
        wanted = {}
        for one in dataclasses.fields(kind):
            default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
            shown = json.dumps(default) if default is not dataclasses.MISSING else "exported"
            wanted[one.name] = f"`{shown}`" if isinstance(default, str | dict) else shown
        assert {key: default for key, (default, _) in rows.items()} == wanted


def documented_values(range_: str) -> tuple[list[Any], list[Any]]:
    """Return values at the ends of a documented range, and values just outside."""
    if range_.endswith(" each"):
        inside, outside = documented_values(range_.removesuffix(" each"))
        return [{"acme": value} for value in inside], [{"acme": value} for value in outside]
    if range_.endswith(" or null"):
        inside, outside = documented_values(range_.removesuffix(" or null"))
        return [*inside, None], [value for value in outside if value is not None]
    if range_ == "true, false":
        return [True, False], [1, None]
    if choices := re.findall(r'`"(\w+)"`', range_):
        return choices, ["another", None]
    if least := re.fullmatch(r"≥ (\d+)", range_):
        return [int(least[1])], [int(least[1]) - 1, None]
    if range_ == "> 0":
        return [0.001], [0, None]
    ends = re.fullmatch(r"(-?[\d.]+) to (-?[\d.]+)", range_)
    assert ends, f"no range that this test can read: {range_}"
    low, high = (json.loads(end) for end in ends.groups())
    return [low, high], [low - 1, high + 1, None]


def test_every_range_in_the_documents_is_that_of_the_code() -> None:
    for kind, rows in documented_settings():
        needed = {one.name: "x" for one in dataclasses.fields(kind) if one.default is one.default_factory}
        if kind is ManagerSettings:
            needed["data_root"] = "/data"
        if kind is RouteSettings:
            needed["models"] = {"minilm": "hbert"}
        for key, (_, range_) in rows.items():
            if range_ in ("path", "absolute path", "name", "names", "URL", "of the policy", "by base", "numbers"):
                continue
            inside, outside = documented_values(range_)
            if get_origin(hint := get_type_hints(kind)[key]) is Literal:
                assert set(inside) == set(get_args(hint)), key
            for value in inside:
                parse_settings(kind, {**needed, key: value}, "here")
            for value in outside:
                with pytest.raises(ConfigError, match=key):
                    parse_settings(kind, {**needed, key: value}, "here")


@pytest.mark.parametrize(
    ("quota", "most"),
    [
        ("max 100000", 10**6),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("", 10**6),
        ("x y", 10**6),
    ],
)
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, quota: str, most: int) -> None:
    without = count_cores(tmp_path)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert count_cores(tmp_path) == min(without, most)


@pytest.mark.parametrize("level", ["system.slice", "system.slice/hplm.service", "."])
def test_a_units_quota_bounds_the_cores_wherever_above_it_stands(tmp_path: Path, level: str) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/hplm.service\n")
    (tmp_path / "root/system.slice/hplm.service").mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("100000 100000\n")  # beyond the root: nobody's
    assert count_cores(tmp_path / "root", own) == count_cores(tmp_path / "nothing", own)
    (tmp_path / "root" / level / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "root" / level / "memory.max").write_text("1000000\n")
    assert count_cores(tmp_path / "root", own) == 1
    assert count_memory(tmp_path / "root", own) == 1_000_000


@pytest.mark.parametrize(
    ("cores", "wanted", "instances", "threads"),
    [(1, 0, 1, 1), (2, 0, 1, 1), (2, 0, 2, 1), (8, 0, 1, 7), (8, 0, 2, 3), (8, 4, 2, 4)],
)
def test_processes_beside_each_other_share_all_cores_but_one(
    cores: int, wanted: int, instances: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "count_cores", lambda: cores)
    assert choose_threads(wanted, instances) == threads


def test_an_encode_stage_of_several_knows_its_layers_and_its_cores() -> None:
    settings = {"store": "s", "base": "b", "stage_layers": [3, 1, 2], "stage_cores": [[0, 1], [2], [3]]}
    stages = [parse_settings(EncodeSettings, {**settings, "stage": number}, "here") for number in (1, 2, 3)]
    assert [stage.layers for stage in stages] == [range(3), range(3, 4), range(4, 6)]
    assert [stage.cores for stage in stages] == [(0, 1), (2,), (3,)]
    single = parse_settings(EncodeSettings, {"store": "s", "base": "b", "stage_cores": [[4]]}, "here")
    assert (single.layers, single.cores, single.encode_stages) == (None, (4,), 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stage_layers": [6]}, "stage_layers must be the number of layers of each of two or more"),
        ({"stage_layers": [6, 0]}, "stage_layers must be the number of layers of each of two or more"),
        ({"stage_layers": [3, 3], "stage": 3}, "stage must be the number of an encode stage, 1 to 2, got 3"),
        ({"stage_layers": [3, 3], "stage_cores": [[0]]}, "stage_cores must have numbers of cores for each of 2"),
        ({"stage_cores": [[]]}, "stage_cores must have numbers of cores for each of 1"),
        ({"stage_cores": [[-1]]}, "stage_cores must have numbers of cores for each of 1"),
        ({"stage_cores": [0]}, "stage_cores must be a list, got 0"),
    ],
)
def test_encode_stages_that_do_not_fit_together_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_settings(EncodeSettings, {"store": "s", "base": "b", **changed}, "here")
