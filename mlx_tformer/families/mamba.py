"""Mamba: nothing but selective state spaces, which need no positions and remember a state of fixed size."""

from collections.abc import Callable

from ..config import Config
from ..names import Names, Same
from ..nn import LM, Block, Embed, Mamba, Residual, RMSNorm, Stack
from ..settings import MOST
from . import llama

ABSENT = {
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
    "state_size": 16,
    "tie_word_embeddings": True,
    "time_step_rank": "auto",
    "use_bias": False,
    "use_conv_bias": True,
}
TRAINING = (
    *("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale"),
    *("rescale_prenorm_residual", "use_associative_scan", "use_mambapy"),
)
"""How weights are initialised, and which of the reference's equal ways to compute is taken."""
ORIGINAL = (
    *("d_inner", "d_model", "fused_add_norm", "intermediate_size", "n_layer", "pad_vocab_size_multiple"),
    *("rms_norm", "ssm_cfg"),
)
"""What converted checkpoints kept of the original config, beside the keys that the reference reads."""


def model(c: Config) -> LM:
    dim, eps, inner = c["hidden_size"], c["layer_norm_epsilon"], width(c, "expand")
    rank = step_rank(c, "time_step_rank")
    c.expect(hidden_act="silu")
    # The residual stream is as wide as the weights here; float32 weights make it what the reference has.
    c.ignore("residual_in_fp32", *TRAINING, *ORIGINAL)

    def block() -> Block:
        mixer = Mamba(
            dim,
            inner=inner,
            states=c["state_size"],
            rank=rank,
            conv=c["conv_kernel"],
            bias=c["use_bias"],
            conv_bias=c["use_conv_bias"],
        )
        return Block(mixer=Residual(mixer, pre=RMSNorm(dim, eps)))

    layers = [block() for _ in range(c["num_hidden_layers"])]
    return LM(Embed(c["vocab_size"], dim), Stack(layers, RMSNorm(dim, eps)), llama.head(c))


def names(c: Config) -> Names:
    # The first checkpoints call the embedding otherwise.
    return backbone_names(c, mixer_names) | {"backbone.embedding": "embed.tokens"}


def backbone_names(c: Config, of_mixer: Callable[[str, str], Names]) -> Names:
    """The weights of a model whose layers are state spaces and nothing else, as `of_mixer` names each."""
    theirs, ours = "backbone.layers.{}", "decoder.layers.{}.mixer"
    return {
        "backbone.embeddings": "embed.tokens",
        f"{theirs}.norm": f"{ours}.pre",
        **of_mixer(f"{theirs}.mixer", f"{ours}.op"),
        "backbone.norm_f": "decoder.norm",
        "lm_head": Same("embed.tokens") if llama.tied(c) else "head",
    }


def mixer_names(theirs: str, ours: str) -> Names:
    """The weights of one selective scan."""
    return space_names(theirs, ours) | {f"{theirs}.x_proj": f"{ours}.select", f"{theirs}.dt_proj": f"{ours}.dt"}


def space_names(theirs: str, ours: str) -> Names:
    """The weights that state spaces of both kinds have."""
    return {
        f"{theirs}.in_proj": f"{ours}.into",
        f"{theirs}.conv1d": f"{ours}.conv",
        f"{theirs}.A_log": f"{ours}.a_log",
        f"{theirs}.D": f"{ours}.skip",
        f"{theirs}.out_proj": f"{ours}.out",
    }


def width(c: Config, expand: str) -> int:
    """Features of the state space: those of the model, so many times over."""
    inner = int(c["hidden_size"] * c[expand])
    if not 1 <= inner <= MOST // 4:
        raise c.wrong(expand, f"a width of 1 to {MOST // 4} features in the state space")
    return inner


def step_rank(c: Config, key: str) -> int:
    """Numbers that the step sizes are made of: a sixteenth of the width if the config leaves it to the reference."""
    rank = c[key]
    return -(-c["hidden_size"] // 16) if rank == "auto" else rank
