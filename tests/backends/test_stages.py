"""The two stages without Triton: what is wrong with one request stays with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hplm import config, errors
from hplm.adapters import bank_file
from hplm.adapters import tenant as tenants
from hplm.config import PlotSettings, UpperSettings
from hplm.serving.plot_stage import LookedUp, PlotStage
from hplm.serving.upper_stage import UpperAnswer, UpperInput, UpperStage
from hplm.store.layout import Store
from tests import tiny

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


@pytest.fixture(scope="module")
def plot_stage(tiny_models: Path) -> PlotStage:
    folder = tiny_models / "hbert_plot" / "1"
    return PlotStage(config.load(PlotSettings, folder / "settings.json"), folder)


@pytest.fixture(scope="module")
def upper_stage(tiny_models: Path) -> UpperStage:
    folder = tiny_models / "hbert_upper" / "1"
    return UpperStage(config.load(UpperSettings, folder / "settings.json"), folder)


def test_each_bad_request_of_a_batch_gets_its_error_and_the_good_ones_their_answer(plot_stage: PlotStage) -> None:
    alone = plot_stage.run([(b"the red cat", b"alpha")])[0]
    assert isinstance(alone, LookedUp)
    requests = [pair for text, tenant, _ in BAD_REQUESTS for pair in ((text, tenant), (b"the red cat", b"alpha"))]
    answers = plot_stage.run(requests)
    for (_, _, error), bad, good in zip(BAD_REQUESTS, answers[::2], answers[1::2], strict=True):
        assert type(bad) is error
        assert len(bad.wire()) < 300
        assert isinstance(good, LookedUp)
        np.testing.assert_allclose(good.hidden, alone.hidden, atol=2e-3, rtol=2e-3)


def test_no_error_names_another_tenant(plot_stage: PlotStage) -> None:
    for text, tenant, _ in BAD_REQUESTS:
        answer = plot_stage.run([(text, tenant)])[0]
        assert isinstance(answer, errors.HplmError)
        for name in tiny.TASKS:
            assert name.encode() in tenant or name not in answer.wire()


def bad_inputs(good: UpperInput) -> list[UpperInput]:
    nan, infinite = good.hidden.copy(), good.hidden.copy()
    nan[1, 1] = np.nan
    infinite[0, 0] = np.inf
    long = np.zeros((41, good.hidden.shape[1]), dtype=np.float16)
    return [
        UpperInput(nan, good.tokens, good.tenant),
        UpperInput(infinite, good.tokens, good.tenant),
        UpperInput(good.hidden[:, :-1], good.tokens, good.tenant),
        UpperInput(good.hidden[:0], good.tokens[:0], good.tenant),
        UpperInput(long, np.zeros((41, 3), dtype=np.int32), good.tenant),
        UpperInput(good.hidden, good.tokens[:-1], good.tenant),
    ]


def test_bad_hidden_states_are_refused_and_the_rest_of_the_batch_answered(
    plot_stage: PlotStage, upper_stage: UpperStage
) -> None:
    found = plot_stage.run([(b"the red cat", b"alpha")])[0]
    assert isinstance(found, LookedUp)
    good = UpperInput(found.hidden, found.tokens, b"alpha")
    bad = bad_inputs(good)
    answers = upper_stage.run([good, *bad, good])
    assert [type(a) for a in answers] == [UpperAnswer, *[errors.HiddenStatesError] * len(bad), UpperAnswer]
    first, last = answers[0], answers[-1]
    assert isinstance(first, UpperAnswer)
    assert isinstance(last, UpperAnswer)
    np.testing.assert_allclose(first.logits, last.logits, atol=1e-4, rtol=1e-4)


def test_a_tenant_with_a_broken_file_fails_alone(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    path = tmp_path / "store" / "tenants" / "beta" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    folder = models / "hbert_upper" / "1"
    stage = UpperStage(config.load(UpperSettings, folder / "settings.json"), folder)
    hidden, tokens = np.zeros((3, 48), dtype=np.float16), np.zeros((3, 3), dtype=np.int32)
    answers = stage.run([UpperInput(hidden, tokens, name) for name in (b"alpha", b"beta", b"gamma")])
    assert [type(a) for a in answers] == [UpperAnswer, errors.CorruptArtifactError, UpperAnswer]


def test_a_tenant_of_another_base_is_refused(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    with pytest.raises(errors.WrongBaseError, match="fine-tune it again"):
        tenants.load(tmp_path / "store" / "tenants" / "alpha", fingerprint="0123456789abcdef")


def test_a_missing_base_is_named_at_the_start(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    shutil.rmtree(tmp_path / "store" / "bases")
    folder = models / "hbert_upper" / "1"
    with pytest.raises(errors.MissingArtifactError, match="no base in"):
        UpperStage(config.load(UpperSettings, folder / "settings.json"), folder)


def test_a_copied_tenant_folder_is_never_served_as_the_tenant_it_was_copied_from(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    members = tmp_path / "store" / "tenants"
    shutil.copytree(members / "alpha", members / "copy")
    fingerprint = tenants.load_card(members / "alpha").base
    with pytest.raises(errors.CorruptArtifactError, match="card of another tenant"):
        tenants.load(members / "copy", fingerprint=fingerprint)


def test_a_manifest_with_flipped_keys_is_corrupt_not_a_crash(tmp_path: Path) -> None:
    tiny.make_repository(tmp_path)
    manifest = tmp_path / "store" / "tenants" / "alpha" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sha256", "rha256"))
    with pytest.raises(errors.CorruptArtifactError, match="not a manifest"):
        tenants.load_card(manifest.parent)


def test_a_broken_bank_tells_a_client_nothing_of_where_it_lies(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store = Store(tmp_path / "store")
    fingerprint = tenants.load_card(store.tenant("alpha")).base
    alpha = tenants.load(store.tenant("alpha"), fingerprint=fingerprint)
    folder = models / "hbert_plot" / "1"
    stage = PlotStage(config.load(PlotSettings, folder / "settings.json"), folder)
    shutil.rmtree(store.tenant("alpha"))
    bank_file.write(store.bank("fleet"), fingerprint, [alpha])
    assert isinstance(stage.run([(b"the red cat", b"alpha")])[0], LookedUp)
    (store.bank("fleet") / "manifest.json").write_text("{}")
    # The bank that was good goes on; one that never was has nothing to go on with.
    assert isinstance(stage.run([(b"the red cat", b"alpha")])[0], LookedUp)
    bank_file.write(store.bank("a-new-one"), fingerprint, [alpha])
    (store.bank("a-new-one") / "manifest.json").write_text("{}")
    answer = stage.run([(b"the red cat", b"alpha")])[0]
    assert isinstance(answer, errors.CorruptArtifactError)
    assert str(tmp_path) not in answer.wire()
