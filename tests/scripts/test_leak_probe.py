"""scripts/leak_probe.py: output and exit codes."""

import sys
import types

import pytest
import torch

from scripts import leak_probe
from scripts.leak_probe import Probe, probed_tokens
from tests.conftest import ROOT
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.tools.testing.layouts import Layout, Table
from trainer.tools.testing.parity import Row
from trainer.tools.testing.ranks import RankError

CHAT = ["--config", str(ROOT / "train_configs" / "sft_debug.toml"), "--model.overrides.n_layers", "4"]
WINDOW = ["--model.name", "mistral", "--model.overrides.window", "8"]


def main(monkeypatch, capsys, *argv):
    """Return the exit code, and the rows of the table without the header."""
    monkeypatch.setattr(sys, "argv", ["leak_probe.py", *argv])
    with pytest.raises(SystemExit) as exit:
        run_to_end(leak_probe.main)
    return exit.value.code, capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(
    ("more", "layouts"),
    [([], ["cp=2 tp=2"]), (WINDOW, ["dp_shard=1", "tp=2", "cp=2", "cp=2 tp=2", "pp=2"])],
    ids=["documents", "documents and windows"],
)
def test_no_layout_leaks_and_injected_leaks_are_found(monkeypatch, capsys, tmp_path, more, layouts):
    words = [word for text in layouts for word in ("--layout", text)]
    code, rows = main(monkeypatch, capsys, *CHAT, "--run.output_folder", str(tmp_path), *more, *words)
    assert code == 0
    own = rows[: len(layouts)]
    assert [row.split("  ")[0] for row in own] == layouts
    assert all(row.endswith(" 0 no leak") for row in own)
    controls = [row for row in rows if row.startswith("negative control: ")]
    assert len(controls) == 1 + bool(more) and all(row.endswith(" found") for row in controls)


def test_without_document_masks_later_documents_change(monkeypatch, capsys, tmp_path):
    argv = [*CHAT, "--run.output_folder", str(tmp_path), "--data.document_mask", "false", "--layout", "tp=2"]
    code, rows = main(monkeypatch, capsys, *argv, "--probes", "4")
    assert code == 0
    assert rows[0].split()[3] == rows[0].split()[4]  # every later position may change, and does
    assert int(rows[0].split()[3]) > 256


def test_tokens_at_document_boundaries_are_probed_first():
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    assert probed_tokens(documents, 4) == [2, 3, 6, 7]
    assert {0, 2, 3, 6, 7} <= set(probed_tokens(documents, 8))
    assert probed_tokens(torch.zeros(8, dtype=torch.int64), 4) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("changed", "bug", "passes"),
    [
        ({3, 4}, "", True),
        ({3, 4, 9}, "", False),  # a leak
        ({4}, "", False),  # the token does not change its own position
        ({3, 4}, "a bug", False),  # its leak is not found
        ({3, 4, 9}, "a bug", True),
        (None, "", False),  # the run fails
        (None, "a bug", False),
    ],
)
def test_a_leak_fails_and_so_does_a_bug_that_is_not_found(monkeypatch, capsys, changed, bug, passes):
    class Ranks:
        def __init__(self, count):
            pass

        def run(self, function, *args):
            if changed is None:
                raise RankError("out of memory")
            return [[Probe(3, changed & {3, 9}, {3, 4})], [Probe(3, changed - {3, 9}, {3, 4})]]  # parts of two ranks

    monkeypatch.setattr(leak_probe, "LocalRanks", Ranks)
    row = Row(Layout.parse("cp=2"), load_config(["--parallel.cp", "2"]), {}, 1)
    runs = types.SimpleNamespace(flags=lambda settings: [])
    assert leak_probe.run(runs, row, Table(layout="", ranks=""), 1, bug) == passes


def test_layouts_that_do_not_fit_are_listed_unless_they_are_given(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(leak_probe, "run", lambda *args: True)
    argv = [*CHAT, "--run.output_folder", str(tmp_path), "--model.overrides.n_kv_heads", "1"]
    code, rows = main(monkeypatch, capsys, *argv)
    assert code == 0
    assert rows[0].split("  ")[0] == "tp=2" and "does not fit: " in rows[0]
    assert main(monkeypatch, capsys, *argv, "--layout", "tp=2")[0] == 2
    assert main(monkeypatch, capsys, *argv, "--parallel.tp", "2")[0] == 2
