r"""Evaluate policies: numbers with intervals, paired comparisons, best of N, and a report (SWEET-RL section 5).

How it works:
  1. the episodes of each policy are read from files (`--episodes`) or rolled out here (`--tasks`, `--agent`);
  2. repeats of a task are averaged first, then tasks; an episode with an error counts as an error and nowhere else;
  3. each 95 % interval is a bootstrap over tasks, and over seeds where a policy has several files;
  4. `--against` compares pair by pair on the same tasks: difference, interval, sign test, win rate;
  5. `--best_of_n` lets a critic, or a judging model, choose each turn among N candidates of the policy.

    python evaluate.py --episodes sft=runs/sft/episodes.jsonl sweet=runs/sweet/episodes.jsonl \
        --against base=runs/base/episodes.jsonl --output runs/evaluation --report runs/evaluation/report.html
    python evaluate.py --episodes sweet=seed0.jsonl sweet=seed1.jsonl --output runs/evaluation   # one policy, two seeds
    python evaluate.py --tasks test.jsonl --agent policy --best_of_n 1 4 16 --critic critic --output runs/best_of_n

Reads: episodes (collect.py, or the official file); metrics.jsonl of checkpoint directories (`--metrics`).
Writes: results.json and results.md (a table to paste) in `--output`; the report, one HTML file without network.
Episodes may also carry, for the report: `advantages` and `credits` (one entry for each agent turn), `screenshot` and
`reference_screenshot` (base64); `agent_tokens` for the table; `best_of_n` and `scorer` for the best-of-N curve.

Shape letters: D bootstrap draws, R runs (seeds) of a policy, T tasks.
"""

import base64
import functools
import hashlib
import io
import json
import math
import re
from collections import Counter, defaultdict
from html import escape
from pathlib import Path

import numpy

from colbench import (
    Browser,
    SpeakerError,
    extract_html,
    graded_page,
    has_toy_credit,
    load_speaker,
    open_picture,
    read_episodes,
    read_jsonl,
    read_tasks,
    toy_credit,
    write_atomically,
)
from collect import (
    add_rollout_flags,
    check_rollout_flags,
    claim_rollout,
    collect,
    flag_parser,
    join_processes,
    launch,
    require_at_least,
)
from train_critic import Critic

# -----------------------------------------------------------------------------
# Statistics


def interval(values, run_draws, task_draws):
    """Mean of values (R, T) with a 95 % bootstrap interval; NaN, a task without a value, carries no weight.

    Seeds and tasks are crossed, every seed plays the same tasks. So a draw takes seeds with replacement and,
    independently, tasks with replacement, the same ones for all seeds: run_draws (D, R) and task_draws (D, T) hold how
    often each was taken. With one seed this is the plain bootstrap over tasks.
    """
    seen = ~numpy.isnan(values)
    if not seen.any():
        return None
    totals = ((run_draws @ numpy.where(seen, values, 0.0)) * task_draws).sum(1)  # (D,)
    weights = ((run_draws @ seen.astype(float)) * task_draws).sum(1)
    low, high = numpy.percentile(totals[weights > 0] / weights[weights > 0], (2.5, 97.5))
    return {"value": float(values[seen].mean()), "low": float(low), "high": float(high)}


def draw_counts(generator, count, draws):
    """How often each of `count` things is taken in each bootstrap draw, (D, count)."""
    return generator.multinomial(count, numpy.full(count, 1 / count), size=draws).astype(float)


def sign_test(wins, losses):
    """Two-sided exact p of so uneven a split if either side were as likely; ties are left out before."""
    total, tail, ways = wins + losses, 0, 1
    for smaller in range(min(wins, losses) + 1):
        tail += ways
        ways = ways * (total - smaller) // (smaller + 1)  # C(total, smaller + 1)
    return min(1.0, 2 * tail / 2**total)


def pass_power(successes, k):
    """pass^k: unbiased chance that k repeats all succeed, C(c, k) / C(n, k); NaN with fewer than k repeats."""
    if len(successes) < k:
        return math.nan
    return math.comb(int(sum(successes)), k) / math.comb(len(successes), k)


def compare(ours, theirs, metric, task_draws):
    """Difference ours - theirs on the tasks that have a value in every run of both, each task weighing the same."""
    left, right = ours["values"][metric], theirs["values"][metric]  # (R, T) each
    shared = ~(numpy.isnan(left).any(0) | numpy.isnan(right).any(0))
    if not shared.any():
        return None
    left, right, weights = left[:, shared], right[:, shared], task_draws[:, shared]
    drawn = weights.sum(1) > 0
    # Both policies meet the same drawn tasks (paired); their seeds have nothing in common and are drawn apart.
    means = [policy["run_draws"] @ values / len(values) for policy, values in ((ours, left), (theirs, right))]  # (D, T)
    differences = ((means[0] - means[1]) * weights).sum(1)[drawn] / weights.sum(1)[drawn]
    signs = numpy.sign(numpy.round(left.mean(0) - right.mean(0), 12))  # rounded: sums in another order are a tie
    wins, losses = int((signs > 0).sum()), int((signs < 0).sum())
    low, high = numpy.percentile(differences, (2.5, 97.5))
    return {
        "difference": {"value": float((left.mean(0) - right.mean(0)).mean()), "low": float(low), "high": float(high)},
        "win_rate": interval((signs[None] + 1) / 2, numpy.ones((len(weights), 1)), weights),  # a tie is half a win
        "tasks": int(shared.sum()), "wins": wins, "losses": losses, "sign_test_p": sign_test(wins, losses),
    }


# -----------------------------------------------------------------------------
# From episodes to numbers

HEADINGS = {  # number -> heading, factor
    "success": ("Success %", 100), "reward": ("Tests passed %", 100), "turns": ("Turns", 1),
    "tokens": ("Agent tokens", 1), "errors": ("Errors %", 100), "leaking": ("Leaking %", 100),
    "clean_success": ("Success without leaks %", 100),
}


def split_name(spec):
    """NAME=FILE, or a file named after itself, or after its folder when every stage calls it the same."""
    name, equals, path = spec.partition("=")
    if equals and not Path(spec).exists():
        return name, path
    file = Path(spec).resolve()
    return (file.parent.name if file.stem in ("episodes", "metrics") else file.stem), spec


def read_policies(specs):
    """Policy name -> list of runs, a run being the episodes of one file; a name given again is another seed."""
    policies = defaultdict(list)
    for spec in specs:
        name, path = split_name(spec)
        policies[name].append(read_episodes(path))
    return dict(policies)


class BestOfN:
    """A speaker that says the best of `count` candidates, by the score of a critic or of a judging model."""

    def __init__(self, speaker, scorer, count):
        self.speaker, self.scorer, self.count = speaker, scorer, count
        self.count_tokens = speaker.count_tokens

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        spoken = self.speaker.speak(conversations, self.count, seeds, tasks)
        return [said if isinstance(said, SpeakerError) else [self._best(task, messages, said)]
                for task, messages, said in zip(tasks, conversations, spoken, strict=True)]

    def _best(self, task, messages, utterances):
        scores = self.scorer.score(task, messages, *zip(*utterances, strict=True)) or [0.0]
        return utterances[max(range(len(scores)), key=scores.__getitem__)]


class JudgingModel:
    """A language model as scorer, like the paper's LLM judge: it reads all candidates at once and names the best."""

    def __init__(self, spec, model_name, device, dtype):
        self.speaker = load_speaker(spec, "critic", model_name, temperature=0.0, max_new_tokens=16, device=device, dtype=dtype)

    def score(self, task, messages, texts, finished):
        dialogue = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        listed = "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
        request = (f"An assistant and a user talk:\n{dialogue}\n\nCandidates for the assistant's next message:\n{listed}\n"
                   "\nWhich candidate brings the user's task furthest? Reply with its number alone.")
        said = self.speaker.speak([[{"role": "user", "content": request}]], seeds=[0], tasks=[task])[0]
        number = re.search(r"\d+", "" if isinstance(said, SpeakerError) else said[0].text)
        return [float(number is not None and place == int(number[0])) for place in range(1, len(texts) + 1)]


def load_scorer(args, device):
    if args.critic and args.critic.startswith("judge:"):
        return JudgingModel(args.critic.removeprefix("judge:"), args.critic_model, device, args.dtype)
    return Critic(args.critic, device, dtype=args.dtype) if args.critic else None


def rollouts(args, process):
    """Play --tasks with --agent, once for each N of --best_of_n; policy name -> its one run of episodes."""
    tasks = read_tasks(args.tasks, args.num_tasks)
    scorer, policies = load_scorer(args, process.device), {}
    base = args.name or Path(args.agent_model or args.agent).name
    for count in args.best_of_n or [1]:
        name = f"{base}-best-of-{count}" if args.best_of_n else base
        path = Path(args.output) / f"{name}.jsonl"
        claim_rollout(f"{path}.run.json", args, process)
        notes = {"best_of_n": count, "scorer": args.critic} if args.best_of_n else {}
        collect(tasks, args.repeats, args, process, path,
                lambda agent, count=count: BestOfN(agent, scorer, count) if count > 1 else agent, **notes)
        policies[name] = [read_episodes(path)]
    return policies


def annotate(policies, args, process):
    """What the report shows of each episode besides its text: the critic's advantages, the toy's true credit, pictures."""
    scorer = None if (args.critic or "judge:").startswith("judge:") else Critic(args.critic, process.device, dtype=args.dtype)
    episodes = [episode for runs in policies.values() for run in runs for episode in run if not episode["error"]]
    for episode in episodes:
        if scorer:
            episode["advantages"] = scorer.score_dialogue(episode)
        if has_toy_credit(episode["task"]):
            history = episode["dialogue_history"]
            episode["credits"] = [toy_credit(episode["task"], history, turn, episode["success"], episode["turns"]).kind
                                  for turn in range(len(history) // 2)]
    if episodes and episodes[0]["task"]["domain"] == "frontend":
        with Browser() as browser:
            draw = functools.cache(lambda html: thumbnail(browser.picture(html)))  # many episodes share a reference page
            for episode in episodes:
                pages = {"screenshot": graded_page(episode["answer"], episode["dialogue_history"]),
                         "reference_screenshot": extract_html(episode["task"]["ground_truth"])}
                episode |= {key: draw(html) for key, html in pages.items() if draw(html)}


def thumbnail(png, width=360):
    """A small copy of a screenshot in base64; None of a page that could not be drawn."""
    if png is None:
        return None
    image = open_picture(png)
    image.thumbnail((width, 3 * width))
    small = io.BytesIO()
    image.save(small, "PNG")
    return base64.b64encode(small.getvalue()).decode()


def shared_tasks(policies):
    """All task ids in order of appearance; a run that lacks some of them is refused, for it compares with nothing."""
    runs = [(name, {episode["task"]["task_id"]: episode["task"]["domain"] for episode in run})
            for name, policy in policies.items() for run in policy]
    everything = {task_id: domain for _, tasks in runs for task_id, domain in tasks.items()}
    for name, tasks in runs:
        missing = [task_id for task_id in everything if task_id not in tasks]
        if missing:
            first = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise SystemExit(f"found no episode of {len(missing)} of {len(everything)} tasks in a run of {name!r} "
                             f"({first}), expected all runs on the same tasks; roll these out or leave the file out")
    if len(set(everything.values())) > 1:
        raise SystemExit("found backend and frontend tasks together, expected one domain; evaluate them apart")
    return list(everything), next(iter(everything.values()))


def episode_numbers(episode, leak_threshold, in_tokens):
    """What one episode counts for; a number that is absent or NaN does not count."""
    if episode["error"]:
        return {"errors": 1.0}
    success = math.nan if episode["success"] is None else float(episode["success"])
    leaking = math.nan if episode["success"] is None else float((episode["leak"] or 0.0) >= leak_threshold)
    words = sum(len((turn.get("output") or turn["content"]).split()) for turn in episode["dialogue_history"]
                if turn["role"] == "assistant")
    return {
        "success": success, "reward": float(episode["reward"]), "turns": float(episode["turns"]),
        "tokens": float(episode["agent_tokens"] if in_tokens else words), "errors": 0.0,
        "leaking": leaking, "clean_success": success if leaking == 0.0 else math.nan,
    }


def task_means(run, task_ids, powers, leak_threshold, in_tokens):
    """Number -> its mean over the repeats of each task (T,), NaN where no repeat counts."""
    repeats = {task_id: defaultdict(list) for task_id in task_ids}
    for episode in run:
        for key, value in episode_numbers(episode, leak_threshold, in_tokens).items():
            if not math.isnan(value):
                repeats[episode["task"]["task_id"]][key].append(value)
    means = {key: [sum(task[key]) / len(task[key]) if task[key] else math.nan for task in repeats.values()]
             for key in HEADINGS}
    for k in powers:
        means[f"pass^{k}"] = [pass_power(task["success"], k) for task in repeats.values()]
    return means


def score(policies, args):
    """(results as written to results.json, policy name -> the tables and draws that `compare` needs)."""
    task_ids, domain = shared_tasks(policies)
    episodes = [episode for runs in policies.values() for run in runs for episode in run]
    # Words and tokens are never mixed in one column.
    in_tokens = all(episode.get("agent_tokens") is not None for episode in episodes if not episode["error"])
    most = max(max(Counter(episode["task"]["task_id"] for episode in run).values())
               for runs in policies.values() for run in runs)
    powers = [k for k in range(2, most + 1) if k == most or k & (k - 1) == 0]
    generator = numpy.random.default_rng(args.seed)
    task_draws = draw_counts(generator, len(task_ids), args.draws)
    results = {"domain": domain, "tasks": len(task_ids), "in_tokens": in_tokens, "draws": args.draws, "seed": args.seed,
               "leak_threshold": args.leak_threshold, "policies": {}, "pairs": []}
    tables = {}
    for name, runs in policies.items():
        means = [task_means(run, task_ids, powers, args.leak_threshold, in_tokens) for run in runs]
        values = {key: numpy.array([run[key] for run in means]) for key in means[0]}
        run_draws = draw_counts(generator, len(runs), args.draws)
        tables[name] = {"values": values, "run_draws": run_draws}
        results["policies"][name] = {
            "seeds": len(runs), "episodes": sum(map(len, runs)),
            "success_by_seed": [float(numpy.nanmean(run)) if not numpy.isnan(run).all() else None
                                for run in values["success"]],
            "best_of_n": runs[0][0].get("best_of_n"), "scorer": runs[0][0].get("scorer"),
            "numbers": {key: interval(table, run_draws, task_draws) for key, table in values.items()},
        }
    return results, tables, task_draws


def compare_all(results, tables, task_draws, ours, theirs):
    """Every policy of `ours` beside every one of `theirs`, on success and reward."""
    for left in ours:
        for right in theirs:
            for metric in ("success", "reward"):
                outcome = compare(tables[left], tables[right], metric, task_draws)
                if outcome:
                    results["pairs"].append({"policy": left, "against": right, "metric": metric} | outcome)


# -----------------------------------------------------------------------------
# Tables


def heading(key, results):
    if key.startswith("pass^"):
        return f"{key} %", 100
    if key == "reward" and results["domain"] == "frontend":
        return "Similarity × 100", 100
    if key == "tokens" and not results["in_tokens"]:
        return "Agent words", 1
    return HEADINGS[key]


def cell(number, factor, sign=""):
    """("56.8", "[53.7, 59.9]"), or a dash where there is nothing to count."""
    if number is None:
        return "–", ""
    value, low, high = (f"{factor * number[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return value, f"[{low}, {high}]"


def policy_table(results):
    """(headings, rows of (value, interval) cells): policies as columns; numbers that no policy has are left out."""
    policies = results["policies"]
    keys = dict.fromkeys(key for policy in policies.values() for key, number in policy["numbers"].items() if number)
    rows = [[(heading(key, results)[0], ""),
             *(cell(policy["numbers"][key], heading(key, results)[1]) for policy in policies.values())] for key in keys]
    return ["Policy", *policies], rows


def pair_table(results):
    """The same for the comparisons; the paper reports the win rate for frontend tasks only."""
    headings, rows = ["Comparison", "Number", "Difference", "Won / lost / tied", "Win rate %", "Sign test p"], []
    for pair in results["pairs"]:
        ties = pair["tasks"] - pair["wins"] - pair["losses"]
        rows.append([(f"{pair['policy']} − {pair['against']}", ""), (heading(pair["metric"], results)[0], ""),
                     cell(pair["difference"], 100, "+"), (f"{pair['wins']} / {pair['losses']} / {ties}", ""),
                     cell(pair["win_rate"], 100), (f"{pair['sign_test_p']:.2g}", "")])
    return headings, rows


def lines_of(table, markdown=False):
    """A table as aligned text, or as markdown."""
    headings, rows = table
    grid = [headings, *([" ".join(filter(None, parts)) for parts in row] for row in rows)]
    if markdown:
        grid = [[text.replace("|", "\\|") for text in row] for row in grid]
        return ["| " + " | ".join(row) + " |" for row in [grid[0], ["---"] * len(headings), *grid[1:]]]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in grid]


def html_table(table):
    headings, rows = table
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)} <small>{escape(span)}</small></td>" for value, span in row)
                   + "</tr>" for row in rows)
    return f'<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# -----------------------------------------------------------------------------
# Charts: inline SVG, drawn here so that the report needs no script for them

WIDTH, LEFT, RIGHT = 460, 52, 440  # of the drawing, and the plot's sides in it


def label(x, y, text, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def stroke(kind, *points):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}"/>'


def figure(title, height, marks, legend=None):
    """A titled drawing; `legend` gives the number of each name's colour."""
    shown = "".join(f"<span class=c{i}><i></i>{escape(name)}</span>" for name, i in (legend or {}).items())
    return (f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}">{"".join(marks)}</svg><p class=legend>{shown}</p></figure>')


def ticks(low, high):
    """Round numbers that divide the range into about four."""
    rough = (high - low) / 4 or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def bar_chart(title, numbers):
    """One horizontal bar from zero, with its interval, for each policy."""
    scale, marks = (WIDTH - 70) / max(0.01, *(number["high"] for number in numbers.values())), []
    for i, (name, number) in enumerate(numbers.items()):
        y, low, high = 16 + 44 * i, 8 + scale * number["low"], 8 + scale * number["high"]
        marks += [label(8, y, name), f'<rect class="c{i % 8}" x="8" y="{y + 6}" height="16" '
                  f'width="{scale * number["value"]:.1f}"/>', stroke("whisker", (low, y + 14), (high, y + 14)),
                  *(stroke("whisker", (x, y + 9), (x, y + 19)) for x in (low, high)),
                  label(high + 6, y + 18, f"{100 * number['value']:.1f}")]
    return figure(title, 44 * len(numbers) + 4, marks)


def line_chart(title, series, x_labels=None, floor=math.inf, names=()):
    """Lines through (x, y) or (x, y, low, high) points, the latter with whiskers; `x_labels`: position to text.

    A name has the colour of its place in `names`, or in `series`; there are eight.
    """
    colours = {name: place % 8 for place, name in enumerate(names or series)}
    points = [point for line in series.values() for point in line]
    xs, ys = [point[0] for point in points], [y for point in points for y in point[1:]]
    left, bottom = min(xs), min(floor, *ys)
    width, height = (max(xs) - left) or 1, (max(ys) - bottom) or 1

    def place(x, y):
        return LEFT + 8 + (RIGHT - LEFT - 8) * (x - left) / width, 168 - 150 * (y - bottom) / height

    marks = []
    for y in ticks(bottom, bottom + height):
        level = place(left, y)[1]
        marks += [stroke("grid", (LEFT, level), (RIGHT, level)), label(LEFT - 6, level + 4, f"{y:.4g}", "end")]
    x_labels = x_labels or {x: f"{x:g}" for x in ticks(left, left + width)}
    marks += [label(place(x, bottom)[0], 190, text, "middle") for x, text in x_labels.items()]
    for name, line in series.items():
        kind = f"line c{colours[name]}"
        marks.append(stroke(kind, *(place(*point[:2]) for point in line)))
        marks += [stroke(kind, *(place(x, end) for end in ends)) for x, _, *ends in line if ends]
    return figure(title, 196, marks, {name: colours[name] for name in series})


def turn_shares(policies):
    """Policy -> (turns, percent of its episodes) points."""
    counts = {name: Counter(int(episode["turns"]) for run in runs for episode in run if not episode["error"])
              for name, runs in policies.items()}
    last = max(max(count, default=1) for count in counts.values())
    return {name: [(turns, 100 * count[turns] / count.total()) for turns in range(1, last + 1)]
            for name, count in counts.items() if count}


def best_of_n_curves(results, metric):
    """Scorer -> (log2 N, value, low, high) points, of policies whose episodes name their number of candidates."""
    curves = defaultdict(list)
    for name, policy in results["policies"].items():
        number = policy["numbers"][metric]
        if policy["best_of_n"] and number:
            point = math.log2(policy["best_of_n"]), *(100 * number[key] for key in ("value", "low", "high"))
            curves[policy["scorer"] or name].append(point)
    return {scorer: sorted(points) for scorer, points in curves.items()}


def training_curves(specs):
    """Metric -> file's name -> (step, value) points, averaged over windows so that a curve has 300 at most."""
    curves = defaultdict(dict)
    for name, path in map(split_name, specs):
        rows = [row for _, row in read_jsonl(path)]
        for key in dict.fromkeys(key for row in rows for key in row if key.startswith(("train/", "holdout/"))):
            points = [(row.get("step", i), row[key]) for i, row in enumerate(rows)
                      if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])]
            window = math.ceil(len(points) / 300) or 1
            means = [numpy.mean(points[i:i + window], axis=0) for i in range(0, len(points), window)]
            if len(means) > 3:  # two points of a hold-out are no curve
                curves[key][name] = means
    return curves


def charts(results, policies, metric_files):
    metric = "success" if results["domain"] == "backend" else "reward"
    title = heading(metric, results)[0]
    numbers = {name: policy["numbers"][metric] for name, policy in results["policies"].items()}
    numbers = {name: number for name, number in numbers.items() if number}
    drawn = [bar_chart(f"{title}, with 95 % intervals", numbers)] if numbers else []
    turns, best = turn_shares(policies), best_of_n_curves(results, metric)
    curves = training_curves(metric_files)
    names = dict.fromkeys([*numbers, *turns, *(name for series in curves.values() for name in series)])
    if turns:
        drawn.append(line_chart("Turns per episode, % of episodes", turns, floor=0, names=names))
    if best:
        sizes = {x: f"{2**x:g}" for points in best.values() for x, *_ in points}
        drawn.append(line_chart(f"{title} by number of candidates", best, sizes))
    return "".join(drawn + [line_chart(key, series, names=names) for key, series in curves.items()])


# -----------------------------------------------------------------------------
# Report

PAGE_BYTES = 19_500_000  # of episode data; the rest of the page is far below the half megabyte left to 20


def as_json(value):
    """JSON that can stand in a <script> element: no `<`, so no tag in it can begin or end anything."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def finite(values):
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values or []]


def episode_record(name, run, episode, leak_threshold):
    """One episode as the page's script reads it; what belongs to its task is kept once, beside it."""
    sample = f"{episode['sample']}, seed {run}" if run else str(episode["sample"])
    success = {None: "scored", True: "solved", False: "unsolved"}[episode["success"]]
    return {
        "id": f"{name}/{episode['task']['task_id']}/{sample}", "policy": name, "sample": sample,
        "task": episode["task"]["task_id"], "outcome": "error" if episode["error"] else success,
        "error": episode["error"],
        "leaking": (episode["leak"] or 0.0) >= leak_threshold, "leak": episode["leak"], "turns": episode["turns"],
        "reward": None if episode["error"] else episode["reward"], "reasons": episode["reasons"],
        "answer": episode["answer"], "advantages": finite(episode.get("advantages")),
        "credits": finite(episode.get("credits")),
        "dialogue": [{key: turn[key] for key in ("role", "content", "output", "finished")
                      if key in turn and not (key == "output" and turn[key] == turn["content"])}
                     for turn in episode["dialogue_history"]],
    }


def browser_data(policies, leak_threshold, room=PAGE_BYTES):
    """What the episode browser shows, task by task; when room runs out, screenshots go first, then whole episodes."""
    tasks, records, pictures, left_out = {}, [], [], {"episodes": 0, "screenshots": 0}
    everything = [(name, number, episode) for name, runs in policies.items() for number, run in enumerate(runs)
                  for episode in run]
    order = {task_id: i for i, task_id in enumerate(dict.fromkeys(e["task"]["task_id"] for *_, e in everything))}
    for name, number, episode in sorted(everything, key=lambda entry: order[entry[2]["task"]["task_id"]]):
        task, record = episode["task"], episode_record(name, number, episode, leak_threshold)
        shared = {"request": task["problem_description"], "reference": task["ground_truth"],
                  "tests": task.get("test_cases") or {}}
        known = task["task_id"] in tasks
        size = len(as_json([record] if known else [record, task["task_id"], shared]))
        if size > room:
            left_out["episodes"] += 1
            continue
        room -= size
        records.append(record)
        pictures.append((record, episode.get("screenshot")))
        if not known:
            tasks[task["task_id"]] = shared
            pictures.append((shared, episode.get("reference_screenshot")))
    for holder, picture in pictures:
        if picture and len(picture) + 20 <= room:
            room -= len(picture) + 20
            holder["screenshot"] = picture
        elif picture:
            left_out["screenshots"] += 1
    sizes = sorted(abs(value) for record in records for value in record["advantages"] if value is not None)
    # The 95th percentile, so that one outlier does not make every other turn pale.
    scale = (sizes[int(0.95 * (len(sizes) - 1))] if sizes else 0) or 1.0
    return {"tasks": tasks, "episodes": records, "left_out": left_out, "scale": scale}


def report(results, policies, metric_files, leak_threshold):
    """The whole page. Its policy allows this style and this script, by hash, pictures in it, and nothing else."""
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (STYLE, SCRIPT))
    rules = (f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; "
             "base-uri 'none'; form-action 'none'")
    seeds = max(entry["seeds"] for entry in results["policies"].values())
    subtitle = (f"{results['domain']} · {results['tasks']:,} tasks · 95 % bootstrap intervals over "
                f"{'seeds and tasks' if seeds > 1 else 'tasks'}, {results['draws']:,} draws")
    pairs = f"<h2>Compared on the same tasks</h2>{html_table(pair_table(results))}" if results["pairs"] else ""
    return f"""<!doctype html>
<html lang=en><head><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{rules}">
<meta name=viewport content="width=device-width"><title>ColBench evaluation</title><style>{STYLE}</style></head>
<body><h1>ColBench evaluation</h1><p class=quiet>{escape(subtitle)}</p>
{html_table(policy_table(results))}{pairs}<div id=charts>{charts(results, policies, metric_files)}</div>{BROWSER}
<script type="application/json" id=data>{as_json(browser_data(policies, leak_threshold))}</script>
<script>{SCRIPT}</script></body></html>
"""


BROWSER = """<h2>Episodes</h2>
<form id=filters><select id=outcome aria-label=Outcome></select><select id=policy aria-label=Policy></select>
<select id=order aria-label=Order><option value="">by task<option value=low>lowest reward first</select>
<input id=search type=search placeholder="Search text or task id" aria-label=Search><output id=count></output></form>
<div id=browser><div id=list tabindex=0 role=listbox aria-label=Episodes></div><article id=episode></article></div>
<p class=quiet><kbd>j</kbd> <kbd>k</kbd> next, previous · <kbd>/</kbd> search · the address links to the episode</p>"""

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c1e21, #e4e5e7); --quiet: light-dark(#5d636b, #9aa0a8);
  --page: light-dark(#fff, #15171a); --card: light-dark(#f6f7f8, #1e2125); --rule: light-dark(#dcdfe3, #33373d);
  --good: light-dark(#0072b2, #56b4e9); --bad: light-dark(#b84f00, #f0903c) }
.c0 { --c: light-dark(#0072b2, #4fa8e0) } .c1 { --c: light-dark(#d55e00, #f08040) } .c2 { --c: #009e73 }
.c3 { --c: #cc79a7 } .c4 { --c: #e69f00 } .c5 { --c: #56b4e9 } .c6 { --c: var(--quiet) } .c7 { --c: var(--ink) }
* { box-sizing: border-box; min-width: 0 } body { margin: 0 auto; padding: 24px 16px; max-width: 1240px;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 } h2 { font-size: 16px; margin: 32px 0 8px } h3 { margin: 16px 0 6px }
.quiet, small, th { color: var(--quiet) } small, .legend, p.quiet, summary { font-size: 12px } p { margin: 2px 0 18px }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 6px 0 6px 26px; border-bottom: 1px solid var(--rule); white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 } th, h3 { font-size: 13px } td small { margin: 3px }
#charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 350px), 1fr)); gap: 16px 36px }
#charts { margin-top: 32px } figure { margin: 0; flex: 1 } figcaption { font: 600 13px/2 system-ui, sans-serif }
svg { width: 100%; max-width: 560px } text { fill: var(--ink); font-size: 12px } rect { fill: var(--c); opacity: .85 }
polyline { fill: none; stroke: var(--rule) } .line { stroke: var(--c); stroke-width: 2 } .whisker { stroke: var(--ink) }
.legend span { margin-right: 14px; white-space: nowrap } .legend i { border-top: 3px solid var(--c); width: 14px }
.legend i { display: inline-block; vertical-align: middle; margin-right: 6px } #search { flex: 1 1 180px }
#filters { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin-bottom: 12px; font-size: 14px }
select, input { font: inherit; padding: 5px 8px; color: inherit; background: var(--page) }
select, input, img, kbd, #list, .turn { border: 1px solid var(--rule); border-radius: 5px } kbd { padding: 0 4px }
#browser { display: grid; grid-template-columns: 270px 1fr; gap: 28px; align-items: start } pre { max-height: 480px }
#list { position: sticky; top: 12px; height: min(96vh, 900px); overflow-y: auto }
.row { padding: 7px 12px; border-bottom: 1px solid var(--rule); cursor: pointer; font-size: 13px; line-height: 1.4 }
.row > * { display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap } b { color: var(--bad) }
.row[aria-selected=true] { background: var(--card); box-shadow: inset 3px 0 var(--good) } #episode h2 { margin: 0 }
b { display: inline-block; width: 17px } .solved, .passed { color: var(--good) } .scored { color: var(--quiet) }
#columns { display: grid; grid-template-columns: 3fr 2fr; gap: 28px }
.turn { padding: 8px 12px; margin: 8px 22px 8px 0 }
.assistant { margin: 8px 0 8px 22px; background: var(--card) } .turn > small { float: right; margin-left: 10px }
pre, .test { font: 12px/1.6 ui-monospace, monospace } .text, pre { white-space: pre-wrap; margin: 0; overflow: auto }
#episode { overflow-wrap: anywhere } pre { background: var(--card); padding: 10px 12px; border-radius: 6px }
img { width: 100% } .pages { display: flex; gap: 16px; margin: 12px 0 }
@media (max-width: 900px) { #browser, #columns { grid-template-columns: 1fr; gap: 16px } #columns { gap: 0 }
  #list { position: relative; top: 0; height: 250px } th, td { padding-left: 12px } td small { display: block } }
"""

SCRIPT = r"""
"use strict";
const find = id => document.getElementById(id), data = JSON.parse(find("data").textContent);
const signs = {solved: "✓", unsolved: "✗", error: "!", scored: "·"};
const fixed = (value, digits) => typeof value === "number" ? value.toFixed(digits) : "–";
let shown = [], selected = null;

function make(tag, className, text, ...children) {  // the only way text enters the page: it is never parsed as HTML
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  element.append(...children);
  return element;
}

function matches(episode) {
  const {policy, outcome, search} = Object.fromEntries(["policy", "outcome", "search"].map(id => [id, find(id).value]));
  episode.text ??= [episode.id, data.tasks[episode.task].request, episode.answer, episode.error,
    ...episode.dialogue.map(turn => turn.content)].join("\n").toLowerCase();
  return (!policy || episode.policy === policy) && episode.text.includes(search.toLowerCase())
    && (!outcome || episode.outcome === outcome || (outcome === "leaking" && episode.leaking));
}

function filter() {
  shown = data.episodes.filter(matches);
  if (find("order").value) shown.sort((left, right) => (left.reward ?? 2) - (right.reward ?? 2));
  find("count").textContent = `${shown.length} of ${data.episodes.length}`;
  find("list").replaceChildren();
  drawRows(60);
}

function drawRows(until) {  // the others come as the list is scrolled, so that thousands of episodes open at once
  for (const episode of shown.slice(find("list").children.length, until)) {
    const title = make("span", "", "", make("b", episode.outcome, signs[episode.outcome]));
    title.append(data.tasks[episode.task].request.slice(0, 90));
    const facts = `${episode.policy} · reward ${fixed(episode.reward, 2)} · ${episode.turns} turns`;
    const row = make("div", "row", "", title, make("small", "", facts));
    row.role = "option";
    row.ariaSelected = episode === selected;
    row.onclick = () => choose(episode);
    find("list").append(row);
  }
}

function choose(episode, byReader = true) {
  selected = episode;
  draw(episode, data.tasks[episode.task]);
  drawRows(shown.indexOf(episode) + 20);
  const list = find("list"), row = list.children[shown.indexOf(episode)];
  for (const other of list.children) other.ariaSelected = other === row;
  if (!byReader) return;
  history.replaceState(null, "", "#episode=" + encodeURIComponent(episode.id));
  if (row) list.scrollTop += Math.min(0, row.offsetTop - list.scrollTop)
    + Math.max(0, row.offsetTop + row.offsetHeight - list.scrollTop - list.clientHeight);
  const {top} = find("episode").getBoundingClientRect();
  if (top < 0 || top > innerHeight * 0.6) find("episode").scrollIntoView();
}

function drawTurn(turn, advantage, credit) {
  const agent = turn.role === "assistant", notes = [], box = make("div", "turn " + turn.role, "");
  if (typeof advantage === "number") {
    const strength = Math.min(45, 45 * Math.abs(advantage) / data.scale), hue = advantage < 0 ? "--bad" : "--good";
    box.style.background = `color-mix(in srgb, var(${hue}) ${strength}%, var(--page))`;
    notes.push(`advantage ${fixed(advantage, 3)}`);
  }
  if (credit !== undefined && credit !== null) notes.push(`true credit: ${credit}`);
  if (turn.finished === false) notes.push("cut at the token limit");
  box.append(make("small", "", notes.join(" · ")), make("div", "quiet", agent ? "Agent" : "Human"));
  box.append(make("div", "text", turn.content));
  const whole = make("details", "", "", make("summary", "", "Whole output"), make("pre", "", turn.output));
  if (turn.output) box.append(whole);
  return box;
}

function draw(episode, task) {
  const facts = [episode.policy, episode.outcome, `reward ${fixed(episode.reward, 3)}`, `${episode.turns} turns`];
  if (episode.leaking) facts.push(`leaking: the human repeats ${fixed(100 * episode.leak, 0)} % of the reference`);
  if (episode.error) facts.push(episode.error);
  const left = make("section", "", ""), right = make("section", "", ""), pages = make("div", "pages", "");
  let agentTurns = 0;
  for (const turn of episode.dialogue) {
    const index = turn.role === "assistant" ? agentTurns++ : -1;
    left.append(drawTurn(turn, episode.advantages[index], episode.credits[index]));
  }
  if (episode.advantages.length) left.append(make("p", "quiet", "Shaded by the critic's advantage: blue above 0, "
    + `orange below, strongest from ±${fixed(data.scale, 3)}.`));
  const reasons = Object.entries(episode.reasons), tests = reasons.filter(([name]) => Object.hasOwn(task.tests, name));
  for (const [name, reason] of reasons) if (!Object.hasOwn(task.tests, name)) facts.push(`${name}: ${reason}`);
  const passed = tests.filter(([, reason]) => reason === "passed").length;
  if (tests.length) right.append(make("h3", "", `Tests: ${passed} of ${tests.length} passed`));
  for (const [name, reason] of tests) {
    const [kind, sign, why] = reason === "passed" ? ["passed", "✓", ""] : ["", "✗", "– " + reason];
    right.append(make("div", "test", "", make("b", kind, sign), `${name}  ${task.tests[name] ?? ""}  ${why}`));
  }
  right.append(make("h3", "", "Reference"), make("pre", "", task.reference), make("h3", "", "Answer"));
  right.append(make("pre", "", episode.answer ?? "none"));
  for (const [title, picture] of [["Agent's page", episode.screenshot], ["Reference page", task.screenshot]]) {
    if (!picture) continue;
    const image = Object.assign(new Image(), {src: `data:image/png;base64,${picture}`, alt: title});
    pages.append(make("figure", "", "", make("figcaption", "", title), image));
  }
  const columns = Object.assign(make("div", "", "", left, right), {id: "columns"});
  find("episode").replaceChildren(make("h2", "", `${episode.task} · sample ${episode.sample}`),
    make("div", "quiet", facts.join(" · ")), pages, columns);
}

function openLink() {
  const linked = data.episodes.find(episode => location.hash === "#episode=" + encodeURIComponent(episode.id));
  if (linked) choose(linked);
  return linked;
}

function addOptions(id, all, names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  find(id).append(new Option(all, ""), ...[...counts].map(([name, count]) => new Option(`${name} (${count})`, name)));
}

const leaks = data.episodes.filter(episode => episode.leaking).map(() => "leaking");
addOptions("outcome", "all outcomes", [...data.episodes.map(episode => episode.outcome), ...leaks]);
addOptions("policy", "all policies", data.episodes.map(episode => episode.policy));
find("filters").onsubmit = event => event.preventDefault();
find("filters").oninput = filter;
find("list").onscroll = ({target}) => {
  if (target.scrollTop + 2 * target.clientHeight > target.scrollHeight) drawRows(target.children.length + 60);
};
addEventListener("hashchange", openLink);
addEventListener("keydown", event => {
  const inList = event.target === find("list"), moves = {j: 1, k: -1, ArrowDown: inList && 1, ArrowUp: inList && -1};
  if (event.key === "Escape") document.activeElement.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  if (event.key !== "/" && !moves[event.key]) return;
  event.preventDefault();
  const next = shown[shown.indexOf(selected) + moves[event.key]];
  if (event.key === "/") find("search").focus();
  else if (next) choose(next);
});
filter();
if (!openLink() && shown.length) choose(shown[0], false);
const {episodes, screenshots} = data.left_out;
if (episodes || screenshots) find("filters").after(make("p", "quiet",
  `Left out to keep this file below 20 MB: ${episodes} episodes, ${screenshots} screenshots.`));
"""

# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    # episodes that exist
    parser.add_argument("--episodes", nargs="+", default=[], help="[NAME=]FILE ...; a NAME again is another seed")
    parser.add_argument("--against", nargs="+", default=[], help="[NAME=]FILE ... to compare each policy with")
    # episodes to roll out
    add_rollout_flags(parser)
    parser.add_argument("--name", help="name of the policy that is rolled out (default: its directory's, or --agent_model)")
    parser.add_argument("--repeats", type=int, default=1, help="episodes of each task")
    parser.add_argument("--best_of_n", type=int, nargs="+", default=[], help="candidates for each turn: 1 2 4 ...")
    parser.add_argument("--critic", help="checkpoint of train_critic.py, or judge:SPEC; chooses among the candidates,"
                        " and shows a checkpoint's advantages in the report")
    parser.add_argument("--critic_model", help="model name to ask a judging server for")
    # statistics
    parser.add_argument("--leak_threshold", type=float, default=0.5, help="share of the reference that makes a leak")
    parser.add_argument("--draws", type=int, default=2000, help="bootstrap draws")
    # output
    parser.add_argument("--output", required=True, help="directory for results.json and results.md")
    parser.add_argument("--report", help="FILE.html to write the report to")
    parser.add_argument("--metrics", nargs="+", default=[], help="[NAME=]metrics.jsonl ... for training curves")
    args = parser.parse_args(argv)
    if args.draws < 100:
        raise SystemExit(f"found --draws {args.draws}, expected 100 or more for a 95 % interval")
    if args.repeats < 1 or min(args.best_of_n, default=1) < 1:
        raise SystemExit(f"found --repeats {args.repeats} and --best_of_n {args.best_of_n}, expected at least 1")
    if not 0 < args.leak_threshold <= 1:
        raise SystemExit(f"found --leak_threshold {args.leak_threshold}, expected more than 0 and at most 1")
    require_at_least(0, args, "seed")
    if not args.episodes:
        check_rollout_flags(args)
    elif args.tasks or args.agent:
        raise SystemExit("found --episodes together with --tasks or --agent, expected episodes that exist or a rollout; leave"
                         " one of them out")
    if any(count > 1 for count in args.best_of_n) and not args.critic:
        raise SystemExit("found --best_of_n without --critic, expected a critic to choose among the candidates")
    return args


def main(args):
    process = join_processes()
    for _, path in map(split_name, args.metrics):
        if not Path(path).is_file():
            raise SystemExit(f"{path}: no such file; expected the metrics.jsonl of a checkpoint directory")
    theirs = read_policies(args.against)
    ours = read_policies(args.episodes) if args.episodes else rollouts(args, process)
    if not process.leads:
        return
    for name in ours.keys() & theirs.keys():
        raise SystemExit(f"found policy {name!r} in --episodes and in --against, expected different names; "
                         f"give one as NAME=FILE")
    policies = ours | theirs
    results, tables, task_draws = score(policies, args)
    compare_all(results, tables, task_draws, ours, theirs)
    tables_shown = [policy_table(results)] + ([pair_table(results)] if results["pairs"] else [])
    print("\n\n".join("\n".join(lines_of(table)) for table in tables_shown))
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    markdown = "\n\n".join("\n".join(lines_of(table, markdown=True)) for table in tables_shown)
    write_atomically(output / "results.md", markdown + "\n")
    if args.report:
        annotate(policies, args, process)
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.report, report(results, policies, args.metrics, args.leak_threshold))


if __name__ == "__main__":
    launch(main, parse_args())
