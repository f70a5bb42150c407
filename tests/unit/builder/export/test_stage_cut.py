"""Exports of several encode stages: the cut, cores and GPUs, what is kept, and what is refused."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.export.model_folders import delete_base, export
from hplm_builder.export.stage_cut import choose_cut, parse_cut, parse_devices

from hplm.core.roles import base_roles, cascade_role, names, served_base, settings_path, staged_roles
from hplm.core.settings import CascadeSettings, EncodeSettings, LookupSettings, load_settings
from hplm.errors import ConfigError
from hplm.models import base_folder
from hplm.profiles.profile import LayerTiming
from hplm.profiles.profile_store import write_profile
from hplm.registry.records import NewLevel
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny
from tests.unit.builder.export.test_model_folders import make_artifacts
from tests.unit.hplm.profiles.made_profiles import CONDITIONS, made_profile
from tests.unit.hplm.registry.test_cascades import make_plan

LAYERS = 6
PLOT = LookupSettings(store="", base="b", table="t")
UPPER = EncodeSettings(store="", base="b")
Exported = Callable[..., str]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    for base, table in (("b", "t"), ("c", "u"), (DEFAULT_BASE, "general")):
        shape = vars(tiny.config(name=base, upper_layers=LAYERS))
        make_artifacts(made, base, table, config=shape)
    return made


@pytest.fixture
def exported(tmp_path: Path, store: Store, hplm: Callable[..., subprocess.CompletedProcess[str]]) -> Exported:
    def run(*options: str, fails: bool = False) -> str:
        folders = ["--store", str(store.root), "--models", str(tmp_path / "models")]
        done = hplm("build", "export", *folders, *options)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


def stages_of(models: Path, name: str = "hbert") -> list[EncodeSettings]:
    roles = [role for role in served_base(models, name).roles if role.settings is EncodeSettings]
    return [load_settings(EncodeSettings, settings_path(models, role)) for role in roles]


def config_of(models: Path, model: str) -> str:
    return (models / model / "config.pbtxt").read_text()


def opened(store: Store) -> base_folder.BaseFolder:
    return base_folder.read(store.base("b"), verify=False)


@pytest.mark.parametrize(("stages", "cut"), [(2, (3, 3)), (4, (1, 2, 1, 2)), (6, (1,) * 6)])
def test_without_a_profile_the_cut_is_even(store: Store, stages: int, cut: tuple[int, ...]) -> None:
    found, words = choose_cut(store, opened(store), stages, None)
    assert found == cut
    assert words.startswith("evenly, because there is no profile")
    assert choose_cut(store, opened(store), 1, None)[0] == choose_cut(store, opened(store), None, None)[0] == ()


def test_the_newest_profile_of_the_bases_weights_decides_on_the_cut(store: Store) -> None:
    base = opened(store)
    slow_first = (LayerTiming(1, 8, (1.0,) * LAYERS), LayerTiming(8, 32, (9.0, 1.0, 1.0, 1.0, 1.0, 1.0)))
    own = replace(CONDITIONS, fingerprint=base.fingerprint)
    write_profile(store, made_profile(base="b", conditions=own, layers=slow_first))
    found, words = choose_cut(store, base, 2, None)
    assert (found, words) == ((1, 5), "by the layers' times in the profile of 2026-01-31T12:00:00Z")
    # A profile of other weights says nothing about this base.
    other = made_profile(base="b", measured_at="2026-02-01T12:00:00Z", layers=(LayerTiming(1, 8, (1.0,) * LAYERS),))
    write_profile(store, other)
    assert choose_cut(store, base, 2, None)[0] == (1, 5)
    assert choose_cut(store, base, 2, (4, 2)) == ((4, 2), "as --cut says")


@pytest.mark.parametrize(
    ("stages", "cut", "words"),
    [
        (7, None, "--stages: base b has 6 layers that an encode stage computes, so 1 to 6 stages were expected, got 7"),
        (None, (3, 2), "with 6 in all were expected, got 3,2"),
        (None, (6, 0), "with 6 in all were expected, got 6,0"),
        (3, (3, 3), "--cut has 2 stages and --stages is 3: give one of them"),
    ],
)
def test_a_cut_that_does_not_fit_the_base_is_refused(
    store: Store, stages: int | None, cut: tuple[int, ...] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_cut(store, opened(store), stages, cut)


def test_the_options_of_cuts_and_devices_are_read_and_refused_by_name() -> None:
    assert parse_cut("3,2,1") == (3, 2, 1)
    assert parse_devices("--cores", "0,1:2") == ((0, 1), (2,))
    with pytest.raises(ConfigError, match="--cut: the number of layers of each stage was expected, such as 3,3"):
        parse_cut("3;3")
    for wrong in ("", "a", "0:", "0,-1", ":"):
        with pytest.raises(ConfigError, match="--gpus: numbers with commas within a stage and colons"):
            parse_devices("--gpus", wrong)
    with pytest.raises(ConfigError, match="--cores: each number may be there once"):
        parse_devices("--cores", "0:0")


def test_each_encode_stage_has_a_model_with_its_layers_cores_and_gpus(tmp_path: Path, exported: Exported) -> None:
    models = tmp_path / "models"
    said = exported("--stages", "3", "--cores", "0:1:2,3", "--gpus", "0:1:2,3", "--instances", "2")
    assert "encode stages of 2, 2, 2 layers, cut evenly" in said
    stages = stages_of(models)
    assert [stage.layers for stage in stages] == [range(2), range(2, 4), range(4, 6)]
    assert [stage.cores for stage in stages] == [(0,), (1,), (2, 3)]
    assert load_settings(LookupSettings, models / "hbert_plot" / "1" / "settings.json").encode_stages == 3
    there = {path.name for path in models.iterdir()} - {"manager"}
    assert there == set(names(staged_roles("hbert", 3)))
    groups = [config_of(models, f"hbert_upper_{number}").splitlines()[-1] for number in (1, 2, 3)]
    assert groups == [
        "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]",
        "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 1 ] } ]",
        "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 2, 3 ] } ]",
    ]


def test_a_single_encode_stage_has_cores_and_gpus_too(tmp_path: Path, exported: Exported) -> None:
    models = tmp_path / "models"
    exported("--cores", "1", "--gpus", "2")
    assert [stage.cores for stage in stages_of(models)] == [(1,)]
    assert "count: 1 kind: KIND_GPU gpus: [ 2 ]" in config_of(models, "hbert_upper")


def test_stages_cores_and_gpus_are_kept_with_the_settings(tmp_path: Path, exported: Exported) -> None:
    models = tmp_path / "models"
    exported("--cut", "4,2", "--cores", "0:1", "--gpus", "0:1", "--instances", "2")
    exported("--keep-settings", "--slots", "9")
    stages = stages_of(models)
    assert [(stage.layers, stage.cores, stage.num_slots) for stage in stages] == [
        (range(4), (0,), 9),
        (range(4, 6), (1,), 9),
    ]
    assert "count: 2 kind: KIND_GPU gpus: [ 1 ]" in config_of(models, "hbert_upper_2")
    # Other stages have other cores and GPUs.
    exported("--keep-settings", "--stages", "3")
    assert [(stage.layers, stage.cores) for stage in stages_of(models)] == [
        (range(2), ()),
        (range(2, 4), ()),
        (range(4, 6), ()),
    ]
    assert "count: 2 kind: KIND_AUTO" in config_of(models, "hbert_upper_3")
    exported("--keep-settings", "--stages", "1")
    assert served_base(models).roles == base_roles("hbert")
    assert [stage.num_slots for stage in stages_of(models)] == [9]


def test_a_cut_that_does_not_fit_is_refused(store: Store, tmp_path: Path, exported: Exported) -> None:
    assert "stage_cores must have numbers of cores for each of 2" in exported(
        "--stages", "2", "--cores", "0", fails=True
    )
    assert "GPUs of each of 2 encode stages were expected" in exported("--stages", "2", "--gpus", "0", fails=True)
    make_artifacts(store, "thin", "t2", trunk={"of": "b"}, config=vars(tiny.config(name="thin")))
    settings = replace(PLOT, base="thin", table="t2"), replace(UPPER, base="thin", stage_layers=(1, 1))
    with pytest.raises(ConfigError, match="base thin is a trunk, whose students want all layers in one process"):
        export(store, tmp_path / "models", *settings)


def test_a_level_of_a_tenants_cascade_is_not_cut(store: Store, tmp_path: Path) -> None:
    with closing(Registry.open(store, create=True)) as registry:
        roots = []
        for base, table in (("b", "t"), ("c", "u")):
            folder = base_folder.read(store.base(base), verify=False)
            path = store.relative(store.table(table, "root").parent)
            registry.publish_base(base, folder.fingerprint, store.relative(store.base(base)), 1.0)
            roots.append(registry.publish_domain(base, table, path, 1.0, parent_id=None, about={}, expected=None))
        new = [NewLevel(root.id, f"tenants/films/{number}", {}, number, None) for number, root in enumerate(roots, 1)]
        registry.publish_levels("films", new, make_plan({"b": 1, "c": 2}), time.time())
    with pytest.raises(ConfigError, match="base b is a level of the cascade of tenant 'films'"):
        export(store, tmp_path / "models", PLOT, replace(UPPER, stage_layers=(3, 3)))


def test_beside_other_bases_a_base_of_several_stages_is_routed_to_but_is_no_level(store: Store, tmp_path: Path) -> None:
    models = tmp_path / "models"
    export(store, models, PLOT, UPPER)
    other: Any = replace(PLOT, base="c", table="u"), replace(UPPER, base="c", stage_layers=(3, 3))
    export(store, models, *other, name="other")
    cascade = load_settings(CascadeSettings, settings_path(models, cascade_role()))
    assert cascade.models == {"b": "hbert", "c": "other"}
    assert cascade.levels == {"b": "hbert_dispatch"}
    assert not (models / "other_dispatch").exists()
    # An export of the first base leaves the other as it is.
    export(store, models, PLOT, UPPER)
    assert [stage.layers for stage in stages_of(models, "other")] == [range(3), range(3, 6)]
    delete_base(models, "other")
    assert not [path.name for path in models.iterdir() if path.name.startswith("other")]
