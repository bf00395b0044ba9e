"""M2M-100 and NLLB: translation between many languages; pre-norm, with computed positions that begin behind the id of
padding."""

from ..config import Config
from ..names import Drop, Names
from ..nn import Seq2Seq, Sinusoidal
from . import bart

ABSENT = bart.ABSENT | {
    "activation_function": "relu",
    "scale_embedding": True,
    "pad_token_id": 1,
    "forced_eos_token_id": None,
}


def model(c: Config) -> Seq2Seq:
    c.expect(static_position_embeddings=True)
    dim, first = c["d_model"], c["pad_token_id"] + 1
    return bart.seq2seq(c, pre=True, positions=lambda: Sinusoidal(dim, first=first, closed=True), normed=False)


def names(c: Config) -> Names:
    return bart.shared_names(c, place="pre") | {
        f"model.{side}.embed_positions.weights": Drop("computed from the config") for side in bart.EMBEDS
    }
