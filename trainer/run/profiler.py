"""Traces of steps by torch's profiler, and snapshots of GPU memory."""

from pathlib import Path

import torch
import torch.distributed as dist

from trainer.base.config import ProfilingConfig
from trainer.base.system import console
from trainer.base.system.files import describe
from trainer.base.system.streams import print_error
from trainer.runtime import device as devices


class Profiler:
    """Profiler of a range of steps, on one rank or on all ranks. It writes one trace per rank when the range or the run ends."""

    def __init__(self, config: ProfilingConfig, device: torch.device, run_folder: Path, step: int):
        """step: completed steps of the run."""
        self._steps = range(config.first_step, config.first_step + config.num_steps) if config.first_step else range(0)
        self._config, self._device = config, device
        self._folder = run_folder / "profiles"
        self._traces = config.rank in ("all", dist.get_rank())
        self._trace: torch.profiler.profile | None = None
        self.recording = False
        """Whether the current step is traced, on this rank or on another one."""
        if self._steps and step >= self._steps[-1]:
            console.warning(
                f"the run has already completed the steps of [profiling], up to {self._steps[-1]}: no trace"
            )

    def starts_at(self, step: int) -> bool:
        return step in self._steps and not self.recording

    def ends_after(self, step: int) -> bool:
        return self.recording and step + 1 not in self._steps

    def start(self) -> None:
        """Start to record, collectively. The device must have completed its work."""
        self.recording = True
        if self._traces:
            if self._config.memory_snapshot:
                devices.record_memory_history(True)
            self._trace = torch.profiler.profile(record_shapes=True)
            self._trace.start()
        dist.barrier()

    def stop(self) -> None:
        """Write the trace, collectively. The device must have completed its work."""
        self.recording = False
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
            try:
                self._write(trace)
            except OSError as error:  # on any rank; logging prints only on some
                print_error(f"[rank {dist.get_rank()}] warning: a trace cannot be written: {describe(error)}")
            if self._config.memory_snapshot:
                devices.record_memory_history(False)
        dist.barrier()
        console.info(f"traced steps from {self._steps.start} on, rank {self._config.rank}: {self._folder}")

    def _write(self, trace: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self._steps.start:08d}-rank-{dist.get_rank():05d}"
        path = self._folder / f"{name}.json.gz"
        unfinished = path.with_name(f"unfinished-{path.name}")  # torch compresses files whose names end in .gz
        trace.export_chrome_trace(str(unfinished))
        unfinished.rename(path)
        if self._config.memory_snapshot:
            devices.write_memory_snapshot(self._folder / f"{name}.memory.pickle")
