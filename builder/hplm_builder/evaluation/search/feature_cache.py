"""Features kept from one run to the next."""

from __future__ import annotations

from hplm.reporting.progress import Report
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.variants import Variant
from hplm_builder.tenants.prepared import Featurise, Prepared, counted, prepare


class FeatureCache:
    """Of one task and source at a time: what the next run most likely needs. A whole task's can be a gigabyte."""

    def __init__(self) -> None:
        self._source: tuple[str, str] | None = None
        self._featurise: Featurise | None = None
        self._parts: dict[tuple[str, int | None], list[Prepared]] = {}

    def parts(
        self, task: EvalTask, variant: Variant, data: LabelledData, seed: int, report: Report
    ) -> dict[str, list[Prepared]]:
        """Train, dev and test of `data`, what of the task a budget takes with that seed, and unlabelled where it has such.

        Raises DataError.
        """
        encoder = variant.base.load_text_encoder()
        if self._source != (task.name, variant.source.name):
            self._parts = {}
            self._featurise = variant.source.open(task, report)
            self._source = task.name, variant.source.name
        # Of those without, nothing is kept: the next run with the same seed may have some.
        given = data.labelled | ({"unlabelled": data.unlabelled} if data.unlabelled else {})
        keys = {
            name: (name, None if name == "test" or part is task.data.labelled.get(name) else seed)
            for name, part in given.items()
        }
        self._parts = {key: part for key, part in self._parts.items() if key in keys.values()}
        missing = {name: part for name, part in given.items() if keys[name] not in self._parts}
        tick = counted("features", sum(map(len, missing.values())), report)
        assert self._featurise is not None
        for name, part in missing.items():
            self._parts[keys[name]] = prepare(part, data, encoder, self._featurise, tick)
        return {name: self._parts[key] for name, key in keys.items()}
