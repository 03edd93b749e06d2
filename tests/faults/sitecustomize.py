"""Faults, inside the processes that they hit.

Python imports a `sitecustomize` that is on the path at the start of every process. The modules of the trainer are changed, as
FAULT says, when they are imported. The trainer itself knows nothing of it.

FAULT='{"kind": "raise", "rank": 1, "step": 5}'; see the functions below for the kinds.
"""

import errno
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

FAULT = json.loads(os.environ.get("FAULT", "null"))


def here() -> bool:
    return FAULT.get("rank", 0) in (int(os.environ.get("RANK", "0")), "all")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, action) -> None:
    """Let action run before a function does."""
    original = getattr(owner, name)

    def changed(*args, **kwargs):
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, changed)


def after(owner, name, action) -> None:
    original = getattr(owner, name)

    def changed(*args, **kwargs):
        result = original(*args, **kwargs)
        action()
        return result

    setattr(owner, name, changed)


# ---------------------------------------------------------------- at a step


def at_step(trainer, action) -> None:
    def act(self, *args, **kwargs):
        if self.state.step + 1 == FAULT["step"] and here() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            action(self)

    before(trainer.Trainer, "train_step", act)


def kind_raise(trainer) -> None:
    def fail(self):
        raise RuntimeError("injected")

    at_step(trainer, fail)


def kind_stop(trainer) -> None:
    """The rank stands still, as a machine does that swaps or a kernel that hangs."""
    at_step(trainer, lambda self: os.kill(os.getpid(), signal.SIGSTOP))


def kind_stop_at_end(distributed) -> None:
    """The same, when the run is over and the ranks wait for each other to leave."""
    before(distributed, "shutdown", lambda: os.kill(os.getpid(), signal.SIGSTOP) if here() else None)


def kind_memory(trainer) -> None:
    """More memory is asked for than there is."""

    def fill(self):
        import torch

        torch.empty(2**60, dtype=torch.uint8)

    at_step(trainer, fill)


def kind_desync(trainer) -> None:
    """One rank leaves out one reduction."""

    def skip(self):
        import trainer.optim.optimizer as optimizer

        original = optimizer.sum_over

        def once(tensor, group):
            optimizer.sum_over = original
            return tensor.clone()

        optimizer.sum_over = once

    at_step(trainer, skip)


def kind_slow(trainer) -> None:
    def wait(self, *args, **kwargs):
        if here():
            time.sleep(FAULT["seconds"])

    before(trainer.Trainer, "train_step", wait)


def kind_straggler(build) -> None:
    """A rank is slow all the time: every block it computes takes twice as long, or its data longer than the rest of a step."""
    if not here():
        return
    if FAULT["where"] == "blocks":
        original = build.build_model_parts

        def slowed(config, resolved, *args):
            parts = original(config, resolved, *args)
            for part in parts.values():
                for block in part.get_submodule(resolved.spec.plan(resolved.sizes).blocks).children():
                    block.forward = twice(block.forward)
            return parts

        build.build_model_parts = slowed
    else:
        before(build.TrainingData, "to_device", lambda *given: time.sleep(0.1))


def twice(compute):
    def slow(*args, **kwargs):
        start = time.perf_counter()
        result = compute(*args, **kwargs)
        time.sleep(time.perf_counter() - start)
        return result

    return slow


def kind_gradient(trainer) -> None:
    """The gradients of a rank are scaled at some steps of the first attempt (nan: they become no numbers)."""

    def act(self, *args, **kwargs):
        if self.state.step + 1 in FAULT["steps"] and here() and self.state.rollbacks == 0:
            corrupt(self, float(FAULT["scale"]))

    before(trainer.Trainer, "train_step", act)


def corrupt(trainer, scale) -> None:
    """Scale this step's gradients on this rank."""
    clip = trainer.engine.optimizer.clip

    def injured(*args, **kwargs):
        for p in trainer.engine.parameters.values():
            p.grad.mul_(scale)
        trainer.engine.optimizer.clip = clip
        return clip(*args, **kwargs)

    trainer.engine.optimizer.clip = injured


# ---------------------------------------------------------------- while a long run goes on


def ordered(order) -> bool:
    """Whether the harness has asked this rank for a fault, since the last call."""
    try:
        (Path(FAULT["folder"]) / f"{order} {os.environ.get('RANK', '0')}").unlink()
    except FileNotFoundError:
        return False
    return True


def kind_on_order(module) -> None:
    """Faults when the harness asks for them; and now and then gradients that are no numbers, always at the same steps. Steps are
    made longer, as if another device calculated: a tiny model's alone would be nothing beside a start of processes."""
    if module.__name__ == "trainer.checkpoint.storage":
        write = module.write_safetensors

        def full(path, entries, metadata):
            if ordered("disk full"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(path, entries, metadata)

        module.write_safetensors = full
        return

    def act(self, *args, **kwargs):
        if ordered("raise"):
            raise RuntimeError("injected")
        if (self.state.step + 1) % FAULT["nan_every"] == 0:
            corrupt(self, float("nan"))
        time.sleep(FAULT["seconds"])

    before(module.Trainer, "train_step", act)


# ---------------------------------------------------------------- in a save


class Count:
    """Acts on one of the calls, counted from 1; on all from then on, where FAULT says so."""

    def __init__(self, action):
        self.action = action
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == FAULT.get("save", 1) and here():
            self.action()


def crash_before_or_after(module, points) -> None:
    """points: name of a point of a save -> when to SIGKILL (before, after), and the function."""
    if FAULT["point"] in points:
        when, name = points[FAULT["point"]]
        when(module, name, Count(die))


def crash_in_checkpoint(checkpoint) -> None:
    crash_before_or_after(
        checkpoint,
        {
            "before the folder": (before, "make_staging_dir"),
            "folder made": (after, "make_staging_dir"),
            "before the plan": (before, "save"),
            "written, not committed": (before, "_commit"),
            "committed": (before, "prune"),
        },
    )
    count = Count(die)
    if FAULT["point"] == "old moved aside":
        original = Path.rename

        def rename(path, target):
            result = original(path, target)
            if str(target).endswith(".old"):
                count()
            return result

        Path.rename = rename
    if FAULT["point"] == "renamed":
        before(checkpoint, "sync", lambda path: count() if path.name == "checkpoints" else None)


def crash_in_shards(shards) -> None:
    crash_before_or_after(shards, {"shard written": (after, "write_safetensors")})
    if FAULT["point"] in ("header written", "half of a shard"):
        blocks, count = shards._blocks, Count(die)

        def dying(head, entries):
            entries = list(entries)
            for number, block in enumerate(blocks(head, entries)):
                yield block
                if number == (0 if FAULT["point"] == "header written" else len(entries) // 2):
                    count()

        shards._blocks = dying


def crash_in_manifest(manifest) -> None:
    crash_before_or_after(manifest, {"before the manifest": (before, "write"), "manifest written": (after, "write")})
    if FAULT["point"] == "half of the manifest":
        count = Count(die)

        def half(path, content):
            if path.name == manifest.NAME:
                path.write_bytes(content[: len(content) // 2])
                count()

        before(manifest, "write_file", half)


def kind_slow_save(checkpoint) -> None:
    """The commit takes its time."""
    before(checkpoint, "_commit", lambda *given: time.sleep(FAULT["seconds"]))


def kind_write_error(shards) -> None:
    """Writing a shard fails `times` times from a save on."""
    write = shards.write_safetensors
    calls = [0]

    def failing(path, entries, metadata):
        calls[0] += 1
        first = FAULT.get("save", 1)
        if here() and first <= calls[0] < first + FAULT["times"]:
            number = getattr(errno, FAULT["error"])
            raise OSError(number, os.strerror(number), str(path))
        return write(path, entries, metadata)

    shards.write_safetensors = failing


KINDS = {
    "raise": {"trainer.trainer": kind_raise},
    "stop": {"trainer.trainer": kind_stop},
    "stop_at_end": {"trainer.runtime.distributed": kind_stop_at_end},
    "memory": {"trainer.trainer": kind_memory},
    "desync": {"trainer.trainer": kind_desync},
    "slow": {"trainer.trainer": kind_slow},
    "straggler": {"trainer.build": kind_straggler},
    "gradient": {"trainer.trainer": kind_gradient},
    "on_order": dict.fromkeys(("trainer.trainer", "trainer.checkpoint.storage"), kind_on_order),
    "crash": {
        "trainer.checkpoint.commit": crash_in_checkpoint,
        "trainer.checkpoint.storage": crash_in_shards,
        "trainer.checkpoint.manifest": crash_in_manifest,
    },
    "slow_save": {"trainer.checkpoint.commit": kind_slow_save},
    "write_error": {"trainer.checkpoint.storage": kind_write_error},
}


class Injector(importlib.abc.MetaPathFinder):
    def __init__(self, changes):
        self.changes = changes

    def find_spec(self, name, path, target=None):
        change = self.changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change
        return spec


if FAULT:
    sys.meta_path.insert(0, Injector(dict(KINDS[FAULT["kind"]])))
