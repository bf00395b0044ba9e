"""Falcon: one key and value head for all queries, or a few in the new architecture; rotary positions or ALiBi; side
by side."""

import mlx.core as mx

from ..config import Config
from ..names import ByGroup, Drop, Moved, Names, Same, first
from ..nn import LM, Attention, Block, Embed, LayerNorm, Mlp, Parallel, Position, Residual, Stack
from ..nn.position import alibi_slopes, places
from ..settings import ROTARY, Other

ABSENT = {
    "hidden_size": Other("n_embed"),
    "max_position_embeddings": 2048,
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    dim, heads, eps = c["hidden_size"], c["num_attention_heads"], c.get("layer_norm_epsilon", 1e-5)
    hidden, act, bias = c.get("ffn_hidden_size", 4 * dim), c.get("activation", "gelu"), c.get("bias", False)
    head_dim = c.head_dim("hidden_size", "num_attention_heads")
    alibi = RoundedAlibi(heads, head_dim**-0.5) if c.get("alibi", False) else None
    c.expect(apply_residual_connection_post_layernorm=False, tie_word_embeddings=True)
    c.ignore("multi_query", "num_kv_heads")
    if alibi is not None:
        c.ignore(*ROTARY)

    def attention() -> Attention:
        position: Position = c.rope(head_dim) if alibi is None else alibi
        return Attention(dim, heads, kv_heads(c), head_dim, bias=bias, position=position)

    def block() -> Block:
        attn, mlp = attention(), Mlp(dim, hidden, act, bias)
        if not c["parallel_attn"] and not new(c):
            return Block(attn=Residual(attn, pre=LayerNorm(dim, eps)), mlp=Residual(mlp, pre=LayerNorm(dim, eps)))
        if norms(c) == 2:
            return Parallel(attn=Residual(attn, pre=LayerNorm(dim, eps)), mlp=Residual(mlp, pre=LayerNorm(dim, eps)))
        return Parallel(LayerNorm(dim, eps), attn=Residual(attn), mlp=Residual(mlp))

    layers = [block() for _ in range(c["num_hidden_layers"])]
    return LM(Embed(c["vocab_size"], dim), Stack(layers, LayerNorm(dim, eps)), context=c["max_position_embeddings"])


def names(c: Config) -> Names:
    heads, theirs, ours = c["num_attention_heads"], "transformer.h.{}", "decoder.layers.{}"
    groups = 1 if kv_heads(c) == 1 else kv_heads(c)
    qkv = Moved(f"{ours}.attn.op.qkv", (ByGroup(groups, (heads // groups, 1, 1)),))
    shared = f"{ours}.pre" if (c["parallel_attn"] or new(c)) and norms(c) == 1 else f"{ours}.attn.pre"
    two: Names = {f"{theirs}.ln_attn": f"{ours}.attn.pre", f"{theirs}.ln_mlp": f"{ours}.mlp.pre"}
    usual: Names = {
        "transformer.word_embeddings": "embed.tokens",
        f"{theirs}.input_layernorm": shared,
        f"{theirs}.post_attention_layernorm": f"{ours}.mlp.pre",
        f"{theirs}.self_attention.query_key_value": qkv,
        f"{theirs}.self_attention.dense": f"{ours}.attn.op.out",
        f"{theirs}.self_attention.rotary_emb.inv_freq": Drop("computed from the config"),
        f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.op.up",
        f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.op.down",
        "transformer.ln_f": "decoder.norm",
        "lm_head": Same("embed.tokens"),
    }
    return first(two, usual) if new(c) else first(usual, two)


def new(c: Config) -> bool:
    """True for the architecture of the 40B and 180B models, with several key and value heads."""
    return c.get("new_decoder_architecture", False)


def norms(c: Config) -> int:
    """Norms of a block whose halves run side by side."""
    return c.get("num_ln_in_parallel_attn", 2 if new(c) else 1)


def kv_heads(c: Config) -> int:
    heads = c["num_attention_heads"]
    count = c.get("num_kv_heads", heads)
    if heads % count:
        raise c.wrong("num_kv_heads", f"a divisor of num_attention_heads ({heads})")
    return count if new(c) else 1 if c["multi_query"] else heads


class RoundedAlibi(Position):
    """ALiBi as the reference computes it: rounded to bfloat16 and counted from the start, and scaled as the scores
    are."""

    def __init__(self, heads: int, scale: float):
        super().__init__()
        self.slopes, self.scale = alibi_slopes(heads), scale

    def bias(self, queries: range, keys: range, left: mx.array | None = None) -> mx.array:
        at = mx.maximum(places(keys.start if left is None else keys.start - left, len(keys)), 0)  # (S,) or (B, S)
        bias = mx.array(self.slopes, dtype=mx.bfloat16)[:, None] * at[..., None, :].astype(mx.bfloat16)
        return (bias.astype(mx.float32) * self.scale)[..., None, :]
