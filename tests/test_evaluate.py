"""Statistics, tables, best of N and flags of evaluate.py: pytest tests/test_evaluate.py"""

import itertools
import json
import math

import numpy
import pytest

import evaluate
from colbench import lacks_answer, load_episodes
from collect import interleave
from speakers.interface import Request, Speaker, SpeakerError, Utterance
from report import page, statistics, tables


def draws(runs, tasks, count=2000):
    generator = numpy.random.default_rng(0)
    run_draws = statistics.draw_counts(generator, runs, count)
    return run_draws, statistics.draw_counts(generator, tasks, count)


def episode(task, sample=0, reward=1.0, domain="backend", **more):
    row = {
        "task": {
            "task_id": f"t{task}", "domain": domain, "problem_description": "p", "ground_truth": "r"
        },
        "sample": sample, "reward": reward, "success": None, "turns": 1, "leak": 0.0,
        "answer": "a", "error": None, "reasons": {},
        "dialogue_history": [
            {"role": "user", "content": "p"}, {"role": "assistant", "content": "one two"}
        ],
    }
    if domain == "backend":
        row["task"]["test_cases"] = {"test1": "f()"}
        row["success"] = reward == 1
    return row | more


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def evaluated(folder, *flags, **policies):
    """results.json of a run of evaluate.py on policies, name -> rows."""
    files = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in policies.items()]
    given = ["--episodes", *files] if files else []
    evaluate.main(evaluate.parse_args([*given, "--output", str(folder), *flags]))
    return json.loads((folder / "results.json").read_text())


def numbers_of(folder, *flags, rows):
    """The numbers of one policy with these rows."""
    return evaluated(folder, *flags, p=rows)["policies"]["p"]["numbers"]


def test_interval_covers_the_true_mean_about_95_times_in_100():
    generator, covered = numpy.random.default_rng(1), 0
    run_draws, task_draws = draws(1, 100, count=1000)
    for _ in range(300):
        values = (generator.random((1, 100)) < 0.4).astype(float)
        number = statistics.interval(values, run_draws, task_draws)
        if number["low"] <= 0.4 <= number["high"]:
            covered += 1
    assert 0.91 <= covered / 300 <= 0.985


def test_interval_equals_a_slow_bootstrap_with_missing_values():
    values = numpy.array([[1.0, 0.0, math.nan, 0.5], [0.0, math.nan, 1.0, 1.0]])
    run_draws, task_draws = draws(2, 4)
    means = []
    for run_counts, task_counts in zip(run_draws, task_draws, strict=True):
        total, weights = 0.0, 0.0
        for r, t in itertools.product(range(2), range(4)):
            if not math.isnan(values[r, t]):
                weight = run_counts[r] * task_counts[t]
                total += values[r, t] * weight
                weights += weight
        if weights:
            means.append(total / weights)
    number = statistics.interval(values, run_draws, task_draws)
    assert number["value"] == pytest.approx(3.5 / 6)
    found = [number["low"], number["high"]]
    assert found == pytest.approx(numpy.percentile(means, (2.5, 97.5)))


def test_one_task_gives_counts_no_interval_and_shares_one_that_other_tasks_could_leave_wide(
        tmp_path, capsys):
    rows = [episode(0, sample, reward=sample % 2, agent_tokens=sample) for sample in range(12)]
    numbers = numbers_of(tmp_path, rows=rows)
    for key in ("turns", "tokens"):
        assert numbers[key]["low"] is None and numbers[key]["high"] is None
    assert numbers["success"]["low"] < 0.2 < 0.8 < numbers["success"]["high"]
    assert "1.0 [–]" in capsys.readouterr().out


def test_the_main_metric_is_shown_even_if_it_is_zero_for_every_policy(tmp_path):
    for domain, heading in (("backend", "Success %"), ("frontend", "Similarity × 100")):
        rows = [episode(task, reward=0.0, domain=domain) for task in range(2)]
        results = evaluated(tmp_path, p=rows)
        shown, *folded = tables.all_tables(results)
        assert heading in shown.headings
        assert heading not in [text for table in folded for text in table.headings]


def test_seeds_that_disagree_widen_the_interval():
    agreeing = numpy.full((2, 50), 0.5)
    disagreeing = numpy.array([[0.0] * 50, [1.0] * 50])
    narrow = statistics.interval(agreeing, *draws(2, 50))
    wide = statistics.interval(disagreeing, *draws(2, 50))
    assert narrow["low"] == narrow["high"] == 0.5
    assert (wide["low"], wide["high"]) == (0.0, 1.0)


@pytest.mark.parametrize("share, count, low, high", [
    (0, 2, 0, 0.6576), (1, 2, 0.3424, 1), (0.5, 10, 0.2366, 0.7634), (0, 500, 0, 0.0076)])
def test_wilson_intervals_agree_with_published_ones(share, count, low, high):
    assert statistics.wilson(share, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("value, low, high", [
    (0.0, 0.0, 0.6576), (1.0, 0.3424, 1.0), (0.5, 0.1712, 0.8288)])
def test_tasks_that_all_agree_have_wilsons_interval(value, low, high):
    number = statistics.interval(numpy.full((1, 2), value), *draws(1, 2), statistics.SHARE)
    assert [number["low"], number["high"]] == pytest.approx([low, high], abs=1e-4)


@pytest.mark.parametrize("tasks, settled", [(2, False), (5, False), (9, True)])
def test_few_tasks_settle_nothing_however_clear_they_are(tmp_path, tasks, settled):
    results = evaluated(tmp_path, a=[episode(task) for task in range(tasks)],
                        b=[episode(task, reward=0.0) for task in range(tasks)])
    (lead,) = results["leads"]
    assert (lead["policy"], lead["against"], lead["settled"]) == ("a", "b", settled)
    assert lead["difference"]["low"] < 1 == lead["difference"]["value"]


def test_policies_that_tie_on_every_task_still_have_an_interval(tmp_path):
    rows = [episode(task) for task in range(4)]
    (lead,) = evaluated(tmp_path, a=rows, b=rows)["leads"]
    ends = [lead["difference"][key] for key in ("low", "value", "high")]
    assert ends == pytest.approx([-0.4899, 0, 0.4899], abs=1e-4) and not lead["settled"]


def test_best_policy_is_compared_with_each_other_the_next_best_first(tmp_path, capsys):
    policies = {name: [episode(task, reward=float(task < solved)) for task in range(40)]
                for name, solved in (("low", 2), ("best", 38), ("middle", 36))}
    leads = evaluated(tmp_path, **policies)["leads"]
    assert [(lead["policy"], lead["against"]) for lead in leads] == [("best", "middle"),
                                                                     ("best", "low")]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("The winner is not settled: best solves 95.0 % [")
    assert "middle solves 90.0 % [" in first and "the difference is 5.0 points [" in first
    assert second.startswith("best leads low by 90.0 points [") and "not settled" not in second


def test_a_policy_that_is_behind_on_the_tasks_that_both_finished_never_wins(tmp_path, capsys):
    errors = [episode(task, reward=None, success=None, error="gone") for task in range(50, 150)]
    lucky = [episode(task, reward=float(task < 30)) for task in range(50)] + errors
    other = [episode(task, reward=float(task < 50)) for task in range(150)]
    (lead,) = evaluated(tmp_path, lucky=lucky, other=other)["leads"]
    assert (lead["policy"], lead["tasks"], lead["settled"]) == ("lucky", 50, True)
    assert lead["difference"]["value"] == pytest.approx(-0.4)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("The winner is not settled: lucky solves 60.0 % [")
    assert "the difference is -40.0 points [" in first and "on the 50 tasks" in first


def test_terminal_has_a_named_line_for_each_policy_and_no_zero_columns(tmp_path, capsys):
    evaluated(tmp_path, a=[episode(0)], b=[episode(0, reward=0.0)])
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("Policy"))
    assert "Success %" in header and "Errors %" not in header
    named = [line.split()[:3] for line in lines if line.startswith(("a  ", "b  "))]
    assert named == [["a", "1", "1"], ["b", "1", "1"]]


@pytest.mark.parametrize("text, lacks", [
    ("What now?", 1.0), ("I WANT TO ANSWER:\n  ", 1.0), ("I WANT TO ANSWER: def f", 0.0)])
def test_an_episode_without_an_answer_is_counted_as_one(tmp_path, text, lacks):
    history = [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}]
    row = episode(0, reward=0.0, dialogue_history=history)
    assert numbers_of(tmp_path, rows=[row])["no_answer"]["value"] == lacks
    assert page.ending(row) == ("no answer" if lacks else "wrong answer")
    assert page.ending(episode(0, dialogue_history=history)) == "solved"


def test_only_tests_tell_by_their_reasons_that_there_is_no_answer():
    history = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "What now?"}]
    row = episode(0, reward=0.0, dialogue_history=history, reasons={"exact match": "wrong"})
    assert not lacks_answer(row)  # it is a piece of code, but a wrong one
    del row["task"]["test_cases"]  # another domain's referee
    assert lacks_answer(row)


def test_endings_tell_cut_answers_errors_and_early_ones_apart():
    def ending(text="I WANT TO ANSWER: x", finished=True, **more):
        turn = {"role": "assistant", "content": text, "finished": finished}
        history = [{"role": "user", "content": "p"}, turn]
        return page.ending(episode(0, reward=0.5, dialogue_history=history, **more))

    assert ending(finished=False) == "cut" and ending(error="gone") == "error"
    assert ending(credits=["early answer"]) == "early answer"
    assert ending(credits=["wrong answer"]) == "wrong answer"
    assert ending(domain="frontend") == "answered"
    for reasons in ({}, {"page": "rendered"}):
        assert ending("a page", domain="frontend", reasons=reasons) == "out of turns"


def test_interval_of_nothing_is_nothing():
    assert statistics.interval(numpy.full((1, 3), math.nan), *draws(1, 3)) is None


@pytest.mark.parametrize("wins, losses, p", [
    (0, 0, 1.0), (5, 5, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (8, 2, 0.109375)])
def test_sign_test_is_the_exact_binomial(wins, losses, p):
    assert statistics.sign_test(wins, losses) == pytest.approx(p)


def test_sign_test_stays_exact_for_thousands_of_tasks():
    assert 0 < statistics.sign_test(6000, 4000) < 1e-80
    assert statistics.sign_test(2000, 2000) == 1.0


def test_pass_power_is_the_share_of_subsets_that_all_succeed():
    outcomes = [1.0, 0.0, 1.0, 1.0, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(outcomes, k))
        share = sum(all(subset) for subset in subsets) / len(subsets)
        assert statistics.pass_power(outcomes, k) == pytest.approx(share)
    assert math.isnan(statistics.pass_power(outcomes, 6))


def test_samples_of_a_task_are_averaged_before_tasks(tmp_path):
    rows = [episode(0, sample, reward=1.0) for sample in range(9)] + [episode(1, reward=0.0)]
    assert numbers_of(tmp_path, rows=rows)["success"]["value"] == 0.5


def test_errors_count_as_errors_and_nowhere_else(tmp_path):
    failed = episode(1, reward=None, success=None, error="server gone", turns=99)
    numbers = numbers_of(tmp_path, rows=[episode(0), failed])
    values = [numbers[key]["value"] for key in ("errors", "success", "reward", "turns")]
    assert values == [0.5, 1.0, 1.0, 1.0]


def test_success_without_leaks_omits_leaking_episodes(tmp_path):
    rows = [episode(0, leak=0.5), episode(1, reward=0.5, leak=0.4)]
    numbers = numbers_of(tmp_path, rows=rows)
    values = [numbers[key]["value"] for key in ("success", "leaking", "clean_success")]
    assert values == [0.5, 0.5, 0.0]
    numbers = numbers_of(tmp_path, "--leak_threshold", "0.3", rows=rows)
    assert numbers["leaking"]["value"] == 1.0
    assert numbers["clean_success"] is None


def test_tokens_are_used_only_if_every_episode_has_them(tmp_path):
    both = evaluated(tmp_path, p=[episode(0, agent_tokens=7), episode(1, agent_tokens=9)])
    mixed = evaluated(tmp_path, p=[episode(0, agent_tokens=7), episode(1)])
    assert both["in_tokens"] is True
    assert both["policies"]["p"]["numbers"]["tokens"]["value"] == 8
    assert mixed["in_tokens"] is False
    assert mixed["policies"]["p"]["numbers"]["tokens"]["value"] == 2


def test_paired_difference_is_far_narrower_than_the_unpaired_one(tmp_path):
    easy = numpy.random.default_rng(2).random(60)
    left = [episode(task, reward=float(value)) for task, value in enumerate(easy)]
    right = [episode(task, reward=float(value) * 0.9) for task, value in enumerate(easy)]
    base = write_rows(tmp_path / "base.jsonl", right)
    results = evaluated(tmp_path, "--against", base, p=left)
    pair = next(pair for pair in results["pairs"] if pair["metric"] == "reward")
    alone = results["policies"]["p"]["numbers"]["reward"]
    paired = pair["difference"]
    assert paired["value"] == pytest.approx(easy.mean() / 10)
    assert 0 < paired["low"] < paired["value"] < paired["high"]
    assert paired["high"] - paired["low"] < 0.2 * (alone["high"] - alone["low"])
    assert (pair["wins"], pair["losses"]) == (60, 0)
    assert pair["sign_test_p"] == pytest.approx(2 / 2**60)


def test_frontend_win_rate_counts_ties_half_and_omits_success(tmp_path):
    def write(name, cosines):
        rows = [episode(task, reward=cosine, domain="frontend")
                for task, cosine in enumerate(cosines)]
        return write_rows(tmp_path / f"{name}.jsonl", rows)

    ours, theirs = write("ours", (0.9, 0.5, 0.7)), write("theirs", (0.8, 0.6, 0.7))
    results = evaluated(tmp_path, "--episodes", ours, "--against", theirs)
    (pair,) = results["pairs"]
    assert pair["metric"] == "reward" and pair["win_rate"]["value"] == 0.5
    assert results["policies"]["ours"]["numbers"]["success"] is None
    assert "Similarity × 100" in (tmp_path / "results.md").read_text()


def test_the_interval_of_a_win_rate_covers_other_seeds():
    task_draws = statistics.draw_counts(numpy.random.default_rng(0), 40, 500)
    theirs = statistics.PolicyValues({"reward": numpy.full((1, 40), 0.5)}, numpy.ones((500, 1)))
    widths = []
    for seeds in ([0.6, 0.6], [0.9, 0.3]):  # both seeds ahead; one ahead, the other behind
        ours = statistics.PolicyValues(
            {"reward": numpy.repeat([[seed] for seed in seeds], 40, 1)},
            statistics.draw_counts(numpy.random.default_rng(1), 2, 500))
        rate = statistics.compare(ours, theirs, "reward", task_draws)["win_rate"]
        assert rate["value"] == 1.0
        widths.append(rate["high"] - rate["low"])
    assert widths[0] < 0.2 and widths[1] == 1.0


def test_other_tasks_are_refused_and_named(tmp_path):
    with pytest.raises(SystemExit, match=r"2 of 3 tasks in a run of 'b' \(t1, t2\)"):
        evaluated(tmp_path, a=[episode(task) for task in range(3)], b=[episode(0)])


@pytest.mark.parametrize("key, other", [
    ("problem_description", "q"), ("ground_truth", "s"), ("test_cases", {"test1": "f(2)"})])
def test_another_task_of_the_same_name_is_refused_in_evaluation_and_training(tmp_path, key, other):
    row, edited = episode(0), episode(0)
    edited["task"][key] = other
    with pytest.raises(SystemExit, match="task_id 't0' with two different tasks, expected"):
        evaluated(tmp_path, a=[row], b=[edited])
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert len(load_episodes(files[:1])[0]) == 1
    with pytest.raises(SystemExit, match="task_id 't0' with two different tasks, expected"):
        load_episodes(files)


def test_domains_never_mix(tmp_path):
    with pytest.raises(SystemExit, match="expected one domain"):
        evaluated(tmp_path, a=[episode(0), episode(1, domain="frontend")])


def test_same_name_twice_is_another_seed_and_a_clash_with_against_is_refused(tmp_path):
    for seed in (0, 1):
        write_rows(tmp_path / f"s{seed}.jsonl", [episode(0, reward=float(seed))])
    flags = ["--episodes", f"p={tmp_path}/s0.jsonl", f"p={tmp_path}/s1.jsonl"]
    policy = evaluated(tmp_path, *flags)["policies"]["p"]
    assert policy["seeds"] == 2
    assert policy["numbers"]["success"] == {"value": 0.5, "low": 0.0, "high": 1.0}
    with pytest.raises(SystemExit, match="expected different names"):
        evaluated(tmp_path, *flags, "--against", f"p={tmp_path}/s0.jsonl")


def test_two_files_of_one_name_are_no_seeds_unless_a_name_says_so(tmp_path):
    paths = []
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "sweet.jsonl", [episode(0, reward=1.0)])
        paths.append(f"{tmp_path}/{folder}/sweet.jsonl")
    with pytest.raises(SystemExit, match="found a second file named 'sweet', expected NAME=FILE"):
        evaluate.read_policies(paths)
    assert len(evaluate.read_policies([f"sweet={path}" for path in paths])["sweet"]) == 2


def test_a_name_that_against_has_too_is_refused_before_anything_is_played(tmp_path):
    write_rows(tmp_path / "base.jsonl", [episode(0)])
    flags = ["--tasks", "toy:backend:test", "--agent", "toy/base", "--against",
             f"{tmp_path}/base.jsonl", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="policy 'base' of --agent in --against, too.*--name"):
        evaluate.main(evaluate.parse_args(flags))
    assert not (tmp_path / "out").exists()


def test_a_comparison_on_other_tasks_is_refused_before_anything_is_played(tmp_path):
    base = write_rows(tmp_path / "base.jsonl", [episode(0), episode(1)])
    flags = ["--tasks", "toy:backend:test", "--num_tasks", "2", "--agent", "scripted",
             "--against", base, "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="found 4 tasks that only one of --tasks and --against"):
        evaluate.main(evaluate.parse_args(flags))
    assert not (tmp_path / "out").exists()


def test_a_critic_of_the_report_is_looked_at_before_anything_is_played(tmp_path):
    flags = ["--tasks", "toy:backend:test", "--num_tasks", "2", "--agent", "scripted",
             "--critic", str(tmp_path / "none"), "--report", str(tmp_path / "r.html"),
             "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="none: found no run.json"):
        evaluate.main(evaluate.parse_args(flags))
    assert not (tmp_path / "out").exists()


def test_a_refused_flag_leaves_nothing_where_the_episodes_would_be(tmp_path):
    flags = ["--tasks", "toy:backend:test", "--agent", "scripted", "--clip", "none"]
    with pytest.raises(SystemExit, match="found --clip none, which is ignored"):
        evaluate.main(evaluate.parse_args([*flags, "--output", str(tmp_path / "out")]))
    assert not (tmp_path / "out").exists()


def test_policy_is_named_by_prefix_stem_or_folder(tmp_path):
    assert evaluate.split_name("mine=a/b.jsonl") == ("mine", "a/b.jsonl")
    assert evaluate.split_name("a/b.jsonl") == ("b", "a/b.jsonl")
    sweet = "runs/sweet/episodes.jsonl"
    assert evaluate.split_name(sweet) == ("sweet", sweet)
    (tmp_path / "x=1.jsonl").touch()
    assert evaluate.split_name(f"{tmp_path}/x=1.jsonl") == ("x=1", f"{tmp_path}/x=1.jsonl")


def test_official_rows_work_as_they_are(tmp_path):
    solution = "def f(): return 1"
    task = {"problem_description": "p", "ground_truth": solution, "test_cases": {"t": "f()"}}
    history = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a b c"}]
    rows = [{"task": task, "answer": "a", "reward": reward, "dialogue_history": history}
            for reward in (1.0, 0.0, 1.0)]
    numbers = numbers_of(tmp_path, rows=rows)
    assert numbers["success"]["value"] == pytest.approx(2 / 3)
    assert numbers["pass^2"]["value"] == pytest.approx(1 / 3)


def test_policies_that_talked_to_different_humans_are_named_as_such(tmp_path, capsys):
    policies = {name: [episode(task, human=human) for task in range(3)]
                for name, human in (("a", "llama"), ("b", "llama"), ("c", "qwen"), ("d", None))}
    c = policies.pop("c")
    evaluated(tmp_path, **policies)
    assert "different humans" not in capsys.readouterr().out
    evaluated(tmp_path, **policies, c=c)
    assert "held with different humans (llama, qwen), so" in capsys.readouterr().out


def test_same_seed_gives_the_same_files_byte_for_byte(tmp_path):
    rows, report = [episode(task, reward=task / 9) for task in range(10)], tmp_path / "report.html"
    files = [report, tmp_path / "results.json", tmp_path / "results.md"]
    written = []
    for _ in range(2):
        evaluated(tmp_path, "--report", str(report), p=rows)
        written.append([path.read_bytes() for path in files])
    assert written[0] == written[1]


def test_markdown_table_survives_a_pipe_in_a_name():
    table = tables.Table("", ["Policy", "a|b"], [[("Turns", ""), ("1.0", "[1.0, 1.0]")]])
    lines = tables.lines_of(table, markdown=True)
    assert lines == ["| Policy | a\\|b |", "| --- | --- |", "| Turns | 1.0 [1.0, 1.0] |"]


def test_training_curves_skip_what_is_not_finite_and_stay_small(tmp_path):
    lines = []
    for step in range(5000):
        loss = math.nan if step == 5 else 1.0
        lines.append({"step": step, "train/loss": loss, "time/step": 1})
    path = write_rows(tmp_path / "metrics.jsonl", lines)
    (run,) = page.read_training([("run", path)])
    (chart,) = page.training_charts(run)
    ((name, points),) = [(line["name"], line["points"]) for line in chart["lines"]]
    assert chart["title"] == "Loss" and name == "run" and len(points) <= 200
    assert {value for _, value in points} == {1.0}
    assert [points[0][0], points[-1][0]] == [0, 4999]


def test_a_file_without_steps_is_refused_as_metrics(tmp_path):
    path = write_rows(tmp_path / "episodes.jsonl", [episode(0)])
    with pytest.raises(SystemExit, match=f"{path}: found a line without a step, expected"):
        page.read_training([("run", path)])


def test_a_partial_last_batch_weighs_as_little_as_it_is():
    steps = [(step, 0.5, 4000) for step in range(50)] + [(50, 9.0, 40)]
    points, window = page.smoothed(steps)
    assert window == 3 and points[-1][1] == pytest.approx((0.5 * 4000 + 9 * 40) / 4040)


def failed(task, reason):
    return episode(task, reward=None, success=None, error=reason)


def test_all_errors_still_give_a_table_and_a_report_but_no_share_and_no_exit_status_0(
        tmp_path, capsys):
    rows = [failed(task, "human: HTTP 404\n\x1b[2J") for task in range(3)]
    with pytest.raises(SystemExit, match="every dialogue of p was stopped by an error; expected"):
        numbers_of(tmp_path, "--report", str(tmp_path / "r.html"), rows=rows)
    results = json.loads((tmp_path / "results.json").read_text())
    numbers = results["policies"]["p"]["numbers"]
    assert numbers["errors"]["value"] == 1.0 and numbers["success"] is None
    printed = capsys.readouterr().out
    assert "An error stopped 3 of 3 dialogues of p, which" in printed
    assert "human: HTTP 404 \\x1b[2J" in printed and "of the tasks" not in printed
    assert (tmp_path / "r.html").is_file()


def test_the_verdict_counts_dialogues_that_an_error_stopped_and_names_the_commonest(
        tmp_path, capsys):
    rows = [failed(0, "rare"), failed(1, "common"), failed(2, "common"), episode(3)]
    results = evaluated(tmp_path, p=rows, q=[episode(task) for task in range(4)])
    assert results["policies"]["p"]["errors"] == {"rare": 1, "common": 2}
    assert ("An error stopped 3 of 4 dialogues of p, which count nowhere else; the most frequent:"
            " common\n") in capsys.readouterr().out


def test_tasks_that_their_own_solution_fails_are_counted_and_end_in_a_way_of_their_own(
        tmp_path, capsys):
    reasons = {"test1": "solution failed"}
    rows = [episode(0, reward=0.0, reasons=reasons), episode(0, 1, reward=0.0, reasons=reasons),
            episode(1)]
    results = evaluated(tmp_path, p=rows)
    assert results["unsolvable"] == 1
    assert "1 of 2 tasks cannot be solved by their own solution" in capsys.readouterr().out
    assert "2 tasks, 1 of them unsolvable by their own solution" in page.subtitle(results)
    assert [page.ending(row) for row in rows] == ["solution failed"] * 2 + ["solved"]


# -----------------------------------------------------------------------------
# Best of N


def reply(speaker, request):
    """What a speaker made of others says, with its questions answered as in a rollout."""
    (said,) = interleave([speaker.reply(request)], 1)
    return said


class FixedSpeaker(Speaker):
    """Says "0", "1", ...; keeps what it was asked."""

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        self.asked = (n, seeds, tasks, keys)
        return [[Utterance(str(index), True) for index in range(n)] for _ in conversations]


class FixedScorer:
    def __init__(self, scores):
        self.scores = scores

    def advantages(self, task, messages, texts, finished):
        return self.scores


@pytest.mark.parametrize("scores, chosen", [
    ([0.1, 0.3, 0.2], "1"),
    ([0.0, 0.0, 0.0], "0"),
    (None, "0"),  # the state is too long for the critic
])
def test_best_of_n_takes_the_best_score_and_the_first_without_scores(scores, chosen):
    speaker = FixedSpeaker()
    best = evaluate.BestOfN(speaker, FixedScorer(scores), 3)
    assert reply(best, Request(["m"], 1, 7, "task", "key")) == [Utterance(chosen, True)]
    assert speaker.asked == (3, [7], ["task"], ["key"])


def test_best_of_n_never_says_an_empty_candidate():
    class Mute(FixedSpeaker):
        def speak(self, *arguments, **options):
            return [[Utterance(text, True) for text in (" ", "a question", "")]]

    best = evaluate.BestOfN(Mute(), FixedScorer([0.9, -0.3, 0.5]), 3)
    assert reply(best, Request(["m"])) == [Utterance("a question", True)]


def test_best_of_n_passes_an_error_of_the_speaker_on():
    class Failing(FixedSpeaker):
        def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
            return [SpeakerError("server gone")]

    best = evaluate.BestOfN(Failing(), FixedScorer(None), 3)
    assert isinstance(reply(best, Request(["m"])), SpeakerError)


@pytest.mark.parametrize("answer, chosen", [
    ([Utterance("Candidate 2.", True)], "1"),
    ([Utterance("3", True)], "0"),
    ([Utterance("none", True)], "0"),
    ([Utterance("<think>1 is shorter</think> 2", True)], "1"),
])
def test_a_grader_model_chooses_the_candidate_that_it_names_else_the_first(
        monkeypatch, answer, chosen):
    class Grader(Speaker):
        def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
            assert "[1] 0\n[2] 1" in conversations[0][0]["content"]
            return [answer]

    monkeypatch.setattr(evaluate, "load_speaker", lambda *arguments: Grader())
    grader = evaluate.GraderModel("some/model", None)
    best = evaluate.BestOfN(FixedSpeaker(), grader, 2)
    request = Request([{"role": "user", "content": "p"}])
    assert reply(best, request) == [Utterance(chosen, True)]


@pytest.mark.parametrize("answer, reason", [
    (SpeakerError("HTTP 400"), "grader: HTTP 400"),
    ([Utterance("<think>1 is", False)], "grader: found thoughts that never end, expected"),
])
def test_a_grader_that_fails_stops_the_dialogue_and_does_not_choose_the_first(
        monkeypatch, answer, reason):
    class Failing(Speaker):
        def speak(self, *arguments):
            return [answer]

    monkeypatch.setattr(evaluate, "load_speaker", lambda *arguments: Failing())
    best = evaluate.BestOfN(FixedSpeaker(), evaluate.GraderModel("some/model", None), 2)
    said = reply(best, Request([{"role": "user", "content": "p"}]))
    assert isinstance(said, SpeakerError) and str(said).startswith(reason)


# -----------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize("flags, named", [
    ("--episodes e --tasks toy:backend:test", "--tasks"),
    ("--episodes e --agent a", "--agent"),
    ("--episodes e --max_turns 3", "--max_turns"),
    ("--episodes e --name n", "--name"),
    ("--episodes e --samples_per_task 2", "--samples_per_task"),
    ("--episodes e --best_of_n 4 --critic c", "--best_of_n"),
    ("--episodes e --dtype float32", "--dtype"),
    ("--episodes e --critic c", "--critic"),
    ("--episodes e --critic grader:m --report r.html", "--critic"),
    ("--episodes e --critic c --critic_model m --report r.html", "--critic_model"),
    ("--episodes e --critic_model m", "--critic_model"),
    ("--episodes e --metrics m", "--metrics"),
    ("--metrics m --report r.html", "--output"),
    ("--metrics m --report r.html --against e", "--against"),
    ("--tasks t --agent a --critic c", "--critic"),
    ("--tasks t --agent a --critic grader:m --critic_model n --best_of_n 4", "--critic_model"),
])
def test_a_flag_that_would_be_ignored_is_refused(flags, named):
    with pytest.raises(SystemExit, match=f"found {named} .*expected"):
        evaluate.parse_args(f"{flags} --output o".split())


@pytest.mark.parametrize("flags", [
    "--episodes e --seed 3",
    "--episodes e --critic c --dtype float32 --report r.html --metrics m",
    "--tasks t --agent a --critic c --best_of_n 1 4",
    "--tasks t --agent a --critic c --report r.html",
    "--tasks t --agent a --critic grader:http://m --critic_model n --best_of_n 4",
])
def test_a_flag_that_is_used_is_accepted(flags):
    evaluate.parse_args(f"{flags} --output o".split())


@pytest.mark.parametrize("flags, named", [
    ("--output o", "--episodes to evaluate"),
    ("--metrics m", "--episodes to evaluate"),
    ("--tasks t --output o", "--agent"),
    ("--tasks t --agent http://m/v1 --output o", "a name"),
    ("--tasks t --agent a --name ../b --output o", "a name without a folder"),
    ("--episodes e --output o --report e.jsonl", "FILE.html"),
])
def test_a_command_without_episodes_or_a_policy_says_what_it_needs(flags, named):
    with pytest.raises(SystemExit, match=f"expected.*{named}|{named}"):
        evaluate.parse_args(flags.split())


def test_output_is_needed_with_episodes_and_metrics_alone_need_none():
    with pytest.raises(SystemExit, match="found no --output"):
        evaluate.parse_args("--episodes e".split())
    assert evaluate.parse_args("--metrics m --report r.html".split()).output is None


def test_best_of_n_without_a_critic_is_refused():
    with pytest.raises(SystemExit, match="expected a critic"):
        evaluate.parse_args("--tasks t --agent a --best_of_n 4 --output o".split())
