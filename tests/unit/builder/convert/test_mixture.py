"""Shares of the sources in the text of a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_builder.convert.distillation import PackedText
from hplm_builder.convert.mixture import mixture
from rich.progress import Progress

from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus.txt").write_text("\n".join(tiny.sentences(6_000)))
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def mixed(folder: Path, share: float) -> tuple[PackedText, PackedText]:
    return mixture({str(folder / "corpus.txt"): share}, folder / "tokenizer.json", 40, Progress(disable=True))


@pytest.mark.parametrize("share", [0.25, 2.0, 2.5])
def test_a_share_chooses_or_repeats_passages(folder: Path, share: float) -> None:
    whole, shared = mixed(folder, 1.0)[0], mixed(folder, share)[0]
    assert len(shared.lengths) == pytest.approx(share * len(whole.lengths), rel=0.1)


def test_a_held_out_passage_is_held_out_once_whatever_the_share(folder: Path) -> None:
    once, often = mixed(folder, 1.0)[1], mixed(folder, 3.0)[1]
    assert once.lengths.tolist() == often.lengths.tolist()
    assert once.ids.tolist() == often.ids.tolist()
