"""Emulated devices answer real requests through a real server, with the decisions of live queues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.emulation.repository import EmulatedGroup, serve_groups, write_groups
from hplm_loadtest.placement.replay import Target, recorded_replay

from hplm.errors import DeadlineError
from hplm.workloads.model_requests import ModelRequests

pytestmark = pytest.mark.triton


def test_two_groups_answer_in_time_and_refuse_what_would_be_late(tmp_path: Path) -> None:
    groups = [EmulatedGroup("pipeline", {"a": (0.02, 0.02)}), EmulatedGroup("single", {"a": (0.04,)})]
    models = write_groups(tmp_path / "models", groups, hop_s=0.0, way_back_s=0.0, boundary_bytes=1000)
    with serve_groups(tmp_path / "models", models, log=tmp_path / "triton.log") as server:
        targets = {"a": [Target(server.ports.grpc_url, group.name, group.name) for group in groups]}
        # The last request has less time than the model takes.
        deadlines_s = np.array([30.0] * 20 + [0.03])
        requests = ModelRequests(("a",), np.arange(21) * 0.02, np.zeros(21, np.int32), deadlines_s, 1.0)
        replayed = recorded_replay(targets, {"a": ["a"]}, requests, ["text"], warm_up=1)
    outcomes = replayed.outcomes
    assert outcomes.in_time[:20].all()
    assert (outcomes.latencies_s[:20] >= 0.04).all()
    assert replayed.run.codes[20] == DeadlineError.code
    assert set(outcomes.groups[:20].tolist()) == {0, 1}
