"""`EncoderModel`: what `load` returns for an encoder, with its tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import mlx.core as mx

from .config import Config
from .errors import UsageError
from .lm import as_batch, check_ids
from .nn import Encoder
from .tokens import Tokenizer, Tokens

POOLS = ("mean", "cls", "last")
"""How a text's hidden states become one vector: their mean, that of the first token, that of the last."""


@dataclass
class EncoderModel:
    """An encoder that can be called, and that reads text if it has a tokenizer."""

    model: Encoder
    config: Config
    tokenizer: Tokenizer | None
    dtype: mx.Dtype
    origin: str
    notes: list[str] = field(default_factory=list)

    def __call__(
        self,
        ids: mx.array | Sequence[int],
        *,
        attention_mask: mx.array | None = None,
        token_types: mx.array | None = None,
    ) -> mx.array:
        """Logits (B, L, V) of what stands at each of `ids` (B, L), or hidden states (B, L, C) of a checkpoint without
        a head for that.

        A list of ids, or what `tokens` gives, is a batch of one. attention_mask (B, L) is 0 at padding, wherever it
        stands; token_types (B, L) tell the texts of a pair apart.
        Raises UsageError for ids, types, shapes and lengths that the model does not have.
        """
        ids = as_batch(ids)
        self._check(ids, token_types)
        return self.model(ids, attention_mask=attention_mask, token_types=token_types)

    def hidden(
        self, ids: mx.array, *, attention_mask: mx.array | None = None, token_types: mx.array | None = None
    ) -> mx.array:
        """The hidden states after the last block, (B, L, C); arguments and errors are those of a call."""
        self._check(ids, token_types)
        return self.model.hidden(ids, attention_mask=attention_mask, token_types=token_types)

    def embed(self, texts: Sequence[str] | str, *, pool: str = "mean", normalise: bool = True) -> mx.array:
        """A vector for each text, (N, C), in float32; for a single text (1, C).

        pool: "mean" of the hidden states of its tokens, "cls", that of the first one, or "last". normalise: of length
        1, so that dot products are cosines. Texts run as one batch, padded on the right, which changes nothing.
        Raises UsageError for a `pool` that is none, no texts, a text that is longer than the model's positions, and a
        model without a tokenizer.
        """
        if pool not in POOLS:
            raise UsageError(f"pool: found {pool!r}, expected one of {', '.join(POOLS)}")
        rows = [list(self.tokens(text)) for text in ([texts] if isinstance(texts, str) else texts)]
        if not rows or not all(rows):
            raise UsageError("texts: found none, or one without any tokens; give one text or more")
        longest = max(map(len, rows))
        if longest > self.context:
            at = next(i for i, row in enumerate(rows) if len(row) > self.context)
            expected = f"at most {self.context}, as many as the model has positions"
            raise UsageError(f"texts: found {len(rows[at])} tokens in text {at}, expected {expected}")
        ids = mx.array([row + [0] * (longest - len(row)) for row in rows])
        mask = mx.arange(longest) < mx.array([[len(row)] for row in rows])  # (N, L)
        found = pooled(self.hidden(ids, attention_mask=mask).astype(mx.float32), mask, pool)
        return found / mx.maximum(mx.linalg.norm(found, axis=-1, keepdims=True), 1e-12) if normalise else found

    @property
    def vocab(self) -> int:
        """Ids that the model knows: the rows of its embedding."""
        return self.model.vocab

    @property
    def context(self) -> int:
        """Tokens that the model has positions for."""
        return 2**31 - 1 if self.model.context is None else self.model.context

    @property
    def has_head(self) -> bool:
        """Whether a call gives logits over the vocabulary."""
        return self.model.has_head

    def tokens(self, text: str) -> Tokens:
        """The ids of a text, with the special tokens that go around it; `.table()` shows them."""
        if self.tokenizer is None:
            raise UsageError(f"{self.origin} has no tokenizer; give ids instead of text")
        return Tokens(self.tokenizer.encode(text), self.tokenizer)

    def generate(self, *prompt: Any, **settings: Any) -> NoReturn:
        """Refused: an encoder does not write. Raises UsageError."""
        self.refuse()

    def chat(self, *messages: Any, **variables: Any) -> NoReturn:
        """Refused, as `generate` is. Raises UsageError."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the UsageError of whatever needs a model that continues a text."""
        kind = self.config.model_type
        raise UsageError(f"{self.origin} is an encoder ({kind}), which reads texts and does not continue them")

    def _check(self, ids: mx.array, token_types: mx.array | None) -> None:
        check_ids(ids, self.vocab)
        if token_types is None:
            return
        kinds = max(self.model.embed.kinds, 1)
        wrong = next((i for i in cast(list[int], token_types.flatten().tolist()) if not 0 <= i < kinds), None)
        if wrong is not None or not mx.issubdtype(token_types.dtype, mx.integer):
            found = token_types.dtype if wrong is None else wrong
            raise UsageError(f"token_types: found {found}, expected 0 to {kinds - 1} in integers")


def pooled(hidden: mx.array, mask: mx.array, pool: str) -> mx.array:
    """One vector a row, (B, C), of hidden states (B, L, C) whose mask (B, L) is True for text.

    >>> x, mask = mx.array([[[1.0], [3.0], [8.0]]]), mx.array([[True, True, False]])
    >>> [pooled(x, mask, pool).item() for pool in POOLS]
    [2.0, 1.0, 3.0]
    """
    places = mx.arange(mask.shape[1])
    if pool == "mean":
        weights = mask[..., None].astype(hidden.dtype)
        return mx.where(mask[..., None], hidden, 0).sum(axis=1) / weights.sum(axis=1)
    at = mx.argmax(mask, axis=1) if pool == "cls" else mx.max(mx.where(mask, places, 0), axis=1)
    return mx.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]
