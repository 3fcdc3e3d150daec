#!/usr/bin/env bash
# N seeds of the embedded experiment: a table, and runs/out/toy_seeds.json. ONLY=toy leaves out ablations, best of N, round 2.
set -euo pipefail
cd "$(dirname "$0")/.."
export N=${1:-5} ROOT=${ROOT:-runs/out/seeds} TASKS=${TASKS:-1500}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for SEED in $(seq 0 $((N - 1))); do export SEED OUT=$ROOT/$SEED
  [ -f "$OUT/report.html" ] || runs/toy.sh
  [ "${ONLY:-}" = toy ] || {
    FIRST=2 MODEL=$OUT/sweet EARLIER=$OUT/episodes.jsonl OUT=$OUT/iterate runs/iterate.sh & runs/ablations.sh; wait $!; }
done
python - "$ROOT" <<'END'
import argparse, json, pathlib, sys
from evaluate import compare, lines_of, policy_table, read_episodes, score
root, names = pathlib.Path(sys.argv[1]), """base single_turn rft mtdpo sweet sweet_no_privileged sweet_no_normalise sweet_value_head
    sweet_round2 sweet_any_gap sweet_any_gap_no_privileged""".split()
runs = {name: found for name in names if (found := { # name -> seed -> episodes
    path.relative_to(root).parts[0]: read_episodes(path) for path in root.glob(f"[0-9]*/**/{name}.jsonl")})}
def scored(names, seeds):
    policies = {name: [runs[name][seed] for seed in sorted(seeds) if seed in runs[name]] for name in names}
    return score(policies, argparse.Namespace(seed=0, draws=2000, leak_threshold=0.5))
print("\n".join(lines_of(policy_table(results := scored(runs, runs["base"])[0]), markdown=True)))
table = {name: entry["success_by_seed"] for name, entry in results["policies"].items()} | {"differences": {}}
table["mean"] = {name: entry["numbers"]["success"] for name, entry in results["policies"].items()}
pairs = ("rft", "base"), ("mtdpo", "base"), ("base", "single_turn"), ("sweet_any_gap", "sweet_any_gap_no_privileged")
for a, b in [("sweet", name) for name in runs if name != "sweet"] + [pair for pair in pairs if {*pair} <= {*runs}]:
    _, tables, draws = scored([a, b], runs[a].keys() & runs[b].keys()) # an ablation may have fewer seeds
    number = table["differences"][f"{a} - {b}"] = compare(tables[a], tables[b], "success", draws)["difference"]
    print(f"{a} - {b}: {100 * number['value']:+.1f} [{100 * number['low']:+.1f}, {100 * number['high']:+.1f}]")
for kind in ("", "_no_privileged", "_no_normalise", "_value_head", "_round2"):
    name, critic = f"credit_auc{kind}", {"": "critic", "_round2": "iterate/round2/critic"}.get(kind, f"sweet{kind}/critic")
    logs = [path.read_text().splitlines() for path in sorted(root.glob(f"[0-9]*/{critic}/metrics.jsonl"))]
    kinds = [{key: value for line in log for key, value in json.loads(line).items() if "credit_auc" in key} for log in logs]
    table |= {name: [seed["credit_auc/all"] for seed in kinds], f"{name}_by_kind": kinds}
for kind, counts in (("best_of_n", (1, 2, 4, 8, 16)), ("best_of_n_no_privileged", (8, 16))):
    best = [json.loads(path.read_text())["policies"] for path in sorted(root.glob(f"[0-9]*/test/{kind}/results.json"))]
    table[kind] = {n: [seed[f"base-best-of-{n}"]["success_by_seed"][0] for seed in best] for n in counts}
pathlib.Path("runs/out/toy_seeds.json").write_text(json.dumps(table, indent=1) + "\n")
print({name: table[name] for name in ("credit_auc", "credit_auc_no_privileged", "best_of_n")})
END
