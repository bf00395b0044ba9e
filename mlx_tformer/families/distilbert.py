"""DistilBERT: BERT of half the layers, without vectors for the two texts of a pair."""

from ..config import Config
from ..names import Drop, Names, Same, either, joined
from ..nn import Attention, Block, Embed, Encoder, Everything, LayerNorm, Learned, Mlp, Residual, Stack, TokenHead
from ..settings import Other
from .bert import FILLS, LABELS, classifier, norm

ABSENT = {
    "dim": Other("hidden_size"),
    "n_heads": Other("num_attention_heads"),
    "n_layers": Other("num_hidden_layers"),
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
EPS = 1e-12
"""No key of the config says otherwise."""


def model(c: Config) -> Encoder:
    dim, heads, hidden, vocab = c["dim"], c["n_heads"], c["hidden_dim"], c["vocab_size"]
    act, context, head_dim = c.get("activation", "gelu"), c["max_position_embeddings"], c.head_dim("dim", "n_heads")
    c.expect(tie_word_embeddings=True)
    c.ignore("qa_dropout", "seq_classif_dropout", "tie_weights_", "output_past")
    c.ignore("sinusoidal_pos_embds")  # how the table began; it is stored

    def block() -> Block:
        attn = Attention(dim, heads, head_dim=head_dim, bias=True, mask=Everything())
        mlp = Mlp(dim, hidden, act)
        return Block(attn=Residual(attn, after=LayerNorm(dim, EPS)), mlp=Residual(mlp, after=LayerNorm(dim, EPS)))

    embed = Embed(vocab, dim, positions=Learned(context, dim), norm=LayerNorm(dim, EPS))
    has_head = c.stores("vocab_transform.weight", "head.dense.weight", tasks=FILLS)
    head = TokenHead(dim, vocab, LayerNorm(dim, EPS), act) if has_head else None
    labels, stack = classifier(c, "dim", *LABELS, act="relu"), Stack([block() for _ in range(c["n_layers"])])
    return Encoder(embed, stack, head, classifier=labels, context=context)


def names(c: Config) -> Names:
    theirs, ours = "transformer.layer.{}", "encoder.layers.{}"
    attn = f"{theirs}.attention"
    return either(
        "distilbert.",
        {
            "embeddings.word_embeddings": "embed.tokens",
            "embeddings.position_embeddings": "embed.positions.table",
            "embeddings.position_ids": Drop("counted from 0"),
            **norm("embeddings.LayerNorm", "embed.norm"),
            **joined(f"{ours}.attn.op.qkv", {f"{attn}.{part}_lin": 1 for part in "qkv"}),
            f"{attn}.out_lin": f"{ours}.attn.op.out",
            f"{theirs}.sa_layer_norm": f"{ours}.attn.after",
            f"{theirs}.ffn.lin1": f"{ours}.mlp.op.up",
            f"{theirs}.ffn.lin2": f"{ours}.mlp.op.down",
            f"{theirs}.output_layer_norm": f"{ours}.mlp.after",
        },
    ) | {
        "pre_classifier": "classifier.dense",
        "classifier": "classifier.out",
        "vocab_transform": "head.dense",
        "vocab_layer_norm": "head.norm",
        "vocab_projector.weight": Same("embed.tokens.weight"),
        "vocab_projector.bias": "head.bias",
    }
