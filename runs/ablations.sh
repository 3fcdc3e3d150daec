#!/usr/bin/env bash
# The paper's Table 3, a comparison of critics, and best of N on the embedded world, from what
# runs/toy.sh left in OUT. Each critic ranks the same candidates, and a policy learns from its
# ranks. The critics: without the solution, without length normalisation; with the official code's
# normalisation, with its reference in the ranking, with both and, as there, without the NLL term;
# with a value head; untrained. For comparison, true credit and random ranks.
# Then SWEET-RL's own ranks with another pairing rule, and LoRA, which trains matrices of rank 16 in
# place of all weights. FULL=1, as with runs/toy.sh, gives those of the tables.
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
source runs/toy_flags.sh
OUT=${OUT:-$TOY$SUFFIX}
POLICIES=(sweet="$OUT/test/sweet.jsonl") # that the others are compared with

learn() { # NAME RANKED FLAGS...: a policy, and its test
  policy "$2" "$BASE" "$OUT/$1/policy" "${@:3}"
  play "$1" "$OUT/$1/policy"
  POLICIES+=("$1=$OUT/test/$1.jsonl")
}
critic_and_policy() { # NAME RANKING_FLAGS CRITIC_FLAGS...
  critic "$BASE" "$OUT/$1/critic" --episodes "$OUT/episodes.jsonl" "${@:3}"
  rank "$OUT/candidates.jsonl" "$OUT/$1/critic" $2
  true_credit "$OUT/$1/critic"
  learn "$1" "$OUT/$1/critic/ranked.jsonl"
}
critic_and_policy sweet_no_privileged "" --privileged none
critic_and_policy sweet_no_normalise "" --normalise none
critic_and_policy sweet_trajectory "" --normalise trajectory
critic_and_policy sweet_official "--reference plain" --normalise trajectory --nll 0

mkdir -p "$OUT/sweet_plain"
python train_critic.py --candidates "$OUT/candidates.jsonl" --output "$OUT/critic" $PACKED \
  --reference plain --ranked "$OUT/sweet_plain/ranked.jsonl"
true_credit "$OUT/sweet_plain"
learn sweet_plain "$OUT/sweet_plain/ranked.jsonl"

python variants/value_critic.py --episodes "$OUT/episodes.jsonl" --model "$BASE" --seed "$SEED" \
  "${CRITIC[@]}" "${VALUE_HEAD[@]}" --output "$OUT/sweet_value_head/critic" \
  --candidates "$OUT/candidates.jsonl"
true_credit "$OUT/sweet_value_head/critic"
learn sweet_value_head "$OUT/sweet_value_head/critic/ranked.jsonl"

# A step with learning rate 0 leaves the base as it is: its log-ratio, with the solution to without
# it, takes the place of a critic
critic_and_policy sweet_untrained "--reference plain" --lr 0 --max_steps 1

if [ "$DOMAIN" = backend ]; then # whose true credit is known
  for ranker in credit random; do
    mkdir -p "$OUT/sweet_$ranker"
    python -m toy.credit rank "$OUT/candidates.jsonl" --ranker "$ranker" --seed "$SEED" \
      --output "$OUT/sweet_$ranker/ranked.jsonl"
    true_credit "$OUT/sweet_$ranker"
    learn "sweet_$ranker" "$OUT/sweet_$ranker/ranked.jsonl"
  done
fi

learn sweet_positive_vs_negative "$OUT/critic/ranked.jsonl" --pairing positive_vs_negative
critic "$BASE" "$OUT/sweet_lora/critic" --episodes "$OUT/episodes.jsonl" --lora_rank 16 --lr 1e-4
rank "$OUT/candidates.jsonl" "$OUT/sweet_lora/critic"
true_credit "$OUT/sweet_lora/critic"
learn sweet_lora "$OUT/sweet_lora/critic/ranked.jsonl" --lora_rank 16 --lr 3e-3

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
