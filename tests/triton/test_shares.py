"""Shares on a real server: a flood keeps to its own, a weight is worth what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.open_loop import closed_loop, open_loop
from hplm_loadtest.plan import Plan, Requests

from hplm.triton.server import TritonServer, free_ports
from tests import tiny

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.alone, pytest.mark.timeout(200)]
TEXT = tiny.sentences(1, words=(20, 21))[0]
COUNTS = {"alpha": 300, "beta": 150, "gamma": 100}


def test_a_flood_gets_no_more_than_its_share_and_a_weight_of_three_gets_three_times_as_much(tmp_path: Path) -> None:
    weights = {"tenant_weights": {"beta": 3}}
    models = tiny.make_repository(
        tmp_path,
        # Slow enough that all wait at once: of a batch of ten beta may have six, the others two each.
        shape=tiny.config(hidden_size=512, upper_layers=12),
        num_slots=8,
        plot_settings={"default_deadline_s": 150.0, **weights},
        upper_settings={
            "batch_requests": 10,
            "device": "cpu",
            "num_threads": 1,
            "default_deadline_s": 150.0,
            "starve_after_s": 150.0,
            **weights,
        },
    )
    rng = np.random.default_rng(0)
    names = rng.permutation([name for name, count in COUNTS.items() for _ in range(count)]).tolist()
    requests = Requests(names, [TEXT] * len(names), np.full(len(names), np.nan))
    with TritonServer(models, free_ports(), log=tmp_path / "triton.log") as server:
        server.wait_ready()
        closed_loop(server.ports.grpc_url, Requests(names[:20], [TEXT] * 20, np.full(20, np.nan)), 4)
        run = open_loop(server.ports.grpc_url, Plan(np.linspace(0.0, 0.5, len(names)), requests, 0.5))
    assert run.kinds == {"answered": len(names)}
    done = {name: np.sort(run.done_s[np.array(names) == name]) for name in COUNTS}
    # All have come, and of all some are still there.
    first_s, last_s = done["beta"][40], done["beta"][130]
    assert float(np.nanmax(run.sent_s)) < first_s
    assert last_s < min(own[-1] for own in done.values())
    answered = {name: int(np.count_nonzero((own > first_s) & (own <= last_s))) for name, own in done.items()}
    print(answered)
    # First come, first served would answer two of alpha for one of beta.
    assert 2 < answered["beta"] / answered["gamma"] < 4.5
    assert answered["alpha"] < 1.5 * answered["gamma"]
