"""Making a trunk: a base of one or two layers, distilled from another base of the store on general text.

A trunk is where the students of tenants start. Its layers train to give the parent's last hidden states. Everything in front
of the layers is the parent's and frozen: word embeddings, lower encoder, positions and the LayerNorm behind them. So parent
and trunk read one input, which is computed once for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from hplm.core.names import check_name_of
from hplm.core.settings import BaseConfig
from hplm.engine.lower_layers import load_lower
from hplm.engine.token_domain import token_features
from hplm.errors import ConfigError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.base_folder import KIND
from hplm.models.device import choose_device, choose_dtype, computing_in, in_dtype
from hplm.models.layers import UpperLayers, WholeLayers, packed_attention, packed_positions
from hplm.models.lower import LowerEncoder, merged_texts
from hplm.plot.ngrams import Ids
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.base import shipped_bases
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.distillation import (
    MEASURED_TOKENS,
    Distilled,
    DistillSettings,
    PackedText,
    batches,
    distil,
    relative_errors,
)
from hplm_builder.convert.mixture import mixture
from hplm_builder.convert.whole import save_whole_base
from hplm_builder.export.register import check_unused

MOST_LAYERS = 2  # with more layers a trunk would be a smaller base, not a place where shallow students start


@dataclass(frozen=True)
class TrunkSettings(DistillSettings):
    """Settings of a trunk's distillation.

    The loss is the error of the last hidden states of all tokens, plus `pooled_weight` times that of their mean over each text.
    """

    pooled_weight: float = 0.25


class Trunk(Distilled):
    """A trunk in distillation beside its parent. Only the layers train, and the relative positions of a model such as MPNet."""

    def __init__(self, parent: Base, config: BaseConfig, starts: list[int]) -> None:
        super().__init__()
        self.config = config
        self.lower: LowerEncoder | None = None if config.is_whole else load_lower(parent)
        self.parent = parent.load_upper().requires_grad_(False)
        self.upper = _upper_from(self.parent, config, starts)
        if self.lower is not None:
            self.lower.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.upper.position_embeddings.weight.device

    def states(self, ids: Ids, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Compute the last hidden states of trunk and parent `[N, H]` from packed ids `[N]`. The parent's have no gradient."""
        with torch.no_grad():
            embedded = self.parent.embed(self._features(ids, lengths), packed_positions(lengths, self.device))
            wanted = _through(self.parent, embedded, lengths)
        return _through(self.upper, embedded, lengths), wanted

    def _features(self, ids: Ids, lengths: list[int]) -> Tensor:
        """Return what the layers read: ids and types `[N, 2]` in a whole base, else merged vectors `[N, H]`."""
        if self.lower is None:
            return torch.from_numpy(token_features(ids)).to(self.device)
        return merged_texts(self.lower, ids, lengths)


def _upper_from(parent: UpperLayers, config: BaseConfig, starts: list[int]) -> UpperLayers:
    upper = WholeLayers(config, parent.words) if isinstance(parent, WholeLayers) else UpperLayers(config)
    missing = upper.load_state_dict(
        {name: value for name, value in parent.state_dict().items() if not name.startswith("layers.")}, strict=False
    ).missing_keys
    assert all(name.startswith("layers.") for name in missing)
    for layer, start in zip(upper.layers, starts, strict=True):
        layer.load_state_dict(parent.layers[start].state_dict())
    upper.requires_grad_(False)
    upper.layers.requires_grad_(True)
    if upper.relative is not None:
        upper.relative.requires_grad_(True)
    return upper


def _through(upper: UpperLayers, hidden: Tensor, lengths: list[int]) -> Tensor:
    attend = packed_attention(upper.config.num_heads, lengths, upper.relative)
    for index in range(len(upper.layers)):
        hidden = upper.layer(index, hidden, attend)
    return hidden


def pooled(states: Tensor, lengths: list[int]) -> Tensor:
    """Return the mean of each text's states: `[N, H]` -> `[texts, H]`."""
    return torch.stack([text.mean(0) for text in states.split(lengths)])


def starting_layers(parent: BaseConfig, layers: int) -> list[int]:
    """Return which of a parent's upper layers a trunk of `layers` layers starts from, counted from 0.

    These are the last layers of a hierarchical base, the first and the last of a whole base, or the last alone. In both kinds
    they had the least error after 100,000 tokens (docs/own-base.md).
    """
    last = parent.upper_layers - 1
    return [0 if parent.is_whole else last - 1, last][-layers:]


def trunk_config(parent: Base, layers: int, name: str) -> BaseConfig:
    """Return the shape of a trunk. Raises ConfigError if no trunk of so many layers can be made from `parent`."""
    config = parent.config
    if parent.is_trunk:
        raise ConfigError(
            f"base {config.name!r} is a trunk already: distil a trunk from {parent.trunk_of!r}, which it was made from"
        )
    if not 1 <= layers <= MOST_LAYERS:
        raise ConfigError(f"a trunk has 1 to {MOST_LAYERS} layers, got {layers}")
    if layers >= config.upper_layers:
        raise ConfigError(
            f"base {config.name!r} has {config.upper_layers} upper layers, and a trunk of it must have fewer, got {layers}"
        )
    return replace(config, name=name, upper_layers=layers, adapter_layers=0)


def trunk_distance(model: Trunk, text: PackedText) -> dict[str, float]:
    """Measure how far the trunk is from its parent on `text`, in the dtype that training uses.

    `mse`: mean squared error of the last hidden states. `relative`: that error over their variance. `relative_pooled`: the same
    of their mean over each text.
    """
    source = batches(text, MEASURED_TOKENS, np.random.default_rng(0))
    count = max(1, text.num_tokens // MEASURED_TOKENS)
    sums = np.zeros(3)
    with torch.no_grad(), computing_in(choose_dtype("auto", model.device), model.device):
        for _ in range(count):
            ids, lengths = next(source)
            states, wanted = model.states(ids, lengths)
            error, of_means = _errors(states, wanted, lengths)
            sums += [float((states.float() - wanted.float()).square().mean()), float(error), float(of_means)]
    return dict(zip(("mse", "relative", "relative_pooled"), (sums / count).tolist(), strict=True))


def _errors(states: Tensor, wanted: Tensor, lengths: list[int]) -> list[Tensor]:
    """Return the relative errors of the states, and of their means over each text."""
    return relative_errors([states, pooled(states, lengths)], [wanted, pooled(wanted, lengths)])


def train_trunk(
    model: Trunk, text: PackedText, settings: TrunkSettings, checkpoint: Checkpoint, progress: Progress
) -> None:
    """Train in place, as `distil` does."""

    def batch_loss(ids: Ids, lengths: list[int], _: np.random.Generator) -> tuple[Tensor, Tensor]:
        error, of_means = _errors(*model.states(ids, lengths), lengths)
        return error + settings.pooled_weight * of_means, error

    distil(model, batch_loss, text, settings, checkpoint, model.device, progress, "distil a trunk")


def distil_trunk(
    store: Store,
    parent: Base,
    *,
    name: str,
    layers: int,
    shares: Mapping[str, float],
    settings: TrunkSettings,
    device: str,
    progress: Progress,
) -> Base:
    """Distil a trunk of `layers` layers from `parent`, publish it as base `name`, and return the base.

    Raises DataError for text that cannot be used. Raises ConfigError if the trunk cannot be made from `parent`, if training
    diverges, or if domains stand on an existing base `name`.
    """
    check_name_of("--name", name)
    config = trunk_config(parent, layers, name)
    if name == parent.config.name or name in shipped_bases():
        raise ConfigError(f"the name {name} is that of the parent or of a shipped base: give another --name")
    check_unused(store, name)
    text, held_out = mixture(shares, parent.tokenizer_path, config.max_tokens, progress)
    where = choose_device(device)
    starts = starting_layers(parent.config, layers)
    model = Trunk(parent, config, starts).to(where)
    # The parent computes only, so its matrices are converted once.
    in_dtype(model.parent, choose_dtype("auto", where))
    before = trunk_distance(model, held_out)
    run = {
        "trunk_of": parent.fingerprint,
        "settings": asdict(settings),
        "config": asdict(config),
        "starts": starts,
        "text": text.digest,
    }
    checkpoint = Checkpoint(store.local_work(f"trunk-{name}") / "training.pt", run, precious=True)
    train_trunk(model, text, settings, checkpoint, progress)
    after = trunk_distance(model, held_out)
    if not math.isfinite(after["mse"]):
        checkpoint.remove()
        raise ConfigError(f"training with a learning rate of {settings.learning_rate:g} diverged: choose a lower one")
    about = {
        **{key: value for key, value in artifact.read(parent.folder, KIND).meta.items() if key == "original"},
        "trunk": {
            "of": parent.config.name,
            "fingerprint": parent.fingerprint,
            "layers": layers,
            "error": after["relative"],
        },
        "distillation": {
            **asdict(settings),
            "starting_layers": starts,
            "text": dict(shares),
            "text_tokens": text.num_tokens,
            "held_out_tokens": held_out.num_tokens,
            "before": before,
            "after": after,
        },
    }
    # Checked again after the training. If it raises, the checkpoint keeps the result.
    check_unused(store, name)
    tokenizer = parent.tokenizer_path.read_bytes()
    if model.lower is None:
        made = save_whole_base(
            store, config, model.parent.get_buffer("words"), model.upper.state_dict(), tokenizer, about
        )
    else:
        bases.save(store.base(name), config, model.lower.state_dict(), model.upper.state_dict(), tokenizer, about)
        made = bases.load(store.base(name))
    checkpoint.remove()
    return made
