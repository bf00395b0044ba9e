"""Mixtral: Mistral with 8 experts instead of the MLP, 2 for each token, weighted by a softmax over the two."""

from ..config import Config
from ..names import Expert, Names
from ..nn import LM, Causal, Experts, Mixture, Router, Window
from ..settings import Other
from . import llama

ABSENT = {
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": Other("num_experts", 8),
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}


def model(c: Config) -> LM:
    dim, count, window = c["hidden_size"], c["num_local_experts"], c.get("sliding_window")
    mask = Causal() if window is None else Causal() & Window(window)
    c.ignore("router_jitter_noise")

    def mixture(layer: int) -> Mixture:
        experts = Experts(dim, c["intermediate_size"], count, act=c.get("hidden_act", "silu"))
        return Mixture(Router(dim, count, c.chosen(count), normalise=True), experts)

    return llama.decoder(c, lambda layer: llama.attention(c, bias=False, out_bias=False, mask=mask), mlp_of=mixture)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}.block_sparse_moe", "decoder.layers.{}.mlp.op"
    return llama.names(c) | {
        f"{theirs}.gate": f"{ours}.router",
        f"{theirs}.experts.{{}}.w1": Expert(f"{ours}.experts.gate_up", 0, (1, 1)),
        f"{theirs}.experts.{{}}.w3": Expert(f"{ours}.experts.gate_up", 1, (1, 1)),
        f"{theirs}.experts.{{}}.w2": Expert(f"{ours}.experts.down"),
        # As transformers 5 keeps them in memory.
        "model.layers.{}.mlp.gate": f"{ours}.router",
        "model.layers.{}.mlp.experts.gate_up_proj": f"{ours}.experts.gate_up.weight",
        "model.layers.{}.mlp.experts.down_proj": f"{ours}.experts.down.weight",
    }
