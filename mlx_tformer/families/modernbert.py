"""ModernBERT: an encoder, pre-norm, with rotary positions, gated MLPs, and two of three layers that look around them
only."""

from ..config import Config
from ..names import Names, Same, either
from ..nn import (
    Around,
    Attention,
    Block,
    Classifier,
    Embed,
    Encoder,
    Everything,
    GatedMlp,
    LayerNorm,
    Linear,
    Residual,
    Rope,
    Stack,
    TokenHead,
)
from .bert import FILLS, LABELS, by_token, classifies

ABSENT = {
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def model(c: Config) -> Encoder:
    dim, heads, vocab, layers = c["hidden_size"], c["num_attention_heads"], c["vocab_size"], c["num_hidden_layers"]
    hidden, act = c["intermediate_size"], c.get("hidden_activation", "gelu")
    head_dim = c.head_dim("hidden_size", "num_attention_heads")
    bias, mlp_bias = c.get("attention_bias", False), c.get("mlp_bias", False)
    kinds, reach = kinds_of(c), c["local_attention"] // 2
    # The keys of the head for masked tokens are those of a classifier's, which it was made from.
    head_act, dense_bias = c.get("classifier_activation", "gelu"), c.get("classifier_bias", False)
    c.expect(tie_word_embeddings=True, decoder_bias=True, position_embedding_type="absolute")
    c.ignore("mlp_dropout", "initializer_cutoff_factor", "layer_norm_eps", *THETAS.values())
    c.ignore("cls_token_id", "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn")
    c.ignore("reference_compile", "repad_logits_with_grad")

    def norm() -> LayerNorm:
        return LayerNorm(dim, c.get("norm_eps", 1e-5), bias=c.get("norm_bias", False))

    def position(kind: str) -> Rope:
        return c.rope(head_dim, layer_type=kind, theta=THETAS[kind])

    def block(layer: int) -> Block:
        kind = kinds[layer]
        mask = Around(reach) if kind == "sliding_attention" else Everything()
        attn = Attention(dim, heads, head_dim=head_dim, bias=bias, position=position(kind), mask=mask)
        return Block(
            attn=Residual(attn, pre=norm() if layer else None),  # the embedding has a norm of its own
            mlp=Residual(GatedMlp(dim, hidden, act, mlp_bias), pre=norm()),
        )

    stack = Stack([block(layer) for layer in range(layers)], norm())
    pool, context = c.get("classifier_pooling", "cls"), c["max_position_embeddings"]
    head, labels = None, None
    if classifies(c, *LABELS):
        dense, pool = Linear(dim, dim, dense_bias), None if by_token(c) else pool
        labels = Classifier(dim, len(c.labels), dense=dense, act=head_act, norm=norm(), pool=pool)
    elif c.stores("head.dense.weight", tasks=FILLS):
        head = TokenHead(dim, vocab, norm(), head_act, dense_bias=dense_bias)
    return Encoder(Embed(vocab, dim, norm=norm()), stack, head, classifier=labels, context=context)


def kinds_of(c: Config) -> list[str]:
    """The kind of each layer: `layer_types`, or every so many is one that sees everything, from the first on."""
    every, layers = c["global_attn_every_n_layers"], c["num_hidden_layers"]
    derived = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    kinds: list[str] = c.get("layer_types", derived)
    if len(kinds) != layers or not THETAS.keys() >= set(kinds):
        raise c.wrong("layer_types", f"{layers} entries of {' and '.join(THETAS)}, one for each layer")
    return kinds


def names(c: Config) -> Names:
    theirs, ours = "layers.{}", "encoder.layers.{}"
    head = "classifier" if classifies(c, *LABELS) else "head"
    return either(
        "model.",
        {
            "embeddings.tok_embeddings": "embed.tokens",
            "embeddings.norm": "embed.norm",
            f"{theirs}.attn_norm": f"{ours}.attn.pre",
            f"{theirs}.attn.Wqkv": f"{ours}.attn.op.qkv",
            f"{theirs}.attn.Wo": f"{ours}.attn.op.out",
            f"{theirs}.mlp_norm": f"{ours}.mlp.pre",
            f"{theirs}.mlp.Wi": f"{ours}.mlp.op.gate_up",
            f"{theirs}.mlp.Wo": f"{ours}.mlp.op.down",
            "final_norm": "encoder.norm",
        },
    ) | {
        "head.dense": f"{head}.dense",
        "head.norm": f"{head}.norm",
        "classifier": "classifier.out",
        "decoder.bias": "head.bias",
        "decoder.weight": Same("embed.tokens.weight"),
    }
