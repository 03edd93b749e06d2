"""Evaluate a trained model on tasks of EleutherAI's lm-evaluation-harness (pip install lm-eval).

python scripts/evaluate.py outputs/debug --tasks own_text --include-path tasks
python scripts/evaluate.py outputs/debug@best --tasks hellaswag,arc_easy --num-fewshot 5 --limit 100 --output results.json
torchrun --nproc-per-node 4 scripts/evaluate.py outputs/debug --tasks hellaswag --tp 2    # two models over two ranks each
"""

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import (
    Readable,
    existing_folder,
    file_to_write,
    non_negative_int,
    positive_int,
)
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import answer_early, end_process_after, run_to_end


def arguments() -> Arguments:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add(
        "path",
        type=Readable,
        help="checkpoint, run folder (its newest checkpoint, or RUN@best), or Hugging Face folder",
    )
    add("--tasks", required=True, metavar="NAMES", help="names of tasks and groups, with commas between them")
    add("--include-path", type=existing_folder, metavar="PATH", help="folder with the YAML files of further tasks")
    add(
        "--num-fewshot",
        type=non_negative_int,
        metavar="N",
        help="number of examples in a context (default: the task's)",
    )
    add("--limit", type=positive_int, metavar="N", help="number of documents of each task (default: all)")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="number of texts that are generated together")
    add("--apply-chat-template", action="store_true", help="make a message of a user of each context")
    add("--chat-template", default="", metavar="NAME", help="shipped template or a file (default: the model's)")
    add("--max-seq-len", type=non_negative_int, default=0, metavar="N", help="context window; 0: the model's")
    add("--tp", type=positive_int, default=1, metavar="N", help="number of ranks over which the matrices are sharded")
    add("--base", type=Readable, metavar="PATH", help="base model of an adapter (default: the path at training)")
    add("--averaged", action="store_true", help="use the averaged weights of the run ([optimizer] ema_decay)")
    add("--output", type=file_to_write, metavar="FILE", help="write the results in the harness's JSON form")
    add("--dtype", choices=["fp32", "bf16"], help="default: bf16 on a GPU, fp32 on a CPU")
    add("--device", choices=["auto", "gpu", "cpu"], default="auto", help="device of the model")
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

import torch
import torch.distributed as dist

from trainer.base.config import ConfigError, DistributedConfig
from trainer.base.config.checkpoints import resolve_checkpoint, why_chosen
from trainer.base.config.errors import errors_of_options
from trainer.base.config.packages import require_package
from trainer.base.system.files import atomic_write, describe
from trainer.base.system.remote_files import is_copy
from trainer.base.system.run_files import CHECKPOINTS, METRICS_FILE, step_of
from trainer.base.system.streams import print_error, print_line
from trainer.checkpoint.formats.folders import metadata_and_generation
from trainer.data.chat.template import TemplateFailure
from trainer.inference.generate import TextGenerator
from trainer.run.run_folder import acquire_lock
from trainer.run.sinks.local import append_records
from trainer.runtime import device as devices
from trainer.runtime import distributed
from trainer.runtime.device import DTYPES


def load(args: argparse.Namespace, device: torch.device) -> TextGenerator:
    folder = distributed.run_on_rank_0(lambda: resolve_checkpoint(args.path))
    if dist.get_rank() == 0 and (why := why_chosen(args.path, folder)):
        print_line(f"{folder}: {why}", sys.stderr)
    dtype = DTYPES[args.dtype or ("bf16" if device.type != "cpu" else "fp32")]
    # As an export says, so that the harness's own models cut the same contexts.
    max_seq_len = args.max_seq_len or metadata_and_generation(folder)[0].context_window
    settings = {"tp": args.tp, "max_rows": args.batch_size}
    return TextGenerator.load(
        folder, dtype, device, max_seq_len, args.chat_template, args.base, args.averaged, **settings
    )


def evaluate(args: argparse.Namespace, device: torch.device) -> None:
    # A module that imports an optional package is imported only here, where the package is known to exist.
    harness = require_package("trainer.inference.harness", "")
    generator = load(args, device)
    if args.apply_chat_template:
        generator.chat_format()
    try:
        results = harness.run_tasks(
            generator,
            args.tasks,
            args.include_path,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            batch_size=args.batch_size,
            apply_chat_template=args.apply_chat_template,
        )
    except TemplateFailure as failure:
        raise ConfigError("data.chat_template", f"the chat template: {failure}") from None
    if dist.get_rank() == 0:
        print(harness.table(results))
        if args.output:
            atomic_write(args.output, harness.as_json(results))
    if args.limit is None:  # the score of some documents would stand for the task
        way = "" if args.num_fewshot is None else f" {args.num_fewshot}-shot"
        way += (" chat" if args.apply_chat_template else "") + (" (averages)" if args.averaged else "")
        record(generator.folder, {} if dist.get_rank() else {k + way: v for k, v in harness.scores(results).items()})


def record(checkpoint: Path, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Add the scores to the records of a run, collectively, if it has ended.

    Args:
        checkpoint: What was evaluated. Nothing is recorded unless it is a checkpoint of a run on this disk.
        scores: Task -> metric -> value, on rank 0.
    """
    run = checkpoint.parent.parent
    is_of_run = checkpoint.parent.name == CHECKPOINTS and not is_copy(run)
    if not distributed.run_on_rank_0(lambda: is_of_run and (run / METRICS_FILE).exists()):
        return
    common = {"kind": "task", "step": step_of(checkpoint)}
    records = [common | {"task": f"lm_eval {name}"} | dict(own) for name, own in scores.items()]
    try:
        with acquire_lock(run) or nullcontext():
            distributed.run_on_rank_0(lambda: _append(run, records))
    except ConfigError as error:
        if dist.get_rank() == 0:
            print_error(f"the scores are not among the records of the run: {error}")


def _append(run: Path, records: list[dict[str, Any]]) -> None:
    try:
        append_records(run, records)
    except OSError as error:
        raise ConfigError("", describe(error)) from None


def run(args: argparse.Namespace) -> None:
    require_package("lm_eval", "scripts/evaluate.py")
    template = f"--chat-template {args.chat_template}" if args.chat_template else ""
    with errors_of_options({"run.device": f"--device {args.device}", "data.chat_template": template}):
        device = devices.select_device(args.device)
        distributed.init_process_group(DistributedConfig(), device)
        evaluate(args, device)
    distributed.shutdown()


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    args.tasks = [name.strip() for name in args.tasks.split(",")]
    if "" in args.tasks or len(set(args.tasks)) < len(args.tasks):
        parser.error(f"--tasks {','.join(args.tasks)}: a name is empty, or stands twice")
    if args.chat_template and not args.apply_chat_template:
        parser.error("--chat-template has no effect without --apply-chat-template")
    end_process_after(lambda: run(args))


if __name__ == "__main__":
    run_to_end(main)
