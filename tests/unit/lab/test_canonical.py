"""The stored form of a lab has no trace of an execution."""

from __future__ import annotations

import nbformat

from kvlab.lab.canonical import canonical


def test_outputs_counts_and_foreign_metadata_are_dropped_and_tags_stay():
    cell = nbformat.v4.new_code_cell(
        "1 + 1", id="one", metadata={"tags": ["parameters"], "execution": {"iopub.execute_input": "noon"}}
    )
    cell.outputs = [nbformat.v4.new_output("stream", text="2")]
    cell.execution_count = 3
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"papermill": {"duration": 1}})
    text = canonical(nbformat.writes(notebook))
    stored = nbformat.reads(text, as_version=4)
    assert stored.cells[0].outputs == []
    assert stored.cells[0].execution_count is None
    assert stored.cells[0].metadata == {"tags": ["parameters"]}
    assert "papermill" not in text


def test_the_canonical_form_is_a_fixed_point():
    text = canonical(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("x", id="m")])))
    assert canonical(text) == text
