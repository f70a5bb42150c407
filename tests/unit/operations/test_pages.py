"""The pages name files, sections and results that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_has_its_file_and_section(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_result_is_named_by_a_page() -> None:
    named = set(re.findall(r"results/([\w.-]+)\)", "".join(page.read_text() for page in PAGES)))
    assert {path.name for path in (ROOT / "docs" / "results").iterdir()} == named


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "threat-model.md").read_text())
    assert len(named) > 20
    missing = []
    for path, name in named:
        file = ROOT / "tests" / path
        if not file.is_file() or f"\ndef {name}(" not in file.read_text():
            missing.append(f"{path}::{name}")
    assert missing == []


def test_each_claim_of_the_threat_model_has_a_test() -> None:
    page = (ROOT / "docs" / "threat-model.md").read_text()
    rows = re.findall(r"^\| claim \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    assert rows
    assert [row for table in rows for row in table.splitlines() if "::test_" not in row] == []
