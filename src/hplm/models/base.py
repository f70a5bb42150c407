"""A converted base's weights: window encoder and upper layers, each loadable on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as packed
from torch import Tensor

from hplm.core.settings import BaseConfig
from hplm.core.text import TextEncoder
from hplm.errors import CorruptArtifactError, unusable
from hplm.models import base_folder
from hplm.models.base_folder import KIND, BaseFolder
from hplm.models.layers import UpperLayers, WindowEncoder
from hplm.store import artifact


class Base(BaseFolder):
    """A base on disk whose weights and tokenizer can be loaded."""

    def load_text_encoder(self) -> TextEncoder:
        """Texts to ids, as long as the base reads them."""
        return TextEncoder(self.tokenizer_path, self.config.max_tokens)

    def load_lower(self) -> WindowEncoder:
        """The window encoder, in fp32."""
        return _filled(WindowEncoder(self.config), self.folder / "lower.safetensors")

    def load_upper(self) -> UpperLayers:
        """The upper layers, in fp32."""
        return _filled(UpperLayers(self.config), self.folder / "upper.safetensors")


def _filled(module: Any, path: Path) -> Any:
    try:
        module.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    except OSError as error:
        raise unusable(f"{path} cannot be read", error) from error
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(f"{path} does not hold this base's weights ({error}); build it again") from error
    return module.eval()


def save(
    folder: Path,
    config: BaseConfig,
    lower: dict[str, Tensor],
    upper: dict[str, Tensor],
    tokenizer: bytes,
    about: dict[str, Any],
) -> None:
    """Publish a base."""
    with artifact.publish(folder, KIND, {"config": asdict(config), **about}) as partial:
        write_weights(partial / "lower.safetensors", lower)
        write_weights(partial / "upper.safetensors", upper)
        (partial / "tokenizer.json").write_bytes(tokenizer)


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """In float16."""
    halved = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in state.items()}
    # Written from here, a full disk is an OSError.
    path.write_bytes(packed(halved))


def load(folder: Path, *, verify: bool = True) -> Base:
    """Open a base. Raises MissingArtifactError or CorruptArtifactError."""
    found = base_folder.read(folder, verify=verify)
    return Base(found.folder, found.config, found.fingerprint)
