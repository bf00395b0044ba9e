"""From GGUF's metadata and tensor names to a Hugging Face config and Hugging Face names.

`architectures` has a row of data for each `general.architecture`. The keys are those of the ggml project's
`docs/gguf.md`; `{arch}.` keys that are not understood are refused unless they stand at a value that changes nothing.
"""

import re
from collections.abc import Iterable, Mapping
from math import nextafter
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadInput
from .architectures import ARCHITECTURES, WITH_EXPERTS, Architecture
from .container import TensorInfo, brief, shown
from .fields import Fields
from .rope import FREQUENCY_TENSORS, rope_parameters

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]*)(?=\.|$)")

NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "expert_count": 0,
    "expert_gating_func": 1,  # softmax
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "pooling_type": 0,
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
}
"""Keys that a family does not read, and the value at which they change nothing."""

HARMLESS = {"vocab_size", "rope.scaling.finetuned"}
"""Keys that change nothing whatever they say; the vocabulary is counted in the embedding."""


def architecture(path: Path, metadata: dict[str, Any]) -> Architecture:
    """The row for a file; raises BadInput for what is not a whole language model of a known architecture."""
    general = Fields(path, metadata, "general.")
    if general.text("type", "model") != "model":
        raise general.wrong("type", "model: adapters and projectors are not whole models")
    if Fields(path, metadata).whole("split.count", 1, least=0) > 1:
        raise Fields(path, metadata).wrong("split.count", "1: join the files first (llama-gguf-split --merge)")
    name = general.text("architecture")
    if name not in ARCHITECTURES:
        raise general.wrong("architecture", f"one of {', '.join(sorted(ARCHITECTURES))}")
    if name in WITH_EXPERTS and Fields(path, metadata, f"{name}.").whole("expert_count", 0, least=0) > 0:
        return WITH_EXPERTS[name]
    return ARCHITECTURES[name]


def hugging_face_names(path: Path, arch: Architecture, tensors: Iterable[str]) -> dict[str, str]:
    """Tensor names: the file's -> Hugging Face's; the frequency tensors are left out.

    Raises BadInput that lists the tensors which the architecture does not have.
    """
    names, unknown = {}, []
    for name in tensors:
        if name in FREQUENCY_TENSORS:
            continue
        module, _, leaf = name.rpartition(".")
        numbers = _NUMBER.findall(module)
        template = _NUMBER.sub("{}", module)
        if template not in arch.names or leaf not in ("weight", "bias") or template.count("{}") != len(numbers):
            unknown.append(shown(name))
            continue
        names[name] = f"{arch.names[template].format(*numbers)}.{leaf}"
    if unknown:
        listed = ", ".join(unknown[:20]) + (f" and {len(unknown) - 20} more" if len(unknown) > 20 else "")
        raise BadInput(f"tensors that {arch.model_type} does not have: {listed}", file=path)
    return names


def config(
    path: Path,
    metadata: dict[str, Any],
    arch: Architecture,
    tensors: Mapping[str, TensorInfo],
    divisors: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """A Hugging Face config in the dialect of transformers 5; `divisors` are the frequency tensors that the file has.

    Raises BadInput for a key that is missing, not as expected, or not understood.
    """
    fields = Fields(path, metadata, f"{metadata['general.architecture']}.")
    sizes = _sizes(fields, arch.partial)
    values = {"model_type": arch.model_type, "hidden_act": "silu", **sizes, **arch.constants}
    values["num_hidden_layers"] = _layers(fields, tensors)
    values["vocab_size"] = _vocabulary(fields, tensors)
    values[arch.eps[0]] = fields.number(arch.eps[1])
    values["rope_parameters"] = _rotary(fields, values["head_dim"], divisors)
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values |= {key: tensor in tensors for key, tensor in arch.biases.items()}
    for reading in arch.readings:
        values |= reading(fields, values)
    _refuse_unread(fields)
    return values | token_ids(path, metadata, values["vocab_size"])


def _sizes(fields: Fields, partial: bool) -> dict[str, int]:
    dim, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    return {
        "hidden_size": dim,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": _head_dim(fields, dim, heads, partial),
        "intermediate_size": fields.whole("feed_forward_length"),
        "max_position_embeddings": fields.whole("context_length"),
    }


def _head_dim(fields: Fields, dim: int, heads: int, partial: bool) -> int:
    """Features of a head of q, k and v alike; all of them turn unless `partial`, where their number alone says less."""
    turning = fields.has("rope.dimension_count") and not partial
    if not fields.has("attention.key_length") and not turning and dim % heads:
        raise fields.wrong("attention.head_count", f"a divisor of embedding_length ({dim})")
    implied = fields.whole("rope.dimension_count") if turning else dim // heads or 1
    head_dim = fields.whole("attention.key_length", implied)
    for key in ("attention.value_length",) if partial else ("rope.dimension_count", "attention.value_length"):
        if fields.whole(key, head_dim) != head_dim:
            raise fields.wrong(key, f"{head_dim}, the features of a head")
    if head_dim % 2:
        raise fields.wrong("attention.key_length", f"an even number of features ({head_dim})")
    return head_dim


def _rotary(fields: Fields, head_dim: int, divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """`rope_parameters`, with the share of a head that turns if that is not all of it."""
    turning = fields.whole("rope.dimension_count", head_dim)
    if turning > head_dim or turning % 2:
        raise fields.wrong("rope.dimension_count", f"an even number up to {head_dim}, the features of a head")
    parameters = rope_parameters(fields, turning, divisors)
    if turning == head_dim:
        return parameters
    share = turning / head_dim
    # Whoever multiplies again and cuts off must not lose a feature to rounding.
    return {**parameters, "partial_rotary_factor": share if int(head_dim * share) == turning else nextafter(share, 1)}


def _layers(fields: Fields, tensors: Iterable[str]) -> int:
    layers = fields.whole("block_count")
    found = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(found) != layers or any(int(number) >= layers for number in found):
        raise fields.wrong("block_count", f"{len(found)}, as many as the layers that the tensors name, from 0 on")
    return layers


def _vocabulary(fields: Fields, tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding, which are as many as the tokens or more."""
    if "token_embd.weight" not in tensors:
        raise fields.wrong_tensor("token_embd.weight", "no such tensor", "the embedding")
    shape = tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise fields.wrong_tensor("token_embd.weight", f"shape {shape}", "a matrix")
    return shape[0]


def _refuse_unread(fields: Fields) -> None:
    left = [key.removeprefix(fields.prefix) for key in fields.unread()]
    matters = [key for key in left if key not in HARMLESS and not _is_neutral(key, fields.get(key))]
    if matters:
        first, *others = matters
        more = f" (and {', '.join(shown(fields.prefix + key) for key in others[:20])})" if others else ""
        expected = NEUTRAL.get(first, "no such key")
        raise fields.wrong(first, f"{expected}: its meaning is not known here, and it could change the results{more}")


def _is_neutral(key: str, value: Any) -> bool:
    if key not in NEUTRAL or isinstance(value, np.ndarray | list):
        return False
    return bool(value == NEUTRAL[key])


def token_ids(path: Path, metadata: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, where the file has them.

    Raises BadInput if an id, or the number of tokens, is beyond the rows of the embedding.
    """
    fields = Fields(path, metadata, "tokenizer.ggml.")
    if fields.has("tokens") and len(fields.strings("tokens")) > vocabulary:
        found = f"{len(fields.strings('tokens'))} tokens"
        raise fields.wrong_tensor("tokenizer.ggml.tokens", found, f"at most {vocabulary}, the rows of the embedding")
    ids = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: _id(fields, key, vocabulary) for ours, key in ids.items() if fields.has(key)}


def generation_config(path: Path, metadata: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """What `generation_config.json` would say; all ids that end a text or a turn are listed."""
    fields = Fields(path, metadata, "tokenizer.ggml.")
    found = token_ids(path, metadata, vocabulary)
    keys = [key for key in ("eos_token_id", "eot_token_id", "eom_token_id") if fields.has(key)]
    ends = list(dict.fromkeys(_id(fields, key, vocabulary) for key in keys))
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _id(fields: Fields, key: str, vocabulary: int) -> int:
    value = fields.whole(key, least=0)
    if value >= vocabulary:
        raise fields.wrong(key, f"a token below {vocabulary}")
    return value


def rotary_rows(heads: int, head_dim: int) -> np.ndarray:
    """For each row of q or k in Hugging Face's order, its row in a file that keeps neighbours together.

    The file has features 2i and 2i + 1 turn together, Hugging Face i and i + head_dim / 2.

    >>> rotary_rows(heads=1, head_dim=6)
    array([0, 2, 4, 1, 3, 5])
    """
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def check_rotary_rows(path: Path, info: TensorInfo, heads: int, head_dim: int) -> None:
    """Raise BadInput unless a tensor of q or k has a row for each feature of each head."""
    if info.shape[0] != heads * head_dim or len(info.shape) > 2:
        expected = f"{heads * head_dim} rows: {heads} heads of {head_dim}"
        raise BadInput(f"found shape {brief(info.shape)}, expected {expected}", file=path, field=shown(info.name))
