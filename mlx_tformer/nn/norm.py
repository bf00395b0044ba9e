"""Norms: MLX's own, which compute in float32 and are fused, and the variants that families have.

A slot without a norm holds `Identity`. Norms of queries and keys get heads, (B, H, L, D).
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import Identity, LayerNorm, RMSNorm


class ShiftedRMSNorm(nn.Module):
    """RMS norm that multiplies by 1 + weight, so that a weight of zero does nothing (Gemma)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = mx.zeros((dim,))
        self.eps = eps
        self._shifted: tuple[mx.array, mx.array] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self._factor(), self.eps).astype(x.dtype)

    def _factor(self) -> mx.array:
        """1 + weight in float32, since rounded to 16 bits it would lose most of a small weight. It is made once for a
        weight, and not in every step."""
        if self._shifted is None or self._shifted[0] is not self.weight:
            self._shifted = self.weight, 1 + self.weight.astype(mx.float32)
        return self._shifted[1]


class UnitRMSNorm(nn.Module):
    """RMS norm without weights (Llama 4 on queries and keys)."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, self.eps)


class AllHeads(nn.Module):
    """A norm over the features of all heads together (OLMo 2)."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def __call__(self, x: mx.array) -> mx.array:
        heads = x.shape[1]
        flat = self.norm(x.swapaxes(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, H * D)
        return mx.unflatten(flat, -1, (heads, -1)).swapaxes(1, 2)


class EachHead(nn.Module):
    """Layer norm of each head with weights of its own, (H, D), and no bias (Cohere, StableLM)."""

    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = mx.ones((heads, head_dim))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, None, None, self.eps) * self.weight[:, None]


__all__ = ["AllHeads", "EachHead", "Identity", "LayerNorm", "RMSNorm", "ShiftedRMSNorm", "UnitRMSNorm"]
