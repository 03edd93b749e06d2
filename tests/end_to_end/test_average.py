"""The average of the weights in complete runs: in every layout, after a resume, in evaluations, in exports and in new runs."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import run_script
from tests.training_runs import (
    checkpoint_of,
    combine,
    error_line,
    full,
    in_folder,
    lines_logged_by_train,
    records,
    train,
    trainer_from,
)
from trainer.inference import load_model

AVERAGED = ["--optimizer.ema_decay", "0.9", "--optimizer.lr", "0.01", "--evaluation.averaged", "true"]
EVALUATED = ["--evaluation.interval_steps", "2", "--evaluation.max_samples", "16"]
LAYOUTS = [
    "--parallel.dp_replicate 2",
    "--parallel.tp 2",
    "--parallel.cp 2",
    "--parallel.pp 2 --training.local_batch_size 4",
    "--parallel.cpu_offload true",
    "--optimizer.offload state",
    "--parallel.reshard_after_forward never",
    "--optimizer.name muon",
]


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
    export = ["--checkpoint.export_huggingface", "true", "--checkpoint.export_averaged", "true"]
    argv = [*tiny, *AVERAGED, *EVALUATED, "--checkpoint.interval_steps", "2", *export, *in_folder(folder)]
    return folder, together(ranks(1).run(averages, argv))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_averages_and_evaluations_of_one_rank(ranks, tiny, trained, tmp_path, layout):
    folder, expected = trained
    own = [*AVERAGED, *EVALUATED, *layout.split()]
    if "muon" in layout:
        folder = tmp_path / "one"
        expected = together(ranks(1).run(averages, [*tiny, *own, *in_folder(folder)]))
    found = together(ranks(2).run(averages, [*tiny, *own, *in_folder(tmp_path / "run")]))
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
        "average of the weights ([optimizer] ema_decay) was null, is true; set another --run.name for a new run"
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


def test_a_checkpoint_without_averages_is_one_line(ranks, tiny, trained, tmp_path):
    plain = tmp_path / "plain"
    ranks(1).run(train, [*tiny, *in_folder(plain), "--training.steps", "1"])
    reason = f"{checkpoint_of(plain)} contains no averaged weights: its run had no [optimizer] ema_decay"
    ended = run_script("scripts/convert_hf.py", "to-hf", plain, tmp_path / "out", "--averaged")
    assert (ended.returncode, ended.stderr) == (2, f"{reason}\n")
    init = ["--checkpoint.init_averaged", "true", "--checkpoint.init_from"]
    (line,) = ranks(1).run(error_line, [*tiny, *init, str(plain), *in_folder(tmp_path / "run")])
    assert line.endswith(reason)
    exported = trained[0] / "huggingface"
    (line,) = ranks(1).run(error_line, [*tiny, *init, str(exported), *in_folder(tmp_path / "run")])
    assert line.endswith(f"{exported} contains no averaged weights: it is no checkpoint of a run")
    unused = "has no effect without evaluations or samples: set [evaluation] interval_steps or [samples] prompts"
    assert error_line([*tiny, *AVERAGED]) == f"--evaluation.averaged true: {unused}"
    best = ["--evaluation.keep_best_on", "held_out", "--checkpoint.export_huggingface", "true"]
    best += ["--checkpoint.export_checkpoint", "best"]
    other = "must be true with export_checkpoint = best, like [evaluation] averaged"
    assert error_line([*tiny, *AVERAGED, *EVALUATED, *best]).endswith(f"checkpoint.export_averaged: {other}")
    condition = "has an effect only with [optimizer] ema_decay"
    assert error_line([*tiny, "--evaluation.averaged", "true"]) == f"--evaluation.averaged true: {condition}"
