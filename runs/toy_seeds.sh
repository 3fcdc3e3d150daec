#!/usr/bin/env bash
# N seeds of the embedded experiment, with DOMAIN=frontend of pages, and a table of what ROOT has:
# ROOT/table.json. Resumes; ONLY=toy omits ablations, best of N and round 2. The committed tables
# are runs/out/toy_seeds.json, runs/out/toy_seeds_frontend.json and, with FULL= in front (the tasks
# of make toy), runs/out/toy_seeds_225_tasks.json.
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
export DOMAIN=${DOMAIN:-backend} FULL=${FULL-1}
N=${1:-5}
SUFFIX=
[ -n "$FULL" ] || SUFFIX=_225_tasks
[ "$DOMAIN" = backend ] || SUFFIX=_frontend
ROOT=${ROOT:-runs/out/seeds$SUFFIX}
trap 'for job in $(jobs -p); do kill -- "-$job"; done 2>/dev/null || true' EXIT
set -m # a job leads its process group, so the trap reaches the programs that it runs

more() { # the second round on one core, the ablations and best of N on the other
  FIRST=2 MODEL=$OUT/sweet EARLIER=$OUT/episodes.jsonl OUT=$OUT/iterate runs/iterate.sh &
  runs/ablations.sh
  wait $!
}
for SEED in $(seq 0 $((N - 1))); do
  export SEED OUT=$ROOT/$SEED
  [ -f "$OUT/report.html" ] || runs/toy.sh
  [ "${ONLY:-}" = toy ] || more
done
python runs/toy_seeds.py "$ROOT"
