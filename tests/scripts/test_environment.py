"""What is said before dependencies are installed, and by commands that lack them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
import tomli

from tests.conftest import ROOT
from trainer.base.system.dependencies import MODULES, require_dependencies


def announced(tmp_path, with_driver: bool, with_torch: bool) -> list[str]:
    """Return the lines before an installation on Linux. with_torch: whether the environment has torch already."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "uname").write_text("#!/bin/bash\necho Linux\n")
    if with_driver:
        (tools / "nvidia-smi").write_text("#!/bin/bash\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    venv = tmp_path / "venv"
    if with_torch:
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        (venv / "bin" / "python").chmod(0o755)
    code = f"source {ROOT}/scripts/environment.sh; announce_download python3 {venv}"
    command = [shutil.which("bash"), "-c", code]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=True)
    return done.stderr.replace(str(venv), "VENV").splitlines()


BEGIN = "python3 lacks dependencies of pyproject.toml: installing them into VENV (once; "
SIZE = "about 3 GB to download and 5 GB on the disk, most of it torch with CUDA)"


def test_an_installation_says_what_it_downloads(tmp_path):
    assert announced(tmp_path, with_driver=True, with_torch=False) == [BEGIN + SIZE]


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="this machine has a GPU driver")
def test_an_installation_without_a_gpu_driver_names_the_build_for_cpus(tmp_path):
    first, second = announced(tmp_path, with_driver=False, with_torch=False)
    assert first == BEGIN + SIZE
    assert second == (
        "no GPU driver found; torch for CPUs has 0.2 GB to download instead: press Ctrl-C, run python3 -m venv VENV && "
        "VENV/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu, then repeat the command"
    )


def test_an_installation_that_has_torch_already_announces_the_rest(tmp_path):
    lines = announced(tmp_path, with_driver=False, with_torch=True)
    assert lines == [BEGIN + "less than 0.2 GB, because torch is there)"]


def test_a_command_outside_the_environment_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "tomli") else name)
    with pytest.raises(SystemExit) as exit:
        require_dependencies()
    line = capsys.readouterr().err
    assert exit.value.code == 2 and line.startswith(f"{sys.executable} lacks tomli, torch: ")
    assert line.count("\n") == 1 and ("run_llama_train.sh installs them into" in line or "use " in line)


def test_a_module_in_a_package_that_is_missing_is_named(monkeypatch, capsys):
    def find_spec(name):
        if name == "google.protobuf":
            raise ModuleNotFoundError("No module named 'google'")
        return name

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(SystemExit):
        require_dependencies()
    assert capsys.readouterr().err.startswith(f"{sys.executable} lacks google.protobuf: ")


def test_the_checked_modules_are_the_dependencies_of_the_project():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    assert {name.removeprefix("google.").lower() for name in MODULES} == dependencies


@pytest.mark.parametrize(
    ("listed", "also", "expected"), [("json", "csv", 0), ("no_such", "csv", 1), ("json", "nope", 1)]
)
def test_the_shell_checks_the_same_modules_and_those_of_the_caller(tmp_path, listed, also, expected):
    package = tmp_path / "trainer" / "base" / "system"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "dependencies.py").write_text(f"MODULES = [{listed!r}]")
    code = f"source {ROOT}/scripts/environment.sh; ROOT={tmp_path}; has_modules {sys.executable} {also}"
    assert subprocess.run(["bash", "-c", code], cwd=tmp_path).returncode == expected
