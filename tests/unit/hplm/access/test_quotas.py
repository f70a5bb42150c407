"""Quotas of a store: limits from the registry, requests of several texts, two servers on one registry."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select, text, update

from hplm.access.quota_keeper import JOINING_S, QuotaKeeper
from hplm.access.quotas import Charge, Quotas, TextCost, estimated_tokens, file_of, remove_dead_files
from hplm.errors import (
    BadInputError,
    CancelledError,
    DeadlineError,
    EmptyTextError,
    HplmError,
    QueueFullError,
    QuotaError,
    UnknownTenantError,
)
from hplm.quotas.limits import Limits, Use
from hplm.quotas.quota_file import QuotaFile
from hplm.quotas.token_bucket import DEBT_S, LEASE_S, rate_of
from hplm.registry.access.limits import ALIVE_S, DEFAULT
from hplm.registry.database import Database
from hplm.registry.registry import Registry
from hplm.registry.schema import leases
from hplm.store.layout import Store
from tests.postgres import PostgresServer
from tests.waiting import until

TEXT = [b"one short text"]
MOST_TOKENS = 256
ESTIMATE = estimated_tokens(TEXT, MOST_TOKENS)
FILMS, NEWS = TextCost("films", ESTIMATE), TextCost("news", ESTIMATE)


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store whose registry is on either database."""
    if request.param == "sqlite":
        return Store(tmp_path / "store")
    server: PostgresServer = request.getfixturevalue("postgres")
    server.clear()
    return Store(tmp_path / "store", server.url)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def quotas(store: Store, registry: Registry, tmp_path: Path, clock: ManualClock) -> Iterator[Quotas]:
    with closing(Quotas(store, tmp_path / "quotas", clock=clock)) as opened:
        yield opened


def limit(quotas: Quotas, registry: Registry, tenant: str, **limits: float) -> None:
    registry.set_limits(tenant, Limits(**limits))  # type: ignore[arg-type]
    quotas._book.refresh()


def test_without_limits_nothing_is_held_and_no_file_is_made(quotas: Quotas, tmp_path: Path) -> None:
    assert quotas.take([FILMS]) is None
    assert not (tmp_path / "quotas").exists()


def test_a_tenant_has_its_own_limits_and_the_default_where_it_has_none(quotas: Quotas, registry: Registry) -> None:
    limit(quotas, registry, DEFAULT, requests_per_s=1.0, concurrent=5)
    limit(quotas, registry, "films", requests_per_s=20.0)
    assert quotas._book.of("films") == Limits(20.0, None, 5)
    assert quotas._book.of("news") == Limits(1.0, None, 5)
    registry.set_limits(DEFAULT, Limits())
    registry.set_limits("films", Limits())
    quotas._book.refresh()
    assert quotas._book.of("films") is None


def test_a_request_over_the_quota_is_told_how_long_to_wait(
    quotas: Quotas, registry: Registry, clock: ManualClock
) -> None:
    limit(quotas, registry, "films", requests_per_s=2.0)
    assert quotas.take([FILMS, FILMS]) is not None
    with pytest.raises(QuotaError, match=r"requests/s is used up; try again in 0\.400 s") as refused:
        quotas.take([FILMS])
    assert refused.value.wait_s == pytest.approx(0.4)
    clock.now_s += 0.401
    assert quotas.take([FILMS]) is not None


def test_a_request_of_several_tenants_takes_of_all_or_of_none(
    quotas: Quotas, registry: Registry, clock: ManualClock
) -> None:
    limit(quotas, registry, DEFAULT, requests_per_s=1.0)
    assert quotas.take([NEWS]) is not None
    with pytest.raises(QuotaError):
        quotas.take([FILMS, NEWS])
    assert quotas.take([FILMS]) is not None


@pytest.mark.parametrize(
    "own_fault",
    [EmptyTextError("empty"), CancelledError("cancelled"), DeadlineError("late")],
    ids=["wrong", "cancelled", "late"],
)
def test_what_the_server_refuses_costs_nothing_and_what_was_wrong_does(
    quotas: Quotas, registry: Registry, own_fault: HplmError
) -> None:
    limit(quotas, registry, "films", requests_per_s=1.0)
    held = quotas.take([FILMS])
    assert held is not None
    held.end(QueueFullError("full"))
    held = quotas.take([FILMS])
    assert held is not None
    held.end(own_fault)
    with pytest.raises(QuotaError):
        quotas.take([FILMS])


def test_tokens_are_charged_by_an_estimate_and_corrected(quotas: Quotas, registry: Registry) -> None:
    limit(quotas, registry, "films", tokens_per_s=0.5 * ESTIMATE / LEASE_S)
    assert quotas.take([FILMS]) is not None
    with pytest.raises(QuotaError, match="tokens/s"):
        quotas.take([FILMS])
    quotas.correct("films", Charge(ESTIMATE), 0)
    assert quotas.take([FILMS]) is not None


def spent_tokens(quotas: Quotas) -> float:
    return quotas._file.marked()["films"].tokens


def test_each_level_of_a_cascade_is_charged_what_it_tokenised(quotas: Quotas, registry: Registry) -> None:
    limit(quotas, registry, "films", tokens_per_s=10.0)
    quotas.take([TextCost("films", 200)])
    quotas.correct("films", Charge(200), 60)
    quotas.correct("films", Charge(0), 50)
    assert spent_tokens(quotas) == 60 + 50


@pytest.mark.parametrize(("tokens", "charged"), [(60, 60), (250, 300)])
def test_a_text_that_is_tokenised_again_gives_no_further_credit(
    quotas: Quotas, registry: Registry, tokens: int, charged: int
) -> None:
    limit(quotas, registry, "films", tokens_per_s=10.0)
    quotas.take([TextCost("films", 200)])
    quotas.correct("films", Charge(200), tokens)
    quotas.correct("films", Charge(200, is_repeated=True), tokens)
    assert spent_tokens(quotas) == charged


def test_a_text_whose_first_call_failed_before_it_was_tokenised_is_charged_no_less_than_its_tokens(
    quotas: Quotas, registry: Registry
) -> None:
    limit(quotas, registry, "films", tokens_per_s=10.0)
    quotas.take([TextCost("films", 20)])
    quotas.correct("films", Charge(20, is_repeated=True), 80)
    assert spent_tokens(quotas) == 80


def test_an_estimate_is_never_more_than_a_base_reads() -> None:
    assert estimated_tokens([b"x" * 400], MOST_TOKENS) == 102
    assert estimated_tokens([b"x" * 1_000_000, b"y"], MOST_TOKENS) == MOST_TOKENS


@pytest.mark.parametrize("charge", [Charge(0), Charge(256), Charge(7, is_repeated=True)])
def test_a_model_reads_what_another_has_charged(charge: Charge) -> None:
    assert Charge.parse(str(charge)) == charge


@pytest.mark.parametrize("written", ["", "-5", "1e3", "7rr", "None", "1234567", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_malformed_charge_is_refused(written: str) -> None:
    with pytest.raises(BadInputError):
        Charge.parse(written)


def test_a_request_is_under_way_until_it_ends_also_where_it_was_handed_on(quotas: Quotas, registry: Registry) -> None:
    limit(quotas, registry, "films", concurrent=1)
    held = quotas.take([FILMS])
    assert held is not None
    held.hand_on()
    with pytest.raises(QuotaError, match="concurrent"):
        quotas.take([FILMS])
    taken_over = quotas.take_over({"films": ESTIMATE})
    assert taken_over is not None
    with pytest.raises(QuotaError, match="concurrent"):
        quotas.take([FILMS])
    taken_over.end("answer")
    assert quotas.take([FILMS]) is not None


def test_a_request_that_no_stage_has_handed_on_is_taken_as_any_other(quotas: Quotas, registry: Registry) -> None:
    limit(quotas, registry, "films", requests_per_s=1.0)
    held = quotas.take([FILMS])
    assert held is not None
    held.hand_on()
    assert quotas.take_over({"films": ESTIMATE}) is not None
    with pytest.raises(QuotaError, match="requests/s"):
        quotas.take_over({"films": ESTIMATE})


def test_limits_need_a_tenant_and_end_with_it(registry: Registry) -> None:
    with pytest.raises(UnknownTenantError):
        registry.set_limits("nobody", Limits(1.0))
    registry.set_limits("films", Limits(1.0))
    known = registry.limits_since(0)
    assert known.limits == {"films": Limits(1.0)}
    registry.delete_tenant("films", 1.0)
    assert registry.limits_since(known.generation).limits == {"films": Limits()}


def use(quotas: Quotas) -> int:
    """Take as often as possible at one moment."""
    count = 0
    try:
        while True:
            quotas.take([FILMS])
            count += 1
    except QuotaError:
        return count


def test_two_servers_together_keep_to_a_quota(store: Store, registry: Registry) -> None:
    registry.set_limits("films", Limits(requests_per_s=200.0))
    with ExitStack() as stack:
        keepers = [QuotaKeeper(store) for _ in range(2)]
        for keeper in keepers:
            stack.callback(keeper.stop)
            keeper.start()
        stages = [stack.enter_context(closing(Quotas(store, keeper.path))) for keeper in (*keepers, *keepers)]
        time.sleep(1.2)  # each hears of the other within a second
        began_s, used = time.monotonic(), [0, 0, 0, 0]
        while (passed_s := time.monotonic() - began_s) < 3.0:
            for place, stage in enumerate(stages):
                used[place] += use(stage)
            time.sleep(0.002)
    lease = rate_of(200.0).capacity
    assert sum(used) <= 200.0 * passed_s + 2 * lease
    assert sum(used) >= 100.0 * passed_s
    assert used[0] + used[2] > 0
    assert used[1] + used[3] > 0


def test_two_servers_keep_to_the_first_limit_of_a_registry_from_the_start(store: Store, registry: Registry) -> None:
    with ExitStack() as stack:
        keepers = [QuotaKeeper(store) for _ in range(2)]
        for keeper in keepers:
            stack.callback(keeper.stop)
            keeper.start()
        stages = [stack.enter_context(closing(Quotas(store, keeper.path))) for keeper in keepers]
        for stage in stages:
            stage.start()
        registry.set_limits("films", Limits(requests_per_s=200.0))
        until(lambda: all(stage._book.of("films") is not None for stage in stages))
        began_s, used = time.monotonic(), 0
        while (passed_s := time.monotonic() - began_s) < 0.7:
            used += sum(map(use, stages))
            time.sleep(0.002)
    # What the account and both servers may hold at the start.
    assert used <= 200.0 * passed_s + 3 * rate_of(200.0).capacity


def test_a_tenant_below_its_quota_is_never_refused_by_one_of_two_servers(store: Store, registry: Registry) -> None:
    registry.set_limits("films", Limits(requests_per_s=4.0))
    with ExitStack() as stack:
        for _ in range(2):
            keeper = QuotaKeeper(store)
            stack.callback(keeper.stop)
            keeper.start()
        time.sleep(1.2)
        stage = stack.enter_context(closing(Quotas(store, keeper.path)))
        for pause_s in (0.0, 0.5, 0.8, 0.4, 1.2):
            time.sleep(pause_s)
            assert stage.take([FILMS]) is not None


def test_a_tenant_below_its_quota_is_refused_by_neither_of_two_servers(store: Store, registry: Registry) -> None:
    registry.set_limits("films", Limits(requests_per_s=10.0))
    with ExitStack() as stack:
        keepers = [QuotaKeeper(store) for _ in range(2)]
        for keeper in keepers:
            stack.callback(keeper.stop)
            keeper.start()
        stages = [stack.enter_context(closing(Quotas(store, keeper.path))) for keeper in keepers]
        time.sleep(1.2)
        for number in range(20):
            assert stages[number % 2].take([FILMS]) is not None
            time.sleep(0.125)


def test_a_server_that_is_alone_writes_no_leases(store: Store, registry: Registry) -> None:
    registry.set_limits("films", Limits(requests_per_s=200.0))
    later_s = 0.0
    keeper = QuotaKeeper(store, clock=lambda: time.monotonic() + later_s)
    try:
        keeper.step()
        later_s = JOINING_S
        with closing(Quotas(store, keeper.path)) as stage:
            assert use(stage) >= 20
            keeper.step()
        assert not registry.leased_quotas("films")
    finally:
        keeper.start()
        keeper.stop()


@contextmanager
def unwritable(store: Store) -> Iterator[None]:
    """Let transactions on leases fail as long as the block lasts."""
    with closing(Database(store, writer=True)) as database:
        with database.writing() as connection:
            connection.execute(text("ALTER TABLE leases RENAME TO away"))
        yield
        with database.writing() as connection:
            connection.execute(text("ALTER TABLE away RENAME TO leases"))


@pytest.fixture
def keeper(store: Store, registry: Registry, clock: ManualClock) -> Iterator[QuotaKeeper]:
    """The keeper of one of two servers, which a test steps by itself."""
    registry.announce_server("other")
    opened = QuotaKeeper(store, clock=clock)
    yield opened
    opened.start()
    opened.stop()


def test_spending_is_booked_after_a_transaction_that_failed(
    store: Store, registry: Registry, clock: ManualClock, keeper: QuotaKeeper
) -> None:
    limits = Limits(requests_per_s=0.01)
    registry.set_limits("films", limits)
    keeper._book.refresh()
    with closing(Quotas(store, keeper.path, clock=clock)) as stage:
        stage._book.refresh()
        assert use(stage) == 1
    with unwritable(store):
        keeper.step()
    keeper.step()
    # Nothing is left in the account, which fills in 100 s.
    assert registry.settle_quotas("other", {"films": Use()}, {"films": limits})["films"].requests < 0.5


def test_a_long_failure_leaves_a_tenant_no_debt(
    store: Store, registry: Registry, clock: ManualClock, keeper: QuotaKeeper
) -> None:
    limits = Limits(requests_per_s=1.0)
    registry.set_limits("films", limits)
    keeper._book.refresh()
    with closing(Quotas(store, keeper.path, clock=clock)) as stage:
        stage._book.refresh()
        with unwritable(store):
            for _ in range(200):
                assert use(stage) == 1
                keeper.step()
                clock.now_s += 1.0
        registry.announce_server("other")
        keeper.step()
    # A debt of all 200 requests would be paid back after 200 s.
    until(lambda: registry.settle_quotas("other", {"films": Use()}, {"films": limits})["films"].requests > 0)


def test_a_lost_servers_lease_comes_back(registry: Registry) -> None:
    limits = {"films": Limits(requests_per_s=20.0)}
    assert registry.settle_quotas("lost", {"films": Use()}, limits)["films"].requests == 2.0
    # One of the three requests stays for a server that has none.
    assert 1.0 <= registry.settle_quotas("other", {"films": Use()}, limits)["films"].requests < 2.0
    registry.end_server("lost")
    assert 2.0 <= registry.settle_quotas("other", {"films": Use()}, limits)["films"].requests <= 3.0
    assert set(registry.leased_quotas("films")) == {"other"}


def test_a_killed_server_no_longer_counts(registry: Registry) -> None:
    assert registry.announce_server("killed") == 1
    assert registry.announce_server("other") == 2
    time.sleep(ALIVE_S + 0.1)
    assert registry.announce_server("other") == 1


def step_clock_back(store: Store, by_s: float) -> None:
    """Make all times of accounts and leases lie in the future, as after a database's clock stepped back."""
    with closing(Database(store, writer=True)) as database, database.writing() as connection:
        for row in connection.execute(select(leases)).all():
            amounts = {
                quota: [amount[0], amount[1] + by_s, *amount[2:]] if isinstance(amount, list) else amount
                for quota, amount in row.amounts.items()
            }
            where = (leases.c.server == row.server) & (leases.c.tenant == row.tenant)
            connection.execute(update(leases).where(where).values(until_s=row.until_s + by_s, amounts=amounts))


def test_accounts_servers_and_leases_outlast_no_clock_that_stepped_back(store: Store, registry: Registry) -> None:
    limits = {"films": Limits(requests_per_s=20.0)}
    for server in ("lost", "other"):
        registry.announce_server(server)
        registry.settle_quotas(server, {"films": Use(2.0)}, limits)
    step_clock_back(store, 3600.0)
    # A step takes no living server's sign away.
    assert registry.announce_server("other") == 2
    began_s = time.monotonic()
    until(lambda: registry.settle_quotas("other", {"films": Use()}, limits)["films"].requests >= 2.0)
    assert time.monotonic() - began_s < 2.0
    until(lambda: registry.announce_server("other") == 1)
    registry.settle_quotas("other", {"films": Use()}, limits)
    assert set(registry.leased_quotas("films")) == {"other"}
    assert time.monotonic() - began_s < ALIVE_S + 5.0


@pytest.mark.parametrize("whose", ["films", DEFAULT])
def test_a_debt_among_servers_has_a_bound_and_ends_when_limits_are_set(
    store: Store, registry: Registry, clock: ManualClock, keeper: QuotaKeeper, whose: str
) -> None:
    limits = Limits(tokens_per_s=5.0)
    registry.set_limits(whose, limits)
    keeper._book.refresh()
    of = {"films": limits}
    with closing(Quotas(store, keeper.path, clock=clock)) as stage:
        assert stage.take([TextCost("films", 16_384)]) is not None
        keeper.step()
        with pytest.raises(QuotaError):
            stage.take([FILMS])
        with closing(Database(store, writer=False)) as database, database.reading() as connection:
            account = connection.scalar(
                select(leases.c.amounts).where(leases.c.tenant == "films", leases.c.server == "")
            )
        assert account["tokens"][0] == pytest.approx(-5.0 * DEBT_S)
        assert registry.settle_quotas("other", {"films": Use()}, of)["films"].tokens == 0
        registry.set_limits(whose, Limits())
        registry.set_limits(whose, limits)
        assert registry.settle_quotas("other", {"films": Use()}, of)["films"].tokens > 0
        # Before and after the keeper has leased again.
        stage._book.refresh()
        assert stage.take([TextCost("films", 1)]) is not None
        keeper._book.refresh()
        for _ in range(2):
            time.sleep(0.4)  # the account fills
            clock.now_s += 0.1
            keeper.step()
        assert registry.leased_quotas("films")[keeper.server].tokens >= 1.0
        assert stage.take([TextCost("films", 1)]) is not None


def test_files_that_no_process_uses_are_removed(store: Store, registry: Registry, tmp_path: Path) -> None:
    used, dead = (file_of(store, name).name for name in ("used", "dead"))
    with closing(QuotaFile(tmp_path / used)) as file:
        file.keep()
        QuotaFile(tmp_path / dead).close()
        for name in (used, dead):
            os.utime(tmp_path / name, (0, 0))
        remove_dead_files(tmp_path)
        assert (tmp_path / used).exists()
        assert not (tmp_path / dead).exists()


def test_a_registry_without_limits_is_not_written(store: Store, registry: Registry) -> None:
    keeper = QuotaKeeper(store)
    keeper.start()
    keeper.stop()
    assert registry.announce_server("other") == 1


def test_a_stopped_servers_file_is_removed(store: Store, registry: Registry) -> None:
    keeper = QuotaKeeper(store)
    keeper.start()
    assert keeper.path.exists()
    keeper.stop()
    assert not keeper.path.exists()
