#!/usr/bin/env bash
# Train toy/base, the tiny policy that the embedded world starts from. It imitates a noisy demonstrator; a third of its
# dialogues have the reference in front and follow it, so that it can read one, as a pretrained model can.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/out/base}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive
mkdir -p "$OUT" && echo "Ask what is missing, then answer." > "$OUT/prompt.txt"

demonstrate() { # NAME AGENT SAMPLES SEED
  python collect.py --tasks toy:backend:train --num_tasks 3000 --samples_per_task "$3" --agent "$2" \
    --agent_prompt "$OUT/prompt.txt" --seed "$4" --output "$OUT/$1.jsonl"
}
demonstrate noisy scripted 4 0
demonstrate informed scripted:informed 2 1

python train_policy.py --method sft --model toy --episodes "$OUT/noisy.jsonl" \
  --privileged_episodes "$OUT/informed.jsonl" --epochs 4 --lr 3e-3 --batch_size 32 --micro_batch_size 16 \
  --output "$OUT/checkpoint"
mkdir -p toy/base
cp "$OUT"/checkpoint/*.json "$OUT"/checkpoint/*.jinja "$OUT"/checkpoint/*.safetensors "$OUT"/checkpoint/*.txt toy/base/
