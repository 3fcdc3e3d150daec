#!/usr/bin/env bash
# The paper's backend setting: Llama-3.1-8B-Instruct on eight 80 GB GPUs, a 70B human behind a URL,
# the official files.
#   . .venv/bin/activate; hf auth login     (with an account to which Meta gives Llama)
#   hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
#   vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 8
#     (on another host: HUMAN_URL)
set -euo pipefail
cd "$(dirname "$0")/.."
HUMAN_URL=${HUMAN_URL:-http://localhost:8000/v1}
MODEL=meta-llama/Llama-3.1-8B-Instruct
HUMAN=meta-llama/Llama-3.1-70B-Instruct
OUT=${OUT:-runs/out/backend_8b}
RUN=${RUN:-torchrun --nproc_per_node 8}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

play() { # NAME AGENT: the paper's test tasks, the first thousand
  $RUN evaluate.py --tasks data/backend_tasks/test.jsonl --num_tasks 1000 --name "$1" \
    --agent "$2" --human "$HUMAN_URL" --human_model "$HUMAN" --output "$OUT/test/$1"
}
# 0. the model as it is (22.4 % in the paper): a human or prompts that give something else show
#    here, before days of training
play base "$MODEL"

# 1. episodes: 5,000 tasks three times
#    (the official ones are data/colbench_code_offline_15k_llama8b.jsonl)
$RUN collect.py --tasks data/backend_tasks/train.jsonl --num_tasks 5000 --samples_per_task 3 \
  --agent "$MODEL" --human "$HUMAN_URL" --human_model "$HUMAN" --output "$OUT/episodes.jsonl"

# 2. critic
$RUN train_critic.py --episodes "$OUT/episodes.jsonl" --model "$MODEL" --output "$OUT/critic"

# 3. policy, and what the paper compares it with
$RUN train_policy.py --method sweet --episodes "$OUT/episodes.jsonl" --model "$MODEL" \
  --critic "$OUT/critic" --output "$OUT/sweet"
$RUN train_policy.py --method mtdpo --episodes "$OUT/episodes.jsonl" --model "$MODEL" \
  --output "$OUT/mtdpo"
$RUN train_policy.py --method rft --episodes "$OUT/episodes.jsonl" --model "$MODEL" \
  --batch_size 32 --output "$OUT/rft"

# 4. the table and the report
for policy in sweet mtdpo rft; do
  play "$policy" "$OUT/$policy"
done
python evaluate.py --episodes "$OUT/test/sweet/sweet.jsonl" \
  --against "$OUT"/test/{mtdpo/mtdpo,rft/rft,base/base}.jsonl \
  --output "$OUT/test" --report "$OUT/test/report.html"
