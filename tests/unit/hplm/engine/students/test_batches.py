"""Batches of students, of all forms beside each other, against the loop over students."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hplm.adapters.tenant import Tenant
from hplm.core.settings import EncodeSettings
from hplm.engine import reference
from hplm.engine.adapter_plan import OWN_PRODUCT_TOKENS
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.kernels.int8 import check_int8
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.lower_layers import load_lower
from hplm.engine.served_engine import make_engine
from hplm.engine.token_domain import random_features
from hplm.errors import ConfigError, CorruptArtifactError
from hplm.models.base import Base
from hplm.models.device import has_bfloat16
from hplm.models.layers import UpperLayers
from tests import tiny

STUDENTS = 3
BOTH_FORMATS = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16, marks=pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16")
        ),
    ],
    ids=str,
)


def members_of(base: Base) -> list[Tenant]:
    """Return tenants with and without students, of both forms, that read the mean, `[CLS]`, or every token."""
    shared, own = (tiny.students_of(base, form, seed, STUDENTS, form) for seed, form in enumerate(("shared", "own"), 1))
    return [
        shared,
        own,
        tiny.tenant_of(base, "tagger", 3),
        reading_cls(tiny.students_of(base, "shared-cls", 4, STUDENTS, like="follows")),
        reading_cls(tiny.students_of(base, "own-cls", 5, 2, "own", like="beta")),
        tiny.tenant_of(base, "gamma", 6),
        tiny.students_of(base, "shared-grade", 7, 2, like="grade"),
    ]


def reading_cls(tenant: Tenant) -> Tenant:
    return replace(tenant, card=replace(tenant.card, pooling="cls"))


def requests_of(base: Base, members: list[Tenant], seed: int, count: int = 24) -> list[EngineRequest]:
    """Return texts of random lengths, tenants and numbers of students."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        tenant = members[rng.integers(len(members))]
        # Few lengths, so that texts of one length stand at several places.
        features = random_features(base.config, int(rng.choice([1, 5, 6, 17, base.config.max_tokens])), rng)
        requests.append(EngineRequest(tenant, features, students=int(rng.integers(1, tenant.card.students + 1))))
    return requests


def wanted(upper: UpperLayers, request: EngineRequest) -> np.ndarray:
    hidden = torch.from_numpy(request.features)
    if request.tenant.students is None:
        return reference.logits(upper, hidden, request.tenant).numpy()
    return reference.students(upper, hidden, request.tenant, request.students).numpy()


def check_equal(engine: EncodeEngine, base: Base, requests: list[EngineRequest], tolerance: float) -> None:
    upper = base.load_upper()
    for request, got in zip(requests, engine.run(requests), strict=True):
        np.testing.assert_allclose(got, wanted(upper, request), atol=tolerance, rtol=tolerance)


@tiny.BASES_OF_BOTH_KINDS
@pytest.mark.parametrize("num_slots", [STUDENTS + 1, 32])
def test_texts_of_tenants_with_and_without_students_get_the_logits_of_the_loop_over_students(
    tiny_base: Base, num_slots: int
) -> None:
    engine = tiny.engine_of(tiny_base, num_slots, own_slots=min(num_slots, 9) - 1)
    members = members_of(tiny_base)
    for seed in range(2):
        check_equal(engine, tiny_base, requests_of(tiny_base, members, seed), 3e-4)
    engine.close()


@BOTH_FORMATS
def test_no_neighbour_changes_a_bit_of_an_answer_of_students_that_share_layers(
    tiny_base: Base, dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("without AVX-512, products in float32 are rounded by their size")
    engine = tiny.engine_of(tiny_base, 32, dtype=dtype)
    requests = [one for one in requests_of(tiny_base, members_of(tiny_base), 3) if not one.has_own_layers]
    for request, got in zip(requests, engine.run(requests), strict=True):
        np.testing.assert_array_equal(engine.run([request])[0], got)
    engine.close()


@pytest.mark.skipif(not has_bfloat16(), reason="this processor has no bfloat16")
def test_in_bfloat16_students_get_the_logits_of_the_loop_to_the_rounding(tiny_base: Base) -> None:
    engine = tiny.engine_of(tiny_base, 16, dtype=torch.bfloat16)
    check_equal(engine, tiny_base, requests_of(tiny_base, members_of(tiny_base), 0), 0.15)
    engine.close()


def test_beside_int8_students_get_the_logits_of_the_loop_to_the_rounding(tiny_base: Base) -> None:
    try:
        check_int8(torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))
    int8 = measure_ranges(tiny_base, load_lower(tiny_base), tiny_base.load_upper())
    engine = tiny.engine_of(tiny_base, 16, int8=int8)
    members = members_of(tiny_base)
    requests = requests_of(tiny_base, members, 0)
    check_equal(engine, tiny_base, requests, 0.3)
    # Own layers are not in int8.
    check_equal(engine, tiny_base, [request for request in requests if request.has_own_layers], 3e-4)
    engine.close()


def test_the_first_student_alone_has_the_bits_of_an_ordinary_tenant(tiny_base: Base) -> None:
    shared = tiny.students_of(tiny_base, "shared", 1, STUDENTS)
    ordinary = replace(shared, card=replace(shared.card, students=1), students=None)
    features = random_features(tiny_base.config, 9, np.random.default_rng(0))
    engine = tiny.engine_of(tiny_base)
    first, alone = engine.run([EngineRequest(shared, features), EngineRequest(ordinary, features)])
    np.testing.assert_array_equal(first, alone)
    engine.close()


def test_importances_are_those_of_the_first_student(tiny_base: Base) -> None:
    engine, upper = tiny.engine_of(tiny_base, 16), tiny_base.load_upper()
    requests = requests_of(tiny_base, members_of(tiny_base), 0)
    for request, (logits, importance) in zip(requests, engine.run_with_importance(requests), strict=True):
        np.testing.assert_allclose(logits, wanted(upper, request), atol=3e-4, rtol=3e-4)
        hidden, tenant = torch.from_numpy(request.features), request.tenant
        reader, adapters = (reference.own_layers(upper, tenant, 0), None) if request.has_own_layers else (upper, tenant)
        np.testing.assert_allclose(importance, reference.importance(reader, hidden, adapters), atol=3e-4, rtol=3e-4)
    engine.close()


def test_parts_of_a_batch_say_how_many_students_answered_each_text(tiny_base: Base) -> None:
    engine = tiny.engine_of(tiny_base, STUDENTS + 1)
    requests = requests_of(tiny_base, members_of(tiny_base), 1)
    parts = list(engine.run_each(requests))
    assert len(parts) > 2
    numbers = [(text, number) for part in parts for text, number in zip(part.texts, part.students, strict=True)]
    assert sorted(numbers) == [(text, request.students) for text, request in enumerate(requests)]
    engine.close()


class KernelCalls(TorchDispatchMode):
    """Counts calls of torch's operators, without views, which compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@BOTH_FORMATS
@pytest.mark.parametrize("form", ["shared", "own"])
def test_the_number_of_kernel_calls_grows_with_neither_students_nor_tenants(
    tiny_base: Base, form: Any, dtype: torch.dtype
) -> None:
    engine = tiny.engine_of(tiny_base, 32, dtype=dtype)
    members = [tiny.students_of(tiny_base, f"t{seed}", seed, STUDENTS, form) for seed in range(0, 12, 2)]
    # The tokens of all these batches are a size without fillers. Two texts of a tenant have tokens enough for a product of
    # their own.
    features = random_features(tiny_base.config, OWN_PRODUCT_TOKENS // 2, np.random.default_rng(0))
    found: dict[tuple[int, int], Counter[str]] = {}
    for tenants, students in [(1, 2), (1, 3), (2, 1), (6, 1), (6, 3)]:
        requests = [EngineRequest(member, features, students=students) for member in members[:tenants] * 2]
        # Slots are filled before the calls are counted.
        engine.run(requests)
        with KernelCalls() as counted:
            engine.run(requests)
        found[tenants, students] = counted.calls
    assert min(calls.total() for calls in found.values()) > 20
    for calls in found.values():
        assert calls == found[1, 2]
    engine.close()


@pytest.mark.parametrize(
    ("changed", "form", "error"),
    [
        ({"batching": "naive"}, "shared", "students want batching packed"),
        ({"num_slots": STUDENTS}, "shared", "want as many slots, there are 2: raise num_slots"),
        ({"own_slots": STUDENTS - 1}, "own", "want as many slots, there are 2: raise num_slots"),
        ({"own_slots": 0}, "own", "too large for students with own layers"),
    ],
)
def test_a_tenant_whose_students_cannot_all_run_is_refused_by_name(
    tiny_base: Base, changed: dict[str, Any], form: Any, error: str
) -> None:
    engine = tiny.engine_of(tiny_base, **{"num_slots": 8, **changed})
    tenant = replace(tiny.students_of(tiny_base, "acme", 1, STUDENTS, form), version="v")
    with pytest.raises(ConfigError, match=f"tenant acme, version v: .*{error}"):
        engine.check(tenant)
    engine.close()


@pytest.mark.parametrize("form", ["shared", "own"])
def test_students_over_other_layers_are_refused_by_name(tiny_base: Base, form: Any) -> None:
    deeper = replace(tiny_base, config=replace(tiny_base.config, upper_layers=3))
    engine = tiny.engine_of(tiny_base)
    with pytest.raises(CorruptArtifactError, match="tenant acme"):
        engine.check(tiny.students_of(deeper, "acme", 1, STUDENTS, form))
    engine.check(tiny.students_of(tiny_base, "acme", 1, STUDENTS, form))
    engine.close()


def test_a_trunk_wants_packed_batches(tiny_base: Base) -> None:
    trunk, settings = (
        replace(tiny_base, trunk_of="minilm"),
        EncodeSettings("", "tiny", dtype="float32", batching="turbo"),
    )
    with pytest.raises(ConfigError, match=r"base tiny is a trunk, .* batching packed, it is turbo"):
        make_engine(trunk, settings, torch.device("cpu"))
