"""Forms of lower encoders: how they are found, and that conversion, packing and manifests take any form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.convert.distillation import PackedText
from hplm_builder.convert.training import Converted, ConvertSettings, distance, train
from rich.progress import Progress

from hplm.core.settings import BaseConfig
from hplm.engine.kernels import int8
from hplm.engine.lower_layers import LOWER_FORMS, lower_form, make_lower, pack
from hplm.errors import ConfigError
from hplm.models import base as bases
from hplm.models.layers import OriginalEncoder
from hplm.store.layout import Store
from tests import tiny
from tests.plugins.centre_token import CentreToken
from tests.plugins.install import install, install_centre_token


@pytest.fixture
def centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BaseConfig:
    """Install the form `centre`; return the shape of a base with it."""
    install_centre_token(tmp_path / "venv", monkeypatch)
    return replace(tiny.config(window=5), lower_form="centre", vectors_per_ngram=1)


def test_an_unknown_form_is_refused_with_the_forms_there_are(centre: BaseConfig) -> None:
    with pytest.raises(ConfigError, match=r"no lower form 'guess'; there are ngram-encoder, windows, centre: install"):
        lower_form("guess")
    assert type(make_lower(centre)).__name__ == CentreToken.__name__


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('torch is too old')", "cannot be imported: torch is too old"),
        ("Form = dict", "is no subclass of hplm.models.lower.LowerEncoder"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    points = "[hplm.lower_forms]\nbroken = broken_form:Form\n"
    monkeypatch.syspath_prepend(install(tmp_path / "venv", "broken_form", source, points, monkeypatch))
    with pytest.raises(ConfigError, match=words):
        lower_form("broken")


@pytest.mark.parametrize("form", LOWER_FORMS)
def test_a_base_whose_config_has_another_number_of_vectors_than_its_form_is_refused(form: str) -> None:
    wrong = replace(tiny.config(), lower_form=form, vectors_per_ngram=2)
    with pytest.raises(ConfigError, match="has vectors_per_ngram 2, but its lower form"):
        make_lower(wrong)


def test_a_form_without_int8_products_refuses_int8_and_is_served_in_floats(
    centre: BaseConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.make_base(Store(tmp_path), centre)
    lower = make_lower(centre)
    monkeypatch.setattr("hplm.engine.lower_layers.check_int8", lambda device: int8.check_int8(device, has_vnni=True))
    with pytest.raises(ConfigError, match="form 'centre' has no int8 products"):
        pack(lower, torch.float32, base)
    pack(lower, torch.float32)
    assert lower(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 1, centre.hidden_size)


def test_conversion_trains_any_form(centre: BaseConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = OriginalEncoder(centre, 4).eval()
    model = Converted(centre, original)
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 20, 200)
    text = PackedText(rng.integers(5, centre.vocab_size, lengths.sum()), lengths)
    before = distance(model, original, text)["relative"]
    settings = ConvertSettings(total_tokens=40_000, batch_tokens=500)
    train(model, original, text, settings, tmp_path / "checkpoint", Progress(disable=True))
    assert distance(model, original, text)["relative"] < 0.8 * before


def test_the_manifest_of_a_base_names_its_form(centre: BaseConfig, tmp_path: Path) -> None:
    tiny.make_base(Store(tmp_path), centre)
    found = bases.load(Store(tmp_path).base("tiny")).config
    assert (found.lower_form, found.vectors_per_ngram) == ("centre", 1)
