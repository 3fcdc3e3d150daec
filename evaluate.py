r"""Evaluate policies: numbers with intervals, paired comparisons, best of N, and a report.

How it works (SWEET-RL section 5):
  1. The episodes of each policy are read (`--episodes`) or rolled out here (`--tasks`, `--agent`).
  2. The samples of a task are averaged first, then the tasks. An episode with an error counts as
     an error and nowhere else.
  3. Each 95 % interval is a bootstrap over tasks, and over seeds where a policy has several files.
     Where all outcomes agree, a bootstrap has no width, and Wilson's interval takes its place.
  4. The best policy is compared with every other one on the same tasks, and each one of
     `--episodes`, or played here, with each of `--against`: difference, interval, sign test, win
     rate.
  5. `--best_of_n` lets a critic or a grader model choose each turn among N candidates.

    python evaluate.py --episodes sft=runs/sft/episodes.jsonl sweet=runs/sweet/episodes.jsonl \
        --against base=runs/base/episodes.jsonl \
        --output runs/evaluation --report runs/evaluation/report.html
    python evaluate.py --episodes sweet=seed0.jsonl sweet=seed1.jsonl \
        --output runs/evaluation                                          # one policy, two seeds
    python evaluate.py --tasks test.jsonl --agent policy --best_of_n 1 4 16 --critic critic \
        --human http://localhost:8000/v1 --output runs/best_of_n
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

import functools
import json
import math
import re
import typing
from collections import Counter, defaultdict
from pathlib import Path

import numpy

from colbench import (
    check_same_task, lacks_answer, read_episodes, without_thoughts, write_atomically)
from collect import (
    COST_FLAGS, add_rollout_flags, all_jobs, check_rollout_flags, claim_rollout, collect_episodes,
    rollout_settings, rollout_tasks)
from judge.sandbox import SOLUTION_FAILED
from report.page import (
    PAGE_BYTES, Summary, annotate, as_json, filled_page, overview, packed_episodes, read_training,
    training_sentences)
from report.statistics import (
    PolicyValues, compare, draw_counts, interval, limits_of, pass_power)
from report.tables import HEADINGS, all_tables, lines_of, main_metric, verdict
from speakers import load_speaker
from speakers.interface import Request, Speaker, SpeakerError, SpeakerSettings
from speakers.names import is_server
from stages.flags import flag_parser, refuse_ignored, require_at_least
from stages.processes import join_processes, launch
from train_critic import Critic, critic_flags

# -----------------------------------------------------------------------------
# From episodes to numbers


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
    """Policy name -> runs, each the episodes of one file; a NAME= given again is another seed."""
    policies = defaultdict(list)
    for spec in specs:
        name, path = split_name(spec)
        if name in policies and path == spec:  # without NAME=, two files are no seeds
            raise SystemExit(f"{path}: found a second file named {name!r}, expected NAME=FILE; give"
                             " both one NAME if they are seeds of a policy, or else two")
        policies[name].append(read_episodes(path))
    return dict(policies)


def shared_tasks(policies):
    """All task ids in order of appearance, and their domain.

    A run that lacks some of the tasks, or has others of their names, cannot be compared.
    """
    runs = []
    everything, tasks = {}, {}
    for name, policy in policies.items():
        for run in policy:
            for episode in run:
                check_same_task(tasks, episode["task"], f"policy {name!r}")
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
    """The numbers of one episode; means omit those that it lacks."""
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
        leaking = episode["leak"] >= leak_threshold
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
    powers = [2**exponent for exponent in range(1, most.bit_length()) if 2**exponent < most]
    if most > 1:
        powers.append(most)  # 2, 4, 8, ..., most
    generator = numpy.random.default_rng(settings.seed)
    task_draws = draw_counts(generator, len(task_ids), settings.draws)
    results = {
        "domain": domain, "tasks": len(task_ids), "in_tokens": in_tokens, "draws": settings.draws,
        "seed": settings.seed, "leak_threshold": settings.leak_threshold, "policies": {},
        "pairs": [], "unsolvable": len(unsolvable_ids(all_runs)),
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
            "reward_by_seed": [mean_or_none(run) for run in tables["reward"]],
            "humans": sorted({episode["human"] for run in runs for episode in run
                              if episode["human"]}),
            "agent": runs[0][0]["agent"], "best_of_n": runs[0][0].get("best_of_n"),
            "scorer": runs[0][0].get("scorer"),
            "errors": Counter(episode["error"] for run in runs for episode in run
                              if episode["error"]),
            "numbers": {key: interval(table, run_draws, task_draws, limits_of(key))
                        for key, table in tables.items()},
        }
    return results, values, task_draws


def unsolvable_ids(runs):
    """The ids of the tasks that have a test which their own solution does not pass."""
    return {episode["task"]["task_id"] for run in runs for episode in run
            if SOLUTION_FAILED in episode["reasons"].values()}


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


class BestOfN(Speaker):
    """A speaker that says the best of `count` candidates, as a critic or a grader model finds."""

    def __init__(self, speaker, scorer, count):
        self.speaker, self.scorer, self.count = speaker, scorer, count

    def count_tokens(self, texts):
        return self.speaker.count_tokens(texts)

    @property
    def given_up(self):
        reason = self.speaker.given_up
        if not reason and isinstance(self.scorer, GraderModel):
            reason = self.scorer.speaker.given_up
        return reason

    def reply(self, request):
        """One Utterance: the best."""
        candidates = yield from self.speaker.reply(request._replace(n=self.count))
        if isinstance(candidates, SpeakerError):
            return candidates
        if isinstance(self.scorer, GraderModel):
            best = yield from self.scorer.best(request.messages, candidates)
            if isinstance(best, SpeakerError):
                return best  # the first candidate would pass for the best of N
        else:
            best = best_by_critic(self.scorer, request, candidates)
        return [candidates[best]]


def best_by_critic(critic, request, candidates):
    """The index of the greatest advantage; the first where the state is too long for the critic."""
    texts = [candidate.text for candidate in candidates]
    finished = [candidate.finished for candidate in candidates]
    advantages = critic.advantages(request.task, request.messages, texts, finished)
    if advantages is None:
        return 0
    # an empty message must never win, whatever the advantage of its end-of-turn token is
    advantages = [value if text.strip() else -math.inf
                  for text, value in zip(texts, advantages, strict=True)]
    return int(numpy.argmax(advantages))


class GraderModel:
    """A language model that reads all candidates at once and names the best (paper: Fig. 3a)."""

    def __init__(self, spec, settings):
        self.speaker = load_speaker(spec, "grader", settings)

    def best(self, messages, candidates):
        """The index of the candidate that it names, 0 if it names none, or a SpeakerError.

        A generator, for collect.interleave.
        """
        dialogue = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        listed = "\n".join(f"[{number}] {candidate.text}"
                           for number, candidate in enumerate(candidates, 1))
        question = (
            f"An assistant and a user talk:\n{dialogue}\n\n"
            f"Candidates for the assistant's next message:\n{listed}\n\n"
            "Which candidate brings the user's task furthest? Reply with its number alone."
        )
        answer = yield from self.speaker.reply(Request([{"role": "user", "content": question}]))
        if isinstance(answer, SpeakerError):
            return SpeakerError(f"grader: {answer}")
        said = without_thoughts(answer[0].text)
        if said is None:
            return SpeakerError("grader: found thoughts that never end, expected a number after"
                                " them; turn the model's thinking off")
        number = re.search(r"\d+", said)
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


# flags that decide how episodes are used, and not what is played
LATER_USE = ("best_of_n", "against", "report", "metrics", "draws", "leak_threshold")


def rollout_path(args, name):
    return Path(args.output) / f"{name}.jsonl"


def rollout_names(args):
    """Name of the policy -> its N, for each N of --best_of_n, or for 1."""
    base = args.name or Path(args.agent_model or args.agent).name
    if not args.best_of_n:
        return {base: 1}
    return {f"{base}-best-of-{count}": count for count in args.best_of_n}


def roll_out(args, theirs, process):
    """Play --tasks with --agent, once for each N of --best_of_n, to compare with `theirs`.

    Returns policy name -> its one run of episodes; they are on the leading process only.
    """
    tasks = rollout_tasks(args, process)
    refuse_other_tasks(tasks, theirs)
    settings = rollout_settings(args, tasks, process)
    jobs = all_jobs(tasks, args.samples_per_task)
    flags = dict(vars(args))
    if not args.best_of_n:  # then the critic is the report's alone
        del flags["critic"], flags["critic_model"]
    names = rollout_names(args)
    for name in names:
        claim_rollout(rollout_path(args, name), flags, process, (*COST_FLAGS, *LATER_USE))
    scorer = load_scorer(args, process.device) if args.best_of_n else None
    policies = {}
    for name, count in names.items():
        wrap_agent = None
        notes = settings.notes
        if args.best_of_n:
            notes = notes | {"best_of_n": count, "scorer": args.critic}
        if count > 1:
            wrap_agent = functools.partial(BestOfN, scorer=scorer, count=count)
        policies[name] = [collect_episodes(jobs, settings._replace(notes=notes),
                                           rollout_path(args, name), process, wrap_agent)]
    return policies


def refuse_other_tasks(tasks, theirs):
    """What is compared must have been played on the same tasks."""
    ids = {task["task_id"] for task in tasks}
    for name, runs in theirs.items():
        for run in runs:
            others = ids ^ {episode["task"]["task_id"] for episode in run}
            if others:
                raise SystemExit(f"found {len(others)} tasks that only one of --tasks and --against"
                                 f" {name!r} has, expected the same tasks; choose others with"
                                 " --tasks and --num_tasks, or omit the file")


def refuse_same_names(ours, theirs, flag, advice):
    """Two policies of one name could not be told apart."""
    for name in ours:
        if name in theirs:
            raise SystemExit(f"found policy {name!r} of {flag} in --against, too, expected"
                             f" different names; {advice}")


# -----------------------------------------------------------------------------
# Main


def main(args):
    process = join_processes()
    training = read_training(map(split_name, args.metrics))
    if args.critic and not is_grader(args.critic):
        critic_flags(args.critic)
    if args.report:
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
    theirs = read_policies(args.against)
    if args.episodes:
        ours = read_policies(args.episodes)
        refuse_same_names(ours, theirs, "--episodes", "give one as NAME=FILE")
    elif args.tasks:
        refuse_same_names(rollout_names(args), theirs, "--agent",
                          "name the one that is played now with --name")
        ours = roll_out(args, theirs, process)
    else:
        ours = {}
    if not process.leads:
        return
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
        critic = None if is_grader(args.critic) else load_scorer(args, process.device)
        annotate(policies, critic)
        sources = episode_files(args, policies)
        data = overview(Summary(results, sentences, tables), policies, sources, training)
        episodes = packed_episodes(policies, args.leak_threshold, PAGE_BYTES - len(as_json(data)))
        write_atomically(args.report, filled_page(data, episodes))
        print(f"\nreport: {args.report}")

    failed = [name for name, runs in policies.items()
              if all(episode["error"] for run in runs for episode in run)]
    if failed:
        raise SystemExit(f"every dialogue of {', '.join(failed)} was stopped by an error; expected"
                         " the agent and the human to answer: see the reason above")


def episode_files(args, policies):
    """Policy -> the files that its episodes were read from, or written to."""
    files = {name: [] for name in policies}
    for name, path in map(split_name, [*args.episodes, *args.against]):
        files[name].append(path)
    for name in policies:
        if not files[name]:
            files[name].append(str(rollout_path(args, name)))
    return files


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
                       " (default: --agent_model, or the last part of --agent)")
    group.add_argument("--samples_per_task", type=int, default=1, help="episodes of each task")
    group.add_argument("--best_of_n", type=int, nargs="+", default=[],
                       help="numbers of candidates for each turn, such as 1 2 4: the tasks are"
                       " played once for each number")
    group.add_argument("--critic", help="checkpoint of train_critic.py, or grader:SPEC;"
                       " chooses among the candidates; the report shows a checkpoint's advantages")
    group.add_argument("--critic_model", help="model name to ask a grader's server for")
    group = parser.add_argument_group("statistics")
    group.add_argument("--leak_threshold", type=float, default=0.5,
                       help="share of the solution that a human reply must repeat to be a leak")
    group.add_argument("--draws", type=int, default=2000, help="bootstrap draws")
    group = parser.add_argument_group("output")
    group.add_argument("--output", help="directory for results.json and results.md, and for the"
                       " episodes that are played here (NAME.jsonl)")
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
        check_rollout_flags(parser, args)
        if is_server(args.agent) and not args.agent_model and not args.name:
            raise SystemExit(f"found --agent {args.agent} without --name, expected a name for the"
                             " policy in tables and files")
    if args.name and Path(args.name).name != args.name:
        raise SystemExit(f"found --name {args.name}, expected a name without a folder: the"
                         " episodes go to OUTPUT/NAME.jsonl")
    if args.report and not args.report.endswith(".html"):
        raise SystemExit(f"found --report {args.report}, expected FILE.html")
    if not args.output and (args.episodes or args.tasks):
        raise SystemExit("found no --output; expected a directory for results.json and results.md")
    if not args.report:
        refuse_ignored(parser, args, ["metrics"], "without --report")
    if not args.best_of_n and not args.report:
        refuse_ignored(parser, args, ["critic"], "without --best_of_n and without --report")
    if not args.best_of_n and grader:
        refuse_ignored(parser, args, ["critic"], "without --best_of_n")
    if not grader or "://" not in args.critic:
        refuse_ignored(parser, args, ["critic_model"], "without a server as --critic grader:URL")
    if max(args.best_of_n, default=1) > 1 and not args.critic:
        raise SystemExit("found --best_of_n without --critic, expected a critic to choose among the"
                         " candidates")


if __name__ == "__main__":
    launch(main, parse_args())
