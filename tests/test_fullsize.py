"""What docs/scaling.md says of models that no machine here holds, counted without weights."""

import pytest
from conftest import ROOT, run_script

MARKS = "<!-- python tests/fullsize.py --table -->\n", "<!-- end of the table -->"


def rows_of(text):
    """First cell -> the other cells, of a table's rows."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row[1:] for row in rows[1:]}


COUNTED = ["critic_8b", "rft_8b", "lora_7b_longest"]
VALIDATED = ["lora", "eight_ranks", "pages"]


@pytest.fixture(scope="module")
def counted():
    return rows_of(run_script("tests/fullsize.py", "--table", *COUNTED).stdout)


@pytest.fixture(scope="module")
def validated():
    return rows_of(run_script("tests/fullsize.py", "--validate", *VALIDATED).stdout)


@pytest.fixture(scope="module")
def documented():
    _, _, text = (ROOT / "docs/scaling.md").read_text().partition(MARKS[0])
    table, end, _ = text.partition(MARKS[1])
    assert end, MARKS
    return rows_of(table)


def test_the_document_has_the_recipes_that_are_counted(documented):
    from fullsize import RECIPES

    assert list(documented) == list(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COUNTED)
def test_the_peaks_of_full_size_steps_are_those_of_the_document(recipe, counted, documented):
    found, stated = counted[recipe], documented[recipe]
    for mine, other in zip(found[2:6], stated[2:6], strict=True):
        assert mine == other == "-" or number(mine) == pytest.approx(number(other), rel=0.01)
    assert found[6:9] == stated[6:9]  # arithmetic and collectives


def number(cell):
    return float(cell.strip("*").replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("model", VALIDATED)
def test_peaks_and_arithmetic_without_data_are_those_of_small_models_that_run(model, validated):
    simulated, real, allocated, products, equal = validated[model]
    assert float(simulated) == pytest.approx(float(real), rel=0.01)
    assert float(simulated) == pytest.approx(float(allocated), rel=0.01)
    assert float(products) == 1 and equal == "equal"
