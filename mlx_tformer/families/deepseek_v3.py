"""DeepSeek V3 and R1: V2 with sigmoid scores, a bias that selects experts and does not weigh them, and groups by
their two best. The modules that predict further tokens are kept if they are stored (no setting says that they are).
"""

from collections.abc import Callable
from functools import partial
from itertools import takewhile

from ..config import Config
from ..names import Names, Rule, Same, moved_to
from ..nn import LM, Block, Embed, Linear, NextToken, RMSNorm, Router
from ..settings import Other
from . import deepseek_v2, llama

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
    "num_nextn_predict_layers": 1,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


def model(c: Config) -> LM:
    groups = deepseek_v2.groups_of(c, best=2)
    c.expect(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", ep_size=1)
    c.expect(head_dim=c["qk_rope_head_dim"])  # the features that turn, as newer configs say again
    c.ignore("aux_loss_alpha", "seq_aux")

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

    return deepseek_v2.decoder(c, router, interleaved=c.get("rope_interleave", False), drafts=drafts(c))


def names(c: Config) -> Names:
    correction = "decoder.layers.{}.mlp.op.router.correction"
    table = deepseek_v2.names(c) | {"model.layers.{}.mlp.gate.e_score_correction_bias": correction}
    return table | {name: rule for i in range(len(drafts(c))) for name, rule in draft_names(c, i, table).items()}


def drafts(c: Config) -> list[Callable[[Block], NextToken]]:
    """What makes the modules that predict further tokens, those that are stored."""
    layers = c["num_hidden_layers"]

    def stored(i: int) -> bool:
        return c.stores(f"model.layers.{layers + i}.enorm.weight", f"drafts.{i}.embed_norm.weight")

    return [partial(draft, c, i) for i in takewhile(stored, range(c.get("num_nextn_predict_layers", 0)))]


def draft(c: Config, i: int, block: Block) -> NextToken:
    """The module with number `i`; its embedding and its head are the model's unless others are stored."""
    dim, vocab, eps = c["hidden_size"], c["vocab_size"], c.get("rms_norm_eps", 1e-6)
    embed, head = (isinstance(rule, str) for rule in shared_names(c, i).values())
    return NextToken(
        dim,
        block,
        norms=(RMSNorm(dim, eps), RMSNorm(dim, eps), RMSNorm(dim, eps)),
        embed=Embed(vocab, dim) if embed else None,
        head=Linear(dim, vocab, bias=False) if head else None,
    )


def draft_names(c: Config, i: int, table: Names) -> Names:
    """Where the weights of module `i` go, which is stored as one more layer with five parts more."""
    theirs, ours = f"model.layers.{c['num_hidden_layers'] + i}", f"drafts.{i}"
    layer = {name: rule for name, rule in table.items() if name.startswith("model.layers.{}.")}
    return {
        **{
            n.replace("model.layers.{}", theirs): moved_to(r, "decoder.layers.{}", f"{ours}.block")
            for n, r in layer.items()
        },
        f"{theirs}.enorm": f"{ours}.embed_norm",
        f"{theirs}.hnorm": f"{ours}.hidden_norm",
        f"{theirs}.eh_proj": f"{ours}.join",
        f"{theirs}.shared_head.norm": f"{ours}.norm",
        **shared_names(c, i),
    }


def shared_names(c: Config, i: int) -> dict[str, Rule]:
    """The embedding and the head of module `i`: copies of the model's, or its own where they differ."""
    theirs, ours = f"model.layers.{c['num_hidden_layers'] + i}", f"drafts.{i}"
    tied = llama.tied(c)
    head = ("model.embed_tokens", "embed.tokens") if tied else ("lm_head", "head")
    parts = {
        f"{theirs}.embed_tokens": ("model.embed_tokens", "embed.tokens", f"{ours}.embed.tokens"),
        f"{theirs}.shared_head.head": (*head, f"{ours}.head"),
    }
    found: dict[str, Rule] = {}
    for name, (main, shared, own) in parts.items():
        differs = c.stores(f"{own}.weight") or (c.stores(f"{name}.weight") and not c.repeats(name, main))
        found[name] = own if differs else Same(shared)
    return found
