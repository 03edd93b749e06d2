"""Names and values of other trainers."""

import re

import pytest

from tests.base.config.test_load import error_of
from tests.conftest import ROOT
from trainer.base.config.fields import coerce, parse_text, settings
from trainer.base.config.foreign import foreign_names, hint_of_value, read_foreign
from trainer.base.config.render import foreign_as_markdown

SECTIONS = read_foreign()["sections"]
VALUES = [(key, v) for key, hints in read_foreign()["values"].items() for names in hints.values() for v in names]
OWN_SECTIONS = {setting.section for setting in settings().values()}


@pytest.mark.parametrize("name", foreign_names())
def test_each_entry_names_existing_settings_and_known_projects(name):
    entry = foreign_names()[name]
    assert name not in settings() and name == name.lower() and "-" not in name
    cited = re.findall(r"\b([a-z_]+\.[a-z_]+)\b", entry.note.replace("tokenizer.json", ""))
    named = {*entry.use.split(), *(key for key in cited if key.split(".")[0] in OWN_SECTIONS)}
    assert {key for key in named if "overrides" not in key} <= {*settings()}
    assert entry.use or entry.note
    assert set(entry.projects) <= {*read_foreign()["projects"].values()}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_foreign_section_leads_to_one_that_exists(section):
    assert section not in OWN_SECTIONS and SECTIONS[section] in OWN_SECTIONS


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_each_foreign_value_is_refused_and_its_replacement_is_accepted(key, value):
    with pytest.raises(ValueError):
        coerce(parse_text(value, str), settings()[key].type)
    if write := re.match(r"write ([\w-]+)", hint_of_value(key, value)):
        assert parse_text(write[1], settings()[key].type) == write[1]


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "--lora_r 8": "--lora_r: unknown setting; use '--lora.rank'",
        "--lora-r 8": "--lora-r: unknown setting; use '--lora.rank'",
        "--lora_r=8": "--lora_r: unknown setting; use '--lora.rank'",
        "lora_r=8": "lora_r=8: unexpected argument; use '--lora.rank'",
        "--training.lora_r 8": "--training.lora_r: unknown setting; use '--lora.rank'",
        "--lora.r 8": "--lora.r: unknown setting; use '--lora.rank'",
        "--bf16": "--bf16: unknown setting; use '--training.compute_dtype': bf16, which is the default",
        "++optimizer.lr=1": "++optimizer.lr=1: unexpected argument; did you mean '--optimizer.lr 1'?",
        "--checkpoint.interval 5": "--checkpoint.interval: unknown setting; use '--checkpoint.interval_steps'",
        "--path x": "--path: unknown setting; did you mean '--tokenizer.path' or '--data.path'?",
        "--fp8": (
            "--fp8: unknown setting; use '--training.float8': tensorwise or rowwise, with training.float8_exclude; the output "
            "stays in training.compute_dtype"
        ),
        "--optimizer.name adamw_torch": (
            "--optimizer.name adamw_torch: expected one of adamw, muon; write adamw"  # not only the nearest spelling
        ),
    }.items(),
)
def test_a_foreign_name_on_the_command_line_is_translated(words, line):
    assert error_of(words.split()) == line


@pytest.mark.parametrize(
    ("text", "line"),
    {
        "[training]\ntensor_parallel_degree = 2": "[training] tensor_parallel_degree: unknown key; use [parallel] tp",
        "[parallelism]\ntensor_parallel_degree = 2": (
            "[parallelism] tensor_parallel_degree: unknown section; use [parallel] tp"
        ),
        "[parallelism]\nx = 2": "[parallelism]: unknown section; did you mean [parallel]?",
        "[comm]\nx = 2": "[comm]: unknown section; did you mean [distributed]?",
        "learning_rate = 1e-4": "learning_rate = 0.0001: the key is outside any [section]; use [optimizer] lr",
        "[checkpoint]\ninterval = 5": "[checkpoint] interval: unknown key; use [checkpoint] interval_steps",
        "[lora]\nr = 8": "[lora] r: unknown key; use [lora] rank",
        "[optimizer]\nbeta1 = 0.9": (
            "[optimizer] beta1: unknown key; use [optimizer] betas: both decay rates, such as 0.9,0.95"
        ),
    }.items(),
)
def test_a_foreign_name_in_a_file_is_translated(text, line, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    assert error_of(["--config", f"{tmp_path}/run.toml"]) == f"{tmp_path}/run.toml {line}"


@pytest.mark.parametrize(
    ("name", "text", "translated"),
    [
        (
            "zero3.json",
            '{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}',
            ["train_micro_batch_size_per_gpu", "gradient_clipping"],
        ),
        (
            "axolotl.yaml",
            "base_model: x\nmicro_batch_size: 2\nnoisy_embedding_alpha: 5\n",
            ["base_model", "noisy_embedding_alpha"],
        ),
        (
            "args.json",
            '{\n  "neftune_noise_alpha": 5,\n  "group_by_length": true\n}',
            ["neftune_noise_alpha", "group_by_length"],
        ),
        ("own.yml", "training:\n  - 5\n", []),
        ("random.json", "\x00\x00{", []),
    ],
)
def test_a_file_of_another_trainer_is_named_as_such(name, text, translated, tmp_path):
    (tmp_path / name).write_text(text)
    line = error_of(["--config", str(tmp_path / name)])
    assert "expected a TOML file" in line or "not printable" in line
    assert ("settings of another trainer" in line) == bool(translated)
    assert all(f"{word}:" in line for word in translated)


@pytest.mark.parametrize("table", [None, *sorted({key.split(".")[0] for key in settings()})])
@pytest.mark.parametrize(
    ("name", "answer"),
    {
        "neftune_noise_alpha": "NEFTune is not supported",
        "use_dora": "DoRA is not supported",
        "label_smoothing": "docs/python.md",
        "group_by_length": "data.packing",
        "padding_free": "data.document_mask",
        "n_layer": "model.overrides",
        "n_embd": "model.overrides",
        "num_kv_heads": "model.overrides",
    }.items(),
)
def test_a_word_without_a_setting_of_its_own_has_an_answer_in_every_table(name, answer, table):
    assert answer in error_of([f"--{name if table is None else f'{table}.{name}'}", "1"])


def test_the_page_of_foreign_names_is_current():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    assert page.endswith(foreign_as_markdown()), "run scripts/dev/generate_config_docs.py"
