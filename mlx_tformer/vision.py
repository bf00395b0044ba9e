"""`VisionModel`: what `load` returns for an encoder of images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import mlx.core as mx

from .config import Config
from .errors import UsageError
from .labels import Label, labelled
from .nn import VisionEncoder
from .pixels import FILE, Preprocessor


@dataclass
class VisionModel:
    """An encoder of images that can be called, and that names what a picture shows if it was made for that."""

    model: VisionEncoder
    config: Config
    preprocessing: Mapping[str, Any] | None
    """The content of `preprocessor_config.json`; None if there is none."""
    dtype: mx.Dtype
    origin: str
    notes: list[str] = field(default_factory=list)

    def __call__(self, pixel_values: mx.array) -> mx.array:
        """Logits (B, labels) of images (B, channels, height, width), or hidden states (B, 1 + N, C) of a checkpoint
        without a classifier.

        Raises UsageError for another number of channels or another size than the model's: positions are not stretched.
        """
        return self.model(as_pixels(pixel_values))

    def hidden(self, pixel_values: mx.array) -> mx.array:
        """The hidden states after the last block and norm, (B, 1 + N, C), the first token's in front; errors as in a
        call."""
        return self.model.hidden(as_pixels(pixel_values))

    def classify(self, image: Any, *, top: int | None = 5) -> list[Label]:
        """What an image shows, the likeliest first; `top` of the labels, or all of them (None).

        image: the path of a file, a Pillow image, or an array of uint8 (height, width, 3) or (height, width), which is
        resized and scaled as the checkpoint's preprocessor_config.json says. Raises UsageError for a model without a
        classifier or without that file, for an image that is none of these, and where Pillow is not installed; BadInput
        for a broken file; InputOutputError for one that cannot be read.
        """
        if not self.model.has_head:
            raise UsageError(f"{self.origin} has no classifier; its hidden states are what it gives")
        if top is not None and top < 1:
            raise UsageError(f"top: found {top}, expected 1 or more")
        return labelled(self(self.pixels(image)), self.config, top)[0]

    def pixels(self, image: Any) -> mx.array:
        """The pixel values (1, 3, height, width) of an image; arguments and errors are those of `classify`."""
        if self.preprocessing is None:
            raise UsageError(f"{self.origin} has no {FILE}, which says how pictures become numbers; give pixel_values")
        return Preprocessor.read(self.preprocessing, self.origin)(image)

    @property
    def labels(self) -> list[str]:
        """What the model tells apart, in the order of its logits; empty without a classifier."""
        return self.config.labels if self.model.has_head else []

    def generate(self, *prompt: Any, **settings: Any) -> NoReturn:
        """Refused: an encoder does not write. Raises UsageError."""
        self.refuse()

    def chat(self, *messages: Any, **variables: Any) -> NoReturn:
        """Refused, as `generate` is. Raises UsageError."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the UsageError of whatever needs a model that continues a text."""
        kind = self.config.model_type
        raise UsageError(f"{self.origin} is an encoder ({kind}), which looks at images and does not continue texts")


def as_pixels(values: Any) -> mx.array:
    """Pixel values as a model takes them, of MLX or of NumPy; raises UsageError for what is no array."""
    try:
        return values if isinstance(values, mx.array) else mx.array(values)
    except (TypeError, ValueError):
        expected = "an array; `classify` takes files and pictures"
        raise UsageError(f"pixel_values: found a {type(values).__name__}, expected {expected}") from None
