"""The weights of linear layers as plain matrices, for those who look at them."""

import mlx.core as mx
import mlx.nn as nn


def matrix(layer: nn.Module, rows: slice | None = None) -> mx.array:
    """The weight (out, in) of a linear layer, or (vocab, dim) of an embedding, unpacked where it is quantized; all of
    it, or some rows.

    >>> layer = nn.Linear(64, 32)
    >>> gap = mx.abs(matrix(nn.QuantizedLinear.from_linear(layer, bits=8)) - layer.weight).max()
    >>> matrix(layer, slice(2, 5)).shape, gap.item() < 0.01
    ((3, 64), True)
    """
    rows = slice(None) if rows is None else rows
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        biases = layer.get("biases")
        packed = layer.weight[rows], layer.scales[rows], None if biases is None else biases[rows]
        return mx.dequantize(*packed, layer.group_size, layer.bits, mode=layer.mode)
    return layer["weight"][rows]
