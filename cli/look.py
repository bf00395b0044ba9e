"""What `mlx-tformer inspect` looks at: a model, a text for it, and the run that is watched."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

import mlx_tformer as mt
from mlx_tformer import inspect
from mlx_tformer.inspect.sites import STACKS, main_stack
from mlx_tformer.nn import watch

from .progress import progress_bar

if TYPE_CHECKING:
    from mlx_tformer.inspect.pictures import Picture

    from .inspect import Request

TITLES = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
"""The parts of models that have attention."""
MOST = 2**28
"""Weights of patterns that are held at a time: 1 GB."""
WRITTEN = 32
"""Tokens that the decoder beside an encoder writes, unless told otherwise."""


@dataclass(frozen=True)
class View:
    """What there is to see: `pictures`, the first of which is the PNG; lines to be printed below; all numbers; and what
    the terminal shows, if that is not the first picture alone."""

    title: str
    pictures: "list[Picture]"
    lines: list[str]
    numbers: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    terminal: "list[Picture] | None" = None

    @property
    def shown(self) -> "list[Picture]":
        """The pictures for the terminal."""
        return self.pictures[:1] if self.terminal is None else self.terminal


@dataclass(frozen=True)
class Look:
    """A model, a text or a picture for it, and what was asked for."""

    lm: Any
    ids: mt.tokens.Tokens | None
    asked: "Request"
    pixels: mx.array | None = None

    @classmethod
    def of(cls, lm: Any, text: str | None, asked: "Request") -> "Look":
        """The ids of a text, with the chat template around it if the model has one and it was not to be left out; for
        a model of images, the picture in the file that the text names."""
        if text is None:
            return cls(lm, None, asked)
        if isinstance(lm, mt.VisionModel):
            return cls(lm, None, asked, lm.pixels(text))
        chat = isinstance(lm, mt.LanguageModel) and lm.has_chat_template and not asked.raw
        ids = lm.chat([{"role": "user", "content": text}]) if chat else lm.tokens(text)
        if not ids:
            raise mt.UsageError("prompt: it has no tokens")
        if len(ids) > lm.context:
            raise mt.UsageError(f"prompt: it has {len(ids)} tokens, and the model has positions for {lm.context}")
        return cls(lm, ids, asked)

    @property
    def length(self) -> int:
        """Tokens that are read: of the text, or of the picture."""
        return len(self.tokens) if self.pixels is None else self.lm.model.context

    @property
    def tokens(self) -> mt.tokens.Tokens:
        """The ids of the text."""
        assert self.ids is not None
        return self.ids

    @property
    def parts(self) -> dict[str, list[inspect.Site]]:
        """The patterns of each part of the model; raises UsageError for a model without attention, and for a part or
        an option that it does not have."""
        found: dict[str, list[inspect.Site]] = {}
        for site in inspect.sites_of(self.lm.model):
            if site.kind == "pattern" and site.stack in STACKS:
                found.setdefault("cross" if site.crosses else site.stack, []).append(site)
        if not found:
            kind = self.lm.config.model_type
            raise mt.UsageError(f"{self.lm.origin} has no attention ({kind}); --lens looks at any model that writes")
        chosen = self.asked.part
        if chosen is not None and chosen not in found:
            raise mt.UsageError(f"part: found {chosen}, expected one of {', '.join(found)} for this model")
        order = [name for name in TITLES if name in found]
        return {name: found[name] for name in order if chosen in (None, name)}

    def about(self, mode: str) -> dict[str, Any]:
        """What every result tells of itself."""
        if self.pixels is not None:
            tokens = self.lm.model.embed.labels
        else:
            tokens = [self.lm.tokenizer.token_text(i) for i in self.ids or []]
        return {"model": self.lm.origin, "mode": mode, "ids": list(self.ids or []), "tokens": tokens}

    def run(self, watching: "AbstractContextManager[Any] | None" = None) -> list[int]:
        """Let the model read, and write if it is to; returns the ids that it wrote."""
        lm, count = self.lm, self.asked.max_tokens
        if not isinstance(lm, mt.Seq2SeqModel) and self.asked.target is not None:
            raise mt.UsageError("target: this model has no decoder beside an encoder")
        if isinstance(lm, mt.EncoderModel | mt.VisionModel) and count is not None:
            raise mt.UsageError("max_tokens: this model reads and does not write")
        with counted(lm.model, 1 if self.asked.target is not None else self._passes()):
            if isinstance(lm, mt.Seq2SeqModel):
                return self._conditioned(lm)
            if count is None:
                lm(self.tokens if self.pixels is None else self.pixels)
                return []
            made = lm.generate(self.tokens, max_tokens=count, watch=watching)
            return [step.token for step in made]

    def _passes(self) -> int:
        two = isinstance(self.lm, mt.Seq2SeqModel)
        return self.asked.max_tokens or (WRITTEN if two else 1)

    def _conditioned(self, lm: mt.Seq2SeqModel) -> list[int]:
        """The same for a model with two texts."""
        if self.asked.target is None:
            return [step.token for step in lm.generate(self.tokens, max_tokens=self.asked.max_tokens or WRITTEN)]
        first = [] if lm.rules.first is None else [lm.rules.first]
        assert lm.tokenizer is not None
        own = [i for i in lm.tokenizer.encode(self.asked.target) if i not in lm.end_ids and i not in first]
        lm(self.tokens, decoder_input_ids=[lm.rules.start, *first, *own])
        return []

    def traced(self, names: "Sequence[str]") -> inspect.Trace:
        """What these activations were while the model ran."""
        with inspect.trace(self.lm, read=names) as t:
            self.run()
        return t


@contextmanager
def counted(model: Any, passes: int) -> Iterator[None]:
    """A progress bar of layers while a model runs so many times."""
    stacks = [model[name] for name in STACKS if name in model]
    total = sum(len(stack.layers) for stack in stacks) + (passes - 1) * len(model[main_stack(model)].layers)
    outs = {f"{name}.layers.{i}.out" for name in STACKS if name in model for i in range(len(model[name].layers))}
    with progress_bar("looking", "layers") as show:
        if show is None:
            yield
            return
        done = 0

        def see(path: str, value: object) -> None:
            nonlocal done
            done += 1
            show(min(done, total), total)

        with watch(outs, see, last=True):
            yield


def fits(look: Look, sites: list[inspect.Site]) -> None:
    """Raise UsageError for more weights than can be held."""
    modules = dict(look.lm.model.named_modules())
    count = sum(modules[site.module].heads for site in sites)
    length = look.length + (look.asked.max_tokens or 0)
    if count * length**2 > MOST:
        size = 4 * count * length**2 / 1e9
        way = "choose --layer, or use --stats" if look.asked.layer is None else "use --stats"
        raise mt.UsageError(f"the patterns of {length} tokens would take {size:.1f} GB; {way}")
