"""Fault injection inside the processes of a run.

Python imports the `sitecustomize` on its path when a process starts. This one patches modules of the trainer when they are
imported, as the environment variable FAULT says; the trainer contains no code for it.

FAULT='{"kind": "raise", "rank": 1, "step": 5}'; KINDS lists the kinds, each with a function below.
"""

import errno
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

FAULT = json.loads(os.environ.get("FAULT", "null"))


def is_on_this_rank() -> bool:
    return FAULT.get("rank", 0) in (int(os.environ.get("RANK", "0")), "all")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Stop all threads, as on a node that swaps or with a kernel that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def before(owner, name, action) -> None:
    """Call action with the arguments of a function before each of its calls."""
    original = getattr(owner, name)

    def patched(*args, **kwargs):
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def after(owner, name, action) -> None:
    """Call action without arguments after each call of a function."""
    original = getattr(owner, name)

    def patched(*args, **kwargs):
        result = original(*args, **kwargs)
        action()
        return result

    setattr(owner, name, patched)


# ---------------------------------------------------------------- faults of a step


def at_step(trainer, action) -> None:
    """Call action with the Trainer before FAULT["step"], unless torchrun has restarted the ranks."""

    def at_given_step(self, *args, **kwargs):
        first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.state.step + 1 == FAULT["step"] and is_on_this_rank() and first_attempt:
            action(self)

    before(trainer.Trainer, "train_step", at_given_step)


def inject_exception(trainer) -> None:
    def fail(self):
        raise RuntimeError("injected")

    at_step(trainer, fail)


def inject_hang(trainer) -> None:
    at_step(trainer, lambda self: hang())


def inject_hang_at_end(distributed) -> None:
    """Hang when the run is complete and the ranks wait for each other to exit."""
    before(distributed, "shutdown", lambda: hang() if is_on_this_rank() else None)


def inject_out_of_memory(trainer) -> None:
    def allocate(self):
        import torch

        torch.empty(2**60, dtype=torch.uint8)

    at_step(trainer, allocate)


def inject_desync(trainer) -> None:
    """Omit one reduction on one rank."""

    def omit_next(self):
        import trainer.optim.optimizer as optimizer

        original = optimizer.sum_over

        def omitted(tensor, group):
            optimizer.sum_over = original
            return tensor.clone()

        optimizer.sum_over = omitted

    at_step(trainer, omit_next)


def inject_slow_steps(trainer) -> None:
    def wait(self, *args, **kwargs):
        if is_on_this_rank():
            time.sleep(FAULT["seconds"])

    before(trainer.Trainer, "train_step", wait)


def inject_straggler(build) -> None:
    """Make every block of a rank take twice as long, or each of its microbatches 0.1 s longer to load."""
    if not is_on_this_rank():
        return
    if FAULT["location"] == "data":
        before(build.Batch, "to", lambda *args: time.sleep(0.1))
        return
    original = build.build_model_parts

    def build_slow_parts(config, resolved, *args):
        parts = original(config, resolved, *args)
        for part in parts.values():
            for block in part.get_submodule(resolved.structure.blocks_path).children():
                block.forward = twice_as_slow(block.forward)
        return parts

    build.build_model_parts = build_slow_parts


def twice_as_slow(function):
    def slow(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        time.sleep(time.perf_counter() - start)
        return result

    return slow


def at_microbatch(samples, action) -> None:
    """Call action before a rank loads its FAULT["microbatch"]-th microbatch, counted from 1. Evaluations do not count."""
    loaded = [0]

    def at_given_microbatch(self, index):
        if "training_batches" not in {frame.name for frame in traceback.extract_stack()} and is_main_thread():
            return
        loaded[0] += 1
        if is_on_this_rank() and loaded[0] == FAULT["microbatch"]:
            action()

    before(samples.WrappedSamples, "__getitem__", at_given_microbatch)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def inject_hang_of_data(samples) -> None:
    """Hang the thread that loads a microbatch, as a disk does. FAULT["file"] tells that it hangs."""

    def hang_thread():
        Path(FAULT["file"]).touch()
        threading.Event().wait()

    at_microbatch(samples, hang_thread)


def inject_read_error(samples) -> None:
    def fail():
        original = os.preadv

        def failing(*_):
            os.preadv = original
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.preadv = failing

    at_microbatch(samples, fail)


def inject_bad_gradients(trainer) -> None:
    """Scale the gradients of a rank at FAULT["steps"], until a rollback. A scale of nan or inf makes them non-finite."""

    def at_given_steps(self, *args, **kwargs):
        if self.state.step + 1 in FAULT["steps"] and is_on_this_rank() and self.state.rollbacks == 0:
            scale_gradients(self, float(FAULT["scale"]))

    before(trainer.Trainer, "train_step", at_given_steps)


def scale_gradients(trainer, scale) -> None:
    """Scale this rank's gradients before the next clipping."""
    optimizer = trainer.engine.optimizer
    original = optimizer.clip

    def clip(*args, **kwargs):
        for p in trainer.engine.parameters.values():
            p.grad.mul_(scale)
        optimizer.clip = original
        return original(*args, **kwargs)

    optimizer.clip = clip


# ---------------------------------------------------------------- faults on request, for long runs


def requested(fault) -> bool:
    """Return whether the harness has requested this fault on this rank since the last call."""
    try:
        (Path(FAULT["folder"]) / f"{fault} {os.environ.get('RANK', '0')}").unlink()
    except FileNotFoundError:
        return False
    return True


def inject_on_request(module) -> None:
    """Inject faults that the harness requests, and non-finite gradients at every FAULT["nan_every"]-th step. Steps take
    FAULT["seconds"] longer, because the steps of a tiny model are much shorter than a restart."""
    if module.__name__ == "trainer.checkpoint.tensor_files":

        def fail_if_requested(path, *args):
            if requested("disk full"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        before(module, "write_safetensors", fail_if_requested)
        return

    def before_step(self, *args, **kwargs):
        if requested("raise"):
            raise RuntimeError("injected")
        if (self.state.step + 1) % FAULT["nan_every"] == 0:
            scale_gradients(self, float("nan"))
        time.sleep(FAULT["seconds"])

    before(module.Trainer, "train_step", before_step)


# ---------------------------------------------------------------- faults of a save


class AtSave:
    """Calls action at one call, counted from 1: the FAULT["save"]-th one on the rank of the fault."""

    def __init__(self, action):
        self.action = action
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == FAULT.get("save", 1) and is_on_this_rank():
            self.action()


def crash_before_or_after(module, points) -> None:
    """points: point of a save -> `before` or `after`, and the name of the function."""
    if FAULT["point"] in points:
        patch, name = points[FAULT["point"]]
        patch(module, name, AtSave(die))


def inject_crash_in_commit(commit) -> None:
    crash_before_or_after(
        commit,
        {
            "before the folder": (before, "make_staging_dir"),
            "folder made": (after, "make_staging_dir"),
            "before the plan": (before, "save"),
            "written, not committed": (before, "_commit"),
            "committed": (before, "prune"),
        },
    )
    crash = AtSave(die)
    if FAULT["point"] == "old renamed":
        original = Path.rename

        def rename(path, target):
            result = original(path, target)
            if str(target).endswith(".old"):
                crash()
            return result

        Path.rename = rename
    if FAULT["point"] == "renamed":
        before(commit, "sync", lambda path: crash() if path.name == "checkpoints" else None)


def inject_crash_in_storage(storage) -> None:
    crash_before_or_after(storage, {"shard written": (after, "write_safetensors")})
    if FAULT["point"] in ("header written", "half of a shard"):
        original, crash = storage._blocks, AtSave(die)

        def blocks(header, entries):
            entries = list(entries)
            last = 0 if FAULT["point"] == "header written" else len(entries) // 2
            for i, block in enumerate(original(header, entries)):
                yield block
                if i == last:
                    crash()

        storage._blocks = blocks


def inject_crash_in_manifest(manifest) -> None:
    crash_before_or_after(manifest, {"before the manifest": (before, "write"), "manifest written": (after, "write")})
    if FAULT["point"] == "half of the manifest":
        crash = AtSave(die)

        def write_half(path, content):
            if path.name == manifest.MANIFEST:
                path.write_bytes(content[: len(content) // 2])
                crash()

        before(manifest, "write_file", write_half)


def inject_slow_commits(commit) -> None:
    before(commit, "_commit", lambda *args: time.sleep(FAULT["seconds"]))


def inject_write_errors(storage) -> None:
    """Fail FAULT["times"] writes of a shard, from the FAULT["save"]-th one on."""
    calls = [0]

    def fail(path, *args):
        calls[0] += 1
        first = FAULT.get("save", 1)
        if is_on_this_rank() and first <= calls[0] < first + FAULT["times"]:
            number = getattr(errno, FAULT["error"])
            raise OSError(number, os.strerror(number), str(path))

    before(storage, "write_safetensors", fail)


KINDS = {
    "raise": {"trainer.trainer": inject_exception},
    "hang": {"trainer.trainer": inject_hang},
    "hang_at_end": {"trainer.runtime.distributed": inject_hang_at_end},
    "memory": {"trainer.trainer": inject_out_of_memory},
    "desync": {"trainer.trainer": inject_desync},
    "slow": {"trainer.trainer": inject_slow_steps},
    "straggler": {"trainer.build": inject_straggler},
    "hang_of_data": {"trainer.data.sampling.samples": inject_hang_of_data},
    "read_error": {"trainer.data.sampling.samples": inject_read_error},
    "gradient": {"trainer.trainer": inject_bad_gradients},
    "on_request": dict.fromkeys(("trainer.trainer", "trainer.checkpoint.tensor_files"), inject_on_request),
    "crash": {
        "trainer.checkpoint.commit": inject_crash_in_commit,
        "trainer.checkpoint.tensor_files": inject_crash_in_storage,
        "trainer.checkpoint.manifest": inject_crash_in_manifest,
    },
    "slow_save": {"trainer.checkpoint.commit": inject_slow_commits},
    "write_error": {"trainer.checkpoint.tensor_files": inject_write_errors},
}
"""Kind -> module -> function that patches it."""


class PatchOnImport(importlib.abc.MetaPathFinder):
    def __init__(self, patches):
        self.patches = patches

    def find_spec(self, name, path, target=None):
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


if FAULT:
    sys.meta_path.insert(0, PatchOnImport(dict(KINDS[FAULT["kind"]])))
