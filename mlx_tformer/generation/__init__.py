"""Text from a model: sampling, the token loop, stopping. Read in this order: `sampling`, `stopping`, `decode`,
`generate`."""

from .generate import Generation, Step, generate
from .sampling import Sampler, Sampling
from .stopping import StopStrings

__all__ = ["Generation", "Sampler", "Sampling", "Step", "StopStrings", "generate"]
