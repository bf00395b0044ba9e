"""Direct logit attribution: how much each head, each MLP and the embedding add to a logit, the scale of the last norm
taken as given (Elhage et al. 2021, transformer-circuits.pub/2021/framework)."""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import LM, Identity, Parallel, Scaled
from ..nn.linear import matrix
from .frozen import Frozen, frozen
from .lens import head_of, token_id
from .sites import resolve
from .trace import Trace, check_row, trace

SITES = ("embed.out", "*.delta", "residual.out")


@dataclass(frozen=True)
class Share:
    """What one part of the model adds to a logit. kind: "embed", "head", "bias", or the name of a step ("mlp")."""

    name: str
    kind: str
    layer: int | None
    head: int | None
    value: float


@dataclass(frozen=True)
class Attribution:
    """The shares of all parts, in the order of the model. `logit` is what the model says, before a soft cap, and what
    the shares add up to."""

    shares: list[Share]
    logit: float
    notes: list[str]

    @property
    def total(self) -> float:
        """The sum of all shares."""
        return sum(share.value for share in self.shares)

    def top(self, count: int = 10, kind: str | None = None) -> list[Share]:
        """The parts that add or take most, of one kind or of all."""
        chosen = [share for share in self.shares if kind is None or share.kind == kind]
        return sorted(chosen, key=lambda share: -abs(share.value))[:count]

    def of_layer(self, layer: int) -> float:
        """What a layer adds in all."""
        return sum(share.value for share in self.shares if share.layer == layer)

    def __str__(self) -> str:
        return "\n".join(f"{share.value:+9.3f}  {share.name}" for share in self.top(20))


@dataclass
class _Part:
    """What one part of a model adds to the residual stream, (C,)."""

    name: str
    kind: str
    layer: int | None
    head: int | None
    value: mx.array


def attribution(
    t: Trace, token: str | int, *, minus: str | int | None = None, position: int = -1, row: int = 0
) -> Attribution:
    """The direct shares in the logit of `token` at a position, or in its distance from that of `minus`.

    What the trace has not read of "embed.out", "*.delta", "attn.z" and "residual.out" is read in one more run of its
    text. Raises UsageError for a model that is no decoder, a text that began before the trace, and where that run gives
    something else than the trace has, because the model was edited.
    """
    model = t.lm.model
    if not isinstance(model, LM):
        raise UsageError("attribution needs a decoder, whose logits are made of its residual stream")
    t = _complete(t)
    rows, length, _ = t["embed.out"].shape
    check_row(row, rows)
    if not -length <= position < length:
        raise UsageError(f"position: found {position}, expected one of {length}")
    parts = _parts(model, t, position % length, row)
    x = cast(mx.array, sum(part.value for part in parts))
    last = frozen(model.decoder.norm, x)
    ids = [token_id(t.lm, one) for one in (token, minus) if one is not None]
    vectors, bias = _directions(model, ids)
    direction = vectors[0] - vectors[1] if minus is not None else vectors[0]
    shares = [Share(p.name, p.kind, p.layer, p.head, _number(last.part(p.value) @ direction)) for p in parts]
    rest = bias[0] - bias[1] if minus is not None else bias[0]
    rest = rest if last.bias is None else rest + last.bias @ direction
    shares.append(Share("bias of the last norm and the head", "bias", None, None, _number(rest)))
    exact = model.decoder.norm(t[f"decoder.layers.{len(model.decoder.layers) - 1}.out"][row, position][None])[0]
    return Attribution(
        shares,
        _number(exact.astype(mx.float32) @ direction + bias[0] - (bias[1] if minus is not None else 0)),
        _notes(model),
    )


def _complete(t: Trace) -> Trace:
    """The trace, if it has all that is needed, or one of another run of its text."""
    heads = any(site.kind == "pattern" for site in t.sites)
    wanted = [*SITES, *(["attn.z"] if heads else [])]
    names = {site.name for name in wanted for site in resolve(t.sites, name) if site.layer is not None} | {"embed.out"}
    if names <= set(t.names):
        return t
    ids = t.ids
    if not t.names:
        raise UsageError("the trace has read nothing; run the model in it")
    if ids is None:
        raise UsageError("the text began before the trace; trace all of it, or read " + ", ".join(map(repr, wanted)))
    padded = {"attention_mask": mx.arange(ids.shape[1]) >= mx.array(t.left)[:, None]} if any(t.left) else {}
    with trace(t.lm, wanted) as again:
        cast(Any, t.lm)(ids, **padded)
    for name in sorted(set(t.names) & names):
        apart = mx.abs(again[name] - t[name]).max() / mx.maximum(mx.abs(t[name]).max(), 1e-9)
        if not _number(apart) < 1e-2:
            raise UsageError(f"{name} was edited in the trace; read {', '.join(map(repr, wanted))} in it as well")
    return again


def _parts(model: LM, t: Trace, position: int, row: int) -> list[_Part]:
    """Everything that adds to the residual stream at a position, as it is at the end of the last block."""
    parts = [_Part("embed", "embed", None, None, t["embed.out"][row, position].astype(mx.float32))]
    for i, block in enumerate(model.decoder.layers):
        for name in block.order:
            step, path = block[name], f"decoder.layers.{i}.{name}"
            delta = t[f"{path}.delta"][row, position].astype(mx.float32)
            if "pattern" in step.op.sites:
                parts += _heads(step, i, name, t[f"{path}.op.z"][row, :, position].astype(mx.float32), delta)
            else:
                parts.append(_Part(f"{name} {i}", name, i, None, delta))
            if not isinstance(block, Parallel) and not isinstance(step.after, Identity):
                parts = _through(frozen(step.after, cast(mx.array, sum(p.value for p in parts))), parts, i, name)
    return parts


def _heads(step: Any, layer: int, name: str, z: mx.array, delta: mx.array) -> list[_Part]:
    """What each head of an attention (z, (H, D)) adds, through the norm after it; what is left is the bias."""
    out = step.op.out
    shares = mx.unflatten(matrix(out).astype(mx.float32), 1, (z.shape[0], -1)).transpose(1, 2, 0)  # (H, D, C)
    said = (z[:, None] @ shares)[:, 0]  # (H, C)
    whole = said.sum(axis=0) + (out.bias.astype(mx.float32) if "bias" in out else 0)
    said = frozen(step.post, whole).part(said) * step.scale
    parts = [_Part(f"head {layer}.{head}", "head", layer, head, said[head]) for head in range(z.shape[0])]
    return [*parts, _Part(f"{name} {layer} bias", "bias", layer, None, delta - said.sum(axis=0))]


def _through(norm: Frozen, parts: list[_Part], layer: int, name: str) -> list[_Part]:
    """All parts after a norm that the residual stream itself goes through."""
    moved = [_Part(p.name, p.kind, p.layer, p.head, norm.part(p.value)) for p in parts]
    return moved if norm.bias is None else [*moved, _Part(f"{name} {layer} norm bias", "bias", layer, None, norm.bias)]


def _directions(model: LM, ids: list[int]) -> tuple[list[mx.array], list[mx.array]]:
    """What the hidden state is multiplied with for the logits of tokens, and what is added."""
    head = head_of(model)
    factor = model.finish.factor if isinstance(model.finish, Scaled) else 1.0
    rows = [matrix(head, slice(i, i + 1))[0].astype(mx.float32) * factor for i in ids]
    return rows, [head["bias"][i].astype(mx.float32) * factor if "bias" in head else mx.array(0.0) for i in ids]


def _notes(model: LM) -> list[str]:
    known = isinstance(model.finish, Identity | Scaled)
    return [] if known else [f"shares add up to the logit before {type(model.finish).__name__}"]


def _number(x: mx.array) -> float:
    value = x.item()
    assert isinstance(value, float)
    return value
