"""Another form of lower encoder, brought by an installed package: built, further pretrained and served by the real Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.jobs.local_builds import build_domain
from hplm_client import Client
from hplm_loadtest.scenarios.server_metrics import metric_value
from rich.progress import Progress

from hplm.core.settings import Miss
from hplm.engine import reference
from hplm.models.base import Base
from hplm.plot import table
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.plugins.install import install_centre_token
from tests.waiting import until

pytestmark = pytest.mark.triton
# Some n-grams of the first text are in the root's table, of the second in the domain's alone, of the last in neither.
CORPUS = tiny.sentences(60, 7)
TEXTS = [tiny.sentences(50)[3], CORPUS[0], "Bob and Eve and Tom and Anna sleeps sings runs over under Oslo Rome"]
DOMAIN = DomainSettings(total_tokens=600, warmup_tokens=200, learning_rate=2e-3, top_percent=50.0, min_corpus_tokens=10)


@dataclass(frozen=True)
class Place:
    """A server over a base of the form `centre`: the tenants of `tiny` over the root, `judge` over the domain `law`."""

    server: TritonServer
    store: Store
    base: Base
    miss: Miss

    def expected(self, tenant: str, text: str) -> np.ndarray:
        """Return the slow reference's logits over the tenant's own lineage."""
        with closing(Registry.open(self.store)) as registry:
            version = registry.tenant(tenant).current
            folders = [above.path for above in registry.lineage(version.domain_version_id)]
        levels, lower = reference.lineage(self.store, self.base, folders, self.miss)
        encoded = self.base.load_text_encoder().encode([text])[0]
        merged = reference.merged(encoded.ids.tolist(), self.base.config, levels, lower)
        made = tiny.load_tenant(self.store, self.base, tenant)
        return reference.answered(self.base.load_upper(), merged, made, encoded.tokens)


@pytest.fixture(scope="module", params=["compute", "backoff"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, miss = tmp_path_factory.mktemp("centre"), request.param
    with pytest.MonkeyPatch.context() as patch:
        install_centre_token(folder / "venv", patch)
        shape = replace(tiny.config(window=5), lower_form="centre", vectors_per_ngram=1)
        models = tiny.make_repository(folder, shape=shape, miss=miss)
        store, base = tiny.opened(folder)
        (folder / "law.txt").write_text("\n".join(CORPUS) + "\n")

        build_domain(store, "tiny", None, "law", folder / "law.txt", DOMAIN, Progress(disable=True))
        tiny.publish(store, base, "law", tiny.tenant_of(base, "judge", 9, like="alpha"))
        with TritonServer(models, free_ports(), log=folder / "triton.log") as server:
            server.wait_ready()
            yield Place(server, store, base, miss)


def test_tables_of_the_form_hold_one_vector_an_ngram(place: Place) -> None:
    root = table.load(place.store.table(tiny.PLOT, "root"), fingerprint=place.base.fingerprint)
    assert root.vectors_per_ngram == 1
    assert root.values.shape == (len(root.keys), 1, place.base.config.hidden_size)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_hits_and_misses_of_root_and_domain_get_the_references_logits(place: Place, protocol: str) -> None:
    pairs = [(tenant, text) for text in TEXTS for tenant in ("judge", *tiny.TASKS)]
    with Client(getattr(place.server.ports, f"{protocol}_url")) as client:
        # Twice: what was computed is remembered then.
        for answer in (*client.predict_many(pairs, logits=True), *client.predict_many(pairs, logits=True)):
            assert answer.logits is not None
            np.testing.assert_allclose(answer.logits, place.expected(answer.tenant, answer.text), atol=0.05, rtol=0.02)
    levels = {"compute": ("computed", "overlay"), "backoff": ("bigram", "unigram")}[place.miss]
    for level in ("law", "root", *levels):
        until(lambda level=level: metric_value(place.server, f'hplm_plot_windows_total{{level="{level}"}}') > 0)


def test_a_domain_of_the_form_changes_its_tenants_hidden_states(place: Place) -> None:
    with closing(Registry.open(place.store)) as registry:
        law = registry.lineage(registry.current_domain("tiny", "law").id)
    ids = place.base.load_text_encoder().encode([CORPUS[0]])[0].ids.tolist()
    states = []
    for lineage in (law, law[1:]):
        levels, lower = reference.lineage(place.store, place.base, [above.path for above in lineage], place.miss)
        states.append(reference.merged(ids, place.base.config, levels, lower).numpy())
    assert np.abs(states[0] - states[1]).max() > 1e-3
