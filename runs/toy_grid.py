"""The table of the grid that runs/toy_grid.sh has run: when does SWEET-RL pay?

    python runs/toy_grid.py runs/out/grid

Reads: the test episodes and the critics' metrics of ROOT/WORLD/TASKS/SEED. Seeds of a cell
that have not been run are omitted.
Prints: a table to paste.
Writes: runs/out/toy_grid.json, for each cell and seed the success of every policy and the critics'
AUC against true credit. A row that is in this file already stays unless ROOT has the same cell and
seed, so that a grid may be run in parts, on several machines.
And docs/grid.svg: a panel for each world, success against the number of training tasks.
"""

import itertools
import json
import math
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluate import score  # noqa: E402
from formats.read import read_episodes  # noqa: E402
from runs.toy_seeds import credit_metrics, table_parser  # noqa: E402

POLICIES = ("base", "rft", "sweet", "sweet_positive_vs_negative", "sweet_no_privileged")
CELL = ("world", "tasks")
CRITICS = {"sweet": "critic_ground_truth", "sweet_no_privileged": "critic_none"}
LINES = {  # policy -> its name in table and picture, colour (of both colour schemes), dashes
    "sweet": ("SWEET-RL", "#0072b2", ""),
    "sweet_positive_vs_negative": ("positive against negative", "#8f7ee7", "2 3"),
    "sweet_no_privileged": ("without information", "#d55e00", "7 3"),
    "rft": ("rejection fine-tuning", "#009e73", "9 3 2 3"),
    "base": ("base", "#8b939c", "1 4"),
}
HEADER = ("world", "tasks", "seeds", *(LINES[name][0] for name in POLICIES),
          "gained by information (seed by seed)", "AUC with", "AUC without")


def read_grid(root):
    """A row of the table's file for each cell and seed that is finished."""
    rows = []
    for path in root.glob("*/*/*/test/sweet_no_privileged.jsonl"):
        folder = path.parent.parent
        if (folder / "episodes.jsonl").exists():  # a finished cell has none
            continue
        world, tasks, seed = folder.relative_to(root).parts
        rows.append({"world": world.replace("_", "/"), "tasks": int(tasks), "seed": int(seed)}
                    | score_seed(folder))
    return rows


def score_seed(folder):
    """Success of each policy, and the AUC of both critics, in one cell with one seed."""
    episodes = {name: [read_episodes(folder / f"test/{name}.jsonl")] for name in POLICIES}
    results = score(episodes)
    success = {name: results["policies"][name]["success_by_seed"][0] for name in POLICIES}
    aucs = {}
    for name, critic in CRITICS.items():
        aucs[name] = credit_metrics(folder / critic / "metrics.jsonl")["credit_auc/all"]
    return {"success": success, "credit_auc": aucs}


def merge(old, new):
    """The rows of both, in the order of the table; a new row replaces an old one of its seed."""
    rows = {tuple(row[key] for key in (*CELL, "seed")): row for row in old + new}
    return [rows[key] for key in sorted(rows)]


def cell_means(rows):
    """The seeds of each cell together: means, and what information gains with each seed."""
    cells = []
    for key, group in itertools.groupby(rows, lambda row: [row[name] for name in CELL]):
        seeds = list(group)
        cells.append(dict(zip(CELL, key, strict=True)) | {
            "success": mean_by_name(seed["success"] for seed in seeds),
            "credit_auc": mean_by_name(seed["credit_auc"] for seed in seeds),
            "gains": [seed["success"]["sweet"] - seed["success"]["sweet_no_privileged"]
                      for seed in seeds],
        })
    return cells


def mean_by_name(seeds):
    seeds = list(seeds)
    return {name: mean(seed[name] for seed in seeds) for name in seeds[0]}


# -----------------------------------------------------------------------------
# Picture

STYLE = """
  text { font: 13px sans-serif; fill: #1c1e21 }
  .page { fill: #fff } .rule { stroke: #dcdfe3 } .quiet { fill: #5d636b }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e5e7 } .page { fill: #15171a } .rule { stroke: #33373d }
    .quiet { fill: #9aa0a8 }
  }
"""
WIDTH, HEIGHT = 250, 190  # of a panel, with its margins
LEFT, TOP, RIGHT, BOTTOM = 40, 36, 10, 24  # margins


def draw(cells):
    """The grid as SVG: a panel for each world."""
    worlds = sorted({cell["world"] for cell in cells})
    counts = sorted({cell["tasks"] for cell in cells})
    highest = max(success for cell in cells for success in cell["success"].values())
    top = math.ceil(highest * 10) / 10
    panels = []
    for column, world in enumerate(worlds):
        panel = [cell for cell in cells if cell["world"] == world]
        panels.append(f'<g transform="translate({column * WIDTH} 0)">'
                      f"{draw_panel(panel, world, counts, top)}</g>")
    width = max(len(worlds) * WIDTH, 760)  # of the panels, or of the legend
    height = HEIGHT + 50
    legend = "".join(
        f'<line x1="{x}" x2="{x + 26}" y1="{height - 22}" y2="{height - 22}" {stroke(name)}/>'
        f'<text x="{x + 32}" y="{height - 18}">{LINES[name][0]}</text>'
        for name, x in zip(LINES, (10, 125, 330, 500, 690), strict=True))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n'
            "<title>Success on test tasks against the number of training tasks</title>\n"
            f'<style>{STYLE}</style>\n<rect class="page" width="{width}" height="{height}"/>\n'
            + "\n".join([*panels, legend]) + "\n</svg>\n")


def draw_panel(cells, title, counts, top):
    """Success of each policy, from 0 to `top`, against the number of tasks, one of `counts`."""
    def x(tasks):
        step = (WIDTH - LEFT - RIGHT - 40) / max(1, len(counts) - 1)
        return LEFT + 20 + step * counts.index(tasks)

    def y(success):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * success / top

    parts = [f'<text x="{LEFT}" y="20">{title}</text>']
    for share in (0, top / 2, top):
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" '
                     f'y2="{y(share):.1f}"/><text class="quiet" x="{LEFT - 6}" '
                     f'y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    for tasks in counts:
        parts.append(f'<text class="quiet" x="{x(tasks):.1f}" y="{HEIGHT - 6}" '
                     f'text-anchor="middle">{tasks:,}</text>')
    for name in LINES:
        marks = [(x(cell["tasks"]), y(cell["success"][name])) for cell in cells]
        joined = " ".join(f"{left:.1f},{height:.1f}" for left, height in marks)
        parts.append(f'<polyline points="{joined}" {stroke(name)}/>')
        parts += [f'<circle cx="{left:.1f}" cy="{height:.1f}" r="3" fill="{LINES[name][1]}"/>'
                  for left, height in marks]
    return "".join(parts)


def stroke(name):
    _, colour, dashes = LINES[name]
    return f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'


# -----------------------------------------------------------------------------
# Main


def main(args):
    old = json.loads(args.output.read_text()) if args.output.exists() else []
    rows = merge(old, read_grid(args.root))
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    cells = cell_means(rows)
    args.picture.write_text(draw(cells))
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for cell in cells:
        print("| " + " | ".join(table_line(cell)) + " |")


def table_line(cell):
    gains = [f"{100 * gain:+.1f}" for gain in cell["gains"]]
    gained = f"{100 * mean(cell['gains']):+.1f} ({', '.join(gains)})" if gains[1:] else gains[0]
    success = [f"{100 * share:.1f}" for share in cell["success"].values()]
    aucs = [f"{auc:.3f}" for auc in cell["credit_auc"].values()]
    return [cell["world"], f"{cell['tasks']:,}", f"{len(gains)}", *success, gained, *aucs]


def parse_args(argv=None):
    parser = table_parser(__doc__, "runs/out/toy_grid.json")
    parser.add_argument("--picture", type=Path, default=Path("docs/grid.svg"),
                        help="the table as SVG (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
