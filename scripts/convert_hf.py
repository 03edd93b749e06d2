"""Convert between checkpoints and Hugging Face's format.

    python scripts/convert_hf.py to-hf outputs/debug/checkpoints/step-00000300 out/
    python scripts/convert_hf.py from-hf model-folder/ out/

to-hf     CHECKPOINT OUT: a model that transformers loads, with config.json and tokenizer files; of a run folder its newest
          checkpoint
    --dtype NAME       of the weights: bf16 or fp32 (default: bf16)
from-hf   FOLDER OUT: a checkpoint that holds a model alone, in the precision it has there; [checkpoint] init_from takes it, and
          takes FOLDER itself as well
    --family NAME      of models/__init__.py (default: the first one that has these sizes, else the first one)

--shard-gib N      largest size of one file (default: 5)

Both read block by block: memory does not grow with the model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tqdm import tqdm

from models import MODELS
from trainer.checkpoint.export import export_from_checkpoint
from trainer.checkpoint.huggingface import HfModelFolder, import_folder
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.weights import resolve_checkpoint
from trainer.config import ConfigError
from trainer.config.command_line import Arguments, die, positive_float, run_to_end
from trainer.config.fields import did_you_mean
from trainer.run.resolve import parameter_names
from trainer.runtime.device import DTYPES
from trainer.system.units import GIB


def to_hf(checkpoint: Path, out: Path, dtype: str, shard_bytes: int) -> None:
    checkpoint = resolve_checkpoint(checkpoint)
    export = export_from_checkpoint(checkpoint, DTYPES[dtype])
    with tqdm(total=export.num_bytes(), unit="B", unit_scale=True, disable=None) as bar:
        export.write(out, shard_bytes, bar.update)


def from_hf(source: Path, out: Path, family: str | None, shard_bytes: int) -> None:
    if family is not None and family not in MODELS:
        die(f"--family {family}: expected one of {', '.join(MODELS)}{did_you_mean(family, MODELS)}")
    folder = HfModelFolder(source, MODELS[family or next(iter(MODELS))])
    family = family or next((n for n, s in MODELS.items() if folder.sizes in s.sizes.values()), next(iter(MODELS)))
    names = parameter_names(MODELS[family], folder.sizes)
    total = sum(path.stat().st_size for path in set(folder.files.values()))
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        import_folder(folder, family, names, out, shard_bytes, bar.update)


def main() -> None:
    parser = Arguments(__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    there, back = kinds.add_parser("to-hf"), kinds.add_parser("from-hf")
    for kind in (there, back):
        kind.add_argument("source", type=Path)
        kind.add_argument("out", type=Path)
        kind.add_argument("--shard-gib", type=positive_float, default=5.0)
    there.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    back.add_argument("--family")
    chosen = parser.parse_args()
    shard_bytes = int(chosen.shard_gib * GIB)
    try:
        if chosen.what == "to-hf":
            to_hf(chosen.source, chosen.out, chosen.dtype, shard_bytes)
        else:
            from_hf(chosen.source, chosen.out, chosen.family, shard_bytes)
    except (ConfigError, CorruptError) as error:
        die(str(error))
    except OSError as error:
        die(f"{error.filename}: {error.strerror}")
    print(f"{chosen.out}: written")


if __name__ == "__main__":
    run_to_end(main)
