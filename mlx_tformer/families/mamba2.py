"""Mamba 2: state spaces in heads, each with one decay, and a gated norm before the last projection."""

from typing import Any

from ..config import Config
from ..names import Names
from ..nn import LM, Block, Embed, Mamba2, Residual, RMSNorm, Stack
from . import llama, mamba

ABSENT = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 8,
    "num_heads": 128,
    "state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "use_bias": False,
    "use_conv_bias": True,
}


def model(c: Config) -> LM:
    dim, eps, inner = c["hidden_size"], c["layer_norm_epsilon"], mamba.width(c, "expand")
    heads, head_dim, groups = c["num_heads"], c["head_dim"], c["n_groups"]
    if heads * head_dim != inner:
        raise c.wrong("num_heads", f"{inner} features (expand · hidden_size) in heads of head_dim ({head_dim})")
    if heads % groups:
        raise c.wrong("n_groups", f"a divisor of num_heads ({heads})")
    limits = step_limits(c)
    c.expect(hidden_act="silu")
    # The size of a chunk changes how much is computed at once; the rest is as in Mamba.
    c.ignore("chunk_size", "residual_in_fp32", "rms_norm", "norm_before_gate", "time_step_rank", *mamba.TRAINING)

    def block() -> Block:
        mixer = Mamba2(
            dim,
            heads=heads,
            head_dim=head_dim,
            states=c["state_size"],
            groups=groups,
            conv=c["conv_kernel"],
            bias=c["use_bias"],
            conv_bias=c["use_conv_bias"],
            limits=limits,
            eps=eps,
        )
        return Block(mixer=Residual(mixer, pre=RMSNorm(dim, eps)))

    layers = [block() for _ in range(c["num_hidden_layers"])]
    return LM(Embed(c["vocab_size"], dim), Stack(layers, RMSNorm(dim, eps)), llama.head(c))


def names(c: Config) -> Names:
    return mamba.backbone_names(c, mixer_names)


def mixer_names(theirs: str, ours: str) -> Names:
    """The weights of one state space."""
    own: Names = {f"{theirs}.dt_bias": f"{ours}.dt_bias", f"{theirs}.norm": f"{ours}.norm"}
    return mamba.space_names(theirs, ours) | own


def step_limits(c: Config) -> tuple[float, float]:
    """The smallest and the largest step size."""
    low, high = (_bound(x) for x in c["time_step_limit"])
    if low > high:
        raise c.wrong("time_step_limit", "the smaller number first")
    return low, high


def _bound(value: Any) -> float:
    """A bound on the step size; transformers 5 writes one that is infinite as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)
