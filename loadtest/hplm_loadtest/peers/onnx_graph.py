"""The same model for ONNX Runtime: a graph of its fused BERT operators, weights beside it in a file that it maps.

Written by hand: it is what ONNX Runtime's own optimiser aims at, and a session opens without optimising anything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from hplm.core.settings import BaseConfig
from hplm_loadtest.peers.plain import PlainModel

MICROSOFT = "com.microsoft"
# ONNX Runtime maps external data from page boundaries.
PAGE = 4096
# Of the graph: files of another are not taken for one of these.
FORMAT = 2
# Starts and axes of a Slice over each text's tokens.
SLICE = {"zero": 0, "tokens": 1}


def file_bytes(config: BaseConfig) -> int:
    """About the size of a model's weights, fp32."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    return 4 * (config.upper_layers * layer + (config.vocab_size + config.max_tokens) * hidden)


def write(model: PlainModel, config: BaseConfig, path: Path, data: Path) -> None:
    """Inputs `ids` int32 `[B, T]`, `mask` int32 `[B, T]` of 1 and 0, `read` int64 `[1]`; output `hidden` fp32 `[B, R, H]`.

    R is the lesser of T and `read`: how many tokens of each text heads read, from the first on. After its attention the last
    layer goes on with those alone.
    """
    arrays = _arrays(model)
    initializers, start = [], 0
    with data.open("wb") as file:
        for name, array in arrays.items():
            file.seek(start)
            file.write(array.tobytes())
            initializers.append(_external(name, array, data.name, start))
            start += -(-array.nbytes // PAGE) * PAGE
    graph = helper.make_graph(
        _nodes(config),
        "bert",
        [
            *(helper.make_tensor_value_info(name, TensorProto.INT32, ["B", "T"]) for name in ("ids", "mask")),
            helper.make_tensor_value_info("read", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", "R", config.hidden_size])],
        [*initializers, *(helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in SLICE.items())],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path), format="protobuf")


def _arrays(model: PlainModel) -> dict[str, npt.NDArray[np.float32]]:
    """Initializers by name; products are `x @ W` in ONNX, so matrices are turned."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    arrays = {}
    for name, array in state.items():
        is_product = array.ndim == 2 and "embeddings" not in name
        arrays[name] = np.ascontiguousarray(array.T if is_product else array)
    return arrays


def _external(name: str, array: npt.NDArray[np.float32], location: str, start: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", start), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _nodes(config: BaseConfig) -> list[onnx.NodeProto]:
    eps = config.layer_norm_eps
    nodes = [
        helper.make_node(
            "EmbedLayerNormalization",
            [
                *("ids", "", "word_embeddings.weight", "body.position_embeddings.weight", ""),
                *("body.merge_norm.weight", "body.merge_norm.bias", "mask"),
            ],
            ["state.0", "lengths"],
            domain=MICROSOFT,
            epsilon=eps,
        )
    ]
    for index in range(config.upper_layers):
        layer, given = f"body.layers.{index}", f"state.{index}"
        nodes.append(
            helper.make_node(
                "Attention",
                [given, f"{layer}.qkv.weight", f"{layer}.qkv.bias", "lengths"],
                [f"{layer}.seen"],
                domain=MICROSOFT,
                num_heads=config.num_heads,
            )
        )
        seen, after = f"{layer}.seen", f"state.{index + 1}"
        if index == config.upper_layers - 1:
            for name in (seen, given):
                nodes.append(helper.make_node("Slice", [name, "zero", "read", "tokens"], [f"{name}.read"]))
            seen, given, after = f"{seen}.read", f"{given}.read", "hidden"
        nodes += _behind_attention(layer, seen, given, after, eps)
    return nodes


def _behind_attention(layer: str, seen: str, given: str, after: str, eps: float) -> list[onnx.NodeProto]:
    """The rest of a layer: `seen` of attention and the layer's input `given` -> `after`."""

    def product(source: str, weight: str, target: str) -> onnx.NodeProto:
        return helper.make_node("MatMul", [source, f"{layer}.{weight}.weight"], [target])

    def norm(skipped: str, source: str, bias: str, weight: str, target: str) -> onnx.NodeProto:
        return helper.make_node(
            "SkipLayerNormalization",
            [source, skipped, f"{layer}.{weight}.weight", f"{layer}.{weight}.bias", f"{layer}.{bias}.bias"],
            [target],
            domain=MICROSOFT,
            epsilon=eps,
        )

    middle = f"{after}.middle"
    return [
        product(seen, "attention_out", f"{after}.attended"),
        norm(given, f"{after}.attended", "attention_out", "attention_norm", middle),
        product(middle, "ffn_in", f"{after}.inner"),
        helper.make_node(
            "BiasGelu", [f"{after}.inner", f"{layer}.ffn_in.bias"], [f"{after}.activated"], domain=MICROSOFT
        ),
        product(f"{after}.activated", "ffn_out", f"{after}.out"),
        norm(middle, f"{after}.out", "ffn_out", "ffn_norm", after),
    ]
