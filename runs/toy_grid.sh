#!/usr/bin/env bash
# When does it pay? A grid of embedded worlds and numbers of training tasks: a task needs 4 or 5 of
# 5, 6 or 8 likely details, and there are 200 or 800 tasks. Each cell has the paper's halves, our
# pairing rule, a critic without the solution, rejection fine-tuning and the base.
# CELLS="64/10/8/4-5:800" and SEEDS="0" choose; one core. Resumes. The table goes to
# ROOT/table.json; the committed one is runs/out/toy_grid.json.
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
ROOT=${ROOT:-runs/out/grid}
SEEDS=${SEEDS:-0 1}
FULL=1 # the settings of the tables
[ -n "${CELLS:-}" ] || CELLS=$(echo 64/10/{5,6,8}/4-5:{800,200})
for cell in $CELLS; do
  WORLD=${cell%:*} TASKS=${cell#*:}
  name=${WORLD//\//_}.$TASKS
  for SEED in $SEEDS; do
    SHORT= source runs/toy_flags.sh # a cell names its number of tasks
    BOTH=(python) # one core: another cell may run on the other
    OUT=$ROOT/$name/$SEED
    mkdir -p "$OUT/test"
    learn() { # NAME RANKED FLAGS...
      policy "$2" "$BASE" "$OUT/$1/policy" "${@:3}"
      play "$1" "$OUT/$1/policy"
    }
    collect "$BASE" "$SEED" "$OUT/episodes.jsonl"
    candidates "$BASE" "$OUT/episodes.jsonl" "$OUT/candidates.jsonl"
    critic "$BASE" "$OUT/critic" --episodes "$OUT/episodes.jsonl"
    rank "$OUT/candidates.jsonl" "$OUT/critic"
    true_credit "$OUT/critic"
    learn sweet "$OUT/critic/ranked.jsonl"
    learn sweet_positive_vs_negative "$OUT/critic/ranked.jsonl" --pairing positive_vs_negative
    no_privileged=$OUT/sweet_no_privileged/critic
    critic "$BASE" "$no_privileged" --episodes "$OUT/episodes.jsonl" --privileged none
    rank "$OUT/candidates.jsonl" "$no_privileged"
    true_credit "$no_privileged"
    learn sweet_no_privileged "$no_privileged/ranked.jsonl"
    rft "$OUT/episodes.jsonl" "$OUT/rft"
    play rft "$OUT/rft"
    play base "$BASE"
  done
done
python runs/toy_grid.py "$ROOT"
