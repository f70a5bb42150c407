"""Masked language modelling."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.distillation import PackedText
from hplm_builder.domains.masked_lm import MaskedLm, MaskedLmSettings, progress_at, train
from hplm_builder.domains.masking import Vocabulary, mask_tokens, read_vocabulary
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch import Tensor

from hplm.engine.lower_layers import load_lower
from hplm.errors import ConfigError, DataError, StoppingError
from hplm.models.base import Base
from hplm.reporting.progress import silent
from tests import tiny
from tests.limits import limited

SETTINGS = MaskedLmSettings(total_tokens=40 * 256, warmup_tokens=10 * 256, learning_rate=5e-3, batch_tokens=256)


@pytest.fixture(scope="module")
def known() -> Vocabulary:
    return read_vocabulary(tiny.tokenizer(), tiny.config())


def chains(count: int, seed: int) -> PackedText:
    """Return texts in which every word determines the next."""
    tokenizer, rng = tiny.tokenizer(), np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        start, length = rng.integers(len(tiny.WORDS)), rng.integers(4, 20)
        texts.append(tokenizer.encode(" ".join(tiny.WORDS[(start + i) % len(tiny.WORDS)] for i in range(length))).ids)
    return PackedText(np.concatenate(texts), np.array([len(text) for text in texts]))


def model_over(base: Base, text: PackedText, seed: int = 0) -> MaskedLm:
    counts = np.bincount(text.ids, minlength=base.config.vocab_size)
    return MaskedLm(load_lower(base), base.load_upper(), counts, seed)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=800), st.integers(0, 2**31))
def test_of_the_ordinary_tokens_15_percent_are_chosen_and_of_those_80_10_10(ids: list[int], seed: int) -> None:
    known = read_vocabulary(tiny.tokenizer(), tiny.config())
    text = np.array(ids)
    masked = mask_tokens(text, known, np.random.default_rng(seed))
    ordinary = ~np.isin(text, known.special)
    assert len(masked.places) == round(0.15 * ordinary.sum())
    assert len(set(masked.places.tolist())) == len(masked.places)
    assert ordinary[masked.places].all()
    assert np.array_equal(masked.targets, text[masked.places])
    others = np.setdiff1d(np.arange(len(text)), masked.places)
    assert np.array_equal(masked.ids[others], text[others])
    now = masked.ids[masked.places]
    hidden = now == known.mask_id
    assert hidden.sum() == round(0.8 * len(now))
    # A random token may equal the original one.
    assert (now != masked.targets)[~hidden].sum() <= round(0.9 * len(now)) - round(0.8 * len(now))
    assert not np.isin(now[~hidden], known.special).any()


def test_over_many_tokens_a_tenth_is_replaced_by_all_kinds_of_tokens(known: Vocabulary) -> None:
    text = np.full(100_000, known.ordinary[0])
    masked = mask_tokens(text, known, np.random.default_rng(0))
    now = masked.ids[masked.places]
    replaced = now[(now != known.mask_id) & (now != text[0])]
    assert len(replaced) / len(now) == pytest.approx(0.1, abs=0.01)
    assert set(replaced) == set(known.ordinary[1:])


def test_what_stood_under_a_mask_is_in_no_window(tiny_base: Base, known: Vocabulary) -> None:
    text = chains(20, 0)
    lengths = text.lengths.tolist()
    masked = mask_tokens(text.ids, known, np.random.default_rng(0))
    hidden = masked.places[masked.ids[masked.places] == known.mask_id]
    other = text.ids.copy()
    other[hidden] = known.ordinary[(np.searchsorted(known.ordinary, other[hidden]) + 1) % len(known.ordinary)]
    again = mask_tokens(other, known, np.random.default_rng(0))
    assert not np.array_equal(masked.targets, again.targets)
    model = model_over(tiny_base, text)
    with torch.inference_mode():
        assert torch.equal(model(masked, lengths), model(again, lengths))


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    with pytest.raises(DataError, match=r"tiny knows no \[MASK\]"):
        read_vocabulary(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), tiny.config())


def test_training_lowers_the_held_out_loss_and_changes_the_lower_layers_alone(
    tiny_base: Base, known: Vocabulary
) -> None:
    model = model_over(tiny_base, chains(200, 0))
    lower, upper = weights(model.lower), weights(model.upper)
    settings = MaskedLmSettings(total_tokens=80 * 512, warmup_tokens=20 * 512, learning_rate=5e-3, batch_tokens=512)
    losses = train(model, chains(200, 0), chains(30, 1), known, settings, silent).summary()
    assert losses["after"]["loss"] < 0.9 * losses["before"]["loss"]
    assert losses["after"]["accuracy"] > losses["before"]["accuracy"]
    after = weights(model.lower)
    unchanged = {name for name, value in lower.items() if torch.equal(value, after[name])}
    assert unchanged == {"word_embeddings.weight"}
    for name, value in weights(model.upper).items():
        assert torch.equal(value, upper[name])


def test_a_held_out_text_too_short_to_mask_a_token_in_has_no_loss(tiny_base: Base, known: Vocabulary) -> None:
    held = PackedText(known.ordinary[:3], np.array([3]))
    losses = train(model_over(tiny_base, chains(50, 0)), chains(50, 0), held, known, SETTINGS, silent)
    assert losses.summary() == {step: {"loss": None, "accuracy": None} for step in ("before", "after")}
    assert losses.difference() is None


def test_while_the_head_warms_up_everything_else_stays(tiny_base: Base, known: Vocabulary) -> None:
    text = chains(50, 0)
    model = model_over(tiny_base, text)
    lower, head = weights(model.lower), weights(model.head)

    def stop_after_warmup(step: str, progress: float) -> None:
        if step != "warm up the head":
            raise StoppingError("warm")

    with pytest.raises(StoppingError):
        train(model, text, text, known, SETTINGS, stop_after_warmup)
    assert all(torch.equal(value, lower[name]) for name, value in weights(model.lower).items())
    assert not any(torch.equal(value, head[name]) for name, value in weights(model.head).items())


def test_measuring_on_held_out_text_can_be_stopped_at_each_batch(tiny_base: Base, known: Vocabulary) -> None:
    text, held = chains(50, 0), chains(50, 1)
    seen: list[str] = []

    def stop_at_the_third(step: str, progress: float) -> None:
        seen.append(step)
        if seen.count("measure after") == 3:
            raise StoppingError("enough")

    with pytest.raises(StoppingError):
        train(model_over(tiny_base, text), text, held, known, SETTINGS, stop_at_the_third)
    assert seen.count("measure before") > 3, "also before the lower layers train"


def test_nothing_is_said_to_be_done_before_it_is(tiny_base: Base, known: Vocabulary) -> None:
    told: list[tuple[str, float]] = []
    text = chains(50, 0)
    train(
        model_over(tiny_base, text),
        text,
        chains(50, 1),
        known,
        SETTINGS,
        lambda step, done: told.append((step, done)),
    )
    steps = ["warm up the head", "measure before", "further pretrain", "measure after"]
    assert list(dict.fromkeys(step for step, _ in told)) == steps
    assert told == sorted(told, key=lambda one: (steps.index(one[0]), one[1]))
    assert len({*told}) == len(told), "measuring, too, says how far it is"
    assert all(0 <= done < 1 for _, done in told)


def test_one_seed_gives_the_same_bits_and_another_seed_others(tiny_base: Base, known: Vocabulary) -> None:
    def trained(seed: int) -> dict[str, Tensor]:
        model = model_over(tiny_base, chains(50, 0), seed)
        settings = MaskedLmSettings(total_tokens=5 * 256, warmup_tokens=256, batch_tokens=256, seed=seed)
        train(model, chains(50, 0), chains(5, 1), known, settings, silent)
        return weights(model.lower)

    first, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["blocks.0.ffn_in.weight"], other["blocks.0.ffn_in.weight"])


@pytest.mark.parametrize("stopped_at", [3, 25, 45])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    tiny_base: Base, known: Vocabulary, tmp_path: Path, stopped_at: int
) -> None:
    text, held = chains(100, 0), chains(10, 1)
    calls: list[tuple[str, float]] = []

    def run(checkpoint: Checkpoint, stop_at: int = -1) -> dict[str, Tensor]:
        def report(step: str, progress: float) -> None:
            if not step.startswith("measure"):
                calls.append((step, progress))
            if len(calls) == stop_at:
                raise StoppingError("now")

        calls.clear()
        model = model_over(tiny_base, text)
        train(model, text, held, known, SETTINGS, report, checkpoint)
        return weights(model)

    whole = run(Checkpoint(tmp_path / "whole.pt", {}))
    assert len(calls) == SETTINGS.steps == 50
    cut = Checkpoint(tmp_path / "cut.pt", {"seed": 0})
    with pytest.raises(StoppingError):
        run(cut, stopped_at)
    resumed = run(cut)
    assert len(calls) == SETTINGS.steps - (stopped_at - 1)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_not_gone_on_from(tmp_path: Path) -> None:
    path, device = tmp_path / "work" / "c.pt", torch.device("cpu")
    mine = Checkpoint(path, {"seed": 0})
    assert mine.load(device) is None
    mine.save({"step": 7})
    assert mine.load(device) == {"step": 7}
    assert Checkpoint(path, {"seed": 1}).load(device) is None
    for data in (path.read_bytes()[:-40], b"", b"nonsense" * 99):
        path.write_bytes(data)
        assert mine.load(device) is None
    mine.remove()
    assert not path.parent.exists()


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c.pt", {})
    checkpoint.save({"step": 7})
    with limited(resource.RLIMIT_FSIZE, 10_000), pytest.raises(OSError, match="cannot be written"):
        checkpoint.save({"step": 8, "model": torch.zeros(100_000)})
    assert checkpoint.load(torch.device("cpu")) == {"step": 7}
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_progress_only_grows_within_a_step() -> None:
    told = [progress_at(step, SETTINGS) for step in range(SETTINGS.steps)]
    assert [step for step, _ in told] == ["warm up the head"] * 10 + ["further pretrain"] * 40
    assert told == sorted(told, key=lambda one: (one[0] == "further pretrain", one[1]))
    assert all(0 <= progress < 1 for _, progress in told)


@pytest.mark.parametrize(
    "change",
    [
        {"total_tokens": 0},
        {"warmup_tokens": 0},
        {"batch_tokens": 0},
        {"learning_rate": 0.0},
        {"learning_rate": 1.01},
        {"learning_rate": float("nan")},
        {"seed": -1},
    ],
)
def test_settings_out_of_range_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        MaskedLmSettings(**change)  # type: ignore[arg-type]
