"""Write a page that shows runs: curves, events, settings and environment, in one HTML file.

    python scripts/report.py outputs/debug
    python scripts/report.py outputs/a outputs/b --output report.html
    python scripts/report.py outputs/debug@best
    python scripts/report.py outputs/debug --watch

The file needs no network and no server. Several runs are drawn over each other, with the settings in which they differ. A
checkpoint instead of its run (RUN@best: the run's best one) marks its step in the curves. The planned memory is simulated, which
takes seconds to minutes; --no-plan leaves it out. The page needs the package bokeh.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.remote_files import is_copy
from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from collections.abc import Sequence

from trainer.base.config import ConfigError
from trainer.base.config.argument_types import ReadableRecords, file_to_write, number
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.system.files import atomic_write
from trainer.base.system.streams import require_stdout
from trainer.tools.report.drawing import require_plotting
from trainer.tools.report.page import GENERATOR, Watch, render
from trainer.tools.report.plan import Plan, plan_memory
from trainer.tools.report.run import FILES, Run, find_run, labels, read_run, require_runs
from trainer.tools.report.serve import HOST, Pages, Server


def plans_of(runs: Sequence[Run]) -> list[Plan | str | None]:
    """Return the planned memory of each run. Runs with the same settings and hardware are simulated once."""
    plans: dict[tuple, Plan | str] = {}
    found: list[Plan | str | None] = []
    for run in runs:
        names = ("run.name", "run.output_folder")
        settings = tuple(item for item in run.settings.items() if item[0] not in names)
        key = (settings, run.world_size, run.environment.get("device"))
        if key not in plans:
            print(f"{run.label}: simulating a step for the planned memory (--no-plan leaves it out)", file=sys.stderr)
            plans[key] = plan_memory(run)
        found.append(plans[key])
    return found


def require_own_page(path: Path) -> None:
    """Raise ConfigError if the page cannot be written, or if a file would be lost that is not an earlier page."""
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("", f"{path.parent} cannot be written; name another file with --output")
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:1000]:
        raise ConfigError("", f"--output {path}: exists and is not a report; choose another name")


def version_of(folders: Sequence[Path]) -> str:
    """Return a text that changes when a file of the runs changes."""
    versions = []
    for path in (folder / name for folder in folders for name in FILES):
        try:
            stat = path.stat()
            versions.append(f"{stat.st_mtime_ns:x}-{stat.st_size:x}")
        except OSError:
            versions.append("none")
    return " ".join(versions)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "runs", type=ReadableRecords, nargs="+", metavar="RUN", help="run folder, one of its checkpoints, or RUN@best"
    )
    help_text = "HTML file to write (default: report.html in the folder of the first run)"
    parser.add_argument("--output", type=file_to_write, metavar="FILE", help=help_text)
    parser.add_argument("--no-plan", action="store_true", help="do not simulate the planned memory")
    help_text = f"serve the page on {HOST} instead, and follow runs that are being written"
    parser.add_argument("--watch", action="store_true", help=help_text)
    port = number(int, 1, 65535)
    parser.add_argument("--port", type=port, metavar="N", help="port of --watch (default: any free port)")
    args = parser.parse_args()
    if args.watch and args.output:
        parser.error("--watch: serves the page and writes no file; remove --output")
    if args.port and not args.watch:
        parser.error(f"--port {args.port}: requires --watch")
    if any(map(is_copy, args.runs)) and (args.watch or not args.output):
        way = "--watch: does not follow the run at a URL" if args.watch else "--output: must name the file to write"
        parser.error(f"{way}, because a copy is read")
    require_plotting()
    folders, marked = zip(*map(find_run, args.runs), strict=True)
    require_runs(folders)
    require_stdout()
    output = args.output or folders[0] / "report.html"
    if not args.watch:
        require_own_page(output)
    plans: list[Plan | str | None] = []

    def build(watch: Watch | None = None) -> str:
        runs = [read_run(*of_run) for of_run in zip(folders, labels(folders), marked, strict=True)]
        if not plans:  # once: a run keeps its settings
            plans.extend([None] * len(runs) if args.no_plan else plans_of(runs))
        return render(runs, plans, watch)

    if not args.watch:
        atomic_write(output, build(), durable=False)
        print(output)
        return
    with Server(args.port or 0, Pages(lambda: version_of(folders), build)) as server:
        server.pages.current()
        print(f"{server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    run_to_end(main)
