"""Writing the fine-tuned models that `dedicated` and `onnxruntime` swap."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import Progress

from hplm.core.settings import BaseConfig
from hplm.errors import ConfigError
from hplm_loadtest.peers import onnx_graph
from hplm_loadtest.peers.files import model_files
from hplm_loadtest.peers.plain import file_bytes, seeded_model, stored_as, write_flat


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
    """Write as many different models of shape `config` (see `plain.whole`) as `tenants` need or `disk_bytes` hold.

    Those that are there are kept, but for what `disk_bytes` do not hold. Returns how many there are; with fewer than tenants,
    tenants share files in turn, which every swap still reads and copies whole.
    """
    model_bytes = onnx_graph.file_bytes(config) if onnx else file_bytes(config, dtype)
    most = disk_bytes // model_bytes
    count = min(tenants, most)
    if count < 1:
        raise ConfigError(f"one model takes {model_bytes:,} bytes on disk, {disk_bytes:,} are allowed")
    folder.mkdir(parents=True, exist_ok=True)
    for number in progress.track(range(count), description=f"{folder.name}: models of {model_bytes / 1e6:.0f} MB"):
        path = folder / f"model-{number:05d}{'.onnx' if onnx else '.bin'}"
        if not path.is_file():
            partial = path.with_name(f".{path.name}")
            model = seeded_model(config, number)
            if onnx:
                onnx_graph.write(model, config, partial, path.with_suffix(".data"))
            else:
                write_flat(stored_as(model, dtype), partial)
            partial.rename(path)
    files = model_files(folder)
    for path in files[most:]:
        # Of a run that was allowed more: all that are there are served.
        path.unlink()
        path.with_suffix(".data").unlink(missing_ok=True)
    return min(len(files), most)
