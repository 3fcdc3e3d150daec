#!/usr/bin/env bash
# SWEET-RL and its baselines on the embedded world, on two CPU cores: collect, critic, policies,
# evaluation, report. SEED, OUT, TASKS and TEST can be set; SHORT=1 is a smoke run.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${SHORT:-}" ]; then
  TASKS=80
  TEST=20
fi
source runs/toy_flags.sh
if [ -n "${SHORT:-}" ]; then
  OUT=${OUT:-runs/out/short$SUFFIX}
  echo "SHORT=1: a smoke run on few tasks. It shows that all stages work; its numbers mean nothing."
fi
OUT=${OUT:-runs/out/toy$SUFFIX}
mkdir -p "$OUT/test"
step() { printf '\n%s\n' "$1"; }
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

step "1. Episodes: $BASE plays $TASKS training tasks $SAMPLES times each with the scripted human"
collect "$BASE" "$SEED" "$OUT/episodes.jsonl"
export COLBENCH_PROTECTIONS_TOLD=1 # missing protections are printed once

# what the paper compares SWEET-RL with, on one core; each policy's summary goes to a file
baselines() {
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/rft" "${RFT[@]}"
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/mtdpo" "${MTDPO[@]}"
  play rft "$OUT/rft" "$OUT/test/rft" >"$OUT/test/rft.txt"
  play mtdpo "$OUT/mtdpo" "$OUT/test/mtdpo" >"$OUT/test/mtdpo.txt"
  play base "$BASE" "$OUT/test/base" >"$OUT/test/base.txt"
  play single_turn "$BASE" "$OUT/test/single_turn" --max_turns 1 >"$OUT/test/single_turn.txt"
}
step "2. Critic; the baselines train on the other core meanwhile (progress in $OUT/baselines.log)"
baselines >"$OUT/baselines.log" 2>&1 &
critic "$BASE" "$OUT/critic" --episodes "$OUT/episodes.jsonl" "${CRITIC_LOSS[@]}"

step "3. Policy: SWEET-RL on candidates that the critic ranks"
policy "$OUT/episodes.jsonl" "$BASE" "$OUT/sweet" "${SWEET[@]}" "${SAMPLING[@]}" "${PAIRING[@]}" \
  --critic "$OUT/critic"

step "4. Test: $TEST tasks that training has not seen"
play sweet "$OUT/sweet" "$OUT/test/sweet"
wait $! || { cat "$OUT/baselines.log" >&2; exit 1; }
cat "$OUT"/test/{mtdpo,rft,base,single_turn}.txt

step "5. Who won, and the report${SHORT:+ (SHORT=1: the numbers mean nothing)}"
python evaluate.py --episodes "$OUT/test/sweet/sweet.jsonl" \
  --against "$OUT"/test/{mtdpo/mtdpo,rft/rft,base/base,single_turn/single_turn}.jsonl \
  --critic "$OUT/critic" --metrics "$OUT"/{critic,sweet,mtdpo,rft}/metrics.jsonl \
  --output "$OUT/test" --report "$OUT/report.html"
