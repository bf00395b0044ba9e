"""The weights of linear layers as plain matrices, for those who look at them."""

import mlx.core as mx
import mlx.nn as nn


def matrix(layer: nn.Module) -> mx.array:
    """The weight (out, in) of a linear layer, or (vocab, dim) of an embedding, unpacked where it is quantized.

    >>> layer = nn.Linear(64, 32)
    >>> gap = mx.abs(matrix(nn.QuantizedLinear.from_linear(layer, bits=8)) - layer.weight).max()
    >>> matrix(layer).shape, gap.item() < 0.01
    ((32, 64), True)
    """
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        packed = layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits
        return mx.dequantize(*packed, mode=layer.mode)
    return layer["weight"]
