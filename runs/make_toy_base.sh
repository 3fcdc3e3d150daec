#!/usr/bin/env bash
# Train toy/base (DOMAIN=frontend: toy/base_frontend), the tiny policy that the embedded world
# starts from. It imitates a noisy demonstrator. Informed dialogues begin with the solution and
# follow it; they teach the model to use a solution in its context, as a pretrained model can.
#
# The base knows all topics by name and nothing of what they hide, so it serves any number of them.
# For one that knows: AGENT=scripted:knowing BASE=runs/out/knowing runs/make_toy_base.sh
# For a world of other details: WORLD=256/16/5/2-3 BASE=runs/out/base_16 runs/make_toy_base.sh
# For one that was never shown which questions a solution makes worth asking, but says what it holds
# when asked: READ=recite BASE=runs/out/reciting runs/make_toy_base.sh
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
DOMAIN=${DOMAIN:-backend}
OUT=${OUT:-${BASE:+${BASE}_made}} # a base elsewhere has files of its own
OUT=${OUT:-runs/out/base_$DOMAIN}
AGENT=${AGENT:-scripted}
READ=${READ:-inform} # how it learns to read a solution: inform or recite (toy/make_base.py)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive
export CUDA_VISIBLE_DEVICES= # on the CPU: the model is tiny
if [ "$DOMAIN" != backend ] && [ "$DOMAIN" != frontend ]; then
  echo "found DOMAIN=$DOMAIN, expected backend or frontend; give one, such as DOMAIN=backend" >&2
  exit 1
fi
if [ "$DOMAIN" = backend ]; then
  BASE=${BASE:-toy/base}
  TASKS=(--tasks "toy:backend:train:${WORLD:-256}" --num_tasks 4000)
  TURNS=(--max_turns 9)
  EPOCHS=3
else
  BASE=${BASE:-toy/base_frontend}
  TASKS=(--tasks toy:frontend:train --num_tasks 600)
  TURNS=()
  EPOCHS=4
fi
mkdir -p "$OUT" "$BASE"

demonstrate() { # NAME AGENT SAMPLES SEED FLAGS...
  python collect.py "${TASKS[@]}" --samples_per_task "$3" --agent "$2" --seed "$4" \
    --output "$OUT/$1.jsonl" "${@:5}"
}
demonstrate noisy "$AGENT" 3 0 "${TURNS[@]}"
READER=$AGENT # its questions are recited
[ "$READ" = recite ] || READER=scripted:informed
demonstrate "$READ" "$READER" 2 1 "${TURNS[@]}"
EPISODES=("$OUT/noisy.jsonl")
if [ "$DOMAIN" = backend ]; then
  demonstrate at_once scripted:guessing 1 2 --max_turns 1
  EPISODES+=("$OUT/at_once.jsonl")
fi
python toy/make_base.py model "${EPISODES[@]}" --output "$OUT/random"
python toy/make_base.py "$READ" "$OUT/$READ.jsonl" --output "$OUT/solution_first.jsonl"

train() { # MODEL OUTPUT SEED
  python variants/sft.py --episodes "${EPISODES[@]}" "$OUT/solution_first.jsonl" --model "$1" \
    --epochs "$EPOCHS" --lr 2e-3 --batch_size 32 --micro_batch_size 32 --packed --seed "$3" \
    --output "$2"
}
train "$OUT/random" "$OUT/first" 0
# a second peak of the learning rate: topics, reading and counting come late
train "$OUT/first" "$OUT/checkpoint" 1
cp "$OUT"/checkpoint/{*.json,*.jinja,*.safetensors} "$BASE/"
