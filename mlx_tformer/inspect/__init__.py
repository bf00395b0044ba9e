"""Look inside a model while it runs: read activations and change them, measure what heads do, and prove that what is
read is what the model computed.

Read in this order: `sites`, `texts`, `trace`, `places`, `edits`, `sweep`; `lens`, `frozen`, `attribution`; `scores`,
`measures`, `experts`; `streaming` (with `peaks`), `kept`, `stats`: statistics without patterns; `circuits` looks at
weights, and `pictures` draws.
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
