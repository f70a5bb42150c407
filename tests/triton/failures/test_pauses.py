"""Requests that come together to a server that was idle: none of them is kept by Triton until somebody else comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.scenarios.grpc_load import open_loop
from hplm_loadtest.scenarios.server_metrics import metric_value
from hplm_loadtest.workloads.load_plan import LoadPlan, Requests

from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.waiting import until

pytestmark = [pytest.mark.triton, pytest.mark.alone, pytest.mark.timeout(600)]
WAVES, OF_A_WAVE = 20, 16
EVERY_S = 0.8
# Before a model whose queue is bounded Triton looks by itself every half second.
KEPT_S = 0.4
MOST_RUNS = 3


def test_of_a_few_requests_at_once_and_then_none_nobody_waits_for_tritons_next_look(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # Some come while a call lasts that the others began.
    starts_s = np.repeat(np.arange(WAVES) * EVERY_S, OF_A_WAVE)
    planned_s = np.sort(starts_s + rng.uniform(0, 0.003, len(starts_s)))
    names = rng.choice(list(tiny.TASKS), len(planned_s)).tolist()
    requests = Requests(names, tiny.sentences(len(names)), np.full(len(names), np.nan))
    with TritonServer(tiny.make_repository(tmp_path), free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        kept = []
        # Else about every second wave; a machine that is busy with something else may be that late in one of the runs.
        while len(kept) < MOST_RUNS and min(kept, default=WAVES) > 3:
            run = open_loop(server.ports.grpc_url, LoadPlan(planned_s, requests, WAVES * EVERY_S), timeout_s=100.0)
            assert run.kinds == {"answered": len(names)}
            worst_s = (run.done_s - run.sent_s).reshape(WAVES, OF_A_WAVE).max(axis=1)
            kept.append(np.count_nonzero(worst_s > KEPT_S))
        assert min(kept) <= 3
        # What had Triton look never came to a stage, which would have refused it.
        for stage in ("plot", "upper"):
            events = f"hplm_{stage}_events_total"
            until(lambda events=events: metric_value(server, f'{events}{{event="ok"}}') == len(kept) * len(names))
            until(lambda events=events: metric_value(server, f'{events}{{event="wakes"}}') >= WAVES)
            assert metric_value(server, f'{events}{{event="failed_wakes"}}') == 0
