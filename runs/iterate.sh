#!/usr/bin/env bash
# ROUNDS rounds of SWEET-RL on the embedded world: each collects with the last policy, trains a critic on its episodes,
# and trains on, with the last policy as model and reference; then the table, round by round.
set -euo pipefail
cd "$(dirname "$0")/.."
source runs/toy_flags.sh
ROUNDS=${ROUNDS:-2} FIRST=${FIRST:-1} MODEL=${MODEL:-$BASE} OUT=${OUT:-runs/out/iterate$SUFFIX}
PLAYED=()

for round in $(seq "$FIRST" "$ROUNDS"); do  # FIRST=2 MODEL=DIR: go on from a policy that was trained already
  DIR=$OUT/round$round
  collect "$MODEL" "$((SEED + 1000 * (round - 1)))" "$DIR/episodes.jsonl"
  critic "$DIR/episodes.jsonl" "$MODEL" "$DIR/critic"
  policy "$DIR/episodes.jsonl" "$MODEL" "$DIR/policy" "${SWEET[@]}" --critic "$DIR/critic"
  MODEL=$DIR/policy
  play "sweet_round$round" "$MODEL" "$OUT/test"
  PLAYED+=("$OUT/test/sweet_round$round.jsonl")
done
python evaluate.py --episodes "${PLAYED[@]}" --output "$OUT/test"
