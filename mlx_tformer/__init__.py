"""mlx_tformer: generate with, convert and look inside transformer language models on Apple silicon."""

from .blas import preload

preload()  # before anything imports mlx.core

from .build import build  # noqa: E402
from .checkpoint.convert import Conversion, convert  # noqa: E402
from .checkpoint.export import Export, export  # noqa: E402
from .checkpoint.load import load  # noqa: E402
from .checkpoint.save import save  # noqa: E402
from .checkpoint.verify import Verification, verify  # noqa: E402
from .encoder import EncoderModel  # noqa: E402
from .errors import BadInput, InputOutputError, Mismatch, MlxTformerError, UsageError  # noqa: E402
from .labels import Label  # noqa: E402
from .lm import LanguageModel  # noqa: E402
from .seq2seq import Seq2SeqModel  # noqa: E402
from .vision import VisionModel  # noqa: E402

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
