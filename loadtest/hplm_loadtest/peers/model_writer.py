"""Writes the whole models that the peers `dedicated` and `onnxruntime` swap."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import Progress

from hplm.core.settings import BaseConfig
from hplm.errors import ConfigError
from hplm_loadtest.peers import onnx_graph
from hplm_loadtest.peers.model_files import model_files
from hplm_loadtest.peers.whole_model import file_bytes, make_seeded_model, stored_as, write_model


def write_models(
    folder: Path,
    config: BaseConfig,
    *,
    tenants: int,
    disk_bytes: int,
    dtype: torch.dtype,
    onnx: bool,
    progress: Progress,
) -> int:
    """Write a different model of shape `config`, see `whole_config`, for each tenant, as far as `disk_bytes` allow.

    Files from an earlier call are kept, except those beyond `disk_bytes`. Returns the number of files. If there are fewer files
    than tenants, tenants share files; a swap still reads and copies a whole model.
    """
    model_bytes = onnx_graph.file_bytes(config) if onnx else file_bytes(config, dtype)
    max_files = disk_bytes // model_bytes
    count = min(tenants, max_files)
    if count < 1:
        raise ConfigError(
            f"one model takes {model_bytes:,} bytes on disk, and {disk_bytes:,} are allowed: raise --disk-mb"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for number in progress.track(range(count), description=f"{folder.name}: models of {model_bytes / 1e6:.0f} MB"):
        path = folder / f"model-{number:05d}{'.onnx' if onnx else '.bin'}"
        if not path.is_file():
            partial = path.with_name(f".{path.name}")
            model = make_seeded_model(config, number)
            if onnx:
                onnx_graph.write(model, config, partial, path.with_suffix(".data"))
            else:
                write_model(stored_as(model, dtype), partial)
            partial.rename(path)
    files = model_files(folder)
    # Removed, because a server uses all files: an earlier benchmark was allowed more disk.
    for path in files[max_files:]:
        path.unlink()
        path.with_suffix(".data").unlink(missing_ok=True)
    return min(len(files), max_files)
