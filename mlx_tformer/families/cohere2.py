"""Command R7B: Command R with a window and rotary positions in three of four layers, and neither in the fourth."""

from ..config import Config
from ..nn import LM, Attention, Position, Window
from ..settings import ROTARY
from . import cohere, llama

ABSENT = {**cohere.ABSENT, "rope_theta": 10000.0, "sliding_window": 4096}


def model(c: Config) -> LM:
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias, layers, every = c.get("attention_bias", False), c["num_hidden_layers"], c.get("sliding_window_pattern", 4)
    c.ignore(
        "use_gated_activation", "use_embedding_sharing", "use_parallel_block", "use_parallel_embedding", "use_qk_norm"
    )
    c.ignore(
        "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "layer_switch", "cache_implementation"
    )
    c.ignore(*ROTARY)
    masks = c.masks(["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)])

    def attention(layer: int) -> Attention:
        windowed = any(isinstance(part, Window) for part in masks[layer].parts)
        position = c.rope(head_dim, interleaved=True) if windowed else Position()
        return Attention(c["hidden_size"], heads, kv_heads, head_dim, bias=bias, position=position, mask=masks[layer])

    return cohere.decoder(c, [attention(layer) for layer in range(layers)])


names = cohere.names
