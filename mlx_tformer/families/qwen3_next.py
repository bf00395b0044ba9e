"""Qwen 3 Next: three layers of the gated delta rule for each one that attends, with a gate on what it finds and a
quarter of each head turning; many small experts, norms that multiply by 1 + weight, and a module that predicts one
token more."""

from ..config import Config
from ..names import ByGroup, Moved, Names, joined, moved_to
from ..nn import LM, Attention, Block, Embed, GatedDelta, GatedMlp, Linear, NextToken, Residual, ShiftedRMSNorm, Stack
from ..nn.tap import Module
from . import llama, qwen2_moe

ABSENT = {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
}
MTP = "mtp.layers.0"
"""The one layer of the module that predicts a further token."""


def model(c: Config) -> LM:
    dim, kinds = c["hidden_size"], layer_kinds(c)
    c.expect(hidden_act="silu", use_sliding_window=False)
    c.ignore("num_local_experts", *qwen2_moe.EITHER)
    attention(c), mixer(c)  # so that their settings are checked where no layer is of that kind as well

    def block(layer: int, attends: bool) -> Block:
        after = Residual(mlp(c, layer), pre=norm(c))
        if attends:
            return Block(attn=Residual(attention(c), pre=norm(c)), mlp=after)
        return Block(mixer=Residual(mixer(c), pre=norm(c)), mlp=after)

    layers = [block(layer, kind == "full_attention") for layer, kind in enumerate(kinds)]
    drafts = [NextToken(dim, block(0, True), norms=(norm(c), norm(c), norm(c)))] if predicts(c) else []
    context = c["max_position_embeddings"]
    return LM(Embed(c["vocab_size"], dim), Stack(layers, norm(c)), llama.head(c), context=context, drafts=drafts)


def norm(c: Config) -> ShiftedRMSNorm:
    return ShiftedRMSNorm(c["hidden_size"], c["rms_norm_eps"])


def attention(c: Config) -> Attention:
    """Grouped heads with a gate on what they find."""
    heads, kv_heads, head_dim = llama.head_sizes(c)
    eps = c["rms_norm_eps"]
    return Attention(
        c["hidden_size"],
        heads,
        kv_heads,
        head_dim,
        bias=c.get("attention_bias", False),
        position=c.rope(head_dim),
        q_norm=ShiftedRMSNorm(head_dim, eps),
        k_norm=ShiftedRMSNorm(head_dim, eps),
        gated=True,
    )


def mixer(c: Config) -> GatedDelta:
    """The gated delta rule of a layer."""
    heads, key_heads = delta_heads(c)
    return GatedDelta(
        c["hidden_size"],
        heads=heads,
        key_heads=key_heads,
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        conv=c["linear_conv_kernel_dim"],
        eps=c["rms_norm_eps"],
    )


def mlp(c: Config, layer: int) -> Module:
    """Experts, or a dense layer where the config asks for one."""
    dim, act, shared = c["hidden_size"], c.get("hidden_act", "silu"), c["shared_expert_intermediate_size"]
    if not qwen2_moe.sparse(c, layer):
        return GatedMlp(dim, c["intermediate_size"], act)
    gate = Linear(dim, 1, bias=False)
    return qwen2_moe.mixture(c, c["num_experts"], shared=GatedMlp(dim, shared, act), shared_gate=gate)


def layer_kinds(c: Config) -> list[str]:
    """The kind of each layer: `layer_types`, or every so many attends."""
    layers, every = c["num_hidden_layers"], c["full_attention_interval"]
    derived = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds: list[str] = c.get("layer_types", derived)
    if len(kinds) != layers or not {*kinds} <= {"linear_attention", "full_attention"}:
        raise c.wrong("layer_types", f"{layers} entries of linear_attention and full_attention, one for each layer")
    return kinds


def delta_heads(c: Config) -> tuple[int, int]:
    """Heads of values, and of keys, which divide as they must."""
    heads, key_heads = c["linear_num_value_heads"], c["linear_num_key_heads"]
    if heads % key_heads:
        raise c.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads ({heads})")
    return heads, key_heads


def predicts(c: Config) -> bool:
    """True if the module that predicts a further token is stored; no setting says so."""
    return c.stores("mtp.fc.weight", "drafts.0.join.weight")


def names(c: Config) -> Names:
    heads, kv_heads, _ = llama.head_sizes(c)
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    attn, op = f"{theirs}.self_attn", f"{ours}.attn.op"
    qkv = {f"{attn}.q_proj": 2 * heads, f"{attn}.k_proj": kv_heads, f"{attn}.v_proj": kv_heads}
    table = qwen2_moe.names(c) | joined(f"{op}.qkv", qkv) | {f"{attn}.{x}_norm": f"{op}.{x}_norm" for x in "qk"}
    table |= mixer_names(c, f"{theirs}.linear_attn", f"{ours}.mixer.op")
    steps = {layer: "attn" if kind == "full_attention" else "mixer" for layer, kind in enumerate(layer_kinds(c))}
    first = {f"model.layers.{i}.input_layernorm": f"decoder.layers.{i}.{step}.pre" for i, step in steps.items()}
    return table | first | (draft_names(table) if predicts(c) else {})


def mixer_names(c: Config, theirs: str, ours: str) -> Names:
    """The rows of q, k, v and the gate, and of both rates, come one key head after the other."""
    heads, key_heads = delta_heads(c)
    shared, keys = heads // key_heads, c["linear_key_head_dim"]
    values = shared * c["linear_value_head_dim"]
    return {
        f"{theirs}.in_proj_qkvz": Moved(f"{ours}.into", (ByGroup(key_heads, (keys, keys, values, values)),)),
        f"{theirs}.in_proj_ba": Moved(f"{ours}.rates", (ByGroup(key_heads, (shared, shared)),)),
        f"{theirs}.conv1d": f"{ours}.conv",
        f"{theirs}.dt_bias": f"{ours}.dt_bias",
        f"{theirs}.A_log": f"{ours}.a_log",
        f"{theirs}.norm": f"{ours}.norm",
        f"{theirs}.out_proj": f"{ours}.out",
    }


def draft_names(table: Names) -> Names:
    """The module that predicts a further token is a layer that attends, and what joins a token to a state."""
    layer = {name: rule for name, rule in table.items() if name.startswith("model.layers.{}.")}
    return {
        **{
            name.replace("model.layers.{}", MTP): moved_to(rule, "decoder.layers.{}", "drafts.0.block")
            for name, rule in layer.items()
            if ".linear_attn." not in name
        },
        "mtp.pre_fc_norm_embedding": "drafts.0.embed_norm",
        "mtp.pre_fc_norm_hidden": "drafts.0.hidden_norm",
        "mtp.fc": "drafts.0.join",
        "mtp.norm": "drafts.0.norm",
    }
