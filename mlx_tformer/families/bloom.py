"""BLOOM: ALiBi instead of positions, a norm after the embedding; q, k and v are stored by head."""

from ..config import Config
from ..names import ByGroup, Moved, Names, Same, either
from ..nn import LM, Alibi, Attention, Block, Embed, LayerNorm, Mlp, Residual, Stack
from ..settings import Other

ABSENT = {
    "hidden_size": Other("n_embed"),
    "n_head": Other("num_attention_heads"),
    "n_layer": Other("num_hidden_layers"),
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    dim, heads, eps = c["hidden_size"], c["n_head"], c.get("layer_norm_epsilon", 1e-5)
    head_dim, alibi = c.head_dim("hidden_size", "n_head"), Alibi(heads)
    c.expect(apply_residual_connection_post_layernorm=False, tie_word_embeddings=True)
    c.ignore("slow_but_exact", "seq_length", "offset_alibi", "unk_token_id", "n_inner", "attention_softmax_in_fp32")
    c.ignore("masked_softmax_fusion", "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv")

    def block() -> Block:
        return Block(
            attn=Residual(Attention(dim, heads, head_dim=head_dim, bias=True, position=alibi), pre=LayerNorm(dim, eps)),
            mlp=Residual(Mlp(dim, 4 * dim, "gelu_new"), pre=LayerNorm(dim, eps)),
        )

    layers = [block() for _ in range(c["n_layer"])]
    return LM(Embed(c["vocab_size"], dim, norm=LayerNorm(dim, eps)), Stack(layers, LayerNorm(dim, eps)))


def names(c: Config) -> Names:
    theirs, ours = "h.{}", "decoder.layers.{}"
    return either(
        "transformer.",
        {
            "word_embeddings": "embed.tokens",
            "word_embeddings_layernorm": "embed.norm",
            f"{theirs}.input_layernorm": f"{ours}.attn.pre",
            f"{theirs}.self_attention.query_key_value": Moved(
                f"{ours}.attn.op.qkv", (ByGroup(c["n_head"], (1, 1, 1)),)
            ),
            f"{theirs}.self_attention.dense": f"{ours}.attn.op.out",
            f"{theirs}.post_attention_layernorm": f"{ours}.mlp.pre",
            f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.op.up",
            f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.op.down",
            "ln_f": "decoder.norm",
        },
    ) | {"lm_head": Same("embed.tokens")}
