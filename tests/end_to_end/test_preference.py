"""Runs of preference optimization: equal to TRL, independent of the layout, and with stored reference log-probabilities."""

import itertools
import json
import math
import random
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from models.huggingface_tensors import join_tensors, split_tensors
from tests import training_runs
from tests.training_runs import (
    checkpoint_of,
    combine,
    error_line,
    full,
    in_folder,
    measured,
    recorded_batches,
    records,
    trainer_from,
)
from trainer.base.config import CheckpointConfig, PreferenceConfig
from trainer.base.config.load import load_config
from trainer.batch import IGNORE_INDEX
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.data.store.store import read_description
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.objective import reference
from trainer.objective.preference import Preference
from trainer.parallel.step import Step
from trainer.run.resolve import resolve
from trainer.tools.testing.layouts import Layout, flags, num_ranks
from trainer.tools.testing.parity import LIMITS, deviations, within

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LOSSES = ["dpo", "ipo", "simpo", "orpo"]
SINGLE_DATASET = ("dataset", "path")


def train(argv):
    return training_runs.train(combine(argv))


def write_pairs(path, count):
    """Write pairs of short texts, of which none has the length of another."""
    draw = random.Random(0)
    with path.open("w") as out:
        for i in range(count):
            texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(3)]
            out.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True), id=i)) + "\n")


@pytest.fixture(scope="module")
def base(ranks, tiny, tmp_path_factory):
    """Command line of a preference run that starts from a trained model."""
    folder = tmp_path_factory.mktemp("base")
    argv = [*tiny, "--model.overrides.n_layers", "4"]
    ranks(1).run(train, [*argv, *in_folder(folder / "run"), "--training.steps", "4", "--optimizer.lr", "1e-2"])
    ranks(1).run(export_run, folder / "run", CheckpointConfig(export_huggingface=True))
    write_pairs(folder / "pairs.jsonl", 80)
    argv += ["--checkpoint.init_from", str(folder / "run"), "--training.seq_len", "64", "--training.steps", "3"]
    argv += ["--data.dataset", "preference", "--data.path", str(folder / "pairs.jsonl"), "--data.packing", "best-fit"]
    argv += ["--data.long_documents", "drop", "--data.document_mask", "true", "--data.held_out_fraction", "0.1"]
    argv += ["--data.store_folder", str(folder / "stores"), "--optimizer.lr", "1e-3", "--optimizer.eps", "1e-4"]
    return [*argv, "--lr_schedule.warmup_steps", "0", "--lr_schedule.min_lr_ratio", "1", "--training.max_norm", "none"]


# ---------------------------------------------------------------- equality with TRL


def last_step(argv):
    """Train on this rank. Return, for the last step, the parameters before it, the gradients and the microbatches."""
    trainer = trainer_from(combine(argv))
    engine, before = trainer.engine, {}
    clip = engine.optimizer.clip

    def record_and_clip(*args, **kwargs):
        before["parameters"] = {name: full(p).clone() for name, p in engine.parameters.items()}
        before["gradients"] = {name: p.grad.clone() for name, p in engine.parameters.items()}
        return clip(*args, **kwargs)

    engine.optimizer.clip = record_and_clip
    with recorded_batches() as batches:
        trainer.train()
    return (
        before["parameters"],
        before["gradients"],
        batches[-trainer.data.partition.num_microbatches(trainer.config.training.global_batch_size) :],
    )


def answers_of(batches):
    """Return (ids, whether each id is a target) of all chosen answers with their prompts, and of all rejected ones."""
    answers = [], []
    for batch in batches:
        for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
            for document in range(documents.max() + 1):
                own = documents == document
                ids, targets = tokens[own].tolist(), (labels[own] != IGNORE_INDEX).tolist()
                answers[document % 2].append(([*ids, labels[own][-1].item()], [False, *targets]))
    return answers


def padded(rows, value=0):
    length = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def trl_loss(loss, config, model, initial, folder, chosen, rejected):
    """Return TRL's loss of some pairs, and its metrics."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    cpo, orpo = (pytest.importorskip(f"trl.experimental.{name}") for name in ("cpo", "orpo"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    rows = datasets.Dataset.from_list([{"prompt": "one", "chosen": "two", "rejected": "three"}])
    common = {"output_dir": str(folder / "trl"), "beta": config.beta, "report_to": [], "use_cpu": True, "bf16": False}
    common |= {"max_length": None, "gradient_checkpointing": False}
    ids, targets = ([row[i] for row in chosen + rejected] for i in (0, 1))
    inputs = {"input_ids": padded(ids), "attention_mask": padded([[1] * len(row) for row in ids])}
    if loss in ("dpo", "ipo"):
        args = trl.DPOConfig(loss_type=["sigmoid" if loss == "dpo" else loss], **common)
        trainer = trl.DPOTrainer(model, initial, args=args, train_dataset=rows, processing_class=tokenizer)
        result = trainer.compute_loss(trainer.model.train(), inputs | {"completion_mask": padded(targets)})
        return result, {name: values[-1] for name, values in trainer._metrics["train"].items()}
    if loss == "simpo":
        args = cpo.CPOConfig(loss_type=loss, simpo_gamma=config.margin, cpo_alpha=0.0, **common)
        trainer = cpo.CPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    else:
        trainer = orpo.ORPOTrainer(model, orpo.ORPOConfig(**common), train_dataset=rows, processing_class=tokenizer)
    inputs["labels"] = inputs["input_ids"].where(padded(targets).bool(), IGNORE_INDEX)
    batch = {f"chosen_{name}": value[: len(chosen)] for name, value in inputs.items()}
    batch |= {f"rejected_{name}": value[len(chosen) :] for name, value in inputs.items()}
    return trainer.get_batch_loss_metrics(trainer.model, batch)


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_gradients_and_metrics_equal_those_of_trl(ranks, base, tmp_path, loss, packing):
    argv = [*base, *in_folder(tmp_path / "run"), "--data.packing", packing, "--preference.loss", loss]
    argv += ["--training.local_batch_size", "4", "--preference.beta", "2" if loss == "simpo" else "0.3"]
    if loss == "orpo":
        # TRL trains on the prompt's tokens, too.
        pairs = [{"prompt": "", "chosen": f"{a} {b}", "rejected": b} for a, b in itertools.permutations(WORDS, 2)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        argv += ["--data.path", str(tmp_path / "pairs.jsonl")]
    ((parameters, gradients, batches),) = ranks(1).run(last_step, argv)
    config = load_config(combine(argv))
    write_huggingface(
        open_weights(checkpoint_of(Path(config.checkpoint.init_from)), alone=True), tmp_path / "hf", torch.float32
    )
    initial, model = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
        for _ in range(2)
    )
    resolved = resolve(config, 1)
    hf, head_dim = resolved.spec.huggingface, resolved.sizes.head_dim
    model.load_state_dict(join_tensors(hf, parameters, head_dim))
    chosen, rejected = answers_of(batches)
    batches = [(chosen, rejected)]
    if loss == "orpo":  # TRL takes the mean over the tokens of all pairs
        batches = [([a], [b]) for a, b in zip(chosen, rejected, strict=True)]
    results = [trl_loss(loss, config.preference, model, initial, tmp_path, *batch) for batch in batches]
    result = torch.stack([value for value, _ in results]).mean()
    metrics = {name: np.mean([values[name] for _, values in results]) for name in results[0][1]}
    result.backward()
    record = records(tmp_path / "run")[-1]
    assert record["num_pairs"] == len(chosen) > (8 if packing == "best-fit" else 7)
    assert record["loss"] == pytest.approx(result.item(), rel=1e-5)
    for name, key in {
        "chosen": "chosen",
        "rejected": "rejected",
        "margin": "margins",
        "accuracy": "accuracies",
    }.items():
        assert record[f"reward_{name}"] == pytest.approx(metrics[f"rewards/{key}"], rel=1e-4, abs=1e-6)
    expected = split_tensors(hf, {name: p.grad for name, p in model.named_parameters()}, parameters, head_dim)
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in gradients.items():
        difference = (gradient - expected[name]).norm()
        assert difference <= 1e-5 * expected[name].norm().clamp(min=0.01 * total), name


# ---------------------------------------------------------------- layouts

ROWS = [
    "dp_shard=2",
    "dp_shard=2 reshard_after_forward=always activation_checkpoint.mode=full preference.loss=ipo",
    "dp_shard=2 cpu_offload=true preference.loss=simpo",
    "tp=2",
    "tp=2 sequence_parallel=false preference.loss=orpo",
    "cp=2",
    "cp=2 preference.loss=ipo",
    "cp=2 tp=2 preference.loss=simpo",
    "cp=2 preference.loss=orpo data.packing=none",
    "pp=2",
    "pp=2 pipeline_schedule=ZBVZeroBubble preference.loss=ipo",
    "dp_shard=2 cp=2 pp=2 preference.loss=orpo",
    "tp=2 pp=2 preference.loss=simpo",
    "dp_shard=2 compile.enabled=true",
    "dp_shard=2 tp=2 lora.rank=4 lora.dropout=0.3",
    "cp=2 training.compute_dtype=bf16",
]


@pytest.mark.parametrize("text", ROWS)
def test_preferences_have_the_losses_and_gradients_of_one_rank(ranks, base, on_one_rank, tmp_path, text):
    if torch.__version__ < (2, 13) and "ZeroBubble" in text:
        pytest.skip("needs torch 2.13")
    layout = Layout.parse(text)
    argv = [*base, "--preference.loss", "dpo"]
    size = num_ranks(load_config(combine([*argv, *flags(layout.settings)])).parallel)
    expected = on_one_rank(*argv, "--training.local_batch_size", "4", *flags(layout.single_rank_settings))
    argv += ["--training.local_batch_size", "2", *flags(layout.settings)]
    run = measured(ranks, size, argv, tmp_path / "run")
    deviation, limits = deviations(expected, run), LIMITS["bf16" if "bf16" in text else "fp32"]
    assert within(deviation, limits), deviation
    # In the first step, the margins are rounding errors, because the model is its own reference.
    for a, b in zip(expected.records[1:], run.records[1:], strict=True):
        assert a["num_pairs"] == b["num_pairs"]
        assert a["reward_accuracy"] == pytest.approx(b["reward_accuracy"], abs=0.1 if "bf16" in text else 1e-6)
        assert a["reward_margin"] == pytest.approx(b["reward_margin"], rel=limits["gradient"] * 10, abs=1e-3)


# ---------------------------------------------------------------- the reference


def store_of_texts(tiny):
    """Return the store of the tiny configuration. Other tests prepare stores with other tokenizers in the same folder."""
    config = load_config(tiny)
    tokenizer = load_tokenizer(config.tokenizer).fingerprint
    stores = (path.parent for path in Path(config.data.store_folder).glob("text-*/store.json"))
    return next(store for store in stores if read_description(store)["tokenizer"] == tokenizer)


class Stopped(Exception):
    pass


def train_counting(argv, stop_after=None):
    """Train on this rank, with stored parts of four samples. Return the number of evaluated microbatches, and the final weights.
    stop_after: number of evaluations after which the run is killed."""
    read, count = Step.read, itertools.count()

    def counted(*args):
        if next(count) == stop_after:
            raise Stopped
        return read(*args)

    with mock.patch.object(Step, "read", counted), mock.patch.object(reference, "_PART_SAMPLES", 4):
        try:
            weights = train(argv).weights
        except Stopped:
            weights = ""
    return next(count), weights


def stored_values(stores):
    parts = sorted((stores / "references").rglob("*.json"))
    return np.concatenate([json.loads(part.read_text())["values"] for part in parts])


@pytest.fixture
def dpo(base, tmp_path):
    """Command line of a run whose reference log-probabilities take 12 evaluations on one rank."""
    argv = [
        *base,
        "--preference.loss",
        "dpo",
        "--data.store_folder",
        str(tmp_path / "stores"),
        "--data.packing",
        "none",
    ]
    argv += ["--data.held_out_fraction", "0", "--training.local_batch_size", "2", "--training.steps", "2"]
    write_pairs(tmp_path / "pairs.jsonl", 24)
    return [*argv, "--data.path", str(tmp_path / "pairs.jsonl")]


def test_reference_log_probabilities_are_computed_once(ranks, dpo, tmp_path):
    complete = ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "a")])
    values = stored_values(tmp_path / "stores")
    assert complete[0][0] == 12 and len(values) == 48
    assert ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "b")]) == [(0, complete[0][1])]
    assert ranks(2).run(train_counting, [*dpo, *in_folder(tmp_path / "c"), "--optimizer.lr", "1e-2"])[0][0] == 0
    assert ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "d"), "--run.seed", "1"])[0][0] == 0
    other = ["--checkpoint.init_exclude", "output.weight"]
    assert ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "e"), *other])[0][0] == 12
    other = ["--training.float8", "rowwise"]
    assert ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "f"), *other])[0][0] == 12
    assert len(stored_values(tmp_path / "stores")) == 3 * len(values)


def test_reference_log_probabilities_depend_on_the_precision_of_fully_trained_modules(ranks, dpo, tmp_path):
    argv = [*dpo, "--training.parameter_dtype", "bf16", "--lora.rank", "4", "--lora.train_fully"]
    ranks(1).run(train_counting, [*argv, "output", *in_folder(tmp_path / "a")])
    values = stored_values(tmp_path / "stores")
    for name, modules, dtype in (("b", "output", "bf16"), ("c", "norm", "fp32")):
        own = [*argv, modules, "--lora.dtype", dtype, "--data.store_folder", str(tmp_path / name)]
        ranks(1).run(train_counting, [*own, *in_folder(tmp_path / f"run_{name}")])
        assert not np.array_equal(stored_values(tmp_path / name), values)
        shared = [*argv, modules, "--lora.dtype", dtype, *in_folder(tmp_path / f"shared_{name}")]
        assert ranks(1).run(train_counting, shared)[0][0] == 12


@pytest.mark.parametrize("settings", ["", "--parallel.tp 2", "--parallel.cp 2", "--parallel.pp 2"])
def test_a_killed_computation_continues_under_another_layout(ranks, dpo, tmp_path, settings):
    ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "a")])
    values = stored_values(tmp_path / "stores")
    shutil.rmtree(tmp_path / "stores" / "references")
    argv = [*dpo, *in_folder(tmp_path / "b")]
    assert ranks(1).run(train_counting, argv, 7) == [(8, "")]  # three of six parts are stored
    evaluations = {count for count, _ in ranks(2).run(train_counting, [*argv, *settings.split()])}
    assert evaluations == {6 if settings else 3}
    np.testing.assert_allclose(stored_values(tmp_path / "stores"), values, rtol=1e-5)


def test_a_damaged_part_is_computed_again(ranks, dpo, tmp_path):
    ((_, weights),) = ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "a")])
    part = sorted((tmp_path / "stores" / "references").rglob("*.json"))[4]
    part.write_text(part.read_text().replace("[-", "[-1", 1))
    assert ranks(1).run(train_counting, [*dpo, *in_folder(tmp_path / "b")]) == [(4, weights)]


@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_resumes_bitwise_without_its_stored_values(ranks, dpo, tmp_path, adapters):
    argv = [*dpo, *(["--lora.rank", "4"] if adapters else [])]
    ((_, weights),) = ranks(1).run(train_counting, [*argv, *in_folder(tmp_path / "a"), "--training.steps", "4"])
    ranks(1).run(train_counting, [*argv, *in_folder(tmp_path / "b")])
    shutil.rmtree(tmp_path / "stores" / "references")
    resumed = ranks(1).run(train_counting, [*argv, *in_folder(tmp_path / "b"), "--training.steps", "4"])
    assert resumed == [(12, weights)]


def test_references_belong_to_the_samples_of_mixed_and_of_prepared_datasets(ranks, base, tiny, tmp_path):
    """In the first step, the model is its own reference, so the loss of each pair is log 2."""
    argv = [*base, "--preference.loss", "dpo", "--training.steps", "1", "--training.local_batch_size", "4"]
    write_pairs(tmp_path / "few.jsonl", 30)
    data = load_config(combine(argv)).data
    toml = "".join(line for line in Path(argv[1]).read_text().splitlines(True) if not line.startswith(SINGLE_DATASET))
    (tmp_path / "mixed.toml").write_text(toml)
    mixed = [
        word for pair in zip(argv[::2], argv[1::2], strict=True) for word in pair if pair[0][7:] not in SINGLE_DATASET
    ]
    mixed += ["--config", str(tmp_path / "mixed.toml")]
    mixed += [
        "--data.datasets.a",
        f"preference:{data.path}",
        "--data.datasets.b",
        f"preference:{tmp_path / 'few.jsonl'}",
    ]
    ranks(2).run(train, [*mixed, *in_folder(tmp_path / "mixed")])
    stores = sorted(path.parent for path in Path(data.store_folder).glob("preference-*/store.json"))
    assert len(stores) > 1
    prepared = [*argv, "--data.dataset", "prepared", "--data.path", str(Path(data.store_folder) / "preference-*")]
    ranks(2).run(train, [*prepared, *in_folder(tmp_path / "prepared")])
    for name in ("mixed", "prepared"):
        (record,) = records(tmp_path / name)
        assert record["loss"] == pytest.approx(math.log(2), rel=1e-6) and record["num_pairs"] > 8
    texts = store_of_texts(tiny)
    shutil.copytree(stores[0], tmp_path / "some" / "a")
    shutil.copytree(texts, tmp_path / "some" / "b")
    (line,) = ranks(1).run(error_line, [*prepared, *in_folder(tmp_path / "x"), "--data.path", str(tmp_path / "some")])
    assert f"only some of these stores consist of preference pairs, such as {tmp_path / 'some' / 'a'}" in line


# ---------------------------------------------------------------- evaluation and errors


def test_evaluation_reports_rewards_of_held_out_pairs(ranks, base, tmp_path):
    argv = [*base, *in_folder(tmp_path / "run"), "--preference.loss", "dpo", "--evaluation.interval_steps", "3"]
    for size in (1, 2):
        batch = str(4 // size)
        ranks(size).run(train, [*argv, *in_folder(tmp_path / f"run{size}"), "--training.local_batch_size", batch])
    one, two = (records(tmp_path / f"run{size}", "eval")[-1] for size in (1, 2))
    assert one["num_pairs"] == two["num_pairs"] > 4
    for name in ("loss", "reward_chosen", "reward_rejected", "reward_margin"):
        assert one[name] == pytest.approx(two[name], rel=1e-4)
    assert one["reward_margin"] == pytest.approx(one["reward_chosen"] - one["reward_rejected"], rel=1e-4)
    assert one["reward_accuracy"] * one["num_pairs"] == pytest.approx(round(one["reward_accuracy"] * one["num_pairs"]))


MISTAKES = {
    (
        "--preference.loss",
        "dop",
    ): "--preference.loss dop: expected one of none, dpo, ipo, simpo, orpo; did you mean 'dpo'?",
    ("--preference.beta", "0"): "--preference.beta 0: must be above 0",
    ("--evaluation.datasets.x", "chat:{pairs}"): "--evaluation.datasets.x chat:{pairs}: is incompatible with",
    ("--data.path", "{one}"): (
        "--data.path {one}: this dataset contains no readable document; found {one}:1: the document has no field rejected"
    ),
    (
        "--data.path",
        "{empty}",
    ): "--data.path {empty}: this dataset contains no readable document; found {empty}:1: the document's field rejected is empty",
    ("--data.dataset", "prepared", "--data.path", "{texts}"): "does not consist of preference pairs",
    ("--training.seq_len", "4"): '"drop" removes all of the training documents, because each has more than seq_len 4',
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line(ranks, base, tiny, tmp_path, words):
    places = {name: tmp_path / name for name in ("one", "empty", "pairs")}
    places["one"].write_text(json.dumps({"prompt": "p", "chosen": "c"}))
    places["empty"].write_text(json.dumps({"prompt": "p", "chosen": "c", "rejected": ""}))
    write_pairs(places["pairs"], 8)
    places["texts"] = store_of_texts(tiny)
    argv = [*base, *in_folder(tmp_path / "run"), "--preference.loss", "dpo", "--training.steps", "1"]
    (line,) = ranks(1).run(error_line, [*argv, *(word.format(**places) for word in words)])
    assert MISTAKES[words].format(**places) in line and "\n" not in line


def test_a_reference_that_cannot_be_written_is_one_line(ranks, dpo, tmp_path):
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "references").touch()
    lines = ranks(2).run(error_line, [*dpo, *in_folder(tmp_path / "run")])
    assert len(set(lines)) == 1 and "cannot be written (" in lines[0] and lines[0].startswith("--data.store_folder")


def test_a_run_with_another_initial_model_is_refused_before_the_reference_is_computed(ranks, dpo, tmp_path):
    ranks(1).run(train, [*dpo, *in_folder(tmp_path / "run")])
    ranks(1).run(train, [*dpo, *in_folder(tmp_path / "other")])
    shutil.rmtree(tmp_path / "stores" / "references")
    argv = [
        *dpo,
        *in_folder(tmp_path / "run"),
        "--training.steps",
        "4",
        "--checkpoint.init_from",
        str(tmp_path / "other"),
    ]
    (line,) = ranks(1).run(error_line, argv)
    assert "reference model was" in line and "set another --run.name" in line
    assert not (tmp_path / "stores" / "references").exists()


def test_an_answer_of_probability_one_has_a_finite_loss_and_gradient():
    for loss in LOSSES:
        sums = torch.tensor([[0.0, -3.0], [0.0, 0.0]], requires_grad=True)
        objective = Preference(PreferenceConfig(loss=loss), 8, mock.Mock(size=lambda: 1), 8, False)
        total = objective._sums(sums, torch.tensor([[2.0, 3.0], [2.0, 2.0]]))
        total[0].backward()
        assert total.isfinite().all() and sums.grad.isfinite().all()


def test_a_run_resumes_only_with_the_same_loss(ranks, base, tmp_path):
    argv = [*base, *in_folder(tmp_path / "run"), "--preference.loss", "dpo", "--training.steps", "1"]
    ranks(1).run(train, argv)
    argv += ["--training.steps", "2"]
    (line,) = ranks(1).run(error_line, [*argv, "--preference.loss", "ipo"])
    assert 'preference.loss was "dpo", is "ipo"; set another --run.name for a new run' in line
    (line,) = ranks(1).run(error_line, [*argv, "--preference.beta", "1"])
    assert "preference.beta was 0.1, is 1.0; set another --run.name for a new run" in line
