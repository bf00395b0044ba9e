"""GPT-2: learned positions, pre-norm, biases everywhere; matrices are stored (in, out), with q, k and v as one."""

from ..config import Config
from ..names import Drop, Moved, Names, Same, Transposed, either
from ..nn import LM, Attention, Block, Embed, LayerNorm, Learned, Mlp, Residual, Stack
from ..settings import Other

ABSENT = {
    "n_embd": Other("hidden_size"),
    "n_head": Other("num_attention_heads"),
    "n_layer": Other("num_hidden_layers"),
    "n_positions": Other("max_position_embeddings", 1024),
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    dim, heads, layers, eps = c["n_embd"], c["n_head"], c["n_layer"], c.get("layer_norm_epsilon", 1e-5)
    hidden, act = c.get("n_inner", 4 * dim), c.get("activation_function", "gelu_new")
    scaled, by_layer = c.get("scale_attn_weights", True), c.get("scale_attn_by_inverse_layer_idx", False)
    head_dim = c.head_dim("n_embd", "n_head")
    c.expect(tie_word_embeddings=True)

    def block(layer: int) -> Block:
        scale = (head_dim**-0.5 if scaled else 1.0) / (layer + 1 if by_layer else 1)
        return Block(
            attn=Residual(Attention(dim, heads, head_dim=head_dim, bias=True, scale=scale), pre=LayerNorm(dim, eps)),
            mlp=Residual(Mlp(dim, hidden, act), pre=LayerNorm(dim, eps)),
        )

    embed = Embed(c["vocab_size"], dim, positions=Learned(c["n_positions"], dim))
    return LM(embed, Stack([block(layer) for layer in range(layers)], LayerNorm(dim, eps)), context=c["n_positions"])


def names(c: Config) -> Names:
    theirs, ours = "h.{}", "decoder.layers.{}"

    def transposed(to: str) -> Moved:
        return Moved(f"{ours}.{to}", (Transposed(),))

    # With the prefix of the language model, and without, as the first checkpoints have it.
    return either(
        "transformer.",
        {
            "wte": "embed.tokens",
            "wpe": "embed.positions.table",
            f"{theirs}.ln_1": f"{ours}.attn.pre",
            f"{theirs}.attn.c_attn": transposed("attn.op.qkv"),
            f"{theirs}.attn.c_proj": transposed("attn.op.out"),
            f"{theirs}.attn.bias": Drop("the causal mask"),
            f"{theirs}.attn.masked_bias": Drop("the causal mask"),
            f"{theirs}.ln_2": f"{ours}.mlp.pre",
            f"{theirs}.mlp.c_fc": transposed("mlp.op.up"),
            f"{theirs}.mlp.c_proj": transposed("mlp.op.down"),
            "ln_f": "decoder.norm",
        },
    ) | {"lm_head": Same("embed.tokens")}
