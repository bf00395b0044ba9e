"""A model in memory, trained or changed, as a folder that `load` takes."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import UsageError
from ..lm import LanguageModel
from ..nn.moe import QuantizedExpertLinear
from ..pixels import FILE as PREPROCESSOR
from ..seq2seq import Seq2SeqModel
from ..vision import VisionModel
from .atomic import new_folder
from .convert import SHARD
from .folder import LAYOUT
from .load import Loaded
from .output import write_files, write_json, write_weights
from .plan import dtype_name
from .safetensors_file import CODES
from .source import Quantization, Tensor


def save(lm: Loaded, dest: str | Path) -> Path:
    """Write a model to the folder `dest` in our layout, with its config and its tokenizer; returns the folder.

    `dest` does not exist or is empty; it exists whole or not at all. Weights are written in the dtype that they have,
    packed ones packed. What is missing for Hugging Face's names `export` adds. Raises InputOutputError for a
    destination that cannot be written, UsageError for weights of a dtype that files do not have.

    >>> import tempfile, mlx_tformer as mt
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = mt.load(save(mt.build("gpt2", vocab=50), Path(folder) / "model"))
    >>> again.vocab
    50
    """
    target = Path(dest)
    flat: Any = tree_flatten(lm.model.parameters())
    values: dict[str, mx.array] = dict(flat)
    tensors = {name: Tensor(value.shape, value.dtype) for name, value in values.items()}
    odd = next((name for name, tensor in tensors.items() if tensor.dtype not in CODES), None)
    if odd is not None:
        raise UsageError(f"{odd}: found {dtype_name(tensors[odd].dtype)}, which files of weights do not have")
    with new_folder(target, None, sum(tensor.nbytes for tensor in tensors.values())) as folder:
        write_weights(folder, tensors, values.items(), largest=SHARD)
        write_json(folder / "config.json", _config(lm))
        _write_companions(lm, folder)
    return target


def _write_companions(lm: Loaded, folder: Path) -> None:
    """What stands beside the weights: how text or pictures become numbers, and how to write."""
    if isinstance(lm, VisionModel):
        if lm.preprocessing is not None:
            write_json(folder / PREPROCESSOR, lm.preprocessing)
        return
    write_files(folder, {} if lm.tokenizer is None else lm.tokenizer.files)
    if isinstance(lm, LanguageModel | Seq2SeqModel) and lm.generation_config:
        write_json(folder / "generation_config.json", lm.generation_config)


def _config(lm: Loaded) -> dict[str, Any]:
    """The config, and under `mlx_tformer` what is ours."""
    named: Any = lm.model.named_modules()
    packed = {path: way for path, module in sorted(named) if (way := _packing(module)) is not None}
    ours = {"layout": LAYOUT, "source": lm.origin, "revision": None}
    return {**lm.config.values, "mlx_tformer": {**ours, "dtype": dtype_name(lm.dtype), "quantization": packed}}


def _packing(module: nn.Module) -> Quantization | None:
    """How a module's weight is packed."""
    if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedExpertLinear):
        return None
    return {"bits": module.bits, "group_size": module.group_size, "mode": module.mode}
