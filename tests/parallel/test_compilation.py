"""Whether blocks are compiled."""

import pytest

from trainer.base.config.load import load_config
from trainer.parallel import compilation


@pytest.mark.parametrize(
    ("flags", "on_gpu", "compilers", "compiled"),
    [
        ([], True, ["gcc"], True),
        ([], True, [], False),
        ([], False, ["gcc"], False),
        (["--compile.enabled", "true"], False, [], True),
        (["--compile.enabled", "false"], True, ["gcc"], False),
        (["--parallel.pp", "2", "--parallel.pipeline_schedule", "1F1B"], True, ["cc"], True),
        (["--parallel.pp", "2", "--parallel.pipeline_schedule", "ZBVZeroBubble"], True, ["cc"], False),
    ],
)
def test_compilation_is_on_by_default_where_it_is_possible(monkeypatch, tmp_path, flags, on_gpu, compilers, compiled):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name in compilers)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    config = load_config(flags)
    assert compilation.resolve_compilation(config.compile.enabled, config.parallel, on_gpu) == compiled
    (tmp_path / "Python.h").unlink()
    explicit = config.compile.enabled is True
    assert compilation.resolve_compilation(config.compile.enabled, config.parallel, on_gpu) == explicit
