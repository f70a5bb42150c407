"""The parts of a domain version's folder, and which versions of a lineage a look-up searches.

A domain version has the artifact `lower`, its lower encoder. It also has the artifact `branch`, a table of its own, unless it
was built without one. A root (a PLOT) always has tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hplm.store import artifact

LOWER_KIND = "lower"
# The key of the lower encoder's manifest that says whether the version has a branch table.
HAS_BRANCH = "has_branch"


def has_branch(folder: Path) -> bool:
    """Return whether a domain version has a branch table, as the manifest of its lower encoder says.

    The folder itself cannot tell: a table may be lost. Raises MissingArtifactError or CorruptArtifactError.
    """
    # Versions of before there was a choice do not say it, and have a table.
    return bool(artifact.read(folder / "lower", LOWER_KIND).meta.get(HAS_BRANCH, True))


def searched(lineage: Sequence[Path]) -> tuple[list[Path], Path | None]:
    """Return the versions whose branch tables a look-up searches, and the root whose tables it searches last.

    `lineage` holds the folders of a version and of those above it, its own first, its root's last. The search ends before the
    first version without a table: then the root is None. Such a version computes every n-gram with its own encoder. The tables
    above it hold what other encoders compute, which is not what this version answers. Raises as `has_branch` does.
    """
    *versions, root = lineage
    with_branch = list(itertools.takewhile(has_branch, versions))
    return with_branch, root if len(with_branch) == len(versions) else None
