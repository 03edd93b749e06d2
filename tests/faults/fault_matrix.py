"""Inject faults into runs of a tiny model and check that nothing is lost: python tests/faults/fault_matrix.py [--cases 1 5 15]

Each case is one kind of fault. A trial of it starts runs with ./run_llama_train.sh, injects the fault, resumes the runs, and
compares their checkpoints with those of a reference run without faults. Results are appended to a file, so that counts
accumulate over several calls; the report covers all of them.

exit code: 1 if any trial in the file failed
"""

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from tests.faults.cases import CASES
from tests.faults.harness import Failed, FaultHarness, SeededRandom
from trainer.base.config import ConfigError
from trainer.base.config.argument_types import existing_folder, non_negative_int, positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.system.files import parse_json_object
from trainer.tools.testing.layouts import Layout, flags

SOAK = 48
"""The case that takes an hour."""


def run_trial(harness: FaultHarness, case: int, trial: int, seed: int) -> tuple[str, str]:
    """Return the problem, "" if the trial passed, and the summary of the case."""
    try:
        return "", CASES[case][1](harness, SeededRandom(seed, case, trial)) or ""
    except Failed as failure:
        return str(failure), ""
    finally:
        harness.close()  # otherwise the processes of a failed trial would disturb the next one


def run_case(harness: FaultHarness, case: int, trials: int, seed: int, path: Path, layout: str = "") -> None:
    """Run trials of a case after those in the file, and append their results to it. layout: name of the harness's layout."""
    previous = [r["trial"] for r in read_results(path) if (r["case"], r["seed"], r["layout"]) == (case, seed, layout)]
    first = 1 + max(previous, default=-1)
    for trial in range(first, first + trials):
        start = time.monotonic()
        problem, summary = run_trial(harness, case, trial, seed)
        seconds = time.monotonic() - start
        name = f"case {case}{', ' * bool(layout)}{layout}"
        print(f"{name}, trial {trial}: {problem or summary or 'passed'} ({seconds:.0f} s)", flush=True)
        result = {"case": case, "layout": layout, "trial": trial, "seed": seed, "problem": problem, "summary": summary}
        with path.open("a") as file:
            file.write(json.dumps(result | {"seconds": round(seconds, 1)}) + "\n")


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results in the file. Raises ConfigError if the file cannot be read or was not written by this script."""
    try:
        results = [parse_json_object(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        if all({"case", "layout", "trial", "seed", "problem", "summary"} <= result.keys() for result in results):
            return results
        problem = "a line is not a result of this script"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except ValueError:
        problem = "a line is not a JSON object"
    raise ConfigError("", f"--results {path}: {problem}")


def report(path: Path) -> bool:
    """Print the results of the file. Return whether no trial failed."""
    results = read_results(path)
    layouts = sorted({r["layout"] for r in results} | {""})
    for (case, (description, _)), layout in itertools.product(CASES.items(), layouts):
        trials = [r for r in results if (r["case"], r["layout"]) == (case, layout)]
        if layout and not trials:
            continue
        passed = sum(not r["problem"] for r in trials)
        count = f"{passed} of {len(trials)}" if trials else "not run"
        print(f"{case:>3}  {count:>12}  {f'[{layout}] ' if layout else ''}{description}")
        for r in trials:
            if message := r["problem"] or r["summary"]:
                print(f"       trial {r['trial']}, seed {r['seed']}: {message[:300]}")
    return all(not r["problem"] for r in results)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--cases", type=positive_int, nargs="+", metavar="N", help=f"cases to run (default: all except {SOAK})"
    )
    parser.add_argument("--trials", type=positive_int, default=1, metavar="N", help="trials of each case")
    parser.add_argument(
        "--results", type=Path, default=Path("outputs/fault_matrix.jsonl"), metavar="FILE", help="file of all results"
    )
    parser.add_argument(
        "--folder", type=existing_folder, metavar="PATH", help="parent of the temporary folder of the runs"
    )
    parser.add_argument(
        "--seed",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="seed of the times and locations of faults, which also depend on the case and the trial",
    )
    parser.add_argument(
        "--soak-minutes", type=positive_int, default=60, metavar="N", help=f"approximate duration of case {SOAK}"
    )
    parser.add_argument(
        "--layout",
        default="",
        metavar='"name=value ..."',
        help="layout of the runs, such as tp=2, for cases with two ranks (default: data parallelism)",
    )
    parser.add_argument("--report", action="store_true", help="print the accumulated results without running anything")
    args = parser.parse_args()
    cases = args.cases or [case for case in CASES if case != SOAK]
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"--cases {unknown[0]}: expected some of {', '.join(map(str, CASES))}")
    layout = flags(Layout.parse(args.layout).settings) if args.layout else []
    if not args.report:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
            harness = FaultHarness(Path(folder), args.soak_minutes, layout=layout)
            for case in cases:
                run_case(harness, case, args.trials, args.seed, args.results, args.layout)
    sys.exit(0 if report(args.results) else 1)


if __name__ == "__main__":
    run_to_end(main)
