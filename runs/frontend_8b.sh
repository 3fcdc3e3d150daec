#!/usr/bin/env bash
# The paper's frontend setting: WebSight tasks, a Qwen2-VL-72B human behind a URL that sees both
# screenshots, CLIP reward.
#   apt-get install chromium     (on each node; also where the critic is trained, which sees pages)
#   pip install datasets && python -c 'import json; from datasets import load_dataset; \
#     rows = load_dataset("HuggingFaceM4/WebSight", "v0.2", split="train", streaming=True); \
#     rows = rows.select_columns(["text", "llm_generated_idea"]).take(10500); \
#     print(*map(json.dumps, rows), sep="\n")' > websight_rows.jsonl
#   python colbench.py websight websight_rows.jsonl data/frontend_{train,test}.jsonl
#   vllm serve Qwen/Qwen2-VL-72B-Instruct --tensor-parallel-size 8 --generation-config vllm
#     (elsewhere: HUMAN_URL; two pictures a request)
#
# RUN, NODE, OUT, GLOO_SOCKET_IFNAME for eight GPUs or two nodes: as runs/backend_8b.sh has them.
# Estimated (docs/scaling.md): about a day on eight GPUs, disk as there. One H200 does not hold the
# critic.
# SHORT=1 is a smoke run on the CPU: the embedded pages, their scripted human (or HUMAN_URL),
# toy/base_frontend as agent and critic.
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
RUN=${RUN:-torchrun --nproc_per_node 8}
OUT=${OUT:-runs/out/frontend_8b${SHORT:+_short}}
MODEL=meta-llama/Llama-3.1-8B-Instruct
CRITIC=Qwen/Qwen2-VL-7B-Instruct
HUMAN=(--human "${HUMAN_URL:-http://localhost:8000/v1}" --human_model Qwen/Qwen2-VL-72B-Instruct)
TRAIN=(--tasks data/frontend_train.jsonl --num_tasks 1000 --samples_per_task 6)
TEST=(--tasks data/frontend_test.jsonl --num_tasks 500)
# ten pages are some 10,000 tokens, so that 64 dialogues at a time would fill 80 GB
SAMPLING=(--batch_size 16)
CANDIDATES=(--batch_size 128) # 16 of each turn of a tenth of the tasks; these keep no caches
# some dialogues are longer than the default; for the critic, a picture adds some 6,500 tokens
TRAINING=(--max_length 16384)
CRITIC_TRAINING=(--epochs 8)
RFT=(--successes --epochs 8)
PROMPTS=() # the paper's, if you have them: --agent_prompt FILE --human_prompt FILE
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 # seconds to save in; torchrun kills what takes longer
if [ -n "${SHORT:-}" ]; then
  export CUDA_VISIBLE_DEVICES=
  RUN=python
  MODEL=toy/base_frontend
  CRITIC=toy/base_frontend
  HUMAN=(--human "${HUMAN_URL:-scripted}")
  TRAIN=(--tasks toy:frontend:train --num_tasks 12 --samples_per_task 2)
  TEST=(--tasks toy:frontend:test --num_tasks 4)
  SAMPLING=(--max_new_tokens 200)
  CANDIDATES=(--num_candidates 4 --states_per_task 1)
  TRAINING=(--max_steps 4)
  CRITIC_TRAINING=()
  RFT=() # of so few pages, none may be a success
fi

play() { # NAME AGENT
  $RUN collect.py "${TEST[@]}" --samples_per_task 1 --agent "$2" "${HUMAN[@]}" \
    "${SAMPLING[@]}" "${PROMPTS[@]}" --output "$OUT/test/$1.jsonl"
}

# 0. the model as it is (cosine 72.4 in the paper, with its prompts): if the human does not fit, it
#    shows here, before hours of training
play base "$MODEL"

# 1. episodes: 1,000 tasks six times; and candidates
$RUN collect.py "${TRAIN[@]}" --agent "$MODEL" "${HUMAN[@]}" \
  "${SAMPLING[@]}" "${PROMPTS[@]}" --output "$OUT/episodes.jsonl"
$RUN collect.py --states "$OUT/episodes.jsonl" --agent "$MODEL" "${SAMPLING[@]}" \
  "${CANDIDATES[@]}" --output "$OUT/candidates.jsonl"

# 2. the critic, a vision-language model with a value head, which then ranks the candidates
$RUN variants/value_critic.py --episodes "$OUT/episodes.jsonl" --model "$CRITIC" --pairs all \
  --margin 0.1 "${TRAINING[@]}" "${CRITIC_TRAINING[@]}" --output "$OUT/critic" \
  --candidates "$OUT/candidates.jsonl"

# 3. the policy, and what the paper compares it with
$RUN train_policy.py --candidates "$OUT/critic/ranked.jsonl" --model "$MODEL" "${TRAINING[@]}" \
  --packed --output "$OUT/sweet"
$RUN train_policy.py --episodes "$OUT/episodes.jsonl" --pairs all --margin 0.1 --epochs 8 \
  --model "$MODEL" "${TRAINING[@]}" --packed --output "$OUT/mtdpo"
$RUN variants/sft.py --episodes "$OUT/episodes.jsonl" "${RFT[@]}" --model "$MODEL" \
  "${TRAINING[@]}" --packed --output "$OUT/rft"

# 4. 500 test pages; against GPT-4o's episodes, this gives the paper's win rate
POLICIES=(base="$OUT/test/base.jsonl")
for name in rft mtdpo sweet; do
  play "$name" "$OUT/$name"
  POLICIES+=("$name=$OUT/test/$name.jsonl")
done
if [ "${NODE:-0}" = 0 ]; then
  python evaluate.py "${POLICIES[@]}" --output "$OUT/test"
  python -m report "${POLICIES[@]}" --output "$OUT/test/report.html"
fi
