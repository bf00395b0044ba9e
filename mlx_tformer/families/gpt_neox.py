"""GPT-NeoX and Pythia: attention and MLP read the same input, a quarter of each head turns; q, k, v are stored by
head."""

from ..config import Config
from ..names import ByGroup, Drop, Moved, Names
from ..nn import LM, Attention, Block, Embed, LayerNorm, Linear, Mlp, Parallel, Residual, Stack
from ..settings import Other

ABSENT = {
    "max_position_embeddings": 2048,
    "partial_rotary_factor": Other("rotary_pct", 0.25),
    "rope_theta": Other("rotary_emb_base", 10000.0),
    "use_parallel_residual": True,
}


def model(c: Config) -> LM:
    dim, heads, hidden, eps = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["intermediate_size"],
        c.get("layer_norm_eps", 1e-5),
    )
    head_dim = c.head_dim("hidden_size", "num_attention_heads")
    bias, act = c.get("attention_bias", True), c.get("hidden_act", "gelu")
    order = Parallel if c["use_parallel_residual"] else Block
    c.expect(tie_word_embeddings=False)
    c.ignore("num_key_value_heads")

    def block() -> Block:
        attention = Attention(dim, heads, head_dim=head_dim, bias=bias, position=c.rope(head_dim))
        return order(
            attn=Residual(attention, pre=LayerNorm(dim, eps)),
            mlp=Residual(Mlp(dim, hidden, act), pre=LayerNorm(dim, eps)),
        )

    layers = [block() for _ in range(c["num_hidden_layers"])]
    head = Linear(dim, c["vocab_size"], bias=False)
    return LM(
        Embed(c["vocab_size"], dim), Stack(layers, LayerNorm(dim, eps)), head, context=c["max_position_embeddings"]
    )


def names(c: Config) -> Names:
    theirs, ours = "gpt_neox.layers.{}", "decoder.layers.{}"
    return {
        "gpt_neox.embed_in": "embed.tokens",
        f"{theirs}.input_layernorm": f"{ours}.attn.pre",
        f"{theirs}.attention.query_key_value": Moved(
            f"{ours}.attn.op.qkv", (ByGroup(c["num_attention_heads"], (1, 1, 1)),)
        ),
        f"{theirs}.attention.dense": f"{ours}.attn.op.out",
        f"{theirs}.attention.rotary_emb.inv_freq": Drop("computed from the config"),
        f"{theirs}.attention.bias": Drop("the causal mask"),
        f"{theirs}.attention.masked_bias": Drop("the causal mask"),
        f"{theirs}.post_attention_layernorm": f"{ours}.mlp.pre",
        f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.op.up",
        f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.op.down",
        "gpt_neox.final_layer_norm": "decoder.norm",
        "embed_out": "head",
        "lm_head": "head",
    }
