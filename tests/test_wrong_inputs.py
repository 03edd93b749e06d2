"""Wrong and foreign inputs of newcomers: each is one line that says what to do. Nothing is a traceback, nothing is silent."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import run_script
from trainer.base.config import ConfigError
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.environment_variables import check_environment
from trainer.base.config.exits import one_line_errors
from trainer.inference import load_model
from trainer.launch import TorchrunOptions
from trainer.run.resolve import resolve

SETTINGS = {
    # ---------------------------------------------------------------- names of others
    "--tensor_parallel_degree 2": "use '--parallel.tp'",
    "--parallelism.tensor_parallel_degree 2": "use '--parallel.tp'",
    "--training.data_parallel_shard_degree 2": "use '--parallel.dp_shard'",
    "--tensor-model-parallel-size 2": "use '--parallel.tp'",
    "--gradient_accumulation_steps 4": "use '--training.global_batch_size' and '--training.local_batch_size'",
    "--per_device_train_batch_size 4": "use '--training.local_batch_size'",
    "--micro-batch-size 4": "use '--training.local_batch_size'",
    "--max_steps 100": "use '--training.steps'",
    "--train-iters 100": "use '--training.steps'",
    "--num_train_epochs 3": "use '--training.epochs'",
    "--epochs 3": "use '--training.epochs'",
    "--learning_rate 1e-4": "use '--optimizer.lr'",
    "--lora_r 8": "use '--lora.rank'",
    "--lora.r 8": "use '--lora.rank'",
    "--use_peft": "use '--lora.rank'",
    "--report_to wandb": "use '--metrics.sinks': a list such as console,jsonl,wandb",
    "--lr_scheduler_type cosine": "use '--lr_schedule.name'",
    "--warmup_ratio 0.1": "use '--lr_schedule.warmup_steps'",
    "--bf16": "use '--training.compute_dtype'",
    "bf16=true": "use '--training.compute_dtype'",
    "--fp16 true": "fp16 is not supported",
    "--gradient_checkpointing true": "use '--activation_checkpoint.mode'",
    "--output_dir out": "use '--run.output_folder' and '--run.name'",
    "--model_name_or_path x": "use '--model.pretrained': or --from FOLDER",
    "--max_seq_length 2048": "use '--training.seq_len'",
    "--resume_from_checkpoint x": "runs resume by themselves",
    "--deepspeed ds.json": "sharded over all ranks by default",
    "--load_in_4bit": "use '--lora.base_dtype': nf4, with lora.rank",
    "--nproc_per_node 2": "NGPU=8 ./run_llama_train.sh",
    "--attn_implementation flash_attention_2": "not needed",
    "--depth 12": "model.overrides",
    "--total_batch_size 524288": "in samples",
    "--seed 1": "did you mean '--run.seed' or '--samples.seed'?",
    "--sequence-parallel true": "did you mean '--parallel.sequence_parallel'?",
    "--world-size 64": "NGPU=8 ./run_llama_train.sh",
    "--nnodes 8": "docs/multi_node.md",
    "--train_config x.toml": "--config FILE",
    "--dp-size 8": "use '--parallel.dp_shard'",
    "--run.device cuda:0": "write gpu",
    "--optimizer.name lion": "no other optimizer is supported",
    "--training.compute_dtype float8": "write bf16, with [training] float8 = tensorwise",
    "--training.float8 dynamic": "write tensorwise",
    "--training.float8 mxfp8": "such scales are not supported",
    "--training.float8_exclude *.wk": "has an effect only with [training] float8",
    "--lr 1e-4": "did you mean '--optimizer.lr'?",
    # ---------------------------------------------------------------- forms
    "lora_r=8": "use '--lora.rank'",
    "training.steps=5": "did you mean '--training.steps 5'?",
    "+training.steps=5": "did you mean '--training.steps 5'?",
    "-training.steps 5": "did you mean '--training.steps'?",
    "--training-steps 5": "did you mean '--training.steps'?",
    "--training.seq-len 128": "did you mean '--training.seq_len'?",
    "--training.steps": "--training.steps: expects a value",
    "--training.steps 5 --training.steps 6": "is given twice, first as 5; give it once",
    "train_configs/debug.toml": "did you mean '--config train_configs/debug.toml'?",
    "--config llama3_8b": "/llama3_8b.toml'?",
    "--config llama3_8b.toml": "train_configs/llama3_8b.toml'?",
    "--config nowhere/debugg.toml": "train_configs/debug.toml'?",
    "--config axolotl.yaml": "expected a TOML file",
    "--config .": "expected a TOML file, got a folder",
    "--config": "--config: expects a value",
    "resume": "runs resume by themselves",
    # ---------------------------------------------------------------- values
    "--training.steps 1e3": "write 1000",
    "--training.steps 10,000": "write 10000",
    "--training.steps 2k": "write 2000",
    "--training.steps 0": "must be at least 1",
    "--training.seq_len 0": "must be at least 1",
    "--optimizer.lr 1e-4x": "expected a number",
    "--optimizer.lr 0": "must be above 0",
    "--optimizer.lr 3e-4,": "expected a number",
    "--optimizer.name adamw_8bit": "write adamw, with [optimizer] state_dtype = 8bit",
    "--optimizer.name sgd": "expected one of adamw",
    "--optimizer.betas 0.9": "expected a list of 2 numbers",
    "--training.compute_dtype bfloat16": "write bf16",
    "--training.compute_dtype fp16": "bf16 has the range of fp32",
    "--training.max_norm None": "did you mean 'none'?",
    "--training.max_norm null": "write none",
    "--checkpoint.enabled yes": "write true",
    "--checkpoint.enabled False": "did you mean 'false'?",
    "--run.device cuda": "expected one of auto, gpu, cpu",
    "--lr_schedule.name wsd": "write warmup_stable_decay",
    "--data.dataset sharegpt": "write chat",
    "--data.packing true": "write best-fit",
    "--preference.loss sigmoid": "write dpo",
    "--metrics.sinks wandb": "needs [metrics] sinks = jsonl",
    "--metrics.sinks console,jsonl,jsonl": "names jsonl twice",
    "--metrics.sinks console,,jsonl": "expected a list of",
    "--lora.alpha 16": "has an effect only with [lora] rank",
    "--lora.rank 8": "needs [checkpoint] init_from",
    "--preference.loss dpo": "such a loss compares pairs of answers",
    "--model.name llama4": "expected one of",
    "--model.size 8B": "did you mean '8b'?",
    "--model.size 9b": "expected one of debug, 8b, 70b for llama3",
    "--model.overrides.hidden_size 64": "has no dimension of this name",
    "--model.overrides 4": "is a table",
    # ---------------------------------------------------------------- paths
    "--run.output_folder s3://bucket/run": "must be a local path, not a URL",
    "--data.store_folder gs://bucket": "must be a local path, not a URL",
    "--data.dataset jsonl --data.path s3a://bucket/x.jsonl": "write s3://BUCKET/PREFIX",
    "--data.datasets.web jsonl:https://x.org/a.jsonl": "mount https:// as one",
    "--data.path file:///data/x.jsonl": "not a URL: write /data/x.jsonl",
    "--data.columns.question a --data.columns.answer a": "reads the same field as data.columns.question",
    "--hub_model_id x": "use '--checkpoint.export_huggingface'",
    "--accumulate_grad_batches 4": "use '--training.global_batch_size'",
    "--moe-aux-loss-coeff 0.01": "use '--experts.balance_loss'",
    "--galore true": "GaLore is not supported",
    "--learning-rat 1": "unknown setting",
    "--warmup_step 1": "did you mean '--lr_schedule.warmup_steps'?",
    "--data.datasets.web s3://bucket": "expected TYPE:PATH",
    "--checkpoint.init_from hf://meta-llama/Llama-3": "must be a local path, not a URL",
    "--model.huggingface https://huggingface.co/gpt2": "must be a local path, not a URL",
    "--run.output_folder ~/runs": "~ is expanded only by a shell",
    "--run.output_folder $SCRATCH/runs": "$SCRATCH is expanded only by a shell",
    "--run.output_folder=": "must not be empty",
    "--checkpoint.init_from nowhere": "no such folder",
    "--checkpoint.init_from file.txt": "is a file, not a folder",
    "--lora.init_from nowhere --lora.rank 8 --checkpoint.init_from .": "no such folder",
    "--data.dataset text --data.path nowhere": "no such file or folder",
    "--data.dataset text --data.path word.txt": "no such file or folder; did you mean 'words.txt'?",
    "--data.dataset text --data.path gguff/*.txt": "no file matches the pattern; did you mean 'gguf'?",
    "--data.datasets.web jsonl:contents.jsonl": "did you mean 'content.jsonl'?",
    "--checkpoint.init_from runs": "no such folder; did you mean 'run'?",
    "--model.huggingface gpt3": "no such file or folder; did you mean 'gpt2'?",
    "--from=": '--from: the value is empty; --model.pretrained "" would clear that of a file',
    "--from adaptor": "no such folder; did you mean 'adapter'?",
    "--tokenizer.backend tiktoken --tokenizer.path word.txt": "no such file; did you mean 'words.txt'?",
    "--data.path file.txt": "set [data] dataset to text",
    "--tokenizer.backend tiktoken --tokenizer.path nowhere": "no such file",
    "--tokenizer.path file.txt": "is not clear from its name; set tokenizer.backend to huggingface",
    "--tokenizer.backend huggingface": "needs [tokenizer] path",
    # ---------------------------------------------------------------- meshes
    "--parallel.tp 2": "NGPU=2 ./run_llama_train.sh",
    "--parallel.dp_shard 4": "NGPU=4 ./run_llama_train.sh",
    "--parallel.tp 2 --parallel.pp 2": "NGPU=4 ./run_llama_train.sh",
    "--parallel.tp 0": "must be at least 1",
    "--training.local_batch_size 64": "must be a multiple of local_batch_size 64",
    "--training.global_batch_size 6": "must be a multiple of local_batch_size 4",
}
"""Settings on the command line of train.py -> text of the line."""

FILES = {
    "[training]\ntensor_parallel_degree = 2": "use [parallel] tp",
    "[parallelism]\ncontext_parallel_degree = 2": "use [parallel] cp",
    "[job]\ndump_folder = 'x'": "use [run] output_folder and [run] name",
    "[comm]\nx = 1": "did you mean [distributed]?",
    "[lr_scheduler]\nwarmup_steps = 1": "did you mean [lr_schedule]?",
    "[checkpoint]\ninterval = 5": "use [checkpoint] interval_steps",
    "[model]\nflavor = '8B'": "use [model] size",
    "[lora]\nr = 8": "use [lora] rank",
    "learning_rate = 1e-4": "use [optimizer] lr",
    "steps = 5": "did you mean [training] steps?",
    "training = 5": "write [training] as a table",
    "[training]\nlr = 1": "did you mean [optimizer] lr?",
    "[training]\nsteps = '5'": "write 5",
    "[training]\nsteps = 5.0": "write 5",
    "[checkpoint]\nenabled = 'true'": "expected true or false",
    "[optimizer]\nlr = '1e-4'": "expected a number",
    "[data]\npath = ['a', 'b']": "expected text",
    "[run\nname = 'x'": "not valid TOML",
    "base_model: x\nlora_r: 8": "not valid TOML",
}
"""Content of the settings file -> text of the line."""

DATA = {
    "jsonl --data.path content.jsonl": "no field 'text', which data.text_field names; its fields: content",
    "jsonl --data.path number.jsonl": "field 'text', which data.text_field names, is a number",
    "jsonl --data.path messages.jsonl": 'dataset = "chat" reads conversations',
    "jsonl --data.path wrapped.json": "field 'data' holds a list of 1 record; the file must hold this list only",
    "jsonl --data.path pretty.json": "one array; field 'data' holds a list of records; the file must hold this list only",
    "jsonl --data.path commas.jsonl": "a file must hold one complete object per line, or one array",
    "jsonl --data.path python.jsonl": "Python's notation is not JSON",
    "jsonl --data.path arrays.jsonl": "a document of JSON lines must be an object",
    "jsonl --data.path utf32.jsonl": "this is UTF-32 text",
    "text --data.path utf16.txt": "this is UTF-16 text; convert such files to UTF-8",
    "csv --data.path headless.csv": "its first row (Hello there., 1) does not name the columns; add a first row",
    "csv --data.path header.csv": "found 1 file (8 bytes) without a document",
    "jsonl --data.path empty.jsonl": "contains no readable document",
    "jsonl --data.path words.txt": "the line is not valid JSON",
    "jsonl --data.path empty": "this path holds no file ending in .jsonl",
    "text --data.path paper.pdf": "this is a PDF document, not UTF-8 text",
    "preference --data.path content.jsonl": "needs [preference] loss",
    "parquet --data.path content.jsonl": 'dataset = "jsonl" reads such files',
    "tokens --data.path words.txt": "expected the name of a .bin or .npy file",
    "prepared --data.path empty": "a prepared store is a folder with a store.json",
    "text --data.path words.txt --tokenizer.backend tiktoken --tokenizer.path words.txt": "is not a tiktoken file",
    "text --data.path words.txt --tokenizer.backend sentencepiece --tokenizer.path words.txt": "is not a sentencepiece",
    "text --data.path words.txt --tokenizer.backend huggingface --tokenizer.path empty": "has no tokenizer.json",
}
"""Dataset of scripts/prepare_data.py -> text of the line."""

SCRIPTS = {
    "prepare_data --data.datasets.web web.jsonl": "chat, preference, prepared, such as jsonl:web.jsonl",
    "prepare_data --data.datasets.web text:words.txt --data.mixture 'web=1'": "expected 'START: NAME=WEIGHT ...'",
    "prepare_data --data.datasets.web text:words.txt --data.mixture '0: wb=1'": "did you mean 'web'?",
    "prepare_data --model.name llama4": "did you mean 'llama3'?",
    "prepare_data --input words.txt": "use --data.path",
    "prepare_data --shard 4/3": "expected I/N",
    "prepare_data --verfy": "did you mean '--verify'?",
    "generate run": "expected either --prompt TEXT or --chat",
    "generate --model run": "use the first argument for the folder",
    "generate run --max_tokens 5 --prompt x": "use --max-new-tokens",
    "generate run --max_new_tokens 5 --prompt x": "did you mean '--max-new-tokens'?",
    "generate run --prompt x --temperature -1": "expected a number from 0",
    "generate run --prompt x --dtype fp16": "did you mean 'bf16'?",
    "generate run --prompt x --system y": "has no effect without --chat",
    "generate s3://bucket/*/run --prompt x": "is a pattern, but one file or folder is read",
    "plan --gpus 8": "use --world-size",
    "plan --world_size 8": "did you mean '--world-size'?",
    "plan --device h1000": "did you mean 'h100'?",
    "plan --tokens 15T": "expected a number",
    "plan --model.huggingface nowhere": "no such file or folder",
    "plan --from-hf nowhere": "use --from or --model.huggingface",
    "plan --world-size 4 --parallel.tp 8": "plan.py --world-size 8",
    "plan --lora_r 8": "use '--lora.rank'",
    "convert_hf to_hf run out": "did you mean 'to-hf'?",
    "convert_hf to-hf nowhere out": "nowhere: no such folder",
    "convert_hf to-hf runs out": "no such folder; did you mean 'run'?",
    "checkpoint list gguff": "no such folder; did you mean 'gguf'?",
    "compare_runs broken run": "broken/config.toml is not the configuration of a run",
    "inspect_samples broken 1": "--config broken/config.toml: not valid TOML",
    "inspect_samples moved 1": 'moved/config.toml [data] path = "words.jsonl": no such file or folder',
    "inspect_samples unread 1": 'unread/config.toml [data] path = "content.jsonl": this dataset contains no readable',
    "convert_hf to-hf run --output out": "use OUT, the last argument",
    "convert_hf to-hf gs:// out": "names no bucket",
    "checkpoint list nowhere": "no such folder",
    "checkpoint list empty": "contains no checkpoint",
    "checkpoint lst run": "did you mean 'list'?",
    "inspect_samples empty 1": "is not a run folder",
    "inspect_samples runs 1": "no such folder; did you mean 'run'?",
    "compare_runs runs run": "no such folder; did you mean 'run'?",
    "train_tokenizer words.txt": "already exists",
    "train_tokenizer new.tiktoken --data.dataset text --data.path commas.jsonl": 'dataset = "jsonl" reads them',
    "parity --layout tensor=2": "is not a setting of [parallel]",
}
"""Script and arguments -> text of the line."""

VARIABLES = {
    "NGPU=two": "NGPU=two: expected an integer",
    "NGPU=0": "NGPU=0: expected an integer",
    "NNODES=two": "NNODES=two: expected an integer of at least 1",
    "NNODES=2": "set MASTER_ADDR to the host name of the first node",
    "MASTER_PORT=http NNODES=2 MASTER_ADDR=a": "MASTER_PORT=http: expected an integer",
    "NODE_RANK=2 NNODES=2 MASTER_ADDR=a": "must be below NNODES=2",
    "MAX_RESTARTS=-1": "MAX_RESTARTS=-1: expected an integer",
    "WORLD_SIZE=2": "needs RANK too",
    "RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1": "must be below WORLD_SIZE=2",
    "LOG_RANK=first": 'expected "all" or a list of ranks',
    "LOG_RANK=٣": 'expected "all" or a list of ranks',
    "LOG_RANK=7 NGPU=2": "nothing would be logged, because this run has ranks 0 to 1",
    "LOG_RANK=4,5 NNODES=2 NGPU=2 MASTER_ADDR=a": "nothing would be logged, because this run has ranks 0 to 3",
}
"""Environment variables of the launcher -> text of the line."""

FOLDERS = {
    "": "must be the path of a checkpoint",
    "nowhere": "no such folder",
    "words.txt": "is a file, not a folder",
    "empty": "is empty",
    "gguf": "use the original model in Hugging Face's format",
    "adapter": "use its base model (org/base) here",
    "gpt2": 'model_type "gpt2": expected one of',
    "https://x.org/run": "must be a local path, not a URL",
}
"""Folder of a model -> text of the line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files that the inputs name."""
    path = tmp_path_factory.mktemp("newcomer")
    for name in ("empty", "run", "gguf", "adapter", "gpt2", "broken", "moved", "unread"):
        (path / name).mkdir()
    files = {
        "file.txt": "x",
        "words.txt": "some words\n",
        "axolotl.yaml": "lora_r: 8",
        "content.jsonl": '{"content": "hello"}\n',
        "empty.jsonl": "",
        "number.jsonl": '{"text": 5}\n',
        "messages.jsonl": '{"messages": []}\n',
        "wrapped.json": '{"version": 1, "data": [{"text": "hello"}]}',
        "pretty.json": json.dumps({"version": 1, "data": [{"text": "hello"}]}, indent=2),
        "commas.jsonl": '{"text": "hello"},\n',
        "python.jsonl": "{'text': 'hello'}\n",
        "arrays.jsonl": '["hello"]\n["you"]\n',
        "headless.csv": "Hello there.,1\n",
        "header.csv": "text,id\n",
        "broken/config.toml": "[run",
        "broken/metrics.jsonl": "",
        "moved/config.toml": '[data]\ndataset = "jsonl"\npath = "words.jsonl"',
        "moved/metrics.jsonl": "",
        "unread/config.toml": '[data]\ndataset = "jsonl"\npath = "content.jsonl"\nstore_folder = "stores"',
        "unread/metrics.jsonl": '{"kind": "train", "step": 1, "first_step": 1, "cursor": 8, "global_batch_size": 8, '
        '"skipped_samples": []}\n',
        "run/config.toml": "",
        "gguf/model.gguf": "GGUF",
        "adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"}),
        "gpt2/config.json": json.dumps({"model_type": "gpt2"}),
    }
    for name, content in files.items():
        (path / name).write_text(content)
    (path / "utf16.txt").write_bytes("Hello there.\n".encode("utf-16-le"))
    (path / "utf32.jsonl").write_bytes(b'{"text": "hello"}\n'.decode().encode("utf-32"))
    (path / "paper.pdf").write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    return path


def require_help(line: str, text: str) -> None:
    assert line.count("\n") == 1 and text in line, line
    assert "Traceback" not in line


def line_of(work: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints to stderr before it exits with code 2."""
    with pytest.raises(SystemExit) as exit, one_line_errors():
        work()
    assert exit.value.code == 2
    return capsys.readouterr().err


def start(words: list[str]) -> None:
    """Check a configuration as train.py does before the process group starts, on one rank."""
    config = config_from_command_line(words)
    with config.explained_errors():
        resolve(config, 1)


def test_there_are_at_least_120_inputs():
    assert sum(map(len, (SETTINGS, FILES, DATA, SCRIPTS, VARIABLES, FOLDERS))) >= 120


@pytest.mark.parametrize("words", SETTINGS)
def test_a_wrong_or_foreign_setting_is_helped_at_once(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    require_help(line_of(lambda: start(words.split()), capsys), SETTINGS[words])


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_or_foreign_file_is_helped_at_once(text, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    require_help(line_of(lambda: start(["--config", f"{tmp_path}/run.toml"]), capsys), FILES[text])


@pytest.mark.parametrize("words", DATA)
def test_data_that_cannot_be_read_is_helped_at_once(words, folder):
    text, words = DATA[words], f"--data.store_folder stores --data.dataset {words}"
    done = run_script("scripts/prepare_data.py", *words.split(), folder=folder)
    assert done.returncode == 2
    require_help(done.stderr, text)


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_wrong_or_foreign_argument_of_a_script_is_helped_at_once(command, folder):
    script, *words = shlex.split(command)
    if script == "train_tokenizer":
        pytest.importorskip("tokenizers")
    done = run_script(f"scripts/{script}.py", *words, folder=folder)
    assert done.returncode == 2
    require_help(done.stderr, SCRIPTS[command])


@pytest.mark.parametrize("variables", VARIABLES)
def test_a_wrong_environment_variable_is_helped_at_once(variables, monkeypatch, capsys):
    for name in ("WORLD_SIZE", "RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))

    def launch() -> None:
        check_environment()
        TorchrunOptions.from_environment()

    require_help(line_of(launch, capsys), VARIABLES[variables])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_model_is_helped_at_once(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as error:
        load_model(name)
    require_help(f"{error.value}\n", FOLDERS[name])
