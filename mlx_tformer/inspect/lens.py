"""The logit lens: what the model would say if it stopped after each layer (nostalgebraist 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from ..nn import Encoder, VisionEncoder
from .drawn import Drawn, numbers
from .sites import main_stack
from .trace import Trace, check_row

if TYPE_CHECKING:
    from .pictures import Picture


@dataclass(frozen=True)
class Lens(Drawn):
    """The best tokens after each layer: row i of the arrays is `layers[i]`, column j `positions[j]`.

    tokens, probabilities: (layers, positions, top), the best first. ranks: (layers, positions), the place of the token
    asked for, 0 for the best; None if none was.
    """

    layers: list[int]
    positions: list[int]
    tokens: mx.array
    probabilities: mx.array
    ranks: mx.array | None
    texts: list[list[list[str]]]

    def picture(self) -> "Picture":
        """The best token at each position after each layer, coloured by its probability."""
        from .pictures import Grid

        best, text = numbers(self.probabilities[..., 0]), [[one[0] for one in line] for line in self.texts]
        rows, columns = map(str, self.layers), map(str, self.positions)
        return Grid("best next tokens", best, list(rows), list(columns), down="layer", across="position", text=text)

    def __str__(self) -> str:
        shares = cast(list[list[list[float]]], self.probabilities.tolist())
        rows = []
        for layer, row, texts in zip(self.layers, shares, self.texts, strict=True):
            best = [f"'{text}' {share:.3f}" for text, share in zip(texts[-1], row[-1], strict=True)]
            rows.append(f"{layer:>5}  {'  '.join(best)}")
        return "\n".join(["layer", *rows])


def lens(
    t: Trace, position: int | Sequence[int] | None = -1, *, top: int = 5, of: str | int | None = None, row: int = 0
) -> Lens:
    """The `top` best next tokens at a position (or several, None: all) after each layer of which `residual.out` was
    read, through the model's last norm and its head; after the last layer they are the model's own.

    of: a token, as text or id, whose rank is wanted. Raises UsageError where the residual stream was not read, and for
    a model without a head for tokens.

    >>> import mlx_tformer as mt
    >>> from mlx_tformer.inspect import trace
    >>> lm = mt.load("shakespeare")
    >>> with trace(lm, read=["residual.out"]) as t:
    ...     logits = lm(lm.tokens("ROMEO:"))
    >>> (lens(t, top=1).tokens[-1, 0, 0] == mx.argmax(logits[0, -1])).item()
    True
    """
    model = cast(Any, t.lm.model)
    site = f"{main_stack(model)}.layers.*.residual.out"
    if isinstance(model, VisionEncoder) or (isinstance(model, Encoder) and not model.has_head):
        raise UsageError("the lens needs a head that says which token stands where, and this model has none")
    if site not in t:
        raise UsageError('the lens reads the residual stream: trace with read=["residual.out"]')
    streams = t.by_layer(site)
    rows, length, _ = next(iter(streams.values())).shape
    check_row(row, rows)
    places = range(length) if position is None else [position] if isinstance(position, int) else list(position)
    wrong = next((at for at in places if not -length <= at < length), None)
    if wrong is not None or not top >= 1 or not places:
        found_at = "no position" if not places else f"position {wrong}"
        raise UsageError(f"lens: found {found_at} and top {top}, expected one of {length} positions, 1 or more")
    at, token = mx.array([i % length for i in places]), None if of is None else token_id(t.lm, of)
    norm, found = model[main_stack(model)].norm, []
    for stream in streams.values():
        logits = model.logits(norm(stream[row][at][None]))  # (1, P, V)
        found.append(_best(logits[0], top, token))
        mx.eval(found[-1])
    tokens, shares, ranks = (mx.stack([part[i] for part in found]) for i in range(3))
    texts = [[[text_of(t.lm, i) for i in one] for one in line] for line in cast(list[list[list[int]]], tokens.tolist())]
    chosen = [i % length for i in places]
    return Lens(list(streams), chosen, tokens, shares, None if token is None else ranks, texts)


def _best(logits: mx.array, top: int, token: int | None) -> tuple[mx.array, mx.array, mx.array]:
    """(P, V) -> the best tokens and their probabilities (P, top), and the rank of a token (P,)."""
    best = mx.argsort(-logits, axis=-1)[:, :top]
    shares = mx.softmax(logits.astype(mx.float32), axis=-1, precise=True)
    own = logits[:, [0 if token is None else token]]
    return best, mx.take_along_axis(shares, best, axis=-1), (logits > own).sum(axis=-1)


def token_id(lm: Any, token: str | int) -> int:
    """The id of a token that is given as such or as text; raises UsageError for text of several tokens."""
    if isinstance(token, str):
        if lm.tokenizer is None:
            raise UsageError(f"{token!r}: there is no tokenizer; give the id of a token")
        ids = lm.tokenizer.encode(token, add_bos=False)
        if len(ids) != 1:
            raise UsageError(f"{token!r}: found {len(ids)} tokens, expected text of one (is a space missing in front?)")
        return ids[0]
    if not 0 <= token < lm.model.vocab:
        raise UsageError(f"token: found {token}, expected 0 to {lm.model.vocab - 1}")
    return token


def text_of(lm: Any, token: int) -> str:
    """A token as a reader sees it; its id if there is no tokenizer, or if the tokenizer does not have it."""
    known = lm.tokenizer is not None and token < lm.tokenizer.size
    return lm.tokenizer.token_text(token) if known else str(token)


def head_of(model: Any) -> nn.Module:
    """What makes logits of the last hidden states."""
    return model.embed.tokens if model.tied else model.head
