"""The device, number format and threads that this machine computes with."""

from __future__ import annotations

import functools
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import threadpoolctl  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from torch import nn

from hplm.core.settings import Quantization
from hplm.errors import ConfigError
from hplm.runtime import cgroups
from hplm.runtime.memory import keep_freed_memory

CPU = torch.device("cpu")
Encoder = TypeVar("Encoder", bound=nn.Module)
TRIES = 6  # timings of each format, of which the best counts
# Rows, inputs and outputs of the product that is timed; it takes some milliseconds.
TRIED = (256, 768, 768)


def has_bfloat16() -> bool:
    """Return whether this CPU multiplies matrices in bf16 (AVX-512 BF16 or AMX). Other CPUs emulate bf16, slower than fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def gpu_has_bfloat16(device: torch.device) -> bool:
    """Return whether this GPU multiplies matrices in bf16. Older GPUs emulate it, although torch reports support."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def bfloat16_is_fast() -> bool:
    """Return whether this CPU multiplies matrices faster in bf16 than in fp32. It is timed once a process, in 50 ms.

    A CPU that has bf16 may be slower in it: on a Xeon whose host hides AMX from its guests, a core does 84 GFLOP/s in bf16 and
    164 in fp32 (docs/decisions.md).
    """
    if not has_bfloat16():
        return False
    rows, inputs, outputs = TRIED
    formats = (torch.bfloat16, torch.float32)
    best_s = dict.fromkeys(formats, math.inf)
    with torch.inference_mode():
        products = {
            dtype: functools.partial(
                F.linear, torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
            )
            for dtype in formats
        }
        # Formats alternate, and the thread's processor time counts: processes that start on a busy machine must agree.
        for _ in range(TRIES):
            for dtype, product in products.items():
                start = time.thread_time()
                product()
                best_s[dtype] = min(best_s[dtype], time.thread_time() - start)
    return best_s[torch.bfloat16] < best_s[torch.float32]


def choose_device(name: str, index: int = 0) -> torch.device:
    """Return the device that `name` means: `auto` is a GPU if there is one, else the CPU. `index` is the GPU's number."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; use auto or cpu")
    if name == "cpu":
        return CPU
    # torch prefers cuDNN's attention on newer GPUs. cuDNN prepares itself for each new number of rows and length, and packed
    # batches always bring new ones.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(f"cuda:{index}")


def choose_dtype(name: str, device: torch.device, quantization: Quantization = "none") -> torch.dtype:
    """Return the number format that `name` means: `auto` is bf16 if the device is faster in it, else fp32.

    With int8 matrices `auto` is fp32. In a large batch the rest takes as long in either format, in a small batch less in fp32
    (docs/decisions.md).
    """
    if name == "auto":
        if quantization == "int8":
            return torch.float32
        is_fast = gpu_has_bfloat16(device) if device.type == "cuda" else bfloat16_is_fast()
        return torch.bfloat16 if is_fast else torch.float32
    if name not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype must be auto, bfloat16 or float32, got {name!r}")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast to `dtype`: products in `dtype`, LayerNorm and softmax in fp32. For fp32 it does nothing."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def in_dtype(encoder: Encoder, dtype: torch.dtype) -> Encoder:
    """Convert the matrices to `dtype`, for use within `computing_in`; LayerNorm and the residual stream stay in fp32."""
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return encoder.eval()


def choose_threads(wanted: int, instances: int = 1) -> int:
    """Return `wanted` threads, or for 0 all cores but one, shared among `instances` processes that compute upper layers.

    The server, the look-up stage and the client need the last core. Threads that wait for each other stall for milliseconds on
    cores that other threads use too, so more threads would be slower.
    """
    return wanted or max(1, (count_cores() - 1) // instances)


def is_device_lost(error: BaseException, device: torch.device | str = "cuda") -> bool:
    """Return whether every later CUDA call of this process will fail too, as after an illegal address, by trying a call.

    Errors of exhausted memory or of wrong arguments do not lose the device.
    """
    if not isinstance(error, RuntimeError) or "CUDA error" not in str(error):
        return False
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        return False
    except RuntimeError as again:
        return not any(word in str(again) for word in ("out of memory", "ALLOC_FAILED"))
    return False


def use_threads(count: int) -> None:
    """Let torch compute with `count` threads, and numpy with the caller's thread alone. Call it before other threads start.

    A head of a dozen labels is large enough for numpy's OpenBLAS to share it among threads. These then wait in a busy loop,
    which took two fifths of a core at 160 texts a second.
    """
    keep_freed_memory()
    # Before torch's own setting, because torch may compute with the same BLAS.
    threadpoolctl.threadpool_limits(1, user_api="blas")
    torch.set_num_threads(count)


def count_cores(cgroup: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Return the number of cores that this process may use, at most its quota (`docker --cpus`, Kubernetes, `CPUQuota`).

    If more threads run than a quota has cores for, all of them are stopped for the rest of each period.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for words in cgroups.limits("cpu.max", cgroup, own):
        with suppress(ValueError):  # "max 100000" without a quota
            quota, period = map(int, words)
            cores = min(cores, max(1, quota // period))
    return cores
