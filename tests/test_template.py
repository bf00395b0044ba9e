"""Chat templates: what they can do, as in transformers (see test_tokens for its answers), and what they cannot."""

import threading
from datetime import datetime
from typing import Any

import pytest

from mlx_tformer.errors import BadInput, UsageError
from mlx_tformer.tokens import guard as template_guard
from mlx_tformer.tokens.template import LONGEST, ChatTemplate, choose, one_line

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
GROW = "{% set ns = namespace(x=['ab']) %}{% for i in range(99) %}"


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, file="x.jinja").render({"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}", "<user>Hello<assistant>Hi"),
        (
            "{% for m in messages %}\n  {% if loop.last %}\n{{ loop.length }}{{ loop.revindex }}\n  {% endif %}\n"
            "{% endfor %}",
            "21\n",
        ),
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "02",
        ),
        ("{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}", '{"b": "<é>", "a": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ ['é'] | tojson(ensure_ascii=true, separators=(',', ':')) }}", '["\\u00e9"]'),
        ("{% generation %}a{{ messages[0].role }}{% endgeneration %}", "auser"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        (
            "{% macro f(a, b='x') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
            "{{ f(1) }}{% call f(2, b='y') %}z{% endcall %}",
            "1x2yz",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}", "Hello"),
        ("{{ messages[::-1][0].role }}{{ messages[1:] | length }}{{ messages[-1]['role'][:4] }}", "assistant1assi"),
        (
            "{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}|{}'.format(1, 'b') }}{{ 2 ** 10 }}",
            "a1Nonexxxa-007   1|b1024",
        ),
        ("{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | sum }}{{ messages | sum(attribute='n', start=0) }}", "[1, 2]30"),
        (
            "{{ 'a\nb' | indent(2, first=true) }}|{{ 'b' | center(5) }}|{{ 'aab' | replace('a', 'c', 1) }}|"
            "{{ '%d' | format(3) }}",
            "  a\n  b|  b  |cab|3",
        ),
        (
            "{{ 2.567 | round(1) }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ ', '.join(['a', 'b']) }}",
            "2.6[[1, 2], [3, 0]]a, b",
        ),
        (
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for m in [] %}{% else %}none{% endfor %}",
            "a1none",
        ),
        ("{% for n in [{'n': 1, 'k': [{'n': 2}]}] recursive %}{{ n.n }}{{ loop(n.k) if n.k }}{% endfor %}", "12"),
        ("{% set x %}a{{ messages[0].role }}{% endset %}{{ x | upper }}{% filter upper %}b{% endfilter %}", "AUSERB"),
        (
            "{% if messages.append is defined %}{{ 1 }}{% endif %}{{ missing }}{{ messages[0].missing is defined }}",
            "False",
        ),
        ("{{ 'a,b'.split(',') | last }}{{ ' a '.strip() }}{{ 'ab'.startswith('a') }}{{ 'x'.ljust(3) }}|", "baTruex  |"),
        ("{{ dict(a=1) }}{{ cycler('a', 'b').next() }}{{ namespace(a=1) }}", "{'a': 1}a<Namespace>"),
        ("{{ tools is none }}{{ tools }}", "TrueNone"),
    ],
)
def test_templates_do_what_jinja_does(source: str, text: str) -> None:
    messages = [{**message, "n": 0} for message in MESSAGES]
    assert ChatTemplate(source).render({"messages": messages, "tools": None}) == text


def test_a_template_knows_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))


def test_a_loop_can_be_as_long_as_a_conversation() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 3000
    source = "{% for m in messages %}{{ m.content | trim }}{{ m.content ~ '' }}{% endfor %}"
    assert len(ChatTemplate(source).render({"messages": messages})) == 6_000_000


# What a template says and where it is wrong


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('Roles must\n alternate!') }}",
            "the template refuses this conversation: Roles must alternate!",
        ),
        ("{{ raise_exception('\x1b[31mred') }}", "the template refuses this conversation: ?[31mred"),
        ("a\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        ("{{ a | nonsense }}", "line 1: No filter named 'nonsense'"),
        ("{{ a | pprint }}", "line 1: No filter named 'pprint'"),
        ("{{ a.b.c }}", "UndefinedError: 'a' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
        ("{{ {} | tojson(indent='x', nonsense=1) }}", "TypeError: "),
        ("{{ undefined | tojson }}", "TypeError: Object of type Undefined is not JSON serializable"),
        ("{% include 'config.json' %}", "TypeError: no loader"),
        ("{% import 'a' as b %}", "TypeError: no loader"),
        ("{% autoescape true %}{% endautoescape %}", "line 1: autoescape is for HTML"),
        ("{{ lipsum() }}", "UndefinedError: 'lipsum' is undefined"),
        ("x" * (LONGEST + 1), "found 64,001 characters, expected at most 64,000"),
    ],
)
def test_a_failing_template_is_one_clear_line(source: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        render(source)
    text = str(caught.value)
    assert text.startswith(f"x.jinja: chat template: {message}") and text.isprintable() and len(text) < 400


def test_a_nonsensical_template_warns_nobody(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(BadInput, match="TypeError"):
        render("{{ (1)[2:3] }}")
    assert not recwarn.list


# Security


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0[__class__]}'.format(messages[0].content) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__builtins__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.mro() }}",
        "{{ namespace(a=1)._Namespace__attrs }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__call__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ self.__init__ }}",
        "{% macro f() %}{% endmacro %}{{ f._func }}",
        "{{ (messages | map(attribute='role')).gi_frame }}",
        "{{ (messages | map(attribute='role')).send(none) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ 'x'.encode() }}",
        "{{ (5).to_bytes(9, 'big') }}",
        "{{ '{a}'.format_map({'a': 1}) }}",
    ],
)
def test_a_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(BadInput, match=r"x\.jinja: chat template: security: .*access to|underscore"):
        render(source)
    assert MESSAGES == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


# Limits


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if messages | list | length > 9 %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        * 40,
        "{% for i in range(99999) %}{{ range(99999) | map('string') | select('in', 'abc') | list }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
        "{{ range(99999) | slice(10 ** 9) | list }}",
        "{{ ([[1]] * 50000) | sum(start=[]) | length }}",
        "{% set x = 'a' * 2000000 ~ 'ba' %}{% set y = 'a' * 1000000 ~ 'c' %}" + "{% if y in x %}{% endif %}" * 2000,
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set x = 'ab' * 200000 %}{% for i in range(99999) %}{{ x | title | length }}{% endfor %}",
    ],
)
def test_a_template_is_stopped_when_its_time_is_over(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_guard, "SECONDS", 0.1)
    monkeypatch.setattr(template_guard, "TOUCHES", 10**6)
    with pytest.raises(BadInput, match=r"chat template: stopped: took longer than 0\.1 s"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 10 ** 10 * (1, 2) }}",
        "{{ (7 ** 9) ** (7 ** 9) }}",
        "{{ 0x" + "f" * 3000 + " * 2 }}",
        "{{ 0x" + "f" * 3000 + " is divisibleby 7 }}",
        "{{ ('f' * 99999) | int(0, 16) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{% macro f() %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endmacro %}{{ f() }}",
        "{% set y %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
        "{% block a %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endblock %}{{ self.a() }}",
        GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x * 2 %}{% endfor %}",
        GROW + "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}{% endfor %}",
        GROW + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        GROW + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
        GROW + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        GROW + "{% set ns.x = dict(a=ns.x, b=ns.x).items() %}{% endfor %}{{ ns.x }}",
        GROW + "{% set ns.x = {}.fromkeys('ab', ns.x) %}{% endfor %}{{ ns.x }}",
        GROW + "{% set ns.x = [1] | batch(3, ns.x) | list %}{% endfor %}{{ ns.x }}",
        GROW + "{% for y in [1] | batch(3, ns.x) %}{% set ns.x = y %}{% endfor %}{% endfor %}{{ ns.x }}",
        GROW + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
        GROW + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        GROW + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        GROW + "{% set ns.x = ''.join(['' ~ ns.x] * 2) %}{% endfor %}",
        "{{ 'x'.center(10 ** 10) }}{{ 'x'.ljust(10 ** 10) }}",
        "{{ 'x'.zfill(10 ** 10) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 'x' | indent(10 ** 10, first=true) }}",
        "{{ ('x\n' * 9999) | indent('y' * 9999) }}",
        "{{ 1.5 | round(10 ** 9, 'ceil') }}",
        "{{ [1] | batch(10 ** 10, 0) | list }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('b' * 1000000).join('a' * 1000000) }}",
        "{{ ('a' * 1000000) | join('b' * 1000000) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{0:{1}}'.format(1, 10 ** 9) }}",
        "{{ ('{0}' * 1000000).format('x' * 1000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ ('%(a)s' * 1000000) % {'a': 'x' * 1000000} }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ [[[]]] | tojson(indent='x' * 100) }}",
        "{{ strftime_now('%c' * 1000) }}",
        "{{ ('ab' * 1900000) | sort | length }}",
        "{{ ('a-' * 1900000) | title | length }}",
        "{{ ('a,' * 1900000).split(',') | length }}",
        "{% set x = 'a' * 4000000 %}" + "{% set y = x[1:] %}" * 200,
        "{% set x = 'a' * 4000000 %}" + "{% set y = x.upper() %}" * 200,
    ],
)
def test_a_template_cannot_ask_for_too_much(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_guard, "SECONDS", 60)  # it is the size that must stop it, on the slowest machine too
    with pytest.raises(BadInput, match=r"chat template: (stopped: (?!took)|OverflowError: Range too big)"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "1+" * 5000 + "1 }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    ],
)
def test_a_template_cannot_dig_too_deep(source: str) -> None:
    with pytest.raises(BadInput, match="stopped: it calls itself, or is nested, too deeply"):
        render(source)


@pytest.mark.parametrize(
    "step",
    [
        "{% for i in [] %}{% endfor %}{% for i in 'a' %}{% endfor %}",
        "{% if a == b %}{% endif %}",
        "{% if a is divisibleby 2 %}{% endif %}",
        "{% set x = a + a %}",
        "{% set x = b.upper() %}",
        "{% set x = b | upper %}",
        "{% set x = b[1:] %}",
        "{% set x = [a] %}",
        "{% set x = (a, b) %}",
        "{% set x = {'a': a} %}",
        "{% set x = a ~ b %}",
        "{% set x %}x{% endset %}",
        "{{ a }}",
    ],
)
def test_every_step_asks_for_time(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for times in (1, 21):
        asked: list[int] = []
        monkeypatch.setattr(template_guard.Budget, "tick", lambda self, asked=asked: asked.append(1))
        ChatTemplate(step * times).render({"a": 2, "b": "text"})
        counts.append(len(asked))
    assert counts[1] - counts[0] >= 20


def test_endless_structures_are_found_in_the_conversation_too() -> None:
    shared: Any = ["ab"]
    for _ in range(40):
        shared = [shared, shared]
    budget = template_guard.Budget(())
    with pytest.raises(template_guard.TemplateLimit, match="more than 4,000,000 characters"):
        budget.measure(shared)


def test_renderings_in_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for i in range(300) %}{{ n }}{% endfor %}")
    found: dict[int, str] = {}

    def work(n: int) -> None:
        found[n] = template.render({"n": n})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: str(n) * 300 for n in range(4)}


# Which template


def test_the_template_is_chosen_by_name_by_tools_or_by_default() -> None:
    assert choose(["default", "rag"]) == "default"
    assert choose(["default", "rag"], "rag", tools=True) == "rag"
    assert choose(["default", "tool_use"], tools=True) == "tool_use"
    assert choose(["default"], tools=True) == "default"
    for names, wish, message in (
        (["rag"], None, "no chat template named 'default'; there are 'rag'"),
        ([], None, "use --raw"),
    ):
        with pytest.raises(UsageError, match=message):
            choose(names, wish)


def test_a_strangers_words_fit_on_a_line() -> None:
    assert one_line("a\n\tb\x1b[0m\u202e c") == "a b?[0m? c"
    assert len(one_line("x" * 10**6)) == 300
