r"""Evaluate policies from their episodes: means, intervals, differences, who won (section 5).

  1. The samples of a task are averaged first, then the tasks. An episode with
     an error counts only in the error rate.                                   task_means
  2. Each 95 % interval is a bootstrap that resamples tasks and seeds. For a
     share, Wilson's interval replaces it if all outcomes are equal, since a
     bootstrap then has no width.                                               interval, bounds
  3. Every policy is compared with the first one, and the best one with every
     other, on the same tasks: difference, win rate, sign test.                 compare
The script plays nothing and loads no model.

    python evaluate.py base=base.jsonl sweet=sweet.jsonl --output runs/evaluation
    python evaluate.py base=base0.jsonl base=base1.jsonl sweet=sweet0.jsonl sweet=sweet1.jsonl \
        --output runs/evaluation                                          # two seeds of each

To change                          edit
    what is measured               episode_numbers, NUMBERS; HEADINGS in formats/verdict.py
    the intervals                  interval, bounds
    what counts as significant     compare (`settled`)
    tables and verdict             formats/verdict.py

Reads episodes (of collect.py, variants/best_of_n.py, or `colbench.py import`). Writes results.json,
and results.md with the tables that are printed. `python -m report` draws the same numbers as a
page.
Letters in shapes: D bootstrap draws, K seeds of a policy, M tasks.

Difference from the paper, which reports only means: intervals and tests.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy

from colbench import DOMAINS
from formats.outcome import lacks_answer
from formats.policies import facts_of, read_policies, shared_tasks
from formats.verdict import all_tables, verdict
from runtime.files import write_atomically
from runtime.flags import FlagParser
from runtime.processes import launch, own_rank
from runtime.text import markdown

# -----------------------------------------------------------------------------
# From episodes to a number for each task

SHARE = (0.0, 1.0)  # the least and the greatest possible value of a share
NUMBERS = {  # name -> its limits; counts have none
    "success": SHARE, "reward": SHARE, "turns": None, "words": None, "no_answer": SHARE,
    "errors": SHARE, "leaking": SHARE, "clean_success": SHARE}
LEAK = 0.5  # a human reply that repeats this share of the solution has leaked it


def episode_numbers(episode):
    """The numbers of one episode; a number that it lacks is left out of the means."""
    if episode["error"]:
        return {"errors": 1.0}
    said = [message.get("output") or message["content"]
            for message in episode["dialogue_history"] if message["role"] == "assistant"]
    numbers = {"errors": 0.0, "reward": float(episode["reward"]), "turns": float(len(said)),
               "words": float(sum(len(text.split()) for text in said))}
    if episode["success"] is not None:  # pages and logs have a reward, but no success
        success, leaking = float(episode["success"]), episode["leak"] >= LEAK
        numbers |= {"success": success, "no_answer": float(lacks_answer(episode)),
                    "leaking": float(leaking)}
        if not leaking:
            numbers["clean_success"] = success  # averaged over dialogues without a leak
    return numbers


def task_means(episodes, task_ids):
    """Name of a number -> its mean over the samples of each task, (M,); NaN if none has it."""
    samples = {task_id: defaultdict(list) for task_id in task_ids}
    for episode in episodes:
        for key, value in episode_numbers(episode).items():
            samples[episode["task"]["task_id"]][key].append(value)
    return {key: [sum(numbers[key]) / len(numbers[key]) if numbers[key] else math.nan
                  for numbers in samples.values()] for key in NUMBERS}


# -----------------------------------------------------------------------------
# Intervals and comparisons

Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations


def draw_counts(generator, count, draws):
    """How often each of `count` things is taken in each bootstrap draw, (D, count)."""
    return generator.multinomial(count, numpy.full(count, 1 / count), size=draws).astype(float)


def drawn_means(sums, counts):
    """The mean of each draw, (D, M) and (D, M) -> (D,); draws without a value are omitted."""
    sums, counts = sums.sum(1), counts.sum(1)
    return sums[counts > 0] / counts[counts > 0]


def interval(values, seed_draws, task_draws, limits=None):
    """Mean of values (K, M) with a 95 % bootstrap interval; NaN marks a task without a value.

    A draw takes seeds and, independently, tasks, both with replacement. The tasks are the same for
    all seeds of a draw, since every seed plays the same tasks. seed_draws (D, K) and task_draws
    (D, M) say how often each was taken.
    """
    present = ~numpy.isnan(values)
    if not present.any():
        return None
    sums = (seed_draws @ numpy.where(present, values, 0.0)) * task_draws  # (D, M)
    counts = (seed_draws @ present.astype(float)) * task_draws  # (D, M)
    tasks = int(present.any(0).sum())
    means = drawn_means(sums, counts)
    return {"value": float(values[present].mean())} | bounds(means, tasks, limits)


def bounds(means, count, limits=None):
    """95 % interval of the bootstrapped `means` of `count` tasks.

    If all tasks have the same value, the bootstrap interval has width 0. Where there are `limits`,
    Wilson's interval then replaces it (for a single task, always): each end moves towards its limit
    by the share u = z² / (n + z²) of the distance, with n = `count`. So n successes of n give
    [1 - u, 1]. Without limits, the width stays 0, and a single task has no interval.
    """
    if count == 1 and limits is None:
        return {"low": None, "high": None}
    low, high = numpy.percentile(means, (2.5, 97.5))
    if limits is not None and (count == 1 or high - low < 1e-9):
        unseen = Z**2 / (count + Z**2)
        low = (1 - unseen) * low + unseen * limits[0]
        high = (1 - unseen) * high + unseen * limits[1]
    # rounded, as sums that are 0 may come out as 1e-17 or -0.0, and 0 decides what is settled
    return {"low": round(float(low), 12) + 0.0, "high": round(float(high), 12) + 0.0}


def compare(ours, theirs, our_draws, their_draws, task_draws, limits=SHARE):
    """Compare the values of two policies, (K, M) each, each with its own number of seeds.

    Only tasks with a value for every seed of both policies count; None if there is none. A draw
    takes the same tasks for both policies (a paired comparison), and their seeds independently.
    """
    shared = ~(numpy.isnan(ours).any(0) | numpy.isnan(theirs).any(0))  # (M,)
    if not shared.any():
        return None
    ours, theirs, task_draws = ours[:, shared], theirs[:, shared], task_draws[:, shared]
    gaps = ours.mean(0) - theirs.mean(0)  # (M,)
    drawn_gaps = our_draws @ ours / len(ours) - their_draws @ theirs / len(theirs)  # (D, M)
    count = len(gaps)
    if limits is not None:
        limits = (limits[0] - limits[1], limits[1] - limits[0])  # of a difference
    gap_bounds = bounds(drawn_means(drawn_gaps * task_draws, task_draws), count, limits)
    # sums that differ only in the order of addition are a tie
    tolerance = 1e-12 * numpy.maximum(abs(ours).max(0), abs(theirs).max(0))  # (M,)
    points, drawn_points = win_points(gaps, tolerance), win_points(drawn_gaps, tolerance)
    rate_bounds = bounds(drawn_means(drawn_points * task_draws, task_draws), count, SHARE)
    wins, losses = int((points == 1).sum()), int((points == 0).sum())
    p = sign_test(wins, losses)
    # A bootstrap over few tasks is too narrow, so the sign test must agree, also in its direction:
    # a few large gains may outweigh many small losses in the mean
    low, high = gap_bounds["low"], gap_bounds["high"]
    excludes_zero = low is not None and (low > 0 or high < 0)
    return {"difference": {"value": float(gaps.mean())} | gap_bounds,
            "win_rate": {"value": float(points.mean())} | rate_bounds,
            "tasks": count, "wins": wins, "losses": losses, "sign_test_p": p,
            "settled": excludes_zero and p < 0.05 and (low > 0) == (wins > losses)}


def win_points(gaps, tolerance):
    """1 for each task where ours is ahead, 0 where it is behind, one half for a tie."""
    return numpy.where(abs(gaps) <= tolerance, 0.5, gaps > 0)


def sign_test(wins, losses):
    """The exact two-sided p-value of this split if wins and losses were equally likely."""
    total = wins + losses
    ways, tail = 1, 1  # total choose 0, and the sum up to total choose min(wins, losses)
    for k in range(min(wins, losses)):
        ways = ways * (total - k) // (k + 1)  # total choose k + 1
        tail += ways
    return min(1.0, 2 * tail / 2**total)


# -----------------------------------------------------------------------------
# All policies


def score(policies, draws=2000):
    """What results.json holds. policies: name -> seeds, each a list of episodes."""
    task_ids, domain, unsolvable = shared_tasks(policies)
    metric = "success" if DOMAINS[domain].has_success else "reward"  # decides who is better
    logged = DOMAINS[domain].logged  # then a reward may be any number
    limits = NUMBERS | {"reward": None} if logged else NUMBERS
    task_draws = draw_counts(numpy.random.default_rng(0), len(task_ids), draws)  # (D, M)
    values = {}  # policy -> number -> (K, M)
    seed_draws = {}  # policy -> (D, K)
    facts = {}  # policy -> who played and graded it, its errors, its numbers
    for name, seeds in policies.items():
        means = [task_means(episodes, task_ids) for episodes in seeds]
        values[name] = {key: numpy.array([of_seed[key] for of_seed in means]) for key in NUMBERS}
        # seeded by the name, so that an interval does not depend on the other policies
        generator = numpy.random.default_rng([0, *name.encode()])
        seed_draws[name] = draw_counts(generator, len(seeds), draws)
        facts[name] = facts_of(seeds) | {"numbers": {
            key: interval(table, seed_draws[name], task_draws, limits[key])
            for key, table in values[name].items()}}

    def comparisons(wanted):
        """Compare each (policy, against, key) for which some task has this number of both."""
        entries = []
        for name, against, key in wanted:
            found = compare(values[name][key], values[against][key], seed_draws[name],
                            seed_draws[against], task_draws, limits[key])
            if found:
                entries.append({"policy": name, "against": against, "metric": key} | found)
        return entries

    first, *others = policies
    achieved = {name: fact["numbers"][metric]["value"] for name, fact in facts.items()
                if fact["numbers"][metric]}
    ranking = sorted(achieved, key=lambda name: -achieved[name])
    return {
        "domain": domain, "metric": metric, "reward_heading": DOMAINS[domain].reward_heading,
        "reward_factor": 1 if logged else 100,  # what tables and charts multiply rewards by
        "tasks": len(task_ids), "unsolvable": unsolvable, "draws": draws,
        "policies": facts, "ranking": ranking,
        "comparisons": comparisons([(name, first, key) for name in others
                                    for key in ("success", "reward")]),
        "leads": comparisons([(ranking[0], name, metric) for name in ranking[1:]]),
    }


# -----------------------------------------------------------------------------
# The run


def main(args):
    if own_rank() != 0:  # the first process of torchrun evaluates
        return
    results = score(read_policies(args.policies))
    tables = "\n\n".join(map(markdown, all_tables(results)))
    output = Path(args.output)
    text = json.dumps(results, indent=2, allow_nan=False)
    write_atomically(output / "results.json", text + "\n")
    write_atomically(output / "results.md", tables + "\n")
    print("\n".join(verdict(results)) + "\n\n" + tables)
    for name, policy in results["policies"].items():
        if policy["errors"].total() == policy["episodes"]:
            raise SystemExit(f"an error stopped every dialogue of {name}; expected at least one to"
                             " end; remove the cause printed above, then collect them again")


def parse_args(argv=None):
    parser = FlagParser(__doc__)
    parser.add_argument("policies", nargs="+", metavar="NAME=EPISODES.jsonl",
                        help="the others are compared with the first policy; a NAME given again is"
                        " another seed of it")
    parser.add_argument("--output", required=True,
                        help="directory for results.json and results.md, which are replaced")
    return parser.parse_args(argv)


if __name__ == "__main__":
    launch(main, parse_args(), advice="Rerun the same command.")
