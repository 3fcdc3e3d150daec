"""The benchmark and the GPU check run, and their two sides agree. No figure is judged here."""

import re

import pytest
from conftest import run_script

ALONE = {"OMP_NUM_THREADS": "1"}  # in a process of its own, where nothing has loaded torch yet


@pytest.mark.slow
def test_every_section_of_the_benchmark_prints_its_lines_and_both_sides_agree():
    # it stops with an error where the sides disagree
    printed = run_script("tests/benchmark.py", "--quick", env=ALONE, timeout=900).stdout
    for key in ("policy_state_vs_trl", "score16_vs", "critic_vs_per_turn", "sample16_vs"):
        assert f"[{key}" in printed


@pytest.mark.slow
def test_the_gpu_check_runs_dry_and_claims_no_gpu_figure():
    printed = run_script("tests/gpu_check.py", "--dry", env=ALONE, timeout=600).stdout
    assert "no figure here is a GPU's" in printed
    for part in ("4 a forward, packed", "parity with the CPU", "resumed critic", "two ranks",
                 "packed policy", "checkpoint of the run lora", "train_critic.py, 2 layers"):
        assert part in printed
    assert not re.search(r"\d%", printed)
