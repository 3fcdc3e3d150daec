"""The four scripts in order, as a user runs them."""

import pytest
from conftest import run_script

from formats.read import read_episodes


@pytest.mark.slow
def test_a_random_model_plays_real_rows_with_a_model_as_human(real_data, tiny, tmp_path):
    model = tiny("qwen2.5", "qwen2")
    run_script(
        "collect.py", "--tasks", real_data("colbench_backend_200.jsonl"), "--num_tasks", 3,
        "--samples_per_task", 1, "--agent", model, "--human", model, "--max_new_tokens", 12,
        "--output", tmp_path / "e.jsonl")
    for episode in read_episodes(tmp_path / "e.jsonl"):
        assert episode["turns"] == 10 and episode["reward"] == 0
        assert "passed" not in episode["reasons"].values()


@pytest.mark.slow
@pytest.mark.parametrize("template, family", [("qwen2.5", "qwen2"), ("llama3", "llama")])
def test_a_chat_model_goes_from_demonstrations_to_a_policy(
        template, family, tiny, toy_episodes, tmp_path):
    """A warm start on demonstrations, then all stages, with the chat templates in use."""
    start, critic, policy = tmp_path / "start", tmp_path / "critic", tmp_path / "policy"
    training = ("--max_steps", 2, "--micro_batch_size", 4, "--lr", 1e-3, "--packed")
    run_script("variants/sft.py", "--episodes", toy_episodes, "--model", tiny(template, family),
               *training, "--output", start)
    run_script("collect.py", "--states", toy_episodes, "--states_fraction", 0.2,
               "--states_per_task", 1, "--num_candidates", 4, "--max_new_tokens", 8,
               "--agent", start, "--output", tmp_path / "candidates.jsonl")
    run_script("train_critic.py", "--episodes", toy_episodes, "--pairs", "all", "--model", start,
               *training, "--output", critic, "--candidates", tmp_path / "candidates.jsonl")
    run_script("train_policy.py", "--candidates", critic / "ranked.jsonl", "--model", start,
               *training, "--output", policy)
    run_script("collect.py", "--tasks", "toy:backend:test", "--num_tasks", 2, "--samples_per_task",
               1, "--max_new_tokens", 8, "--agent", policy, "--output", tmp_path / "test.jsonl")
    for episode in read_episodes(tmp_path / "test.jsonl"):
        assert not episode["error"] and episode["agent_prompt"] == "Ask, then answer."
