"""What was read once and need not be read again: kept between generations, and in files."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadInput, InputOutputError, UsageError
from ..nn import WHOLE, Cache, Keeping
from ..nn.cache import State

if TYPE_CHECKING:
    from ..lm import LanguageModel

LAYOUT = "1"
"""Of the file; another one is refused."""
SAMPLES = 64
"""Values of each weight that the fingerprint looks at."""
Stored = dict[str, mx.array | int]


class PromptCache:
    """The ids of a text, and a cache that has read them.

    A generation that is given one reads only what differs from that text, and leaves its own text in it. Of a layer
    with a window, and of a state space, the end cannot always be forgotten: then everything is read again.

    >>> import mlx_tformer as mt
    >>> lm, memory = mt.load("shakespeare"), PromptCache()
    >>> for text in ("ROMEO: But soft,", "ROMEO: But soft, what light"):
    ...     generation = lm.generate(text, max_tokens=1, memory=memory)
    ...     _ = list(generation)
    >>> 0 < generation.stats.known_tokens < generation.stats.prompt_tokens
    True
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Cache | None = None

    def matching(self, lm: "LanguageModel", ids: Sequence[int], how: Keeping = WHOLE) -> Cache | None:
        """The cache, trimmed to what `ids` begin with, short of the last of them; None where nothing can be used.

        Whoever takes it gives it back through `learn`; in between nothing is remembered.
        """
        cache, known = self.cache, self.ids
        self.cache, self.ids = None, []
        if cache is None or cache.how != how:
            return None
        if any(p.regime(len(ids)) != p.regime(cache.context) for p in lm.model.scaled_positions()):
            return None
        common = common_length(known, ids[:-1])
        with suppress(UsageError):
            cache.trim(len(known) - common)
            return cache if common else None
        return None

    def learn(self, ids: Sequence[int], cache: Cache | None) -> None:
        """Remember `cache`, which has read `ids` as far as it goes; None: nothing."""
        self.ids, self.cache = [], None
        lengths = set() if cache is None else {state.length for state in cache.states.values()}
        if cache is None or len(lengths) != 1:
            return
        beyond = max(lengths.pop() - len(ids), 0)
        with suppress(UsageError):
            cache.trim(beyond)
            self.ids, self.cache = list(ids[: cache.length]), cache

    def save(self, file: str | Path, lm: "LanguageModel") -> None:
        """Write it as safetensors, with a fingerprint of the model; the file is there whole or not at all.

        Raises UsageError if nothing is remembered, InputOutputError if the file cannot be written.
        """
        if self.cache is None:
            raise UsageError("prompt cache: there is nothing to save; generate first")
        arrays: dict[str, mx.array] = {"ids": mx.array(self.ids, dtype=mx.int32)}
        numbers: dict[str, dict[str, int]] = {}
        for path, state in self.cache.states.items():
            for name, value in state.stored().items():
                if isinstance(value, mx.array):
                    arrays[f"{path}|{name}"] = mx.contiguous(value)
                else:
                    numbers.setdefault(path, {})[name] = value
        about = {
            "layout": LAYOUT,
            "fingerprint": fingerprint(lm),
            "keeping": json.dumps(asdict(self.cache.how)),
            "context": str(self.cache.context),
            "numbers": json.dumps(numbers),
        }
        _write(Path(file), arrays, {"format": "mlx_tformer prompt cache", **about})

    @classmethod
    def load(cls, file: str | Path, lm: "LanguageModel", how: Keeping = WHOLE) -> "PromptCache":
        """Read a file that `save` wrote; raises BadInput for one that is broken, of another model, or of other
        settings."""
        from ..checkpoint.safetensors_file import SafetensorsFile

        path = Path(file)
        source = SafetensorsFile(path)
        about = source.metadata
        _expect(path, "layout", about.get("layout"), LAYOUT)
        _expect(path, "fingerprint", about.get("fingerprint"), fingerprint(lm), "that of another model")
        _expect(path, "settings", _parsed(path, about, "keeping"), asdict(how))
        found = {name: source.read(name) for name in source.tensors}
        made = cls()
        made.ids = _ids(path, found.pop("ids", None), lm.vocab)
        context = about.get("context", "")
        if not context.isdecimal():
            raise BadInput(f"found {context!r}, expected a whole number", file=path, field="context")
        made.cache = lm.new_cache(int(context), how)
        _restore(path, made, lm, found, _parsed(path, about, "numbers"))
        return made


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two texts have in common from the beginning.

    >>> common_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def fingerprint(lm: "LanguageModel") -> str:
    """A digest of what a cache depends on: the config, and shape, dtype and some values of each weight."""
    flat: Any = tree_flatten(lm.model.parameters())
    digest = hashlib.sha256(json.dumps(dict(lm.config.values), sort_keys=True, default=str).encode())
    for path, array in sorted(flat, key=lambda pair: pair[0]):
        digest.update(f"{path} {array.shape} {array.dtype}".encode())
        if not array.size:
            continue
        places = mx.array([i * (array.size - 1) // max(SAMPLES - 1, 1) for i in range(SAMPLES)])
        values = array.flatten()[places]
        exact = values.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else values.astype(mx.int64)
        digest.update(bytes(memoryview(exact)))
    return digest.hexdigest()


def _write(file: Path, arrays: dict[str, mx.array], about: dict[str, str]) -> None:
    # The name must end so, or MLX adds it.
    partial = file.with_name(f".{file.name}.{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(partial), arrays, about)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(file)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputOutputError(f"{file}: cannot be written: {reason}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _expect(file: Path, field: str, found: Any, wanted: Any, words: str | None = None) -> None:
    if found != wanted:
        said = words if words is not None and found is not None else found
        expected = "that of this model" if words is not None else wanted
        raise BadInput(
            f"found {said}, expected {expected}; leave the prompt cache out, or remove it", file=file, field=field
        )


def _parsed(file: Path, about: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(about.get(name, ""))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInput("found no object", file=file, field=name)
    return found


def _ids(file: Path, found: mx.array | None, vocab: int) -> list[int]:
    if found is None or found.ndim != 1 or found.dtype != mx.int32 or not found.size:
        raise BadInput("found no list of ids", file=file, field="ids")
    ids = cast(list[int], found.tolist())
    if not all(0 <= i < vocab for i in ids):
        raise BadInput(f"found ids that the model does not have, expected 0 to {vocab - 1}", file=file, field="ids")
    return ids


def _restore(
    file: Path, made: PromptCache, lm: "LanguageModel", found: Mapping[str, mx.array], numbers: Mapping[str, Any]
) -> None:
    """Give each state what is stored of it, if that fits what the model would have made."""
    assert made.cache is not None
    by_path: dict[str, Stored] = {path: {} for path in made.cache.states}
    for key, array in found.items():
        path, _, name = key.rpartition("|")
        by_path.setdefault(path, {})[name] = array
    for path, several in numbers.items():
        if isinstance(several, dict):
            by_path.setdefault(path, {}).update(several)
    packed = any("|packed." in key for key in found)
    examples = _example(lm, replace(made.cache.how, start=0) if packed else made.cache.how)
    if by_path.keys() != examples.keys():
        raise BadInput("found the layers of another model", file=file)
    for path, state in made.cache.states.items():
        _check(file, path, state, by_path[path], examples[path], len(made.ids))
        state.restore(by_path[path])


def _example(lm: "LanguageModel", how: Keeping) -> dict[str, Stored]:
    """What the states of one token store; nothing of it is computed."""
    cache = lm.new_cache(1, how)
    lm.model(mx.array([[0]]), cache)
    return {path: state.stored() for path, state in cache.states.items()}


def _check(file: Path, path: str, state: State, found: Stored, example: Stored, length: int) -> None:
    """Raise BadInput for what no cache of this model can hold."""
    if found.keys() != example.keys():
        raise BadInput(f"found {sorted(found)}, expected {sorted(example)}", file=file, field=path)
    first = found.get("first", 0)
    for name, wanted in example.items():
        value = found[name]
        if isinstance(wanted, mx.array):
            shape = list(wanted.shape)
            if name.partition(".")[0] in ("keys", "values", "packed"):
                shape[2] = length - (first if isinstance(first, int) else 0)
            right = isinstance(value, mx.array) and value.shape == tuple(shape) and value.dtype == wanted.dtype
        else:
            most = {"length": (length, length), "first": (0, length)}.get(name, (wanted, wanted))
            right = isinstance(value, int) and most[0] <= value <= most[1]
        if not right:
            raise BadInput("found what does not fit the model or the ids", file=file, field=f"{path}|{name}")
