"""The look-up on a GPU: windows that no table has."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.tables.plot_tables import write_ngrams

from hplm.core.settings import LookupSettings, load_settings
from hplm.engine import lower_layers as lowers
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import CUDA_NGRAMS, open_lineage
from hplm.models.device import CPU
from hplm.serving.lookup_stage import LookupAnswer, LookupStage
from hplm.serving.request import Request
from tests import tiny
from tests.batches import look_up
from tests.submitting import Started, submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
GPU = torch.device("cuda:0")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("relative_buckets", [0, 8])
def test_windows_are_computed_on_the_gpu_as_on_the_cpu(
    tmp_path: Path, relative_buckets: int, dtype: torch.dtype, tolerance: float
) -> None:
    tiny.make_repository(tmp_path, shape=replace(tiny.config(), relative_buckets=relative_buckets))
    store, base = tiny.opened(tmp_path)
    root = [store.table(tiny.PLOT, "root").parent]
    # More than are computed at once.
    ids = tiny.some_ngrams(base, CUDA_NGRAMS, seed=5).ravel()
    exact = open_lineage(store, base, root, dtype=torch.float32).hidden_states(ids, [len(ids)])
    lookup = open_lineage(store, base, root, dtype=dtype, device=GPU)
    found = lookup.hidden_states(ids, [len(ids)])
    assert lookup.windows_by_level["computed"] > CUDA_NGRAMS
    assert np.abs(found - exact).max() < tolerance * max(1.0, float(np.abs(exact).max()))
    # What was computed is remembered.
    np.testing.assert_array_equal(lookup.hidden_states(ids, [len(ids)])[-100:], found[-100:])


def test_a_domain_s_own_layers_are_on_the_gpu_beside_the_base_s_with_whom_they_share_words(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    root, branch = store.table(tiny.PLOT, "root").parent, tmp_path / "domain"
    own = load_lower(base)
    with torch.no_grad():
        own.gate_bias.add_(0.5)
    lowers.save(branch / "lower", base, own, {})
    nothing = np.zeros((0, base.config.window), np.int64)
    write_ngrams(branch / "branch", "own", nothing, own, base.fingerprint, {}, torch.float32, lambda count: None)
    ids = tiny.some_ngrams(base, 50, seed=5).ravel()
    shared = load_lower(base).to(GPU)
    answers = []
    for lineage in ([root], [branch, root]):
        exact = open_lineage(store, base, lineage, dtype=torch.float32).hidden_states(ids, [len(ids)])
        lookup = open_lineage(store, base, lineage, dtype=torch.float32, device=GPU, base_lower=shared)
        assert lookup._lower is not None
        assert lookup._lower.word_embeddings.weight.data_ptr() == shared.word_embeddings.weight.data_ptr()
        answers.append(lookup.hidden_states(ids, [len(ids)]))
        np.testing.assert_allclose(answers[-1], exact, atol=1e-2)
    assert np.abs(answers[0] - answers[1]).max() > 0.1


def test_a_stage_answers_from_the_gpu_what_it_answers_from_the_cpu(tiny_models: Path) -> None:
    folder = tiny_models / "hbert_plot" / "1"
    settings = load_settings(LookupSettings, folder / "settings.json")
    requests = [((text.encode(),), b"alpha") for text in tiny.sentences(20, seed=11)]
    answers = {}
    for device in ("auto", "cpu"):
        stage = LookupStage(replace(settings, device=device, dtype="float32"), folder)
        assert stage.domains.device == (GPU if device == "auto" else CPU)
        answers[device] = look_up(stage, requests)
    for got, exact in zip(answers["auto"], answers["cpu"], strict=True):
        assert isinstance(got, LookupAnswer)
        assert isinstance(exact, LookupAnswer)
        np.testing.assert_allclose(got.features, exact.features, atol=5e-3)


def test_a_stage_says_where_it_computes_and_runs_its_own_threads(tiny_models: Path, started: Started) -> None:
    folder = tiny_models / "hbert_plot" / "1"
    stage = started.add(
        LookupStage(replace(load_settings(LookupSettings, folder / "settings.json"), num_threads=2), folder)
    )
    assert stage.domains.how_misses_are_computed.startswith("computed on cuda:0 in ")
    answer: Future[object] = Future()
    submit(stage, Request((b"zebra crossing",), b"alpha"), answer.set_result)
    assert isinstance(answer.result(60), LookupAnswer)
