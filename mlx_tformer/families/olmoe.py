"""OLMoE: 64 small experts in every layer, q and k normed over all heads together."""

from ..config import Config
from ..names import Names
from ..nn import LM, AllHeads, Attention, Experts, Mixture, RMSNorm, Router
from ..settings import Other
from . import llama, qwen2_moe

ABSENT = {
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_experts": Other("num_local_experts", 64),
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
}


def model(c: Config) -> LM:
    dim, eps, count = c["hidden_size"], c["rms_norm_eps"], c["num_experts"]
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias, clip = c.get("attention_bias", False), c.get("clip_qkv")

    def attention(layer: int) -> Attention:
        return Attention(
            dim,
            heads,
            kv_heads,
            head_dim,
            bias=bias,
            position=c.rope(head_dim),
            q_norm=AllHeads(RMSNorm(heads * head_dim, eps)),
            k_norm=AllHeads(RMSNorm(kv_heads * head_dim, eps)),
            clip=clip,
        )

    def mixture(layer: int) -> Mixture:
        experts = Experts(dim, c["intermediate_size"], count, act=c.get("hidden_act", "silu"))
        return Mixture(Router(dim, count, c.chosen(count), normalise=c["norm_topk_prob"]), experts)

    return llama.decoder(c, attention, mlp_of=mixture)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    norms = {f"{theirs}.self_attn.{x}_norm": f"{ours}.attn.op.{x}_norm.norm" for x in "qk"}
    return llama.names(c) | norms | qwen2_moe.expert_names(f"{theirs}.mlp", f"{ours}.mlp.op")
