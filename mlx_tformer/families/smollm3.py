"""SmolLM3: Llama in which every fourth layer has no positions."""

from ..config import Config
from ..nn import LM, Attention, Position
from ..settings import ROTARY
from . import llama

ABSENT = {
    "max_position_embeddings": 32768,
    "no_rope_layer_interval": 4,
    "num_key_value_heads": 4,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    layers, every, bias = c["num_hidden_layers"], c["no_rope_layer_interval"], c.get("attention_bias", False)
    turning = c.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(layers)])
    if len(turning) != layers:
        raise c.wrong("no_rope_layers", f"{layers} entries, one for each layer")
    windowed = c.get("use_sliding_window", False) and c.get("sliding_window") is not None
    masks = c.masks(["sliding_attention" if windowed and not turns else "full_attention" for turns in turning])
    c.ignore("sliding_window", "max_window_layers", *ROTARY)

    def attention(layer: int) -> Attention:
        position = None if turning[layer] else Position()
        return llama.attention(c, bias=bias, out_bias=bias, mask=masks[layer], position=position)

    return llama.decoder(c, attention, mlp_bias=c.get("mlp_bias", False))


names = llama.names
