"""`LanguageModel`: what `load` returns, a model with its tokenizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, cast

import mlx.core as mx

from .config import Config
from .errors import UsageError
from .generation.batch import Request, Result, batch
from .generation.generate import Generation, generate
from .generation.scoring import Score, score
from .generation.settings import recommended
from .generation.task import Prompt
from .nn import LM, WHOLE, Cache, Keeping
from .tokens import Tokenizer, Tokens

NO_LIMIT = 2**31 - 1
"""The context of a model whose positions have no end."""


@dataclass
class LanguageModel:
    """A model that can be called, and that reads and writes text if it has a tokenizer."""

    model: LM
    config: Config
    tokenizer: Tokenizer | None
    generation_config: Mapping[str, Any]
    dtype: mx.Dtype
    origin: str
    notes: list[str] = field(default_factory=list)

    def __call__(
        self, ids: mx.array | Sequence[int], cache: Cache | None = None, *, attention_mask: mx.array | None = None
    ) -> mx.array:
        """Logits (B, L, V) of the next token after each of `ids` (B, L), which follow what `cache` remembers.

        A list of ids, or what `tokens` gives, is a batch of one. `attention_mask` (B, L) is 0 at padding in front of a
        text. Raises UsageError for ids that the model does not have.
        """
        ids = as_batch(ids)
        check_ids(ids, self.vocab)
        return self.model(ids, cache, attention_mask=attention_mask)

    @property
    def vocab(self) -> int:
        """Ids that the model knows: the rows of its embedding."""
        return self.model.vocab

    @property
    def context(self) -> int:
        """Tokens that the model can look at, with its positions stretched as its config says."""
        return NO_LIMIT if self.model.lengths is None else self.model.lengths[1]

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a text, by the generation config, the config and the tokenizer together."""
        found = set() if self.tokenizer is None else set(self.tokenizer.end_ids)
        for settings in (self.generation_config, self.config.values):
            named = settings.get("eos_token_id")
            several = named if isinstance(named, list) else [named]
            found |= {index for index in several if isinstance(index, int) and not isinstance(index, bool)}
        return frozenset(found)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations, so that `chat` works."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    @property
    def recommended_sampling(self) -> dict[str, Any]:
        """The settings that the model's authors recommend in `generation_config.json`, for `generate` and `batch`; may
        be empty. Raises BadInput for what cannot be followed."""
        return recommended(self.generation_config, self.origin, self.vocab, self.end_ids)

    def new_cache(self, context: int = 0, how: Keeping = WHOLE) -> Cache:
        """An empty cache, for a text that is planned to have `context` tokens; `how` much of it is kept."""
        return self.model.new_cache(context, how)

    def tokens(self, text: str) -> Tokens:
        """The ids of a text; `.table()` shows them."""
        tokenizer = self._with_tokenizer()
        return Tokens(tokenizer.encode(text), tokenizer)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Tokens:
        """The ids of a conversation, ready for an answer, through the model's chat template."""
        tokenizer = self._with_tokenizer()
        return Tokens(tokenizer.chat(messages, **variables), tokenizer)

    def generate(self, prompt: Prompt, **settings: Any) -> Generation:
        """Continue a prompt token by token; see `mlx_tformer.generation.generate` for the settings."""
        return generate(self, prompt, **settings)

    def score(self, texts: Prompt | Sequence[Prompt], *, top: int = 0) -> list[Score]:
        """The log-probabilities of each text's tokens, and their sum; see `mlx_tformer.generation.score`."""
        return score(self, texts, top=top)

    def batch(self, prompts: Iterable[Request], **settings: Any) -> Iterator[Result]:
        """Continue many prompts at once; see `mlx_tformer.generation.batch` for the settings."""
        return batch(self, prompts, **settings)

    def _with_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(f"{self.origin} has no tokenizer; give ids instead of text")
        return self.tokenizer


def as_batch(ids: mx.array | Sequence[int]) -> mx.array:
    """Ids as a model takes them, (B, L): a list of them is one text. Raises UsageError for what are no ids."""
    if isinstance(ids, mx.array):
        return ids
    if isinstance(ids, str):
        raise UsageError("ids: found a text; `tokens` makes ids of it")
    try:
        return mx.array([[index(i) for i in ids]])
    except (TypeError, ValueError, RuntimeError):  # the last for numbers that no array holds
        raise UsageError(f"ids: found {ids!r:.60}, expected a list of whole numbers or an array (B, L)") from None


def check_ids(ids: mx.array, vocab: int) -> None:
    """Raise UsageError for ids that are not rows of the embedding: MLX would read whatever lies there."""
    if ids.ndim == 2 and ids.shape[1] == 0:
        raise UsageError("ids: found none, expected one or more")
    if ids.ndim != 2 or not mx.issubdtype(ids.dtype, mx.integer):
        raise UsageError(f"ids: found {ids.dtype} of shape {ids.shape}, expected integers of shape (B, L)")
    wrong = next((i for i in cast(list[int], ids.flatten().tolist()) if not 0 <= i < vocab), None)
    if wrong is not None:
        raise UsageError(f"ids: found {wrong}, expected 0 to {vocab - 1}")
