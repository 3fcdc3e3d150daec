#!/usr/bin/env bash
# A small chat model through all stages, on one GPU or a CPU. It needs no server and no data set: it
# plays the embedded world with the scripted human.
#   MODEL=HuggingFaceTB/SmolLM2-135M-Instruct bash runs/llm.sh
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash runs/llm.sh        (or a directory)
# docs/measured.md has what SmolLM2-135M-Instruct reached. Killed runs go on where they stopped.
# On a CPU that does not multiply bf16 (no avx512_bf16), DTYPE=float32 is faster.
# SHORT=1 is a smoke run.
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
OUT=${OUT:-runs/out/llm}
SEED=${SEED:-0}
WORLD=${WORLD:-8} # topics: 25 training tasks of each. More would need more tasks
TASKS=200
TEST=200
SPLIT=${SPLIT:-test} # valid: for tuning
if [ -n "${SHORT:-}" ]; then
  TASKS=16
  TEST=4
fi
TURNS=(--max_turns 9)
SAMPLING=(--max_new_tokens 96 --dtype "${DTYPE:=bfloat16}" --seed "$SEED")
TRAINING=(--dtype "$DTYPE" --packed --micro_batch_size 8 --seed "$SEED")

collect() { # AGENT OUTPUT FLAGS...
  python collect.py --agent "$1" --output "$2" "${SAMPLING[@]}" "${@:3}"
}
play() { # NAME AGENT: writes OUT/test/NAME.jsonl
  collect "$2" "$OUT/test/$1.jsonl" --tasks "toy:backend:$SPLIT:$WORLD" --num_tasks "$TEST" \
    --samples_per_task 1 "${TURNS[@]}"
}
train_tasks=(--tasks "toy:backend:train:$WORLD" --num_tasks "$TASKS")

# 1. The model as it is does not know the rules of this world: it never answers, so no critic could
# learn from it. It first imitates demonstrations, which ask for details at random
python collect.py "${train_tasks[@]}" --samples_per_task 3 --agent scripted --max_turns 12 \
  --output "$OUT/demonstrations.jsonl" # in twelve turns, nearly all of them end with an answer
python variants/sft.py --episodes "$OUT/demonstrations.jsonl" --model "$MODEL" --lr 1e-4 \
  --epochs 1 --batch_size 16 "${TRAINING[@]}" --output "$OUT/warm"

# 2. Episodes, and candidates
collect "$OUT/warm" "$OUT/episodes.jsonl" "${train_tasks[@]}" --samples_per_task 6 "${TURNS[@]}"
collect "$OUT/warm" "$OUT/candidates.jsonl" --states "$OUT/episodes.jsonl" --states_fraction 1 \
  --states_per_task 3 --batch_size 128
