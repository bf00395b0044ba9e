"""The parts that models are made of: one mechanism a file, on MLX arrays.

Read in this order: `tap`, `mask`, `position`, `cache`, `context`, `attention`, `latent`, `ssm`, `delta`,
`linear_attention`, `lsh`, `mlp`, `moe`, `block`, `draft`, `model`, `encoder`.
"""

from mlx.nn import Linear

from .attention import Attention, attend
from .block import Block, Parallel, Residual
from .cache import KV, Apart, Cache, State, Stateful, WindowKV, stateful
from .context import Context
from .delta import GatedDelta
from .draft import NextToken
from .encoder import Encoder, TokenHead
from .latent import LatentAttention
from .linear_attention import LinearAttention
from .lsh import LSHAttention
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
from .ssm import GatedNorm, Mamba, Mamba2, Multipliers, NormedGate, Recurrent, SiluGate
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
    "GatedDelta",
    "GatedMlp",
    "GatedNorm",
    "Groups",
    "Identity",
    "LSHAttention",
    "LatentAttention",
    "LayerNorm",
    "Learned",
    "Linear",
    "LinearAttention",
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
    "Multipliers",
    "NextToken",
    "NormedGate",
    "Parallel",
    "Position",
    "RMSNorm",
    "Recurrent",
    "Residual",
    "Rope",
    "Router",
    "Scaled",
    "Scaling",
    "ShiftedRMSNorm",
    "SiluGate",
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
    "stateful",
    "tap",
    "visible",
    "wanted",
    "watch",
]
