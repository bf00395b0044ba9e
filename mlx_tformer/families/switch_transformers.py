"""Switch Transformers: T5 in which one of several experts makes up the MLP, and takes only so many tokens of a text."""

from ..config import Config
from ..names import Expert, Names, Same
from ..nn import Mixture, Mlp, PlainExperts, Router, Seq2Seq
from ..nn.tap import Module
from . import t5

ABSENT = t5.ABSENT | {
    "d_kv": 64,
    "num_decoder_layers": 12,
    "dense_act_fn": "relu",
    "expert_capacity": 64,
    "num_experts": 8,
    "num_sparse_encoder_layers": 3,
    "num_sparse_decoder_layers": 3,
    "router_bias": False,
}
SIDES = ("encoder", "decoder")


def model(c: Config) -> Seq2Seq:
    dim, hidden, count, act = c["d_model"], c["d_ff"], c["num_experts"], c["dense_act_fn"]
    capacity, bias = c["expert_capacity"], c["router_bias"]
    steps = {side: sparse_step(c, side) for side in SIDES}
    c.expect(router_dtype="float32", add_router_probs=False)
    # Noise is for training, and padding is not looked at by the reference's router whatever the last key says.
    c.ignore("router_jitter_noise", "router_ignore_padding_tokens", "feed_forward_proj", "is_gated_act")

    def mlp(side: str, layer: int) -> Module:
        step = steps[side]
        if step and (step == 1 or layer % step == 1):
            router, experts = Router(dim, count, 1, bias=bias), PlainExperts(dim, hidden, count, act=act)
            return Mixture(router, experts, capacity=capacity)
        return Mlp(dim, hidden, act, bias=False)

    tied: bool = c["tie_word_embeddings"]
    return t5.seq2seq(c, mlp, scaled=tied, own_head=not tied)


def sparse_step(c: Config, side: str) -> int:
    """How many layers further on the next one with experts stands (0: there are none)."""
    layers = c["num_layers"] if side == "encoder" else t5.decoder_layers(c)
    sparse = c[f"num_sparse_{side}_layers"]
    return c.get(f"{side}_sparse_step", layers // sparse if sparse else layers)


def names(c: Config) -> Names:
    found = t5.stack_names("mlp") | {
        **t5.once(c, "embed.tokens", "shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "lm_head": Same("embed.tokens") if c["tie_word_embeddings"] else "head",
    }
    for side, last in {"encoder": 1, "decoder": 2}.items():
        theirs, ours = f"{side}.block.{{}}.layer.{last}.mlp", f"{side}.layers.{{}}.mlp.op"
        found |= {
            f"{theirs}.router.classifier": f"{ours}.router",
            f"{theirs}.experts.expert_{{}}.wi": Expert(f"{ours}.experts.up"),
            f"{theirs}.experts.expert_{{}}.wo": Expert(f"{ours}.experts.down"),
        }
    return found
