import signal
import subprocess
import sys

from trainer import launch


def test_a_signal_reaches_the_other_ranks_if_one_has_just_ended(monkeypatch):
    ended, sleeping = (subprocess.Popen([sys.executable, "-c", code]) for code in ("", "import time; time.sleep(60)"))
    ended.wait()
    monkeypatch.setattr(launch, "children", lambda: [ended.pid, sleeping.pid])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    forwarder = launch.SignalForwarder(Exception)
    forwarder._forward(signal.SIGTERM, None)
    assert sleeping.wait(10) == -signal.SIGTERM and forwarder.signal is signal.SIGTERM
