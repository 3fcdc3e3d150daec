"""Statistics, tables and the verdict of evaluate.py."""

import itertools
import json
import math
import random

import conftest
import numpy
import pytest
from conftest import dialogue, run_script, write_rows

import evaluate
from formats.policies import read_policies
from formats.read import load_episodes
from formats.verdict import pair_table, policy_table


def draws(runs, tasks, count=2000):
    generator = numpy.random.default_rng(0)
    seed_draws = evaluate.draw_counts(generator, runs, count)
    return seed_draws, evaluate.draw_counts(generator, tasks, count)


def episode(task, sample=0, reward=1.0, **more):
    return conftest.episode(f"t{task}", reward, sample, ("p", "one two"), **more)


def rewarded(*rewards, **more):
    """An episode of each task, with these rewards."""
    return [episode(task, reward=float(reward), **more) for task, reward in enumerate(rewards)]


def outcomes(solved, tasks, **more):
    """An episode of each task, of which the first ones are solved."""
    return rewarded(*(task < solved for task in range(tasks)), **more)


def failed(task, reason):
    return episode(task, reward=None, error=reason)


def evaluated(folder, *flags, **policies):
    """results.json of a run of evaluate.py on policies, name -> rows, after other words."""
    files = [f"{name}={write_rows(folder / f'{name}.jsonl', rows)}"
             for name, rows in policies.items()]
    evaluate.main(evaluate.parse_args([*files, *flags, "--output", str(folder / "out")]))
    return json.loads((folder / "out/results.json").read_text())


def numbers_of(folder, *flags, rows):
    """The numbers of one policy with these rows."""
    return evaluated(folder, *flags, p=rows)["policies"]["p"]["numbers"]


# -----------------------------------------------------------------------------
# Intervals


def test_interval_covers_the_true_mean_about_95_times_in_100():
    generator, covered = numpy.random.default_rng(1), 0
    seed_draws, task_draws = draws(1, 100, count=1000)
    for _ in range(300):
        values = (generator.random((1, 100)) < 0.4).astype(float)
        number = evaluate.interval(values, seed_draws, task_draws)
        if number["low"] <= 0.4 <= number["high"]:
            covered += 1
    assert 0.91 <= covered / 300 <= 0.985


@pytest.mark.parametrize("values, mean", [
    ([[1.0, 0.0, math.nan, 0.5], [0.0, math.nan, 1.0, 1.0]], 3.5 / 6),
    ([[1.0, 0.0, math.nan, 0.5], [1.0, math.nan, math.nan, 1.0]], 3.5 / 5),
    ([[0.8, 0.8, math.nan]], 0.8)])
def test_interval_equals_a_slow_bootstrap_with_missing_values(values, mean):
    values = numpy.array(values)
    runs, tasks = values.shape
    seed_draws, task_draws = draws(runs, tasks)
    means = []
    for seed_counts, task_counts in zip(seed_draws, task_draws, strict=True):
        total, weights = 0.0, 0.0
        for r, t in itertools.product(range(runs), range(tasks)):
            if not math.isnan(values[r, t]):
                weight = seed_counts[r] * task_counts[t]
                total += values[r, t] * weight
                weights += weight
        if weights:  # some draws have nothing but tasks without a value
            means.append(total / weights)
    number = evaluate.interval(values, seed_draws, task_draws)
    assert number["value"] == pytest.approx(mean)
    found = [number["low"], number["high"]]
    assert found == pytest.approx(numpy.percentile(means, (2.5, 97.5)))


def test_one_task_gives_counts_no_interval_and_shares_a_wide_one(tmp_path, capsys):
    rows = [episode(0, sample, reward=sample % 2) for sample in range(12)]
    numbers = numbers_of(tmp_path, rows=rows)
    for key in ("turns", "words"):
        assert numbers[key]["low"] is None and numbers[key]["high"] is None
    assert numbers["success"]["low"] < 0.2 < 0.8 < numbers["success"]["high"]
    assert evaluate.bounds([0.5, 0.51], 1, evaluate.SHARE)["low"] < 0.2  # of two seeds
    assert "1.0 [–]" in capsys.readouterr().out


@pytest.mark.parametrize("values, low, high", [
    ([[0.0] * 2], 0.0, 0.657620), ([[1.0] * 2], 0.342380, 1.0), ([[0.5] * 2], 0.171190, 0.828810),
    ([[0.0] * 500], 0, 0.007624),
    ([[1 / 3] * 7], 0.215223, 0.569554),  # equal but for the rounding of their mean
    ([[1.0, math.nan, 1.0], [1.0, 1.0, math.nan]], 0.438503, 1.0)])  # three tasks, not two or six
def test_tasks_that_all_agree_have_wilsons_interval(values, low, high):
    seeds, tasks = len(values), len(values[0])
    number = evaluate.interval(numpy.array(values), *draws(seeds, tasks), evaluate.SHARE)
    assert [number["low"], number["high"]] == pytest.approx([low, high], abs=1e-6)


def test_a_bound_of_exactly_0_excludes_no_0_whatever_the_order_of_addition():
    assert evaluate.bounds(numpy.array([2.8e-18, -2.8e-18, 0.5] * 10), 5)["low"] == 0


# -----------------------------------------------------------------------------
# Comparisons


def test_equal_sums_that_were_added_in_another_order_are_a_tie():
    gaps = numpy.array([0.1 + 0.2 - 0.3, 0.3 - 0.2 - 0.1, 1e-6, -1e-6])
    assert evaluate.win_points(gaps, 1e-12).tolist() == [0.5, 0.5, 1.0, 0.0]
    draw = random.Random(0)  # rewards of logs may be large
    samples = [[draw.uniform(1e3, 9e4) for _ in range(3)] for _ in range(100)]
    # not `sum`, which adds exactly since Python 3.12
    ours = numpy.array([[(first + second + third) / 3 for first, second, third in samples]])
    theirs = numpy.array([[(third + second + first) / 3 for first, second, third in samples]])
    once, tasks = numpy.ones((1, 1)), numpy.ones((1, 100))
    found = evaluate.compare(ours, theirs, once, once, tasks, limits=None)
    assert (ours != theirs).any() and found["wins"] == found["losses"] == 0


def test_one_huge_reward_of_a_log_makes_no_other_task_a_tie():
    better, worse = numpy.full((1, 21), 0.9), numpy.full((1, 21), 0.1)
    better[0, 0] = worse[0, 0] = 1e13
    seed_draws, task_draws = draws(1, 21)
    found = evaluate.compare(better, worse, seed_draws, seed_draws, task_draws, None)
    assert (found["wins"], found["losses"]) == (20, 0)


@pytest.mark.parametrize("wins, losses, p", [
    (0, 0, 1.0), (5, 5, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (8, 2, 0.109375),
    (2000, 2000, 1.0), (6000, 4000, 1.7404316412268784e-89)])
def test_sign_test_is_the_exact_binomial(wins, losses, p):
    assert evaluate.sign_test(wins, losses) == pytest.approx(p, abs=0)


def test_paired_difference_is_far_narrower_than_the_unpaired_one(tmp_path):
    easy = numpy.random.default_rng(2).random(60)
    results = evaluated(tmp_path, base=rewarded(*0.9 * easy), p=rewarded(*easy))
    pair = next(pair for pair in results["comparisons"] if pair["metric"] == "reward")
    alone = results["policies"]["p"]["numbers"]["reward"]
    paired = pair["difference"]
    assert paired["value"] == pytest.approx(easy.mean() / 10)
    assert 0 < paired["low"] < paired["value"] < paired["high"]
    assert paired["high"] - paired["low"] < 0.2 * (alone["high"] - alone["low"])
    assert (pair["wins"], pair["losses"]) == (60, 0)
    assert pair["sign_test_p"] == pytest.approx(2 / 2**60)


def test_the_interval_of_a_win_rate_covers_other_seeds():
    task_draws = evaluate.draw_counts(numpy.random.default_rng(0), 40, 500)
    our_draws = evaluate.draw_counts(numpy.random.default_rng(1), 2, 500)
    theirs, their_draws = numpy.full((1, 40), 0.5), numpy.ones((500, 1))
    widths = []
    for seeds in ([0.6, 0.6], [0.9, 0.3]):  # both seeds ahead; one ahead, the other behind
        ours = numpy.repeat([[seed] for seed in seeds], 40, 1)
        rate = evaluate.compare(ours, theirs, our_draws, their_draws, task_draws)["win_rate"]
        assert rate["value"] == 1.0
        widths.append(rate["high"] - rate["low"])
    assert widths[0] < 0.2 and widths[1] == 1.0


def test_the_seeds_of_two_policies_are_drawn_independently(tmp_path):
    files = [*seeds(tmp_path, "a", 20, 0, 20), *seeds(tmp_path, "b", 20, 0, 20)]
    (lead,) = evaluated(tmp_path, *files)["leads"]
    assert (lead["difference"]["low"], lead["difference"]["high"]) == (-1.0, 1.0)


def test_a_task_that_one_seed_did_not_finish_is_no_task_of_the_comparison():
    partly, whole = numpy.array([[1.0, math.nan, 1.0], [1.0, 1.0, 0.5]]), numpy.zeros((1, 3))
    seed_draws, task_draws = draws(2, 3)
    once = numpy.ones((2000, 1))
    found = evaluate.compare(partly, whole, seed_draws, once, task_draws)
    assert (found["tasks"], found["difference"]["value"]) == (2, 0.875)
    found = evaluate.compare(whole, partly, once, seed_draws, task_draws)
    assert (found["tasks"], found["difference"]["value"]) == (2, -0.875)


@pytest.mark.parametrize("tasks, settled", [(2, False), (5, False), (9, True)])
def test_few_tasks_settle_nothing_however_clear_they_are(tmp_path, tasks, settled):
    (lead,) = evaluated(tmp_path, a=outcomes(tasks, tasks), b=outcomes(0, tasks))["leads"]
    assert (lead["policy"], lead["against"], lead["settled"]) == ("a", "b", settled)
    assert lead["difference"]["low"] < 1 == lead["difference"]["value"]


def test_many_small_wins_do_not_settle_what_a_few_great_losses_undo(tmp_path):
    pages = {"a": rewarded(*[0.6] * 25, *[0.1] * 5, domain="frontend"),
             "b": rewarded(*[0.5] * 30, domain="frontend")}
    (lead,) = evaluated(tmp_path, **pages)["leads"]
    assert lead["sign_test_p"] < 0.05 and not lead["settled"]


@pytest.mark.parametrize("solved", [4, 0])
def test_policies_that_tie_on_every_task_still_have_an_interval(tmp_path, solved):
    (lead,) = evaluated(tmp_path, a=outcomes(solved, 4), b=outcomes(solved, 4))["leads"]
    ends = [lead["difference"][key] for key in ("low", "value", "high")]
    assert ends == pytest.approx([-0.4899, 0, 0.4899], abs=1e-4) and not lead["settled"]
    assert (lead["wins"], lead["losses"], lead["win_rate"]["value"]) == (0, 0, 0.5)


def test_pages_are_compared_by_reward_and_ties_count_half(tmp_path):
    results = evaluated(tmp_path, theirs=rewarded(0.8, 0.6, 0.7, domain="frontend"),
                        ours=rewarded(0.9, 0.5, 0.7, domain="frontend"))
    (pair,) = results["comparisons"]
    assert pair["metric"] == "reward" and pair["win_rate"]["value"] == 0.5
    assert results["policies"]["ours"]["numbers"]["success"] is None
    assert "Similarity × 100" in (tmp_path / "out/results.md").read_text()


# -----------------------------------------------------------------------------
# From episodes to numbers


def test_samples_of_a_task_are_averaged_before_tasks(tmp_path):
    rows = [episode(0, sample, reward=1.0) for sample in range(9)] + [episode(1, reward=0.0)]
    assert numbers_of(tmp_path, rows=rows)["success"]["value"] == 0.5


def test_words_are_those_that_the_agent_wrote_its_thoughts_included(tmp_path):
    history = dialogue("a b c d", "one two")
    history[1]["output"] = "<think>so</think> one two"
    row = episode(0, dialogue_history=history)
    assert numbers_of(tmp_path, rows=[row])["words"]["value"] == 3


def test_the_number_of_turns_is_that_of_the_episodes_that_tell_it(tmp_path):
    rows = [episode(0, max_turns=9), episode(1)]
    assert evaluated(tmp_path, p=rows)["policies"]["p"]["max_turns"] == 9


def test_errors_count_as_errors_and_nowhere_else(tmp_path):
    rows = [episode(0), failed(1, "server gone") | {"turns": 99}]
    numbers = numbers_of(tmp_path, rows=rows)
    values = [numbers[key]["value"] for key in ("errors", "success", "reward", "turns")]
    assert values == [0.5, 1.0, 1.0, 1.0]


def test_success_without_leaks_omits_leaking_episodes(tmp_path):
    rows = [episode(0, leak=0.5), episode(1, reward=0.5, leak=0.499)]
    numbers = numbers_of(tmp_path, rows=rows)
    values = [numbers[key]["value"] for key in ("success", "leaking", "clean_success")]
    assert values == [0.5, 0.5, 0.0]
    numbers = numbers_of(tmp_path, rows=rows[:1])
    assert numbers["leaking"]["value"] == 1.0
    assert numbers["clean_success"] is None


@pytest.mark.parametrize("text, lacks", [
    ("What now?", 1.0), ("I WANT TO ANSWER:\n  ", 1.0), ("I WANT TO ANSWER: def f", 0.0)])
def test_an_episode_without_an_answer_is_counted_as_one(tmp_path, text, lacks):
    row = episode(0, reward=0.0, dialogue_history=dialogue("p", text))
    row["dialogue_history"][-1]["output"] = f"<think>I WANT TO ANSWER: later</think>{text}"
    assert numbers_of(tmp_path, rows=[row])["no_answer"]["value"] == lacks
    # the same, as a judge has graded it
    row["task"]["test_cases"] = {"a": "f(1)"}
    row["reasons"] = {"a": "no code" if text.startswith("I WANT") else "no answer"}
    assert numbers_of(tmp_path, rows=[row])["no_answer"]["value"] == lacks
    row["reasons"] = {"b": "solution failed"} | row["reasons"]
    assert numbers_of(tmp_path, rows=[row])["no_answer"]["value"] == lacks
    # a success is an answer, with or without the marker
    assert numbers_of(tmp_path, rows=[row | {"reward": 1.0, "success": True, "reasons": {}}])[
        "no_answer"]["value"] == 0.0


def test_logs_have_rewards_of_any_size_and_neither_success_nor_answers(tmp_path, capsys):
    history = dialogue("p", "one two", "seven words are not", "x")
    history[2]["role"] = "tool"
    policies = {name: rewarded(*[reward] * 8, domain="logged", dialogue_history=history)
                for name, reward in (("a", -3.0), ("b", 40.0))}
    results = evaluated(tmp_path, **policies)
    numbers = results["policies"]["b"]["numbers"]
    assert numbers["reward"] == {"value": 40.0, "low": 40.0, "high": 40.0}  # no limits to reach for
    assert numbers["success"] is numbers["no_answer"] is None
    assert (numbers["turns"]["value"], numbers["words"]["value"]) == (2, 3)
    (lead,) = results["leads"]
    assert lead["difference"] == {"value": 43.0, "low": 43.0, "high": 43.0}
    assert lead["win_rate"]["low"] == pytest.approx(8 / (8 + evaluate.Z**2))
    printed = capsys.readouterr().out
    assert printed.startswith("b wins: b reaches 40.000 [40.000, 40.000] (Reward), 43.000 [43.000,")
    assert "answer" not in printed.lower()
    single = evaluated(tmp_path, **{name: rows[:1] for name, rows in policies.items()})
    assert single["leads"][0]["difference"]["low"] is None and not single["leads"][0]["settled"]


def test_tiny_rewards_of_logs_are_told_apart(tmp_path, capsys):
    evaluated(tmp_path, **{name: rewarded(*[reward] * 8, domain="logged")
                           for name, reward in (("a", 1e-4), ("b", 4e-4), ("c", 2e-4))})
    printed = capsys.readouterr().out
    assert printed.startswith("b wins: b reaches 0.000400 [0.000400, 0.000400] (Reward),")
    assert "b leads a by 0.000300 [" in printed and "level" not in printed
    evaluated(tmp_path, **{name: rewarded(*rewards, domain="logged") for name, rewards in (
        ("a", [4e-4] * 8), ("b", [3e-3, *[1e-4] * 7]), ("c", [0.0, 5e-4] * 4))})
    assert "b leads c by 0.000212 [" in capsys.readouterr().out  # not settled, and not level


# -----------------------------------------------------------------------------
# Policies


def seeds(folder, name, tasks, *solved):
    """NAME=FILE for each seed, with so many solved tasks."""
    return [f"{name}=" + str(write_rows(folder / f"{name}{count}.jsonl", outcomes(count, tasks)))
            for count in solved]


def test_a_name_given_again_is_another_seed(tmp_path):
    results = evaluated(tmp_path, *seeds(tmp_path, "p", 1, 0, 1))
    policy = results["policies"]["p"]
    assert policy["seeds"] == 2
    assert policy["numbers"]["success"] == {"value": 0.5, "low": 0.0, "high": 1.0}
    assert results["comparisons"] == results["leads"] == []


def test_an_interval_does_not_depend_on_the_other_policies(tmp_path):
    ours, theirs, third = (seeds(tmp_path, name, 20, *solved) for name, *solved in (
        ("ours", 6, 14), ("theirs", 8, 10), ("third", 2, 18)))
    two = evaluated(tmp_path, *theirs, *ours)
    three = evaluated(tmp_path, *theirs, *third, *ours)
    assert two["policies"]["ours"] == three["policies"]["ours"]
    (pair,) = [pair for pair in two["comparisons"] if pair["metric"] == "success"]
    assert pair in three["comparisons"]


def test_a_file_given_twice_is_no_second_seed(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [episode(0)])
    with pytest.raises(SystemExit, match="twice, expected each file once"):
        evaluated(tmp_path, f"p={file}", f"p={file}")
    assert len(evaluated(tmp_path, f"p={file}", f"q={file}")["policies"]) == 2


def test_a_copy_of_a_file_is_told_to_be_no_further_seed(tmp_path, capsys):
    first, copy = (write_rows(tmp_path / f"{name}.jsonl", [episode(0)]) for name in "ab")
    other = write_rows(tmp_path / "c.jsonl", [episode(0) | {"seed": 1}])
    evaluated(tmp_path, f"p={first}", f"p={copy}", f"p={other}")
    assert "The 3 files of p are only 2 different ones and copies" in capsys.readouterr().out
    evaluated(tmp_path, f"p={first}", f"p={other}")
    assert "copies" not in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["a/b.jsonl", "=a.jsonl", "name="])
def test_a_file_without_a_name_is_refused(spec):
    with pytest.raises(SystemExit, match=f"found {spec}, expected NAME=FILE; put a name"):
        read_policies([spec])


def test_other_tasks_are_refused_and_named(tmp_path):
    with pytest.raises(SystemExit, match=r"of 3 in all: a 3, b 1 \(not .*: t1, t2\)"):
        evaluated(tmp_path, a=outcomes(3, 3), b=[episode(0)])


@pytest.mark.parametrize("key, other", [
    ("problem_description", "q"), ("ground_truth", "s"), ("test_cases", {"test1": "f(2)"}),
    ("a_field_of_a_fork", "x")])
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


# -----------------------------------------------------------------------------
# What is said


def test_best_policy_is_compared_with_each_other_the_next_best_first(tmp_path, capsys):
    leads = evaluated(tmp_path, low=outcomes(2, 40), best=outcomes(38, 40),
                      middle=outcomes(36, 40))["leads"]
    assert [(lead["policy"], lead["against"]) for lead in leads] == [("best", "middle"),
                                                                     ("best", "low")]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("The winner is not settled: best solves 95.0 % [")
    assert "middle solves 90.0 % [" in first and "the difference is 5.0 points [" in first
    assert second.startswith("best leads low by 90.0 points [") and "not settled" not in second


def test_policies_that_are_level_with_the_best_are_named(tmp_path, capsys):
    evaluated(tmp_path, a=outcomes(3, 4), b=outcomes(3, 4), c=outcomes(3, 4))
    assert "a is level with c.\n" in capsys.readouterr().out


def test_few_large_gains_settle_nothing_against_many_small_losses(tmp_path, capsys):
    """Means favour `new`, which is better on 40 tasks and worse on 70."""
    def policy(solved):  # of three samples
        return [episode(task, reward=float(sample < solved(task)), sample=sample)
                for task in range(110) for sample in range(3)]

    lead, = evaluated(tmp_path, base=policy(lambda task: 0 if task < 40 else 3),
                      new=policy(lambda task: 3 if task < 40 else 2))["leads"]
    assert lead["difference"]["low"] > 0 and lead["sign_test_p"] < 0.05 and not lead["settled"]
    assert capsys.readouterr().out.startswith("The winner is not settled: new solves 78.8 % [")


def test_a_settled_winner_is_said_to_win_by_how_much(tmp_path, capsys):
    (lead,) = evaluated(tmp_path, a=outcomes(9, 9), b=outcomes(0, 9))["leads"]
    won = 9 / (9 + evaluate.Z**2)  # Wilson's interval of a share, as it has won all tasks
    assert lead["win_rate"] == {"value": 1.0, "low": pytest.approx(won), "high": 1.0}
    assert capsys.readouterr().out.startswith(
        "a wins: a solves 100.0 % [70.1, 100.0] of the tasks, 100.0 points [40.2, 100.0] more than"
        " b, the next best.\n")


def test_a_policy_that_is_behind_on_the_tasks_that_both_finished_never_wins(tmp_path, capsys):
    errors = [failed(task, "gone") for task in range(50, 150)]
    lucky = outcomes(30, 50) + errors
    lead, _ = evaluated(tmp_path, lucky=lucky, other=outcomes(50, 150), third=[
        *outcomes(45, 50), *outcomes(0, 150)[50:]])["leads"]
    assert (lead["policy"], lead["tasks"], lead["settled"]) == ("lucky", 50, True)
    assert lead["difference"]["value"] == pytest.approx(-0.4)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert second.startswith("On the tasks that lucky and third both finished (50), the difference"
                             " is -30.0 points [")
    assert first.startswith("The winner is not settled: lucky solves 60.0 % [")
    assert "the difference is -40.0 points [" in first and "that both finished (50)" in first


def test_a_policy_that_shares_no_finished_task_with_the_best_is_named(tmp_path, capsys):
    evaluated(tmp_path, a=[*outcomes(9, 9), failed(9, "gone")],
              b=[*(failed(task, "gone") for task in range(9)), episode(9, reward=0.0)],
              c=outcomes(0, 10))
    said = capsys.readouterr().out
    assert "a wins: a solves 100.0 %" in said and "more than c.\n" in said
    assert "No task was finished by both a and b, so these are not compared." in said
    evaluated(tmp_path, a=[episode(0), failed(1, "gone")], b=[failed(0, "gone"), episode(1)])
    said = capsys.readouterr().out
    assert "No task was finished by both a and b, so these are not compared." in said


def test_policies_that_talked_to_different_humans_are_named_as_such(tmp_path, capsys):
    policies = {name: outcomes(3, 3, human=human)
                for name, human in (("a", "llama"), ("b", "llama"), ("d", None))}
    evaluated(tmp_path, **policies)
    assert "different humans" not in capsys.readouterr().out
    evaluated(tmp_path, **policies, c=outcomes(3, 3, human="qwen"))
    assert "held with different humans (llama, qwen), so" in capsys.readouterr().out


@pytest.mark.parametrize("solved, told", [((1, 2), True), ((1, 2, 3), False)])
def test_fewer_than_three_seeds_are_called_few(tmp_path, capsys, solved, told):
    evaluated(tmp_path, *seeds(tmp_path, "a", 4, *solved), *seeds(tmp_path, "b", 4, 0, 1, 2))
    assert ("With fewer than three seeds of a policy" in capsys.readouterr().out) == told


@pytest.mark.parametrize("ours, theirs, said", [
    ({"judge": "--judge fixed"}, {"judge": "--judge official"},
     "graded with different flags (a --judge fixed, b --judge official), so"),
    ({"agent_prompt": "Ask.", "max_turns": 9}, {"agent_prompt": "Answer.", "max_turns": 9},
     "The agents had different instructions (agent_prompt in the episodes), so"),
    ({"agent_prompt": "Ask.", "max_turns": 1}, {"agent_prompt": "Answer.", "max_turns": 1},
     "The agents had different instructions"),
    ({"best_of_n": 4, "scorer": "critic"}, {},
     "Each turn of a was the best of 4 candidates by critic. A critic that sees the solution"),
    ({"best_of_n": 4, "scorer": "grader:x"}, {"best_of_n": 1, "scorer": "critic"},
     "Each turn of a was the best of 4 candidates by grader:x.\n")])
def test_what_else_may_explain_a_difference_is_said(tmp_path, capsys, ours, theirs, said):
    policies = {"a": outcomes(3, 4, **ours), "b": outcomes(2, 4, **theirs)}
    evaluated(tmp_path, **policies)
    assert said in capsys.readouterr().out
    evaluated(tmp_path, a=outcomes(3, 4, **theirs), b=outcomes(2, 4, **theirs))
    printed = capsys.readouterr().out
    assert not any(part in printed for part in ("different", "best of"))


@pytest.mark.parametrize("limit, told", [(5, True), (10, False), (1, False)])
def test_other_numbers_of_turns_are_told_unless_one_policy_may_not_ask(
        tmp_path, capsys, limit, told):
    evaluated(tmp_path, a=outcomes(3, 4, max_turns=10, agent_prompt="Ask."),
              b=outcomes(2, 4, max_turns=limit, agent_prompt="Answer." if limit == 1 else "Ask."))
    said = capsys.readouterr().out
    assert (f"different numbers of turns (--max_turns: a 10, b {limit}), so" in said) == told
    assert "instructions" not in said  # who may not ask needs others


def test_a_judge_of_a_later_seed_is_named_too(tmp_path, capsys):
    files = [f"{name}=" + str(write_rows(tmp_path / f"{name}{judge}.jsonl",
                                         outcomes(2, 4, judge=f"--judge {judge}")))
             for name, judge in (("a", "fixed"), ("a", "official"), ("b", "fixed"))]
    evaluated(tmp_path, *files)
    assert "(a --judge fixed or --judge official, b --judge fixed)" in capsys.readouterr().out


def test_unknown_instructions_and_errors_are_no_reason(tmp_path, capsys):
    unknown = [episode(0, reward=None, error="gone", agent_prompt=None)]
    with pytest.raises(SystemExit):
        evaluated(tmp_path, a=unknown, b=unknown,
                  c=outcomes(1, 1, agent_prompt="Ask.", max_turns=9))
    assert "instructions" not in capsys.readouterr().out


def test_policies_that_give_no_answer_more_than_half_of_the_time_are_named(tmp_path, capsys):
    answer = dialogue("p", "I WANT TO ANSWER: x")
    evaluated(tmp_path, asks=outcomes(0, 4), answers=outcomes(0, 4, dialogue_history=answer))
    said = capsys.readouterr().out
    assert "More than half of the episodes end without an answer (asks 100 %): success" in said
    half = [*outcomes(0, 1), episode(1, reward=0.0, dialogue_history=answer)]
    evaluated(tmp_path, p=half, q=half)
    assert "without an answer" not in capsys.readouterr().out


def test_all_errors_still_give_a_table_but_no_share_and_no_exit_status_0(tmp_path, capsys):
    rows = [failed(task, "human: HTTP 404\n\x1b[2J") for task in range(3)]
    with pytest.raises(SystemExit, match="an error stopped every dialogue of p; expected"):
        numbers_of(tmp_path, rows=rows)
    results = json.loads((tmp_path / "out/results.json").read_text())
    numbers = results["policies"]["p"]["numbers"]
    assert numbers["errors"]["value"] == 1.0 and numbers["success"] is None
    printed = capsys.readouterr().out
    assert "An error stopped 3 of 3 dialogues of p, which" in printed
    assert "human: HTTP 404 \\x1b[2J" in printed and "of the tasks" not in printed


def test_the_verdict_counts_dialogues_with_errors_and_names_the_commonest(tmp_path, capsys):
    rows = [failed(0, "rare"), failed(1, "common"), failed(2, "common"), episode(3)]
    results = evaluated(tmp_path, p=rows, q=outcomes(4, 4))
    assert results["policies"]["p"]["errors"] == {"rare": 1, "common": 2}
    assert ("An error stopped 3 of 4 dialogues of p, which count nowhere else; the most frequent:"
            " common\n") in capsys.readouterr().out


def test_tasks_that_their_own_solution_fails_are_counted(tmp_path, capsys):
    reasons = {"test1": "solution failed"}
    rows = [episode(0, reward=0.0, reasons=reasons), episode(0, 1, reward=0.0, reasons=reasons),
            episode(1)]
    others = [failed(0, "gone"), episode(1)]  # whichever policy shows it
    assert evaluated(tmp_path, p=others, q=rows)["unsolvable"] == 1
    assert "1 of 2 tasks cannot be solved by their own solution" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# Tables and files


def test_the_main_number_is_shown_even_if_it_is_zero_for_every_policy(tmp_path):
    for domain, heading in (("backend", "Success %"), ("frontend", "Similarity × 100")):
        rows = outcomes(0, 2, domain=domain)
        assert heading in policy_table(evaluated(tmp_path, p=rows))[0]


def test_the_tables_name_their_columns_put_the_main_number_first_and_count_ties(tmp_path):
    results = evaluated(tmp_path, a=rewarded(1, 0, 1, 0), b=rewarded(0, 1, 1, 0),
                        c=rewarded(0, 0, 0, 0))
    headings, *rows = policy_table(results)
    assert headings == ["Policy", "Tasks", "Episodes", "Success %", "Tests passed %", "Turns",
                        "Agent words", "No answer %"]  # and none that is zero for all
    assert [row[:3] for row in rows] == [[name, "4", "4"] for name in "abc"]
    assert [(pair["policy"], pair["metric"]) for pair in results["comparisons"]] == [
        *itertools.product("bc", ("success", "reward"))]
    _, b, c, *rest = pair_table(results)
    assert (b[0], b[1], b[4]) == ("b − a", "Success %", "1 / 1 / 2")
    assert (c[0], c[1], c[4]) == ("c − a", "Success %", "0 / 2 / 2")
    assert [row[:2] for row in rest] == [[pair, "Tests passed %"] for pair in ("b − a", "c − a")]


def test_markdown_survives_a_pipe_in_a_name_and_is_aligned():
    lines = evaluate.markdown([["Policy", "a|b"], ["Turns", "1.0 [1.0, 1.0]"]]).splitlines()
    assert lines == ["| Policy | a\\|b           |",
                     "| ------ | -------------- |",
                     "| Turns  | 1.0 [1.0, 1.0] |"]


def test_of_several_processes_one_evaluates(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    evaluate.main(evaluate.parse_args(["a=nowhere.jsonl", "--output", str(tmp_path / "out")]))
    assert capsys.readouterr().out == "" and not (tmp_path / "out").exists()


def test_same_seed_gives_the_same_bytes_and_md_holds_what_is_printed(tmp_path, capsys):
    rows = rewarded(*(task / 9 for task in range(10)))
    written = []
    for _ in range(2):
        evaluated(tmp_path, p=rows, q=rows)
        written.append([(tmp_path / "out" / name).read_text()
                        for name in ("results.json", "results.md")])
    assert written[0] == written[1]
    assert capsys.readouterr().out.endswith(written[0][1])


def test_no_refusal_lets_a_file_steer_the_terminal(tmp_path):
    files = [f"{name}={write_rows(tmp_path / f'{name}.jsonl', [conftest.episode(task, 1.0)])}"
             for name, task in (("p", "t"), ("q", "\x1b[2J"))]
    done = run_script("evaluate.py", *files, "--output", tmp_path / "out", check=False)
    assert done.returncode == 1 and "\x1b" not in done.stderr and "\\x1b[2J" in done.stderr
