"""Writing model folders."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.export.model_folders import KEEPABLE_SETTINGS, delete_base, export
from hplm_builder.fleet.demo import PLOT as PLOT_NAME

from hplm.core.roles import (
    CALLING,
    MANAGING,
    base_roles,
    cascade_role,
    load_serving_settings,
    names,
    route_role,
    served_base,
    served_bases,
    settings_path,
)
from hplm.core.settings import (
    CascadeSettings,
    EncodeSettings,
    FusedSettings,
    LookupSettings,
    ManagedBase,
    ManagerSettings,
    RouteSettings,
    load_settings,
)
from hplm.errors import ConfigError, DataError, MissingArtifactError, WrongBaseError
from hplm.manage.base_survey import survey_bases
from hplm.models import base_folder
from hplm.plot import table as tables
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.backend_folder import share_folder
from tests import tiny

PLOT = LookupSettings(store="", base="b", table="t", miss="backoff")
UPPER = EncodeSettings(store="", base="b")


def store_at(folder: Path, registry: str = "") -> Store:
    """Make a store that seems to have the base and the tables that the settings name."""
    store = Store(folder, registry)
    make_artifacts(store, "b", "t")
    return store


def make_artifacts(store: Store, base: str, *plots: str, weights: bytes = b"", **meta: Any) -> None:
    """Make a base and its tables without contents, because an export reads their manifests alone."""
    described = {"config": asdict(tiny.config(name=base)), **meta}
    with artifact.publish(store.base(base), base_folder.KIND, described) as folder:
        (folder / "weights").write_bytes(weights or base.encode())
    fingerprint = base_folder.read(store.base(base)).fingerprint
    for plot in plots:
        with artifact.publish(store.table(plot, "root"), tables.KIND, {"base": fingerprint}):
            pass


def test_every_role_has_a_config_a_version_and_settings_that_point_to_the_store(tmp_path: Path) -> None:
    export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, UPPER)
    for role in names(base_roles()):
        assert f'name: "{role}"' in (tmp_path / "models" / role / "config.pbtxt").read_text()
        assert any((tmp_path / "models" / role / "1").iterdir())
    folder = tmp_path / "models" / "hbert_plot" / "1"
    settings = load_settings(LookupSettings, folder / "settings.json")
    assert (folder / settings.store).resolve() == tmp_path / "store"


@pytest.mark.parametrize("role", ["hbert_plot", "hbert_upper", "hbert_fused"])
def test_triton_queues_a_bounded_number_of_requests_per_stage_and_delays_none(role: str) -> None:
    config = (share_folder("model_repository") / role / "config.pbtxt").read_text()
    for needed in ("max_queue_size: 1024", "allow_timeout_override: true", "default_timeout_microseconds: "):
        assert needed in config
    # With a delay, Triton before 26.08 merges payloads, loses count of them and at last hands over no request.
    assert "max_queue_delay" not in config


def make_folders(store: Path) -> None:
    """Make two bases of the same weights, and tables of both."""
    for base in ("mine", DEFAULT_BASE):
        make_artifacts(Store(store), base, "general", weights=b"same")


def test_kept_settings_are_the_earlier_models_except_given_options(
    tmp_path: Path, hplm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    models = tmp_path / "models"
    make_folders(tmp_path / "store")
    command = ["build", "export", "--store", str(tmp_path / "store"), "--models", str(models)]

    def exported(*options: str) -> tuple[LookupSettings, EncodeSettings]:
        done = hplm(*command, *options)
        assert done.returncode == 0, done.stderr
        return (
            load_settings(LookupSettings, models / "hbert_plot" / "1" / "settings.json"),
            load_settings(EncodeSettings, models / "hbert_upper" / "1" / "settings.json"),
        )

    exported("--slots", "16", "--miss", "backoff", "--base", "mine")
    path = models / "hbert_upper" / "1" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tenant_weights": {"acme": 3}}))
    plot, upper = exported("--keep-settings", "--slots", "32")
    assert (plot.miss, plot.base, upper.num_slots, upper.tenant_weights) == ("backoff", "mine", 32, {"acme": 3})
    manager = load_settings(ManagerSettings, models / "manager" / "1" / "settings.json")
    assert (manager.miss, manager.base, manager.reduction_factor) == (
        "backoff",
        "mine",
        EncodeSettings.reduction_factor,
    )
    exported("--keep-settings", "--reduction-factor", "8")
    exported("--keep-settings", "--quantization", "int8")
    plot, upper = exported("--keep-settings")
    manager = load_settings(ManagerSettings, models / "manager" / "1" / "settings.json")
    assert (upper.reduction_factor, manager.reduction_factor) == (8, 8)
    assert (plot.quantization, upper.quantization) == ("int8", "int8")
    pbtxt = models / "hbert_upper" / "config.pbtxt"
    assert "count: 1 kind" in pbtxt.read_text()
    exported("--keep-settings", "--instances", "2")
    exported("--keep-settings")
    assert "count: 2 kind" in pbtxt.read_text()
    pbtxt.write_text(pbtxt.read_text().replace("count: 2 kind: KIND_AUTO", "kind: KIND_CPU count: 3"))
    done = hplm(*command, "--keep-settings")
    assert done.returncode == 1
    assert "BAD_CONFIG" in done.stderr
    assert "--instances" in done.stderr
    exported("--keep-settings", "--instances", "1")
    look_up = models / "hbert_plot" / "config.pbtxt"
    assert "count: 1 kind: KIND_CPU" in look_up.read_text()
    exported("--keep-settings", "--look-up-instances", "3")
    exported("--keep-settings")
    assert "count: 3 kind: KIND_CPU" in look_up.read_text()
    look_up.write_text(look_up.read_text().replace("count: 3 kind: KIND_CPU", "kind: KIND_CPU count: 3"))
    assert "--look-up-instances" in hplm(*command, "--keep-settings").stderr
    exported("--keep-settings", "--look-up-instances", "1")
    assert "count: 1 kind" in pbtxt.read_text()
    exported("--keep-settings", "--no-manager", "--miss", "compute")
    exported("--keep-settings", "--miss", "backoff")
    assert not any((models / role).exists() for role in names(MANAGING))
    exported("--keep-settings", "--manager")
    manager = load_settings(ManagerSettings, models / "manager" / "1" / "settings.json")
    assert (manager.miss, manager.base) == ("backoff", "mine")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"slots_of_yore": 1}))
    done = hplm(*command, "--keep-settings")
    assert done.returncode == 1
    assert "unknown key 'slots_of_yore'" in done.stderr
    # Settings whose width cannot be read are replaced too.
    plot, upper = exported()
    assert (plot.miss, upper.num_slots, upper.tenant_weights) == ("compute", EncodeSettings.num_slots, {})


def test_kept_settings_outlast_a_change_between_two_stages_and_a_fused_model(
    tmp_path: Path, hplm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    models = tmp_path / "models"
    make_folders(tmp_path / "store")
    command = ["build", "export", "--store", str(tmp_path / "store"), "--models", str(models)]

    def exported(*options: str) -> None:
        done = hplm(*command, *options)
        assert done.returncode == 0, done.stderr

    exported("--slots", "16", "--miss", "backoff", "--base", "mine", "--instances", "2", "--look-up-instances", "3")
    path = models / "hbert_plot" / "1" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_threads": 5, "most_domains": 7}))
    exported("--keep-settings", "--fused")
    for options in ((), ("--dtype", "float32")):
        exported("--keep-settings", *options)
        assert {path.name for path in models.iterdir()} == {"hbert", *names(MANAGING)}
        fused = load_settings(FusedSettings, models / "hbert" / "1" / "settings.json")
        assert (fused.miss, fused.table, fused.most_domains, fused.num_slots) == ("backoff", PLOT_NAME, 7, 16)
        assert (fused.base, fused.num_threads) == ("mine", 0)
        assert (models / "hbert" / "1" / fused.store).resolve() == tmp_path / "store"
        assert "count: 2 kind" in (models / "hbert" / "config.pbtxt").read_text()
    assert "--look-up-instances" in hplm(*command, "--base", "mine", "--fused", "--look-up-instances", "2").stderr
    exported("--keep-settings", "--no-fused")
    assert {path.name for path in models.iterdir()} == {*names(base_roles()), *names(MANAGING)}
    plot, upper, _ = load_serving_settings(models)
    assert (plot.miss, plot.most_domains, upper.num_slots, upper.dtype) == ("backoff", 7, 16, "float32")
    assert "count: 2 kind" in (models / "hbert_upper" / "config.pbtxt").read_text()
    exported("--fused", "--base", "mine")
    exported("--base", "mine")
    assert load_serving_settings(models).encode.num_slots == EncodeSettings.num_slots
    assert {path.name for path in models.iterdir()} == {*names(base_roles()), *names(MANAGING)}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--base", "nope"), "no base 'nope', its bases are mine, minilm-ngrams"),
        (("--plot", "nope"), "no tables 'nope'"),
    ],
)
def test_a_missing_base_or_table_is_refused_and_the_models_stay(
    tmp_path: Path, hplm: Callable[..., subprocess.CompletedProcess[str]], asked: tuple[str, str], words: str
) -> None:
    make_folders(tmp_path / "store")
    command = ["build", "export", "--store", str(tmp_path / "store"), "--models", str(tmp_path / "models")]
    assert hplm(*command).returncode == 0
    before = (tmp_path / "models" / "hbert_plot" / "1" / "settings.json").read_text()
    done = hplm(*command, *asked)
    assert done.returncode == 1
    assert words in done.stderr
    assert (tmp_path / "models" / "hbert_plot" / "1" / "settings.json").read_text() == before


def test_slots_are_narrowed_only_by_an_explicit_option(
    tmp_path: Path, hplm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    make_folders(tmp_path / "store")
    command = ["build", "export", "--store", str(tmp_path / "store"), "--models", str(tmp_path / "models")]
    assert hplm(*command, "--reduction-factor", "2").returncode == 0
    path = tmp_path / "models" / "hbert_upper" / "1" / "settings.json"
    before = path.read_text()
    done = hplm(*command, "--instances", "2")
    assert done.returncode == 1
    assert "BAD_CONFIG" in done.stderr
    assert "--reduction-factor 2" in done.stderr
    assert path.read_text() == before
    assert hplm(*command, "--reduction-factor", "16").returncode == 0
    assert load_settings(EncodeSettings, path).reduction_factor == 16
    assert hplm(*command).returncode == 0


def test_a_managed_repository_has_both_manager_models_with_their_settings(tmp_path: Path) -> None:
    manager = ManagerSettings(store="", base="b", domain="t", keep_versions=7)
    export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, replace(UPPER, reduction_factor=8), manager)
    for role in names(MANAGING):
        assert f'name: "{role}"' in (tmp_path / "models" / role / "config.pbtxt").read_text()
        folder = tmp_path / "models" / role / "1"
        settings = load_settings(ManagerSettings, folder / "settings.json")
        assert settings.keep_versions == 7
        assert settings.miss == PLOT.miss
        assert settings.reduction_factor == 8
        assert (folder / settings.store).resolve() == tmp_path / "store"


def test_a_repository_exported_again_without_a_manager_has_none(tmp_path: Path) -> None:
    manager = ManagerSettings(store="", base="b", domain="t")
    export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, UPPER, manager)
    export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, UPPER)
    assert {path.name for path in (tmp_path / "models").iterdir()} == set(names(base_roles()))


def test_exporting_again_replaces_the_models_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, UPPER)
    export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, EncodeSettings(store="", base="b", num_slots=9))
    written = json.loads((tmp_path / "models" / "hbert_upper" / "1" / "settings.json").read_text())
    assert written["num_slots"] == 9
    assert {path.name for path in tmp_path.iterdir()} == {"models", "store"}


def test_settings_with_a_shared_registry_cannot_be_read_by_other_users(tmp_path: Path) -> None:
    url = "postgresql+psycopg://hplm:secret@db/hplm"
    export(store_at(tmp_path / "store", url), tmp_path / "models", PLOT, UPPER)
    for role in ("hbert_plot", "hbert_upper"):
        path = tmp_path / "models" / role / "1" / "settings.json"
        assert json.loads(path.read_text())["registry"] == url
        assert path.stat().st_mode & 0o077 == 0


def test_a_folder_with_foreign_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"thesis\.tex"):
        export(store_at(tmp_path / "store"), tmp_path / "models", PLOT, UPPER)
    assert (tmp_path / "models" / "thesis.tex").exists()


def test_the_templates_are_never_replaced() -> None:
    with pytest.raises(DataError, match="templates"):
        export(Store(Path("store")), share_folder("model_repository"), PLOT, UPPER)


def test_kept_settings_keep_the_registry_if_none_is_given(tmp_path: Path) -> None:
    url, other = "postgresql+psycopg://hplm:secret@db/hplm", "postgresql+psycopg://hplm:secret@other/hplm"
    path = tmp_path / "models" / "hbert_upper" / "1" / "settings.json"
    export(store_at(tmp_path / "store", url), tmp_path / "models", PLOT, UPPER)
    for name, given, keep, wanted in (
        ("store", "", {"miss"}, url),
        ("store", other, {"miss"}, other),
        ("another", "", {"miss"}, ""),
        ("store", url, {"miss"}, url),
        ("store", "", set[str](), ""),
    ):
        export(store_at(tmp_path / name, given), tmp_path / "models", PLOT, UPPER, keep=keep)
        assert json.loads(path.read_text())["registry"] == wanted
        assert bool(path.stat().st_mode & 0o077) == (not wanted)


def test_a_trunk_is_exported_as_one_fused_model_unless_two_stages_are_asked_for(tmp_path: Path) -> None:
    store, models = store_at(tmp_path / "store"), tmp_path / "models"
    make_artifacts(store, "thin", "t2", trunk={"of": "b"})
    export(store, models, PLOT, UPPER)

    def form(**options: Any) -> str:
        settings = replace(PLOT, base="thin", table="t2"), replace(UPPER, base="thin")
        export(store, models, *settings, name="students", **options)
        return served_base(models, "students").form

    assert form() == "fused"
    assert form(fused=False) == "two-stage"
    assert form(keep=KEEPABLE_SETTINGS) == "two-stage"
    assert form() == "fused"
    with pytest.raises(ConfigError, match="leave out --look-up-instances, or give --no-fused"):
        form(look_up_instances=2)
    with closing(Registry.open(store, create=True)) as registry:
        listed = survey_bases(models, store, registry, {})
    assert [(base["model"], base["trunk_of"]) for base in listed] == [("hbert", None), ("students", "b")]


def test_missing_artifacts_are_refused_by_name_also_with_kept_settings(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    export(store, tmp_path / "models", PLOT, UPPER)
    with pytest.raises(MissingArtifactError, match="no tables 'other': give --plot"):
        export(store, tmp_path / "models", replace(PLOT, table="other"), UPPER, keep={"miss", "base"})
    with pytest.raises(MissingArtifactError, match="no base 'c', its bases are b: give --base"):
        export(store, tmp_path / "models", replace(PLOT, base="c"), replace(UPPER, base="c"), keep={"miss"})
    # The kept settings are checked, not the given ones.
    export(store, tmp_path / "models", replace(PLOT, base="c"), replace(UPPER, base="c"), keep={"base"})


def make_two(folder: Path, **options: Any) -> Path:
    """Export two bases to one repository: hbert, and mpnet with `options`."""
    store = folder / "store"
    for base, table in (("small", "general"), ("big", "wide")):
        make_artifacts(Store(store), base, table)
    models = folder / "models"
    export_base(store, models, "small", "general")
    export_base(store, models, "big", "wide", name="mpnet", **options)
    return models


def export_base(store: Path, models: Path, base: str, table: str, *, miss: Any = "compute", **options: Any) -> None:
    plot = LookupSettings(store="", base=base, table=table, miss=miss)
    manager = ManagerSettings(store="", base=base, domain=table)
    export(Store(store), models, plot, EncodeSettings(store="", base=base), manager, **options)


def files_of(models: Path, name: str) -> dict[str, tuple[bytes, int]]:
    """Return the contents and times of the files of a base's models."""
    folders = [models / role.name for role in served_base(models, name).roles]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_a_further_base_leaves_the_others_and_the_managers_limits_as_they_are(tmp_path: Path) -> None:
    models = make_two(tmp_path)
    path = models / "manager" / "1" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"keep_versions": 7}))
    before = files_of(models, "hbert")
    export_base(tmp_path / "store", models, "big", "wide", name="mpnet", miss="backoff", fused=True)
    assert files_of(models, "hbert") == before
    assert [(base.name, base.base, base.form) for base in served_bases(models)] == [
        ("hbert", "small", "two-stage"),
        ("mpnet", "big", "fused"),
    ]
    manager = load_settings(ManagerSettings, path)
    assert (manager.base, manager.domain, manager.keep_versions) == ("small", "general", 7)
    assert manager.managed["big"] == ManagedBase("wide", "backoff", EncodeSettings.reduction_factor)
    assert load_settings(ManagerSettings, models / "manager_watch" / "1" / "settings.json") == manager


def test_a_base_that_is_deleted_leaves_the_others_and_the_manager_forgets_it(tmp_path: Path) -> None:
    models = make_two(tmp_path)
    before = files_of(models, "hbert")
    delete_base(models, "mpnet")
    # Clients may call the models that call bases, so they stay.
    assert {path.name for path in models.iterdir()} == {*names(base_roles()), *names(MANAGING), *CALLING}
    assert files_of(models, "hbert") == before
    manager = load_settings(ManagerSettings, models / "manager" / "1" / "settings.json")
    assert list(manager.managed) == ["small"]
    assert (models / "manager" / "1" / manager.store).resolve() == tmp_path / "store"
    with pytest.raises(ConfigError, match="'hbert' is the default base"):
        delete_base(models, "hbert")


def levels_of(models: Path) -> dict[str, str]:
    """Return the model of each base that the model `cascade` of a repository calls as a level."""
    settings = load_settings(CascadeSettings, settings_path(models, cascade_role()))
    assert settings.models == served_by_route(models)
    return settings.levels


def served_by_route(models: Path) -> dict[str, str] | None:
    """Return the model of each base to which the model `hplm` of a repository routes, None if there is no such model."""
    path = settings_path(models, route_role())
    return load_settings(RouteSettings, path).models if path.is_file() else None


def test_two_bases_have_a_model_that_routes_to_both_and_its_limits_stay(tmp_path: Path) -> None:
    store, models = store_at(tmp_path / "store"), tmp_path / "models"
    make_artifacts(store, "c", weights=b"b")
    export(store, models, PLOT, UPPER)
    assert served_by_route(models) is None
    export(store, models, replace(PLOT, base="c"), replace(UPPER, base="c"), name="other")
    assert served_by_route(models) == {"b": "hbert", "c": "other"}
    assert levels_of(models) == {"b": "hbert_dispatch", "c": "other_dispatch"}
    path = settings_path(models, route_role())
    assert (path.parent / load_settings(RouteSettings, path).store).resolve() == tmp_path / "store"
    path.write_text(json.dumps({**json.loads(path.read_text()), "calls": 3}))
    export(store, models, PLOT, UPPER)
    assert load_settings(RouteSettings, path).calls == 3
    export(store, models, replace(PLOT, base="c"), replace(UPPER, base="c"), name="other", fused=True)
    assert levels_of(models) == {"b": "hbert_dispatch", "c": "other"}
    delete_base(models, "other")
    assert levels_of(models) == {"b": "hbert_dispatch"}
    assert served_by_route(models) == {"b": "hbert"}
    export(store, models, PLOT, UPPER)
    assert served_by_route(models) == {"b": "hbert"}


def test_one_base_has_a_model_that_routes_if_the_operator_wants_it(
    tmp_path: Path, hplm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    models = tmp_path / "models"
    make_folders(tmp_path / "store")
    done = hplm("build", "export", "--store", str(tmp_path / "store"), "--models", str(models), "--route")
    assert done.returncode == 0, done.stderr
    assert served_by_route(models) == {DEFAULT_BASE: "hbert"}


def test_a_base_that_does_not_fit_those_that_are_there_is_refused(tmp_path: Path) -> None:
    models = make_two(tmp_path)
    before = files_of(models, "hbert") | files_of(models, "mpnet")
    with pytest.raises(ConfigError, match="base 'big' is served as 'mpnet': give --name mpnet"):
        export_base(tmp_path / "store", models, "big", "wide")
    elsewhere = tmp_path / "elsewhere"
    make_artifacts(Store(elsewhere), "new", "general")
    with pytest.raises(ConfigError, match=r"share a store, and that of 'hbert' is .*/store: give --store"):
        export_base(elsewhere, models, "new", "general", name="new")
    plot, other = LookupSettings(store="", base="big", table="wide"), Store(tmp_path / "store", "sqlite:///other")
    with pytest.raises(ConfigError, match="share a registry, and 'hbert' has another"):
        export(other, models, plot, EncodeSettings(store="", base="big"), name="mpnet")
    with pytest.raises(ConfigError, match="further models end with _plot, _upper, _upper_NUMBER or _dispatch"):
        export_base(tmp_path / "store", models, "new", "general", name="new_upper")
    assert files_of(models, "hbert") | files_of(models, "mpnet") == before


def test_the_settings_of_one_base_are_kept_by_its_name(tmp_path: Path) -> None:
    models = make_two(tmp_path, instances=2)
    for name, weight in (("hbert", 2), ("mpnet", 3)):
        path = models / f"{name}_upper" / "1" / "settings.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tenant_weights": {"acme": weight}}))
    export_base(tmp_path / "store", models, "big", "wide", name="mpnet", keep=KEEPABLE_SETTINGS)
    weights = {base.name: base.settings.encode.tenant_weights["acme"] for base in served_bases(models)}
    assert weights == {"hbert": 2, "mpnet": 3}
    assert "count: 2 kind" in (models / "mpnet_upper" / "config.pbtxt").read_text()
    assert "count: 1 kind" in (models / "hbert_upper" / "config.pbtxt").read_text()


def test_a_base_whose_tables_or_registry_are_of_other_weights_is_refused(tmp_path: Path) -> None:
    models = make_two(tmp_path)
    before = files_of(models, "mpnet")
    store = Store(tmp_path / "store")
    with pytest.raises(WrongBaseError, match="PLOT 'general' was built for another base than 'big'"):
        export_base(store.root, models, "big", "general", name="mpnet")
    with closing(Registry.open(store, create=True)) as registry:
        registry.publish_base("big", base_folder.read(store.base("big")).fingerprint, "bases/big", 1.0)
    make_artifacts(store, "big", "wide", weights=b"others")
    with pytest.raises(WrongBaseError, match="has other weights than those that its tenants and domains were made for"):
        export_base(store.root, models, "big", "wide", name="mpnet")
    assert files_of(models, "mpnet") == before
