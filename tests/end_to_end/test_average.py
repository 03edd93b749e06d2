"""The average of the weights in complete runs: in every layout, after a resume and a rollback, in evaluations, in exports, in new
runs, and of adapters."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from models.huggingface_tensors import reorder_rows
from tests.commands import run_script
from tests.conftest import ROOT
from tests.training_runs import (
    checkpoint_of,
    combine,
    error_line,
    full,
    hash_of,
    in_folder,
    lines_logged_by_train,
    read_tensor,
    records,
    train,
    trainer_from,
)
from trainer.adapters.select import LORA_A
from trainer.checkpoint.formats.adapter import Adapter
from trainer.checkpoint.formats.export import is_export_of
from trainer.checkpoint.formats.peft import PeftNames
from trainer.checkpoint.tensor_files import read_index
from trainer.inference import load_model
from trainer.inference.engine import Sampling
from trainer.inference.generate import TextGenerator

AVERAGED = ["--optimizer.ema_decay", "0.9", "--optimizer.lr", "0.01"]
EVALUATED = ["--evaluation.averaged", "true", "--evaluation.interval_steps", "2", "--evaluation.max_samples", "16"]
EXPORT = ["--checkpoint.export_huggingface", "true", "--checkpoint.export_averaged", "true"]
LORA = [*AVERAGED, "--lora.rank", "4", "--checkpoint.init_from"]
LAYOUTS = [
    ("", "--parallel.dp_replicate 2"),
    ("", "--parallel.tp 2"),
    ("", "--parallel.cp 2"),
    ("", "--parallel.pp 2 --training.local_batch_size 4"),
    ("", "--parallel.cpu_offload true"),
    ("", "--optimizer.offload state"),
    ("", "--parallel.reshard_after_forward never"),
    ("--optimizer.name muon", ""),
    ("--training.max_norm none --resilience.max_consecutive_skips 1", "--optimizer.in_backward true"),
    ("--model.name mixtral", "--parallel.ep 2"),
]
"""Settings that change the result of training, and settings of the layout."""


def averages(argv):
    """Train, and return this rank's averages, as full tensors."""
    trainer = trainer_from(argv)
    trainer.train()
    return {name: full(tensor) for name, tensor in trainer.engine.average.state().items()}


def together(parts):
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.fixture(scope="module")
def trained(ranks, tiny, tmp_path_factory):
    """Folder and averages of a run on one rank, with an export of the averages."""
    folder = tmp_path_factory.mktemp("average") / "run"
    argv = [*tiny, *AVERAGED, *EVALUATED, "--checkpoint.interval_steps", "2", *EXPORT, *in_folder(folder)]
    return folder, together(ranks(1).run(averages, argv))


@pytest.fixture(scope="module")
def plain(ranks, tiny, tmp_path_factory):
    """Folder of the same run without averages and evaluations."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    ranks(1).run(train, [*tiny, "--optimizer.lr", "0.01", *in_folder(folder)])
    return folder


@pytest.mark.parametrize(("changed", "layout"), LAYOUTS)
def test_every_layout_has_the_averages_and_evaluations_of_one_rank(ranks, tiny, trained, tmp_path, changed, layout):
    folder, expected = trained
    own = [*tiny, *AVERAGED, *EVALUATED, *changed.split()]
    if changed:
        folder = tmp_path / "one"
        expected = together(ranks(1).run(averages, [*own, *in_folder(folder)]))
    found = together(ranks(2).run(averages, [*own, *layout.split(), *in_folder(tmp_path / "run")]))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5)
    for kind in ("train", "eval"):
        losses, of_one_rank = ([r["loss"] for r in records(f, kind)] for f in (tmp_path / "run", folder))
        assert losses == pytest.approx(of_one_rank, rel=1e-5)


def test_evaluations_use_the_averages(ranks, tiny, trained, tmp_path):
    ranks(1).run(
        train, combine([*tiny, *AVERAGED, *EVALUATED, "--evaluation.averaged", "false", *in_folder(tmp_path / "run")])
    )
    averaged, last = ([r["loss"] for r in records(f, "eval")] for f in (trained[0], tmp_path / "run"))
    assert all(abs(a - b) > 1e-3 for a, b in zip(averaged, last, strict=True))
    assert [r["loss"] for r in records(trained[0])] == [r["loss"] for r in records(tmp_path / "run")]


def test_averages_and_their_evaluations_change_no_bit_of_the_training(trained, plain):
    of_runs = []
    for checkpoint in map(checkpoint_of, (trained[0], plain)):
        index = read_index(checkpoint)
        names = [name for name in index if name.startswith(("model/", "optimizer/", "stability/"))]
        of_runs.append({name: read_tensor(checkpoint, name, index[name]) for name in names})
    assert hash_of(of_runs[0]) == hash_of(of_runs[1]) and of_runs[0].keys() == of_runs[1].keys()


def averages_at_each_step(argv, faulty):
    """Train. Return the number of each step and a hash of the averages before its update. faulty: steps whose gradients are not
    finite, until a rollback."""
    trainer = trainer_from(combine(argv))
    engine, state, clip, seen = trainer.engine, trainer.state, trainer.engine.optimizer.clip, []

    def faulty_clip(max_norm, vote):
        seen.append((state.step + 1, hash_of(engine.average.state())))
        if state.step + 1 in faulty and not state.rollbacks:
            next(iter(engine.parameters.values())).grad.mul_(float("nan"))
        return clip(max_norm, vote)

    engine.optimizer.clip = faulty_clip
    trainer.train()
    return seen


def test_a_rollback_restores_the_averages_and_a_skipped_step_changes_none(ranks, tiny, tmp_path):
    rollback = ["--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"]
    argv = [*tiny, *AVERAGED, *rollback, "--training.steps", "6", "--checkpoint.interval_steps", "3"]
    (seen,) = ranks(1).run(averages_at_each_step, [*argv, *in_folder(tmp_path / "run")], (5, 6))
    steps, hashes = zip(*seen, strict=True)
    assert steps == (1, 2, 3, 4, 5, 6, 4, 5, 6)
    assert hashes[6] == hashes[3] and hashes[7] == hashes[4] == hashes[5]
    assert len(set(hashes)) == 6


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks, tiny, trained, tmp_path):
    folder, expected = trained
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(checkpoint_of(tmp_path / "run"))
    found = together(ranks(1).run(averages, [*tiny, *AVERAGED, *EVALUATED, *in_folder(tmp_path / "run")]))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_run_without_averages_cannot_begin_them_but_one_may_end_them(ranks, tiny, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "with")
    shutil.rmtree(checkpoint_of(tmp_path / "with"))
    ((*_, line),) = [
        [line for line in lines if "ema_decay" in line]
        for lines in ranks(1).run(
            lines_logged_by_train, [*tiny, "--optimizer.lr", "0.01", *in_folder(tmp_path / "with")]
        )
    ]
    assert line == 'setting changed since the checkpoint: optimizer.ema_decay 0.9 -> "none"'
    argv = [*tiny, *AVERAGED, *EVALUATED, *in_folder(tmp_path / "with"), "--training.steps", "5"]
    (message,) = ranks(1).run(error_line, argv)
    assert message.endswith(
        "average of the weights, which a resumed run cannot begin ([optimizer] ema_decay) was null, is true; "
        "set another --run.name for a new run"
    )


def test_exports_and_loaded_models_are_averages_on_request(trained, tmp_path):
    folder, expected = trained
    exported = load_file(folder / "huggingface" / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(exported[name], expected["layers.0.feed_forward.w1.weight"].bfloat16())
    run = run_script("scripts/convert_hf.py", "to-hf", folder, tmp_path / "out", "--averaged", "--dtype", "fp32")
    assert run.returncode == 0, run.stderr
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[name], expected["layers.0.feed_forward.w1.weight"])
    model, _ = load_model(folder, averaged=True)
    last, _ = load_model(folder)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[key])
    assert not torch.equal(last.output.weight, model.output.weight)


def initial(argv):
    return {name: full(p).clone() for name, p in trainer_from(argv).engine.parameters.items()}


def test_a_new_run_starts_from_the_averages(ranks, tiny, trained, tmp_path):
    folder, expected = trained
    source = ["--checkpoint.init_from", str(folder), "--checkpoint.init_averaged", "true"]
    found = together(ranks(2).run(initial, [*tiny, *source, *in_folder(tmp_path / "run")]))
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_checkpoint_without_averages_is_one_line(ranks, tiny, trained, plain, tmp_path):
    reason = f"{checkpoint_of(plain)} contains no averaged weights: its run had no [optimizer] ema_decay"
    ended = run_script("scripts/convert_hf.py", "to-hf", plain, tmp_path / "out", "--averaged")
    assert (ended.returncode, ended.stderr) == (2, f"{reason}\n")
    init = ["--checkpoint.init_averaged", "true", "--checkpoint.init_from"]
    (line,) = ranks(1).run(error_line, [*tiny, *init, str(plain), *in_folder(tmp_path / "run")])
    assert line.endswith(reason)
    exported = trained[0] / "huggingface"
    (line,) = ranks(1).run(error_line, [*tiny, *init, str(exported), *in_folder(tmp_path / "run")])
    assert line.endswith(f"{exported} contains no averaged weights: it is no checkpoint of a run")


@pytest.fixture(scope="module")
def adapter(ranks, tiny, trained, tmp_path_factory):
    """Folder and averages of a run that trains an adapter of the trained model, with an export of the averages."""
    folder = tmp_path_factory.mktemp("adapter") / "run"
    return folder, together(ranks(1).run(averages, [*tiny, *LORA, str(trained[0]), *EXPORT, *in_folder(folder)]))


def test_an_export_of_an_adapter_has_its_averages_on_request(adapter, tmp_path):
    folder, expected = adapter
    checkpoint = checkpoint_of(folder)
    assert {name.rpartition(".")[2] for name in expected} == {"lora_a", "lora_b", "num_updates"}
    source = Adapter.open(checkpoint, alone=True)
    names = PeftNames(source.weights.spec, source.weights.sizes)
    exported = load_file(folder / "huggingface" / "adapter_model.safetensors")
    assert len(exported) == len(expected) - 1
    for name in source.trained.shapes:
        value = expected[name]
        if not name.endswith(LORA_A):
            value = reorder_rows(names.hf, names.base(name), value, names.head_dim)
        assert torch.equal(exported[names.stored(name)], value), name
        assert not torch.equal(source.read(name), expected[name])
    for averaged in (True, False):
        out = tmp_path / str(averaged)
        run = run_script("scripts/convert_hf.py", "to-hf", folder, out, *["--averaged"] * averaged)
        assert run.returncode == 0, run.stderr
        assert is_export_of(out, checkpoint, averaged) and not is_export_of(out, checkpoint, not averaged)
        assert (hash_of(load_file(out / "adapter_model.safetensors")) == hash_of(exported)) == averaged


def most_likely_answers(models):
    """Return the first tokens that each model generates. models: path, and whether to use the averages."""
    answers = []
    for path, averaged in models:
        generator = TextGenerator.load(path, torch.float32, torch.device("cpu"), 0, "", averaged=averaged)
        request = generator.text_request("the ", sampling=Sampling(temperature=0), max_new_tokens=8)
        answers.append(generator.generate([request])[0].tokens)
    return answers


def test_a_merged_adapter_has_its_averages_on_request(ranks, adapter, trained, tmp_path):
    folder, expected = adapter
    run = run_script("scripts/convert_hf.py", "merge", folder, tmp_path / "out", "--averaged", "--dtype", "fp32")
    assert run.returncode == 0, run.stderr
    base, merged, last = (
        dict(load_model(path, averaged=averaged)[0].named_parameters())
        for path, averaged in ((trained[0], False), (folder, True), (folder, False))
    )
    written = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    name = "layers.0.feed_forward.w2.weight"
    a, b = (expected[f"layers.0.feed_forward.w2.{matrix}"] for matrix in ("lora_a", "lora_b"))
    scale = Adapter.open(checkpoint_of(folder), alone=True).scale
    torch.testing.assert_close(written, base[name] + scale * b @ a, rtol=0, atol=1e-6)
    assert torch.equal(written, merged[name]) and not torch.allclose(merged[name], last[name], rtol=0, atol=1e-6)
    answers = ranks(1).run(most_likely_answers, [(folder, True), (tmp_path / "out", False)])[0]
    assert answers[0] == answers[1]
    command = [
        sys.executable,
        "scripts/generate.py",
        str(folder),
        "--averaged",
        "--prompt",
        "the ",
        "--max-new-tokens",
        "2",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    newest = f"{checkpoint_of(folder)}: the newest checkpoint\n"
    assert (ended.returncode, ended.stderr, ended.stdout[:4]) == (0, newest, "the ")
