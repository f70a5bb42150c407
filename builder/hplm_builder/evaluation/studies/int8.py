"""`hplm eval int8`: what serving with products in int8, in both stages, costs in accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from hplm.adapters.tenant import Tenant
from hplm.core.settings import REDUCTION_FACTOR
from hplm.core.wire import LabelledSpan
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.kernels.int8 import LEAST_RANGE, MARGIN, Ranges, channels_apart, check_int8, widest_inner
from hplm.engine.kernels.int8_ranges import FEED_FORWARD, measure_ranges, product_inputs
from hplm.engine.open_domain import COMPUTED, OpenDomain
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype, computing_in, in_dtype
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import silent
from hplm.store.layout import Store
from hplm.tasks.decode import answer_of
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.summary import AVERAGE, Row, Spread, complete_seeds, measurements_by_task
from hplm_builder.evaluation.search.variants import RATES, ServedDomain, Variant, hbert_body, with_adapters
from hplm_builder.fleet.demo import PLOT
from hplm_builder.tenants.bodies import AdapterModel, fastest_format
from hplm_builder.tenants.finetune import Trained
from hplm_builder.tenants.judging import scores_of
from hplm_builder.tenants.prepared import Prepared, prepare
from hplm_builder.tenants.tenant_build import tenant_of

BATCH = 64
CLIPPED_OF = 200
# Of one trained model, see `Int8Comparison.score_trained`.
Judged = dict[str, float]
# Points, on average: less than seeds differ by.
GOAL = 0.2


class Int8Comparison:
    """Asks the look-up and the engine that serve, once as they are and once in int8, the same test part."""

    def __init__(self, served: ServedDomain, pooling: str) -> None:
        self._base: Base = served.base
        self._pooling = pooling
        self._ranges = measure_ranges(self._base, self._base.load_upper())
        self._plain, self._quantised = served, replace(served, quantization="int8")
        # Of the same version both, whatever is published meanwhile.
        assert self._plain.lineage == self._quantised.lineage
        # Of the task under way: examples plain and in int8, and the share of windows computed.
        self._examples: dict[str, tuple[list[list[Prepared]], float]] = {}

    def score_trained(self, task: EvalTask, data: LabelledData, trained: Trained) -> dict[str, Any]:
        """As `Variant.more`: under `int8` the metric `plain` and `int8`, the share of `same` answers, and two shares more.

        `same`: labels and places, not scores, so of a regression all. The others: see `clipped_share`, `computed_share`.
        """
        assert isinstance(trained.body, AdapterModel)
        if task.name not in self._examples:
            both = [
                prepare(data.test, data, self._base.load_text_encoder(), one.source.open(task, silent))
                for one in (self._plain, self._quantised)
            ]
            self._examples = {task.name: (both, computed_share(self._quantised.lookup))}
        (examples, looked_up_in_int8), computed = self._examples[task.name]
        tenant = tenant_of(self._base, task.name, data, trained.body, trained.head, self._pooling)
        plain = self._answers(tenant, examples, is_int8=False)
        quantised = self._answers(tenant, looked_up_in_int8, is_int8=True)
        same = [
            [(span.label, span.start, span.end) for span in one]
            == [(span.label, span.start, span.end) for span in other]
            for one, other in zip(plain, quantised, strict=True)
        ]
        scores = {
            name: scores_of(data, examples, answers)[task.metric]
            for name, answers in (("plain", plain), ("int8", quantised))
        }
        # Of its own on a CPU, which alone serves in int8: the frozen layers of `trained` are other runs' too, maybe on a GPU.
        frozen = in_dtype(self._base.load_upper(), fastest_format()[0])
        body = AdapterModel(frozen, REDUCTION_FACTOR, trained.body.adapter(), trained.body.at)
        clipped = clipped_share(body, self._ranges, looked_up_in_int8[:CLIPPED_OF])
        return {"int8": {**scores, "same": float(np.mean(same)), "clipped": clipped, "computed": computed}}

    def _answers(self, tenant: Tenant, examples: Sequence[Prepared], *, is_int8: bool) -> list[list[LabelledSpan]]:
        """Decoded answers, in the order of `examples`."""
        engine = EncodeEngine(
            self._base.config,
            self._base.load_upper(),
            num_slots=2,
            reduced_size=tenant.packed.reduced_size,
            device=CPU,
            dtype=choose_dtype("auto", CPU, "int8" if is_int8 else "none"),
            int8=self._ranges if is_int8 else (),
        )
        card, transitions = tenant.card, tenant.head.transitions
        with closing(engine):
            logits = [
                found
                for start in range(0, len(examples), BATCH)
                for found in engine.run(
                    [EngineRequest(tenant, one.features.numpy()) for one in examples[start : start + BATCH]]
                )
            ]
        return [
            answer_of(card.task, found, card.labels, one.tokens, transitions)[0]
            for one, found in zip(examples, logits, strict=True)
        ]


def computed_share(lookup: OpenDomain) -> float:
    """Of the windows looked up since the last call, those that no table had, each as often as it came."""
    found, total = lookup.windows_by_level, sum(lookup.windows_by_level.values())
    missed = sum(found[level] for level in COMPUTED)
    found.clear()
    return missed / max(total, 1)


def clipped_share(body: AdapterModel, ranges: Sequence[Ranges], examples: Sequence[Prepared]) -> float:
    """Of the values that go into the feed-forward halves of a trained tenant, those beyond the ranges and their margin.

    Where each token has a scale of its own nothing is clipped. Fewer are than this: of the channels all but the widest have
    some more room.
    """
    clipped = total = 0

    def see(number: int, given: Tensor) -> None:
        nonlocal clipped, total
        clipped += int((given.abs() > MARGIN * bounds[number]).sum())
        total += given.numel()

    bounds: list[Tensor] = []
    for found in ranges:
        inner = torch.full_like(found.inner, widest_inner(found))
        inner[channels_apart(found)] = torch.inf
        bounds += [found.channels.clamp(min=LEAST_RANGE), inner]
    features = torch.cat([one.features for one in examples])
    with product_inputs(body.upper, FEED_FORWARD, see), torch.no_grad(), computing_in(*fastest_format(CPU)):
        body(features, [len(one.tokens) for one in examples])
    return clipped / total


def int8_rows(judged: Mapping[str, Sequence[Judged | None]]) -> list[Row]:
    """A row a task, and one of averages over tasks: means over the seeds, None for one that diverged.

    An average is taken of each seed that no task lacks.
    """
    rows = [_row(task, found) for task, models in judged.items() if (found := [one for one in models if one])]
    if len(judged) > 1:
        averages = [_mean(of_seed) for of_seed in complete_seeds(judged)]
        rows += [_row(AVERAGE, averages)] if averages else []
    return rows


def _mean(models: Sequence[Judged]) -> Judged:
    return {key: float(np.mean([model[key] for model in models])) for key in models[0]}


def _row(task: str, models: Sequence[Judged]) -> Row:
    lost = [100 * (model["plain"] - model["int8"]) for model in models]
    mean = _mean(models)
    return {
        "task": task,
        "plain": mean["plain"],
        "int8": mean["int8"],
        **Spread.of(lost).columns("points_lost"),
        "lost_by_seed": [round(points, 2) for points in lost],
        "same_answers": mean["same"],
        "clipped": mean["clipped"],
        "computed": mean["computed"],
    }


def goals_of(rows: Sequence[Row], tasks: int) -> list[Goal]:
    """Of the average, or of the only task."""
    found = [row for row in rows if tasks == 1 or row["task"] == AVERAGE]
    return [Goal("int8-loss", "points that int8 loses", GOAL, row["points_lost"], "points", "lower") for row in found]


@eval_command
def int8(
    shared: EvalOptions,
    domain: Annotated[str, typer.Option(help="PLOT or domain that tenants stand on.")] = PLOT,
    base: BaseOption = DEFAULT_BASE,
) -> None:
    """Tenants trained as ever, test parts answered by look-up and engine as they serve, plain and with `quantization` int8.

    Example: hplm eval int8 --root data --resume runs-int8 --json int8-accuracy.json
    """
    check_int8(CPU)
    tasks, limits, where = shared.read()
    dtype = choose_dtype("auto", CPU)
    about = {"base": base, "domain": domain, "dtype": str(dtype)}
    store = Store.at(shared.store)
    served = ServedDomain(store, bases.load(store.base(base)), domain)
    variant = Variant(
        "hbert",
        served.base,
        served.source,
        hbert_body(served.base, where),
        RATES["hbert"],
        with_adapters(lambda task: {**served.about(), "judged": f"matrices of both stages in int8, beside {dtype}"}),
        Int8Comparison(served, shared.pooled).score_trained,
        more_tests=2,
    )
    study, found = shared.run(tasks, [variant], limits, where)
    rows = int8_rows(measurements_by_task("int8", study, found))
    Report("int8-accuracy", study_settings(study, found, about), rows, goals_of(rows, len(tasks))).publish(
        shared.json_file
    )
