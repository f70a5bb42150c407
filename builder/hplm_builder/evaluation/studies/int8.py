"""`hplm eval int8`: the accuracy that int8 products in both stages cost."""

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
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import COMPUTED, Domain, OpenDomain
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype, computing_in, in_dtype
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import silent
from hplm.tasks.task_loader import task_named
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.search.summary import AVERAGE, Row, mean_and_spread, measurements_by_task, with_average
from hplm_builder.fleet.demo import PLOT
from hplm_builder.tenants.bodies import AdapterModel, fastest_format
from hplm_builder.tenants.finetune import Trained
from hplm_builder.tenants.judging import scores_of
from hplm_builder.tenants.prepared import Prepared, prepare
from hplm_builder.tenants.tenant_build import tenant_of

BATCH = 64  # requests that the engine computes at once
CLIPPED_OF = 200  # test examples on which the share of clipped values is measured
# The measurements of one trained model, see `Int8Comparison.score_trained`.
Measured = dict[str, float]
GOAL = 0.2  # percentage points that int8 may lose on average: less than seeds differ by


class Int8Comparison:
    """Answers test parts with the look-up and the engine that serve, once in floats and once in int8."""

    def __init__(self, served: ServedDomain, pooling: str) -> None:
        self._base: Base = served.base
        self._pooling = pooling
        lower = None if self._base.config.is_whole else load_lower(self._base)
        self._ranges = measure_ranges(self._base, lower, self._base.load_upper())
        self._plain, self._quantised = served, replace(served, quantization="int8")
        # Read both now, so that they are the same version even if another is published meanwhile.
        assert self._plain.lineage == self._quantised.lineage
        # For the current task: examples looked up in floats and in int8, and the share of windows computed.
        self._examples: dict[str, tuple[list[list[Prepared]], float]] = {}

    def score_trained(self, task: EvalTask, data: LabelledData, trained: Trained) -> dict[str, Any]:
        """Return, under `int8`, the task's metric `plain` and `int8` and three shares, for `Variant.measure_more`.

        `same` is the share of answers with the same labels and places; scores may differ, so for a regression it is 1.
        `clipped` and `computed`: see `clipped_share` and `computed_share`.
        """
        assert isinstance(trained.body, AdapterModel)
        if task.name not in self._examples:
            both = [
                prepare(data.test, data, self._base.load_text_encoder(), served.source.open(task, silent))
                for served in (self._plain, self._quantised)
            ]
            self._examples = {task.name: (both, computed_share(self._quantised.lookup))}
        (examples, looked_up_in_int8), computed = self._examples[task.name]
        tenant = tenant_of(self._base, task.name, data, trained.body, trained.head, self._pooling)
        plain = self._answers(tenant, examples, is_int8=False)
        quantised = self._answers(tenant, looked_up_in_int8, is_int8=True)
        labels_and_places = (
            [[(span.label, span.start, span.end) for span in spans] for spans in answers]
            for answers in (plain, quantised)
        )
        same = [in_floats == in_int8 for in_floats, in_int8 in zip(*labels_and_places, strict=True)]
        scores = {
            name: scores_of(data, examples, answers)[task.metric]
            for name, answers in (("plain", plain), ("int8", quantised))
        }
        # A copy on the CPU, which alone serves in int8: `trained` shares its frozen layers with other runs, maybe on a GPU.
        frozen = in_dtype(self._base.load_upper(), fastest_format()[0])
        body = AdapterModel(frozen, REDUCTION_FACTOR, trained.body.adapter(), trained.body.at)
        clipped = clipped_share(body, self._ranges, looked_up_in_int8[:CLIPPED_OF])
        return {"int8": {**scores, "same": float(np.mean(same)), "clipped": clipped, "computed": computed}}

    def _answers(self, tenant: Tenant, examples: Sequence[Prepared], *, is_int8: bool) -> list[list[LabelledSpan]]:
        """Return the decoded answers in the order of `examples`."""
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
        task = task_named(card.task)
        with closing(engine):
            logits = [
                request_logits
                for start in range(0, len(examples), BATCH)
                for request_logits in engine.run(
                    [EngineRequest(tenant, example.features.numpy()) for example in examples[start : start + BATCH]]
                )
            ]
        return [
            task.decode(request_logits, card.labels, example.tokens, transitions)[0]
            for example, request_logits in zip(examples, logits, strict=True)
        ]


def computed_share(lookup: Domain) -> float:
    """Return the share of windows since the last call that no table held, and reset the counts. Repeats count again.

    A whole base has no windows, so the share is 0.
    """
    if not isinstance(lookup, OpenDomain):
        return 0.0
    counts, total = lookup.windows_by_level, sum(lookup.windows_by_level.values())
    missed = sum(counts[level] for level in COMPUTED)
    counts.clear()
    return missed / max(total, 1)


def clipped_share(body: AdapterModel, ranges: Sequence[Ranges], examples: Sequence[Prepared]) -> float:
    """Return the share of a trained tenant's feed-forward inputs that are beyond the ranges and their margin.

    The share is an upper bound: all channels but the widest have more room, and tokens with a scale of their own are not
    clipped.
    """
    clipped = total = 0

    def count(product: int, inputs: Tensor) -> None:
        nonlocal clipped, total
        clipped += int((inputs.abs() > MARGIN * bounds[product]).sum())
        total += inputs.numel()

    bounds: list[Tensor] = []
    for layer in ranges:
        inner = torch.full_like(layer.inner, widest_inner(layer))
        inner[channels_apart(layer)] = torch.inf
        bounds += [layer.channels.clamp(min=LEAST_RANGE), inner]
    features = torch.cat([example.features for example in examples])
    with product_inputs(body.upper.layers, FEED_FORWARD, count), torch.no_grad(), computing_in(*fastest_format(CPU)):
        body(features, [len(example.tokens) for example in examples])
    return clipped / total


def int8_rows(measured: Mapping[str, Sequence[Measured | None]]) -> list[Row]:
    """Return a row of means over the seeds for each task, and one of averages over tasks. A diverged seed is None.

    The average is over the seeds that diverged on no task.
    """
    return [_row(name, models) for name, models in with_average(measured, _mean)]


def _mean(models: Sequence[Measured]) -> Measured:
    return {key: float(np.mean([model[key] for model in models])) for key in models[0]}


def _row(task: str, models: Sequence[Measured]) -> Row:
    lost = [100 * (model["plain"] - model["int8"]) for model in models]
    mean = _mean(models)
    return {
        "task": task,
        "plain": mean["plain"],
        "int8": mean["int8"],
        **mean_and_spread("points_lost", lost),
        "lost_by_seed": [round(points, 2) for points in lost],
        "same_answers": mean["same"],
        "clipped": mean["clipped"],
        "computed": mean["computed"],
    }


def goals_of(rows: Sequence[Row], tasks: int) -> list[Goal]:
    """Return the goal for the average over tasks, or for the only task."""
    goal_rows = [row for row in rows if tasks == 1 or row["task"] == AVERAGE]
    return [
        Goal("int8-loss", "points that int8 loses", GOAL, row["points_lost"], "points", "lower") for row in goal_rows
    ]


@eval_command
def int8(
    shared: EvalOptions,
    domain: Annotated[str, typer.Option(help="PLOT or domain of the tenants.")] = PLOT,
    base: BaseOption = DEFAULT_BASE,
) -> None:
    """Compare answers in floats and in int8: tenants train as usual, the serving stages answer the test parts both ways.

    Example: hplm eval int8 --root data --resume runs-int8 --json int8-accuracy.json
    """
    check_int8(CPU)
    tasks, limits, device = shared.read()
    dtype = choose_dtype("auto", CPU)
    about = {"base": base, "domain": domain, "dtype": str(dtype)}
    served = shared.served(base, domain)
    variant = replace(
        served.adapter_variant("hbert", device, judged=f"matrices of both stages in int8, beside {dtype}"),
        measure_more=Int8Comparison(served, shared.pooled).score_trained,
        extra_predictions=2,
    )
    study, best = shared.run(tasks, [variant], limits, device)
    rows = int8_rows(measurements_by_task("int8", study, best))
    Report("int8-accuracy", study_settings(study, best, about), rows, goals_of(rows, len(tasks))).publish(
        shared.json_file
    )
