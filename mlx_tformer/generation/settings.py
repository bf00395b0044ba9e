"""What a caller can ask of sampling, and what the authors of a model recommend."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import BadInput, UsageError

Word = str | Sequence[int]
"""A text, or the ids of one."""
Token = str | int
"""An id, or a text that is one token."""
Encode = Callable[[str], list[int]]
NO_LIMIT = 2**31 - 1
"""Of tokens, where nothing bounds their number."""
BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True)
class Sampling:
    """How to choose: always the best token (temperature 0), or by chance among those that the filters leave.

    In the order in which they apply, which is that of transformers:

    logit_bias: what to add to the logits of some tokens, by id or by a text that is one token. sequence_bias: pairs of
    a text, or a list of ids, and what to add to the logit of its last token where the others stand before it.
    repetition_penalty: divides what speaks for tokens of the prompt and the text, above 1 against repeating (arXiv
    1909.05858). presence_penalty, frequency_penalty: taken from the logits of tokens of the text, once, and for each
    time. dry_multiplier, dry_base, dry_allowed_length: a token that would repeat the last n tokens once more costs
    multiplier · base^(n - allowed length), from that length on; dry_breakers are tokens that no repetition reaches
    across. bad_words: texts or lists of ids that never come, as the tokenizer cuts them at the beginning of a text and
    after a space. min_tokens: so many tokens come before an end token may; min_length: the same, the prompt's counted.

    no_repeat_ngram_size: no sequence of so many tokens comes twice in prompt and text (0: any may).
    forced_bos_token_id: the token that follows a prompt of a single one. forced_eos_token_id: the last token of a text
    that is cut off, or several of which one is. exponential_decay_length_penalty: a number of tokens and a factor; for
    each token beyond, the logits of end tokens gain by the factor. suppress_tokens: tokens that never come, and
    begin_suppress_tokens: not as the first.

    temperature: divides the logits. top_k: keep so many of the best tokens (0: all). top_p: keep the best tokens that
    together have this probability (arXiv 1904.09751). min_p: keep tokens at least so likely as this share of the best
    one (arXiv 2407.01082). typical_p: keep the tokens nearest to the expected surprise that together have this
    probability (arXiv 2202.00666). xtc_probability, xtc_threshold: so often, remove all but the least likely of the
    tokens that have at least this probability; end tokens stay. seed: the same seed gives the same choices (None: a
    new one each time), alone or in a batch.

    >>> Sampling(top_p=2)
    Traceback (most recent call last):
    mlx_tformer.errors.UsageError: top_p: found 2, expected a number above 0, at most 1
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: Sequence[str | int] = BREAKERS
    logit_bias: Mapping[str | int, float] = field(default_factory=dict)
    bad_words: Sequence[Word] = ()
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0
    sequence_bias: Sequence[tuple[Word, float]] = ()
    min_length: int = 0
    forced_bos_token_id: Token | None = None
    forced_eos_token_id: Token | Sequence[Token] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: Sequence[Token] = ()
    begin_suppress_tokens: Sequence[Token] = ()

    def __post_init__(self) -> None:
        for name, (expected, holds) in NUMBERS.items():
            _expect(vars(self)[name], name, expected, holds)
        for name, least in COUNTS.items():
            value = vars(self)[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}: found {value}, expected a whole number of {least} or more")
        for name, (expected, fits) in FORMS.items():
            if not fits(vars(self)[name]):
                raise UsageError(f"{name}: found {vars(self)[name]!r}, expected {expected}")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < 2**64):
            raise UsageError(f"seed: found {self.seed}, expected a whole number from 0 to 2^64 - 1")
        for key, bias in self.logit_bias.items():
            _expect(bias, f"logit_bias: {key}", *BIAS)
        for word, bias in self.sequence_bias:
            _expect(bias, f"sequence_bias: {word}", *BIAS)
        if isinstance(self.bad_words, str) or any(not len(word) for word in self.bad_words):
            raise UsageError("bad_words: found an empty one, expected a list of texts, or of lists of ids")

    def in_ids(self, encode: Encode | None, vocab: int) -> "Sampling":
        """The same with ids where it has texts, all of them ids that the model knows.

        Raises UsageError for a text without a tokenizer (`encode`), and for a text that should be one token and is not.
        """
        bias: dict[str | int, float] = {
            self._one_id("logit_bias", key, encode, vocab): value for key, value in self.logit_bias.items()
        }
        words = [ids for word in self.bad_words for ids in _spellings("bad_words", word, encode, vocab)]
        breakers: list[str | int] = []
        if self.dry_multiplier and (encode is not None or self.dry_breakers is not BREAKERS):
            # After a letter, since what stands at a beginning may be another token.
            breakers = [_breaker(key, encode, vocab) for key in self.dry_breakers]
        sequences = {
            tuple(ids): value
            for word, value in self.sequence_bias
            for ids in _spellings("sequence_bias", word, encode, vocab)
        }
        tokens: dict[str, Any] = {
            name: tuple(self._one_id(name, token, encode, vocab) for token in _listed(vars(self)[name]))
            for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
        }
        tokens["forced_bos_token_id"] = next(iter(tokens["forced_bos_token_id"]), None)
        tokens["forced_eos_token_id"] = tokens["forced_eos_token_id"] or None
        return replace(
            self, logit_bias=bias, bad_words=words, dry_breakers=breakers, sequence_bias=[*sequences.items()], **tokens
        )

    @staticmethod
    def _one_id(name: str, key: str | int, encode: Encode | None, vocab: int) -> int:
        ids = _ids(name, key if isinstance(key, str) else [key], encode, vocab)
        if len(ids) != 1:
            raise UsageError(f"{name}: found {key!r}, which is {len(ids)} tokens, expected one token")
        return ids[0]


def _breaker(key: str | int, encode: Encode | None, vocab: int) -> int:
    return _ids("dry_breakers", f"a{key}" if isinstance(key, str) else [key], encode, vocab)[-1]


def _listed(tokens: Any) -> Sequence[Any]:
    """One token, several or None, as a list."""
    return [] if tokens is None else [tokens] if isinstance(tokens, Token) else tokens


def _spellings(name: str, word: Word, encode: Encode | None, vocab: int) -> list[list[int]]:
    """The ids of a word at the beginning of a text and after a space."""
    forms = [word, f" {word}"] if isinstance(word, str) else [word]
    found = [_ids(name, form, encode, vocab) for form in forms]
    return [ids for at, ids in enumerate(found) if ids and ids not in found[:at]]


def _ids(name: str, word: Word, encode: Encode | None, vocab: int) -> list[int]:
    if isinstance(word, str) and encode is None:
        raise UsageError(f"{name}: found {word!r}, but the model has no tokenizer; give ids")
    ids = encode(word) if isinstance(word, str) and encode is not None else [*word]
    wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab), None)
    if wrong is not None:
        raise UsageError(f"{name}: found id {wrong}, expected 0 to {vocab - 1}")
    return [i for i in ids if isinstance(i, int)]


NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number of 0 or more", lambda v: 0 <= v < math.inf),
    "top_p": ("a number above 0, at most 1", lambda v: 0 < v <= 1),
    "min_p": ("a number from 0 to 1", lambda v: 0 <= v <= 1),
    "typical_p": ("a number above 0, at most 1", lambda v: 0 < v <= 1),
    "xtc_probability": ("a number from 0 to 1", lambda v: 0 <= v <= 1),
    "xtc_threshold": ("a number above 0, at most 1", lambda v: 0 < v <= 1),
    "repetition_penalty": ("a number above 0", lambda v: 0 < v < math.inf),
    "presence_penalty": ("a number", math.isfinite),
    "frequency_penalty": ("a number", math.isfinite),
    "dry_multiplier": ("a number of 0 or more", lambda v: 0 <= v < math.inf),
    "dry_base": ("a number of 1 or more", lambda v: 1 <= v < math.inf),
}
"""What the numbers must be, in words and as a test."""
COUNTS = {"top_k": 0, "min_tokens": 0, "dry_allowed_length": 1, "no_repeat_ngram_size": 0, "min_length": 0}
"""What whole numbers must be at least."""
BIAS = ("a number (-inf: never)", lambda v: not math.isnan(v) and v < math.inf)


def _is_token(found: Any) -> bool:
    return isinstance(found, Token) and not isinstance(found, bool)


def _are_tokens(found: Any) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str) and all(map(_is_token, found))


def _are_pairs(found: Any) -> bool:
    """Whether each is a text, or ids, and something to add."""
    if isinstance(found, str) or not isinstance(found, Sequence):
        return False
    pairs = [pair for pair in found if isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2]
    return len(pairs) == len(found) and all(isinstance(word, Sequence) and len(word) for word, _ in pairs)


def _is_decay(found: Any) -> bool:
    """Whether it is a number of tokens and a factor."""
    if isinstance(found, str) or not isinstance(found, Sequence) or len(found) != 2:
        return False
    count, factor = found
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return False
    return isinstance(factor, int | float) and math.isfinite(factor)


FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "sequence_bias": ("pairs of a text, or ids, and a number", _are_pairs),
    "forced_bos_token_id": ("a token", lambda v: v is None or _is_token(v)),
    "forced_eos_token_id": ("a token or a list of them", lambda v: v is None or _is_token(v) or _are_tokens(v)),
    "exponential_decay_length_penalty": ("a number of tokens and a factor", lambda v: v is None or _is_decay(v)),
    "suppress_tokens": ("a list of tokens", _are_tokens),
    "begin_suppress_tokens": ("a list of tokens", _are_tokens),
}
"""What is no number must be, in words and as a test."""
ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "sequence_bias": "sequence_bias",
    "min_length": "min_length",
    "forced_bos_token_id": "forced_bos_token_id",
    "forced_eos_token_id": "forced_eos_token_id",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
}
"""Keys of a `generation_config.json` that hold whether tokens are drawn or not, and our names."""
SETTINGS = frozenset(f.name for f in fields(Sampling))
"""The names of all settings."""


def _expect(value: float, name: str, expected: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise UsageError(f"{name}: found {value}, expected {expected}")


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """A `Sampling` of these settings; raises UsageError for a name that none has."""
    unknown = sorted(settings.keys() - SETTINGS)
    if unknown:
        raise UsageError(f"{unknown[0]}: there is no such setting; expected one of {', '.join(sorted(SETTINGS))}")
    return Sampling(**settings)


def recommended(
    settings: Mapping[str, Any], origin: str, vocab: int = NO_LIMIT, end_ids: Collection[int] = ()
) -> dict[str, Any]:
    """The arguments of `Sampling` that a `generation_config.json` recommends: no filters if it says `do_sample: false`.

    vocab: ids that the model writes. end_ids: ids that end a text; none of them is a bad word, whatever the file says,
    and `min_length` says nothing beside `min_new_tokens`, as in transformers. Raises BadInput for a recommendation that
    cannot be followed.

    >>> recommended({"do_sample": True, "top_k": 20, "top_p": None, "eos_token_id": 2}, "a model")
    {'temperature': 1.0, 'top_k': 20}
    """
    names = dict(ALWAYS)
    if settings.get("do_sample") is not False:
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
    if settings.get("min_new_tokens") is not None:
        del names["min_length"]
    found = {ours: settings[name] for name, ours in names.items() if settings.get(name) is not None}
    if settings.get("do_sample") is True:
        found = {"temperature": 1.0, **found}
    if isinstance(found.get("bad_words"), list):
        found["bad_words"] = [word for word in found["bad_words"] if word not in [[i] for i in end_ids]]
    neutral = vars(Sampling())
    found = {name: v for name, v in found.items() if name not in ALWAYS.values() or v not in (neutral[name], [])}
    try:
        Sampling(**found).in_ids(None, vocab)
    except (UsageError, TypeError) as error:
        raise BadInput(str(error), file=f"{origin}/generation_config.json") from None
    return found
