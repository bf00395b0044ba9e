"""Models of all kinds as a card sees them: stacks of blocks, and what surrounds these.

A new kind of model has a card when it registers with `anatomy`.
"""

from dataclasses import dataclass
from functools import singledispatch

import mlx.nn as nn

from .errors import UsageError
from .mechanisms import Row
from .nn import LM, Encoder, Identity, LogitBias, Seq2Seq, Stack, VisionEncoder


@dataclass(frozen=True)
class Layers:
    """The blocks of a stack, which the model calls so."""

    name: str
    stack: Stack


@dataclass(frozen=True)
class Around:
    """What happens before, between or after stacks."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Anatomy:
    """A model from its input to its output."""

    parts: tuple[Layers | Around, ...]
    """In the order in which they run."""
    sizes: dict[str, int]
    """What the symbols of axes stand for: C, the width, and others."""
    head: str
    """What makes the output, in words."""
    tied: bool = False
    head_bias: bool = False
    vocabulary: int | None = None
    """Rows of the embedding."""
    idle: int = 0
    """Parameters around the blocks that the computation of one token does not touch."""
    remembers: bool = True
    """False for models that keep nothing between calls."""
    images: str | None = None
    """What images it looks at."""

    @property
    def layers(self) -> list[Layers]:
        """The stacks."""
        return [part for part in self.parts if isinstance(part, Layers)]


@singledispatch
def anatomy(model: nn.Module) -> Anatomy:
    """What a model consists of; raises UsageError for a kind that has no card."""
    raise UsageError(f"there is no card of a {type(model).__name__}")


@anatomy.register
def _(model: LM) -> Anatomy:
    (rows, narrow), into = table_of(model.embed.tokens), model.embed.into
    dim = narrow if isinstance(into, Identity) else table_of(into)[0]
    head = None if model.tied else model.head
    end = (("decoder.norm", "B L C" if dim == narrow else "B L W", model.decoder.norm), ("logits", "B L V", head))
    return Anatomy(
        (_embedding(model.embed), Layers("decoder", model.decoder), Around("end", end)),
        {"C": dim, "V": rows, "W": narrow},
        head="tied to the embedding" if model.tied else "a matrix of its own",
        tied=model.tied,
        head_bias=not model.tied and "bias" in model.head,
        vocabulary=rows,
        # A token reads one row of the embedding; as the head, the same matrix is used whole.
        idle=0 if model.tied else (rows - 1) * narrow,
    )


@anatomy.register
def _(model: Encoder) -> Anatomy:
    rows, dim = table_of(model.embed.tokens)
    end: tuple[Row, ...] = (("encoder.norm", "B L C", model.encoder.norm),)
    sizes, head = {"C": dim, "V": rows}, "none: hidden states"
    if model.has_classifier:
        sizes["N"], pool = model.classifier.labels, model.classifier.pool
        head = f"{sizes['N']} labels, {'token by token' if pool is None else f'by {POOLED[pool]}'}"
        end += (("classifier", "B L N" if pool is None else "B N", model.classifier),)
    elif model.has_head:
        end += (("head", "B L C", model.head), ("logits", "B L V", None))
        head = "for masked tokens, its last matrix tied to the embedding"
    return Anatomy(
        (_embedding(model.embed), Layers("encoder", model.encoder), Around("end", end)),
        sizes,
        head=head,
        tied=model.tied,
        head_bias=model.has_head,
        vocabulary=rows,
        idle=0 if model.tied else (rows - 1) * dim,
        remembers=False,
    )


POOLED = {"cls": "the first token", "mean": "the mean of all tokens", "last": "the last token"}


@anatomy.register
def _(model: VisionEncoder) -> Anatomy:
    embed = model.embed
    (height, width), (high, wide) = embed.size, embed.patch
    count, dim = embed.rows * embed.columns, embed.first.shape[-1]
    end: tuple[Row, ...] = (("encoder.norm", "B L C", model.encoder.norm),)
    sizes, labels = {"C": dim, "c": embed.channels, "h": height, "w": width}, None
    if model.has_head:
        labels = sizes["N"] = model.head.weight.shape[0]
        end += (("head", "B N", model.head),)
    first = Around("embedding", (("pixels", "B c h w", None), ("embed", "B L C", embed)))
    return Anatomy(
        (first, Layers("encoder", model.encoder), Around("end", end)),
        sizes,
        head="none: hidden states" if labels is None else f"{labels} labels, by the first token",
        head_bias=labels is not None,
        remembers=False,
        images=f"{height} × {width} with {embed.channels} channels, in {count} patches of {high} × {wide}",
    )


@anatomy.register
def _(model: Seq2Seq) -> Anatomy:
    rows, dim = table_of(model.embed.tokens)
    apart = model.has_target and "tokens" in model.target
    target = model.target if model.has_target else None
    source = (*_embedding(model.embed).rows, *_position("encoder", model.encoder))
    between: tuple[Row, ...] = (
        ("encoder.norm", "B L C", model.encoder.norm),
        ("decoder_input_ids", "B L", None),
        ("target" if model.has_target else "embed", "B L C", target),
        *_position("decoder", model.decoder),
    )
    head: tuple[Row, ...] = () if model.tied else (("head", "B L T", model.head),)
    end = (("decoder.norm", "B L C", model.decoder.norm), *head, ("finish", "B L T", model.finish))
    table = "decoder's embedding" if apart else "embedding"
    return Anatomy(
        (
            Around("embedding", source),
            Layers("encoder", model.encoder),
            Around("between", between),
            Layers("decoder", model.decoder),
            Around("end", (*end, ("logits", "B L T", None))),
        ),
        {"C": dim, "V": rows, "T": model.target_vocab},
        head=f"tied to the {table}" if model.tied else "a matrix of its own",
        tied=model.tied,
        head_bias=isinstance(model.finish, LogitBias),
        vocabulary=rows,
        idle=_unread(model, apart),
    )


def _unread(model: Seq2Seq, apart: bool) -> int:
    """Parameters of tables of which a token reads one row, and which are no head as well."""
    tables = [model.embed, *([model.target] if apart else [])]
    heads = tables[-1:] if model.tied else []
    sizes = [table_of(embed.tokens) for embed in tables if all(embed is not head for head in heads)]
    return sum((rows - 1) * dim for rows, dim in sizes)


def _position(name: str, stack: Stack) -> tuple[Row, ...]:
    """The line of a position that all layers of a stack share."""
    return ((f"{name}.position", "H L S", stack.position),) if "position" in stack else ()


def _embedding(embed: nn.Module) -> Around:
    return Around("embedding", (("ids", "B L", None), ("embed.tokens", "B L C", embed)))


def table_of(layer: nn.Module) -> tuple[int, int]:
    """Rows and columns of an embedding or a linear layer, whose matrix may be packed."""
    rows, columns = layer.weight.shape
    packed = isinstance(layer, nn.QuantizedEmbedding | nn.QuantizedLinear)
    return rows, columns * 32 // layer.bits if packed else columns
