"""RoBERTa: BERT whose positions begin behind the id of padding, with a head of other names."""

from ..config import Config
from ..names import Names, Same
from ..nn import Encoder
from .bert import FILLS, by_token, classifier, encoder, encoder_names, norm

ABSENT = {"max_position_embeddings": 512, "type_vocab_size": 2, "tie_word_embeddings": True, "pad_token_id": 1}
LABELS = ("classifier.weight", "classifier.out_proj.weight", "classifier.out.weight")


def model(c: Config) -> Encoder:
    has_head = c.stores("lm_head.dense.weight", "head.dense.weight", tasks=FILLS)
    labels = classifier(c, "hidden_size", *LABELS)
    return encoder(c, act="gelu" if has_head else None, first=c["pad_token_id"] + 1, labels=labels)


def names(c: Config) -> Names:
    texts: Names = {"classifier.dense": "classifier.dense", "classifier.out_proj": "classifier.out"}
    labels: Names = {"classifier": "classifier.out"} if by_token(c) else texts
    return (
        encoder_names("roberta.")
        | labels
        | {
            "lm_head.dense": "head.dense",
            **norm("lm_head.layer_norm", "head.norm"),
            "lm_head.bias": "head.bias",
            "lm_head.decoder.weight": Same("embed.tokens.weight"),
            "lm_head.decoder.bias": Same("head.bias"),
        }
    )
