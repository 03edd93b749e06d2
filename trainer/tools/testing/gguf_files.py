"""Comparison of two files for llama.cpp."""

from pathlib import Path

import gguf


def differences(first: Path, second: Path) -> tuple[list[str], list[str]]:
    """Return the keys, and the tensors, that are in one file only, or differ."""
    readers = [gguf.GGUFReader(path) for path in (first, second)]
    keys = [{n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")} for reader in readers]
    tensors = [{t.name: (t.tensor_type, *t.shape.tolist(), t.data.tobytes()) for t in r.tensors} for r in readers]
    return _differing(*keys), _differing(*tensors)


def _differing(first: dict, second: dict) -> list[str]:
    return sorted(n for n in {*first, *second} if n not in first or n not in second or first[n] != second[n])
