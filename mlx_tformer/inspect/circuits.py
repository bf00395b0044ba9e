"""The weights of attention by themselves: what each head looks for (QK) and what it moves (OV), and how heads of two
layers fit together (Elhage et al. 2021, transformer-circuits.pub/2021/framework).

Both are matrices (C, C) of rank head_dim, kept as two thin factors; nothing here is ever (C, C), let alone (V, V).
Positions are left out: QK is what two tokens at the same place would give each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import Attention, LatentAttention, Parallel, Residual, Scaled
from ..nn.block import Norm
from ..nn.linear import matrix
from ..nn.norm import AllHeads, EachHead, Identity, LayerNorm, RMSNorm, ShiftedRMSNorm, UnitRMSNorm
from .sites import main_stack


@dataclass(frozen=True)
class LowRank:
    """Matrices left @ right for each head: left (H, C, D), right (H, D, C)."""

    left: mx.array
    right: mx.array

    @property
    def norms(self) -> mx.array:
        """The Frobenius norm of each, (H,)."""
        small = (self.left.swapaxes(1, 2) @ self.left) * (self.right @ self.right.swapaxes(1, 2))
        return mx.sqrt(mx.maximum(small.sum(axis=(1, 2)), 0))

    @property
    def singular_values(self) -> mx.array:
        """The D singular values of each that may not be zero, (H, D), largest first."""
        _, r_left = mx.linalg.qr(self.left, stream=mx.cpu)
        _, r_right = mx.linalg.qr(self.right.swapaxes(1, 2), stream=mx.cpu)
        return cast(mx.array, mx.linalg.svd(r_left @ r_right.swapaxes(1, 2), compute_uv=False, stream=mx.cpu))

    @property
    def trace(self) -> mx.array:
        """The trace of each, the sum of its eigenvalues, (H,): positive where a head copies."""
        return (self.left.swapaxes(1, 2) * self.right).sum(axis=(1, 2))

    def of(self, head: int) -> "LowRank":
        """That of one head."""
        return LowRank(self.left[head : head + 1], self.right[head : head + 1])


@dataclass(frozen=True)
class Circuits:
    """The circuits of one layer. A query x and a key y score x qk y · scale; a head that looks at y adds y ov.

    Key and value heads are those that each query head uses. Norms in front, on q and k, and on what the heads say are
    part of them with their weights and the mean that a LayerNorm takes away, but without the size that they divide by,
    which is not linear.
    """

    layer: int
    qk: LowRank
    ov: LowRank
    scale: float


def circuits(lm: Any) -> list[Circuits]:
    """The circuits of all layers with attention.

    Of latent attention QK is that of the features without a position: the rotary key is not made of the latent, whose
    norm weighs the others against it for each token anew. Raises UsageError for a model without attention of which q, k
    and v are linear in what the layer reads, but for the sizes by which norms divide.

    >>> import mlx_tformer as mt
    >>> found = circuits(mt.load("shakespeare"))
    >>> found[0].ov.norms.shape
    (6,)
    """
    found = []
    for i, block in enumerate(lm.model[main_stack(lm.model)].layers):
        shared = [block.pre] if isinstance(block, Parallel) else []
        found += [
            _circuits(i, step, [*shared, step.pre])
            for step in block.steps
            if isinstance(step.op, Attention | LatentAttention)
        ]
    if not found:
        raise UsageError("circuits: the model has no attention whose q, k and v are linear in what it reads")
    return found


def _circuits(layer: int, step: Residual, norms: Sequence[Norm]) -> Circuits:
    op = step.op
    assert isinstance(op, Attention | LatentAttention)
    q, k, v = _heads(op, norms) if isinstance(op, Attention) else _latent_heads(op, norms)  # (H, D, C)
    out = mx.unflatten(matrix(op.out).astype(mx.float32), 1, (op.heads, -1)).transpose(1, 2, 0)  # (H, D, C)
    said = step.scale * _after(step.post, out)
    return Circuits(layer, LowRank(q.swapaxes(1, 2), k), LowRank(v.swapaxes(1, 2), said), op.scale)


def _heads(op: Attention, norms: Sequence[Norm]) -> tuple[mx.array, mx.array, mx.array]:
    rows = _behind(norms, matrix(op.qkv).astype(mx.float32))
    heads = mx.unflatten(rows, 0, (-1, op.head_dim)).transpose(2, 0, 1)  # (C, H + 2K, D)
    queries = op.heads * (1 + op.gated)
    q, k, v = mx.split(heads, [queries, queries + op.kv_heads], axis=1)
    q = q[:, ::2] if op.gated else q  # every other one is a gate, which multiplies what OV moves
    q, k = (op.position.rotate(x[:, :, None], 0, 1)[:, :, 0] for x in (_normed(op.q_norm, q), _normed(op.k_norm, k)))
    k, v = (mx.repeat(x, op.heads // op.kv_heads, axis=1) for x in (k, v))
    return q.transpose(1, 2, 0), k.transpose(1, 2, 0), v.transpose(1, 2, 0)


def _latent_heads(op: LatentAttention, norms: Sequence[Norm]) -> tuple[mx.array, mx.array, mx.array]:
    rows = _behind(norms, matrix(op.into).astype(mx.float32))
    q, latent, _ = mx.split(rows, [-op.rank - op.rotary, -op.rotary])
    if op.q_rank is not None:
        q = matrix(op.q_up).astype(mx.float32) @ _after(op.q_norm, q.T).T
    q = mx.unflatten(q, 0, (op.heads, -1))[:, : op.plain]
    made = op.kv_up.astype(mx.float32) @ _after(op.kv_norm, latent.T).T  # (H, plain + value, C)
    k, v = mx.split(made, [op.plain], axis=1)
    return q, k, v


def _behind(norms: Sequence[Norm], rows: mx.array) -> mx.array:
    """Rows (..., C) that read what norms give, as rows that read what the first of these gets."""
    for norm in reversed(norms):
        weight, centred = _linear(norm)
        rows = rows * weight
        rows = rows - rows.mean(axis=-1, keepdims=True) if centred else rows
    return rows


def _after(norm: Norm, x: mx.array) -> mx.array:
    """What a norm makes of x (..., C), but for the size by which it divides."""
    weight, centred = _linear(norm)
    return (x - x.mean(axis=-1, keepdims=True) if centred else x) * weight


def _normed(norm: Norm, heads: mx.array) -> mx.array:
    """The same of heads (C, H, D), of each or of all together."""
    return (
        _after(norm.norm, heads.flatten(1)).reshape(heads.shape) if isinstance(norm, AllHeads) else _after(norm, heads)
    )


def _linear(norm: Norm) -> tuple[mx.array, bool]:
    """What a norm multiplies each feature with, and whether it takes their mean away before."""
    if isinstance(norm, ShiftedRMSNorm):
        return 1 + norm.weight.astype(mx.float32), False
    if isinstance(norm, Scaled):
        return mx.array(norm.factor), False
    if not isinstance(norm, Identity | RMSNorm | UnitRMSNorm | LayerNorm | EachHead):
        raise UsageError(f"circuits cannot look through a {type(norm).__name__}")
    weight = norm.weight.astype(mx.float32) if "weight" in norm else mx.ones((1,))
    return weight, isinstance(norm, LayerNorm | EachHead)


def composition(earlier: Circuits, later: Circuits) -> dict[str, mx.array]:
    """How much heads of a later layer read what heads of an earlier one wrote: for "q", "k" and "v" an array (H of the
    earlier layer, H of the later one) of ‖product‖ / (‖one‖ · ‖other‖), 0 to 1 (Elhage et al. 2021).

    Raises UsageError where the layers are not in order.
    """
    if not earlier.layer < later.layer:
        raise UsageError(f"composition: found layers {earlier.layer} and {later.layer}, expected an earlier one first")
    wrote, qk = earlier.ov, later.qk
    transposed = LowRank(qk.right.swapaxes(1, 2), qk.left.swapaxes(1, 2))
    return {"q": _composed(wrote, qk), "k": _composed(wrote, transposed), "v": _composed(wrote, later.ov)}


def _composed(first: LowRank, second: LowRank) -> mx.array:
    """‖A B‖ / (‖A‖ ‖B‖) of all pairs, (H, H'), from products of size D alone."""
    between = first.right[:, None] @ second.left[None]  # (H, 1, D, C) @ (1, H', C, D) -> (H, H', D, D)
    ends = first.left.swapaxes(1, 2) @ first.left, second.right @ second.right.swapaxes(1, 2)  # (H, D, D) each
    squared = ((ends[0][:, None] @ between) * (between @ ends[1][None])).sum(axis=(2, 3))
    return mx.sqrt(mx.maximum(squared, 0)) / mx.maximum(first.norms[:, None] * second.norms[None], 1e-30)


def copying(circuit: Circuits) -> list[float]:
    """The trace of each head's OV as a share of its norm times the root of its rank: near 1 where it copies, near -1
    where it suppresses what it reads."""
    ov = circuit.ov
    share = ov.trace / mx.maximum(ov.norms * ov.left.shape[-1] ** 0.5, 1e-30)
    return cast(list[float], share.tolist())
