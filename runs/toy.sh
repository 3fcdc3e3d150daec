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
OUT=${OUT:-runs/out/toy$SUFFIX}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# 1. episodes of the base policy with the scripted human, judged by the hidden tests
collect "$BASE" "$SEED" "$OUT/episodes.jsonl"

# 2. the critic, and the policy that it teaches, on one core
sweet() {
  critic "$BASE" "$OUT/critic" --episodes "$OUT/episodes.jsonl" "${CRITIC_LOSS[@]}"
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/sweet" "${SWEET[@]}" "${SAMPLING[@]}" "${GAP[@]}" \
    --critic "$OUT/critic"
  play sweet "$OUT/sweet" "$OUT/test/sweet"
}

# 3. what the paper compares it with, on the other
baselines() {
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/rft" "${RFT[@]}"
  policy "$OUT/episodes.jsonl" "$BASE" "$OUT/mtdpo" "${MTDPO[@]}"
  play rft "$OUT/rft" "$OUT/test/rft"
  play mtdpo "$OUT/mtdpo" "$OUT/test/mtdpo"
  play base "$BASE" "$OUT/test/base"
  play single_turn "$BASE" "$OUT/test/single_turn" --max_turns 1
}
sweet &
baselines
wait $!

# 4. the table and the report
python evaluate.py --episodes "$OUT/test/sweet/sweet.jsonl" \
  --against "$OUT"/test/{mtdpo/mtdpo,rft/rft,base/base,single_turn/single_turn}.jsonl \
  --critic "$OUT/critic" --metrics "$OUT"/{critic,sweet,mtdpo,rft}/metrics.jsonl \
  --output "$OUT/test" --report "$OUT/report.html"
