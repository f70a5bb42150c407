"""Writes a whole model for ONNX Runtime: a graph of its fused BERT operators, and a file of weights that it maps.

The graph has the form that ONNX Runtime's own optimiser would produce, so a session opens without optimising.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from hplm.core.settings import BaseConfig
from hplm_loadtest.peers.whole_model import WholeModel

MICROSOFT = "com.microsoft"
# ONNX Runtime maps external data from page boundaries.
PAGE = 4096
FORMAT = 2  # version of the graph, part of the folder's name so that files of another version are not used
# Start and axis of a Slice over the tokens of each text.
SLICE = {"zero": 0, "tokens": 1}


def file_bytes(config: BaseConfig) -> int:
    """Return the approximate size of a model's weights in fp32."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    return 4 * (config.upper_layers * layer + (config.vocab_size + config.max_tokens) * hidden)


def write(model: WholeModel, config: BaseConfig, path: Path, data: Path) -> None:
    """Write a model's graph to `path` and its weights to `data`.

    Inputs: `ids` int32 `[B, T]`, `mask` int32 `[B, T]` of 1 and 0, `read` int64 `[1]`. Output: `hidden` fp32 `[B, R, H]`.
    R is the smaller of T and `read`, the number of tokens that heads read, from the first on. After attention, the last layer
    computes only those tokens.
    """
    initializers, start = [], 0
    for name, array in _arrays(model).items():
        tensor = numpy_helper.from_array(array, name)
        set_external_data(tensor, data.name, start)
        initializers.append(tensor)
        start += -(-array.nbytes // PAGE) * PAGE
    data.unlink(missing_ok=True)  # left by a call that was interrupted: weights are only appended
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


def _arrays(model: WholeModel) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights by name. Matrices are transposed, because ONNX computes `x @ W`."""
    arrays = {}
    for name, tensor in model.state_dict().items():
        is_product = tensor.ndim == 2 and "embeddings" not in name
        arrays[name] = np.ascontiguousarray((tensor.T if is_product else tensor).float().numpy())
    return arrays


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
        layer, layer_input = f"body.layers.{index}", f"state.{index}"
        nodes.append(
            helper.make_node(
                "Attention",
                [layer_input, f"{layer}.qkv.weight", f"{layer}.qkv.bias", "lengths"],
                [f"{layer}.context"],
                domain=MICROSOFT,
                num_heads=config.num_heads,
            )
        )
        context, output = f"{layer}.context", f"state.{index + 1}"
        if index == config.upper_layers - 1:
            for name in (context, layer_input):
                nodes.append(helper.make_node("Slice", [name, "zero", "read", "tokens"], [f"{name}.read"]))
            context, layer_input, output = f"{context}.read", f"{layer_input}.read", "hidden"
        nodes += _after_attention(layer, context, layer_input, output, eps)
    return nodes


def _after_attention(layer: str, context: str, layer_input: str, output: str, eps: float) -> list[onnx.NodeProto]:
    """Return the nodes of a layer after its attention: from `context`, the attention's output, and the layer's input."""

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

    middle = f"{output}.middle"
    return [
        product(context, "attention_out", f"{output}.attended"),
        norm(layer_input, f"{output}.attended", "attention_out", "attention_norm", middle),
        product(middle, "ffn_in", f"{output}.inner"),
        helper.make_node(
            "BiasGelu", [f"{output}.inner", f"{layer}.ffn_in.bias"], [f"{output}.activated"], domain=MICROSOFT
        ),
        product(f"{output}.activated", "ffn_out", f"{output}.out"),
        norm(middle, f"{output}.out", "ffn_out", "ffn_norm", output),
    ]
