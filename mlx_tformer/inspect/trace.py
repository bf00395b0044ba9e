"""`trace`: read activations while a model runs, and hold the patterns against what the model really computed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import Mismatch, UsageError
from ..memory import QUANTIZED
from ..nn import watch
from ..tokens import Tokenizer
from .drawn import Drawn, numbers
from .sites import Site, main_stack, nearest, resolve, sites_of
from .texts import Pass, Reader, Text, told

if TYPE_CHECKING:
    from .pictures import Picture


class Inspectable(Protocol):
    """What `load` returns: a model with its tokenizer."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


@dataclass(frozen=True)
class Pattern:
    """The attention of one head, or of all heads of a layer, in one text.

    values: (H, L, S), or (L, S) for one head. deficit: what each row lacks of one, (H, L) or (L,): the mass of a
    learned sink, and 1 for a query that sees nothing. queries and keys: a label for each token; first_key: the place in
    the text of the first key, which is not 0 where a window has dropped what came before.
    """

    name: str
    layer: int
    head: int | None
    values: mx.array
    deficit: mx.array
    queries: list[str]
    keys: list[str]
    first_query: int
    first_key: int


class Trace(Drawn):
    """The activations that a model's runs inside a `with` block gave, by name.

    A name is a path or an alias, as in `trace`; one that means several activations is refused, and `all` gives them.
    After several passes, as in generation, an activation is that of the whole text: token after token, keys by their
    place. A text that begins anew takes the place of the last one.
    """

    def __init__(self, lm: Inspectable, read: Sequence[str]):
        self.lm, self.read = lm, tuple(read)
        self.sites = sites_of(lm.model)
        self.notes = _notes(lm.model)
        self._asked = {name: resolve(self.sites, name) for name in self.read}
        self._wanted = {site.path: site for found in self._asked.values() for site in found}
        self._reader = Reader()
        self._errors: dict[str, float] = {}
        self._values: dict[str, mx.array] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Trace":
        proofs = {
            f"{site.module}.{kind}"
            for site in self._wanted.values()
            if site.kind == "pattern"
            for kind in ("values", "fused")
        }
        bits = {f"{site.module}.bits" for site in self.sites if site.keys is not None}
        self._stack.enter_context(watch(told(self.sites), self._reader.heard, last=True))
        self._stack.enter_context(watch(bits, self._hear_bits, last=True))
        self._stack.enter_context(watch(frozenset(self._wanted), self._keep, last=True))
        self._stack.enter_context(watch(proofs, self._prove, last=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None:
            self._check_fired()

    def _check_fired(self) -> None:
        fired = {site.path for site in self._fired()}
        for name, sites in self._asked.items():
            if not any(site.path in fired for site in sites):
                fired_sites = self._fired() or self.sites
                problem = "it did not run" if self._reader.texts else "the model did not run"
                raise UsageError(f"{name!r} was never computed: {problem}; {nearest(fired_sites, name)}")

    # --- while the model runs ---

    def _keep(self, path: str, value: mx.array) -> None:
        site = self._wanted[path]
        kept = mx.contiguous(by_text(value, site, self._reader.now(site.stack)))
        mx.eval(kept)  # here, so that what it is a part of can go
        self._reader.keep(site, kept)

    def _hear_bits(self, path: str, value: mx.array) -> None:
        note = f"keys and values were kept in {value.item()} bits: attention is that over the packed ones"
        if note not in self.notes:
            self.notes.append(note)

    def _prove(self, path: str, value: mx.array) -> None:
        module, _, kind = path.rpartition(".")
        if kind == "values":
            self._values[module] = value
            return
        pattern = self._text(self._wanted[f"{module}.pattern"]).kept[f"{module}.pattern"][-1].value
        apart = mx.abs(weighed(pattern, self._values.pop(module)) - value.astype(mx.float32)).max()
        error = (apart / mx.maximum(mx.abs(value).max().astype(mx.float32), 1e-30)).item()
        assert isinstance(error, float)
        worst = self._errors.get(f"{module}.pattern", 0.0)
        self._errors[f"{module}.pattern"] = error if not error <= worst else worst  # NaN is the worst there is

    # --- afterwards ---

    def _fired(self) -> list[Site]:
        """What was read, in the order in which it was computed."""
        kept = {path: None for text in self._reader.texts.values() for path in text.kept}  # each once
        return [self._wanted[path] for path in kept]

    def _text(self, site: Site) -> Text:
        text = self._reader.of(site.path)
        assert text is not None
        return text

    def site(self, name: str) -> Site:
        """The one activation that was read and that `name` means; raises UsageError for none and for several."""
        found = resolve(self._fired(), name)
        if len(found) > 1:
            some = ", ".join(site.name for site in found[:3])
            raise UsageError(f"{name!r} means {len(found)} activations ({some}, ...); name one, or use .all({name!r})")
        return found[0]

    def __getitem__(self, name: str) -> mx.array:
        site = self.site(name)
        return self._text(site).of(site)

    def __contains__(self, name: str) -> bool:
        return any(site.exactly(name) or site.ends(name) for site in self._fired())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """The names of everything that was read, in the order in which it was computed."""
        return [site.name for site in self._fired()]

    @property
    def layers(self) -> list[int]:
        """The layers of which something was read."""
        return sorted({site.layer for site in self._fired() if site.layer is not None})

    def all(self, name: str) -> dict[str, mx.array]:
        """Everything that was read and that a name, the end of one or a glob means."""
        return {site.name: self._text(site).of(site) for site in resolve(self._fired(), name)}

    def by_layer(self, name: str) -> dict[int, mx.array]:
        """As `all`, by layer; raises UsageError where a layer has several such activations."""
        found: dict[int, mx.array] = {}
        for site in resolve(self._fired(), name):
            if site.layer is None or site.layer in found:
                raise UsageError(f"{name!r} means several activations of a layer, or one outside; use .all({name!r})")
            found[site.layer] = self._text(site).of(site)
        return found

    def keys(self, name: str) -> range:
        """The places in the text of the keys of a pattern, of scores, of keys or values."""
        site = self.site(name)
        return self._text(site).keys(site)

    @property
    def ids(self) -> mx.array | None:
        """The ids of the text (B, L), of the decoder's where there are two; None if it began before the trace."""
        return None if self._reader.main is None else self._reader.main.ids

    @property
    def left(self) -> list[int]:
        """Padding in front of each row."""
        return [] if self._reader.main is None else self._reader.main.left

    def labels(self, stack: str = "", row: int = 0) -> list[str]:
        """The tokens of a text as a reader sees them: their text with a tokenizer, else their ids; their places if
        they are not known. stack: "encoder" or "decoder", where there are two."""
        text = self._reader.texts.get(stack) or self._reader.main
        ids = None if text is None else text.ids
        if text is None or ids is None:
            return [] if text is None else [str(i) for i in range(text.length)]
        listed = cast(list[int], ids[row].tolist())
        return [str(i) if self.lm.tokenizer is None else self.lm.tokenizer.token_text(i) for i in listed]

    def patterns(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        row: int = 0,
        stack: str | None = None,
        crosses: bool = False,
    ) -> list[Pattern]:
        """The patterns that were read, of all layers or one, of all heads or one, with labels: what pictures are made
        of. Of a model with two stacks those of the decoder, or of `stack`; crosses: those of cross-attention. Raises
        UsageError for a layer or head that was not read."""
        stack = main_stack(self.lm.model) if stack is None else stack
        found = [s for s in self._fired() if s.kind == "pattern" and s.stack == stack and s.crosses == crosses]
        chosen = [site for site in found if layer is None or site.layer == layer]
        if not chosen:
            have = ", ".join(str(site.layer) for site in found) or "none"
            which = "any layer" if layer is None else f"layer {layer}"
            raise UsageError(f"no pattern of {which} was read; there are those of: {have}")
        return [self._pattern(site, head, row) for site in chosen]

    def _pattern(self, site: Site, head: int | None, row: int) -> Pattern:
        text = self._text(site)
        values = text.of(site)
        if not 0 <= row < values.shape[0]:
            raise UsageError(f"row: found {row}, expected 0 to {values.shape[0] - 1}")
        if head is not None and not 0 <= head < values.shape[1]:
            raise UsageError(f"head: found {head}, expected 0 to {values.shape[1] - 1}")
        values = values[row] if head is None else values[row, head]
        keys, first = text.keys(site), text.kept[site.path][0].at.start
        queries = self.labels(site.stack, row)[first : first + values.shape[-2]]
        seen = self.labels("encoder" if site.crosses else site.stack, row)[keys.start : keys.stop]
        assert site.layer is not None
        return Pattern(site.name, site.layer, head, values, deficit(values), queries, seen, first, keys.start)

    def picture(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        row: int = 0,
        stack: str | None = None,
        crosses: bool = False,
    ) -> "Picture":
        """The patterns as a picture: of one head, of all heads of a layer, or of all layers; see `patterns`."""
        from .pictures import Heads

        found = self.patterns(layer, row=row, stack=stack, crosses=crosses)
        first = min(one.first_key for one in found)
        widest = max(found, key=lambda one: len(one.keys))
        # Keys that a window has dropped have nothing.
        padded = [mx.pad(one.values, [(0, 0), (0, 0), (one.first_key - first, 0)]) for one in found]
        shown = {str(one.layer): numbers(values) for one, values in zip(found, padded, strict=True)}
        picture = Heads("", shown, found[0].queries, widest.keys, notes=self.notes)
        return picture if layer is None or head is None else picture.head(layer, head)

    def deficit(self, name: str) -> mx.array:
        """What each row of a pattern lacks of one, (B, H, L): the mass of a learned sink, if there is one."""
        return deficit(self[name])

    def check(self, tol: float = 1e-4) -> float:
        """The largest difference between pattern @ values and what the fused path gave for the same queries, keys and
        values, as a share of the largest output, over all patterns that were read.

        That is what a missing rotation, a missing mask and heads that are shared out wrongly cannot pass. Raises
        Mismatch with the worst layer if it is not at most `tol`, UsageError if no pattern was read.
        """
        if not self._errors:
            raise UsageError('there is nothing to check: no pattern was read; trace with read=["attn.pattern"]')
        path, worst = max(self._errors.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])
        if not worst <= tol:
            problem = f"pattern @ values differs from the fused output by {worst:.2g} of its largest value"
            raise Mismatch(f"{path.lstrip('.')}: {problem}, expected at most {tol:g}")
        return worst


def trace(lm: Inspectable, read: Sequence[str]) -> Trace:
    """Read activations of everything that `lm` runs inside the block: calls, generation, chunks, steps.

    read: names, aliases, ends of names or globs (see `sites_of`): "attn.pattern", "residual.out",
    "decoder.layers.3.attn.op.q", "blocks.*.attn.hook_pattern". Reading changes no result, and leaves attention fused
    unless patterns or scores are read. What is read is copied and evaluated layer by layer.

    Raises UsageError, with the nearest names, for a name that the model does not have, and at the end of the block for
    one that was never computed.

    >>> import mlx_tformer as mt
    >>> lm = mt.load("shakespeare")
    >>> with trace(lm, read=["attn.pattern"]) as t:
    ...     _ = lm(lm.tokens("ROMEO:"))
    >>> t["blocks.0.attn.hook_pattern"].shape == t["decoder.layers.0.attn.op.pattern"].shape
    True
    """
    if isinstance(read, str):
        raise UsageError(f"read: found {read!r}, expected a list of names: [{read!r}]")
    return Trace(lm, read)


def by_text(value: mx.array, site: Site, now: Pass) -> mx.array:
    """An activation by text and token, (B, L, ...), where all tokens of a batch stand in one row, (B * L, ...)."""
    if site.width is None or value.ndim != site.width - 1 or not now.length or value.shape[0] % now.length:
        return value
    return mx.unflatten(value, 0, (-1, now.length))


def weighed(pattern: mx.array, values: mx.array) -> mx.array:
    """pattern (B, H, L, S) @ values (B, K, S, E), each value head for H / K heads, in float32."""
    grouped = mx.unflatten(pattern.astype(mx.float32), 1, (values.shape[1], -1))
    return (grouped @ values.astype(mx.float32)[:, :, None]).flatten(1, 2)


def deficit(pattern: mx.array) -> mx.array:
    """What the rows of a pattern lack of one."""
    return 1 - pattern.sum(axis=-1)


def _notes(model: nn.Module) -> list[str]:
    """What a reader should know of the numbers."""
    bits = sorted({m.bits for m in model.modules() if isinstance(m, QUANTIZED)})
    if not bits:
        return []
    return [
        f"the weights are quantized ({', '.join(map(str, bits))} bits): these are the quantized model's activations"
    ]
