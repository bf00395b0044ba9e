"""Granite 3 MoE: Granite with experts, weighted by a softmax over the chosen."""

from ..config import Config
from ..names import Names
from ..nn import LM, Experts, Mixture, Router
from . import granite

ABSENT = {**granite.ABSENT, "num_experts_per_tok": 2, "num_local_experts": 8}


def model(c: Config) -> LM:
    dim, count = c["hidden_size"], c["num_local_experts"]

    def mixture() -> Mixture:
        experts = Experts(dim, c["intermediate_size"], count, act=c.get("hidden_act", "silu"))
        return Mixture(Router(dim, count, c.chosen(count), score="none", after="softmax"), experts)

    return granite.decoder(c, mixture)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}.block_sparse_moe", "decoder.layers.{}.mlp.op"
    return granite.names(c) | {
        f"{theirs}.router.layer": f"{ours}.router",
        f"{theirs}.input_linear": f"{ours}.experts.gate_up",
        f"{theirs}.output_linear": f"{ours}.experts.down",
    }
