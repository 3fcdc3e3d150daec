"""Intervals and tests of evaluate.py. Letters in shapes: D bootstrap draws, R runs, T tasks."""

import math
import typing

import numpy


def wilson(share, count):
    """Wilson's 95 % interval (low, high) of a share of `count` independent outcomes."""
    z = 1.959964
    middle = share + z * z / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    scale = 1 + z * z / count
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


SHARE = (0.0, 1.0)  # the range of a share of tasks
GAP = (-1.0, 1.0)  # that of a difference of two shares


def bounds(means, count, limits=None):
    """95 % interval of the bootstrapped `means` of `count` tasks.

    A bootstrap of equal outcomes has no width. Then a share of the tasks, Wilson's upper bound for
    0 of `count`, is taken to have the least or the greatest value of `limits`. For outcomes of 0 or
    1 this is Wilson's interval itself.
    Without limits one task has no interval, since its samples do not tell how other tasks differ.
    """
    if count == 1 and not limits:
        return {"low": None, "high": None}
    low, high = numpy.percentile(means, (2.5, 97.5))
    if limits and high - low < 1e-9:
        _, others = wilson(0.0, count)
        low, high = low + others * (limits[0] - low), high + others * (limits[1] - high)
    return {"low": float(low), "high": float(high)}


def interval(values, run_draws, task_draws, limits=None):
    """Mean of values (R, T) with a 95 % bootstrap interval; NaN marks a task without a value.

    Seeds and tasks are crossed: every seed plays the same tasks. A draw therefore takes seeds with
    replacement and, independently, tasks with replacement, the same ones for all seeds.
    run_draws (D, R) and task_draws (D, T) hold how often each was taken. With one seed this is the
    plain bootstrap over tasks. `limits`: the least and greatest possible value, see `bounds`.
    """
    present = ~numpy.isnan(values)
    if not present.any():
        return None
    totals = ((run_draws @ numpy.where(present, values, 0.0)) * task_draws).sum(1)  # (D,)
    weights = ((run_draws @ present.astype(float)) * task_draws).sum(1)
    means = totals[weights > 0] / weights[weights > 0]
    count = int(present.any(0).sum())
    return {"value": float(values[present].mean())} | bounds(means, count, limits)


def draw_counts(generator, count, draws):
    """How often each of `count` things is taken in each bootstrap draw, (D, count)."""
    return generator.multinomial(count, numpy.full(count, 1 / count), size=draws).astype(float)


def sign_test(wins, losses):
    """Two-sided exact p-value of a split this uneven if both sides were equally likely.

    The caller omits ties.
    """
    total = wins + losses
    tail = 0
    ways = 1  # C(total, smaller)
    for smaller in range(min(wins, losses) + 1):
        tail += ways
        ways = ways * (total - smaller) // (smaller + 1)
    return min(1.0, 2 * tail / 2**total)


def pass_power(successes, k):
    """pass^k: unbiased estimate of the chance that k samples all succeed, C(c, k) / C(n, k).

    NaN with fewer than k samples.
    """
    if len(successes) < k:
        return math.nan
    return math.comb(int(sum(successes)), k) / math.comb(len(successes), k)


class PolicyValues(typing.NamedTuple):
    """What intervals and comparisons of one policy are computed from."""

    values: dict  # number -> its mean for each run and task (R, T)
    run_draws: numpy.ndarray  # (D, R)


def compare(ours, theirs, metric, task_draws):
    """Difference ours - theirs on the tasks that have a value in every run of both policies.

    Each task weighs the same. None where the policies share no such task.
    """
    left, right = ours.values[metric], theirs.values[metric]  # (R, T) each
    shared = ~(numpy.isnan(left).any(0) | numpy.isnan(right).any(0))
    if not shared.any():
        return None
    left, right, weights = left[:, shared], right[:, shared], task_draws[:, shared]
    drawn = weights.sum(1) > 0
    # Both policies meet the same drawn tasks: they are paired. Their seeds are drawn independently.
    our_means = ours.run_draws @ left / len(left)  # (D, T)
    their_means = theirs.run_draws @ right / len(right)
    gaps, drawn_gaps = left.mean(0) - right.mean(0), our_means - their_means  # (T,), (D, T)

    def drawn_mean(table):
        return (table * weights).sum(1)[drawn] / weights.sum(1)[drawn]

    points = win_points(gaps)
    wins, losses = int((points == 1).sum()), int((points == 0).sum())
    difference = {"value": float(gaps.mean())} | bounds(drawn_mean(drawn_gaps), len(gaps), GAP)
    rates = drawn_mean(win_points(drawn_gaps))
    p = sign_test(wins, losses)
    return {
        "difference": difference,
        "win_rate": {"value": float(points.mean())} | bounds(rates, len(gaps), SHARE),
        "tasks": len(gaps), "wins": wins, "losses": losses, "sign_test_p": p,
        # both, since a bootstrap over a handful of tasks is too narrow
        "settled": difference["low"] * difference["high"] > 0 and p < 0.05,
    }


def win_points(gaps):
    """1 for each task where ours is ahead, 0 where it is behind, one half for a tie."""
    # equal sums, added in another order, are a tie
    return (numpy.sign(numpy.round(gaps, 12)) + 1) / 2


def limits_of(key):
    """The range of a number that is a share; None of one that is a count."""
    return SHARE if key not in ("turns", "tokens") else None
