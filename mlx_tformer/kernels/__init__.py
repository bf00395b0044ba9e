"""Metal kernels beside the plain MLX that says what each computes; every choice among them is a pure function.

Read in this order: `launch`, `rope`, `keys`, `asked`, `twin`, `attention`, `choice`,
`router`, `measure`.
"""

from .asked import Asked, Buckets, Distances, Sight, Slopes, Wanted
from .attention import MOST_TOP, Plan, attention, attention_statistics, plan, refusal
from .choice import Answer, Case, case_of, choose, chosen_for
from .keys import Keys, Latent, Packed, Plain
from .launch import Kernel, Maker, Place, made_by, place
from .rope import plain_rope, rope, worth_turning
from .router import Rules, plain_route, route, worth_routing
from .twin import Statistics, plain_attention, plain_statistics

__all__ = [
    "MOST_TOP",
    "Answer",
    "Asked",
    "Buckets",
    "Case",
    "Distances",
    "Kernel",
    "Keys",
    "Latent",
    "Maker",
    "Packed",
    "Place",
    "Plain",
    "Plan",
    "Rules",
    "Sight",
    "Slopes",
    "Statistics",
    "Wanted",
    "attention",
    "attention_statistics",
    "case_of",
    "choose",
    "chosen_for",
    "made_by",
    "place",
    "plain_attention",
    "plain_rope",
    "plain_route",
    "plain_statistics",
    "plan",
    "refusal",
    "rope",
    "route",
    "worth_routing",
    "worth_turning",
]
