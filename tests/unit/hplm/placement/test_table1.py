"""Table 1's models have the table's totals and the paper's overheads."""

from __future__ import annotations

import pytest

from hplm.placement.placement import ParallelConfig
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import ARCHITECTURES, DEVICE_BYTES, cut_by_hand, model_set, table1_cluster, table1_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_add_up_to_the_table(name: str) -> None:
    model, row = table1_model(name), ARCHITECTURES[name]
    assert model.latency_s == pytest.approx(row.latency_ms / 1000)
    assert model.weight_bytes == pytest.approx(row.size_gb * 1e9, rel=1e-6)


def test_model_sets_have_the_papers_sizes() -> None:
    assert [len(model_set(name)) for name in ("S1", "S2", "S3", "S4")] == [32, 32, 60, 4]


@pytest.mark.parametrize(("name", "reduction"), [("BERT-1.3B", 0.329), ("BERT-2.7B", 0.467)])
def test_the_balanced_cut_saves_a_third_or_more_of_the_overhead_of_eight_stages(name: str, reduction: float) -> None:
    """Fig. 16: by 32.9 % and 46.7 %. The overhead is the stages times the slowest stage, less the latency."""
    model, config = table1_model(name), ParallelConfig(8)
    by_hand, balanced = (
        8 * max(seconds) - model.latency_s
        for seconds in (
            StageTimes(table1_cluster(8), [model], cut_by_hand).of(model, config),
            StageTimes(table1_cluster(8), [model]).of(model, config),
        )
        if seconds
    )
    assert 1 - balanced / by_hand == pytest.approx(reduction, abs=0.2)


def test_a_device_holds_bert_6_7b_only_in_parts() -> None:
    times = StageTimes(table1_cluster(2), [table1_model("BERT-6.7B")])
    assert max(times.bytes_of("BERT-6.7B", ParallelConfig(1)) or ()) > DEVICE_BYTES
    assert max(times.bytes_of("BERT-6.7B", ParallelConfig(2)) or ()) < DEVICE_BYTES


def test_bert_104b_needs_sixteen_devices() -> None:
    times = StageTimes(table1_cluster(64), [table1_model("BERT-104B")])
    assert max(times.bytes_of("BERT-104B", ParallelConfig(8)) or ()) > DEVICE_BYTES
    assert max(times.bytes_of("BERT-104B", ParallelConfig(8, 2)) or ()) > 0
