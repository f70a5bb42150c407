"""The n-gram encoder against its slow twin, packed, in int8, and through tables and memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.tables.plot_tables import build_plot
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import Progress

from hplm.engine import lower_layers as lowers
from hplm.engine import reference
from hplm.engine.kernels.int8 import APART, channels_apart
from hplm.engine.kernels.onednn import can_pack
from hplm.engine.lower_layers import load_lower
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.engine.open_domain import compute_ngrams, open_lineage
from hplm.errors import WrongBaseError
from hplm.models.base import Base
from hplm.models.layers import HalfLayer, OriginalEncoder
from hplm.plot import table
from hplm.plot.ngrams import text_ngrams
from hplm.store.layout import Store
from tests import tiny
from tests.rounding import assert_same_windows, skip_without_avx512
from tests.unit.hplm.engine.kernels.test_int8 import needs_vnni

CPU = torch.device("cpu")
FORM = NgramEncoder.form
FORMATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LENGTHS = pytest.mark.parametrize("n", [2, 3, 5])


def encoder_of(base: Base) -> NgramEncoder:
    lower = load_lower(base)
    assert isinstance(lower, NgramEncoder)
    return lower


def with_edges(grams: np.ndarray, pad_id: int) -> np.ndarray:
    """n-grams some of which begin before or end behind their text."""
    grams[:20, 0] = grams[10:30, -1] = pad_id
    return grams


@LENGTHS
@pytest.mark.parametrize("quantities", ["readable", "float32", "bfloat16"])
def test_a_vector_equals_the_slow_twin(tmp_path: Path, n: int, quantities: str) -> None:
    base = tiny.make_base(Store(tmp_path), tiny.config(n, form=FORM))
    lower = encoder_of(base)
    grams = with_edges(tiny.some_ngrams(base, 60), base.config.pad_id)
    expected = np.stack([reference.ngram_encoder(gram, lower) for gram in grams.tolist()])
    dtype = torch.bfloat16 if quantities == "bfloat16" else torch.float32
    if quantities != "readable":
        if not can_pack(CPU, dtype):
            pytest.skip(f"oneDNN has no {dtype} on this processor")
        lowers.pack(lower, dtype)
        assert lower.packed is not None
        assert not lower.blocks
    found = compute_ngrams(lower, grams, dtype)[:, 0]
    off = 0.1 if dtype == torch.bfloat16 else 5e-3
    np.testing.assert_allclose(found, expected, atol=off, rtol=off)


@needs_vnni
@FORMATS
def test_in_int8_a_vector_equals_the_slow_twin_of_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    base = tiny.make_base(Store(tmp_path), tiny.config(form=FORM))
    lower, packed = encoder_of(base), encoder_of(base)
    for one in (lower, packed):
        first = one.blocks[0]
        assert isinstance(first, HalfLayer)
        with torch.inference_mode():
            # Some inner channels are far larger than the others, so they are computed in floats.
            first.ffn_in.weight[:APART] *= 60
            first.ffn_out.weight[:, :APART] /= 60
    ranges = lower.measure_ranges(base)
    assert [bool(channels_apart(measured)) for measured in ranges] == [True, False]
    grams = with_edges(tiny.some_ngrams(base, 60), base.config.pad_id)
    expected = reference.int8_ngram_encoder(torch.from_numpy(grams), lower, ranges).numpy()
    exact = compute_ngrams(lower, grams, torch.float32)[:, 0]
    lowers.pack(packed, dtype, base)
    found = compute_ngrams(packed, grams, dtype)[:, 0]
    # A value between two codes may be rounded to either, which moves later results a little.
    assert np.abs(found - expected).max() < 0.08 * np.abs(expected).max()
    assert 0 < np.square(found - exact).mean() < 0.02 * exact.astype(np.float32).var()


@FORMATS
@pytest.mark.parametrize("hidden", [384, 768])
def test_a_vector_has_the_same_bits_whatever_others_are_computed_with_it(
    tmp_path: Path, dtype: torch.dtype, hidden: int
) -> None:
    skip_without_avx512(dtype)
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN has no {dtype} on this processor")
    # Products smaller than a real base's are computed differently by their size.
    base = tiny.make_base(Store(tmp_path), tiny.config(form=FORM, hidden_size=hidden))
    lower = encoder_of(base)
    lowers.pack(lower, dtype)
    grams = tiny.some_ngrams(base, 600)
    together = compute_ngrams(lower, grams, dtype)
    for size in (1, 2, 3, 15, 150, 257):
        assert_same_windows(compute_ngrams(lower, grams[:size], dtype), together[:size], dtype)


@LENGTHS
def test_a_looked_up_a_remembered_and_a_computed_vector_have_the_same_bits(tmp_path: Path, n: int) -> None:
    skip_without_avx512(torch.float32)
    store = Store(tmp_path)
    base = tiny.make_base(store, tiny.config(n, form=FORM, hidden_size=384))
    sentences = tiny.sentences(30)
    build_plot(store, "tiny", "all", sentences, 100.0, Progress(disable=True), dtype="float32")
    build_plot(store, "tiny", "few", tiny.sentences(1, seed=9), 1.0, Progress(disable=True), dtype="float32")
    known, fresh = (open_lineage(store, base, [f"plots/{name}"], dtype=torch.float32) for name in ("all", "few"))
    for encoded in base.load_text_encoder().encode(sentences[:10]):
        ids = np.asarray(encoded.ids)
        looked_up, computed, remembered = (domain.hidden_states(ids, [len(ids)]) for domain in (known, fresh, fresh))
        np.testing.assert_array_equal(looked_up, computed)
        np.testing.assert_array_equal(looked_up, remembered)
    assert set(known.windows_by_level) == {"root"}
    assert fresh.windows_by_level["computed"]
    assert fresh.windows_by_level["overlay"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 5]), st.lists(st.integers(1, 60), min_size=1, max_size=12), st.data())
def test_nothing_outside_the_n_places_changes_a_vector(n: int, ids: list[int], data: st.DataObject) -> None:
    torch.manual_seed(0)
    config = tiny.config(n, form=FORM)
    lower = NgramEncoder(config)
    changed_at = data.draw(st.integers(0, len(ids) - 1))
    other = ids.copy()
    other[changed_at] = data.draw(st.integers(1, 60))
    first, second = (
        lower(torch.from_numpy(text_ngrams(np.array(text), [len(text)], config)[0])) for text in (ids, other)
    )
    for token in range(len(ids)):
        before = (n - 1) // 2
        is_seen = token - before <= changed_at <= token - before + n - 1
        is_same = torch.equal(first[token], second[token])
        assert is_same or (is_seen and other != ids)


def test_a_conversion_starts_from_the_originals_feed_forward_halves_and_the_token_alone() -> None:
    torch.manual_seed(0)
    config = tiny.config(form=FORM)
    original, lower = OriginalEncoder(config, 4), NgramEncoder(config)
    lower.word_embeddings.load_state_dict(original.word_embeddings.state_dict())
    lower.start_from(original)
    grams = torch.from_numpy(tiny.some_ngrams(lower, 20))
    with torch.inference_mode():
        positions = original.position_embeddings.weight[1:64].mean(0)
        hidden = original.embedding_norm(original.word_embeddings(grams[:, 1]) + positions + original.token_types[0])
        for layer in original.layers[:2]:
            assert isinstance(layer, HalfLayer)
            hidden = layer.feed_forward(hidden)
        torch.testing.assert_close(lower(grams)[:, 0], hidden, atol=1e-5, rtol=1e-5)


def test_a_table_of_another_form_is_refused_and_its_form_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tiny.make_base(store, tiny.config(5, form="windows"))
    build_plot(store, "tiny", "p", tiny.sentences(5), 50.0, Progress(disable=True))
    other = tiny.make_base(Store(tmp_path / "other"), tiny.config(form=FORM))
    with pytest.raises(WrongBaseError, match="vectors of form 'windows' for n-grams of 5 tokens"):
        table.load(store.table("p", "root"), fingerprint=other.fingerprint)
