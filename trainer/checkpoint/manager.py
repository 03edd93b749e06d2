"""Checkpoints of a run: when they are saved, which ones are kept, and how a saved state is restored."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.config import CheckpointConfig
from trainer.base.config.checkpoints import list_checkpoints
from trainer.base.system import console
from trainer.base.system.run_files import CONFIG_FILE, STATE_FILE, step_of
from trainer.base.system.spelling import counted
from trainer.checkpoint import resume
from trainer.checkpoint.async_save import SaveResult, Writer
from trainer.checkpoint.best import BestTracker
from trainer.checkpoint.commit import SaveFailed, SaveRequest, load
from trainer.checkpoint.mirror import Mirror, finish_mirror
from trainer.checkpoint.resume import ResumePoint
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState, is_due


class CheckpointManager:
    """Manager that saves and restores the complete state of a run: tensors, random generators and TrainState."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        device: torch.device,
        tensors: Callable[[], dict[str, Tensor]],
        after_load: Callable[[], None],
        best: BestTracker,
        writer: Writer,
        mirror: Mirror | None = None,
        *,
        steps: int,
        stored_names: set[str],
        files: Mapping[str, bytes],
        metadata: Mapping[str, Any],
    ):
        """Describe the checkpoints of a run. Nothing is read or written.

        Args:
            config: Settings of checkpoints.
            folder: Folder of the checkpoints.
            device: Device of this rank, whose random generators are saved.
            tensors: Function that returns name in the checkpoint -> tensor of this rank. These are the tensors in use.
            after_load: Function to call after a checkpoint is loaded into these tensors.
            best: Which checkpoint is the best one by keep_best_on.
            writer: It is started with the tensors of `saved_tensors`.
            mirror: Uploads what is committed, on the first rank of each node.
            steps: Number of steps of the run.
            stored_names: Names of the tensors of the model and the optimizer on all ranks.
            files: Small files to save in every checkpoint.
            metadata: Metadata to write to every manifest.
        """
        self.config = config
        self.folder = folder
        self.device = device
        self.tensors = tensors
        self.after_load = after_load
        self.best = best
        self.writer = writer
        self.mirror = mirror
        self.steps = steps
        self.stored_names = stored_names
        self.files = files
        self.metadata = metadata
        self._deferred = False
        self._last_step: int | None = None

    def before_update(self) -> None:
        """Wait until the tensors of the save in flight are copied, so that the optimizer may change them."""
        self.writer.before_update()

    def close(self) -> None:
        """Stop the writer and the mirror without waiting for a save or an upload in flight."""
        self.writer.close()
        if self.mirror is not None:
            self.mirror.close()

    def finish_mirror(self) -> None:
        """Wait for the uploads, collectively. See Mirror.finish."""
        finish_mirror(self.config, self.mirror)

    def due(self, step: int) -> bool:
        if not self.config.enabled:
            return False
        return self._deferred or self.best.pending or is_due(step, self.config.interval_steps, self.steps)

    def save(self, state: TrainState, *, suspect: bool, last: bool) -> list[SaveResult]:
        """Wait for the save in flight, start a new save, and return the results of successful saves.

        Args:
            state: State after the latest step.
            suspect: Whether a non-finite loss or gradient norm suggests that the parameters are corrupted. If so, the save is
                deferred to the next step, or at the last step, no checkpoint is deleted.
            last: Whether the run ends after this step.

        Raises:
            SaveFailed: As in `poll`.
        """
        if not self.config.enabled:
            return []
        results = self.wait()
        if self.config.mirror and (failure := run_on_rank_0(lambda: self.mirror.uploads.failure)):
            raise SaveFailed(failure)
        self._deferred = suspect and not last
        if self._deferred:
            return results
        if last:
            self._last_step = state.step
        self.best.before_save(state.step)
        rng = devices.rng_state(self.device)
        state = replace(state, best=self.best.state(), rng=sorted(rng))
        counts = {"step": state.step, "tokens_seen": state.tokens_seen, "world_size": state.world_size}
        request = SaveRequest(
            folder=self.folder,
            step=state.step,
            files={STATE_FILE: state.to_json().encode(), **self.files},
            metadata={**counts, **self.metadata},
            keep=0 if suspect else self.config.keep,  # 0: delete nothing
            keep_interval_steps=self.config.keep_interval_steps,
            keep_best=self.best.step,
            after_commit=self._mirror_request if self.config.mirror else None,
        )
        self.writer.save(request, saved_tensors(self.tensors(), rng))
        return results + self.poll()

    def poll(self) -> list[SaveResult]:
        """Return the saves that have succeeded since the last call. A failed save is logged as a warning.

        Raises:
            SaveFailed: A save failed, and on_failure is "stop", or the save was the run's last.
        """
        return self._check(self.writer.poll())

    def wait(self) -> list[SaveResult]:
        """Wait for the save in flight, then return or raise like `poll`. Afterwards all ranks agree on the best checkpoint."""
        return self._check(self.writer.wait())

    def _check(self, results: list[SaveResult]) -> list[SaveResult]:
        for result in results:
            if result.failure is None:
                continue
            self.best.after_failed_save(result.step)
            if self.config.on_failure == "stop" or result.step == self._last_step:
                raise result.failure
            console.warning(
                f"{result.failure}; previous checkpoints are intact, and the next save will be attempted as scheduled"
            )
        return [result for result in results if result.failure is None]

    def _mirror_request(self, request: SaveRequest) -> None:
        if self.mirror is not None:
            self.mirror.add(request)

    def restore(self, point: ResumePoint, state: TrainState) -> None:
        """Load a checkpoint, collectively, into the tensors in use and into `state`. Raises ConfigError."""
        saved = point.state
        resume.require_compatible(point, state.fingerprint)
        # A rank beyond the saving run's world size keeps newly seeded generators.
        names = saved.rng if dist.get_rank() < saved.world_size else []
        fresh = devices.rng_state(self.device)
        rng = {name: torch.empty_like(fresh[name]) for name in names if name in fresh}
        load(
            point.path,
            saved_tensors(self.tensors(), rng),
            self.stored_names | {"average/num_updates", "stability", "rng"},
        )
        self.after_load()
        devices.set_rng_state(self.device, rng)
        state.resume_from(saved)
        existing = run_on_rank_0(lambda: list_checkpoints(self.folder))
        mirrored = run_on_rank_0(lambda: self.mirror.steps) if self.config.mirror else []
        self.best.load_state(saved.best, [*map(step_of, existing), *mirrored])
        self._deferred = False
        ranks = counted(saved.world_size, "rank")
        console.info(f"resuming from {point.path} (step {saved.step}, saved by {ranks})")
        for line in resume.changed_settings(point, self.files[CONFIG_FILE].decode()):
            console.info(f"setting changed since the checkpoint: {line}")
        if point.rollback:
            run_on_rank_0(lambda: self._discard_newer(point))

    def _discard_newer(self, point: ResumePoint) -> None:
        if self.mirror is not None:  # first: a start on another disk must not find what is discarded
            self.mirror.rolled_back(point.state.step, point.requested)
        resume.discard_newer(point)


def saved_tensors(tensors: Mapping[str, Tensor], rng: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name in the checkpoint -> tensor, for this rank's tensors and the states of its random generators."""
    return {**tensors} | {f"rng/{dist.get_rank()}/{name}": state for name, state in rng.items()}
