"""A cache of features between runs."""

from __future__ import annotations

from hplm.reporting.progress import Report
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.variants import Variant
from hplm_builder.tenants.prepared import Featurise, Prepared, counted, prepare


class FeatureCache:
    """The features of one task from one source, which the next run most likely needs; they can take a gigabyte."""

    def __init__(self) -> None:
        self._source: tuple[str, str] | None = None
        self._featurise: Featurise | None = None
        self._parts: dict[tuple[str, int | None], list[Prepared]] = {}

    def parts(
        self, task: EvalTask, variant: Variant, data: LabelledData, seed: int, report: Report
    ) -> dict[str, list[Prepared]]:
        """Return features by part of `data`: train, dev, test, and unlabelled if it has any. Raises DataError.

        `data` is the sample of the task that a budget takes with `seed`.
        """
        encoder = variant.base.load_text_encoder()
        if self._source != (task.name, variant.source.name):
            self._parts = {}
            self._featurise = variant.source.open(task, report)
            self._source = task.name, variant.source.name
        wanted = data.labelled | ({"unlabelled": data.unlabelled} if data.unlabelled else {})
        # The test part, and a part that a budget takes whole, are the same for every seed.
        keys = {
            name: (name, None if name == "test" or part is task.data.labelled.get(name) else seed)
            for name, part in wanted.items()
        }
        self._parts = {key: part for key, part in self._parts.items() if key in keys.values()}
        missing = {name: part for name, part in wanted.items() if keys[name] not in self._parts}
        tick = counted("features", sum(map(len, missing.values())), report)
        assert self._featurise is not None
        for name, part in missing.items():
            self._parts[keys[name]] = prepare(part, data, encoder, self._featurise, tick)
        return {name: self._parts[key] for name, key in keys.items()}
