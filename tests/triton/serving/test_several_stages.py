"""Several encode stages under `hplm serve`: the answers of a single one, keys, late requests, and a killed stage."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc
from hplm_client import Client
from tritonclient.utils import InferenceServerException

from hplm.access.keys import new_key
from hplm.access.proof import REFUSED
from hplm.core import wire
from hplm.engine import reference
from hplm.errors import DeadlineError, HplmError
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.runtime.process import SHARED_MEMORY, backlogs_of
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from tests import tiny
from tests.messages import TOLERANCE, looked_up
from tests.triton.failures.serve_process import START_S, Service
from tests.waiting import until

pytestmark = pytest.mark.triton
TEXTS = tiny.sentences(8)
MIDDLE = "hbert_upper_2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cores = sorted(os.sched_getaffinity(0))
    pinned = tuple((cores[number % len(cores)],) for number in range(3))
    return tiny.make_repository(
        tmp_path_factory.mktemp("several"),
        shape=tiny.config(upper_layers=3),
        stage_layers=(1, 1, 1),
        plot_settings={"miss": "backoff"},
        upper_settings={"stage_cores": pinned},
    )


@pytest.fixture(scope="module")
def keys(models: Path) -> dict[str, str]:
    """A key of each tenant."""
    made = {}
    with closing(Registry.open(Store(models.parent / "store"))) as registry:
        for tenant in tiny.TASKS:
            key = new_key()
            registry.add_key(AccessKey(key.id, tenant, "infer", key.sha256(), time.time()))
            made[tenant] = key.text()
    return made


@pytest.fixture(scope="module")
def service(models: Path, keys: dict[str, str]) -> Iterator[Service]:
    made = Service(models, free_ports(), ["--keys"])
    made.launch()
    try:
        until(lambda: made.health()[0] == 200 if is_open(made) else False, START_S)
        yield made
    finally:
        made.process.send_signal(signal.SIGTERM)
        made.process.wait(60)


def is_open(service: Service) -> bool:
    """Whether the health endpoint listens."""
    assert service.process.poll() is None, service.said()
    try:
        service.health("live")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tenants_of_every_task_get_the_references_logits(
    service: Service, models: Path, keys: dict[str, str], protocol: str
) -> None:
    store, base = tiny.opened(models.parent)
    upper, states = base.load_upper(), looked_up(models, TEXTS)
    encoded = base.load_text_encoder().encode(TEXTS)
    asked = [(tenant, text) for tenant in tiny.TASKS for text in TEXTS]
    with Client(getattr(service.ports, f"{protocol}_url"), key=keys) as client:
        answers = client.predict_batch(asked[:32], logits=True)
    members = {name: tiny.load_tenant(store, base, name) for name in tiny.TASKS}
    for (tenant, text), answer in zip(asked, answers, strict=True):
        place = TEXTS.index(text)
        assert answer.logits is not None
        wanted = reference.answered(upper, states[place], members[tenant], encoded[place].tokens)
        np.testing.assert_allclose(answer.logits, wanted, atol=TOLERANCE, rtol=0, err_msg=tenant)


def test_each_encode_stage_tells_what_waits_in_a_file_of_its_own(service: Service) -> None:
    triton = service.pid("triton")
    assert triton is not None
    until(lambda: len({path.name.split(".")[0] for path in SHARED_MEMORY.glob(f"{backlogs_of(triton)}*.json")}) == 3)


def test_early_stages_count_what_they_pass_on(service: Service, keys: dict[str, str]) -> None:
    tenant = next(iter(tiny.TASKS))
    with Client(service.ports.grpc_url, key=keys) as client:
        client.predict(tenant, TEXTS[0], deadline_s=20.0)

    def counted() -> set[str]:
        with urlopen(f"http://127.0.0.1:{service.ports.metrics}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        counts = [line for line in lines if line.startswith("hplm_layers_events_total") and 'event="ok"' in line]
        return set(re.findall(r'model_instance="(hbert_upper_\d)_', "\n".join(counts)))

    until(lambda: counted() == {"hbert_upper_1", MIDDLE})


def test_a_later_stage_answers_no_client_that_calls_it_without_a_proof(service: Service) -> None:
    values = {
        wire.STATES: np.zeros((1, 2, 48), np.float32),
        wire.TOKENS: np.zeros((1, 2, 3), np.int32),
        wire.TENANT: np.array([[b"alpha"]], dtype=np.object_),
    }
    kinds = {wire.STATES: "FP32", wire.TOKENS: "INT32", wire.TENANT: "BYTES"}
    inputs = []
    for name, value in values.items():
        inputs.append(tritonclient.grpc.InferInput(name, value.shape, kinds[name]))
        inputs[-1].set_data_from_numpy(value)
    with closing(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{service.ports.grpc}")) as triton:
        for model in (MIDDLE, "hbert_upper_3"):
            with pytest.raises(InferenceServerException, match=REFUSED):
                triton.infer(model, inputs)


def test_a_request_that_is_late_is_refused(service: Service, keys: dict[str, str]) -> None:
    with Client(service.ports.grpc_url, key=keys) as client, pytest.raises(DeadlineError):
        client.predict("alpha", TEXTS[0], deadline_s=0.0005)


def test_a_killed_stage_is_started_again_beside_the_other_stages(service: Service, keys: dict[str, str]) -> None:
    others = [service.pid(model) for model in ("hbert_plot", "hbert_upper_1", "hbert_upper_3")]
    killed = service.pid(MIDDLE)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    until(lambda: service.pid(MIDDLE) not in (None, killed))
    service.await_ready()
    assert [service.pid(model) for model in ("hbert_plot", "hbert_upper_1", "hbert_upper_3")] == others

    def answers() -> bool:
        with Client(service.ports.http_url, key=keys) as client:
            try:
                return client.predict("beta", TEXTS[0]).label in tiny.TASKS["beta"][1]
            except HplmError:
                return False

    until(answers)
