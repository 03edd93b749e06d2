"""Local copies of URLs of object stores, for this process and those that it starts, in an environment variable: all ranks of a
node read the same objects, whatever happens in the store meanwhile."""

import json
import os

from trainer.base.system.paths import BEST

_PINS = "MESHWRIGHT_URLS"
WITHOUT_WEIGHTS = " without weights"
"""End of a URL whose local copy lacks the files with weights."""


def local_copies() -> dict[str, str]:
    """Return URL -> path of its local copy."""
    return json.loads(os.environ.get(_PINS, "{}"))


def remember(url: str, path: str) -> None:
    os.environ[_PINS] = json.dumps(local_copies() | {url: path})


def with_urls(text: str) -> str:
    """Return a text in which URLs replace the paths of their local copies, for messages and records."""
    for name, path in sorted(local_copies().items(), key=lambda entry: len(entry[1]), reverse=True):
        url = name.removesuffix(WITHOUT_WEIGHTS)
        # What lies below a run is named by the run: s3://bucket/run@best gives s3://bucket/run/checkpoints/step-00000100.
        text = text.replace(f"{path.removesuffix(BEST)}/", f"{url.removesuffix(BEST)}/").replace(path, url)
    return text
