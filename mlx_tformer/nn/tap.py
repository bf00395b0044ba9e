"""The seam for watchers: every activation with a name passes through `tap` on its way.

A module offers its activations with `tap(self, "pattern", value)`. Nobody listens most of the time, and then a tap
is one look at a number: it adds no node to the graph and changes nothing. A watcher is told the path of
the activation (`decoder.layers.3.attn.op.pattern`) and may put another value in its place.
"""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from threading import Lock
from typing import Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

M = TypeVar("M", bound=nn.Module)


class Module(nn.Module):
    """An MLX module that knows where it stands in the model: `decoder.layers.3.attn.op`."""

    precise: tuple[str, ...] = ()
    """Parameters that stay in the dtype they are stored in, whatever the model computes in."""
    sites: tuple[str, ...] = ()
    """Names of the activations that it offers, those that are computed only if somebody asks included."""
    packs: bool = True
    """Whether the texts of a row that holds several stay apart in it (`text_starts`), as they do in whatever works on
    each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""


@dataclass(frozen=True, eq=False, repr=False)
class Elsewhere(Generic[M]):
    """A module that stands at another place of the model: here it is used, and its weights are not there once more."""

    module: M


def name_modules(model: nn.Module) -> None:
    """Tell each `Module` below `model` its path; done once, when a model is complete."""
    for path, module in model.named_modules():
        if isinstance(module, Module):
            module.path = path


@dataclass(frozen=True)
class Watcher:
    """A glob over activation paths, or the paths themselves, and what to do with a match: return None to keep the
    value, or a new one. of: the modules whose activations count, by `id`; None: those of all models."""

    pattern: str | Set[str]
    see: Callable[[str, mx.array], mx.array | None]
    last: bool = False
    of: Set[int] | None = None

    def wants(self, module: Module, path: str) -> bool:
        """True if `path` of this module is one that the watcher asked for."""
        if self.of is not None and id(module) not in self.of:
            return False
        return fnmatchcase(path, self.pattern) if isinstance(self.pattern, str) else path in self.pattern


_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
_listening = _watchers.get  # looked up once and not for every activation
_blocks = 0
"""In how many blocks, of all threads, somebody watches: while there is none, an activation costs one look at this."""
_counting = Lock()


def wanted(module: Module, name: str) -> bool:
    """True if somebody watches this activation; asked before computing one that is not needed otherwise."""
    if not _blocks:
        return False
    return any(watcher.wants(module, f"{module.path}.{name}") for watcher in _listening())


def tap(module: Module, name: str, value: mx.array) -> mx.array:
    """Offer an activation to the watchers; returns it, or what a watcher put in its place."""
    if not _blocks:
        return value
    for watcher in _listening():
        path = f"{module.path}.{name}"
        if watcher.wants(module, path):
            changed = watcher.see(path, value)
            value = value if changed is None else changed
    return value


def watching() -> tuple[Watcher, ...]:
    """Those who watch now."""
    return _watchers.get()


@contextmanager
def _heard_by(watchers: tuple[Watcher, ...]) -> Iterator[None]:
    """These are the watchers of what runs in the block."""
    global _blocks
    with _counting:
        _blocks += 1
    token = _watchers.set(watchers)
    try:
        yield
    finally:
        _watchers.reset(token)
        with _counting:
            _blocks -= 1


@contextmanager
def recorded(watchers: tuple[Watcher, ...]) -> Iterator[dict[str, mx.array]]:
    """What these watchers would see of the block, by path; they are not called, and nobody else is."""
    found: dict[str, mx.array] = {}
    with _heard_by(tuple(replace(watcher, see=found.__setitem__, last=False) for watcher in watchers)):
        yield found


@contextmanager
def watch(
    pattern: str | Set[str],
    see: Callable[[str, mx.array], mx.array | None],
    *,
    last: bool = False,
    of: nn.Module | None = None,
) -> Iterator[None]:
    """Call `see(path, value)` on every activation inside the block whose path matches the glob `pattern`, or is one of
    several; `of` a model, and not of others that run there as well.

    Watchers are called in the order in which they came, and those that are `last` after the others: so they see what
    the model goes on with, whoever changes it.

    >>> from mlx_tformer.nn import GatedMlp
    >>> seen = []
    >>> with watch("*.hidden", lambda path, value: seen.append((path, value.shape))):
    ...     _ = GatedMlp(8, 16)(mx.zeros((1, 3, 8)))
    >>> seen
    [('.hidden', (1, 3, 16))]
    """
    own = None if of is None else frozenset(map(id, of.modules()))
    every = (*_watchers.get(), Watcher(pattern, see, last, own))
    with _heard_by(tuple(sorted(every, key=lambda watcher: watcher.last))):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Nobody watches what runs in the block."""
    with _heard_by(()):
        yield
