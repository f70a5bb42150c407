"""Two bases in one server: one repository, store, registry, manager and worker, and a tree of domains for each."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hplm_builder.export.model_folders import export
from hplm_builder.tables.plot_tables import build_plot
from hplm_client import AsyncClient, Client, ManageClient
from rich.progress import Progress

from hplm import errors
from hplm.core.settings import EncodeSettings, LookupSettings, ManagerSettings
from hplm.housekeeping import garbage_collection
from hplm.models.base import Base
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.launcher.ports import Ports, free_ports
from hplm.triton.workarounds.dead_stubs import stubs_over
from tests import tiny
from tests.managed import FAST, LEARNING, at_work, await_seen_at, expected_logits, swapped, write_colours, write_rows
from tests.unit.hplm.profiles.made_profiles import keep_profile
from tests.waiting import until

pytestmark = pytest.mark.triton
QUICK = {"tokens": 400, "warmup_tokens": 400, "top_percent": 20.0, "learning_rate": 0.01}
TEXTS = ["the red cat sings in Paris", "a slow dog runs over the green hill"]
# Settings with which a tenant learns the texts of `write_colours`.
COLOURS = {"epochs": 3, "learning_rates": [0.02], "adapter_width": "narrow"}
# Tenants of each base beside the two that a job made.
FLEET = 8
ASKED = 400


@dataclass(frozen=True)
class Side:
    """A base, its root, and the model that clients call. The first tenant stands on domain `law`, the second on the root."""

    base: Base
    root: str
    model: str

    @property
    def name(self) -> str:
        return self.base.config.name

    @property
    def tenants(self) -> tuple[str, str]:
        return f"{self.name}-judge", f"{self.name}-plain"

    @property
    def fleet(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(FLEET)]


@dataclass
class Place:
    """`hplm serve` over the repository, the store, the rows that tenants are trained on, and the two bases."""

    process: subprocess.Popen[bytes]
    ports: Ports
    models: Path
    store: Store
    rows: Path
    sides: tuple[Side, Side]

    def url(self, protocol: str) -> str:
        return self.ports.http_url if protocol == "http" else self.ports.grpc_url

    def client(self, side: Side, protocol: str = "grpc") -> Client:
        return Client(self.url(protocol), model=side.model)

    def manage(self, protocol: str = "grpc") -> ManageClient:
        return ManageClient(self.url(protocol))

    def is_ready(self, model: str) -> bool:
        with Client(self.ports.grpc_url, model=model) as client:
            try:
                return client.is_ready()
            except errors.UnreachableError:
                return False

    def await_seen(self, side: Side) -> None:
        await_seen_at(self.ports.grpc_url, self.store, side.base, side.root, side.model)


def add(folder: Path, store: Store, side: Side, manager: ManagerSettings | None) -> None:
    """Export a base beside the other bases of the repository."""
    export(
        store,
        folder / "models",
        LookupSettings(store="", base=side.name, table=side.root, dtype="float32"),
        EncodeSettings(store="", base=side.name, dtype="float32"),
        manager,
        name=side.model,
    )


def make_side(store: Store, model: str, name: str, root: str, seed: int, hidden_size: int = 32) -> Side:
    """A base of its own size and weights, its root, and its fleet."""
    base = tiny.make_base(store, tiny.config(name=name, hidden_size=hidden_size, upper_layers=1 + seed % 2), seed=seed)
    build_plot(store, name, root, tiny.sentences(30), 30.0, Progress(disable=True), dtype="float32")
    side = Side(base, root, model)
    for number, tenant in enumerate(side.fleet):
        tiny.make_tenant(store, base, tenant, 100 * seed + number, like="alpha", domain=root)
    return side


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Through the one manager a domain `law` and two tenants over each of two bases."""
    folder = tmp_path_factory.mktemp("two-bases")
    store = Store(folder / "store")
    sides = (
        make_side(store, "hbert", "tiny", tiny.PLOT, 1, hidden_size=48),
        make_side(store, "other", "small", "general-small", 2),
    )
    settings = ManagerSettings("", "", "", min_corpus_tokens=300, allow_paths=True, data_root=str(folder))
    for side in sides:
        add(folder, store, side, settings)
    rows = write_rows(folder / "rows.csv")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(tiny.sentences(60, seed=3)) + "\n")
    ports = free_ports()
    flags = [f"--{kind}-port={getattr(ports, kind)}" for kind in ("http", "grpc", "metrics", "health")]
    command = [sys.executable, "-m", "hplm_cli", "serve", "--no-worker", "--models", str(folder / "models"), *flags]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    made = Place(process, ports, folder / "models", store, rows, sides)
    try:
        until(lambda: process.poll() is not None or all(map(made.is_ready, ("hbert", "other"))), 240)
        assert process.poll() is None, (folder / "serve.log").read_text()
        with at_work(store), made.manage() as manage:
            train, text = manage.on_server(rows.name), manage.on_server(corpus.name)
            for side in sides:
                judge, plain = side.tenants
                manage.wait(manage.create_domain("law", base=side.name, corpus=text, settings=QUICK))
                manage.create_tenant(judge, base=side.name, domain="law", train=train, settings=FAST)
                manage.wait(manage.create_tenant(plain, base=side.name, train=train, settings=FAST))
        for side in sides:
            made.await_seen(side)
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_tenant_is_trained_on_its_base_and_is_unknown_to_the_model_of_another(place: Place, protocol: str) -> None:
    for own, other in (place.sides, place.sides[::-1]):
        with (
            place.client(own, protocol) as client,
            place.client(other, protocol) as stranger,
            place.manage(protocol) as manage,
        ):
            for tenant, domain in zip(own.tenants, ("law", own.root), strict=True):
                shown = manage.show_tenant(tenant)
                assert (shown.base, shown.domain) == (own.name, domain)
                for text in TEXTS:
                    logits = client.predict(tenant, text, logits=True).logits
                    assert logits is not None
                    wanted = expected_logits(place.store, own.base, tenant, text)
                    np.testing.assert_allclose(logits, wanted, atol=0.01)
                with pytest.raises(errors.UnknownTenantError) as not_here:
                    stranger.predict(tenant, TEXTS[0])
                with pytest.raises(errors.UnknownTenantError) as nowhere:
                    stranger.predict(f"{tenant}-2", TEXTS[0])
                assert str(not_here.value) == str(nowhere.value).replace(f"{tenant}-2", tenant)


def test_no_answers_are_crossed_between_bases_under_mixed_load(place: Place) -> None:
    rng = np.random.default_rng(0)
    wanted = {
        (side.model, tenant, text): expected_logits(place.store, side.base, tenant, text)
        for side in place.sides
        for tenant in side.fleet
        for text in TEXTS
    }
    asked = [list(wanted)[number] for number in rng.integers(len(wanted), size=ASKED)]

    async def ask() -> list[npt.NDArray[np.float32] | None]:
        clients = {
            (side.model, protocol): AsyncClient(place.url(protocol), model=side.model)
            for side in place.sides
            for protocol in ("http", "grpc")
        }
        requests = [
            clients[model, ("http", "grpc")[number % 2]].predict(tenant, text, logits=True)
            for number, (model, tenant, text) in enumerate(asked)
        ]
        answers = await asyncio.gather(*requests)
        for client in clients.values():
            await client.close()
        return [answer.logits for answer in answers]

    for key, logits in zip(asked, asyncio.run(ask()), strict=True):
        assert logits is not None
        np.testing.assert_allclose(logits, wanted[key], atol=0.01, err_msg=str(key))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_name_is_one_tenants_in_the_whole_store_and_a_domains_in_each_tree(place: Place, protocol: str) -> None:
    train = {"path": place.rows.name}
    for own, other in (place.sides, place.sides[::-1]):
        with place.manage(protocol) as manage:
            with pytest.raises(errors.UnknownDomainError):
                manage.create_tenant("new", base=own.name, domain=other.root, train=train, settings=FAST)
            assert manage.show_domain("law", base=own.name).parent == own.root
            assert [one.name for one in manage.list_domains(own.name)] == sorted(["law", own.root])
    with place.manage(protocol) as manage:
        domains = {(one.base, one.name) for one in manage.list_domains()}
        assert domains == {(side.name, name) for side in place.sides for name in ("law", side.root)}
        # The default base is that of the model hbert.
        assert manage.show_domain("law").base == "tiny"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_base_that_is_not_served_is_refused_with_those_that_are(place: Place, protocol: str) -> None:
    train, corpus = {"path": place.rows.name}, {"path": "corpus.txt"}
    with place.manage(protocol) as manage:
        for ask in (
            lambda: manage.create_tenant("new", base="big", train=train),
            lambda: manage.create_domain("new", base="big", corpus=corpus),
            lambda: manage.update_domain("law", base="big", corpus=corpus),
            lambda: manage.delete_domain("law", base="big"),
            lambda: manage.list_domains("big"),
        ):
            with pytest.raises(errors.BadManageRequestError, match="does not serve base 'big'"):
                ask()


def test_one_bases_updates_and_rollback_leave_the_other_alone(place: Place) -> None:
    own, other = place.sides

    def answers() -> list[npt.NDArray[np.float32]]:
        with place.client(other) as client:
            found = [client.predict(name, text, logits=True).logits for name in other.tenants for text in TEXTS]
        return [logits for logits in found if logits is not None]

    before = answers()
    with place.manage("http") as manage, place.client(own, "http") as client:
        with at_work(place.store):
            manage.wait(manage.update_domain("law", corpus=manage.on_server("corpus.txt"), settings=QUICK))
            other_rows = manage.on_server(swapped(place.rows).name)
            manage.wait(manage.update_tenant(own.tenants[0], train=other_rows, settings=LEARNING))
        assert manage.show_domain("law").version == 2
        assert manage.show_domain("law", base=other.name).version == 1
        manage.rollback_tenant(own.tenants[0])
        place.await_seen(own)
        for text in TEXTS:
            logits = client.predict(own.tenants[0], text, logits=True).logits
            assert logits is not None
            wanted = expected_logits(place.store, own.base, own.tenants[0], text)
            np.testing.assert_allclose(logits, wanted, atol=0.05, rtol=0.02)
    for found, was in zip(answers(), before, strict=True):
        np.testing.assert_allclose(found, was, atol=1e-3)


def test_one_tenant_is_served_over_both_bases_by_each_ones_model(place: Place) -> None:
    own, other = place.sides
    tenant = own.tenants[1]
    with place.client(own) as client, place.client(other) as stranger, place.manage() as manage:
        before = client.predict(tenant, TEXTS[0], logits=True).logits
        with at_work(place.store):
            train = manage.on_server(place.rows.name)
            manage.wait(manage.create_tenant(tenant, base=other.name, train=train, settings=FAST))
        place.await_seen(other)
        assert manage.show_tenant(tenant).bases.keys() == {own.name, other.name}
        assert stranger.predict(tenant, TEXTS[0]).label in ("cat", "none")
        np.testing.assert_array_equal(client.predict(tenant, TEXTS[0], logits=True).logits, before)
        manage.delete_tenant(tenant, base=other.name)
        place.await_seen(other)
        with pytest.raises(errors.UnknownTenantError):
            stranger.predict(tenant, TEXTS[0])
        np.testing.assert_array_equal(client.predict(tenant, TEXTS[0], logits=True).logits, before)


def test_a_cascade_is_created_keeps_its_promise_through_an_update_that_breaks_it_and_is_rolled_back(
    place: Place,
) -> None:
    folder, levels = place.rows.parent, [side.name for side in place.sides]
    for side, ms in zip(place.sides, (1.0, 5.0), strict=True):
        keep_profile(place.store, side.base, ms)
    train, proof = (
        write_colours(folder / f"{name}.csv", seed=seed) for seed, name in enumerate(("colours", "colours-proof"))
    )
    broken = write_colours(folder / "colours-broken.csv", seed=3, is_swapped=True)

    def rights() -> float:
        """The share of right answers to the proof, over the tenant's default base."""
        rows = [line.rsplit(",", 1) for line in proof.read_text().splitlines()[1:]]
        with Client(place.ports.grpc_url) as client:
            return float(np.mean([client.predict("acme", text).label == label for text, label in rows]))

    def current() -> dict[str, int]:
        return manage.show_tenant("acme").bases

    with place.manage() as manage, at_work(place.store):
        files = {"train": manage.on_server(train.name), "proof": manage.on_server(proof.name)}
        job = manage.create_tenant("acme", levels=levels, accuracy=0.7, settings=COLOURS, **files)
        result = manage.wait(job).result
        assert result is not None
        assert result["promise"]["accuracy"] >= 0.7
        place.await_seen(place.sides[0])
        place.await_seen(place.sides[1])
        assert rights() > 0.7
        first = current()
        files["train"] = manage.on_server(broken.name)
        update = manage.wait(
            manage.update_tenant("acme", settings={**COLOURS, "learning_rates": [0.05]}, **files)
        ).result
        assert update is not None
        assert (update["published"], current()) == (False, first)
        assert "nearest offer" in update["why"]
        assert rights() > 0.7
        with pytest.raises(errors.ContractError, match="nearest offer"):
            manage.wait(manage.target_tenant("acme", latency_ms=0.1))
        manage.wait(manage.target_tenant("acme", accuracy=0.6))
        shown = manage.show_tenant("acme")
        assert shown.cascade is not None
        assert shown.cascade.in_force
        assert max(shown.bases.values()) > max(first.values())
        manage.rollback_tenant("acme")
        assert current() == first
        manage.delete_tenant("acme")


@dataclass
class Load:
    """Requests to a base, one after the other: the number of answers, and the errors of refused requests."""

    answered: int = 0
    refused: list[errors.HplmError] = field(default_factory=list)

    def run(self, place: Place, side: Side, done: threading.Event) -> None:
        with place.client(side) as client:
            while not done.is_set():
                try:
                    client.predict(side.fleet[self.answered % FLEET], TEXTS[0])
                    self.answered += 1
                except errors.HplmError as error:
                    self.refused.append(error)


@contextmanager
def under_load(place: Place, side: Side) -> Iterator[Load]:
    load, done = Load(), threading.Event()
    thread = threading.Thread(target=load.run, args=(place, side, done))
    thread.start()
    try:
        until(lambda: load.answered > 0)
        yield load
    finally:
        done.set()
        thread.join()


def run_base(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `hplm base`."""
    command = [sys.executable, "-m", "hplm_cli", "base", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_base_is_added_and_deleted_while_requests_run(place: Place) -> None:
    third = make_side(place.store, "late", "third", "general-third", 4)
    loads = [under_load(place, side) for side in place.sides]
    with loads[0] as first, loads[1] as second:
        add(place.models.parent, place.store, third, ManagerSettings("", "", ""))
        until(lambda: place.is_ready("late"))
        with place.client(third) as client, place.manage() as manage:
            logits = client.predict(third.fleet[0], TEXTS[0], logits=True).logits
            assert logits is not None
            wanted = expected_logits(place.store, third.base, third.fleet[0], TEXTS[0])
            np.testing.assert_allclose(logits, wanted, atol=0.01)
            listed = {base.model: base for base in manage.list_bases()}
            assert list(listed) == ["hbert", "late", "other"]
            assert (listed["late"].base, listed["late"].kind, listed["late"].tenants) == (
                "third",
                "hierarchical",
                FLEET,
            )
            # The sizes of processes are known, and that of a process is some megabytes at least.
            assert set(listed["late"].process_bytes) == {"late_plot", "late_upper"}
            assert min(listed["late"].process_bytes.values()) > 1e6
            # Its settings are known to the manager, which has not started again.
            with pytest.raises(errors.UnknownDomainError):
                manage.show_domain("law", base="third")
        in_use = run_base("delete", "late", "--from-store", "--models", str(place.models))
        assert in_use.returncode == 1
        assert f"base 'third' cannot be deleted: {FLEET} tenants stand on it" in in_use.stderr
        with under_load(place, third) as last:
            assert run_base("delete", "late", "--yes", "--models", str(place.models)).returncode == 0
            until(lambda: not place.is_ready("late"))
            until(lambda: bool(last.refused))
            until(lambda: not {"late_plot", "late_upper"} & stubs_over(place.models).keys())
        # Requests under way were answered. Later requests are refused, because there is no such model.
        assert {type(error) for error in last.refused} == {errors.UnreachableError}
        assert all("unknown model" in str(error) for error in last.refused)
        with (
            place.manage() as manage,
            pytest.raises(errors.BadManageRequestError, match="does not serve base 'third'"),
        ):
            manage.show_domain("general-third", base="third")
    for load in (first, second):
        assert load.answered > 0
        assert load.refused == []


def test_the_death_of_a_stage_of_one_base_leaves_the_other_serving(place: Place) -> None:
    own, other = place.sides
    with under_load(place, own) as load, place.client(other) as client:
        (pid,) = stubs_over(place.models)["other_upper"]
        before = load.answered
        os.kill(pid, signal.SIGKILL)

        def answers() -> bool:
            try:
                return client.predict(other.fleet[0], TEXTS[0], deadline_s=2.0).label is not None
            except errors.HplmError:
                return False

        until(lambda: answers() and stubs_over(place.models).get("other_upper") not in (None, [pid]))
    assert load.answered > before
    assert load.refused == []


def test_the_command_lists_the_bases_and_refuses_to_delete_the_default_one(place: Place) -> None:
    by_url, by_folder = (
        run_base("list", "--json", *option)
        for option in (("--url", place.ports.grpc_url), ("--models", str(place.models)))
    )
    for listed in (by_url, by_folder):
        bases = [json.loads(line) for line in listed.stdout.splitlines()]
        assert [(base["model"], base["base"], base["tenants"] > FLEET) for base in bases] == [
            ("hbert", "tiny", True),
            ("other", "small", True),
        ]
    refused = run_base("delete", "hbert", "--models", str(place.models))
    assert refused.returncode == 1
    assert "'hbert' is the default base" in refused.stderr
    unknown = run_base("delete", "nobody", "--models", str(place.models))
    assert "its models of bases are: hbert, other" in unknown.stderr


def test_the_start_shows_an_answer_of_a_tenant_of_each_base(place: Place) -> None:
    said = (place.models.parent / "serve.log").read_text()
    for side in place.sides:
        assert re.search(rf"  {side.fleet[0]} +'Anna sings in Paris' -> ", said)


def test_tables_of_one_base_are_not_built_over_anothers(place: Place) -> None:
    own, other = place.sides
    before = artifact.read(place.store.table(own.root, "root"), "plot-table").fingerprint
    with pytest.raises(errors.DataError, match=f"of base '{own.name}': choose another name"):
        build_plot(place.store, other.name, own.root, TEXTS, 30.0, Progress(disable=True))
    assert artifact.read(place.store.table(own.root, "root"), "plot-table").fingerprint == before


def test_the_store_of_two_bases_is_whole(place: Place) -> None:
    with closing(Registry.open(place.store)) as registry:
        assert garbage_collection.verify(place.store, registry, time.time()).problems == ()
