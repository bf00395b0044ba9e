"""Phi 3 and 4: Llama with q, k, v and gate, up stored as one, longrope for long contexts, and a window where one is
given."""

from ..config import Config
from ..names import Names, first
from ..nn import LM, Causal, Window
from . import llama

ABSENT = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
}


def model(c: Config) -> LM:
    window = c.get("sliding_window")
    mask = Causal() if window is None else Causal() & Window(window)
    c.expect(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    c.ignore("original_max_position_embeddings")
    return llama.decoder(c, lambda layer: llama.attention(c, bias=False, out_bias=False, mask=mask))


def names(c: Config) -> Names:
    own: Names = {
        "model.layers.{}.self_attn.qkv_proj": "decoder.layers.{}.attn.op.qkv",
        "model.layers.{}.mlp.gate_up_proj": "decoder.layers.{}.mlp.op.gate_up",
    }
    return first(own, llama.names(c))
