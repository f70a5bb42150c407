"""A base's weights: lower encoder and upper layers, each loadable on its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as packed
from torch import Tensor, nn

from hplm.core.settings import BaseConfig
from hplm.core.text import TextEncoder
from hplm.errors import CorruptArtifactError, unusable
from hplm.models import base_folder
from hplm.models.base_folder import KIND, BaseFolder
from hplm.models.layers import UpperLayers, WholeLayers
from hplm.store import artifact

# The weights below the cut. A whole base has its word embeddings there, and nothing else.
LOWER = "lower.safetensors"
WORDS = "word_embeddings.weight"


class Base(BaseFolder):
    """A base on disk whose weights and tokenizer can be loaded."""

    def load_text_encoder(self) -> TextEncoder:
        """Load the tokenizer; it cuts texts to the length that the base reads."""
        return TextEncoder(self.tokenizer_path, self.config.max_tokens)

    def load_upper(self, layers: range | None = None) -> UpperLayers:
        """Load the upper layers, in fp32. `hplm.engine.lower_layers` loads the lower encoder.

        The layers of a whole base read word embeddings that are mapped from the disk, so that processes share their memory.
        With `layers` only these are loaded. Unless they begin with the first layer, they read hidden states, and no word
        embeddings are loaded.
        """
        config = self.config if layers is None else replace(self.config, upper_layers=len(layers), adapter_layers=0)
        first = layers.start if layers is not None else 0
        reads_ids = self.config.is_whole and not first
        upper = WholeLayers(config, self._map_words()) if reads_ids else UpperLayers(config)
        fill(upper, self.folder / "upper.safetensors", None if layers is None else partial(_name_in_file, first))
        return upper

    def _map_words(self) -> Tensor:
        """Map the word embeddings `[V, H]`, float16. Raises an ArtifactError."""
        path, config = self.folder / LOWER, self.config
        try:
            with safe_open(path, framework="pt") as file:
                words: Tensor = file.get_tensor(WORDS)
        except OSError as error:
            raise unusable(f"{path} cannot be read", error) from error
        except SafetensorError as error:
            raise CorruptArtifactError(f"{path} does not hold word embeddings ({error}); build it again") from error
        if words.shape != (config.vocab_size, config.hidden_size):
            raise CorruptArtifactError(f"{path} has word embeddings of another shape; build the base again")
        return words


def fill(module: nn.Module, path: Path, name_in_file: Callable[[str], str] | None = None) -> None:
    """Load a half's weights into `module`, in fp32, and put it in evaluation mode. Raises an ArtifactError.

    With `name_in_file` only the module's own tensors are read, under the names that the function returns.
    """
    try:
        if name_in_file is None:
            tensors = load_file(path)
        else:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name_in_file(name)) for name in module.state_dict()}
        module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except OSError as error:
        raise unusable(f"{path} cannot be read", error) from error
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(f"{path} does not hold this base's weights ({error}); build it again") from error
    module.eval()


def _name_in_file(first: int, name: str) -> str:
    """Return the name in a base's file of a tensor of layers that are numbered from layer `first` on."""
    return re.sub(r"^layers\.([0-9]+)", lambda found: f"layers.{first + int(found[1])}", name)


def save(
    folder: Path,
    config: BaseConfig,
    lower: dict[str, Tensor],
    upper: dict[str, Tensor],
    tokenizer: bytes,
    meta: dict[str, Any],
) -> None:
    """Publish a base. `meta` goes into its manifest."""
    with artifact.publish(folder, KIND, {"config": asdict(config), **meta}) as partial:
        write_weights(partial / LOWER, lower)
        write_weights(partial / "upper.safetensors", upper)
        (partial / "tokenizer.json").write_bytes(tokenizer)
        if config.is_whole:
            # The fingerprint is computed from files. Adapters of a base with another number of layers must not fit this base.
            (partial / "adapter_layers").write_text(f"{config.adapted_layers}\n")


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write weights in float16. Raises OSError, also if the disk is full."""
    halved = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in state.items()}
    # Of a full disk safetensors' own writing raises another error than OSError.
    path.write_bytes(packed(halved))


def load(folder: Path, *, verify: bool = True) -> Base:
    """Open a base. Raises MissingArtifactError or CorruptArtifactError."""
    return Base(**vars(base_folder.read(folder, verify=verify)))
