"""The table of all seeds of the embedded experiment, which runs/toy_seeds.sh has run.

    python runs/toy_seeds.py runs/out/seeds

Reads: what runs/toy.sh, runs/ablations.sh and runs/iterate.sh left in ROOT/SEED for each seed.
Prints: a table to paste, and differences with 95 % intervals.
Writes: runs/out/toy_seeds.json with success (of pages, the reward) by seed, differences, and the
AUC of the critics' advantages against true credit.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from colbench import read_episodes  # noqa: E402
from evaluate import main_metric, markdown, policy_table, score  # noqa: E402
from runtime.files import read_jsonl  # noqa: E402

POLICIES = [
    "base", "single_turn", "rft", "mtdpo", "sweet",
    "sweet_no_privileged", "sweet_no_normalise", "sweet_trajectory", "sweet_value_head",
    "sweet_untrained", "sweet_credit", "sweet_random", "sweet_positive_vs_negative", "sweet_lora",
    "sweet_round2", "best_of_2", "best_of_4", "best_of_8", "best_of_16",
    "best_of_8_no_privileged", "best_of_16_no_privileged",
]
PAIRS = [  # besides sweet - every other policy
    ("rft", "base"),
    ("mtdpo", "base"),
    ("base", "single_turn"),
]
CRITICS = {  # key of the table -> directory in that of a seed
    "credit_auc": "critic",
    "credit_auc_no_privileged": "sweet_no_privileged/critic",
    "credit_auc_no_normalise": "sweet_no_normalise/critic",
    "credit_auc_trajectory": "sweet_trajectory/critic",
    "credit_auc_value_head": "sweet_value_head/critic",
    "credit_auc_untrained": "sweet_untrained/critic",
    "credit_auc_lora": "sweet_lora/critic",
    "credit_auc_round2": "iterate/round2/critic",
}


def read_seeds(root):
    """Policy name -> seed -> episodes, of the policies that were played."""
    runs = {}
    for name in POLICIES:
        found = {}
        for path in root.glob(f"[0-9]*/**/{name}.jsonl"):
            seed = path.relative_to(root).parts[0]
            found[seed] = read_episodes(path)
        if found:
            runs[name] = found
    return runs


def score_seeds(runs, names, seeds):
    """evaluate.score of these policies on these seeds, as far as they were played.

    All are compared with the first.
    """
    policies = {}
    for name in names:
        policies[name] = [runs[name][seed] for seed in sorted(seeds) if seed in runs[name]]
    return score(policies)


def differences(runs, metric):
    """Name -> difference in the metric and its interval, on the seeds that both policies have."""
    pairs = [("sweet", name) for name in runs if name != "sweet"]
    pairs += [(left, right) for left, right in PAIRS if left in runs and right in runs]
    found = {}
    for left, right in pairs:
        seeds = runs[left].keys() & runs[right].keys()  # an ablation may have fewer seeds
        for pair in score_seeds(runs, [right, left], seeds)["pairs"]:
            if pair["metric"] == metric:
                found[f"{left} - {right}"] = pair["difference"]
    return found


def credit_aucs(paths):
    """For each seed's critic, the last value of each `credit_auc/...` in its metrics.jsonl."""
    found = []
    for path in paths:
        last = {}
        for _, metrics in read_jsonl(path):
            last |= {key: value for key, value in metrics.items() if "credit_auc" in key}
        found.append(last)
    return found


def points(difference):
    """A difference and its interval in percentage points."""
    value, low, high = (100 * difference[key] for key in ("value", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def main(args):
    runs = read_seeds(args.root)
    results = score_seeds(runs, list(runs), runs["base"])
    print(markdown(policy_table(results)))

    policies, metric = results["policies"], main_metric(results)
    table = {name: entry[f"{metric}_by_seed"] for name, entry in policies.items()}
    table["differences"] = differences(runs, metric)
    table["mean"] = {name: entry["numbers"][metric] for name, entry in policies.items()}
    for name, number in table["differences"].items():
        print(f"{name}: {points(number)}")
    for name, critic in CRITICS.items():
        aucs = credit_aucs(sorted(args.root.glob(f"[0-9]*/{critic}/metrics.jsonl")))
        table[name] = [seed["credit_auc/all"] for seed in aucs if seed]  # pages have no credit
        table[f"{name}_by_kind"] = aucs
    args.output.write_text(json.dumps(table, indent=1) + "\n")
    print({name: table[name] for name in ("credit_auc", "credit_auc_no_privileged")})


def table_parser(description, output):
    """The flags of a script that makes a table of finished runs."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="directory of the runs, see above")
    parser.add_argument("--output", type=Path, default=Path(output),
                        help="the table as JSON (default: %(default)s)")
    return parser


def parse_args(argv=None):
    return table_parser(__doc__, "runs/out/toy_seeds.json").parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
