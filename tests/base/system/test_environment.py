"""The description of software and hardware never ends a run."""

import sys

import pytest

from tests.conftest import ROOT
from trainer.base.system.environment import environment

DAMAGED = {
    "~orch-2.0.dist-info": None,  # what pip leaves when it is interrupted
    "empty-1.0.dist-info": "",
    "nameless-1.0.dist-info": "Metadata-Version: 2.1\nVersion: 1.0\n",
    "versionless-1.0.dist-info": "Metadata-Version: 2.1\nName: versionless\n",
    "binary-1.0.dist-info": b"\xff\xfe\x00Name",
    "good-1.0.dist-info": "Metadata-Version: 2.1\nName: good\nVersion: 1.0\n",
}


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_installation_of_a_package_is_left_out(tmp_path, monkeypatch, damaged):
    content = DAMAGED[damaged]
    (tmp_path / damaged).mkdir()
    if content is not None:
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / damaged / "METADATA").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    packages = environment(ROOT)["packages"]
    assert "torch" in packages and ("good" in packages) == damaged.startswith("good")
    assert all(isinstance(name, str) and isinstance(version, str) for name, version in packages.items())
