"""Scoring trained models with tables of several sizes, and with both ways to answer a miss."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hplm.adapters.tenant import Head
from hplm.engine.open_domain import COMPUTED, OpenDomain
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.tables.pruned_tables import OWN_TABLE, VersionTree
from hplm_builder.tenants.finetune import Trained
from hplm_builder.tenants.judging import predict, scores_of
from hplm_builder.tenants.prepared import Prepared, chunks, prepare
from hplm_builder.tenants.trained_layers import plot_features

MISSES = ("compute", "backoff")
SHORTER = ("bigram", "unigram")


class TableScorer:
    """Scores models with a tree's own table at each of `percents`. Files in `folder` hold the features, perhaps gigabytes."""

    def __init__(self, tree: VersionTree, percents: Sequence[float], folder: Path, pooling: str, device: torch.device):
        self._tree = tree
        self._percents = percents
        self._folder = folder
        self._pooling = pooling
        self.device = device
        # For the current task: for each size and way, the rates of hits and the examples.
        self._looked_up: dict[str, list[tuple[dict[str, Any], list[Prepared]]]] = {}

    def score_trained(self, task: EvalTask, data: LabelledData, trained: Trained) -> dict[str, Any]:
        """Return the rows of `score` under `tables`, for `Variant.measure_more`."""
        return {"tables": self.score(task, data, trained.body, trained.head, self._pooling)}

    def score(
        self, task: EvalTask, data: LabelledData, body: nn.Module, head: Head, pooling: str
    ) -> list[dict[str, Any]]:
        """Return for each size and way: `percent`, `miss`, `hit_rate`, `own_hit_rate` and `test`, the task's metric.

        `own_hit_rate` is the share of windows that the tree's own table held, `hit_rate` the share that any table held.
        """
        if task.name not in self._looked_up:
            self._looked_up = {task.name: self._look_up(task, data)}
        rows = []
        for rates, examples in self._looked_up[task.name]:
            answers = predict(body, head, data, examples, pooling, device=self.device)
            rows.append({**rates, "test": scores_of(data, examples, answers)[task.metric]})
        return rows

    def _look_up(self, task: EvalTask, data: LabelledData) -> list[tuple[dict[str, Any], list[Prepared]]]:
        encoder = self._tree.base.load_text_encoder()
        texts = [
            encoded.ids
            for chunk in chunks(data.test)
            for encoded in encoder.encode([example.text_or_pair for example in chunk])
        ]
        tests = []
        for percent in self._percents:
            for miss in MISSES:
                # A new folder, because the search may come back to a task whose features were dropped.
                folder = Path(tempfile.mkdtemp(prefix=f"{task.name}-{percent:g}-{miss}-", dir=self._folder))
                lookup = self._tree.open(folder, percent, miss, texts)
                examples = prepare(data.test, data, encoder, plot_features(lookup))
                hit_rate, own_hit_rate = hit_rates(lookup)
                rates = {"percent": percent, "miss": miss, "hit_rate": hit_rate, "own_hit_rate": own_hit_rate}
                tests.append((rates, _on_disk(examples, folder / "features.npy")))
        return tests


def hit_rates(lookup: OpenDomain) -> tuple[float, float]:
    """Return the shares of the windows so far that any table of whole n-grams held, and that the tree's own table held."""
    levels = lookup.windows_by_level
    total = sum(levels.values())
    hits = total - sum(levels[name] for name in (*SHORTER, *COMPUTED))
    return hits / total, levels[OWN_TABLE] / total


def _on_disk(examples: list[Prepared], path: Path) -> list[Prepared]:
    """Return the examples with their features mapped from a file at `path`."""
    np.save(path, torch.cat([example.features for example in examples]).numpy())
    mapped = torch.from_numpy(np.load(path, mmap_mode="c"))
    parts = mapped.split([len(example.tokens) for example in examples])
    return [replace(example, features=part) for example, part in zip(examples, parts, strict=True)]
