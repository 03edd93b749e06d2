"""Chat templates. Each template is rendered in its own process (sandbox.py) with limited CPU time and memory."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.data.chat import sandbox
from trainer.data.chat.template_files import SETTING

_ROOT = Path(__file__).parents[3]


class TemplateFailure(Exception):
    """Failure of a template that is invalid or cannot render a conversation. The message is one line."""

    def __init__(self, reason: str, way_out: str = ""):
        """way_out: what a user can do about it."""
        self.reason = " ".join(reason.split())[:300]
        self.way_out = way_out
        super().__init__(f"{self.reason}; {way_out}" if way_out else self.reason)


@dataclass(frozen=True)
class Rendering:
    """A conversation as text."""

    text: str
    origins: str
    """Origin of each character of the text (traced_text.py): the template, an untraced operation, or a string of the data."""
    read: frozenset[str]
    """Names of the fields that the template read from a message."""


class ChatTemplate:
    """A compiled chat template, and the process that renders it."""

    def __init__(self, source: str, cpu_s: float, memory_mib: int):
        """See `compile`."""
        self._source = source
        self._cpu_s, self._memory_mib = cpu_s, memory_mib
        self._process: subprocess.Popen | None = None
        self.variables: frozenset[str] = frozenset()
        """Names of all variables."""
        self.tags: list[str] = []
        """Constant strings that look like tags, such as </think>."""

    @classmethod
    def compile(cls, source: str, cpu_s: float = 10, memory_mib: int = 1024) -> "ChatTemplate":
        """Compile a template in a new process.

        Args:
            source: Jinja text.
            cpu_s: Limit of the CPU time for each rendering.
            memory_mib: Limit of the memory for each rendering.

        Raises:
            TemplateFailure: The text is not a valid template.
        """
        template = cls(source, cpu_s, memory_mib)
        names, constants = template._start()
        template.variables = frozenset(names)
        template.tags = [text for text in constants if re.fullmatch(r"[<\[].+[>\]]", text)]
        return template

    def _start(self) -> tuple[list[str], list[str]]:
        """Start the process that renders the template. Return the names of its variables and its constant strings."""
        # With PYTHONSAFEPATH, `-m` would not search the current folder.
        run = f"runpy.run_module({sandbox.__name__!r}, run_name='__main__')"
        code = f"import runpy, sys; sys.path.insert(0, {str(_ROOT)!r}); {run}"
        command = [sys.executable, "-c", code, str(self._cpu_s), str(self._memory_mib)]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        return self._request(self._source)

    def __del__(self) -> None:
        if self._process is not None:
            with self._process:  # the end of the context closes the pipes and waits
                self._process.kill()

    def render(self, names: Mapping[str, str], data: Mapping[str, Any], add_generation_prompt: bool) -> Rendering:
        """Render a conversation. Raises TemplateFailure.

        Args:
            names: variables whose text counts as the template's own, such as bos_token.
            data: the variables "messages" and "tools" and, as "arguments", further variables by name. The roles of messages
                count as the template's own text.
            add_generation_prompt: the template's variable of this name.
        """
        if self._process.poll() is not None:  # an earlier conversation exceeded a limit
            self._start()
        text, runs, read = self._request((names, data, add_generation_prompt))
        origins = "".join(origin * length for origin, length in runs)
        return Rendering(text, origins, frozenset(read))

    def _request(self, request: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if reply.endswith("\n"):  # a process that is killed may have written a part of its reply
            result, error = json.loads(reply)
            if error is not None:
                raise TemplateFailure(error)
            return result
        status = self._process.wait()
        if status == -signal.SIGPROF:
            raise TemplateFailure(f"the template takes more than {self._cpu_s:g} s of CPU time")
        if status == sandbox.OUT_OF_MEMORY:
            raise TemplateFailure(f"the template takes more than {self._memory_mib} MiB of memory")
        if status == -signal.SIGKILL:
            message = (
                "a process that renders the chat template was killed, probably for lack of memory; use fewer workers"
            )
            raise ConfigError("data.prepare_workers", message)
        raise ConfigError(SETTING, f"the process that renders the template ended with status {status}")
