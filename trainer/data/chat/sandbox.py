"""The process that renders one untrusted chat template. Usage: python -m trainer.data.chat.sandbox CPU_S MEMORY_MIB.

Jinja's sandbox denies access to Python, but does not limit the size of loops, numbers and texts. The kernel therefore ends this
process if a rendering takes more than CPU_S seconds of CPU time, and denies it more than MEMORY_MIB of additional memory.

Each line of stdin is a JSON request, and each line of stdout is the JSON reply [result, error]. The first request compiles the
template. All later requests render conversations. All strings in this process are traced (traced_text.py), so that a reply states
which characters the template wrote, and from which string of the conversation each of the others comes.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import sync_do_join
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.base.system.signals import STOP_SIGNALS
from trainer.data.chat.traced_text import Traced, join, literal, origins_of, to_json, trace

_DATE = datetime(2024, 7, 26)
"""Date that strftime_now() returns, so that tokens do not depend on the day. It is Llama 3.1's default date. If the
date is changed, _VERSION in format.py must be changed too, because fingerprints do not contain the date."""
MAX_CHARACTERS = 10_000_000
"""Maximum number of characters that a template may write."""
OUT_OF_MEMORY = 3
"""Exit status of a process that ran out of memory."""


class _Generation(Extension):
    """Jinja extension for {% generation %} ... {% endgeneration %}, which transformers defines. The block writes its body: the
    origins of the text show where the answers are."""

    tags = {"generation"}  # noqa: RUF012  the type is Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _TracingCode(CodeGenerator):
    """Code generator for templates whose constant strings are traced."""

    def visit_Const(self, node: nodes.Const, frame: Any) -> None:
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Any) -> None:
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("concat((")
        for operand in node.nodes:
            self.write("str(")
            self.visit(operand, frame)
            self.write("), ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(map(str, group)))

    def _literal(self, text: str) -> str:
        """Return Python code for a string of the template."""
        self.environment.literals.append(literal(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's environment as transformers configures it, with traced strings."""

    code_generator_class = _TracingCode
    concat = staticmethod(join)

    def __init__(self):
        # The optimizer would replace constant expressions by plain strings.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self.literals: list[Traced] = []
        self.filters["tojson"] = to_json  # Jinja's own filter escapes <, > and & for HTML
        self.filters["join"] = _join
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _DATE.strftime
        del self.filters["random"], self.globals["lipsum"]  # these two are random


@pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return sync_do_join(context, value, d if isinstance(d, Traced) else literal(d), attribute)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Message(dict):
    """A message that records which of its fields a template reads."""

    __slots__ = ("_read",)

    def __init__(self, fields: Mapping[str, Any], read: set[str]):
        super().__init__(fields)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read.add(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def items(self) -> Iterable[tuple[str, Any]]:
        self._read.update(super().keys())
        return super().items()

    def values(self) -> Iterable[Any]:
        self._read.update(super().keys())
        return super().values()


def _compile(source: str) -> tuple[Template, tuple[list[str], list[str]]]:
    """Compile a template. Return the template, and the names of its variables and its constant strings."""
    environment = _Environment()
    tree = environment.parse(source)
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    names = {node.name for node in tree.find_all(nodes.Name)}
    return environment.from_string(source), (sorted(names), sorted(constants))


def _render(
    template: Template, names: Mapping[str, str], data: Mapping[str, Any], add_generation_prompt: bool
) -> tuple:
    """Render a conversation. ChatTemplate.render() describes arguments and result."""
    data, read = trace(data), set()
    for message in data["messages"]:
        if isinstance(message.get("role"), str):
            message["role"] = literal(message["role"])  # one of ROLES: templates compose special tokens of them
    data["messages"] = [_Message(message, read) for message in data["messages"]]
    variables = {"documents": None} | {name: literal(text) for name, text in names.items()}
    variables |= data.pop("arguments") | data
    text = template.render(variables, add_generation_prompt=add_generation_prompt)
    if len(text) > MAX_CHARACTERS:
        raise TemplateError(f"the template writes more than {MAX_CHARACTERS} characters")
    runs = [(origin, len(list(group))) for origin, group in itertools.groupby(origins_of(text))]
    return text, runs, sorted(name for name in read if isinstance(name, str))


def _reason(error: Exception) -> str:
    if line := getattr(error, "lineno", None):
        return f"line {line}: {error}"
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _serve(cpu_s: float, memory_mib: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent handles them
    with contextlib.suppress(OSError, ValueError):  # macOS cannot limit memory
        present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + memory_mib * 2**20,) * 2)
    template = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            if template is None:
                template, result = _compile(json.loads(line))
            else:
                result = _render(template, *json.loads(line))
            reply = result, None
        except MemoryError:
            raise
        except Exception as error:  # a template can raise any of Python's exceptions
            reply = None, _reason(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    try:
        _serve(float(sys.argv[1]), int(sys.argv[2]))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
