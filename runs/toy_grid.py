"""When does it pay? The table of the grid that runs/toy_grid.sh has run.

    python runs/toy_grid.py runs/out/grid

Reads: what runs/toy_grid.sh left in ROOT/CELL/SEED, a cell being a world and a number of tasks.
Prints: a table to paste.
Writes: ROOT/table.json: for each cell what runs/toy_seeds.py writes of it.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs.toy_seeds import table_of
from runtime.text import markdown, with_interval

POLICIES = {  # -> their names in the table
    "sweet": "SWEET-RL",
    "sweet_positive_vs_negative": "with positive_vs_negative",
    "sweet_no_privileged": "critic without the solution",
    "rft": "rejection fine-tuning",
    "base": "base",
}


def cell_of(name):
    """(details that a topic makes likely, training tasks) of a directory's name."""
    world, tasks = name.split(".")
    return int(world.split("_")[2]), int(tasks)


def table(cells):
    rows = [["likely details", "tasks", *POLICIES.values(),
             "SWEET-RL's lead over rejection fine-tuning", "AUC with, without the solution"]]
    for name in sorted(cells, key=cell_of):
        cell, auc = cells[name], []
        for policy in ("sweet", "sweet_no_privileged"):
            found = [seed["credit_auc/all"] for seed in cell["credit_auc"][policy].values()]
            auc.append(f"{sum(found) / len(found):.3f}")
        rows.append([*map(str, cell_of(name)),
                     *(with_interval(cell["means"][policy], 100) for policy in POLICIES),
                     with_interval(cell["differences"]["sweet - rft"], 100, sign="+"),
                     ", ".join(auc)])
    return rows


def main(args):
    folders = sorted(path for path in args.root.glob("*") if path.is_dir())
    cells = {folder.name: table_of(folder) for folder in folders}
    if not cells:
        raise SystemExit(f"{args.root}: found no cell of the grid, expected the directory of its"
                         " runs; run runs/toy_grid.sh first")
    print(markdown(table(cells)))
    (args.root / "table.json").write_text(json.dumps(cells, indent=1) + "\n")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="directory of the runs, see above")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
