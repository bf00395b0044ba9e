"""What the tests share: the golden cases, and models made from them."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

import mlx_tformer as mt
from mlx_tformer.nn import LM, Attention, LatentAttention, watch
from mlx_tformer.nn.ssm import StateSpace

GOLDEN = Path(__file__).parent / "golden"


def cases_of(kind: str) -> list[str]:
    """The golden cases of one kind: "lm" for decoders, "mlm" for encoders, "vision" for those of images, "seq2seq" for
    encoders with decoders."""
    files = GOLDEN.glob("*/case.json")
    return sorted(file.parent.name for file in files if json.loads(file.read_text())["kind"] == kind)


CASES = cases_of("lm")


def load(folder: Path) -> LM:
    """The model in a Hugging Face folder, in float32."""
    return mt.load(folder, dtype="float32").model


def tensors(file: Path) -> dict[str, mx.array]:
    """The tensors in a safetensors file."""
    found = mx.load(str(file))
    assert isinstance(found, dict)
    return found


def leaves(module: nn.Module) -> dict[str, mx.array]:
    """The parameters of a module by path."""
    return dict(tree_flatten(module.parameters()))


M = TypeVar("M", bound=nn.Module)


def shaken(module: M) -> M:
    """The module with random weights, the same every time, in which no norm is one and no bias zero."""
    noise = [0.3 * mx.random.normal(v.shape, key=mx.random.key(i)) for i, v in enumerate(leaves(module).values())]
    norms = [v.ndim == 1 and name.endswith("weight") for name, v in leaves(module).items()]
    module.load_weights([(k, x + n) for k, x, n in zip(leaves(module), noise, norms, strict=True)])
    return module


def unpack(model: nn.Module) -> None:
    """Put dense matrices in the place of packed ones."""
    packed = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    model.update_modules(tree_unflatten([(name, _dense(module)) for name, module in packed]))
    mx.eval(model.parameters())


def _dense(module: nn.QuantizedLinear | nn.QuantizedEmbedding) -> nn.Module:
    weight = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
    if isinstance(module, nn.QuantizedEmbedding):
        made: nn.Module = nn.Embedding(1, 1)
    else:
        made = nn.Linear(1, 1, bias=False)
        if "bias" in module:
            made.bias = module.bias
    made.weight = weight
    return made


@cache
def golden(case: str) -> LM:
    """The model of a golden case; tests must not change it."""
    return load(GOLDEN / case)


@cache
def opened(case: str) -> Any:
    """What `load` makes of a golden case, a decoder or an encoder; tests must not change it."""
    return mt.load(GOLDEN / case, dtype="float32")


def config_of(case: str) -> dict[str, Any]:
    """The config of a golden case, to be changed at will."""
    return json.loads((GOLDEN / case / "config.json").read_text())


def attentions(model: LM) -> list[Attention | LatentAttention]:
    """The attention of each layer that has one."""
    return [layer.attn.op for layer in model.decoder.layers if "attn" in layer.order]


def state_spaces(model: LM) -> list[StateSpace]:
    """The state spaces of a model, in order."""
    return [module for module in model.modules() if isinstance(module, StateSpace)]


def ids_of(case: str) -> mx.array:
    """The text of a golden case, (1, 24)."""
    return mx.array(expected(case)["input_ids"])


@cache
def expected(case: str) -> dict[str, np.ndarray]:
    """What transformers computes from a golden case."""
    return {name: np.array(value) for name, value in tensors(GOLDEN / case / "expected.safetensors").items()}


def variant(case: str, config: Mapping[str, Any], folder: Path) -> LM:
    """The weights of a golden case under another config; `folder` is an empty one to put both into."""
    shutil.copy(GOLDEN / case / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder)


def limit(logits: np.ndarray) -> float:
    """How far logits may be from transformers' at most (golden/README.md)."""
    return 2e-4 * float(logits.std()) + 1e-4


def gap(found: mx.array, wanted: mx.array | np.ndarray) -> float:
    """The largest difference between two arrays of one shape; NaN is never close to anything."""
    a, b = np.array(found.astype(mx.float32), np.float64), np.array(wanted, np.float64)
    assert a.shape == b.shape, f"{a.shape} is not {b.shape}"
    return float(np.abs(a - b).max()) if a.size else 0.0


@contextmanager
def seen(pattern: str) -> Iterator[dict[str, mx.array]]:
    """The activations whose paths match `pattern`, by path, of what runs in the block."""
    found: dict[str, mx.array] = {}

    def see(path: str, value: mx.array) -> None:
        found[path] = value

    with watch(pattern, see):
        yield found
