"""OPT: learned positions that begin at row 2; pre-norm, or post-norm in the 350M model, which also widens its
embedding."""

import mlx.nn as nn

from ..config import Config
from ..names import Names, Same, either, joined
from ..nn import LM, Attention, Block, Embed, LayerNorm, Learned, Linear, Mlp, Residual, Stack
from ..nn.tap import Module

ABSENT = {"max_position_embeddings": 2048, "tie_word_embeddings": True}


def model(c: Config) -> LM:
    dim, heads, hidden, vocab = c["hidden_size"], c["num_attention_heads"], c["ffn_dim"], c["vocab_size"]
    act, bias, affine = (
        c.get("activation_function", "relu"),
        c.get("enable_bias", True),
        c.get("layer_norm_elementwise_affine", True),
    )
    before, narrow = c.get("do_layer_norm_before", True), c.get("word_embed_proj_dim", dim)
    c.expect(_remove_final_layer_norm=False, tie_word_embeddings=True)

    head_dim = c.head_dim("hidden_size", "num_attention_heads")

    def norm() -> LayerNorm:
        return LayerNorm(dim, affine=affine)

    def step(op: Module) -> Residual:
        return Residual(op, pre=norm()) if before else Residual(op, after=norm())

    def block() -> Block:
        return Block(
            attn=step(Attention(dim, heads, head_dim=head_dim, bias=bias)),
            mlp=step(Mlp(dim, hidden, act, bias)),
        )

    into, out = (Linear(narrow, dim, bias=False), Linear(dim, narrow, bias=False)) if narrow != dim else (None, None)
    last = [part for part in (norm() if before else None, out) if part is not None]
    embed = Embed(vocab, narrow, positions=Learned(c["max_position_embeddings"], dim, first=2), into=into)
    layers = [block() for _ in range(c["num_hidden_layers"])]
    return LM(embed, Stack(layers, nn.Sequential(*last)), context=c["max_position_embeddings"])


def names(c: Config) -> Names:
    theirs, ours = "decoder.layers.{}", "decoder.layers.{}"
    place = "pre" if c.get("do_layer_norm_before", True) else "after"
    out = 1 if place == "pre" else 0
    return either(
        "model.",
        {
            "decoder.embed_tokens": "embed.tokens",
            "decoder.embed_positions": "embed.positions.table",
            "decoder.project_in": "embed.into",
            "decoder.project_out": f"decoder.norm.layers.{out}",
            f"{theirs}.self_attn_layer_norm": f"{ours}.attn.{place}",
            **joined(f"{ours}.attn.op.qkv", {f"{theirs}.self_attn.{x}_proj": 1 for x in "qkv"}),
            f"{theirs}.self_attn.out_proj": f"{ours}.attn.op.out",
            f"{theirs}.final_layer_norm": f"{ours}.mlp.{place}",
            f"{theirs}.fc1": f"{ours}.mlp.op.up",
            f"{theirs}.fc2": f"{ours}.mlp.op.down",
            "decoder.final_layer_norm": "decoder.norm.layers.0",
        },
    ) | {"lm_head": Same("embed.tokens")}
