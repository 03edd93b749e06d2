"""Properties of the process."""

import os

import pytest

from trainer.base.system.process import limit_spinning, spins


@pytest.mark.parametrize(
    ("chosen", "spin_count"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_openmp_threads_spin_briefly_unless_the_user_chooses_another_policy(monkeypatch, chosen, spin_count):
    monkeypatch.setattr(os, "environ", dict(chosen))
    assert spins() == (not chosen)
    limit_spinning()
    assert not spins()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count
