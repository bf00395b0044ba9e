"""GLM 4 (the 9B of 2024): Llama with half of each head turning, interleaved, and biases on q, k and v."""

from ..config import Config
from ..names import Names, first
from ..nn import LM
from . import llama

ABSENT = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}


def model(c: Config) -> LM:
    bias = c["attention_bias"]
    return llama.decoder(c, lambda layer: llama.attention(c, bias=bias, out_bias=False, interleaved=True))


def names(c: Config) -> Names:
    return first({"model.layers.{}.mlp.gate_up_proj": "decoder.layers.{}.mlp.op.gate_up"}, llama.names(c))
