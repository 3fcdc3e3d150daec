"""The table of the grid that runs/toy_grid.sh has run: when does training-time information pay?

    python runs/toy_grid.py runs/out/grid

Reads: the test episodes of ROOT/TOPICS-PRIOR-TASKS/SEED. Cells that have not been run are omitted.
Prints: a table to paste. Writes: runs/out/toy_grid.json with success by seed of every policy, and
what SWEET-RL gains by training-time information, with its 95 % interval.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from colbench import read_episodes  # noqa: E402
from evaluate import score  # noqa: E402
from report.statistics import compare  # noqa: E402
from runs.toy_seeds import SCORING, parse_table_args, points  # noqa: E402

POLICIES = ("base", "rft", "mtdpo", "sweet", "sweet_no_privileged")
HEADER = ("topics", "base's prior", "tasks", "seeds", "base", "rejection fine-tuning",
          "multi-turn DPO", "SWEET-RL", "without information", "gained by information")


def read_cells(root):
    """[((topics, prior, tasks), [test directory of each seed])], in the order of the table."""
    cells = {}
    for path in root.glob("*-*-*/*/test/sweet_no_privileged.jsonl"):
        topics, prior, tasks = path.relative_to(root).parts[0].split("-")
        key = (float(prior), int(topics), int(tasks))
        cells.setdefault(key, []).append(path.parent)
    return [((topics, prior, tasks), sorted(cells[prior, topics, tasks]))
            for prior, topics, tasks in sorted(cells)]


def score_cell(folders):
    """Success of each policy by seed, and the gain with its interval over tasks and seeds."""
    episodes = {name: [read_episodes(folder / f"{name}.jsonl") for folder in folders]
                for name in POLICIES}
    results, values, draws = score(episodes, SCORING)
    gain = compare(values["sweet"], values["sweet_no_privileged"], "success", draws)["difference"]
    success = {name: results["policies"][name]["success_by_seed"] for name in POLICIES}
    return success, gain


def main(args):
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    table = []
    for (topics, prior, tasks), folders in read_cells(args.root):
        success, gain = score_cell(folders)
        table.append({"topics": topics, "prior": prior, "tasks": tasks,
                      "seeds": [folder.parent.name for folder in folders],
                      "success_by_seed": success, "gain": gain})
        means = [f"{100 * sum(by_seed) / len(by_seed):.1f}" for by_seed in success.values()]
        cells = [topics, f"{prior:g}", f"{tasks:,}", len(folders), *means,
                 points(gain)]
        print("| " + " | ".join(str(cell) for cell in cells) + " |")
    args.output.write_text(json.dumps(table, indent=1) + "\n")


def parse_args(argv=None):
    return parse_table_args(__doc__, "runs/out/toy_grid.json", argv)


if __name__ == "__main__":
    main(parse_args())
