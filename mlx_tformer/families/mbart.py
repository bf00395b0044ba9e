"""mBART and mBART-50: BART for many languages, pre-norm, with a norm on the embedding and one after the last layer."""

from ..config import Config
from ..names import Names
from ..nn import Seq2Seq
from . import bart

ABSENT = bart.ABSENT | {"decoder_start_token_id": None}


def model(c: Config) -> Seq2Seq:
    return bart.seq2seq(c, pre=True, positions=lambda: bart.learned(c), normed=True)


def names(c: Config) -> Names:
    return bart.names(c) | bart.shared_names(c, place="pre")
