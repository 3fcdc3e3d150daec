#!/usr/bin/env bash
# SWEET-RL and its baselines on the embedded world: collect, critic, policies, evaluation, report; two CPU cores.
# SEED, OUT, TASKS and TEST can be set; SHORT=1 is a smoke run. Learning rates: README.
set -euo pipefail
cd "$(dirname "$0")/.."
SEED=${SEED:-0} OUT=${OUT:-runs/out/toy}
if [ -n "${SHORT:-}" ]; then TASKS=80 TEST=20; fi
TASKS=${TASKS:-1500} TEST=${TEST:-500}
export OMP_NUM_THREADS=1; trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
policy() { # NAME METHOD FLAGS...
  python train_policy.py --method "$2" --episodes "$OUT/episodes.jsonl" --model toy/base --seed "$SEED" \
    --batch_size 32 --micro_batch_size 16 --output "$OUT/$1" "${@:3}"
}
play() { # NAME AGENT FLAGS...
  python evaluate.py --tasks toy:backend:test --num_tasks "$TEST" --agent "$2" --name "$1" --max_new_tokens 128 \
    --seed "$SEED" --output "$OUT/test/$1" "${@:3}" | tail -1
}
# 1. episodes of the base policy with the scripted human, judged by the hidden tests
python -m torch.distributed.run --standalone --nproc_per_node 2 collect.py --tasks toy:backend:train --num_tasks "$TASKS" \
  --samples_per_task 6 --agent toy/base --max_new_tokens 128 --seed "$SEED" --output "$OUT/episodes.jsonl"
# 2. the critic, and the policy that it teaches, on one core
sweet() {
  python train_critic.py --episodes "$OUT/episodes.jsonl" --model toy/base --lr 2e-4 --beta 1 --nll 0.5 --epochs 2 \
    --batch_size 32 --micro_batch_size 16 --seed "$SEED" --output "$OUT/critic"
  policy sweet sweet --critic "$OUT/critic" --data_fraction 1 --states_per_task 2 --share state --lr 1e-3 --beta 1 \
    --nll 0.2 --epochs 2 --max_new_tokens 128 --sampling_batch_size 256; play sweet "$OUT/sweet"
}
# 3. what the paper compares it with, on the other
baselines() {
  policy rft rft --lr 3e-4 --epochs 3; play rft "$OUT/rft"
  policy mtdpo mtdpo --lr 1e-4 --epochs 2; play mtdpo "$OUT/mtdpo"
  play base toy/base; play single_turn toy/base --max_turns 1
}
sweet & baselines; wait $!
# 4. the table and the report
python evaluate.py --episodes "$OUT"/test/{sweet/sweet,mtdpo/mtdpo,rft/rft}.jsonl --against "$OUT"/test/base/base.jsonl \
  "$OUT"/test/single_turn/single_turn.jsonl --critic "$OUT/critic" --output "$OUT/test" --report "$OUT/report.html" \
  --metrics "$OUT"/{critic,sweet,mtdpo,rft}/metrics.jsonl
