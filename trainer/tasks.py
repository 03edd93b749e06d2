"""Tasks that judge the model while it trains, at intervals: questions whose answers are scored by the same Step that trains.

No result depends on the layout, the batch size or the order of requests, except for rounding: a request is one document of a
packed sample, whose attention ends at document boundaries, and each rank gets the scores of all samples.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.base.config import ConfigError, DataConfig, EvaluationConfig, TaskConfig
from trainer.base.config.schema.tasks import DEFAULT_STOP
from trainer.base.system import console
from trainer.base.system.files import atomic_write, digest
from trainer.base.system.run_files import TASKS
from trainer.base.system.spelling import counted
from trainer.data.chat.template import TemplateFailure
from trainer.data.prepare.encode import chat_format
from trainer.data.sampling.loader import BatchPartition
from trainer.data.tasks.encode import Request, RequestEncoder, UnusableRequest
from trainer.data.tasks.packed_requests import PackedRequests
from trainer.data.tasks.questions import Question, read_questions
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.inference.engine import Sampling, TextRequest
from trainer.inference.in_training import Loading, TrainingGenerator
from trainer.inference.text import without_special_tokens
from trainer.objective.document_scores import score_requests
from trainer.objective.task_metrics import (
    Values,
    chance_level,
    choices_values,
    continuation_values,
    empty_answer,
    exact_values,
    means,
)
from trainer.parallel.step import Step
from trainer.runtime.distributed import run_on_rank_0
from trainer.state import is_due


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task whose questions are tokens."""

    name: str
    config: TaskConfig
    questions: Sequence[Question]
    requests: Sequence[Sequence[Request]]
    """Requests of each question: its choices, then, with acc_mutual_info, the same after a context that says nothing."""
    packed: PackedRequests
    prompts: Sequence[Sequence[int]]
    """Tokens after which the model generates, of each question of an exact task. Other tasks have requests instead."""
    end_of_turn: frozenset[int]
    """Tokens that end a generated answer, beside those of the model: in a chat, those of its template."""

    @property
    def identity(self) -> str:
        """Hash of the tokens, of the answers and of the options that change a score."""
        answers = [[q.continuations, q.right, q.stop] for q in self.questions]
        options = asdict(replace(self.config, path="", interval_steps=0, metrics=(), limit=0, save_requests=False))
        return digest(json.dumps([options, self.requests, self.prompts, answers]).encode())[:16]

    @property
    def chance_level(self) -> dict[str, float]:
        """Accuracy of choices that are drawn at random, by the name "chance", or {} for other kinds."""
        return chance_level(self.config, self.questions)


def load_tasks(
    evaluation: EvaluationConfig, data: DataConfig, tokenizer: Tokenizer, seq_len: int, shares_contexts: bool = True
) -> list[Task]:
    """Read and encode the tasks that a run uses, on rank 0, so that all ranks have the same questions. Raises ConfigError if a
    task cannot be used.

    Args:
        evaluation: The tasks.
        data: Settings of the training data, which name the chat template.
        tokenizer: Tokenizer of the run.
        seq_len: Length of the sequences in training.
        shares_contexts: See PackedRequests.pack.
    """
    used = {name: config for name, config in evaluation.tasks.items() if evaluation.interval_of(name)}
    return run_on_rank_0(
        lambda: [_load_task(*task, data, tokenizer, seq_len, shares_contexts) for task in used.items()]
    )


def _load_task(
    name: str, config: TaskConfig, data: DataConfig, tokenizer: Tokenizer, seq_len: int, shares_contexts: bool
) -> Task:
    key = f"evaluation.tasks.{name}"
    questions, unused = read_questions(config, key)
    if unused:
        console.info(f"task {name}: these fields are not used: {', '.join(unused)}")
    if tokenizer.bos is None and any(not context.rstrip() for q in questions for context, _ in _pairs(config, q)):
        line = "the tokenizer has no BOS token, so EOS stands before continuations without a context"
        console.info(f"task {name}: {line}")
    chat = chat_format(data, tokenizer) if config.chat else None
    encode = RequestEncoder(
        tokenizer=tokenizer,
        max_tokens=config.max_seq_len or seq_len,
        render=None if chat is None else lambda text: chat.prompt([{"role": "user", "content": text}]),
    )
    requests: list[list[Request]] = []
    prompts: list[list[int]] = []
    room = encode.max_tokens - config.max_new_tokens
    if config.kind == "exact" and room < 1:
        message = f"leaves no room for a prompt in the {encode.max_tokens} tokens of a request"
        raise ConfigError(f"{key}.max_new_tokens", message)
    for question in questions:
        try:
            if config.kind == "exact":
                if (answer := empty_answer(config, question)) is not None:
                    raise UnusableRequest(f"nothing is left of the answer {answer[:40]!r} to compare")
                prompts.append(encode.prompt(question.requests[0][0], room))
            else:
                requests.append([encode(*pair) for pair in _pairs(config, question)])
        except (UnusableRequest, TemplateFailure) as failure:
            raise ConfigError(f"{key}.path", f"question {question.key}: {failure}") from None
    packed = PackedRequests.pack(requests, seq_len, shares_contexts)
    return Task(
        name=name,
        config=config,
        questions=questions,
        requests=requests,
        packed=packed,
        prompts=prompts,
        end_of_turn=frozenset(() if chat is None else chat.end_of_turn),
    )


def _pairs(config: TaskConfig, question: Question) -> tuple[tuple[str, str], ...]:
    second = question.unconditional if "acc_mutual_info" in config.measured else ()
    return question.requests + second


@dataclass(frozen=True, kw_only=True)
class TaskEvaluator:
    """Evaluation of the tasks, each at its interval and after the last step."""

    config: EvaluationConfig
    tasks: Sequence[Task]
    partition: BatchPartition
    device: torch.device
    steps: int
    """Total number of steps in the run."""
    chunk_tokens: int
    compiled: bool
    """See CrossEntropyHead."""
    by_document: Callable[[], AbstractContextManager[None]]
    """Context manager in which attention ends at document boundaries."""
    generator: TrainingGenerator
    folder: Path
    """Run folder."""

    def due(self, step: int) -> bool:
        return bool(self.due_tasks(step))

    def due_tasks(self, step: int, others: bool = False) -> list[Task]:
        """Return the tasks that are used after a step, or the others."""
        due = {task.name: is_due(step, self.config.interval_of(task.name), self.steps) for task in self.tasks}
        return [task for task in self.tasks if due[task.name] != others]

    def run(self, task: Task, step: Step, loading: Loading, number: int) -> dict[str, float]:
        """Return the metrics of a task, the numbers of its questions and tokens, collectively: the same on all ranks.

        Args:
            task: The task.
            step: Of the training.
            loading: See Loading.
            number: Number of completed steps, which names the file of results.
        """
        if task.config.kind == "exact":
            values, lines, num_tokens = self._generate(task, step, loading)
        else:
            values, lines = self._score(task, step, loading)
            num_tokens = task.packed.num_tokens
        if task.config.save_requests:
            run_on_rank_0(lambda: self._save(task, lines, number))
        result = means(task.config, values) if values else dict.fromkeys(task.config.measured, math.nan)
        return result | {"num_questions": len(values), "num_tokens": num_tokens}

    def _is_late(self, task: Task, start_s: float) -> bool:
        """Return whether the time of a task is over, collectively."""
        limit = task.config.time_limit_s
        is_late = bool(limit) and run_on_rank_0(lambda: time.monotonic() - start_s > limit)
        if is_late:
            console.info(f"task {task.name}: stopped after time_limit_s = {limit:g}")
        return is_late

    def _generate(self, task: Task, step: Step, loading: Loading) -> tuple[list[Values], list[dict[str, Any]], int]:
        """Return the values of the questions of an exact task, a line for the file of results for each, and the number of new
        tokens."""
        start_s, size, tokenizer = time.monotonic(), self.generator.max_rows, self.generator.tokenizer
        special, answers = set(tokenizer.special_tokens.values()), []
        requests = [
            TextRequest(
                prompt=prompt,
                sampling=Sampling(temperature=0.0),
                stop_tokens=self.generator.stop_tokens | task.end_of_turn,
                stop=task.config.stop or question.stop or DEFAULT_STOP,
                max_new_tokens=task.config.max_new_tokens,
                continues=() if task.config.chat else [token for token in prompt if token not in special],
            )
            for question, prompt in zip(task.questions, task.prompts, strict=True)
        ]
        for first in range(0, len(requests), size):
            if first and self._is_late(task, start_s):
                break
            answers += self.generator.generate(requests[first : first + size], step, loading)
        texts = [
            None if answer.end == "non-finite" else without_special_tokens(tokenizer, answer.tokens, request.stop)
            for request, answer in zip(requests, answers, strict=False)
        ]
        answered = list(zip(task.questions, texts, strict=False))
        values = [exact_values(task.config, question, text) for question, text in answered]
        lines = [{"question": question.key, "text": text} for question, text in answered]
        return values, lines, sum(len(answer.tokens) for answer in answers)

    def _score(self, task: Task, step: Step, loading: Loading) -> tuple[list[Values], list[dict[str, Any]]]:
        """Return the values of the questions whose requests are scored, and a line for the file of results for each request."""
        start_s = time.monotonic()
        with self.by_document():
            log_probs, is_greedy, is_done = score_requests(
                task.packed,
                lambda batch, readout: step.read([batch], readout),
                self.partition,
                self.chunk_tokens,
                self.compiled,
                self.device,
                loading,
                lambda: self._is_late(task, start_s),
            )
        values, lines, first = [], [], 0
        for question, requests in zip(task.questions, task.requests, strict=True):
            own = slice(first, first := first + len(requests))
            if is_done[own].all():  # otherwise the time was over before
                values.append(_values(task.config, question, log_probs[own], is_greedy[own]))
                lines += [
                    {"question": question.key, "request": i, "log_prob": log_prob, "is_greedy": greedy}
                    for i, (log_prob, greedy) in enumerate(
                        zip(log_probs[own].tolist(), is_greedy[own].tolist(), strict=True)
                    )
                ]
        return values, lines

    def _save(self, task: Task, lines: Sequence[Mapping[str, Any]], number: int) -> None:
        """Write the results as JSON lines."""
        folder = self.folder / TASKS / task.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            atomic_write(folder / f"step-{number:08}.jsonl", text)
        except OSError as error:
            console.warning(f"task {task.name}: {folder} cannot be written ({error.strerror})")


def _values(config: TaskConfig, question: Question, log_probs: np.ndarray, is_greedy: np.ndarray) -> Values:
    """Return the values of one question.

    Args:
        config: The task.
        question: The question.
        log_probs: Of its requests, (requests,).
        is_greedy: Likewise.
    """
    if config.kind == "continuation":
        return continuation_values(question, float(log_probs[0]), bool(is_greedy[0]))
    number = len(question.requests)
    return choices_values(config, question, log_probs[:number], log_probs[number:])


def task_line(name: str, task: Task, result: Mapping[str, float]) -> str:
    """Return the console's text for the result of a task."""
    shown = ", ".join(f"{metric} {result[metric]:.4f}" for metric in task.config.measured)
    chance = "".join(f" (chance {level:.3g})" for level in task.chance_level.values())
    return f"{name}: {shown}{chance}, over {counted(int(result['num_questions']), 'question')}"
