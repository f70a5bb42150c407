"""A converted base on disk without its weights; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hplm.core.settings import BaseConfig, parse_settings
from hplm.errors import CorruptArtifactError, MissingArtifactError
from hplm.models.architectures import find_architecture
from hplm.store import artifact

KIND = "base"


@dataclass(frozen=True)
class BaseFolder:
    """A base's folder, with its shape. Its fingerprint ties tables and tenants to it.

    `trunk_of` is the name of the base that a trunk was distilled from, None if the base is no trunk.
    """

    folder: Path
    config: BaseConfig
    fingerprint: str
    trunk_of: str | None = None

    @property
    def kind(self) -> Literal["hierarchical", "whole"]:
        """Whether a table and an encoder of n-grams replace the lower layers, or all layers are computed."""
        return "whole" if self.config.lower_form == "whole" else "hierarchical"

    @property
    def is_trunk(self) -> bool:
        """Whether the base was made for shallow students of tenants (`hplm build base --trunk`)."""
        return self.trunk_of is not None

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"


def read(folder: Path, *, verify: bool = True) -> BaseFolder:
    """Read a base's manifest. Raises MissingArtifactError, CorruptArtifactError or ConfigError.

    With `verify` every file is compared with its checksum.
    """
    stored = artifact.read(folder, KIND)
    if verify:
        stored.verify()
    config = parse_settings(BaseConfig, stored.meta.get("config"), f"{folder / artifact.MANIFEST}: config")
    find_architecture(config.architecture)
    return BaseFolder(folder, config, stored.fingerprint, _trunk_of(stored))


def _trunk_of(stored: artifact.Artifact) -> str | None:
    """Return the name of the base that a trunk was distilled from. Raises CorruptArtifactError."""
    if (trunk := stored.meta.get("trunk")) is None:
        return None
    if not isinstance(trunk, dict) or not isinstance(parent := trunk.get("of"), str):
        raise CorruptArtifactError(
            f"{stored.folder / artifact.MANIFEST}: trunk must be an object whose `of` names a base, got {trunk!r}; "
            "build the base again"
        )
    return parent


def is_whole(folder: Path) -> bool:
    """Return whether a folder holds a whole base; False if it holds no base. Raises CorruptArtifactError or ConfigError."""
    try:
        return read(folder, verify=False).config.is_whole
    except MissingArtifactError:
        return False
