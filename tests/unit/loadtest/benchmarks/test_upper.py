"""The upper layers' counted work equals their computed work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hplm_loadtest.benchmarks.engine.upper import product_flop_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hplm.adapters.tenant import Pooling
from hplm.engine.encode import EngineRequest
from hplm.models.base import Base
from hplm.models.layers import TransformerLayer
from hplm.store.layout import Store
from tests import tiny


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_counted_products_of_the_upper_layers_equal_the_computed_products(
    tiny_base: Base, tmp_path: Any, pooling: Pooling
) -> None:
    config, lengths = tiny_base.config, (3, 7, 11)
    store = Store(tmp_path)
    tiny.name_root(store, tiny_base)
    tiny.make_tenant(store, tiny_base, "alpha", 1)
    tenant = tiny.load_tenant(store, tiny_base, "alpha")
    tenant = replace(tenant, card=replace(tenant.card, pooling=pooling))
    requests = [EngineRequest(tenant, np.zeros((length, config.hidden_size), np.float16)) for length in lengths]
    starts, state = [0, 3, 10], torch.zeros(sum(lengths), config.hidden_size)
    layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.upper_layers))

    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        for index, layer in enumerate(layers):
            assert isinstance(layer, TransformerLayer)
            _, _, context = layer.qkv(state).chunk(3, dim=-1)
            if pooling == "cls" and index == len(layers) - 1:
                context = context[starts]
            state = layer.ffn_out(layer.ffn_in(layer.attention_out(context)))
    assert product_flop_of(config, requests) == counted.get_total_flops()
