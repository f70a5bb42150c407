"""A converted base on disk without its weights; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hplm.core.settings import BaseConfig, parse_settings
from hplm.errors import MissingArtifactError
from hplm.models.architectures import find_architecture
from hplm.store import artifact

KIND = "base"


@dataclass(frozen=True)
class BaseFolder:
    """A base's folder, with its shape. Its fingerprint ties tables and tenants to it."""

    folder: Path
    config: BaseConfig
    fingerprint: str

    @property
    def kind(self) -> Literal["hierarchical", "whole"]:
        """Whether a table and an encoder of n-grams replace the lower layers, or all layers are computed."""
        return "whole" if self.config.lower_form == "whole" else "hierarchical"

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
    return BaseFolder(folder, config, stored.fingerprint)


def is_whole(folder: Path) -> bool:
    """Return whether a folder holds a whole base; False if it holds no base. Raises CorruptArtifactError or ConfigError."""
    try:
        return read(folder, verify=False).config.is_whole
    except MissingArtifactError:
        return False
