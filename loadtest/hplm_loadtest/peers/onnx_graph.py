"""Writes a whole model for ONNX Runtime: a graph of its fused BERT operators, and a file of weights that it maps.

The graph has the form that ONNX Runtime's own optimiser would produce, so a session opens without optimising.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.external_data_helper import set_external_data

from hplm.core.settings import BaseConfig
from hplm_loadtest.peers.whole_model import WholeModel

MICROSOFT = "com.microsoft"
# ONNX Runtime maps external data from page boundaries.
PAGE = 4096
FORMAT = 2  # version of the graph, part of the folder's name so that files of another version are not used
# Start and axis of a Slice over the tokens of each text.
SLICE = {"zero": 0, "tokens": 1}
# A layer in ONNX's text form.
ATTENTION = """
    "{layer}.context" = com.microsoft.Attention <num_heads = {heads}> (
        "{state}", "{layer}.qkv.weight", "{layer}.qkv.bias", lengths)
"""
READ = """
    "{context}" = Slice ("{layer}.context", zero, read, tokens)
    "{skipped}" = Slice ("{state}", zero, read, tokens)
"""
AFTER_ATTENTION = """
    "{layer}.attended" = MatMul ("{context}", "{layer}.attention_out.weight")
    "{layer}.middle" = com.microsoft.SkipLayerNormalization <epsilon = {eps}> (
        "{layer}.attended", "{skipped}",
        "{layer}.attention_norm.weight", "{layer}.attention_norm.bias", "{layer}.attention_out.bias")
    "{layer}.inner" = MatMul ("{layer}.middle", "{layer}.ffn_in.weight")
    "{layer}.activated" = com.microsoft.BiasGelu ("{layer}.inner", "{layer}.ffn_in.bias")
    "{layer}.out" = MatMul ("{layer}.activated", "{layer}.ffn_out.weight")
    "{output}" = com.microsoft.SkipLayerNormalization <epsilon = {eps}> (
        "{layer}.out", "{layer}.middle",
        "{layer}.ffn_norm.weight", "{layer}.ffn_norm.bias", "{layer}.ffn_out.bias")
"""


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
    graph = parser.parse_graph(_graph_text(config))
    slices = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in SLICE.items()]
    graph.initializer.extend([*initializers, *slices])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path), format="protobuf")


def _arrays(model: WholeModel) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights by name. Matrices are transposed, because ONNX computes `x @ W`."""
    arrays = {}
    for name, tensor in model.state_dict().items():
        is_product = tensor.ndim == 2 and "embeddings" not in name
        arrays[name] = np.ascontiguousarray((tensor.T if is_product else tensor).float().numpy())
    return arrays


def _graph_text(config: BaseConfig) -> str:
    """Return the inputs, the output and the nodes of the graph in ONNX's text form."""
    last = config.upper_layers - 1
    layers = ""
    for index in range(config.upper_layers):
        is_last, layer, state = index == last, f"body.layers.{index}", f"state.{index}"
        read = ".read" if is_last else ""
        names = {"layer": layer, "state": state, "eps": config.layer_norm_eps, "heads": config.num_heads}
        names |= {"context": f"{layer}.context{read}", "skipped": state + read}
        names["output"] = "hidden" if is_last else f"state.{index + 1}"
        layers += (ATTENTION + (READ if is_last else "") + AFTER_ATTENTION).format(**names)
    return f"""
bert (int32[B, T] ids, int32[B, T] mask, int64[1] read) => (float[B, R, {config.hidden_size}] hidden) {{
    "state.0", lengths = com.microsoft.EmbedLayerNormalization <epsilon = {config.layer_norm_eps}> (
        ids, "", "word_embeddings.weight", "body.position_embeddings.weight", "",
        "body.merge_norm.weight", "body.merge_norm.bias", mask)
    {layers}
}}
"""
