"""The parts that models are made of: one mechanism a file, on MLX arrays.

Read in this order: `tap`, `spectator`, `mask`, `position`, `cache`, `context`, `linear`, `attention`, `latent`, `ssm`,
`mlp`, `moe`, `block`, `draft`, `model`, `encoder`.
"""

from mlx.nn import Linear

from .attention import Attention, attend
from .block import Block, Parallel, Residual
from .cache import KV, Apart, Cache, State, Stateful, WindowKV, stateful
from .context import Context
from .draft import NextToken
from .encoder import Encoder, TokenHead
from .latent import LatentAttention
from .linear import matrix
from .mask import Around, Causal, Chunk, Everything, Mask, Window, visible
from .mlp import ACTIVATIONS, Gate, GatedMlp, Mlp
from .model import LM, Embed, Scaled, SoftCap, Stack
from .moe import ExpertLinear, Experts, Groups, Mixture, Router
from .norm import AllHeads, EachHead, Identity, LayerNorm, RMSNorm, ShiftedRMSNorm, UnitRMSNorm
from .position import (
    Alibi,
    DynamicNTK,
    Learned,
    LinearScaling,
    Llama3,
    LongRope,
    Position,
    Rope,
    Scaling,
    Unscaled,
    Yarn,
)
from .spectator import Call, Places, spectate, spectators
from .ssm import GatedNorm, Mamba, Mamba2, Recurrent
from .tap import Module, tap, wanted, watch

Model = LM | Encoder
"""What a family makes."""

__all__ = [
    "ACTIVATIONS",
    "KV",
    "LM",
    "Alibi",
    "AllHeads",
    "Apart",
    "Around",
    "Attention",
    "Block",
    "Cache",
    "Call",
    "Causal",
    "Chunk",
    "Context",
    "DynamicNTK",
    "EachHead",
    "Embed",
    "Encoder",
    "Everything",
    "ExpertLinear",
    "Experts",
    "Gate",
    "GatedMlp",
    "GatedNorm",
    "Groups",
    "Identity",
    "LatentAttention",
    "LayerNorm",
    "Learned",
    "Linear",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "Mamba",
    "Mamba2",
    "Mask",
    "Mixture",
    "Mlp",
    "Model",
    "Module",
    "NextToken",
    "Parallel",
    "Places",
    "Position",
    "RMSNorm",
    "Recurrent",
    "Residual",
    "Rope",
    "Router",
    "Scaled",
    "Scaling",
    "ShiftedRMSNorm",
    "SoftCap",
    "Stack",
    "State",
    "Stateful",
    "TokenHead",
    "UnitRMSNorm",
    "Unscaled",
    "Window",
    "WindowKV",
    "Yarn",
    "attend",
    "matrix",
    "spectate",
    "spectators",
    "stateful",
    "tap",
    "visible",
    "wanted",
    "watch",
]
