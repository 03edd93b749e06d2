"""Generate text with a trained model.

python scripts/generate.py outputs/debug --prompt "def "
python scripts/generate.py outputs/sft_debug --chat
torchrun --nproc-per-node 2 scripts/generate.py outputs/debug --prompt "def "    # matrices sharded over two ranks
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import (
    Readable,
    non_negative_float,
    non_negative_int,
    number,
    positive_int,
    utf8,
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
    add("--base", type=Readable, metavar="PATH", help="base model of an adapter (default: the path at training)")
    add("--averaged", action="store_true", help="use the averaged weights of the run ([optimizer] ema_decay)")
    add(
        "--prompt",
        type=utf8,
        action="append",
        metavar="TEXT",
        help="text to continue; repeat the option for further texts, which are generated together",
    )
    add("--chat", action="store_true", help="start a chat, in which each line of stdin is a message of the user")
    add("--system", default="", type=utf8, metavar="TEXT", help="system message of the chat")
    add("--chat-template", default="", metavar="NAME", help="shipped template or a file (default: the model's)")
    add("--stop", type=utf8, action="append", default=[], metavar="TEXT", help="end a text before TEXT; repeatable")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N", help="maximum number of tokens of an answer")
    add("--max-seq-len", type=non_negative_int, default=0, metavar="N", help="context window; 0: seq_len of training")
    add("--temperature", type=non_negative_float, default=0.8, metavar="T", help="0: the most likely token")
    add("--top-k", type=non_negative_int, default=0, metavar="K", help="sample among the K most likely tokens; 0: all")
    add(
        "--top-p",
        type=number(float, 1e-18, 1),
        default=1.0,
        metavar="P",
        help="nucleus sampling: total probability of candidates",
    )
    add("--seed", type=non_negative_int, default=0, metavar="N", help="seed of the sampling")
    add("--dtype", choices=["fp32", "bf16"], help="default: bf16 on a GPU, fp32 on a CPU")
    add("--device", choices=["auto", "gpu", "cpu"], default="auto", help="device of the model")
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

import torch
import torch.distributed as dist

from trainer.base.config import ConfigError, DistributedConfig
from trainer.base.config.checkpoints import why_chosen
from trainer.base.config.errors import errors_of_options
from trainer.base.system.streams import print_line
from trainer.data.chat.format import ChatFormat
from trainer.data.chat.template import TemplateFailure
from trainer.inference.engine import NON_FINITE, Sampling, TextRequest
from trainer.inference.generate import TextGenerator
from trainer.runtime import device as devices
from trainer.runtime import distributed
from trainer.runtime.device import DTYPES

_TIMEOUT_S = 7 * 24 * 3600.0
"""Timeout of the collectives in seconds. It is long, because the other ranks wait while rank 0 reads a line from the user."""


def print_on_rank_0(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, end="", flush=True)


def answer_printed(generator: TextGenerator, request: TextRequest) -> str:
    """Print the answer while it is generated. Return its text."""
    (answer,) = generator.generate([request], lambda index, text: print_on_rank_0(text))
    if answer.end == "non-finite":
        raise ConfigError("", f"{generator.folder}: the model returns non-finite logits, so it cannot generate text")
    print_on_rank_0("\n")
    return answer.text


def user_lines() -> Iterator[str]:
    """Yield, on all ranks, the lines that rank 0 reads from stdin."""
    on_terminal = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")

    def read_line() -> str:
        if on_terminal:
            print_on_rank_0("> ")
        return sys.stdin.readline()

    while line := distributed.run_on_rank_0(read_line):
        if line.strip():
            yield line.strip()


def chat(generator: TextGenerator, chat_format: ChatFormat, settings: dict[str, Any], system: str) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    stop = {*chat_format.end_of_turn, *generator.stop}
    for line in user_lines():
        messages.append({"role": "user", "content": line})
        request = TextRequest(prompt=chat_format.prompt(messages), stop_tokens=stop, **settings)
        messages.append({"role": "assistant", "content": answer_printed(generator, request)})


def run(args: argparse.Namespace) -> None:
    template = f"--chat-template {args.chat_template}" if args.chat_template else ""
    with errors_of_options({"run.device": f"--device {args.device}", "data.chat_template": template}):
        device = devices.select_device(args.device)
        distributed.init_process_group(DistributedConfig(timeout_s=_TIMEOUT_S), device)
        try:
            generate(args, device)
        except TemplateFailure as failure:
            raise ConfigError("data.chat_template", str(failure)) from None
    distributed.shutdown()


def generate(args: argparse.Namespace, device: torch.device) -> None:
    dtype = DTYPES[args.dtype or ("bf16" if device.type != "cpu" else "fp32")]
    generator = TextGenerator.load(
        args.path, dtype, device, args.max_seq_len, args.chat_template, args.base, args.averaged
    )
    if dist.get_rank() == 0 and (why := why_chosen(args.path, generator.folder)):
        print_line(f"{generator.folder}: {why}", sys.stderr)
    if args.chat or len(args.prompt) == 1:  # memory should not be lacking in the middle of an answer
        generator.cache.reserve(1, generator.max_seq_len)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    settings = {"sampling": sampling, "seed": args.seed, "stop": args.stop, "max_new_tokens": args.max_new_tokens}
    if args.chat:
        chat(generator, generator.chat_format(), settings, args.system)
        return
    requests = [generator.text_request(text, **settings) for text in args.prompt]
    if len(requests) == 1:
        generator.require_fitting(requests)  # before the prompt is printed
        print_on_rank_0(args.prompt[0])
        answer_printed(generator, requests[0])
        return
    for text, answer in zip(args.prompt, generator.generate(requests), strict=True):
        end = NON_FINITE if answer.end == "non-finite" else ""
        print_on_rank_0(f"{text}{answer.text}{end}\n")


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if (args.prompt is None) != args.chat:
        parser.error("expected either --prompt TEXT or --chat")
    if "" in args.stop:
        parser.error("--stop: must not be empty")
    for name in ("system", "chat_template"):
        if getattr(args, name) and not args.chat:
            parser.error(f"--{name.replace('_', '-')} has no effect without --chat")
    end_process_after(lambda: run(args))


if __name__ == "__main__":
    run_to_end(main, "")  # if interrupted, print an empty line after the generated text
