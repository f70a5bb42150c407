"""A replay's choice among queues, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.placement.loopback import serve_plan, used_nodes
from hplm_loadtest.placement.replay import _Queue, replay

from hplm.errors import ConfigError
from hplm.placement.plan import (
    Assumptions,
    Plan,
    PlannedBase,
    PlannedGroup,
    PlannedNode,
    Prediction,
    TenantRule,
)
from hplm.workloads.model_requests import ModelRequests

REQUESTS = ModelRequests(("a",), np.array([0.0]), np.array([0], np.int32), np.array([1.0]), 1.0)


def made_plan() -> Plan:
    nodes = (PlannedNode("left", 1, 10**9), PlannedNode("right", 1, 10**9))
    group = PlannedGroup("right", (0,), (PlannedBase("a", (2,), (10.0,)),))
    assumptions = Assumptions({"a": 1.0}, 1.0, {"a": 100.0}, 32, "made")
    return Plan(nodes, (group,), TenantRule(), assumptions, Prediction(1.0, {"a": 1.0}, (0.1,), 10), "made")


def test_a_queue_of_known_times_has_the_requests_that_have_not_begun() -> None:
    queue = _Queue()
    for index in range(3):
        queue.add(index, 1.0, 0.0)
    assert queue.rank(0.0) == (2, 3.0)
    assert queue.rank(1.5) == (1, 3.0)


def test_a_refused_request_gives_its_time_back() -> None:
    queue = _Queue()
    for index in range(3):
        queue.add(index, 1.0, 0.0)
    queue.remove(1, 1.0, 0.1)
    assert queue.rank(0.5) == (1, 2.0)
    assert queue.rank(1.0) == (0, 2.0)


def test_a_queue_of_unknown_times_has_the_unanswered_requests() -> None:
    queue = _Queue()
    queue.add(0, 0.0, 0.0)
    queue.add(1, 0.0, 0.0)
    queue.remove(0, 0.0, 5.0)
    assert queue.rank(5.0)[0] == 1


def test_a_model_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="an address and a tenant were expected"):
        replay({"a": []}, {"a": "hbert"}, {"a": ["t"]}, REQUESTS, ["text"])


def test_nodes_without_bases_are_not_served() -> None:
    assert used_nodes(made_plan()) == ["right"]


def test_a_missing_repository_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="the model repository of node 'right' was expected"),
        serve_plan(made_plan(), tmp_path, log=tmp_path),
    ):
        pass
