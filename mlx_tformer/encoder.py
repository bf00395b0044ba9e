"""`EncoderModel`: what `load` returns for an encoder of texts, with its tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import mlx.core as mx

from .batches import Batch, Progress, Row, over
from .config import Config
from .errors import UsageError
from .labels import Label, labelled, scores
from .lm import as_batch, check_ids
from .nn import POOLS, Encoder, pooled
from .sentences import length_of, pool_of
from .tokens import Tokenizer, Tokens

Text = str | tuple[str, str]
"""A text, or the two of a pair."""


@dataclass(frozen=True)
class Ranked:
    """One of the texts that `rank` has put in order."""

    index: int
    """Which of the texts it is."""
    score: float
    text: str


@dataclass(frozen=True)
class Candidate:
    """One of the tokens that may stand at a masked one."""

    token: str
    probability: float
    id: int


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
        """What the checkpoint was made for, of `ids` (B, L): logits of labels, (B, labels) for a classifier of texts
        and (B, L, labels) for one of tokens; logits (B, L, V) of what stands at each token; or hidden states (B, L, C)
        without a head.

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

    def embed(
        self,
        texts: Sequence[str] | str,
        *,
        pool: str | None = None,
        normalise: bool = True,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> mx.array:
        """A vector for each text, (N, C), in float32; for a single text (1, C).

        pool: "mean" of the hidden states of its tokens, "cls", that of the first one, or "last"; None: what the
        checkpoint says that sentence-transformers should take, or the mean. normalise: of length 1, so that dot
        products are cosines. truncate: cut off what is too long for the model, or longer than its authors read.
        progress: told how many texts of how many are done. Texts run in batches of like lengths, padded on the right,
        which changes nothing.

        Raises UsageError for a `pool` that is none, no texts, a text that is longer than the model's positions, and a
        model without a tokenizer; BadInput for a checkpoint that wants more done than to pool.
        """
        if pool is not None and pool not in POOLS:
            raise UsageError(f"pool: found {pool!r}, expected one of {', '.join(POOLS)}")
        files = self._with_tokenizer().files
        pool = pool_of(files, self.origin) if pool is None else pool
        rows = self._rows([texts] if isinstance(texts, str) else texts, truncate, most=length_of(files, self.origin))

        def compute(batch: Batch) -> mx.array:
            hidden = self.hidden(batch.ids, attention_mask=batch.mask)
            found = pooled(hidden.astype(mx.float32), batch.mask, pool)
            length = mx.linalg.norm(found, axis=-1, keepdims=True)
            return found / mx.maximum(length, 1e-12) if normalise else found

        return over(rows, compute, progress)

    def classify(
        self,
        texts: Sequence[Text] | str,
        *,
        top: int | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[list[Label]]:
        """The labels of each text, the likeliest first: for one text a list of one list.

        texts: one, or several; a tuple of two among them is a pair. top: so many of the labels (None: all).
        truncate, progress: as in `embed`. Probabilities are a softmax, or sigmoids where several labels can be right
        (`problem_type`) and where there is but one. Raises UsageError for a checkpoint that is no classifier of texts,
        and for texts as `embed` does.
        """
        if top is not None and top < 1:
            raise UsageError(f"top: found {top}, expected 1 or more")
        rows = self._rows([texts] if isinstance(texts, str) else texts, truncate)
        return labelled(self._labels_of(rows, progress), self.config, top)

    def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, progress: Progress | None = None
    ) -> mx.array:
        """What a cross-encoder says of each pair of texts: (N,) for one label, else (N, labels), in float32.

        It is the logit, or its sigmoid, as the config says for sentence-transformers' CrossEncoder; where that says
        nothing, the sigmoid of a single label and else the logits. truncate, progress: as in `embed`. Raises UsageError
        as `classify` does.
        """
        found = scores(self._labels_of(self._rows(pairs, truncate, pairs=True), progress), self.config)
        return found[:, 0] if found.shape[1] == 1 else found

    def rank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        top: int | None = None,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[Ranked]:
        """Texts by how well they answer a query, the best first, by a cross-encoder with a single label; see `score`.

        Raises UsageError for a checkpoint with more labels, and as `classify` does.
        """
        found = self.score([(query, text) for text in texts], truncate=truncate, progress=progress)
        if found.ndim != 1:
            raise UsageError(f"{self.origin} has {found.shape[1]} labels, and ranking needs one that says how well")
        values = cast(list[float], found.tolist())
        best = sorted(range(len(values)), key=lambda i: -values[i])[:top]
        return [Ranked(i, values[i], texts[i]) for i in best]

    def fill(self, text: str, *, top: int = 5) -> list[list[Candidate]]:
        """For each mask in a text, such as BERT's "[MASK]", the `top` tokens that are likeliest to stand there.

        Special tokens in the text are what they say. Raises UsageError for a checkpoint without a head for masked
        tokens, a text without a mask, and one that is too long.
        """
        if not self.has_head:
            raise UsageError(f"{self.origin} has no head for masked tokens, so it cannot fill them")
        if not 1 <= top <= self.vocab:
            raise UsageError(f"top: found {top}, expected 1 to {self.vocab}")
        tokenizer = self._with_tokenizer()
        ids = tokenizer.encode(text, special=True)
        self._check_length([ids])
        places = [i for i, index in enumerate(ids) if index == tokenizer.mask_id]
        if tokenizer.mask_id is None:
            raise UsageError(f"{self.origin} has a tokenizer without a mask_token, so it cannot fill one")
        if not places:
            raise UsageError(f"the text has no {tokenizer.mask_token}, which stands for a missing word in this model")
        logits = self.model.logits(self.hidden(mx.array([ids]))[:, mx.array(places)])[0]
        return candidates(logits, tokenizer, top)

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
        """Whether the model tells what stands at a masked token."""
        return self.model.has_head

    @property
    def labels(self) -> list[str]:
        """What a classifier tells apart, in the order of its logits; empty for a model that is none."""
        return self.config.labels if self.model.has_classifier else []

    def tokens(self, text: str) -> Tokens:
        """The ids of a text, with the special tokens that go around it; `.table()` shows them."""
        tokenizer = self._with_tokenizer()
        return Tokens(tokenizer.encode(text), tokenizer)

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

    def _labels_of(self, rows: Sequence[Row], progress: Progress | None) -> mx.array:
        """Logits (N, labels) of texts."""
        if not self.model.has_classifier:
            raise UsageError(f"{self.origin} has no classifier; its config and its weights are those of another task")
        if self.model.classifier.pool is None:
            raise UsageError(f"{self.origin} labels single tokens; call it with ids for logits (B, L, labels)")
        with_types = self.model.embed.kinds > 1  # RoBERTa has one, which all tokens are of

        def compute(batch: Batch) -> mx.array:
            types = batch.types if with_types else None
            return self(batch.ids, attention_mask=batch.mask, token_types=types).astype(mx.float32)

        return over(rows, compute, progress)

    def _rows(
        self, texts: Sequence[Text], truncate: bool, *, most: int | None = None, pairs: bool = False
    ) -> list[Row]:
        """Texts and pairs as ids, cut off at `most` if that is asked for, or where the model's positions end."""
        tokenizer = self._with_tokenizer()
        most = min(self.context, self.context if most is None else most) if truncate else None
        rows = []
        for i, text in enumerate(texts):
            parts = (text,) if isinstance(text, str) else text
            if not isinstance(parts, tuple | list) or len(parts) not in ((2,) if pairs else (1, 2)):
                expected = "a pair of texts" if pairs else "a text, or a tuple of two"
                raise UsageError(f"texts: found {type(text).__name__} in place {i}, expected {expected}")
            rows.append(Row(*tokenizer.read(*parts, most=most)))
        if not rows or not all(row.ids for row in rows):
            raise UsageError("texts: found none, or one without any tokens; give one text or more")
        self._check_length([row.ids for row in rows])
        return rows

    def _check_length(self, rows: Sequence[Sequence[int]]) -> None:
        wrong = next((i for i, row in enumerate(rows) if len(row) > self.context), None)
        if wrong is not None:
            expected = f"at most {self.context}, as many as the model has positions"
            raise UsageError(f"texts: found {len(rows[wrong])} tokens in text {wrong}, expected {expected}")

    def _with_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(f"{self.origin} has no tokenizer; give ids instead of text")
        return self.tokenizer

    def _check(self, ids: mx.array, token_types: mx.array | None) -> None:
        check_ids(ids, self.vocab)
        if token_types is None:
            return
        kinds = max(self.model.embed.kinds, 1)
        wrong = next((i for i in cast(list[int], token_types.flatten().tolist()) if not 0 <= i < kinds), None)
        if wrong is not None or not mx.issubdtype(token_types.dtype, mx.integer):
            found = token_types.dtype if wrong is None else wrong
            raise UsageError(f"token_types: found {found}, expected 0 to {kinds - 1} in integers")


def candidates(logits: mx.array, tokenizer: Tokenizer, top: int) -> list[list[Candidate]]:
    """The likeliest tokens by each row of logits (N, V)."""
    shares = mx.softmax(logits.astype(mx.float32), axis=-1, precise=True)
    order = mx.argsort(-shares, axis=-1)[:, :top]
    best = cast(list[list[float]], mx.take_along_axis(shares, order, axis=-1).tolist())
    rows = zip(cast(list[list[int]], order.tolist()), best, strict=True)
    # A model may have more rows than the tokenizer has ids.
    return [[Candidate(_named(i, tokenizer), p, i) for i, p in zip(ids, ps, strict=True)] for ids, ps in rows]


def _named(index: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([index]) if index < tokenizer.size else ""
