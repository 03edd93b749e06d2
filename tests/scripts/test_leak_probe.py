"""scripts/leak_probe.py: output and exit codes."""

import sys

import pytest
import torch

from scripts import leak_probe
from scripts.leak_probe import probed_tokens
from tests.conftest import ROOT
from trainer.config.command_line import run_to_end

CHAT = ["--config", str(ROOT / "train_configs" / "sft_debug.toml"), "--model.overrides.n_layers", "4"]
WINDOW = ["--model.name", "mistral", "--model.overrides.window", "8"]


def main(monkeypatch, capsys, *argv):
    """Return the exit code, and the rows of the table without the header."""
    monkeypatch.setattr(sys, "argv", ["leak_probe.py", *argv])
    with pytest.raises(SystemExit) as exit:
        run_to_end(leak_probe.main)
    return exit.value.code, capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize("more", [[], WINDOW], ids=["documents", "documents and windows"])
def test_no_layout_leaks_and_injected_leaks_are_found(monkeypatch, capsys, tmp_path, more):
    layouts = ["dp_shard=1", "tp=2", "cp=2", "cp=2 tp=2", "pp=2"]
    words = [word for text in layouts for word in ("--layout", text)]
    code, rows = main(monkeypatch, capsys, *CHAT, "--run.output_folder", str(tmp_path), *more, *words)
    assert code == 0
    assert [row.split("  ")[0] for row in rows[:5]] == layouts
    assert all(row.endswith(" 0 no leak") for row in rows[:5])
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
