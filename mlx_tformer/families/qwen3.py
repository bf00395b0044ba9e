"""Qwen 3: Llama with a norm on each head of q and k before it turns; some layers may see a window alone."""

from ..config import Config
from ..names import Names
from ..nn import LM
from . import llama, qwen2

ABSENT = {**qwen2.ABSENT, "head_dim": 128}


def model(c: Config) -> LM:
    bias, first = c.get("attention_bias", False), c["max_window_layers"]
    masks = qwen2.layer_masks(c, lambda layer: layer >= first)
    return llama.decoder(c, lambda layer: llama.attention(c, bias=bias, out_bias=bias, mask=masks[layer], qk_norm=True))


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}.self_attn", "decoder.layers.{}.attn.op"
    return llama.names(c) | {f"{theirs}.{x}_norm": f"{ours}.{x}_norm" for x in "qk"}
