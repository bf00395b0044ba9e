"""T5, mT5 and Flan-T5: an encoder and a decoder whose layers share a learned bias for distances; scores unscaled."""

from collections.abc import Callable

from ..config import Config
from ..names import Drop, Names, Same, joined
from ..nn import (
    Attention,
    Block,
    CrossAttention,
    Embed,
    Everything,
    GatedMlp,
    Linear,
    Mlp,
    RelativeBias,
    Residual,
    RMSNorm,
    Scaled,
    Seq2Seq,
    Shared,
    Stack,
)
from ..nn.tap import Module
from ..settings import Other

ABSENT = {
    "d_model": Other("hidden_size"),
    "num_heads": Other("num_attention_heads"),
    "num_layers": Other("num_hidden_layers"),
    "d_kv": Other("head_dim", 64),
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def model(c: Config) -> Seq2Seq:
    dim, hidden = c["d_model"], c["d_ff"]
    act, gated = activation(c)
    c.ignore("n_positions", "output_past")  # of the first configs; the bias has no end
    c.expect(is_decoder=False)

    def mlp(side: str, layer: int) -> Module:
        return GatedMlp(dim, hidden, act) if gated else Mlp(dim, hidden, act, bias=False)

    return seq2seq(c, mlp, scaled=scaled(c), own_head=own_head(c))


def activation(c: Config) -> tuple[str, bool]:
    """The activation, and whether it is of a gate; newer configs say again what `feed_forward_proj` says."""
    way, _, name = c["feed_forward_proj"].rpartition("-")
    name = "gelu_new" if (way, name) == ("gated", "gelu") else name
    return c.get("dense_act_fn", name), c.get("is_gated_act", way == "gated")


def scaled(c: Config) -> bool:
    """Whether logits are scaled: in the first T5, which configs tell from the later ones by a head that is tied."""
    tied: bool = c.get("tie_word_embeddings", True)
    return c.get("scale_decoder_outputs", tied)


def own_head(c: Config) -> bool:
    """Whether there is a head of its own: in later versions, if it is stored and not the embedding once more."""
    if scaled(c):
        return False
    return c.stores("head.weight") or (c.stores("lm_head.weight") and not c.repeats("lm_head", "shared"))


def seq2seq(c: Config, mlp: Callable[[str, int], Module], *, scaled: bool, own_head: bool) -> Seq2Seq:
    """What T5 and Switch share; `mlp` makes the last step of a layer of either side."""
    dim, heads, head_dim, eps, vocab = c["d_model"], c["num_heads"], c["d_kv"], c["layer_norm_epsilon"], c["vocab_size"]
    buckets, farthest = c["relative_attention_num_buckets"], c["relative_attention_max_distance"]
    c.ignore("dropout_rate", "initializer_factor")

    def step(op: Module) -> Residual:
        return Residual(op, pre=RMSNorm(dim, eps))

    def stack(side: str, layers: int) -> Stack:
        reads = side == "encoder"
        position = RelativeBias(buckets, heads, farthest, causal=not reads)
        shared = Shared(position)

        def block(layer: int) -> Block:
            mask = Everything() if reads else None
            attn = Attention(dim, heads, head_dim=head_dim, scale=1.0, position=shared, mask=mask)
            cross = {} if reads else {"cross": step(CrossAttention(dim, heads, head_dim=head_dim, scale=1.0))}
            return Block(attn=step(attn), **cross, mlp=step(mlp(side, layer)))

        return Stack([block(layer) for layer in range(layers)], RMSNorm(dim, eps), position=position)

    embed = Embed(vocab, dim)
    return Seq2Seq(
        embed,
        stack("encoder", c["num_layers"]),
        stack("decoder", decoder_layers(c)),
        Linear(dim, vocab, bias=False) if own_head else None,
        target=Embed(vocab, dim, of=embed),
        finish=Scaled(dim**-0.5) if scaled else None,
    )


def decoder_layers(c: Config) -> int:
    """As many layers as the encoder has, if nothing is said."""
    layers: int = c.get("num_decoder_layers", c["num_layers"])
    return layers


def names(c: Config) -> Names:
    return stack_names("DenseReluDense") | {
        **once(c, "embed.tokens", "shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "lm_head": "head" if own_head(c) else Same("embed.tokens"),
    }


def once(c: Config, to: str, *theirs: str) -> Names:
    """Modules that hold the same weights, of which the first that is stored makes ours."""
    main = next((name for name in theirs if c.stores(f"{name}.weight")), theirs[0])
    found: Names = {main: to}
    return found | {name: Same(to) for name in theirs if name != main}


def stack_names(mlp: str) -> Names:
    """The names of both stacks; `mlp` is what the last step of a layer is called."""
    found: Names = {}
    for side, last in {"encoder": 1, "decoder": 2}.items():
        theirs, ours = f"{side}.block.{{}}.layer", f"{side}.layers.{{}}"
        found |= {
            **joined(f"{ours}.attn.op.qkv", {f"{theirs}.0.SelfAttention.{part}": 1 for part in "qkv"}),
            f"{theirs}.0.SelfAttention.o": f"{ours}.attn.op.out",
            f"{theirs}.0.layer_norm": f"{ours}.attn.pre",
            **joined(f"{ours}.mlp.op.gate_up", {f"{theirs}.{last}.{mlp}.wi_{i}": 1 for i in (0, 1)}),
            f"{theirs}.{last}.{mlp}.wi": f"{ours}.mlp.op.up",
            f"{theirs}.{last}.{mlp}.wo": f"{ours}.mlp.op.down",
            f"{theirs}.{last}.layer_norm": f"{ours}.mlp.pre",
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": f"{side}.position.table",
            f"{side}.final_layer_norm": f"{side}.norm",
        }
    theirs, ours = "decoder.block.{}.layer.1", "decoder.layers.{}.cross"
    return found | {
        f"{theirs}.EncDecAttention.q": f"{ours}.op.q",
        **joined(f"{ours}.op.kv", {f"{theirs}.EncDecAttention.{part}": 1 for part in "kv"}),
        f"{theirs}.EncDecAttention.o": f"{ours}.op.out",
        f"{theirs}.EncDecAttention.relative_attention_bias": Drop("distances to another text mean nothing"),
        f"{theirs}.layer_norm": f"{ours}.pre",
    }
