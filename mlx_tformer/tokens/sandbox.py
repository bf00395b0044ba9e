"""The Jinja environment that chat templates run in. Imports jinja2, so `template` imports this only when it is needed.

It offers what transformers' environment does (`utils/chat_template_utils.py`): trimmed blocks, loop controls, the
`generation` tag, `tojson` that leaves HTML alone, `raise_exception`, `strftime_now`; and it puts a `Budget` into
everything that can repeat or grow.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import update_wrapper, wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

from jinja2 import TemplateAssertionError, Undefined, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_batch, do_center, do_format, do_indent, do_round, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
    modifies_known_mutable,
)
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from .guard import NODE, Budget, Each, Refusal, TemplateLimit

NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters whose cost has no simple bound; they are for HTML pages, and no chat template needs them."""
NO_ATTRIBUTES: Mapping[type, frozenset[str]] = {
    str: frozenset(("encode", "expandtabs", "format_map", "maketrans", "translate")),
    int: frozenset(("from_bytes", "to_bytes")),
}
"""Methods that make huge values, or kinds of value that no template needs."""
BY_THE_LETTER = ("batch", "groupby", "list", "slice", "sort", "title", "unique", "urlencode", "wordcount")
"""Filters that make a value out of every character, or every few, of a text."""
DIGITS = 4
"""Digits that a width in `str.format` may have."""
SHORT = 64
"""Largest width or separator in JSON, and largest number of decimals is four times that."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering, so that renderings in several threads do not meet."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, budget: Budget):
        # Constant folding is off: it would compute things at a time when no budget counts.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, LoopControlExtension],
            optimized=False,
            finalize=Output(budget).text,
        )
        self.budget = budget
        own = Filters(self)
        self.filters = {name: self._watched(function, name) for name, function in self.filters.items()} | own.table()
        self.tests = {name: self._watched(function, name) for name, function in self.tests.items()}
        for name in NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals |= {
            "dict": PlainDict(),
            "namespace": PlainNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def concat(self, parts: Iterable[str]) -> str:
        """What macros, blocks and `set` blocks are put together with."""
        return self.budget.concat(parts)

    def _watched(self, function: Any, name: str) -> Callable[..., Any]:
        """A filter or test that asks the budget; `wraps` keeps the marks by which Jinja knows what to pass first."""

        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            self.budget.arguments(args, named)
            if name in BY_THE_LETTER:
                self.budget.fits(NODE * max((len(text) for text in args if isinstance(text, str)), default=0))
            return self.budget.account(function(*args, **named))

        return run

    # Two underscores before the names, as in Jinja: a template may call something with an argument named `self`.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.arguments(args, kwargs)
        if isinstance(__obj, LoopContext) and args:  # a recursive loop, whose items no guard has seen yet
            args = (Each(args[0], budget), *args[1:])
        elif isinstance(__obj, (BuiltinMethodType, MethodType)) and isinstance(__obj.__self__, str):
            args = budget.method(__obj.__self__, __obj.__name__, args)
        return budget.account(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.operator(operator, left, right)
        return self.budget.account(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = any(isinstance(obj, kind) and attr in names for kind, names in NO_ATTRIBUTES.items())
        return not refused and not isinstance(obj, GeneratorType) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Jinja hands out a value that fails when it is used but prints as nothing; here the attempt itself fails.

        `append` and its like stay Jinja's way, since a dict of the conversation may have a key of that name.
        """
        if modifies_known_mutable(obj, attribute):
            return super().unsafe_undefined(obj, attribute)
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ != "format":
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None

        def run(*args: Any, **named: Any) -> str:
            return type(text)(self._formatter(text).vformat(text, args, named))

        return update_wrapper(run, value)

    def _formatter(self, text: str) -> "CountingFormatter":
        if isinstance(text, Markup):
            return CountingEscapeFormatter(self, escape=text.escape)
        return CountingFormatter(self)


class CountingFormatter(SandboxedFormatter):
    """`str.format` that looks at the width and at the size of all that it prints."""

    def __init__(self, environment: Sandbox, **kwargs: Any):
        super().__init__(environment, **kwargs)
        self.budget = environment.budget
        self.printed = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        if sum(c.isdigit() for c in format_spec) > DIGITS:
            raise TemplateLimit(f"a width as in {format_spec[:20]!r}")
        text = super().format_field(value, format_spec)
        self.printed += len(text)
        self.budget.fits(self.printed)
        self.budget.spend(len(text))
        return text


class CountingEscapeFormatter(CountingFormatter, SandboxedEscapeFormatter):
    """The same for text that is marked as HTML."""


class Output:
    """What is printed, counted."""

    def __init__(self, budget: Budget):
        self.budget = budget

    # Because it asks for the evaluation context, Jinja does not call it at compile time.
    @pass_eval_context
    def text(self, context: EvalContext, value: Any) -> str:
        """`value` as text."""
        text = value if isinstance(value, str) else str(value)
        self.budget.spend(len(text))
        return text


class Filters:
    """The filters that can make much out of little, with a look at how much before they do, and those that guard."""

    def __init__(self, environment: Sandbox):
        self.environment = environment
        self.budget = environment.budget

    def table(self) -> dict[str, Callable[..., Any]]:
        """The filters by name. No template can spell a name with a space; see `guarded`."""
        return {
            "each of": self.each,
            "joined up": self.budget.concat,
            "made here": self.budget.account,
            "batch": self.batch,
            "center": self.center,
            "format": self.format,
            "indent": self.indent,
            "join": self.join,
            "replace": self.replace,
            "round": self.round,
            "sum": self.sum,
            "tojson": self.tojson,
        }

    def each(self, iterable: Any) -> Each:
        """What a loop goes over."""
        return Each(iterable, self.budget)

    def batch(self, value: Any, linecount: int, fill_with: Any = None) -> Any:
        """Jinja's, with a limit on the padding of the last row."""
        self.budget.fits(linecount * (NODE + self.budget.measure(fill_with)))
        return self.budget.account(do_batch(value, linecount, fill_with))

    def center(self, value: Any, width: int = 80) -> str:
        """Jinja's, with a limit on the width."""
        self.budget.fits(width)
        return self.budget.account(do_center(value, width))

    def format(self, value: Any, *args: Any, **named: Any) -> str:
        """Jinja's, which is the `%` of strings."""
        self.budget.operator("%", str(value), named or args)
        return self.budget.account(do_format(value, *args, **named))

    def indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        """Jinja's, with a limit on what is put before the lines."""
        self.budget.indenting(str(value), width)
        return self.budget.account(do_indent(value, width, first, blank))

    def join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        """Jinja's outside of HTML."""
        items = value if attribute is None else map(make_attrgetter(self.environment, attribute), value)
        return self.budget.join(str(d), items)

    def replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        """Jinja's outside of HTML."""
        text, old, new = str(value), str(old), str(new)
        self.budget.replacing(text, old, new)
        return self.budget.account(text.replace(old, new, -1 if count is None else count))

    def round(self, value: Any, precision: int = 0, method: Any = "common") -> Any:
        """Jinja's, with a limit on the decimals, since it computes 10 ** precision."""
        self.budget.arguments((value, precision), {})
        if abs(precision) > 4 * SHORT:
            raise TemplateLimit(f"rounding to {precision} decimals")
        return self.budget.account(do_round(value, precision, method))

    def sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """Jinja's; every addition is looked at, since lists can be added too."""
        total = start
        for item in iterable if attribute is None else map(make_attrgetter(self.environment, attribute), iterable):
            self.budget.operator("+", total, item)
            total = self.budget.account(total + item)
        return total

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as Python writes it, with the options that transformers gives to templates."""
        widths = [len(part) for part in separators or ()] + [indent if isinstance(indent, int) else len(indent or "")]
        if max(widths) > SHORT:
            raise TemplateLimit("very wide JSON")
        options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "sort_keys": sort_keys}
        return self.budget.concat(json.JSONEncoder(separators=separators, **options).iterencode(value))


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model says, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainDict:
    """`dict` in templates: the function, without the class's attributes."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dict with one value for all keys."""
        return dict.fromkeys(keys, value)


class PlainNamespace(Namespace):
    """`namespace` in templates; prints as a word, because one namespace can hold another, and itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"attribute {name!r} of a namespace starts with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > SHORT:
        raise TemplateLimit("a very long date")
    return datetime.now().strftime(pattern)


class _Guards(NodeTransformer):
    """Puts filters that ask the budget around what Jinja compiles into plain Python operations."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("each of", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("joined up", nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("made here", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Literal(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        return _through("made here", node)

    visit_List = visit_Dict = visit_Compare = visit_Literal

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_Literal(node) if node.ctx == "load" else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise TemplateAssertionError("autoescape is for HTML, and not supported", node.lineno)


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def guarded(tree: nodes.Template) -> nodes.Template:
    """The template with every loop, literal, slice, comparison and `~` passed through a filter that asks the budget."""
    _Guards().visit(tree)
    return tree
