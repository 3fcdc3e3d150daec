#!/usr/bin/env bash
# The paper's backend setting: Llama-3.1-8B-Instruct on eight 80 GB GPUs, a 70B human behind a URL, the official files.
#   hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
#   vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 8     (on another host: HUMAN_URL)
set -euo pipefail
cd "$(dirname "$0")/.."
HUMAN_URL=${HUMAN_URL:-http://localhost:8000/v1}
MODEL=meta-llama/Llama-3.1-8B-Instruct
HUMAN=meta-llama/Llama-3.1-70B-Instruct
OUT=${OUT:-runs/out/backend_8b}
RUN="torchrun --nproc_per_node 8"

# 1. episodes: 5,000 tasks three times (or use the official file, data/colbench_code_offline_15k_llama8b.jsonl)
$RUN collect.py --tasks data/backend_tasks/train.jsonl --num_tasks 5000 --samples_per_task 3 \
  --agent $MODEL --human "$HUMAN_URL" --human_model $HUMAN --output "$OUT/episodes.jsonl"

# 2. critic
$RUN train_critic.py --episodes "$OUT/episodes.jsonl" --model $MODEL --output "$OUT/critic"

# 3. policy, and what the paper compares it with
$RUN train_policy.py --method sweet --episodes "$OUT/episodes.jsonl" --model $MODEL --critic "$OUT/critic" \
  --output "$OUT/sweet"
$RUN train_policy.py --method mtdpo --episodes "$OUT/episodes.jsonl" --model $MODEL --output "$OUT/mtdpo"
$RUN train_policy.py --method rft --episodes "$OUT/episodes.jsonl" --model $MODEL --batch_size 32 --output "$OUT/rft"

# 4. the paper's test tasks: the first thousand
for policy in sweet mtdpo rft; do
  $RUN evaluate.py --tasks data/backend_tasks/test.jsonl --num_tasks 1000 --agent "$OUT/$policy" \
    --human "$HUMAN_URL" --human_model $HUMAN --output "$OUT/test/$policy"
done
python evaluate.py --episodes "$OUT/test/sweet/sweet.jsonl" --against "$OUT/test/mtdpo/mtdpo.jsonl" \
  "$OUT/test/rft/rft.jsonl" --output "$OUT/test" --report "$OUT/test/report.html"
