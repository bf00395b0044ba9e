"""RoBERTa: BERT whose positions begin behind the id of padding, with a head of other names."""

from ..config import Config
from ..names import Names, Same
from ..nn import Encoder
from .bert import encoder, encoder_names, norm

ABSENT = {"max_position_embeddings": 512, "type_vocab_size": 2, "tie_word_embeddings": True, "pad_token_id": 1}


def model(c: Config) -> Encoder:
    has_head = c.stores("lm_head.dense.weight", "head.dense.weight")
    return encoder(c, act="gelu" if has_head else None, first=c["pad_token_id"] + 1)


def names(c: Config) -> Names:
    return encoder_names("roberta.") | {
        "lm_head.dense": "head.dense",
        **norm("lm_head.layer_norm", "head.norm"),
        "lm_head.bias": "head.bias",
        "lm_head.decoder.weight": Same("embed.tokens.weight"),
        "lm_head.decoder.bias": Same("head.bias"),
    }
