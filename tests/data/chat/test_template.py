from datetime import datetime

import pytest

from trainer.data.chat.template import BEGIN_MARK, END_MARK, ChatTemplate, TemplateFailure

DAY = datetime(2024, 7, 26)


def render(source: str, **variables) -> str:
    return ChatTemplate(source, DAY).render({"messages": [{"role": "user", "content": "hi"}], **variables})


def error_of(source: str) -> str:
    with pytest.raises(TemplateFailure) as failure:
        render(source)
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


def test_generation_blocks_are_marked():
    template = ChatTemplate("a{% generation %}{% set x = 'b' %}\n{{ x }}{%- endgeneration %}c{{ x }}", DAY)
    assert template.has_generation_blocks
    assert template.render({BEGIN_MARK: "[", END_MARK: "]"}) == "a[b]c"
    assert not ChatTemplate("generation", DAY).has_generation_blocks


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
    "{{ namespace(__class__='x') }}",
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
    assert any(
        word in error_of(source) for word in ("unsafe", "undefined", "entry", "no loader", "no element", "no attribute")
    )


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


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 1000000 steps",
        ),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError: maximum recursion depth exceeded"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "takes more than 1000000 steps",
        ),
        ("{{ 'a' * 10 ** 9 }}", "creates a text of more than 10000000 characters"),
        ("{{ [1] * 10 ** 9 }}", "creates a text of more than 10000000 characters"),
        ("{{ 2 ** 100000 }}", "raises to a power above 1000"),
        ("{{ 'a'.center(10 ** 10) }}", "calls a function with a number above 10000000"),
        ("{{ 'a' | center(width=10 ** 10) }}", "calls a function with a number above 10000000"),
        ("{{ ['a'] | tojson(indent=10 ** 10) }}", "calls a function with a number above 10000000"),
        ("{{ '%9999999999d' % 1 }}", "formats a text with a width above 99999 or a computed width"),
        ("{{ '%*d' % (9999999999, 1) }}", "formats a text with a width above 99999 or a computed width"),
        ("{{ '%9999999999d' | format(1) }}", "formats a text with a width above 99999 or a computed width"),
        ("{{ '{:9999999999}'.format(1) }}", "formats a text with a width above 99999 or a computed width"),
        ("{{ '{:{}}'.format('a', '9999999999') }}", "formats a text with a width above 99999 or a computed width"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "creates a text of more than 10000000 characters",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "creates a text of more than 10000000 characters",
        ),
        (
            "{% set x = 'a' * 10000 %}{% for i in range(2000) %}{{ x }}{% endfor %}",
            "writes more than 10000000 characters",
        ),
        (
            "{{ range(10 ** 7) }}",
            "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).",
        ),
    ],
)
def test_a_template_has_a_budget(source, reason):
    assert error_of(source).startswith(reason)


def test_each_rendering_has_its_own_budget():
    template = ChatTemplate("{% for i in range(600) %}{% for j in range(1000) %}{% endfor %}{% endfor %}x", DAY)
    assert [template.render({}) for _ in range(3)] == ["x"] * 3
