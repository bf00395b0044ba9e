"""mlx_tformer: generate with, convert and look inside transformer language models on Apple silicon."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .blas import preload

preload()  # before anything imports mlx.core

if TYPE_CHECKING:
    from .checkpoint.convert import Conversion, convert
    from .checkpoint.export import Export, export
    from .checkpoint.load import load
    from .checkpoint.save import save
    from .checkpoint.verify import Verification, verify
    from .encoder import EncoderModel
    from .errors import BadInput, InputOutputError, Mismatch, MlxTformerError, UsageError
    from .from_sizes import build
    from .labels import Label
    from .lm import LanguageModel
    from .seq2seq import Seq2SeqModel
    from .vision import VisionModel

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "Conversion",
    "EncoderModel",
    "Export",
    "InputOutputError",
    "Label",
    "LanguageModel",
    "Mismatch",
    "MlxTformerError",
    "Seq2SeqModel",
    "UsageError",
    "Verification",
    "VisionModel",
    "build",
    "convert",
    "export",
    "load",
    "save",
    "verify",
]

_HOMES = {
    "checkpoint.convert": ("Conversion", "convert"),
    "checkpoint.export": ("Export", "export"),
    "checkpoint.load": ("load",),
    "checkpoint.save": ("save",),
    "checkpoint.verify": ("Verification", "verify"),
    "encoder": ("EncoderModel",),
    "errors": ("BadInput", "InputOutputError", "Mismatch", "MlxTformerError", "UsageError"),
    "from_sizes": ("build",),
    "labels": ("Label",),
    "lm": ("LanguageModel",),
    "seq2seq": ("Seq2SeqModel",),
    "vision": ("VisionModel",),
}
"""Which module each public name is in: it is imported with the first use, so that a program pays for what it uses."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
