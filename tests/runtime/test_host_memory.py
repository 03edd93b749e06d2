"""Memory that the process keeps, and memory that forked processes do not inherit."""

import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from trainer.runtime.host_memory import exclude_from_forks

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
    # In new processes, because the setting cannot be undone.
    for setting in ("keep_freed_memory()", ""):
        program = [sys.executable, "-c", COUNT_FAULTS.format(setting=setting)]
        faults[setting] = int(subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert faults["keep_freed_memory()"] < faults[""] / 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the setting")
def test_forked_processes_inherit_only_the_incomplete_pages_of_a_pinned_buffer():
    buffer = torch.frombuffer(mmap.mmap(-1, 12 * 4096), dtype=torch.uint8)[100:-100]
    exclude_from_forks(buffer)
    first = buffer.data_ptr() - 100 + 4096
    last = first + 10 * 4096
    smaps = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z ]+)$", smaps, re.MULTILINE | re.DOTALL)
    excluded = {(int(start, 16), int(stop, 16)) for start, stop, names in areas if "dc" in names.split()}
    assert (first, last) in excluded
