"""Falcon H1: attention and Mamba 2 read the same input, side by side, then an MLP; multipliers nearly everywhere."""

from dataclasses import dataclass

import mlx.core as mx
from mlx.nn import silu

from ..config import Config
from ..names import Names, joined
from ..nn import LM, Attention, Embed, GatedMlp, Mamba2, Multipliers, Parallel, Residual, RMSNorm, Scaled, Stack
from ..nn.ssm import GatedNorm, Join, NormedGate, SiluGate
from . import llama, mamba, mamba2

ABSENT = {
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_ssm": 1024,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_norm_before_gate": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 8192,
    "mlp_multipliers": [1.0, 1.0],
    "num_key_value_heads": 8,
    "projectors_bias": False,
    "rms_norm_eps": 1e-5,
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
    "ssm_out_multiplier": 1.0,
    "time_step_limit": [0.0, float("inf")],
}
LEFT_OVER = (
    *("mamba_chunk_size", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep"),
    *("time_step_floor", "time_step_max", "time_step_min"),
)
"""How weights were initialised, how much is computed at once, and what the reference no longer reads."""


def model(c: Config) -> LM:
    dim, eps = c["hidden_size"], c["rms_norm_eps"]
    down = multipliers(c, "mlp_multipliers", 2)[1]
    c.expect(hidden_act="silu", attn_layer_indices=None)
    c.ignore(*LEFT_OVER)

    def block() -> Parallel:
        attn = Residual(attention(c), pre=Scaled(c["attention_in_multiplier"]), scale=c["attention_out_multiplier"])
        space = Residual(mixer(c), pre=Scaled(c["ssm_in_multiplier"]), scale=c["ssm_out_multiplier"])
        return Parallel(
            RMSNorm(dim, eps), 2, attn=attn, mixer=space, mlp=Residual(mlp(c), pre=RMSNorm(dim, eps), scale=down)
        )

    return LM(
        Embed(c["vocab_size"], dim, scale=c["embedding_multiplier"]),
        Stack([block() for _ in range(c["num_hidden_layers"])], RMSNorm(dim, eps)),
        llama.head(c),
        context=c["max_position_embeddings"],
        finish=Scaled(c["lm_head_multiplier"]),
    )


def attention(c: Config) -> Attention:
    """Grouped heads; what multiplies the keys multiplies the scores."""
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias, scale = c.get("attention_bias", False), c["key_multiplier"] * head_dim**-0.5
    rope = c.rope(head_dim)
    return Attention(c["hidden_size"], heads, kv_heads, head_dim, bias=bias, position=rope, scale=scale)


def mixer(c: Config) -> Mamba2:
    """The state space of a layer, which is as wide as `mamba_d_ssm` says."""
    heads, head_dim, groups = space_heads(c)
    inner, states, eps = heads * head_dim, c["mamba_d_state"], c["rms_norm_eps"]
    sizes = (inner, inner, groups * states, groups * states, heads)
    return Mamba2(
        c["hidden_size"],
        heads=heads,
        head_dim=head_dim,
        states=states,
        groups=groups,
        conv=c["mamba_d_conv"],
        bias=c["mamba_proj_bias"],
        out_bias=c["projectors_bias"],
        conv_bias=c["mamba_conv_bias"],
        limits=mamba2.step_limits(c),
        norm=joining(c, inner, groups, eps),
        scaled=Multipliers(multipliers(c, "ssm_multipliers", 5), sizes),
    )


def joining(c: Config, inner: int, groups: int, eps: float) -> Join:
    """How the state space's output and its gate become one."""
    first = c["mamba_norm_before_gate"]
    if not c["mamba_rms_norm"]:
        return SiluGate()
    return NormedGate(inner, groups, eps) if first else GatedNorm(inner, groups, eps)


def mlp(c: Config) -> GatedMlp:
    """A gated MLP whose gate is multiplied before it is activated."""
    gate = ScaledSilu(multipliers(c, "mlp_multipliers", 2)[0])
    return GatedMlp(c["hidden_size"], c["intermediate_size"], gate, bias=c.get("mlp_bias", False))


@dataclass(frozen=True)
class ScaledSilu:
    """silu(factor · gate) · up."""

    factor: float

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        return silu(self.factor * gate) * up

    def __str__(self) -> str:
        return f"silu of {self.factor:g} · gate"


def multipliers(c: Config, key: str, count: int) -> list[float]:
    """So many factors in one setting."""
    found: list[float] = c[key]
    if len(found) != count:
        raise c.wrong(key, f"{count} numbers above 0")
    return found


def space_heads(c: Config) -> tuple[int, int, int]:
    """Heads of the state space, their features, and the groups that share what is written and read."""
    inner, heads, groups = c.get("mamba_d_ssm"), c["mamba_n_heads"], c["mamba_n_groups"]
    c.ignore("mamba_expand")
    inner = mamba.width(c, "mamba_expand") if inner is None else inner
    if inner % heads:
        raise c.wrong("mamba_n_heads", f"a divisor of the {inner} features of the state space")
    if heads % groups:
        raise c.wrong("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    if c["mamba_d_head"] not in ("auto", inner // heads):
        raise c.wrong("mamba_d_head", f"{inner // heads}: {inner} features in {heads} heads")
    return heads, inner // heads, groups


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    mlp = f"{theirs}.feed_forward"
    shared = ("model.embed_tokens", "lm_head", f"{theirs}.self_attn")
    return {
        **{name: rule for name, rule in llama.names(c).items() if name.startswith(shared)},
        f"{theirs}.input_layernorm": f"{ours}.pre",
        **mamba2.mixer_names(f"{theirs}.mamba", f"{ours}.mixer.op"),
        f"{theirs}.pre_ff_layernorm": f"{ours}.mlp.pre",
        **joined(f"{ours}.mlp.op.gate_up", {f"{mlp}.gate_proj": 1, f"{mlp}.up_proj": 1}),
        f"{mlp}.down_proj": f"{ours}.mlp.op.down",
        "model.final_layernorm": "decoder.norm",
    }
