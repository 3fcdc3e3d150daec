"""The four scripts in order, as a user runs them. Run: pytest tests/test_pipeline.py"""

import json

import pytest
from conftest import run_script

from colbench import read_episodes


def lines(path):
    return [json.loads(line) for line in open(path)]


def play(path, *more, **options):
    return run_script("collect.py", "--tasks", "toy:backend:train", "--num_tasks", 10, "--samples_per_task", 4, "--agent",
                      "toy/base", "--max_new_tokens", 96, "--output", path, *more, **options)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline") / "episodes.jsonl"
    play(path)
    return path


def test_the_same_command_and_seed_give_the_same_bytes_and_another_seed_others(episodes, tmp_path):
    play(tmp_path / "again.jsonl", "--batch_size", 64)
    assert (tmp_path / "again.jsonl").read_bytes() == episodes.read_bytes()
    play(tmp_path / "other.jsonl", "--seed", 1)
    assert (tmp_path / "other.jsonl").read_bytes() != episodes.read_bytes()


def test_two_processes_play_every_task_and_sample_once(episodes, tmp_path):
    play(tmp_path / "two.jsonl", processes=2)
    one, two = (sorted((row["task"]["task_id"], row["sample"]) for row in lines(path))
                for path in (episodes, tmp_path / "two.jsonl"))
    assert one == two and len(set(one)) == 40


def test_a_half_written_last_line_is_repaired_and_nothing_is_played_twice(episodes, tmp_path):
    path = tmp_path / "cut.jsonl"
    content = episodes.read_text().splitlines(keepends=True)
    play(path, "--max_turns", 10)
    path.write_text("".join(content[:7]) + content[7][:50])
    done = play(path, "--max_turns", 10)
    assert path.read_text() == "".join(content) and "40 episodes" in done.stdout


@pytest.mark.parametrize("family, template", [("llama", "llama3"), ("qwen2", "qwen2.5")])
def test_a_random_two_layer_model_plays_real_rows_with_a_model_as_human(real_data, tiny, tmp_path, family, template):
    run_script("collect.py", "--tasks", real_data / "colbench_backend_200.jsonl", "--num_tasks", 3, "--samples_per_task", 1,
               "--agent", tiny(template, family), "--human", tiny(template, family), "--max_new_tokens", 12, "--output",
               tmp_path / "e.jsonl")
    for episode in read_episodes(tmp_path / "e.jsonl"):
        assert episode["turns"] == 10 and episode["reward"] == 0 and "passed" not in episode["reasons"].values()


def test_the_scripted_agent_plays_real_rows_for_a_dry_run_and_a_random_model_the_toy(real_data, tiny, tmp_path):
    run_script("collect.py", "--tasks", real_data / "colbench_backend_200.jsonl", "--num_tasks", 5, "--samples_per_task", 2,
               "--agent", "scripted", "--human", "scripted", "--output", tmp_path / "real.jsonl")
    assert [episode["turns"] for episode in read_episodes(tmp_path / "real.jsonl")] == [2] * 10
    play(tmp_path / "toy.jsonl", "--num_tasks", 2, "--agent", tiny(), "--max_new_tokens", 8)
    assert all(episode["turns"] == 10 and not episode["error"] for episode in read_episodes(tmp_path / "toy.jsonl"))


def test_best_of_n_by_critics_without_training_time_information_and_with_a_value_head(episodes, tmp_path):
    for name, flags in (("plain", ("--privileged", "none")), ("value", ("--head", "value"))):
        run_script("train_critic.py", "--episodes", episodes, "--pairs", "all", "--model", "toy/base", "--max_steps", 2,
                   "--lr", 1e-4, "--micro_batch_size", 8, "--output", tmp_path / name, *flags)
        run_script("evaluate.py", "--tasks", "toy:backend:test", "--num_tasks", 2, "--agent", "toy/base", "--best_of_n", 3,
                   "--critic", tmp_path / name, "--max_new_tokens", 96, "--output", tmp_path / "test", "--name", name)
        assert len(lines(tmp_path / f"test/{name}-best-of-3.jsonl")) == 2


def test_the_pipeline_runs_from_episodes_to_a_report(episodes, tmp_path):
    common = ("--model", "toy/base", "--micro_batch_size", 8, "--max_steps", 4, "--lr", 1e-4)
    run_script("train_critic.py", "--episodes", episodes, "--pairs", "all", "--holdout", 0.2, *common, "--output",
               tmp_path / "critic")
    printed = lines(tmp_path / "critic/metrics.jsonl")[-1]
    assert "credit_auc/question_question" in printed and 0 <= printed["credit_auc/all"] <= 1
    run_script("train_policy.py", "--method", "sweet", "--episodes", episodes, *common, "--critic", tmp_path / "critic",
               "--data_fraction", 0.3, "--states_per_task", 2, "--max_new_tokens", 96, "--output", tmp_path / "sweet")
    done = run_script("evaluate.py", "--tasks", "toy:backend:test", "--num_tasks", 6, "--agent", tmp_path / "sweet",
                      "--best_of_n", 1, 2, "--critic", tmp_path / "critic", "--max_new_tokens", 96, "--output",
                      tmp_path / "test", "--report", tmp_path / "report.html")
    results = json.loads((tmp_path / "test/results.json").read_text())
    assert set(results["policies"]) == {"sweet-best-of-1", "sweet-best-of-2"} and "sweet-best-of-2" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "question" in page and "advantages" in page
    played = tmp_path / "test/sweet-best-of-2.jsonl"
    before = lines(played)
    again = run_script("evaluate.py", "--tasks", "toy:backend:test", "--num_tasks", 6, "--agent", tmp_path / "sweet",
                       "--best_of_n", 2, "--critic", tmp_path / "critic", "--max_new_tokens", 96, "--output",
                       tmp_path / "test", "--draws", 500)  # other N, no report: the same episodes are enough
    assert "sweet-best-of-2" in again.stdout and lines(played) == before and before[0]["best_of_n"] == 2


def test_best_of_n_says_the_candidate_with_the_highest_score():
    from colbench import Utterance
    from evaluate import BestOfN

    class Speaker:
        count_tokens = None

        def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
            return [[Utterance(str(number), True) for number in range(n)] for _ in conversations]

    class Scorer:
        def score(self, task, messages, texts, finished):
            return [-abs(int(text) - 2) for text in texts]

    assert BestOfN(Speaker(), Scorer(), 4).speak([["m"]], tasks=[None]) == [[Utterance("2", True)]]


def test_a_judging_model_can_choose_among_the_candidates(tiny, tmp_path):
    run_script("evaluate.py", "--tasks", "toy:backend:test", "--num_tasks", 2, "--agent", "toy/base", "--best_of_n", 2,
               "--critic", f"judge:{tiny()}", "--max_new_tokens", 96, "--output", tmp_path / "test")
    assert len(lines(tmp_path / "test/base-best-of-2.jsonl")) == 2


def test_the_toy_pages_are_played_and_graded_in_the_browser(tmp_path):
    import shutil

    if not shutil.which("chromium"):
        pytest.skip("no Chromium here; apt-get install chromium")
    run_script("collect.py", "--tasks", "toy:frontend:test", "--num_tasks", 4, "--samples_per_task", 1, "--agent", "scripted",
               "--output", tmp_path / "e.jsonl")
    rewards = [episode["reward"] for episode in read_episodes(tmp_path / "e.jsonl")]
    assert len(rewards) == 4 and all(0 < reward <= 1 for reward in rewards)
