"""PEGASUS: BART for summaries, pre-norm, with computed positions."""

from ..config import Config
from ..names import Names
from ..nn import Seq2Seq
from . import bart

ABSENT = bart.ABSENT | {"decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}


def model(c: Config) -> Seq2Seq:
    return bart.seq2seq(c, pre=True, positions=lambda: bart.computed(c), normed=False)


def names(c: Config) -> Names:
    return bart.shared_names(c, place="pre") | bart.position_names()
