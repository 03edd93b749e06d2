"""Write the shipped chat set: short conversations that a model of a few million parameters can learn to hold.

    python scripts/make_chats.py trainer/data/chats.jsonl

The same content each time. Questions of the project, of Python and of numbers, and greetings; alone and in conversations of
two to four turns, some with a system prompt that the answers keep to.
"""

import argparse
import json
import random
from pathlib import Path

# (ways to ask, answer)
Fact = tuple[tuple[str, ...], str]

PROJECT: list[Fact] = [
    (("What is Meshwright?", "Tell me about Meshwright."), "A reference trainer for Llama models in plain PyTorch."),
    (("Who are you?", "What are you?"), "I am a small model, trained with Meshwright."),
    (("What is FSDP?", "What does FSDP do?"), "It shards parameters, gradients and optimizer state over the ranks."),
    (("What does dp_shard do?", "What is dp_shard?"), "It says over how many ranks the parameters are sharded."),
    (("What does dp_shard = -1 mean?",), "It takes every rank that the other degrees leave."),
    (
        ("What does dp_replicate do?", "What is dp_replicate?"),
        "It makes copies of the sharded model, for slow networks.",
    ),
    (
        ("What does tp do?", "What is tensor parallelism?"),
        "It cuts each matrix, so that several ranks compute one block.",
    ),
    (("Where should I use tp?",), "Inside one machine, where the network is fast."),
    (("What does cp do?", "What is context parallelism?"), "It cuts each sequence between ranks."),
    (("When do I need cp?",), "When the sequences are too long for one rank."),
    (("What does pp do?", "What is pipeline parallelism?"), "It cuts the layers into stages on different ranks."),
    (("How many ranks do I need?",), "The product of all five degrees."),
    (("What is a rank?",), "One process of the run; on GPUs, one for each."),
    (("How do I start a run?", "How do I train?"), "Run ./run_llama_train.sh with a config file."),
    (("How do I choose a config file?",), "Give it with --config FILE.toml."),
    (("How do I change a setting?", "Can I change one setting?"), "On the command line: --section.key value."),
    (("How do I resume?", "How do I continue a run?"), "Run the same command again."),
    (("Can I resume on other ranks?", "Can I resume on fewer GPUs?"), "Yes, on any number of ranks."),
    (("How do I train for longer?",), "Raise --training.steps and run the same command."),
    (("Where are checkpoints?", "Where is my model saved?"), "In the folder checkpoints of the run folder."),
    (("How do I check a checkpoint?",), "Run scripts/checkpoint.py verify on the run folder."),
    (("How often are checkpoints written?",), "Every checkpoint.interval_steps steps, and at the end."),
    (("How many checkpoints are kept?",), "All of them, unless checkpoint.keep says how many."),
    (("How do I go back to an older step?",), "Set --checkpoint.load_step to that step."),
    (("What if a checkpoint is damaged?",), "It is passed over, with a warning that names the file."),
    (("How do I export to Hugging Face?", "How do I get a Hugging Face model?"), "Run scripts/convert_hf.py to-hf."),
    (("How do I start from a given model?",), "Set --checkpoint.initial to its folder."),
    (("Where are the metrics?", "Where is the loss written?"), "In metrics.jsonl in the run folder."),
    (("How do I see the curves?",), "Start tensorboard --logdir outputs."),
    (("What is the loss?",), "The mean over all target tokens of the step, in nats."),
    (("What is mfu?", "What does mfu_percent mean?"), "The share of the device's peak that the model's FLOPs reach."),
    (("Does it run on a CPU?", "Do I need a GPU?"), "It runs on a CPU too, with the same code."),
    (("What is the default dataset?",), "The source code of Python's standard library."),
    (("Which datasets can I use?",), "Text files, JSON lines and more; see docs/data.md."),
    (("What is a token store?",), "The tokens of a dataset on disk, read through a memory map."),
    (("What is a token?",), "A piece of text that the model sees as one number."),
    (("What is a sample?",), "A row of seq_len tokens."),
    (("What is the cursor?",), "The number of samples consumed; it is the whole state of the data."),
    (("Does the order of samples change on resume?",), "No, it is the same on any number of ranks."),
    (("What is grad_norm?",), "The length of the gradient, before it is clipped."),
    (("What does max_norm do?",), "It scales larger gradients down to that norm."),
    (("What is a warm-up?", "What does warmup_steps do?"), "In these steps the learning rate rises to its peak."),
    (("Which optimizer is used?",), "AdamW."),
    (("What is activation checkpointing?",), "Activations are computed again in backward, to save memory."),
    (("What does torch.compile do here?",), "It compiles each block; set compile.enabled."),
    (("What is a DTensor?",), "A tensor that is cut or copied over ranks."),
    (("What is a mesh?",), "A grid of ranks with named axes."),
    (("What is an all-gather?",), "Each rank gets the parts of all ranks."),
    (("What is a reduce-scatter?",), "Parts are summed over ranks, and each keeps its share."),
    (("How do I prove that a layout is right?",), "Run scripts/parity.py: it compares layouts with one rank."),
    (("What happens on a wrong setting?",), "The run ends with one clear line."),
    (("What happens when a rank hangs?",), "The job ends and shows the stacks of all ranks."),
    (("How do I stop a run?",), "Press Ctrl-C once: it saves and ends."),
    (("Does it run under Slurm?",), "Yes: sbatch scripts/slurm/train.sbatch."),
    (("What is fine-tuning?",), "To train a model further on other data."),
    (("Which tokens are learned in a chat?",), "Those of the assistant, and the end of its turn."),
    (("Why is the end of turn learned?",), "So that I know when to stop."),
]

PYTHON: list[Fact] = [
    (("What does len do?", "How do I count the items of a list?"), "len(x) is the number of items in x."),
    (("How do I add to a list?", "How do I append?"), "x.append(item)"),
    (("How do I sort a list?",), "sorted(x) gives a sorted copy."),
    (("How do I reverse a list?",), "x[::-1] is a reversed copy."),
    (("How do I get the last item?",), "x[-1]"),
    (("How do I open a file?", "How do I read a file?"), "with open(path) as file: text = file.read()"),
    (("How do I define a function?", "Show me a function."), "def double(x): return 2 * x"),
    (("How do I write a loop?",), "for item in items: print(item)"),
    (("How do I count to nine?",), "for i in range(10): print(i)"),
    (("How do I make a class?",), "class Point: ..."),
    (("How do I make a set?",), "{1, 2, 3} is a set."),
    (("How do I make an empty set?",), "set(), since {} is a dict."),
    (("What is a dict?",), "A table of keys and their values."),
    (("How do I read a key that may be missing?",), "d.get(key) gives None if it is missing."),
    (("What is a tuple?",), "A sequence that cannot be changed."),
    (("Can I change a tuple?",), "No, make a new one."),
    (("Can I change a string?",), "No, strings cannot be changed."),
    (("How do I join strings?",), "', '.join(names)"),
    (("How do I split a string?",), "text.split() splits at spaces."),
    (("How do I remove spaces at the ends?",), "text.strip()"),
    (("How do I make text upper case?",), "text.upper()"),
    (("How do I turn text into a number?",), "int(text), or float(text)."),
    (("How do I format a number?",), "f'{x:.2f}' gives two digits behind the point."),
    (("How do I catch an error?",), "try: ... except ValueError: ..."),
    (("How do I raise an error?",), "raise ValueError('why')"),
    (("What is None?",), "The value that means nothing is there."),
    (("How do I test for None?",), "x is None"),
    (("What does // do?",), "It divides and rounds down: 7 // 2 is 3."),
    (("What does % do?",), "It gives the rest: 7 % 2 is 1."),
    (("What does ** do?",), "It raises to a power: 2 ** 3 is 8."),
    (("What is a generator?",), "A function that yields its values one by one."),
    (("What is a decorator?",), "A function that wraps another one."),
    (("How do I import a module?",), "import math"),
    (("How do I print?",), "print('hello')"),
    (("How do I sum a list?",), "sum(x)"),
    (("How do I find the largest item?",), "max(x)"),
    (("How do I loop over two lists?",), "for a, b in zip(x, y): ..."),
    (("How do I number the items of a loop?",), "for i, item in enumerate(x): ..."),
    (("What does pass do?",), "Nothing."),
    (("What is True and False?",), "False."),
]

GREETINGS: list[Fact] = [
    (("Hello!", "Hello.", "Hello there!"), "Hello! How can I help?"),
    (("Hi!", "Hi.", "Hey!"), "Hi! What would you like to know?"),
    (("Good morning!", "Good morning."), "Good morning! How can I help?"),
    (("Good evening!", "Good evening."), "Good evening! How can I help?"),
    (("How are you?", "How do you do?"), "I am fine, thank you."),
    (("Can you help me?", "I need help."), "Yes. What would you like to know?"),
    (("What can you do?",), "I answer short questions about Meshwright, Python and small numbers."),
]

THANKS: list[Fact] = [
    (("Thanks!", "Thank you.", "Thank you!"), "You are welcome."),
    (("Goodbye.", "Bye!", "See you!"), "Goodbye!"),
    (("Great!", "Good.", "Nice."), "I am glad to help."),
]

SYSTEMS = ("You are a helpful assistant.", "You are a trainer's assistant. Answer in one line.", "Answer briefly.")
NUMBERS_ONLY = "Answer with the number alone."

Message = dict[str, str]


def turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def sum_of(draw: random.Random, alone: bool) -> tuple[str, str, int]:
    """A question, its answer, and the number in it. alone: the answer is the number and nothing else."""
    a, b = draw.randint(0, 20), draw.randint(0, 20)
    if draw.random() < 0.2:
        a, b = draw.randint(1, 10), draw.randint(1, 10)
        sign, number = "times", a * b
    elif draw.random() < 0.4 and a >= b:
        sign, number = "minus", a - b
    else:
        sign, number = "plus", a + b
    question = draw.choice(("What is {} {} {}?", "{} {} {}?", "How much is {} {} {}?")).format(a, sign, b)
    return question, str(number) if alone else f"{a} {sign} {b} is {number}.", number


def sums(draw: random.Random, turns: int) -> list[Message]:
    """One sum, and what comes of it when more is added."""
    alone = draw.random() < 0.4
    question, answer, number = sum_of(draw, alone)
    messages = [{"role": "system", "content": NUMBERS_ONLY}] if alone else []
    messages += turn(question, answer)
    for _ in range(turns - 1):
        more = draw.randint(1, 9)
        messages += turn(
            f"And {more} more?", str(number + more) if alone else f"{number} plus {more} is {number + more}."
        )
        number += more
    return messages


def talk(draw: random.Random, turns: int) -> list[Message]:
    """Facts in a row, perhaps with a greeting before and thanks behind."""
    asked = draw.sample(PROJECT if draw.random() < 0.6 else PYTHON, turns)
    if turns > 1 and draw.random() < 0.4:
        asked[0] = draw.choice(GREETINGS)
    if turns > 1 and draw.random() < 0.5:
        asked[-1] = draw.choice(THANKS)
    messages = [{"role": "system", "content": draw.choice(SYSTEMS)}] if draw.random() < 0.25 else []
    for questions, answer in asked:
        messages += turn(draw.choice(questions), answer)
    return messages


def conversations() -> list[list[Message]]:
    """Every fact in each way to ask, then sums and longer conversations; no two the same."""
    draw = random.Random(0)
    found = [turn(q, answer) for facts in (PROJECT, PYTHON, GREETINGS, THANKS) for qs, answer in facts for q in qs]
    seen = {json.dumps(messages) for messages in found}
    for make, turns, number in (
        (sums, 1, 100),
        (sums, 2, 30),
        (sums, 3, 10),
        (talk, 2, 80),
        (talk, 3, 40),
        (talk, 4, 15),
    ):
        wanted = len(found) + number
        while len(found) < wanted:
            messages = make(draw, turns)
            if (text := json.dumps(messages)) not in seen:
                seen.add(text)
                found.append(messages)
    draw.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write, as trainer/data/chats.jsonl")
    out = parser.parse_args().out
    out.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations()))


if __name__ == "__main__":
    main()
