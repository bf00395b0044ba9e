"""The language part of a checkpoint that also sees: its settings, the names of its weights, and what is left out.

`text_config` holds the settings of the language part, and what lies outside it, such as the ids that end a text, holds
for it as well. Qwen's first vision models have no `text_config`: there the settings lie in the open. What a nested
config leaves out is what the class of transformers takes, sizes included.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import Config
from ..families import known
from ..names import Assignment, Names
from ..settings import HARMLESS, SIZE
from .source import Source

Values = dict[str, Any]

KINDS = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "vipllava": "llama",
}
"""`model_type` of the whole -> that of its language part, where `text_config` names none."""
OPEN = ("llava", "llava_next", "llava_onevision", "mistral3", "vipllava")
"""Kinds whose language part may be of any family."""
FLAT = ("qwen2_5_vl", "qwen2_vl")
"""Kinds whose first configs have no `text_config`."""
FAMILIES = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Language parts that are of a family with another name, once their positions are those of a text."""


def _sizes(dim: int, hidden: int, heads: int, layers: int, vocab: int) -> Values:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    return dict(zip(keys, (dim, hidden, heads, layers, vocab), strict=True))


_QWEN2_VL = {
    **_sizes(8192, 29568, 64, 80, 152064),
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
}
SPARSE: dict[str, Values] = {
    "gemma3_text": _sizes(2304, 9216, 8, 26, 262208),
    "llama": _sizes(4096, 11008, 32, 32, 32000),
    "llama4_text": _sizes(5120, 8192, 40, 48, 202048),
    "mistral": _sizes(4096, 14336, 32, 32, 32000),
    "qwen2": _sizes(4096, 22016, 32, 32, 151936),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {
        **_sizes(4096, 22016, 32, 32, 151936),
        "max_position_embeddings": 128000,
        "num_key_value_heads": 32,
        "rope_theta": 500000.0,
    },
}
"""What the class of a `text_config` takes for keys that it leaves out, beyond what its family takes."""

INHERITED = ("bos_token_id", "dtype", "eos_token_id", "mlx_tformer", "pad_token_id", "torch_dtype")
"""Keys that hold for the language part if they lie outside."""
# fmt: off
SEEING = frozenset(
    {
        "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "ignore_index", "image_grid_pinpoints",
        "image_seq_length", "image_token_id", "image_token_index", "mm_tokens_per_image", "multimodal_projector_bias",
        "projector_hidden_act", "projector_layernorm_eps", "spatial_merge_size", "text_config", "tie_word_embeddings",
        "use_image_newline_parameter", "video_token_id", "video_token_index", "vision_aspect_ratio", "vision_config",
        "vision_end_token_id", "vision_feature_layer", "vision_feature_select_strategy", "vision_start_token_id",
        "vision_token_id",
    }
)
# fmt: on
"""Keys outside that are about images, or that are looked at here."""

PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""How names begin where the language part is one of several, and what stands there where it is alone."""
LEFT_OUT = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "image_newline"),
    *("model.vision_tower.", "model.vision_model.", "model.visual.", "model.multi_modal_projector."),
    "model.image_newline",
)
"""How the names of the other parts begin."""
REASON = "not part of the language model"


def language_config(source: Source) -> Config:
    """The config of a checkpoint as a family reads it: for one that also sees, that of its language part.

    Raises BadInput for a kind whose language part is not known, and for settings outside that contradict those inside
    or that nobody knows.
    """
    outer, file = source.config, source.config_file
    kind = outer.get("model_type")
    if not is_part(outer):
        if "text_config" in outer and isinstance(kind, str) and kind not in known():
            expected = f"one of {', '.join(KINDS)}: of no other kind the language part is known"
            raise Config(outer, file).wrong("model_type", expected)
        return Config(outer, file, source)
    nested = "text_config" in outer or kind not in FLAT
    inner = outer.get("text_config") if nested else {k: v for k, v in outer.items() if k not in SEEING}
    if not isinstance(inner, dict):
        raise Config(outer, file).wrong("text_config", "an object with the settings of the language part")
    if nested:
        _check_outside(outer, inner, file)
    values = _completed(outer, inner, file if not nested else f"{file}: text_config")
    tied = _tied(outer, inner if nested else {}, source.tensors)
    values |= {} if tied is None else {"tie_word_embeddings": tied}
    return Config(values, f"{file}: text_config" if nested else file, source)


def is_part(config: Mapping[str, Any]) -> bool:
    """True for the config of a checkpoint that is more than a language model."""
    return config.get("model_type") in KINDS


def _completed(outer: Values, inner: Values, file: str) -> Values:
    """The settings of the language part with what it inherits and what its class takes."""
    kind = outer["model_type"]
    named = inner.get("model_type")
    text = KINDS[kind] if named in (None, kind) else named
    if text != KINDS[kind] and not (kind in OPEN and text in known()):
        expected = f"the name of a family: {', '.join(known())}" if kind in OPEN else repr(KINDS[kind])
        raise Config(inner, file).wrong("model_type", expected)
    inherited = {key: outer[key] for key in INHERITED if outer.get(key) is not None}
    values = {**SPARSE.get(text, {}), **inner, **inherited, "model_type": FAMILIES.get(text, text)}
    for key in ("rope_parameters", "rope_scaling") if text in FAMILIES else ():
        if isinstance(values.get(key), dict):
            values[key] = _one_axis(values[key], f"{file}: {key}")
    return values


def _one_axis(table: Values, file: str) -> Values:
    """Rotary settings for a text alone.

    Qwen's vision models have three positions for each token, time, height and width, and share the rotary features
    among them (`mrope_section`, arXiv 2409.12191, section 2.1). For the tokens of a text the three are equal, so that
    whatever the shares are, it turns as by one position: the shares are checked and left out.
    """
    sections = table.get("mrope_section")
    three = isinstance(sections, list) and len(sections) == 3 and all(map(SIZE.holds, sections))
    if sections is not None and not three:
        raise Config(table, file).wrong("mrope_section", "three whole numbers")
    rest = {key: value for key, value in table.items() if key not in ("mrope_section", "mrope_interleaved")}
    return rest | {key: "default" for key in ("type", "rope_type") if rest.get(key) == "mrope"}


def _check_outside(outer: Values, inner: Values, file: str) -> None:
    """Raise BadInput for settings outside `text_config` that are not those inside; some configs repeat them."""
    for key, value in outer.items():
        if key in SEEING or key in HARMLESS or key in INHERITED or value is None:
            continue
        if key not in inner:
            raise Config(outer, file).wrong(
                key, f"nothing outside text_config that {outer['model_type']} does not have"
            )
        if inner[key] != value:
            raise Config(outer, file).wrong(key, "what text_config says")


def _tied(outer: Values, inner: Values, tensors: Iterable[str]) -> bool | None:
    """Whether the embedding serves as the head; None for what the family takes.

    Where the config outside says nothing or `text_config` contradicts it, what is stored decides, as it does in
    transformers, whose versions have asked one or the other.
    """
    outside, inside = outer.get("tie_word_embeddings"), inner.get("tie_word_embeddings")
    if outside is not None and inside in (None, outside):
        return outside
    stored = list(tensors)
    if not stored:
        return inside if outside is None else outside
    return not any(name.startswith("head.") or "lm_head." in name for name in stored)


def language_names(names: Names, config: Mapping[str, Any], tensors: Iterable[str]) -> Names:
    """A family's table as it is for a checkpoint with this config, whose tensors are called so.

    >>> names = {"model.norm": "decoder.norm", "lm_head": "head"}
    >>> language_names(names, {"model_type": "gemma3"}, ["model.language_model.norm.weight"])
    {'model.language_model.norm': 'decoder.norm', 'lm_head': 'head'}
    """
    if not is_part(config):
        return names
    stored = list(tensors)
    for theirs, alone in PREFIXES.items():
        if any(name.startswith(theirs) for name in stored):
            begins = {name: name.startswith(alone) for name in names}
            return {theirs + name.removeprefix(alone) if begins[name] else name: rule for name, rule in names.items()}
    return names


def leave_out(assignment: Assignment) -> list[str]:
    """Drop the tensors of the other parts; returns what was left out, in one line (nothing if nothing was)."""
    others = [name for name in assignment.unknown if name.startswith(LEFT_OUT)]
    assignment.unknown = [name for name in assignment.unknown if not name.startswith(LEFT_OUT)]
    assignment.dropped |= dict.fromkeys(others, REASON)
    begins = Counter(next(start for start in LEFT_OUT if name.startswith(start)).rstrip(".") for name in others)
    named = ", ".join(f"{part} ({count} tensors)" if count > 1 else part for part, count in sorted(begins.items()))
    return [f"the language part alone is used; left out: {named}"] if others else []
