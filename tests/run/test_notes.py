"""What a run says of itself when it starts, and a dry run too."""

import pytest
import torch

from trainer.base.config import SamplesConfig
from trainer.base.config.load import load_config
from trainer.run.notes import compiled_blocks, many_epochs, mixture_notes, model_notes, samples_text, steps_text
from trainer.run.resolve import resolve
from trainer.state import TrainState


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["--lora.rank", "8"], []),
        (
            ["--lora.rank", "200"],
            [
                "lora.rank = 200: exceeds the smaller side of 56 of 56 matrices, such as layers.0.attention.wq (128 x 128), of "
                "which rank 128 can represent every change"
            ],
        ),
        (
            ["--lora.rank", "8", "--model.name", "mixtral"],
            [
                "lora: each expert of mixtral/debug has adapters of its own, 172,032 of 206,848 values; [lora] targets can leave "
                "experts out"
            ],
        ),
        (["--lora.rank", "12", "--model.name", "olmoe", "--lora.targets", "*.attention.*"], []),
        (
            ["--lora.rank", "12", "--model.name", "mixtral", "--training.compute_dtype", "bf16"],
            [
                "lora: each expert of mixtral/debug has adapters of its own, 258,048 of 310,272 values; [lora] targets can leave "
                "experts out",
                "lora.rank = 12: is no multiple of 8, which the grouped kernel needs with [training] compute_dtype = bf16, so "
                "the adapters of each expert are multiplied one by one",
            ],
        ),
        (
            ["--lora.rank", "12", "--model.name", "mixtral", "--training.compute_dtype", "fp32"],
            [
                "lora: each expert of mixtral/debug has adapters of its own, 258,048 of 310,272 values; [lora] targets can leave "
                "experts out",
            ],
        ),
    ],
)
def test_adapters_that_do_less_than_expected_are_named(tmp_path, words, expected):
    base = ["--checkpoint.init_from", str(tmp_path)] if "--lora.rank" in words else []
    config = load_config([*words, *base])
    notes = model_notes(config, resolve(config, 1), torch.device("cpu"))
    assert [note.text for note in notes if note.name == "adapters" and note.warns] == expected


EP = ["--model.name", "deepseek-v3", "--parallel.dp_shard", "2", "--parallel.ep", "2", "--compile.enabled", "true"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compile.enabled", "false"], ""),
        (["--compile.enabled", "true"], "compiled"),
        (EP, "1 block compiled, 3 blocks compiled except around experts"),
        ([*EP, "--activation_checkpoint.mode", "selective"], "1 block compiled, 3 blocks uncompiled"),
        (
            [*EP, "--activation_checkpoint.mode", "selective", "--activation_checkpoint.every_n_blocks", "2"],
            "1 block compiled, 2 blocks compiled except around experts, 1 block uncompiled",
        ),
    ],
)
def test_the_summary_counts_the_compiled_blocks(words, expected):
    config = load_config(words)
    assert compiled_blocks(config, resolve(config, 2 if "--parallel.ep" in words else 1)) == expected


def test_steps_that_repeat_few_samples_many_times_are_named(tmp_path):
    config = load_config(["--training.steps", "1000"])
    assert many_epochs(config, 40, 200.4) == (
        "training.steps = 1000: passes over the 40 samples of the data 200 times, so the model may memorize them; "
        "training.epochs chooses the number of passes"
    )
    assert many_epochs(config, 40, 10.0) == ""
    assert many_epochs(load_config(["--training.epochs", "50"]), 40, 50.0) == ""


def test_the_steps_of_a_batch_schedule_are_listed():
    config = load_config(["--training.batch_schedule.100", "64", "--training.batch_schedule.200", "16"])
    assert steps_text(config.training, resolve(config, 2).grad_accum, 50, 300) == (
        "51 to 300, each of 32 samples (64 after step 100, 16 after step 200) of 128 tokens, in up to 8 microbatches on each rank"
    )


def test_the_samples_are_one_line():
    config = SamplesConfig(prompts=("a", "b"), interval_steps=5)
    assert samples_text(config) == "of 2 prompts, up to 64 tokens each, after every 5 steps and the last step"


MIXED = ["--data.datasets.web", "text:web", "--data.datasets.code", "text:code", "--training.batch_schedule.100", "64"]
MIXED += ["--data.mixture", "0: web=7 code=3, 3200: code=1, 3240: web=1"]
LATER = [
    ("code=1 from sample 3200 on, in step 101", False),
    ("web=1 from sample 3240 on, in step 101", False),
]


@pytest.mark.parametrize(
    ("state", "steps", "expected"),
    [
        (TrainState(), 300, [("web=0.7 code=0.3 from the first step on", False), *LATER]),
        (TrainState(), None, [("web=0.7 code=0.3 from the first step on", False), *LATER]),
        (TrainState(step=50, cursor=1600), 300, [("web=0.7 code=0.3 now", False), *LATER]),
        (TrainState(step=101, cursor=3264), 300, [("web=1 now", False)]),
        (
            TrainState(step=99, cursor=3168),
            100,
            [
                ("web=0.7 code=0.3 now", False),
                *(
                    (f"{text}; the run ends after step 100, so it has no sample with these weights", True)
                    for text, _ in LATER
                ),
            ],
        ),
        # 40 samples were skipped, so the phases start 40 samples earlier.
        (
            TrainState(step=50, cursor=1600, skipped_samples=[(100, 140)]),
            300,
            [
                ("web=0.7 code=0.3 now", False),
                ("code=1 from sample 3200 on, in step 99", False),
                ("web=1 from sample 3240 on, in step 101", False),
            ],
        ),
        # All samples of the second phase were skipped.
        (
            TrainState(step=99, cursor=3168, skipped_samples=[(3190, 3300)]),
            300,
            [("web=0.7 code=0.3 now", False), ("web=1 from sample 3240 on, in step 100", False)],
        ),
    ],
)
def test_the_phases_of_a_mixture_are_listed_with_their_steps(state, steps, expected):
    config = load_config([*MIXED, "--training.steps", "300"], check_files=())
    found = mixture_notes(config, None, state, steps)
    assert {note.name for note in found} == {"mixture"}
    assert [(note.text, note.warns) for note in found] == expected


def test_one_dataset_is_no_mixture():
    assert mixture_notes(load_config([]), None, TrainState(), 300) == []
