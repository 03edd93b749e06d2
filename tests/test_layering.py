"""The floors of the house: a module imports its own floor or below, and only at the top of its file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

FLOORS = {
    "trainer.config": 0,
    "trainer.settings": 0,
    "trainer.show_config": 0,
    "trainer.load_config": 0,
    "trainer.logging": 0,
    "trainer.boards": 0,
    "trainer.system": 0,
    "models": 1,
    "trainer.batch": 1,
    "trainer.device": 2,
    "trainer.distributed": 2,
    "trainer.loss": 2,
    "trainer.optimizer": 2,
    "trainer.updates": 2,
    "trainer.eight_bits": 2,
    "trainer.schedule": 2,
    "trainer.pace": 2,
    "trainer.metrics": 2,
    "trainer.parallel": 2,
    "trainer.data": 2,
    "trainer.manifest": 2,
    "trainer.recorder": 2,
    "trainer.shards": 2,
    "trainer.checkpoint": 3,
    "trainer.lineage": 3,
    "trainer.saver": 3,
    "trainer.room": 3,
    "trainer.resilience": 3,
    "trainer.huggingface": 3,
    "trainer.initial": 3,
    "trainer.export": 3,
    "trainer.evaluate": 3,
    "trainer.generation": 3,
    "trainer.setup": 4,
    "trainer.run_folder": 4,
    "trainer.engine": 4,
    "trainer.trainer": 4,
    "trainer.roofline": 2,
    "trainer.imaginary": 5,
    "trainer.simulate": 5,
    "trainer.planning": 5,
    "trainer.search": 5,
    "train": 5,
    "scripts": 5,
}
FLOOR_0_LIBRARIES = {"tomli"}
FLOOR_1_LIBRARIES = {"torch"}
MAY_IMPORT_INSIDE = {
    "train": "a wrong setting is told without waiting for torch",
    "scripts.launch": "likewise",
    "scripts.faults.sitecustomize": "it runs before everything else",
    "trainer.metrics": "TensorBoard, where it is written",
}

SOURCES = sorted([ROOT / "train.py", *(p for f in ("trainer", "models", "scripts") for p in (ROOT / f).rglob("*.py"))])


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """The longest name in FLOORS that the module is, or lies in."""
    rooms = [room for room in FLOORS if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from trainer import device` names a module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_imports_its_own_floor_or_below(path):
    module = name_of(path)
    room = room_of(module)
    if path.read_text() == "":
        return
    assert room is not None, f"{module}: give it a floor"
    for imported in imports(ast.parse(path.read_text())):
        target = room_of(imported)
        library = imported.partition(".")[0]
        if target is not None:
            assert FLOORS[target] <= FLOORS[room], f"{module} imports {imported} from a higher floor"
            assert not (room == "models" and target != "models"), (
                f"{module} imports {imported}: models import torch alone"
            )
            assert {room, target} != {"trainer.parallel", "trainer.data"}, f"{module} imports {imported}"
        elif library not in __import__("sys").stdlib_module_names and library not in ("trainer", "models"):
            assert FLOORS[room] > 0 or library in FLOOR_0_LIBRARIES, f"{module} imports {library} on floor 0"
            assert FLOORS[room] != 1 or library in FLOOR_1_LIBRARIES, f"{module} imports {library} on floor 1"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_stand_at_the_top(path):
    tree = ast.parse(path.read_text())
    inside = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and list(imports(f))]
    assert not inside or name_of(path) in MAY_IMPORT_INSIDE, f"imports inside {inside[0].name}"


def test_there_are_no_cycles():
    graph = {name_of(p): {i for i in imports(ast.parse(p.read_text()))} for p in SOURCES}
    names = set(graph)
    edges = {
        m: {n for i in targets for n in (i, i.rpartition(".")[0]) if n in names} - {m} for m, targets in graph.items()
    }
    while edges:
        leaves = {m for m, targets in edges.items() if not targets & set(edges)}
        assert leaves, f"a cycle among {sorted(edges)}"
        edges = {m: targets for m, targets in edges.items() if m not in leaves}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_device_names_the_accelerator(path):
    if path.name != "device.py":
        assert "cuda" not in path.read_text().lower()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_take_their_own_section(path):
    """The whole `Config` stands only where it is made and shown, and from floor 4 on, where a run is put together."""
    allowed = {
        "trainer.settings",
        "trainer.show_config",
        "trainer.load_config",
        "trainer.setup",
        "trainer.run_folder",
        "trainer.engine",
        "trainer.simulate",
        "trainer.planning",
        "trainer.search",
        "trainer.trainer",
        "train",
        "scripts.parity",
        "scripts.allocations",
        "scripts.ladder",
    }
    if name_of(path) not in allowed:
        assert "trainer.config.Config" not in set(imports(ast.parse(path.read_text())))
