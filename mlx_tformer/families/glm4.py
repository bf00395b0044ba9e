"""GLM 4 (0414): GLM with a norm before and one after each operation."""

from ..config import Config
from ..names import Names
from ..nn import LM
from . import glm, llama

ABSENT = glm.ABSENT


def model(c: Config) -> LM:
    bias = c["attention_bias"]
    return llama.decoder(
        c, lambda layer: llama.attention(c, bias=bias, out_bias=False, interleaved=True), sandwich=True
    )


def names(c: Config) -> Names:
    return glm.names(c) | {
        "model.layers.{}.post_self_attn_layernorm": "decoder.layers.{}.attn.post",
        "model.layers.{}.post_mlp_layernorm": "decoder.layers.{}.mlp.post",
    }
