"""Chat templates: untrusted Jinja text, run in a sandbox with the functions that transformers provides."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Maximum number of loop iterations in one rendering. A call counts as _STEPS_OF_A_CALL, since it takes as long."""
_STEPS_OF_A_CALL = 10
MAX_CHARACTERS = 10_000_000
"""Maximum length of the output of one rendering, and of each text that a template concatenates or repeats."""

BEGIN_MARK, END_MARK = "generation_begins", "generation_ends"
"""Template variables whose text is written before and after the body of {% generation %}."""


class TemplateFailure(Exception):
    """A template is invalid or cannot render a conversation. The message is one line."""

    def __init__(self, reason: object):
        super().__init__(" ".join(str(reason).split())[:300])


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}, which encloses an answer and the end of the turn."""

    tags = {"generation"}  # noqa: RUF012  the type is Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN_MARK, END_MARK))
        return [begin.set_lineno(line), nodes.Scope(body).set_lineno(line), end.set_lineno(line)]


class _Bounds(NodeTransformer):
    """Transformation that counts loop iterations and limits concatenated texts, since Jinja's sandbox does neither."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(node, "measured", [], [], None, None)


class _Namespace(Namespace):
    """A namespace that rejects names with a leading underscore, which give access to Python internals."""

    def __init__(*args: Any, **kwargs: Any):  # a template may name an entry "self"
        for name in dict(*args[1:], **kwargs):
            _refuse_underscore(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no entry {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering and a limit on the result of each operation."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, today: datetime):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.steps = 0
        self.filters |= {"tojson": _to_json, "counted": self._counted, "measured": _measured}
        del self.filters["random"], self.globals["lipsum"]  # these two are random
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": today.strftime,
            "dict": _make_dict,
            "namespace": _Namespace,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise TemplateError(f"takes more than {MAX_STEPS} steps")

    def _counted(self, items: Iterable) -> list:
        result = list(items)
        self.spend(len(result))
        return result

    def call(*args: Any, **kwargs: Any) -> Any:  # a template may name an argument "self"
        args[0].spend(_STEPS_OF_A_CALL)
        _require_small([*args[3:], *kwargs.values()])
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable | None:
        """Wrap str.format and str.format_map."""
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None

        def format_narrow(*args: Any, **kwargs: Any) -> str:
            _require_narrow(value.__self__)
            return format_safely(*args, **kwargs)

        return format_narrow

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.spend(1)
        if operator == "+":
            return _measured(left + right)
        if operator == "%" and isinstance(left, str):
            _require_narrow(left)
        sizes = [v if isinstance(v, int) else len(v) if hasattr(v, "__len__") else 0 for v in (left, right)]
        numbers = all(isinstance(v, int | float) for v in (left, right))
        if operator == "*" and not numbers and sizes[0] * sizes[1] > MAX_CHARACTERS:
            raise TemplateError(f"creates a text of more than {MAX_CHARACTERS} characters")
        if operator == "**" and max(map(abs, sizes)) > 1000:
            raise TemplateError("raises to a power above 1000")
        return super().call_binop(context, operator, left, right)


def _bounded(function: Callable) -> Callable:
    """Wrap a filter so that it rejects large numbers and wide formats."""

    @functools.wraps(function)  # Jinja stores the calling convention as attributes
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _require_small([*args, *kwargs.values()])
        if function is FILTERS["format"]:
            _require_narrow(args[0])
        return function(*args, **kwargs)

    return bounded


def _require_small(values: Iterable) -> None:
    """Raise TemplateError for large numbers among arguments, as in "x".center(10 ** 10)."""
    for value in values:
        if isinstance(value, int) and value > MAX_CHARACTERS:
            raise TemplateError(f"calls a function with a number above {MAX_CHARACTERS}")


def _require_narrow(text: Any) -> None:
    """Raise TemplateError for a format with a wide field or a computed width."""
    if re.search(r"[0-9]{6,}|%[^a-zA-Z%]*\*|\{[^{}]*\{", str(text).replace("{{", "")):
        raise TemplateError("formats a text with a width above 99999 or a computed width")


def _measured(value: Any) -> Any:
    if hasattr(value, "__len__") and len(value) > MAX_CHARACTERS:
        raise TemplateError(f"creates a text of more than {MAX_CHARACTERS} characters")
    return value


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _make_dict(*args: Any, **kwargs: Any) -> dict:
    # A function is used, because the methods of the class dict give access to other classes.
    return dict(*args, **kwargs)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, today: datetime):
        """today: date that strftime_now() returns. Raises TemplateFailure if the text is not a valid template."""
        self._environment = _Sandbox(today)
        try:
            tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except Exception as error:  # some invalid templates raise exceptions other than Jinja's
            line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
            raise TemplateFailure(f"{line}{error}") from None
        loaded = {name.name for name in tree.find_all(nodes.Name)}
        self.has_generation_blocks = BEGIN_MARK in loaded
        """Whether {% generation %} blocks mark the answers."""
        self.uses_date = "strftime_now" in loaded
        self.uses_tools = "tools" in loaded

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template renders. Raises TemplateFailure."""
        self._environment.steps = 0
        written: list[str] = []
        size = 0
        try:
            for text in self._template.generate(variables):
                written.append(text)
                size += len(text)
                if size > MAX_CHARACTERS:
                    raise TemplateError(f"writes more than {MAX_CHARACTERS} characters")
        except Exception as error:  # a template can raise any of Python's exceptions
            name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise TemplateFailure(f"{name}{error}") from None
        return "".join(written)
