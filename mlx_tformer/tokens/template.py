"""Chat templates: the Jinja programs by which a model's makers turn a conversation into a prompt.

They come with a checkpoint, so from strangers, and run in `sandbox`, within the limits of `guard`.
"""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from ..errors import BadInput, UsageError
from .guard import Budget, Refusal, TemplateLimit

LONGEST = 64_000
"""Characters of a template's source. The longest in use have a third of that."""
MESSAGE = 300
"""Characters of an error message that came from a template."""


class ChatTemplate:
    """A compiled chat template.

    >>> hello = {"messages": [{"role": "user", "content": "Hello"}]}
    >>> ChatTemplate("{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}").render(hello)
    '<user> Hello'
    """

    def __init__(self, source: str, *, file: str | Path | None = None):
        """Compile `source`; raises BadInput that names `file` and the line if it is not a template."""
        self.source = source
        self.file = file
        if len(source) > LONGEST:
            raise self._bad(f"found {len(source):,} characters, expected at most {LONGEST:,}")
        self._code = self._compile()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for `variables`, which must be plain data: strings, numbers, lists and dicts.

        Raises BadInput if the template fails, refuses the conversation, or wants too much time or room.
        """
        from jinja2 import Template

        from .sandbox import Sandbox

        try:
            budget = Budget(variables.values())
            environment = Sandbox(budget)
            template = Template.from_code(environment, self._code, environment.make_globals(None))
            return budget.concat(template.generate(variables))
        except Exception as error:
            raise self._explained(error) from None

    def _compile(self) -> CodeType:
        from .sandbox import Sandbox, guarded

        environment = Sandbox(Budget(()))
        try:
            # Python warns on standard error of some of the nonsense that a template can hold.
            with warnings.catch_warnings(action="ignore"):
                return environment.compile(guarded(environment.parse(self.source)), filename="<chat template>")
        except Exception as error:
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> BadInput:
        """Say in one line what went wrong: in the template's own words, where it has any."""
        from jinja2 import TemplateSyntaxError
        from jinja2.exceptions import SecurityError

        if isinstance(error, Refusal):
            return self._bad(f"the template refuses this conversation: {one_line(str(error))}")
        if isinstance(error, SecurityError):
            return self._bad(f"security: {one_line(str(error))}")
        if isinstance(error, TemplateLimit):
            return self._bad(f"stopped: {error}")
        if isinstance(error, RecursionError):
            return self._bad("stopped: it calls itself, or is nested, too deeply")
        if isinstance(error, TemplateSyntaxError):
            return self._bad(f"line {error.lineno}: {one_line(error.message or 'not a template')}")
        return self._bad(f"{type(error).__name__}: {one_line(str(error))}")

    def _bad(self, problem: str) -> BadInput:
        return BadInput(problem, file=self.file, field="chat template")


def choose(names: Collection[str], wish: str | None = None, *, tools: bool = False) -> str:
    """Which template to use: the one that was asked for, "tool_use" if there are tools, or "default".

    Raises UsageError, which says how to go on, if there is none.
    """
    if not names:
        raise UsageError("this model has no chat template; use --raw, or give the prompt as plain text")
    wanted = [wish] if wish is not None else ["tool_use"] * tools + ["default"]
    for name in wanted:
        if name in names:
            return name
    raise UsageError(f"no chat template named {wanted[-1]!r}; there are {', '.join(map(repr, sorted(names)))}")


def one_line(text: str) -> str:
    """A stranger's text, fit for a terminal: no line breaks, no control characters, not too long."""
    words = " ".join(text[: 2 * MESSAGE].split())
    return "".join(c if c.isprintable() else "?" for c in words)[:MESSAGE]
