"""The figures in the heads of shipped configurations."""

import re
from unittest import mock

import pytest

from scripts.dev import plan_recipes
from scripts.dev.plan_recipes import PAGE, Head, configurations, figures, page, planned
from tests.commands import run_script
from trainer.base.config.load import load_config
from trainer.base.system.units import GIB
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES
from trainer.tools.planner.estimate import Hardware, margin_bytes
from trainer.tools.planner.limits import GPU_RESERVE_BYTES

RECIPES = sorted(PAGE.parent.glob("*.toml"))
FAMILIES = ("llama3_1", "qwen2_5", "qwen3", "mistral", "ministral3", "smollm3", "olmo2", "olmo3", "granite3")
FAMILIES += ("gemma2", "gemma3", "phi4")
NUMBER = r"[\d,.]+"


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*", text)]


def test_the_page_of_the_recipes_lists_the_heads_of_the_files():
    assert PAGE.read_text() == page()


def test_every_family_has_a_recipe_for_each_method():
    methods = {
        (family, path.stem.split("_")[-2]) for path in RECIPES for family in FAMILIES if path.stem.startswith(family)
    }
    assert methods == {(family, method) for family in FAMILIES for method in ("lora", "dpo", "full")}


@pytest.mark.parametrize("path", configurations(), ids=lambda path: path.stem)
def test_a_head_has_complete_figures_and_keeps_the_margin(path):
    head = Head.of(path)
    if not head.is_complete:
        pytest.skip("not planned yet: run scripts/dev/plan_recipes.py --missing")
    pattern = rf"({NUMBER}) of ({NUMBER}) GiB, {NUMBER} tokens/s, ({NUMBER}) steps in {NUMBER} (days|hours|minutes)"
    peak_gib, memory_gib, steps, _ = re.fullmatch(pattern, head.figures).groups()
    config = load_config(["--config", str(path)], check_files=())
    hardware = Hardware(head.ranks, ACCELERATORS[SHORT_NAMES[head.device]], reserved_bytes=GPU_RESERVE_BYTES)
    assert numbers(steps) == [config.training.steps]
    assert numbers(memory_gib) == [pytest.approx(hardware.accelerator.memory_gib, abs=0.0501)]
    (peak,) = numbers(peak_gib)
    assert peak * GIB + margin_bytes(config, hardware, peak * GIB) < hardware.usable_bytes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_name_of_a_recipe_tells_its_family_method_and_gpus(path):
    family, method, count = re.fullmatch(r"(.+)_(lora|dpo|full)_(\d+)gpus?", path.stem).groups()
    config = load_config(["--config", str(path)], check_files=())
    assert Head.of(path).ranks == int(count)
    assert re.sub(r"\W", "_", f"{config.model.name}_{config.model.size}").startswith(family.split("_")[0].rstrip("4"))
    assert (config.lora.rank is None) == (method == "full") and config.preference.enabled == (method == "dpo")


def test_every_recipe_has_a_head():
    assert set(RECIPES) <= set(configurations())


def test_a_head_equals_the_plan():
    """Of a small model; scripts/dev/plan_recipes.py --check plans all."""
    path = PAGE.parent / "llama3_2_1b_full_1gpu.toml"
    assert numbers(figures(planned(path))) == pytest.approx(numbers(Head.of(path).figures), rel=0.02)


@pytest.fixture
def small(tmp_path):
    """A configuration whose plan takes a second, without figures in its head."""
    path = tmp_path / "small.toml"
    path.write_text('# Small.\n# Planned on 2 x l4:\n\n[model]\nname = "llama3"\nsize = "debug"\n')
    return path


def test_figures_of_a_run_in_epochs_have_no_duration(small):
    small.write_text(f"{small.read_text()}\n[training]\nepochs = 1.5\n")
    text = figures(planned(small))
    assert text.endswith(" tokens/s, 1.5 epochs: the length in steps is known only when the data are prepared")
    assert (
        Head(2, "l4", text)
        .row("small")
        .endswith("| 1.5 epochs: the length in steps is known only when the data are prepared |")
    )


def test_figures_are_written_into_the_head_and_checked(small, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_recipes, "PAGE", tmp_path / "README.md")
    checked = run_script("scripts/dev/plan_recipes.py", "--check", small)
    assert checked.returncode == 1 and checked.stdout.endswith(" (the head says: not planned yet)\n")
    assert not Head.of(small).is_complete
    written = run_script("scripts/dev/plan_recipes.py", "--missing", small)
    figures = Head.of(small).figures
    assert written.returncode == 0 and f"small: {figures} (" in written.stdout
    assert re.fullmatch(r"0\.\d of 22\.0 GiB, [\d,]+ tokens/s, 1,000 steps in [\d.]+ (hours|minutes|seconds)", figures)
    assert small.read_text().startswith(f"# Small.\n# Planned on 2 x l4: {figures}\n\n[model]")
    assert f"| [`small`](small.toml) | 2 x l4 | {figures.split(', ')[0]} | " in (tmp_path / "README.md").read_text()
    planned_before = mock.patch.multiple(plan_recipes, planned=mock.DEFAULT, figures=lambda _: figures)
    with planned_before:
        checked = run_script("scripts/dev/plan_recipes.py", "--check", small)
    assert (checked.returncode, checked.stdout) == (0, f"small: {figures}\n")
    assert run_script("scripts/dev/plan_recipes.py", "--missing", "--check", small).stdout == ""


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("", "{path}: has no line '# Planned on N x DEVICE:'"),
        ("# Planned on 2 x h101: x\n", "{path}: device h101: expected one of "),
    ],
)
def test_a_file_that_cannot_be_planned_is_one_line(tmp_path, head, line):
    path = tmp_path / "small.toml"
    path.write_text(f'{head}[model]\nname = "llama3"\n')
    ended = run_script("scripts/dev/plan_recipes.py", path)
    assert ended.returncode == 2 and ended.stderr.startswith(line.format(path=path)), ended.stderr
    assert len(ended.stderr.splitlines()) == 1
