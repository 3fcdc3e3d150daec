"""The four scripts in order, as a user runs them. Run: pytest tests/test_pipeline.py"""

import json
import shutil

import pytest
from conftest import metrics, run_script

from colbench import read_episodes


def lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def play(path, *more, **options):
    return run_script(
        "collect.py", "--tasks", "toy:backend:train", "--num_tasks", 10, "--samples_per_task", 4,
        "--agent", "toy/base", "--max_new_tokens", 96, "--output", path, *more, **options)


def evaluate(output, agent, num_tasks, *more):
    return run_script(
        "evaluate.py", "--tasks", "toy:backend:test", "--num_tasks", num_tasks, "--agent", agent,
        "--max_new_tokens", 96, "--output", output, *more)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline") / "episodes.jsonl"
    play(path)
    return path


# -----------------------------------------------------------------------------
# Rollouts


def test_the_same_command_and_seed_give_the_same_bytes_and_another_seed_others(episodes, tmp_path):
    play(tmp_path / "again.jsonl", "--batch_size", 64)
    assert (tmp_path / "again.jsonl").read_bytes() == episodes.read_bytes()
    play(tmp_path / "other.jsonl", "--seed", 1)
    assert (tmp_path / "other.jsonl").read_bytes() != episodes.read_bytes()


def test_two_processes_play_every_task_and_sample_once(episodes, tmp_path):
    play(tmp_path / "two.jsonl", processes=2)

    def keys(path):
        return sorted((row["task"]["task_id"], row["sample"]) for row in lines(path))

    one = keys(episodes)
    assert one == keys(tmp_path / "two.jsonl") and len(set(one)) == 40


def test_a_half_written_last_line_is_repaired_and_nothing_is_played_twice(episodes, tmp_path):
    path = tmp_path / "cut.jsonl"
    content = episodes.read_text().splitlines(keepends=True)
    play(path, "--max_turns", 10)
    path.write_text("".join(content[:7]) + content[7][:50])
    done = play(path, "--max_turns", 10)
    assert path.read_text() == "".join(content) and "40 episodes" in done.stdout


@pytest.mark.parametrize("family, template", [("llama", "llama3"), ("qwen2", "qwen2.5")])
def test_a_random_model_plays_real_rows_with_a_model_as_human(
        real_data, tiny, tmp_path, family, template):
    model = tiny(template, family)
    run_script(
        "collect.py", "--tasks", real_data / "colbench_backend_200.jsonl", "--num_tasks", 3,
        "--samples_per_task", 1, "--agent", model, "--human", model, "--max_new_tokens", 12,
        "--output", tmp_path / "e.jsonl")
    for episode in read_episodes(tmp_path / "e.jsonl"):
        assert episode["turns"] == 10 and episode["reward"] == 0
        assert "passed" not in episode["reasons"].values()


def test_the_scripted_agent_plays_real_rows_as_a_dry_run(real_data, tmp_path):
    run_script(
        "collect.py", "--tasks", real_data / "colbench_backend_200.jsonl", "--num_tasks", 5,
        "--samples_per_task", 2, "--agent", "scripted", "--human", "scripted",
        "--output", tmp_path / "real.jsonl")
    assert [episode["turns"] for episode in read_episodes(tmp_path / "real.jsonl")] == [2] * 10


def test_a_random_model_plays_the_toy_world(tiny, tmp_path):
    play(tmp_path / "toy.jsonl", "--num_tasks", 2, "--agent", tiny(), "--max_new_tokens", 8)
    for episode in read_episodes(tmp_path / "toy.jsonl"):
        assert episode["turns"] == 10 and not episode["error"]


def test_the_toy_pages_are_played_and_graded_in_the_browser(tmp_path):
    if not shutil.which("chromium"):
        pytest.skip("no Chromium here; apt-get install chromium")
    run_script(
        "collect.py", "--tasks", "toy:frontend:test", "--num_tasks", 4, "--samples_per_task", 1,
        "--agent", "scripted", "--output", tmp_path / "e.jsonl")
    rewards = [episode["reward"] for episode in read_episodes(tmp_path / "e.jsonl")]
    assert len(rewards) == 4 and all(0 < reward <= 1 for reward in rewards)


# -----------------------------------------------------------------------------
# All stages


def test_the_pipeline_runs_from_episodes_to_a_report(episodes, tmp_path):
    critic, policy, report = tmp_path / "critic", tmp_path / "sweet", tmp_path / "report.html"
    training = ("--model", "toy/base", "--micro_batch_size", 8, "--max_steps", 4, "--lr", 1e-4)
    run_script("train_critic.py", "--episodes", episodes, "--pairs", "all", "--holdout", 0.2,
               *training, "--output", critic)
    reported = metrics(critic)[-1]
    assert "credit_auc/question_question" in reported and 0 <= reported["credit_auc/all"] <= 1
    run_script("train_policy.py", "--method", "sweet", "--episodes", episodes, *training,
               "--critic", critic, "--data_fraction", 0.3, "--states_per_task", 2,
               "--max_new_tokens", 96, "--output", policy)
    done = evaluate(tmp_path / "test", policy, 6, "--best_of_n", 1, 2, "--critic", critic,
                    "--report", report)
    results = json.loads((tmp_path / "test/results.json").read_text())
    assert set(results["policies"]) == {"sweet-best-of-1", "sweet-best-of-2"}
    assert "sweet-best-of-2" in done.stdout
    page = report.read_text()
    assert "question" in page and "advantages" in page
    played = tmp_path / "test/sweet-best-of-2.jsonl"
    before = lines(played)
    # other N, no report: the same episodes are enough
    again = evaluate(tmp_path / "test", policy, 6, "--best_of_n", 2, "--critic", critic,
                     "--draws", 500)
    assert "sweet-best-of-2" in again.stdout and lines(played) == before
    assert before[0]["best_of_n"] == 2
    # without N a critic only shows its advantages: what has been played without it is enough
    evaluate(tmp_path / "test", policy, 2)
    done = evaluate(tmp_path / "test", policy, 2, "--critic", critic, "--report", report)
    assert f"report: {report}" in done.stdout


# -----------------------------------------------------------------------------
# Best of N


@pytest.mark.parametrize("name, flags", [
    ("plain", ("--privileged", "none")), ("value", ("--head", "value")),
])
def test_best_of_n_by_a_critic_without_the_solution_or_with_a_value_head(
        episodes, tmp_path, name, flags):
    run_script("train_critic.py", "--episodes", episodes, "--pairs", "all", "--model", "toy/base",
               "--max_steps", 2, "--lr", 1e-4, "--micro_batch_size", 8,
               "--output", tmp_path / name, *flags)
    evaluate(tmp_path / "test", "toy/base", 2, "--best_of_n", 3, "--critic", tmp_path / name,
             "--name", name)
    assert len(lines(tmp_path / f"test/{name}-best-of-3.jsonl")) == 2


def test_a_grader_model_can_choose_among_the_candidates(tiny, tmp_path):
    evaluate(tmp_path / "test", "toy/base", 2, "--best_of_n", 2, "--critic", f"grader:{tiny()}")
    assert len(lines(tmp_path / "test/base-best-of-2.jsonl")) == 2
