"""What mlx-lm calls weights where it does not say what Hugging Face says: its experts, and GPT's of the first years.

Experts are stacked (E, out, in) with gate and up apart. GPT-2's matrices stand (out, in). Names: `sanitize` in
`mlx_lm/models/*.py` of mlx-lm 0.32.
"""

from ..names import Alternating, Moved, Names, Rows, Rule, Transposed

EXPERTS = {
    "deepseek_v2": "mlp.switch_mlp",
    "deepseek_v3": "mlp.switch_mlp",
    "gpt_oss": "mlp.experts",
    "granitemoe": "block_sparse_moe.switch_mlp",
    "llama4_text": "feed_forward.experts",
    "mixtral": "block_sparse_moe.switch_mlp",
    "olmoe": "mlp.switch_mlp",
    "qwen2_moe": "mlp.switch_mlp",
    "qwen3_moe": "mlp.switch_mlp",
}
"""Family -> where the experts of a layer are."""
PREFIXES = {
    "gpt2": {"h.": "model.h.", "wte": "model.wte", "wpe": "model.wpe", "ln_f": "model.ln_f"},
    "gpt_neox": {"gpt_neox.layers.": "model.h.", "gpt_neox.": "model.", "embed_out": "model.embed_out"},
    "gptj": {"transformer.": "model."},
}
"""Family -> how names of Hugging Face's begin, and what mlx-lm begins them with."""
LEAVES = ("weight", "scales", "biases", "bias")


def with_mlx_names(family: str, names: Names) -> Names:
    """A family's table with mlx-lm's names beside its own.

    >>> names = with_mlx_names("gpt2", {"h.{}.attn.c_proj": Moved("layers.{}.out", (Transposed(),))})
    >>> names["model.h.{}.attn.c_proj"]
    'layers.{}.out'
    """
    return names | _renamed(family, names) | _experts(family)


def _renamed(family: str, names: Names) -> Names:
    found: Names = {}
    for theirs, rule in names.items():
        prefix = next((start for start in PREFIXES.get(family, {}) if theirs.startswith(start)), None)
        if prefix is not None:
            found[PREFIXES[family][prefix] + theirs.removeprefix(prefix)] = _upright(rule)
    return found


def _upright(rule: Rule) -> Rule:
    """The same rule for a matrix that does not have to be transposed."""
    return rule.to if isinstance(rule, Moved) and rule.changes == (Transposed(),) else rule


def _experts(family: str) -> Names:
    """Leaf by leaf, since some families have a tensor of the name that is a module's here."""
    if family not in EXPERTS:
        return {}
    theirs, ours = f"model.layers.{{}}.{EXPERTS[family]}", "decoder.layers.{}.mlp.op.experts"
    found: Names = {}
    for leaf in LEAVES:
        found[f"{theirs}.gate_proj.{leaf}"] = Rows(f"{ours}.gate_up.{leaf}", 0, (1, 1), axis=1)
        found[f"{theirs}.up_proj.{leaf}"] = Rows(f"{ours}.gate_up.{leaf}", 1, (1, 1), axis=1)
        found[f"{theirs}.down_proj.{leaf}"] = f"{ours}.down.{leaf}"
        if family == "gpt_oss":  # as `formats.mxfp4` gives them
            found[f"{theirs}.gate_up_proj.{leaf}"] = Moved(f"{ours}.gate_up.{leaf}", (Alternating(axis=1),))
    return found
