"""The notebook is run as a reader would run it, by a kernel of its own; in the tree it carries no outputs."""

import json
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "investigate.ipynb"
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def book() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def codes(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_it_is_kept_without_outputs(book: Any) -> None:
    nbformat.validate(book)
    assert [cell for cell in codes(book) if cell.outputs or cell.execution_count] == []
    assert set(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["metadata"]) == {"kernelspec", "language_info"}


def test_it_lies_beside_the_data_that_it_reads(book: Any) -> None:
    (line,) = [line for cell in codes(book) for line in cell.source.splitlines() if line.startswith("RUN = ")]
    run = NOTEBOOK.parent / line.split('"')[1]
    assert (run / "metrics.parquet").is_file(), run


@pytest.mark.slow
def test_it_runs(book: Any) -> None:
    client = nbclient.NotebookClient(
        book, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    assert [cell.execution_count for cell in codes(book)] == list(range(1, len(codes(book)) + 1))
    outputs = [output for cell in codes(book) for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    assert [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
    assert len(plots) == 3
    assert "\n  Blamed: " in printed
    assert "\n  Not blamed: " in printed
    assert "after the onset, which is right\n" in printed, "the node that was broken is the one that is named"
