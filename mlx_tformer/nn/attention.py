"""Attention: many heads, grouped heads, one head; and `attend`, the one place where scores become outputs."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..errors import UsageError
from .cache import KV, State, Stateful, WindowKV
from .context import Context
from .keeping import Keeping
from .linear import matrix
from .mask import Causal, Mask, window_of
from .packed import KeptKV, PackedKV, packed_bytes
from .position import Position
from .spectator import Call, Places, slot_array, spectators
from .tap import Module, tap, wanted


class Attention(Stateful):
    """Attention of H query heads that share K key and value heads of D features (Vaswani et al. 2017; Ainslie et
    al. 2023).

    K = H is multi-head attention, K = 1 multi-query, and between the two grouped-query attention. Queries, keys and
    values come from one matrix, whose rows are all q heads, then all k heads, then all v heads. `q_norm` and
    `k_norm` work on each head before the position turns it; `mask` says who sees whom, and a window in it bounds
    what is remembered. `softcap` bounds the scores to ± its value (Gemma 2), `sinks` gives each head a learned score
    that takes part in the softmax and adds nothing (gpt-oss), `clip` bounds q, k and v (OLMo, MPT). `gated` multiplies
    what a head finds by the sigmoid of as many more features, whose rows follow those of the head's q (Qwen3-Next).

    >>> Attention(32, heads=4, kv_heads=2)(mx.zeros((1, 5, 32))).shape
    (1, 5, 32)
    """

    sites = ("q", "k", "v", "scores", "pattern", "z", "result")
    packs = True

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        position: Position | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        clip: float | None = None,
        gated: bool = False,
    ):
        super().__init__()
        self.heads, self.gated = heads, gated
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({self.kv_heads})")
        self.qkv = nn.Linear(dim, (self.heads * (1 + gated) + 2 * self.kv_heads) * self.head_dim, bias)
        self.out = nn.Linear(self.heads * self.head_dim, dim, bias if out_bias is None else out_bias)
        self.position = Position() if position is None else position
        self.q_norm = nn.Identity() if q_norm is None else q_norm
        self.k_norm = nn.Identity() if k_norm is None else k_norm
        self.mask = Causal() if mask is None else mask
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.softcap, self.clip = softcap, clip
        if sinks:
            self.sinks = mx.zeros((heads,))
        self.has_sinks = sinks

    @property
    def remembers(self) -> bool:
        return any(isinstance(part, Causal) for part in self.mask.parts)

    def new_state(self) -> State:
        window = window_of(self.mask)
        return KV() if window is None else WindowKV(window)

    def state_bytes(self, tokens: int, dtype: mx.Dtype) -> int:
        window = window_of(self.mask)
        kept = tokens if window is None else min(tokens, window)
        return 2 * self.kv_heads * self.head_dim * kept * dtype.size

    def kept_state(self, how: Keeping) -> State:
        window = window_of(self.mask)
        if how.size is not None and how.bounds(window):
            if how.keep and self.position.bias(range(1), range(1), None) is not None:
                raise UsageError(
                    "kv_keep: positions that add to the scores (ALiBi, T5) cannot skip tokens; leave it out"
                )
            return KeptKV(how.size, how.keep) if how.keep else WindowKV(how.size)
        return PackedKV(how.bits, how.start) if how.bits is not None and window is None else self.new_state()

    def kept_bytes(self, tokens: int, dtype: mx.Dtype, how: Keeping) -> int:
        window = window_of(self.mask)
        if how.size is not None and how.bounds(window):
            return self.state_bytes(min(tokens, how.size), dtype)
        if how.bits is not None and window is None and tokens > how.start:
            return 2 * tokens * packed_bytes(self.kv_heads, self.head_dim, how.bits, dtype)
        return self.state_bytes(tokens, dtype)

    def __call__(self, x: mx.array, ctx: Context | None = None) -> mx.array:
        ctx = Context.alone(x) if ctx is None else ctx
        q, k, v, gate = self._heads(self.qkv(x))
        q, k, v = (
            x if self.clip is None else mx.clip(x, -self.clip, self.clip) for x in (self.q_norm(q), self.k_norm(k), v)
        )
        q, k = self.position.turn(q, k, ctx.offset, ctx.context)
        q, state = tap(self, "q", q), ctx.state(self.path)
        if isinstance(state, KV):
            k, v = state.append(k, v)  # (B, K, S, D)
            q = state.turn(q)
        kept, at = (k, v), placed(self, ctx, state, k.shape[2])
        k, v = self._offered("k", k, state), self._offered("v", v, state)
        unchanged = k is kept[0] and v is kept[1]
        mask, bias = ctx.visible(self.mask, k.shape[2]), ctx.bias(self.position, k.shape[2])
        sinks = self.sinks if self.has_sinks else None
        z = attend(
            self,
            q,
            k,
            v,
            scale=self.scale,
            mask=mask,
            bias=bias,
            distances=self.position.distances,
            softcap=self.softcap,
            sinks=sinks,
            at=at,
            packed=state.as_keys() if isinstance(state, PackedKV) and unchanged else None,
        )
        z = state.turn_back(z) if isinstance(state, KV) else z
        return joined_heads(self, z if gate is None else z * mx.sigmoid(gate), self.out)

    def _offered(self, name: str, x: mx.array, state: State | None) -> mx.array:
        """Keys or values for watchers, turned back if the cache has turned them."""
        if not isinstance(state, KV) or not wanted(self, name):
            return tap(self, name, x)
        shown = state.turn_back(x)
        changed = tap(self, name, shown)
        return x if changed is shown else state.turn(changed)

    def _heads(self, qkv: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """(B, L, (H + 2K) * D) -> q (B, H, L, D), k and v (B, K, L, D), and the gate (B, H, L, D) if there is one"""
        heads = mx.unflatten(qkv, -1, (-1, self.head_dim)).swapaxes(1, 2)
        queries = self.heads * (1 + self.gated)
        q, k, v = mx.split(heads, [queries, queries + self.kv_heads], axis=1)
        return (q[:, ::2], k, v, q[:, 1::2]) if self.gated else (q, k, v, None)


def placed(module: Module, ctx: Context, state: State | None, keys: int) -> Places:
    """Where new tokens and keys stand. Whoever watches may learn what is not plain about the keys: in how many `bits`
    they are packed, and their `places` if some between are gone."""
    at = ctx.places(keys, state.apart if isinstance(state, KV) else 0)
    if isinstance(state, PackedKV) and state.packed and wanted(module, "bits"):
        tap(module, "bits", mx.array(state.bits))
    if not isinstance(at.keys, range) and wanted(module, "places"):
        tap(module, "places", slot_array(at.keys))
    return at


def joined_heads(module: Module, z: mx.array, out: nn.Module) -> mx.array:
    """What the heads say together, (B, H, L, D) -> (B, L, C). What each of them says, `result` (B, H, L, C), is worked
    out only for a watcher, and added up only if that changes it."""
    z = tap(module, "z", z)
    if wanted(module, "result"):
        shares = mx.unflatten(matrix(out), 1, (z.shape[1], -1)).transpose(1, 2, 0)  # (C, H * D) -> (H, D, C)
        each = z @ shares.astype(z.dtype)
        said = tap(module, "result", each)
        if said is not each:
            return said.sum(axis=1) + out["bias"] if "bias" in out else said.sum(axis=1)
    return out(z.swapaxes(1, 2).flatten(2))  # (B, L, H * D) -> (B, L, C)


def attend(
    module: Module,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    bias: mx.array | None = None,
    distances: kernels.Distances | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    at: Places | None = None,
    packed: kernels.Packed | None = None,
) -> mx.array:
    """softmax(scale · q kᵀ + bias) v over what `mask` lets be seen; q (B, H, L, D), k (B, K, S, D) and v (B, K, S, E)
    -> (B, H, L, E).

    bias: (H, L, S), added to the scores; distances: the same by distance, where it can be told so. softcap: scores
    become softcap · tanh(score / softcap). sinks: (H,), one more score in each softmax, whose weight goes nowhere. at:
    where queries and keys stand, for those who count them; None: the queries are the last tokens of the keys' text.
    packed: k and v as they are kept, for a kernel that reads them so. Fused, by MLX or by a kernel of `kernels`, unless
    somebody watches the scores or the pattern of this module, or scores are capped where no kernel of ours runs: then
    the explicit twin, which gives the same. A query that sees nothing gets zeros. The softmax is taken in float32, and
    k and v are not repeated for grouped heads.

    Whoever sees the pattern may hold it against two more taps: `values` (v) and `fused`, what the fused path gives, or
    `repeated` where there is none.
    """
    for see in spectators():
        places = Places.plain(q.shape[2], k.shape[2]) if at is None else at
        see(Call(module.path, q, k, v, scale, mask, bias, softcap, sinks, places))
    shown = wanted(module, "scores") or wanted(module, "pattern")
    if not shown and (bias is None or distances is not None):
        z = _by_kernel(q, k, v, packed, asked_of(scale, mask, distances, softcap, sinks))
        if z is not None:
            return z
    if shown or softcap is not None:
        z = _explicit(module, q * scale, k, v, mask, bias, softcap, sinks)
        if wanted(module, "fused"):
            tap(module, "values", v)
            proof = fused if softcap is None else partial(repeated, softcap=softcap)
            tap(module, "fused", proof(q, k, v, scale, mask, bias, sinks))
        return z
    return fused(q, k, v, scale, mask, bias, sinks)


def fused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | str | None,
    bias: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention without a cap by MLX's kernel, which keeps no scores; the arguments are those of `attend`."""
    added = mask
    if bias is not None:
        seen = booleans(mask, q, k)
        added = (bias if seen is None else mx.where(seen, bias, -mx.inf)).astype(q.dtype)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    z = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=added, sinks=sinks)
    return z if not isinstance(mask, mx.array) else mx.where(mask.any(axis=-1, keepdims=True), z, 0)


def asked_of(
    scale: float,
    mask: mx.array | str | None,
    distances: kernels.Distances | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> kernels.Asked:
    """What a kernel is asked for."""
    seen = mask if isinstance(mask, mx.array) else None
    sight = kernels.Sight(causal=isinstance(mask, str))
    return kernels.Asked(scale, sight, softcap, distances, seen, sinks=sinks)


def _by_kernel(
    q: mx.array, k: mx.array, v: mx.array, packed: kernels.Packed | None, asked: kernels.Asked
) -> mx.array | None:
    """Attention by a kernel of ours, if one is chosen for it."""
    if packed is not None:
        wide = mx.pad(q, [(0, 0)] * 3 + [(0, packed.width - q.shape[3])])  # whole groups, as the keys
        if kernels.chosen_for(wide, packed, asked):
            return kernels.attention(wide, packed, asked)[..., : v.shape[3]]
    keys = kernels.Plain(k, v)
    return kernels.attention(q, keys, asked) if kernels.chosen_for(q, keys, asked) else None


def repeated(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | str | None,
    bias: mx.array | None,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """Attention with a cap once more, by another way than its explicit twin, to hold that against: a copy of k and v
    for each head, a mask that is added, a sink that is a key of its own; the arguments are those of `attend`."""
    k, v = (mx.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(mx.float32) for x in (k, v))
    scores = softcap * mx.tanh(scale * (q.astype(mx.float32) @ k.swapaxes(2, 3)) / softcap)
    scores = scores if bias is None else scores + bias
    seen = booleans(mask, q, k)
    scores = scores if seen is None else scores + mx.where(seen, 0, -mx.inf)
    if sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=-1)
        v = mx.pad(v, [(0, 0), (0, 0), (0, 1), (0, 0)])
    top = mx.maximum(scores.max(axis=-1, keepdims=True), -1e30)
    weights = mx.exp(scores - top)
    return weights @ v / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)


def _explicit(
    module: Module,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | str | None,
    bias: mx.array | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention written out for scaled q, with taps on the scores (B, H, L, S) before the softmax and the pattern
    after it."""
    scores, seen = scores_of(q, k, bias, softcap), booleans(mask, q, k)
    scores = _where_seen(seen, tap(module, "scores", _where_seen(seen, scores, -mx.inf)), -mx.inf)
    shown = mx.where(scores == -mx.inf, 0, _softmax(scores, sinks))  # 0 / 0 where all keys of a row are hidden
    pattern = tap(module, "pattern", shown).astype(v.dtype)
    return (mx.unflatten(pattern, 1, (k.shape[1], -1)) @ v[:, :, None]).flatten(1, 2)


def scores_of(q: mx.array, k: mx.array, bias: mx.array | None, softcap: float | None) -> mx.array:
    """Scores (B, H, L, S) in float32 of scaled q, those of hidden keys too."""
    grouped = mx.unflatten(q, 1, (k.shape[1], -1))  # (B, K, H / K, L, D)
    scores = (grouped @ k[:, :, None].swapaxes(-1, -2)).flatten(1, 2).astype(mx.float32)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    return scores if bias is None else scores + bias


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Weights (B, H, L, S); with sinks they sum to less than one."""
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def _where_seen(seen: mx.array | None, values: mx.array, otherwise: float) -> mx.array:
    """Values where there is something to see; a row without gives 0 / 0 in a softmax, and an edit cannot show what is
    hidden."""
    return values if seen is None else mx.where(seen, values, otherwise)


def booleans(mask: mx.array | str | None, q: mx.array, k: mx.array) -> mx.array | None:
    """A mask as an array, where True is seen."""
    if not isinstance(mask, str):
        return mask
    return mx.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=mx.bool_)
