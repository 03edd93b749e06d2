"""Plot the phases and the matrix products of the first step in a trace of a CPU run with [profiling], for docs/profiling.md.

python scripts/dev/plot_trace.py outputs/debug/profiles/step-00000010-rank-00000.json.gz --output docs/images/trace.png
"""

import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.config import ConfigError
from trainer.config.command_line import Arguments, run_to_end
from trainer.planning.report import COLORS, canvas

_PHASE = "phase: "
_OPERATORS = {
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
}


def rows(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return name -> (start, duration) of every bar, in ms since the start of the first step. Raises ValueError if the trace
    contains no phase."""
    # A trace of a GPU repeats each phase in another category.
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op")]
    starts = sorted(event["ts"] for event in spans if event["name"] == f"{_PHASE}data")
    if not starts:
        raise ValueError
    first, end = starts[0], starts[1] if len(starts) > 1 else float("inf")
    bars: dict[str, list[tuple[float, float]]] = {}
    for event in sorted(spans, key=lambda event: event["ts"]):
        name = _OPERATORS.get(event["name"], event["name"].removeprefix(_PHASE))
        if (event["name"] in _OPERATORS or event["name"].startswith(_PHASE)) and first <= event["ts"] < end:
            bars.setdefault(name, []).append(((event["ts"] - first) / 1000, event["dur"] / 1000))
    return bars


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file that [profiling] has written")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .pdf")
    args = parser.parse_args()
    try:
        bars = rows(json.loads(gzip.decompress(args.trace.read_bytes()))["traceEvents"])
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("", f"{args.trace}: is not a trace of [profiling]") from None
    figure = canvas(args.output, "--output")
    axes = figure.add_subplot(xlabel="ms")
    for i, (spans, color) in enumerate(zip(bars.values(), COLORS * len(bars), strict=False)):
        axes.broken_barh(spans, (-i - 0.4, 0.8), facecolors=color)
    axes.set_yticks([-i for i in range(len(bars))], list(bars))
    figure.savefig(args.output)


if __name__ == "__main__":
    run_to_end(main)
