"""gpt-oss: a learned sink in each head, a window in every other layer, experts with biases and a clamped gate."""

from dataclasses import dataclass

import mlx.core as mx

from ..config import Config
from ..names import Alternating, Moved, Names, Transposed
from ..nn import LM, Attention, Experts, Mixture, Router
from ..settings import Other
from . import llama

ABSENT = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": Other("num_experts", 128),
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def model(c: Config) -> LM:
    dim, count, layers = c["hidden_size"], c["num_local_experts"], c["num_hidden_layers"]
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias = c["attention_bias"]
    masks = c.masks(["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)])
    c.expect(hidden_act="silu")
    c.ignore("initial_context_length", "experts_per_token", "attention_dropout")

    def attention(layer: int) -> Attention:
        position = c.rope(head_dim)
        return Attention(dim, heads, kv_heads, head_dim, bias=bias, position=position, mask=masks[layer], sinks=True)

    def mixture(layer: int) -> Mixture:
        router = Router(dim, count, c.chosen(count), score="none", after="softmax", bias=True)
        act = ClampedGate(c["swiglu_alpha"], c["swiglu_limit"])
        return Mixture(router, Experts(dim, c["intermediate_size"], count, act=act, bias=True))

    return llama.decoder(c, attention, mlp_of=mixture)


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) · gate · sigmoid(alpha · gate), where the gate is at most `limit` and up within ± `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        gate, up = mx.minimum(gate, self.limit), mx.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * mx.sigmoid(gate * self.alpha)

    def __str__(self) -> str:
        return f"gate · sigmoid({self.alpha:g} · gate) · (up + 1), clamped at {self.limit:g}"


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    mlp, op = f"{theirs}.mlp", f"{ours}.mlp.op"
    # Experts are stored (E, in, out), and the columns of gate and up alternate.
    return llama.names(c) | {
        f"{theirs}.self_attn.sinks": f"{ours}.attn.op.sinks",
        f"{mlp}.router": f"{op}.router",
        f"{mlp}.experts.gate_up_proj": Moved(
            f"{op}.experts.gate_up.weight", (Transposed(stacked=True), Alternating(axis=1))
        ),
        f"{mlp}.experts.gate_up_proj_bias": Moved(f"{op}.experts.gate_up.bias", (Alternating(axis=1),)),
        f"{mlp}.experts.down_proj": Moved(f"{op}.experts.down.weight", (Transposed(stacked=True),)),
        f"{mlp}.experts.down_proj_bias": f"{op}.experts.down.bias",
    }
