"""The rules of a generation config, read and checked."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import BadInput
from .rules import Started

NEUTRAL: dict[str, Any] = {
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "renormalize_logits": False,
    "watermarking_config": None,
    "dola_layers": None,
}
"""Keys that change a text and are not followed, with the values that change nothing."""


DECODERS = {key: value for key, value in NEUTRAL.items() if key != "sequence_bias"}
DECODERS |= {"num_beams": 1, "encoder_no_repeat_ngram_size": 0}
"""The same for models that continue a text; what these follow is in `settings.ALWAYS`."""


def unfollowed(settings: Mapping[str, Any]) -> list[str]:
    """A line if a generation config asks for what is not followed where a text is continued.

    >>> unfollowed({"num_beams": 3, "no_repeat_ngram_size": 3})
    ['generation_config.json asks for num_beams, which is not followed here']
    """
    asked = [key for key, neutral in DECODERS.items() if settings.get(key) not in (None, neutral)]
    verb = "is" if len(asked) == 1 else "are"
    return [f"generation_config.json asks for {', '.join(asked)}, which {verb} not followed here"] if asked else []


def rules_of(setting: Callable[[str], Any], vocab: int, file: str) -> Started:
    """The rules of an encoder-decoder's config, which `setting` looks up by key; raises BadInput for what cannot be
    followed."""
    read = Reader(setting, vocab, file)
    for key, neutral in NEUTRAL.items():
        if setting(key) not in (None, neutral):
            read.fail(key, f"found {setting(key)!r}, which is not followed here; expected {_either(neutral)}")
    start = read.ids("decoder_start_token_id", several=False) or read.ids("bos_token_id", several=False)
    if not start:
        read.fail("decoder_start_token_id", "missing, expected the id that the decoder begins with")
    first = read.ids("forced_bos_token_id", several=False)
    shortest, new = max(0, read.count("min_length") - 1), read.count("min_new_tokens")
    return Started(
        start=start[0],
        first=first[0] if first else None,
        last=read.ids("forced_eos_token_id"),
        words=read.words("bad_words_ids"),
        shortest=shortest if setting("min_new_tokens") is None else new,
        penalty=read.factor("repetition_penalty"),
        ngram=read.count("no_repeat_ngram_size"),
        source_ngram=read.count("encoder_no_repeat_ngram_size"),
        suppressed=read.ids("suppress_tokens"),
        suppressed_first=read.ids("begin_suppress_tokens"),
        decay=read.decay("exponential_decay_length_penalty"),
    )


def longest_of(setting: Callable[[str], Any], vocab: int, file: str) -> int | None:
    """Tokens that a text has at most by a config: `max_new_tokens`, or `max_length`, which counts the start; None if it
    says neither."""
    read = Reader(setting, vocab, file)
    new, whole = read.count("max_new_tokens"), read.count("max_length")
    return new or (max(1, whole - 1) if whole else None)


@dataclass(frozen=True)
class Reader:
    """Values of a config; all methods raise BadInput for one that is not what it should be."""

    setting: Callable[[str], Any]
    vocab: int
    file: str

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the error about a key."""
        raise BadInput(problem, file=self.file, field=key)

    def ids(self, key: str, *, several: bool = True) -> tuple[int, ...]:
        """One id, or a list of them."""
        found = self.setting(key)
        listed = [] if found is None else found if several and isinstance(found, list) else [found]
        return tuple(self._id(index, key) for index in listed)

    def words(self, key: str) -> tuple[tuple[int, ...], ...]:
        """Lists of ids."""
        found = self.setting(key)
        found = [] if found is None else found
        if not isinstance(found, list) or not all(isinstance(word, list) and word for word in found):
            self.fail(key, f"found {found!r}, expected lists of ids")
        return tuple(tuple(self._id(index, key) for index in word) for word in found)

    def count(self, key: str) -> int:
        """A whole number, 0 where there is none."""
        found = self.setting(key)
        if found is not None and not _whole(found):
            self.fail(key, f"found {found!r}, expected a whole number of 0 or more")
        return found or 0

    def factor(self, key: str) -> float:
        """A number above 0, 1 where there is none."""
        found = self.setting(key)
        if found is not None and not (_number(found) and found > 0):
            self.fail(key, f"found {found!r}, expected a number above 0")
        return 1.0 if found is None else float(found)

    def decay(self, key: str) -> tuple[int, float] | None:
        """A number of tokens and a factor."""
        found = self.setting(key)
        if found is None:
            return None
        if not isinstance(found, list | tuple) or len(found) != 2 or not _whole(found[0]) or not _number(found[1]):
            self.fail(key, f"found {found!r}, expected a number of tokens and a factor")
        return found[0], float(found[1])

    def _id(self, index: Any, key: str) -> int:
        if not _whole(index) or index >= self.vocab:
            self.fail(key, f"found {index!r}, expected an id from 0 to {self.vocab - 1}")
        return int(index)


def _either(neutral: Any) -> str:
    return "none" if neutral is None else f"{neutral} or none"


def _whole(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0


def _number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
