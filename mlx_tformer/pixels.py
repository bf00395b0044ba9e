"""Pictures to the numbers that a model for images reads, as `preprocessor_config.json` says: size, scale, mean and
standard deviation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .errors import BadInput, InputOutputError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

FILE = "preprocessor_config.json"
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Kinds of files that are read; others may run programs of their own."""
MOST = 2**14
"""Pixels of a side at most."""
PLAIN = {"do_center_crop": False, "do_pad": False, "do_resize": True}
"""Settings of other processors, which may stand here as long as they hold these values."""


@dataclass(frozen=True)
class Preprocessor:
    """Pictures of any size and kind -> pixel values (1, 3, height, width), as transformers' ViTImageProcessor."""

    height: int
    width: int
    resample: int
    """How Pillow counts the ways to resize: 2 is bilinear, 3 bicubic."""
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, values: Mapping[str, Any], origin: str) -> "Preprocessor":
        """From the content of `preprocessor_config.json`; raises BadInput for what is not understood."""
        for key, expected in PLAIN.items():
            if values.get(key) not in (None, expected):
                raise _wrong(values, key, f"{str(expected).lower()}: nothing else is supported", origin)
        height, width = _sides(values, origin)
        resample = values.get("resample", 2)
        if resample not in range(6):
            raise _wrong(values, "resample", "one of Pillow's filters, 0 to 5", origin)
        scale = _numbers(values, "rescale_factor", 1 / 255, origin)[0] if values.get("do_rescale", True) else 1.0
        mean, std = (_numbers(values, key, [0.5] * 3, origin) for key in ("image_mean", "image_std"))
        if not values.get("do_normalize", True):
            mean, std = (0.0,), (1.0,)
        return cls(height, width, resample, scale, mean, std)

    def __call__(self, picture: Any) -> mx.array:
        """Pixel values (1, 3, height, width) of a file, a Pillow image, or an array (height, width, 3) or (height,
        width) of numbers from 0 to 255.

        Raises UsageError for an array of another shape or kind and where Pillow is needed and not installed, BadInput
        for a file that is no picture, and InputOutputError for one that cannot be read.
        """
        import numpy as np

        found = _bytes_of(picture)
        if found.shape[:2] != (self.height, self.width):
            found = np.asarray(_pillow().fromarray(found).resize((self.width, self.height), self.resample))
        mean, std = (np.array(numbers, np.float32) for numbers in (self.mean, self.std))
        values = (found.astype(np.float32) * np.float32(self.scale) - mean) / std  # (height, width, 3)
        return mx.array(values.transpose(2, 0, 1)[None])


def _bytes_of(picture: Any) -> "np.ndarray":
    """A picture as (height, width, 3) bytes."""
    import numpy as np

    if isinstance(picture, str | Path):
        return np.asarray(_opened(Path(picture)))
    if not isinstance(picture, np.ndarray | mx.array):
        if type(picture).__module__.partition(".")[0] != "PIL":
            raise UsageError(f"image: found a {type(picture).__name__}, expected a path, a Pillow image or an array")
        return np.asarray(picture.convert("RGB"))
    found = np.array(picture)
    found = np.stack([found] * 3, axis=-1) if found.ndim == 2 else found
    if found.ndim != 3 or found.shape[2] != 3 or 0 in found.shape or found.dtype != np.uint8:
        expected = "uint8 of shape (height, width, 3) or (height, width)"
        raise UsageError(f"image: found {found.dtype} of shape {found.shape}, expected {expected}")
    return found


def _opened(path: Path) -> "Image":
    """The picture in a file, upright and in RGB."""
    pillow = _pillow()
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with pillow.open(path, formats=FORMATS) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise BadInput(f"is no picture of a known kind, expected {', '.join(FORMATS)}", file=path) from None
    except pillow.DecompressionBombError:
        raise BadInput("has more pixels than any picture needs", file=path) from None
    except OSError as error:
        if error.errno is None:  # Pillow's own, about the content
            raise BadInput(f"is a broken picture: {error}", file=path) from None
        raise InputOutputError(f"{path}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"is a broken picture: {error}", file=path) from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        problem = "reading and resizing pictures needs Pillow; install mlx-tformer[vision], or give pixel_values"
        raise UsageError(problem) from None
    return Image


def _sides(values: Mapping[str, Any], origin: str) -> tuple[int, int]:
    """Height and width; one number stands for both."""
    size = values.get("size", 224)
    size = {"height": size, "width": size} if isinstance(size, int) else size
    sides: list[Any] = [size.get(side) for side in ("height", "width")] if isinstance(size, dict) else [None]
    if not all(isinstance(n, int) and 0 < n <= MOST for n in sides):
        raise _wrong(values, "size", "a height and a width", origin)
    height, width = sides
    return height, width


def _numbers(values: Mapping[str, Any], key: str, absent: Any, origin: str) -> tuple[float, ...]:
    """One number, or one for each of three colours, none of them 0 where it divides."""
    found = values.get(key, absent)
    several = found if isinstance(found, list) else [found]
    right = all(isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e30 for n in several)
    if len(several) not in (1, 3) or not right or (0 in several and key != "image_mean"):
        raise _wrong(values, key, "a number, or one for each of three colours", origin)
    return tuple(map(float, several))


def _wrong(values: Mapping[str, Any], key: str, expected: str, origin: str) -> BadInput:
    return BadInput(f"found {values.get(key)!r}, expected {expected}", file=f"{origin}: {FILE}", field=key)
