"""The tables of the recipes that run many seeds.

Run: pytest tests/test_recipe_tables.py
"""

import json
from xml.etree import ElementTree

import pytest
from conftest import episode, run_script

from colbench import write_jsonl

BETTER = {"sweet": 4, "sweet_no_privileged": 1, "mtdpo": 2, "rft": 2, "base": 1, "single_turn": 0}


def write_policy(path, solved, tasks=6):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [episode(f"task{index}", float(index < solved)) for index in range(tasks)]
    write_jsonl(path, rows)


def write_critic(folder, *aucs):
    folder.mkdir(parents=True)
    rows = [{"step": step, "credit_auc/all": auc} for step, auc in enumerate(aucs)]
    write_jsonl(folder / "metrics.jsonl", rows)


def test_the_grid_compares_the_policies_of_each_cell_over_its_seeds(tmp_path):
    root, table, picture = tmp_path / "grid", tmp_path / "grid.json", tmp_path / "grid.svg"
    for cell, seeds in {"16-0-200": 2, "256-0.5-300": 1}.items():
        for seed in range(seeds):
            for name, solved in BETTER.items():
                write_policy(root / cell / str(seed) / "test" / f"{name}.jsonl", solved + seed)
            write_critic(root / cell / str(seed) / "sweet.critic", 0.5 + 0.1 * seed, 0.9)
            write_critic(root / cell / str(seed) / "sweet_no_privileged.critic", 0.6 - 0.1 * seed)
    write_policy(root / "16-0-200/2/test/base.jsonl", 1)  # a seed and a cell that are unfinished
    write_critic(root / "16-0-200/2/sweet.critic", 0.9)
    write_policy(root / "64-0-200/0/test/sweet_no_privileged.jsonl", 1, tasks=2)
    write_policy(root / "64-0-200/0/episodes.jsonl", 1)

    done = run_script("runs/toy_grid.py", root, "--output", table, "--picture", picture)

    first, second = json.loads(table.read_text())
    assert (first["topics"], first["prior"], first["tasks"], first["seeds"]) == (
        16, 0, 200, ["0", "1"])
    assert first["success_by_seed"]["sweet"] == pytest.approx([4 / 6, 5 / 6])
    assert first["gain"]["value"] == pytest.approx(3 / 6)
    assert first["credit_auc"] == {"sweet": [0.9, 0.9], "sweet_no_privileged": [0.6, 0.5]}
    assert second["topics"] == 256 and second["seeds"] == ["0"]
    assert "| 0 | 16 | 200 | 2 | 25.0 |" in done.stdout and "| +50.0 [" in done.stdout
    assert "] | 0.900 | 0.550 |" in done.stdout
    drawn = ElementTree.parse(picture).getroot()
    marks = drawn.findall(".//{*}circle")
    assert len(marks) == 2 * len(first["success_by_seed"])
    assert {text.text for text in drawn.findall(".//{*}text")} >= {
        "16 topics, prior 0", "256 topics, prior 0.5", "SWEET-RL", "without information"}


def test_the_table_of_the_seeds_compares_policies_on_the_seeds_that_both_have(tmp_path):
    root, table = tmp_path / "seeds", tmp_path / "seeds.json"
    for seed in range(2):
        for name, solved in BETTER.items():
            if name != "sweet_no_privileged" or seed == 0:  # an ablation may have fewer seeds
                write_policy(root / str(seed) / "test" / name / f"{name}.jsonl", solved + seed)
    for name, counts in {"best_of_n": (1, 2, 4, 8, 16), "best_of_n_no_privileged": (8, 16)}.items():
        policies = {f"base-best-of-{n}": {"success_by_seed": [n / 16]} for n in counts}
        folder = root / "0/test" / name
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"policies": policies}))
    write_critic(root / "0/critic", 0.5, 0.75)

    run_script("runs/toy_seeds.py", root, "--output", table)

    found = json.loads(table.read_text())
    assert found["sweet"] == pytest.approx([4 / 6, 5 / 6])
    assert found["sweet_no_privileged"] == pytest.approx([1 / 6])
    assert found["differences"]["sweet - base"]["value"] == pytest.approx(3 / 6)
    assert found["differences"]["sweet - sweet_no_privileged"]["value"] == pytest.approx(3 / 6)
    assert found["credit_auc"] == [0.75]
    assert found["best_of_n"] == {"1": [1 / 16], "2": [2 / 16], "4": [4 / 16], "8": [0.5],
                                  "16": [1.0]}
