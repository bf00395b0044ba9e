"""StarCoder 2: layer norms, a plain MLP, biases everywhere, and a window where one is given."""

from ..config import Config
from ..names import Names, first
from ..nn import LM, Attention, Block, Causal, Embed, LayerNorm, Mlp, Residual, Stack, Window
from . import llama

ABSENT = {"max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True}


def model(c: Config) -> LM:
    dim, hidden, eps, bias = (
        c["hidden_size"],
        c["intermediate_size"],
        c.get("norm_epsilon", 1e-5),
        c.get("use_bias", True),
    )
    act, window = c.get("hidden_act", "gelu_pytorch_tanh"), c.get("sliding_window")
    heads, kv_heads, head_dim = llama.head_sizes(c)
    mask = Causal() if window is None else Causal() & Window(window)
    c.ignore("layer_norm_epsilon", "norm_type", "mlp_type", "embedding_dropout", "residual_dropout")

    def block() -> Block:
        attention = Attention(dim, heads, kv_heads, head_dim, bias=bias, position=c.rope(head_dim), mask=mask)
        return Block(
            attn=Residual(attention, pre=LayerNorm(dim, eps)),
            mlp=Residual(Mlp(dim, hidden, act, bias), pre=LayerNorm(dim, eps)),
        )

    layers = [block() for _ in range(c["num_hidden_layers"])]
    stack = Stack(layers, LayerNorm(dim, eps))
    return LM(Embed(c["vocab_size"], dim), stack, llama.head(c), context=c["max_position_embeddings"])


def names(c: Config) -> Names:
    own: Names = {
        "model.layers.{}.mlp.c_fc": "decoder.layers.{}.mlp.op.up",
        "model.layers.{}.mlp.c_proj": "decoder.layers.{}.mlp.op.down",
    }
    return first(own, llama.names(c))
