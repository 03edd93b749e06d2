"""Memory that the process keeps. Each case runs in a new process, because the setting cannot be undone."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

PAGES = 2**14
COUNT_FAULTS = f"""
import resource, torch
from trainer.runtime.host_memory import keep_freed_memory
{{setting}}
tensor = torch.ones({PAGES}, 1024)
del tensor
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tensor = torch.ones({PAGES} // 2, 1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    faults = {}
    for setting in ("keep_freed_memory()", ""):
        program = [sys.executable, "-c", COUNT_FAULTS.format(setting=setting)]
        faults[setting] = int(subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert faults["keep_freed_memory()"] < faults[""] / 4
