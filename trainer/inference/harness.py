"""A model for EleutherAI's lm-evaluation-harness, with the harness's rules for requests.

The harness runs on every rank and asks every rank the same. Each data-parallel group answers its share, and all ranks get all
answers. So nothing depends on the number of ranks, and no request is repeated to fill a rank's share.
"""

import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table

from trainer.base.config import ConfigError
from trainer.base.system.spelling import did_you_mean, first_line
from trainer.data.chat.format import ChatFormat
from trainer.data.tasks.encode import NO_TOKEN, UnusableRequest, before_empty, encode, fitted
from trainer.inference.engine import Sampling, TextRequest
from trainer.inference.generate import TextGenerator
from trainer.inference.text import without_special_tokens
from trainer.runtime.distributed import all_gather_objects, run_on_rank_0

T = TypeVar("T")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]

_SETTINGS = {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p"}
"""Settings of generation that have an effect."""


class HarnessModel(TemplateLM):
    """A TextGenerator behind the harness's interface."""

    def __init__(self, generator: TextGenerator):
        super().__init__()
        self._generator = generator

    # ---------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        return self._generator.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """What precedes a text without a context: BOS, or EOS if the tokenizer has no BOS."""
        return before_empty(self._generator.tokenizer)

    @property
    def max_length(self) -> int:
        return self._generator.max_seq_len

    @property
    def max_gen_toks(self) -> int:
        """Number of new tokens, if a task names none."""
        return 256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text in which names of special tokens are these tokens, as in an export. add_special_tokens: `with_prefix` of
        trainer.data.tasks.encode.encode."""
        return encode(self._generator.tokenizer, string, add_special_tokens)

    # ---------------------------------------------------------------- chats

    @property
    def tokenizer_name(self) -> str:
        return self._generator.tokenizer.fingerprint

    @cached_property
    def _chat(self) -> ChatFormat:
        return self._generator.chat_format()

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._chat.template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._chat.text(chat_history, add_generation_prompt)

    # ---------------------------------------------------------------- requests

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        for (context, text), _, continuation in requests:
            if not continuation:
                raise ConfigError("", f"{NO_TOKEN}: {text[:40]!r} after {context[-40:]!r}")
        return self._score([(context, continuation) for _, context, continuation in requests])

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Score pairs of a context and its continuation."""
        try:
            requests = [fitted(*pair, self.max_length) for pair in pairs]
        except UnusableRequest as failure:
            raise ConfigError("", f"{failure} (--max-seq-len)") from None
        # Requests with the same context share its computation, so they go to the same group.
        questions = [list(group) for _, group in groupby(requests, key=lambda request: request.context)]
        length = lambda question: sum(map(len, chain(*question)))  # noqa: E731
        return [*chain.from_iterable(self._shared(questions, self._generator.score, length))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text. The first token follows one BOS, also if the tokenizer adds BOS itself."""
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = [*get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)]
            pairs += map(make_disjoint_window, windows)
            counts.append(len(windows))
        scores = iter(self._score(pairs))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = [self._request(*request.args, seed) for seed, request in enumerate(requests)]
        answers = self._shared(texts, self._answers, length=lambda request: len(request.prompt))
        if None in answers:
            raise ConfigError("", f"{self._generator.folder}: the model returns non-finite logits")
        return answers

    def _request(self, context: str, settings: Mapping[str, Any], seed: int) -> TextRequest:
        settings = normalize_gen_kwargs(dict(settings), self.max_gen_toks)
        if unknown := settings.keys() - _SETTINGS:
            raise ConfigError("", f"the task sets {', '.join(sorted(unknown))} for generation, which is not supported")
        new = settings["max_gen_toks"]
        for name, is_right, rule in (
            ("max_gen_toks", new >= 1, "at least 1"),
            ("temperature", (settings.get("temperature") or 0) >= 0, "at least 0"),
            ("top_k", (settings.get("top_k") or 0) >= 0, "at least 0"),
            ("top_p", 0 < (settings.get("top_p") or 1) <= 1, "above 0 and at most 1"),
        ):
            if not is_right:
                raise ConfigError("", f"the task sets {name} = {settings[name]}; expected {rule}")
        if new >= self.max_length:
            message = f"the task generates up to {new} tokens, but the context window has {self.max_length}"
            raise ConfigError("", f"{message} tokens (--max-seq-len)")
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0
        return TextRequest(
            prompt=prompt[new - self.max_length :],  # the last tokens
            sampling=Sampling(temperature, settings.get("top_k") or 0, settings.get("top_p") or 1.0),
            seed=seed,
            stop_tokens=self._generator.stop,
            stop=[text for text in settings["until"] if text],
            max_new_tokens=new,
        )

    def _answers(self, requests: Sequence[TextRequest]) -> list[str | None]:
        """Return the texts. None: the model returns non-finite logits."""
        answered, tokenizer = zip(requests, self._generator.generate(requests), strict=True), self._generator.tokenizer
        return [
            None if answer.end == "non-finite" else without_special_tokens(tokenizer, answer.tokens, request.stop)
            for request, answer in answered
        ]

    def _shared(
        self, requests: Sequence[T], answer: Callable[[Sequence[T]], list[R]], length: Callable[[T], int]
    ) -> list[R]:
        """Return the answers to requests, of which each data-parallel group answers some.

        Args:
            requests: The same on all ranks.
            answer: Returns the answers to some requests.
            length: Number of tokens of a request. Groups get requests of about the same lengths.
        """
        order = sorted(range(len(requests)), key=lambda i: length(requests[i]), reverse=True)
        tp = self._generator.mesh["tp"].size()  # of neighbouring ranks
        groups, own_group = dist.get_world_size() // tp, dist.get_rank() // tp
        own = answer([requests[i] for i in order[own_group::groups]])
        answers: list[Any] = [None] * len(requests)
        for group, of_group in enumerate(all_gather_objects(own)[::tp]):
            for i, result in zip(order[group::groups], of_group, strict=True):
                answers[i] = result
        return answers


def run_tasks(
    generator: TextGenerator, names: Sequence[str], include_path: Path | None, **settings: Any
) -> dict[str, Any]:
    """Return the harness's results, collectively: on rank 0 those of all ranks.

    Args:
        generator: The model.
        names: Of tasks, groups and tags.
        include_path: Folder with further tasks.
        settings: Further arguments of lm_eval.simple_evaluate.

    Raises:
        ConfigError: There is no such task, its data cannot be loaded, or the model cannot answer its requests.
    """
    if dist.get_rank():
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # rank 0 says the same
    tasks = _tasks(names, include_path)
    if unknown := [name for name in names if name not in tasks.all_tasks]:
        problem = _yaml_problem(unknown[0], include_path) or did_you_mean(unknown[0], tasks.all_tasks)
        raise ConfigError("", f"--tasks {unknown[0]}: no such task{problem}")
    model = HarnessModel(generator)
    try:
        run_on_rank_0(lambda: _download(tasks, names))  # the other ranks then find it
        return simple_evaluate(model, tasks=[*names], task_manager=tasks, log_samples=False, **settings) or {}
    except Exception as error:
        raise _fault_of_task(error, names) from None


def _tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return the tasks in a folder if these are all that are named, because to read the harness's own takes seconds."""
    if include_path is None:
        return TaskManager()
    own = TaskManager(include_path=str(include_path), include_defaults=False)
    return own if set(names) <= set(own.all_subtasks) else TaskManager(include_path=str(include_path))


def _download(tasks: TaskManager, names: Sequence[str]) -> None:
    """Load the data into the cache. Raises ConfigError."""
    try:
        tasks.load([*names])
    except Exception as error:
        raise _fault_of_task(error, names) from None


def _fault_of_task(error: Exception, names: Sequence[str]) -> Exception:
    """Return a ConfigError instead of an error of the harness, which is a fault of a task: a missing file, a misspelt field or
    metric. An error of this project is returned as it is."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ConfigError) or any(module.startswith(f"{_PACKAGE}.") for module in modules[1:]):
        return error
    reason = first_line(error)
    name = type(error).__name__
    return ConfigError("", f"--tasks {','.join(names)}: the harness fails with {name}{f': {reason}' if reason else ''}")


def _yaml_problem(name: str, include_path: Path | None) -> str:
    """Return which file of a task the harness has ignored, or ""."""
    path = next(iter(include_path.rglob(f"{name}.yaml")) if include_path else iter(()), None)
    return f": {path} is no valid YAML, or has another name in task" if path else ""


def table(results: Mapping[str, Any]) -> str:
    """Return the scores as a table."""
    return "\n".join(make_table(results, column) for column in ("results", "groups") if results.get(column))


def scores(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return task or group -> metric -> value, without standard errors. A filter of answers stands behind the metric."""
    found: dict[str, dict[str, float]] = {}
    for name, values in results["results"].items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                found.setdefault(name, {})[metric if chosen == "none" else f"{metric} {chosen}"] = value
    return found


def as_json(results: Mapping[str, Any]) -> str:
    """Return the results in the form that the harness writes."""
    scores = {key: value for key, value in results.items() if key != "samples"}
    return json.dumps(scores, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"
