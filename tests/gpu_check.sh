#!/usr/bin/env bash
# What the project does on one CUDA GPU: about seven minutes on an H200.
#   bash tests/gpu_check.sh [--dry] [--layers 32]     --dry: the same code on tiny shapes on the CPU
# PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
timeout 800 "$PYTHON" tests/gpu_check.py "$@"
tests=(tests/test_critic.py tests/test_policy.py tests/test_dialogue.py tests/test_speakers.py)
# there is one GPU, and bf16 is not exact
wanted="not ranks and not resumed and not toy and not its_effect and not their_cost"
case " $* " in *" --dry "*) wanted="packed or equations" ;; esac
TEST_GPU=1 timeout 500 "$PYTHON" -m pytest -v -m "not slow" -k "$wanted" "${tests[@]}"
