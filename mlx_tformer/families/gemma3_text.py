"""Gemma 3: Gemma 2 with norms on q and k instead of caps; five of six layers see a window, and turn by another
theta."""

from ..config import Config
from ..names import Names
from ..nn import LM, Attention, Rope, ShiftedRMSNorm
from . import gemma, gemma2

ABSENT = {
    **gemma2.ABSENT,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
}


def model(c: Config) -> LM:
    layers, scale = c["num_hidden_layers"], c["query_pre_attn_scalar"] ** -0.5
    head_dim, eps = c["head_dim"], c.get("rms_norm_eps", 1e-6)
    every = c.get("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
    pattern = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    masks, kinds = c.masks(pattern), c.get("layer_types", pattern)
    c.ignore("hidden_act", "cache_implementation", "attn_logit_softcapping", "rope_theta", "rope_local_base_freq")

    def position(kind: str) -> Rope:
        # Old configs have one table, which is that of the full layers, and a theta for the others.
        local = kind == "sliding_attention" and not c.has_rope_table(kind)
        theta = "rope_local_base_freq" if kind == "sliding_attention" else "rope_theta"
        return Rope(head_dim, c[theta]) if local else c.rope(head_dim, layer_type=kind, theta=theta)

    def attention(layer: int) -> Attention:
        norms = {f"{x}_norm": ShiftedRMSNorm(head_dim, eps) for x in "qk"}
        kind = kinds[layer]
        return gemma.attention(c, mask=masks[layer], scale=scale, position=position(kind), **norms)

    return gemma.decoder(c, c["hidden_activation"], attention, sandwich=True)


def names(c: Config) -> Names:
    theirs, ours = "model.layers.{}.self_attn", "decoder.layers.{}.attn.op"
    return gemma2.names(c) | {f"{theirs}.{x}_norm": f"{ours}.{x}_norm" for x in "qk"}
