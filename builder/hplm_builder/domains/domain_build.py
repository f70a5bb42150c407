"""Building domains (HMI 5.1): lower layers further pretrained on a corpus, with a small table over the parent's or without one.

A domain version is a folder of two artifacts. `lower` holds the lower encoder: children start from it, and it computes
n-grams that no table has. `branch` holds the vectors of the most frequent n-grams of its corpus, and of the n-grams that the
version before had. A version without `branch` computes all n-grams: see `hplm.store.domain_version`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
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
from hplm.store.domain_version import HAS_BRANCH, has_branch
from hplm.store.layout import Store
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.distillation import batches, source_of
from hplm_builder.data.corpus_file import MOST_BYTES, read_corpus
from hplm_builder.data.labelled import LabelledFile
from hplm_builder.domains.benefit import DevExamples, DevSet, compare_answers
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
from hplm_builder.domains.verdict import Verdict
from hplm_builder.tables.plot_tables import write_ngrams
from hplm_builder.tenants.prepared import counted

SAMPLED_NGRAMS = 2048  # of a branch, on which a move or a speed is measured
BRANCH = "compute the branch"
DEV_BEFORE, DEV_AFTER = "answer labelled examples before", "answer labelled examples after"
# Rises with what a checkpoint holds.
CHECKPOINT_FORMAT = 2
READING_SHARE = 0.03
# Share of a dry run's progress at which measuring begins.
MEASURED_FROM = 0.9
# Measurements of a dry run, the first of which does not count. Once the others have taken this long, no more are taken: other
# work of the machine hardly changes a long measurement.
MEASUREMENTS, ENOUGH_S = 4, 1.0


@dataclass(frozen=True)
class DomainSettings(MaskedLmSettings):
    """Settings of a domain: its branch keeps the top `top_percent` of the corpus's distinct n-grams, and the old branch's.

    With `top_percent` 0 the domain has no branch, not even the old one.
    """

    top_percent: float = 10.0
    min_corpus_tokens: int = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.top_percent <= 100:
            raise ConfigError(f"top_percent is a share in percent, 0 (no table) to 100; got {self.top_percent:g}")
        at_least(self, 0, "min_corpus_tokens")


def build_domain(
    store: Store,
    base_name: str,
    start: Sequence[Path | str],
    folder: Path,
    corpus: Path,
    settings: DomainSettings,
    report: Report,
    *,
    above: Sequence[Path | str] = (),
    before: str | None = None,
    work: Path | None = None,
    most_corpus_bytes: int = MOST_BYTES,
    device: str = "auto",
    dev: Sequence[LabelledFile] = (),
) -> dict[str, Any]:
    """Further pretrain the lower layers of the version that `start` leads to, and publish `folder`.

    `start` is a lineage as `open_lineage` takes it: of the parent, or of the version before. `folder` is
    `<domain's name>/<number>`; its level of the look-up has the domain's name. `above` is the lineage of the version's parent,
    by default `start`. If it is given, its first path is kept in the manifest for `hplm store adopt`. `before` is the version
    that an update starts from: the n-grams of its branch stay, computed anew. `dev` are files of labelled examples, on which
    the domain is compared with `start`.
    Returns the version's record: corpus, settings, held-out loss before and after, sizes, and as `benefit` the verdict whether
    the domain helps (`hplm_builder.domains.verdict`).

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
    examples = DevExamples(store, base, [DevSet.read(file) for file in dev], where)
    parent = lowers.of_lineage(store, base, start)
    grams = _grams(store, base, prepared, settings, before)
    branch_tokens = len(grams) * base.config.window
    weights = _weights(settings, prepared.held_out.num_tokens, branch_tokens, examples.num_tokens)
    overall = shared_out(report, weights, READING_SHARE)
    # `top_percent` and `min_corpus_tokens` do not change the training.
    trained_by = {field.name: getattr(settings, field.name) for field in fields(MaskedLmSettings)}
    run = {"format": CHECKPOINT_FORMAT, "settings": trained_by, "parent": source_of(parent, prepared.text)}
    checkpoint = Checkpoint(work / "domain.pt", run) if work else None
    model = MaskedLm(parent, base.load_upper(), prepared.token_counts, settings.seed).to(where)
    try:
        # Answered before the long training, so that bad examples are refused at once.
        answered = examples.answer(start, partial(overall, DEV_BEFORE))
        losses = train(model, prepared.text, prepared.held_out, prepared.vocabulary, settings, overall, checkpoint)
        summary = losses.summary()
        if (loss := summary["after"]["loss"]) is not None and not math.isfinite(loss):
            raise ConfigError(f"training with learning_rate {settings.learning_rate:g} diverged: choose a lower one")
        trained = model.lower.eval()
        verdict = Verdict(
            folder.parent.name,
            name_start(start, before),
            losses.difference(),
            is_update=before is not None,
            base=base.config.name,
        )
        measured = grams if len(grams) else prepared.grams.grams
        record = {
            **({"parent": str(above[0])} if above else {}),
            "corpus": prepared.summary(),
            **({"warnings": prepared.warnings} if prepared.warnings else {}),
            "settings": asdict(settings),
            "masked_lm": summary,
            "moved": distance(lowers.of_lineage(store, base, start).to(where), trained, measured),
            "corpus_hit_rate": prepared.grams.share_of(grams, base.config.vocab_size),
            "benefit": verdict.as_dict(),
        }

        def with_dev(version: Path) -> dict[str, Any]:
            now = examples.answer([version, *(above or start)], partial(overall, DEV_AFTER))
            return {**record, "benefit": replace(verdict, dev=compare_answers(answered, now)).as_dict()}

        branch_done = counted(BRANCH, len(grams), overall)
        return publish(folder, base, trained, grams, record, branch_done, with_dev if dev else None)
    except JobCancelledError:
        if checkpoint:
            checkpoint.remove()
        raise


def name_start(start: Sequence[Path | str], before: str | None) -> str:
    """Return what the version that a training starts from is called in a verdict."""
    folder = Path(start[0])
    if before is not None:
        return f"version {folder.name}"
    return folder.name if len(start) == 1 else folder.parent.name


def _grams(store: Store, base: Base, prepared: DomainCorpus, settings: DomainSettings, before: str | None) -> Ids:
    """Return the n-grams of the branch: the corpus's most frequent ones, and those of the version before. None, no branch."""
    if not settings.top_percent:
        return prepared.grams.grams[:0]
    grams = prepared.grams.top(settings.top_percent)
    if before is None or not has_branch(store.path(before)):
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
    measure: Callable[[Path], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Put a domain version in place, both artifacts in one step or neither; return the record with rows and bytes.

    Without `grams` the version has no branch. `measure` is called with the folder before that is in place, and returns the
    record to keep.
    """
    device = lower.device
    with artifact.replacing(folder) as unfinished:

        def save_lower() -> None:
            lowers.save(unfinished / "lower", base, lower, {HAS_BRANCH: len(grams) > 0, "domain": record})

        save_lower()
        if len(grams):
            # Loaded as written, so that the table and later misses are computed with the same weights.
            written = lowers.load(unfinished / "lower", base, words=lower.word_embeddings).to(device)
            dtype = choose_dtype("auto", device)
            lowers.pack(written, dtype)
            name = folder.parent.name
            write_ngrams(
                unfinished / "branch", name, grams, written, base.fingerprint, {"domain": record}, dtype, advance
            )
        if measure is not None:
            record = measure(unfinished)
            save_lower()
        parts = {part: unfinished / part for part in ("branch", "lower")}
        sizes = {
            f"{part}_bytes": sum(path.stat().st_size for path in place.iterdir()) if place.is_dir() else 0
            for part, place in parts.items()
        }
    return {**record, "rows": len(grams), **sizes}


def distance(old: LowerEncoder, new: LowerEncoder, grams: Ids) -> float:
    """Measure how far pretraining moved the vectors of n-grams: mean squared difference over the old vectors' variance."""
    sample = grams[np.random.default_rng(0).permutation(len(grams))[:SAMPLED_NGRAMS]]
    dtype = choose_dtype("auto", old.device)
    before, after = (compute_ngrams(lower, sample, dtype).astype(np.float32) for lower in (old, new))
    return float(np.square(after - before).mean() / before.var())


def _weights(settings: DomainSettings, held_out_tokens: int, branch_tokens: int, dev_tokens: int) -> dict[str, float]:
    """Return the weights of the steps after reading: a token costs a third without gradients, less without upper layers."""
    measuring = HELD_OUT_ROUNDS * held_out_tokens / 3
    return {
        DEV_BEFORE: dev_tokens / 3,
        WARM_UP: settings.warmup_tokens / 3,
        MEASURE_BEFORE: measuring,
        PRETRAIN: float(settings.total_tokens),
        MEASURE_AFTER: measuring,
        BRANCH: branch_tokens / 6,
        DEV_AFTER: dev_tokens / 3,
    }


def estimate_domain(
    store: Store,
    base_name: str,
    start: Sequence[Path | str],
    corpus: Path,
    settings: DomainSettings,
    report: Report,
    *,
    before: str | None = None,
    most_corpus_bytes: int = MOST_BYTES,
    device: str = "auto",
    dev: Sequence[LabelledFile] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Estimate what `build_domain` would cost: corpus, `rows` and `bytes` exactly, `estimated_s` from a few steps on `device`.

    Raises as `build_domain` does for a corpus or a file of examples that it would refuse.
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
    dev_tokens = DevExamples(store, base, [DevSet.read(file) for file in dev], where).num_tokens
    lower = lowers.of_lineage(store, base, start)
    model = MaskedLm(lower, base.load_upper(), prepared.token_counts, settings.seed).to(where)
    optimizer = make_optimizer(model)
    rng = np.random.default_rng(settings.seed)
    ids, lengths = next(batches(prepared.text, min(settings.batch_tokens, 1024), rng))
    grams = _grams(store, base, prepared, settings, before)
    sample = (grams if len(grams) else prepared.grams.grams)[:SAMPLED_NGRAMS]
    measured: list[tuple[float, float]] = []
    for turn in range(MEASUREMENTS):
        report("measure a step", MEASURED_FROM + (1 - MEASURED_FROM) * turn / MEASUREMENTS)
        begin_s = clock()
        train_step(model, optimizer, mask_tokens(ids, prepared.vocabulary, rng), lengths)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        middle_s = clock()
        compute_ngrams(lower, sample, choose_dtype("auto", where))
        measured.append((middle_s - begin_s, clock() - middle_s))
        if np.sum(measured[1:]) > ENOUGH_S:
            break
    report("measure a step", 1.0)
    # The first measurement pays for memory and kernels. The shortest of the others waited least for other work of the machine.
    step_s, ngram_s = np.min(measured[1:], axis=0) / [len(ids), len(sample)]
    measured_tokens = 2 * (HELD_OUT_ROUNDS * prepared.held_out.num_tokens + dev_tokens)
    return {
        "corpus": prepared.summary(),
        "rows": len(grams),
        "bytes": len(grams) * tables.row_bytes(base.config) + 2 * sum(p.numel() for p in model.lower_parameters()),
        "tokens": settings.warmup_tokens + settings.total_tokens,
        "estimated_s": float(
            step_s * (settings.total_tokens + (settings.warmup_tokens + measured_tokens) / 3) + ngram_s * len(grams)
        ),
        **({"warnings": prepared.warnings} if prepared.warnings else {}),
    }
