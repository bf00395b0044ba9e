"""Text from a model: sampling, the token loop, stopping, and searching. Read in this order: `sampling`, `stopping`,
`decode`, `generate`, `rules`, `beam`, `conditioned`."""

from .beam import Search
from .conditioned import Found
from .generate import Generation, Step, generate
from .sampling import Sampler, Sampling
from .stopping import StopStrings

__all__ = ["Found", "Generation", "Sampler", "Sampling", "Search", "Step", "StopStrings", "generate"]
