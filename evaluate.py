r"""Evaluate policies: numbers with intervals, paired comparisons, best of N, and a report.

How it works (SWEET-RL section 5):
  1. The episodes of each policy are read (`--episodes`) or rolled out here (`--tasks`, `--agent`).
  2. The samples of a task are averaged first, then the tasks. An episode with an error counts as
     an error and nowhere else.
  3. Each 95 % interval is a bootstrap over tasks, and over seeds where a policy has several files.
     Where all outcomes agree, a bootstrap has no width, and Wilson's interval takes its place.
  4. The best policy is compared with each other one on the same tasks, and those of `--episodes`
     with those of `--against`: difference, interval, sign test, win rate.
  5. `--best_of_n` lets a critic or a grader model choose each turn among N candidates.

    python evaluate.py --episodes sft=runs/sft/episodes.jsonl sweet=runs/sweet/episodes.jsonl \
        --against base=runs/base/episodes.jsonl \
        --output runs/evaluation --report runs/evaluation/report.html
    python evaluate.py --episodes sweet=seed0.jsonl sweet=seed1.jsonl \
        --output runs/evaluation                                          # one policy, two seeds
    python evaluate.py --tasks test.jsonl --agent policy --best_of_n 1 4 16 --critic critic \
        --output runs/best_of_n
    python evaluate.py --metrics runs/critic/metrics.jsonl --report runs/training.html
                                                          # watch a training run; no episodes yet

Reads: episodes (of collect.py, or the official file); metrics.jsonl of checkpoints (`--metrics`),
and the run.json and candidates.jsonl beside them.
Writes: results.json and results.md (tables to paste) in `--output`; the report, one HTML file that
needs no network (evaluate.html with the data filled in).
For the report, episodes may also carry `advantages` and `credits` (one entry for each agent turn),
`screenshot` and `solution_screenshot` (base64); for the table, `agent_tokens`; for the best-of-N
curve, `best_of_n` and `scorer`.

Shape letters: D bootstrap draws, R runs (seeds) of a policy, T tasks.
"""

import base64
import functools
import hashlib
import io
import json
import math
import random
import re
import shlex
import time
import typing
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy

from colbench import (
    DOMAINS, MAX_TURNS, ResumableJsonl, derive_seed, read_episodes, write_atomically)
from collect import (
    add_rollout_flags, all_jobs, check_rollout_flags, claim_rollout, collect_episodes, flag_parser,
    given_up, join_processes, launch, read_run, refuse_ignored, reply_of, require_at_least,
    rollout_settings, rollout_tasks)
from judge.browser import Browser
from judge.pages import extract_html, graded_page, open_picture
from judge.sandbox import ANSWER_MARKER
from speakers import load_speaker
from speakers.interface import Request, SpeakerError, SpeakerSettings
from toy.world import has_toy_credit, toy_credit
from train_critic import Critic
from train_policy import candidate_key, make_pairs, read_candidates

# -----------------------------------------------------------------------------
# Statistics


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

    A bootstrap of equal outcomes has no width. Then up to Wilson's bound for 0 of `count` could be
    otherwise: as low or as high as `limits` allow. For 0 or 1 this is Wilson's interval itself.
    """
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
    differences = ((our_means - their_means) * weights).sum(1)[drawn] / weights.sum(1)[drawn]
    gaps = left.mean(0) - right.mean(0)
    signs = numpy.sign(numpy.round(gaps, 12))  # equal sums, added in another order, are a tie
    wins, losses = int((signs > 0).sum()), int((signs < 0).sum())
    points = (signs[None] + 1) / 2  # a tie is half a win
    difference = {"value": float(gaps.mean())} | bounds(differences, len(gaps), GAP)
    p = sign_test(wins, losses)
    return {
        "difference": difference,
        "win_rate": interval(points, numpy.ones((len(weights), 1)), weights, SHARE),
        "tasks": len(gaps), "wins": wins, "losses": losses, "sign_test_p": p,
        # both, since a bootstrap over a handful of tasks is too narrow
        "settled": difference["low"] * difference["high"] > 0 and p < 0.05,
    }


# -----------------------------------------------------------------------------
# From episodes to numbers

HEADINGS = {  # number -> heading, factor; the domain names the reward
    "success": ("Success %", 100),
    "reward": (None, 100),
    "turns": ("Turns", 1),
    "tokens": ("Agent tokens", 1),
    "no_answer": ("No answer %", 100),
    "errors": ("Errors %", 100),
    "leaking": ("Leaking %", 100),
    "clean_success": ("Success without leaks %", 100),
}


class ScoreSettings(typing.NamedTuple):
    seed: int = 0
    draws: int = 2000
    leak_threshold: float = 0.5


def split_name(spec):
    """(name, path) of NAME=FILE or FILE.

    A file without a name is named after itself, or after its folder where the file has the name
    that every stage gives it.
    """
    name, equals, path = spec.partition("=")
    if equals and not Path(spec).exists():
        return name, path
    file = Path(spec).resolve()
    if file.stem in ("episodes", "metrics"):
        return file.parent.name, spec
    return file.stem, spec


def read_policies(specs):
    """Policy name -> runs, each the episodes of one file; a repeated name is another seed."""
    policies = defaultdict(list)
    for spec in specs:
        name, path = split_name(spec)
        policies[name].append(read_episodes(path))
    return dict(policies)


def shared_tasks(policies):
    """All task ids in order of appearance, and their domain.

    A run that lacks some of the tasks is refused: it cannot be compared.
    """
    runs = []
    everything = {}
    for name, policy in policies.items():
        for run in policy:
            domains = {episode["task"]["task_id"]: episode["task"]["domain"] for episode in run}
            runs.append((name, domains))
            everything |= domains
    for name, domains in runs:
        missing = [task_id for task_id in everything if task_id not in domains]
        if missing:
            first = ", ".join(missing[:5])
            if len(missing) > 5:
                first += ", ..."
            raise SystemExit(f"found no episode of {len(missing)} of {len(everything)} tasks in a"
                             f" run of {name!r} ({first}), expected all runs on the same tasks;"
                             " roll these out or omit the file")
    domains = sorted(set(everything.values()))
    if len(domains) > 1:
        raise SystemExit(f"found {' and '.join(domains)} tasks together, expected one domain;"
                         " evaluate them separately")
    return list(everything), domains[0]


def lacks_answer(episode):
    """Whether the dialogue ends without an answer, so that a question was graded in its place."""
    last = episode["dialogue_history"][-1]
    text = last.get("output") or last["content"]
    _, _, answer = text.partition(ANSWER_MARKER)
    return not answer.strip() and not episode["success"]


def episode_numbers(episode, leak_threshold, in_tokens):
    """What one episode counts for; a number that is absent does not count."""
    if episode["error"]:
        return {"errors": 1.0}
    numbers = {"errors": 0.0, "reward": float(episode["reward"]), "turns": float(episode["turns"])}
    if in_tokens:
        numbers["tokens"] = float(episode["agent_tokens"])
    else:
        agent_turns = episode["dialogue_history"][1::2]
        words = [len((turn.get("output") or turn["content"]).split()) for turn in agent_turns]
        numbers["tokens"] = float(sum(words))
    if episode["success"] is not None:
        leaking = (episode["leak"] or 0.0) >= leak_threshold
        numbers["success"] = float(episode["success"])
        numbers["leaking"] = float(leaking)
        numbers["no_answer"] = float(lacks_answer(episode))
        if not leaking:
            numbers["clean_success"] = float(episode["success"])
    return numbers


def task_means(run, task_ids, powers, settings, in_tokens):
    """Number -> its mean over the samples of each task (T,), NaN where no sample counts."""
    samples = {task_id: defaultdict(list) for task_id in task_ids}
    for episode in run:
        numbers = episode_numbers(episode, settings.leak_threshold, in_tokens)
        for key, value in numbers.items():
            samples[episode["task"]["task_id"]][key].append(value)
    means = {key: [] for key in HEADINGS}
    for task in samples.values():
        for key in HEADINGS:
            means[key].append(sum(task[key]) / len(task[key]) if task[key] else math.nan)
    for k in powers:
        means[f"pass^{k}"] = [pass_power(task["success"], k) for task in samples.values()]
    return means


def score(policies, settings):
    """All numbers of all policies.

    Returns the results as written to results.json, PolicyValues by name, and task_draws (D, T).
    """
    task_ids, domain = shared_tasks(policies)
    all_runs = [run for runs in policies.values() for run in runs]
    # Words and tokens are never mixed in one column.
    in_tokens = all(
        episode.get("agent_tokens") is not None
        for run in all_runs for episode in run if not episode["error"]
    )
    samples = [max(Counter(e["task"]["task_id"] for e in run).values()) for run in all_runs]
    most = max(samples)
    powers = [k for k in range(2, most + 1) if k == most or k & (k - 1) == 0]  # 2, 4, 8, ..., most
    generator = numpy.random.default_rng(settings.seed)
    task_draws = draw_counts(generator, len(task_ids), settings.draws)
    results = {
        "domain": domain, "tasks": len(task_ids), "in_tokens": in_tokens, "draws": settings.draws,
        "seed": settings.seed, "leak_threshold": settings.leak_threshold, "policies": {},
        "pairs": [],
    }
    values = {}
    for name, runs in policies.items():
        means = [task_means(run, task_ids, powers, settings, in_tokens) for run in runs]
        tables = {key: numpy.array([run[key] for run in means]) for key in means[0]}
        run_draws = draw_counts(generator, len(runs), settings.draws)
        values[name] = PolicyValues(tables, run_draws)
        results["policies"][name] = {
            "seeds": len(runs), "episodes": sum(len(run) for run in runs),
            "success_by_seed": [mean_or_none(run) for run in tables["success"]],
            "best_of_n": runs[0][0].get("best_of_n"), "scorer": runs[0][0].get("scorer"),
            "numbers": {key: interval(table, run_draws, task_draws, limits_of(key))
                        for key, table in tables.items()},
        }
    return results, values, task_draws


def limits_of(key):
    """The range of a number that is a share; None of one that is a count."""
    return SHARE if key not in ("turns", "tokens") else None


def mean_or_none(values):
    return None if numpy.isnan(values).all() else float(numpy.nanmean(values))


def compare_all(values, task_draws, ours, theirs):
    """Every policy of `ours` against every one of `theirs`, on success and reward."""
    pairs = []
    for left in ours:
        for right in theirs:
            for metric in ("success", "reward"):
                comparison = compare(values[left], values[right], metric, task_draws)
                if comparison:
                    pairs.append({"policy": left, "against": right, "metric": metric} | comparison)
    return pairs


def main_metric(results):
    """The number that decides who is better: success, or the reward where there is no success."""
    return "success" if DOMAINS[results["domain"]].has_success else "reward"


def compare_leader(results, values, task_draws):
    """The best policy against each other one, the next best first."""
    metric = main_metric(results)
    means = {name: policy["numbers"][metric]["value"]
             for name, policy in results["policies"].items() if policy["numbers"][metric]}
    ranked = sorted(means, key=means.get, reverse=True)
    pairs = compare_all(values, task_draws, ranked[:1], ranked[1:])
    return [pair for pair in pairs if pair["metric"] == metric]


# -----------------------------------------------------------------------------
# Best of N

GRADER = "grader:"


class BestOfN:
    """A speaker that says the best of `count` candidates, as a critic or a grader model finds."""

    def __init__(self, speaker, scorer, count):
        self.speaker, self.scorer, self.count = speaker, scorer, count
        self.count_tokens = speaker.count_tokens

    @property
    def given_up(self):
        return given_up(self.speaker) or given_up(getattr(self.scorer, "speaker", None))

    def reply(self, request):
        """One utterance, as a generator for collect.interleave."""
        candidates = yield from reply_of(self.speaker, request._replace(n=self.count))
        if isinstance(candidates, SpeakerError):
            return candidates
        if isinstance(self.scorer, GraderModel):
            best = yield from self.scorer.best(request.messages, candidates)
        else:
            best = best_by_critic(self.scorer, request, candidates)
        return [candidates[best]]


def best_by_critic(critic, request, candidates):
    """The index of the greatest advantage; the first where the state is too long for the critic."""
    texts = [candidate.text for candidate in candidates]
    finished = [candidate.finished for candidate in candidates]
    advantages = critic.score(request.task, request.messages, texts, finished)
    if advantages is None:
        return 0
    # an empty text has no tokens, and so an advantage of 0 that says nothing
    advantages = [value if text else -math.inf
                  for text, value in zip(texts, advantages, strict=True)]
    return int(numpy.argmax(advantages))


class GraderModel:
    """A language model that reads all candidates at once and names the best (paper: Fig. 3a)."""

    def __init__(self, spec, settings):
        self.speaker = load_speaker(spec, "grader", settings)

    def best(self, messages, candidates):
        """The index of the candidate that it names, 0 if it names none; a generator."""
        dialogue = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        listed = "\n".join(f"[{number}] {candidate.text}"
                           for number, candidate in enumerate(candidates, 1))
        question = (
            f"An assistant and a user talk:\n{dialogue}\n\n"
            f"Candidates for the assistant's next message:\n{listed}\n\n"
            "Which candidate brings the user's task furthest? Reply with its number alone."
        )
        answer = yield from reply_of(
            self.speaker, Request([{"role": "user", "content": question}]))
        if isinstance(answer, SpeakerError):
            return 0
        number = re.search(r"\d+", answer[0].text)
        if number and 1 <= int(number[0]) <= len(candidates):
            return int(number[0]) - 1
        return 0


def is_grader(critic):
    """Whether --critic names a grader model; if not, it is a checkpoint, or None."""
    return critic is not None and critic.startswith(GRADER)


def load_scorer(args, device):
    if not args.critic:
        return None
    if not is_grader(args.critic):
        return Critic(args.critic, device, dtype=args.dtype)
    settings = SpeakerSettings(model_name=args.critic_model, temperature=0.0, max_new_tokens=16,
                               batch_size=args.batch_size, device=device, dtype=args.dtype)
    return GraderModel(args.critic.removeprefix(GRADER), settings)


def rollout_path(args, name):
    return Path(args.output) / f"{name}.jsonl"


def roll_out(args, process):
    """Play --tasks with --agent, once for each N of --best_of_n.

    Returns policy name -> its one run of episodes; they are on the leading process only.
    """
    tasks = rollout_tasks(args, process)
    jobs = all_jobs(tasks, args.samples_per_task)
    scorer = load_scorer(args, process.device)
    base = args.name or Path(args.agent_model or args.agent).name
    policies = {}
    for count in args.best_of_n or [1]:
        name = f"{base}-best-of-{count}" if args.best_of_n else base
        path = rollout_path(args, name)
        claim_rollout(f"{path}.run.json", vars(args), process)
        settings = rollout_settings(args, tasks, process)
        wrap_agent = None
        if args.best_of_n:
            notes = {"best_of_n": count, "scorer": args.critic}
            settings = settings._replace(notes=settings.notes | notes)
        if count > 1:
            wrap_agent = functools.partial(BestOfN, scorer=scorer, count=count)
        policies[name] = [collect_episodes(jobs, settings, path, process, wrap_agent)]
    return policies


# -----------------------------------------------------------------------------
# Main


def main(args):
    process = join_processes()
    training = read_training(args.metrics)
    theirs = read_policies(args.against)
    if args.episodes:
        ours = read_policies(args.episodes)
    elif args.tasks:
        ours = roll_out(args, process)
    else:
        ours = {}
    if not process.leads:
        return
    for name in ours.keys() & theirs.keys():
        raise SystemExit(f"found policy {name!r} in --episodes and in --against, expected different"
                         " names; give one as NAME=FILE")
    policies = ours | theirs

    results, sentences, tables = None, training_sentences(training), []
    if policies:
        settings = ScoreSettings(args.seed, args.draws, args.leak_threshold)
        results, values, task_draws = score(policies, settings)
        results["pairs"] = compare_all(values, task_draws, ours, theirs)
        results["leads"] = compare_leader(results, values, task_draws)
        sentences, tables = verdict(results), all_tables(results)
        write_results(args.output, results, tables)
    print("\n".join(sentences))
    for table in tables:
        if not table.folded:
            print("\n" + "\n".join(lines_of(table)))

    if args.report:
        annotate(policies, args, process)
        sources = episode_files(args, policies)
        data = overview(Summary(results, sentences, tables), policies, sources, training)
        episodes = packed_episodes(policies, args.leak_threshold, PAGE_BYTES - len(as_json(data)))
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.report, filled_page(data, episodes))
        print(f"\nreport: {args.report}")


def write_results(output, results, tables):
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    as_text = json.dumps(results, indent=2, allow_nan=False)
    write_atomically(output / "results.json", as_text + "\n")
    markdown = []
    for table in tables:
        if table.title:
            markdown.append(f"**{table.title}**")
        markdown.append("\n".join(lines_of(table, markdown=True)))
    write_atomically(output / "results.md", "\n\n".join(markdown) + "\n")


# -----------------------------------------------------------------------------
# Sentences and tables


def with_interval(number, factor, sign=""):
    """("56.8", "[53.7, 59.9]"), or a dash where there is nothing to count."""
    if number is None:
        return "–", ""
    value, low, high = (f"{factor * number[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return value, f"[{low}, {high}]"


def in_words(number, unit):
    """A share or a difference of shares as "56.8 % [53.7, 59.9]"."""
    value, ends = with_interval(number, 100)
    return f"{value} {unit} {ends}"


def verdict(results):
    """Sentences on who won: the best policy against the next best, then against the others."""
    metric, leads = main_metric(results), results["leads"]
    text, factor = heading(metric, results)
    achieved = {}
    for name, policy in results["policies"].items():
        number = policy["numbers"][metric]
        if number and metric == "success":
            achieved[name] = f"solves {in_words(number, '%')}"
        elif number:
            achieved[name] = f"reaches {' '.join(with_interval(number, factor))}"
    of_what = "of the tasks" if metric == "success" else f"({text})"
    if not achieved:
        return ["No policy has an episode without an error, so there is nothing to compare."]
    if leads:
        first, second = leads[0]["policy"], leads[0]["against"]
        points = in_words(leads[0]["difference"], "points")
        if leads[0]["tasks"] < results["tasks"]:
            points += f" on the {leads[0]['tasks']} tasks that both finished"
        if leads[0]["settled"]:
            sentences = [f"{first} wins: {first} {achieved[first]} {of_what}, {points} more than"
                         f" {second}, the next best."]
        else:
            sentences = [f"The winner is not settled: {first} {achieved[first]} {of_what},"
                         f" {second} {achieved[second]}; the difference is {points},"
                         f" {p_value(leads[0])}."]
    else:
        sentences = [f"{name} {words} {of_what}." for name, words in achieved.items()]
    others = []
    for pair in leads[1:]:
        doubt = "" if pair["settled"] else f", which is not settled ({p_value(pair)})"
        others.append(f"{pair['against']} by {in_words(pair['difference'], 'points')}{doubt}")
    if others:
        sentences.append(f"{first} leads {'; '.join(others)}.")
    return sentences + silent_policies(results)


def p_value(pair):
    return f"sign test p = {pair['sign_test_p']:.2g}"


def silent_policies(results):
    """A sentence for each policy that mostly sends questions where answers are graded."""
    sentences = []
    for name, policy in results["policies"].items():
        silent = policy["numbers"]["no_answer"]
        if silent and silent["value"] > 0.5:
            sentences.append(f"{100 * silent['value']:.0f} % of the episodes of {name} end without"
                             " an answer: its success says little about the code that it writes.")
    return sentences


class Table(typing.NamedTuple):
    title: str
    headings: list
    rows: list  # of cells (text, interval); the interval may be empty
    folded: bool = False  # only a click away in the report, and not on the terminal


def heading(key, results):
    """(heading, factor) of a number."""
    if key.startswith("pass^"):
        return f"{key} %", 100
    text, factor = HEADINGS[key]
    if key == "reward":
        text = DOMAINS[results["domain"]].reward_heading
    if key == "tokens" and not results["in_tokens"]:
        text = "Agent words"
    return text, factor


def all_tables(results):
    tables = [policy_table(results)]
    _, zeros = number_keys(results)
    if zeros:
        tables.append(number_table("Zero for every policy", results, zeros, folded=True))
    metric = main_metric(results)
    for pairs, folded in (
        ([pair for pair in results["pairs"] if pair["metric"] == metric], False),
        ([pair for pair in results["pairs"] if pair["metric"] != metric], True),
    ):
        if pairs:
            tables.append(pair_table(results, pairs, folded))
    return tables


def number_keys(results):
    """(numbers to show, numbers that are zero for every policy).

    One that no policy has is in neither, nor is success without leaks where nothing leaks.
    """
    shown, zeros = [], []
    numbers = [policy["numbers"] for policy in results["policies"].values()]
    for key in numbers[0]:
        found = [policy[key]["value"] for policy in numbers if policy[key]]
        if any(found):
            shown.append(key)
        elif found:
            zeros.append(key)
    if "leaking" not in shown and "clean_success" in shown:
        shown.remove("clean_success")
    return shown, zeros


def policy_table(results):
    """One line for each policy, with the numbers that are not zero for all of them."""
    shown, _ = number_keys(results)
    return number_table("", results, shown)


def number_table(title, results, keys, folded=False):
    """One policy a row, one number a column."""
    columns = [heading(key, results) for key in keys]
    rows = []
    for name, policy in results["policies"].items():
        counts = [(f"{count:,}", "") for count in (results["tasks"], policy["episodes"])]
        cells = [with_interval(policy["numbers"][key], factor)
                 for key, (_, factor) in zip(keys, columns, strict=True)]
        rows.append([(name, ""), *counts, *cells])
    texts = [text for text, _ in columns]
    return Table(title, ["Policy", "Tasks", "Episodes", *texts], rows, folded)


def pair_table(results, pairs, folded=False):
    """One comparison a row; all pairs compare the same number."""
    rows = []
    for pair in pairs:
        ties = pair["tasks"] - pair["wins"] - pair["losses"]
        rows.append([
            (f"{pair['policy']} − {pair['against']}", ""),
            with_interval(pair["difference"], 100, "+"),
            ("yes" if pair["settled"] else "not settled", ""),
            (f"{pair['wins']} / {pair['losses']} / {ties}", ""),
            with_interval(pair["win_rate"], 100),
            (f"{pair['sign_test_p']:.2g}", ""),
        ])
    text, _ = heading(pairs[0]["metric"], results)
    headings = ["Comparison", "Difference", "Settled", "Won / lost / tied", "Win rate %"]
    return Table(f"{text} compared on the same tasks", [*headings, "Sign test p"], rows, folded)


def lines_of(table, markdown=False):
    """A table as lines of aligned text or of markdown."""
    grid = [table.headings]
    for row in table.rows:
        grid.append([" ".join(part for part in parts if part) for parts in row])
    if markdown:
        grid = [[text.replace("|", "\\|") for text in row] for row in grid]
        grid.insert(1, ["---"] * len(table.headings))
        return ["| " + " | ".join(row) + " |" for row in grid]
    widths = [max(len(text) for text in column) for column in zip(*grid, strict=True)]
    lines = []
    for row in grid:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


# -----------------------------------------------------------------------------
# Report: its data, which evaluate.html draws

PAGE = Path(__file__).with_name("evaluate.html")
EMPTY_DATA = '<script type="application/json" id="data">{}</script>'
EMPTY_EPISODES = '<script type="text/plain" id="packed"></script>'
PAGE_BYTES = 4_900_000  # of data; evaluate.html itself is far below the 100 kB left to 5 MB

# What a turn can be, as toy_credit names it; the last is ours
HELPFUL_TURNS = ("useful question", "right answer")
LAST_QUESTION = "question on the last turn"
TURNS = (*HELPFUL_TURNS, "wasted question", "repeated question", "early answer", "wrong answer",
         LAST_QUESTION)
ENDINGS = ("solved", "answered", "wrong answer", "early answer", "no answer", "out of turns", "cut",
           "error")
METHODS = {
    "sweet": "SWEET-RL, which is DPO on pairs of turns that the critic ranked",
    "mtdpo": "multi-turn DPO on pairs of whole dialogues",
    "rft": "rejection fine-tuning on solved dialogues",
    "sft": "supervised fine-tuning on dialogues",
}


class Summary(typing.NamedTuple):
    results: dict | None  # None where only training is reported
    sentences: list
    tables: list


class Training(typing.NamedTuple):
    """A training run: its metrics.jsonl, and what its run.json says."""

    name: str
    folder: Path
    flags: dict
    rows: list

    @property
    def last(self):
        """The last value of each metric."""
        return {key: value for row in self.rows for key, value in row.items()}


def overview(summary, policies, sources, training):
    """All that the page shows above its dialogues."""
    results = summary.results
    episodes = {name: [episode for run in runs for episode in run]
                for name, runs in policies.items()}
    charts = []
    if results:
        charts += result_charts(results, episodes)
    charts += critic_charts(episodes, training)
    for run in training:
        charts += training_charts(run)
    starts = {run.flags.get("model") for run in training}
    return {
        "sentences": summary.sentences,
        "subtitle": subtitle(results) if results else "training only, no episodes",
        "policies": [policy_facts(name, episodes[name], sources[name], starts)
                     for name in policies],
        "runs": [{"name": run.name, "what": training_method(run.flags)} for run in training],
        "charts": charts,
        "pairs": [example for run in training for example in example_pairs(run)],
        "tables": [table._asdict() for table in summary.tables],
    }


def subtitle(results):
    counts = [policy["episodes"] for policy in results["policies"].values()]
    over = "tasks"
    if any(policy["seeds"] > 1 for policy in results["policies"].values()):
        over = "seeds and tasks"
    return (f"{results['domain']} · {results['tasks']:,} tasks · {sum(counts):,} episodes ·"
            f" [ ]: 95 % intervals over {over}, {results['draws']:,} bootstrap draws,"
            " Wilson's where all outcomes agree")


# -----------------------------------------------------------------------------
# Report: what was run


def read_training(specs):
    """The training runs of --metrics. One that still writes may end in half a line."""
    training = []
    for name, path in map(split_name, specs):
        if not Path(path).is_file():
            raise SystemExit(f"{path}: no such file; expected the metrics.jsonl of a training run,"
                             " which has one from its first step on")
        folder = Path(path).parent
        rows = list(ResumableJsonl.whole_rows(path))
        training.append(Training(name, folder, flags_of(folder / "run.json"), rows))
    return training


def flags_of(path):
    """The flags in a run's record, none where there is no record."""
    return read_run(path)["flags"] if Path(path).is_file() else {}


def training_method(flags):
    """One clause on what a checkpoint is, from the flags that trained it."""
    if "method" in flags:
        return f"{METHODS[flags['method']]}, from {flags['model']}"
    if "head" in flags:
        head = {"logratio": "log-ratio critic", "value": "critic with a value head"}[flags["head"]]
        sight = "" if flags["privileged"] == "none" else " that sees the solution"
        return f"{head}{sight}, from {flags['model']}"
    return ""


def training_sentences(training):
    """How far each run is, for a report without episodes; smoothed, as its curves are."""
    sentences = []
    for run in training:
        parts = [f"step {run.last['step']}" if run.rows else "no step yet"]
        for curve in training_charts(run):
            if not curve["folded"]:
                _, value = curve["lines"][0]["points"][-1]
                parts.append(f"{curve['title'].lower()} {value:.3g} {curve['y']['title']}")
        sentences.append(f"{run.name}: {', '.join(parts)}.")
    return sentences


def episode_files(args, policies):
    """Policy -> the files that its episodes were read from, or written to."""
    files = {name: [] for name in policies}
    for name, path in map(split_name, [*args.episodes, *args.against]):
        files[name].append(path)
    for name in policies:
        if not files[name]:
            files[name].append(str(rollout_path(args, name)))
    return files


def policy_facts(name, episodes, files, starts):
    """What a policy is, in a clause, and how it was played: (label, text) pairs.

    starts: the models that the training runs of the report start from.
    """
    first = episodes[0]
    run, flags = {}, {}
    record = Path(f"{files[0]}.run.json")
    if record.is_file():
        run = read_run(record)
        flags = run["flags"]
    agent = str(first.get("agent") or flags.get("agent") or "unknown")
    trained = flags_of(Path(agent) / "run.json")
    if agent in starts:
        what = [f"{agent}, the model that training starts from"]
    else:
        what = [training_method(trained) or f"the model {agent}"]
    if flags.get("max_turns", MAX_TURNS) != MAX_TURNS:
        what.append("in one turn" if flags["max_turns"] == 1
                    else f"at most {flags['max_turns']} turns")
    if (first.get("best_of_n") or 1) > 1:
        what.append(f"each turn the best of {first['best_of_n']} candidates, chosen by"
                    f" {first.get('scorer')}")
    human = " ".join(str(part) for part in (first.get("human"), flags.get("human_model")) if part)
    finished = time.strftime("%Y-%m-%d", time.gmtime(Path(files[0]).stat().st_mtime))
    facts = {
        "Model": agent, "Tasks": flags.get("tasks"), "Human": human, "Judge": flags.get("judge"),
        "Last played": finished, "Commit": run.get("commit"),
        "Versions": ", ".join(f"{key} {value}" for key, value in run.get("versions", {}).items()),
        "Files": ", ".join(files), "Played by": command_of(run.get("script", ""), flags),
        "Trained by": command_of("train_policy.py", trained),
    }
    return {"name": name, "what": "; ".join(what),
            "facts": [[label, text] for label, text in facts.items() if text]}


def command_of(script, flags):
    """The command that these flags come from, without those that are off."""
    words = []
    for flag, value in flags.items():
        if value is None or value is False or value == []:
            continue
        words.append(f"--{flag}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return shlex.join([script, *words]) if words else ""


# -----------------------------------------------------------------------------
# Report: charts, as the titles, units and numbers that evaluate.html draws


def chart(section, kind, title, **content):
    return {"section": section, "kind": kind, "title": title} | content


def result_charts(results, episodes):
    metric = main_metric(results)
    text, factor = heading(metric, results)
    numbers = {name: policy["numbers"][metric] for name, policy in results["policies"].items()
               if policy["numbers"][metric]}
    bars = [{"name": name} | {key: factor * value for key, value in number.items()}
            for name, number in numbers.items()]
    charts = []
    if bars:
        charts.append(chart("results", "bars", f"{text}, with 95 % intervals", rows=bars))
    charts += turn_charts(episodes)
    charts.append(stack("How episodes end, %", "episodes", ENDINGS,
                        {name: [ending(episode) for episode in found]
                         for name, found in episodes.items()}))
    sound = {name: [episode for episode in found if not episode["error"]]
             for name, found in episodes.items()}
    charts += requirement_chart(sound)
    charts += turn_limit_chart(sound, metric)
    charts += best_of_n_chart(results["policies"], numbers, text)
    return charts


def stack(title, unit, parts, names):
    """Bars of shares that add up to 100 %; names: policy -> the part that each of its things is."""
    counts = {name: Counter(found) for name, found in names.items() if found}
    shown = [part for part in parts if any(count[part] for count in counts.values())]
    rows = [{"name": name, "counts": [count[part] for part in shown]}
            for name, count in counts.items()]
    return chart("results", "stack", title, unit=unit, parts=shown, rows=rows)


def ending(episode):
    """How an episode ends: one of ENDINGS. Only the embedded world knows an early answer."""
    if episode["error"]:
        return "error"
    if episode["success"]:
        return "solved"
    if lacks_answer(episode):  # the last page counts all the same, a question does not
        return "out of turns" if episode["success"] is None else "no answer"
    if episode["dialogue_history"][-1].get("finished") is False:
        return "cut"
    if episode["success"] is None:
        return "answered"
    credits = episode.get("credits")
    return "early answer" if credits and credits[-1] == "early answer" else "wrong answer"


def turn_charts(episodes):
    """What the turns are; where that is not known, the critic's advantage by turn."""
    kinds = {name: [kind for episode in found for kind in episode.get("credits") or []]
             for name, found in episodes.items()}
    if any(kinds.values()):
        return [stack("What the turns are, %", "turns", TURNS, kinds)]
    lines = []
    for name, found in episodes.items():
        by_turn = defaultdict(list)
        for episode in found:
            for turn, advantage in enumerate(finite(episode.get("advantages")), 1):
                if advantage is not None:
                    by_turn[turn].append(advantage)
        points = [mean_point(turn, values) for turn, values in sorted(by_turn.items())]
        if points:
            lines.append({"name": name, "points": points})
    if not lines:
        return []
    return [chart("results", "lines", "Critic's advantage by turn", lines=lines,
                  x={"title": "turn", "whole": True}, y={"title": "mean advantage"})]


def mean_point(x, values):
    """[x, mean, low, high] with a normal 95 % interval."""
    mean = numpy.mean(values)
    reach = 1.96 * numpy.std(values) / math.sqrt(len(values))
    return rounded([x, mean, mean - reach, mean + reach])


def share_point(x, shares):
    """[x, %, low, high] of shares between 0 and 1, with Wilson's interval."""
    share = numpy.mean(shares)
    return rounded([x, *(100 * value for value in (share, *wilson(share, len(shares))))])


def rounded(values):
    return [float(f"{value:.5g}") for value in values]


def requirement_chart(episodes):
    """Success by the number of details that a task of the embedded world needs."""
    lines = []
    for name, found in episodes.items():
        tasks = defaultdict(list)
        for episode in found:
            if has_toy_credit(episode["task"]):
                needed = len(episode["task"]["toy"]["needed"])
                tasks[needed, episode["task"]["task_id"]].append(episode["success"])
        groups = defaultdict(list)
        for (needed, _), outcomes in tasks.items():
            groups[needed].append(numpy.mean(outcomes))
        if groups:
            points = [share_point(needed, shares) for needed, shares in sorted(groups.items())]
            lines.append({"name": name, "points": points})
    if not lines:
        return []
    x = {"title": "details that the task needs", "whole": True}
    return [chart("results", "lines", "Success by number of requirements", lines=lines, x=x,
                  y={"title": "% of tasks solved", "least": 0})]


def turn_limit_chart(episodes, metric):
    """How many episodes are solved (pages: have ended) after each number of turns."""
    last = max((episode["turns"] for found in episodes.values() for episode in found), default=0)
    title = "Solved within so many turns" if metric == "success" else "Ended within so many turns"
    lines = []
    for name, found in episodes.items():
        ends = [episode["turns"] for episode in found if episode["success"] in (True, None)]
        points = [rounded([turn, 100 * sum(end <= turn for end in ends) / len(found)])
                  for turn in range(1, last + 1) if found]
        if points:
            lines.append({"name": name, "points": points})
    if last < 2:
        return []
    return [chart("results", "lines", title, lines=lines, x={"title": "turns", "whole": True},
                  y={"title": "% of episodes", "least": 0})]


def best_of_n_chart(policies, numbers, text):
    """The main number by N, a line for each scorer."""
    curves = defaultdict(list)
    for name, number in numbers.items():
        count = policies[name]["best_of_n"]
        if count:
            percents = [100 * number[key] for key in ("value", "low", "high")]
            curves[policies[name]["scorer"] or name].append(rounded([count, *percents]))
    if not curves:
        return []
    lines = [{"name": scorer, "points": sorted(points)} for scorer, points in curves.items()]
    counts = sorted({point[0] for line in lines for point in line["points"]})
    x = {"title": "candidates (N), logarithmic", "log": True, "values": counts}
    return [chart("results", "lines", f"{text} by number of candidates", lines=lines, x=x,
                  y={"title": text})]


AUC_ROWS = {
    "all": "any two candidates",
    "question_question": "two questions",
    "answer_answer": "two answers",
    "answer_question_known": "answer or question, all is known",
    "answer_question_unknown": "answer or question, something is unknown",
}


def critic_charts(episodes, training):
    charts = [critic_chart(run) for run in training] + [calibration_chart(episodes)]
    return [found for found in charts if found]


def critic_chart(run):
    """How often a critic is right on held-out tasks; None of a run that trained no critic."""
    last, rows = run.last, []
    if "holdout/accuracy" in last:
        share, count = last["holdout/accuracy"], last["holdout/pairs"]
        low, high = wilson(share, count)
        rows.append({"name": f"held-out pairs of dialogues ({count})", "value": 100 * share,
                     "low": 100 * low, "high": 100 * high})
    for kind, name in AUC_ROWS.items():
        if f"credit_auc/{kind}" in last:
            rows.append({"name": f"AUC, {name}", "value": 100 * last[f"credit_auc/{kind}"]})
    if not rows:
        return None
    return chart("critic", "bars", f"{run.name}: the better one ranked higher, %", rows=rows,
                 guide=50, most=100, run=run.name)


def calibration_chart(episodes):
    """How many of the turns with an advantage of so much truly help; None where that is unknown."""
    scored = []  # (advantage, whether the turn truly helps)
    for found in episodes.values():
        for episode in found:
            advantages, kinds = finite(episode.get("advantages")), episode.get("credits") or []
            if len(advantages) == len(kinds):
                scored += [(advantage, kind in HELPFUL_TURNS)
                           for advantage, kind in zip(advantages, kinds, strict=True)
                           if advantage is not None]
    bins = min(10, len(scored) // 20)
    if bins < 2:
        return None
    groups = numpy.array_split(numpy.array(sorted(scored), float), bins)
    points = [share_point(group[:, 0].mean(), group[:, 1]) for group in groups]
    return chart("critic", "lines", "Advantage against true credit",
                 lines=[{"name": f"{len(scored):,} turns of all policies", "points": points}],
                 x={"title": f"critic's advantage, mean of each of {bins} equal groups"},
                 y={"title": "% that truly help", "least": 0})


CURVES = {  # metric -> title, unit, factor
    "train/loss": ("Loss", "nats", 1),
    "train/accuracy": ("Training pairs ranked right", "%", 100),
    "train/margin": ("Margin of chosen over rejected", "nats", 1),
    "train/nll": ("Negative log-likelihood of the chosen side", "nats a token", 1),
    "train/chosen_reward": ("Implicit reward of the chosen side", "nats", 1),
    "holdout/accuracy": ("Held-out pairs ranked right", "%", 100),
    "holdout/loss": ("Held-out loss", "nats", 1),
}
DRAWN_CURVES = ("train/loss", "train/accuracy", "train/margin")  # the others fold out


def training_charts(run):
    """A chart for each metric of a run, smoothed; a small last batch weighs as little as it is."""
    series = defaultdict(list)
    for index, row in enumerate(run.rows):
        for key, value in row.items():
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if key.startswith(("train/", "holdout/")) and is_number:
                series[key].append((row.get("step", index), value, row.get("data/tokens", 1)))
    charts = []
    keys = [*CURVES, *sorted(series.keys() - CURVES.keys())]
    for key in keys:
        if len(series[key]) <= 3:  # two points of a hold-out are no curve
            continue
        title, unit, factor = CURVES.get(key, (key, "", 1))
        points, window = smoothed(series[key])
        points = [rounded([step, factor * value]) for step, value in points]
        charts.append(chart(
            "training", "lines", title, lines=[{"name": run.name, "points": points}],
            x={"title": "step" + (f", mean of {window} steps" if window > 1 else "")},
            y={"title": unit}, run=run.name, folded=key not in DRAWN_CURVES))
    return charts


def smoothed(series):
    """(points (step, value), steps in a window): weighted means of windows around each step.

    A window spans a twentieth of the steps. At most 200 points remain.
    """
    steps, values, weights = numpy.array(series, float).T
    half = max(1, len(steps) // 40) if len(steps) >= 10 else 0
    window = numpy.ones(2 * half + 1)
    means = (numpy.convolve(values * weights, window, "same")
             / numpy.convolve(weights, window, "same"))
    kept = numpy.unique(numpy.linspace(0, len(steps) - 1, 200).round().astype(int))
    return list(zip(steps[kept], means[kept], strict=True)), len(window)


def example_pairs(run):
    """Three of the pairs that a policy learnt from, by the difference of their advantages."""
    path = run.folder / "candidates.jsonl"
    if run.flags.get("method") != "sweet" or not path.is_file():
        return []
    flags, pairs = run.flags, []
    states = read_candidates(path)
    gap = flags["min_gap"] * numpy.std([value for state in states for value in state["advantages"]])
    for state in states:
        draw = random.Random(derive_seed(flags["seed"], "pairs", *candidate_key(state)))
        advantages = state["advantages"]
        for chosen, rejected in make_pairs(state["candidates"], advantages, flags["pairing"],
                                           flags["pairs_per_state"], draw, gap):
            pairs.append((advantages[chosen] - advantages[rejected], chosen, rejected, state))
    if not pairs:
        return []
    pairs.sort(key=lambda pair: pair[0], reverse=True)
    examples = []
    for which, share in (("A wide", 0.1), ("The median", 0.5), ("A narrow", 0.9)):
        difference, *sides, state = pairs[int(share * (len(pairs) - 1))]
        chosen, rejected = ({"text": state["candidates"][side],
                             "advantage": state["advantages"][side]} for side in sides)
        examples.append({
            "run": run.name, "title": f"{which} difference, {difference:.3f}",
            "where": f"{state['task_id']}, turn {state['turn'] + 1}, one of {len(pairs):,} pairs",
            "before": state["messages"], "chosen": chosen, "rejected": rejected})
    return examples


# -----------------------------------------------------------------------------
# Report: episodes


def annotate(policies, args, process):
    """Add what the report shows besides text: advantages, true credit in the toy, screenshots."""
    runs = [run for policy in policies.values() for run in policy]
    episodes = [episode for run in runs for episode in run if not episode["error"]]
    if args.critic and not is_grader(args.critic):
        critic = Critic(args.critic, process.device, dtype=args.dtype)
        for episode in episodes:
            episode["advantages"] = critic.score_dialogue(episode)
    for episode in episodes:
        if has_toy_credit(episode["task"]):
            episode["credits"] = true_credits(episode)
    if episodes and DOMAINS[episodes[0]["task"]["domain"]].pages:
        with Browser() as browser:
            add_screenshots(episodes, browser)


def true_credits(episode):
    """The kind of each agent turn, as the toy world knows it."""
    task, history = episode["task"], episode["dialogue_history"]
    kinds = []
    for turn in range(episode["turns"]):
        credit = toy_credit(task, history, turn, episode["success"], episode["turns"])
        kinds.append(credit.kind)
    if lacks_answer(episode):  # toy_credit takes whatever stands on the last turn for an answer
        kinds[-1] = LAST_QUESTION
    return kinds


def add_screenshots(episodes, browser):
    @functools.cache  # many episodes share a solution page
    def draw(html):
        return thumbnail(browser.picture(html))

    for episode in episodes:
        pages = {
            "screenshot": graded_page(episode["answer"], episode["dialogue_history"]),
            "solution_screenshot": extract_html(episode["task"]["ground_truth"]),
        }
        for key, html in pages.items():
            picture = draw(html)
            if picture:
                episode[key] = picture


def thumbnail(png, width=360):
    """A small copy of a screenshot in base64; None for a page that could not be drawn."""
    if png is None:
        return None
    image = open_picture(png)
    image.thumbnail((width, 3 * width))
    small = io.BytesIO()
    image.save(small, "PNG")
    return base64.b64encode(small.getvalue()).decode()


def as_json(value):
    """JSON for a <script> element: without `<`, no text in it can begin or end a tag."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def finite(values):
    """The values with None for each NaN and infinity, which JSON does not have."""
    if values is None:
        return []
    return [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]


def episode_record(name, seed_index, episode, leak_threshold):
    """One episode as the page reads it; what belongs to its task is stored once, separately."""
    task_id = episode["task"]["task_id"]
    sample = str(episode["sample"])
    if seed_index > 0:
        sample += f", seed {seed_index}"
    dialogue = []
    for turn in episode["dialogue_history"]:
        record = {key: turn[key] for key in ("role", "content", "finished") if key in turn}
        if turn.get("output") not in (None, turn["content"]):
            record["output"] = turn["output"]
        dialogue.append(record)
    return {
        "id": f"{name}/{task_id}/{sample}", "policy": name, "sample": sample,
        "outcome": ending(episode), "error": episode["error"], "turns": episode["turns"],
        "reward": None if episode["error"] else episode["reward"], "reasons": episode["reasons"],
        "leak": episode["leak"], "leaking": (episode["leak"] or 0.0) >= leak_threshold,
        "answer": episode["answer"], "dialogue": dialogue,
        "advantages": finite(episode.get("advantages")),
        "credits": finite(episode.get("credits")),
    }


def task_records(policies, leak_threshold):
    """(tasks with the episodes of all policies, distinct screenshots that these point to)."""
    tasks, pictures = {}, {}

    def index_of(picture):
        return pictures.setdefault(picture, len(pictures)) if picture else None

    for name, runs in policies.items():
        for seed_index, run in enumerate(runs):
            for episode in run:
                task_id = episode["task"]["task_id"]
                task = tasks.setdefault(task_id, {
                    "id": task_id, "request": episode["task"]["problem_description"],
                    "solution": episode["task"]["ground_truth"],
                    "tests": episode["task"].get("test_cases") or {}, "picture": None,
                    "episodes": [],
                })
                record = episode_record(name, seed_index, episode, leak_threshold)
                record["picture"] = index_of(episode.get("screenshot"))
                task["episodes"].append(record)
                if task["picture"] is None:
                    task["picture"] = index_of(episode.get("solution_screenshot"))
    return list(tasks.values()), list(pictures)


def packed_episodes(policies, leak_threshold, room):
    """All that the browser of dialogues shows, compressed, in at most `room` characters.

    When room runs out, screenshots are omitted first, then whole tasks.
    """
    tasks, pictures = task_records(policies, leak_threshold)
    sizes = sorted(abs(value) for task in tasks for record in task["episodes"]
                   for value in record["advantages"] if value is not None)
    # The strongest shade: the 95th percentile, so that one outlier does not pale all other turns.
    scale = sizes[int(0.95 * (len(sizes) - 1))] if sizes else 0.0
    data = {"tasks": tasks, "pictures": pictures, "scale": scale or 1.0}
    while True:
        data["omitted"] = {
            "episodes": sum(len(task["episodes"]) for task in tasks[len(data["tasks"]):]),
            "screenshots": len(pictures) - len(data["pictures"]),
        }
        packed = base64.b64encode(zlib.compress(json.dumps(data, allow_nan=False).encode()))
        if len(packed) <= room or not data["tasks"]:
            return packed.decode()
        largest = "pictures" if data["pictures"] else "tasks"
        kept = int(len(data[largest]) * 0.95 * room / len(packed))
        data[largest] = data[largest][:max(0, kept)]


def filled_page(data, episodes):
    """evaluate.html with its data and a Content-Security-Policy.

    The policy allows the page's style and script, by hash, its embedded pictures, and nothing else.
    """
    page = PAGE.read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    policy = (f"default-src 'none'; script-src '{sha256(script)}'; style-src '{sha256(style)}';"
              " img-src data:; base-uri 'none'; form-action 'none'")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace("<!-- Content-Security-Policy -->", meta)
    page = page.replace(EMPTY_EPISODES, EMPTY_EPISODES.replace("><", f">{episodes}<"))
    return page.replace(EMPTY_DATA, EMPTY_DATA.replace("{}", as_json(data)))


def sha256(text):
    """The hash of an inline style or script, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    group = parser.add_argument_group("episodes that exist")
    group.add_argument("--episodes", nargs="+", default=[],
                       help="[NAME=]FILE ...; a NAME again is another seed")
    group.add_argument("--against", nargs="+", default=[],
                       help="[NAME=]FILE ... to compare each policy with")
    rollout_flags = add_rollout_flags(parser)
    group = parser.add_argument_group("policy and best of N")
    group.add_argument("--name", help="name of the policy that is rolled out"
                       " (default: its directory's, or --agent_model)")
    group.add_argument("--samples_per_task", type=int, default=1, help="episodes of each task")
    group.add_argument("--best_of_n", type=int, nargs="+", default=[],
                       help="candidates for each turn: 1 2 4 ...")
    group.add_argument("--critic", help="checkpoint of train_critic.py, or grader:SPEC;"
                       " chooses among the candidates; the report shows a checkpoint's advantages")
    group.add_argument("--critic_model", help="model name to ask a grader's server for")
    group = parser.add_argument_group("statistics")
    group.add_argument("--leak_threshold", type=float, default=0.5,
                       help="share of the solution that makes a leak")
    group.add_argument("--draws", type=int, default=2000, help="bootstrap draws")
    group = parser.add_argument_group("output")
    group.add_argument("--output", help="directory for results.json and results.md")
    group.add_argument("--report", help="FILE.html to write the report to")
    group.add_argument("--metrics", nargs="+", default=[],
                       help="[NAME=]metrics.jsonl ... for training curves in the report; alone,"
                       " without episodes, to watch a training run")
    args = parser.parse_args(argv)
    check_flags(parser, args, rollout_flags)
    return args


def check_flags(parser, args, rollout_flags):
    require_at_least(100, args, "draws")  # fewer give no 95 % interval
    require_at_least(1, args, "samples_per_task")
    require_at_least(0, args, "seed")
    if min(args.best_of_n, default=1) < 1:
        raise SystemExit(f"found --best_of_n {args.best_of_n}, expected numbers of at least 1")
    if not 0 < args.leak_threshold <= 1:
        raise SystemExit(f"found --leak_threshold {args.leak_threshold}, expected more than 0 and"
                         " at most 1")
    grader = is_grader(args.critic)
    if args.episodes:
        ignored = [*rollout_flags, "name", "samples_per_task", "best_of_n"]
        ignored.remove("seed")  # the bootstrap's, too
        if args.critic:
            ignored.remove("dtype")
        refuse_ignored(parser, args, ignored, "with --episodes, which are played already")
    elif args.metrics and args.report and not args.tasks and not args.agent:
        ignored = [*rollout_flags, "name", "samples_per_task", "best_of_n", "against", "critic",
                   "critic_model", "leak_threshold", "draws", "output"]
        refuse_ignored(parser, args, ignored, "with --metrics alone, without episodes")
    elif not args.tasks and not args.agent:
        raise SystemExit("found neither --episodes nor --tasks; expected --episodes to evaluate,"
                         " --tasks and --agent to play, or --metrics and --report to watch a"
                         " training run")
    else:
        check_rollout_flags(args)
    if not args.output and (args.episodes or args.tasks):
        raise SystemExit("found no --output; expected a directory for results.json and results.md")
    if not args.report:
        refuse_ignored(parser, args, ["metrics"], "without --report")
    if not args.best_of_n and not args.report:
        refuse_ignored(parser, args, ["critic"], "without --best_of_n and without --report")
    if not args.best_of_n and grader:
        refuse_ignored(parser, args, ["critic"], "without --best_of_n")
    if not grader:
        refuse_ignored(parser, args, ["critic_model"], "without --critic grader:SPEC")
    if max(args.best_of_n, default=1) > 1 and not args.critic:
        raise SystemExit("found --best_of_n without --critic, expected a critic to choose among the"
                         " candidates")


if __name__ == "__main__":
    launch(main, parse_args())
