"""Text from a model: sampling, the token loop, stopping, searching, batches and scoring. Read in this order:
`settings`, `filters`, `penalties`, `sampling`, `scores`, `stopping`, `decode`, `generate`, `rules`, `beam`,
`conditioned`, `batch`, `scoring`."""

from .batch import Result, batch
from .beam import Search
from .conditioned import Found
from .generate import Generation, Step, generate
from .sampling import Sampler
from .scores import TokenScore
from .scoring import Comparison, Perplexity, Score, compare, perplexity, score
from .settings import Sampling
from .stopping import StopStrings

__all__ = [
    "Comparison",
    "Found",
    "Generation",
    "Perplexity",
    "Result",
    "Sampler",
    "Sampling",
    "Score",
    "Search",
    "Step",
    "StopStrings",
    "TokenScore",
    "batch",
    "compare",
    "generate",
    "perplexity",
    "score",
]
