#!/usr/bin/env bash
# The paper's Table 3 and best of N on the embedded world, from what runs/toy.sh left in OUT:
# SWEET-RL without training-time information, without length normalisation, and with a value head;
# with and without information on the paper's own pairs, and on these, ranks by true credit and at
# random, the bounds of every critic; and matrices of rank 16 (LoRA) in place of all weights.
set -euo pipefail
cd "$(dirname "$0")/.."
source runs/toy_flags.sh
OUT=${OUT:-runs/out/toy$SUFFIX}
POLICIES=(sweet="$OUT/test/sweet.jsonl") # that the others are compared with

learn() { # NAME RANKED FLAGS...: a policy, and its test
  policy "$2" "$BASE" "$OUT/$1/policy" "${@:3}"
  play "$1" "$OUT/$1/policy"
  POLICIES+=("$1=$OUT/test/$1.jsonl")
}
ablation() { # NAME CRITIC_FLAGS...: the same candidates, ranked by another critic
  critic "$BASE" "$OUT/$1/critic" --episodes "$OUT/episodes.jsonl" "${@:2}"
  rank "$OUT/candidates.jsonl" "$OUT/$1/critic"
}
ablation sweet_no_privileged --privileged none
learn sweet_no_privileged "$OUT/sweet_no_privileged/critic/ranked.jsonl"
ablation sweet_no_normalise --normalise none
learn sweet_no_normalise "$OUT/sweet_no_normalise/critic/ranked.jsonl"
ablation sweet_lora --lora_rank 16 --lr 1e-4
learn sweet_lora "$OUT/sweet_lora/critic/ranked.jsonl" --lora_rank 16 --lr 3e-3

# a value is no ratio to a reference, so that zero would say nothing: halves
python variants/value_critic.py --episodes "$OUT/episodes.jsonl" --model "$BASE" --seed "$SEED" \
  "${CRITIC[@]}" "${VALUE_HEAD[@]}" --output "$OUT/sweet_value_head/critic" \
  --candidates "$OUT/candidates.jsonl"
true_credit "$OUT/sweet_value_head/critic"
learn sweet_value_head "$OUT/sweet_value_head/critic/ranked.jsonl" --pairing halves

learn sweet_halves "$OUT/critic/ranked.jsonl" --pairing halves
learn sweet_halves_no_privileged "$OUT/sweet_no_privileged/critic/ranked.jsonl" --pairing halves
if [ "$DOMAIN" = backend ]; then # whose true credit is known
  for ranker in credit random; do
    mkdir -p "$OUT/sweet_halves_$ranker"
    python -m toy.credit rank "$OUT/candidates.jsonl" --ranker "$ranker" --seed "$SEED" \
      --output "$OUT/sweet_halves_$ranker/ranked.jsonl"
    learn "sweet_halves_$ranker" "$OUT/sweet_halves_$ranker/ranked.jsonl" --pairing halves
  done
fi

best_of() { # NAME N CRITIC; the best of one is the base itself
  python variants/best_of_n.py "${TEST_TASKS[@]}" --agent "$BASE" --n "$2" --critic "$3" \
    --output "$OUT/test/$1.jsonl"
  POLICIES+=("$1=$OUT/test/$1.jsonl")
}
for n in 2 4 8 16; do
  best_of "best_of_$n" "$n" "$OUT/critic"
done
for n in 8 16; do
  best_of "best_of_${n}_no_privileged" "$n" "$OUT/sweet_no_privileged/critic"
done

python evaluate.py "${POLICIES[@]}" --output "$OUT/test/ablations"
