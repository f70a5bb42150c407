"""Domains on the real server: each tenant over its own branch, updates while asked, whatever other domains do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.jobs.local_builds import build_domain
from hplm_client import Client
from rich.progress import Progress

from hplm import errors
from hplm.core.text import TextEncoder
from hplm.engine import reference
from hplm.models.base import Base
from hplm.registry.catalog import POLL_EVERY_S
from hplm.registry.records import DomainVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.managed import await_seen, expected_logits

pytestmark = pytest.mark.triton
MOVES = 10  # there and back
# A rate at which a text differs between domains by more than the tolerance of its answers.
SETTINGS = DomainSettings(
    total_tokens=600, warmup_tokens=200, learning_rate=2e-3, top_percent=20.0, min_corpus_tokens=10
)


@dataclass(frozen=True)
class Place:
    """A server over a tree of domains: `law` over the root, `tax` over `law`, `art` over the root, `map` without a table."""

    server: TritonServer
    store: Store
    base: Base

    def grow(self, name: str, parent: str, seed: int, settings: DomainSettings | None = None) -> DomainVersion:
        """Publish a domain's next version."""
        corpus = self.store.root.parent / f"{name}-{seed}.txt"
        corpus.write_text("\n".join(tiny.sentences(60, seed)) + "\n")
        build_domain(
            self.store, "tiny", parent, name, corpus, settings or SETTINGS, Progress(disable=True), device="cpu"
        )
        with closing(Registry.open(self.store)) as registry:
            return registry.current_domain("tiny", name)

    def settle(self, tenant: str, domain: str, seed: int) -> None:
        """Publish a tenant's next version over a domain's current one."""
        made = tiny.tenant_of(self.base, tenant, seed, like="alpha")
        version = tiny.publish(self.store, self.base, domain, made)
        with closing(Registry.open(self.store)) as registry:
            assert version.domain_version_id == registry.current_domain("tiny", domain).id

    def await_seen(self) -> None:
        """Until whatever was published is served."""
        await_seen(self.server, self.store, self.base)

    def expected(self, tenant: str, text: str) -> np.ndarray:
        """The slow reference over the tenant's own lineage."""
        return expected_logits(self.store, self.base, tenant, text)


TEXTS = ["the red cat sings in Paris", "Anna", "a slow dog runs over the green hill and under the river " * 3]
TENANTS = {"judge": "law", "clerk": "law", "taxman": "tax", "painter": "art", "scout": "map", "plain": tiny.PLOT}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("domains")
    # One open domain less than there are: each is closed and opened again.
    models = tiny.make_repository(folder, plot_settings={"most_domains": 4})
    with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
        server.wait_ready()
        made = Place(server, *tiny.opened(folder))
        for seed, (name, parent) in enumerate((("law", tiny.PLOT), ("tax", "law"), ("art", tiny.PLOT))):
            made.grow(name, parent, seed)
        made.grow("map", tiny.PLOT, 3, replace(SETTINGS, top_percent=0.0))
        for seed, (tenant, domain) in enumerate(TENANTS.items()):
            made.settle(tenant, domain, seed)
        made.await_seen()
        yield made


def check(place: Place, tenants: list[str]) -> None:
    pairs = [(tenant, text) for text in TEXTS for tenant in tenants]
    with Client(place.server.ports.grpc_url) as client:
        for answer in client.predict_many(pairs, logits=True):
            assert answer.logits is not None
            np.testing.assert_allclose(answer.logits, place.expected(answer.tenant, answer.text), atol=0.05, rtol=0.02)


def test_tenants_of_a_tree_of_domains_published_while_serving_get_the_references_logits(place: Place) -> None:
    check(place, [*TENANTS, *tiny.TASKS])


def test_the_same_text_reads_differently_in_two_domains(place: Place) -> None:
    assert np.abs(place.expected("judge", TEXTS[2]) - place.expected("plain", TEXTS[2])).max() > 0.1
    states = []
    for tenant in ("judge", "taxman", "painter", "scout", "plain"):
        with closing(Registry.open(place.store)) as registry:
            version = registry.tenant(tenant).current
            folders = [one.path for one in registry.lineage(version.domain_version_id)]
        levels, lower = reference.lineage(place.store, place.base, folders, "compute")
        ids = TextEncoder(place.base.tokenizer_path, 40).encode([TEXTS[2]])[0].ids.tolist()
        states.append(reference.merged(ids, place.base.config, levels, lower).numpy())
    for i, one in enumerate(states):
        for other in states[i + 1 :]:
            assert np.abs(one - other).max() > 1e-3


def test_a_domains_new_version_changes_nothing_for_its_tenants_until_they_are_updated(place: Place) -> None:
    before = {tenant: place.expected(tenant, TEXTS[0]) for tenant in ("judge", "clerk")}
    place.grow("law", tiny.PLOT, 99)
    place.await_seen()
    check(place, ["judge", "clerk", "taxman"])
    place.settle("judge", "law", 0)
    place.await_seen()
    check(place, ["judge", "clerk", "taxman"])
    # Same adapter and head as before over another version of the domain.
    assert np.abs(place.expected("judge", TEXTS[0]) - before["judge"]).max() > 1e-3
    np.testing.assert_array_equal(place.expected("clerk", TEXTS[0]), before["clerk"])


def test_a_tenant_moved_between_domains_while_asked_answers_over_the_domain_of_its_version(place: Place) -> None:
    text, homes = TEXTS[2], ("law", "art")
    own, crossed = [], []
    for seed, home in enumerate(homes):
        place.settle("mover", home, seed)
        own.append(place.expected("mover", text))
        # What the adapters of one version would say of the features of the other.
        crossed.append(expected_logits(place.store, place.base, "mover", text, homes[1 - seed]))
    assert all(np.abs(one - other).max() > 0.1 for one in own for other in crossed)
    assert np.abs(own[0] - own[1]).max() > 0.1
    place.await_seen()
    told: list[np.ndarray] = []
    over = threading.Event()

    def ask() -> None:
        with Client(place.server.ports.grpc_url) as client:
            while not over.is_set():
                told.extend(answer.logits for answer in client.predict_many([("mover", text)] * 16, logits=True))

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for change in range(2 * MOVES):
                place.settle("mover", homes[change % 2], change % 2)
                time.sleep(POLL_EVERY_S)
        finally:
            over.set()
        for one in asking:
            one.result()
    nearest = np.array([[np.abs(answer - one).max() for one in own] for answer in told])
    assert nearest.min(axis=1).max() < 0.05
    assert set(nearest.argmin(axis=1)) == {0, 1}


def test_a_domain_whose_files_are_broken_fails_its_own_tenants_alone(place: Place, tmp_path: Path) -> None:
    broken = place.grow("maths", tiny.PLOT, 7)
    (place.store.path(broken.path) / "branch" / "manifest.json").write_text("{}")
    place.settle("algebra", "maths", 3)
    place.await_seen()
    with Client(place.server.ports.http_url) as client:
        with pytest.raises(errors.CorruptArtifactError) as caught:
            client.predict("algebra", TEXTS[0])
        assert str(place.store.root) not in str(caught.value)
    check(place, ["plain", "painter"])
