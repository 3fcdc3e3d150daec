#!/usr/bin/env bash
# SWEET-RL and its baselines on the embedded world, on two CPU cores: collect, critic, policies,
# test, report. SEED, OUT, TASKS and TEST can be set. FULL=1 has about twice as many tasks (for
# pages, the same number): most tables of docs/measured.md were measured with it. SHORT=1 is a smoke
# run with few tasks, whatever TASKS and TEST say.
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
source runs/toy_flags.sh
OUT=${OUT:-$TOY$SUFFIX}
if [ -n "${SHORT:-}" ]; then
  echo "SHORT=1: a smoke run on few tasks. It shows that all stages work; its numbers mean nothing."
fi
mkdir -p "$OUT/test"
step() { printf '\n%s\n' "$1"; }
trap 'for job in $(jobs -p); do kill -- "-$job"; done 2>/dev/null || true' EXIT
set -m # a job leads its process group, so the trap reaches the programs that it runs
finished() { # waits for the job on the other core
  wait "$OTHER" || { cat "$OUT/other.log" >&2; exit 1; }
}
running() { kill -0 "$OTHER" 2>/dev/null; }

step "1. Episodes: $BASE plays $TASKS training tasks $SAMPLES times each with the scripted human"
collect "$BASE" "$SEED" "$OUT/episodes.jsonl"
export COLBENCH_PROTECTIONS_TOLD=1 # missing protections are printed once

step "2. Critic. On the other core ($OUT/other.log): candidates for it to rank, then multi-turn DPO"
{
  candidates "$BASE" "$OUT/episodes.jsonl" "$OUT/candidates.jsonl"
  mtdpo "$OUT/episodes.jsonl" "$OUT/mtdpo"
  play mtdpo "$OUT/mtdpo"
  play base "$BASE"
  play single_turn "$BASE" --max_turns 1
} >"$OUT/other.log" 2>&1 &
OTHER=$!
critic "$BASE" "$OUT/critic" --episodes "$OUT/episodes.jsonl"
while [ ! -e "$OUT/candidates.jsonl" ] && running; do # the file comes whole
  sleep 1
done
running || finished # says so, and stops, if that job has failed

step "3. Ranks, SWEET-RL's policy, and rejection fine-tuning"
rank "$OUT/candidates.jsonl" "$OUT/critic"
TQDM_DISABLE=1 true_credit "$OUT/critic" >"$OUT/credit.log" & # the cores take turns
CREDIT=$!
policy "$OUT/critic/ranked.jsonl" "$BASE" "$OUT/sweet"
wait "$CREDIT"
cat "$OUT/credit.log"
rft "$OUT/episodes.jsonl" "$OUT/rft"

running || finished
step "4. Test: $TEST tasks that training has not seen"
TQDM_DISABLE=1 play rft "$OUT/rft" & # by now, the other core is mostly free
RFT_PLAYS=$!
play sweet "$OUT/sweet"
wait "$RFT_PLAYS"
echo "Multi-turn DPO and the base on the other core:"
tail -n 1 -f "$OUT/other.log" &
TAIL=$!
finished
sleep 1 # for its last lines
# not TERM: the shell loses that if `tail` has not begun yet, and then waits without an end
{ kill -KILL "$TAIL" && wait "$TAIL"; } 2>/dev/null || true

step "5. Who won, and the report${SHORT:+ (SHORT=1: the numbers mean nothing)}"
POLICIES=()
for name in base single_turn rft mtdpo sweet; do
  POLICIES+=("$name=$OUT/test/$name.jsonl")
done
python evaluate.py "${POLICIES[@]}" --output "$OUT/test" >"$OUT/evaluate.log" &
EVALUATION=$!
REPORT=$(python -m report "${POLICIES[@]}" --critic "$OUT/critic" --output "$OUT/report.html" \
  --metrics sweet="$OUT/sweet/metrics.jsonl" \
  mtdpo="$OUT/mtdpo/metrics.jsonl" rft="$OUT/rft/metrics.jsonl" | tail -n 1)
wait "$EVALUATION"
cat "$OUT/evaluate.log"
echo "$REPORT"
