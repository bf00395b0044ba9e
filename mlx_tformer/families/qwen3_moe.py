"""Qwen 3 MoE: Qwen 3 with many small experts in every layer, or in those that the config names."""

from ..config import Config
from ..names import Names
from ..nn import LM, Causal, GatedMlp, Window
from ..nn.tap import Module
from ..settings import Other
from . import llama, qwen2, qwen2_moe, qwen3

ABSENT = {
    **qwen2.ABSENT,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_local_experts": Other("num_experts", 128),
}


def model(c: Config) -> LM:
    bias, window = c.get("attention_bias", False), c.get("sliding_window") if c["use_sliding_window"] else None
    mask = Causal() if window is None else Causal() & Window(window)
    c.ignore("sliding_window", "max_window_layers", "num_local_experts", *qwen2_moe.EITHER)

    def mlp(layer: int) -> Module:
        if qwen2_moe.sparse(c, layer):
            return qwen2_moe.mixture(c, c["num_local_experts"])
        return GatedMlp(c["hidden_size"], c["intermediate_size"], c.get("hidden_act", "silu"))

    return llama.decoder(
        c, lambda layer: llama.attention(c, bias=bias, out_bias=bias, mask=mask, qk_norm=True), mlp_of=mlp
    )


def names(c: Config) -> Names:
    return qwen3.names(c) | qwen2_moe.expert_names("model.layers.{}.mlp", "decoder.layers.{}.mlp.op")
