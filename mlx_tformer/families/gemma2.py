"""Gemma 2: norms before and after each operation, capped scores and logits, a window in every other layer."""

from ..config import Config
from ..names import Names
from ..nn import LM
from . import gemma

ABSENT = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    layers, scale, cap = c["num_hidden_layers"], c["query_pre_attn_scalar"] ** -0.5, c.get("attn_logit_softcapping")
    masks = c.masks(["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)])
    c.ignore("hidden_act", "cache_implementation", "sliding_window_size")
    return gemma.decoder(
        c,
        c["hidden_activation"],
        lambda layer: gemma.attention(c, mask=masks[layer], scale=scale, softcap=cap),
        sandwich=True,
    )


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    return gemma.names(c) | {
        f"{theirs}.post_attention_layernorm": f"{ours}.attn.post",
        f"{theirs}.pre_feedforward_layernorm": f"{ours}.mlp.pre",
        f"{theirs}.post_feedforward_layernorm": f"{ours}.mlp.post",
    }
