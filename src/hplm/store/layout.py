"""The paths of artifacts in a store. The registry holds the same paths, relative to the store's root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import MissingArtifactError

# The folder of a job's scratch files begins with this if a command works on the job, or on a training of its own.
LOCAL = "local-"


def levels(window: int) -> tuple[str, ...]:
    """Return the tables of a PLOT, longest n-grams first. With windows of two tokens the root table holds the bigrams."""
    return ("root", "bigram", "unigram") if window > 2 else ("root", "unigram")


@dataclass(frozen=True)
class Store:
    """A folder of artifacts, and the registry that names them. Serving reads both and never writes.

    `registry` is an SQLAlchemy URL; "" is `registry.sqlite` in the folder itself.
    """

    root: Path
    registry: str = ""

    @classmethod
    def at(cls, folder: Path) -> Store:
        """Return the store that a command works on, with the registry that `HPLM_REGISTRY` names or else its own."""
        return cls(folder, os.environ.get("HPLM_REGISTRY", ""))

    def path(self, relative: str) -> Path:
        """Return the path on this machine, of a path as the registry holds it."""
        return self.root / relative

    def relative(self, path: Path) -> str:
        """Return a path as the registry holds it, of a path on this machine."""
        return path.relative_to(self.root).as_posix()

    def bases(self) -> list[str]:
        """Return the sorted names of the bases. Raises MissingArtifactError if there is none."""
        if not (names := sorted(path.name for path in (self.root / "bases").glob("[!.]*"))):
            raise MissingArtifactError(
                f"{self.root} has no base, so it is no store: give --store; `hplm build --help` shows how to make one"
            )
        return names

    def base(self, name: str) -> Path:
        return self.root / "bases" / name

    def is_whole_root(self, path: str) -> bool:
        """Return whether a root's path is that of a whole base. Such a root has no tables, so its folder is the base's."""
        return self.path(path).parent == self.root / "bases"

    def table(self, name: str, level: str) -> Path:
        """Return the folder of a table of the PLOT called `name`; `level` is one of `levels`."""
        return self.root / "plots" / name / level

    def domain(self, base: str, name: str, number: int) -> Path:
        """Return the folder of a domain's version: its `branch` table and its `lower` layers."""
        return self.root / "domains" / base / name / str(number)

    def tenant_version(self, name: str, number: int) -> Path:
        return self.root / "tenants" / name / str(number)

    def bank(self, name: str) -> Path:
        """Return the folder of a bank: many tenants in one file."""
        return self.root / "banks" / name

    def banks(self) -> list[Path]:
        """Return the folders of all published banks, sorted by name."""
        folder = self.root / "banks"
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def profiles(self, base: str) -> Path:
        """Return the folder of the profiles that were measured of a base."""
        return self.root / "profiles" / base

    def upload(self, upload_id: str) -> Path:
        """Return the folder for the bytes of an upload."""
        return self.root / "uploads" / upload_id

    def scratch(self, job_id: str) -> Path:
        """Return the folder for what a job continues from if its worker process is lost."""
        return self.root / "jobs" / job_id

    def local_work(self, name: str) -> Path:
        """Return the folder for what an interrupted command continues from; `name` is that of the command's work."""
        return self.scratch(f"{LOCAL}{name}")
