"""`Seq2SeqModel`: what `load` returns for an encoder with a decoder, with its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import mlx.core as mx

from .config import Config
from .errors import BadInput, UsageError
from .families import family
from .generation.beam import Search
from .generation.conditioned import generate
from .generation.generate import Generation
from .generation.rule_configs import longest_of, rules_of
from .generation.rules import RULED, Started
from .generation.settings import recommended
from .generation.task import Prompt
from .lm import NO_LIMIT, as_batch, check_ids
from .nn import Cache, Seq2Seq
from .tokens import Tokenizer, Tokens

NEEDED = ("bos_token_id", "decoder_start_token_id", "eos_token_id")
"""Keys that are looked for in the config too: without them nothing can be written."""

ALSO_RULED = (*RULED, "min_tokens", "bad_words", "sequence_bias")
"""Sampling settings that the configs' rules are about, or refuse."""


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
        self,
        ids: mx.array | Sequence[int],
        *,
        decoder_input_ids: mx.array | Sequence[int],
        attention_mask: mx.array | None = None,
    ) -> mx.array:
        """Logits (B, L, V) of the next token after each of `decoder_input_ids` (B, L), given a source `ids` (B, S).

        A list of ids is a batch of one. attention_mask (B, S) is 0 at padding of the source, wherever that stands.
        Raises UsageError for ids that the model does not have, and for shapes that do not go together.
        """
        ids, decoder_input_ids = as_batch(ids), as_batch(decoder_input_ids)
        check_ids(ids, self.vocab)
        check_ids(decoder_input_ids, self.model.target_vocab)
        if ids.shape[0] != decoder_input_ids.shape[0]:
            found = f"found {decoder_input_ids.shape[0]} rows, expected {ids.shape[0]}, as many as there are sources"
            raise UsageError(f"decoder_input_ids: {found}")
        return self.model(ids, decoder_input_ids=decoder_input_ids, attention_mask=attention_mask)

    def echoed(self, ids: Sequence[int]) -> mx.array:
        """Logits (1, L, V) for a text (L,) that is source and target at once: what shows whether all weights are right.

        Ids that the decoder does not have are others of its own there.
        """
        target = [index % self.model.target_vocab for index in ids]
        return self(mx.array([list(ids)]), decoder_input_ids=mx.array([target]))

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

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a text, by the generation config or the config, else by the tokenizer."""
        named = self._setting("eos_token_id")
        several = named if isinstance(named, list) else [named]
        found = frozenset(i for i in several if isinstance(i, int) and not isinstance(i, bool))
        return found or frozenset(() if self.tokenizer is None else self.tokenizer.end_ids)

    @property
    def rules(self) -> Started:
        """What the configs say about the tokens that come first, last, and never; raises BadInput for what cannot be
        followed."""
        return rules_of(self._setting, self.model.target_vocab, self._file)

    @property
    def recommended_length(self) -> int | None:
        """Tokens that a text has at most by the configs (`max_new_tokens`, else `max_length` less the start); None if
        they say nothing. Raises BadInput for what cannot be meant."""
        return longest_of(self._setting, self.model.target_vocab, self._file)

    @property
    def _file(self) -> str:
        """Where `_setting` finds things."""
        return f"{self.origin}/{'generation_config.json' if self.generation_config else 'config.json'}"

    @property
    def recommended_sampling(self) -> dict[str, Any]:
        """The sampling settings that the model's authors recommend in `generation_config.json`; may be empty. What
        they say of repetitions, words and ends is in `rules`."""
        return {k: v for k, v in recommended(self.generation_config, self.origin).items() if k not in ALSO_RULED}

    @property
    def recommended_search(self) -> dict[str, Any]:
        """The settings of a beam search that the configs recommend (`num_beams` above 1); may be empty."""
        if self.generation_config.get("do_sample") is True or (self._setting("num_beams") or 1) == 1:
            return {}
        names = {"num_beams": "beams", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
        found = {ours: self._setting(key) for key, ours in names.items() if self._setting(key) is not None}
        try:
            Search(**found)
        except UsageError as error:
            raise BadInput(str(error), file=f"{self.origin}/generation_config.json") from None
        return found

    def _setting(self, key: str) -> Any:
        """What the generation config says, or, for a checkpoint without one, the config or what its family takes."""
        if self.generation_config:
            found = self.generation_config.get(key)
            return self.config.values.get(key) if found is None and key in NEEDED else found
        return self.config.values.get(key, family(self.config.model_type).absent.get(key))

    def tokens(self, text: str) -> Tokens:
        """The ids of a source, with the special tokens that go around it; `.table()` shows them."""
        tokenizer = self._with_tokenizer()
        return Tokens(tokenizer.encode(text), tokenizer)

    def generate(self, prompt: Prompt, **settings: Any) -> Generation:
        """Write what belongs to a source, token by token; see `mlx_tformer.generation.conditioned.generate` for the
        settings."""
        return generate(self, prompt, **settings)

    def refuse(self) -> NoReturn:
        """Raise the UsageError of whatever needs a model that continues its prompt."""
        kind = self.config.model_type
        raise UsageError(f"{self.origin} is an encoder with a decoder ({kind}): it does not continue what it reads")

    def _with_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(f"{self.origin} has no tokenizer; give ids instead of text")
        return self.tokenizer
