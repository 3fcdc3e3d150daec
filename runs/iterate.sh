#!/usr/bin/env bash
# ROUNDS rounds of SWEET-RL on the embedded world. Each round collects episodes with the latest
# policy and continues to train it; that policy is also the reference. The critic starts from the
# base each time and learns from the episodes of all rounds, since a trained policy no longer reads
# a solution as well as the base. Then the table.
# To resume after a first round: FIRST=2 MODEL=DIR EARLIER=FILE (its policy and its episodes).
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
source runs/toy_flags.sh
ROUNDS=${ROUNDS:-2}
OUT=${OUT:-$TOY$SUFFIX/iterate}
FIRST=${FIRST:-1}
MODEL=${MODEL:-$BASE}
EPISODES=(${EARLIER:+"$EARLIER"})
PLAYED=()

for round in $(seq "$FIRST" "$ROUNDS"); do
  DIR=$OUT/round$round
  collect "$MODEL" "$((SEED + 1000 * (round - 1)))" "$DIR/episodes.jsonl"
  EPISODES+=("$DIR/episodes.jsonl")
  critic "$BASE" "$DIR/critic" --episodes "${EPISODES[@]}"
  candidates "$MODEL" "$DIR/episodes.jsonl" "$DIR/candidates.jsonl"
  rank "$DIR/candidates.jsonl" "$DIR/critic"
  true_credit "$DIR/critic"
  policy "$DIR/critic/ranked.jsonl" "$MODEL" "$DIR/policy"
  MODEL=$DIR/policy
  play "sweet_round$round" "$MODEL"
  PLAYED+=("sweet_round$round=$OUT/test/sweet_round$round.jsonl")
done
python evaluate.py "${PLAYED[@]}" --output "$OUT/test"
