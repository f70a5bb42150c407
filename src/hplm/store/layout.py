"""Where the artifacts of a store lie. Paths in the registry are these, relative to the store's root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import MissingArtifactError


def levels(window: int) -> tuple[str, ...]:
    """The tables of a PLOT, longest n-grams first; of windows of two tokens the root's are the bigrams."""
    return ("root", "bigram", "unigram") if window > 2 else ("root", "unigram")


@dataclass(frozen=True)
class Store:
    """A folder of artifacts and the registry that names them. Serving reads both and never writes.

    `registry` is an SQLAlchemy URL; "" is `registry.sqlite` in the folder itself.
    """

    root: Path
    registry: str = ""

    @classmethod
    def at(cls, folder: Path) -> Store:
        """With the registry that `HPLM_REGISTRY` names, by default its own: what a command works on."""
        return cls(folder, os.environ.get("HPLM_REGISTRY", ""))

    def path(self, relative: str) -> Path:
        """A path as the registry writes it, on this machine."""
        return self.root / relative

    def relative(self, path: Path) -> str:
        """The other way: as the registry writes it."""
        return path.relative_to(self.root).as_posix()

    def bases(self) -> list[str]:
        """Names of the bases in it, sorted. Raises MissingArtifactError where there is none."""
        if not (found := sorted(path.name for path in (self.root / "bases").glob("[!.]*"))):
            raise MissingArtifactError(
                f"{self.root} has no base, so it is no store: give --store; `hplm build --help` shows how to make one"
            )
        return found

    def base(self, name: str) -> Path:
        return self.root / "bases" / name

    def table(self, name: str, level: str) -> Path:
        """Level is one of `levels` of the PLOT called `name`."""
        return self.root / "plots" / name / level

    def domain(self, base: str, name: str, number: int) -> Path:
        """A domain's version: its `branch` table and its `lower` layers."""
        return self.root / "domains" / base / name / str(number)

    def tenant_version(self, name: str, number: int) -> Path:
        return self.root / "tenants" / name / str(number)

    def bank(self, name: str) -> Path:
        """Many tenants in one file."""
        return self.root / "banks" / name

    def banks(self) -> list[Path]:
        """Folders of all published banks, sorted by name."""
        folder = self.root / "banks"
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def upload(self, upload_id: str) -> Path:
        """The bytes of an upload as they come in."""
        return self.root / "uploads" / upload_id

    def scratch(self, job_id: str) -> Path:
        """What a job goes on from when its worker was lost."""
        return self.root / "jobs" / job_id
