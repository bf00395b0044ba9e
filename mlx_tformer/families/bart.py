"""BART: an encoder and a decoder, post-norm, with learned positions that begin at row 2 and a norm on the embedding."""

from collections.abc import Callable

from ..config import Config
from ..names import Names, Rule, Same, joined
from ..nn import (
    Attention,
    Block,
    CrossAttention,
    Embed,
    Everything,
    LayerNorm,
    Learned,
    LogitBias,
    Mlp,
    Residual,
    Seq2Seq,
    Sinusoidal,
    Stack,
)
from ..nn.tap import Module
from ..settings import Other
from .t5 import once

ABSENT = {
    "d_model": Other("hidden_size", 1024),
    "encoder_layers": Other("num_hidden_layers", 12),
    "encoder_attention_heads": Other("num_attention_heads", 16),
    "encoder_ffn_dim": 4096,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
FIRST = 2
"""Rows of the positions that no token has."""


def model(c: Config) -> Seq2Seq:
    return seq2seq(c, pre=False, positions=lambda: learned(c), normed=True)


def learned(c: Config) -> Learned:
    """A table of positions as BART has it."""
    c.expect(static_position_embeddings=False)
    return Learned(c["max_position_embeddings"], c["d_model"], first=FIRST)


def seq2seq(
    c: Config,
    *,
    pre: bool,
    positions: Callable[[], Learned | Sinusoidal],
    normed: bool,
    target_vocab: int | None = None,
) -> Seq2Seq:
    """What BART and those after it share. pre: norms stand before each step and after the last layer, else after each
    step. normed: there is one on the embedding too. target_vocab: what the decoder writes, with a table of its own."""
    dim, vocab, act, context = c["d_model"], c["vocab_size"], c["activation_function"], c["max_position_embeddings"]
    scale = dim**0.5 if c["scale_embedding"] else 1.0
    ignore_old(c, pre=pre, normed=normed)

    def step(op: Module) -> Residual:
        return Residual(op, pre=LayerNorm(dim)) if pre else Residual(op, after=LayerNorm(dim))

    def stack(side: str) -> Stack:
        reads, heads, hidden = side == "encoder", c[f"{side}_attention_heads"], c[f"{side}_ffn_dim"]
        head_dim = c.head_dim("d_model", f"{side}_attention_heads")

        def block() -> Block:
            attn = Attention(dim, heads, head_dim=head_dim, bias=True, mask=Everything() if reads else None)
            cross = {} if reads else {"cross": step(CrossAttention(dim, heads, head_dim=head_dim, bias=True))}
            return Block(attn=step(attn), **cross, mlp=step(Mlp(dim, hidden, act)))

        return Stack([block() for _ in range(c[f"{side}_layers"])], LayerNorm(dim) if pre else None)

    def embedding(size: int, of: Embed | None = None) -> Embed:
        return Embed(size, dim, positions=positions(), scale=scale, norm=LayerNorm(dim) if normed else None, of=of)

    embed = embedding(vocab)
    target = embedding(vocab, embed) if target_vocab is None else embedding(target_vocab)
    biased = c.stores("final_logits_bias", "finish.bias")
    finish = LogitBias(target.vocab) if biased else None
    return Seq2Seq(embed, stack("encoder"), stack("decoder"), target=target, finish=finish, context=context)


def ignore_old(c: Config, *, pre: bool, normed: bool) -> None:
    """The switches of the time when one class served all of these, which must say what the family is."""
    c.expect(tie_word_embeddings=True, is_decoder=False)
    c.expect(normalize_before=pre, add_final_layer_norm=pre, normalize_embedding=normed)
    c.expect(add_bias_logits=False)
    c.ignore("encoder_layerdrop", "decoder_layerdrop", "classif_dropout", "extra_pos_embeddings", "output_past")
    c.ignore("force_bos_token_to_be_generated", "save_step")


def names(c: Config) -> Names:
    return shared_names(c, place="after") | position_names()


EMBEDS = {"encoder": "embed", "decoder": "target"}


def shared_names(c: Config, *, place: str) -> Names:
    """What BART and those after it call what they have in common; positions apart."""
    found: Names = {"final_logits_bias": "finish.bias"}
    for side, embed in EMBEDS.items():
        theirs, ours = f"model.{side}.layers.{{}}", f"{side}.layers.{{}}"
        found |= {
            **joined(f"{ours}.attn.op.qkv", {f"{theirs}.self_attn.{part}_proj": 1 for part in "qkv"}),
            f"{theirs}.self_attn.out_proj": f"{ours}.attn.op.out",
            f"{theirs}.self_attn_layer_norm": f"{ours}.attn.{place}",
            f"{theirs}.fc1": f"{ours}.mlp.op.up",
            f"{theirs}.fc2": f"{ours}.mlp.op.down",
            f"{theirs}.final_layer_norm": f"{ours}.mlp.{place}",
            f"model.{side}.layernorm_embedding": f"{embed}.norm",
            f"model.{side}.layer_norm": f"{side}.norm",
        }
    theirs, ours = "model.decoder.layers.{}.encoder_attn", "decoder.layers.{}.cross"
    return found | {
        f"{theirs}.q_proj": f"{ours}.op.q",
        **joined(f"{ours}.op.kv", {f"{theirs}.{part}_proj": 1 for part in "kv"}),
        f"{theirs}.out_proj": f"{ours}.op.out",
        f"{theirs}_layer_norm": f"{ours}.{place}",
        **once(c, "embed.tokens", "model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
        "lm_head": Same("embed.tokens"),
    }


def computed(c: Config) -> Learned | Sinusoidal:
    """Sinusoids, or the table of them that a checkpoint stores, rounded as it may be: transformers takes it too."""
    c.expect(static_position_embeddings=True)
    count, dim = c["max_position_embeddings"], c["d_model"]
    stored = c.stores("model.encoder.embed_positions.weight", "embed.positions.table.weight")
    return Learned(count, dim) if stored else Sinusoidal(dim, count)


def position_names() -> dict[str, Rule]:
    """The names of both tables of positions."""
    return {f"model.{side}.embed_positions": f"{ours}.positions.table" for side, ours in EMBEDS.items()}
