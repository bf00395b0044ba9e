"""Llama 4, the language part: chunked layers that turn, full ones that do not; experts in some layers, one for each
token."""

import mlx.core as mx

from ..config import Config
from ..names import Moved, Names, Transposed, first, joined
from ..nn import LM, Attention, Experts, GatedMlp, Mixture, Position, Rope, Router, UnitRMSNorm
from ..nn.position import places
from ..nn.tap import Module, tap
from ..settings import ROTARY
from . import llama

ABSENT = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "no_rope_layer_interval": 4,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_qk_norm": True,
}


class NormedRope(Rope):
    """Rotary positions, and a norm without weights after them."""

    def __init__(self, rope: Rope, eps: float):
        super().__init__(rope.dims, rope.theta, rope.scaling, interleaved=rope.interleaved)
        self.unit = UnitRMSNorm(eps)

    def turn(self, q: mx.array, k: mx.array, offset: int | mx.array, context: int) -> tuple[mx.array, mx.array]:
        q, k = super().turn(q, k, offset, context)
        return self.unit(q), self.unit(k)


class Tempered(Position):
    """No positions, but queries that grow with the length of the text (arXiv 2501.19399)."""

    def __init__(self, scale: float, floor: float):
        super().__init__()
        self.scale, self.floor = scale, floor

    def turn(self, q: mx.array, k: mx.array, offset: int | mx.array, context: int) -> tuple[mx.array, mx.array]:
        at = mx.maximum(places(offset, q.shape[2]), 0).astype(mx.float32)
        at = mx.expand_dims(at, -1) if at.ndim == 1 else at[:, None, :, None]  # (L, 1) or (B, 1, L, 1)
        factor = mx.log1p(mx.floor((at + 1) / self.floor)) * self.scale + 1
        return q * factor.astype(q.dtype), k


class WeighedBefore(Mixture):
    """Experts whose input, not output, is multiplied by the weight."""

    def routed(self, x: mx.array, weights: mx.array, chosen: mx.array) -> mx.array:
        weighed = x[:, None] * weights[..., None].astype(x.dtype)  # (N, top, C)
        return tap(self, "said", self.experts(weighed, chosen)).sum(axis=1)


def model(c: Config) -> LM:
    dim, act, eps, layers = c["hidden_size"], c.get("hidden_act", "silu"), c["rms_norm_eps"], c["num_hidden_layers"]
    heads, kv_heads, head_dim = llama.head_sizes(c)
    bias, count, step = c.get("attention_bias", False), c["num_local_experts"], c["interleave_moe_layer_step"]
    every, sparse = c["no_rope_layer_interval"], c.get("moe_layers", list(range(step - 1, layers, step)))
    turning = c.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(turning) != layers:
        raise c.wrong("no_rope_layers", f"{layers} entries, one for each layer")
    chunked = c.get("attention_chunk_size") is not None
    masks = c.masks(["chunked_attention" if chunked and turns else "full_attention" for turns in turning])
    # Not all of these are needed where all layers are alike.
    c.ignore("intermediate_size", "intermediate_size_mlp", "num_experts_per_tok", "use_qk_norm", *ROTARY)
    c.ignore("router_jitter_noise", "for_llm_compressor", "attn_temperature_tuning", "attn_scale", "floor_scale")

    def position(layer: int) -> Position:
        if turning[layer]:
            rope = c.rope(head_dim, interleaved=True)
            return NormedRope(rope, eps) if c["use_qk_norm"] else rope
        return Tempered(c["attn_scale"], c["floor_scale"]) if c["attn_temperature_tuning"] else Position()

    def attention(layer: int) -> Attention:
        return Attention(dim, heads, kv_heads, head_dim, bias=bias, position=position(layer), mask=masks[layer])

    def mlp(layer: int) -> Module:
        if layer not in sparse:
            return GatedMlp(dim, c["intermediate_size_mlp"], act)
        router = Router(dim, count, c.chosen(count), score="none", after="sigmoid")
        hidden = c["intermediate_size"]
        return WeighedBefore(router, Experts(dim, hidden, count, act=act), shared=GatedMlp(dim, hidden, act))

    return llama.decoder(c, attention, mlp_of=mlp)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}.feed_forward", "decoder.layers.{}.mlp.op"
    one = f"{theirs}.shared_expert"
    stored = (Transposed(stacked=True),)
    own: Names = (
        joined(f"{ours}.gate_up", {f"{theirs}.gate_proj": 1, f"{theirs}.up_proj": 1})
        | joined(f"{ours}.shared.gate_up", {f"{one}.gate_proj": 1, f"{one}.up_proj": 1})
        | {
            f"{theirs}.down_proj": f"{ours}.down",
            f"{theirs}.router": f"{ours}.router",
            f"{one}.down_proj": f"{ours}.shared.down",
            f"{theirs}.experts.gate_up_proj": Moved(f"{ours}.experts.gate_up.weight", stored),
            f"{theirs}.experts.down_proj": Moved(f"{ours}.experts.down.weight", stored),
        }
    )
    return first(own, llama.names(c))
