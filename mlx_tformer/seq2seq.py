"""`Seq2SeqModel`: what `load` returns for an encoder with a decoder, with its tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import mlx.core as mx

from .config import Config
from .errors import UsageError
from .lm import NO_LIMIT, check_ids
from .nn import Cache, Seq2Seq
from .tokens import Tokenizer, Tokens


@dataclass
class Seq2SeqModel:
    """An encoder with a decoder: it can be called, and reads and writes text if it has a tokenizer."""

    model: Seq2Seq
    config: Config
    tokenizer: Tokenizer | None
    generation_config: Mapping[str, Any]
    dtype: mx.Dtype
    origin: str
    notes: list[str] = field(default_factory=list)

    def __call__(
        self, ids: mx.array, *, decoder_input_ids: mx.array, attention_mask: mx.array | None = None
    ) -> mx.array:
        """Logits (B, L, V) of the next token after each of `decoder_input_ids` (B, L), given a source `ids` (B, S).

        attention_mask (B, S) is 0 at padding of the source, wherever that stands. Raises UsageError for ids that the
        model does not have, and for shapes that do not go together.
        """
        check_ids(ids, self.vocab)
        check_ids(decoder_input_ids, self.model.target_vocab)
        if ids.shape[0] != decoder_input_ids.shape[0]:
            found = f"found {decoder_input_ids.shape[0]} rows, expected {ids.shape[0]}, as many as there are sources"
            raise UsageError(f"decoder_input_ids: {found}")
        return self.model(ids, decoder_input_ids=decoder_input_ids, attention_mask=attention_mask)

    @property
    def vocab(self) -> int:
        """Ids that the model reads: the rows of its embedding."""
        return self.model.vocab

    @property
    def context(self) -> int:
        """Tokens that either side can look at."""
        return NO_LIMIT if self.model.lengths is None else self.model.lengths[1]

    def new_cache(self, context: int = 0) -> Cache:
        """An empty cache of the decoder."""
        return self.model.new_cache(context)

    def tokens(self, text: str) -> Tokens:
        """The ids of a source, with the special tokens that go around it; `.table()` shows them."""
        tokenizer = self._with_tokenizer()
        return Tokens(tokenizer.encode(text), tokenizer)

    def refuse(self) -> NoReturn:
        """Raise the UsageError of whatever needs a model that continues its prompt."""
        kind = self.config.model_type
        raise UsageError(f"{self.origin} is an encoder with a decoder ({kind}): it does not continue what it reads")

    def _with_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(f"{self.origin} has no tokenizer; give ids instead of text")
        return self.tokenizer
