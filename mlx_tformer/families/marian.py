"""Marian (opus-mt): translation between two languages; post-norm, computed positions, a bias on the logits; text by its
`source.spm`."""

from ..config import Config
from ..names import Names, Same
from ..nn import Seq2Seq
from . import bart

ABSENT = bart.ABSENT | {
    "share_encoder_decoder_embeddings": True,
    "decoder_start_token_id": 58100,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}


def model(c: Config) -> Seq2Seq:
    apart = None if shares(c) else c.get("decoder_vocab_size", c["vocab_size"])
    return bart.seq2seq(c, pre=False, positions=lambda: bart.computed(c), normed=False, target_vocab=apart)


def shares(c: Config) -> bool:
    """Whether both sides have one table; a size of the decoder's is not looked at then."""
    c.ignore("decoder_vocab_size")
    shared: bool = c["share_encoder_decoder_embeddings"]
    return shared


def names(c: Config) -> Names:
    found = bart.shared_names(c, place="after") | bart.position_names()
    if shares(c):
        return found
    del found["model.shared"]
    return found | {
        "model.encoder.embed_tokens": "embed.tokens",
        "model.decoder.embed_tokens": "target.tokens",
        "lm_head": Same("target.tokens"),
    }
