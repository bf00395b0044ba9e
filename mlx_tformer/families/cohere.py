"""Command R: attention and MLP share one norm without a bias and run side by side; interleaved rotary; scaled
logits."""

from ..config import Config
from ..names import Names
from ..nn import LM, Attention, EachHead, Embed, GatedMlp, LayerNorm, Parallel, Residual, Scaled, Stack
from . import llama

ABSENT = {
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def model(c: Config) -> LM:
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias, eps, normed = c.get("attention_bias", False), c.get("layer_norm_eps", 1e-5), c.get("use_qk_norm", False)

    def attention(layer: int) -> Attention:
        return Attention(
            c["hidden_size"],
            heads,
            kv_heads,
            head_dim,
            bias=bias,
            position=c.rope(head_dim, interleaved=True),
            q_norm=EachHead(heads, head_dim, eps) if normed else None,
            k_norm=EachHead(kv_heads, head_dim, eps) if normed else None,
        )

    return decoder(c, [attention(layer) for layer in range(c["num_hidden_layers"])])


def decoder(c: Config, attentions: list[Attention]) -> LM:
    """What Command R and R7B share."""
    dim, hidden, act, eps = (
        c["hidden_size"],
        c["intermediate_size"],
        c.get("hidden_act", "silu"),
        c.get("layer_norm_eps", 1e-5),
    )

    def block(attention: Attention) -> Parallel:
        mlp = GatedMlp(dim, hidden, act)
        return Parallel(LayerNorm(dim, eps, bias=False), attn=Residual(attention), mlp=Residual(mlp))

    stack = Stack([block(attention) for attention in attentions], LayerNorm(dim, eps, bias=False))
    embed, finish = Embed(c["vocab_size"], dim), Scaled(c["logit_scale"])
    return LM(embed, stack, llama.head(c), context=c["max_position_embeddings"], finish=finish)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    return llama.names(c) | {
        f"{theirs}.input_layernorm": f"{ours}.pre",
        f"{theirs}.self_attn.q_norm": f"{ours}.attn.op.q_norm",
        f"{theirs}.self_attn.k_norm": f"{ours}.attn.op.k_norm",
    }
