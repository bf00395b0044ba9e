"""Make the PyTorch files of this folder, and the values that must be read from them.

Run with Python that has `torch` (2.13 was used) and `safetensors`: `python tests/data/pickles/make.py`.
`expected.safetensors` holds what is in each file under FILE/NAME, float64 as float32.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
KINDS = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def module() -> nn.Module:
    """A module whose state dict has attributes, a tied weight, a buffer and a counter."""
    net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 7, bias=False)})
    net["head"].weight = net["embed"].weight
    return net


def kinds() -> dict[str, torch.Tensor]:
    """A tensor of each kind, with values that a wrong reading would show."""
    numbers = torch.tensor([[0.0, 1.0, 2.5], [100.0, 3.0, 117.0]])
    odd = torch.tensor([0x7FC1, -0x8000, 0x7F80, -0x7F, 0x0001], dtype=torch.int16).view(torch.bfloat16)
    double = torch.tensor([0.1, 1e-300, -3.5, 1e300], dtype=torch.float64)
    return {str(kind): numbers.to(kind) for kind in KINDS} | {"odd": odd, "double": double}


def views() -> dict[str, torch.Tensor]:
    """Tensors that share storages, or do not lie in the order of their values."""
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    half = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    return {
        "whole": whole,
        "tied": whole,
        "rows": whole[2:5],
        "transposed": whole.T,
        "columns": whole[:, 3:7],
        "every other": whole[1::2, ::3],
        "corner": whole[5, 9],
        "permuted": half.permute(2, 0, 1),
        "swapped": half.transpose(0, 1),
        "one row": torch.arange(5).expand(1, -1),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7, dtype=torch.float16),
    }


def main() -> None:
    torch.manual_seed(0)
    state = module().state_dict()
    training = {"model": state, "optimizer": {"state": {0: torch.ones(2)}, "groups": [{"lr": 0.1}]}, "epoch": 3}
    mixed = {"a": torch.ones(2, 3), "version": "1.0", "steps": 12, "rate": 0.5, "none": None}
    parameters = {"weight": nn.Parameter(torch.arange(6.0).reshape(2, 3)), "size": torch.ones(2)}
    files = {
        "module.bin": (state, {}),
        "kinds.bin": (kinds(), {}),
        "views.bin": (views(), {}),
        "mixed.bin": (mixed, {}),
        "training.bin": (training, {}),
        "parameters.bin": (parameters, {}),
        "protocol4.bin": (state, {"pickle_protocol": 4}),
        "legacy-module.bin": (state, {"_use_new_zipfile_serialization": False}),
        "legacy-kinds.bin": (kinds(), {"_use_new_zipfile_serialization": False}),
        "legacy-views.bin": (views(), {"_use_new_zipfile_serialization": False}),
    }
    expected = {}
    for name, (value, how) in files.items():
        torch.save(value, HERE / name, **how)
        expected |= values(name, value)
    shards = {
        "pytorch_model-00001-of-00002.bin": {"a": torch.ones(3, 2), "b": torch.arange(4)},
        "pytorch_model-00002-of-00002.bin": {"c": torch.arange(6.0).reshape(2, 3).bfloat16()},
    }
    (HERE / "sharded").mkdir(exist_ok=True)
    for name, value in shards.items():
        torch.save(value, HERE / "sharded" / name)
        expected |= values(f"sharded/{name}", value)
    places = {tensor: name for name, value in shards.items() for tensor in value}
    index = {"metadata": {"total_size": 68}, "weight_map": places}
    (HERE / "sharded" / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")
    save_file(expected, HERE / "expected.safetensors")


def values(name: str, saved: dict[str, object]) -> dict[str, torch.Tensor]:
    """The tensors that were saved in a file, each on its own and in order."""
    found = saved.get("model", saved)
    tensors = {key: value.detach() for key, value in found.items() if isinstance(value, torch.Tensor)}
    floats = {key: value.float() if value.dtype == torch.float64 else value for key, value in tensors.items()}
    return {f"{name}/{key}": value.clone(memory_format=torch.contiguous_format) for key, value in floats.items()}


main()
