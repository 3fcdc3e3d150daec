#!/usr/bin/env bash
# ROUNDS rounds of SWEET-RL on the embedded world: each collects with the last policy, trains a critic on its episodes,
# and trains on, with the last policy as model and reference; then the table, round by round.
set -euo pipefail
cd "$(dirname "$0")/.."
ROUNDS=${ROUNDS:-2} SEED=${SEED:-0} OUT=${OUT:-runs/out/iterate} TASKS=${TASKS:-1500} TEST=${TEST:-500}
export OMP_NUM_THREADS=1
MODEL=toy/base PLAYED=()

for round in $(seq 1 "$ROUNDS"); do
  DIR=$OUT/round$round
  python collect.py --tasks toy:backend:train --num_tasks "$TASKS" --samples_per_task 6 --agent "$MODEL" \
    --max_new_tokens 128 --seed "$((SEED + round - 1))" --output "$DIR/episodes.jsonl"
  python train_critic.py --episodes "$DIR/episodes.jsonl" --model "$MODEL" --lr 2e-4 --beta 1 --nll 0.5 --epochs 2 \
    --batch_size 32 --micro_batch_size 16 --seed "$SEED" --output "$DIR/critic"
  python train_policy.py --method sweet --episodes "$DIR/episodes.jsonl" --model "$MODEL" --critic "$DIR/critic" \
    --data_fraction 1 --states_per_task 2 --share state --lr 1e-3 --beta 1 --nll 0.2 --epochs 2 \
    --batch_size 32 --micro_batch_size 16 --seed "$SEED" \
    --max_new_tokens 128 --sampling_batch_size 256 --output "$DIR/policy"
  MODEL=$DIR/policy
  python evaluate.py --tasks toy:backend:test --num_tasks "$TEST" --agent "$MODEL" --name "round$round" \
    --max_new_tokens 128 --seed "$SEED" --output "$OUT/test"
  PLAYED+=("$OUT/test/round$round.jsonl")
done
python evaluate.py --episodes "${PLAYED[@]}" --output "$OUT/test"
