"""Qwen 1.5 and 2 MoE: Qwen 2 with many small experts, and one that all tokens share, weighted by a sigmoid of its
own."""

from ..config import Config
from ..names import Expert, Names, joined
from ..nn import LM, Experts, GatedMlp, Linear, Mixture, Router
from ..nn.tap import Module
from . import llama, qwen2

ABSENT = {
    **qwen2.ABSENT,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
}
EITHER = ("intermediate_size", "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok")
"""Settings of dense layers and of those with experts, which nobody reads where all layers are of the other kind."""


def model(c: Config) -> LM:
    dim, act, bias = c["hidden_size"], c.get("hidden_act", "silu"), c.get("qkv_bias", True)
    shared, last = c["shared_expert_intermediate_size"], c["max_window_layers"]
    masks = qwen2.layer_masks(c, lambda layer: layer % 2 == 0 and layer < last)

    def mlp(layer: int) -> Module:
        if not sparse(c, layer):
            return GatedMlp(dim, c["intermediate_size"], act)
        return mixture(c, c["num_experts"], shared=GatedMlp(dim, shared, act), shared_gate=Linear(dim, 1, bias=False))

    c.ignore("num_local_experts", *EITHER)
    return llama.decoder(c, lambda layer: llama.attention(c, bias=bias, out_bias=False, mask=masks[layer]), mlp_of=mlp)


def sparse(c: Config, layer: int) -> bool:
    """True if a layer has experts."""
    dense, step = c.get("mlp_only_layers", []), c["decoder_sparse_step"]
    return layer not in dense and (layer + 1) % step == 0


def mixture(c: Config, count: int, *, shared: Module | None = None, shared_gate: Linear | None = None) -> Mixture:
    """`count` experts for a layer, with a softmax over all of them."""
    dim = c["hidden_size"]
    router = Router(dim, count, c.chosen(count), normalise=c["norm_topk_prob"])
    experts = Experts(dim, c["moe_intermediate_size"], count, act=c.get("hidden_act", "silu"))
    return Mixture(router, experts, shared=shared, shared_gate=shared_gate)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}.mlp", "decoder.layers.{}.mlp.op"
    one = f"{theirs}.shared_expert"
    return (
        llama.names(c)
        | expert_names(theirs, ours)
        | joined(f"{ours}.shared.gate_up", {f"{one}.gate_proj": 1, f"{one}.up_proj": 1})
        | {f"{one}.down_proj": f"{ours}.shared.down", f"{theirs}.shared_expert_gate": f"{ours}.shared_gate"}
    )


def expert_names(theirs: str, ours: str) -> Names:
    """Experts stored one by one, as checkpoints have them, or stacked, as transformers 5 keeps them in memory."""
    return {
        f"{theirs}.gate": f"{ours}.router",
        f"{theirs}.experts.{{}}.gate_proj": Expert(f"{ours}.experts.gate_up", 0, (1, 1)),
        f"{theirs}.experts.{{}}.up_proj": Expert(f"{ours}.experts.gate_up", 1, (1, 1)),
        f"{theirs}.experts.{{}}.down_proj": Expert(f"{ours}.experts.down"),
        f"{theirs}.experts.gate_up_proj": f"{ours}.experts.gate_up.weight",
        f"{theirs}.experts.down_proj": f"{ours}.experts.down.weight",
    }
