"""Qwen 2 and 2.5: Llama with biases on q, k and v; some layers may see a window alone."""

from ..config import Config
from ..nn import LM, Causal, Mask, Window
from . import llama

ABSENT = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def model(c: Config) -> LM:
    masks = layer_masks(c)
    return llama.decoder(c, lambda layer: llama.attention(c, bias=True, out_bias=False, mask=masks[layer]))


names = llama.names


def layer_masks(c: Config) -> list[Mask]:
    """The mask of each layer: a window from `max_window_layers` on, or where `layer_types` says so, if windows are
    used at all."""
    layers, first, size = c["num_hidden_layers"], c["max_window_layers"], c.get("sliding_window")
    windowed = c["use_sliding_window"] and size is not None
    default = ["sliding_attention" if windowed and layer >= first else "full_attention" for layer in range(layers)]
    types = c.get("layer_types", default)
    if len(types) != layers:
        raise c.wrong("layer_types", f"{layers} entries, one for each layer")
    if "sliding_attention" in types and not windowed:
        raise c.wrong("layer_types", "full_attention alone, because use_sliding_window is not set")
    return [Causal() & Window(size) if kind == "sliding_attention" else Causal() for kind in types]
