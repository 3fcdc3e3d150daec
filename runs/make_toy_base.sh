#!/usr/bin/env bash
# Train toy/base (DOMAIN=frontend: toy/base_frontend), the tiny policy that the embedded world
# starts from. It imitates a noisy demonstrator. In the informed dialogues the solution stands in
# front and is followed, so that the model can read one, as a pretrained model can.
set -euo pipefail
cd "$(dirname "$0")/.."
DOMAIN=${DOMAIN:-backend}
OUT=${OUT:-runs/out/base_$DOMAIN}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive
if [ "$DOMAIN" = backend ]; then
  BASE=toy/base
  TASKS=4000
  EPOCHS=3
  PROMPT="Ask what is missing, then answer."
else
  BASE=toy/base_frontend
  TASKS=600
  EPOCHS=4
  PROMPT="Show a page, change what the person asks for, then answer."
fi
mkdir -p "$OUT" "$BASE"
echo "$PROMPT" > "$OUT/prompt.txt"

demonstrate() { # NAME AGENT SAMPLES SEED
  python collect.py --tasks "toy:$DOMAIN:train" --num_tasks "$TASKS" --samples_per_task "$3" \
    --agent "$2" --agent_prompt "$OUT/prompt.txt" --seed "$4" --output "$OUT/$1.jsonl"
}
demonstrate noisy scripted 3 0
demonstrate informed scripted:informed 2 1

train() { # MODEL OUTPUT SEED
  python train_policy.py --method sft --model "$1" --episodes "$OUT/noisy.jsonl" \
    --privileged_episodes "$OUT/informed.jsonl" --epochs "$EPOCHS" --lr 2e-3 \
    --batch_size 32 --micro_batch_size 32 --seed "$3" --output "$2"
}
train toy "$OUT/first" 0
# a second peak of the learning rate: topics, reading and counting come late
train "$OUT/first" "$OUT/checkpoint" 1
cp "$OUT"/checkpoint/*.{json,jinja,safetensors,txt} "$BASE/"
