r"""Evaluate policies: numbers with intervals, paired comparisons, best of N, and a report.

How it works (SWEET-RL section 5):
  1. The episodes of each policy are read (`--episodes`) or rolled out here (`--tasks`, `--agent`).
  2. The samples of a task are averaged first, then the tasks. An episode with an error counts as
     an error and nowhere else.
  3. Each 95 % interval is a bootstrap over tasks, and over seeds where a policy has several files.
  4. `--against` compares policies on the same tasks: difference, interval, sign test, win rate.
  5. `--best_of_n` lets a critic or a grader model choose each turn among N candidates.

    python evaluate.py --episodes sft=runs/sft/episodes.jsonl sweet=runs/sweet/episodes.jsonl \
        --against base=runs/base/episodes.jsonl \
        --output runs/evaluation --report runs/evaluation/report.html
    python evaluate.py --episodes sweet=seed0.jsonl sweet=seed1.jsonl \
        --output runs/evaluation                                          # one policy, two seeds
    python evaluate.py --tasks test.jsonl --agent policy --best_of_n 1 4 16 --critic critic \
        --output runs/best_of_n

Reads: episodes (of collect.py, or the official file); metrics.jsonl of checkpoints (`--metrics`).
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
import re
import typing
from collections import Counter, defaultdict
from pathlib import Path

import numpy

from colbench import DOMAINS, read_episodes, read_jsonl, write_atomically
from collect import (
    add_rollout_flags, all_jobs, check_rollout_flags, claim_rollout, collect_episodes, flag_parser,
    given_up, join_processes, launch, refuse_ignored, reply_of, require_at_least, rollout_settings,
    rollout_tasks)
from judge.browser import Browser
from judge.pages import extract_html, graded_page, open_picture
from speakers import load_speaker
from speakers.interface import Request, SpeakerError, SpeakerSettings
from toy.world import has_toy_credit, toy_credit
from train_critic import Critic

# -----------------------------------------------------------------------------
# Statistics


def interval(values, run_draws, task_draws):
    """Mean of values (R, T) with a 95 % bootstrap interval; NaN marks a task without a value.

    Seeds and tasks are crossed: every seed plays the same tasks. A draw therefore takes seeds with
    replacement and, independently, tasks with replacement, the same ones for all seeds.
    run_draws (D, R) and task_draws (D, T) hold how often each was taken. With one seed this is the
    plain bootstrap over tasks.
    """
    present = ~numpy.isnan(values)
    if not present.any():
        return None
    totals = ((run_draws @ numpy.where(present, values, 0.0)) * task_draws).sum(1)  # (D,)
    weights = ((run_draws @ present.astype(float)) * task_draws).sum(1)
    means = totals[weights > 0] / weights[weights > 0]
    low, high = numpy.percentile(means, (2.5, 97.5))
    return {"value": float(values[present].mean()), "low": float(low), "high": float(high)}


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
    low, high = numpy.percentile(differences, (2.5, 97.5))
    gaps = left.mean(0) - right.mean(0)
    signs = numpy.sign(numpy.round(gaps, 12))  # equal sums, added in another order, are a tie
    wins, losses = int((signs > 0).sum()), int((signs < 0).sum())
    points = (signs[None] + 1) / 2  # a tie is half a win
    return {
        "difference": {"value": float(gaps.mean()), "low": float(low), "high": float(high)},
        "win_rate": interval(points, numpy.ones((len(weights), 1)), weights),
        "tasks": int(shared.sum()), "wins": wins, "losses": losses,
        "sign_test_p": sign_test(wins, losses),
    }


# -----------------------------------------------------------------------------
# From episodes to numbers

HEADINGS = {  # number -> heading, factor; the domain names the reward
    "success": ("Success %", 100),
    "reward": (None, 100),
    "turns": ("Turns", 1),
    "tokens": ("Agent tokens", 1),
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
            "numbers": {k: interval(table, run_draws, task_draws) for k, table in tables.items()},
        }
    return results, values, task_draws


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
        path = Path(args.output) / f"{name}.jsonl"
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
    curves = training_curves(args.metrics)
    theirs = read_policies(args.against)
    if args.episodes:
        ours = read_policies(args.episodes)
    else:
        ours = roll_out(args, process)
    if not process.leads:
        return
    for name in ours.keys() & theirs.keys():
        raise SystemExit(f"found policy {name!r} in --episodes and in --against, expected different"
                         " names; give one as NAME=FILE")
    policies = ours | theirs

    settings = ScoreSettings(args.seed, args.draws, args.leak_threshold)
    results, values, task_draws = score(policies, settings)
    results["pairs"] = compare_all(values, task_draws, ours, theirs)

    tables = [policy_table(results)]
    if results["pairs"]:
        tables.append(pair_table(results))
    print("\n\n".join("\n".join(lines_of(table)) for table in tables))
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    as_text = json.dumps(results, indent=2, allow_nan=False)
    write_atomically(output / "results.json", as_text + "\n")
    markdown = "\n\n".join("\n".join(lines_of(table, markdown=True)) for table in tables)
    write_atomically(output / "results.md", markdown + "\n")

    if args.report:
        annotate(policies, args, process)
        data = overview(results, policies, tables, curves)
        room = PAGE_BYTES - len(as_json(data))
        data |= browser_data(policies, args.leak_threshold, room)
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.report, filled_page(data))


# -----------------------------------------------------------------------------
# Tables


class Table(typing.NamedTuple):
    title: str
    headings: list
    rows: list  # of cells (text, interval); the interval may be empty


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


def cell(number, factor, sign=""):
    """("56.8", "[53.7, 59.9]"), or a dash where there is nothing to count."""
    if number is None:
        return "–", ""
    value, low, high = (f"{factor * number[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return value, f"[{low}, {high}]"


def policy_table(results):
    """Policies as columns; numbers that no policy has are omitted."""
    policies = results["policies"]
    keys = {}  # in order of appearance
    for policy in policies.values():
        for key, number in policy["numbers"].items():
            if number:
                keys[key] = heading(key, results)
    rows = []
    for key, (text, factor) in keys.items():
        cells = [cell(policy["numbers"][key], factor) for policy in policies.values()]
        rows.append([(text, ""), *cells])
    return Table("", ["Policy", *policies], rows)


def pair_table(results):
    """One comparison a row; the paper reports the win rate for frontend tasks only."""
    rows = []
    for pair in results["pairs"]:
        ties = pair["tasks"] - pair["wins"] - pair["losses"]
        rows.append([
            (f"{pair['policy']} − {pair['against']}", ""),
            (heading(pair["metric"], results)[0], ""),
            cell(pair["difference"], 100, "+"),
            (f"{pair['wins']} / {pair['losses']} / {ties}", ""),
            cell(pair["win_rate"], 100),
            (f"{pair['sign_test_p']:.2g}", ""),
        ])
    headings = ["Comparison", "Number", "Difference", "Won / lost / tied", "Win rate %"]
    return Table("Compared on the same tasks", [*headings, "Sign test p"], rows)


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
PAGE_BYTES = 19_500_000  # for the data; evaluate.html is far below the half megabyte left to 20 MB


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
    for turn in range(len(history) // 2):
        credit = toy_credit(task, history, turn, episode["success"], episode["turns"])
        kinds.append(credit.kind)
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


def overview(results, policies, tables, curves):
    """What the page draws above the episodes: its tables as they are, its charts from these."""
    metric = "success" if DOMAINS[results["domain"]].has_success else "reward"
    turns = {}
    for name, runs in policies.items():
        episodes = [episode for run in runs for episode in run if not episode["error"]]
        turns[name] = Counter(int(episode["turns"]) for episode in episodes)
    return {
        "results": results, "tables": [table._asdict() for table in tables],
        "metric": metric, "heading": heading(metric, results)[0],  # the number that charts show
        "turns": turns, "curves": curves,
    }


def training_curves(specs):
    """Metric -> name of the file -> points (step, value).

    They are means of windows, so that a curve has at most 300.
    """
    curves = defaultdict(dict)
    for name, path in map(split_name, specs):
        rows = [row for _, row in read_jsonl(path)]
        points = defaultdict(list)
        for index, row in enumerate(rows):
            for key, value in row.items():
                if not key.startswith(("train/", "holdout/")):
                    continue
                if isinstance(value, (int, float)) and math.isfinite(value):
                    points[key].append((row.get("step", index), value))
        for key, line in points.items():
            window = math.ceil(len(line) / 300)
            means = []
            for start in range(0, len(line), window):
                step, value = numpy.mean(line[start:start + window], axis=0)
                means.append((float(step), float(f"{value:.5g}")))
            if len(means) > 3:  # two points of a hold-out are no curve
                curves[key][name] = means
    return curves


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
    if episode["error"]:
        outcome = "error"
    elif episode["success"] is None:
        outcome = "scored"
    else:
        outcome = "solved" if episode["success"] else "unsolved"
    dialogue = []
    for turn in episode["dialogue_history"]:
        record = {key: turn[key] for key in ("role", "content", "finished") if key in turn}
        if turn.get("output") not in (None, turn["content"]):
            record["output"] = turn["output"]
        dialogue.append(record)
    return {
        "id": f"{name}/{task_id}/{sample}", "policy": name, "task": task_id, "sample": sample,
        "outcome": outcome, "error": episode["error"], "turns": episode["turns"],
        "reward": None if episode["error"] else episode["reward"], "reasons": episode["reasons"],
        "leak": episode["leak"], "leaking": (episode["leak"] or 0.0) >= leak_threshold,
        "answer": episode["answer"], "dialogue": dialogue,
        "advantages": finite(episode.get("advantages")),
        "credits": finite(episode.get("credits")),
    }


def browser_data(policies, leak_threshold, room=PAGE_BYTES):
    """What the episode browser shows, task by task, in at most `room` bytes.

    When room runs out, screenshots are omitted first, then whole episodes.
    """
    by_task = defaultdict(list)
    for name, runs in policies.items():
        for seed_index, run in enumerate(runs):
            for episode in run:
                by_task[episode["task"]["task_id"]].append((name, seed_index, episode))
    tasks, records, pictures = {}, [], []
    omitted = {"episodes": 0, "screenshots": 0}
    for task_id, entries in by_task.items():
        for name, seed_index, episode in entries:
            record = episode_record(name, seed_index, episode, leak_threshold)
            task = {
                "request": episode["task"]["problem_description"],
                "solution": episode["task"]["ground_truth"],
                "tests": episode["task"].get("test_cases") or {},
            }
            new = [record] if task_id in tasks else [record, task_id, task]
            size = len(as_json(new))
            if size > room:
                omitted["episodes"] += 1
                continue
            room -= size
            records.append(record)
            pictures.append((record, episode.get("screenshot")))
            if task_id not in tasks:
                tasks[task_id] = task
                pictures.append((task, episode.get("solution_screenshot")))
    for owner, picture in pictures:
        if not picture:
            continue
        size = len(picture) + 20
        if size <= room:
            room -= size
            owner["screenshot"] = picture
        else:
            omitted["screenshots"] += 1
    advantages = [value for record in records for value in record["advantages"]]
    sizes = sorted(abs(value) for value in advantages if value is not None)
    # The strongest shade: the 95th percentile, so that one outlier does not pale all other turns.
    scale = sizes[int(0.95 * (len(sizes) - 1))] if sizes else 0.0
    return {"tasks": tasks, "episodes": records, "omitted": omitted, "scale": scale or 1.0}


def filled_page(data):
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
    group.add_argument("--output", required=True, help="directory for results.json and results.md")
    group.add_argument("--report", help="FILE.html to write the report to")
    group.add_argument("--metrics", nargs="+", default=[],
                       help="[NAME=]metrics.jsonl ... for training curves in the report")
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
    else:
        check_rollout_flags(args)
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
