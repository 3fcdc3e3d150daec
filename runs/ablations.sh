#!/usr/bin/env bash
# The paper's Table 3 and best of N on the embedded world, from what runs/toy.sh left in OUT:
# SWEET-RL without training-time information, without length normalisation, and with a value head;
# with and without information on the paper's own pairs; and with matrices of rank 16 (LoRA) in place
# of all weights.
set -euo pipefail
cd "$(dirname "$0")/.."
source runs/toy_flags.sh
OUT=${OUT:-runs/out/toy$SUFFIX}

ablation() { # NAME CRITIC_FLAGS...
  critic "$BASE" "$OUT/$1/critic" --episodes "$OUT/episodes.jsonl" "${@:2}"
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/$1/policy" "${SWEET[@]}" "${PAIRING[@]}" \
    --candidates "$OUT/sweet/candidates.jsonl" --critic "$OUT/$1/critic" # ranked by another critic
  play "$1" "$OUT/$1/policy" "$OUT/test/$1"
}
ablation sweet_no_privileged "${CRITIC_LOSS[@]}" --privileged none
ablation sweet_no_normalise "${CRITIC_LOSS[@]}" --normalise none
(
  SWEET+=(--lora_rank 16 --lr 3e-3)
  ablation sweet_lora "${CRITIC_LOSS[@]}" --lora_rank 16 --lr 1e-4
)
PAIRING=() # a value is no ratio to a reference, so that zero would say nothing
ablation sweet_value_head "${VALUE_HEAD[@]}"

halves() { # NAME RANKED
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/$1/policy" "${SWEET[@]}" \
    --candidates "$OUT/$2/candidates.jsonl"
  play "$1" "$OUT/$1/policy" "$OUT/test/$1"
}
halves sweet_halves sweet
halves sweet_halves_no_privileged sweet_no_privileged/policy

play base "$BASE" "$OUT/test/best_of_n" --critic "$OUT/critic" --best_of_n 1 2 4 8 16
play base "$BASE" "$OUT/test/best_of_n_no_privileged" \
  --critic "$OUT/sweet_no_privileged/critic" --best_of_n 8 16

python evaluate.py --episodes "$OUT"/test/sweet_*/sweet_*.jsonl \
  --against "$OUT/test/sweet/sweet.jsonl" --output "$OUT/test/ablations"
