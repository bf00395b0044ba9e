"""Text from a model: sampling, the token loop, stopping. Read in this order: `settings`, `filters`, `penalties`,
`sampling`, `scores`, `stopping`, `decode`, `generate`, `batch`."""

from .batch import Result, batch
from .generate import Generation, Step, generate
from .sampling import Sampler
from .scores import TokenScore
from .settings import Sampling
from .stopping import StopStrings

__all__ = ["Generation", "Result", "Sampler", "Sampling", "Step", "StopStrings", "TokenScore", "batch", "generate"]
