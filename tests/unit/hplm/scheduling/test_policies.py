"""Each policy chooses the batch that its definition says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.scheduling import reference
from hplm.scheduling.policies import Das, Edf, Fcfs, Sjf, SlottedDas
from hplm.scheduling.policy import Batch, Budget, Policy, PolicyError, Waiting, check
from hplm.scheduling.policy_loader import BUILT_IN, load_policy

POLICIES: list[Policy] = [Fcfs(), Sjf(), Edf(), Das(), SlottedDas()]
BUDGETS = st.builds(
    Budget,
    rows=st.integers(1, 4),
    row_tokens=st.integers(5, 60),
    max_requests=st.integers(1, 12),
    max_tenants=st.integers(1, 6),
)


@st.composite
def waiting_requests(draw: st.DrawFn, least: int = 1, longest: int = 70) -> list[Waiting]:
    parts = draw(
        st.lists(
            st.tuples(st.integers(1, longest), st.integers(0, 5), st.integers(0, 20), st.integers(0, 4)),
            min_size=least,
            max_size=30,
        )
    )
    return [
        Waiting(i, f"t{tenant}", tokens, float(arrived), float(arrived + slack))
        for i, (tokens, arrived, slack, tenant) in enumerate(sorted(parts, key=lambda part: part[1]))
    ]


def of_tokens(*tokens: int) -> list[Waiting]:
    return [Waiting(i, f"t{i}", n, float(i), 100.0 - i) for i, n in enumerate(tokens)]


ONE_ROW = Budget(1, 100, 64, 64)


@given(waiting_requests(), BUDGETS)
def test_every_policy_keeps_to_the_budget_and_chooses_something(waiting: list[Waiting], budget: Budget) -> None:
    for policy in POLICIES:
        check(policy.select(waiting, 0.0, budget), waiting, budget)


@given(waiting_requests(longest=100), BUDGETS, st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.1, 0.5, 0.9]))
def test_das_equals_algorithm_1_word_by_word(waiting: list[Waiting], budget: Budget, eta: float, q: float) -> None:
    wanted, _ = reference.das(waiting, budget, eta, q)
    assert Das(eta, q).select(waiting, 0.0, budget) == wanted.batch()


@given(waiting_requests(longest=100), BUDGETS, st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.1, 0.5, 0.9]))
def test_slotted_das_equals_algorithm_2_word_by_word(
    waiting: list[Waiting], budget: Budget, eta: float, q: float
) -> None:
    assert SlottedDas(eta, q).select(waiting, 0.0, budget) == reference.slotted_das(waiting, budget, eta, q)


def test_fcfs_goes_by_arrival_sjf_by_length_and_edf_by_deadline() -> None:
    waiting = of_tokens(60, 50, 40)
    assert [r.id for r in Fcfs().select(waiting, 0.0, ONE_ROW).requests] == [0, 2]
    assert [r.id for r in Sjf().select(waiting, 0.0, ONE_ROW).requests] == [2, 1]
    assert [r.id for r in Edf().select(waiting, 0.0, ONE_ROW).requests] == [2, 1]


def test_das_serves_an_urgent_request_that_sjf_leaves() -> None:
    short = [Waiting(i, "a", 10, 0.0, 100.0) for i in range(20)]
    urgent = Waiting(99, "b", 18, 0.0, 1.0)
    assert urgent not in Sjf().select([*short, urgent], 0.0, ONE_ROW).requests
    assert urgent in Das().select([*short, urgent], 0.0, ONE_ROW).requests


@given(waiting_requests(longest=40))
def test_das_with_all_weight_on_utility_serves_as_many_as_sjf_within_one(waiting: list[Waiting]) -> None:
    das = Das(eta=0.999, q=0.001).select(waiting, 0.0, ONE_ROW)
    sjf = Sjf().select(waiting, 0.0, ONE_ROW)
    assert len(das.requests) >= len(sjf.requests) - 1


def test_das_serves_an_urgent_request_also_where_a_batch_is_full_by_number() -> None:
    waiting = [Waiting(i, f"t{i}", 8, float(i), 30.0) for i in range(100)]
    waiting.append(Waiting(100, "urgent", 8, 100.0, 0.3))
    batch = Das().select(waiting, 0.0, Budget(1, 1024, 64, 64))
    assert len(batch.requests) == 64
    assert waiting[-1] in batch.requests


def test_a_slot_is_as_long_as_the_longest_request_chosen_for_its_utility() -> None:
    batch = SlottedDas().select(of_tokens(10, 10, 10, 10, 12, 50, 50), 0.0, Budget(1, 60, 64, 64))
    assert batch.slot_tokens == 10
    assert max(request.tokens for request in batch.requests) <= 10


def test_a_request_longer_than_a_row_has_a_row_of_its_own() -> None:
    for policy in POLICIES:
        assert [r.id for r in policy.select(of_tokens(500), 0.0, ONE_ROW).requests] == [0]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        Batch(()),
        Batch(((Waiting(7, "x", 1, 0.0, 1.0),),)),
        Batch((tuple(of_tokens(60, 50)),)),
    ],
    ids=["nothing", "a list", "empty", "foreign", "equal but not the same"],
)
def test_what_is_no_batch_of_the_waiting_is_named(broken: object) -> None:
    with pytest.raises(PolicyError):
        check(broken, of_tokens(60, 50), ONE_ROW)  # type: ignore[arg-type]


def test_more_than_the_budget_or_a_request_twice_is_named() -> None:
    waiting = of_tokens(60, 50)
    with pytest.raises(PolicyError, match="110 tokens"):
        check(Batch((tuple(waiting),)), waiting, ONE_ROW)
    with pytest.raises(PolicyError, match="twice"):
        check(Batch(((waiting[0], waiting[0]),)), waiting, ONE_ROW)
    with pytest.raises(PolicyError, match="tenants"):
        check(Batch(((waiting[0],), (waiting[1],))), waiting, Budget(2, 100, 64, 1))


def test_policies_come_by_name_with_settings_checked_by_name() -> None:
    assert load_policy("das", {"eta": 0.3, "q": 0.7}) == Das(0.3, 0.7)
    with pytest.raises(ConfigError, match="there are fcfs, sjf"):
        load_policy("fastest", {})
    with pytest.raises(ConfigError, match="etta"):
        load_policy("das", {"etta": 0.3})
    for bad in (0, 1, -1, "x", True, None):
        with pytest.raises(ConfigError, match="eta"):
            load_policy("das", {"eta": bad})


def test_a_policy_that_fails_to_begin_is_an_error_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(table: str) -> Fcfs:
        raise FileNotFoundError(table)

    monkeypatch.setitem(BUILT_IN, "broken", broken)
    with pytest.raises(ConfigError, match=r"policy_settings of 'broken': FileNotFoundError: weights\.csv"):
        load_policy("broken", {"table": "weights.csv"})


@pytest.mark.parametrize("name", ["fcfs", "sjf", "edf", "das", "slotted_das"])
def test_a_batch_of_ten_thousand_waiting_is_chosen_with_a_number_of_steps_that_grows_with_them(name: str) -> None:
    """Count how often the policy reads a request's length, as a measure of its steps."""

    class Counting(Waiting):
        reads = 0

        def __getattribute__(self, name: str) -> object:
            Counting.reads += name == "tokens"
            return super().__getattribute__(name)

    def steps(count: int) -> int:
        Counting.reads = 0
        waiting = [Counting(i, f"t{i % 50}", 3 + i * 7 % 98, i / 1000, 10 + i * 13 % 100) for i in range(count)]
        load_policy(name, {}).select(waiting, 0.0, Budget(16, 100, 64, 64))
        return Counting.reads

    assert steps(10_000) <= 12 * max(1, steps(1_000))
