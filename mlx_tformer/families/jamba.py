"""Jamba: Mamba with attention in every eighth layer, no positions, and experts in every second one."""

from ..config import Config
from ..names import Expert, Names, joined
from ..nn import LM, Block, Embed, Experts, GatedMlp, Mamba, Mixture, Position, Residual, RMSNorm, Router, Stack
from ..nn.tap import Module
from ..settings import Other
from . import llama, mamba

ABSENT = {
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "max_position_embeddings": 262144,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": "auto",
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "num_experts": Other("num_local_experts", 16),
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
}


def model(c: Config) -> LM:
    dim, eps, act, count = c["hidden_size"], c["rms_norm_eps"], c.get("hidden_act", "silu"), c["num_experts"]
    attends, mixes = _layers(c, "attn_layer"), _layers(c, "expert_layer")
    llama.head_sizes(c)  # checked where no layer attends as well
    c.expect(hidden_act="silu")
    c.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")

    def mlp(layer: int) -> Module:
        if not mixes[layer] or count == 1:
            return GatedMlp(dim, c["intermediate_size"], act)
        return Mixture(Router(dim, count, c.chosen(count)), Experts(dim, c["intermediate_size"], count, act=act))

    def block(layer: int) -> Block:
        after = Residual(mlp(layer), pre=RMSNorm(dim, eps))
        if attends[layer]:
            attention = llama.attention(c, bias=False, out_bias=False, position=Position())
            return Block(attn=Residual(attention, pre=RMSNorm(dim, eps)), mlp=after)
        return Block(mixer=Residual(mixer(c), pre=RMSNorm(dim, eps)), mlp=after)

    c.chosen(count) if count > 1 else c.ignore("num_experts_per_tok")
    layers = [block(layer) for layer in range(c["num_hidden_layers"])]
    context = c["max_position_embeddings"]
    return LM(Embed(c["vocab_size"], dim), Stack(layers, RMSNorm(dim, eps)), llama.head(c), context=context)


def mixer(c: Config) -> Mamba:
    """A selective scan with norms on the step size and on what is written and read."""
    eps, states, rank = c["rms_norm_eps"], c["mamba_d_state"], mamba.step_rank(c, "mamba_dt_rank")
    return Mamba(
        c["hidden_size"],
        inner=mamba.width(c, "mamba_expand"),
        states=states,
        rank=rank,
        conv=c["mamba_d_conv"],
        bias=c["mamba_proj_bias"],
        conv_bias=c["mamba_conv_bias"],
        dt_norm=RMSNorm(rank, eps),
        b_norm=RMSNorm(states, eps),
        c_norm=RMSNorm(states, eps),
    )


def names(c: Config) -> Names:
    heads, kv_heads, _ = llama.head_sizes(c)
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    attends, mixes = _layers(c, "attn_layer"), _layers(c, "expert_layer")
    table: Names = {
        "model.embed_tokens": "embed.tokens",
        "model.final_layernorm": "decoder.norm",
        "lm_head": llama.names(c)["lm_head"],
    }
    for layer, attention in enumerate(attends):
        step = "attn" if attention else "mixer"
        table[f"model.layers.{layer}.input_layernorm"] = f"decoder.layers.{layer}.{step}.pre"
    attn, mlp, inside = f"{theirs}.self_attn", f"{theirs}.feed_forward", f"{ours}.mlp.op"
    qkv = {f"{attn}.q_proj": heads, f"{attn}.k_proj": kv_heads, f"{attn}.v_proj": kv_heads}
    scan, mixing = f"{theirs}.mamba", f"{ours}.mixer.op"
    table |= {
        **joined(f"{ours}.attn.op.qkv", qkv),
        f"{attn}.o_proj": f"{ours}.attn.op.out",
        **mamba.mixer_names(scan, mixing),
        **{f"{scan}.{name}_layernorm": f"{mixing}.{name}_norm" for name in ("dt", "b", "c")},
        f"{theirs}.pre_ff_layernorm": f"{ours}.mlp.pre",
        **joined(f"{inside}.gate_up", {f"{mlp}.gate_proj": 1, f"{mlp}.up_proj": 1}),
        f"{mlp}.down_proj": f"{inside}.down",
    }
    return table | expert_names(mlp, inside) if any(mixes) else table


def expert_names(theirs: str, ours: str) -> Names:
    """Experts one by one, as checkpoints have them, or stacked, as transformers 5 keeps them in memory."""
    return {
        f"{theirs}.router": f"{ours}.router",
        f"{theirs}.experts.{{}}.gate_proj": Expert(f"{ours}.experts.gate_up", 0, (1, 1)),
        f"{theirs}.experts.{{}}.up_proj": Expert(f"{ours}.experts.gate_up", 1, (1, 1)),
        f"{theirs}.experts.{{}}.down_proj": Expert(f"{ours}.experts.down"),
        f"{theirs}.experts.gate_up_proj": f"{ours}.experts.gate_up.weight",
        f"{theirs}.experts.down_proj": f"{ours}.experts.down.weight",
    }


def _layers(c: Config, kind: str) -> list[bool]:
    """Which layers are of a kind that comes again after so many."""
    period, offset = c[f"{kind}_period"], c[f"{kind}_offset"]
    if offset >= period:
        raise c.wrong(f"{kind}_offset", f"less than {kind}_period ({period})")
    return [layer % period == offset for layer in range(c["num_hidden_layers"])]
