"""What docs/scaling.md says of models that no machine here holds, counted without weights."""

import re

import pytest
from conftest import ROOT, run_script


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["critic_8b", "rft_8b", "lora_7b_longest"])
def test_the_peaks_of_full_size_steps_are_those_of_the_document(recipe):
    lines = (ROOT / "docs/scaling.md").read_text().splitlines()
    row, = (line for line in lines if line.startswith(f"| `{recipe}` |"))
    cells = [cell.strip(" *") for cell in row.split("|")]
    stated = [float(cell) for cell in cells[4:7] if cell != "-"]  # loading, reference, step
    printed = run_script("tests/fullsize.py", recipe).stdout
    assert [float(size) for size in re.findall(r"\d+\.\d+", printed)] == pytest.approx(
        stated, rel=0.01)
