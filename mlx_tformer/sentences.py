"""How the authors of an encoder make one vector of a text, as sentence-transformers writes it down.

`modules.json` names what follows the encoder, `1_Pooling/config.json` says how its hidden states become one vector, and
`sentence_bert_config.json` how many tokens of a text count (`max_seq_length`).
"""

import json
from collections.abc import Mapping
from typing import Any

from .errors import BadInput

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
FILES = (MODULES, POOLING, LENGTH)
FOLLOWED = {"Transformer", "Pooling", "Normalize", "Dropout"}
"""Modules whose part we do: normalising is the caller's choice, and dropout does nothing once a model is trained."""
POOLS = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""Their names and ours."""
SWITCH = "pooling_mode_"


def pool_of(files: Mapping[str, bytes], origin: str) -> str:
    """ "mean", "cls" or "last", whichever the files of a checkpoint say; "mean" if they say nothing.

    Raises BadInput for a broken file, and for what is done to hidden states that is none of these.

    >>> pool_of({"1_Pooling/config.json": b'{"pooling_mode": "cls"}'}, "bge")
    'cls'
    """
    modules = _read(files, MODULES, origin, list) or []
    kinds = [str(one.get("type")).rpartition(".")[2] if isinstance(one, dict) else repr(one) for one in modules]
    other = next((kind for kind in kinds if kind not in FOLLOWED), None)
    if other is not None:
        expected = f"only {', '.join(sorted(FOLLOWED))}; name a pool to do without"
        raise BadInput(f"found {other}, expected {expected}", file=f"{origin}/{MODULES}", field="type")
    asked = _read(files, POOLING, origin, dict)
    if asked is None:
        return "mean"
    switches = {f"{SWITCH}mean_tokens": True, **asked}
    on = [key.removeprefix(SWITCH) for key, value in switches.items() if key.startswith(SWITCH) and value]
    chosen = str(asked.get("pooling_mode") or "+".join(key.removesuffix("s").removesuffix("_token") for key in on))
    if chosen not in POOLS:
        expected = f"one of {', '.join(POOLS)}; name a pool to do without"
        raise BadInput(f"found {chosen!r}, expected {expected}", file=f"{origin}/{POOLING}", field="pooling_mode")
    return POOLS[chosen]


def length_of(files: Mapping[str, bytes], origin: str) -> int | None:
    """Of how many tokens the authors read a text, what is behind them being cut off; None if they do not say."""
    found = (_read(files, LENGTH, origin, dict) or {}).get("max_seq_length")
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        problem = f"found {found!r}, expected a whole number of 1 or more"
        raise BadInput(problem, file=f"{origin}/{LENGTH}", field="max_seq_length")
    return found


def _read(files: Mapping[str, bytes], name: str, origin: str, kind: type) -> Any:
    """The content of a file, or None if there is none."""
    if name not in files:
        return None
    try:
        found = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}", file=f"{origin}/{name}") from None
    if not isinstance(found, kind):
        expected = "a list" if kind is list else "an object"
        raise BadInput(f"found a {type(found).__name__}, expected {expected}", file=f"{origin}/{name}")
    return found
