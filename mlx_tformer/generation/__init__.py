"""Text from a model: sampling, the token loop, stopping, speculation, searching, batches, scoring, conversations.

Read in this order: `settings`, `filters`, `penalties`, `rules`, `grammar`, `sampling`, `scores`, `stopping`,
`transcript`, `task`, `decode`, `drafts`, `speculate`, `generate`, `prompt_cache`, `rule_configs`, `beam`,
`conditioned`, `batch`, `scoring`, `reasoning`, `conversation`.
"""

from .batch import Result, batch
from .beam import Search
from .conditioned import Found
from .conversation import Conversation
from .generate import Generation, generate
from .prompt_cache import PromptCache
from .sampling import Sampler
from .scores import TokenScore
from .scoring import Comparison, Perplexity, Score, compare, perplexity, score
from .settings import Sampling
from .stopping import StopStrings
from .transcript import Step

__all__ = [
    "Comparison",
    "Conversation",
    "Found",
    "Generation",
    "Perplexity",
    "PromptCache",
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
