"""Everything that is checked before the first step of a run, in one order. A run and its dry run differ only in their data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from trainer.base.config import Config, compatibility, errors_about
from trainer.base.config.value_rules import check_values
from trainer.base.system import console
from trainer.checkpoint.formats.gguf_writer import llama_cpp_vocabulary
from trainer.checkpoint.formats.initial_weights import open_initial_weights
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE
from trainer.checkpoint.formats.tokenizer_files import exported_tokenizer
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.data.build import Datasets
from trainer.data.datasets import check_names
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.evaluate import EvalSet, build_eval_sets
from trainer.inference.samples import encode_prompts
from trainer.run.context_window import extension_of_window
from trainer.run.resolve import ResolvedRun, require_profiled_step
from trainer.run.resources import check_disk, check_memory
from trainer.run.sinks.services import require_access
from trainer.run.text_format import TextFormat, load_text_format, require_same_tokenizer, unused_template
from trainer.run.training_data import require_unchanged_mixture, with_steps
from trainer.runtime import device as devices
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import TrainState
from trainer.tasks import Task, load_tasks


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What the checks have opened."""

    config: Config
    """The settings, with training.steps instead of training.epochs if there are datasets."""
    text: TextFormat
    prompts: list[list[int]]
    """Tokens of each prompt of [samples]."""
    tasks: list[Task]
    """Tasks that the run uses."""
    weights: Weights | None
    """Those of checkpoint.init_from. None: the run starts from random weights, or its checkpoint replaces them."""
    datasets: Datasets | None
    """None only in a dry run, if a dataset is too large to be prepared in it."""
    eval_sets: list[EvalSet]

    def identity_of(self, name: str) -> str:
        """Return what changes with the content of an evaluation dataset or of a task. It is "" for documents that are held out
        of the training data."""
        of_dataset = "" if self.datasets is None else self.datasets.evaluation_names.get(name, "")
        return next((task.identity for task in self.tasks if task.name == name), of_dataset)


def check_run(
    config: Config,
    resolved: ResolvedRun,
    point: ResumePoint | None,
    open_data: Callable[[Config, Tokenizer, TrainState | None], Datasets | None],
    model_parts: Iterable[nn.Module],
    device: torch.device,
) -> CheckedRun:
    """Check, collectively, what `resolve` could not: device, services, texts, memory, weights, data, disk. What is quick to
    check, or needs no data, comes first, because the preparation of data may take hours.

    Args:
        config: Settings of the run.
        resolved: Result of `resolve` for these settings.
        point: Checkpoint to resume from.
        open_data: Prepares and opens the datasets: `prepare_and_open`, or the trial stores of a dry run.
        model_parts: This rank's stages on the meta device, whose memory is compared with that of the device. Empty in a dry run,
            which plans the memory.
        device: Device of this rank.

    Raises:
        ConfigError: The run would fail.
    """
    check_values(config)  # a program may have changed what load_config has checked
    compatibility.check(config, devices.float8_facts(config.run.device))
    run_on_rank_0(lambda: require_access(config.metrics))
    text = load_text_format(config, resolved)
    prompts = encode_prompts(config.samples, config.data, text.tokenizer, text.is_chat, config.training.seq_len)
    shares = not resolved.structure.is_recurrent
    tasks = load_tasks(config.evaluation, config.data, text.tokenizer, config.training.seq_len, shares)
    if point is not None:
        require_same_tokenizer(point, config.tokenizer, text.tokenizer)
    _check_gguf(config, resolved, text)
    check_memory(config, resolved, model_parts, device)
    weights = _open_weights(config, resolved, point)
    saved = None if point is None else point.state
    check_names(config.data, config.evaluation)
    datasets, state = open_data(config, text.tokenizer, saved), saved or TrainState()
    renders_chats = text.is_chat and (datasets is None or datasets.renders_chats)
    if renders_chats and (line := unused_template(config, resolved.family, text.tokenizer)):
        console.warning(line)
    known = config if datasets is None else with_steps(config, datasets, state)
    if known.training.epochs is None:
        require_profiled_step(known.profiling, known.training.steps)
        check_disk(known, resolved, state.step)
    eval_sets: list[EvalSet] = []
    if datasets is not None:
        if point is not None:
            require_unchanged_mixture(known, datasets, state)
            require_compatible(point, {"data": datasets.name})
        eval_sets = build_eval_sets(datasets.evaluation, known.evaluation, text.tokenizer.text_bytes)
    return CheckedRun(
        config=known,
        text=text,
        prompts=prompts,
        tasks=tasks,
        weights=weights,
        datasets=datasets,
        eval_sets=eval_sets,
    )


def _check_gguf(config: Config, resolved: ResolvedRun, text: TextFormat) -> None:
    """Warn about what llama.cpp will do differently. Raises ConfigError if it cannot compute the model, or encode text."""
    if config.checkpoint.export_gguf == "none":
        return

    def check() -> tuple[str, ...]:
        template = {CHAT_TEMPLATE: text.chat_template.encode()} if text.chat_template else {}
        files = exported_tokenizer(text.tokenizer.huggingface_files() | template, resolved.spec.huggingface)
        with errors_about("checkpoint.export_gguf"):
            return llama_cpp_vocabulary(resolved.spec, resolved.sizes, text.tokenizer, files, {}).remarks

    for remark in run_on_rank_0(check):
        console.warning(f"checkpoint.export_gguf: {remark}")


def _open_weights(config: Config, resolved: ResolvedRun, point: ResumePoint | None) -> Weights | None:
    """Return CheckedRun.weights. Raises ConfigError, also if they are not those of the model."""
    is_replaced = point is not None and config.lora.rank is None
    if is_replaced or not config.checkpoint.init_from:
        return None
    return open_initial_weights(config.checkpoint, resolved.spec, resolved.sizes, extension_of_window(config))
