"""Settings from files and the command line, and the error line of each mistake."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer.base.config import Config, ConfigError, TaskConfig
from trainer.base.config.fields import options, settings
from trainer.base.config.load import load_config
from trainer.base.config.render import compatibility_as_markdown, help_text, settings_as_markdown, to_toml
from trainer.base.config.toml_text import toml_value

DEBUG = str(ROOT / "train_configs" / "debug.toml")


def error_of(argv) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    text = str(error.value)
    assert "\n" not in text
    return text


UNTYPED = "needs the type of its files (set [data] dataset to {}): a path does not tell how its files are read"

COMMAND_LINES = {
    "--activation_checkpoint.save matmuls,atention": (
        "--activation_checkpoint.save matmuls,atention: expected a list of matmuls | attention | reduce_scatters | exchanges; "
        "did you mean 'attention'?"
    ),
    "--model.name lama3": (
        "--model.name lama3: expected one of llama2, llama3, llama3.1, llama3.2, qwen2.5, qwen3, mistral, ministral3, "
        "smollm3, olmo2, olmo3, granite3, gemma2, gemma3, phi, mixtral, olmoe, qwen3-moe, deepseek-v3, gpt-oss, "
        "gemma4, glm-4.5, qwen3-next, qwen3.5, olmo-hybrid, kimi-linear; did you mean 'llama3'?"
    ),
    "--metrics.sinks jsonl,jsonl": "--metrics.sinks jsonl,jsonl: names jsonl twice",
    "--metrics.sinks=": (
        "--metrics.sinks : expected a list of console | jsonl | tensorboard | wandb | mlflow | trackio"
    ),
    "--activation_checkpoint.mode ful": (
        "--activation_checkpoint.mode ful: expected one of none, full, selective, budget; did you mean 'full'?"
    ),
    "--activation_checkpoint.memory_budget 1.5": "--activation_checkpoint.memory_budget 1.5: must be at most 1",
    "--activation_checkpoint.every_n_blocks 0": "--activation_checkpoint.every_n_blocks 0: must be at least 1",
    "--parallel.pipeline_schedule 1f1b": (
        "--parallel.pipeline_schedule 1f1b: expected one of GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, "
        "ZBVZeroBubble, DualPipeV; did you mean '1F1B'?"
    ),
    "--parallel.tp 0": "--parallel.tp 0: must be at least 1",
    "--training.stpes 5": "--training.stpes: unknown setting; did you mean '--training.steps'?",
    "--trainin.steps 5": "--trainin.steps: unknown setting; did you mean '--training.steps'?",
    "--steps 5": "--steps: unknown setting; did you mean '--training.steps'?",
    "--lr 1e-4": "--lr: unknown setting; did you mean '--optimizer.lr'?",
    "--qqqq 5": "--qqqq: unknown setting",
    "--training 5": "--training: unknown setting; did you mean '--training.steps'?",
    "--training.steps.x 5": "--training.steps.x: unknown setting; did you mean '--training.steps'?",
    "--confg x.toml": "--confg: unknown setting; did you mean '--config'?",
    "--dryrun": "--dryrun: unknown setting; did you mean '--dry-run'?",
    "--dry_run": "--dry_run: unknown setting; did you mean '--dry-run'?",
    "--dry-run=true": "--dry-run: takes no value",
    "--print-confg 1": "--print-confg: unknown setting; did you mean '--print-config'?",
    "steps=5": "steps=5: unexpected argument; did you mean '--training.steps'?",
    "-training.steps 5": "-training.steps: unexpected argument; did you mean '--training.steps'?",
    "-- 5": "--: unexpected argument; write settings as --section.key value",
    "--training.steps": "--training.steps: expects a value",
    "--training.steps --run.seed 1": "--training.steps: expects a value",
    "--config": "--config: expects a value",
    "--training.steps 1e3": "--training.steps 1e3: expected an integer; write 1000",
    "--training.steps 5.0": "--training.steps 5.0: expected an integer; write 5",
    "--training.steps=": "--training.steps : expected an integer",
    "--training.steps 0": "--training.steps 0: must be at least 1",
    "--training.steps -5": "--training.steps -5: must be at least 1",
    "--training.steps none": "--training.steps none: expected an integer",
    "--training.steps 5 --training.steps 6": "--training.steps 6: --training.steps is given twice, first as 5; give it once",
    "--training.batch_schedule 64": (
        "--training.batch_schedule is a table: set one of its entries with --training.batch_schedule.NAME VALUE, "
        "or empty it with --training.batch_schedule {}"
    ),
    "--training.batch_schedule.09 64": (
        "--training.batch_schedule.09 64: '09' must be the number of completed steps after which the size changes, such as 1000"
    ),
    "--training.batch_schedule.0 64": (
        "--training.batch_schedule.0 64: '0' must be the number of completed steps after which the size changes, such as 1000"
    ),
    "--training.batch_schedule.9 0": "--training.batch_schedule.9 0: must be at least 1",
    "--training.batch_schedule.9 many": "--training.batch_schedule.9 many: expected an integer",
    "--training.batch_schedule.9 32": (
        "--training.batch_schedule.9 32: must differ from the size of the steps before, 32"
    ),
    "--training.batch_schedule.9 64 --training.batch_schedule.20 64": (
        "--training.batch_schedule.20 64: must differ from the size of the steps before, 64"
    ),
    "--training.batch_schedule.9 64 --training.steps 9": (
        "--training.batch_schedule.9 64: no step would have this size, because the run ends after [training] steps = 9"
    ),
    "--rampup-batch-size 64": (
        "--rampup-batch-size: unknown setting; use '--training.batch_schedule': each size with the number of steps before it"
    ),
    "--optimizer.lr fast": "--optimizer.lr fast: expected a number",
    "--optimizer.lr 0": "--optimizer.lr 0: must be above 0",
    "--optimizer.lr nan": "--optimizer.lr nan: must be finite",
    "--run.seed 1" + 400 * "0": "--run.seed 1" + 400 * "0" + ": must be at most 9223372036854775807",
    "--optimizer.lr inf": "--optimizer.lr inf: must be finite",
    "--optimizer.betas 0.9": "--optimizer.betas 0.9: expected a list of 2 numbers",
    "--optimizer.betas 0.9,high": "--optimizer.betas 0.9,high: expected a list of 2 numbers",
    "--optimizer.betas 0.9,1.5": "--optimizer.betas 0.9,1.5: must be at most 0.999999",
    "--optimizer.name adam": "--optimizer.name adam: expected one of adamw, muon; did you mean 'adamw'?",
    "--training.max_norm 0": "--training.max_norm 0: must be above 0",
    "--training.max_norm off": "--training.max_norm off: expected a number or none; write none",
    "--checkpoint.enabled yes": "--checkpoint.enabled yes: expected true or false; write true",
    "--checkpoint.enabled": "--checkpoint.enabled: expects a value",
    "--metrics.tensorboard false": (
        '--metrics.tensorboard: unknown setting; [metrics] sinks replaces it, a list with or without "tensorboard"'
    ),
    "--data.num_workers 2": (
        "--data.num_workers: unknown setting; [data] prefetch replaces it, the number of microbatches that a thread loads ahead"
    ),
    "--metrics.sinks console,tensorbord": (
        "--metrics.sinks console,tensorbord: expected a list of console | jsonl | tensorboard | wandb | mlflow | trackio; "
        "did you mean 'tensorboard'?"
    ),
    "--checkpoint.enabled True": "--checkpoint.enabled True: expected true or false; did you mean 'true'?",
    "--training.max_norm None": "--training.max_norm None: expected a number or none; did you mean 'none'?",
    "--data.dataset JSONL": (
        "--data.dataset JSONL: expected one of python_stdlib, text, jsonl, parquet, csv, huggingface, tokens, chat, preference, "
        "prepared; did you mean 'jsonl'?"
    ),
    "--run.seed -1": "--run.seed -1: must be at least 0",
    "--run.name a/b": "--run.name a/b: must be a single folder name",
    "--run.output_folder=": "--run.output_folder : must not be empty",
    "--run.name=  ": "--run.name   : must be a single folder name",
    "--run.name=a\nb": "--run.name a\\nb: must be printable text",
    "--training.steps 9999999999999": "--training.steps 9999999999999: must be at most 1000000000000",
    "--resilience.hang_timeout_s 600": (
        "--resilience.hang_timeout_s 600: must be below [distributed] timeout_s, 600: otherwise a collective fails before the "
        "hang is reported"
    ),
    "--distributed.timeout_s 1e300": "--distributed.timeout_s 1e300: must be at most 10000000",
    "--run.name a@best": "--run.name a@best: must not end in @best, which stands for the best checkpoint of a run",
    "--run.name ..": "--run.name ..: must be a single folder name",
    f"--run.name {'é' * 128}": f"--run.name {'é' * 128}: exceeds 255 bytes, the limit for a folder name",
    "--evaluation.datasets.wiki jsonl:/nope": ("--evaluation.datasets.wiki jsonl:/nope: no such file or folder"),
    f"--checkpoint.init_from {__file__}": f"--checkpoint.init_from {__file__}: is a file, not a folder",
    "--data.path my.txt": f"--data.path my.txt: {UNTYPED.format('text')}",
    "--data.path x.jsonl.gz": (f"--data.path x.jsonl.gz: {UNTYPED.format('jsonl (texts), chat or preference')}"),
    "--data.dataset chat --data.columns.questoin q": (
        "--data.columns.questoin q: unknown field; it must be one of messages, conversations, prompt, completion, instruction, "
        "input, output, question, answer, chosen, rejected, system, tools, role, content; did you mean 'question'?"
    ),
    "--data.dataset chat --data.path no/such.jsonl": ("--data.path no/such.jsonl: no such file or folder"),
    "--data.dataset chat --data.path tests/such": ("--data.path tests/such: no such file or folder"),
    "--data.held_out_fraction 0.9": "--data.held_out_fraction 0.9: must be at most 0.5",
    "--lr_schedule.name cosin": (
        "--lr_schedule.name cosin: expected one of cosine, linear, warmup_stable_decay, constant, range_test; "
        "did you mean 'cosine'?"
    ),
    "--parallel.reshard_after_forward alwys": (
        "--parallel.reshard_after_forward alwys: expected one of default, always, never or an integer; "
        "did you mean 'always'?"
    ),
    "--parallel.reshard_after_forward 1": (
        "--parallel.reshard_after_forward 1: must be at least 2 if it is a number of ranks"
    ),
    "--parallel.dp_shard 0": "--parallel.dp_shard 0: must be at least 1, or -1 for all remaining ranks",
    "--parallel.dp_shard -2": "--parallel.dp_shard -2: must be at least -1",
    "--model.overrides 4": "--model.overrides is a table: set one of its entries with --model.overrides.NAME VALUE, "
    "or empty it with --model.overrides {}",
    "--tokenizer.backend tiktoken --tokenizer.path no/such": "--tokenizer.path no/such: no such file",
    "--tokenizer.path x": "--tokenizer.path x: no such file",
    "--tokenizer.path pyproject.toml": (
        "--tokenizer.path pyproject.toml: the kind of this tokenizer is not clear from its name; set tokenizer.backend to "
        "huggingface, sentencepiece, tekken, tiktoken"
    ),
    "--tokenizer.path docs": (
        "--tokenizer.path docs: this folder contains none of tokenizer.json, tokenizer.model, tekken.json"
    ),
    "--data.dataset text --data.path no/such": ("--data.path no/such: no such file or folder"),
    "--data.path x": (
        f"--data.path x: {UNTYPED.format('text, jsonl, parquet, csv, huggingface, tokens, chat or preference')}"
    ),
    "--model.overrides.a.b 4": "--model.overrides.a.b 4: 'a.b' is not a valid name",
    "--optimizer.lr 1" + 400 * "0": "--optimizer.lr 1" + 400 * "0" + ": expected a number",
    f"--model.overrides.dim {2**63}": f"--model.overrides.dim {2**63}: must be a 64-bit integer",
    f"--parallel.reshard_after_forward -{10**400}": (
        f"--parallel.reshard_after_forward -{10**400}: must be a 64-bit integer"
    ),
}


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_a_wrong_command_line_is_an_error_of_one_line(command):
    words = [command] if "=" in command and command.startswith("--") else command.split()
    assert error_of(words) == COMMAND_LINES[command]


FILES = {
    "[training]\nstpes = 5": "{f} [training] stpes: unknown key; did you mean 'steps'?",
    "[training]\nlr = 5": "{f} [training] lr: unknown key; did you mean [optimizer] lr?",
    "[trainng]\nsteps = 5": "{f} [trainng]: unknown section; did you mean [training]?",
    "steps = 5": "{f} steps = 5: the key is outside any [section]; did you mean [training] steps?",
    "training = 5": "{f} training = 5: the key is outside any [section]; write [training] as a table",
    "[training]\nsteps = 'ten'": '{f} [training] steps = "ten": expected an integer',
    "[training]\nsteps = true": "{f} [training] steps = true: expected an integer",
    "[training]\nsteps = 5.0": "{f} [training] steps = 5.0: expected an integer; write 5",
    "[training]\nsteps = [5]": "{f} [training] steps = [5]: expected an integer",
    "[training]\nlocal_batch_size = -3": "{f} [training] local_batch_size = -3: must be at least 1",
    "[training.steps]\na = 1": "{f} [training] steps = {{ a = 1 }}: expected an integer",
    "[training]\nsteps = 2024-01-01": "{f} [training] steps = 2024-01-01: expected an integer",
    "[optimizer]\nlr = '3e-4x'": '{f} [optimizer] lr = "3e-4x": expected a number',
    "[optimizer]\nlr = nan": "{f} [optimizer] lr = nan: must be finite",
    "[optimizer]\nbetas = [0.9]": "{f} [optimizer] betas = [0.9]: expected a list of 2 numbers",
    "[checkpoint]\nenabled = 1": "{f} [checkpoint] enabled = 1: expected true or false; write true",
    "[metrics]\ntensorboard = true": (
        '{f} [metrics] tensorboard: unknown key; [metrics] sinks replaces it, a list with or without "tensorboard"'
    ),
    "[model.overrides]\n'n layers' = 4": "{f} [model.overrides] n layers = 4: 'n layers' is not a valid name",
    "[optimizer]\nlr = 1" + 400 * "0": "{f} [optimizer] lr = 1" + 400 * "0" + ": expected a number",
    "[model]\noverrides = 4": "{f} [model] overrides = 4: expected a table",
    "[model.overrides]\nn_layers = [[4]]": (
        "{f} [model.overrides] n_layers = [[4]]: expected a number or true or false or text or a list of values"
    ),
    "[training]\ncompute_dtype = 'bf1'": (
        "{f} [training] compute_dtype = \"bf1\": expected one of bf16, fp32; did you mean 'bf16'?"
    ),
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_is_an_error_of_one_line(text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert error_of(["--config", str(file)]) == FILES[text].format(f=file)


@pytest.mark.parametrize(
    "text", ["[training\nsteps = 5\n", "[training]\nsteps = 5\nsteps = 6\n", "=", "[run]\nname = 'x"]
)
def test_invalid_toml_is_an_error_with_its_position(text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    line = error_of(["--config", str(file)])
    assert line.startswith(f"--config {file}: not valid TOML: ")
    assert line.endswith(")")  # (at line 1, column 10)


@pytest.mark.parametrize(
    "text",
    [
        "steps = 1" + 5000 * "0",
        "steps = 0x1" + 5000 * "0",
        "steps" + 2000 * ".a" + " = 1",
        "steps = " + 2000 * "[" + 2000 * "]",
        "steps = " + 2000 * "{a=" + "1" + 2000 * "}",
    ],
    ids=["digits", "hexadecimal digits", "keys", "lists", "tables"],
)
def test_values_that_are_too_long_or_nested_too_deep_are_an_error(text, tmp_path):
    (tmp_path / "x.toml").write_text(f"[training]\n{text}")
    line = error_of(["--config", f"{tmp_path}/x.toml"])
    assert line == f"--config {tmp_path}/x.toml: a value is too long or nested too deep"


def test_the_settings_of_a_run_of_an_earlier_version_are_read(tmp_path, capsys):
    """Its config.toml contains all settings of that version."""
    file = tmp_path / "config.toml"
    file.write_text("[data]\nnum_workers = 2\nprefetch = 3")
    assert load_config(["--config", str(file)]).data.prefetch == 3
    replaces = "[data] prefetch replaces it, the number of microbatches that a thread loads ahead"
    assert capsys.readouterr().err.endswith(f" warning: {file} [data] num_workers has no effect: {replaces}\n")


def test_a_missing_file_suggests_a_similar_name(tmp_path):
    (tmp_path / "debug.toml").touch()
    assert error_of(["--config", f"{tmp_path}/debgu.toml"]) == (
        f"--config {tmp_path}/debgu.toml: no such file; did you mean '{tmp_path}/debug.toml'?"
    )


def test_a_folder_or_a_file_that_is_not_utf8_is_an_error(tmp_path):
    assert error_of(["--config", str(tmp_path)]) == f"--config {tmp_path}: expected a TOML file, got a folder"
    (tmp_path / "x.toml").write_bytes(b"[run]\nname = '\xff'")
    assert error_of(["--config", f"{tmp_path}/x.toml"]) == f"--config {tmp_path}/x.toml: not UTF-8 text (byte 14)"
    assert error_of(["--config", "a.toml", "--config", "b.toml"]) == (
        "--config b.toml: --config is given twice, first as a.toml; give it once"
    )


def test_the_command_line_overrides_the_file():
    config = load_config(
        [
            *("--training.steps", "7", "--training.compute_dtype=bf16", "--metrics.sinks", "console,jsonl"),
            *("--parallel.dp_shard", "-1", "--optimizer.betas", "[0.8, 0.9]", "--training.max_norm", "none"),
            *("--model.overrides.n_layers", "4", "--model.overrides.tied_embeddings=true", "--run.seed=1_000"),
            *("--model.overrides.rope_theta", "1e4", "--parallel.reshard_after_forward", "4"),
        ]
    )
    assert config.training.steps == 7
    assert config.training.compute_dtype == "bf16"
    assert config.metrics.sinks == ("console", "jsonl")
    assert config.parallel.dp_shard == -1
    assert config.parallel.reshard_after_forward == 4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.training.max_norm is None
    assert config.run.seed == 1000
    assert config.model.overrides == {"n_layers": 4, "tied_embeddings": True, "rope_theta": 1e4}
    assert config.run.name == "debug"


def test_model_overrides_of_file_and_command_line_are_merged(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("[model]\noverrides = { n_layers = 2, dim = 64 }\n[training]\nmax_norm = 'none'")
    config = load_config(["--config", str(file), "--model.overrides.dim", "32"])
    assert config.model.overrides == {"n_layers": 2, "dim": 32}
    assert config.training.max_norm is None


def test_a_printed_configuration_loads_as_an_equal_one(tmp_path):
    config = load_config(
        ["--model.overrides.n_layers", "4", "--run.output_folder", 'a "b" \\ ü', "--optimizer.lr", "1e-7"]
    )
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(["--config", str(tmp_path / "again.toml")]) == config


def test_every_setting_has_a_docstring_and_is_in_help_and_docs():
    text, table = help_text(), (ROOT / "docs" / "configuration.md").read_text()
    for setting in settings().values():
        assert setting.doc
        assert f"--{setting.key}" in text
        for option in options(setting.key).values():
            assert f"      .{option.name}: " in text
            assert option.doc in text
    assert table.endswith(settings_as_markdown()), "run scripts/dev/generate_config_docs.py"
    pairs = (ROOT / "docs" / "compatibility.md").read_text()
    assert pairs.endswith(compatibility_as_markdown()), "run scripts/dev/generate_config_docs.py"


def test_defaults_satisfy_their_constraints(tmp_path):
    (tmp_path / "defaults.toml").write_text(to_toml(Config()))
    load_config(["--config", str(tmp_path / "defaults.toml")])


@pytest.mark.parametrize("value", ["plain", 'a"b', "tab\tnew\nline", "back\\slash", "\x7f\x00", "日本"])
def test_strings_round_trip_through_toml(value):
    import tomli

    assert tomli.loads(f"x = {toml_value(value)}") == {"x": value}


@pytest.mark.parametrize(
    "command",
    [
        "--evaluation.datasets.a chat: --data.chat_template chatml",
        "--data.packing best-fit --data.long_documents drop",
        "--parallel.pipeline_stages_per_rank 2 --activation_checkpoint.memory_budget 0.2",
    ],
)
def test_met_conditions_and_details_of_features_that_are_off_are_accepted(command):
    load_config(command.split())


@pytest.mark.parametrize(
    ("argv", "code", "output"),
    [
        (["--help"], 0, "--training.steps: an integer; default 1000 (steps, at least 1, at most 1000000000000)"),
        (["--print-config"], 0, "[training]\nsteps = 300\n"),
        (["--training.stpes", "5"], 2, "--training.stpes: unknown setting; did you mean '--training.steps'?\n"),
        (["--data.text_field", "x"], 2, "--data.text_field x: has an effect only with"),
    ],
)
def test_help_and_errors_in_settings_import_neither_torch_nor_numpy(argv, code, output):
    program = (
        f"import runpy, sys; sys.argv = ['train.py', *{argv}]\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        f"except SystemExit as e: assert e.code == {code}, e.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "flags", "key"),
    [
        (
            "[checkpoint]\ninit_from = 'x'\n[lora]\nrank = 8\nalpha = 4.0\ndropout = 0.1",
            "--lora.rank none",
            "lora.dropout",
        ),
        ("[optimizer]\nname = 'muon'\nmuon_momentum = 0.5", "--optimizer.name adamw", "optimizer.muon_momentum"),
        (
            "[samples]\nprompts = ['a']\ninterval_steps = 5\ntemperature = 0.5",
            "--samples.prompts []",
            "samples.temperature",
        ),
        (
            "[training]\nfloat8 = 'rowwise'\nfloat8_exclude = ['output']",
            "--training.float8 none",
            "training.float8_exclude",
        ),
        (
            "[lr_schedule]\nname = 'warmup_stable_decay'\ndecay_steps = 5",
            "--lr_schedule.name cosine",
            "lr_schedule.decay_steps",
        ),
        (  # what depends on something that depends on the flag
            "[optimizer]\nema_decay = 0.9\n[checkpoint]\nexport_huggingface = true\nexport_averaged = true",
            "--checkpoint.enabled false",
            "checkpoint.export_averaged",
        ),
    ],
)
def test_one_flag_switches_off_what_a_file_sets(text, flags, key, tmp_path):
    (tmp_path / "a.toml").write_text(text)
    section, name = key.split(".")
    default, path = getattr(getattr(Config(), section), name), ["--config", str(tmp_path / "a.toml")]
    given = getattr(getattr(load_config(path, check_files=()), section), name)
    assert given != default
    assert getattr(getattr(load_config([*path, *flags.split()], check_files=()), section), name) == default
    again = ",".join(given) if isinstance(given, list) else str(given).lower()
    assert "has an effect only with" in error_of(
        [*path, *flags.split(), f"--{key}", again]
    )  # the user's own words are not undone


def test_a_flag_empties_a_table_of_the_file(tmp_path):
    (tmp_path / "a.toml").write_text("[model]\noverrides = { n_layers = 3, dim = 64 }")
    path = ["--config", str(tmp_path / "a.toml")]
    assert load_config([*path, "--model.overrides", "{}"]).model.overrides == {}
    assert load_config([*path, "--model.overrides="]).model.overrides == {}
    assert load_config([*path, "--model.overrides", "{}", "--model.overrides.dim", "32"]).model.overrides == {"dim": 32}


def test_the_length_of_a_run_on_the_command_line_replaces_the_one_in_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 7\n")
    by_epochs = load_config(["--config", str(file), "--training.epochs", "2"])
    assert by_epochs.training.epochs == 2 and by_epochs.training.steps == 1000
    file.write_text(to_toml(by_epochs))
    assert load_config(["--config", str(file)]) == by_epochs
    by_steps = load_config(["--config", str(file), "--training.steps", "5"])
    assert by_steps.training.epochs is None and by_steps.training.steps == 5
    assert load_config(["--config", str(file), "--training.epochs", "none"]).training.epochs is None


def test_a_run_has_steps_or_epochs_but_not_both(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 7\nepochs = 1.5\n")
    assert f"{file} [training] epochs = 1.5: is incompatible with [training] steps" in error_of(["--config", str(file)])
    assert error_of(["--training.epochs", "0"]) == "--training.epochs 0: must be above 0"


def test_prompts_contain_commas_spaces_and_line_breaks(tmp_path):
    prompts = ("Hello, world ", "def f():\n\treturn ")
    config = load_config(["--samples.prompts", toml_value(prompts)])
    assert config.samples.prompts == prompts
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert load_config(["--config", str(file)]) == config
    for text in ("Hello, world", "[INST] Hello, world [/INST]", "[1, 2", "[x] = y"):
        assert load_config(["--samples.prompts", text]).samples.prompts == (text,)
    assert load_config(["--samples.prompts", "[]"]).samples.prompts == ()
    for text in ('["a", 3]', '["a"', "[ 'a' b]"):
        assert error_of(["--samples.prompts", text]) == f"--samples.prompts {text}: expected a list of names"
    assert error_of(["--samples.prompts", "a\x1b"]).endswith(": must be printable text")


def test_reused_reserved_tokens_may_have_any_name_and_round_trip(tmp_path):
    text = """[tokenizer]\nreuse_reserved_tokens = { "<|im_start|>" = "<|reserved_special_token_0|>" }\n"""
    (tmp_path / "run.toml").write_text(text)
    config = load_config(["--config", str(tmp_path / "run.toml")])
    assert dict(config.tokenizer.reuse_reserved_tokens) == {"<|im_start|>": "<|reserved_special_token_0|>"}
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(["--config", str(tmp_path / "again.toml")]).tokenizer == config.tokenizer


# ---------------------------------------------------------------- tables of dataclasses

TASKS = """
[[evaluation.tasks]]
name = "arc-easy"
path = "python_idioms"
limit = 5
[[evaluation.tasks]]
name = "lambada"
path = "python_idioms"
kind = "continuation"
"""


def tasks_of(tmp_path, text, *argv):
    (tmp_path / "tasks.toml").write_text(text)
    return load_config(["--config", str(tmp_path / "tasks.toml"), *argv]).evaluation.tasks


def test_an_array_of_tables_and_a_table_of_tables_are_the_same(tmp_path):
    tasks = tasks_of(tmp_path, TASKS)
    assert [*tasks] == ["arc-easy", "lambada"]
    assert tasks["arc-easy"] == TaskConfig(path="python_idioms", limit=5)
    tables = TASKS.replace("[[evaluation.tasks]]\nname", "#")
    for name in tasks:
        tables = tables.replace(f'# = "{name}"', f"[evaluation.tasks.{name}]")
    assert tasks_of(tmp_path, tables) == tasks


def test_a_flag_changes_one_option_or_adds_a_task_or_removes_all(tmp_path):
    tasks = tasks_of(
        tmp_path, TASKS, "--evaluation.tasks.arc-easy.limit", "7", "--evaluation.tasks.arc-easy.metrics", "acc"
    )
    assert tasks["arc-easy"] == TaskConfig(path="python_idioms", limit=7, metrics=("acc",))
    added = tasks_of(
        tmp_path, TASKS, "--evaluation.tasks.new", '{ path = "python_idioms", kind = "exact", stop = ["a,b"] }'
    )
    assert added["new"] == TaskConfig(path="python_idioms", kind="exact", stop=("a,b",))
    assert tasks_of(tmp_path, TASKS, "--evaluation.tasks", "{}") == {}


def test_tasks_round_trip_through_toml(tmp_path):
    (tmp_path / "tasks.toml").write_text(TASKS)
    config = load_config(["--config", str(tmp_path / "tasks.toml")])
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(["--config", str(tmp_path / "again.toml")]) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[evaluation.tasks]]\nlimit = 3", "[[evaluation.tasks]] { limit = 3 }: expected a table with a name"),
        (TASKS + TASKS, '[[evaluation.tasks]] name = "arc-easy": another table has this name'),
        ("[evaluation]\ntasks = 3", "[evaluation] tasks = 3: expected a table"),
        ("[evaluation.tasks]\na = 3", "[evaluation.tasks] a = 3: expected a table with one or more of path, kind"),
        ("[evaluation.tasks.a]", "[evaluation.tasks] a = {}: expected a table with one or more of path, kind"),
        ("[evaluation.tasks.a]\npat = 'x'", '[evaluation.tasks.a] pat = "x": unknown option pat; it is one of path'),
        ("[evaluation.tasks.a]\nlimit = -1", "[evaluation.tasks.a] limit = -1: must be at least 0"),
        ("[evaluation.tasks.'a b']\nlimit = 1", "[evaluation.tasks.a b] limit = 1: 'a b' is not a valid name"),
        ("[evaluation.tasks.a]\nlimit = 1", '[evaluation.tasks.a] path = "" (default): expected a file of questions'),
        (
            TASKS + "metrics = ['acc_norm']",
            'metrics = ["acc_norm"]: acc_norm is no metric of kind = continuation, which has',
        ),
        (TASKS + "metrics = ['acc', 'acc']", 'metrics = ["acc", "acc"]: names acc twice'),
        (TASKS + "stop = ['a']", 'stop = ["a"]: has no effect on a task of kind = continuation'),
    ],
)
def test_a_wrong_table_is_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        tasks_of(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["arc-easy.limt", "3"], "--evaluation.tasks.arc-easy.limt 3: unknown option limt; it is one of"),
        (["arc-easy.limit", "x"], "--evaluation.tasks.arc-easy.limit x: expected an integer"),
        (["arc-easy.kind", "exac"], "expected one of choices, continuation, exact; did you mean 'exact'?"),
        (["arc-easy", "3"], "--evaluation.tasks.arc-easy 3: expected a table with one or more of path"),
        (["arc-easy", "{ limit = 'x' }"], "--evaluation.tasks.arc-easy { limit = 'x' }, limit: expected an integer"),
        (["arc-easy.answer_pattern", "("], "has no effect on a task of kind = choices"),
    ],
)
def test_a_wrong_option_of_a_flag_is_one_line(tmp_path, argv, message):
    with pytest.raises(ConfigError) as error:
        tasks_of(tmp_path, TASKS, f"--evaluation.tasks.{argv[0]}", argv[1])
    assert message in str(error.value)


def test_each_of_two_flags_about_one_task_has_its_own_origin(tmp_path):
    flags = ["--evaluation.tasks.arc-easy.limit", "7", "--evaluation.tasks.arc-easy.max_seq_len", "4096"]
    with pytest.raises(ConfigError, match=r"^--evaluation.tasks.arc-easy.max_seq_len 4096: must be at most"):
        tasks_of(tmp_path, TASKS, *flags, "--evaluation.tasks.lambada.limit", "3")


def test_a_task_with_the_name_of_a_dataset_is_named_with_its_origin(tmp_path):
    taken = TASKS + '[evaluation.datasets]\nlambada = "text:a.txt"\n'
    with pytest.raises(ConfigError) as error:
        tasks_of(tmp_path, taken)
    message = 'kind = "continuation": the name of a task must differ from those of the evaluation datasets'
    assert str(error.value).endswith(f"[evaluation.tasks.lambada] {message}")
