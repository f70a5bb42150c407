"""Third parties' policies in a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_client import Client
from hplm_loadtest.scenarios.server_metrics import metric_value

from hplm.errors import StartError
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.plugins.install import install
from tests.waiting import until

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.timeout(300)]

PLUGIN = """
from hplm.scheduling.policy import Batch, Waiting

class Broken:
    turn = 0

    def select(self, waiting, now_s, budget):
        self.turn += 1
        first = waiting[0]
        return [
            lambda: {}["no such thing"],
            lambda: None,
            lambda: Batch(()),
            lambda: Batch(((first, first),)),
            lambda: Batch(((Waiting(10**9, "alpha", 1, 0.0, 1e9),),)),
            lambda: Batch(((first,),), slot_tokens="many"),
        ][self.turn % 6]()
"""


def test_with_a_policy_that_raises_or_returns_nonsense_everything_is_answered_and_the_failures_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "venv", "third_party", PLUGIN, "[hplm.policies]\nbroken = third_party:Broken\n", monkeypatch)
    models = tiny.make_repository(tmp_path, upper_settings={"policy": "broken"})
    with TritonServer(models, free_ports(), log=tmp_path / "log") as server:
        server.wait_ready()
        with Client(server.ports.grpc_url) as client:
            pairs = [(tenant, text) for text in tiny.sentences(20) for tenant in tiny.TASKS]
            assert len(list(client.predict_many(pairs))) == 80
        until(lambda: metric_value(server, 'hplm_upper_events_total{event="policy_failures"}') > 0)
        assert server.process.poll() is None
        until(lambda: "KeyError: 'no such thing'" in (tmp_path / "log").read_text())
        assert "the policy failed (KeyError); that batch is first come, first served" in (tmp_path / "log").read_text()


def test_an_unknown_policy_stops_the_start_with_one_clear_error(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path, upper_settings={"policy": "best"})
    with (
        TritonServer(models, free_ports(), log=tmp_path / "log") as server,
        pytest.raises(StartError, match="there is no policy 'best'; there are fcfs, sjf, edf, das, slotted_das"),
    ):
        server.wait_ready()
