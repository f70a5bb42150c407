"""Domain knowledge (HMI 5.1): lower layers further pretrained on a corpus, kept as a small table over the parent's.

A domain version is a folder of two artifacts: `lower`, the layers themselves, which its children start from and which
compute what no table has, and `branch`, the windows of the most frequent n-grams of its corpus and of those before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hplm.core.settings import at_least
from hplm.engine import lower_layers as lowers
from hplm.engine.open_domain import compute_windows
from hplm.errors import ConfigError, JobCancelledError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import choose_device, choose_dtype
from hplm.models.layers import WindowEncoder
from hplm.plot import table as tables
from hplm.reporting.progress import Report, shared_out
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.training import Ids, batches, source_of
from hplm_builder.data.corpus_file import MOST_BYTES, read_corpus
from hplm_builder.domains.domain_corpus import DomainCorpus, prepare_corpus
from hplm_builder.domains.masked_lm import (
    HELD_OUT_ROUNDS,
    MEASURE_AFTER,
    MEASURE_BEFORE,
    PRETRAIN,
    WARM_UP,
    MaskedLm,
    MaskedLmSettings,
    make_optimizer,
    train,
    train_step,
)
from hplm_builder.domains.masking import mask_tokens
from hplm_builder.tables.plot_tables import write_windows
from hplm_builder.tenants.prepared import counted

SAMPLED_WINDOWS = 2048
BRANCH = "compute the branch"
READING_SHARE = 0.03
# Of a dry run, where its measuring begins.
MEASURED_FROM = 0.9
# The first aside, no more once they have taken so long: a long one is hardly the longer for what else the machine does.
MEASUREMENTS, ENOUGH_S = 4, 1.0


@dataclass(frozen=True)
class DomainSettings(MaskedLmSettings):
    """How to make a domain: its branch keeps the top `top_percent` of the corpus's distinct n-grams, and those of before."""

    top_percent: float = 10.0
    min_corpus_tokens: int = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_percent <= 100:
            raise ConfigError(f"top_percent is a share in percent, above 0 and at most 100; got {self.top_percent:g}")
        at_least(self, 0, "min_corpus_tokens")


def build_domain(
    store: Store,
    base_name: str,
    parent_lineage: Sequence[Path | str],
    folder: Path,
    corpus: Path,
    settings: DomainSettings,
    report: Report,
    *,
    below: str = "",
    before: str | None = None,
    work: Path | None = None,
    most_corpus_bytes: int = MOST_BYTES,
    device: str = "auto",
) -> dict[str, Any]:
    """Further pretrain the lower layers of the version that `parent_lineage` leads to, and publish `folder`.

    The lineage is as `open_lineage` takes it; `folder` is `<domain's name>/<number>`, and its level of the look-up is
    called as the domain. `below`, the path of the version that is to be its parent, is kept in its manifest for
    `hplm store adopt`. `before` is the version that an update goes on from: its branch's n-grams stay, computed anew.
    Returns what the version's record says: corpus, settings, held-out loss before and after, sizes.

    An interrupted run goes on where its file in `work` stands; it stays there until the caller has published the version
    and removes it. A cancelled run leaves nothing there. Raises DataError,
    CorpusTooSmallError and what `report` raises, in each case with no trace of `folder`.
    """
    base = bases.load(store.base(base_name))
    found = prepare_corpus(
        read_corpus(corpus, most_corpus_bytes),
        base,
        settings.min_corpus_tokens,
        settings.seed,
        lambda step, done: report(step, READING_SHARE * done),
    )
    where = choose_device(device)
    parent = lowers.of_lineage(store, base, parent_lineage)
    grams = _grams(store, base, found, settings, before)
    weights = _weights(settings, found.held.num_tokens, len(grams) * base.config.window)
    overall = shared_out(report, weights, READING_SHARE)
    # What the branch keeps and how small a corpus may be are nothing to the training.
    trained_by = {field.name: getattr(settings, field.name) for field in fields(MaskedLmSettings)}
    run = {"settings": trained_by, "parent": source_of(parent, found.text)}
    checkpoint = Checkpoint(work / "domain.pt", run) if work else None
    model = MaskedLm(parent, base.load_upper(), found.token_counts, settings.seed).to(where)
    try:
        losses = train(model, found.text, found.held, found.known, settings, overall, checkpoint)
        if (loss := losses["after"]["loss"]) is not None and not math.isfinite(loss):
            raise ConfigError(f"training with learning_rate {settings.learning_rate:g} diverged: choose a lower one")
        trained = model.lower.eval()
        about = {
            **({"parent": below} if below else {}),
            "corpus": found.about(),
            "settings": asdict(settings),
            "masked_lm": losses,
            "moved": distance(lowers.of_lineage(store, base, parent_lineage).to(where), trained, grams),
            "corpus_hit_rate": found.grams.share_of(grams, base.config.vocab_size),
        }
        sizes = publish(folder, base, trained, grams, about, counted(BRANCH, len(grams), overall))
    except JobCancelledError:
        if checkpoint:
            checkpoint.remove()
        raise
    return {**about, **sizes}


def _grams(store: Store, base: Base, found: DomainCorpus, settings: DomainSettings, before: str | None) -> Ids:
    """What the branch is to hold: the corpus's most frequent n-grams, and those of the version before."""
    grams = found.grams.top(settings.top_percent)
    if before is None:
        return grams
    branch = tables.load(store.path(before) / "branch", fingerprint=base.fingerprint)
    return tables.sort_grams(np.concatenate([grams, branch.ngrams()]), base.config.vocab_size)


def publish(
    folder: Path,
    base: Base,
    lower: WindowEncoder,
    grams: Ids,
    about: dict[str, Any],
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, int]:
    """Put a domain version in place: both artifacts in one step, or neither. Returns rows and bytes."""
    device = lower.window_position.device
    with artifact.replacing(folder) as partial:
        lowers.save(partial / "lower", base, lower, {"domain": about})
        # As it was written: what computes misses later is what computed the table.
        written = lowers.load(partial / "lower", base, words=lower.word_embeddings).to(device)
        rows = write_windows(
            partial / "branch",
            folder.parent.name,
            grams,
            written,
            base.fingerprint,
            {"domain": about},
            choose_dtype("auto", device),
            advance,
        )
        sizes = {
            f"{part}_bytes": sum(path.stat().st_size for path in (partial / part).iterdir())
            for part in ("branch", "lower")
        }
    return {"rows": rows, **sizes}


def distance(old: WindowEncoder, new: WindowEncoder, grams: Ids) -> float:
    """How far further pretraining moved the vectors of n-grams: mean squared difference over the old ones' variance."""
    sample = grams[np.random.default_rng(0).permutation(len(grams))[:SAMPLED_WINDOWS]]
    dtype = choose_dtype("auto", old.window_position.device)
    before, after = (compute_windows(lower, sample, dtype).astype(np.float32) for lower in (old, new))
    return float(np.square(after - before).mean() / before.var())


def _weights(settings: DomainSettings, held_out_tokens: int, branch_tokens: int) -> dict[str, float]:
    """Of the steps behind the reading: a token costs a third without its gradients, less without upper layers."""
    measuring = HELD_OUT_ROUNDS * held_out_tokens / 3
    return {
        WARM_UP: settings.warmup_tokens / 3,
        MEASURE_BEFORE: measuring,
        PRETRAIN: float(settings.total_tokens),
        MEASURE_AFTER: measuring,
        BRANCH: branch_tokens / 6,
    }


def estimate_domain(
    store: Store,
    base_name: str,
    parent_lineage: Sequence[Path | str],
    corpus: Path,
    settings: DomainSettings,
    report: Report,
    *,
    before: str | None = None,
    most_corpus_bytes: int = MOST_BYTES,
    device: str = "auto",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """What `build_domain` would cost: its corpus, `rows` and `bytes` exactly, `estimated_s` from a few steps on `device`.

    Raises as `build_domain` does for a corpus that it would refuse.
    """
    base = bases.load(store.base(base_name))
    found = prepare_corpus(
        read_corpus(corpus, most_corpus_bytes),
        base,
        settings.min_corpus_tokens,
        settings.seed,
        lambda step, done: report(step, MEASURED_FROM * done),
    )
    where = choose_device(device)
    lower = lowers.of_lineage(store, base, parent_lineage)
    model = MaskedLm(lower, base.load_upper(), found.token_counts, settings.seed).to(where)
    optimizer = make_optimizer(model)
    rng = np.random.default_rng(settings.seed)
    ids, lengths = next(batches(found.text, min(settings.batch_tokens, 1024), rng))
    grams = _grams(store, base, found, settings, before)
    sample = grams[:SAMPLED_WINDOWS]
    measured: list[tuple[float, float]] = []
    for turn in range(MEASUREMENTS):
        report("measure a step", MEASURED_FROM + (1 - MEASURED_FROM) * turn / MEASUREMENTS)
        start = clock()
        train_step(model, optimizer, mask_tokens(ids, found.known, rng), lengths)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        middle = clock()
        compute_windows(lower, sample, choose_dtype("auto", where))
        measured.append((middle - start, clock() - middle))
        if np.sum(measured[1:]) > ENOUGH_S:
            break
    report("measure a step", 1.0)
    # The first pays for memory and kernels, and any may have waited for other work of the machine.
    step_s, windows_s = np.min(measured[1:], axis=0) / [len(ids), len(sample)]
    held_out = 2 * HELD_OUT_ROUNDS * found.held.num_tokens
    return {
        "corpus": found.about(),
        "rows": len(grams),
        "bytes": len(grams) * tables.row_bytes(base.config) + 2 * sum(p.numel() for p in model.lower_parameters()),
        "tokens": settings.warmup_tokens + settings.total_tokens,
        "estimated_s": float(
            step_s * (settings.total_tokens + (settings.warmup_tokens + held_out) / 3) + windows_s * len(grams)
        ),
    }
