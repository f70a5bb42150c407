"""The part of a Triton model that the stages share which look texts up."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from hplm.serving.lookup_stage import RawTexts, TextLookup
from hplm.serving.stage import Stage
from hplm.triton.bridge import metrics, translate
from hplm.triton.stages.stage_model import Counters, Gauges
from hplm.triton.stages.text_model import TextModel


class LookupModel(TextModel):
    """A Triton model over a stage that looks texts up. It counts windows and tenants."""

    def begin_lookup(
        self,
        args: dict[str, str],
        stage: Stage[RawTexts, Any, Any],
        lookup: TextLookup,
        *,
        hold_s: float,
        events: str,
        waiting: str,
        counters: Counters = MappingProxyType({}),
        gauges: Gauges = MappingProxyType({}),
    ) -> None:
        """Start the stage and its metrics, see `StageModel.begin`. `lookup` is the stage's look-up of texts."""
        translate.log(f"{args['model_name']}: what no table has is {lookup.domains.how_misses_are_computed}")
        windows = metrics.MetricFamily(
            "hplm_plot_windows_total", "Windows looked up, by the level that answered", "level"
        )
        tenants = metrics.MetricFamily("hplm_plot_tenants", "Tenants there are", "")
        self.begin_texts(
            args,
            stage,
            hold_s=hold_s,
            events=events,
            waiting=waiting,
            counters={**counters, windows: lambda: lookup.domains.windows_by_level},
            gauges={**gauges, tenants: lambda: {"": stage.tenants}},
        )
