"""Let a trained model speak.

    python scripts/generate.py outputs/debug --prompt "def "                    # a run, a checkpoint, or a Hugging Face folder
    python scripts/generate.py outputs/sft --chat                               # a turn a line, from the terminal or a file
    torchrun --nproc-per-node 2 scripts/generate.py outputs/debug --prompt ...  # its matrices cut over two ranks

--prompt TEXT      what it goes on with
--chat             talk: each line is a turn of the user
--system TEXT      what the assistant is told first; only with --chat
--template NAME    chat template: llama2, llama3, chatml, or a file (default: the model's own)
--max-tokens N     of one answer (default: 256)
--longest N        tokens of prompt and answers together (default: those of a sample it was trained with)
--temperature X    0: always the likeliest token (default: 0.8)
--top-k N          only among the N likeliest; 0: all (default: 0)
--top-p X          only among the likeliest that have this probability together (default: 1.0)
--seed N           (default: 0)
--dtype NAME       fp32 or bf16 (default: bf16 on a GPU, else fp32)
--device NAME      auto or cpu (default: auto)
"""

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

from trainer.config import ConfigError, DistributedConfig
from trainer.config.command_line import Arguments, die, non_negative_int, positive_int, run_to_end, utf8
from trainer.data.chat.format import ChatFormat
from trainer.data.chat.template import TemplateFailure
from trainer.inference.generate import Sampling, TextGenerator, TextStream
from trainer.runtime import device as devices
from trainer.runtime import distributed
from trainer.runtime.device import DTYPES

_PATIENCE_S = 7 * 24 * 3600.0
"""How long the other ranks wait for a line of the user."""


def number(text: str) -> float:
    """A number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 on")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0, up to 1")
    return value


def write(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, end="", flush=True)


def spoken(
    speaker: TextGenerator, prompt: Sequence[int], chosen: argparse.Namespace, stop: Collection[int], text: TextStream
) -> str:
    """What the model says, while it says it; without the token that ends it."""
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p)
    said = ""
    for token in speaker.generate(prompt, sampling, chosen.seed, stop, chosen.max_tokens):
        if token not in stop:
            said += (new := text.put(token))
            write(new)
    said += (rest := text.rest())
    write(f"{rest}\n")
    return said


def turns() -> Iterator[str]:
    """Lines of the user, on all ranks."""
    on_terminal = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")
    while True:
        line = None
        if dist.get_rank() == 0:
            if on_terminal:
                write("> ")
            line = sys.stdin.readline()
        line = distributed.broadcast(line, source=0)
        if not line:
            return
        if line.strip():
            yield line.strip()


def talk(speaker: TextGenerator, chat: ChatFormat, chosen: argparse.Namespace) -> None:
    messages = [{"role": "system", "content": chosen.system}] if chosen.system else []
    stop = {*chat.end_of_turn, speaker.tokenizer.eos}
    for line in turns():
        messages.append({"role": "user", "content": line})
        said = spoken(speaker, chat.prompt(messages), chosen, stop, TextStream(speaker.tokenizer))
        messages.append({"role": "assistant", "content": said})


def run(chosen: argparse.Namespace) -> None:
    device = devices.select_device(chosen.device)
    distributed.init_process_group(DistributedConfig(timeout_s=_PATIENCE_S), device)
    dtype = DTYPES[chosen.dtype or ("bf16" if device.type != "cpu" else "fp32")]
    speaker = TextGenerator(chosen.path, dtype, device, chosen.longest, chosen.template)
    if chosen.chat:
        talk(speaker, speaker.chat(), chosen)
    else:
        tokenizer = speaker.tokenizer
        prompt = [tokenizer.bos, *tokenizer.encode(chosen.prompt)]
        write(chosen.prompt)
        spoken(speaker, prompt, chosen, {tokenizer.eos}, TextStream(tokenizer, prompt[1:]))
    distributed.shutdown()


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--prompt", type=utf8)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--system", default="", type=utf8)
    parser.add_argument("--template", default="")
    parser.add_argument("--max-tokens", type=positive_int, default=256)
    parser.add_argument("--longest", type=non_negative_int, default=0)
    parser.add_argument("--temperature", type=number, default=0.8)
    parser.add_argument("--top-k", type=non_negative_int, default=0)
    parser.add_argument("--top-p", type=share, default=1.0)
    parser.add_argument("--seed", type=non_negative_int, default=0)
    parser.add_argument("--dtype", choices=["fp32", "bf16"])
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    chosen = parser.parse_args()
    if (chosen.prompt is None) != chosen.chat:
        parser.error("expected either --prompt TEXT or --chat")
    for name in ("system", "template"):
        if getattr(chosen, name) and not chosen.chat:
            parser.error(f"--{name} has no effect here: only with --chat")
    try:
        run(chosen)
    except (ConfigError, TemplateFailure) as error:
        of_template = isinstance(error, TemplateFailure) or error.key == "data.chat_template"
        named = f"--template {chosen.template}: " if of_template and chosen.template else ""
        die(named + (error.message if isinstance(error, ConfigError) else str(error)))
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's clean-up, in which gloo's threads abort now and then


if __name__ == "__main__":
    run_to_end(main, "")  # a new line behind what was said
