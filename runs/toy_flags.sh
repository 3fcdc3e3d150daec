# Flags and commands of the embedded world's recipes, which source this file. docs/tuning.md says
# how the flags were chosen.
export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES= # everything runs on the CPU: the models are tiny
# malloc keeps freed memory: new pages from the kernel take time
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=4000000000

DOMAIN=${DOMAIN:-backend}
if [ "$DOMAIN" != backend ] && [ "$DOMAIN" != frontend ]; then
  echo "found DOMAIN=$DOMAIN, expected backend or frontend; give one, such as DOMAIN=backend" >&2
  exit 1
fi
SEED=${SEED:-0}
TOY=runs/out/toy # where runs/toy.sh writes, with SUFFIX
if [ -n "${SHORT:-}" ]; then # a smoke run
  TASKS=80
  TEST=20
  TOY=runs/out/short
elif [ -n "${FULL:-}" ]; then # what most tables of docs/measured.md were measured with
  TOY=runs/out/full
fi
if [ "$DOMAIN" = backend ]; then
  SUFFIX=
  BASE=${BASE:-toy/base}
  SAMPLES=6
  TURNS=(--max_turns 9) # toy/world.py says why
  TOKENS=64             # of one agent message
  # A task with mixed outcomes has five to nine pairs. So a step of the critic has some four tasks,
  # one of multi-turn DPO four or eight; in one micro-batch, each dialogue is computed once.
  PAIRS=(--pairs success_vs_failure --shuffle groups)
  CRITIC=("${PAIRS[@]}" --batch_size 24 --micro_batch_size 24 --lr 5e-5 --epochs 2)
  CRITIC_LOSS=(--beta 30 --nll 0.02)
  VALUE_HEAD=(--lr 3e-3)
  if [ -n "${FULL:-}" ]; then
    TASKS=${TASKS:-500}
    STATES=6 # of a task that give candidates
    TEST=${TEST:-500}
    POLICY=(--batch_size 64 --lr 1e-3 --epochs 4) # four pairs a state
    MTDPO=(--batch_size 48 --micro_batch_size 48 --lr 2e-3)
    RFT=(--batch_size 32 --lr 2e-3)
  else # five minutes on two cores
    TASKS=${TASKS:-225}
    STATES=12
    TEST=${TEST:-250}
    POLICY=(--batch_size 32 --lr 5e-4 --epochs 2)
    MTDPO=(--batch_size 24 --micro_batch_size 24 --lr 1e-3)
    RFT=(--batch_size 16 --lr 1e-3)
  fi
  MTDPO+=("${PAIRS[@]}" --epochs 12 --beta 0.3 --nll 10)
  RFT+=(--epochs 12)
else
  SUFFIX=_frontend
  BASE=${BASE:-toy/base_frontend}
  TASKS=${TASKS:-400}
  SAMPLES=4
  TEST=${TEST:-150}
  TURNS=()
  TOKENS=200
  STATES=2
  PAIRS=(--pairs all --margin 0.1 --batch_size 32 --micro_batch_size 16)
  CRITIC=("${PAIRS[@]}" --lr 2e-4 --epochs 2)
  CRITIC_LOSS=(--beta 3 --nll 0.5)
  VALUE_HEAD=(--lr 3e-4)
  POLICY=(--batch_size 128 --lr 3e-4 --epochs 2)
  MTDPO=("${PAIRS[@]}" --lr 3e-4 --nll 3 --epochs 2)
  RFT=(--batch_size 32 --lr 1e-3 --epochs 6)
fi
POLICY+=(--shuffle groups --micro_batch_size 64 --beta 0.3 --nll 3)
RFT+=(--successes --micro_batch_size 16)
PACKED=${PACKED---packed} # PACKED= runs the trainers' own turn_logprobs, such as that of a fork
# Both cores. --local_addr: with --standalone alone, torchrun waits for this machine's own name
BOTH=(python -m torch.distributed.run --standalone --local_addr 127.0.0.1 --nproc_per_node 2)

collect() { # MODEL SEED EPISODES
  "${BOTH[@]}" collect.py --tasks "toy:$DOMAIN:train${WORLD:+:$WORLD}" --num_tasks "$TASKS" \
    --samples_per_task "$SAMPLES" "${TURNS[@]}" --agent "$1" --max_new_tokens "$TOKENS" \
    --batch_size 128 --seed "$2" --output "$3"
}
candidates() { # MODEL EPISODES CANDIDATES
  python collect.py --states "$2" --states_fraction 1 --states_per_task "$STATES" --agent "$1" \
    --max_new_tokens "$TOKENS" --batch_size 256 --seed "$SEED" --output "$3"
}
critic() { # MODEL OUTPUT --episodes FILE... FLAGS...
  python train_critic.py --model "$1" --output "$2" --seed "$SEED" "${CRITIC[@]}" \
    "${CRITIC_LOSS[@]}" $PACKED "${@:3}"
}
rank() { # CANDIDATES CRITIC FLAGS...: writes CRITIC/ranked.jsonl, so FLAGS may not hold --ranked
  python train_critic.py --candidates "$1" --output "$2" $PACKED "${@:3}"
}
true_credit() { # CRITIC: how true its ranks are, in its metrics.jsonl, too; pages have no credit
  [ "$DOMAIN" = frontend ] ||
    python -m toy.credit auc "$1/ranked.jsonl" --metrics "$1/metrics.jsonl"
}
policy() { # RANKED MODEL OUTPUT FLAGS...
  python train_policy.py --candidates "$1" --model "$2" --output "$3" --seed "$SEED" \
    "${POLICY[@]}" $PACKED "${@:4}"
}
mtdpo() { # EPISODES OUTPUT
  python train_policy.py --episodes "$1" --model "$BASE" --output "$2" --seed "$SEED" \
    "${MTDPO[@]}" $PACKED
}
rft() { # EPISODES OUTPUT
  python variants/sft.py --episodes "$1" --model "$BASE" --output "$2" --seed "$SEED" \
    "${RFT[@]}" $PACKED
}
TEST_TASKS=(--tasks "toy:$DOMAIN:${SPLIT:-test}${WORLD:+:$WORLD}" --num_tasks "$TEST"
  --samples_per_task 1 "${TURNS[@]}" --max_new_tokens "$TOKENS" --batch_size 128 --seed "$SEED")
play() { # NAME MODEL FLAGS...: writes OUT/test/NAME.jsonl
  python collect.py "${TEST_TASKS[@]}" --agent "$2" --output "$OUT/test/$1.jsonl" "${@:3}"
}
