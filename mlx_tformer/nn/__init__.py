"""The parts that models are made of: one mechanism a file, on MLX arrays.

Read in this order: `tap`, `mask`, `position`, `cache`, `context`, `attention`, `mlp`, `block`, `model`.
"""

from mlx.nn import Linear

from .attention import Attention, attend
from .block import Block, Parallel, Residual
from .cache import KV, Cache, State, Stateful, WindowKV
from .context import Context
from .mask import Causal, Everything, Mask, Window, visible
from .mlp import ACTIVATIONS, GatedMlp, Mlp
from .model import LM, Embed, Stack
from .norm import Identity, LayerNorm, RMSNorm
from .position import DynamicNTK, LinearScaling, Llama3, LongRope, Position, Rope, Scaling, Unscaled, Yarn
from .tap import Module, tap, wanted, watch

__all__ = [
    "ACTIVATIONS",
    "KV",
    "LM",
    "Attention",
    "Block",
    "Cache",
    "Causal",
    "Context",
    "DynamicNTK",
    "Embed",
    "Everything",
    "GatedMlp",
    "Identity",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "Mask",
    "Mlp",
    "Module",
    "Parallel",
    "Position",
    "RMSNorm",
    "Residual",
    "Rope",
    "Scaling",
    "Stack",
    "State",
    "Stateful",
    "Unscaled",
    "Window",
    "WindowKV",
    "Yarn",
    "attend",
    "tap",
    "visible",
    "wanted",
    "watch",
]
