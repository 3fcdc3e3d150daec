"""The benchmark and the GPU check still run, and their two sides agree. No figure is judged here."""

import re

import pytest
from conftest import run_script

KEYS = {"policy_state_vs_trl", "policy_pair_vs_trl", "policy_state_vs_trl_long", "policy_pair_vs_trl_long", "score16_vs_full",
        "critic_vs_per_turn", "critic_vs_single_forward", "sample16_vs_generate", "rollout_vs_recompute", "judge_vs_per_sample",
        "judge_vs_per_test", "judge_vs_fork", "import_colbench", "judge_worker_ready", "growth", "growth_exponent",
        "episodes_per_second"}


@pytest.mark.slow
def test_the_benchmark_names_every_figure_and_both_sides_of_each_agree():
    printed = run_script("tests/benchmark.py", "--quick", timeout=900).stdout  # it stops where the sides disagree
    assert set(re.findall(r"\[(\w+)\]", printed)) == KEYS
    assert "relative difference" in printed and "the tokens of generate" in printed


@pytest.mark.slow
def test_the_gpu_check_runs_dry_and_claims_no_gpu_figure():
    printed = run_script("tests/gpu_check.py", "--dry", timeout=600).stdout
    assert "no figure here is a GPU's" in printed and "--share state" in printed and "Loss parity" in printed
    assert not re.search(r"\d%", printed)
