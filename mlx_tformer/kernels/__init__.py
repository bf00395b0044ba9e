"""Metal kernels beside the plain MLX that says what each computes; every choice among them is a pure function.

Read in this order: `launch`, `rope`.
"""

from .launch import Kernel, Maker, Place, made_by, place
from .rope import plain_rope, rope, worth_turning

__all__ = [
    "Kernel",
    "Maker",
    "Place",
    "made_by",
    "place",
    "plain_rope",
    "rope",
    "worth_turning",
]
