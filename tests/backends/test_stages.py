"""The two stages without Triton: a fault of one request concerns no other."""

from __future__ import annotations

import errno
import queue
import resource
import shutil
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl  # type: ignore[import-untyped]
import torch

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.adapters.bank import TenantBank
from hplm.core.settings import EncodeSettings, LookupSettings, load_settings
from hplm.core.wire import LabelledSpan
from hplm.engine import open_domains, reference
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import verify_domain
from hplm.engine.open_domains import choose_lookup_device
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry import catalog
from hplm.registry.records import ServedTenant
from hplm.registry.registry import Registry
from hplm.scheduling.downstream_admission import Backlog
from hplm.serving.backlog_file import READ_EVERY_S, BacklogFile
from hplm.serving.encode_stage import EncodeAnswer, EncodeInput, EncodeStage
from hplm.serving.lookup_stage import LookupAnswer, LookupStage, RawTexts
from hplm.serving.request import Request
from hplm.store.layout import Store
from tests import tiny
from tests.batches import find_labels, look_up
from tests.doubles import Panic
from tests.limits import limited
from tests.open_files import open_files
from tests.submitting import CallbackClient, Started, never, submit
from tests.waiting import until

BAD_REQUESTS: list[tuple[bytes, bytes, type[errors.HplmError]]] = [
    (b"", b"alpha", errors.EmptyTextError),
    (b"   ", b"alpha", errors.EmptyTextError),
    (b"\x01", b"alpha", errors.EmptyTextError),
    (b"caf\xe9", b"alpha", errors.TextEncodingError),
    (b"x" * 10_000_000, b"alpha", errors.TextTooLargeError),
    (b"hello", b"nobody", errors.UnknownTenantError),
    (b"hello", b"../alpha", errors.TenantNameError),
    (b"hello", b"alpha/1", errors.TenantNameError),
    (b"hello", b"", errors.TenantNameError),
    (b"hello", b"a" * 10_000, errors.TenantNameError),
    (b"hello", b"\xff", errors.TenantNameError),
]
GOOD_REQUEST = ((b"the red cat",), b"alpha")
PAIR = (b"the red cat", b"the dog runs")
SOON_S = 60.0
HIDDEN, TOKENS = np.zeros((4, tiny.config().hidden_size), np.float16), np.zeros((4, 3), np.int32)
LookupRequest = Request[RawTexts, LookupAnswer]
EncodeRequest = Request[EncodeInput, EncodeAnswer]


def plot_stage_of(models: Path, **changed: Any) -> LookupStage:
    """Make the stage as it was exported, with `changed` settings."""
    folder = models / "hbert_plot" / "1"
    return LookupStage(replace(load_settings(LookupSettings, folder / "settings.json"), **changed), folder)


def upper_stage_of(models: Path, **changed: Any) -> EncodeStage:
    """Make the stage as it was exported, with `changed` settings."""
    folder = models / "hbert_upper" / "1"
    return EncodeStage(replace(load_settings(EncodeSettings, folder / "settings.json"), **changed), folder)


@pytest.fixture(scope="module")
def plot_stage(tiny_models: Path) -> LookupStage:
    return plot_stage_of(tiny_models)


@pytest.fixture(scope="module")
def upper_stage(tiny_models: Path) -> EncodeStage:
    return upper_stage_of(tiny_models)


def plot_input(name: str, deadline_s: float | None = None) -> LookupRequest:
    """Make a request that arrives now."""
    return Request((b"the red cat",), name.encode(), deadline_s)


def upper_input(name: str, deadline_s: float | None = None, version_id: int | None = None) -> EncodeRequest:
    return Request(EncodeInput(HIDDEN, TOKENS, version_id), name.encode(), deadline_s)


def labels_input(looked_up: LookupAnswer, tenant: bytes, version_id: int | None = None) -> EncodeRequest:
    """Make the request to the encode stage after a look-up."""
    return Request(EncodeInput(looked_up.features, looked_up.tokens, version_id), tenant)


def asked(stage: LookupStage | EncodeStage, request: LookupRequest | EncodeRequest) -> Future[Any]:
    """Submit a request, and return its future answer."""
    answer: Future[Any] = Future()
    submit(stage, request, answer.set_result)
    return answer


def test_each_bad_request_of_a_batch_gets_its_error_and_the_good_ones_their_answer(plot_stage: LookupStage) -> None:
    alone = look_up(plot_stage, [GOOD_REQUEST])[0]
    assert isinstance(alone, LookupAnswer)
    requests = [one for text, tenant, _ in BAD_REQUESTS for one in (((text,), tenant), GOOD_REQUEST)]
    answers = look_up(plot_stage, requests)
    for (_, _, error), bad, good in zip(BAD_REQUESTS, answers[::2], answers[1::2], strict=True):
        assert type(bad) is error
        assert len(bad.wire()) < 300
        assert isinstance(good, LookupAnswer)
        np.testing.assert_allclose(good.features, alone.features, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("stage_of", [plot_stage_of, upper_stage_of], ids=["LookupStage", "EncodeStage"])
def test_no_thread_of_a_stage_looks_for_small_products_to_share(
    stage_of: Callable[[Path], LookupStage | EncodeStage], tiny_models: Path, restored_threads: None, started: Started
) -> None:
    with threadpoolctl.threadpool_limits(4, user_api="blas"):
        started.add(stage_of(tiny_models))
        assert {one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"} == {1}


@pytest.mark.parametrize("stage_of", [plot_stage_of, upper_stage_of], ids=["LookupStage", "EncodeStage"])
def test_a_stage_runs_from_its_start_to_its_stop(
    stage_of: Callable[[Path], LookupStage | EncodeStage], tiny_models: Path, restored_threads: None
) -> None:
    stage = stage_of(tiny_models)
    assert not stage.is_running
    with Started() as started:
        assert started.add(stage).is_running
    assert not stage.is_running


def test_what_is_too_late_already_opens_nothing(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage = started.add(plot_stage_of(tiny_models))
    late = Request((b"the red cat",), b"alpha", 1e-6, time.monotonic() - 0.001)
    monkeypatch.setattr(stage.lookup._cards, "fetch", pytest.fail)
    assert isinstance(asked(stage, late).result(SOON_S), errors.DeadlineError)


def test_what_the_upper_stage_could_not_answer_in_time_is_refused_before_it_is_looked_up(
    tmp_path: Path, started: Started
) -> None:
    stage = started.add(plot_stage_of(tiny.make_repository(tmp_path)))
    assert isinstance(asked(stage, plot_input("alpha", 30.0)).result(SOON_S), LookupAnswer)
    backlog = BacklogFile((tmp_path / "store").resolve(), "tiny")
    now_s = time.monotonic()
    # A time in the future, so that the backlog does not become old during this test.
    backlog.publish(Backlog(now_s + 60, now_s, 10, 1.0, now_s, (now_s + 1.0,), (1000,), {"alpha": 1000}))
    time.sleep(2 * READ_EVERY_S)
    batches = stage.counts["batches"]
    assert isinstance(asked(stage, plot_input("alpha", 30.0)).result(SOON_S), errors.DeadlineError)
    assert stage.counts["batches"] == batches
    assert isinstance(asked(stage, plot_input("alpha", 300.0)).result(SOON_S), LookupAnswer)
    backlog.remove()


@pytest.mark.parametrize(("wanted", "threads"), [(0, 1), (1, 1), (3, 3)])
def test_windows_are_computed_by_as_many_threads_as_asked_for(
    tiny_models: Path, wanted: int, threads: int, started: Started
) -> None:
    stage = started.add(plot_stage_of(tiny_models, num_threads=wanted, device="cpu"))
    names: set[str] = set()
    begun = threading.Barrier(threads)

    def see(*_: object) -> None:
        name = threading.current_thread().name
        if name not in names:
            names.add(name)
            # No thread ends before all threads have begun.
            begun.wait(30)

    assert stage.domains._lower is not None
    stage.domains._lower.register_forward_pre_hook(see)
    requests = [((text.encode(),), b"alpha") for text in tiny.sentences(200, seed=77)]
    found = look_up(stage, requests)
    assert all(isinstance(one, LookupAnswer) for one in found)
    assert len(names) == threads


def test_no_error_names_another_tenant(plot_stage: LookupStage) -> None:
    for text, tenant, _ in BAD_REQUESTS:
        answer = look_up(plot_stage, [((text,), tenant)])[0]
        assert isinstance(answer, errors.HplmError)
        for name in tiny.TASKS:
            assert name.encode() in tenant or name not in answer.wire()


@pytest.fixture(scope="module")
def other_tenants(tmp_path_factory: pytest.TempPathFactory) -> tuple[LookupStage, EncodeStage, Store, Base]:
    """Both stages over a store that has the tenants of OTHER_TASKS too."""
    models = tiny.make_repository(tmp_path_factory.mktemp("other"), other_tasks=True)
    return plot_stage_of(models), upper_stage_of(models), *tiny.opened(models.parent)


def test_a_pair_is_looked_up_as_the_tokenizer_joins_it_and_answered_as_the_reference_does(
    other_tenants: tuple[LookupStage, EncodeStage, Store, Base],
) -> None:
    plot, upper, store, base = other_tenants
    vocabulary = tiny.tokenizer().get_vocab()
    pieces = ["[CLS]", "the", "red", "cat", "[SEP]", "the", "dog", "runs", "[SEP]"]
    merged = reference.merged([vocabulary[piece] for piece in pieces], base.config, [], load_lower(base))
    for name in ("alike", "follows"):
        found = look_up(plot, [(PAIR, name.encode())])[0]
        assert isinstance(found, LookupAnswer)
        np.testing.assert_allclose(found.features, merged.numpy(), atol=5e-3, rtol=5e-3)
        answer = find_labels(upper, [labels_input(found, name.encode())])[0]
        assert isinstance(answer, EncodeAnswer)
        member = tiny.load_tenant(store, base, name)
        wanted = reference.logits(base.load_upper(), merged, member).numpy()
        np.testing.assert_allclose(answer.logits, wanted, atol=0.05, rtol=0.02)
        # Characters of both texts with one between them.
        assert (answer.spans[0].start, answer.spans[0].end) == (0, len("the red cat the dog runs"))


def test_a_regression_answers_its_value_under_one_label(
    other_tenants: tuple[LookupStage, EncodeStage, Store, Base],
) -> None:
    plot, upper, _, _ = other_tenants
    found = look_up(plot, [((b"the red cat",), b"grade")])[0]
    assert isinstance(found, LookupAnswer)
    answer = find_labels(upper, [labels_input(found, b"grade")])[0]
    assert isinstance(answer, EncodeAnswer)
    assert answer.spans == [LabelledSpan("score", float(answer.logits[0, 0]), 0, 11)]


@pytest.mark.parametrize(
    ("texts", "tenant", "words"),
    [
        (PAIR, b"alpha", "trained on single texts"),
        (PAIR[:1], b"follows", "trained on pairs"),
        ((*PAIR, b"three"), b"follows", "3 texts came"),
        ((), b"alpha", "0 texts came"),
    ],
)
def test_a_wrong_number_of_texts_gets_one_clear_error_and_the_rest_of_the_batch_its_answer(
    other_tenants: tuple[LookupStage, EncodeStage, Store, Base], texts: tuple[bytes, ...], tenant: bytes, words: str
) -> None:
    bad, good = look_up(other_tenants[0], [(texts, tenant), (PAIR, b"alike")])
    assert isinstance(bad, errors.TextCountError)
    assert words in str(bad)
    assert isinstance(good, LookupAnswer)


def test_a_pair_of_which_one_text_is_empty_or_both_are_too_large_is_refused(
    other_tenants: tuple[LookupStage, EncodeStage, Store, Base],
) -> None:
    large = b"cat " * 10_000
    answers = look_up(
        other_tenants[0], [(texts, b"alike") for texts in ((b"a", b" "), (b"\x01", b"a"), (large, large))]
    )
    assert [type(one) for one in answers] == [errors.EmptyTextError, errors.EmptyTextError, errors.TextTooLargeError]


def close(stage: LookupStage, lineage: open_domains.Lineage) -> None:
    """Close a domain, as after it has left the cache and no request uses it."""
    stage.domains._cache.drop([lineage])
    stage.domains._in_use.clear()


def blocked(
    monkeypatch: pytest.MonkeyPatch, method: str, *names: str, then: errors.HplmError | None = None
) -> threading.Event:
    """Block `TenantBank.card` or `.load` of these tenants until the event is set; then they raise `then`."""
    may_go_on, really = threading.Event(), getattr(TenantBank, method)

    def waiting(bank: TenantBank, key: ServedTenant) -> Any:
        if key.name in names:
            assert may_go_on.wait(120)
            if then is not None:
                raise then
        return really(bank, key)

    monkeypatch.setattr(TenantBank, method, waiting)
    return may_go_on


def test_a_tenant_whose_card_is_slow_to_read_or_broken_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage = started.add(plot_stage_of(tiny.make_repository(tmp_path)))
    may_go_on = blocked(monkeypatch, "card", "alpha", "gamma", "tagger", then=errors.CorruptArtifactError("broken"))
    answers = {name: asked(stage, plot_input(name)) for name in ("alpha", "gamma", "tagger", "beta")}
    assert isinstance(answers["beta"].result(SOON_S), LookupAnswer)
    slow = [answer for name, answer in answers.items() if name != "beta"]
    assert not any(answer.done() for answer in slow)
    may_go_on.set()
    assert all(isinstance(answer.result(SOON_S), errors.CorruptArtifactError) for answer in slow)


def test_a_flood_for_a_tenant_whose_card_does_not_come_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage = started.add(plot_stage_of(tiny.make_repository(tmp_path), queue_capacity=20))
    may_go_on = blocked(monkeypatch, "card", "alpha")
    flood = [asked(stage, plot_input("alpha")) for _ in range(15)]
    assert all(isinstance(one.result(SOON_S), errors.QueueFullError) for one in flood[10:])
    assert isinstance(asked(stage, plot_input("beta")).result(SOON_S), LookupAnswer)
    assert not any(one.done() for one in flood[:10])
    may_go_on.set()
    assert all(isinstance(one.result(SOON_S), LookupAnswer) for one in flood[:10])


def test_a_tenant_that_becomes_one_of_pairs_is_asked_for_pairs_from_then_on(tmp_path: Path, started: Started) -> None:
    stage = started.add(plot_stage_of(tiny.make_repository(tmp_path)))
    assert isinstance(look_up(stage, [GOOD_REQUEST])[0], LookupAnswer)
    before = stage._bank.resolve(b"alpha").version_id
    tiny.make_tenant(*tiny.opened(tmp_path), "alpha", 9, like="follows")
    until(lambda: stage._bank.resolve(b"alpha").version_id != before)
    single, pair = look_up(stage, [GOOD_REQUEST, (PAIR, b"alpha")])
    assert isinstance(single, errors.TextCountError)
    assert isinstance(pair, LookupAnswer)


def bad_inputs(good: EncodeRequest) -> list[EncodeRequest]:
    hidden, tokens = good.item.features, good.item.tokens
    nan, infinite = hidden.copy(), hidden.copy()
    nan[1, 1] = np.nan
    infinite[0, 0] = np.inf
    long = np.zeros((41, hidden.shape[1]), dtype=np.float16)
    inputs = [
        EncodeInput(nan, tokens),
        EncodeInput(infinite, tokens),
        EncodeInput(hidden[:, :-1], tokens),
        EncodeInput(hidden[:0], tokens[:0]),
        EncodeInput(long, np.zeros((41, 3), dtype=np.int32)),
        EncodeInput(hidden, tokens[:-1]),
    ]
    return [Request(bad, good.tenant) for bad in inputs]


def test_bad_hidden_states_are_refused_and_the_rest_of_the_batch_answered(
    plot_stage: LookupStage, upper_stage: EncodeStage
) -> None:
    found = look_up(plot_stage, [GOOD_REQUEST])[0]
    assert isinstance(found, LookupAnswer)
    good = labels_input(found, b"alpha")
    bad = bad_inputs(good)
    answers = find_labels(upper_stage, [good, *bad, good])
    assert [type(a) for a in answers] == [EncodeAnswer, *[errors.HiddenStatesError] * len(bad), EncodeAnswer]
    first, last = answers[0], answers[-1]
    assert isinstance(first, EncodeAnswer)
    assert isinstance(last, EncodeAnswer)
    np.testing.assert_allclose(first.logits, last.logits, atol=1e-4, rtol=1e-4)


def test_a_tenant_with_a_broken_file_fails_alone(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    tiny.flip_last_byte(tiny.folder_of(Store(tmp_path / "store"), "beta") / "weights.safetensors")
    answers = find_labels(upper_stage_of(models), [upper_input(name) for name in ("alpha", "beta", "gamma")])
    assert [type(a) for a in answers] == [EncodeAnswer, errors.CorruptArtifactError, EncodeAnswer]


def test_a_domain_and_a_tenant_that_cannot_be_opened_now_are_as_soon_as_they_can(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    plot_stage, upper_stage = plot_stage_of(models), upper_stage_of(models)
    lineage = plot_stage._bank.resolve(b"alpha").lineage
    assert isinstance(look_up(plot_stage, [GOOD_REQUEST])[0], LookupAnswer)
    close(plot_stage, lineage)

    def answers() -> list[object]:
        return [*look_up(plot_stage, [GOOD_REQUEST]), *find_labels(upper_stage, [upper_input("alpha")])]

    with limited(resource.RLIMIT_NOFILE, 3):
        refused = answers()
    assert [type(one) for one in refused] == [errors.StoreUnavailableError] * 2
    assert [type(one) for one in answers()] == [LookupAnswer, EncodeAnswer]


def test_a_bank_that_was_replaced_is_open_no_longer_than_it_may_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    monkeypatch.setattr(catalog, "REMEMBER_S", 0.5)
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    tiny.make_fleet(store, base, 3)
    plot_stage, upper_stage = started.add(plot_stage_of(models)), started.add(upper_stage_of(models))

    def ask() -> None:
        # Through queues and threads: none may keep its last request.
        for _ in range(8):
            looked_up: queue.SimpleQueue[LookupAnswer | errors.HplmError] = queue.SimpleQueue()
            submit(plot_stage, plot_input("t1"), looked_up.put)
            found = looked_up.get(timeout=SOON_S)
            assert isinstance(found, LookupAnswer)
            answered: queue.SimpleQueue[EncodeAnswer | errors.HplmError] = queue.SimpleQueue()
            submit(upper_stage, labels_input(found, b"t1", found.version_id), answered.put)
            assert isinstance(answered.get(timeout=SOON_S), EncodeAnswer)

    def is_open(bank: str) -> bool:
        return any(store.bank(bank) in one.parents for one in open_files())

    ask()
    assert is_open("fleet")
    tiny.make_fleet(store, base, 3, seed=1)
    until(lambda: not is_open("fleet"))
    ask()
    assert is_open("fleet-2")


def test_tenants_whose_weights_are_slow_to_read_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage = started.add(upper_stage_of(tiny.make_repository(tmp_path)))
    may_go_on = blocked(monkeypatch, "load", "alpha", "gamma", "tagger")
    answers = {name: asked(stage, upper_input(name)) for name in ("alpha", "gamma", "tagger", "beta")}
    assert isinstance(answers["beta"].result(SOON_S), EncodeAnswer)
    slow_ones = [answer for name, answer in answers.items() if name != "beta"]
    assert not any(answer.done() for answer in slow_ones)
    may_go_on.set()
    assert all(isinstance(answer.result(SOON_S), EncodeAnswer) for answer in slow_ones)


def over_a_registry_that_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Started,
    then: errors.HplmError | None = None,
    **changed: Any,
) -> tuple[EncodeStage, threading.Event]:
    """A started stage whose registry answers about unknown versions only after the event, with `then`."""
    stage, may_go_on = upper_stage_of(tiny.make_repository(tmp_path), **changed), threading.Event()

    def hang(version_id: int) -> ServedTenant:
        assert may_go_on.wait(120)
        raise then or errors.UnknownVersionError(str(version_id))

    monkeypatch.setattr(stage._catalog._registry, "served_version", hang)
    return started.add(stage), may_go_on


def test_a_version_that_a_registry_is_asked_for_which_hangs_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage, may_go_on = over_a_registry_that_hangs(tmp_path, monkeypatch, started)
    unknown = asked(stage, upper_input("alpha", version_id=999))
    late = asked(stage, upper_input("alpha", 0.4, version_id=999))
    known = asked(stage, upper_input("alpha"))
    assert isinstance(known.result(SOON_S), EncodeAnswer)
    assert isinstance(late.result(SOON_S), errors.DeadlineError)
    assert not unknown.done()
    may_go_on.set()
    assert isinstance(unknown.result(SOON_S), errors.UnknownVersionError)


def test_a_flood_of_names_that_nobody_has_leaves_room_for_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage, may_go_on = over_a_registry_that_hangs(tmp_path, monkeypatch, started, queue_capacity=20)
    flood = [asked(stage, upper_input(f"made-up-{number}", version_id=999)) for number in range(40)]
    assert all(isinstance(one.result(SOON_S), errors.QueueFullError) for one in flood[10:])
    assert isinstance(asked(stage, upper_input("alpha")).result(SOON_S), EncodeAnswer)
    may_go_on.set()
    assert all(isinstance(one.result(SOON_S), errors.UnknownVersionError) for one in flood[:10])


@pytest.mark.parametrize("of", ["tenant", "version"])
def test_a_load_that_fails_says_as_much_however_many_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started, of: str
) -> None:
    error = errors.CorruptArtifactError("broken")
    may_load = blocked(monkeypatch, "load", "alpha", then=error)
    stage, may_go_on = over_a_registry_that_hangs(tmp_path, monkeypatch, started, error)
    version_id = 999 if of == "version" else None
    answers = [asked(stage, upper_input("alpha", version_id=version_id)) for _ in range(200)]
    may_load.set()
    may_go_on.set()
    assert all(isinstance(answer.result(SOON_S), errors.CorruptArtifactError) for answer in answers)
    assert len(list(traceback.walk_tb(error.__traceback__))) < 20


def stage_that_loads(kind: str, tmp_path: Path, **changed: Any) -> LookupStage | EncodeStage:
    """Make the look-up stage, which reads cards, or the encode stage, which loads weights."""
    stage_of = plot_stage_of if kind == "card" else upper_stage_of
    return stage_of(tiny.make_repository(tmp_path), **changed)


def input_for(stage: LookupStage | EncodeStage, name: str, deadline_s: float | None) -> LookupRequest | EncodeRequest:
    return plot_input(name, deadline_s) if isinstance(stage, LookupStage) else upper_input(name, deadline_s)


@pytest.mark.parametrize("kind", ["card", "load"])
def test_who_waits_for_files_that_hang_is_answered_at_the_deadline_or_when_the_client_or_the_stage_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stage = stage_that_loads(kind, tmp_path)
    may_go_on = blocked(monkeypatch, kind, "alpha")
    stage.start()
    gone, over = threading.Event(), threading.Event()
    answers: dict[str, Future[Any]] = {}
    requests: dict[str, weakref.ref[Any]] = {}

    def ask(name: str, deadline_s: float | None) -> None:
        is_cancelled = gone.is_set if name == "gone" else never
        is_over = over.is_set if name == "over" else never
        answers[name] = Future()
        request = input_for(stage, "alpha", deadline_s)
        request.client = CallbackClient(answers[name].set_result, is_cancelled, is_over)
        requests[name] = weakref.ref(request)
        stage.submit(request)

    for name, deadline_s in (("over", 1000.0), ("late", 100.0), ("gone", 1000.0), ("stopped", 1000.0)):
        ask(name, deadline_s)
    assert stage.waiting == 4
    over.set()
    assert isinstance(answers["over"].result(SOON_S), errors.CancelledError)
    monkeypatch.setattr(stage._batch_loop._pending, "_clock", lambda: time.monotonic() + 200)
    assert isinstance(answers["late"].result(SOON_S), errors.DeadlineError)
    # A load that hangs must not keep all refused requests in memory.
    until(lambda: requests["late"]() is None)
    assert requests["gone"]() is not None
    assert not answers["gone"].done()
    gone.set()
    assert isinstance(answers["gone"].result(SOON_S), errors.CancelledError)
    assert stage.waiting == 1
    stage.stop()
    assert isinstance(answers["stopped"].result(0), errors.StoppingError)
    # The late load answers no request a second time: its Future would raise.
    may_go_on.set()


@pytest.mark.parametrize("kind", ["card", "load"])
def test_no_more_wait_for_files_that_hang_than_may_wait_at_all_also_where_all_were_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started, kind: str
) -> None:
    stage = started.add(stage_that_loads(kind, tmp_path, queue_capacity=20))
    may_go_on = blocked(monkeypatch, kind, "alpha")

    def ask(name: str, deadline_s: float | None) -> Any:
        return asked(stage, input_for(stage, name, deadline_s)).result(SOON_S)

    # A request that comes too late takes no permit.
    while stage._load_permits._held["alpha"] < 10:
        assert isinstance(ask("alpha", 0.05), errors.DeadlineError)
    assert isinstance(ask("alpha", None), errors.QueueFullError)
    assert not isinstance(ask("beta", None), errors.HplmError)
    may_go_on.set()
    until(lambda: not isinstance(ask("alpha", None), errors.HplmError))


def test_a_weight_is_worth_places_in_the_queue_of_the_look_up(tmp_path: Path, started: Started) -> None:
    models = tiny.make_repository(tmp_path, plot_settings={"queue_capacity": 8, "tenant_weights": {"alpha": 3}})
    stage = plot_stage_of(models)
    # The cards are in memory then: requests are queued at once, and stay in the queue until `start`.
    look_up(stage, [((b"the red cat",), name) for name in (b"alpha", b"beta")])
    answers: dict[bytes, list[LookupAnswer | errors.HplmError]] = {b"alpha": [], b"beta": []}
    for name, got in answers.items():
        for _ in range(8):
            submit(stage, plot_input(name.decode()), got.append)
    until(lambda: sum(map(len, answers.values())) == 8)
    assert {type(one) for got in answers.values() for one in got} == {errors.QueueFullError}
    assert (len(answers[b"alpha"]), len(answers[b"beta"])) == (2, 6)
    started.add(stage)
    until(lambda: sum(map(len, answers.values())) == 16)


def test_a_tenant_of_another_base_is_refused(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    with pytest.raises(errors.WrongBaseError, match="fine-tune it again"):
        tenants.load(tiny.folder_of(Store(tmp_path / "store"), "alpha"), name="alpha", fingerprint="0123456789abcdef")


@pytest.mark.parametrize("max_tokens", [3, 31])
def test_a_base_of_short_texts_answers(tmp_path: Path, max_tokens: int) -> None:
    models = tiny.make_repository(tmp_path, shape=tiny.config(max_tokens=max_tokens))
    (looked_up,) = look_up(plot_stage_of(models), [((b"the cat",), b"alpha")])
    assert isinstance(looked_up, LookupAnswer)
    (answer,) = find_labels(upper_stage_of(models), [labels_input(looked_up, b"alpha")])
    assert isinstance(answer, EncodeAnswer)


def test_a_missing_base_is_named_at_the_start(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    shutil.rmtree(tmp_path / "store" / "bases")
    with pytest.raises(errors.MissingArtifactError, match="no base in"):
        upper_stage_of(models)


def test_cut_weights_of_a_base_are_corrupt_also_where_no_checksum_is_looked_at(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    base = bases.load(Store(tmp_path / "store").base("tiny"), verify=False)
    for name, read in (("upper", base.load_upper), ("lower", lambda: load_lower(base))):
        weights = base.folder / f"{name}.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        with pytest.raises(errors.CorruptArtifactError, match=name):
            read()


def test_a_broken_root_shows_at_the_start_where_no_tenant_stands_on_it(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store = Store(tmp_path / "store")
    with closing(Registry.open(store)) as registry:
        for name in tiny.TASKS:
            registry.delete_tenant(name, time.time())
    values = store.table(tiny.PLOT, "root") / "values.f16"
    values.write_bytes(values.read_bytes()[:-2])
    with pytest.raises(errors.CorruptArtifactError, match=r"values\.f16"):
        plot_stage_of(models)


def test_a_copied_tenant_folder_is_never_served_as_the_tenant_it_was_copied_from(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    folder = tiny.folder_of(Store(tmp_path / "store"), "alpha")
    shutil.copytree(folder, tmp_path / "copy")
    fingerprint = tenants.load_card(folder).base
    with pytest.raises(errors.CorruptArtifactError, match="card of another tenant"):
        tenants.load(tmp_path / "copy", fingerprint=fingerprint)


def test_a_manifest_with_flipped_keys_is_corrupt_not_a_crash(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    manifest = tiny.folder_of(Store(tmp_path / "store"), "alpha") / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sha256", "rha256"))
    with pytest.raises(errors.CorruptArtifactError, match="not a manifest"):
        tenants.load_card(manifest.parent)


def test_a_broken_bank_tells_a_client_nothing_of_where_it_lies(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    bank = tiny.make_bank(store, base, [tiny.load_tenant(store, base, "alpha")])
    (bank / "manifest.json").write_text("{}")
    answer, other = look_up(plot_stage_of(models), [GOOD_REQUEST, ((b"the red cat",), b"beta")])
    assert isinstance(answer, errors.CorruptArtifactError)
    assert str(tmp_path) not in answer.wire()
    assert isinstance(other, LookupAnswer)


@pytest.mark.parametrize("error", [Panic, ValueError])
def test_a_text_that_the_tokenizer_fails_on_fails_alone(
    plot_stage: LookupStage, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    encode = plot_stage.lookup._encoder.encode

    def failing(texts: Any) -> Any:
        if "poison" in texts:
            raise error
        return encode(texts)

    monkeypatch.setattr(plot_stage.lookup._encoder, "encode", failing)
    answers = look_up(plot_stage, [GOOD_REQUEST, ((b"poison",), b"alpha"), GOOD_REQUEST])
    assert [type(one) for one in answers] == [LookupAnswer, errors.InternalError, LookupAnswer]


def test_a_text_that_the_look_up_fails_on_fails_alone(plot_stage: LookupStage, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, vocab_size = plot_stage.lookup._encoder.encode, plot_stage._base.config.vocab_size

    def beyond(texts: Any) -> Any:
        found = zip(texts, encode(texts), strict=True)
        return [replace(one, ids=one.ids + vocab_size) if text == "poison" else one for text, one in found]

    monkeypatch.setattr(plot_stage.lookup._encoder, "encode", beyond)
    answers = look_up(plot_stage, [GOOD_REQUEST, ((b"poison",), b"alpha"), GOOD_REQUEST])
    assert [type(one) for one in answers] == [LookupAnswer, errors.InternalError, LookupAnswer]


def test_the_log_says_why_texts_fail_together_that_do_not_fail_alone(
    plot_stage: LookupStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = plot_stage.lookup._encoder.encode
    lookup = plot_stage.domains.fetch(plot_stage._bank.resolve(b"alpha").lineage).result()
    hidden_states = lookup.hidden_states

    def encode_few(texts: Any) -> Any:
        if len(texts) > 1:
            raise ValueError("too many texts")
        return encode(texts)

    def look_up_few(ids: Any, lengths: Any) -> Any:
        if len(lengths) > 1:
            raise MemoryError("too many tokens")
        return hidden_states(ids, lengths)

    monkeypatch.setattr(plot_stage.lookup._encoder, "encode", encode_few)
    monkeypatch.setattr(lookup, "hidden_states", look_up_few)
    assert all(isinstance(answer, LookupAnswer) for answer in look_up(plot_stage, [GOOD_REQUEST] * 2))
    assert "too many texts" in caplog.text
    assert "too many tokens" in caplog.text


def test_a_tokenizer_with_tokens_that_the_base_does_not_have_is_refused_at_the_start(tmp_path: Path) -> None:
    shape = tiny.config()
    models = tiny.make_repository(tmp_path, shape=replace(shape, vocab_size=shape.vocab_size - 1))
    with pytest.raises(errors.CorruptArtifactError, match=f"token ids up to {shape.vocab_size - 1}"):
        plot_stage_of(models)


def test_a_domain_whose_look_up_fails_fails_its_own_requests(
    plot_stage: LookupStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = plot_stage.domains.fetch(plot_stage._bank.resolve(b"alpha").lineage).result()
    monkeypatch.setattr(lookup, "hidden_states", lambda *_: 1 / 0)
    assert isinstance(look_up(plot_stage, [GOOD_REQUEST])[0], errors.InternalError)


@pytest.mark.parametrize(
    ("changed", "device"),
    [
        ({}, "cuda:0"),
        ({"device": "cuda"}, "cuda:0"),
        ({"device": "cpu"}, "cpu"),
        ({"quantization": "int8"}, "cpu"),
        ({"quantization": "int8", "device": "cuda"}, "cuda:0"),
        ({"miss": "backoff"}, "cpu"),
    ],
)
def test_windows_are_computed_where_the_settings_say_and_by_default_on_a_gpu_but_in_integers(
    changed: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = LookupSettings(store="store", base="tiny", table="general", **changed)
    assert choose_lookup_device(settings) == torch.device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_look_up_that_wants_a_gpu_does_not_start_without_one(tiny_models: Path) -> None:
    for miss in ("compute", "backoff"):
        with pytest.raises(errors.ConfigError, match="torch sees no GPU"):
            plot_stage_of(tiny_models, device="cuda", miss=miss)
    assert plot_stage_of(tiny_models).domains.how_misses_are_computed.startswith("computed on cpu in ")


def test_a_look_up_whose_gpu_is_lost_tries_no_text_again_and_tells_the_batch_loop(
    plot_stage: LookupStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def lost(ids: Any, lengths: Any) -> Any:
        asked.append(len(lengths))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lookup = plot_stage.domains.fetch(plot_stage._bank.resolve(b"alpha").lineage).result()
    monkeypatch.setattr(lookup, "hidden_states", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: lost([], []))
    with pytest.raises(RuntimeError, match="illegal memory") as caught:
        look_up(plot_stage, [GOOD_REQUEST] * 2)
    assert asked[0] == 2
    assert 1 not in asked
    assert plot_stage._batch_loop._is_fatal(caught.value)


def test_a_gpu_that_is_lost_while_a_domain_is_opened_ends_the_process_once_who_asked_knows(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    stage = started.add(plot_stage_of(tiny_models))
    ended = threading.Event()

    def lost(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lineage = stage._bank.resolve(b"alpha").lineage
    stage.domains.forget([lineage], [])
    monkeypatch.setattr(stage.domains, "_open_lineage", lost)
    monkeypatch.setattr(stage._batch_loop, "_die", ended.set)
    assert isinstance(asked(stage, plot_input("alpha")).result(SOON_S), errors.InternalError)
    assert not ended.is_set()
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert isinstance(asked(stage, plot_input("alpha")).result(SOON_S), errors.InternalError)
    assert ended.wait(SOON_S)


def test_a_long_text_counts_as_what_is_looked_up_of_it(
    plot_stage: LookupStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    look_up(plot_stage, [GOOD_REQUEST])
    monkeypatch.setattr(plot_stage._batch_loop, "submit", lambda request, *, tokens, **_: counted.append(tokens))
    most = plot_stage._base.config.max_tokens
    for size in (8, 4 * most, 65_536):
        plot_stage.submit(Request((b"a" * size,), b"alpha"))
    short, full, long = counted
    assert short < full == long == most


def test_the_look_up_counts_the_tokens_it_looked_up_as_many_as_there_are(tiny_models: Path, started: Started) -> None:
    stage = started.add(plot_stage_of(tiny_models))
    texts = (b"the", b"the red cat sleeps over the river", b"\x01")
    answers = [asked(stage, Request((text,), b"alpha")) for text in texts]
    short, long, _ = (answer.result(SOON_S) for answer in answers)
    assert stage.counts["tokens"] == len(short.features) + len(long.features)


def test_a_domain_that_requests_still_hold_is_opened_once(plot_stage: LookupStage) -> None:
    lineage = plot_stage._bank.resolve(b"alpha").lineage
    first = plot_stage.domains.fetch(lineage).result()
    plot_stage.domains._cache.drop([lineage])
    assert plot_stage.domains.fetch(lineage).result() is first


def test_a_domain_whose_files_were_damaged_since_is_refused_when_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = plot_stage_of(tiny.make_repository(tmp_path))
    checked = []

    def verified(folder: Path) -> None:
        checked.append(folder)
        verify_domain(folder)

    monkeypatch.setattr(open_domains, "verify_domain", verified)
    lineage = stage._bank.resolve(b"alpha").lineage

    def reopened() -> object:
        close(stage, lineage)
        return look_up(stage, [GOOD_REQUEST])[0]

    assert isinstance(reopened(), LookupAnswer)
    assert not checked, "nothing changed since the start"
    values = max(stage._store.path(lineage[0]).rglob("values.f16"), key=lambda path: path.stat().st_size)
    with values.open("r+b") as file:
        file.write(b"\xff" * 8)
    assert isinstance(reopened(), errors.CorruptArtifactError)
    assert checked


def test_a_domain_that_the_disk_fails_to_read_is_not_checked_again_at_once(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = plot_stage_of(tiny_models)
    lineage = stage._bank.resolve(b"alpha").lineage
    tries = 0

    def failing(lineage: Any) -> Any:
        nonlocal tries
        tries += 1
        raise OSError(errno.EIO, "the disk fails")

    stage.domains.forget([lineage], [])
    monkeypatch.setattr(stage.domains, "_open_lineage", failing)
    for _ in range(3):
        error = look_up(stage, [GOOD_REQUEST])[0]
        assert isinstance(error, errors.StoreUnavailableError)
        assert "disk" not in error.wire()
    assert tries == 1
