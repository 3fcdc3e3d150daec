"""The tables of the recipes that run many seeds.

Run: pytest tests/test_recipe_tables.py
"""

import json
from xml.etree import ElementTree

import pytest
from conftest import episode, run_script

from runtime.files import write_jsonl

BETTER = {"sweet": 4, "sweet_no_privileged": 1, "sweet_positive_vs_negative": 3, "mtdpo": 2,
          "rft": 2, "base": 1, "single_turn": 0}


def write_policy(path, solved, tasks=6):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [episode(f"task{index}", float(index < solved)) for index in range(tasks)]
    write_jsonl(path, rows)


def write_critic(folder, *aucs):
    folder.mkdir(parents=True)
    rows = [{"step": step, "credit_auc/all": auc} for step, auc in enumerate(aucs)]
    write_jsonl(folder / "metrics.jsonl", rows)


def write_cell(folder, extra, aucs):
    """A finished seed of a cell, in which every policy solves `extra` tasks of six more."""
    for name, solved in BETTER.items():
        write_policy(folder / "test" / f"{name}.jsonl", solved + extra)
    for name, auc in zip(("ground_truth", "none"), aucs, strict=True):
        write_critic(folder / f"critic_{name}", 0.5, auc)


def make_grid_table(root, folder):
    return run_script("runs/toy_grid.py", root, "--output", folder / "grid.json",
                      "--picture", folder / "grid.svg")


def test_the_grid_compares_the_policies_of_each_cell_over_its_seeds(tmp_path):
    root = tmp_path / "grid"
    write_cell(root / "64_16_5_2-3/300/0", 0, (0.8, 0.7))
    for seed in range(2):
        write_cell(root / f"64_10_5_4-5/200/{seed}", seed, (0.9, 0.6 - 0.1 * seed))
    write_policy(root / "64_10_5_4-5/200/1/test/sweet_no_privileged.jsonl", 1)
    write_policy(root / "64_10_5_4-5/200/2/test/base.jsonl", 1)  # a seed that is unfinished
    write_policy(root / "64_16_5_2-3/200/0/test/sweet_no_privileged.jsonl", 1)  # and a cell
    write_policy(root / "64_16_5_2-3/200/0/episodes.jsonl", 1)

    done = make_grid_table(root, tmp_path)

    rows = json.loads((tmp_path / "grid.json").read_text())
    assert [(row["world"], row["tasks"], row["seed"]) for row in rows] == [
        ("64/10/5/4-5", 200, 0), ("64/10/5/4-5", 200, 1), ("64/16/5/2-3", 300, 0)]
    assert rows[1]["success"]["sweet"] == pytest.approx(5 / 6)
    assert rows[1]["credit_auc"] == {"sweet": 0.9, "sweet_no_privileged": 0.5}
    assert "| 64/10/5/4-5 | 200 | 2 | 25.0 |" in done.stdout
    assert "| +58.3 (+50.0, +66.7) | 0.900 | 0.550 |" in done.stdout
    assert "| 64/16/5/2-3 | 300 | 1 |" in done.stdout and "| +50.0 | 0.800 | 0.700 |" in done.stdout
    drawn = ElementTree.parse(tmp_path / "grid.svg").getroot()
    assert len(drawn.findall(".//{*}circle")) == 2 * len(rows[0]["success"])
    assert {text.text for text in drawn.findall(".//{*}text")} >= {
        "64/10/5/4-5", "64/16/5/2-3", "SWEET-RL", "without information"}


def test_a_grid_that_is_run_in_parts_gives_the_table_of_one_that_is_run_at_once(tmp_path):
    parts = [tmp_path / f"part{seed}" for seed in range(2)]
    for seed, part in enumerate(parts):
        write_cell(part / f"64_10_5_4-5/200/{seed}", seed, (0.9, 0.6))
        write_cell(tmp_path / f"whole/64_10_5_4-5/200/{seed}", seed, (0.9, 0.6))
    write_cell(parts[0] / "64_10_5_4-5/200/1", 1, (0.5, 0.5))  # run again in the second part

    make_grid_table(parts[0], tmp_path)
    in_parts = make_grid_table(parts[1], tmp_path).stdout
    (tmp_path / "grid.json").unlink()
    assert in_parts == make_grid_table(tmp_path / "whole", tmp_path).stdout
    assert "0.900" in in_parts


def test_the_table_of_the_seeds_compares_policies_on_the_seeds_that_both_have(tmp_path):
    root, table = tmp_path / "seeds", tmp_path / "seeds.json"
    for seed in range(2):
        for name, solved in BETTER.items():
            if name != "sweet_no_privileged" or seed == 0:  # an ablation may have fewer seeds
                write_policy(root / f"{seed}/test/{name}.jsonl", solved + seed)
    write_policy(root / "0/test/best_of_4.jsonl", 5)
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
            for name, solved in BETTER.items():
                write_policy(root / f"{seed}/test/{name}.jsonl", solved + seed)
            write_critic(root / f"{seed}/critic", 0.5, 0.75 + 0.1 * seed)
    for name in ("part0", "part1"):
        run_script("runs/toy_seeds.py", tmp_path / name, "--output", tmp_path / "parts.json")
    run_script("runs/toy_seeds.py", tmp_path / "whole", "--output", tmp_path / "whole.json")
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()
