"""Compare the parallel layouts of every model family with one rank, as scripts/parity.py does it.

Every row is appended to a file as soon as it is measured. Rows that passed at the same commit, without uncommitted changes and
with the same version of torch, are not repeated. So the script can be stopped and called again. The last lines are the table of
docs/models.md.

exit codes: 0: all rows of the families pass; 1: a row fails; 2: an argument is wrong

    python scripts/dev/family_matrix.py --families qwen3 gemma2 --out outputs/families.jsonl
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.system.environment import environment
from trainer.base.system.files import read_json_lines
from trainer.tools.testing.layouts import DEBUG_FAMILIES, Layout
from trainer.tools.testing.parity import Row, Runs
from trainer.tools.testing.ranks import RankError

LAYOUTS = [
    "dp_shard=2",
    "tp=2",
    "tp=4",
    "tp=2 sequence_parallel=false",
    "cp=2",
    "cp=2 data.document_mask=true",
    "pp=2",
    "tp=2 pp=2",
    "dp_shard=2 tp=2 cp=2",
    "dp_shard=2 tp=2 cp=2 data.document_mask=true",
    "tp=2 training.compute_dtype=bf16",
    *(f"tp=2 activation_checkpoint.mode={mode}" for mode in ("selective", "full")),
    *(f"{layout} compile.enabled=true" for layout in ("dp_shard=1", "tp=2")),
]


def measure(family: str, text: str) -> dict[str, float | bool | str]:
    """Return the deviations of a row, and whether they are within the limits."""
    argv = ["--config", str(ROOT / "train_configs" / "debug.toml"), "--model.name", family, "--model.size", "debug"]
    argv += ["--training.global_batch_size", "4"]
    with tempfile.TemporaryDirectory(prefix="families-", ignore_cleanup_errors=True) as folder:
        runs = Runs(argv, 3, Path(folder))
        try:
            found = Row.build(runs, Layout.parse(text), 1).measure(runs)
        except RankError as error:
            return {"passed": False, "error": str(error).strip().splitlines()[-1]}
        return found.deviation | {"passed": found.passed}


def markdown(rows: dict[tuple[str, str], dict]) -> str:
    """Return a table of the largest deviation of a gradient. rows: (family, layout) -> result of measure."""
    families = list(dict.fromkeys(family for family, _ in rows))
    lines = [f"| layout | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    for text in LAYOUTS:
        cells = []
        for row in (rows.get((family, text), {}) for family in families):
            cells.append(f"{row['gradient']:.0e}" if row.get("passed") else "FAIL" if row else "")
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=DEBUG_FAMILIES,
        default=DEBUG_FAMILIES,
        metavar="NAME",
        help="names of model families",
    )
    out = ROOT / "outputs" / "families.jsonl"
    parser.add_argument("--out", type=Path, default=out, metavar="PATH", help="file to which rows are appended")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    now = environment(ROOT)
    code = {"commit": now["git_commit"], "clean": now["git_clean"], "torch": now["packages"]["torch"]}
    earlier = read_json_lines(args.out) if args.out.exists() and code["clean"] else []
    rows = {(r["family"], r["layout"]): r for r in earlier if code.items() <= r.items()}
    for family in args.families:
        for text in LAYOUTS:
            if not rows.get((family, text), {}).get("passed"):
                row = rows[family, text] = {"family": family, "layout": text} | code | measure(family, text)
                print(json.dumps(row), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(markdown(rows))
    sys.exit(0 if all(rows[family, text]["passed"] for family in args.families for text in LAYOUTS) else 1)


if __name__ == "__main__":
    run_to_end(main)
