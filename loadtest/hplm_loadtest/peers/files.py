"""Which file holds which tenant's model."""

from __future__ import annotations

import zlib
from pathlib import Path

from hplm.errors import MissingArtifactError


def model_files(folder: Path) -> list[Path]:
    """Raises MissingArtifactError where there are none."""
    files = sorted([*folder.glob("model-*.bin"), *folder.glob("model-*.onnx")])
    if not files:
        raise MissingArtifactError(f"no models in {folder}; the benchmark that serves them writes them")
    return files


def file_of(tenant: str, files: list[Path]) -> Path:
    """A tenant's model. Names that end in a number go around, so that tenants that follow each other have different files."""
    digits = tenant[len(tenant.rstrip("0123456789")) :]
    return files[(int(digits) if digits else zlib.crc32(tenant.encode())) % len(files)]
