"""GPT-J: attention and MLP share one norm and run side by side; interleaved rotary features; a bias on the head."""

from ..config import Config
from ..names import Drop, Names, joined
from ..nn import LM, Attention, Embed, LayerNorm, Linear, Mlp, Parallel, Residual, Rope, Stack
from ..settings import Other

ABSENT = {
    "n_embd": Other("hidden_size"),
    "n_head": Other("num_attention_heads"),
    "n_layer": Other("num_hidden_layers"),
    "n_positions": Other("max_position_embeddings", 2048),
    "rotary_dim": 64,
}


def model(c: Config) -> LM:
    dim, heads, eps = c["n_embd"], c["n_head"], c.get("layer_norm_epsilon", 1e-5)
    hidden, act = c.get("n_inner", 4 * dim), c.get("activation_function", "gelu_new")
    c.expect(rotary=True, scale_attn_weights=True, tie_word_embeddings=False)

    head_dim, turning = c.head_dim("n_embd", "n_head"), c["rotary_dim"]
    if turning > head_dim or turning % 2:
        raise c.wrong("rotary_dim", f"an even number up to the features of a head ({head_dim})")

    def block() -> Parallel:
        attention = Attention(dim, heads, head_dim=head_dim, position=Rope(turning, interleaved=True))
        return Parallel(LayerNorm(dim, eps), attn=Residual(attention), mlp=Residual(Mlp(dim, hidden, act)))

    layers = [block() for _ in range(c["n_layer"])]
    head = Linear(dim, c["vocab_size"])
    return LM(Embed(c["vocab_size"], dim), Stack(layers, LayerNorm(dim, eps)), head, context=c["n_positions"])


def names(c: Config) -> Names:
    theirs, ours = "transformer.h.{}", "decoder.layers.{}"
    return {
        "transformer.wte": "embed.tokens",
        f"{theirs}.ln_1": f"{ours}.pre",
        **joined(f"{ours}.attn.op.qkv", {f"{theirs}.attn.{x}_proj": 1 for x in "qkv"}),
        f"{theirs}.attn.out_proj": f"{ours}.attn.op.out",
        f"{theirs}.attn.bias": Drop("the causal mask"),
        f"{theirs}.attn.masked_bias": Drop("the causal mask"),
        f"{theirs}.mlp.fc_in": f"{ours}.mlp.op.up",
        f"{theirs}.mlp.fc_out": f"{ours}.mlp.op.down",
        "transformer.ln_f": "decoder.norm",
        "lm_head": "head",
    }
