"""The table of all seeds of the embedded experiment, which runs/toy_seeds.sh has run.

    python runs/toy_seeds.py runs/out/seeds

Reads: what runs/toy.sh, runs/ablations.sh and runs/iterate.sh left in ROOT/SEED for each seed.
Prints: a table to paste, differences with 95 % intervals, and the critics' AUC.
Writes: ROOT/table.json: what each policy reached on every test task with each seed, means,
differences, and how true the critics' advantages are.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluate import SHARE, compare, draw_counts, interval
from formats.read import read_episodes
from runtime.files import read_jsonl
from runtime.text import markdown, with_interval

POLICIES = [
    "base", "single_turn", "rft", "mtdpo", "sweet",
    "sweet_no_privileged", "sweet_no_normalise", "sweet_trajectory", "sweet_plain",
    "sweet_official", "sweet_value_head", "sweet_untrained", "sweet_credit", "sweet_random",
    "sweet_positive_vs_negative", "sweet_lora", "sweet_round2", "best_of_2", "best_of_4",
    "best_of_8", "best_of_16", "best_of_8_no_privileged", "best_of_16_no_privileged",
]
PAIRS = [  # besides sweet - every other policy
    ("rft", "base"),
    ("mtdpo", "base"),
    ("base", "single_turn"),
]
# the directory of a policy's critic in that of a seed; of others it is NAME/critic or NAME
CRITICS = {"sweet": ["critic"], "sweet_round2": ["iterate/round2/critic"]}
DRAWS = 2000  # of the bootstrap


def read_outcomes(root):
    """Policy name -> seed -> a number for each test task: success, or of pages the reward."""
    found = {}
    for name in POLICIES:
        for path in sorted(root.glob(f"[0-9]*/**/{name}.jsonl")):
            numbers = []
            for episode in read_episodes(path):
                number = episode["reward"] if episode["success"] is None else episode["success"]
                numbers.append(math.nan if episode["error"] else round(float(number), 4))
            seed = path.relative_to(root).parts[0]
            found.setdefault(name, {})[seed] = numbers
    return found


def read_aucs(root):
    """Policy name -> seed -> the last value of each number in its critic's metrics on true credit.
    """
    found = {}
    for name in POLICIES:
        for critic in CRITICS.get(name, [f"{name}/critic", name]):
            for path in sorted(root.glob(f"[0-9]*/{critic}/metrics.jsonl")):
                last = credit_metrics(path)
                if last:  # pages and baselines have no credit
                    found.setdefault(name, {})[path.relative_to(root).parts[0]] = last
    return found


def credit_metrics(path):
    """The last value of each number of a critic's metrics.jsonl that true credit gave."""
    last = {}
    for _, metrics in read_jsonl(path):
        last |= {key: value for key, value in metrics.items()
                 if key.startswith(("credit_auc/", "halves/"))}
    return last


def texts_of(outcomes):
    """The outcomes as the file has them: a text for each policy and seed."""
    return {name: {seed: " ".join(f"{number:g}" for number in numbers)
                   for seed, numbers in seeds.items()} for name, seeds in outcomes.items()}


def tabulate(outcomes):
    """(means, differences): name -> number with its interval, and the seeds that it is of."""
    counts = {len(numbers) for seeds in outcomes.values() for numbers in seeds.values()}
    if len(counts) > 1:
        raise SystemExit(f"found runs on {' and '.join(map(str, sorted(counts)))} test tasks,"
                         " expected all on the same; give a directory whose runs had the same test"
                         " tasks")
    if not counts:
        raise SystemExit("found no test episodes of these policies, expected those that"
                         " runs/toy_seeds.sh writes; give the directory of its runs")
    tasks, = counts
    task_draws = draw_counts(numpy.random.default_rng(0), tasks, DRAWS)

    def runs(name, seeds):
        return numpy.array([outcomes[name][seed] for seed in sorted(seeds)])  # (R, T)

    means, differences = {}, {}
    for name, seeds in outcomes.items():
        # a generator for each row: its interval does not depend on the other rows
        draws = draw_counts(numpy.random.default_rng(1), len(seeds), DRAWS)
        means[name] = interval(runs(name, seeds), draws, task_draws, SHARE) | {
            "seeds": sorted(seeds)}
    pairs = [("sweet", name) for name in outcomes if name != "sweet"] + PAIRS
    for left, right in pairs:
        seeds = outcomes.get(left, {}).keys() & outcomes.get(right, {}).keys()
        if seeds:  # an ablation may have fewer than others
            generator = numpy.random.default_rng(1)
            draws = [draw_counts(generator, len(seeds), DRAWS) for _ in range(2)]
            found = compare(runs(left, seeds), runs(right, seeds), *draws, task_draws)
            if found:  # None: no test task was finished in all runs of both
                differences[f"{left} - {right}"] = found["difference"] | {"seeds": sorted(seeds)}
    return means, differences


def table_of(root):
    """What the file holds of the runs in ROOT."""
    outcomes = read_outcomes(root)
    means, differences = tabulate(outcomes)
    return {"means": means, "differences": differences, "credit_auc": read_aucs(root),
            "outcomes": texts_of(outcomes)}


def main(args):
    table = table_of(args.root)
    means, differences = table["means"], table["differences"]
    rows = [["policy", "seeds", "%", "SWEET-RL's lead", "AUC"]]
    for name, seeds in table["outcomes"].items():
        difference = with_interval(differences.get(f"sweet - {name}"), 100, sign="+")
        auc = [seed["credit_auc/all"] for seed in table["credit_auc"].get(name, {}).values()]
        rows.append([name, str(len(seeds)), with_interval(means[name], 100), difference,
                     f"{numpy.mean(auc):.3f}" if auc else ""])
    print(markdown(rows))
    for left, right in PAIRS:
        if f"{left} - {right}" in differences:
            print(f"{left} - {right}:"
                  f" {with_interval(differences[f'{left} - {right}'], 100, sign='+')}")
    (args.root / "table.json").write_text(json.dumps(table, indent=1) + "\n")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="directory of the runs, see above")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
