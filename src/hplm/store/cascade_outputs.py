"""The place of a cascade's outputs: what all levels of a tenant answered to the examples that select and prove.

The outputs are an artifact inside the folder of the tenant's version over the last base of its levels, and go with that folder.
"""

from __future__ import annotations

from pathlib import Path

from hplm.store import artifact
from hplm.store.artifact import Artifact

KIND = "cascade-outputs"


def outputs_of(version: Path) -> Path:
    """Return the folder of the outputs in the folder of a tenant's version."""
    return version / "cascade"


def read_outputs(version: Path) -> Artifact | None:
    """Read the manifest of the outputs in a tenant's version; None if there are none. Raises as `artifact.read` does."""
    folder = outputs_of(version)
    return artifact.read(folder, KIND) if folder.exists() else None
