"""Generation: identical with and without a KV cache, on one and several ranks, here and in transformers."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.commands import run_script
from tests.conftest import ROOT
from tests.data.tokenizer.test_tekken import content
from tests.training_runs import checkpoint_of, in_folder, train
from trainer.base.config import CheckpointConfig, TokenizerConfig
from trainer.checkpoint.formats.export import export_run
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer
from trainer.inference.engine import NON_FINITE, Sampling, TextRequest, sample
from trainer.inference.generate import TextGenerator
from trainer.tools.testing.ranks import RankError

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.0)
CHAT_DATA = [
    "--data.dataset",
    "chat",
    "--data.packing",
    "best-fit",
    "--data.document_mask",
    "true",
    "--training.seq_len",
    "128",
]


@pytest.fixture(scope="module")
def chat_run(ranks, tiny, tmp_path_factory):
    """The folder of a run that was trained on chats, exported too."""
    folder = tmp_path_factory.mktemp("chat")
    config = folder / "chat.toml"
    lines = Path(tiny[1]).read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith(("dataset =", "path =", "seq_len ="))))
    argv = ["--config", str(config), *CHAT_DATA, "--run.output_folder", str(folder), "--run.name", "run"]
    ranks(1).run(train, [*argv, "--training.steps", "20", "--optimizer.lr", "1e-2"])
    ranks(1).run(export_run, folder / "run", CheckpointConfig(export_huggingface=True))
    return folder / "run"


@pytest.fixture(scope="module")
def tied_run(ranks, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "run"
    settings = ["--model.overrides.tied_embeddings", "true", "--training.steps", "10", "--optimizer.lr", "1e-2"]
    ranks(1).run(train, [*tiny, "--run.output_folder", str(folder.parent), "--run.name", "run", *settings])
    ranks(1).run(export_run, folder, CheckpointConfig(export_huggingface=True))
    return folder


def generated(folder, prompt, max_new_tokens=12, sampling=GREEDY, max_seq_len=0):
    generator = TextGenerator.load(folder, torch.float32, CPU, max_seq_len, "")
    return tokens_of(generator, prompt, max_new_tokens, sampling)


def tokens_of(generator, prompt, max_new_tokens, sampling=GREEDY, stop=()):
    request = TextRequest(prompt=prompt, sampling=sampling, stop_tokens=stop, max_new_tokens=max_new_tokens)
    (answer,) = generator.generate([request])
    return answer.tokens


def generated_without_cache(folder, prompt, max_new_tokens, sampling):
    """The complete text passes through the model for each token."""
    generator = TextGenerator.load(folder, torch.float32, CPU, 0, "")
    tokens, rng = list(prompt), torch.Generator().manual_seed(0)
    for _ in range(max_new_tokens):
        generator.cache.tokens = {}
        logits = generator.cache.next_logits({0: tokens})[0, : generator.tokenizer.vocab_size]
        tokens.append(sample(logits.double(), sampling, rng))
    return tokens[len(prompt) :]


PROMPT = [1792, 20, 31, 44, 5, 17]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_kv_cache_and_tensor_parallelism_do_not_change_the_tokens(ranks, chat_run, size):
    for sampling in (GREEDY, WARM):
        expected = ranks(1).run(generated_without_cache, chat_run, PROMPT, 12, sampling)[0]
        assert ranks(size).run(generated, chat_run, PROMPT, 12, sampling) == [expected] * size
    assert len(set(expected)) > 6


@pytest.fixture(scope="module")
def windowed_run(ranks, tiny, tmp_path_factory):
    """The folder of a run whose layers attend to a window of 4 keys."""
    folder = tmp_path_factory.mktemp("windowed") / "run"
    model = ["--model.name", "mistral", "--model.overrides.window", "4", "--model.overrides.head_dim", "16"]
    argv = [*tiny, "--run.output_folder", str(folder.parent), "--run.name", "run", *model, "--training.steps", "10"]
    ranks(1).run(train, [*argv, "--optimizer.lr", "1e-2"])
    return folder


def generated_in_turns(folder, prompts):
    """Generate with one cache, which contains the tokens of the previous prompt."""
    generator = TextGenerator.load(folder, torch.float32, CPU, 0, "")
    return [tokens_of(generator, prompt, 3) for prompt in prompts]


def test_a_cache_of_a_window_is_recomputed_if_a_prompt_goes_too_far_back(ranks, windowed_run):
    long = (PROMPT * 4)[:20]
    prompts = [long, [*long, 7, 8], long[:19], PROMPT[:3], long, long[:-2]]
    expected = [ranks(1).run(generated_without_cache, windowed_run, prompt, 3, GREEDY)[0] for prompt in prompts]
    assert ranks(1).run(generated_in_turns, windowed_run, prompts)[0] == expected


@pytest.mark.parametrize("size", [1, 2])
def test_models_with_tied_embeddings_generate(ranks, tied_run, size):
    expected = ranks(1).run(generated_without_cache, tied_run, PROMPT, 12, WARM)[0]
    for folder in (tied_run, tied_run / "huggingface"):
        tokens = ranks(size).run(generated, folder, PROMPT, 12, WARM)
        assert folder != tied_run or tokens == [expected] * size
        assert len(set(tokens[0])) > 6


def test_an_exported_chat_model_stops_at_the_end_of_its_turn(chat_run):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(chat_run / "huggingface")
    tokenizer = load_tokenizer(TokenizerConfig())
    ends = [tokenizer.special_tokens[name] for name in ("<|end_of_text|>", "<|eot_id|>")]
    assert model.generation_config.eos_token_id == ends


def update_json(path, values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_model_that_is_fine_tuned_from_a_folder_keeps_its_context_window_and_generation_settings(
    ranks, tiny, tied_run, tmp_path
):
    """The folder's generation_config.json names only the end of a document. The exported one names the end of a turn too. A
    resumed run does not read the folder again."""
    source = tmp_path / "source"
    shutil.copytree(tied_run / "huggingface", source)
    assert isinstance(json.loads((source / "generation_config.json").read_text())["eos_token_id"], int)
    update_json(source / "generation_config.json", {"temperature": 0.6})
    update_json(source / "config.json", {"max_position_embeddings": 4096, "initializer_range": 0.03})
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run"]
    argv += ["--model.huggingface", source, "--tokenizer.backend", "huggingface", "--tokenizer.path", source]
    argv += ["--data.dataset", "chat", "--data.path", "", "--checkpoint.init_from", source]
    argv += ["--checkpoint.export_huggingface", "true"]
    tokenizer = load_tokenizer(TokenizerConfig())
    ends = [tokenizer.special_tokens[name] for name in ("<|end_of_text|>", "<|eot_id|>")]
    for steps in ("1", "2"):
        ranks(1).run(train, [*map(str, argv), "--training.steps", steps])
        export = tmp_path / "run" / "huggingface"
        config, generation = (json.loads((export / f).read_text()) for f in ("config.json", "generation_config.json"))
        assert config["max_position_embeddings"] == 4096 and config["initializer_range"] == 0.03
        assert generation["temperature"] == 0.6 and generation["eos_token_id"] == ends
        update_json(source / "generation_config.json", {"temperature": 0.7})
        update_json(source / "config.json", {"max_position_embeddings": 64, "initializer_range": 0.04})


@pytest.mark.parametrize("is_link", [False, True])
def test_a_bad_generation_config_of_the_initial_model_is_a_one_line_error(ranks, tiny, tied_run, tmp_path, is_link):
    source = tmp_path / "source"
    shutil.copytree(tied_run / "huggingface", source)
    file, secret = source / "generation_config.json", tmp_path / "secret.json"
    secret.write_text("{}")
    file.unlink()
    file.symlink_to(secret) if is_link else file.write_text("[")
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--checkpoint.init_from", str(source)]
    argv += ["--model.overrides.tied_embeddings", "true"]
    message = f"checkpoint.init_from: {file} is not a JSON object"
    if is_link:
        message = f"{source}: {file.name} is a symbolic link to a path outside the folder"
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(1).run(train, argv)


def test_transformers_generates_the_same_tokens(ranks, chat_run):
    transformers = pytest.importorskip("transformers")
    hf_model = transformers.LlamaForCausalLM.from_pretrained(chat_run / "huggingface", dtype=torch.float32)
    expected = hf_model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert ranks(1).run(generated, chat_run / "huggingface", PROMPT) == [expected]


def chat_with_and_without_cache(folder):
    """Generate three turns with the cache and without; return (cached tokens before, new tokens) of each turn."""
    generator, uncached = (TextGenerator.load(folder, torch.float32, CPU, 0, "") for _ in range(2))
    chat_format = generator.chat_format()
    messages, turns = [], []
    for question in ("Hello!", "What is 2 + 3?", "Thanks."):
        messages.append({"role": "user", "content": question})
        prompt = chat_format.prompt(messages)
        num_cached = len(generator.cache.tokens.get(0, []))
        tokens = tokens_of(generator, prompt, 8, stop=chat_format.end_of_turn)
        uncached.cache.tokens = {}
        assert tokens == tokens_of(uncached, prompt, 8, stop=chat_format.end_of_turn)
        turns.append((num_cached, len(tokens)))
        messages.append({"role": "assistant", "content": generator.tokenizer.decode(tokens)})
    return turns


def test_a_chat_reuses_the_cache_of_earlier_turns(ranks, chat_run):
    (turns,) = ranks(1).run(chat_with_and_without_cache, chat_run)
    assert [num_cached > 0 for num_cached, _ in turns] == [False, True, True]


def test_a_seed_determines_the_sampled_tokens(ranks, chat_run):
    first = ranks(1).run(generated, chat_run, PROMPT, 12, WARM)
    assert ranks(1).run(generated, chat_run, PROMPT, 12, WARM) == first
    assert first != ranks(1).run(generated, chat_run, PROMPT)


def answer_until(folder, prompt, stop, end_of_text):
    """Return the answer, and the texts that are shown while it grows."""
    generator = TextGenerator.load(folder, torch.float32, CPU, 0, "")
    shown = []
    request = TextRequest(prompt=prompt, sampling=GREEDY, stop=stop, stop_tokens=end_of_text, max_new_tokens=12)
    (answer,) = generator.generate([request], lambda index, text: shown.append((index, text)))
    return answer, shown


def test_a_text_ends_before_a_string_even_if_it_begins_in_one_token_and_ends_in_another(ranks, chat_run):
    ((answer, shown),) = ranks(1).run(answer_until, chat_run, PROMPT, [], ())
    assert answer.end == "length" and "".join(text for _, text in shown) == answer.text
    tokenizer = load_tokenizer(TokenizerConfig())
    begin = len(tokenizer.decode(answer.tokens[:4]))
    stop = answer.text[begin - 1 : begin + 1]
    assert begin > 1 and stop in answer.text
    ((stopped, shown),) = ranks(1).run(answer_until, chat_run, PROMPT, ["never", stop], ())
    assert stopped.end == "string" and stopped.text == answer.text[: answer.text.index(stop)]
    assert "".join(text for _, text in shown) == stopped.text and {index for index, _ in shown} == {0}
    assert stopped.tokens == answer.tokens[: len(stopped.tokens)]
    ((ended, _),) = ranks(1).run(answer_until, chat_run, PROMPT, ["never"], answer.tokens[3:4])
    first = answer.tokens.index(answer.tokens[3])
    assert (ended.end, ended.tokens) == ("token", answer.tokens[: first + 1])
    assert ended.text == tokenizer.decode(answer.tokens[:first])


def test_a_prompt_that_fills_the_context_window_is_an_error(ranks, chat_run):
    message = r"the prompt has 6 tokens; prompt and answer share a context window of 6 tokens \(--max-seq-len\)"
    with pytest.raises(RankError, match=message):
        ranks(1).run(generated, chat_run, PROMPT, 12, GREEDY, 6)
    assert [len(tokens) for tokens in ranks(1).run(generated, chat_run, PROMPT, 12, GREEDY, 9)] == [3]


def test_a_model_with_non_finite_logits_is_an_error(chat_run, tmp_path):
    folder = Path(shutil.copytree(chat_run / "huggingface", tmp_path / "model"))
    (file,) = folder.glob("*.safetensors")
    safetensors.torch.save_file({k: t.fill_(math.nan) for k, t in safetensors.torch.load_file(file).items()}, file)
    code, out, err = script(folder, "--prompt", "x")
    assert (code, out) == (2, "x")
    assert err == f"{folder}: the model returns non-finite logits, so it cannot generate text"
    code, out, err = script(folder, "--prompt", "x", "--prompt", "y")
    assert (code, out, err) == (0, f"x{NON_FINITE}\ny{NON_FINITE}\n", "")


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.5), {0}),
        (Sampling(temperature=1.0, top_p=0.7), {0, 1}),
        (Sampling(temperature=0), {0}),
        (Sampling(temperature=1e-3), {0}),
        (Sampling(temperature=1e-38), {0}),
        (Sampling(temperature=1.0, top_p=1e-300), {0}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
    ],
)
def test_sampling_draws_only_tokens_that_pass_its_filters(sampling, possible):
    logits = torch.tensor([0.55, 0.25, 0.15, 0.05], dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, sampling, generator) for _ in range(300)} == possible


def tokenizer_fingerprint(folder):
    return TextGenerator.load(folder, torch.float32, CPU, 0, "").tokenizer.fingerprint


def test_a_checkpoint_remembers_the_split_pattern_of_its_tiktoken_file(ranks, tiny, tmp_path):
    settings = {"backend": "tiktoken", "path": str(DEFAULT_FILE), "pattern": "gpt2"}
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run", "--training.steps", "1"]
    argv += ["--data.store_folder", str(tmp_path / "stores")]
    argv += [word for name, value in settings.items() for word in (f"--tokenizer.{name}", value)]
    ranks(1).run(train, argv)
    expected = load_tokenizer(TokenizerConfig(**settings)).fingerprint
    assert expected != load_tokenizer(TokenizerConfig()).fingerprint
    assert ranks(1).run(tokenizer_fingerprint, tmp_path / "run") == [expected]


def text_prompt_and_answer(folder, text):
    generator = TextGenerator.load(folder, torch.float32, CPU, 0, "")
    prompt = generator.text_request(text).prompt
    return prompt, tokens_of(generator, prompt, 4)


def test_a_run_with_a_tekken_json_trains_resumes_generates_and_is_exported(ranks, tiny, tmp_path):
    path, run = tmp_path / "tekken.json", tmp_path / "run"
    path.write_text(json.dumps(content()))
    argv = [
        *tiny,
        *in_folder(run),
        "--data.store_folder",
        str(tmp_path / "stores"),
        "--model.overrides.vocab_size",
        "1030",
    ]
    argv += ["--tokenizer.backend", "tekken", "--tokenizer.path", str(path)]
    ranks(1).run(train, argv)
    ranks(1).run(train, [*argv, "--training.steps", "6"])
    assert (checkpoint_of(run) / "tekken.json").read_bytes() == path.read_bytes()
    ranks(1).run(export_run, run, CheckpointConfig(export_huggingface=True))
    tokenizer = load_tokenizer(TokenizerConfig(backend="tekken", path=str(path)))
    path.unlink()  # the checkpoint has a copy
    for folder in (run, run / "huggingface"):
        ((prompt, answer),) = ranks(1).run(text_prompt_and_answer, folder, "Hello world")
        assert prompt == [tokenizer.bos, *tokenizer.encode("Hello world")]
        assert len(answer) == 4 and max(answer) < tokenizer.vocab_size


# ------------------------------------------------------------ the command


def script(*words, stdin=""):
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input=stdin)
    return done.returncode, done.stdout, done.stderr.strip()


def test_the_command_continues_a_prompt_and_chats(chat_run):
    code, out, err = script(chat_run, "--prompt", "def f", "--temperature", "0", "--max-new-tokens", "5")
    newest = f"{checkpoint_of(chat_run)}: the newest checkpoint"
    assert (code, err) == (0, newest)
    assert out.startswith("def f") and out.endswith("\n") and len(out) > 7
    several = [word for text in ("def f", "import", "def f") for word in ("--prompt", text)]
    code, texts, _ = script(chat_run, *several, "--temperature", "0", "--max-new-tokens", "5")
    assert code == 0 and texts.startswith(f"{out}import") and texts.endswith(out) and len(texts) > 2 * len(out) + 7
    stop = out.removeprefix("def f")[1:2]
    code, stopped, _ = script(
        chat_run, "--prompt", "def f", "--temperature", "0", "--max-new-tokens", "5", "--stop", stop
    )
    assert (code, stopped) == (0, out[: out.index(stop, 5)] + "\n")
    options = ["--chat", "--temperature", "0", "--max-new-tokens", "5"]
    code, out, err = script(chat_run, *options, stdin="Hello!\n\nAgain.\n")
    assert (code, err, out.count("\n") >= 2) == (0, newest, True)


def test_errors_of_the_model_are_one_line(chat_run, tmp_path):
    too_long = 2**31 - 1
    for words, line in (
        ([tmp_path / "no", "--prompt", "x"], f"{tmp_path}/no: no such folder"),
        (
            [chat_run, "--prompt", "x", "--max-seq-len", too_long],
            f"not enough memory for a KV cache of {too_long} tokens; lower --max-seq-len",
        ),
        (
            [chat_run, "--chat", "--chat-template", "Llama3"],
            f"--chat-template Llama3: expected one of {', '.join(BUILT_IN)}, or an existing file or folder; "
            "did you mean 'llama3'?",
        ),
    ):
        code, out, err = script(*words)
        assert (code, out) == (2, "")
        assert err in (line, f"{checkpoint_of(chat_run)}: the newest checkpoint\n{line}")


def test_a_tokenizer_configuration_that_is_not_utf_8_is_one_line(ranks, chat_run, tmp_path):
    folder = Path(shutil.copytree(chat_run / "huggingface", tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_bytes(b'{"chat_template": "\xff"}')
    with pytest.raises(RankError, match=f"ConfigError: .*{folder}/tokenizer_config.json is not a JSON object"):
        ranks(1).run(generated, folder, PROMPT)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "expected either --prompt TEXT or --chat"),
        (["--prompt", "a\udcff"], "argument --prompt: expected UTF-8 text"),
        (["--prompt", "x", "--stop", ""], "--stop: must not be empty"),
        (["--prompt", "x", "--system", "y"], "--system has no effect without --chat"),
        (["--prompt", "x", "--seed", 2**64], f"argument --seed: {2**64}: expected an integer from 0 to 2147483648"),
        (["--prompt", "x", "--top-p", "2"], "argument --top-p: 2: expected a number from 1e-18 to 1"),
    ],
)
def test_errors_of_the_command_line_are_one_line(words, line):
    done = run_script("scripts/generate.py", "outputs/run", *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")
