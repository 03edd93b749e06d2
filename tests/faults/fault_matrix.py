"""Put faults into real runs and look whether anything is lost: python tests/faults/fault_matrix.py [--rows 1 5 15] [...]

Every row is one kind of fault; a trial of it starts runs of a tiny model with ./run_llama_train.sh, hurts them, starts them
again, and compares what comes out with an undisturbed run. Results are added to a file, so that counts grow over several
calls; the table shows all of them. Exit code 1 if any trial in the file failed.

--rows N ...       rows (default: all but 48)
--trials N         trials of each row (default: 1)
--results FILE     where results are kept (default: outputs/fault_matrix.jsonl)
--folder PATH      where the runs are made (default: a temporary folder)
--seed N           of the moments and places of the faults; trial t of a row draws from (seed, row, t) (default: 0)
--soak_minutes N   of row 48, about (default: 60)
--table            run nothing, show the results
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults.cases import CASES
from tests.faults.harness import Failed, FaultHarness, SeededRandom
from trainer.config.command_line import Arguments, non_negative_int, positive_int

# ---------------------------------------------------------------- the matrix


def trial(harness: FaultHarness, row: int, number: int, seed: int) -> tuple[str, str]:
    """What went wrong, or "", and what was seen."""
    try:
        return "", CASES[row][1](harness, SeededRandom(seed, row, number)) or ""
    except Failed as failure:
        return str(failure), ""
    finally:
        harness.end()  # else a run that went wrong would disturb the next


def show(results: Path) -> bool:
    """Print the table; returns whether nothing failed."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for row, (text, _) in CASES.items():
        mine = [line for line in lines if line["row"] == row]
        good = sum(not line["problem"] for line in mine)
        print(f"{row:>3}  {f'{good} of {len(mine)}' if mine else 'not run':>12}  {text}")
        for line in mine:
            if said := line["problem"] or line["seen"]:
                print(f"       trial {line['trial']}, seed {line['seed']}: {said[:300]}")
    return all(not line["problem"] for line in lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--rows", type=positive_int, nargs="+", default=[row for row in CASES if row != 48])
    parser.add_argument("--trials", type=positive_int, default=1)
    parser.add_argument("--results", type=Path, default=Path("outputs/fault_matrix.jsonl"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=non_negative_int, default=0)
    parser.add_argument("--soak_minutes", type=positive_int, default=60)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    unknown = [row for row in chosen.rows if row not in CASES]
    if unknown:
        parser.error(f"--rows {unknown[0]}: expected some of {', '.join(map(str, CASES))}")
    if not chosen.table:
        chosen.results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=chosen.folder, ignore_cleanup_errors=True) as folder:
            harness = FaultHarness(Path(folder), chosen.soak_minutes)
            for row in chosen.rows:
                run_case(harness, row, chosen.trials, chosen.seed, chosen.results)
    sys.exit(0 if show(chosen.results) else 1)


def run_case(harness: FaultHarness, row: int, trials: int, seed: int, results: Path) -> None:
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    first = 1 + max((line["trial"] for line in lines if (line["row"], line["seed"]) == (row, seed)), default=-1)
    for number in range(first, first + trials):
        start = time.monotonic()
        problem, seen = trial(harness, row, number, seed)
        seconds = time.monotonic() - start
        print(f"row {row}, trial {number}: {problem or seen or 'as it should be'} ({seconds:.0f} s)", flush=True)
        with results.open("a") as file:
            line = {"row": row, "trial": number, "seed": seed, "problem": problem, "seen": seen}
            file.write(json.dumps(line | {"seconds": round(seconds, 1)}) + "\n")


if __name__ == "__main__":
    main()
