"""What a trained model says: the same with and without kept keys, on one rank and several, here and in transformers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.training_runs import train
from trainer.checkpoint.export import export_run
from trainer.config import TokenizerConfig
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.inference.generate import Sampling, TextGenerator, TextStream, sample
from trainer.testing.ranks import RankError

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.0)
CHATS = [
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
def spoken(ranks, tiny, tmp_path_factory):
    """The folder of a run that has seen some chats, exported too."""
    folder = tmp_path_factory.mktemp("spoken")
    config = folder / "chat.toml"
    lines = Path(tiny[1]).read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith(("dataset =", "path =", "seq_len ="))))
    argv = ["--config", str(config), *CHATS, "--run.output_folder", str(folder), "--run.name", "run"]
    ranks(1).run(train, [*argv, "--training.steps", "20", "--optimizer.lr", "1e-2"])
    ranks(1).run(export_run, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def tied(ranks, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "run"
    more = ["--model.overrides.tied_embeddings", "true", "--training.steps", "10", "--optimizer.lr", "1e-2"]
    ranks(1).run(train, [*tiny, "--run.output_folder", str(folder.parent), "--run.name", "run", *more])
    ranks(1).run(export_run, folder)
    return folder


def said(folder, prompt, most=12, sampling=GREEDY, longest=0):
    speaker = TextGenerator(folder, torch.float32, CPU, longest, "")
    return list(speaker.generate(prompt, sampling, 0, (), most))


def one_by_one(folder, prompt, most, sampling):
    """Without anything kept: the whole text through the network for each token."""
    speaker = TextGenerator(folder, torch.float32, CPU, 0, "")
    tokens, generator = list(prompt), torch.Generator().manual_seed(0)
    for _ in range(most):
        speaker.seen = []
        tokens.append(sample(speaker._logits(tokens), sampling, generator))
    return tokens[len(prompt) :]


PROMPT = [1792, 20, 31, 44, 5, 17]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_kept_keys_and_cut_matrices_change_nothing(ranks, spoken, size):
    for sampling in (GREEDY, WARM):
        expected = ranks(1).run(one_by_one, spoken, PROMPT, 12, sampling)[0]
        assert ranks(size).run(said, spoken, PROMPT, 12, sampling) == [expected] * size
    assert len(set(expected)) > 6


@pytest.mark.parametrize("size", [1, 2])
def test_tied_models_speak_too(ranks, tied, size):
    expected = ranks(1).run(one_by_one, tied, PROMPT, 12, WARM)[0]
    for folder in (tied, tied / "huggingface"):
        kept = ranks(size).run(said, folder, PROMPT, 12, WARM)
        assert folder != tied or kept == [expected] * size
        assert len(set(kept[0])) > 6


def test_an_exported_chat_model_ends_its_turns_by_itself(spoken):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(spoken / "huggingface")
    tokenizer = load_tokenizer(TokenizerConfig())
    ends = [tokenizer.special_tokens[name] for name in ("<|end_of_text|>", "<|eot_id|>")]
    assert model.generation_config.eos_token_id == ends


def test_transformers_says_the_same(ranks, spoken):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(spoken / "huggingface", dtype=torch.float32)
    expected = theirs.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert ranks(1).run(said, spoken / "huggingface", PROMPT) == [expected]


def in_turns(folder):
    """A conversation of three turns, with what is kept and anew."""
    speaker, fresh = (TextGenerator(folder, torch.float32, CPU, 0, "") for _ in range(2))
    chat = speaker.chat()
    messages, answers = [], []
    for question in ("Hello!", "What is 2 + 3?", "Thanks."):
        messages.append({"role": "user", "content": question})
        prompt = chat.prompt(messages)
        kept = len(speaker.seen)
        tokens = list(speaker.generate(prompt, GREEDY, 0, chat.end_of_turn, 8))
        fresh.seen = []
        assert tokens == list(fresh.generate(prompt, GREEDY, 0, chat.end_of_turn, 8))
        answers.append((kept, len(tokens)))
        messages.append({"role": "assistant", "content": speaker.tokenizer.decode(tokens)})
    return answers


def test_a_conversation_goes_on_from_what_is_kept(ranks, spoken):
    (answers,) = ranks(1).run(in_turns, spoken)
    assert [kept > 0 for kept, _ in answers] == [False, True, True]


def test_the_same_seed_says_the_same_and_another_something_else(ranks, spoken):
    first = ranks(1).run(said, spoken, PROMPT, 12, WARM)
    assert ranks(1).run(said, spoken, PROMPT, 12, WARM) == first
    assert first != ranks(1).run(said, spoken, PROMPT)


def test_a_prompt_that_leaves_no_room_is_refused(ranks, spoken):
    with pytest.raises(RankError, match="the prompt has 6 tokens, and there is room for 6 with the answer"):
        ranks(1).run(said, spoken, PROMPT, 12, GREEDY, 6)
    assert [len(tokens) for tokens in ranks(1).run(said, spoken, PROMPT, 12, GREEDY, 9)] == [3]


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.5), {0}),
        (Sampling(temperature=1.0, top_p=0.7), {0, 1}),
        (Sampling(temperature=0), {0}),
        (Sampling(temperature=1e-3), {0}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
    ],
)
def test_only_what_the_sampling_leaves_is_drawn(sampling, possible):
    logits = torch.tensor([0.55, 0.25, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, sampling, generator) for _ in range(300)} == possible


def test_a_letter_of_several_tokens_comes_whole():
    tokenizer = load_tokenizer(TokenizerConfig())
    text = "né 😀 ok"
    stream = TextStream(tokenizer)
    pieces = [stream.put(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.rest() == text
    assert "\ufffd" not in "".join(pieces) and "" in pieces


# ------------------------------------------------------------ the script


def script(*words, stdin=""):
    words = [word if isinstance(word, bytes) else str(word) for word in words]
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input=stdin)
    return done.returncode, done.stdout, done.stderr.strip()


def test_the_script_speaks_and_chats(spoken):
    code, out, err = script(spoken, "--prompt", "def f", "--temperature", "0", "--max-tokens", "5")
    assert (code, err) == (0, "")
    assert out.startswith("def f") and out.endswith("\n") and len(out) > 7
    code, out, err = script(spoken, "--chat", "--temperature", "0", "--max-tokens", "5", stdin="Hello!\n\nAgain.\n")
    assert (code, err, out.count("\n") >= 2) == (0, "", True)


def test_the_script_refuses_in_one_line(spoken, tmp_path):
    wrong = (
        ([tmp_path / "no", "--prompt", "x"], f"{tmp_path}/no: no such folder"),
        ([spoken], "expected either --prompt TEXT or --chat"),
        ([spoken, "--prompt", b"a\xff"], "argument --prompt: expected UTF-8 text"),
        (
            [spoken, "--prompt", "x", "--longest", "10000000000000"],
            "there is not memory enough for the keys and values of 10000000000000 tokens; --longest takes fewer",
        ),
        ([spoken, "--prompt", "x", "--system", "y"], "--system has no effect here: only with --chat"),
        ([spoken, "--prompt", "x", "--top-p", "2"], "argument --top-p: 2: expected a number above 0, up to 1"),
        (
            [spoken, "--chat", "--template", "llama4"],
            "--template llama4: is neither of llama2, llama3, chatml nor a file or folder",
        ),
    )
    for words, line in wrong:
        assert script(*words) == (2, "", line)
