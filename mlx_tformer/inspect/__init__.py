"""Look inside a model while it runs: read activations and change them, measure what heads do, and prove that what is
read is what the model computed.

Read. `trace` keeps whatever is asked for, of everything that the model runs inside the block: calls, chunks, steps of
generation, with any cache. Names are paths, their ends, globs, or what TransformerLens calls them; `sites_of` lists
what a model has, and a name that it does not have is an error with the nearest ones.

>>> import mlx_tformer as mt
>>> from mlx_tformer import inspect
>>> lm = mt.load("shakespeare", dtype="float32")
>>> tokens = lm.tokens("To be, or not to be")
>>> with inspect.trace(lm, read=["attn.pattern", "residual.out"]) as t:
...     logits = lm(tokens)
>>> t["layers.1.attn.pattern"].shape, t["blocks.1.hook_resid_post"].shape
((1, 6, 7, 7), (1, 7, 192))

Prove. A pattern whose rows sum to one may still be wrong. `check` holds pattern @ values against the output of the
fused attention that the model uses when nobody looks, as a share of its largest value.

>>> t.check(1e-4) < 1e-5
True

Draw. `show` draws in the terminal, `png` (with matplotlib) and `html` (a page without a network) into a file: traces,
scores, the lens and sweeps have all three, and `inspect.pictures` puts several into one page.

>>> t.show(layer=1, head=2)  # doctest: +ELLIPSIS
layer 1, head 2  query down, key across...

Change. `editing` and `run` take edits: `zero`, `mean`, `scale`, `set`, `patch` (from another trace or prompt), `steer`
(a vector added to the residual stream) and `rewrite` (a function of yours), by layer, head and position. An edit that
touches nothing is an error. `sweep` patches one cell of a grid at a time.

>>> cut = inspect.run(lm, tokens, edit=[inspect.zero("attn.z", heads={1: [2, 3]})])
>>> bool((cut == logits).all())
False

Understand. `lens`: what the model would say after each layer. `attribution`: what each head and MLP adds to a logit.
`head_scores`: induction heads and others, on texts made for it. `entropy`, `distance`, `sink_mass`, `rollout` and
`flow` are measures of patterns, `experts` is about mixtures, and `circuits`, `composition` and `copying` read the
weights alone.

>>> [share.kind for share in inspect.attribution(t, " to", minus=" a").top(3)] != []
True

Long texts. A pattern of n tokens has n x n weights a head. `stats` keeps a few numbers of each row, and never a
pattern; hand it to `generate`, or use it as a block.

>>> watch = inspect.stats(top=2, mass=tokens.spans(every=4))
>>> text = "".join(step.text for step in lm.generate(tokens, max_tokens=3, watch=watch))
>>> watch[4].top_keys.shape[-1], watch.spans
(2, ('0-3', '4-6', '(after)'))

What to know. With learned sinks (gpt-oss) rows sum to less than one, and the rest, `t.deficit(name)`, is the sink's; in
pictures it is a column of its own. Activations of quantized weights are the quantized model's, and patterns over a
packed cache (`kv_bits`) those of its keys; `t.notes` says so. Of a bounded cache (`kv_size`, `kv_keep`) keys stand at
their places, and what it has dropped has no weight. In models with two stacks "encoder." and "decoder." tell them
apart, and "cross.pattern" leads from one to the other.
The command is `mlx-tformer inspect`; `examples/` has scripts of a few dozen lines.

The files, in reading order: `sites`, `texts`, `trace`, `places`, `edits`, `sweep`; `lens`, `frozen`, `attribution`;
`scores`, `measures`, `experts`; `streaming` (with `peaks`), `kept`, `stats`: statistics without patterns; `circuits`
looks at weights, and `pictures` (with `drawn`) draws.
"""

from .attribution import Attribution, Share, attribution
from .circuits import Circuits, LowRank, circuits, composition, copying
from .edits import Edit, editing, mean, patch, rewrite, run, scale, steer, zero
from .edits import assign as set
from .experts import ExpertReport, experts
from .kept import LayerStatistics
from .lens import Lens, lens
from .measures import distance, entropy, flow, rollout, sink_mass
from .places import Where
from .scores import HeadScores, head_scores
from .sites import Site, sites_of
from .stats import Watch, stats
from .streaming import Statistics, Wants, statistics_of, streamed
from .sweep import Sweep, sweep
from .trace import Pattern, Trace, trace

__all__ = [
    "Attribution",
    "Circuits",
    "Edit",
    "ExpertReport",
    "HeadScores",
    "LayerStatistics",
    "Lens",
    "LowRank",
    "Pattern",
    "Share",
    "Site",
    "Statistics",
    "Sweep",
    "Trace",
    "Wants",
    "Watch",
    "Where",
    "attribution",
    "circuits",
    "composition",
    "copying",
    "distance",
    "editing",
    "entropy",
    "experts",
    "flow",
    "head_scores",
    "lens",
    "mean",
    "patch",
    "rewrite",
    "rollout",
    "run",
    "scale",
    "set",
    "sink_mass",
    "sites_of",
    "statistics_of",
    "stats",
    "steer",
    "streamed",
    "sweep",
    "trace",
    "zero",
]
