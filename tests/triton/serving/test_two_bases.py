"""Two bases side by side: one store, registry and worker, a tree of domains and a real server each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hplm_builder.export.model_folders import export
from hplm_builder.tables.plot_tables import build_plot
from hplm_client import Client, ManageClient
from rich.progress import Progress

from hplm import errors
from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings
from hplm.housekeeping import garbage_collection
from hplm.models.base import Base
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.managed import FAST, LEARNING, Place, at_work, await_seen, expected_logits, swapped, write_rows

pytestmark = pytest.mark.triton
QUICK = {"tokens": 400, "warmup_tokens": 400, "top_percent": 20.0, "learning_rate": 0.01}
TEXTS = ["the red cat sings in Paris", "a slow dog runs over the green hill"]


@dataclass(frozen=True)
class Side(Place):
    """Beside a server and its store their base and its root; of its tenants one stands on its domain `law`, one on its root."""

    base: Base
    root: str

    @property
    def name(self) -> str:
        return self.base.config.name

    @property
    def tenants(self) -> tuple[str, str]:
        return f"{self.name}-judge", f"{self.name}-plain"

    def await_seen(self) -> None:
        await_seen(self.server, self.store, self.base, self.root)


def exported(folder: Path, store: Store, base: Base, root: str) -> Path:
    """Model folders over a base."""
    name = base.config.name
    export(
        store,
        folder / name,
        LookupSettings(store="", base=name, table=root, dtype="float32"),
        EncodeSettings(store="", base=name, dtype="float32"),
        ManagerSettings("", name, root, min_corpus_tokens=300, allow_paths=True, data_root=str(folder)),
    )
    return folder / name


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Bases of other sizes and weights; through each one's manager a domain `law` and two tenants, by one worker."""
    folder = tmp_path_factory.mktemp("two-bases")
    store = Store(folder / "store")
    bases = [
        tiny.make_base(store, tiny.config(), seed=0),
        tiny.make_base(store, tiny.config(name="small", hidden_size=32, upper_layers=1), seed=1),
    ]
    roots = [tiny.PLOT, "general-small"]
    for base, root in zip(bases, roots, strict=True):
        build_plot(store, base.config.name, root, tiny.sentences(30), 30.0, Progress(disable=True), dtype="float32")
    with closing(Registry.open(store, create=True)) as registry:
        assert garbage_collection.adopt(store, registry, time.time()).skipped == ()
    rows = write_rows(folder / "rows.csv")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(tiny.sentences(60, seed=3)) + "\n")
    with ExitStack() as stack:
        made = []
        for base, root in zip(bases, roots, strict=True):
            models, log = exported(folder, store, base, root), folder / f"{root}.log"
            server = stack.enter_context(TritonServer(models, free_ports(), log=log, tied=True))
            made.append(Side(server, store, rows, base, root))
        with at_work(store):
            for side in made:
                side.server.wait_ready()
                with ManageClient(side.url("grpc")) as manage:
                    train, text = manage.on_server(rows.name), manage.on_server(corpus.name)
                    judge, plain = side.tenants
                    manage.wait(manage.create_domain("law", corpus=text, settings=QUICK))
                    manage.create_tenant(judge, domain="law", train=train, settings=FAST)
                    manage.wait(manage.create_tenant(plain, train=train, settings=FAST))
        for side in made:
            side.await_seen()
        yield made[0], made[1]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_tenant_is_trained_on_and_served_by_its_own_base_alone(sides: tuple[Side, Side], protocol: str) -> None:
    for own, other in (sides, sides[::-1]):
        with (
            Client(own.url(protocol)) as client,
            Client(other.url(protocol)) as stranger,
            ManageClient(own.url(protocol)) as manage,
        ):
            for tenant, domain in zip(own.tenants, ("law", own.root), strict=True):
                shown = manage.show_tenant(tenant)
                assert (shown.base, shown.domain) == (own.name, domain)
                for text in TEXTS:
                    logits = client.predict(tenant, text, logits=True).logits
                    assert logits is not None
                    wanted = expected_logits(own.store, own.base, tenant, text)
                    np.testing.assert_allclose(logits, wanted, atol=0.01)
                with pytest.raises(errors.UnknownTenantError):
                    stranger.predict(tenant, TEXTS[0])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_name_is_one_tenants_in_the_whole_store_and_a_domains_in_each_tree(
    sides: tuple[Side, Side], protocol: str
) -> None:
    for own, other in (sides, sides[::-1]):
        with ManageClient(own.url(protocol)) as manage:
            with pytest.raises(errors.AlreadyThereError):
                manage.create_tenant(other.tenants[0], train=manage.on_server("rows.csv"), settings=FAST)
            with pytest.raises(errors.UnknownDomainError):
                manage.create_tenant("new", domain=other.root, train=manage.on_server("rows.csv"), settings=FAST)
            assert manage.show_domain("law").parent == own.root
            domains = {(one.base, one.name) for one in manage.list_domains()}
            assert domains == {(side.name, name) for side in sides for name in ("law", side.root)}
            assert [one.name for one in manage.list_domains(own.name)] == sorted(["law", own.root])


def test_one_bases_updates_and_rollback_leave_the_other_alone(sides: tuple[Side, Side]) -> None:
    own, other = sides

    def answers() -> list[npt.NDArray[np.float32]]:
        with Client(other.url("grpc")) as client:
            found = [client.predict(name, text, logits=True).logits for name in other.tenants for text in TEXTS]
        return [logits for logits in found if logits is not None]

    before = answers()
    with ManageClient(own.url("http")) as manage, Client(own.url("http")) as client:
        with at_work(own.store):
            manage.wait(manage.update_domain("law", corpus=manage.on_server("corpus.txt"), settings=QUICK))
            other_rows = manage.on_server(swapped(own.rows).name)
            manage.wait(manage.update_tenant(own.tenants[0], train=other_rows, settings=LEARNING))
        assert manage.show_domain("law").version == 2
        assert manage.show_domain("law", base=other.name).version == 1
        manage.rollback_tenant(own.tenants[0])
        own.await_seen()
        for text in TEXTS:
            logits = client.predict(own.tenants[0], text, logits=True).logits
            assert logits is not None
            wanted = expected_logits(own.store, own.base, own.tenants[0], text)
            np.testing.assert_allclose(logits, wanted, atol=0.05, rtol=0.02)
    for found, was in zip(answers(), before, strict=True):
        np.testing.assert_allclose(found, was, atol=1e-3)


def test_tables_of_one_base_are_not_built_over_anothers(sides: tuple[Side, Side]) -> None:
    own, other = sides
    before = artifact.read(own.store.table(own.root, "root"), "plot-table").fingerprint
    with pytest.raises(errors.DataError, match=f"of base '{own.name}': choose another name"):
        build_plot(own.store, other.name, own.root, TEXTS, 30.0, Progress(disable=True))
    assert artifact.read(own.store.table(own.root, "root"), "plot-table").fingerprint == before


def test_the_store_of_two_bases_is_whole(sides: tuple[Side, Side]) -> None:
    (own, _) = sides
    with closing(Registry.open(own.store)) as registry:
        assert garbage_collection.verify(own.store, registry, time.time()).problems == ()
