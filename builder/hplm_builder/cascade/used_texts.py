"""The texts that trained, calibrated or selected a tenant's levels, so that no later proof uses them.

An update trains on from the weights of the versions before it, so the texts of these versions have trained the new version too.
Only checksums of the texts are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from pathlib import Path

import numpy as np

from hplm.core.text import TextOrPair, text_key
from hplm.errors import CorruptArtifactError, unusable
from hplm.store import artifact
from hplm.store.cascade_outputs import KIND
from hplm.tasks.examples import LabelledText
from hplm_builder.data.labelled import LabelledData

# The file with the checksums, beside the outputs of a cascade.
FILE = "used_texts.u64"


def checksum(text: TextOrPair) -> int:
    """Return a checksum of 64 bits of a text or pair."""
    return int.from_bytes(hashlib.blake2b(f"used {text}".encode(), digest_size=8).digest(), "little")


def is_used(example: LabelledText, used: Set[int]) -> bool:
    """Return whether the text of an example, or a near-copy of it, is among those whose checksums are `used`."""
    text = example.text_or_pair
    # Stores of earlier releases have checksums of texts as they were written.
    return checksum(text_key(text)) in used or checksum(text) in used


def used_by(data: LabelledData) -> set[int]:
    """Return the checksums of the texts that train, calibrate or select."""
    return {checksum(text_key(example.text_or_pair)) for example in (*data.train, *data.dev, *data.unlabelled)}


def write_used(folder: Path, used: Set[int]) -> None:
    """Write the checksums into the folder of an artifact that is being made. Raises OSError."""
    np.array(sorted(used), "<u8").tofile(folder / FILE)


def load_used(folder: Path) -> frozenset[int]:
    """Load and verify the checksums that lie beside the outputs of a cascade.

    Raises MissingArtifactError, CorruptArtifactError or StoreUnavailableError.
    """
    stored = artifact.read(folder, KIND)
    if FILE not in stored.files:
        raise CorruptArtifactError(f"{folder} does not say which texts were used; create the tenant again")
    try:
        return frozenset(np.frombuffer(stored.read_bytes(FILE, verify=True), "<u8").tolist())
    except OSError as error:
        raise unusable(f"{folder}: the checksums of used texts cannot be read", error) from error
    except ValueError as error:
        raise CorruptArtifactError(f"{folder / FILE} has a part of a checksum only; create the tenant again") from error
