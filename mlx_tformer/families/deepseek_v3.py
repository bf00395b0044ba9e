"""DeepSeek V3 and R1: V2 with sigmoid scores, a bias that selects experts and does not weigh them, and groups by
their two best."""

from ..config import Config
from ..names import Names
from ..nn import LM, Router
from ..settings import Other
from . import deepseek_v2

ABSENT = {
    **deepseek_v2.ABSENT,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": Other("num_local_experts", 256),
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


def model(c: Config) -> LM:
    groups = deepseek_v2.groups_of(c, best=2)
    c.expect(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", ep_size=1)
    c.ignore("num_nextn_predict_layers", "aux_loss_alpha", "seq_aux")

    def router() -> Router:
        return Router(
            c["hidden_size"],
            c["n_routed_experts"],
            c.chosen(c["n_routed_experts"]),
            score="sigmoid",
            normalise=c["norm_topk_prob"],
            scale=c["routed_scaling_factor"],
            groups=groups,
            correction=True,
        )

    return deepseek_v2.decoder(c, router, interleaved=c.get("rope_interleave", True))


def names(c: Config) -> Names:
    correction = "decoder.layers.{}.mlp.op.router.correction"
    return deepseek_v2.names(c) | {"model.layers.{}.mlp.gate.e_score_correction_bias": correction}
