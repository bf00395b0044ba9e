"""Text from a model: sampling, the token loop, stopping. Read in this order: `settings`, `filters`, `penalties`,
`sampling`, `scores`, `stopping`, `decode`, `generate`, `scoring`."""

from .generate import Generation, Step, generate
from .sampling import Sampler
from .scores import TokenScore
from .scoring import Comparison, Perplexity, Score, compare, perplexity, score
from .settings import Sampling
from .stopping import StopStrings

__all__ = [
    "Comparison",
    "Generation",
    "Perplexity",
    "Sampler",
    "Sampling",
    "Score",
    "Step",
    "StopStrings",
    "TokenScore",
    "compare",
    "generate",
    "perplexity",
    "score",
]
