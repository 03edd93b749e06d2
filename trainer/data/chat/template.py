"""Chat templates. Each template is rendered in its own process (sandbox.py) with limited CPU time and memory."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data.chat import sandbox
from trainer.data.chat.template_files import SETTING

_ROOT = Path(__file__).parents[3]


class TemplateFailure(Exception):
    """Failure of a template that is invalid or cannot render a conversation. The message is one line."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split())[:300])


class ChatTemplate:
    """A compiled chat template."""

    _process: subprocess.Popen | None = None

    def __init__(self, source: str, cpu_s: float = 10, memory_mib: int = 1024):
        """cpu_s, memory_mib: limits for each rendering. Raises TemplateFailure if the text is not a valid template."""
        self._source = source
        self._cpu_s, self._memory_mib = cpu_s, memory_mib
        names = self._start()
        self.has_generation_blocks = sandbox.BEGIN_MARK in names
        """Whether {% generation %} blocks mark the answers."""
        self.uses_tools = "tools" in names

    def _start(self) -> list[str]:
        """Start the process that renders the template. Return the names of the template's variables."""
        command = [sys.executable, "-m", sandbox.__name__, str(self._cpu_s), str(self._memory_mib)]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        return self._request(self._source)

    def __del__(self) -> None:
        if self._process is not None:
            with self._process:  # the end of the context closes the pipes and waits
                self._process.kill()

    def render(self, variables: Mapping[str, Any], locate: bool) -> tuple[str, list[tuple[int, int] | None]]:
        """Return the text of a conversation and, if `locate` is true, the (start, stop) of each answer in the text. A range is
        None if the conversation up to the start or the end of the answer, rendered alone, is not a prefix of the text. Raises
        TemplateFailure."""
        if self._process.poll() is not None:  # an earlier conversation exceeded a limit
            self._start()
        return self._request((variables, locate))

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
        raise ConfigError(SETTING, f"the process that renders the template ended with status {status}")
