"""When does it pay? The table and the picture of the grid that runs/toy_grid.sh has run.

    python runs/toy_grid.py runs/out/grid

Reads: what runs/toy_grid.sh left in ROOT/CELL/SEED, a cell being a world and a number of tasks.
Prints: a table to paste.
Writes: runs/out/toy_grid.json, for each cell what runs/toy_seeds.py writes of it, and
docs/grid.svg. A cell and seed that this file already has stay unless ROOT has them, too.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs.toy_seeds import table_of  # noqa: E402
from runtime.text import markdown, with_interval  # noqa: E402

LINES = {  # policy -> its name in table and picture, its colour in both colour schemes
    "sweet": ("SWEET-RL", "#0072b2"),
    "sweet_positive_vs_negative": ("with positive_vs_negative", "#8f7ee7"),
    "sweet_no_privileged": ("critic without the solution", "#d55e00"),
    "rft": ("rejection fine-tuning", "#009e73"),
    "base": ("base", "#8b939c"),
}
STYLE = """<style>
  text { font: 13px sans-serif; fill: #1c1e21 }
  .page { fill: #fff } .rule { stroke: #dcdfe3 } .quiet { fill: #5d636b }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e5e7 } .page { fill: #15171a } .rule { stroke: #33373d }
    .quiet { fill: #9aa0a8 }
  }
</style>"""
WIDTH, HEIGHT, LEFT = 220, 180, 50  # of a panel's axes


def cell_of(name):
    """(details that a topic makes likely, training tasks) of a directory's name."""
    world, tasks = name.split(".")
    return int(world.split("_")[2]), int(tasks)


def table(cells):
    rows = [["likely details", "tasks", *(name for name, _ in LINES.values()),
             "SWEET-RL minus rejection fine-tuning", "AUC with, without the solution"]]
    for name in sorted(cells, key=cell_of):
        means, differences, aucs = (cells[name][key]
                                    for key in ("means", "differences", "credit_auc"))
        auc = []
        for policy in ("sweet", "sweet_no_privileged"):
            found = [seed["credit_auc/all"] for seed in aucs[policy].values()]
            auc.append(f"{sum(found) / len(found):.3f}")
        rows.append([*map(str, cell_of(name)),
                     *(with_interval(means[policy], 100) for policy in LINES),
                     with_interval(differences["sweet - rft"], 100, sign="+"), ", ".join(auc)])
    return rows


def picture(cells):
    """An SVG with a panel for each number of tasks: success against the likely details."""
    all_tasks = sorted({cell_of(name)[1] for name in cells})
    shares = {name: {policy: 100 * found["means"][policy]["value"] for policy in LINES}
              for name, found in cells.items()}
    parts = []
    for panel, tasks in enumerate(all_tasks):
        found = sorted((cell_of(name)[0], shares[name]) for name in cells
                       if cell_of(name)[1] == tasks)
        least, most = found[0][0], found[-1][0]
        x = {likely: LEFT + 10 + (WIDTH - 20) * (likely - least) / max(1, most - least)
             for likely, _ in found}
        parts.append(f'<g transform="translate({panel * (WIDTH + 60)} 0)">'
                     f'<text x="{LEFT}" y="20">{tasks} training tasks</text>')
        for share in (0, 50, 100):
            y = 36 + HEIGHT * (1 - share / 100)
            parts.append(f'<line class="rule" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}"'
                         f' y2="{y}"/>'
                         f'<text class="quiet" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">'
                         f"{share} %</text>")
        for likely, at in x.items():
            parts.append(f'<text class="quiet" x="{at}" y="{HEIGHT + 54}" text-anchor="middle">'
                         f"{likely}</text>")
        for policy, (_, colour) in LINES.items():
            points = [(x[likely], 36 + HEIGHT * (1 - share[policy] / 100))
                      for likely, share in found]
            line = " ".join(f"{at:.1f},{y:.1f}" for at, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"'
                         ' stroke-width="2"/>')
            parts += [f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
                      for at, y in points]
        parts.append("</g>")
    left, bottom = 60 * len(all_tasks) + WIDTH * len(all_tasks), HEIGHT + 78
    parts.append(f'<text class="quiet" x="{LEFT}" y="{bottom}">likely details, of which a task'
                 " needs 4 or 5; success on test tasks</text>")
    for index, (name, colour) in enumerate(LINES.values()):
        y = 48 + 24 * index
        parts.append(f'<circle cx="{left + 6}" cy="{y - 4}" r="5" fill="{colour}"/>'
                     f'<text x="{left + 18}" y="{y}">{name}</text>')
    width, height = left + 220, bottom + 16
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">\n<title>Success against how many'
            f' questions of a topic are useful</title>\n{STYLE}\n'
            f'<rect class="page" width="{width}" height="{height}"/>\n' + "\n".join(parts)
            + "\n</svg>\n")


def main(args):
    cells = json.loads(args.output.read_text()) if args.output.exists() else {}
    for folder in sorted(path for path in args.root.iterdir() if path.is_dir()):
        cells[folder.name] = table_of(folder, cells.get(folder.name, {}))
    print(markdown(table(cells)))
    args.output.write_text(json.dumps(cells, indent=1) + "\n")
    args.picture.write_text(picture(cells))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="directory of the runs, see above")
    parser.add_argument("--output", type=Path, default=Path("runs/out/toy_grid.json"),
                        help="the table as JSON (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("docs/grid.svg"),
                        help="default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
