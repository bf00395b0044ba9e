"""Qwen 2 and 2.5: Llama with biases on q, k and v; some layers may see a window alone."""

from collections.abc import Callable

from ..config import Config
from ..nn import LM, Mask
from . import llama

ABSENT = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def model(c: Config) -> LM:
    first = c["max_window_layers"]
    masks = layer_masks(c, lambda layer: layer >= first)
    return llama.decoder(c, lambda layer: llama.attention(c, bias=True, out_bias=False, mask=masks[layer]))


names = llama.names


def layer_masks(c: Config, windowed: Callable[[int], bool]) -> list[Mask]:
    """The mask of each layer: a window where `layer_types` says so, or else `windowed(layer)`, if windows are used at
    all."""
    layers = c["num_hidden_layers"]
    if not c["use_sliding_window"] or c.get("sliding_window") is None:
        c.ignore("sliding_window")
        if "sliding_attention" in c.get("layer_types", []):
            raise c.wrong("layer_types", "full_attention alone, because use_sliding_window is not set")
        return c.masks(["full_attention"] * layers)
    return c.masks(["sliding_attention" if windowed(layer) else "full_attention" for layer in range(layers)])
