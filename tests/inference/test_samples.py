"""Samples during training: the texts of generation, in any layout, without an effect on training."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.training_runs import (
    checkpoint_of,
    combine,
    error_line,
    in_folder,
    lines_logged_by_train,
    records,
    train,
    trainer_from,
)
from trainer.base.system.files import read_json_lines
from trainer.inference.engine import NON_FINITE, Sampling, TextRequest
from trainer.inference.generate import TextGenerator

SAMPLES = ["--samples.prompts", '["the ", "of and ", "to be"]', "--samples.interval_steps", "1"]
SAMPLES += ["--samples.max_new_tokens", "4"]


@pytest.mark.parametrize("layout", ["", "dp_shard", "tp", "pp"])
def test_samples_do_not_change_training_by_a_bit(ranks, tiny, tmp_path, layout):
    size, flags = (2, [f"--parallel.{layout}", "2"]) if layout else (1, [])
    argv = [*tiny, *flags, "--training.steps", "3"]
    results = []
    for name, more in (("with", SAMPLES), ("without", [])):
        results.append(ranks(size).run(train, combine([*argv, *in_folder(tmp_path / name), *more])))
    with_samples, without = results
    assert [(r.weights, r.random, r.microbatches) for r in with_samples] == [
        (r.weights, r.random, r.microbatches) for r in without
    ]
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in records(tmp_path / "with")] == [r[key] for r in records(tmp_path / "without")]
    assert [r["step"] for r in records(tmp_path / "with", "samples")] == [1, 2, 3]


def texts_of_generation(checkpoint, prompts, sampling, max_new_tokens, chat):
    """Return what scripts/generate.py prints after each prompt."""
    generator = TextGenerator.load(checkpoint, torch.float32, torch.device("cpu"), 0, "")
    requests = []
    for text in prompts:
        request = generator.text_request(text, sampling=sampling, seed=5, max_new_tokens=max_new_tokens)
        if chat:
            chat_format = generator.chat_format()
            prompt, stop = chat_format.prompt([{"role": "user", "content": text}]), {*chat_format.end_of_turn}
            request = replace(request, prompt=prompt, continues=[], stop_tokens=stop | generator.stop)
        requests.append(request)
    return [answer.text for answer in generator.generate(requests)]


@pytest.mark.parametrize("chat", [False, True])
def test_a_sample_is_the_text_that_generation_gives(ranks, tiny, tmp_path, chat):
    argv = [*tiny, *in_folder(tmp_path / "run"), *SAMPLES, "--samples.max_new_tokens", "50", "--samples.seed", "5"]
    argv += ["--training.steps", "1", "--training.seq_len", "64"]
    if chat:
        argv += ["--data.dataset", "chat", "--data.path", "", "--data.packing", "none"]
    ranks(1).run(train, combine(argv))
    (record,) = records(tmp_path / "run", "samples")
    prompts = [sample["prompt"] for sample in record["samples"]]
    assert prompts == ["the ", "of and ", "to be"]
    generated = (checkpoint_of(tmp_path / "run"), prompts, Sampling(), 50, chat)
    assert [sample["text"] for sample in record["samples"]] == ranks(1).run(texts_of_generation, *generated)[0]


def test_samples_are_printed_and_follow_the_last_step_only_by_default(ranks, tiny, tmp_path):
    argv = [*tiny, *in_folder(tmp_path / "run"), "--training.steps", "2", "--samples.prompts", "the"]
    lines, _ = ranks(2).run(lines_logged_by_train, combine([*argv, "--samples.max_new_tokens", "3"]))
    (record,) = records(tmp_path / "run", "samples")
    (sample,) = record["samples"]
    assert record["step"] == 2 and record["samples_time_s"] > 0
    text = sample["text"].replace("\n", "\n    ")
    assert f"step 2 | sample after 'the':\n    {text}" in lines
    assert all(math.isfinite(r["step_time_s"]) for r in records(tmp_path / "run"))


def break_and_sample(argv, ends):
    """Return the samples of a model whose output is not finite, or that generates only a token that ends a text."""
    trainer = trainer_from(combine(argv))
    engine = trainer.engine
    with torch.no_grad():
        output = engine.parameters["output.weight"]
        if ends:
            read = engine.forward_backward.read

            def only_end(microbatches, readout):
                logits = read(microbatches, readout).reshape(readout.shape)
                logits[:, trainer.samples.generator.tokenizer.eos] = 1e4
                return logits

            engine.forward_backward.read = only_end
        else:
            output.fill_(math.nan)
    trainer.metrics.rewind(0)
    trainer.sample()


@pytest.mark.parametrize(("ends", "text"), [(True, ""), (False, NON_FINITE)])
def test_a_text_ends_with_a_stop_token_or_with_a_broken_model(ranks, tiny, tmp_path, ends, text):
    ranks(1).run(break_and_sample, [*tiny, *in_folder(tmp_path / "run"), *SAMPLES], ends)
    (record,) = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [sample["text"] for sample in record["samples"]] == [text] * 3


def test_a_prompt_must_leave_room_for_a_token(ranks, tiny, tmp_path):
    prompt = "the " * 40
    (line,) = ranks(1).run(error_line, [*tiny, *in_folder(tmp_path / "run"), "--samples.prompts", f'["{prompt}"]'])
    assert line.startswith("--samples.prompts ") and line.endswith("tokens, but [training] seq_len = 32 must be larger")


def answers_in_training(argv):
    """Return the greedy answers of seven prompts of odd lengths, and whether the parameters and random states are the same."""
    trainer = trainer_from(combine(argv))
    generator, step = trainer.samples.generator, trainer.engine.forward_backward
    prompts = [[(7 * i + 3 * j) % 1000 for j in range(length)] for i, length in enumerate((5, 1, 13, 3, 21, 9, 7))]
    requests = [
        TextRequest(prompt=prompt, sampling=Sampling(temperature=0), max_new_tokens=2 + i)
        for i, prompt in enumerate(prompts)
    ]
    answers = generator.generate(requests, step, nullcontext)
    assert answers[::-1] == generator.generate(requests[::-1], step, nullcontext)
    return answers


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3", "dp_shard 2"),
        ("llama3", "tp 2"),
        ("llama3", "cp 2"),
        ("llama3", "pp 2"),
        ("llama3", "dp_replicate 2 tp 2"),
        ("mixtral", "dp_shard 2 ep 2"),
    ],
)
def test_answers_are_the_same_in_every_layout(ranks, tiny, tmp_path, model, layout):
    degrees = dict(zip(layout.split()[::2], layout.split()[1::2], strict=True))
    argv = [*tiny, *in_folder(tmp_path / "run"), *SAMPLES, "--model.name", model]
    (expected,) = ranks(1).run(answers_in_training, argv)
    assert [len(answer.tokens) for answer in expected] == [2, 3, 4, 5, 6, 7, 8]
    size = math.prod(int(size) for name, size in degrees.items() if name != "ep")
    argv += [word for name, size in degrees.items() for word in (f"--parallel.{name}", size)]
    assert ranks(size).run(answers_in_training, argv) == [expected] * size


def test_answers_of_an_adapter_on_a_base_in_4_bits_are_the_same_in_a_layout(ranks, tiny, tmp_path):
    wide = [*tiny, "--model.overrides.dim", "128", "--model.overrides.hidden_dim", "128"]
    ranks(1).run(train, combine([*wide, *in_folder(tmp_path / "base"), "--training.steps", "1"]))
    argv = [*wide, *in_folder(tmp_path / "run"), *SAMPLES, "--checkpoint.init_from", str(tmp_path / "base")]
    argv += ["--lora.rank", "4", "--lora.base_dtype", "nf4"]
    (expected,) = ranks(1).run(answers_in_training, argv)
    assert ranks(2).run(answers_in_training, [*argv, "--parallel.tp", "2"]) == [expected] * 2
    (original,) = ranks(1).run(answers_in_training, [*argv, "--lora.base_dtype", "keep"])
    assert original != expected
