"""Look-up, merge, back-off and computing on a miss, against the slow reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.tables.plot_tables import build_plot
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import Progress

from hplm.engine import reference
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import OpenDomain, compute_ngrams, open_lineage, open_lookup
from hplm.models.base import Base
from hplm.plot import table
from hplm.plot.keys import pack
from hplm.plot.ngrams import text_ngrams
from hplm.plot.overlay import Overlay
from hplm.plot.table import PlotTable
from hplm.store.layout import Store
from tests import tiny


def texts_of(base: Base, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    config = base.config
    return [rng.integers(1, config.vocab_size, rng.integers(1, config.max_tokens + 1)) for _ in range(count)]


@tiny.BOTH_FORMS
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("miss", ["backoff", "compute"])
def test_the_lookup_equals_the_dictionary_reference(tmp_path: Path, n: int, miss: str, form: str) -> None:
    store = Store(tmp_path)
    base = tiny.make_base(store, tiny.config(window=n, form=form))
    build_plot(store, "tiny", "p", tiny.sentences(40), 40.0, Progress(disable=True))
    lookup = open_lineage(store, base, ["plots/p"], miss=miss, dtype=torch.float32)
    # Half of the texts are of the corpus, half of random tokens that no table has.
    ids = np.random.default_rng(0).integers(4, 30, 60)
    texts = [*texts_of(base, 4, 1), ids[:25], ids[25:]]
    merged = np.split(
        lookup.hidden_states(np.concatenate(texts), [len(t) for t in texts]), np.cumsum([len(t) for t in texts])[:-1]
    )
    names = ["root"] if miss == "compute" else ["root", *(["bigram"] if n > 2 else []), "unigram"]
    levels = [reference.level(table.load(store.table("p", name), fingerprint=base.fingerprint)) for name in names]
    lower = load_lower(base) if miss == "compute" else None
    for text, got in zip(texts, merged, strict=True):
        wanted = reference.merged(text.tolist(), base.config, levels, lower).numpy()
        np.testing.assert_allclose(got, wanted, atol=4e-3, rtol=4e-3)


@tiny.BASES_OF_BOTH_FORMS
def test_compute_mode_equals_the_lower_layers_on_every_window(tiny_store: Store, tiny_base: Base) -> None:
    lookup = open_lineage(tiny_store, tiny_base, ["plots/general"], overlay_windows=16, dtype=torch.float32)
    lower = load_lower(tiny_base)
    for seed in range(3):  # repeated, because tables, overlay and freshly computed n-grams must agree
        for ids in texts_of(tiny_base, 3, seed):
            got = lookup.hidden_states(ids, [len(ids)])
            wanted = reference.merged(ids.tolist(), tiny_base.config, [], lower).numpy()
            np.testing.assert_allclose(got, wanted, atol=4e-3, rtol=4e-3)
    assert set(lookup.windows_by_level) == {"root", "overlay", "computed"}


def test_a_window_is_looked_for_in_the_branch_then_the_parent_then_the_root_then_bigrams_then_unigrams() -> None:
    config = tiny.config(form="windows")

    def level(name: str, grams: list[list[int]], value: float) -> PlotTable:
        sorted_grams = table.sort_grams(np.array(grams), config.vocab_size)
        memory = np.full((len(grams) * len(grams[0]), config.hidden_size), value, dtype=np.float16)
        packed = pack(sorted_grams, config.vocab_size)
        return PlotTable(name, len(grams[0]), len(grams[0]), config.vocab_size, packed, memory, 0, None)

    pad = config.pad_id
    text = np.array([5, 6, 7, 8, 9])  # windows: _56 567 678 789 89_
    branch = level("branch", [[pad, 5, 6]], 1.0)
    parent = level("parent", [[pad, 5, 6], [5, 6, 7]], 2.0)
    root = level("root", [[pad, 5, 6], [5, 6, 7], [6, 7, 8]], 4.0)
    bigram = level("bigram", [[6, 7], [8, 9]], 8.0)
    unigram = level("unigram", [[i] for i in range(config.vocab_size)], 16.0)
    lookup = OpenDomain(config, [branch, parent, root], [bigram, unigram], None)
    got = lookup.hidden_states(text, [5])[:, 0].tolist()
    assert dict(lookup.windows_by_level) == {"branch": 1, "parent": 1, "root": 1, "bigram": 1, "unigram": 1}
    # Computed by hand: token 9, for example, has the second vector of bigram 89 and its own unigram.
    assert got == pytest.approx([(1 + 2) / 2, (1 + 2 + 4) / 3, (2 + 4) / 2, (4 + 8) / 2, (8 + 16) / 2], rel=1e-3)


@tiny.BASES_OF_BOTH_FORMS
def test_texts_of_one_batch_do_not_see_each_other(tiny_store: Store, tiny_base: Base) -> None:
    lookup = open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)
    texts = texts_of(tiny_base, 6, 9)
    together = lookup.hidden_states(np.concatenate(texts), [len(t) for t in texts])
    alone = np.concatenate([lookup.hidden_states(t, [len(t)]) for t in texts])
    np.testing.assert_allclose(together, alone, atol=2e-3, rtol=2e-3)


@tiny.BASES_OF_BOTH_FORMS
@pytest.mark.parametrize("seed", range(5))
def test_a_text_gets_the_same_bits_when_its_windows_are_computed_and_when_they_are_remembered(
    tiny_store: Store, tiny_base: Base, seed: int
) -> None:
    lookup = open_lineage(tiny_store, tiny_base, ["plots/general"], dtype=torch.float32)
    encoder = tiny_base.load_text_encoder()
    (text,) = encoder.encode(tiny.sentences(1, seed=seed, words=(10, 20)))
    ids = np.asarray(text.ids)
    first = lookup.hidden_states(ids, [len(ids)])
    assert lookup.windows_by_level["computed"]
    assert lookup.windows_by_level["root"]
    assert np.array_equal(lookup.hidden_states(ids, [len(ids)]), first)


@tiny.BASES_OF_BOTH_FORMS
@pytest.mark.parametrize("miss", ["compute", "backoff"])
def test_warming_up_leaves_nothing_behind(tiny_store: Store, tiny_base: Base, miss: str) -> None:
    cold, warm = (open_lookup(tiny_store, tiny_base, "general", miss=miss) for _ in range(2))
    warm.warm_up()
    assert not warm.windows_by_level
    ids, lengths = np.arange(20, 40, dtype=np.int64), [20]
    np.testing.assert_array_equal(warm.hidden_states(ids, lengths), cold.hidden_states(ids, lengths))
    # Warming up remembers no n-gram, so a request computes the same n-grams.
    assert warm.windows_by_level == cold.windows_by_level


@tiny.BASES_OF_BOTH_FORMS
def test_an_overlay_smaller_than_a_batch_still_answers_right(tiny_store: Store, tiny_base: Base) -> None:
    small = open_lineage(tiny_store, tiny_base, ["plots/general"], overlay_windows=1, dtype=torch.float32)
    large = open_lineage(tiny_store, tiny_base, ["plots/general"], overlay_windows=4096, dtype=torch.float32)
    for ids in [*texts_of(tiny_base, 3, 4), *texts_of(tiny_base, 3, 4)]:
        np.testing.assert_allclose(
            small.hidden_states(ids, [len(ids)]), large.hidden_states(ids, [len(ids)]), atol=2e-3, rtol=2e-3
        )


@settings(max_examples=100)
@given(
    st.integers(1, 6),
    st.sampled_from([2, 5]),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=8)), max_size=30),
)
def test_an_overlay_stays_bounded_and_forgets_the_least_recently_used(
    capacity: int, n: int, calls: list[tuple[bool, list[int]]]
) -> None:
    shape = replace(tiny.config(window=n, form="windows"), hidden_size=1, num_heads=1, vocab_size=30_522)
    overlay = Overlay(capacity, shape)
    everything = np.repeat(np.arange(10)[:, None], n, axis=1)
    last_used = dict.fromkeys(range(10), 0)
    held: set[int] = set()
    for number, (asks, tokens) in enumerate(calls, 1):
        unique = list(dict.fromkeys(tokens))
        grams = everything[unique]
        if asks:
            rows = overlay.find(grams, np.arange(len(grams)), pack(grams, 30_522))
            assert {token for token, row in zip(unique, rows, strict=True) if row >= 0} == held & set(unique)
            assert all(overlay.values[row, 0, 0] == token for token, row in zip(unique, rows, strict=True) if row >= 0)
            last_used |= dict.fromkeys(held & set(unique), number)
            continue
        before = set(held)
        overlay.remember(grams, np.array(unique, dtype=np.float16)[:, None, None].repeat(n, axis=1))
        fresh = [token for token in unique if token not in before][-capacity:]
        keys = overlay._grams[overlay._rows][:, 0].tolist()
        held = {int(token) for token in keys}
        assert len(overlay) == len(held) == min(capacity, len(before) + len(fresh))
        assert set(fresh) <= held
        gone, stayed = before - held, before & held
        assert not gone or not stayed or max(last_used[g] for g in gone) <= min(last_used[s] for s in stayed)
        last_used |= dict.fromkeys(fresh, number)


@tiny.BASES_OF_BOTH_FORMS
def test_computed_windows_are_what_the_table_stores(tiny_store: Store, tiny_base: Base) -> None:
    root = table.load(tiny_store.table("general", "root"), fingerprint=tiny_base.fingerprint)
    grams = np.array(list(reference.level(root))[:20])
    computed = compute_ngrams(load_lower(tiny_base), grams, torch.float32)
    rows = root.find(grams, np.arange(len(grams)), pack(grams, root.vocab_size))
    np.testing.assert_allclose(root.values[rows], computed, atol=2e-3, rtol=2e-3)


def test_windows_of_a_single_token_exist() -> None:
    grams, exists = text_ngrams(np.array([7]), [1], tiny.config(form="windows"))
    assert grams.tolist() == [[0, 7, 0]]
    assert exists.tolist() == [[False, True, False]]
