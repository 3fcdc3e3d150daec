#!/usr/bin/env bash
# When does SWEET-RL pay? SWEET-RL with both pairing rules and without training-time information,
# and rejection fine-tuning, in worlds where 2 or 3 of 16 details are needed, 4 or 5 of 10 of which
# a topic makes six likely, and 4 or 5 of 10 of which it makes five likely; 200 and 800 tasks.
#   runs/toy_grid.sh [SEEDS]     one seed after the other, two cells at a time; resumes
#   runs/toy_grid.sh WORLD TASKS SEED     a single cell: ten to forty minutes
# Then the table, and runs/out/toy_grid.json.
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT=${ROOT:-runs/out/grid}
DOMAIN=backend

cell() { # WORLD TASKS SEED
  WORLD=$1 TASKS=$2 SEED=$3 OUT=$ROOT/${1//\//_}/$2/$3
  [[ $WORLD == */16/* ]] && BASE=$ROOT/base_16
  source runs/toy_flags.sh
  collect "$BASE" "$SEED" "$OUT/episodes.jsonl"
  rft "$OUT/episodes.jsonl" "$OUT/rft"
  candidates "$BASE" "$OUT/episodes.jsonl" "$OUT/candidates.jsonl"
  for privileged in ground_truth none; do
    critic "$BASE" "$OUT/critic_$privileged" --episodes "$OUT/episodes.jsonl" \
      --privileged "$privileged"
    rank "$OUT/candidates.jsonl" "$OUT/critic_$privileged"
  done
  policy "$OUT/critic_ground_truth/ranked.jsonl" "$BASE" "$OUT/sweet"
  policy "$OUT/critic_ground_truth/ranked.jsonl" "$BASE" "$OUT/sweet_positive_vs_negative" \
    --pairing positive_vs_negative
  policy "$OUT/critic_none/ranked.jsonl" "$BASE" "$OUT/sweet_no_privileged"
  play base "$BASE"
  for name in rft sweet sweet_positive_vs_negative sweet_no_privileged; do
    play "$name" "$OUT/$name"
  done
  # the table needs what is left: the test episodes and the critics' metrics
  rm -rf "$OUT"/{episodes.jsonl,candidates.jsonl,rft,sweet*}
  rm -f "$OUT"/critic_*/{*.safetensors,ranked.jsonl}
}
if [ $# = 3 ]; then
  cell "$@"
  exit
fi

[ -f "$ROOT/base_16/model.safetensors" ] || WORLD=256/16/5/2-3 BASE=$ROOT/base_16 \
  OUT=$ROOT/base_16.run runs/make_toy_base.sh
for seed in $(seq 0 $((${1:-2} - 1))); do
  for tasks in 200 800; do
    for world in 64/16/5/2-3 64/10/6/4-5 64/10/5/4-5; do
      done=$ROOT/${world//\//_}/$tasks/$seed # a finished cell has no episodes.jsonl
      [ -f "$done/test/sweet_no_privileged.jsonl" ] && [ ! -e "$done/episodes.jsonl" ] ||
        echo "$world $tasks $seed"
    done
  done
done | xargs -r -P 2 -L 1 bash runs/toy_grid.sh
python runs/toy_grid.py "$ROOT"
