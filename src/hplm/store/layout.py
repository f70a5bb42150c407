"""Where the artifacts of a store lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Store:
    """A folder of artifacts. Serving reads it and never writes."""

    root: Path

    def base(self, name: str) -> Path:
        return self.root / "bases" / name

    def table(self, name: str, level: str) -> Path:
        """Level is `root`, `bigram` or `unigram` of the PLOT called `name`."""
        return self.root / "plots" / name / level

    def tenant(self, name: str) -> Path:
        return self.root / "tenants" / name

    def tenant_names(self) -> list[str]:
        """Names of all published tenants, sorted."""
        folder = self.root / "tenants"
        return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def bank(self, name: str) -> Path:
        """Many tenants in one file."""
        return self.root / "banks" / name

    def banks(self) -> list[Path]:
        """Folders of all published banks, sorted by name."""
        folder = self.root / "banks"
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
