"""Building domains (HMI 5.1): lower layers further pretrained on a corpus, kept as a small table over the parent's.

A domain version is a folder of two artifacts. `lower` holds the lower encoder: children start from it, and it computes
n-grams that no table has. `branch` holds the vectors of the most frequent n-grams of its corpus, and of the n-grams that the
version before had.
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
from hplm.engine.open_domain import compute_ngrams
from hplm.errors import ConfigError, JobCancelledError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import choose_device, choose_dtype
from hplm.models.lower import LowerEncoder
from hplm.plot import table as tables
from hplm.plot.ngrams import Ids
from hplm.reporting.progress import Report, shared_out
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.training import batches, source_of
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
from hplm_builder.tables.plot_tables import write_ngrams
from hplm_builder.tenants.prepared import counted

SAMPLED_NGRAMS = 2048  # of a branch, on which a move or a speed is measured
BRANCH = "compute the branch"
READING_SHARE = 0.03
# Share of a dry run's progress at which measuring begins.
MEASURED_FROM = 0.9
# Measurements of a dry run, the first of which does not count. Once the others have taken this long, no more are taken: other
# work of the machine hardly changes a long measurement.
MEASUREMENTS, ENOUGH_S = 4, 1.0


@dataclass(frozen=True)
class DomainSettings(MaskedLmSettings):
    """Settings of a domain: its branch keeps the top `top_percent` of the corpus's distinct n-grams, and the old branch's."""

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

    The lineage is as `open_lineage` takes it. `folder` is `<domain's name>/<number>`; its level of the look-up has the domain's
    name. `below`, the path of the version that will be its parent, is kept in its manifest for `hplm store adopt`. `before` is
    the version that an update starts from: the n-grams of its branch stay, computed anew.
    Returns the version's record: corpus, settings, held-out loss before and after, sizes.

    An interrupted run resumes from its checkpoint in `work`. The checkpoint stays there until the caller has published the
    version and removes it. A cancelled run removes it. Raises DataError, CorpusTooSmallError and what `report` raises, in each
    case without a trace of `folder`.
    """
    base = bases.load(store.base(base_name))
    prepared = prepare_corpus(
        read_corpus(corpus, most_corpus_bytes),
        base,
        settings.min_corpus_tokens,
        settings.seed,
        lambda step, done: report(step, READING_SHARE * done),
    )
    where = choose_device(device)
    parent = lowers.of_lineage(store, base, parent_lineage)
    grams = _grams(store, base, prepared, settings, before)
    weights = _weights(settings, prepared.held_out.num_tokens, len(grams) * base.config.window)
    overall = shared_out(report, weights, READING_SHARE)
    # `top_percent` and `min_corpus_tokens` do not change the training.
    trained_by = {field.name: getattr(settings, field.name) for field in fields(MaskedLmSettings)}
    run = {"settings": trained_by, "parent": source_of(parent, prepared.text)}
    checkpoint = Checkpoint(work / "domain.pt", run) if work else None
    model = MaskedLm(parent, base.load_upper(), prepared.token_counts, settings.seed).to(where)
    try:
        losses = train(model, prepared.text, prepared.held_out, prepared.vocabulary, settings, overall, checkpoint)
        if (loss := losses["after"]["loss"]) is not None and not math.isfinite(loss):
            raise ConfigError(f"training with learning_rate {settings.learning_rate:g} diverged: choose a lower one")
        trained = model.lower.eval()
        record = {
            **({"parent": below} if below else {}),
            "corpus": prepared.summary(),
            "settings": asdict(settings),
            "masked_lm": losses,
            "moved": distance(lowers.of_lineage(store, base, parent_lineage).to(where), trained, grams),
            "corpus_hit_rate": prepared.grams.share_of(grams, base.config.vocab_size),
        }
        sizes = publish(folder, base, trained, grams, record, counted(BRANCH, len(grams), overall))
    except JobCancelledError:
        if checkpoint:
            checkpoint.remove()
        raise
    return {**record, **sizes}


def _grams(store: Store, base: Base, prepared: DomainCorpus, settings: DomainSettings, before: str | None) -> Ids:
    """Return the n-grams of the branch: the corpus's most frequent ones, and those of the version before."""
    grams = prepared.grams.top(settings.top_percent)
    if before is None:
        return grams
    branch = tables.load(store.path(before) / "branch", fingerprint=base.fingerprint)
    return tables.sort_grams(np.concatenate([grams, branch.ngrams()]), base.config.vocab_size)


def publish(
    folder: Path,
    base: Base,
    lower: LowerEncoder,
    grams: Ids,
    record: dict[str, Any],
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, int]:
    """Put a domain version in place, both artifacts in one step or neither; return rows and bytes."""
    device = lower.device
    with artifact.replacing(folder) as partial:
        lowers.save(partial / "lower", base, lower, {"domain": record})
        # Loaded as written, so that the table and later misses are computed with the same weights.
        written = lowers.load(partial / "lower", base, words=lower.word_embeddings).to(device)
        lowers.pack(written, choose_dtype("auto", device))
        rows = write_ngrams(
            partial / "branch",
            folder.parent.name,
            grams,
            written,
            base.fingerprint,
            {"domain": record},
            choose_dtype("auto", device),
            advance,
        )
        sizes = {
            f"{part}_bytes": sum(path.stat().st_size for path in (partial / part).iterdir())
            for part in ("branch", "lower")
        }
    return {"rows": rows, **sizes}


def distance(old: LowerEncoder, new: LowerEncoder, grams: Ids) -> float:
    """Measure how far pretraining moved the vectors of n-grams: mean squared difference over the old vectors' variance."""
    sample = grams[np.random.default_rng(0).permutation(len(grams))[:SAMPLED_NGRAMS]]
    dtype = choose_dtype("auto", old.device)
    before, after = (compute_ngrams(lower, sample, dtype).astype(np.float32) for lower in (old, new))
    return float(np.square(after - before).mean() / before.var())


def _weights(settings: DomainSettings, held_out_tokens: int, branch_tokens: int) -> dict[str, float]:
    """Return the weights of the steps after reading: a token costs a third without gradients, less without upper layers."""
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
    """Estimate what `build_domain` would cost: corpus, `rows` and `bytes` exactly, `estimated_s` from a few steps on `device`.

    Raises as `build_domain` does for a corpus that it would refuse.
    """
    base = bases.load(store.base(base_name))
    prepared = prepare_corpus(
        read_corpus(corpus, most_corpus_bytes),
        base,
        settings.min_corpus_tokens,
        settings.seed,
        lambda step, done: report(step, MEASURED_FROM * done),
    )
    where = choose_device(device)
    lower = lowers.of_lineage(store, base, parent_lineage)
    model = MaskedLm(lower, base.load_upper(), prepared.token_counts, settings.seed).to(where)
    optimizer = make_optimizer(model)
    rng = np.random.default_rng(settings.seed)
    ids, lengths = next(batches(prepared.text, min(settings.batch_tokens, 1024), rng))
    grams = _grams(store, base, prepared, settings, before)
    sample = grams[:SAMPLED_NGRAMS]
    measured: list[tuple[float, float]] = []
    for turn in range(MEASUREMENTS):
        report("measure a step", MEASURED_FROM + (1 - MEASURED_FROM) * turn / MEASUREMENTS)
        start = clock()
        train_step(model, optimizer, mask_tokens(ids, prepared.vocabulary, rng), lengths)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        middle = clock()
        compute_ngrams(lower, sample, choose_dtype("auto", where))
        measured.append((middle - start, clock() - middle))
        if np.sum(measured[1:]) > ENOUGH_S:
            break
    report("measure a step", 1.0)
    # The first measurement pays for memory and kernels. The shortest of the others waited least for other work of the machine.
    step_s, ngram_s = np.min(measured[1:], axis=0) / [len(ids), len(sample)]
    held_out_tokens = 2 * HELD_OUT_ROUNDS * prepared.held_out.num_tokens
    return {
        "corpus": prepared.summary(),
        "rows": len(grams),
        "bytes": len(grams) * tables.row_bytes(base.config) + 2 * sum(p.numel() for p in model.lower_parameters()),
        "tokens": settings.warmup_tokens + settings.total_tokens,
        "estimated_s": float(
            step_s * (settings.total_tokens + (settings.warmup_tokens + held_out_tokens) / 3) + ngram_s * len(grams)
        ),
    }
