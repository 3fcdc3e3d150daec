#!/usr/bin/env bash
# The paper's backend setting: Llama-3.1-8B-Instruct, a 70B human behind a URL, the official files.
#   . .venv/bin/activate; hf auth login     (with an account to which Meta gives Llama)
#   hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
#   vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 8 --generation-config vllm
#     (elsewhere: HUMAN_URL)
#
# One node of eight 80 GB GPUs:    runs/backend_8b.sh                        2 to 3 hours
# One H200:                        RUN=python runs/backend_8b.sh             about a day
# Two nodes of eight, on each:     NODE=0 (the other: 1) HUMAN_URL=http://human:8000/v1 \
#     OUT=/shared/backend_8b GLOO_SOCKET_IFNAME=eth0 RUN="torchrun --nnodes 2 --nproc_per_node 8 \
#     --rdzv_backend c10d --rdzv_endpoint node0:29500" runs/backend_8b.sh
# These hours are estimated, and so are 130 GB of GPU memory in all for weights and their training
# (docs/scaling.md has the arithmetic). Disk: 300 GB under OUT, which all nodes share.
# SHORT=1 is a smoke run on the CPU: the embedded world, toy/base, any human behind HUMAN_URL.
set -euo pipefail
cd "$(dirname "$0")/.."
HUMAN_URL=${HUMAN_URL:-http://localhost:8000/v1}
RUN=${RUN:-torchrun --nproc_per_node 8}
OUT=${OUT:-runs/out/backend_8b}
MODEL=meta-llama/Llama-3.1-8B-Instruct
HUMAN=meta-llama/Llama-3.1-70B-Instruct
TRAIN=(--tasks data/backend_tasks/train.jsonl --num_tasks 5000)
TEST=(--tasks data/backend_tasks/test.jsonl --num_tasks 1000)
TRAINING=(--length_window 16) # ranks wait less for long dialogues
SAMPLING=(--sampling_batch_size 256)
TOKENS=()
PROMPTS=() # the paper's, if you have them: --agent_prompt FILE --human_prompt FILE
# the official ones: --episodes data/colbench_code_offline_15k_llama8b.jsonl --agent_prompt FILE;
# then omit step 1
EPISODES=(--episodes "$OUT/episodes.jsonl")
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
if [ -n "${SHORT:-}" ]; then
  RUN=python
  MODEL=toy/base
  HUMAN=human
  TRAIN=(--tasks toy:backend:train --num_tasks 40)
  TEST=(--tasks toy:backend:test --num_tasks 8)
  TRAINING=(--length_window 4 --max_steps 4 --micro_batch_size 4)
  SAMPLING=(--num_candidates 4)
  TOKENS=(--max_new_tokens 64)
fi

play() { # NAME AGENT
  $RUN evaluate.py "${TEST[@]}" --name "$1" --agent "$2" "${TOKENS[@]}" "${PROMPTS[@]}" \
    --human "$HUMAN_URL" --human_model "$HUMAN" --output "$OUT/test/$1"
}
policy() { # METHOD FLAGS...
  $RUN train_policy.py --method "$1" "${EPISODES[@]}" --model "$MODEL" --output "$OUT/$1" \
    "${TRAINING[@]}" "${@:2}"
}

# 0. the model as it is (22.4 % in the paper): if the human or the prompts do not fit, it shows
#    here, before hours of training
play base "$MODEL"

# 1. episodes: 5,000 tasks three times
$RUN collect.py "${TRAIN[@]}" --samples_per_task 3 --agent "$MODEL" "${TOKENS[@]}" "${PROMPTS[@]}" \
  --human "$HUMAN_URL" --human_model "$HUMAN" --output "$OUT/episodes.jsonl"

# 2. critic
$RUN train_critic.py "${EPISODES[@]}" --model "$MODEL" --output "$OUT/critic" "${TRAINING[@]}"

# 3. policy, and what the paper compares it with. A server samples faster than the scripts do: give
#    sweet `--sampler URL --stop_after sampling` while one runs on the same GPUs, stop it, and run
#    the same command without --stop_after
policy sweet --critic "$OUT/critic" "${SAMPLING[@]}" "${TOKENS[@]}"
policy mtdpo
policy rft

# 4. the table and the report
for name in sweet mtdpo rft; do
  play "$name" "$OUT/$name"
done
if [ "${NODE:-0}" = 0 ]; then
  python evaluate.py --episodes "$OUT/test/sweet/sweet.jsonl" \
    --against "$OUT"/test/{mtdpo/mtdpo,rft/rft,base/base}.jsonl \
    --output "$OUT/test" --report "$OUT/test/report.html"
fi
