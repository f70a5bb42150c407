"""Tenants over a whole base are made, updated and rolled back by the same jobs as over any other; domains are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hplm.adapters import tenant as tenants
from hplm.errors import BadManageRequestError
from hplm.manage.service import ManageService
from hplm.models import base as bases
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny
from tests.managed import at_work
from tests.unit.hplm.manage.making import (
    NOW_S,
    ask,
    colours,
    create_domain,
    create_tenant,
    make_service,
    update,
    upload,
    work,
)

PLANNED_WITHIN_S = 120.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the whole base `tiny` and its root, both registered."""
    made = Store(tmp_path / "store")
    base = tiny.make_base(made, tiny.config(form="whole"))
    with closing(Registry.open(made, create=True)) as registry:
        registry.publish_base("tiny", base.fingerprint, "bases/tiny", NOW_S)
        registry.publish_domain("tiny", "general", "bases/tiny", NOW_S, parent_id=None, about={}, expected=None)
    return made


@pytest.fixture
def service(store: Store) -> Iterator[ManageService]:
    with closing(make_service(store)) as opened:
        yield opened


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store)) as opened:
        yield opened


def test_a_tenant_is_made_updated_and_rolled_back(service: ManageService, store: Store, registry: Registry) -> None:
    settings = {"epochs": 2, "learning_rates": [0.02], "adapter_width": "narrow"}
    create_tenant(service, "acme", colours(60), settings=settings)
    work(store)
    update(service, "acme", colours(60, is_swapped=True))
    work(store)
    assert registry.tenant("acme").current.number == 2
    base = bases.load(store.base("tiny"))
    first, second = (
        tenants.load(store.tenant_version("acme", number), fingerprint=base.fingerprint, name="acme")
        for number in (1, 2)
    )
    # Two of four layers have an adapter.
    assert len(first.packed.weights) == len(second.packed.weights) == 2
    assert np.abs(first.adapter.up).max() > 0
    assert np.abs(first.adapter.up - second.adapter.up).max() > 0
    ask(service, "tenant.rollback", tenant="acme", version=1)
    assert ask(service, "tenant.show", tenant="acme")["tenant"]["version"] == 1


def test_a_dry_run_says_what_a_tenant_would_take(service: ManageService, store: Store) -> None:
    service._dry_run_wait_s = PLANNED_WITHIN_S
    data = {"train": {"upload": upload(service, colours(60))}}
    with at_work(store):
        plan = ask(service, "tenant.create", tenant="acme", data=data, dry_run=True)["plan"]
    shape = tiny.config(form="whole")
    wide = shape.reduced_size(16)
    head = 2 * (shape.hidden_size + 1)
    assert plan["bytes"] == 4 * (2 * (2 * shape.hidden_size * wide + wide + shape.hidden_size) + head)
    assert plan["estimated_s"] > 0


def test_a_domain_is_refused_at_once(service: ManageService, registry: Registry) -> None:
    with pytest.raises(BadManageRequestError, match="base 'tiny' is whole: all its layers are computed"):
        create_domain(service)
    assert not registry.jobs()
