"""Tenants with students on a real Triton: every answer is that of its number of students, which follows the load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hplm_client import AsyncClient, Client
from hplm_client.prediction import Prediction
from hplm_loadtest.scenarios.server_metrics import metric_value

from hplm import errors
from hplm.adapters.students import Form
from hplm.adapters.tenant import Tenant
from hplm.core.text import TextOrPair
from hplm.tasks.task import softmax
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.messages import TOLERANCE
from tests.triton.students.making import ADAPTING, LEAST, MODELS, TEMPERATURE, Making, Offline, make_models
from tests.waiting import until

pytestmark = pytest.mark.triton

TEXTS: list[TextOrPair] = [*tiny.sentences(6, seed=5, words=(2, 14))]
PAIRS: list[TextOrPair] = list(
    zip(tiny.sentences(4, seed=6, words=(2, 8)), tiny.sentences(4, seed=7, words=(2, 8)), strict=True)
)
MOST = 4
MOST_TEXTS = 60
# Name, task like, students, form: classifications, a regression, pairs, own layers, and a tenant without students.
KINDS: tuple[tuple[str, str, int, Form], ...] = (
    ("a", "alpha", MOST, "shared"),
    ("b", "beta", 2, "own"),
    ("c", "follows", MOST, "shared"),
    ("d", "grade", 3, "shared"),
    ("plain", "alpha", 1, "shared"),
)


@dataclass
class Served:
    """A running server, its tenants by name, and what each number of their students answers to each text."""

    making: Making
    server: TritonServer
    tenants: dict[str, tuple[str, Tenant]]
    wanted: dict[tuple[str, TextOrPair], list[npt.NDArray[np.float32]]]
    offline: Offline
    log: Path

    def check(self, answer: Prediction) -> None:
        """Fail unless the answer is the one that its tenant's number of students must give."""
        text = answer.text if answer.pair is None else (answer.text, answer.pair)
        wanted = self.wanted[answer.tenant, text]
        assert answer.students in range(1, len(wanted) + 1)
        assert answer.students is not None
        assert answer.logits is not None
        np.testing.assert_allclose(
            answer.logits, wanted[answer.students - 1], atol=10 * TOLERANCE, err_msg=f"{answer.tenant}: {text}"
        )

    def requests(self, base: str) -> list[tuple[str, ...]]:
        """Every text of every tenant over a trunk, tenants in turns."""
        return [
            (tenant, text) if isinstance(text, str) else (tenant, *text)
            for tenant, text in self.wanted
            if self.tenants[tenant][0] == base
        ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = make_models(tmp_path_factory.mktemp("students"))
    making, made = Making.over(models.parent), {}
    for seed, base in enumerate(MODELS):
        for number, (name, like, count, form) in enumerate(KINDS):
            named = f"{name}-{base}"
            made[named] = base, making.tenant(named, base, like, count, 100 * seed + number, form)
    offline = Offline(making)
    texts = [(name, text) for text in range(6) for name, (_, tenant) in made.items() if text < len(_texts_of(tenant))]
    keyed = [(name, _texts_of(made[name][1])[text]) for name, text in texts]
    wanted = {(name, text): offline.prefixes(*made[name], text) for name, text in keyed}
    log = models.parent / "triton.log"
    with TritonServer(models, free_ports(), log=log) as running:
        running.wait_ready()
        yield Served(making, running, made, wanted, offline, log)


def _texts_of(tenant: Tenant) -> list[TextOrPair]:
    return PAIRS if tenant.card.texts == 2 else TEXTS


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.server.ports.grpc_url, concurrency=8) as made:
        yield made


def flood(
    served: Served, requests: Sequence[tuple[str, ...]], in_flight: int, texts: int = MOST_TEXTS
) -> list[Prediction]:
    """The answers to requests, sent `texts` at a time and `in_flight` times at once.

    All texts of a message wait at once, however fast this machine is.
    """
    alike = [list(group) for _, group in groupby(sorted(requests, key=len), key=len)]
    messages = [group[first : first + texts] for group in alike for first in range(0, len(group), texts)]

    async def ask() -> list[list[Prediction]]:
        async with AsyncClient(served.server.ports.grpc_url, concurrency=in_flight, timeout_s=60) as client:
            return await asyncio.gather(*(client.predict_batch(one, logits=True) for one in messages))

    return [answer for answers in asyncio.run(ask()) for answer in answers]


def is_calm(served: Served, client: Client) -> bool:
    """Whether all students answer again."""
    return client.predict("a-tiny", str(TEXTS[0])).students == MOST


def test_with_tenants_mixed_each_number_of_students_answers_as_computed_offline(served: Served, client: Client) -> None:
    told = set()
    names = [name for name, (base, _) in served.tenants.items() if base == LEAST]
    for least in range(MOST):
        for number, name in enumerate(names):
            # Neighbours in a batch have different numbers.
            served.making.set_least(name, 1 + (least + number) % MOST)
        # The numbers are set in this order. The last tenant has no students, so the tenant before it tells that all are set.
        until(lambda least=least: client.predict("d-whole", str(TEXTS[0])).students == min(3, 1 + (least + 3) % MOST))  # type: ignore[misc]
        for answer in client.predict_many(served.requests(LEAST), logits=True):
            served.check(answer)
            told.add((answer.tenant, answer.students))
    counts = {f"{name}-{LEAST}": count for name, _, count, _ in KINDS}
    assert told == {(name, number) for name, count in counts.items() for number in range(1, count + 1)}


def test_the_number_follows_a_burst_and_no_answer_is_wrong_lost_or_crossed(served: Served, client: Client) -> None:
    until(lambda: is_calm(served, client))
    requests = served.requests(ADAPTING)
    most = {f"{name}-{ADAPTING}": count for name, _, count, _ in KINDS}
    for request in requests:
        answer = client.predict(*request, logits=True)
        assert (answer.tenant, answer.text, answer.students) == (*request[:2], most[request[0]])
        served.check(answer)
    burst = flood(served, requests * 20, in_flight=4)
    for request, answer in zip(sorted(requests * 20, key=len), burst, strict=True):
        assert (answer.tenant, answer.text) == request[:2]
        served.check(answer)
    told = {answer.students for answer in burst if answer.tenant == "a-tiny"}
    assert told >= {1, 2}
    until(lambda: is_calm(served, client))


def test_under_a_steady_load_the_number_stays(served: Served, client: Client) -> None:
    until(lambda: is_calm(served, client))
    requests = [request for request in served.requests(ADAPTING) if request[0] == "a-tiny"]
    # Three texts at once fit in a batch, so all students answer them.
    assert {answer.students for answer in flood(served, requests * 20, in_flight=3, texts=1)} == {MOST}
    # Of hundreds at once more wait than a batch holds, so one student answers them, and the number does not swing.
    told = [answer.students for answer in flood(served, requests * 200, in_flight=6)]
    assert [number for number, _ in groupby(told[-600:])] == [1]


def test_a_least_number_holds_in_a_burst_and_is_served_without_training(served: Served) -> None:
    requests = [request for request in served.requests(ADAPTING) if request[0] in ("a-tiny", "c-tiny")]

    def students_of(tenant: str) -> set[int | None]:
        answers = flood(served, requests * 10, in_flight=4)
        for answer in answers:
            served.check(answer)
        return {answer.students for answer in answers if answer.tenant == tenant}

    served.making.set_least("c-tiny", 3)
    until(lambda: 1 not in students_of("c-tiny"))
    assert students_of("c-tiny") <= {3, 4}
    assert 1 in students_of("a-tiny")
    served.making.set_least("c-tiny", 1)
    until(lambda: 1 in students_of("c-tiny"))


def test_a_damaged_student_file_is_refused_and_named_in_the_log_and_others_are_served(
    served: Served, client: Client
) -> None:
    served.making.tenant("hurt", ADAPTING, "alpha", MOST, 50)
    folder = tiny.folder_of(served.making.store, "hurt")
    tiny.flip_last_byte(folder / "weights.safetensors")
    until(lambda: isinstance(error_of(client, "hurt"), errors.CorruptArtifactError))
    served.check(client.predict("a-tiny", str(TEXTS[0]), logits=True))
    assert re.search(rf"tenant hurt: .*{re.escape(str(folder))}", served.log.read_text())


def error_of(client: Client, tenant: str) -> Exception | None:
    try:
        client.predict(tenant, "red")
    except errors.HplmError as error:
        return error
    return None


def test_a_level_of_a_cascade_may_have_students(served: Served, client: Client) -> None:
    bases = served.making.bases
    small = tiny.students_of(bases[ADAPTING], "layered", 70, MOST)
    large = tiny.tenant_of(bases[LEAST], "layered", 71, "alpha")
    # Between the confidences of the two middle texts, so that some texts go to the second level.
    logits = [served.offline.prefixes(ADAPTING, small, text)[-1][0] for text in TEXTS]
    served.making.cascade(small, large, cut_off=float(np.median([softmax(one / TEMPERATURE).max() for one in logits])))
    until(lambda: error_of(client, "layered") is None and is_calm(served, client))
    answers = [client.predict("layered", str(text), logits=True) for text in TEXTS * 2]
    assert {answer.level for answer in answers} == {ADAPTING, LEAST}
    for answer in answers:
        tenant = small if answer.level == ADAPTING else large
        assert answer.students == tenant.card.students
        assert answer.logits is not None
        wanted = served.offline.prefixes(str(answer.level), tenant, answer.text)[-1]
        np.testing.assert_allclose(answer.logits, wanted, atol=10 * TOLERANCE)


def test_metrics_count_answers_by_their_number_of_students(served: Served, client: Client) -> None:
    before = metric_value(served.server, f'hplm_students_answers_total{{students="{MOST}"}}')
    until(lambda: is_calm(served, client))
    until(lambda: metric_value(served.server, f'hplm_students_answers_total{{students="{MOST}"}}') > before)
    assert metric_value(served.server, 'hplm_students_cap_changes_total{direction="fewer"}') >= MOST - 1
