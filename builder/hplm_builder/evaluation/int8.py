"""`hplm eval int8`: what serving with feed-forward halves in int8 costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from hplm.adapters.packed import pack
from hplm.adapters.tenant import Tenant, TenantCard
from hplm.decode import DECODERS
from hplm.nn import base as bases
from hplm.nn.base import Base
from hplm.nn.dtype import choose_dtype
from hplm.nn.int8 import measure_ranges
from hplm.nn.upper import UpperEngine, UpperRequest
from hplm.progress import silent
from hplm.report import Goal, Report
from hplm.store.layout import Store
from hplm.wire import LabelledSpan
from hplm_builder.base import DEFAULT_BASE
from hplm_builder.bodies import CPU, AdapterModel
from hplm_builder.demo import PLOT
from hplm_builder.evaluation.options import BaseOption, EvalOptions, about_study, conduct, evaluation, kept_results
from hplm_builder.evaluation.summary import AVERAGE, Row, Spread
from hplm_builder.evaluation.tasks import EvalTask
from hplm_builder.evaluation.variants import RATES, Served, Variant, hbert_body, with_adapters
from hplm_builder.finetune import Trained
from hplm_builder.judging import scores_of
from hplm_builder.labelled import LabelledData
from hplm_builder.prepared import Prepared, prepare
from hplm_builder.tenants import encoder_of

BATCH = 64
# Points, on average: less than seeds differ by.
GOAL = 0.2


class Int8Judge:
    """Asks the engine that serves, once as it is and once in int8, the same test part."""

    def __init__(self, served: Served, pooling: str) -> None:
        self._served = served
        self._base: Base = served.base
        self._pooling = pooling
        self._examples: dict[str, list[Prepared]] = {}

    def of_trained(self, task: EvalTask, data: LabelledData, trained: Trained) -> dict[str, Any]:
        """As `Variant.more`: under `int8` the metric `plain` and `int8`, and the share of `same` answers."""
        assert isinstance(trained.body, AdapterModel)
        if task.name not in self._examples:
            featurise = self._served.source.open(task, silent)
            self._examples = {task.name: prepare(data.test, data, encoder_of(self._base), featurise)}
        examples = self._examples[task.name]
        card = TenantCard(
            name=task.name,
            task=data.task,
            labels=data.labels,
            base=self._base.fingerprint,
            pooling=self._pooling,
            example="",
            about={},
            texts=data.texts,
            adapter_at=trained.body.at,
            transitions=trained.head.transitions is not None,
        )
        tenant = Tenant(card, pack(trained.body.adapter()), trained.head)
        plain, quantised = (self._answers(tenant, examples, is_int8=is_int8) for is_int8 in (False, True))
        same = [
            [(span.label, span.start, span.end) for span in one]
            == [(span.label, span.start, span.end) for span in other]
            for one, other in zip(plain, quantised, strict=True)
        ]
        scores = {
            name: scores_of(data, examples, answers)[task.metric]
            for name, answers in (("plain", plain), ("int8", quantised))
        }
        return {"int8": {**scores, "same": float(np.mean(same))}}

    def _answers(self, tenant: Tenant, examples: Sequence[Prepared], *, is_int8: bool) -> list[list[LabelledSpan]]:
        """Decoded answers, in the order of `examples`."""
        upper = self._base.load_upper()
        engine = UpperEngine(
            self._base.config,
            upper,
            num_slots=2,
            reduced_size=tenant.packed.reduced_size,
            device=CPU,
            dtype=choose_dtype("auto", CPU),
            int8=measure_ranges(self._base, upper) if is_int8 else (),
        )
        answers: list[list[LabelledSpan]] = []
        for start in range(0, len(examples), BATCH):
            chunk = examples[start : start + BATCH]
            requests = [UpperRequest(tenant, one.features.numpy()) for one in chunk]
            for one, logits in zip(chunk, engine.run(requests), strict=True):
                answers.append(
                    DECODERS[tenant.card.task](logits, tenant.card.labels, one.tokens, tenant.head.transitions)
                )
        engine.close()
        return answers


def int8_rows(judged: dict[str, list[dict[str, float]]]) -> list[Row]:
    """A row a task, and the average over tasks: means over the models, `lost` in points with its spread."""
    rows = [_row(task, models) for task, models in judged.items() if models]
    if len(judged) > 1 and (count := min(map(len, judged.values()))):
        averages = [
            {key: float(np.mean([models[i][key] for models in judged.values()])) for key in ("plain", "int8", "same")}
            for i in range(count)
        ]
        rows.append(_row(AVERAGE, averages))
    return rows


def _row(task: str, models: Sequence[dict[str, float]]) -> Row:
    lost = [100 * (model["plain"] - model["int8"]) for model in models]
    return {
        "task": task,
        **Spread.of([model["plain"] for model in models]).columns("plain"),
        "int8": float(np.mean([model["int8"] for model in models])),
        "points_lost": float(np.mean(lost)),
        "lost_by_seed": [round(points, 2) for points in lost],
        "same_answers": float(np.mean([model["same"] for model in models])),
    }


@evaluation
def int8(
    shared: EvalOptions,
    domain: Annotated[str, typer.Option(help="PLOT or domain that tenants stand on.")] = PLOT,
    base: BaseOption = DEFAULT_BASE,
) -> None:
    """Tenants trained as ever, test parts answered by the engine as it serves, plain and with `quantization` int8.

    Example: hplm eval int8 --root data --resume runs --json int8-accuracy.json
    """
    tasks, limits, where = shared.read()
    served = Served(Store(shared.store), bases.load(Store(shared.store).base(base)), domain)
    variant = Variant(
        "hbert",
        served.base,
        served.source,
        hbert_body(served.base, where),
        RATES["hbert"],
        with_adapters(lambda task: {**served.about(), "judged": "int8"}),
        Int8Judge(served, shared.pooling).of_trained,
        more_tests=2,
    )
    study = shared.study(tasks, [variant], limits, where)
    with kept_results(shared.resume) as results:
        found = conduct(study, results, shared.dry_run)
    judged = {
        task.name: [one.run.more["int8"] for one in found[task.name, variant.name] if one.run is not None]
        for task in tasks
    }
    rows = int8_rows(judged)
    text = "points that int8 loses"
    goals = [Goal("int8-loss", text, GOAL, rows[-1]["points_lost"], "points", "lower")] if rows else []
    about = {"base": base, "domain": domain}
    Report("int8-accuracy", about_study(study, found, about), rows, goals).publish(shared.json_file)
