"""Look inside a model while it runs: read activations and change them, and prove that what is read is what the model
computed.

Read in this order: `sites`, `texts`, `trace`, `places`, `edits`, `lens`, `frozen`, `attribution`; `pictures` draws.
"""

from .attribution import Attribution, Share, attribution
from .edits import Edit, editing, mean, patch, rewrite, run, scale, steer, zero
from .edits import assign as set
from .lens import Lens, lens
from .places import Where
from .sites import Site, sites_of
from .trace import Pattern, Trace, trace

__all__ = [
    "Attribution",
    "Edit",
    "Lens",
    "Pattern",
    "Share",
    "Site",
    "Trace",
    "Where",
    "attribution",
    "editing",
    "lens",
    "mean",
    "patch",
    "rewrite",
    "run",
    "scale",
    "set",
    "sites_of",
    "steer",
    "trace",
    "zero",
]
