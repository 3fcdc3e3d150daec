#!/usr/bin/env bash
# The paper's Table 3 on the embedded world: SWEET-RL without training-time information, without length normalisation,
# and with a value head, from the episodes that runs/toy.sh collected.
set -euo pipefail
cd "$(dirname "$0")/.."
SEED=${SEED:-0} TOY=${TOY:-runs/out/toy} OUT=${OUT:-runs/out/ablations} TEST=${TEST:-500}
export OMP_NUM_THREADS=1
PLAYED=()

ablation() { # NAME CRITIC_FLAGS...
  python train_critic.py --episodes "$TOY/episodes.jsonl" --model toy/base --lr 2e-4 --beta 1 --nll 0.5 --epochs 2 \
    --batch_size 32 --micro_batch_size 16 --seed "$SEED" --output "$OUT/$1/critic" "${@:2}"
  python train_policy.py --method sweet --episodes "$TOY/episodes.jsonl" --model toy/base --critic "$OUT/$1/critic" \
    --data_fraction 1 --states_per_task 2 --share state --lr 1e-3 --beta 1 --nll 0.2 --epochs 2 \
    --batch_size 32 --micro_batch_size 16 --seed "$SEED" \
    --max_new_tokens 128 --sampling_batch_size 256 --output "$OUT/$1/policy"
  python evaluate.py --tasks toy:backend:test --num_tasks "$TEST" --agent "$OUT/$1/policy" --name "$1" \
    --max_new_tokens 128 --seed "$SEED" --output "$OUT/test"
  PLAYED+=("$OUT/test/$1.jsonl")
}
ablation sweet_no_privileged --privileged none
ablation sweet_no_normalise --normalise none
ablation sweet_value_head --head value
python evaluate.py --episodes "${PLAYED[@]}" --against "$TOY/test/sweet/sweet.jsonl" --output "$OUT/test"
