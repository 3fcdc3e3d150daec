#!/usr/bin/env bash
# The paper's backend setting: Llama-3.1-8B-Instruct, a 70B human behind a URL, the official files.
#   . .venv/bin/activate; hf auth login     (with an account to which Meta gives Llama)
#   hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
#   vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 8 --generation-config vllm
#     (elsewhere: HUMAN_URL)
#
# One node of eight 80 GB GPUs:    runs/backend_8b.sh                        3.4 to 5.2 hours
# One H200:                        RUN=python runs/backend_8b.sh             one to two days
# Two nodes of eight, on each:     export NODE=0 (the other: 1); HUMAN_URL=http://human:8000/v1 \
#     OUT=/shared/backend_8b GLOO_SOCKET_IFNAME=eth0 RUN="torchrun --nnodes 2 --nproc_per_node 8 \
#     --node_rank $NODE --master_addr node0 --master_port 29500" runs/backend_8b.sh
#     (which plays and ranks sooner. The paper's batches have eight pairs, so training gains
#     nothing, and each step moves 58 GB between the nodes: without InfiniBand, take one node)
# These hours are estimated. 22 to 27 GB of each of eight GPUs, or 137 to 143 GB of one, are counted
# (docs/scaling.md has both; the critic's 137 GB were measured, too). Ranking takes 37 GB of each
# GPU. Disk: 300 GB under OUT, which all nodes share.
# SHORT=1 is a smoke run on the CPU: the embedded world, toy/base, its scripted human (or one behind
# HUMAN_URL).
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
RUN=${RUN:-torchrun --nproc_per_node 8}
OUT=${OUT:-runs/out/backend_8b${SHORT:+_short}}
MODEL=meta-llama/Llama-3.1-8B-Instruct
HUMAN=(--human "${HUMAN_URL:-http://localhost:8000/v1}"
  --human_model meta-llama/Llama-3.1-70B-Instruct)
TRAIN=(--tasks data/backend_tasks/train.jsonl --num_tasks 5000)
TEST=(--tasks data/backend_tasks/test.jsonl --num_tasks 1000)
TRAINING=()
SAMPLING=()
CANDIDATES=(--batch_size 256) # 16 of each turn of a tenth of the tasks
PROMPTS=() # the paper's, if you have them: --agent_prompt FILE --human_prompt FILE
GRADING=() # that of the official code: --judge official
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 # seconds to save in; torchrun kills what takes longer
if [ -n "${SHORT:-}" ]; then
  export CUDA_VISIBLE_DEVICES=
  RUN=python
  MODEL=toy/base
  HUMAN=(--human "${HUMAN_URL:-scripted}")
  TRAIN=(--tasks toy:backend:train --num_tasks 40)
  TEST=(--tasks toy:backend:test --num_tasks 8)
  TRAINING=(--max_steps 4 --micro_batch_size 4)
  SAMPLING=(--max_new_tokens 64)
  CANDIDATES=(--num_candidates 4)
fi

play() { # NAME AGENT
  $RUN collect.py "${TEST[@]}" --samples_per_task 1 --agent "$2" "${SAMPLING[@]}" "${PROMPTS[@]}" \
    "${GRADING[@]}" "${HUMAN[@]}" --output "$OUT/test/$1.jsonl"
}

# 0. the model as it is (22.4 % in the paper, with its prompts and grading): if the human does not
#    fit, it shows here, before hours of training
play base "$MODEL"

# 1. episodes: 5,000 tasks three times. The official ones, in place of this step:
#    python colbench.py import data/colbench_code_offline_15k_llama8b.jsonl --agent_prompt FILE \
#      --output "$OUT/episodes.jsonl"
$RUN collect.py "${TRAIN[@]}" --samples_per_task 3 --agent "$MODEL" "${SAMPLING[@]}" \
  "${PROMPTS[@]}" "${GRADING[@]}" "${HUMAN[@]}" --output "$OUT/episodes.jsonl"

# 2. candidates. A server samples faster than the scripts do: while one serves the model on the same
#    GPUs, give this step --agent URL --agent_model "$MODEL"
$RUN collect.py --states "$OUT/episodes.jsonl" --agent "$MODEL" "${SAMPLING[@]}" \
  "${CANDIDATES[@]}" --output "$OUT/candidates.jsonl"

# 3. the critic, which then ranks the candidates
$RUN train_critic.py --episodes "$OUT/episodes.jsonl" --model "$MODEL" "${TRAINING[@]}" --packed \
  --output "$OUT/critic" --candidates "$OUT/candidates.jsonl"

# 4. the policy, and what the paper compares it with
$RUN train_policy.py --candidates "$OUT/critic/ranked.jsonl" --model "$MODEL" "${TRAINING[@]}" \
  --packed --output "$OUT/sweet"
$RUN train_policy.py --episodes "$OUT/episodes.jsonl" --model "$MODEL" --epochs 4 "${TRAINING[@]}" \
  --packed --output "$OUT/mtdpo"
$RUN variants/sft.py --episodes "$OUT/episodes.jsonl" --successes --model "$MODEL" \
  "${TRAINING[@]}" --packed --output "$OUT/rft"

# 5. the table and the report
POLICIES=(base="$OUT/test/base.jsonl")
for name in rft mtdpo sweet; do
  play "$name" "$OUT/$name"
  POLICIES+=("$name=$OUT/test/$name.jsonl")
done
if [ "${NODE:-0}" = 0 ]; then
  python evaluate.py "${POLICIES[@]}" --output "$OUT/test"
  python -m report "${POLICIES[@]}" --output "$OUT/test/report.html"
fi
