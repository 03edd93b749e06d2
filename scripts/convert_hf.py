"""Convert between checkpoints, the Hugging Face format and that of llama.cpp, block by block, so that memory does not grow with
the model size.

python scripts/convert_hf.py to-hf outputs/debug/checkpoints/step-00000300 out/
python scripts/convert_hf.py from-hf model-folder/ out/
python scripts/convert_hf.py merge outputs/my_lora out/     # base model plus adapter; to-hf writes only the adapter, for peft
python scripts/convert_hf.py to-gguf outputs/my_run model.gguf --type q8_0
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import Readable, file_to_write, positive_float
from trainer.base.config.arguments import Arguments
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import answer_early, run_to_end
from trainer.base.config.schema.checkpoint import GgufType
from trainer.base.config.schema.model import ModelFamily
from trainer.base.system import console

_DTYPE, _GGUF_TYPE, _SHARD_GIB = "bf16", "bf16", 5.0
"""Defaults of --dtype, of --type and of --shard-gib."""


def arguments() -> Arguments:
    parser = Arguments(__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    export = commands.add_parser("to-hf", help="write the model and its tokenizer for the package transformers")
    merge = commands.add_parser("merge", help="write a base model with an adapter merged into it")
    gguf = commands.add_parser(
        "to-gguf", help="write one file for llama.cpp, ollama and LM Studio (base model with adapter)"
    )
    load = commands.add_parser("from-hf", help="write a checkpoint with only the model, for --checkpoint.init_from")
    for command in (export, merge, gguf):
        command.add_argument(
            "source", type=Readable, help="checkpoint, or run folder (its newest checkpoint, or RUN@best)"
        )
        averaged = "write the averaged weights of the run ([optimizer] ema_decay)"
        command.add_argument("--averaged", action="store_true", help=averaged)
    for command in (export, merge):
        command.add_argument("--dtype", choices=["bf16", "fp32"], help=f"dtype of the weights (default: {_DTYPE})")
    for command in (merge, gguf):
        base_help = "base model (default: its path when the adapter was trained)"
        command.add_argument("--base", type=Readable, metavar="PATH", help=base_help)
        into_help = (
            "base model to merge into: the original one, or the one in 4 bits that was trained (default: original)"
        )
        command.add_argument("--into", choices=["original", "quantized"], help=into_help)
    gguf.add_argument("out", type=file_to_write, help="file to write")
    type_help = f"type of the matrices (default: {_GGUF_TYPE}); q4_0 keeps the output matrix in q8_0"
    gguf.add_argument("--type", choices=get_args(GgufType), default=_GGUF_TYPE, help=type_help)
    load.add_argument(
        "source", type=Readable, help="folder in the Hugging Face format (--checkpoint.init_from reads it too)"
    )
    for command in (export, merge, load):
        command.add_argument("out", type=Path, help="folder to write")
        shard_help = f"maximum size of one weight file (default: {_SHARD_GIB})"
        command.add_argument("--shard-gib", type=positive_float, metavar="GIB", help=shard_help)
    families = f"one of {', '.join(get_args(ModelFamily))}; default: the first with the type and the sizes of the model"
    load.add_argument("--family", metavar="NAME", help=families)
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

from models import MODELS
from trainer.base.config.checkpoints import resolve_checkpoint, why_chosen
from trainer.base.config.recognition import is_adapter, is_checkpoint, require
from trainer.base.system.spelling import did_you_mean
from trainer.base.system.units import GIB
from trainer.checkpoint.formats.adapter import Adapter, MergedWeights
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.gguf_writer import GgufExport
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.huggingface_writer import exported_bytes, write_huggingface
from trainer.checkpoint.formats.native_writer import require_new_folder, require_outside_checkpoint, write_checkpoint
from trainer.checkpoint.formats.peft_writer import write_peft
from trainer.checkpoint.manifest import CorruptError
from trainer.runtime.device import DTYPES


def to_gguf(args: argparse.Namespace) -> None:
    require_outside_checkpoint(args.out)
    if args.out.exists():
        raise ConfigError("", f"{args.out} exists; choose another path")
    merge = {"base": args.base, "into_quantized": args.into == "quantized"}
    weights = open_weights(_source(args), alone=True, averaged=args.averaged, **merge)
    if args.into and not isinstance(weights, MergedWeights):
        raise ConfigError("", f"--into {args.into}: has an effect only on an adapter")
    export = GgufExport.of(weights, args.type)
    for remark in export.vocabulary.remarks:
        console.warning(remark)
    with console.progress(export.num_bytes(), "B", "converted") as bar:
        export.write(args.out, progress=bar.update)


def _source(args: argparse.Namespace) -> Path:
    """Return the checkpoint, or the folder, that the command names, and say why it is this one."""
    checkpoint = resolve_checkpoint(args.source)
    if why := why_chosen(args.source, checkpoint):
        print(f"{checkpoint}: {why}")
    return checkpoint


def to_hf(args: argparse.Namespace, checkpoint: Path, shard_bytes: int) -> None:
    merge = {"base": args.base, "into_quantized": args.into == "quantized"} if args.command == "merge" else {}
    weights = open_weights(checkpoint, alone=True, averaged=args.averaged, **merge)
    if not is_checkpoint(checkpoint):
        raise ConfigError("", f"{checkpoint} is a model in Hugging Face's format already")
    dtype = DTYPES[args.dtype or _DTYPE]
    with console.progress(exported_bytes(weights, dtype), "B", "converted") as bar:
        write_huggingface(weights, args.out, dtype, shard_bytes, bar.update)


def from_hf(source: Path, out: Path, family: str | None, shard_bytes: int) -> None:
    if family is not None and family not in MODELS:
        raise ConfigError("", f"--family {family}: expected one of {', '.join(MODELS)}{did_you_mean(family, MODELS)}")
    weights = HuggingFaceWeights.open(source, None if family is None else MODELS[family], alone=True)
    if family is not None:
        weights = replace(weights, model=replace(weights.model, family=family))
    if weights.ignored:
        print(f"{source}: {', '.join(weights.ignored)}: not part of the text model, and not converted", flush=True)
    total = sum(tensor.num_bytes for tensor in weights.index.values())
    with console.progress(total, "B", "converted") as bar:
        write_checkpoint(weights, out, shard_bytes, bar.update)


def main() -> None:
    args = arguments().parse_args()
    try:
        if args.command == "to-gguf":
            to_gguf(args)
        else:
            convert(args)
    except CorruptError as error:
        raise ConfigError("", str(error)) from None
    print(f"{args.out}: written")


def convert(args: argparse.Namespace) -> None:
    """Write the folder of a command."""
    shard_bytes = int((args.shard_gib or _SHARD_GIB) * GIB)
    require_new_folder(args.out)
    checkpoint = _source(args)
    if args.command == "from-hf":
        from_hf(args.source, args.out, args.family, shard_bytes)
    elif args.command == "merge":
        if not is_adapter(checkpoint):
            if not is_checkpoint(checkpoint):
                require(checkpoint, "weights")
            raise ConfigError("", f"{checkpoint} contains no adapter; to-hf writes the model")
        to_hf(args, checkpoint, shard_bytes)
    elif is_adapter(checkpoint):
        for option, value in (("--dtype", args.dtype), ("--shard-gib", args.shard_gib)):
            if value is not None:
                reason = f"{checkpoint} contains only an adapter; see merge"
                raise ConfigError("", f"{option} {value} has no effect, because {reason}")
        write_peft(Adapter.open(checkpoint, alone=True, averaged=args.averaged), args.out)
    else:
        to_hf(args, checkpoint, shard_bytes)


if __name__ == "__main__":
    run_to_end(main)
