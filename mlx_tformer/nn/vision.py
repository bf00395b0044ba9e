"""Images as tokens: patches in, and the same blocks as for text behind them (Dosovitskiy et al. 2020, arXiv
2010.11929)."""

import mlx.core as mx
import mlx.nn as nn

from ..errors import UsageError
from .context import Context
from .model import Stack
from .position import Learned
from .tap import Module, name_modules, tap


class Patches(Module):
    """Pixels (B, channels, height, width) -> tokens (B, 1 + N, C): a learned one in front, then the patches row by row,
    each projected; positions are added to all.

    size: height and width of an image. patch: those of a patch; pixels at the right and below that fill no patch are
    left out.

    >>> Patches((4, 6), (2, 2), channels=3, dim=8)(mx.zeros((1, 3, 4, 6))).shape
    (1, 7, 8)
    """

    sites = ("out",)

    def __init__(self, size: tuple[int, int], patch: tuple[int, int], *, channels: int, dim: int):
        super().__init__()
        self.size, self.patch, self.channels = size, patch, channels
        self.rows, self.columns = size[0] // patch[0], size[1] // patch[1]
        self.project = nn.Linear(channels * patch[0] * patch[1], dim)
        self.first = mx.zeros((1, dim))
        self.positions = Learned(1 + self.rows * self.columns, dim)

    @property
    def labels(self) -> list[str]:
        """What each token is, for a reader: [CLS], the learned one, or a patch by its row and column.

        >>> Patches((4, 6), (2, 2), channels=3, dim=8).labels
        ['[CLS]', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2']
        """
        return ["[CLS]", *(f"{row},{column}" for row in range(self.rows) for column in range(self.columns))]

    def __call__(self, pixels: mx.array) -> mx.array:
        """Raises UsageError for pixels of another shape; positions are not stretched to other sizes."""
        expected = (self.channels, *self.size)
        if pixels.ndim != 4 or pixels.shape[1:] != expected:
            shape = f"(B, {', '.join(map(str, expected))})"
            raise UsageError(f"pixel_values: found shape {pixels.shape}, expected {shape}")
        x = self.project(self._cut(pixels.astype(self.first.dtype)))  # (B, N, C)
        first = mx.broadcast_to(self.first, (x.shape[0], *self.first.shape))
        x = mx.concatenate([first, x], axis=1)
        return tap(self, "out", x + self.positions(x.shape[1], 0))

    def _cut(self, pixels: mx.array) -> mx.array:
        """(B, channels, height, width) -> (B, N, channels * patch height * patch width)"""
        (high, wide), images = self.patch, pixels[:, :, : self.rows * self.patch[0], : self.columns * self.patch[1]]
        cut = images.reshape(images.shape[0], self.channels, self.rows, high, self.columns, wide)
        return cut.transpose(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class VisionEncoder(Module):
    """An encoder of images: pixels (B, channels, height, width) -> logits (B, labels) by what the first token became if
    there is a `head`, else hidden states (B, 1 + N, C).

    >>> from mlx_tformer.nn import Attention, Block, Everything, LayerNorm, Mlp, Residual
    >>> attn = Residual(Attention(16, heads=2, mask=Everything()), pre=LayerNorm(16))
    >>> stack = Stack([Block(attn=attn, mlp=Residual(Mlp(16, 32), pre=LayerNorm(16)))], LayerNorm(16))
    >>> model = VisionEncoder(Patches((8, 8), (4, 4), channels=3, dim=16), stack, nn.Linear(16, 5))
    >>> model(mx.zeros((2, 3, 8, 8))).shape
    (2, 5)
    """

    sites = ("logits",)

    def __init__(self, embed: Patches, encoder: Stack, head: nn.Linear | None = None):
        super().__init__()
        self.embed, self.encoder = embed, encoder
        if head is not None:
            self.head = head
        self.has_head = head is not None
        self.context = 1 + embed.rows * embed.columns
        """Tokens that an image is."""
        self.tied = False  # nothing serves twice
        name_modules(self)

    lengths: tuple[int, int] | None = None
    """Images have as many tokens as they have."""

    def __call__(self, pixels: mx.array) -> mx.array:
        """Logits (B, labels), or hidden states (B, 1 + N, C) without a head; raises UsageError as `hidden` does."""
        x = self.hidden(pixels)
        return self.logits(x) if self.has_head else x

    def hidden(self, pixels: mx.array) -> mx.array:
        """The residual stream after the last block and norm, (B, 1 + N, C); raises UsageError for pixels of another
        shape than the model's."""
        x = self.embed(pixels)
        return self.encoder(x, Context.alone(x))

    def logits(self, x: mx.array) -> mx.array:
        """(B, 1 + N, C) -> (B, labels)"""
        return tap(self, "logits", self.head(x[:, 0]))
