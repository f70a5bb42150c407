"""Making a whole base: a pretrained model as it is, without lower layers and tables. Nothing is trained."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hplm.core.names import check_name_of
from hplm.core.settings import WHOLE, BaseConfig
from hplm.models import base as bases
from hplm.models.base import WORDS, Base
from hplm.models.layers import OriginalEncoder, WholeLayers
from hplm.store.layout import Store
from hplm_builder.convert.original import base_config, load_original, num_layers_of, tokenizer_file
from hplm_builder.export.register import ROOT_OF_WHOLE, check_unused, open_registry, register_root

# Which layers of a whole base have adapters: the upper half, or all.
AdaptedLayers = Literal["upper", "all"]


def make_whole_base(
    store: Store, folder: Path, *, name: str, origin: str, adapters: AdaptedLayers, max_tokens: int | None
) -> Base:
    """Publish the model in `folder` as a whole base, register its root, and return the base.

    `origin` is the model's name in the manifest. Raises DataError for a folder that cannot be used. Raises ConfigError if the
    store has another base of that name.
    """
    check_name_of("--name", name)
    layers = num_layers_of(folder)
    config = base_config(
        folder,
        name=name,
        lower_layers=0,
        lower_form=WHOLE,
        window=1,
        window_layers=0,
        max_tokens=max_tokens,
        adapter_layers=0 if adapters == "all" else -(-layers // 2),
    )
    with tokenizer_file(folder, config) as path:
        tokenizer = path.read_bytes()
    original = load_original(folder, config)
    return publish_whole_base(store, config, original, tokenizer, {"original": origin})


def publish_whole_base(
    store: Store, config: BaseConfig, original: OriginalEncoder, tokenizer: bytes, about: dict[str, Any]
) -> Base:
    """Publish a model as a whole base of shape `config`, register its root, and return the base.

    Raises ConfigError if the store has another base of that name.
    """
    return save_whole_base(
        store, config, original.word_embeddings.weight, upper_state(config, original), tokenizer, about
    )


def save_whole_base(
    store: Store, config: BaseConfig, words: Tensor, upper: dict[str, Tensor], tokenizer: bytes, about: dict[str, Any]
) -> Base:
    """Publish a whole base from its word embeddings `[V, H]` and the state of its layers, and register its root.

    Raises ConfigError if the store has another base of that name.
    """
    name = config.name

    def save(target: Store) -> Base:
        bases.save(target.base(name), config, {WORDS: words}, upper, tokenizer, about)
        return bases.load(target.base(name))

    with tempfile.TemporaryDirectory(prefix="hplm-base-") as apart:
        # A fingerprint is computed from written files.
        check_unused(store, name, save(Store(Path(apart))).fingerprint)
    base = save(store)
    with closing(open_registry(store)) as registry:
        register_root(registry, store, base, ROOT_OF_WHOLE)
    return base


def upper_state(config: BaseConfig, original: OriginalEncoder) -> dict[str, Tensor]:
    """Return the weights of a whole base's layers, which compute exactly as the model in `original`."""
    upper = WholeLayers(config, original.word_embeddings.weight.detach())
    upper.position_embeddings.load_state_dict(original.position_embeddings.state_dict())
    upper.merge_norm.load_state_dict(original.embedding_norm.state_dict())
    upper.layers.load_state_dict(original.layers.state_dict())
    if upper.relative is not None and original.relative is not None:
        upper.relative.load_state_dict(original.relative.state_dict())
    if upper.type_embeddings is not None:
        upper.type_embeddings.load_state_dict({"weight": original.token_types})
    return upper.state_dict()
