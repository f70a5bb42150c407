"""The model that a base was converted from, with its hidden states as features."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hplm.core.text import EncodedText
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import CPU, computing_in
from hplm.models.layers import OriginalEncoder
from hplm_builder.convert.original import base_config, load_original
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.prepared import Featurise


@dataclass(frozen=True)
class OriginalModel:
    """The model that a base was converted from. Its weights are read once, when they are first needed."""

    base: Base
    folder: Path
    device: torch.device = CPU

    def check(self) -> None:
        """Refuse a model that the base cannot have been converted from. Raises ConfigError, or DataError if it is no BERT."""
        config = self.base.config
        shape = base_config(
            self.folder,
            name=config.name,
            lower_layers=0 if config.is_whole else 1,
            lower_form=config.lower_form,
            window=config.window,
            window_layers=0 if config.is_whole else 1,
            max_tokens=config.max_tokens,
        )
        keys = ("architecture", "vocab_size", "hidden_size", "num_heads", "intermediate_size")
        if shape.upper_layers < config.upper_layers or any(getattr(shape, k) != getattr(config, k) for k in keys):
            raise ConfigError(
                f"base {config.name} was not converted from {self.folder}: give the right model with --original"
            )

    @cached_property
    def model(self) -> OriginalEncoder:
        return load_original(self.folder, self.base.config)

    @cached_property
    def fingerprint(self) -> str:
        """A checksum over the weights: 16 hex digits."""
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def states_below(self, last_layers: int) -> Featurise:
        """Return a function that computes the model's hidden states below its last `last_layers` layers."""
        part = copy.deepcopy(self.model).to(self.device)
        part.layers = part.layers[: len(part.layers) - last_layers]

        def featurise(encoded: list[EncodedText]) -> list[Tensor]:
            # Sorted, because texts of equal length go through attention together.
            order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
            lengths = [len(encoded[i].ids) for i in order]
            ids = torch.cat([torch.from_numpy(encoded[i].ids) for i in order]).to(self.device)
            with torch.no_grad(), computing_in(*fastest_format(self.device)):
                hidden = part(ids, lengths)[-1] if len(part.layers) else part.embed(ids, lengths)
            # Rounded to float16, as PLOT rounds its vectors.
            states = dict(zip(order, hidden.to("cpu", torch.float16).split(lengths), strict=True))
            return [states[i] for i in range(len(encoded))]

        return featurise
