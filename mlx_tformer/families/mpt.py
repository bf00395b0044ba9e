"""MPT: ALiBi, norms and projections without biases; sizes and attention settings have names of their own."""

from ..config import Config
from ..names import Names, Same
from ..nn import LM, Alibi, Attention, Block, Embed, LayerNorm, Mlp, Residual, Stack
from ..settings import Other

ABSENT = {
    "d_model": Other("hidden_size"),
    "max_seq_len": 2048,
    "n_heads": Other("num_attention_heads"),
    "n_layers": Other("num_hidden_layers"),
    "no_bias": True,
    "tie_word_embeddings": True,
}
ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}


def model(c: Config) -> LM:
    dim, heads, eps = c["d_model"], c["n_heads"], c.get("layer_norm_epsilon", 1e-5)
    head_dim, inner = c.head_dim("d_model", "n_heads"), c.within("attn_config")
    inner.expect(**ATTENTION)
    inner.ignore("attn_impl", "attn_pdrop")
    alibi, clip = Alibi(heads), inner.get("clip_qkv")
    inner.finish()
    c.expect(no_bias=True, logit_scale=None, embedding_fraction=1.0, tie_word_embeddings=True)
    c.expect(norm_type="low_precision_layernorm")
    c.ignore("expansion_ratio")  # the reference takes 4 whatever it says
    c.ignore(
        "learned_pos_emb", "init_device", "emb_pdrop", "verbose", "use_pad_tok_in_ffn", "attn_config", "init_config"
    )

    def block() -> Block:
        attention = Attention(dim, heads, head_dim=head_dim, position=alibi, clip=clip)
        mlp = Mlp(dim, 4 * dim, "gelu", bias=False)
        return Block(
            attn=Residual(attention, pre=LayerNorm(dim, eps, bias=False)),
            mlp=Residual(mlp, pre=LayerNorm(dim, eps, bias=False)),
        )

    layers = [block() for _ in range(c["n_layers"])]
    return LM(Embed(c["vocab_size"], dim), Stack(layers, LayerNorm(dim, eps, bias=False)), context=c["max_seq_len"])


def names(c: Config) -> Names:
    theirs, ours = "transformer.blocks.{}", "decoder.layers.{}"
    return {
        "transformer.wte": "embed.tokens",
        f"{theirs}.norm_1": f"{ours}.attn.pre",
        f"{theirs}.attn.Wqkv": f"{ours}.attn.op.qkv",
        f"{theirs}.attn.out_proj": f"{ours}.attn.op.out",
        f"{theirs}.norm_2": f"{ours}.mlp.pre",
        f"{theirs}.ffn.up_proj": f"{ours}.mlp.op.up",
        f"{theirs}.ffn.down_proj": f"{ours}.mlp.op.down",
        "transformer.norm_f": "decoder.norm",
        "lm_head": Same("embed.tokens"),
    }
