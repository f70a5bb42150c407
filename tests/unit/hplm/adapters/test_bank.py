"""Bank files are opened once for all requests, and dropped bank files are closed."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hplm.adapters import bank as banks
from hplm.adapters.bank import TenantBank
from hplm.adapters.bank_file import BankFile
from hplm.errors import CorruptArtifactError, StoreUnavailableError
from hplm.models.base import Base
from hplm.store.artifact import Artifact
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.adapters.place import Place, pack_all
from tests.waiting import until

NAMES = ("alpha", "beta", "gamma")


class Opening:
    """Bank files that open when the test allows it, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.opened: list[weakref.ref[BankFile]] = []
        monkeypatch.setattr(banks, "BankFile", self._open)

    def asked(self, bank: TenantBank, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        """Count the requests for a bank from now on."""
        counted, really = Counter(all=0), bank._bank

        def asking(folder: Path, name: str) -> BankFile:
            counted["all"] += 1
            return really(folder, name)

        monkeypatch.setattr(bank, "_bank", asking)
        return counted

    def _open(self, folder: Path, fingerprint: str) -> BankFile:
        self.begun += 1
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        found = BankFile(folder, fingerprint)
        self.opened.append(weakref.ref(found))
        return found


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    return Opening(monkeypatch)


def test_requests_for_many_tenants_of_a_cold_bank_open_it_once(
    tiny_base: Base, store: Store, place: Place, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_all(store, tiny_base)
    place.catalog.refresh()
    keys = [place.bank.resolve(name.encode()) for name in NAMES]
    asked = opening.asked(place.bank, monkeypatch)
    with ThreadPoolExecutor(6) as pool:
        cards = [pool.submit(place.bank.card, key) for key in keys * 2]
        until(lambda: asked["all"] == 6 and opening.begun > 0)
        opening.may_end.set()
        assert [card.result(60).name for card in cards] == [*NAMES, *NAMES]
    assert opening.begun == 1


def test_a_bank_let_go_while_it_is_opened_is_not_kept(
    tiny_base: Base, store: Store, place: Place, opening: Opening
) -> None:
    pack_all(store, tiny_base)
    place.catalog.refresh()
    key = place.bank.resolve(b"alpha")
    with ThreadPoolExecutor(1) as pool:
        card = pool.submit(place.bank.card, key)
        until(lambda: opening.begun > 0)
        place.bank.drop([key.path])
        opening.may_end.set()
        # Earlier requests are answered.
        assert card.result(60).name == "alpha"
        del card
    gc.collect()
    assert [found() for found in opening.opened] == [None]


@pytest.mark.parametrize("banked", [False, True])
@pytest.mark.parametrize("where", ["adapter", "weight", "bias", "transitions"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_tenant_published_with_weights_that_are_no_numbers_is_refused_alone(
    place: Place, store: Store, tiny_base: Base, where: str, banked: bool, value: float
) -> None:
    broken = tiny.tenant_of(tiny_base, "gamma", 7, like="tagger")
    assert broken.is_finite
    parts = {"adapter": broken.packed.weights, **broken.head.arrays}
    parts[where].flat[-1] = value
    if banked:
        alpha = tiny.load_tenant(store, tiny_base, "alpha")
        shutil.rmtree(store.root / "tenants")
        tiny.make_bank(store, tiny_base, [alpha, broken])
    else:
        tiny.delete_tenant(store, "gamma")
        tiny.publish(store, tiny_base, tiny.PLOT, broken)
    with pytest.raises(CorruptArtifactError, match="weights of gamma hold NaN or infinity"):
        place.load("gamma")
    assert place.load("alpha").is_finite


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EMFILE, StoreUnavailableError), (errno.EIO, StoreUnavailableError), (errno.EACCES, CorruptArtifactError)],
)
@pytest.mark.parametrize("is_banked", [False, True], ids=["folder", "bank"])
def test_weights_that_cannot_be_read_now_are_no_fault_of_the_tenant(
    tiny_base: Base,
    store: Store,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    is_banked: bool,
    number: int,
    kind: type[Exception],
) -> None:
    if is_banked:
        pack_all(store, tiny_base)

    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((banks, "BankFile") if is_banked else (Artifact, "read_bytes")), failing)
    with pytest.raises(kind, match="cannot be read"):
        place.load("alpha")


def test_a_bank_that_failed_to_open_fails_all_who_waited_and_is_tried_again(
    tiny_base: Base, store: Store, place: Place, opening: Opening
) -> None:
    pack_all(store, tiny_base)
    place.catalog.refresh()
    keys = [place.bank.resolve(name.encode()) for name in NAMES]
    opening.error = CorruptArtifactError("for now")
    with ThreadPoolExecutor(3) as pool:
        cards = [pool.submit(place.bank.card, key) for key in keys]
        until(lambda: opening.begun > 0)
        opening.may_end.set()
        for card in cards:
            with pytest.raises(CorruptArtifactError, match="for now"):
                card.result(60)
    opening.error = None
    assert place.bank.card(keys[0]).name == "alpha"
