"""The plug-in policy of examples/length_aware dispatches the elements of the paper's buffer, loaded as a package brings it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.scheduling.fairness import fair_select
from hplm.scheduling.policy import Budget, Policy, Waiting, check
from hplm.scheduling.policy_loader import load_policy
from hplm.scheduling.service_history import ServiceHistory
from tests.plugins.install import install

PLUGIN = Path(__file__).parents[3] / "examples" / "length_aware"
ONE_ROW = Budget(1, 100, 64, 64)
MakePolicy = Callable[..., Policy]


@pytest.fixture(scope="module")
def length_aware(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakePolicy]:
    assert '\nlength_aware = "length_aware:LengthAware"\n' in (PLUGIN / "pyproject.toml").read_text()
    with pytest.MonkeyPatch.context() as patch:
        source = (PLUGIN / "length_aware.py").read_text()
        folder = tmp_path_factory.mktemp("plugin") / "venv"
        patch.syspath_prepend(
            install(folder, "length_aware", source, "[hplm.policies]\nlength_aware = length_aware:LengthAware\n", patch)
        )
        yield lambda **settings: load_policy("length_aware", settings)


class PapersBuffer:
    """The buffer of the paper: a queue of elements, and the newest element of each length bin. Requests come in order."""

    def __init__(self, bin_tokens: int, element_texts: int) -> None:
        self._bin_tokens = bin_tokens
        self._element_texts = element_texts
        self._elements: deque[list[Waiting]] = deque()
        self._newest: dict[int, list[Waiting]] = {}

    def add(self, request: Waiting) -> None:
        """Merge a request into the element of its bin if that element has room, or else append an element."""
        key = (request.length - 1) // self._bin_tokens
        element = self._newest.get(key)
        if element is None or len(element) == self._element_texts:
            element = self._newest[key] = []
            self._elements.append(element)
        element.append(request)

    def dispatch(self) -> list[Waiting]:
        """Take the first element out of the buffer, and return its requests."""
        element = self._elements.popleft()
        key = (element[0].length - 1) // self._bin_tokens
        # A later element of the same bin keeps its place in the dictionary.
        if self._newest[key] is element:
            del self._newest[key]
        return element


def of_tokens(*tokens: int, tenant: str = "t{}") -> list[Waiting]:
    return [Waiting(i, tenant.format(i), n, float(i), 100.0) for i, n in enumerate(tokens)]


@given(
    # Tokens of an arrival, or None: a batch begins.
    st.lists(st.one_of(st.integers(1, 70), st.none()), max_size=60),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 5),
)
def test_the_policy_dispatches_the_elements_of_the_papers_buffer(
    length_aware: MakePolicy, events: list[int | None], bin_tokens: int, element_texts: int
) -> None:
    buffer = PapersBuffer(bin_tokens, element_texts)
    policy, budget = length_aware(bin_tokens=bin_tokens, element_texts=element_texts), Budget(1, 1000, 64, 64)
    waiting: list[Waiting] = []
    for number, tokens in enumerate(events):
        if tokens is not None:
            waiting.append(Waiting(number, f"t{number % 7}", tokens, float(number // 3), 100.0))
            buffer.add(waiting[-1])
        elif waiting:
            chosen = policy.select(waiting, float(number), budget).requests
            assert list(chosen) == buffer.dispatch()
            waiting = [request for request in waiting if request not in chosen]


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=30),
    st.builds(Budget, st.integers(1, 4), st.integers(5, 60), st.integers(1, 12), st.integers(1, 6)),
)
def test_the_policy_keeps_to_the_budget(length_aware: MakePolicy, tokens: list[int], budget: Budget) -> None:
    waiting = of_tokens(*tokens)
    check(length_aware().select(waiting, 0.0, budget), waiting, budget)


def test_a_length_bin_ends_at_a_multiple_of_its_tokens(length_aware: MakePolicy) -> None:
    batch = length_aware().select(of_tokens(9, 8, 16, 17, 10, 1), 0.0, ONE_ROW)
    assert [request.tokens for request in batch.requests] == [9, 16, 10]


@pytest.mark.parametrize("rows", [1, 4])
def test_nothing_fills_up_an_element(length_aware: MakePolicy, rows: int) -> None:
    waiting = of_tokens(10, 12, 40, 11, 41, 13, 14)
    batch = fair_select(length_aware(), waiting, 0.0, Budget(rows, 100, 64, 64), {}, math.inf, ServiceHistory())
    assert [request.id for request in batch.requests] == [0, 1, 3, 5]


def test_a_tenant_that_was_passed_over_goes_before_the_element_of_a_flood(length_aware: MakePolicy) -> None:
    flood = of_tokens(*[10] * 20, tenant="flood")
    history = ServiceHistory()
    history.add(["flood"], 0.0)
    waiting = [*flood, Waiting(20, "quiet", 40, 20.0, 100.0)]
    batch = fair_select(length_aware(), waiting, 0.0, ONE_ROW, {}, math.inf, history)
    assert [request.id for request in batch.requests] == [20, 0, 1, 2, 3]


@pytest.mark.parametrize("key", ["bin_tokens", "element_texts"])
@pytest.mark.parametrize("bad", [0, 1.5, "x", True, None])
def test_length_bins_and_elements_are_whole_numbers(length_aware: MakePolicy, key: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=key):
        length_aware(**{key: bad})
