#!/usr/bin/env bash
# The paper's frontend setting: WebSight tasks, a Qwen2-VL-72B human behind a URL that sees both
# screenshots, CLIP reward.
#   python colbench.py websight websight_rows.jsonl data/frontend_{train,test}.jsonl
#   vllm serve Qwen/Qwen2-VL-72B-Instruct --tensor-parallel-size 8
#     (on another host: HUMAN_URL; two pictures a request)
# websight_rows.jsonl: the fields text and llm_generated_idea of the first 10,500 rows of
# HuggingFaceM4/WebSight, v0.2.
set -euo pipefail
cd "$(dirname "$0")/.."
HUMAN_URL=${HUMAN_URL:-http://localhost:8000/v1}
MODEL=meta-llama/Llama-3.1-8B-Instruct
HUMAN=Qwen/Qwen2-VL-72B-Instruct
OUT=${OUT:-runs/out/frontend_8b}
RUN=${RUN:-torchrun --nproc_per_node 8}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# 1. episodes: 1,000 tasks six times. Ten pages are some 10,000 tokens, so that 64 dialogues at a
#    time would fill 80 GB
$RUN collect.py --tasks data/frontend_train.jsonl --num_tasks 1000 --samples_per_task 6 \
  --agent "$MODEL" --human "$HUMAN_URL" --human_model "$HUMAN" --batch_size 16 \
  --output "$OUT/episodes.jsonl"

# 2. critic: a vision-language model with a value head, which sees a picture of the solution (some
#    6,500 tokens)
$RUN train_critic.py --episodes "$OUT/episodes.jsonl" --model Qwen/Qwen2-VL-7B-Instruct \
  --head value --pairs all --margin 0.1 --epochs 8 --max_length 16384 --output "$OUT/critic"

# 3. policy, and what the paper compares it with
$RUN train_policy.py --method sweet --episodes "$OUT/episodes.jsonl" --model "$MODEL" \
  --critic "$OUT/critic" --sampling_batch_size 16 --output "$OUT/sweet"
$RUN train_policy.py --method mtdpo --episodes "$OUT/episodes.jsonl" --model "$MODEL" \
  --pairs all --margin 0.1 --epochs 8 --output "$OUT/mtdpo"
$RUN train_policy.py --method rft --episodes "$OUT/episodes.jsonl" --model "$MODEL" \
  --batch_size 32 --epochs 8 --output "$OUT/rft"

# 4. 500 test pages; against GPT-4o's episodes, this gives the paper's win rate
for policy in sweet mtdpo rft; do
  $RUN evaluate.py --tasks data/frontend_test.jsonl --num_tasks 500 --agent "$OUT/$policy" \
    --human "$HUMAN_URL" --human_model "$HUMAN" --batch_size 16 --output "$OUT/test/$policy"
done
python evaluate.py --episodes "$OUT/test/sweet/sweet.jsonl" \
  --against "$OUT/test/mtdpo/mtdpo.jsonl" "$OUT/test/rft/rft.jsonl" \
  --output "$OUT/test" --report "$OUT/test/report.html"
