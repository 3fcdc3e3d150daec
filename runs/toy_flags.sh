# Flags of the embedded world's recipes, which source this file. docs/measured.md says how they were chosen.
export OMP_NUM_THREADS=1
# malloc keeps freed memory: new pages from the kernel take time
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=4000000000

DOMAIN=${DOMAIN:-backend}
SEED=${SEED:-0}
WORLD=${TOPICS:+:$TOPICS} # a world with so many topics
if [ "$DOMAIN" = backend ]; then
  SUFFIX=
  BASE=${BASE:-toy/base}
  TASKS=${TASKS:-700}
  SAMPLES=6
  TEST=${TEST:-500}
  TOKENS=64 # of one agent message
  PAIRS=(--pairs success_vs_failure --share state --micro_batch_size 2)
  CRITIC=("${PAIRS[@]}" --batch_size 4 --lr 5e-5 --epochs 2)
  CRITIC_LOSS=(--beta 30 --nll 0.02)
  VALUE_HEAD=(--head value --lr 1e-4)
  STATES=(--states_per_task 6)
  PAIRING=(--pairing positive_vs_negative)
  SWEET=(--lr 1e-3 --epochs 4)
  MTDPO=(--method mtdpo "${PAIRS[@]}" --batch_size 8 --lr 1e-3 --beta 0.3 --nll 10 --epochs 6)
else
  SUFFIX=_frontend
  BASE=toy/base_frontend
  TASKS=${TASKS:-400}
  SAMPLES=4
  TEST=${TEST:-150}
  TOKENS=200
  PAIRS=(--pairs all --margin 0.1 --batch_size 32 --micro_batch_size 16)
  CRITIC=("${PAIRS[@]}" --lr 2e-4 --epochs 2)
  CRITIC_LOSS=(--beta 3 --nll 0.5)
  VALUE_HEAD=(--head value --lr 1e-3)
  STATES=(--states_per_task 2)
  PAIRING=()
  SWEET=(--lr 3e-4 --epochs 2)
  MTDPO=(--method mtdpo "${PAIRS[@]}" --lr 3e-4 --nll 3 --epochs 2)
fi
BATCH=(--batch_size 32 --micro_batch_size 16)
SAMPLING=("${STATES[@]}" --data_fraction 1 --max_new_tokens "$TOKENS" --sampling_batch_size 256)
SWEET+=(--method sweet "${BATCH[@]}" --share state --beta 0.3 --nll 3)
RFT=(--method rft "${BATCH[@]}" --lr 1e-3 --epochs 6)

collect() { # MODEL SEED EPISODES
  python -m torch.distributed.run --standalone --nproc_per_node 2 collect.py \
    --tasks "toy:$DOMAIN:train$WORLD" --num_tasks "$TASKS" --samples_per_task "$SAMPLES" \
    --agent "$1" --max_new_tokens "$TOKENS" --batch_size 128 --seed "$2" --output "$3"
}
critic() { # MODEL OUTPUT --episodes FILE... FLAGS...
  python train_critic.py --model "$1" --output "$2" --seed "$SEED" "${CRITIC[@]}" "${@:3}"
}
policy() { # EPISODES MODEL OUTPUT FLAGS...
  python train_policy.py --episodes "$1" --model "$2" --output "$3" --seed "$SEED" "${@:4}"
}
play() { # NAME AGENT OUTPUT FLAGS...: prints what evaluate.py says before its tables
  python evaluate.py --tasks "toy:$DOMAIN:test$WORLD" --num_tasks "$TEST" --name "$1" --agent "$2" \
    --output "$3" --max_new_tokens "$TOKENS" --batch_size 128 --seed "$SEED" "${@:4}" |
    sed '/^$/,$d'
}
