"""Do two checkpoints compute the same? What they give for one input, and their weights module by module.

One model is in memory at a time, and of the weights some rows of both.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import BadInput, Mismatch, UsageError
from ..names import summary
from ..nn import VisionEncoder
from .load import load, stored_dtype
from .open import open_source
from .outputs import Given, outputs
from .plan import Plan, Recipe, plan, shapes, unpacked
from .source import Source, Tensor

if TYPE_CHECKING:  # numpy is slow to import, and the package shall not be
    import numpy as np

EXACT, ROUNDED, QUANTIZED = 1e-8, 1e-3, 0.1
"""Limits of the mean KL divergence, in nats, or of the mean square error of what are no logits: for weights that are
stored alike, in another dtype, or packed otherwise.

The same weights give 0; four bits cost a good model some hundredths."""


@dataclass(frozen=True)
class Verification:
    """How far two checkpoints are apart."""

    a: str
    b: str
    tokens: int
    """Positions, texts or images whose outputs were compared."""
    largest_error: float
    """The largest difference between two outputs, logits or hidden states."""
    deviation: float
    """Standard deviation of the outputs of `a`, to hold the largest error against."""
    mean_kl: float
    """KL divergence of the distribution of `b`, over tokens or labels, from that of `a`, mean over the outputs, in
    nats; NaN for what are no logits."""
    top1: float
    """Share of the outputs of which both find the same number largest, as the likeliest token."""
    limit: float
    """What `distance` may be."""
    modules: dict[str, float] = field(default_factory=dict)
    """Relative error of the weights of each module, |a - b| / |a|, the worst first."""
    are_logits: bool = True
    """False for hidden states, and for the one output of a model that scores."""
    mean_square: float = 0.0
    """Square of the relative error of outputs, |a - b|² / |a|², mean over all of them."""

    @property
    def distance(self) -> float:
        """What decides: the mean KL divergence, or the mean square error where there is none."""
        return self.mean_kl if self.are_logits else self.mean_square

    @property
    def passed(self) -> bool:
        """True if the distance is within the limit; never for outputs that are not finite."""
        return self.distance <= self.limit

    @property
    def measure(self) -> str:
        """What the distance is called."""
        return "mean KL divergence in nats" if self.are_logits else "mean square of the relative error"

    def check(self) -> None:
        """Raise Mismatch, unless it passed."""
        if self.passed:
            return
        found = f"{self.measure} {self.distance:.3g}, more than {self.limit:g}"
        worst = next(((path, error) for path, error in self.modules.items() if error > 0), None)
        named = "the weights are equal" if worst is None else f"worst module {worst[0]} (relative error {worst[1]:.3g})"
        raise Mismatch(f"{self.b} does not compute what {self.a} does: {found}; {named}")

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON; what is not finite is None."""
        found = {name: _finite(value) for name, value in vars(self).items() if name != "modules"}
        return {**found, "passed": self.passed, "modules": {path: _finite(e) for path, e in self.modules.items()}}


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def verify(
    a: str | Path,
    b: str | Path,
    *,
    limit: float | None = None,
    text: str | None = None,
    ids: Sequence[int] | None = None,
    dtype: str = "float32",
    revision: str | None = None,
) -> Verification:
    """Compare two checkpoints of one model, such as a source `a` and what it was converted to, `b`.

    limit: what the mean KL divergence may be, in nats (None: `EXACT`, `ROUNDED` or `QUANTIZED`, by how the two are
    stored). text, ids: the prompt (None: the usual one, or ids from all over the vocabulary where there is no
    tokenizer); models of images get noise. Hidden states, and the output of a model with a single one, are held by
    their mean square error to the same limits. dtype: what both compute in. revision: of `a` on the hub.

    Raises UsageError for a prompt or a limit that cannot be, BadInput for checkpoints that are broken or of different
    models, and MemoryRefusal for a model that does not fit in `dtype`. `Verification.check` raises for a mismatch.
    """
    if limit is not None and not 0 <= limit < math.inf:
        raise UsageError(f"limit: found {limit}, expected a number of nats, 0 or more")
    if text is not None and ids is not None:
        raise UsageError("ids: found a text as well; give one of the two")
    sides = [_Side.of(a, revision), _Side.of(b, None)]
    _check_alike(*sides)
    given = Given(text, None if ids is None else tuple(ids))
    values, are_logits, given = _outputs(a, dtype, given, revision)
    others, _, _ = _outputs(b, dtype, given, None)
    kl, top1 = _compared(values, others)
    return Verification(
        a=str(a),
        b=str(b),
        tokens=len(values),
        largest_error=float(abs(values - others).max()),
        deviation=float(values.std()),
        are_logits=are_logits,
        mean_square=_mean_square(values, others),
        mean_kl=kl if are_logits else math.nan,
        top1=top1,
        limit=_limit(*sides) if limit is None else float(limit),
        modules=_modules(*sides),
    )


@dataclass(frozen=True)
class _Side:
    """One of the two: its files, and how our tensors are made of them."""

    source: Source
    made: Plan

    @classmethod
    def of(cls, where: str | Path, revision: str | None) -> "_Side":
        source = open_source(where, revision=revision)
        return cls(source, plan(source))

    @property
    def recipes(self) -> dict[str, Recipe]:
        """How each tensor is made, all unpacked."""
        found: dict[str, Recipe] = {}
        for name, recipe in self.made.recipes.items():
            module, _, leaf = name.rpartition(".")
            how = self.made.quantization.get(module)
            if how is None or leaf not in ("weight", "scales", "biases"):
                found[name] = recipe
            elif leaf == "weight":
                found[name] = Recipe(recipe.pieces, {piece.source: how for piece in recipe.pieces})
        return found

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, unpacked."""
        ways, wanted = self.made.quantization, shapes(self.made.model)
        packed = {f"{module}.weight": how for module, how in ways.items()}
        return {name: unpacked(Tensor(wanted[name], mx.float32), packed.get(name)).shape for name in self.recipes}

    @property
    def floats(self) -> set[mx.Dtype]:
        """The dtypes that its weights are stored in."""
        found = {tensor.dtype for tensor in self.source.tensors.values()}
        return {dtype for dtype in found if mx.issubdtype(dtype, mx.floating)} | {stored_dtype(self.source)}


def _check_alike(a: _Side, b: _Side) -> None:
    """Raise BadInput for two that are not of one model."""
    ids = [0 if isinstance(side.made.model, VisionEncoder) else side.made.model.vocab for side in (a, b)]
    if ids[0] != ids[1]:
        problem = f"knows {ids[1]} ids, and {a.source.origin} {ids[0]}: they cannot be compared"
        raise BadInput(problem, file=b.source.origin)
    wanted, found = a.sizes, b.sizes
    differ = sorted({name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)})
    if differ:
        problem = f"is another model than {a.source.origin}, with other shapes of {summary(differ)}"
        raise BadInput(problem, file=b.source.origin)


def _limit(a: _Side, b: _Side) -> float:
    """What to allow, by how the two are stored."""
    if a.made.quantization != b.made.quantization:
        return QUANTIZED
    return EXACT if a.floats == b.floats else ROUNDED


def _outputs(where: str | Path, dtype: str, given: Given, revision: str | None) -> tuple["np.ndarray", bool, Given]:
    """Outputs (N, V) in float32, whether they are logits, and what was given; the model is gone when this returns."""
    import numpy as np

    found = outputs(load(where, dtype, context=0, revision=revision), given)
    values = np.array(found.values.astype(mx.float32))
    are_logits, given = found.are_logits, found.given
    del found
    mx.clear_cache()
    return values, are_logits, given


def _mean_square(a: "np.ndarray", b: "np.ndarray") -> float:
    """|a - b|² / |a|² of all outputs together; 0 where both are zeros."""
    import numpy as np

    a, b = a.astype(np.float64), b.astype(np.float64)
    gap, size = float(np.square(a - b).sum()), float(np.square(a).sum())
    return 0.0 if gap == 0 else gap / size if size else math.inf


def _compared(a: "np.ndarray", b: "np.ndarray") -> tuple[float, float]:
    """The mean KL divergence and the share of positions with the same most likely token, of logits (L, V)."""
    import numpy as np

    divergences, same = [], []
    for x, y in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
        p, q = _log_softmax(x), _log_softmax(y)
        divergences.append(float(np.sum(np.exp(p) * (p - q))))
        same.append(float(np.argmax(x) == np.argmax(y)))
    return float(np.mean(divergences)), float(np.mean(same))


def _log_softmax(x: "np.ndarray") -> "np.ndarray":
    import numpy as np

    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def _modules(a: _Side, b: _Side) -> dict[str, float]:
    """The relative error of each module's weights, the worst first."""
    squares: dict[str, list[float]] = {}
    others = b.recipes
    for name, recipe in a.recipes.items():
        place = squares.setdefault(name.rpartition(".")[0], [0.0, 0.0, 0.0])
        for x, y in _pairs(recipe.blocks(a.source), others[name].blocks(b.source)):
            x, y = x.astype(mx.float32), y.astype(mx.float32)
            sums: Any = mx.stack([mx.square(x - y).sum(), mx.square(x).sum(), mx.square(y).sum()]).tolist()
            place[:] = [before + more for before, more in zip(place, sums, strict=True)]
            mx.clear_cache()
    errors = {path: _relative(*sums) for path, sums in squares.items()}
    return dict(sorted(errors.items(), key=lambda item: (-item[1] if item[1] == item[1] else -math.inf, item[0])))


def _relative(gap: float, a: float, b: float) -> float:
    """|a - b| / |a| from the squares; against b where a is all zeros."""
    return 0.0 if gap == 0 else math.sqrt(gap / (a or b))


def _pairs(a: Iterable[mx.array], b: Iterable[mx.array]) -> Iterator[tuple[mx.array, mx.array]]:
    """Equally long stretches of the values of two tensors of one shape, however they come in blocks."""
    xs, ys = ((block.flatten() for block in blocks if block.size) for blocks in (a, b))
    x = y = mx.zeros((0,))
    while True:
        x = x if x.size else next(xs, x)
        y = y if y.size else next(ys, y)
        size = min(x.size, y.size)
        if size == 0:
            return
        yield x[:size], y[:size]
        x, y = x[size:], y[size:]
