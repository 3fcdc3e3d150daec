#!/usr/bin/env bash
# A small chat model through all stages, on one GPU or a CPU. It needs no server and no data set: it
# plays the embedded world with the scripted human.
#   MODEL=HuggingFaceTB/SmolLM2-135M-Instruct bash runs/llm.sh
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash runs/llm.sh        (or a directory)
# docs/measured.md says what SmolLM2-135M-Instruct reached, and how the settings were chosen.
# A killed run continues where it stopped. On an H200 the steps took 23 minutes in all. On two CPU
# cores they would take days; an earlier recipe (120 tasks, four states, fewer demonstrations and
# epochs) took two and a half hours there.
# bf16 is fast on GPUs, and on CPUs with avx512_bf16; elsewhere give DTYPE=float32.
# TASKS=120 trains on fewer tasks; SPLIT=valid plays those that settings are chosen on; SHORT=1 is a
# smoke run, with few tasks whatever TASKS says.
set -eo pipefail # no -u: to macOS's bash 3.2, an empty array is unset
cd "$(dirname "$0")/.."
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
OUT=${OUT:-runs/out/llm${SHORT:+_short}}
SEED=${SEED:-0}
DTYPE=${DTYPE:-bfloat16}
WORLD=8 # topics: 200 training tasks are 25 of each, enough to learn what a topic's tasks need
DEMONSTRATED=1600 # fewer, and the model does not learn to answer once it knows everything
TASKS=${TASKS:-200}
TEST=200
RAW=20
if [ -n "${SHORT:-}" ]; then
  DEMONSTRATED=8
  TASKS=8
  TEST=4
  RAW=2
fi
TURNS=(--max_turns 9)       # eight questions, and ten details to ask for
TO_THE_END=(--max_turns 12) # demonstrations, so that each shows an answer
SAMPLING=(--max_new_tokens 96 --dtype "$DTYPE" --seed "$SEED" --batch_size 256)
TRAINING=(--dtype "$DTYPE" --packed --micro_batch_size 8 --checkpointing_every 0 --seed "$SEED")
PAIRS=(--pairs success_vs_failure --shuffle groups --batch_size 24)
mkdir -p "$OUT/test"

play() { # NAME AGENT FLAGS...: writes OUT/test/NAME.jsonl
  python collect.py --tasks "toy:backend:${SPLIT:-test}:$WORLD" --num_tasks "$TEST" \
    --samples_per_task 1 "${TURNS[@]}" --agent "$2" "${SAMPLING[@]}" \
    --output "$OUT/test/$1.jsonl" "${@:3}"
}

# 1. The model as it is, on a few tasks: it does not know that this human answers short questions
# one by one
play raw "$MODEL" --num_tasks "$RAW"
# So it first imitates demonstrations, whose questions are drawn at random
python collect.py --tasks "toy:backend:train:$WORLD" --num_tasks "$DEMONSTRATED" \
  --samples_per_task 3 "${TO_THE_END[@]}" --agent scripted --output "$OUT/demonstrations.jsonl"
python variants/sft.py --episodes "$OUT/demonstrations.jsonl" --model "$MODEL" --lr 2e-4 \
  --epochs 1 --batch_size 16 "${TRAINING[@]}" --micro_batch_size 16 --output "$OUT/warm"

# 2. Episodes, and candidates in six states of each task
python collect.py --tasks "toy:backend:train:$WORLD" --num_tasks "$TASKS" --samples_per_task 6 \
  "${TURNS[@]}" --agent "$OUT/warm" "${SAMPLING[@]}" --output "$OUT/episodes.jsonl"
python collect.py --states "$OUT/episodes.jsonl" --states_fraction 1 --states_per_task 6 \
  --agent "$OUT/warm" "${SAMPLING[@]}" --output "$OUT/candidates.jsonl"

# 3. The critic ranks them; the policy learns from the ranks. A model this small does not know what
# a solution in its context is for. So the model that the critic starts from first learns it, from
# dialogues whose agent follows the solution
python collect.py --tasks "toy:backend:train:$WORLD" --num_tasks $((DEMONSTRATED / 2)) \
  --samples_per_task 2 "${TO_THE_END[@]}" --agent scripted:informed --seed 1 \
  --output "$OUT/informed.jsonl"
python toy/make_base.py inform "$OUT/informed.jsonl" --output "$OUT/solution_first.jsonl"
python variants/sft.py --episodes "$OUT/solution_first.jsonl" --model "$OUT/warm" --lr 1e-4 \
  --epochs 1 --batch_size 8 "${TRAINING[@]}" --output "$OUT/reader"
python train_critic.py --episodes "$OUT/episodes.jsonl" --model "$OUT/reader" "${PAIRS[@]}" \
  --lr 1e-5 --epochs 3 --beta 3 --nll 0.02 "${TRAINING[@]}" --output "$OUT/critic" \
  --candidates "$OUT/candidates.jsonl" --reference plain # what `reader` learnt counts, too
python -m toy.credit auc "$OUT/critic/ranked.jsonl" --metrics "$OUT/critic/metrics.jsonl"
python train_policy.py --candidates "$OUT/critic/ranked.jsonl" --model "$OUT/warm" \
  --shuffle groups --batch_size 64 --lr 3e-5 --epochs 4 --beta 0.3 --nll 3 "${TRAINING[@]}" \
  --micro_batch_size 16 --output "$OUT/sweet"

# 4. The baselines, on the same episodes
python variants/sft.py --episodes "$OUT/episodes.jsonl" --successes --model "$OUT/warm" \
  --batch_size 16 --lr 1e-4 --epochs 24 "${TRAINING[@]}" --output "$OUT/rft"
python train_policy.py --episodes "$OUT/episodes.jsonl" --model "$OUT/warm" "${PAIRS[@]}" \
  --lr 1e-4 --epochs 6 --beta 0.3 --nll 3 "${TRAINING[@]}" --output "$OUT/mtdpo"

# 5. Test tasks that training has not seen, and the report
play warm "$OUT/warm"
play rft "$OUT/rft"
play mtdpo "$OUT/mtdpo"
play sweet "$OUT/sweet"
POLICIES=()
for name in warm rft mtdpo sweet; do
  POLICIES+=("$name=$OUT/test/$name.jsonl")
done
python evaluate.py "${POLICIES[@]}" --output "$OUT/test"
python -m report "${POLICIES[@]}" --output "$OUT/report.html" \
  --metrics critic="$OUT/critic/metrics.jsonl" sweet="$OUT/sweet/metrics.jsonl" \
  mtdpo="$OUT/mtdpo/metrics.jsonl" rft="$OUT/rft/metrics.jsonl"
