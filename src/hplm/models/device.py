"""Which number format this machine computes fastest in, and how to use it."""

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
TRIES = 6
# Rows, inputs and outputs of the product that is tried: some milliseconds.
TRIED = (256, 768, 768)


def has_bfloat16() -> bool:
    """Whether this CPU multiplies matrices in bf16 (AVX-512 BF16 or AMX); elsewhere bf16 is emulated, slower than fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def gpu_has_bfloat16(device: torch.device) -> bool:
    """Whether this GPU multiplies matrices in bf16; older ones emulate it, and torch says that they support it."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def bfloat16_is_fast() -> bool:
    """Whether this CPU multiplies matrices faster in bf16 than in fp32; tried once a process, in a twentieth of a second.

    That it has bf16 does not say so: on a Xeon whose host hides AMX from its guests a core does 84 GFLOP/s in bf16 and 164
    in fp32 (docs/decisions.md).
    """
    if not has_bfloat16():
        return False
    rows, inputs, outputs = TRIED
    formats = (torch.bfloat16, torch.float32)
    best_s = dict.fromkeys(formats, math.inf)
    with torch.inference_mode():
        products = {
            one: functools.partial(
                F.linear, torch.ones(rows, inputs, dtype=one), torch.ones(outputs, inputs, dtype=one)
            )
            for one in formats
        }
        # In turn, by the processor's time and not the clock's: processes that start on a busy machine must agree.
        for _ in range(TRIES):
            for one, product in products.items():
                start = time.thread_time()
                product()
                best_s[one] = min(best_s[one], time.thread_time() - start)
    return best_s[torch.bfloat16] < best_s[torch.float32]


def choose_device(name: str, index: int = 0) -> torch.device:
    """`auto` is CUDA where there is a GPU, else the CPU; `index` says which GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; use auto or cpu")
    if name == "cpu":
        return CPU
    # cuDNN's attention, which torch prefers on newer GPUs, makes a plan for each number of rows and length that it has not
    # seen: packed batches have ever new ones.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(f"cuda:{index}")


def choose_dtype(name: str, device: torch.device, quantization: Quantization = "none") -> torch.dtype:
    """`auto` is bf16 where the device is faster in it, else fp32.

    Of upper layers whose matrices are in integers it is fp32: the rest of a large batch takes as long in either, of a small one
    less in fp32 (docs/decisions.md).
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
    """Autocast to `dtype`: products in it, LayerNorm and softmax in fp32. Nothing to do for fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def in_dtype(encoder: Encoder, dtype: torch.dtype) -> Encoder:
    """Matrices in `dtype`, LayerNorm and the residual stream in fp32, for use within `computing_in`."""
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return encoder.eval()


def choose_threads(wanted: int, instances: int = 1) -> int:
    """0: all cores but one, which the server, the look-up stage and the client's side need, shared among `instances`.

    Threads that wait for each other on cores that others want stall in steps of milliseconds, so more is less here.
    """
    return wanted or max(1, (count_cores() - 1) // instances)


def is_device_lost(error: BaseException, device: torch.device | str = "cuda") -> bool:
    """Whether CUDA fails every later call of this process to the device too, as after an illegal address: it is tried.

    Not where memory has run out, or what was asked was wrong: these pass.
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
    """Let torch compute with so many threads, and numpy with the caller's alone. To be called before other threads start.

    A head over BERT's hidden states of a dozen labels is large enough for numpy's OpenBLAS to share it among threads, which
    then look for more in a loop: two fifths of a core where 160 texts a second are answered.
    """
    keep_freed_memory()
    # First: what torch computes with may be among them, where it was not built with its own.
    threadpoolctl.threadpool_limits(1, user_api="blas")
    torch.set_num_threads(count)


def count_cores(cgroup: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Those that this process may use, of a quota (`docker --cpus`, Kubernetes, systemd's `CPUQuota`) no more than that.

    More threads than a quota has cores for are all stopped for the rest of each period.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for words in cgroups.limits("cpu.max", cgroup, own):
        with suppress(ValueError):  # "max 100000" without a quota
            quota, period = map(int, words)
            cores = min(cores, max(1, quota // period))
    return cores
