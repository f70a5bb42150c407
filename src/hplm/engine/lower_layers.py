"""Lower encoders by form, as artifacts, and packed for serving.

A base has a lower encoder. A domain version has its own, further pretrained: its branch table was computed with it, and its
misses are computed with it. A version without a table computes every n-gram with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import nn

from hplm.core.settings import BaseConfig
from hplm.engine.kernels.int8 import check_int8
from hplm.engine.kernels.onednn import can_pack
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.engine.windows.encoder import WindowEncoder
from hplm.errors import ConfigError, CorruptArtifactError, WrongBaseError, unusable
from hplm.models.base import LOWER, WORDS, Base, fill, write_weights
from hplm.models.device import in_dtype
from hplm.models.lower import LowerEncoder
from hplm.store import artifact
from hplm.store.domain_version import LOWER_KIND
from hplm.store.layout import Store

# Installed packages add forms through entry points of this group.
GROUP = "hplm.lower_forms"
LOWER_FORMS: dict[str, type[LowerEncoder]] = {form.form: form for form in (NgramEncoder, WindowEncoder)}

_packing = threading.Lock()


def lower_form(name: str) -> type[LowerEncoder]:
    """Return the form of that name. Raises ConfigError, which names the forms there are."""
    if name in LOWER_FORMS:
        return LOWER_FORMS[name]
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        raise ConfigError(
            f"there is no lower form {name!r}; there are {', '.join([*LOWER_FORMS, *sorted(installed)])}: "
            f"install the package that has it (entry point group {GROUP})"
        )
    try:
        form = installed[name].load()
    except Exception as error:
        raise ConfigError(f"lower form {name!r} ({installed[name].value}) cannot be imported: {error}") from error
    if not (isinstance(form, type) and issubclass(form, LowerEncoder)):
        raise ConfigError(
            f"lower form {name!r} ({installed[name].value}) is no subclass of hplm.models.lower.LowerEncoder"
        )
    return form


def check_hierarchical(config: BaseConfig) -> None:
    """Refuse a whole base, where lower layers or tables are needed. Raises ConfigError."""
    if config.is_whole:
        raise ConfigError(
            f"base {config.name!r} is whole: all its layers are computed, so it has no lower layers, no tables and no domains "
            "but its root; name a base that was converted without --whole"
        )


def make_lower(config: BaseConfig) -> LowerEncoder:
    """Make a lower encoder of the form that `config` names, with new weights.

    Raises ConfigError if the form is not installed, gives another number of vectors than `config` says, or the base is whole.
    """
    check_hierarchical(config)
    form = lower_form(config.lower_form)
    if (vectors := form.vectors_per_ngram(config.window)) != config.vectors_per_ngram:
        raise ConfigError(
            f"base {config.name} has vectors_per_ngram {config.vectors_per_ngram}, but its lower form {config.lower_form!r} "
            f"gives {vectors} for n-grams of {config.window} tokens"
        )
    return form(config)


def load_lower(base: Base) -> LowerEncoder:
    """Load a base's lower encoder, in fp32."""
    lower = make_lower(base.config)
    fill(lower, base.folder / LOWER)
    return lower


def save(folder: Path, base: Base, lower: LowerEncoder, meta: dict[str, Any]) -> None:
    """Publish a domain version's lower encoder, without the base's word embeddings. `meta` goes into its manifest."""
    # Most of a small model's bytes. Further pretraining does not change word embeddings, so domains share the base's.
    state = {name: value for name, value in lower.state_dict().items() if name != WORDS}
    with artifact.publish(folder, LOWER_KIND, {"base": base.fingerprint, **meta}) as partial:
        write_weights(partial / LOWER, state)


def load(folder: Path, base: Base, *, words: nn.Embedding | None = None, verify: bool = True) -> LowerEncoder:
    """Load a domain version's lower encoder, in fp32. `words`: the base's word embeddings if they are loaded already.

    Raises MissingArtifactError, CorruptArtifactError or WrongBaseError.
    """
    stored = artifact.read(folder, LOWER_KIND)
    if stored.meta.get("base") != base.fingerprint:
        raise WrongBaseError(
            f"{folder} was trained over base {stored.meta.get('base')}, this base is {base.fingerprint}: "
            "build the domain again with `hplm build domain NAME --base BASE --corpus FILE`"
        )
    with torch.device("meta"):
        lower = make_lower(base.config)
    lower.word_embeddings = words or load_lower(base).word_embeddings
    try:
        state = {name: v.float() for name, v in load_tensors(stored.read_bytes(LOWER, verify=verify)).items()}
        lower.load_state_dict({**state, WORDS: lower.word_embeddings.weight}, assign=True)
    except OSError as error:
        raise unusable(f"{folder} cannot be read", error) from error
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(
            f"{folder} does not hold this base's lower layers ({error}); build it again"
        ) from error
    return lower.eval()


def of_lineage(
    store: Store,
    base: Base,
    lineage: Sequence[Path | str],
    *,
    base_lower: LowerEncoder | None = None,
    verify: bool = True,
) -> LowerEncoder:
    """Load the lower encoder of a domain version, or the base's for a root. Folders are as `open_lineage` takes them."""
    base_lower = base_lower or load_lower(base)
    if len(lineage) == 1:
        return base_lower
    return load(store.root / lineage[0] / "lower", base, words=base_lower.word_embeddings, verify=verify)


def pack(lower: LowerEncoder, dtype: torch.dtype, int8_base: Base | None = None) -> None:
    """Put the matrices in oneDNN's order if the machine can, in place; from then on the encoder serves look-ups alone.

    On a GPU the matrices are converted to `dtype`. With `int8_base`, the encoder's base, the layers' products are computed in
    int8. A second call does nothing and keeps the first call's `dtype`.
    Raises ConfigError if int8 cannot be had, or if the encoder was packed with another quantization.
    """
    if int8_base is not None:
        check_int8(lower.device)
    # All domains of a root share the base's encoder, and two of them may open it at the same time. Other encoders wait too:
    # packing takes the whole processor anyway.
    with _packing:
        if lower.packed is not None:
            if lower.is_int8 != (int8_base is not None):
                raise ConfigError("these lower layers are open already with another quantization")
            return
        if can_pack(lower.device, dtype):
            lower.packed = lower.make_packed(dtype, int8_base)
            lower.is_int8 = int8_base is not None
        elif int8_base is not None:
            raise ConfigError(f"quantization int8 cannot be had beside {dtype} here; leave it out")
        elif lower.device.type != "cpu":
            # Converted once here, not for every batch.
            in_dtype(lower, dtype)
