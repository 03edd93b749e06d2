"""scripts/prepare_data.py and scripts/train_tokenizer.py, run as commands."""

import json
import re
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from tests.commands import run_script
from tests.conftest import ROOT
from tests.faults.harness import write_corpus
from trainer.base.config import TokenizerConfig
from trainer.data.store.store import open_store
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer


@pytest.fixture
def settings(tmp_path) -> list[str]:
    corpus = write_corpus(tmp_path / "corpus", 40)
    return ["--data.dataset", "text", "--data.path", str(corpus), "--data.store_folder", str(tmp_path / "stores")]


def test_a_store_is_prepared_described_reused_and_verified(settings, tmp_path):
    first = run_script("scripts/prepare_data.py", *settings, "--data.held_out_fraction", "0.2")
    assert first.returncode == 0, first.stderr
    (store,) = (path for path in (tmp_path / "stores").iterdir() if path.is_dir())
    train, held_out = open_store(store, "train"), open_store(store, "held_out")
    assert re.search(rf"^{store}: [0-9,]+ tokens per second$", first.stdout, re.MULTILINE)
    title, *rows = first.stdout.splitlines()[-3:]
    assert title.split("  ")[-1] == "first epoch (steps)"
    for row, name, split in zip(rows, ("training", "held out"), (train, held_out), strict=True):
        counts = (
            f"{name} +{len(split.documents) - 1} +{len(split.tokens):,} +100.0 % +{np.diff(split.documents).max()} "
        )
        assert re.match(counts, row), row
    samples = (len(train.tokens) - 1) // 128
    assert rows[0].split()[-4:] == [str(samples), "0.0", "%", f"{samples / 32:.1f}"]
    again = run_script("scripts/prepare_data.py", *settings, "--data.held_out_fraction", "0.2", "--verify")
    assert again.stdout.splitlines()[0] == f"{store}: already prepared"
    assert again.stdout.splitlines()[1] == "  intact: every file has the content that was written"
    tokens = store / "train.tokens"
    tokens.write_bytes(bytes([tokens.read_bytes()[0] ^ 1]) + tokens.read_bytes()[1:])
    damaged = run_script("scripts/prepare_data.py", *settings, "--data.held_out_fraction", "0.2", "--verify")
    assert damaged.returncode == 2
    assert f"{tokens} does not match its digest in store.json; delete the folder {store}" in damaged.stderr
    tokens.write_bytes(tokens.read_bytes()[:-2])
    short = run_script("scripts/prepare_data.py", *settings, "--data.held_out_fraction", "0.2")
    assert (short.returncode, len(short.stderr.splitlines())) == (2, 1) and "train.tokens has " in short.stderr


def test_an_unknown_tiktoken_file_is_one_warning_of_the_preparation_until_its_pattern_is_set(settings, tmp_path):
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(b"\n".join(DEFAULT_FILE.read_bytes().splitlines()[:1700]))
    settings += ["--tokenizer.backend", "tiktoken", "--tokenizer.path", str(path)]
    prepared = run_script("scripts/prepare_data.py", *settings)
    (line,) = prepared.stderr.splitlines()
    assert prepared.returncode == 0
    assert (
        f"warning: {path} is not Llama 3's tiktoken file, but is used with Llama 3's split pattern; set tokenizer.pattern"
        in line
    )
    again = run_script("scripts/prepare_data.py", *settings, "--tokenizer.pattern", "llama3")
    assert (again.returncode, again.stderr) == (0, "")
    assert ": already prepared" in again.stdout, "the tokens are the same"


def test_the_data_of_a_run_whose_initial_model_does_not_exist_yet_is_prepared(tmp_path):
    config = ["--config", "train_configs/dpo_debug.toml", "--data.store_folder", str(tmp_path / "stores")]
    config += ["--checkpoint.init_from", str(tmp_path / "later")]
    prepared = run_script("scripts/prepare_data.py", *config)
    assert (prepared.returncode, prepared.stderr) == (0, ""), "a run would need the model"
    missing = run_script("scripts/prepare_data.py", *config, "--data.path", "nowhere.jsonl")
    message = "--data.path nowhere.jsonl: no such file or folder\n"
    assert (missing.returncode, missing.stderr) == (2, message)


def test_data_is_prepared_only_for_a_configuration_that_a_run_accepts(settings):
    without = ["--data.held_out_fraction", "0", "--evaluation.tasks", "{}"]
    refused = run_script("scripts/prepare_data.py", *settings, *without)
    assert (refused.returncode, refused.stderr.partition(": ")[2]) == (
        2,
        "needs [data] held_out_fraction, [evaluation] datasets or [evaluation] tasks: "
        "without evaluation, set interval_steps = 0\n",
    )
    accepted = [*settings, *without, "--evaluation.interval_steps", "0"]
    assert run_script("scripts/prepare_data.py", *accepted).returncode == 0


def test_an_error_of_a_dataset_names_the_setting_that_selects_it(settings, tmp_path):
    (tmp_path / "junk.jsonl").write_bytes(b"\xff\n")
    evaluation = ["--evaluation.datasets.wiki", f"jsonl:{tmp_path}/junk.jsonl"]
    result = run_script("scripts/prepare_data.py", *settings, *evaluation)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith(
        f"--evaluation.datasets.wiki jsonl:{tmp_path}/junk.jsonl: this dataset contains no readable document; "
    )
    (tmp_path / "nothing.txt").touch()
    result = run_script("scripts/train_tokenizer.py", tmp_path / "x", *settings[:3], tmp_path / "nothing.txt")
    assert (result.returncode, result.stderr.partition(": contains no readable document")[0]) == (
        2,
        f"--data.path {tmp_path}/nothing.txt",
    )
    dataset = ["--data.datasets.mine", f"text:{tmp_path}/nothing.txt"]
    result = run_script("scripts/train_tokenizer.py", tmp_path / "x", *dataset)
    assert (result.returncode, result.stderr.partition(": contains no readable document")[0]) == (2, " ".join(dataset))
    assert not (tmp_path / "x").exists()


def test_an_interrupted_preparation_exits_with_one_line_and_can_be_continued(settings, tmp_path):
    settings += ["--data.prepare_workers", "2"]
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *settings]
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that.
    restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore)
    while not list((tmp_path / "stores").glob("*.tmp-chunks")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted; rerun the same command to continue")
    assert "Traceback" not in err
    assert run_script("scripts/prepare_data.py", *settings).returncode == 0


def test_shards_prepared_on_several_nodes_are_read_together(settings, tmp_path):
    for shard in ("1/2", "2/2"):
        assert run_script("scripts/prepare_data.py", "--shard", shard, *settings).returncode == 0
    joined = ["--data.dataset", "prepared", "--data.path", settings[-1], "--data.store_folder", tmp_path / "joined"]
    verified = run_script("scripts/prepare_data.py", *joined, "--verify")
    assert verified.returncode == 0, verified.stderr
    counts = re.findall(r"^(?:training|held out) +([0-9]+) ", verified.stdout, re.MULTILINE)
    assert len(counts) == 2 and sum(map(int, counts)) == 40


@pytest.fixture
def chats(tmp_path) -> list[str]:
    """Settings of a mixture of two datasets of chats, the first of which has documents that are refused or dropped."""
    for name, answers in (("a", 12), ("b", 30)):
        lines = [{"prompt": f"{i}?", "completion": f"{name} " * (i + 1)} for i in range(answers)]
        if name == "a":
            lines += [{"prompt": "?", "completion": "long " * 200}, {"prompt": "only"}, {"x": 1}, {"x": 2}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = f"--data.datasets.a chat:{tmp_path}/a.jsonl --data.datasets.b chat:{tmp_path}/b.jsonl --data.held_out_fraction 0"
    words += f" --data.store_folder {tmp_path}/stores --data.packing best-fit --data.document_mask true"
    words += " --data.prepare_workers 1 --data.long_documents drop --data.max_bad_documents_percent 40"
    words += " --evaluation.interval_steps 0"
    words += " --data.chat_template llama3 --training.seq_len 64 --training.global_batch_size 4 --training.local_batch_size 1"
    return [*words.split(), "--data.mixture", "0: a=1 b=3"]


def test_the_steps_of_an_epoch_follow_the_batch_schedule_and_the_phases(chats):
    schedule = ["--training.batch_schedule.2", "8", "--data.mixture", "0: a=1 b=3, 24: b=1"]
    prepared = run_script("scripts/prepare_data.py", *chats[:-2], *schedule)
    assert prepared.returncode == 0, prepared.stderr
    a, b = (re.split(" {2,}", row) for row in prepared.stdout[prepared.stdout.index("  documents") :].splitlines()[1:3])
    # The 24 samples of the first phase have 6 of a and 18 of b. Of the steps, 2 have 4 samples, and later ones 8.
    needed = [4 * int(a[8]) if int(a[8]) <= 6 else None, 24 + int(b[8]) - 18 if int(b[8]) > 18 else int(b[8]) * 4 / 3]
    expected = ["" if samples is None else f"{2 + (samples - 8) / 8:.1f}" for samples in needed]
    assert [([*row[9:], "", ""])[1] for row in (a, b)] == expected


def test_the_table_counts_what_was_refused_and_dropped_and_the_first_samples_are_shown(chats, tmp_path):
    prepared = run_script("scripts/prepare_data.py", *chats)
    assert prepared.returncode == 0, prepared.stderr
    table = prepared.stdout[prepared.stdout.index("  documents") :]
    titles, a, b, *refused = table.splitlines()
    assert re.split(" {2,}", titles.strip()) == [
        *("documents", "tokens", "targets", "longest", "refused", "dropped", "no target", "samples", "padding"),
        "first epoch (steps)",
    ]
    a, b = (re.split(" {2,}", row) for row in (a, b))
    assert (a[0], a[1], a[5], a[6]) == ("a: training", "13", "3", "1")
    assert (b[0], b[1], b[5], b[6]) == ("b: training", "30", "0", "0")
    for row, share in ((a, 0.25), (b, 0.75)):
        assert row[-1] == f"{int(row[8]) / (4 * share):.1f}"
    assert refused == [
        f"refused in a: 2 documents like {tmp_path}/a.jsonl:15: the document has none of the layouts of a conversation "
        "(messages; conversations; prompt and completion; instruction, input and output; question and answer); its fields: x; "
        'data.columns names other fields, such as data.columns = { messages = "x" }',
        f"refused in a: {tmp_path}/a.jsonl:14: the document has no field completion; its fields: prompt",
    ]
    shown = run_script("scripts/prepare_data.py", *chats, "--show", "2", "--html", tmp_path / "data.html")
    samples = re.findall("^[ab], sample [0-9]+: 64 positions, [0-9]+ targets", shown.stdout, re.MULTILINE)
    assert len(re.findall("^-- document ", shown.stdout, re.MULTILINE)) == 2
    assert "the first 2 documents of a run: " in shown.stdout
    assert samples and "\x1b" not in shown.stdout and re.search("⟦[ab]( [ab])*", shown.stdout)
    assert shown.stdout.splitlines()[-1] == f"wrote {tmp_path}/data.html"
    content = (tmp_path / "data.html").read_text()
    assert all(sample in content for sample in samples) and "a: training" in content and "refused in a: " in content
    assert run_script("scripts/prepare_data.py", *chats, "--html", tmp_path / "data.html").returncode == 0
    assert (tmp_path / "data.html").read_text().count("<h3 ") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "0"], "argument --show: 0: expected an integer from 1 to 1000"),
        (["--html", "nowhere/x.html"], "argument --html: nowhere: no such folder"),
        (
            ["--show", "1", "--shard", "1/2"],
            "--shard: a part of the files has no samples to show; remove --show and --html",
        ),
    ],
)
def test_samples_that_cannot_be_shown_are_one_line(words, message):
    result = run_script("scripts/prepare_data.py", *words)
    assert (result.returncode, result.stderr) == (2, f"{message}\n")


@pytest.mark.parametrize("shard", ["0/4", "5/4", "4", "a/b"])
def test_an_invalid_shard_is_one_line(shard):
    result = run_script("scripts/prepare_data.py", "--shard", shard)
    assert (result.returncode, result.stderr) == (2, f"argument --shard: {shard}: expected I/N, from 1/N to N/N\n")


def test_a_trained_tokenizer_can_be_loaded_and_used(settings, tmp_path):
    (tmp_path / "corpus" / "bad.txt").write_bytes(b"\xff")
    path = tmp_path / "my.tiktoken"
    refused = run_script("scripts/train_tokenizer.py", path, "--vocab-size", "540", *settings)
    assert refused.returncode == 2
    assert "max_bad_documents_percent 1" in refused.stderr or "max_bad_documents_percent = 1" in refused.stderr
    assert "1 of 41 documents are unreadable (2.44 %); the first: " in refused.stderr
    settings += ["--data.max_bad_documents_percent", "3"]
    trained = run_script("scripts/train_tokenizer.py", path, "--vocab-size", "540", *settings)
    use = f'--tokenizer.backend tiktoken --tokenizer.pattern llama3 --tokenizer.path "{path}"'
    assert trained.stdout == f"{path}: 284 tokens + 256 special tokens\n  to use it: {use}\n", trained.stderr
    first = f"{tmp_path}/corpus/bad.txt:1: the file is not UTF-8 text (byte 0)"
    assert trained.stderr == f"skipped 1 bad document; the first: {first}\n"
    tokenizer = load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(path)))
    assert tokenizer.vocab_size == 540
    text = (tmp_path / "corpus" / "0000.txt").read_text()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < len(text) / 2
    used = [*settings, "--tokenizer.backend", "tiktoken", "--tokenizer.path", path]
    for pattern in (["--tokenizer.pattern", "llama3"], []):
        prepared = run_script("scripts/prepare_data.py", *used, *pattern)
        assert prepared.returncode == 0 and (f"warning: {tokenizer.warnings[0]}\n" in prepared.stderr) == (not pattern)
    again = run_script("scripts/train_tokenizer.py", path, "--vocab-size", "540", *settings)
    assert (again.returncode, again.stderr) == (2, f"{path}: already exists\n")
    strict = run_script(
        "scripts/train_tokenizer.py",
        tmp_path / "strict",
        "--vocab-size",
        "540",
        *settings,
        "--data.on_bad_document",
        "stop",
    )
    message = f"1 or more documents are unreadable; the first: {first}"
    assert (strict.returncode, strict.stderr) == (2, f"--data.on_bad_document stop: {message}\n")


def test_a_tokenizer_cannot_be_trained_on_tokens(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\1\0\2\0")
    for dataset in ("tokens", "prepared"):
        result = run_script(
            "scripts/train_tokenizer.py", tmp_path / "my", "--data.dataset", dataset, "--data.path", tmp_path / "x.bin"
        )
        assert (result.returncode, result.stderr) == (
            2,
            f"--data.path {tmp_path}/x.bin: contains no text to train on\n",
        )


def test_worker_processes_do_not_import_torch():
    """Each worker imports the module that was started as the command."""
    code = "import sys, scripts.prepare_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
