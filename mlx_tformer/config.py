"""What a family reads from `config.json`: checked when it is read, and every reading recorded.

Recording is what makes an unknown setting an error: when the model is built, a key that nobody read and that is not
on the list of harmless ones could change the mathematics, and `finish` refuses it by name. Dialects end here:
transformers 4 wrote `rope_theta` and `rope_scaling`, 5 writes `rope_parameters`, and a null is the same as a key
that is not there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import BadInput
from .nn import (
    Causal,
    Chunk,
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRope,
    Mask,
    Rope,
    Scaling,
    Unscaled,
    Window,
    Yarn,
)
from .settings import HARMLESS, HARMLESS_VALUES, MOST, MOST_ROTARY, ROPE_KEYS, RULES, Other


class Stored(Protocol):
    """The tensors of a checkpoint, for parts that no setting tells of."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What there is, by name."""

    def repeats(self, module: str, of: str) -> bool:
        """True if the tensors of a module are those of another one a second time."""


class Config:
    """A checkpoint's config, read by a family: `c["hidden_size"]`, `c.get("head_dim", 64)`, `c.rope(64)`.

    >>> c = Config({"model_type": "llama", "hidden_size": -64, "colour": "red", "dtype": None})
    >>> c["hidden_size"]
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: config.json: hidden_size: found -64, expected a whole number from 1 to 16777216
    >>> c.finish()
    Traceback (most recent call last):
    mlx_tformer.errors.BadInput: config.json: colour: found 'red', a setting that llama does not know
    """

    def __init__(self, values: dict[str, Any], file: str = "config.json", stored: Stored | None = None):
        self.values, self.file, self._stored = values, file, stored
        self._read: set[str] = set()
        self.used: set[str] = set()
        """The keys whose values were asked for; those that are ignored or held against one value are not among them."""
        self._absent: dict[str, Any] = {}

    def taking(self, absent: dict[str, Any]) -> "Config":
        """The same config, in which a key that is not there means what `absent` says; a null does not."""
        other = Config(self.values, self.file, self._stored)
        other._read, other.used, other._absent = self._read, self.used, absent
        return other

    def stores(self, *names: str, tasks: tuple[str, ...] = ()) -> bool:
        """True if the checkpoint has a tensor of one of these names; where only a config is there, if it was made for
        one of `tasks`."""
        if self._stored is None or not self._stored.tensors:
            return self.made_for(*tasks)
        return any(name in self._stored.tensors for name in names)

    def made_for(self, *tasks: str) -> bool:
        """True if a class saved the checkpoint whose name ends so, as "BertForTokenClassification" does."""
        named = self.values.get("architectures")
        return isinstance(named, list) and any(isinstance(name, str) and name.endswith(tasks) for name in named)

    def repeats(self, module: str, of: str) -> bool:
        """True if the checkpoint stores the weights of a module and they are those of another one; reads them."""
        return self._stored is not None and self._stored.repeats(module, of)

    @property
    def model_type(self) -> str:
        """Which family this is a config of."""
        found = self.values.get("model_type")
        if not isinstance(found, str):
            raise self.wrong("model_type", "the name of a family")
        return found

    def __getitem__(self, key: str) -> Any:
        """The value of a key that has to be there."""
        found = self.get(key)
        if found is None:
            raise BadInput(f"missing, expected {RULES[key].expected}", file=self.file, field=key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; where it is left out what the family's class takes, and else `default`."""
        name, found = self._found(key)
        if found is None:
            return default
        if not RULES[key].holds(found):
            raise self.wrong(name, RULES[key].expected)
        return found

    def _found(self, key: str) -> tuple[str, Any]:
        """The value of a key, whatever it is, and the name that it stands under."""
        self._read.add(key)
        self.used.add(key)
        absent = self._absent.get(key)
        if not isinstance(absent, Other):
            return key, self.values.get(key, absent)
        self._read.add(absent.key)
        self.used.add(absent.key)
        here, there = self.values.get(key), self.values.get(absent.key)
        if here is not None and there is not None and here != there:
            raise self.wrong(absent.key, f"{_short(here)}, which {key} says")
        if here is not None:
            return key, here
        return absent.key, absent.default if there is None else there

    def expect(self, **values: Any) -> None:
        """Refuse settings that the family has and nobody needs yet, unless they are as given or left out."""
        for key, value in values.items():
            self._read.add(key)
            if self.values.get(key) not in (None, value):
                raise self.wrong(key, f"{_short(value)}: nothing else is supported")

    def ignore(self, *keys: str) -> None:
        """Pass over settings that the family's reference does not look at either."""
        self._read |= set(keys)

    def masks(self, types: list[str]) -> list[Mask]:
        """The mask of each layer: `layer_types` if the config has them, else `types`. The size of a window that no
        layer has is not looked at."""
        self.ignore("sliding_window")
        kinds, layers = self.get("layer_types", types), len(types)
        if len(kinds) != layers:
            raise self.wrong("layer_types", f"{layers} entries, one for each layer")
        if "linear_attention" in kinds:
            raise self.wrong("layer_types", "kinds of attention with a mask")
        return [self._mask(kind) for kind in kinds]

    def head_dim(self, dim: str, heads: str) -> int:
        """Features of a head where heads share those of the model."""
        if self[dim] % self[heads]:
            raise self.wrong(heads, f"a divisor of {dim} ({self[dim]})")
        features: int = self[dim] // self[heads]
        return features

    @property
    def labels(self) -> list[str]:
        """What a classifier tells apart, in the order of its logits: `id2label`, or `num_labels` (2) without names.

        Raises BadInput for names that are no texts, or whose numbers do not count from 0.
        """
        named = self.values.get("id2label")
        self.ignore("num_labels", "_num_labels")
        if named is None:
            return [f"LABEL_{i}" for i in range(self.get("num_labels", 2))]
        numbers = [str(i) for i in range(len(named))] if isinstance(named, dict) else []
        if not numbers or set(map(str, named)) != set(numbers) or not all(isinstance(n, str) for n in named.values()):
            raise self.wrong("id2label", "an object with a name for each number from 0 on")
        by_number = {str(number): name for number, name in named.items()}
        return [by_number[number] for number in numbers]

    def chosen(self, experts: int) -> int:
        """How many of so many experts a token goes through."""
        top: int = self["num_experts_per_tok"]
        if top > experts:
            raise self.wrong("num_experts_per_tok", f"at most {experts}, the number of experts")
        return top

    def within(self, key: str) -> "Config":
        """The settings that lie in an object of their own under `key`."""
        return Config(self.get(key, {}), f"{self.file}: {key}")

    def has_rope_table(self, layer_type: str) -> bool:
        """True if one kind of layer has rotary settings of its own."""
        table = self.values.get("rope_parameters") or self.values.get("rope_scaling")
        return isinstance(table, dict) and layer_type in table

    def _mask(self, kind: str) -> Mask:
        if kind == "sliding_attention":
            return Causal() & Window(self["sliding_window"])
        return Causal() & Chunk(self["attention_chunk_size"]) if kind == "chunked_attention" else Causal()

    def wrong(self, key: str, expected: str) -> BadInput:
        """The error for a value that is not as expected."""
        absent = self._absent.get(key)
        key = absent.key if isinstance(absent, Other) and absent.key in self.values else key
        if key not in self.values:
            return BadInput(f"missing, expected {expected}", file=self.file, field=key)
        return BadInput(f"found {_short(self.values[key])}, expected {expected}", file=self.file, field=key)

    def finish(self) -> None:
        """Raise BadInput for the settings that nobody read and that could matter."""
        passed = self._read | HARMLESS | {k for k, v in HARMLESS_VALUES.items() if self.values.get(k) is v}
        left = {k: v for k, v in self.values.items() if k not in passed and v is not None}
        if not left:
            return
        first, *others = left
        more = f" (and {', '.join(others)})" if others else ""
        problem = f"found {_short(left[first])}, a setting that {self._who} does not know{more}"
        raise BadInput(problem, file=self.file, field=first)

    @property
    def _who(self) -> str:
        """The family as messages name it."""
        return str(self.values.get("model_type") or "the family")

    def rope(
        self, head_dim: int, *, layer_type: str | None = None, interleaved: bool = False, theta: str = "rope_theta"
    ) -> Rope:
        """The rotary position that the config asks for, from either dialect; `layer_type` picks one where there are
        several. `theta` is the key beside the table that holds where it does not. Heads turn in part only in families
        whose ABSENT has a `partial_rotary_factor`: the references of the others do not look at it."""
        table = self._rope_table(layer_type, theta)
        dims = int(head_dim * table.get("partial_rotary_factor", 1.0))
        if dims < 1 or (dims % 2 and dims == head_dim):
            raise BadInput(f"found {dims} rotary features, expected an even number", file=self.file, field="head_dim")
        if dims > MOST_ROTARY:
            problem = f"found {dims} rotary features, expected at most {MOST_ROTARY}"
            raise BadInput(problem, file=self.file, field="head_dim")
        rope = Rope(dims, table.get("rope_theta", 10000.0), self._scaling(table, dims), interleaved=interleaved)
        if not _turns(rope):
            problem = f"found {_short(table)}, which gives no usable frequencies for {dims} features"
            raise BadInput(problem, file=self.file, field=self.rope_field)
        return rope

    def _rope_table(self, layer_type: str | None, theta: str) -> dict[str, Any]:
        """What is said about rotary positions, wherever it stands, in the words of transformers 5."""
        self._read |= {"rope_parameters", "rope_scaling"}
        new, old = self.values.get("rope_parameters"), self.values.get("rope_scaling")
        if new and old and new != old:
            raise BadInput("differs from rope_parameters; expected one of them", file=self.file, field="rope_scaling")
        self.rope_field = "rope_parameters" if new else "rope_scaling"
        table = new or old or self._absent.get("rope_parameters", {})
        if isinstance(table, dict) and layer_type in table:
            table = table[layer_type] or {}
        if not isinstance(table, dict):
            raise self.wrong(self.rope_field, "an object")
        beside = {"rope_theta": self._found(theta), "partial_rotary_factor": self._found("partial_rotary_factor")}
        for key, (name, value) in beside.items():
            if value is not None and table.get(key) is None:
                self._check_rope(key, name, value)
        inside = {key: value for key, value in table.items() if value is not None}
        for key, value in inside.items():
            if key not in ("rope_type", "type"):
                self._check_rope(key, f"{self.rope_field}.{key}", value)
        return {key: value for key, (_, value) in beside.items() if value is not None} | inside

    def _check_rope(self, key: str, where: str, value: object) -> None:
        rule = ROPE_KEYS.get(key)
        if rule is None:
            raise BadInput(f"found {_short(value)}, a setting that is not known", file=self.file, field=where)
        if not rule.holds(value):
            raise BadInput(f"found {_short(value)}, expected {rule.expected}", file=self.file, field=where)
        if key == "partial_rotary_factor" and value != 1 and key not in self._absent:
            problem = f"found {_short(value)}, expected 1: {self._who} turns whole heads"
            raise BadInput(problem, file=self.file, field=where)

    def _scaling(self, table: dict[str, Any], dims: int) -> Scaling:
        kind = table.get("rope_type", table.get("type", "default"))
        if not isinstance(kind, str) or kind not in SCALINGS:
            field, expected = f"{self.rope_field}.rope_type", f"one of {', '.join(SCALINGS)}"
            raise BadInput(f"found {_short(kind)}, expected {expected}", file=self.file, field=field)
        return SCALINGS[kind](RopeTable(self, table, dims))


@dataclass(frozen=True)
class RopeTable:
    """The rotary settings of one layer type; keys that a scaling does not use are refused."""

    config: Config
    table: dict[str, Any]
    dims: int

    def take(self, *required: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
        """The values of these keys, those that are there; raises BadInput for a missing or a superfluous one."""
        around = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        for key in required:
            if key not in self.table:
                raise BadInput("missing", file=self.config.file, field=f"{self.config.rope_field}.{key}")
        for key in [key for key in self.table if key not in around | {*required, *optional}]:
            kind = self.table.get("rope_type", self.table.get("type", "default"))
            problem = f"found {_short(self.table[key])}, a setting that rope type {kind} does not have"
            raise BadInput(problem, file=self.config.file, field=f"{self.config.rope_field}.{key}")
        return {key: self.table[key] for key in (*required, *optional) if key in self.table}

    @property
    def trained(self) -> int:
        """The trained length: beside the table (Phi-3), in it, or else the whole length."""
        c = self.config
        beside = c.get("original_max_position_embeddings")
        inside = self.table.get("original_max_position_embeddings")
        return beside or inside or c["max_position_embeddings"]


def _unscaled(t: RopeTable) -> Scaling:
    # Some checkpoints repeat the trained length, which changes nothing without a scaling.
    t.take(optional=("original_max_position_embeddings",))
    return Unscaled()


def _linear(t: RopeTable) -> Scaling:
    return LinearScaling(**t.take("factor"))


def _dynamic(t: RopeTable) -> Scaling:
    found = t.take("factor", optional=("original_max_position_embeddings",))
    return DynamicNTK(found["factor"], t.config["max_position_embeddings"])


def _yarn(t: RopeTable) -> Scaling:
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
    found = t.take("factor", optional=("original_max_position_embeddings", *optional))
    named = {"beta_fast": "fast", "beta_slow": "slow"}
    return Yarn(found["factor"], t.trained, **{named.get(k, k): found[k] for k in optional if k in found})


def _llama3(t: RopeTable) -> Scaling:
    found = t.take("factor", "low_freq_factor", "high_freq_factor", optional=("original_max_position_embeddings",))
    low, high = found["low_freq_factor"], found["high_freq_factor"]
    if high < low:
        problem = f"found {_short(high)}, expected low_freq_factor ({_short(low)}) or more"
        raise BadInput(problem, file=t.config.file, field=f"{t.config.rope_field}.high_freq_factor")
    return Llama3(found["factor"], low, high, t.trained)


def _longrope(t: RopeTable) -> Scaling:
    found = t.take(
        "short_factor", "long_factor", optional=("factor", "attention_factor", "original_max_position_embeddings")
    )
    pairs = (t.dims + 1) // 2  # of an odd number the last turns with one that is not counted
    for key in ("short_factor", "long_factor"):
        if len(found[key]) != pairs:
            problem = f"found {len(found[key])} numbers, expected {pairs}: one for each pair of rotary features"
            raise BadInput(problem, file=t.config.file, field=f"{t.config.rope_field}.{key}")
    factor = found.get("factor", t.config["max_position_embeddings"] / t.trained)
    short, long = tuple(found["short_factor"]), tuple(found["long_factor"])
    return LongRope(short, long, t.trained, factor, found.get("attention_factor"))


SCALINGS: dict[str, Callable[[RopeTable], Scaling]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
}
"""How each `rope_type` is read. `su` is what Phi-3's first configs called longrope."""


def _turns(rope: Rope) -> bool:
    """True if the settings give frequencies that float32 can hold, for short texts and for long ones."""
    try:
        found = [f for n in (1, MOST) for f in rope.scaling.frequencies(rope.dims, rope.theta, rope.regime(n))]
        return all(1e-37 < f < 1e37 for f in found) and math.isfinite(rope.scaling.amplitude)
    except ArithmeticError:
        return False


def _short(value: object) -> str:
    """A value as a message shows it: never longer than a line can bear."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
