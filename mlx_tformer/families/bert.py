"""BERT: an encoder, post-norm, with learned positions and vectors for the two texts of a pair; sentence embeddings."""

from ..config import Config
from ..names import Drop, Names, Same, Unused, either, joined
from ..nn import (
    Attention,
    Block,
    Classifier,
    Embed,
    Encoder,
    Everything,
    LayerNorm,
    Learned,
    Linear,
    Mlp,
    Residual,
    Stack,
    TokenHead,
)

ABSENT = {"max_position_embeddings": 512, "type_vocab_size": 2, "tie_word_embeddings": True}
LABELS = ("classifier.weight", "classifier.out.weight")
FILLS = ("ForMaskedLM", "ForPreTraining")
"""How the classes end that tell what stands at a masked token."""
POOLER = Unused("the pooler, which only heads for whole texts read")
NEXT = Unused("the head for the next sentence")


def model(c: Config) -> Encoder:
    # What old configs say about the pooler, in the words of TensorFlow.
    c.ignore("directionality", *(f"pooler_{word}" for word in ("fc_size", "num_attention_heads", "num_fc_layers")))
    c.ignore("pooler_size_per_head", "pooler_type")
    has_head = c.stores("cls.predictions.transform.dense.weight", "head.dense.weight", tasks=FILLS)
    labels = classifier(c, "hidden_size", *LABELS)
    return encoder(c, act=c.get("hidden_act", "gelu") if has_head else None, labels=labels)


def names(c: Config) -> Names:
    pooler = "classifier.dense" if classifies(c, *LABELS) and not by_token(c) else POOLER
    return encoder_names("bert.", pooler) | {
        "classifier": "classifier.out",
        "cls.predictions.transform.dense": "head.dense",
        **norm("cls.predictions.transform.LayerNorm", "head.norm"),
        "cls.predictions.bias": "head.bias",
        "cls.predictions.decoder.weight": Same("embed.tokens.weight"),
        "cls.predictions.decoder.bias": Same("head.bias"),
        "cls.seq_relationship": NEXT,
    }


def classifies(c: Config, *weights: str) -> bool:
    """True if there is a head for labels, whose last matrix has one of these names."""
    return c.stores(*weights, tasks=("ForSequenceClassification", "ForTokenClassification"))


def by_token(c: Config) -> bool:
    """True if that head is for single tokens. Weights do not tell: some checkpoints kept their pooler."""
    return c.made_for("ForTokenClassification")


def classifier(c: Config, dim: str, *weights: str, act: str = "tanh") -> Classifier | None:
    """The head for labels, of texts with a dense layer before it; `dim` is the key of its width."""
    if not classifies(c, *weights):
        return None
    if by_token(c):
        return Classifier(c[dim], len(c.labels), pool=None)
    return Classifier(c[dim], len(c.labels), dense=Linear(c[dim], c[dim]), act=act)


def encoder(c: Config, *, act: str | None, first: int = 0, labels: Classifier | None = None) -> Encoder:
    """What BERT and RoBERTa share; `act` is the activation of the head for masked tokens (None: no head), and `first`
    the rows of the positions before the first."""
    dim, heads, eps = c["hidden_size"], c["num_attention_heads"], c.get("layer_norm_eps", 1e-12)
    hidden, head_dim, vocab = c["intermediate_size"], c.head_dim("hidden_size", "num_attention_heads"), c["vocab_size"]
    c.expect(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False, tie_word_embeddings=True)
    c.ignore("hidden_dropout_prob", "output_past")
    if c["max_position_embeddings"] <= first:
        raise c.wrong("max_position_embeddings", f"more than {first}, of which none is for a token")

    def block() -> Block:
        attn = Attention(dim, heads, head_dim=head_dim, bias=True, mask=Everything())
        mlp = Mlp(dim, hidden, c.get("hidden_act", "gelu"))
        return Block(attn=Residual(attn, after=LayerNorm(dim, eps)), mlp=Residual(mlp, after=LayerNorm(dim, eps)))

    count = c["max_position_embeddings"] - first
    positions = Learned(count, dim, first)
    embed = Embed(vocab, dim, positions=positions, types=c["type_vocab_size"], norm=LayerNorm(dim, eps))
    stack = Stack([block() for _ in range(c["num_hidden_layers"])])
    head = None if act is None else TokenHead(dim, vocab, LayerNorm(dim, eps), act)
    return Encoder(embed, stack, head, classifier=labels, context=count)


def encoder_names(prefix: str, pooler: str | Unused = POOLER) -> Names:
    """The names below the prefix, and without it, as a bare model has them."""
    theirs, ours = "encoder.layer.{}", "encoder.layers.{}"
    attn = f"{theirs}.attention"
    return either(
        prefix,
        {
            "embeddings.word_embeddings": "embed.tokens",
            "embeddings.position_embeddings": "embed.positions.table",
            "embeddings.token_type_embeddings": "embed.types",
            "embeddings.position_ids": Drop("counted from 0"),
            "embeddings.token_type_ids": Drop("zeros"),
            **norm("embeddings.LayerNorm", "embed.norm"),
            **joined(f"{ours}.attn.op.qkv", {f"{attn}.self.{part}": 1 for part in ("query", "key", "value")}),
            f"{attn}.output.dense": f"{ours}.attn.op.out",
            **norm(f"{attn}.output.LayerNorm", f"{ours}.attn.after"),
            f"{theirs}.intermediate.dense": f"{ours}.mlp.op.up",
            f"{theirs}.output.dense": f"{ours}.mlp.op.down",
            **norm(f"{theirs}.output.LayerNorm", f"{ours}.mlp.after"),
            "pooler.dense": pooler,
        },
    )


def norm(theirs: str, ours: str) -> Names:
    """The names of a norm's weights, those that TensorFlow gave them among them."""
    return {theirs: ours, f"{theirs}.gamma": f"{ours}.weight", f"{theirs}.beta": f"{ours}.bias"}
