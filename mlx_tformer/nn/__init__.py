"""The parts that models are made of: one mechanism a file, on MLX arrays.

Read in this order, in which no file needs a later one: `tap`, `spectator`, `mask`, `position`, `relative`, `norm`,
`keeping`, `cache`, `packed`, `context`, `linear`, `attention`, `cross`, `latent`, `ssm`, `delta`, `linear_attention`,
`lsh`, `mlp`, `moe`, `block`, `draft`, `model`, `encoder`, `vision`, `seq2seq`.
"""

from mlx.nn import Linear

from .attention import Attention, attend
from .block import Block, Parallel, Residual
from .cache import KV, Apart, Cache, Memory, State, Stateful, WindowKV, stateful
from .context import Context
from .cross import CrossAttention
from .delta import GatedDelta
from .draft import NextToken
from .encoder import POOLS, Classifier, Encoder, TokenHead, pooled
from .keeping import WHOLE, Keeping
from .latent import LatentAttention
from .linear import matrix
from .linear_attention import LinearAttention
from .lsh import LSHAttention
from .mask import Around, Causal, Chunk, Everything, Mask, Recent, Window, visible
from .mlp import ACTIVATIONS, Gate, GatedMlp, Mlp
from .model import LM, Embed, Scaled, SoftCap, Stack
from .moe import ExpertLinear, Experts, Groups, Mixture, PlainExperts, Router
from .norm import AllHeads, EachHead, Identity, LayerNorm, RMSNorm, ShiftedRMSNorm, UnitRMSNorm
from .packed import KeptKV, PackedKV
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
    Sinusoidal,
    Unscaled,
    Yarn,
)
from .relative import RelativeBias, Shared
from .seq2seq import LogitBias, Seq2Seq
from .spectator import Call, Places, spectate, spectators, unseen
from .ssm import GatedNorm, Mamba, Mamba2, Multipliers, NormedGate, Recurrent, SiluGate
from .tap import Module, tap, wanted, watch
from .vision import Patches, VisionEncoder

Model = LM | Encoder | VisionEncoder | Seq2Seq
"""What a family makes."""

__all__ = [
    "ACTIVATIONS",
    "KV",
    "LM",
    "POOLS",
    "WHOLE",
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
    "Classifier",
    "Context",
    "CrossAttention",
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
    "Keeping",
    "KeptKV",
    "LSHAttention",
    "LatentAttention",
    "LayerNorm",
    "Learned",
    "Linear",
    "LinearAttention",
    "LinearScaling",
    "Llama3",
    "LogitBias",
    "LongRope",
    "Mamba",
    "Mamba2",
    "Mask",
    "Memory",
    "Mixture",
    "Mlp",
    "Model",
    "Module",
    "Multipliers",
    "NextToken",
    "NormedGate",
    "PackedKV",
    "Parallel",
    "Patches",
    "Places",
    "PlainExperts",
    "Position",
    "RMSNorm",
    "Recent",
    "Recurrent",
    "RelativeBias",
    "Residual",
    "Rope",
    "Router",
    "Scaled",
    "Scaling",
    "Seq2Seq",
    "Shared",
    "ShiftedRMSNorm",
    "SiluGate",
    "Sinusoidal",
    "SoftCap",
    "Stack",
    "State",
    "Stateful",
    "TokenHead",
    "UnitRMSNorm",
    "Unscaled",
    "VisionEncoder",
    "Window",
    "WindowKV",
    "Yarn",
    "attend",
    "matrix",
    "pooled",
    "spectate",
    "spectators",
    "stateful",
    "tap",
    "unseen",
    "visible",
    "wanted",
    "watch",
]
