"""What heads do, measured on texts made for it: random tokens that are said twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import LM, Encoder, VisionEncoder, watch
from .drawn import Drawn, numbers
from .sites import main_stack, resolve, sites_of

if TYPE_CHECKING:
    from .pictures import Picture

NEAR = 4
"""Keys that are local to a query, itself among them."""


@dataclass(frozen=True)
class Probe:
    """Texts of one shape: `before` tokens in front, `length` random ones, the same again, `after` tokens behind."""

    ids: mx.array
    before: int
    length: int

    @property
    def again(self) -> range:
        """The places of the second saying."""
        start = self.before + self.length
        return range(start, start + self.length)


def _diagonal(pattern: mx.array, queries: range, back: int) -> mx.array:
    """The mean weight (H,) on the key that stands `back` tokens before each query; pattern (B, H, L, S)."""
    rows = mx.array(list(queries))
    found = pattern[:, :, rows, rows - back]
    return found.mean(axis=(0, 2))


def _later(probe: Probe) -> range:
    return range(1, probe.ids.shape[1])


SCORES: dict[str, Callable[[mx.array, Probe], mx.array]] = {
    "induction": lambda pattern, probe: _diagonal(pattern, probe.again, probe.length - 1),
    "duplicate": lambda pattern, probe: _diagonal(pattern, probe.again, probe.length),
    "previous": lambda pattern, probe: _diagonal(pattern, _later(probe), 1),
    "next": lambda pattern, probe: _diagonal(pattern, range(probe.ids.shape[1] - 1), -1),
    "current": lambda pattern, probe: _diagonal(pattern, _later(probe), 0),
    "sink": lambda pattern, probe: (pattern[:, :, 1:, 0] + 1 - pattern[:, :, 1:].sum(axis=-1)).mean(axis=(0, 2)),
    "local": lambda pattern, probe: cast(
        mx.array, sum(_diagonal(pattern, range(NEAR, probe.ids.shape[1]), back) for back in range(NEAR))
    ),
}
"""Pattern (B, H, L, S) -> mean weight (H,) of what a kind of head looks at."""


@dataclass(frozen=True)
class HeadScores(Drawn):
    """Scores by kind, each (layers, H) with row i for `layers[i]`; and the mean cross-entropy in nats of the tokens as
    they are said first and again (None for an encoder)."""

    layers: list[int]
    scores: dict[str, mx.array]
    losses: tuple[float, float] | None

    def __getitem__(self, kind: str) -> mx.array:
        if kind not in self.scores:
            raise UsageError(f"scores: found {kind!r}, expected one of {', '.join(self.scores)}")
        return self.scores[kind]

    def picture(self, kind: str | None = None) -> "Picture":
        """The scores of one kind (None: the first) by layer and head."""
        from .pictures import Grid

        kind = next(iter(self.scores)) if kind is None else kind
        heads = [str(head) for head in range(self[kind].shape[1])]
        return Grid(
            kind, numbers(self[kind]), [str(layer) for layer in self.layers], heads, down="layer", across="head"
        )

    def best(self, kind: str, count: int = 5) -> list[tuple[int, int, float]]:
        """Layer, head and score of the heads that do most of a kind."""
        rows = cast(list[list[float]], self[kind].tolist())
        every = [(layer, h, x) for layer, row in zip(self.layers, rows, strict=True) for h, x in enumerate(row)]
        return sorted(every, key=lambda one: -one[2])[:count]

    def __str__(self) -> str:
        def line(kind: str) -> str:
            return f"{kind:>10}  " + "  ".join(f"{layer}.{head} {x:.2f}" for layer, head, x in self.best(kind))

        return "\n".join(line(kind) for kind in self.scores)


def head_scores(
    lm: Any, kinds: Sequence[str] = tuple(SCORES), *, seeds: int = 4, length: int | None = None, chunk: int = 4
) -> HeadScores:
    """How much each head looks at what its kind looks at: the mean weight of its pattern there, 0 to 1.

    Texts are the model's first token, `length` random ones and the same again, one for each seed; None: 64, or as many
    as the model has positions for. induction: what came after the same token before (Olsson et al. 2022, arXiv
    2209.11895); duplicate: the same token before; previous, next, current: by place; sink: the first token, and what
    learned sinks take; local: the last 4 tokens. No pattern is kept: each layer's is measured and let go.

    Raises UsageError for kinds that there are none of, and for texts that the model has no positions for.

    >>> import mlx_tformer as mt
    >>> head_scores(mt.load("shakespeare"), ["previous"], seeds=1, length=8)["previous"].shape
    (5, 6)
    """
    if not isinstance(lm.model, LM | Encoder):
        reads = "looks at images" if isinstance(lm.model, VisionEncoder) else "reads two"
        raise UsageError(f"head_scores needs a model that reads one text, and this one {reads}")
    unknown = next((kind for kind in kinds if kind not in SCORES), None)
    if unknown is not None or not kinds or isinstance(kinds, str):
        raise UsageError(f"kinds: found {unknown or kinds!r}, expected a list out of {', '.join(SCORES)}")
    if length is None:
        length = max(NEAR, min(64, (lm.context - sum(map(len, around(lm)))) // 2))
    if seeds < 1 or length < NEAR:
        raise UsageError(f"found {seeds} seeds and a length of {length}, expected 1 or more and {NEAR} or more")
    stack = main_stack(lm.model)
    sites = {s.path: s for s in resolve(sites_of(lm.model), "attn.pattern") if s.stack == stack and s.layer is not None}
    sums: dict[str, mx.array] = {}
    losses = mx.zeros((2,))
    for start in range(0, seeds, chunk):
        some = range(start, min(start + chunk, seeds))
        probe = said_twice(lm, some, length)
        told = _measured(lm, probe, kinds, set(sites))
        sums = {path: sums.get(path, 0.0) + told[0][path] * len(some) for path in sites if path in told[0]}
        losses = losses + told[1] * len(some)
    layers = [cast(int, sites[path].layer) for path in sums]
    table = mx.stack(list(sums.values()), axis=1) / seeds  # (kinds, layers, H)
    first, again = cast(list[float], (losses / seeds).tolist())
    return HeadScores(
        layers, {kind: table[i] for i, kind in enumerate(kinds)}, (first, again) if stack == "decoder" else None
    )


def said_twice(lm: Any, seeds: Sequence[int], length: int) -> Probe:
    """Random tokens twice, (seeds, L), with the tokens that the model wants around a text."""
    before, after = around(lm)
    ids = mx.stack([mx.random.randint(0, lm.vocab, (length,), key=mx.random.key(seed)) for seed in seeds])
    ends = [mx.broadcast_to(mx.array(part, dtype=mx.int32), (len(seeds), len(part))) for part in (before, after)]
    whole = mx.concatenate([ends[0], ids, ids, ends[1]], axis=1)
    if whole.shape[1] > lm.context:
        raise UsageError(f"length: found {length}, which makes {whole.shape[1]} tokens; the model reads {lm.context}")
    return Probe(whole, len(before), length)


def around(lm: Any) -> tuple[list[int], list[int]]:
    """The ids in front of a text and behind it: those of the tokenizer, or the model's first token."""
    if lm.tokenizer is not None:
        ids = lm.tokenizer.encode("")
        if ids:
            return ids[:1], ids[1:]
        if lm.tokenizer.bos_id is not None:
            return [lm.tokenizer.bos_id], []
    named = lm.config.values.get("bos_token_id")
    return ([named] if isinstance(named, int) and 0 <= named < lm.vocab else [0]), []


def _measured(lm: Any, probe: Probe, kinds: Sequence[str], paths: set[str]) -> tuple[dict[str, mx.array], mx.array]:
    """Scores (kinds, H) by path, and the losses of both sayings."""
    found: dict[str, mx.array] = {}

    def see(path: str, pattern: mx.array) -> None:
        found[path] = mx.stack([SCORES[kind](pattern, probe) for kind in kinds])
        mx.eval(found[path])

    with watch(paths, see, last=True):
        out = lm(probe.ids)
    if not isinstance(lm.model, LM):
        return found, mx.zeros((2,))
    said = out[:, :-1].astype(mx.float32)
    own = mx.take_along_axis(said, probe.ids[:, 1:, None], axis=-1)[..., 0]
    loss = mx.logsumexp(said, axis=-1) - own  # (B, L - 1), of the tokens from the second on
    first, again = probe.before - 1, probe.again.start - 1
    return found, mx.stack([loss[:, max(first, 0) : again].mean(), loss[:, again:].mean()])
