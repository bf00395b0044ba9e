"""DeepSeek V2: latent attention; dense layers first, then small experts with some that all tokens share."""

from collections.abc import Callable, Sequence

from ..config import Config
from ..names import Moved, Names, Unflattened, joined
from ..nn import LM, Block, Experts, GatedMlp, Groups, LatentAttention, Mixture, NextToken, Router
from ..nn.tap import Module
from ..settings import Other
from . import llama, qwen2_moe

ABSENT = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1407,
    "max_position_embeddings": 2048,
    "n_routed_experts": Other("num_experts", 64),
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "v_head_dim": 128,
}


def model(c: Config) -> LM:
    limited = c["topk_method"] == "group_limited_greedy"
    if not limited and c["topk_method"] != "greedy":
        raise c.wrong("topk_method", "greedy or group_limited_greedy")
    groups = groups_of(c, best=1) if limited else None
    c.expect(moe_layer_freq=1, scoring_func="softmax", norm_topk_prob=False, ep_size=1)
    c.ignore("n_group", "topk_group", "aux_loss_alpha", "seq_aux", "mlp_bias")

    def router() -> Router:
        dim, count = c["hidden_size"], c["n_routed_experts"]
        return Router(dim, count, c.chosen(count), scale=c["routed_scaling_factor"], groups=groups)

    return decoder(c, router)


def groups_of(c: Config, best: int) -> Groups:
    """The groups of experts, which must be whole and have enough of them."""
    experts, count, keep = c["n_routed_experts"], c["n_group"], c["topk_group"]
    if experts % count or experts // count < best:
        raise c.wrong("n_group", f"a divisor of n_routed_experts ({experts}) that leaves {best} or more to a group")
    if not c.chosen(experts) * count / experts <= keep <= count:
        raise c.wrong("topk_group", f"at most n_group ({count}), and enough for num_experts_per_tok")
    return Groups(count, keep, best)


def decoder(
    c: Config,
    router: Callable[[], Router],
    *,
    interleaved: bool = True,
    drafts: Sequence[Callable[[Block], NextToken]] = (),
) -> LM:
    """What V2 and V3 share."""
    dim, act, count = c["hidden_size"], c.get("hidden_act", "silu"), c["n_routed_experts"]
    small = c["moe_intermediate_size"]
    c.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "intermediate_size")
    c.ignore("n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor")  # if all are dense

    def mlp(layer: int) -> Module:
        if layer < c["first_k_dense_replace"]:
            return GatedMlp(dim, c["intermediate_size"], act)
        shared = GatedMlp(dim, small * c["n_shared_experts"], act) if c.get("n_shared_experts") else None
        return Mixture(router(), Experts(dim, small, count, act=act), shared=shared)

    return llama.decoder(c, lambda layer: attention(c, interleaved), mlp_of=mlp, drafts=drafts)


def attention(c: Config, interleaved: bool) -> LatentAttention:
    """Latent attention; a scaling that names `mscale_all_dim` also sharpens the scores."""
    plain, rotary, position = (
        c["qk_nope_head_dim"],
        c["qk_rope_head_dim"],
        c.rope(c["qk_rope_head_dim"], interleaved=interleaved),
    )
    return LatentAttention(
        c["hidden_size"],
        c["num_attention_heads"],
        rank=c["kv_lora_rank"],
        plain=plain,
        rotary=rotary,
        value=c["v_head_dim"],
        q_rank=c.get("q_lora_rank"),
        bias=c.get("attention_bias", False),
        position=position,
        scale=(plain + rotary) ** -0.5 * position.scaling.sharpening,
    )


def names(c: Config) -> Names:
    heads, rank, rotary = c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    plain, value, q_rank = c["qk_nope_head_dim"], c["v_head_dim"], c.get("q_lora_rank")
    theirs, ours = "model.layers.{}", "decoder.layers.{}"
    attn, op, shared = f"{theirs}.self_attn", f"{ours}.attn.op", f"{theirs}.mlp.shared_experts"
    query = {f"{attn}.q_proj": heads * (plain + rotary)} if q_rank is None else {f"{attn}.q_a_proj": q_rank}
    return (
        llama.names(c)
        | joined(f"{op}.into", {**query, f"{attn}.kv_a_proj_with_mqa": rank + rotary})
        | joined(f"{ours}.mlp.op.shared.gate_up", {f"{shared}.gate_proj": 1, f"{shared}.up_proj": 1})
        | qwen2_moe.expert_names(f"{theirs}.mlp", f"{ours}.mlp.op")
        | {
            f"{attn}.q_a_layernorm": f"{op}.q_norm",
            f"{attn}.q_b_proj": f"{op}.q_up",
            f"{attn}.kv_a_layernorm": f"{op}.kv_norm",
            f"{attn}.kv_b_proj.weight": Moved(f"{op}.kv_up", (Unflattened(0, plain + value),)),
            f"{shared}.down_proj": f"{ours}.mlp.op.shared.down",
        }
    )
