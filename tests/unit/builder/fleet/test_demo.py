"""The demo's files: what hplm ships, how it is made, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.data.splits import split_of
from hplm_builder.fleet.demo import NGRAMS, SHIPPED, TENANTS, DemoTenant, build_demo, ship_demo, shipped_tenants
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.errors import WrongBaseError
from hplm.store import artifact
from hplm.tasks.examples import LabelledText

QUIET = Progress(disable=True)


def test_the_shipped_folder_has_every_tenant_with_its_scores_and_is_small() -> None:
    assert shipped_tenants() == sorted(demo.name for demo in TENANTS)
    page = (SHIPPED / "README.md").read_text()
    for demo in TENANTS:
        stored = artifact.read(SHIPPED / demo.name, tenants.KIND)
        stored.verify()
        card = tenants.load_card(SHIPPED / demo.name)
        assert demo.source in page
        assert f"| {card.about['scores']['test_accuracy']:.3f} |" in page
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 2_500_000


def colours() -> list[tuple[LabelledText, str]]:
    """Texts with a word that decides the label, enough of them in each part of the split."""
    texts = [f"number {i} is {'red' if i % 2 else 'blue'}" for i in range(90)]
    return [(LabelledText(text, "odd" if "red" in text else "even"), text) for text in texts]


def test_files_that_were_made_anew_are_installed_and_tenants_of_other_weights_are_refused(tmp_path: Path) -> None:
    shipped, folder = tmp_path / "shipped", tmp_path / "demo"
    assert {split_of(text.text) for text, _ in colours()} == {"train", "dev", "test"}
    demo = DemoTenant("colours", "made up, Apache-2.0", colours, 100, 1, "number 7 is red")
    ship_demo(shipped, QUIET, [demo], lambda: [text.text for text, _ in colours()])
    with np.load(shipped / NGRAMS) as arrays:
        assert len(arrays["grams"]) == len(arrays["counts"]) > 0
    assert "made up, Apache-2.0" in (shipped / "README.md").read_text()
    (card,) = build_demo(folder, QUIET, shipped)
    assert (card.name, card.example, card.labels) == ("colours", "number 7 is red", ("even", "odd"))
    # What is there stays.
    assert build_demo(folder, QUIET, shipped) == [card]
    assert (folder / "models" / "hbert_plot" / "config.pbtxt").is_file()
    manifest = shipped / "colours" / artifact.MANIFEST
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**values, "meta": {**values["meta"], "base": "0" * 16}}))
    with pytest.raises(WrongBaseError, match=r"'colours' was trained over other weights .* `make demo-tenants`"):
        build_demo(tmp_path / "other", QUIET, shipped)
