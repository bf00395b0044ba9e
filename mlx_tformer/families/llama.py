"""Llama 1 to 3: pre-norm, rotary positions, grouped heads, a gated MLP."""

from collections.abc import Callable, Sequence

from ..config import MOST, Config
from ..names import Drop, Names, Same, joined
from ..nn import LM, Attention, Block, Embed, GatedMlp, Linear, Mask, NextToken, Position, Residual, RMSNorm, Stack
from ..nn.tap import Module

ABSENT = {"max_position_embeddings": 2048}


def model(c: Config) -> LM:
    bias = c.get("attention_bias", False)
    return decoder(c, lambda layer: attention(c, bias=bias, out_bias=bias), mlp_bias=c.get("mlp_bias", False))


def names(c: Config) -> Names:
    heads, kv_heads, _ = head_sizes(c)
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    qkv = {f"{attn}.q_proj": heads, f"{attn}.k_proj": kv_heads, f"{attn}.v_proj": kv_heads}
    return {
        "model.embed_tokens": "embed.tokens",
        f"{theirs}.input_layernorm": f"{ours}.attn.pre",
        **joined(f"{ours}.attn.op.qkv", qkv),
        f"{attn}.o_proj": f"{ours}.attn.op.out",
        f"{attn}.rotary_emb.inv_freq": Drop("computed from the config"),
        f"{theirs}.post_attention_layernorm": f"{ours}.mlp.pre",
        **joined(f"{ours}.mlp.op.gate_up", {f"{mlp}.gate_proj": 1, f"{mlp}.up_proj": 1}),
        f"{mlp}.down_proj": f"{ours}.mlp.op.down",
        "model.norm": "decoder.norm",
        "lm_head": Same("embed.tokens") if tied(c) else "head",
    }


def decoder(
    c: Config,
    attention_of: Callable[[int], Module],
    *,
    mlp_of: Callable[[int], Module] | None = None,
    mlp_bias: bool = False,
    sandwich: bool = False,
    drafts: Sequence[Callable[[Block], NextToken]] = (),
) -> LM:
    """What Llama and its relatives share.

    `attention_of(layer)` makes the attention of a layer, `mlp_of(layer)` what stands in for the gated MLP; with
    `sandwich` there is a norm after each operation as well. `drafts` make modules that look further ahead, each of
    one more block.
    """
    dim, act, eps = c["hidden_size"], c.get("hidden_act", "silu"), c.get("rms_norm_eps", 1e-6)

    def mlp(layer: int) -> Module:
        return GatedMlp(dim, c["intermediate_size"], act, bias=mlp_bias) if mlp_of is None else mlp_of(layer)

    def step(op: Module) -> Residual:
        return Residual(op, pre=RMSNorm(dim, eps), post=RMSNorm(dim, eps) if sandwich else None)

    def block(layer: int) -> Block:
        return Block(attn=step(attention_of(layer)), mlp=step(mlp(layer)))

    layers, context = c["num_hidden_layers"], c["max_position_embeddings"]
    stack = Stack([block(layer) for layer in range(layers)], RMSNorm(dim, eps))
    ahead = [draft(block(layers + i)) for i, draft in enumerate(drafts)]
    return LM(Embed(c["vocab_size"], dim), stack, head(c), context=context, drafts=ahead)


def head(c: Config) -> Linear | None:
    """What makes logits, or None if the embedding does."""
    return None if tied(c) else Linear(c["hidden_size"], c["vocab_size"], bias=False)


def attention(
    c: Config,
    *,
    bias: bool,
    out_bias: bool,
    mask: Mask | None = None,
    qk_norm: bool = False,
    position: Position | None = None,
    interleaved: bool = False,
) -> Attention:
    """Grouped heads that turn, with a norm on each head of q and k where a family has one."""
    heads, kv_heads, head_dim = head_sizes(c)

    def norm() -> RMSNorm | None:
        return RMSNorm(head_dim, c.get("rms_norm_eps", 1e-6)) if qk_norm else None

    return Attention(
        c["hidden_size"],
        heads,
        kv_heads,
        head_dim,
        bias=bias,
        out_bias=out_bias,
        position=c.rope(head_dim, interleaved=interleaved) if position is None else position,
        mask=mask,
        q_norm=norm(),
        k_norm=norm(),
    )


def head_sizes(c: Config) -> tuple[int, int, int]:
    """heads, kv_heads and head_dim, which divide as they must."""
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise c.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = c.get("head_dim")
    if head_dim is None and c["hidden_size"] % heads:
        raise c.wrong("num_attention_heads", f"a divisor of hidden_size ({c['hidden_size']}), or a head_dim")
    head_dim = c["hidden_size"] // heads if head_dim is None else head_dim
    if (heads + 2 * kv_heads) * head_dim > MOST:
        raise c.wrong("num_attention_heads", f"at most {MOST} features of all heads together")
    return heads, kv_heads, head_dim


def tied(c: Config) -> bool:
    """True if the embedding serves as the head."""
    return c.get("tie_word_embeddings", False)
