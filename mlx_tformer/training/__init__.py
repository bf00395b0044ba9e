"""What training needs besides a model: losses, packed rows, balanced experts, less memory.

The optimizer and the loop are MLX's (`mlx.optimizers`, `nn.value_and_grad`); `examples/train_tiny.py` shows one.
"""

from .balance import Routing, expert_load, load_balancing_loss, move_corrections, router_z_loss, routing
from .checkpointing import checkpoint
from .initialise import initialise
from .losses import cross_entropy, next_token_loss, token_losses
from .packing import Packed, pack

__all__ = [
    "Packed",
    "Routing",
    "checkpoint",
    "cross_entropy",
    "expert_load",
    "initialise",
    "load_balancing_loss",
    "move_corrections",
    "next_token_loss",
    "pack",
    "router_z_loss",
    "routing",
    "token_losses",
]
