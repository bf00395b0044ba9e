"""Norms: MLX's own, which compute in float32 and are fused. A slot without a norm holds `Identity`."""

from mlx.nn import Identity, LayerNorm, RMSNorm

__all__ = ["Identity", "LayerNorm", "RMSNorm"]
