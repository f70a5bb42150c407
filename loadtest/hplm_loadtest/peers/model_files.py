"""Finds the file of a tenant's model."""

from __future__ import annotations

import zlib
from pathlib import Path

from hplm.errors import MissingArtifactError


def model_files(folder: Path) -> list[Path]:
    """Return the model files of a folder, sorted. Raises MissingArtifactError if there are none."""
    files = sorted([*folder.glob("model-*.bin"), *folder.glob("model-*.onnx")])
    if not files:
        raise MissingArtifactError(f"no models in {folder}; the benchmark that serves them writes them")
    return files


def model_file_of(tenant: str, files: list[Path]) -> Path:
    """Return the file of a tenant's model. Tenants with consecutive numbers at the end of their names get different files."""
    digits = tenant[len(tenant.rstrip("0123456789")) :]
    return files[(int(digits) if digits else zlib.crc32(tenant.encode())) % len(files)]
