"""The charts of the page, as the titles, units and numbers that page.html draws.

Results and critics are drawn as bars or as a stack, training runs as curves. A chart without rows
is not drawn.
"""

from collections import Counter, defaultdict

import numpy

from colbench import DOMAINS
from formats.outcome import lacks_answer
from formats.read import is_finite
from formats.verdict import heading, scale
from judge.sandbox import SOLUTION_FAILED

# What a turn can be, as toy_credit names it; the last is ours
LAST_QUESTION = "question on the last turn"
TURNS = ("useful question", "right answer", "wasted question", "repeated question", "early answer",
         "wrong answer", LAST_QUESTION)
ENDINGS = ("solved", "answered", "wrong answer", "early answer", "no answer", "out of turns", "cut",
           SOLUTION_FAILED, "ended", "error")


# -----------------------------------------------------------------------------
# Results


def result_charts(results, episodes):
    """The charts of policies; episodes: policy -> its episodes of all seeds."""
    kinds = {name: [kind for episode in found if not episode["error"]
                    for kind in episode.get("credits") or []]  # empty where nobody knows them
             for name, found in episodes.items()}
    charts = [metric_chart(results), stack("What the turns are, %", "turns", TURNS, kinds)]
    if not DOMAINS[results["domain"]].logged:  # a log does not say how dialogues end
        endings = {name: [ending(episode) for episode in found]
                   for name, found in episodes.items()}
        charts.append(stack("How episodes end, %", "episodes", ENDINGS, endings))
    return charts


def metric_chart(results):
    """The number that decides who won, of the policies that have it."""
    metric = results["metric"]
    factor, digits = scale(metric, results)
    rows = []
    for name, policy in results["policies"].items():
        number = policy["numbers"][metric]
        if number:
            # rounded as in the tables: a browser would round a half the other way
            ends = {key: float(f"{factor * value:.{digits}f}") for key, value in number.items()
                    if value is not None}
            rows.append({"name": name} | ends)
    least, most = 0, 100
    if DOMAINS[results["domain"]].logged:  # rewards of a log can be any number
        ends = [value for row in rows for value in row.values() if isinstance(value, float)]
        least, most = min([0, *ends]), max([0, *ends])
    return {"kind": "bars", "title": f"{heading(metric, results)}, with 95 % intervals",
            "rows": rows, "least": least, "most": most, "digits": digits}


def stack(title, unit, parts, found):
    """Bars of shares that add up to 100 %; found: policy -> the part of each turn or episode."""
    counts = {name: Counter(of_policy) for name, of_policy in found.items() if of_policy}
    shown = [part for part in parts if any(count[part] for count in counts.values())]
    rows = [{"name": name, "counts": [count[part] for part in shown]}
            for name, count in counts.items()]
    return {"kind": "stack", "title": title, "unit": unit, "parts": shown, "rows": rows}


def ending(episode):
    """How an episode ends: one of ENDINGS. Only the embedded world knows an early answer."""
    if episode["error"]:
        return "error"
    if DOMAINS[episode["task"]["domain"]].logged:
        return "ended"
    if episode["success"]:
        return "solved"
    if SOLUTION_FAILED in episode["reasons"].values():  # whatever the answer is
        return SOLUTION_FAILED
    if lacks_answer(episode):  # the last page counts all the same, a question does not
        return "out of turns" if episode["success"] is None else "no answer"
    if episode["dialogue_history"][-1].get("finished") is False:
        return "cut"
    if episode["success"] is None:
        return "answered"
    credits = episode.get("credits")
    return "early answer" if credits and credits[-1] == "early answer" else "wrong answer"


# -----------------------------------------------------------------------------
# The critic

AUC_ROWS = {
    "all": "any two candidates",
    "question_question": "two questions",
    "answer_answer": "two answers",
    "answer_question_known": "answer or question, all is known",
    "answer_question_unknown": "answer or question, something is unknown",
}


def ranking_chart(run):
    """How often a critic is right; no row for a run that trained none."""
    last, rows = run.last, []
    if "holdout/accuracy" in last:
        # without an interval, as the pairs of a task are not independent
        pairs = f"{last['holdout/pairs']:.0f} " if "holdout/pairs" in last else ""
        rows.append({"name": f"{pairs}held-out pairs of dialogues",
                     "value": 100 * last["holdout/accuracy"]})
    for kind, name in AUC_ROWS.items():
        if f"credit_auc/{kind}" in last:  # toy/credit.py appends them
            rows.append({"name": f"AUC, {name}", "value": 100 * last[f"credit_auc/{kind}"]})
    return {"kind": "bars", "title": f"{run.name}: the better one ranked higher, %",
            "rows": rows, "least": 0, "most": 100, "digits": 1, "guide": 50, "run": run.name}


# -----------------------------------------------------------------------------
# Training

CURVES = {  # metric -> title, unit, factor
    "train/loss": ("Loss", "nats", 1),
    "train/accuracy": ("Training pairs ranked right", "%", 100),
    "train/margin": ("Margin of chosen over rejected", "nats", 1),
    "train/nll": ("Negative log-likelihood of the chosen side", "nats a token", 1),
    "train/chosen_reward": ("Implicit reward of the chosen side", "nats", 1),
    "holdout/accuracy": ("Held-out pairs ranked right", "%", 100),
    "holdout/loss": ("Held-out loss", "nats", 1),
    "optim/grad_norm": ("Norm of the gradient", "before clipping", 1),
}
DRAWN_CURVES = ("train/loss", "train/accuracy", "train/margin")  # the others fold out


def training_curves(run):
    """A curve for each metric of a run, smoothed."""
    series = defaultdict(list)
    for row in run.rows:
        for key, value in row.items():
            drawn = key in CURVES or key.startswith("train/")  # also what a fork logs
            if drawn and isinstance(value, (int, float)) and is_finite(value):
                series[key].append((row["step"], value))
    curves = []
    for key in dict.fromkeys([*CURVES, *series]):
        if len(series[key]) <= 3:  # one hold-out or two are no curve
            continue
        title, unit, factor = CURVES.get(key, (key, "", 1))
        points, window = smoothed(series[key])
        points = [[step, float(f"{factor * value:.5g}")] for step, value in points]
        step_title = f"step, mean of {window} values" if window > 1 else "step"
        curves.append({"title": title, "points": points, "x": step_title, "y": unit,
                       "folded": key not in DRAWN_CURVES})
    return curves


def smoothed(series):
    """(points (step, value), steps in a window): means of windows around each step.

    A window spans a twentieth of the steps. At most 200 points remain.
    """
    steps, values = numpy.array(series, float).T
    half = max(1, len(steps) // 40) if len(steps) >= 10 else 0
    window = numpy.ones(2 * half + 1)
    means = (numpy.convolve(values, window, "same")
             / numpy.convolve(numpy.ones_like(values), window, "same"))
    kept = numpy.unique(numpy.linspace(0, len(steps) - 1, 200).round().astype(int))
    return list(zip(steps[kept], means[kept], strict=True)), len(window)
