"""lm-evaluation-harness: the answers of a checkpoint are those of the harness's own model on the export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.evaluate import record
from tests.commands import run_script
from tests.conftest import ROOT
from tests.training_runs import checkpoint_of, records, train
from trainer.base.config import ConfigError
from trainer.inference.generate import TextGenerator
from trainer.tools.report.figures import figures_of
from trainer.tools.report.run import read_run
from trainer.tools.testing.ranks import RankError

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from trainer.inference.harness import HarnessModel, _fault_of_task

TEXTS = ["", "def f(x):", " the ", "a\n\n b", "<|begin_of_text|>the", "é😀<|eot_id|> of", "\t\tof and to " * 9]
PAIRS = [(a, b) for a in TEXTS for b in ("to be", " of", "\nto") if len(a + b) < 200]
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": " Hello! "}]


@pytest.fixture(scope="module")
def run(ranks, tiny, tmp_path_factory) -> Path:
    """A run whose export has the same weights."""
    folder = tmp_path_factory.mktemp("harness")
    argv = [*tiny, "--run.output_folder", str(folder), "--run.name", "run", "--training.steps", "20"]
    ranks(1).run(train, [*argv, "--optimizer.lr", "1e-2", "--data.dataset", "chat", "--data.path", ""])
    checkpoint = checkpoint_of(folder / "run")
    done = run_script("scripts/convert_hf.py", "to-hf", checkpoint, folder / "run" / "huggingface", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def instances(kind, arguments) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def requests() -> dict[str, list[Instance]]:
    until = [{"until": ["\n", "zz"], "max_gen_toks": 7}, {"max_gen_toks": 5, "do_sample": False}]
    return {
        "loglikelihood": instances("loglikelihood", PAIRS),
        "loglikelihood_rolling": instances("loglikelihood_rolling", [(text,) for text in (*TEXTS, "the and " * 40)]),
        "generate_until": instances("generate_until", [(text, settings) for text in TEXTS[1:] for settings in until]),
    }


def answers(model) -> dict[str, list]:
    return {kind: getattr(model, kind)(of_kind) for kind, of_kind in requests().items()}


def our_answers(folder, tp):
    generator = TextGenerator.load(folder, torch.float32, torch.device("cpu"), 0, "", tp=tp, max_rows=4)
    model = HarnessModel(generator)
    tokens = [[model.tok_encode(text, add) for add in (None, True, False)] for text in TEXTS]
    prompts = [model.apply_chat_template(CHAT), model.apply_chat_template(CHAT, add_generation_prompt=False)]
    return answers(model), tokens, prompts


@pytest.fixture(scope="module")
def of_harness(run) -> tuple[HFLM, dict[str, list]]:
    """The harness's model of the export, and its answers."""
    hf = HFLM(str(run / "huggingface"), dtype="float32", device="cpu", batch_size=1)
    expected = answers(hf)
    # The harness prepends BOS to a text that the tokenizer has already prepended it to.
    hf.add_bos_token = False
    expected["loglikelihood_rolling"] = hf.loglikelihood_rolling(requests()["loglikelihood_rolling"])
    hf.add_bos_token = None
    return hf, expected


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_answers_are_those_of_the_harness_on_the_export(ranks, run, of_harness, size, tp):
    hf, expected = of_harness
    for ours, tokens, prompts in ranks(size).run(our_answers, run, tp):
        assert tokens == [[hf.tok_encode(text, add) for add in (None, True, False)] for text in TEXTS]
        assert prompts == [hf.apply_chat_template(CHAT), hf.apply_chat_template(CHAT, add_generation_prompt=False)]
        assert ours["generate_until"] == expected["generate_until"]
        assert ours["loglikelihood_rolling"] == pytest.approx(expected["loglikelihood_rolling"], rel=1e-5)
        for pair, own, theirs in zip(PAIRS, ours["loglikelihood"], expected["loglikelihood"], strict=True):
            assert own == (pytest.approx(theirs[0], rel=1e-5), theirs[1]), pair


def error_of_request(folder, kind, arguments):
    generator = TextGenerator.load(folder, torch.float32, torch.device("cpu"), 0, "", tp=1)
    getattr(HarnessModel(generator), kind)(instances(kind, [arguments]))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "loglikelihood",
            ("a", "x y z " * 20),
            r"a continuation has \d+ tokens, but a request has at most 32 \(--max-seq-len\)",
        ),
        (
            "generate_until",
            ("a", {"max_gen_toks": 32}),
            r"the task generates up to 32 tokens, but the context window has 32 tokens \(--max-seq-len\)",
        ),
        (
            "generate_until",
            ("a", {"max_gen_toks": 0}),
            "the task sets max_gen_toks = 0; expected at least 1",
        ),
        (
            "generate_until",
            ("a", {"max_gen_toks": 3, "num_beams": 2, "penalty": 1}),
            "the task sets num_beams, penalty for generation, which is not supported",
        ),
    ],
)
def test_a_request_that_cannot_be_answered_is_an_error(ranks, run, kind, arguments, message):
    with pytest.raises(RankError, match=message):
        ranks(1).run(error_of_request, run, kind, arguments)


def titled(figures, title):
    return next(figure for figure in figures.all() if figure.title == title)


TASK = """
dataset_path: json
test_split: test
doc_to_text: "{{context}}"
target_delimiter: ""
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    documents = [{"context": text, "choices": ["to be", " of and"], "label": i % 2} for i, text in enumerate(TEXTS)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    files = f"dataset_kwargs: {{ data_files: {{ test: {folder}/documents.jsonl }} }}\n"
    choice = "task: own_choice\noutput_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: label\n"
    exact = "task: own_exact\noutput_type: generate_until\ndoc_to_target: '{{choices[label]}}'\n"
    exact += "generation_kwargs: { until: ['\\n'], max_gen_toks: 4 }\nmetric_list: [{ metric: exact_match }]\n"
    for name, text in (("choice", choice), ("exact", exact)):
        (folder / f"{name}.yaml").write_text(text + files + TASK)
    misspelt = (choice + files + TASK).replace("own_choice", "misspelt").replace("{{context}}", "{{contxt}}")
    (folder / "misspelt.yaml").write_text(misspelt)
    return folder


def evaluate(tmp_path, *words):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **offline}
    )


def test_the_command_prints_a_table_and_writes_the_results(run, tasks, tmp_path):
    words = ["--include-path", tasks, "--tasks", "own_choice,own_exact", "--limit", "5", "--batch-size", "3"]
    done = evaluate(tmp_path, run, *words, "--output", tmp_path / "results.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["own_choice"]["sample_len"] == 5 and 0 <= results["own_choice"]["acc,none"] <= 1
    assert results["own_exact"]["exact_match,none"] <= 1
    assert "|own_choice|" in done.stdout and "exact_match" in done.stdout
    assert not records(run, "task"), "the score of some documents does not stand for the task"


def record_scores(folder):
    record(checkpoint_of(folder), {} if dist.get_rank() else {"arc": {"acc": 0.5}, "piqa": {"acc_norm": 0.25}})


def test_scores_are_among_the_records_of_the_run(ranks, run):
    ranks(2).run(record_scores, run)
    recorded = [{k: v for k, v in row.items() if k != "timestamp_s"} for row in records(run, "task")]
    expected = {"lm_eval arc": {"acc": 0.5}, "lm_eval piqa": {"acc_norm": 0.25}}
    assert recorded == [{"kind": "task", "step": 20, "task": name} | own for name, own in expected.items()]
    assert titled(figures_of([read_run(run, "run")], [None]), "Accuracy on lm_eval arc").group == "Tasks"


def test_errors_of_the_command_are_one_line(run, tasks, tmp_path):
    for words, line in (
        (["own_choices"], "--tasks own_choices: no such task; did you mean 'own_choice'?"),
        (["own_choice", "--tp", "3"], "--tp 3: must divide the number of ranks, 1"),
        (["misspelt"], "--tasks misspelt: the harness fails with UndefinedError: 'contxt' is undefined"),
        (["own_choice,"], "--tasks own_choice,: a name is empty, or stands twice"),
    ):
        done = evaluate(tmp_path, run, "--include-path", tasks, "--tasks", *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.splitlines()[-1] == line


@pytest.mark.parametrize(("module", "kind"), [("lm_eval.tasks", ConfigError), ("trainer.data.mix", KeyError)])
def test_an_environment_in_the_folder_of_the_project_is_not_the_project(module, kind):
    path = ROOT / ".venv" / "lib" / "harness.py"
    with pytest.raises(KeyError) as caught:
        exec(compile("{}['contxt']", str(path), "exec"), {"__name__": module})
    assert isinstance(_fault_of_task(caught.value, ["own_choice"]), kind)
