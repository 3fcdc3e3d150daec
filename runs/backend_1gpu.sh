#!/usr/bin/env bash
# Backend Programming on one 24 GB GPU, from download to report: a 0.5B policy, trained as a whole;
# with LORA=1 a 7B policy, trained by matrices of rank 16. 1,000 training tasks three times.
#   . .venv/bin/activate
#   hf download facebook/collaborative_agent_bench --repo-type dataset --include "backend_tasks/*" \
#     --local-dir data
#   vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ --gpu-memory-utilization 0.4 --max-model-len 8192 \
#     --generation-config vllm
#     (in an environment of its own, beside the 0.5B policy. The 7B policy needs the whole card:
#     then the human is elsewhere, at HUMAN_URL, a second card or an API)
# Counted (docs/scaling.md): 14 GB of GPU memory for training, with LORA=1 23. Estimated: 5 hours,
# with LORA=1 15; 8 GB of host memory, with LORA=1 40; 20 GB of disk, with LORA=1 100.
# The learning rates are starts that nobody has tried: watch train/margin rise.
# SHORT=1 is a smoke run on the CPU: the embedded world, toy/base, its scripted human (or one behind
# HUMAN_URL).
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
HUMAN=(--human "${HUMAN_URL:-http://localhost:8000/v1}")
OUT=${OUT:-runs/out/backend_1gpu${SHORT:+_short}}
SIZE=0.5B
[ -z "${LORA:-}" ] || SIZE=7B
MODEL=${MODEL:-Qwen/Qwen2.5-$SIZE-Instruct}
TRAIN=(--tasks data/backend_tasks/train.jsonl --num_tasks 1000)
TEST=(--tasks data/backend_tasks/test.jsonl --num_tasks 200)
TRAINING=(--lr 1e-5 --max_length 4096)
SAMPLING=(--max_new_tokens 512)
CANDIDATES=() # the defaults: 16 of each turn of a tenth of the tasks
if [ -n "${LORA:-}" ]; then
  TRAINING=(--lora_rank 16 --lr 2e-5 --max_length 4096)
  SAMPLING+=(--batch_size 16) # the caches of more dialogues do not fit beside 15 GB of weights
  CANDIDATES=(--batch_size 64) # candidates keep no caches from turn to turn
fi
if [ -n "${SHORT:-}" ]; then
  export CUDA_VISIBLE_DEVICES=
  MODEL=toy/base
  HUMAN=(--human "${HUMAN_URL:-scripted}")
  TRAIN=(--tasks toy:backend:train --num_tasks 40)
  TEST=(--tasks toy:backend:test --num_tasks 8)
  TRAINING=(--lora_rank 4 --lr 1e-3 --max_steps 4 --micro_batch_size 4)
  SAMPLING=(--max_new_tokens 64)
  CANDIDATES=(--num_candidates 4)
fi

play() { # NAME AGENT
  python collect.py "${TEST[@]}" --samples_per_task 1 --agent "$2" "${HUMAN[@]}" "${SAMPLING[@]}" \
    --output "$OUT/test/$1.jsonl"
}

# the policy as it is
play base "$MODEL"

# episodes, and candidates
python collect.py "${TRAIN[@]}" --samples_per_task 3 --agent "$MODEL" "${HUMAN[@]}" \
  "${SAMPLING[@]}" --output "$OUT/episodes.jsonl"
python collect.py --states "$OUT/episodes.jsonl" --agent "$MODEL" "${SAMPLING[@]}" \
  "${CANDIDATES[@]}" --output "$OUT/candidates.jsonl"

# the critic, which then ranks the candidates; the policy
python train_critic.py --episodes "$OUT/episodes.jsonl" --model "$MODEL" --pairs all \
  "${TRAINING[@]}" --packed --output "$OUT/critic" --candidates "$OUT/candidates.jsonl"
python train_policy.py --candidates "$OUT/critic/ranked.jsonl" --model "$MODEL" \
  "${TRAINING[@]}" --packed --output "$OUT/sweet"

# the table and the report
play sweet "$OUT/sweet"
POLICIES=(base="$OUT/test/base.jsonl" sweet="$OUT/test/sweet.jsonl")
python evaluate.py "${POLICIES[@]}" --output "$OUT/test"
python -m report "${POLICIES[@]}" --critic "$OUT/critic" --output "$OUT/report.html" \
  --metrics sweet="$OUT/sweet/metrics.jsonl"
