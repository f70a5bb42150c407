"""A domain's further pretrained lower layers as an artifact: what its branch was computed with and its misses go through."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import nn

from hplm.engine.kernels.int8 import check_int8
from hplm.engine.kernels.int8_ranges import measure_window_ranges
from hplm.engine.kernels.int8_windows import Int8WindowLayer, quantise_window_layer
from hplm.engine.kernels.onednn import can_pack
from hplm.engine.kernels.run_windows import RunWindows
from hplm.engine.kernels.scripted import scripted
from hplm.errors import ConfigError, CorruptArtifactError, WrongBaseError, unusable
from hplm.models.base import Base, write_weights
from hplm.models.device import in_dtype
from hplm.models.layers import WindowEncoder
from hplm.store import artifact
from hplm.store.layout import Store

KIND = "lower"
WEIGHTS = "lower.safetensors"
# The base's, which further pretraining leaves as they are: most of a small model's bytes, on disk and in memory.
SHARED = "word_embeddings.weight"
_packing = threading.Lock()


def save(folder: Path, base: Base, lower: WindowEncoder, about: dict[str, Any]) -> None:
    """Publish what windows go through after the word embeddings."""
    state = {name: value for name, value in lower.state_dict().items() if name != SHARED}
    with artifact.publish(folder, KIND, {"base": base.fingerprint, **about}) as partial:
        write_weights(partial / WEIGHTS, state)


def load(folder: Path, base: Base, *, words: nn.Embedding | None = None, verify: bool = True) -> WindowEncoder:
    """The window encoder of a domain version, in fp32, with the base's word embeddings: `words` where they are at hand.

    Raises MissingArtifactError, CorruptArtifactError or WrongBaseError.
    """
    stored = artifact.read(folder, KIND)
    if stored.meta.get("base") != base.fingerprint:
        raise WrongBaseError(
            f"{folder} was trained over base {stored.meta.get('base')}, this base is {base.fingerprint}: "
            "build the domain again with `hplm build domain`"
        )
    with torch.device("meta"):
        lower = WindowEncoder(base.config)
    lower.word_embeddings = words or base.load_lower().word_embeddings
    try:
        state = {name: v.float() for name, v in load_tensors(stored.read_bytes(WEIGHTS, verify=verify)).items()}
        lower.load_state_dict({**state, SHARED: lower.word_embeddings.weight}, assign=True)
    except OSError as error:
        raise unusable(f"{folder} cannot be read", error) from error
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(
            f"{folder} does not hold this base's lower layers ({error}); build it again"
        ) from error
    return lower.eval()


def pack(lower: WindowEncoder, dtype: torch.dtype, int8_of: Base | None = None) -> None:
    """Put the matrices in oneDNN's order where that can be, in place: for look-ups alone from then on. Again does nothing.

    On a GPU they are kept in `dtype`. `int8_of`: their base where the layers' products are to be computed in int8. Raises
    ConfigError where they cannot be, or where they were put in order with another quantization; `dtype` is that of the first
    time.
    """
    device = lower.gate_weight.device
    if int8_of is not None:
        check_int8(device)
    # A base's are shared by all that stand on its root, and may be opened twice at a time; others wait with them, but what
    # they wait for would take the processor from them anyway.
    with _packing:
        if lower.packed is not None:
            if lower.packed.is_int8 != (int8_of is not None):
                raise ConfigError("these lower layers are open already with another quantization")
            return
        if not can_pack(device, dtype):
            if int8_of is not None:
                raise ConfigError(f"quantization int8 cannot be had beside {dtype} here; leave it out")
            if device.type != "cpu":
                # Once, not for every batch.
                in_dtype(lower, dtype)
            return
        int8: list[Int8WindowLayer] = []
        if int8_of is not None:
            pairs = zip(lower.layers, measure_window_ranges(int8_of, lower), strict=True)
            int8 = [quantise_window_layer(layer, ranges) for layer, ranges in pairs]
        lower.packed = scripted(RunWindows(lower, dtype, int8))
        # Nobody reads them any more.
        lower.layers = nn.ModuleList()


def of_lineage(
    store: Store,
    base: Base,
    lineage: Sequence[Path | str],
    *,
    base_lower: WindowEncoder | None = None,
    verify: bool = True,
) -> WindowEncoder:
    """The lower layers of a domain version, folders as `open_lineage` takes them: its own, or the base's for a root."""
    base_lower = base_lower or base.load_lower()
    if len(lineage) == 1:
        return base_lower
    return load(store.root / lineage[0] / "lower", base, words=base_lower.word_embeddings, verify=verify)
