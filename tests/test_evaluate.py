"""Statistics, comparisons and tables of evaluate.py: python -m pytest tests/test_evaluate.py"""

import itertools
import json
import math

import numpy
import pytest

import evaluate


def draws(runs, tasks, count=2000):
    generator = numpy.random.default_rng(0)
    return evaluate.draw_counts(generator, runs, count), evaluate.draw_counts(generator, tasks, count)


def episode(task, sample=0, reward=1.0, domain="backend", **more):
    tests = {"test_cases": {"test1": "f()"}} if domain == "backend" else {}
    return {"task": {"task_id": f"t{task}", "domain": domain, "problem_description": "p", "ground_truth": "r"} | tests,
            "sample": sample, "reward": reward, "success": reward == 1 if domain == "backend" else None, "turns": 1,
            "leak": 0.0, "answer": "a", "error": None, "reasons": {},
            "dialogue_history": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "one two"}]} | more


def evaluated(folder, *flags, **policies):
    """results.json of a run of evaluate.py on policies, name -> rows."""
    files = []
    for name, rows in policies.items():
        files.append(str(folder / f"{name}.jsonl"))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--episodes", *files] if files else []
    evaluate.main(evaluate.parse_args([*given, "--output", str(folder), *flags]))
    return json.loads((folder / "results.json").read_text())


def test_interval_covers_the_true_mean_about_95_times_in_100():
    generator, covered = numpy.random.default_rng(1), 0
    run_draws, task_draws = draws(1, 100, count=1000)
    for _ in range(300):
        number = evaluate.interval((generator.random((1, 100)) < 0.4).astype(float), run_draws, task_draws)
        covered += number["low"] <= 0.4 <= number["high"]
    assert 0.91 <= covered / 300 <= 0.985


def test_interval_equals_a_slow_bootstrap_with_missing_values():
    values = numpy.array([[1.0, 0.0, math.nan, 0.5], [0.0, math.nan, 1.0, 1.0]])
    run_draws, task_draws = draws(2, 4)
    means = []
    for run_counts, task_counts in zip(run_draws, task_draws, strict=True):
        cells = [(values[r, t], run_counts[r] * task_counts[t]) for r, t in itertools.product(range(2), range(4))
                 if not math.isnan(values[r, t])]
        if sum(weight for _, weight in cells):
            means.append(sum(v * weight for v, weight in cells) / sum(weight for _, weight in cells))
    number = evaluate.interval(values, run_draws, task_draws)
    assert number["value"] == pytest.approx(3.5 / 6)
    assert [number["low"], number["high"]] == pytest.approx(numpy.percentile(means, (2.5, 97.5)))


def test_seeds_that_disagree_widen_the_interval():
    agreeing, disagreeing = numpy.full((2, 50), 0.5), numpy.array([[0.0] * 50, [1.0] * 50])
    narrow, wide = (evaluate.interval(values, *draws(2, 50)) for values in (agreeing, disagreeing))
    assert narrow["low"] == narrow["high"] == 0.5 and (wide["low"], wide["high"]) == (0.0, 1.0)


def test_interval_of_nothing_is_nothing():
    assert evaluate.interval(numpy.full((1, 3), math.nan), *draws(1, 3)) is None


@pytest.mark.parametrize("wins, losses, p", [
    (0, 0, 1.0), (5, 5, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (8, 2, 0.109375)])
def test_sign_test_is_the_exact_binomial(wins, losses, p):
    assert evaluate.sign_test(wins, losses) == pytest.approx(p)


def test_sign_test_stays_exact_for_thousands_of_tasks():
    assert 0 < evaluate.sign_test(6000, 4000) < 1e-80 and evaluate.sign_test(2000, 2000) == 1.0


def test_pass_power_is_the_share_of_subsets_that_all_succeed():
    outcomes = [1.0, 0.0, 1.0, 1.0, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(outcomes, k))
        assert evaluate.pass_power(outcomes, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))
    assert math.isnan(evaluate.pass_power(outcomes, 6))


def test_repeats_of_a_task_are_averaged_before_tasks(tmp_path):
    rows = [episode(0, sample, reward=1.0) for sample in range(9)] + [episode(1, reward=0.0)]
    assert evaluated(tmp_path, p=rows)["policies"]["p"]["numbers"]["success"]["value"] == 0.5


def test_errors_count_as_errors_and_nowhere_else(tmp_path):
    rows = [episode(0), episode(1, reward=None, success=None, error="server gone", turns=99)]
    numbers = evaluated(tmp_path, p=rows)["policies"]["p"]["numbers"]
    assert [numbers[key]["value"] for key in ("errors", "success", "reward", "turns")] == [0.5, 1.0, 1.0, 1.0]


def test_success_without_leaks_leaves_leaking_episodes_out(tmp_path):
    rows = [episode(0, leak=0.5), episode(1, reward=0.5, leak=0.4)]
    numbers = evaluated(tmp_path, p=rows)["policies"]["p"]["numbers"]
    assert [numbers[key]["value"] for key in ("success", "leaking", "clean_success")] == [0.5, 0.5, 0.0]
    numbers = evaluated(tmp_path, "--leak_threshold", "0.3", p=rows)["policies"]["p"]["numbers"]
    assert numbers["leaking"]["value"] == 1.0 and numbers["clean_success"] is None


def test_tokens_are_used_only_if_every_episode_has_them(tmp_path):
    both = evaluated(tmp_path, p=[episode(0, agent_tokens=7), episode(1, agent_tokens=9)])
    mixed = evaluated(tmp_path, p=[episode(0, agent_tokens=7), episode(1)])
    assert (both["in_tokens"], both["policies"]["p"]["numbers"]["tokens"]["value"]) == (True, 8)
    assert (mixed["in_tokens"], mixed["policies"]["p"]["numbers"]["tokens"]["value"]) == (False, 2)


def test_paired_difference_is_far_narrower_than_the_unpaired_one(tmp_path):
    generator = numpy.random.default_rng(2)
    easy = generator.random(60)
    left = [episode(task, reward=float(value)) for task, value in enumerate(easy)]
    right = [episode(task, reward=float(value) * 0.9) for task, value in enumerate(easy)]
    (tmp_path / "base.jsonl").write_text("".join(json.dumps(row) + "\n" for row in right))
    results = evaluated(tmp_path, "--against", str(tmp_path / "base.jsonl"), p=left)
    pair = next(pair for pair in results["pairs"] if pair["metric"] == "reward")
    alone = results["policies"]["p"]["numbers"]["reward"]
    assert pair["difference"]["value"] == pytest.approx(easy.mean() / 10)
    assert 0 < pair["difference"]["low"] < pair["difference"]["value"] < pair["difference"]["high"]
    assert pair["difference"]["high"] - pair["difference"]["low"] < 0.2 * (alone["high"] - alone["low"])
    assert (pair["wins"], pair["losses"], pair["sign_test_p"]) == (60, 0, pytest.approx(2 / 2**60))


def test_frontend_win_rate_counts_ties_half_and_leaves_success_out(tmp_path):
    for name, cosines in (("ours", (0.9, 0.5, 0.7)), ("theirs", (0.8, 0.6, 0.7))):
        rows = [episode(task, reward=cosine, domain="frontend") for task, cosine in enumerate(cosines)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = evaluated(tmp_path, "--episodes", f"{tmp_path}/ours.jsonl", "--against", f"{tmp_path}/theirs.jsonl")
    (pair,) = results["pairs"]
    assert pair["metric"] == "reward" and pair["win_rate"]["value"] == 0.5
    assert results["policies"]["ours"]["numbers"]["success"] is None
    assert "Similarity × 100" in (tmp_path / "results.md").read_text()


def test_other_tasks_are_refused_and_named(tmp_path):
    with pytest.raises(SystemExit, match=r"2 of 3 tasks in a run of 'b' \(t1, t2\)"):
        evaluated(tmp_path, a=[episode(task) for task in range(3)], b=[episode(0)])


def test_domains_never_mix(tmp_path):
    with pytest.raises(SystemExit, match="expected one domain"):
        evaluated(tmp_path, a=[episode(0), episode(1, domain="frontend")])


def test_same_name_twice_is_another_seed_and_a_clash_with_against_is_refused(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"s{seed}.jsonl").write_text(json.dumps(episode(0, reward=float(seed))) + "\n")
    flags = ["--episodes", f"p={tmp_path}/s0.jsonl", f"p={tmp_path}/s1.jsonl"]
    policy = evaluated(tmp_path, *flags)["policies"]["p"]
    assert policy["seeds"] == 2 and policy["numbers"]["success"] == {"value": 0.5, "low": 0.0, "high": 1.0}
    with pytest.raises(SystemExit, match="expected different names"):
        evaluated(tmp_path, *flags, "--against", f"p={tmp_path}/s0.jsonl")


def test_policy_is_named_by_prefix_stem_or_folder(tmp_path):
    assert evaluate.split_name("mine=a/b.jsonl") == ("mine", "a/b.jsonl")
    assert evaluate.split_name("a/b.jsonl") == ("b", "a/b.jsonl")
    assert evaluate.split_name("runs/sweet/episodes.jsonl") == ("sweet", "runs/sweet/episodes.jsonl")
    (tmp_path / "x=1.jsonl").touch()
    assert evaluate.split_name(f"{tmp_path}/x=1.jsonl") == ("x=1", f"{tmp_path}/x=1.jsonl")


def test_official_rows_work_as_they_are(tmp_path):
    task = {"problem_description": "p", "ground_truth": "def f(): return 1", "test_cases": {"t": "f()"}}
    rows = [{"task": task, "answer": "a", "reward": reward,
             "dialogue_history": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a b c"}]}
            for reward in (1.0, 0.0, 1.0)]
    numbers = evaluated(tmp_path, p=rows)["policies"]["p"]["numbers"]
    assert numbers["success"]["value"] == pytest.approx(2 / 3) and numbers["pass^2"]["value"] == pytest.approx(1 / 3)


def test_same_seed_gives_the_same_files_byte_for_byte(tmp_path):
    rows, report = [episode(task, reward=task / 9) for task in range(10)], tmp_path / "report.html"
    written = []
    for _ in range(2):
        evaluated(tmp_path, "--report", str(report), p=rows)
        written.append([path.read_bytes() for path in (report, tmp_path / "results.json", tmp_path / "results.md")])
    assert written[0] == written[1]


def test_markdown_table_survives_a_pipe_in_a_name():
    lines = evaluate.lines_of((["Policy", "a|b"], [[("Turns", ""), ("1.0", "[1.0, 1.0]")]]), markdown=True)
    assert lines == ["| Policy | a\\|b |", "| --- | --- |", "| Turns | 1.0 [1.0, 1.0] |"]


def test_best_of_n_curve_comes_from_policies_that_name_their_candidates(tmp_path):
    policies = {f"p{n}": [episode(0, best_of_n=n, scorer="critic")] for n in (4, 1, 2)}
    results = evaluated(tmp_path, "--report", str(tmp_path / "report.html"), **policies)
    assert [x for x, *_ in evaluate.best_of_n_curves(results, "success")["critic"]] == [0, 1, 2]
    assert "Success % by number of candidates" in (tmp_path / "report.html").read_text()


def test_training_curves_skip_what_is_not_finite_and_stay_small(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": i, "train/loss": math.nan if i == 5 else 1.0, "time/step": 1} for i in range(5000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = evaluate.training_curves([f"run={path}"])
    assert list(curves) == ["train/loss"] and len(curves["train/loss"]["run"]) <= 300


def test_all_errors_still_give_a_table_and_a_report(tmp_path):
    rows = [episode(task, reward=None, success=None, error="gone") for task in range(3)]
    numbers = evaluated(tmp_path, "--report", str(tmp_path / "r.html"), p=rows)["policies"]["p"]["numbers"]
    assert numbers["errors"]["value"] == 1.0 and numbers["success"] is None
