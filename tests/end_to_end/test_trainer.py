"""Complete runs: identical on any number of ranks and after any interruption."""

import base64
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from models.moe import Router
from tests.conftest import tiny_run
from tests.training_runs import (
    combine,
    hash_of,
    in_folder,
    largest_deviation,
    lines_logged_by_train,
    microbatches_of_step,
    read_tensor,
    records,
    train,
    train_without_code,
    trainer_from,
)
from trainer.base.config.load import load_config
from trainer.base.config.render import to_toml
from trainer.build import build_trainer
from trainer.checkpoint.tensor_files import read_index
from trainer.data.tokenizer.backends import DEFAULT_FILE
from trainer.run.resolve import resolve
from trainer.tools.testing import parity
from trainer.tools.testing.layouts import EXPERT_MATRIX, PARITY_MATRIX, Layout, batch_settings, flags, num_ranks
from trainer.tools.testing.parity import LIMITS, ROUTING_LIMITS, Trained, deviations, within
from trainer.tools.testing.ranks import RankError


@pytest.fixture(scope="module")
def tiny(corpus, tmp_path_factory):
    """Arguments of a tiny run whose global batch of 16 has two microbatches for each of eight ranks."""
    return tiny_run(tmp_path_factory, corpus, 16)


def run(ranks, size, argv, folder, *extra):
    return ranks(size).run(train, [*argv, *in_folder(folder), *extra])


def assert_same_run(reference, other):
    """Losses and gradient norms are equal up to rounding in fp32."""
    for key, limit in (("loss", 5e-6), ("grad_norm", 1e-4)):
        assert largest_deviation(records(reference), records(other), key) < limit


def depth(n_layers):
    return ["--model.overrides.n_layers", str(n_layers)]


def ranks_and_flags(text):
    """Return the number of ranks and the flags of a layout as scripts/parity.py writes it, with the smallest number of
    microbatches that accumulates gradients."""
    layout = Layout.parse(text)
    config = load_config([*flags(layout.settings), "--training.global_batch_size", "16"])
    batch, _ = batch_settings(config, factor=1 if config.parallel.pp > 1 else 2)
    return num_ranks(config.parallel), flags(layout.settings | batch)


def run_four_blocks(ranks, argv, folder, text, extra):
    """Run a model in a layout of at most four pipeline stages."""
    size, layout_flags = ranks_and_flags(text)
    run(ranks, size, argv, folder, *depth(4), *extra, *layout_flags)


@pytest.fixture(scope="module")
def on_one_rank(ranks, tiny, tmp_path_factory):
    """Return the folder of a run on one rank without parallelism, for settings that affect the results."""
    folder, folders = tmp_path_factory.mktemp("one"), {}

    def run_once(*extra):
        if extra not in folders:
            folders[extra] = folder / str(len(folders))
            run(ranks, 1, tiny, folders[extra], "--training.local_batch_size", "16", *extra)
        return folders[extra]

    return run_once


def layout_param(text):
    """Return the parameter of a test; schedules that split the backward pass need torch 2.13."""
    old = torch.__version__ < (2, 13) and any(name in text for name in ("ZeroBubble", "DualPipeV"))
    return pytest.param(text, marks=pytest.mark.skip("needs torch 2.13")) if old else text


def trained(ranks, size, argv, folder, decisions=None, train=parity.train):
    """Train and return losses, gradient norms and gradients. decisions: see parity.train."""
    parts = ranks(size).run(train, [*argv, *in_folder(folder)], decisions or {})
    return Trained.of_ranks(records(folder), parts)


@pytest.fixture(scope="module")
def parity_reference(ranks, tiny, tmp_path_factory):
    """Return a function (flags) -> results on one rank."""
    folder, results = tmp_path_factory.mktemp("reference"), {}

    def run_once(*extra):
        if extra not in results:
            argv = [*tiny, "--training.local_batch_size", "16", *extra]
            results[extra] = trained(ranks, 1, argv, folder / str(len(results)))
        return results[extra]

    return run_once


def is_tested_here(text):
    """Eight ranks have degrees only: other settings have smaller layouts. Compiled layouts have tests of their own."""
    has_degrees_only = all(key.startswith("parallel.") for key in Layout.parse(text).settings)
    return "compile" not in text and (ranks_and_flags(text)[0] < 8 or has_degrees_only)


@pytest.mark.parametrize("text", [layout_param(text) for text in PARITY_MATRIX if is_tested_here(text)])
def test_every_layout_has_the_losses_and_gradients_of_one_rank(ranks, tiny, tmp_path, parity_reference, text):
    assert_like_one_rank(ranks, tiny, tmp_path / "run", parity_reference, text)


def test_a_compiled_layout_has_the_losses_and_gradients_of_one_rank(ranks, tiny, tmp_path, parity_reference):
    text = "tp=2 compile.enabled=true activation_checkpoint.mode=selective"
    assert_like_one_rank(ranks, tiny, tmp_path / "run", parity_reference, text)


FAMILY_ROWS = [
    "tp=2 model.name=qwen2.5",  # biases
    "tp=2 model.name=qwen3 optimizer.cautious_decay=true",  # norms of heads
    "cp=2 data.document_mask=true model.name=mistral model.overrides.window=10",
    "cp=2 model.name=ministral3 model.overrides.rope_original_seq_len=8",  # queries depend on the position
    # two kinds of layers
    "pp=2 pipeline_schedule=ZBVZeroBubble model.name=smollm3 training.z_loss=0.01",
    "tp=2 model.name=olmo2 model.overrides.attention_bias=true",  # norms of all heads, biases of outputs
    "cp=2 model.name=olmo3 model.overrides.window=10 activation_checkpoint.mode=selective",
    "tp=2 model.name=granite3",  # multipliers
    # capped scores and logits
    "cp=2 tp=2 model.name=gemma2 model.overrides.window=10 training.z_loss=0.01",
    "pp=2 model.name=gemma3 model.overrides.tied_embeddings=false model.overrides.window=10 "
    "model.overrides.layer_types=sliding,full",
    "tp=2 model.name=phi",  # rotation of a part of each head
    "tp=2 ep=2 sequence_parallel=false model.name=olmoe model.overrides.head_dim=4 experts.balance_loss=0.1",
    "dp_shard=4 model.name=mixtral model.overrides.n_experts=2 fsdp_prefetch=1",  # more ranks than experts
    "cp=2 tp=2 ep=2 model.name=qwen3-moe experts.balance_loss=0.1 experts.z_loss=0.01",
    "dp_shard=2 ep=2 activation_checkpoint.mode=selective model.name=olmoe model.overrides.head_dim=4 experts.z_loss=0.01",
    "tp=2 activation_checkpoint.mode=full model.name=mixtral data.document_mask=true experts.balance_loss=0.1",
    # sinks, and experts with biases
    "dp_shard=2 ep=2 model.name=gpt-oss model.overrides.window=10 experts.balance_loss=0.1 experts.z_loss=0.01",
    "tp=2 ep=2 model.name=gpt-oss model.overrides.window=10 experts.balance_loss=0.1",
    "tp=2 sequence_parallel=false activation_checkpoint.mode=full model.name=gpt-oss model.overrides.window=10",
    "cp=2 model.name=gpt-oss model.overrides.window=10 data.document_mask=true activation_checkpoint.mode=selective",
    "pp=2 model.name=gpt-oss model.overrides.window=10",
    # recurrences beside attention
    "tp=2 ep=2 model.name=qwen3-next model.overrides.layer_types=linear,full experts.balance_loss=0.1",
    "cp=2 tp=2 model.name=kimi-linear model.overrides.layer_types=linear,full model.overrides.sparse_layers=false,true",
    "tp=2 sequence_parallel=false model.name=olmo-hybrid model.overrides.layer_types=linear,full",
    "pp=2 tp=2 model.name=qwen3.5 model.overrides.layer_types=linear,full model.overrides.tied_embeddings=true",
    "tp=2 model.name=gemma4 model.overrides.window=10 model.overrides.layer_types=sliding,full",  # two widths of heads
    # multi-token prediction
    "pp=2 tp=2 model.name=glm-4.5 model.overrides.prediction_layers=2 training.prediction_weight=0.3 training.z_loss=0.01",
    "cp=2 fsdp_prefetch=1 model.name=glm-4.5 model.overrides.prediction_layers=1 training.prediction_weight=0.3",
]


@pytest.mark.parametrize("text", [layout_param(text) for text in FAMILY_ROWS])
def test_every_family_has_the_losses_and_gradients_of_one_rank(ranks, tiny, tmp_path, parity_reference, text):
    n_layers = 4 if "smollm3" in text or "olmo3" in text else 0  # every fourth layer differs
    assert_like_one_rank(ranks, tiny, tmp_path / "run", parity_reference, text, n_layers)


MIXTURE = "model.name=mixtral experts.balance_loss=0.1 experts.z_loss=0.01"


@pytest.mark.parametrize("text", [layout_param(text) for text in EXPERT_MATRIX if "compile" not in text])
def test_every_layout_of_experts_has_the_losses_and_gradients_of_one_rank(
    ranks, tiny, tmp_path, parity_reference, text
):
    n_layers = 4 if "fsdp_prefetch" in text else 0
    assert_like_one_rank(ranks, tiny, tmp_path / "run", parity_reference, f"{text} {MIXTURE}", n_layers)


MUON = "optimizer.name=muon optimizer.lr=0.01"
MUON_ROWS = [
    f"cp=2 {MUON}",
    f"dp_replicate=2 dp_shard=2 {MUON}",
    f"tp=2 pp=2 {MUON}",
    f"dp_shard=4 ep=2 {MUON} {MIXTURE}",
    f"tp=2 ep=2 {MUON} {MIXTURE}",
    f"dp_shard=2 pp=2 ep=2 {MUON} {MIXTURE}",
]


@pytest.mark.parametrize("text", MUON_ROWS)
def test_every_layout_with_muon_has_the_losses_and_gradients_of_one_rank(ranks, tiny, tmp_path, parity_reference, text):
    assert_like_one_rank(ranks, tiny, tmp_path / "run", parity_reference, text)


def test_compiled_experts_have_the_losses_and_gradients_of_one_rank(ranks, tiny, tmp_path, parity_reference):
    text = f"dp_shard=2 ep=2 compile.enabled=true activation_checkpoint.mode=full {MIXTURE}"
    assert_like_one_rank(ranks, tiny, tmp_path / "run", parity_reference, text, train=train_without_code)


def one_full_expert_and_idle_ranks(scores):
    """Every token is sent to expert 0, and none to the second half of the experts."""
    scores = scores.clone()
    scores[..., 0] = torch.inf
    scores[..., scores.shape[-1] // 2 :] = -torch.inf
    return scores


def many_equal_scores(scores):
    return scores.round(decimals=1)


def train_with_scores(change, argv, decisions):
    """Train as parity does. change: function of the scores by which routers choose."""
    choose = Router.choose
    with mock.patch.object(Router, "choose", lambda router, scores: choose(router, change(scores))):
        return parity.train(argv, decisions)


@pytest.mark.parametrize("change", [one_full_expert_and_idle_ranks, many_equal_scores])
@pytest.mark.parametrize(
    "text",
    [
        "dp_shard=2 ep=2",
        "tp=2 ep=2 activation_checkpoint.mode=full",
        "dp_shard=2 pp=2 ep=2 activation_checkpoint.mode=selective",
    ],
)
def test_extreme_routing_has_the_losses_and_gradients_of_one_rank(ranks, tiny, tmp_path, text, change):
    size, layout_flags = ranks_and_flags(text)
    common = [*tiny, *depth(4), "--training.steps", "3", *flags(Layout.parse(MIXTURE).single_rank_settings)]
    one_rank = [*common, "--training.local_batch_size", "16"]
    train_extremely = partial(train_with_scores, change)
    reference = trained(ranks, 1, one_rank, tmp_path / "one", train=train_extremely)
    run = trained(ranks, size, [*common, *layout_flags], tmp_path / "run", reference.decisions, train_extremely)
    assert within(deviations(reference, run), LIMITS["fp32"]) and run.num_different == 0
    if change is one_full_expert_and_idle_ranks:
        assert [r["idle_experts"] for r in reference.records] == [0.5] * 3


def assert_like_one_rank(ranks, tiny, folder, parity_reference, text, n_layers=0, train=parity.train):
    """Train three steps. n_layers: 0: two blocks for each rank of the pipeline."""
    size, layout_flags = ranks_and_flags(text)
    layout = Layout.parse(text)
    blocks = n_layers or 2 * int(layout.settings.get("parallel.pp", 1))
    common = [*depth(blocks), "--training.steps", "3"]
    reference = parity_reference(*common, *flags(layout.single_rank_settings))
    run = trained(ranks, size, [*tiny, *common, *layout_flags], folder, reference.decisions, train)
    deviation = deviations(reference, run)
    if "bf16" in text:
        deviation["gradient"] /= 3  # of a single parameter, whose rounding errors do not cancel
    dtype = "bf16" if "bf16" in text else "fp32"
    assert within(deviation, LIMITS[dtype]), deviation
    assert run.routed_differently <= ROUTING_LIMITS[dtype]


def table_after_training(argv):
    """Train. Return a hash of this rank's embedding table, its optimizer state and its average."""
    trainer = trainer_from(argv)
    trainer.train()
    return hash_of({name: t for name, t in trainer.engine.tensors().items() if "tok_embeddings" in name})


@pytest.mark.parametrize(
    "model",
    [
        ["--model.overrides.tied_embeddings", "true"],
        ["--model.name", "glm-4.5", "--model.overrides.prediction_layers", "1", "--training.prediction_weight", "0.3"],
    ],
    ids=["tied", "prediction"],
)
def test_both_stages_of_a_shared_table_stay_equal_over_steps_evaluations_and_resumes(ranks, tiny, tmp_path, model):
    argv = [*tiny, *in_folder(tmp_path / "run"), *model, "--parallel.pp", "2", "--optimizer.ema_decay", "0.9"]
    argv += ["--evaluation.interval_steps", "1", "--evaluation.averaged", "true", "--checkpoint.interval_steps", "2"]
    for steps in (3, 5):
        first, last = ranks(2).run(table_after_training, combine([*argv, "--training.steps", str(steps)]))
        assert first == last


def test_losses_do_not_depend_on_the_microbatches(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "eight")
    run(ranks, 1, tiny, tmp_path / "one", "--training.local_batch_size", "16")
    run(ranks, 2, tiny, tmp_path / "reduced", "--training.reduce_every_microbatch", "true")
    for other in ("one", "reduced"):
        assert_same_run(tmp_path / "eight", tmp_path / other)


def test_a_different_seed_gives_different_losses(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "a")
    run(ranks, 1, tiny, tmp_path / "b", "--run.seed", "1")
    assert largest_deviation(records(tmp_path / "a"), records(tmp_path / "b"), "loss") > 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_two_runs_are_bitwise_identical(ranks, tiny, tmp_path, size):
    first = run(ranks, size, tiny, tmp_path / "a")
    second = run(ranks, size, tiny, tmp_path / "b")
    assert first[0].weights == second[0].weights
    assert largest_deviation(records(tmp_path / "a"), records(tmp_path / "b"), "loss") == 0


def test_bf16_computes_in_bf16_on_one_rank_and_stays_near_fp32(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "fp32")
    run(ranks, 1, tiny, tmp_path / "bf16", "--training.compute_dtype", "bf16")
    run(ranks, 2, tiny, tmp_path / "bf16_2", "--training.compute_dtype", "bf16")
    assert 1e-6 < largest_deviation(records(tmp_path / "fp32"), records(tmp_path / "bf16"), "loss") < 1e-2
    assert largest_deviation(records(tmp_path / "bf16"), records(tmp_path / "bf16_2"), "loss") < 1e-2


def kill_after(folder, step):
    """Delete newer checkpoints than that of a step, as if the run had been killed after it."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("mode", ["off", "thread"])
def test_a_stopped_and_resumed_run_ends_bitwise_identical(ranks, tiny, tmp_path, mode):
    """Parameters, moments, the guard's state, random states and losses are equal."""
    extra = ["--training.steps", "6", "--checkpoint.interval_steps", "3", "--checkpoint.async_mode", mode]
    uninterrupted = run(ranks, 2, tiny, tmp_path / "run", *extra)
    before = records(tmp_path / "run")
    kill_after(tmp_path / "run", 3)
    resumed = run(ranks, 2, tiny, tmp_path / "run", *extra)
    assert [len(r.microbatches) for r in resumed] == [3, 3]
    assert resumed[0].weights == uninterrupted[0].weights
    assert [r.random for r in resumed] == [r.random for r in uninterrupted]
    assert resumed[0].random != resumed[1].random
    assert [r["loss"] for r in records(tmp_path / "run")] == [r["loss"] for r in before]


@pytest.mark.parametrize("size", [1, 4])
def test_resume_on_another_world_size_sees_the_same_batches(ranks, tiny, tmp_path, size):
    extra = ["--training.steps", "6", "--checkpoint.interval_steps", "3"]
    uninterrupted = run(ranks, 2, tiny, tmp_path / "run", *extra)
    before = records(tmp_path / "run")
    kill_after(tmp_path / "run", 3)
    resumed = run(ranks, size, tiny, tmp_path / "run", *extra)
    for step in range(3):
        assert microbatches_of_step(resumed, step) == microbatches_of_step(uninterrupted, 3 + step)
    assert largest_deviation(before, records(tmp_path / "run"), "loss") < 5e-6


def in_order(results):
    """Return the microbatches of all steps in global order."""
    return [m for step in range(len(results[0].microbatches)) for m in microbatches_of_step(results, step)]


def test_a_batch_schedule_changes_no_order_and_resumes_at_any_step_on_any_world_size(ranks, tiny, tmp_path):
    """Steps of 16, 16, 32, 32, 8 and 8 samples. The run is killed at a change, and between two."""
    schedule = ["--training.batch_schedule.2", "32", "--training.batch_schedule.4", "8"]
    extra = ["--training.steps", "6", "--checkpoint.interval_steps", "1", *schedule]
    (tmp_path / "changing.toml").write_text(to_toml(load_config([*tiny, *extra])))
    argv, folder = ["--config", str(tmp_path / "changing.toml")], tmp_path / "run"
    uninterrupted, before = run(ranks, 2, argv, folder), records(folder)
    assert [len(step) for step in uninterrupted[0].microbatches] == [4, 4, 8, 8, 2, 2]
    assert in_order(uninterrupted) == in_order(run(ranks, 2, tiny, tmp_path / "same", "--training.steps", "7"))
    assert [(r["global_batch_size"], r["cursor"], r["tokens_seen"]) for r in before] == [
        (size, cursor, 32 * cursor) for size, cursor in ((16, 16), (16, 32), (32, 64), (32, 96), (8, 104), (8, 112))
    ]
    for size, step in ((2, 4), (4, 3)):
        kill_after(folder, step)
        resumed = run(ranks, size, argv, folder)
        assert in_order(resumed) == [m for s in range(step, 6) for m in microbatches_of_step(uninterrupted, s)]
        if size == 2:
            assert [r.weights for r in resumed] == [r.weights for r in uninterrupted]
            assert [r["loss"] for r in records(folder)] == [r["loss"] for r in before]
    assert largest_deviation(before, records(folder), "loss") < 5e-6


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ("tp=2 pp=2", "dp_shard=2"),
        ("dp_shard=2", "tp=2 pp=2 pipeline_schedule=Interleaved1F1B"),
        ("cp=2 tp=2", "dp_replicate=2 dp_shard=2"),
    ],
)
def test_resume_on_another_layout_continues_the_loss_curve(ranks, tiny, tmp_path, saved_by, loaded_by):
    extra = ["--training.steps", "6", "--checkpoint.interval_steps", "3"]
    run_four_blocks(ranks, tiny, tmp_path / "run", saved_by, extra)
    before = records(tmp_path / "run")
    kill_after(tmp_path / "run", 3)
    run_four_blocks(ranks, tiny, tmp_path / "run", loaded_by, extra)
    assert largest_deviation(before, records(tmp_path / "run"), "loss") < 5e-6


@pytest.mark.parametrize(
    "text", ["tp=2", "cp=2", "pp=2", layout_param("pp=2 pipeline_schedule=ZBVZeroBubble"), "tp=2 pp=2"]
)
def test_evaluation_does_not_depend_on_the_layout(ranks, tiny, tmp_path, on_one_rank, text):
    extra = ["--evaluation.interval_steps", "2", "--evaluation.max_samples", "11"]
    run_four_blocks(ranks, tiny, tmp_path / "run", text, extra)
    one, other = records(on_one_rank(*depth(4), *extra), "eval"), records(tmp_path / "run", "eval")
    assert [(r["step"], r["num_targets"]) for r in other] == [(2, 11 * 32), (4, 11 * 32)]
    assert largest_deviation(one, other, "loss") < 5e-6


LAYOUTS = ["dp_shard=1", "dp_shard=2 tp=2", "dp_shard=2 pp=2", "dp_replicate=2 dp_shard=2", "cp=2"]


def hashes_of_resumed_runs(argv, folder):
    """Return a hash of each full tensor of this rank, by name, after resuming each run of a folder."""
    runs = ([*argv, "--run.output_folder", str(folder), "--run.name", str(i)] for i in range(len(LAYOUTS)))
    tensors = (trainer_from(run).engine.tensors() for run in runs)
    return [{name: hash_of({name: tensor}) for name, tensor in of_run.items()} for of_run in tensors]


@pytest.fixture(scope="module")
def saved_in_every_layout(ranks, tiny, tmp_path_factory):
    """A folder with one run per layout, saved after two steps, and the hashes of the tensors of each checkpoint, by name."""
    folder, hashes = tmp_path_factory.mktemp("layouts"), []
    for i, text in enumerate(LAYOUTS):
        run_four_blocks(ranks, tiny, folder / str(i), text, ["--training.steps", "2"])
        path = folder / str(i) / "checkpoints" / "step-00000002"
        index = read_index(path)
        tensors = {name: read_tensor(path, name, index[name]) for name in index if not name.startswith("rng/")}
        hashes.append({name: hash_of({name: tensor}) for name, tensor in tensors.items()})
    return folder, hashes


@pytest.mark.parametrize("loaded_by", LAYOUTS)
def test_any_layout_loads_exactly_what_any_other_saved(ranks, tiny, saved_in_every_layout, loaded_by):
    folder, expected = saved_in_every_layout
    size, layout_flags = ranks_and_flags(loaded_by)
    of_ranks = ranks(size).run(
        hashes_of_resumed_runs, [*tiny, *depth(4), *layout_flags, "--training.steps", "4"], folder
    )
    for saved_by, hashes, stored in zip(LAYOUTS, zip(*of_ranks, strict=True), expected, strict=True):
        assert len(stored) > 100
        assert {name: value for of_rank in hashes for name, value in of_rank.items()} == stored, saved_by


def test_a_run_can_be_extended(ranks, tiny, tmp_path):
    extra = ["--lr_schedule.name", "warmup_stable_decay", "--lr_schedule.decay_steps", "1"]
    run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "3", *extra)
    run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "5", *extra)
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5]


def build_anew(argv):
    config = load_config(argv)
    build_trainer(config, resolve(config, 1), torch.device("cpu"), None)


def test_a_program_that_forgets_the_checkpoint_to_resume_from_changes_nothing(ranks, tiny, tmp_path):
    argv = [*tiny, *in_folder(tmp_path / "run")]
    ranks(1).run(train, argv)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RankError, match=r"run\.name.* has checkpoints of an earlier run; resume_point returns"):
        ranks(1).run(build_anew, combine(argv))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_without_checkpoints_saves_nothing(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run", "--checkpoint.enabled", "false", "--checkpoint.interval_steps", "1")
    assert records(tmp_path / "run")[-1]["step"] == 4
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_settings_changed_since_the_checkpoint_are_logged(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run")
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run"]
    argv += ["--training.steps", "6", "--optimizer.lr", "2e-3"]
    (lines,) = ranks(1).run(lines_logged_by_train, argv)
    assert [line for line in lines if line.startswith("setting changed since the checkpoint: ")] == [
        "setting changed since the checkpoint: training.steps 4 -> 6",
        "setting changed since the checkpoint: optimizer.lr 0.0003 -> 0.002",
    ]


def test_resume_with_settings_that_are_fixed_is_refused_with_every_difference(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    with pytest.raises(RankError) as error:
        run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "8", "--run.seed", "3", "--data.shuffle", "false")
    assert (
        f"cannot resume from {checkpoint}: data.shuffle was true, is false; run.seed was 0, is 3; "
        "set another --run.name for a new run" in str(error.value)
    )


def test_resume_with_another_tokenizer_or_other_data_is_refused(ranks, tiny, corpus, tmp_path):
    copy, ranks_file = tmp_path / "corpus", tmp_path / "copy.tiktoken"
    shutil.copytree(corpus, copy)
    ranks_file.write_bytes(DEFAULT_FILE.read_bytes())
    (tmp_path / "copy.toml").write_text(Path(tiny[1]).read_text().replace(str(corpus), str(copy)))
    extra = ["--tokenizer.backend", "tiktoken", "--tokenizer.path", str(ranks_file), "--training.steps"]
    argv = ["--config", str(tmp_path / "copy.toml")]
    run(ranks, 1, argv, tmp_path / "run", *extra, "2")
    (copy / "new.txt").write_text("one extra document\n")
    with pytest.raises(RankError, match=r"cannot resume from .*: data was \S+, is \S+; set another --run\.name"):
        run(ranks, 1, argv, tmp_path / "run", *extra, "4")
    (copy / "new.txt").unlink()
    *lines, last = ranks_file.read_bytes().splitlines()
    changed = base64.b64encode(b"@@@@@") + b" " + last.split()[1]
    ranks_file.write_bytes(b"\n".join([*lines, changed]) + b"\n")
    with pytest.raises(RankError, match=r"cannot resume from .*: tokenizer was \S+, is \S+; set another --run\.name"):
        run(ranks, 1, argv, tmp_path / "run", *extra, "4")


def test_a_refused_resume_does_not_change_the_files_of_the_run(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run")
    files = [p for p in (tmp_path / "run").iterdir() if p.is_file() and p.name not in (".lock", "log.txt")]
    before = {p: p.read_bytes() for p in files}
    with pytest.raises(RankError, match="data was"):
        run(ranks, 1, tiny, tmp_path / "run", "--training.steps", "8", "--data.held_out_fraction", "0.3")
    assert len(files) == 3 and {p: p.read_bytes() for p in files} == before


def test_evaluation_is_equal_on_any_number_of_ranks_and_does_not_affect_training(ranks, tiny, tmp_path):
    # 11 held-out samples are not a multiple of four ranks with microbatches of two.
    extra = ["--evaluation.interval_steps", "2", "--evaluation.max_samples", "11"]
    run(ranks, 1, tiny, tmp_path / "without")
    for size in (1, 4):
        run(ranks, size, tiny, tmp_path / str(size), *extra)
    one, four = records(tmp_path / "1", "eval"), records(tmp_path / "4", "eval")
    assert [(r["step"], r["num_targets"]) for r in one] == [(2, 11 * 32), (4, 11 * 32)]
    assert [r["num_targets"] for r in four] == [11 * 32, 11 * 32]
    assert largest_deviation(one, four, "loss") < 5e-6
    assert largest_deviation(records(tmp_path / "without"), records(tmp_path / "1"), "loss") == 0


def test_the_first_recorded_lr_is_not_zero_and_the_last_is_the_minimum(ranks, tiny, tmp_path):
    run(ranks, 1, tiny, tmp_path / "run", "--optimizer.lr", "1e-3")
    lrs = [r["learning_rate"] for r in records(tmp_path / "run")]
    assert lrs == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])
