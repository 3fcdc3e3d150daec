#!/usr/bin/env bash
# When does training-time information pay? SWEET-RL with and without it, multi-turn DPO and
# rejection fine-tuning in worlds of 16, 64 and 256 topics, from a base that knows nothing of what
# they hide (prior 0) and from one that half knows it (0.5), with 200, 800 and 1,500 training tasks.
#   runs/toy_grid.sh [SEEDS]     one seed after the other, two cells at a time; resumes
#   runs/toy_grid.sh TOPICS PRIOR TASKS SEED     a single cell: ten to forty minutes
# Then the table, and runs/out/toy_grid.json.
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT=${ROOT:-runs/out/grid}
DOMAIN=backend

base_of() { # TOPICS PRIOR
  [ "$2" = 0 ] && echo toy/base || echo "$ROOT/base_$1"
}
cell() { # TOPICS PRIOR TASKS SEED
  TOPICS=$1 TASKS=$3 SEED=$4 BASE=$(base_of "$1" "$2") OUT=$ROOT/$1-$2-$3/$4
  source runs/toy_flags.sh
  collect "$BASE" "$SEED" "$OUT/episodes.jsonl"
  rft "$OUT/episodes.jsonl" "$OUT/rft"
  mtdpo "$OUT/episodes.jsonl" "$OUT/mtdpo"
  candidates "$BASE" "$OUT/episodes.jsonl" "$OUT/candidates.jsonl"
  sweet sweet ground_truth
  sweet sweet_no_privileged none
  play base "$BASE"
  for name in rft mtdpo sweet sweet_no_privileged; do
    play "$name" "$OUT/$name"
  done
  # the table needs what is left: the test episodes and the critics' metrics
  rm -rf "$OUT"/{episodes.jsonl,candidates.jsonl,rft,mtdpo,sweet,sweet_no_privileged}
  rm -f "$OUT"/*.critic/{*.safetensors,ranked.jsonl}
}
sweet() { # NAME PRIVILEGED
  critic "$BASE" "$OUT/$1.critic" --episodes "$OUT/episodes.jsonl" --privileged "$2"
  rank "$OUT/candidates.jsonl" "$OUT/$1.critic"
  policy "$OUT/$1.critic/ranked.jsonl" "$BASE" "$OUT/$1"
}
if [ $# = 4 ]; then
  cell "$@"
  exit
fi

for topics in 16 64 256; do
  [ -f "$ROOT/base_$topics/model.safetensors" ] || AGENT=scripted:knowing TOPICS=$topics \
    BASE=$ROOT/base_$topics OUT=$ROOT/base_$topics.run runs/make_toy_base.sh
done
for seed in $(seq 0 $((${1:-3} - 1))); do
  for tasks in 200 800 1500; do
    for cell in 16-0 64-0 256-0 16-0.5 64-0.5 256-0.5; do
      done=$ROOT/$cell-$tasks/$seed # a finished cell has no episodes.jsonl
      [ -f "$done/test/sweet_no_privileged.jsonl" ] && [ ! -e "$done/episodes.jsonl" ] ||
        echo "${cell/-/ } $tasks $seed"
    done
  done
done | xargs -r -P 2 -L 1 bash runs/toy_grid.sh
python runs/toy_grid.py "$ROOT"
