"""The tables of the recipes that run many seeds and many worlds."""

import json

import pytest
from conftest import episode, run_script, write_rows

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
    root, table = tmp_path / "seeds", tmp_path / "seeds.json"
    write_policies(root / "0", BETTER | {"best_of_4": 5})
    write_policies(root / "1", {name: BETTER[name] for name in BETTER  # an ablation may have fewer
                                if name != "sweet_no_privileged"}, more=1)
    write_critic(root / "0/critic", 0.5, 0.75)

    run_script("runs/toy_seeds.py", root, "--output", table)

    found = json.loads(table.read_text())
    assert found["means"]["sweet"]["value"] == pytest.approx(4.5 / 6)
    assert found["means"]["sweet_no_privileged"]["value"] == pytest.approx(1 / 6)
    assert found["differences"]["sweet - base"]["value"] == pytest.approx(3 / 6)
    assert found["differences"]["sweet - sweet_no_privileged"]["value"] == pytest.approx(3 / 6)
    assert found["credit_auc"]["sweet"] == {"0": {"credit_auc/all": 0.75}}
    assert found["differences"]["sweet - best_of_4"]["value"] == pytest.approx(-1 / 6)


def test_seeds_that_are_run_in_parts_give_the_table_of_those_that_are_run_at_once(tmp_path):
    for seed in range(2):
        for root in (tmp_path / f"part{seed}", tmp_path / "whole"):
            write_policies(root / str(seed), BETTER, more=seed)
            write_critic(root / f"{seed}/critic", 0.5, 0.75 + 0.1 * seed)
    for name in ("part0", "part1"):
        run_script("runs/toy_seeds.py", tmp_path / name, "--output", tmp_path / "parts.json")
    run_script("runs/toy_seeds.py", tmp_path / "whole", "--output", tmp_path / "whole.json")
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


def test_the_grid_has_a_row_for_each_cell(tmp_path):
    root, output = tmp_path / "grid", ["--output", tmp_path / "grid.json"]
    for likely in (5, 8):
        for tasks in (200, 800):
            folder = root / f"64_10_{likely}_4-5.{tasks}/0"
            write_policies(folder, BETTER, more=tasks == 800)
            for critic in ("critic", "sweet_no_privileged/critic"):
                write_critic(folder / critic, 0.5, 0.75)
    printed = run_script("runs/toy_grid.py", root, *output).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in printed.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["5", "200"], ["5", "800"], ["8", "200"], ["8", "800"]]
    assert [row[2].split()[0] for row in rows] == ["66.7", "83.3"] * 2
    again = run_script("runs/toy_grid.py", root, *output).stdout
    assert again == printed
