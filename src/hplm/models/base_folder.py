"""A converted base on disk, as far as it is known without its weights: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hplm.core.settings import BaseConfig, parse_settings
from hplm.store import artifact

KIND = "base"


@dataclass(frozen=True)
class BaseFolder:
    """A base's folder, with its shape. Its fingerprint ties tables and tenants to it."""

    folder: Path
    config: BaseConfig
    fingerprint: str

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"


def read(folder: Path, *, verify: bool = True) -> BaseFolder:
    """Raises MissingArtifactError or CorruptArtifactError, with `verify` also where a file is not as its checksum says."""
    stored = artifact.read(folder, KIND)
    if verify:
        stored.verify()
    config = parse_settings(BaseConfig, stored.meta.get("config"), f"{folder / artifact.MANIFEST}: config")
    return BaseFolder(folder, config, stored.fingerprint)
