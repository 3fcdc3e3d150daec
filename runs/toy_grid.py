"""The table of the grid that runs/toy_grid.sh has run: when does training-time information pay?

    python runs/toy_grid.py runs/out/grid

Reads: the test episodes and the critics' metrics of ROOT/TOPICS-PRIOR-TASKS/SEED. Cells that have
not been run are omitted.
Prints: a table to paste. Writes: runs/out/toy_grid.json with success by seed of every policy, what
SWEET-RL gains by training-time information, with its 95 % interval, and the critics' AUC against
true credit; docs/grid.svg, a panel for each world, success against the number of training tasks.
"""

import json
import math
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from colbench import read_episodes  # noqa: E402
from evaluate import score  # noqa: E402
from report.statistics import compare  # noqa: E402
from runs.toy_seeds import SCORING, credit_aucs, points, table_parser  # noqa: E402

POLICIES = ("base", "rft", "mtdpo", "sweet", "sweet_no_privileged")
LINES = {  # policy -> its name in table and picture, colour (of both colour schemes), dashes
    "sweet": ("SWEET-RL", "#0072b2", ""),
    "sweet_no_privileged": ("without information", "#d55e00", "7 3"),
    "mtdpo": ("multi-turn DPO", "#8f7ee7", "2 3"),
    "rft": ("rejection fine-tuning", "#009e73", "9 3 2 3"),
    "base": ("base", "#8b939c", "1 4"),
}
HEADER = ("base's prior", "topics", "tasks", "seeds", *(LINES[name][0] for name in POLICIES),
          "gained by information", "AUC with", "AUC without")


def read_cells(root):
    """[((topics, prior, tasks), [test directory of each seed])], in the order of the table."""
    cells = {}
    for path in root.glob("*-*-*/*/test/sweet_no_privileged.jsonl"):
        if (path.parent.parent / "episodes.jsonl").exists():  # a finished cell has none
            continue
        topics, prior, tasks = path.relative_to(root).parts[0].split("-")
        key = (float(prior), int(topics), int(tasks))
        cells.setdefault(key, []).append(path.parent)
    return [((topics, prior, tasks), sorted(cells[prior, topics, tasks]))
            for prior, topics, tasks in sorted(cells)]


def score_cell(folders):
    """Of the test directories of a cell: success of each policy by seed; what information gains,
    with its interval over tasks and seeds; the AUC of both critics by seed.
    """
    episodes = {name: [read_episodes(folder / f"{name}.jsonl") for folder in folders]
                for name in POLICIES}
    results, values, draws = score(episodes, SCORING)
    gain = compare(values["sweet"], values["sweet_no_privileged"], "success", draws)["difference"]
    success = {name: results["policies"][name]["success_by_seed"] for name in POLICIES}
    aucs = {}
    for name in ("sweet", "sweet_no_privileged"):
        metrics = credit_aucs(folder.with_name(f"{name}.critic") / "metrics.jsonl"
                              for folder in folders)
        aucs[name] = [seed["credit_auc/all"] for seed in metrics]
    return success, gain, aucs


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


def draw(table):
    """The grid as SVG: a row of panels for each prior of the base, a column for each world."""
    priors = sorted({cell["prior"] for cell in table})
    topics = sorted({cell["topics"] for cell in table})
    counts = sorted({cell["tasks"] for cell in table})
    highest = max(mean(by_seed) for cell in table for by_seed in cell["success_by_seed"].values())
    top = math.ceil(highest * 10) / 10
    panels = []
    for row, prior in enumerate(priors):
        for column, number in enumerate(topics):
            cells = [cell for cell in table
                     if cell["prior"] == prior and cell["topics"] == number]
            panels.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">'
                          f'{draw_panel(cells, f"{number} topics, prior {prior:g}", counts, top)}'
                          "</g>")
    width = max(len(topics) * WIDTH, 690)  # of the panels, or of the legend
    height = len(priors) * HEIGHT + 50
    legend = "".join(
        f'<line x1="{x}" x2="{x + 26}" y1="{height - 22}" y2="{height - 22}" {stroke(name)}/>'
        f'<text x="{x + 32}" y="{height - 18}">{LINES[name][0]}</text>'
        for name, x in zip(LINES, (10, 125, 300, 440, 615), strict=True))
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
        marks = [(x(cell["tasks"]), y(mean(cell["success_by_seed"][name]))) for cell in cells]
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
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    table = []
    for (topics, prior, tasks), folders in read_cells(args.root):
        success, gain, aucs = score_cell(folders)
        table.append({"topics": topics, "prior": prior, "tasks": tasks,
                      "seeds": [folder.parent.name for folder in folders],
                      "success_by_seed": success, "gain": gain, "credit_auc": aucs})
        means = [f"{100 * mean(by_seed):.1f}" for by_seed in success.values()]
        ranked = [f"{mean(by_seed):.3f}" for by_seed in aucs.values()]
        cells = [f"{prior:g}", topics, f"{tasks:,}", len(folders), *means, points(gain), *ranked]
        print("| " + " | ".join(str(cell) for cell in cells) + " |")
    args.output.write_text(json.dumps(table, indent=1) + "\n")
    args.picture.write_text(draw(table))


def parse_args(argv=None):
    parser = table_parser(__doc__, "runs/out/toy_grid.json")
    parser.add_argument("--picture", type=Path, default=Path("docs/grid.svg"),
                        help="the table as SVG (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
