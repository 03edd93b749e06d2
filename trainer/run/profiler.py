"""Traces of steps by torch's profiler, and snapshots of GPU memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from trainer.config import ProfilingConfig
from trainer.runtime import device as devices
from trainer.system import logging

Section = Callable[[str], AbstractContextManager[Any]]


class Profiler:
    """Profiler of a range of steps on one rank. It writes one file when the range or the run ends."""

    def __init__(self, config: ProfilingConfig, device: torch.device, rank: int, run_folder: Path, section: Section):
        """section: function that times the profiler's own work, whose name is its argument."""
        selected = config.first_step > 0 and config.rank in ("all", rank)
        self._steps = range(config.first_step, config.first_step + config.num_steps) if selected else range(0)
        self._memory, self._device, self._rank, self._section = config.memory_snapshot, device, rank, section
        self._folder = run_folder / "profiles"
        self._trace: torch.profiler.profile | None = None
        """The profiler while it records."""

    def before_step(self, step: int) -> None:
        if step not in self._steps or self._trace is not None:
            return
        with self._section("profiling"):
            if self._memory:
                devices.record_memory_history(True)
            self._trace = torch.profiler.profile(record_shapes=True)
            self._trace.start()

    def after_step(self, step: int) -> None:
        if self._trace is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the files, if the profiler records."""
        if self._trace is not None:
            with self._section("profiling"):
                self._write(self._trace)
            self._trace = None

    def _write(self, trace: torch.profiler.profile) -> None:
        devices.synchronize(self._device)
        trace.stop()
        name = f"step-{self._steps[0]:08d}-rank-{self._rank:05d}"
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"{name}.json.gz"
            unfinished = path.with_name(f"unfinished-{path.name}")  # torch compresses files whose names end in .gz
            trace.export_chrome_trace(str(unfinished))
            unfinished.rename(path)
            if self._memory:
                devices.write_memory_snapshot(self._folder / f"{name}.memory.pickle")
            logging.info(f"wrote a trace of {len(self._steps)} steps to {path}")
        except OSError as error:
            logging.warning(f"the trace cannot be written ({error.strerror}); the run continues")
        finally:
            if self._memory:
                devices.record_memory_history(False)
