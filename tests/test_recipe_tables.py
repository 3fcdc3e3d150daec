"""The tables of the recipes that run many seeds and many worlds."""

import json

import numpy
import pytest
from conftest import ROOT, episode, run_script, write_rows

from evaluate import SHARE, draw_counts, interval
from runs.toy_seeds import DRAWS, tabulate
from runtime.text import with_interval

BETTER = {"sweet": 4, "sweet_no_privileged": 1, "sweet_positive_vs_negative": 3, "mtdpo": 2,
          "rft": 2, "base": 1, "single_turn": 0}


def write_policies(folder, solved, more=0):
    """The test episodes of policies, each with so many of six tasks solved, and `more`."""
    for name, count in solved.items():
        write_rows(folder / f"test/{name}.jsonl", [
            episode(f"task{index}", float(index < count + more)) for index in range(6)])


def write_critic(folder, *aucs):
    rows = [{"step": step, "credit_auc/all": auc} for step, auc in enumerate(aucs)]
    write_rows(folder / "metrics.jsonl", rows)


def test_the_table_of_the_seeds_compares_policies_on_the_seeds_that_both_have(tmp_path):
    root = tmp_path / "seeds"
    write_policies(root / "0", BETTER | {"best_of_4": 5})
    write_policies(root / "1", {name: BETTER[name] for name in BETTER  # an ablation may have fewer
                                if name != "sweet_no_privileged"}, more=1)
    write_critic(root / "0/critic", 0.5, 0.75)

    run_script("runs/toy_seeds.py", root)

    found = json.loads((root / "table.json").read_text())
    assert found["means"]["sweet"]["value"] == pytest.approx(4.5 / 6)
    assert found["means"]["sweet_no_privileged"]["value"] == pytest.approx(1 / 6)
    assert found["differences"]["sweet - base"]["value"] == pytest.approx(3 / 6)
    assert found["differences"]["sweet - sweet_no_privileged"]["value"] == pytest.approx(3 / 6)
    assert found["credit_auc"]["sweet"] == {"0": {"credit_auc/all": 0.75}}
    assert found["differences"]["sweet - best_of_4"]["value"] == pytest.approx(-1 / 6)


def test_the_grid_has_a_row_for_each_cell(tmp_path):
    root = tmp_path / "grid"
    for likely in (5, 8):
        for tasks in (200, 800):
            folder = root / f"64_10_{likely}_4-5.{tasks}/0"
            write_policies(folder, BETTER, more=tasks == 800)
            for critic in ("critic", "sweet_no_privileged/critic"):
                write_critic(folder / critic, 0.5, 0.75)
    printed = run_script("runs/toy_grid.py", root).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in printed.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["5", "200"], ["5", "800"], ["8", "200"], ["8", "800"]]
    assert [row[2].split()[0] for row in rows] == ["66.7", "83.3"] * 2
    again = run_script("runs/toy_grid.py", root).stdout
    assert again == printed
    cells = list(json.loads((root / "table.json").read_text()))
    assert cells == sorted(cells)


def documented():
    """The numbers in the documents, as they stand there; a difference's limits have no sign."""
    names = ("README.md", "docs/measured.md", "docs/tuning.md")
    text = "".join((ROOT / name).read_text() for name in names)
    return text.replace(" % [", " [")


@pytest.mark.parametrize("name", ["toy_seeds", "toy_seeds_225_tasks", "toy_seeds_frontend"])
def test_the_documents_have_the_numbers_of_the_committed_outcomes(name):
    table, text = json.loads((ROOT / f"runs/out/{name}.json").read_text()), documented()
    outcomes = {policy: {seed: [float(number) for number in numbers.split()]
                         for seed, numbers in seeds.items()}
                for policy, seeds in table["outcomes"].items()}
    means, differences = tabulate(outcomes)
    for policy, mean in means.items():
        assert with_interval(mean, 100) in text, policy
    for policy in outcomes.keys() - {"sweet"}:
        if not policy.startswith("best_of"):  # their table has no lead
            lead = with_interval(differences[f"sweet - {policy}"], 100, sign="+")
            signed, _, limits = lead.partition(" ")
            assert f"{signed} {limits.replace('+', '')}" in text, policy


def test_the_documents_have_the_numbers_of_the_chat_model():
    text = documented()
    for run in json.loads((ROOT / "runs/out/llm.json").read_text())["runs"]:
        if run.get("what", "").startswith("An earlier try"):
            continue
        for policy, outcome in run["policies"].items():
            values = numpy.array([outcome["success"]], float)
            draws = draw_counts(numpy.random.default_rng(0), values.shape[1], DRAWS)
            mean = interval(values, numpy.ones((DRAWS, 1)), draws, SHARE)
            assert with_interval(mean, 100) in text, policy
