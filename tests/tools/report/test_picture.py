"""Pictures in files."""

import errno
import os
from types import SimpleNamespace

import pytest

from trainer.base.config import ConfigError
from trainer.base.system.units import GIB
from trainer.tools.planner.recorded import MEMORY_CATEGORIES, ExecutionPoint
from trainer.tools.report.memory_picture import draw_memory
from trainer.tools.report.picture import Picture


@pytest.mark.parametrize(("limit_gib", "limits_gib"), [(8, (0, 11)), (12, (0, 13.2)), (100, (90, 110))])
def test_a_plot_shows_the_device_memory_below_near_and_far_above_the_peak(tmp_path, limit_gib, limits_gib):
    pytest.importorskip("matplotlib")
    timeline = {category: [0, GIB, 0] for category in MEMORY_CATEGORIES} | {"activations": [0, 4 * GIB, 0]}
    point = ExecutionPoint("output", True)
    simulation = SimpleNamespace(
        peak=10 * GIB, peak_at=point, timeline=timeline, timeline_in_backward=[False, True, True]
    )
    path = tmp_path / "memory.svg"
    picture = Picture.open(path, "--plot")
    draw_memory(picture.figure, simulation, "title", limit_gib)
    picture.save(dpi=150)
    figure = picture.figure
    first, last = figure.axes[0], figure.axes[-1]
    (line,) = [line for line in first.lines if list(line.get_ydata()) == [limit_gib, limit_gib]]
    assert first.get_ylim() == pytest.approx(limits_gib) and line.get_linestyle() == "--"
    assert f"device memory: {limit_gib:.1f} GiB" in path.read_text()
    assert (last.get_ylim() == pytest.approx((0, 11))) or first is last
    assert first.get_title() == "title\nplanned peak: 10.00 GiB in backward of the output with its loss"


def test_a_plot_that_cannot_be_written_is_one_line_with_its_name_and_leaves_no_part(tmp_path):
    class FullDisk:
        def savefig(self, path, dpi):
            path.write_text("a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError) as error:
        Picture(FullDisk(), tmp_path / "memory.png", f"--plot {tmp_path}/memory.png").save(dpi=100)
    assert str(error.value) == f"--plot {tmp_path}/memory.png: cannot be written (No space left on device)"
    assert list(tmp_path.iterdir()) == []
