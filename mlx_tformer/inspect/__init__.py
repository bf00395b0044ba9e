"""Look inside a model while it runs: read activations, and prove that they are what the model computed.

Read in this order: `sites`, `texts`, `trace`.
"""

from .sites import Site, sites_of
from .trace import Pattern, Trace, trace

__all__ = ["Pattern", "Site", "Trace", "sites_of", "trace"]
