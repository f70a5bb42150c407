"""A real server on texts of all lengths, new all the time, few and many together: its memory does not grow.

Memory is watched over 1,500 requests in `make test`, over 5,000 in `make test-long`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import ANSWERED
from hplm_loadtest.workloads.load_plan import Requests

from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.triton.repetitions import repetitions
from tests.watching import pages_of, stubs_of

pytestmark = [pytest.mark.triton, pytest.mark.stress, pytest.mark.repeated, pytest.mark.timeout(600)]
MOST_TOKENS = 256
PART = repetitions(300, 1_000)
# Requests under way, part by part. What a stage keeps for each size of a batch is all there when most sizes have come.
WARM_UP = (96, 8, 1, 96, 96)
AFTER_IT = (96, 8, 96, 1, 96)
# One step by which Triton widens a segment: a slow machine may hold all that is under way at once, later than a quick one.
STEP_BYTES = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("lengths")
    shape = tiny.config(max_tokens=MOST_TOKENS)
    # So few windows are remembered that their place is full long before memory is looked at.
    models = tiny.make_repository(folder, shape=shape, num_slots=4, plot_settings={"overlay_windows": 4096})
    with TritonServer(models, free_ports(), log=folder / "triton.log") as running:
        running.wait_ready()
        yield running


def mixed(count: int, rng: np.random.Generator) -> Requests:
    """Half of the texts have under 23 words, one in nine is longer than a base reads."""
    words = np.exp(rng.uniform(0, np.log(2 * MOST_TOKENS), count)).astype(int)
    texts = [" ".join(rng.choice(tiny.WORDS, size=number)) for number in words]
    return Requests(rng.choice(list(tiny.TASKS), count).tolist(), texts, np.full(count, np.nan))


def test_memory_stays_flat_over_requests_of_all_lengths_after_a_warm_up(server: TritonServer) -> None:
    """Over 5,000 requests in `make test-long`."""
    rng = np.random.default_rng(0)
    processes = {**stubs_of(server), "tritonserver": server.process.pid}
    seen: list[dict[str, dict[str, int]]] = []
    for in_flight in (*WARM_UP, *AFTER_IT):
        run = closed_loop(server.ports.grpc_url, mixed(PART, rng), in_flight)
        assert Counter(run.codes) == {ANSWERED: PART}
        seen.append({role: pages_of(pid) for role, pid in processes.items()})
    print({role: [(p[role]["rss"] >> 20, p[role]["shm"] >> 20) for p in seen] for role in processes})
    warm, last = seen[len(WARM_UP) - 1], seen[-1]
    for role in processes:
        assert last[role]["rss"] < 1.03 * warm[role]["rss"] + 16e6
        # Triton has both stages' segments.
        steps = 2 if role == "tritonserver" else 1
        assert last[role]["shm"] <= warm[role]["shm"] + steps * STEP_BYTES
