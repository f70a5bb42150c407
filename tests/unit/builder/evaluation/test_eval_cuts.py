"""`hplm eval cuts`: the bases that it needs, and comparing bases of any n."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.cli.evaluate import app
from hplm_builder.evaluation.search.served_domain import computed_features
from hplm_builder.evaluation.studies.cuts import CUTS, cut_variants, find_bases
from hplm_builder.tenants.trained_layers import plot_features
from typer.testing import CliRunner

from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import open_lookup
from hplm.errors import ConfigError, MissingArtifactError
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.builder.evaluation.evaluated import Place, report_of


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return evaluated.make_place(tmp_path_factory.mktemp("cuts"))


def test_bases_that_are_missing_are_named_with_the_commands_that_make_them(bench: Place) -> None:
    done = CliRunner().invoke(app, bench.options("cuts"))
    assert isinstance(done.exception, MissingArtifactError)
    words = str(done.exception)
    assert "6 of 6 bases are missing" in words
    assert f"hplm build base --shipped --name minilm-l6 --store {bench.store.root}" in words
    for n in (2, 5):
        assert f"--window {n} --window-layers 3" in words
    for layers in (1, 2, 4):
        assert f"--window 3 --window-layers {layers}" in words


def test_all_cuts_are_compared_once_their_bases_exist(tmp_path: Path, bench: Place) -> None:
    store = tmp_path / "store"
    for cut in CUTS[:-1]:
        tiny.make_base(evaluated.Store(store), tiny.config(window=cut.window, form="windows", name=cut.name))
    with pytest.raises(MissingArtifactError, match="1 of 6"):
        find_bases(store, [])
    tiny.make_base(evaluated.Store(store), tiny.config(window=CUTS[-1].window, form="windows", name=CUTS[-1].name))
    assert [base.config.window for base in find_bases(store, [])] == [2, 3, 5, 3, 3, 3]


def test_bases_of_any_n_are_compared_under_their_folders_names(bench: Place) -> None:
    folders = []
    for window in (2, 5):
        made = tiny.make_base(bench.store, tiny.config(window=window, form="windows", name=f"n{window}"))
        folders += ["--base", str(made.folder)]
    report = report_of(bench, "cuts", "--base", str(bench.base.folder), *folders)
    rows = {(row["task"], row["base"]): row for row in report["rows"]}
    assert set(rows) == {(task, base) for task in ("colours", "places", "average") for base in ("tiny", "n2", "n5")}
    assert [rows["colours", base]["window"] for base in ("tiny", "n2", "n5")] == [3, 2, 5]
    assert rows["colours", "n2"]["upper_layers"] == 2
    assert len({rate for rate in report["settings"]["learning_rates"].values()}) == 1


def test_features_without_tables_are_those_of_a_look_up_that_computes(bench: Place) -> None:
    encoded = bench.base.load_text_encoder().encode(tiny.sentences(20, seed=4))
    wanted = plot_features(open_lookup(bench.store, bench.base, tiny.PLOT))(encoded)
    found = computed_features(load_lower(bench.base))(encoded)
    np.testing.assert_allclose(torch.cat(found).numpy(), torch.cat(wanted).numpy(), atol=0.05, rtol=0.05)


def test_a_base_in_the_current_folder_has_the_name_of_that_folder(
    bench: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.base.folder)
    (base,) = find_bases(bench.store.root, [Path()])
    assert base.folder.name == "tiny"


def test_two_bases_of_one_name_are_refused(bench: Place) -> None:
    with pytest.raises(ConfigError, match="two --base folders are called 'tiny'"):
        cut_variants([bench.base, bench.base], torch.device("cpu"))
