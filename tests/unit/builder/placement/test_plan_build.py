"""Plans from placements, and placements from plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hplm_builder.placement.cluster_file import Nodes
from hplm_builder.placement.plan_build import (
    bases_of_nodes,
    make_plan,
    placement_of,
    predicted,
    stage_times_of,
    with_one_cut,
)
from hplm_builder.placement.plan_file import write_plan
from hplm_builder.placement.planned_workload import Scales, planned_requests, sent_requests
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.plan import CheckResult, Plan, TenantRule
from hplm.placement.simulation import simulate
from tests.triton.placement import making

NODES = Nodes(tuple(making.planned_node(name, number) for number, name in enumerate(making.NODES)))
ASSUMED = making.make_plan().assumptions


def built(placement: Placement) -> Plan:
    models = [making.served("hbert"), making.served("mpnet", 4)]
    assumed = replace(ASSUMED, rates={"hbert": 5.0, "mpnet": 5.0}, deadline_ms={"hbert": 200.0, "mpnet": 200.0})
    stage_times = stage_times_of(replace(making.make_plan(), models=tuple(models)))
    outcomes = simulate(placement, stage_times, planned_requests(assumed))
    return make_plan(
        placement, NODES, models, outcomes, assumed, tenants=TenantRule(), algorithm="", survives_any_node=False
    )


def placed(*groups: tuple[tuple[int, ...], tuple[str, ...]]) -> Placement:
    return Placement(
        tuple(Group(devices, ParallelConfig(len(devices))) for devices, _ in groups),
        tuple(models for _, models in groups),
    )


def test_a_plan_has_devices_of_each_node_and_the_cut_of_each_base() -> None:
    plan = built(placed(((0, 1), ("hbert", "mpnet")), ((2,), ("hbert",)), ((3,), ())))
    first, second = plan.groups
    assert (first.node, first.devices) == ("east", (0, 1))
    assert [(base.base, base.cut) for base in first.bases] == [("hbert", (1, 1)), ("mpnet", (2, 2))]
    assert [base.stage_ms for base in first.bases] == [(10.0, 10.0), (20.0, 20.0)]
    assert (second.node, second.devices) == ("west", (0,))
    assert bases_of_nodes(plan) == {"east": {"hbert", "mpnet"}, "west": {"hbert"}}


@pytest.mark.parametrize("cut", [[3], [1, 1], [2, 0], []])
def test_an_edited_plan_whose_cut_does_not_fit_is_refused(cut: list[int], tmp_path: Path) -> None:
    values = json.loads(built(placed(((0,), ("hbert",)))).to_json())
    values["groups"][0]["bases"][0]["cut"] = cut
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    words = "group 1, base 'hbert': a stage of 1 layer or more on each of 1 devices was expected, 2 layers in all"
    with pytest.raises(ConfigError, match=re.escape(f"{words}, got the cut {cut}")):
        Plan.load(path)


def test_a_group_of_two_nodes_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="devices of one node"):
        built(placed(((1, 2), ("hbert", "mpnet"))))


def test_a_base_with_two_cuts_on_a_node_cannot_be_planned() -> None:
    nodes = (making.planned_node("east", devices=3), making.planned_node("west"))
    both = placed(((0, 1), ("hbert",)), ((2,), ("hbert",)))
    kept = with_one_cut(both, Nodes(nodes))
    assert kept.models == (("hbert",), ())
    with pytest.raises(ConfigError, match="with one cut"):
        make_plan(
            both,
            Nodes(nodes),
            [making.served()],
            simulate(both, stage_times_of(making.make_plan()), planned_requests(ASSUMED)),
            ASSUMED,
            tenants=TenantRule(),
            algorithm="",
            survives_any_node=False,
        )


@given(
    st.lists(
        st.tuples(st.sampled_from(making.NODES), st.sampled_from([(0,), (1,), (0, 1)]), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_a_plan_gives_its_placement_back(drawn: list[tuple[str, tuple[int, ...], bool]]) -> None:
    groups = [
        (node, devices, {"hbert": [1, 1] if len(devices) == 2 else [2], **({"mpnet": [4]} if more else {})})
        for node, devices, more in drawn
    ]
    groups = [(node, devices, cuts) for node, devices, cuts in groups if len(devices) == 1 or "mpnet" not in cuts]
    if not groups:
        return
    placement = placement_of(making.make_plan(groups))
    first = {"east": 0, "west": 2}
    assert [group.devices for group in placement.groups] == [
        tuple(first[node] + device for device in devices) for node, devices, _ in groups
    ]
    assert [set(models) for models in placement.models] == [set(cuts) for _, _, cuts in groups]


def test_a_plan_survives_being_written_and_read(tmp_path: Path) -> None:
    plan = replace(
        making.make_plan(),
        tenants=TenantRule({"films": ("east", "west")}, 125, {"east": 2}),
        check=CheckResult("2026-01-01T00:00:00Z", 0.99, 0.98, 100, "here"),
    )
    write_plan(plan, tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_group_with_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="group 1 of the plan: devices of its node 'east'"):
        placement_of(making.make_plan([("east", [5], {"hbert": [2]})]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as a plan"),
        ('{"version": 99}', "a plan of version 1 was expected"),
        ('{"version": 1, "nodes": 3}', "nodes must be"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        Plan.load(path)
    assert str(refused.value).startswith(str(path))


def test_a_prediction_has_the_share_of_each_base_and_the_busy_share_of_each_group() -> None:
    plan = making.make_plan(rate=5.0)
    requests = planned_requests(replace(ASSUMED, duration_s=200.0))
    prediction = predicted(placement_of(plan), simulate(placement_of(plan), stage_times_of(plan), requests))
    assert set(prediction.of_base) == {"hbert"}
    assert prediction.requests == len(requests)
    # Two groups share 10 requests/s of 20 ms each.
    assert sum(prediction.busy) == pytest.approx(0.2, rel=0.2)


def test_the_workload_of_a_plan_can_be_scaled() -> None:
    usual = planned_requests(ASSUMED)
    scaled = planned_requests(ASSUMED, Scales(rate=2.0, deadline=0.5))
    assert len(scaled) == pytest.approx(2 * len(usual), rel=0.4)
    assert set(scaled.deadlines_s) == {0.25}
    assert (planned_requests(ASSUMED).times_s == usual.times_s).all()


def test_the_stages_have_the_deadline_less_the_time_outside_of_them() -> None:
    assumed = replace(ASSUMED, outside_ms={"hbert": 100.0})
    assert set(planned_requests(assumed).deadlines_s) == {0.4}
    assert set(sent_requests(assumed).deadlines_s) == {0.5}
    late = planned_requests(replace(ASSUMED, outside_ms={"hbert": 600.0}))
    plan = making.make_plan()
    assert simulate(placement_of(plan), stage_times_of(plan), late).attainment == 0.0


def test_a_trace_is_played_at_the_rates_of_the_plan(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP\n" + "\n".join(str(second) for second in range(101)))
    assumed = replace(
        ASSUMED, rates={"hbert": 3.0, "mpnet": 1.0}, deadline_ms={"hbert": 100.0, "mpnet": 900.0}, trace=str(trace)
    )
    requests = planned_requests(assumed)
    assert sum(requests.rates().values()) == pytest.approx(4.0, rel=0.05)
    assert set(requests.deadlines_s) == {0.1, 0.9}


def test_a_workload_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no request in 20 s at 0\.0001 requests/s: give a longer --seconds"):
        planned_requests(replace(ASSUMED, rates={"hbert": 1e-4}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"duration_s": float("nan")}, "duration_s: a finite number above 0"),
        ({"cv": 0}, "cv: a finite number above 0"),
        ({"rates": {"hbert": "10"}}, "hbert: a finite number not below 0"),
        ({"rates": {"hbert": -1.0}}, "hbert: a finite number not below 0"),
        ({"deadline_ms": {"hbert": 0}}, "deadline_ms of hbert: a finite number above 0"),
        ({"deadline_ms": {}}, "deadline_ms of base 'hbert' was expected"),
    ],
)
def test_a_plan_whose_workload_has_no_such_number_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(ASSUMED, **changed)


def test_too_many_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="too many to simulate"):
        planned_requests(replace(ASSUMED, duration_s=1e9))
