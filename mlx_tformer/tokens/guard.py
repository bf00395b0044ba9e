"""Limits for chat templates, which come with a checkpoint and so from strangers: time, sizes and what may be called.

Jinja's sandbox keeps a template away from Python's internals, but not from `"a" * 10**10` or a loop that never ends. So
every step that can repeat or grow asks a `Budget` first: a turn of a loop, a call, a filter, a test, an operator, a
literal and every piece of output. No step between two questions costs more than a pass over a few million characters,
and so neither a thread nor a signal is needed to stop a template.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

SECONDS = 2.0
"""Wall time that one rendering may take."""
CHARACTERS = 4_000_000
"""Size that one value, or the output, may have, beside four times the size of the conversation."""
TOUCHES = 25
"""How often a template may build values of the full size, all of them counted together."""
BITS = 10_000
"""Size of an integer: multiplying, dividing and printing take more than linear time."""
NODE = 8
"""What a list, a dict, a number or a string weighs beside its characters."""

VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, set, frozenset, *VIEWS)
PERCENT = re.compile(r"%(?:\([^)]{0,200}\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


class TemplateLimit(Exception):
    """A template asked for more than it may have; the text says for what."""


class Refusal(Exception):
    """What a template said with `raise_exception`."""


class Budget:
    """What one rendering may still spend. `inputs` are the values that the template is given, plain data throughout."""

    def __init__(self, inputs: Iterable[Any]):
        self.known: dict[int, int] = {}
        """Sizes of the containers of `inputs`, by id, so that measuring a list of messages stays cheap."""
        given = sum(self._learn(value) for value in inputs)
        self.cap = CHARACTERS + 4 * given
        self.left = TOUCHES * self.cap
        self.deadline = time.monotonic() + SECONDS

    def _learn(self, value: Any) -> int:
        if isinstance(value, str):
            return NODE + len(value)
        if isinstance(value, dict):
            size = NODE + sum(map(self._learn, value)) + sum(map(self._learn, value.values()))
        elif isinstance(value, (list, tuple)):
            size = NODE + sum(map(self._learn, value))
        else:
            return NODE
        self.known[id(value)] = size
        return size

    def tick(self) -> None:
        """Raise TemplateLimit when the time is over."""
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"took longer than {SECONDS:g} s")

    def fits(self, size: int) -> None:
        """Raise TemplateLimit if a value of `size` characters is too large."""
        if size > self.cap:
            raise TemplateLimit(f"a text or list of more than {self.cap:,} characters")

    def spend(self, size: int) -> None:
        """Count a new value of `size` characters."""
        self.tick()
        self.fits(size)
        self.left -= size
        if self.left < 0:
            raise TemplateLimit(f"built more than {TOUCHES * self.cap:,} characters altogether")

    def measure(self, value: Any) -> int:
        """The characters and nodes that printing `value` would visit, shared parts counted as often as they occur.

        A list that holds one list twice, that one another twice, and so on, is small in memory and endless in print.
        """
        size, stack = 0, [value]
        while stack:
            item = stack.pop()
            size += NODE
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, CONTAINERS):
                if id(item) in self.known:
                    size += self.known[id(item)]
                else:
                    self.fits(size + NODE * (len(item) + len(stack)))
                    stack.extend(chain(item, item.values()) if isinstance(item, dict) else item)
            self.fits(size)
        self.tick()
        return size

    def account(self, value: Any) -> Any:
        """Count a value that a template made, and return it; an iterator comes back as one that is watched."""
        self.tick()
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, CONTAINERS):
            self.measure(value)
            self.spend(NODE * len(value))
        elif isinstance(value, Iterator):
            return iter(Each(value, self))
        else:
            self.number(value)
        return value

    def number(self, value: Any) -> None:
        """Raise TemplateLimit for an integer of thousands of digits."""
        if isinstance(value, int) and value.bit_length() > BITS:
            raise TemplateLimit(f"a number of more than {BITS:,} bits")

    def arguments(self, args: Iterable[Any], named: Mapping[str, Any]) -> None:
        """Look at what a call, a filter or a test is given."""
        self.tick()
        for value in chain(args, named.values()):
            self.number(value)

    def concat(self, parts: Iterable[Any]) -> str:
        """`"".join` that looks before it builds; what macros, set blocks and `~` end in."""
        return self.join("", parts)

    def join(self, separator: str, parts: Iterable[Any]) -> str:
        """`separator.join` of the parts as text."""
        texts, size = [], 0
        for part in parts:
            texts.append(part if isinstance(part, str) else str(part))
            size += len(texts[-1]) + len(separator)
            self.fits(size)
            self.tick()
        text = separator.join(texts)
        self.spend(len(text))
        return text

    def operator(self, sign: str, left: Any, right: Any) -> None:
        """Look at a binary operation before Python does it."""
        self.arguments((left, right), {})
        if sign == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, (str, list, tuple)) and isinstance(times, int):
                    self.fits((len(some) if isinstance(some, str) else self.measure(some)) * max(times, 0))
        elif sign == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > BITS:
            raise TemplateLimit(f"a number of more than {BITS:,} bits")
        elif sign == "%" and isinstance(left, str):
            self.percent(left, right)

    def percent(self, text: str, values: Any) -> None:
        """Look at `text % values`: widths of five digits, widths out of a value, one value printed many times."""
        for match in PERCENT.finditer(text):
            if any(width is not None and (width == "*" or len(width) > 4) for width in match.groups()):
                raise TemplateLimit(f"a width as in {match.group()[:20]!r}")
        if isinstance(values, Mapping):
            self.fits(text.count("%") * max(map(self.measure, values.values()), default=0))

    def replacing(self, text: str, old: str, new: str) -> None:
        """Look at `text.replace(old, new)`."""
        self.fits(len(text) + text.count(old) * len(new))

    def indenting(self, text: str, width: Any) -> None:
        """Look at putting `width` spaces, or the text `width`, before every line."""
        self.fits(len(text) + (len(text.splitlines()) + 1) * (width if isinstance(width, int) else len(str(width))))

    def method(self, owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Look at a call of one of the methods of `str` whose result can be larger than what goes in; the arguments."""
        if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
            self.fits(args[0])
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.replacing(owner, args[0], args[1])
        elif name in ("split", "rsplit", "splitlines"):
            self.fits(NODE * owner.count(args[0] if args and isinstance(args[0], str) else "\n"))
        elif name == "join" and len(args) == 1:
            parts = list(Each(args[0], self))
            self.fits(self.measure(parts) + len(owner) * len(parts))
            return (parts,)
        return args


class Each:
    """An iterable that asks the budget before every item, and has a length if what it goes over has one."""

    def __init__(self, over: Any, budget: Budget):
        self.over = over
        self.budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self.over:
            self.budget.tick()
            if isinstance(item, CONTAINERS):
                self.budget.measure(item)
            yield item

    def __len__(self) -> int:
        return len(self.over)
