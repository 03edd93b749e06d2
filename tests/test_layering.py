"""Layers of folders: a module imports lower layers or its own folder, and only at the top of its file. Other rules of code."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

WINGS: tuple[set[str], ...] = (
    {"trainer.base", "models"},  # what everything stands on
    {"trainer"},  # training: what stands directly in trainer/
    {"trainer.tools"},  # planning, reports, comparisons
    {"train", "trainer.launch", "scripts"},
)
LAYERS: tuple[set[str], ...] = (
    {"trainer.base.system", "models", "trainer.batch", "trainer.state"},
    {"trainer.base.config"},
    {"trainer.runtime", "trainer.data"},
    {"trainer.objective", "trainer.adapters"},
    {"trainer.optim", "trainer.parallel", "trainer.resilience", "trainer.checkpoint"},
    {"trainer.evaluate", "trainer.inference"},
    {"trainer.tasks"},
    {"trainer.run"},
    {"trainer.engine"},
    {"trainer.trainer", "trainer.initial_model"},
    {"trainer.build"},
    {"trainer.tools.planner"},
    {"trainer.tools.report", "trainer.tools.testing"},
    {"trainer.tools.trial"},
    {"trainer.tools.dry_run"},
    {"train", "trainer.launch", "scripts"},
)
INNER_LAYERS: dict[str, tuple[set[str], ...]] = {
    "trainer.data": (
        {"trainer.data.tokenizer", "trainer.data.json_text"},
        {"trainer.data.chat", "trainer.data.sources", "trainer.data.store"},
        {"trainer.data.sampling", "trainer.data.tasks"},
        {"trainer.data.prepare"},
        {"trainer.data.datasets"},
        {"trainer.data.build"},
    ),
    "trainer.checkpoint": (
        {"trainer.checkpoint"},  # saving and resuming
        {"trainer.checkpoint.formats"},
    ),
}
LIBRARIES = {  # beside the standard library; a folder that is not listed may import any dependency
    "models": {"torch"},
    "trainer.batch": {"torch"},
    "trainer.base.system": {"tqdm", "xxhash"},
    "trainer.state": set(),
    "trainer.base.config": {"tomli"},
    "trainer.launch": {"torch"},
}
MAY_IMPORT_INSIDE = {
    "train": "a wrong setting is reported without importing torch",
    "trainer.launch": "a wrong setting is reported without importing torch",
    "scripts.prepare_data": "worker processes, which import the script, do not import torch",
    "trainer.tools.report.plan": "a page without a plan needs no torch",
    "trainer.run.sinks.tensorboard": "only the rank that writes imports it",
    "trainer.run.sinks.services": "optional packages, which only the rank that writes imports",
}
MAY_NAME_CUDA = {"trainer.runtime.device", "trainer.runtime.host_memory"}
MAY_IMPORT_CONFIG = {"trainer.base.config", "trainer.run", "trainer.engine", "trainer.trainer", "trainer.initial_model"} | {
    "trainer.build", "trainer.tools.dry_run", "trainer.tools.trial", "trainer.tools.planner", "trainer.tools.testing",
    "train", "scripts",
}  # fmt: skip

EFFECT = re.compile(
    r"_?(open|fdopen|read|load|restore|rewind|start|restart|run|verify|submit|Popen|ProcessPoolExecutor)(_.*)?|digest_of"
)
"""Names of functions that read files, start processes or threads, or restore a state."""
MAY_HAVE_EFFECTS = {
    "HashingFile": "a file",
    "SignalListener": "signals arrive during the imports",
    "StragglerDetector": "start only sets its counters",
    "Runs": "parity's runs are those of a command line, which is checked first",
}

SOURCES = sorted([ROOT / "train.py", *(p for f in ("trainer", "models", "scripts") for p in (ROOT / f).rglob("*.py"))])


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str, layers: tuple[set[str], ...]) -> str | None:
    """The entry of the layers that the module is or lies in."""
    found = [f for layer in layers for f in layer if module == f or module.startswith(f + ".")]
    return max(found, key=len, default=None)


def layer_of(folder: str, layers: tuple[set[str], ...]) -> int:
    return next(i for i, layer in enumerate(layers) if folder in layer)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from trainer.runtime import device` names a module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_imports_only_lower_layers_and_its_own_folder(path):
    module = name_of(path)
    targets = [
        t for t in imports(ast.parse(path.read_text())) if t.partition(".")[0] in ("trainer", "models", "scripts")
    ]
    inner = next((layers for folder, layers in INNER_LAYERS.items() if module.startswith(folder + ".")), ())
    for layers in (WINGS, LAYERS, inner) if targets else ():
        own = folder_of(module, layers)
        assert own is not None or not layers, f"{module} lies in no folder of the layers"
        for target in targets:
            folder = folder_of(target, layers)
            if folder is None:
                assert layers is inner, f"{module} imports {target}, which lies in no folder of the layers"
            elif folder != own:
                assert layer_of(folder, layers) < layer_of(own, layers), f"{module} imports {target}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_lower_layers_import_few_libraries(path):
    folder = folder_of(name_of(path), LAYERS)
    if folder in LIBRARIES:
        found = {target.partition(".")[0] for target in imports(ast.parse(path.read_text()))}
        assert found <= LIBRARIES[folder] | {"trainer", "models"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_stand_at_the_top_of_a_file(path):
    tree = ast.parse(path.read_text())
    inside = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and list(imports(f))]
    assert not inside or name_of(path) in MAY_IMPORT_INSIDE, f"imports inside {inside[0].name}"


def test_modules_have_no_import_cycle():
    graph = {name_of(p): set(imports(ast.parse(p.read_text()))) for p in SOURCES}
    remaining = {
        m: {n for i in targets for n in (i, i.rpartition(".")[0]) if n in graph} - {m} for m, targets in graph.items()
    }
    while remaining:
        leaves = {m for m, targets in remaining.items() if not targets & set(remaining)}
        assert leaves, f"a cycle among {sorted(remaining)}"
        remaining = {m: targets for m, targets in remaining.items() if m not in leaves}


def test_resolving_a_run_does_not_load_the_compiler():
    """It takes a second, which the launcher and all commands without a step save."""
    graph = {name_of(p): set(imports(ast.parse(p.read_text()))) for p in SOURCES}
    loaded, remaining = set(), {"trainer.run.resolve"}
    while remaining:
        loaded |= remaining
        targets = {target for module in remaining for target in graph.get(module, ())}
        remaining = (targets | {target.rpartition(".")[0] for target in targets}) - loaded
    assert "trainer.parallel.stages" in loaded
    compiler = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining")
    assert not [module for module in loaded if module.startswith(compiler)]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_runtime_names_cuda(path):
    assert name_of(path) in MAY_NAME_CUDA or "cuda" not in path.read_text().lower()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_take_their_own_section(path):
    """The complete `Config` is imported only where a run is put together."""
    if folder_of(name_of(path), LAYERS) not in MAY_IMPORT_CONFIG:
        assert "trainer.base.config.Config" not in set(imports(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_building_an_object_reads_no_file_and_starts_nothing(path):
    """Functions with such effects have names of their own, such as `open_complete`, called where a reader sees them."""
    for cls in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        constructors = [f for f in cls.body if getattr(f, "name", "") in ("__init__", "__post_init__")]
        functions = [node.func for f in constructors for node in ast.walk(f) if isinstance(node, ast.Call)]
        called = {getattr(f, "attr", getattr(f, "id", "")) for f in functions}
        effects = sorted(name for name in called if EFFECT.fullmatch(name))
        assert not effects or cls.name in MAY_HAVE_EFFECTS, f"the constructor of {cls.name} calls {', '.join(effects)}"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_condition(factor: ast.AST) -> bool:
    """Return whether a factor looks like a flag."""
    name = getattr(factor.func if isinstance(factor, ast.Call) else factor, "attr", "") or ast.unparse(factor)
    flags = r"(is_|has_|not |bool\(|any\(|all\(|isinstance\(|startswith|endswith)"
    return isinstance(factor, ast.Compare | ast.BoolOp) or re.match(flags, name) is not None


def is_count(factor: ast.AST, sequence: ast.AST) -> bool:
    """Return whether a factor of a text, a list or a tuple is a number, not a flag. That of a text is written out or contains a
    length, unless the text is one character, such as that of a line."""
    called = [getattr(n.func, "id", "") for n in ast.walk(factor) if isinstance(n, ast.Call)]
    is_character = isinstance(sequence, ast.Constant) and len(sequence.value) == 1
    is_number = isinstance(factor, ast.Constant) or "len" in called or is_character or not is_text(sequence)
    return not is_condition(factor) and is_number


def sequences_times_flags(tree: ast.AST) -> list[str]:
    products = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    pairs = [(n, a, b) for n in products for a, b in ((n.left, n.right), (n.right, n.left))]
    found = [(n, a, b) for n, a, b in pairs if is_text(a) or isinstance(a, ast.List | ast.Tuple)]
    return [ast.unparse(product) for product, sequence, factor in found if not is_count(factor, sequence)]


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ('" (best)" * best', True),
        ('f" on {name}" * bool(name)', True),
        ('"s" * (n > 1)', True),
        ('(n > 1) * "s"', True),
        ('"s" * (not alone)', True),
        ('", ..." * (len(names) > 5)', True),
        ("f\"{a}{'x' * result.is_tight}\"", True),
        ('"x" * text.startswith("y")', True),
        ('"-" * 80', False),
        ('"^" * length', False),
        ('8 * "[0-9a-f]"', False),
        ('"|---" * (len(columns) + 1)', False),
        ("3 * width", False),
        ('["x"] * bool(names)', True),
        ('("x", "y") * (kind == "z")', True),
        ("[None] * len(names)", False),
        ("[0.0] * num_ranks", False),
    ],
)
def test_the_rule_about_sequences_finds_flags_and_no_counts(code, is_found):
    assert bool(sequences_times_flags(ast.parse(code))) == is_found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_text_or_a_list_that_depends_on_a_condition_is_a_conditional_expression(path):
    """`"text" * flag` is shorter by three words, and every reader stops."""
    assert sequences_times_flags(ast.parse(path.read_text())) == []
