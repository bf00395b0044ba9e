"""The weights of attention by themselves: what each head looks for (QK) and what it moves (OV), and how heads of two
layers fit together (Elhage et al. 2021, transformer-circuits.pub/2021/framework).

Both are matrices (C, C) of rank head_dim, kept as two thin factors; nothing here is ever (C, C), let alone (V, V).
Positions are left out: QK is what two tokens at the same place would give each other.
"""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..errors import UsageError
from ..nn import Attention, Identity, LayerNorm, RMSNorm, ShiftedRMSNorm
from ..nn.linear import matrix
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

    Key and value heads are those that each query head uses. The norm's weights in front are part of them.
    """

    layer: int
    qk: LowRank
    ov: LowRank
    scale: float


def circuits(lm: Any) -> list[Circuits]:
    """The circuits of all layers with attention of which q, k and v are linear in what the layer reads.

    Raises UsageError for a model without any: latent attention has a norm between.

    >>> import mlx_tformer as mt
    >>> found = circuits(mt.load("shakespeare"))
    >>> found[0].ov.norms.shape
    (6,)
    """
    stack = lm.model[main_stack(lm.model)]
    found = []
    for i, block in enumerate(stack.layers):
        steps = [block[name] for name in block.order]
        for step in steps:
            if isinstance(step.op, Attention):
                shared = block.get("pre")
                found.append(
                    _circuits(i, step.op, shared if isinstance(step.pre, Identity) and shared is not None else step.pre)
                )
    if not found:
        raise UsageError("circuits: the model has no attention whose q, k and v are linear in what it reads")
    return found


def _circuits(layer: int, op: Attention, norm: Any) -> Circuits:
    heads = mx.unflatten(matrix(op.qkv).astype(mx.float32) * _weight(norm), 0, (-1, op.head_dim))  # (H + 2K, D, C)
    queries = op.heads * (1 + op.gated)
    q, k, v = mx.split(heads, [queries, queries + op.kv_heads])
    q = q[::2] if op.gated else q  # every other one is a gate, which multiplies what OV moves
    k, v = (mx.repeat(x, op.heads // op.kv_heads, axis=0) for x in (k, v))  # (H, D, C)
    out = mx.unflatten(matrix(op.out).astype(mx.float32), 1, (op.heads, -1)).transpose(1, 2, 0)  # (H, D, C)
    return Circuits(layer, LowRank(q.swapaxes(1, 2), k), LowRank(v.swapaxes(1, 2), out), op.scale)


def _weight(norm: Any) -> mx.array:
    """What a norm multiplies each feature with."""
    if isinstance(norm, ShiftedRMSNorm):
        return 1 + norm.weight.astype(mx.float32)
    if isinstance(norm, LayerNorm | RMSNorm) and "weight" in norm:
        return norm.weight.astype(mx.float32)
    return mx.array(1.0)


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
