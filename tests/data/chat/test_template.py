import signal
import threading

import pytest

from trainer.base.config import ConfigError
from trainer.data.chat.template import ChatTemplate, Rendering, TemplateFailure

MESSAGES = [{"role": "user", "content": "hi"}]


def rendering(template: ChatTemplate, names: dict[str, str] | None = None, **arguments) -> Rendering:
    return template.render(names or {}, {"messages": MESSAGES, "tools": None, "arguments": arguments}, False)


def render(source: str, cpu_s: float = 10, memory_mib: int = 1024, **arguments) -> str:
    return rendering(ChatTemplate.compile(source, cpu_s, memory_mib), **arguments).text


def error_of(source: str, **limits) -> str:
    with pytest.raises(TemplateFailure) as failure:
        render(source, **limits)
    return str(failure.value)


def test_templates_have_the_functions_of_transformers():
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert render("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": "<é>"\n}'
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert render("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert (
        render("{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}") == "4"
    )
    assert (
        render("{{ '%05.1f|%s' % (2.25, 'x') }}{{ '{:>4}{{}}'.format(7) }}{{ '%d' | format(5 % 3) }}")
        == "002.2|x   7{}2"
    )
    assert render("{{ dict(a=1).a }}{{ bos_token }}", bos_token="<s>") == "1<s>"
    assert render("  {% if true %}\na\n  {% endif %}\nb\n") == "a\nb"


def test_loops_have_their_index_and_length():
    source = "{% for m in items %}{{ loop.index }}/{{ loop.length }}{{ m }}{{ ',' if not loop.last }}{% else %}none{% endfor %}"
    assert render(source, items=["a", "b"]) == "1/2a,2/2b"
    assert render(source, items=[]) == "none"
    assert render("{% for k, v in d.items() if v %}{{ k }}{% endfor %}", d={"a": 1, "b": 0}) == "a"


def test_a_generation_block_writes_its_body_and_ends_the_variables_set_in_it():
    assert render("a{% generation %}{% set x = 'b' %}\n{{ x }}{%- endgeneration %}c{{ x }}") == "abc"


def test_errors_are_one_line():
    assert error_of("{{ raise_exception('roles must\nalternate') }}") == "roles must alternate"
    assert error_of("a\n{% if %}") == "line 2: Expected an expression, got 'end of statement block'"
    assert error_of("{% generation %}").startswith("line 1: Unexpected end of template")
    assert error_of("{{ 1 // 0 }}") == "ZeroDivisionError: integer division or modulo by zero"
    assert error_of("{{ messages[5].content.x }}") == "list object has no element 5"
    assert error_of("{% include '/etc/passwd' %}") == "TypeError: no loader for this environment specified"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__['os'] }}",
    "{{ namespace(__class__='x').__class__.x }}",
    "{{ dict.mro().pop() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__self__.__class__.__base__ }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ self.__init__.__globals__.x }}",
    "{{ self._TemplateReference__context.environment.x }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('role') }}",
    "{{ (messages | map('attr', '__class__') | list)[0].__mro__ }}",
    "{{ loop.__class__.x }}",
    "{% set x = range.__class__.__base__ %}{{ x.__subclasses__() }}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_templates_cannot_escape_from_the_sandbox(source):
    error = error_of(source)
    assert any(word in error for word in ("unsafe", "undefined", "no loader", "no element", "no attribute"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
        "{{ ('{0.__class__}' | attr('format'))(1) }}",
    ],
)
def test_formatting_does_not_expose_python_internals(source):
    assert render(source) == ""


def repeated(value: str, start: str) -> str:
    """Return a template that assigns an expression of n.x to n.x again and again."""
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(99999) %}}{{% set n.x = {value} %}}{{% endfor %}}"


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "squared number": repeated("n.x * n.x", "3"),
    "constant number": "{{ 3 ** (3 ** 30) }}",
    "replace": repeated("n.x.replace('a', 'aa')", "'a'"),
    "wordwrap": repeated("(n.x ~ n.x) | wordwrap(1, wrapstring='a ' * 1000)", "'a b '"),
    "translate": repeated("n.x.translate({97: 'aa'})", "'a'"),
    "slice": "{{ 'a' | slice(10 ** 9) | list | length }}",
    # Deeper nesting may exceed Python's recursion limit before the limits of the sandbox.
    "pprint": repeated("[n.x, n.x]", "[1]").replace("99999", "60") + "{{ n.x | pprint }}",
    "sum": repeated("[n.x, n.x] | sum(start=[])", "[1]"),
    "concatenation": repeated("n.x ~ n.x", "'ab'"),
    "output": "{% set x = 'a' * 10000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_ends_with_one_line(source):
    """The machine decides which of the two limits is exceeded first."""
    assert error_of(source, cpu_s=0.5, memory_mib=128) in (
        "the template takes more than 0.5 s of CPU time",
        "the template takes more than 128 MiB of memory",
    )


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10 ** 10",
        "[1] * 10 ** 10",
        "'a'.center(10 ** 10)",
        "'%999999999d' | format(1)",
        "'{:9999999999}'.format(1)",
        "['a'] | tojson(indent=10 ** 10)",
    ],
)
def test_memory_is_limited(expression):
    assert error_of(f"{{{{ {expression} }}}}", memory_mib=64) == "the template takes more than 64 MiB of memory"


def test_recursion_and_ranges_are_limited():
    error = error_of("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}")
    assert error.startswith("RecursionError: maximum recursion depth exceeded")
    assert error_of("{{ range(10 ** 7) }}").startswith("OverflowError: Range too big.")


def test_other_conversations_are_rendered_after_an_endless_one():
    template = ChatTemplate.compile("{{ 'a' * count }}{{ text }}")
    for _ in range(2):
        text = "\u00e9\U0001f642\u2028"
        assert rendering(template, count=2, text=text).text == "aa" + text
        with pytest.raises(TemplateFailure, match=r"^the template takes more than 1024 MiB of memory$"):
            rendering(template, count=10**10)


def test_a_kill_from_outside_is_not_a_failure_of_the_conversation():
    """Otherwise a killed process could mark a good document as bad."""
    template = ChatTemplate.compile("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}")
    threading.Timer(0.2, template._process.kill).start()
    message = (
        r"^data\.prepare_workers: a process that renders the chat template was killed, probably for lack of memory"
    )
    with pytest.raises(ConfigError, match=message):
        rendering(template, n=99999)
    template = ChatTemplate.compile("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}")
    threading.Timer(0.2, template._process.send_signal, (signal.SIGSEGV,)).start()
    with pytest.raises(
        ConfigError, match=r"^data\.chat_template: the process that renders the template ended with status -11$"
    ):
        rendering(template, n=99999)


def test_the_process_ends_with_its_template():
    template = ChatTemplate.compile("x")
    process = template._process
    del template
    assert process.returncode is not None
