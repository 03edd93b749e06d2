"""Training loops to compare with the trainer's on one rank: a plain loop, accelerate, and transformers' Trainer.

Each contender trains the same architecture from the same weights on the same tokens, with AdamW and clipping. It runs in its own
process, which sleeps while another contender runs. `benchmark.py peers` starts them and compares their times.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import MODELS
from models.huggingface_config import write_config
from models.huggingface_tensors import join_tensors
from models.sizes import Sizes
from scripts.dev import plain_loop
from scripts.dev.kernels import KernelRecorder
from scripts.dev.plain_loop import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, adamw, cross_entropy
from trainer.base.config.load import load_config
from trainer.base.config.packages import require_package
from trainer.base.config.schema.run import DeviceChoice
from trainer.batch import Batch
from trainer.build import build_trainer
from trainer.parallel.init_weights import allocate, initialize
from trainer.run.resolve import resolve
from trainer.run.training_data import TrainingData
from trainer.runtime import device as devices
from trainer.tools.testing.layouts import flags

_NEVER = 10**9


@dataclass(frozen=True)
class Task:
    """The work of all contenders."""

    family: str
    sizes: Sizes
    batch: int
    """Number of samples in a step."""
    seq: int
    threads: int
    """Number of CPU threads."""
    dtype: str
    """Precision of forward and backward: "fp32" or "bf16"."""
    compiled: bool
    device: DeviceChoice
    folder: Path
    """Folder for tokens.npy and for the files that contenders write."""

    def rows(self) -> Iterator[Tensor]:
        """Yield the samples of each step, (batch, seq + 1)."""
        return plain_loop.rows(self.folder / "tokens.npy", self.seq, self.batch)

    def flags(self, log_interval_steps: int = _NEVER) -> list[str]:
        """Return the command-line arguments with which the trainer does this work."""
        debug = asdict(MODELS[self.family].by_size["debug"])
        values = {
            "run.name": "meshwright",
            "run.output_folder": self.folder,
            "run.device": self.device,
            "model.name": self.family,
            "model.size": "debug",
            "data.dataset": "tokens",
            "data.path": self.folder / "tokens.npy",
            "data.store_folder": self.folder / "stores",
            "data.held_out_fraction": 0,
            "data.max_document_bytes": 2**31,
            "data.shuffle": "false",
            "evaluation.interval_steps": 0,
            "training.steps": _NEVER,
            "training.seq_len": self.seq,
            "training.local_batch_size": self.batch,
            "training.global_batch_size": self.batch,
            "training.compute_dtype": self.dtype,
            "training.max_norm": MAX_NORM,
            "training.cpu_threads": self.threads,
            "training.loss_chunk_tokens": self.batch * self.seq,
            "optimizer.lr": LR,
            "lr_schedule.min_lr_ratio": 1.0,
            "compile.enabled": str(self.compiled).lower(),
            "checkpoint.enabled": "false",
            "resilience.hang_timeout_s": 0,  # a pause is not a hang
            "metrics.interval_steps": log_interval_steps,
            "metrics.sinks": "console,jsonl",
            **{
                f"model.overrides.{name}": str(size).lower()
                for name, size in asdict(self.sizes).items()
                if debug[name] != size
            },
        }
        defaults = self.folder / "defaults.toml"
        defaults.touch()
        return ["--config", str(defaults), *flags({key: str(value) for key, value in values.items()})]


class Pacer:
    """Pause between steps. The parent process requests a number of steps and receives their durations and losses."""

    def __init__(self, pipe: Connection, device: torch.device):
        self.device = device
        self._pipe, self._remaining, self._start = pipe, 0, 0.0
        self._cpu = 0.0
        self._durations: list[float] = []
        self.losses: list[Tensor] = []
        """Loss of each step. Contenders do not read the values, for which the host would wait."""

    def before_step(self) -> None:
        """End a step, if one has begun, and begin the next one. Exit when the parent process exits."""
        if self._remaining == 1:
            devices.synchronize(self.device)  # the work of this turn must not slow down the next contender
        if self._remaining:
            self._durations.append(time.perf_counter() - self._start)
            self._remaining -= 1
        if not self._remaining:
            if self._durations:
                losses = [loss.item() for loss in self.losses]
                self._pipe.send((self._durations, losses, _cpu_seconds() - self._cpu))
            with suppress(EOFError):
                self._remaining = self._pipe.recv()
            if not self._remaining:
                os._exit(0)
            self._durations, self._cpu = [], _cpu_seconds()
        self._start = time.perf_counter()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _model(task: Task, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[task.family].model(task.sizes)
    allocate(model, device)
    initialize(model, seed=0)
    return model


def _autocast(task: Task, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=task.dtype == "bf16")


def _loop(
    task: Task,
    pacer: Pacer,
    model: nn.Module,
    wrapped: nn.Module,
    prepare: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> None:
    """Train.

    Args:
        task: The work.
        pacer: Called before each step.
        model: Holds the parameters.
        wrapped: Computes the logits.
        prepare: Wraps the optimizer.
        backward: Computes the gradients of a loss.
    """
    optimizer = prepare(adamw(model.parameters()))
    autocast = _autocast(task, pacer.device)
    wrapped = torch.compile(wrapped) if task.compiled else wrapped
    for row in task.rows():
        pacer.before_step()
        with autocast:
            loss = cross_entropy(wrapped, row.to(pacer.device))
        backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        pacer.losses.append(loss.detach())


def plain(task: Task, pacer: Pacer) -> None:
    model = _model(task, pacer.device)
    _loop(task, pacer, model, model)


def accelerate(task: Task, pacer: Pacer) -> None:
    accelerator = require_package("accelerate", "").Accelerator(
        cpu=pacer.device.type == "cpu", mixed_precision="bf16" if task.dtype == "bf16" else "no"
    )
    model = _model(task, pacer.device)
    wrapped = accelerator.prepare(model)
    # accelerate casts by itself.
    _loop(replace(task, dtype="fp32"), pacer, model, wrapped, accelerator.prepare, accelerator.backward)


def transformers(task: Task, pacer: Pacer) -> None:
    hf = require_package("transformers", "")
    spec = MODELS[task.family].huggingface
    config = hf.AutoConfig.for_model(**write_config(spec, task.sizes, task.seq))
    config.use_cache = False
    model = hf.AutoModelForCausalLM.from_config(config)
    parameters = {name: p.detach() for name, p in _model(task, torch.device("cpu")).named_parameters()}
    model.load_state_dict(join_tensors(spec, parameters, task.sizes.head_dim), strict=False)
    del parameters
    rows = [row for batch in task.rows() for row in batch]

    def collate(batch: list[Tensor]) -> dict[str, Tensor]:
        stacked = torch.stack(batch)
        labels = stacked[:, 1:].contiguous()
        return {"input_ids": stacked[:, :-1], "shift_labels": labels, "labels": labels}

    class Pause(hf.TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            pacer.before_step()

    class Recording(hf.Trainer):
        def training_step(self, *args: object, **kwargs: object) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            pacer.losses.append(loss.detach())
            return loss

    arguments = hf.TrainingArguments(
        output_dir=str(task.folder / "transformers"),
        per_device_train_batch_size=task.batch,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=MAX_NORM,
        optim="adamw_torch_fused",
        max_steps=len(rows) // task.batch,
        logging_strategy="no",
        report_to=[],
        save_strategy="no",
        use_cpu=pacer.device.type == "cpu",
        bf16=task.dtype == "bf16",
        torch_compile=task.compiled,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    arguments._n_gpu = 1  # otherwise one rank would use all GPUs of the node
    trainer = Recording(model, arguments, data_collator=collate, train_dataset=rows, callbacks=[Pause()])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()


def meshwright(task: Task, pacer: Pacer) -> None:
    """The trainer itself, with its loop, data, guard, watchdog and metrics."""
    dist.init_process_group(devices.communication_backend(pacer.device), store=dist.HashStore(), rank=0, world_size=1)
    config = load_config(task.flags())
    trainer = build_trainer(config, resolve(config, 1), pacer.device, None)
    original = trainer.engine.forward_backward.__class__.__call__
    batches = TrainingData.batches

    def paced(*args: object) -> Iterator[Batch]:
        for batch in batches(*args):
            pacer.before_step()
            yield batch

    def recorded(*args: object) -> dict[str, Tensor]:
        means = original(*args)
        pacer.losses.append(means["loss"].detach())
        return means

    step = mock.patch.object(trainer.engine.forward_backward.__class__, "__call__", recorded)
    with mock.patch.object(TrainingData, "batches", paced), step:
        trainer.train()


def kernels(task: Task, pacer: Pacer) -> None:
    """Not a training loop: the matrix products and attention kernels of the plain loop's first step."""
    model, recorder = _model(task, pacer.device), KernelRecorder()
    with recorder, _autocast(task, pacer.device):
        cross_entropy(model, next(task.rows())).backward()
    del model
    for _ in task.rows():
        pacer.before_step()
        for call in recorder.calls:
            call()


CONTENDERS: dict[str, Callable[[Task, Pacer], None]] = {
    "plain": plain,
    "meshwright": meshwright,
    "accelerate": accelerate,
    "transformers": transformers,
    "kernels": kernels,
}


def serve(name: str, task: Task, pipe: Connection, logs: Path) -> None:
    """Run a contender, in a process of its own."""
    log = os.open(logs, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["OMP_NUM_THREADS"] = str(task.threads)  # accelerate would set another number of threads
    torch.set_num_threads(task.threads)
    CONTENDERS[name](task, Pacer(pipe, devices.select_device(task.device)))
