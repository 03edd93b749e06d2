"""The process that renders one untrusted chat template. Usage: python -m trainer.data.chat.sandbox CPU_S MEMORY_MIB.

Jinja's sandbox denies access to Python, but does not limit the size of loops, numbers and texts. The kernel therefore ends this
process if a rendering takes more than CPU_S seconds of CPU time, and denies it more than MEMORY_MIB of additional memory.

Each line of stdin is a JSON request, and each line of stdout is the JSON reply [result, error]. The first request compiles the
template. All later requests render conversations.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.system.signals import STOP_SIGNALS

BEGIN_MARK, END_MARK = "generation_begins", "generation_ends"
"""Template variables whose text is written before and after the body of {% generation %}."""
_DATE = datetime(2024, 7, 26)
"""Date that strftime_now() returns, so that tokens do not depend on the day. It is Llama 3.1's default date. If the
date is changed, _VERSION in format.py must be changed too, because fingerprints do not contain the date."""
MAX_CHARACTERS = 10_000_000
"""Maximum number of characters that a template may write."""
OUT_OF_MEMORY = 3
"""Exit status of a process that ran out of memory."""


class _Generation(Extension):
    """Jinja extension for {% generation %} ... {% endgeneration %} blocks. A block encloses an answer and its end of turn."""

    tags = {"generation"}  # noqa: RUF012  the type is Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN_MARK, END_MARK))
        return [begin.set_lineno(line), nodes.Scope(body).set_lineno(line), end.set_lineno(line)]


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _compile(source: str) -> tuple[Template, list[str]]:
    """Compile a template with the functions that transformers provides. Return the template and its variables' names."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _DATE.strftime
    del environment.filters["random"], environment.globals["lipsum"]  # these two are random
    names = {name.name for name in environment.parse(source).find_all(nodes.Name)}
    return environment.from_string(source), sorted(names)


def _render(
    template: Template, cpu_s: float, variables: Mapping[str, Any], locate: bool
) -> tuple[str, list[tuple[int, int] | None]]:
    """Render a conversation. ChatTemplate.render() describes the result."""

    def rendered(messages: Sequence[Any], add_generation_prompt: bool) -> str:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # the default action of its signal, SIGPROF, ends the process
        text = template.render(variables, messages=messages, add_generation_prompt=add_generation_prompt)
        if len(text) > MAX_CHARACTERS:
            raise TemplateError(f"the template writes more than {MAX_CHARACTERS} characters")
        return text

    messages = variables["messages"]
    text, turns = rendered(messages, variables["add_generation_prompt"]), []
    for i in (i for i, message in enumerate(messages) if locate and message["role"] == "assistant"):
        before, after = rendered(messages[:i], True), rendered(messages[: i + 1], False)
        is_found = after.startswith(before) and text.startswith(after)
        turns.append((len(before), len(after)) if is_found else None)
    return text, turns


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
                result = _render(template, cpu_s, *json.loads(line))
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
