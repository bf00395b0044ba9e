"""What can be looked at in a model, and the names under which it can be asked for.

An activation has a path, `decoder.layers.3.attn.op.pattern`. It may be called by that, by the same without `op`, by
what TransformerLens calls it (`blocks.3.attn.hook_pattern`), and by the end of any of these; `*`, `?` and `[...]` are
globs. `residual.in`, `residual.mid` and `residual.out` are the stream before a block, after its first step and after
it. Only names are TransformerLens's: heads stand before tokens here, (B, H, L, D), q and k are as they are attended
(turned, and keys with those of the cache), and `hook_embed` has positions in it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import mlx.nn as nn

from ..errors import UsageError
from ..nn import Block, GatedMlp, Mixture, Module, Parallel, Router
from ..nn.moe import Feedforwards
from ..nn.ssm import StateSpace

LENS = {
    "in": ("hook_resid_pre", "residual.in"),
    "out": ("hook_resid_post", "residual.out"),
    "attn.in": ("ln1.hook_normalized",),
    "mlp.in": ("ln2.hook_normalized",),
    "attn.delta": ("hook_attn_out",),
    "mlp.delta": ("hook_mlp_out",),
    "attn.op.q": ("attn.hook_q", "attn.hook_rot_q"),
    "attn.op.k": ("attn.hook_k", "attn.hook_rot_k"),
    "attn.op.v": ("attn.hook_v",),
    "attn.op.z": ("attn.hook_z",),
    "attn.op.result": ("attn.hook_result",),
    "attn.op.scores": ("attn.hook_attn_scores",),
    "attn.op.pattern": ("attn.hook_pattern",),
    "cross.delta": ("hook_cross_attn_out",),
    **{
        f"cross.op.{ours}": (f"cross_attn.hook_{theirs}",)
        for ours, theirs in {"q": "q", "k": "k", "v": "v", "z": "z", "result": "result"}.items()
    },
    "cross.op.scores": ("cross_attn.hook_attn_scores",),
    "cross.op.pattern": ("cross_attn.hook_pattern",),
    "mlp.op.gate": ("mlp.hook_pre",),
    "mlp.op.up": ("mlp.hook_pre_linear",),
    "mlp.op.hidden": ("mlp.hook_post",),
    "mlp.op.router.weights": ("mlp.hook_expert_weights",),
    "mlp.op.router.chosen": ("mlp.hook_expert_indices",),
}
"""TransformerLens's names for what a layer offers."""
OUTSIDE = {
    "embed.out": ("hook_embed",),
    "decoder.out": ("ln_final.hook_normalized",),
    "encoder.out": ("ln_final.hook_normalized",),
}
"""And for what stands outside of layers."""
TOLD = ("slots", "real", "ids", "left", "first")
"""What tells where the tokens of a pass stand and which they are, and of which on there are logits."""
STACKS = ("encoder", "decoder")
LOGITS = ".logits"
"""The path of what a model says in the end."""
EARLY = ("embed.", "target.")
"""What runs before the stack that it runs for."""
LAYER = re.compile(r"(?P<stack>.*)\.layers\.(?P<layer>\d+)\.(?P<tail>.+)")
ATTENTION = {
    **dict.fromkeys(("q", "z", "result"), (1, 2, None, 4)),
    **dict.fromkeys(("k", "v"), (1, None, 2, 4)),
    **dict.fromkeys(("scores", "pattern"), (1, 2, 3, 4)),
    "latent": (None, None, 2, 4),
}
"""The axes of what attention offers: heads, tokens, keys, and how many there are."""


@dataclass(frozen=True)
class Site:
    """One activation of a model: its name, other names, and which of its axes is what.

    heads, tokens, keys: axes, or None. Keys and values have `keys` where others have `tokens`. width: axes there are;
    one fewer means that the tokens of all texts stand in one row.
    """

    path: str
    aliases: tuple[str, ...]
    stack: str
    layer: int | None
    heads: int | None
    tokens: int | None
    keys: int | None
    width: int | None

    @property
    def name(self) -> str:
        """The path as it is shown and asked for."""
        return self.path.lstrip(".")

    @property
    def kind(self) -> str:
        """The last word of the name: `pattern`."""
        return self.path.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The path of the module that offers it."""
        return self.path.rpartition(".")[0]

    @property
    def crosses(self) -> bool:
        """Whether its keys are those of another text than its queries."""
        return ".cross." in self.path

    def exactly(self, pattern: str) -> bool:
        """True if one of its names matches as a whole."""
        return any(fnmatchcase(name, pattern) for name in (self.name, *self.aliases))

    def ends(self, pattern: str) -> bool:
        """True if the end of one of its names matches."""
        return any(fnmatchcase(name, f"*.{pattern}") for name in (self.name, *self.aliases))


def sites_of(model: nn.Module) -> list[Site]:
    """Everything that can be looked at in a model: what comes before the layers, layer by layer, and what comes after.

    >>> from mlx_tformer.nn import LM, Attention, Block, Embed, GatedMlp, Residual, Stack
    >>> block = Block(attn=Residual(Attention(16, heads=2)), mlp=Residual(GatedMlp(16, 32)))
    >>> [site.name for site in sites_of(LM(Embed(9, 16), Stack([block])))][:4]
    ['embed.slots', 'embed.real', 'embed.ids', 'embed.out']
    """
    modules = {path: module for path, module in model.named_modules() if isinstance(module, Module)}
    found = [
        _site(module, f"{path}.{name}", name, modules) for path, module in modules.items() for name in module.sites
    ]
    return sorted((site for site in found if site is not None), key=lambda site: _place(site, modules))


def _place(site: Site, modules: dict[str, Module]) -> tuple[int, str, int, int]:
    """Where in a pass a site stands, roughly: before, in or after the layers, which layer, which step of it."""
    if site.layer is None:
        return 0 if site.path.startswith(EARLY) else 2, "", 0, 0
    block, tail = modules.get(f"{site.stack}.layers.{site.layer}"), LAYER.fullmatch(site.path)
    steps = ("in", *block.order, "out") if isinstance(block, Block) else ()
    step = tail["tail"].split(".")[0] if tail else ""
    return 1, "" if site.stack == "encoder" else site.stack, site.layer, steps.index(step) if step in steps else 0


def _site(module: Module, path: str, name: str, modules: dict[str, Module]) -> Site | None:
    parts = LAYER.fullmatch(path)
    if parts is None:
        return _outside(module, path, name)
    stack, layer, tail = parts["stack"], int(parts["layer"]), parts["tail"]
    block = modules.get(f"{stack}.layers.{layer}")
    if isinstance(block, Parallel) and tail in {f"{step}.out" for step in block.order[: block.beside]}:
        return None  # steps side by side have no sums of their own
    if name == "kept" and isinstance(module, Mixture) and module.capacity is None:
        return None
    theirs = LENS.get(tail, ())
    if isinstance(block, Block) and tail == f"{block.order[0]}.out":
        theirs = ("hook_resid_mid", "residual.mid")
    if tail == "mlp.op.up" and not isinstance(module, GatedMlp):
        theirs = ("mlp.hook_pre",)
    aliases = [
        path.replace(".op.", "."),
        *(f"{stack}.layers.{layer}.{name}" for name in theirs if name.startswith("residual.")),
        *(f"{start}.{layer}.{name}" for start in ("blocks", stack) for name in theirs),
    ]
    return Site(path, tuple(dict.fromkeys(aliases)), stack, layer, *_axes(module, name))


def _outside(module: Module, path: str, name: str) -> Site:
    stack = path.split(".")[0]
    aliases = OUTSIDE.get(path, ()) if "." in path[1:] else ()
    return Site(path, aliases, stack if stack in STACKS else "", None, *_axes(module, name))


def _axes(module: Module, name: str) -> tuple[int | None, int | None, int | None, int | None]:
    """The axes of heads, tokens and keys, and how many axes there are."""
    if name in TOLD and name != "ids":
        return None, None, None, None
    if isinstance(module, StateSpace):  # whose hidden state is by head, or by feature
        return 2 if len(module.hidden_shape) == 3 and name != "z" else None, 1, None, None
    if "q" in module.sites:
        return ATTENTION[name]
    if isinstance(module, Router | Feedforwards | Mixture):
        return None, 1, None, 3 if isinstance(module, Router) or name == "kept" else 4
    return None, 1, None, 2 if name == "ids" else 3


def main_stack(model: nn.Module) -> str:
    """The stack of blocks whose end the logits are made of: the decoder where there are two."""
    return "decoder" if "decoder" in model else "encoder"


def resolve(sites: Iterable[Site], pattern: str) -> list[Site]:
    """The sites that a name or a glob means; raises UsageError with the nearest names if there are none.

    A name that is one as a whole means that alone; the end of a name means all that end so.
    """
    every = list(sites)
    found = [site for site in every if site.exactly(pattern)] or [site for site in every if site.ends(pattern)]
    if not found:
        raise UsageError(f"no activation is called {pattern!r}; {nearest(every, pattern)}")
    return found


def nearest(sites: Iterable[Site], pattern: str) -> str:
    """What somebody may have meant who asked for `pattern`."""
    every = list(sites)
    anywhere = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", pattern)
    if anywhere != pattern and (elsewhere := [s for s in every if s.exactly(anywhere) or s.ends(anywhere)]):
        layers = sorted({site.layer for site in elsewhere if site.layer is not None})
        return f"there is one in layers {', '.join(map(str, layers))}"
    names = {re.sub(r"\.\d+\.", ".*.", name) for site in every for name in (site.name, *site.aliases)}
    ends = {".".join(name.split(".")[-2:]).removeprefix("*.") for name in names}
    wanted = re.sub(r"\[[^]]*\]|\?", "*", anywhere)
    near = get_close_matches(wanted, sorted(names | ends), n=4, cutoff=0.4)
    if near:
        return f"the nearest names: {', '.join(near)}"
    some = dict.fromkeys(site.aliases[0].partition(f"{site.layer}.")[2] for site in every if site.layer is not None)
    return f"there are, among others, {', '.join(list(some)[:9])}"
