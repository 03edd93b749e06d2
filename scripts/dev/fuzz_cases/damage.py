"""Random values and random damage, from which scripts/dev/fuzz.py makes its input."""

import contextlib
import json
from pathlib import Path
from random import Random
from typing import Any

NUMBERS = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "1e-320",
    "1e308",
    "-0.0",
    "0.5",
    "1e400",
    "inf",
    "-inf",
    "nan",
    "0x10",
    "1_0",
]
NUMBERS += [str(sign * 2**bits + off) for bits in (15, 31, 32, 63, 64) for sign in (1, -1) for off in (-1, 0)]
NUMBERS += ["1" + "0" * zeros for zeros in (9, 18, 30, 400, 5000)]
TEXTS = [
    "",
    " ",
    "none",
    "true",
    "None",
    "äß€😀",
    "../x",
    "/",
    "/dev/null",
    "/proc/self/mem",
    ".",
    "\t",
    "\n",
    "\x1b[31m",
]
TEXTS += [
    "\u202e",
    "%s%n",
    "{0}",
    "$HOME",
    "~",
    "a" * 300,
    "b" * 100_000,
    "'",
    '"',
    "\\",
    "<s>",
    "[1, 2]",
    "a,b",
    "x=1",
    "\x7f",
]
SAMPLES = [
    "the quick brown fox",
    "def f(x):\n\treturn x + 1\n",
    "Größe 世界 🙂👍🏽",
    "  \n\n ",
    "<|begin_of_text|><s></s>",
    "a" * 600,
]


def damage_bytes(random: Random, content: bytes) -> bytes:
    """Return the content after one random change."""
    start = random.randrange(len(content) + 1)
    stop = min(len(content), start + random.choice((1, 1, 2, 8, 100)))
    part = content[start:stop]
    earlier = random.randrange(start - len(part) + 1) if start >= len(part) else start
    return random.choice(
        (
            lambda: content[:start],
            lambda: content[:start] + random.randbytes(len(part)) + content[stop:],
            lambda: content[:start] + bytes(b ^ (1 << random.randrange(8)) for b in part[:1]) + content[start + 1 :],
            lambda: content[:start] + content[stop:],
            lambda: content[:start] + content[earlier : earlier + len(part)] + content[stop:],
            lambda: content[:start] + part * random.choice((2, 50)) + content[stop:],
            lambda: content[:start] + random.choice((b"\0", b"\n", b"\xff\xfe", b'"', b"{}", b"]")) + content[start:],
        )
    )()


def damage_file(random: Random, path: Path) -> None:
    """Change the content of a file, or the file itself."""
    content = path.read_bytes()
    action = random.randrange(12)
    path.unlink()
    if action == 0:
        path.mkdir()
    elif action == 1:
        path.symlink_to(random.choice(("nothing", "/dev/null", str(path.parent), path.name)))
    elif action == 2:
        path.write_bytes(b"")
    elif action > 3:  # 3: the file is missing
        path.write_bytes(damage_bytes(random, content))


def random_value(random: Random, depth: int = 0) -> Any:
    """Return a value that JSON can hold."""
    kind = random.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return random.choice((*TEXTS, *NUMBERS))
    if kind < 6:
        with contextlib.suppress(ValueError):  # more than 4,300 digits
            text = random.choice(NUMBERS)
            return int(text) if text.lstrip("-").isdecimal() else float(text)
    if kind < 7:
        return random.choice((None, True, False))
    values = [random_value(random, depth + 1) for _ in range(random.randrange(3))]
    return values if kind == 7 else dict(zip(random.choices(TEXTS, k=len(values)), values, strict=True))


def damage_json(random: Random, value: Any) -> Any:
    """Return a JSON value after one random change at a random place."""
    if isinstance(value, dict | list) and value and random.random() < 0.9:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        action = random.randrange(8)
        if action == 0:
            del copy[key]
        elif action == 1 and isinstance(copy, dict):
            copy[random.choice(TEXTS)] = copy.pop(key)
        elif action == 2 and isinstance(copy, list):
            copy.append(copy[key])
        else:
            copy[key] = damage_json(random, value[key])
        return copy
    if type(value) is int and random.random() < 0.4:
        return value + random.choice((-1, 1, 2, value))
    return random_value(random)


def damage_json_file(random: Random, path: Path) -> None:
    """Change the values or the bytes of a JSON file."""
    if random.random() < 0.25:
        damage_file(random, path)
        return
    content = json.loads(path.read_text())
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        content = damage_json(random, content)
    path.write_text(json.dumps(content))


def require(condition: Any, message: str) -> None:
    """Raise an exception, which is a finding, if the condition is not met."""
    if not condition:
        raise AssertionError(message)
