# Flags of the embedded world's recipes, which source this file; README says how the values were chosen.
export OMP_NUM_THREADS=1
SEED=${SEED:-0} TASKS=${TASKS:-1500} TEST=${TEST:-500}
BATCH=(--batch_size 32 --micro_batch_size 16)
CRITIC=("${BATCH[@]}" --lr 2e-4 --beta 1 --nll 0.5 --epochs 2)
SWEET=("${BATCH[@]}" --method sweet --data_fraction 1 --states_per_task 2 --share state --max_new_tokens 64
       --sampling_batch_size 256 --lr 3e-4 --beta 0.3 --nll 1 --epochs 2)
MTDPO=("${BATCH[@]}" --method mtdpo --lr 1e-4 --epochs 2)
RFT=("${BATCH[@]}" --method rft --lr 3e-4 --epochs 3)

collect() { # MODEL SEED EPISODES
  python -m torch.distributed.run --standalone --nproc_per_node 2 collect.py --tasks toy:backend:train --agent "$1" \
    --num_tasks "$TASKS" --samples_per_task 6 --max_new_tokens 64 --batch_size 128 --seed "$2" --output "$3"
}
critic() { # EPISODES MODEL OUTPUT FLAGS...
  python train_critic.py --episodes "$1" --model "$2" --output "$3" --seed "$SEED" "${CRITIC[@]}" "${@:4}"
}
policy() { # EPISODES MODEL OUTPUT FLAGS...
  python train_policy.py --episodes "$1" --model "$2" --output "$3" --seed "$SEED" "${@:4}"
}
play() { # NAME AGENT OUTPUT FLAGS...
  python evaluate.py --tasks toy:backend:test --num_tasks "$TEST" --name "$1" --agent "$2" --output "$3" \
    --max_new_tokens 64 --batch_size 128 --seed "$SEED" "${@:4}" | tail -1
}
