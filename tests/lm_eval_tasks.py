"""lm-evaluation-harness on the same questions, as local tasks."""

import json
import math
from pathlib import Path

import numpy as np

from trainer.data.tasks.questions import Question

MAX_NEW_TOKENS = 6


def write_task(folder: Path, name: str, kind: str, questions: list[Question]) -> None:
    """Write a local task of lm-evaluation-harness, whose target delimiter is empty."""
    rows = []
    for question in questions:
        contexts = {context for context, _ in question.requests}
        assert len(contexts) == 1
        row = {"context": contexts.pop(), "choices": [text for _, text in question.requests], "gold": question.right}
        rows.append(row | {"continuation": (row["choices"] if kind != "exact" else question.continuations)[0]})
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choices = {"doc_to_choice": "choices", "doc_to_target": "gold", "output_type": "multiple_choice"}
    continuation = {"doc_to_target": "continuation", "output_type": "loglikelihood"}
    metrics = {"choices": ["acc", "acc_norm", "acc_bytes", "acc_mutual_info"], "exact": ["exact_match"]}.get(
        kind, ["acc"]
    )
    generated = {"doc_to_target": "continuation", "output_type": "generate_until"}
    generated["generation_kwargs"] = {"until": ["\n\n"], "max_gen_toks": MAX_NEW_TOKENS, "do_sample": False}
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "context",
        "target_delimiter": "",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics],
        **{"choices": choices, "continuation": continuation, "exact": generated}[kind],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def evaluate(model, folder: Path, names: list[str]) -> dict:
    """Return what lm_eval.simple_evaluate returns. model: an lm_eval.api.model.LM."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, random_seed=None
    )


def of_transformers(folder: Path, max_length: int, batch_size: int = 1):
    """Return lm-evaluation-harness's model of a folder in Hugging Face's format, in fp32 on the CPU."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", max_length=max_length, batch_size=batch_size)


def scores(results: dict, name: str) -> list[list[tuple[float, bool]]]:
    """Return (log-probability, whether it is greedy) of each request of each question, in the order of the questions."""
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [[_pair(answer) for answer in sample["resps"]] for sample in samples]


def _pair(answer) -> tuple[float, bool]:
    ((log_prob, is_greedy),) = answer
    is_true = is_greedy in (True, "True")
    return float(log_prob), is_true


def texts(results: dict, name: str) -> list[str]:
    """Return the generated text of each question, in the order of the questions."""
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


def own_scores(path: Path) -> list[list[tuple[float, bool]]]:
    """Return the same of a file that the trainer has written (save_requests)."""
    questions: dict[str, list[tuple[float, bool]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        questions.setdefault(row["question"], []).append((row["log_prob"], row["is_greedy"]))
    return list(questions.values())


def largest_difference(ours: list, theirs: list) -> float:
    """Return the largest relative difference of two log-probabilities, or infinity if a greedy one differs, or a number."""
    if [len(q) for q in ours] != [len(q) for q in theirs]:
        return math.inf
    flat = [np.array([pair for question in side for pair in question], float) for side in (ours, theirs)]
    if (flat[0][:, 1] != flat[1][:, 1]).any():
        return math.inf
    a, b = flat[0][:, 0], flat[1][:, 0]
    return float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max())
