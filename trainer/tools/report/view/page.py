"""The page about prepared data."""

from collections.abc import Sequence

from trainer.tools.report.page import build_page
from trainer.tools.report.view.samples import SampleView


def data_page(title: str, rows: Sequence[Sequence[str]], notes: Sequence[str], samples: Sequence[SampleView]) -> str:
    """Return the page about prepared data.

    Args:
        title: Heading of the page.
        rows: Table of the datasets. The first row has the titles.
        notes: Lines below the table.
        samples: Samples to show.
    """
    (_, *titles), *values = rows
    table = [(name, cells) for name, *cells in values]
    return build_page(
        "dataset.html.jinja", title, titles=["dataset", *titles], rows=table, notes=notes, samples=samples
    )
