"""One short file a family: what it is made of (`model`), and what its weights are called (`names`).

A file is named as the config's `model_type`, so adding a family is adding a file: CONTRIBUTING.md goes through it. Read
`llama` first, which most others build on, then `gpt2` (other names and norms), `mixtral` (experts) and `gemma3_text`
(layers of two kinds).
"""

import difflib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ..config import Config
from ..errors import BadInput
from ..names import Names
from ..nn import Model


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` become a model."""

    name: str
    about: str
    absent: dict[str, Any]
    """What the family's config class takes for keys that a config leaves out."""
    _model: Callable[[Config], Model]
    _names: Callable[[Config], Names]

    def model(self, c: Config) -> Model:
        """The module tree that a config describes."""
        return self._model(c.taking(self.absent))

    def names(self, c: Config) -> Names:
        """Where the checkpoint's weights go in it."""
        return self._names(c.taking(self.absent))


def known() -> list[str]:
    """The `model_type`s that there is a family for, in alphabetical order.

    >>> "llama" in known()
    True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


@cache
def family(model_type: str, file: str = "config.json") -> Family:
    """The family for a `model_type`; raises BadInput, about `file`, that lists the known ones, nearest first."""
    name = model_type.replace("-", "_")
    if name not in known():
        near = difflib.get_close_matches(name, known(), n=len(known()), cutoff=0.0)
        raise BadInput(f"found {model_type!r}, expected one of {', '.join(near)}", file=file, field="model_type")
    module = import_module(f"{__name__}.{name}")
    return Family(name, (module.__doc__ or "").strip(), module.ABSENT, module.model, module.names)
