r"""Collect episodes: roll an agent out against the simulated human, judge its answers (section 3).

How it works:
  1. each task is played `--samples_per_task` times; ranks share the (task, sample) jobs;
  2. all dialogues of a batch advance one turn at a time (`rollout`); a finished one leaves at once
     and the next job takes its place;
  3. answers are judged by hidden tests or image similarity, and episodes are appended at once.
To resume after a kill, rerun the same command; episodes with an `error` are tried again.

    python collect.py --tasks toy:backend:train --num_tasks 500 --samples_per_task 6 \
        --agent toy/base --human scripted --output runs/out/episodes.jsonl
    torchrun --nproc_per_node 8 collect.py --tasks train.jsonl \
        --agent meta-llama/Llama-3.1-8B-Instruct --human http://localhost:8000/v1 \
        --human_model meta-llama/Llama-3.1-70B-Instruct --output episodes.jsonl

Reads: task files (see colbench.py). Writes: EPISODES.jsonl, one episode a line, and
EPISODES.jsonl.run.json, the record of the command.

Differences from the paper: prompts are in our own words (`--agent_prompt`, `--human_prompt` take
the official ones); the human sees the dialogue as a chat with the roles swapped; the agent sees its
own thoughts before "OUTPUT:" again.
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import sys
import typing
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from colbench import (
    DOMAINS, MAX_TURNS, RefereeSettings, ResumableJsonl, agent_messages, agent_prompt_of,
    derive_seed, leak_share, open_referee, read_prompt, read_tasks, split_message, write_atomically)
from speakers import load_speaker
from speakers.interface import SpeakerError, SpeakerSettings

# -----------------------------------------------------------------------------
# Dialogues


@dataclasses.dataclass
class Dialogue:
    """One sample of a task while it is played."""

    task: dict
    sample: int
    history: list
    answer: str | None = None  # once the agent has given it
    error: str | None = None  # once a speaker could not go on

    @property
    def key(self):
        return self.task["task_id"], self.sample

    @property
    def running(self):
        return self.answer is None and self.error is None


class Rules(typing.NamedTuple):
    agent_prompt: str | None  # None: the domain's own
    human_prompt: str | None
    max_turns: int
    reply_chars: int | None  # None: the domain's own
    seed: int


def rollout(jobs, agent, human, referee, rules, batch_size):
    """Play the (task, sample) `jobs`; yield each episode as soon as it is judged."""
    waiting, active = iter(jobs), []
    while True:
        for task, sample in itertools.islice(waiting, batch_size - len(active)):
            request = {"role": "user", "content": task["problem_description"]}
            active.append(Dialogue(task, sample, [request]))
        if not active:
            return
        agent_turn(active, agent, rules)
        answering = [dialogue for dialogue in active if dialogue.running]
        done = [dialogue for dialogue in active if not dialogue.running]
        if answering:
            human_turn(answering, human, rules, referee)
            done += [dialogue for dialogue in answering if not dialogue.running]
        active = [dialogue for dialogue in answering if dialogue.running]
        yield from judged(done, referee, rules, agent)


def agent_turn(dialogues, agent, rules):
    """One message of the agent in each dialogue; sets `answer` where it ends the dialogue."""
    views = [agent_messages(d.task, d.history, agent_prompt_of(d.task, rules.agent_prompt))
             for d in dialogues]
    for dialogue, spoken in zip(dialogues, ask(agent, dialogues, views, rules), strict=True):
        if isinstance(spoken, SpeakerError):
            dialogue.error = f"agent: {spoken}"
            continue
        utterance = spoken[0]
        last_turn = len(dialogue.history) // 2 == rules.max_turns - 1
        content, dialogue.answer = split_message(dialogue.task, utterance.text, last_turn)
        dialogue.history.append({"role": "assistant", "content": content,
                                 "output": utterance.text, "finished": utterance.finished})


def human_turn(dialogues, human, rules, referee):
    """One reply of the human in each dialogue, cut at the domain's limit."""
    views = [human_view(d, human, rules, referee) for d in dialogues]
    for dialogue, spoken in zip(dialogues, ask(human, dialogues, views, rules), strict=True):
        if isinstance(spoken, SpeakerError):
            dialogue.error = f"human: {spoken}"
            continue
        limit = rules.reply_chars or DOMAINS[dialogue.task["domain"]].reply_chars
        dialogue.history.append({"role": "user", "content": spoken[0].text[:limit]})


def human_view(dialogue, human, rules, referee):
    """What the human reads: a scripted one the history as it is, a model what the referee shows."""
    if getattr(human, "reads_history", False):
        return dialogue.history
    prompt = rules.human_prompt or DOMAINS[dialogue.task["domain"]].human_prompt
    return referee.human_view(dialogue.task, dialogue.history, prompt)


def ask(speaker, dialogues, views, rules):
    """What the speaker says in each dialogue, with draws that depend on the dialogue alone."""
    seeds = [derive_seed(rules.seed, *d.key, len(d.history)) for d in dialogues]
    return speaker.speak(views, seeds=seeds, tasks=[d.task for d in dialogues],
                         keys=[d.key for d in dialogues])


def judged(dialogues, referee, rules, agent):
    """Episodes of ended dialogues; one that could not go on has an error and no reward."""
    sound = [d for d in dialogues if not d.error]
    grades = {}
    if sound:
        answers = [referee.graded_text(d.answer, d.history) for d in sound]
        results = referee.grade_all([d.task for d in sound], answers)
        grades = {d.key: grade for d, grade in zip(sound, results, strict=True)}
    for dialogue in dialogues:
        grade = grades.get(dialogue.key)
        outputs = [m["output"] for m in dialogue.history if m["role"] == "assistant"]
        replies = [m["content"] for m in dialogue.history[2::2]]
        yield {
            "task": dialogue.task, "sample": dialogue.sample,
            "dialogue_history": dialogue.history, "answer": dialogue.answer,
            "reward": grade.reward if grade else None,
            "success": grade.success if grade else None,
            "turns": len(outputs), "agent_tokens": agent.count_tokens(outputs),
            "reasons": grade.reasons if grade else {},
            "leak": leak_share(dialogue.task, replies), "seed": rules.seed,
            "agent_prompt": agent_prompt_of(dialogue.task, rules.agent_prompt),
            "error": dialogue.error,
        }


# -----------------------------------------------------------------------------
# A whole rollout


class RolloutSettings(typing.NamedTuple):
    """What the flags of a rollout say."""

    agent: str
    agent_settings: SpeakerSettings
    human: str
    human_settings: SpeakerSettings
    rules: Rules
    referee: RefereeSettings
    notes: dict  # facts that go into every episode


def all_jobs(tasks, samples_per_task):
    return [(task, sample) for sample in range(samples_per_task) for task in tasks]


def collect_episodes(jobs, settings, output, process, wrap_agent=None):
    """Play the jobs that `output` does not hold yet; return all episodes in the order of the jobs.

    `wrap_agent` puts something between the agent and the dialogue, such as evaluate.py's best of N.
    """
    store = ResumableJsonl(output, lambda row: (row["task"]["task_id"], row["sample"]),
                           lambda row: not row["error"], process.leads)
    process.barrier()  # nobody appends before the leader has tidied the file
    mine = [(task, sample) for task, sample in jobs[process.rank::process.world]
            if (task["task_id"], sample) not in store.rows]
    if mine:
        domain = DOMAINS[mine[0][0]["domain"]]
        with open_referee([task for task, _ in jobs], settings.referee) as referee:
            human = load_speaker(settings.human, "human", settings.human_settings, domain.pages)
            agent = load_speaker(settings.agent, "agent", settings.agent_settings)
            if wrap_agent:
                agent = wrap_agent(agent)
            totals = add_outcomes(Counter(), store.rows.values())
            batch_size = settings.agent_settings.batch_size
            with tqdm(total=len(jobs), initial=len(jobs) - len(mine) * process.world,
                      unit="episode", **process.bar) as bar:
                for episode in rollout(mine, agent, human, referee, settings.rules, batch_size):
                    store.append(episode | settings.notes)
                    add_outcomes(totals, [episode])
                    bar.update(process.world)
                    bar.set_postfix_str(summary(totals), refresh=False)
    return process.finish(store, [(task["task_id"], sample) for task, sample in jobs])


def add_outcomes(totals, episodes):
    """Add episodes to the counts that `summary` prints; one with an error has no outcome."""
    for episode in episodes:
        if not episode["error"]:
            totals["played"] += 1
            totals["tested"] += episode["success"] is not None
            totals["passed"] += episode["success"] is True
            totals["reward"] += episode["reward"]
    return totals


def summary(totals):
    """Mean success, which pages do not have, and mean reward."""
    reward = f"reward {totals['reward'] / max(1, totals['played']):.3f}"
    if not totals["tested"]:
        return reward
    return f"success {totals['passed'] / totals['tested']:.3f}, {reward}"


def main(args):
    process = join_processes()
    tasks = read_tasks(args.tasks, args.num_tasks)
    settings = rollout_settings(args, tasks, process)
    claim_rollout(f"{args.output}.run.json", vars(args), process)
    jobs = all_jobs(tasks, args.samples_per_task)
    episodes = collect_episodes(jobs, settings, args.output, process)
    if not process.leads:
        return
    failures = [episode["error"] for episode in episodes if episode["error"]]
    outcomes = summary(add_outcomes(Counter(), episodes))
    print(f"{args.output}: {len(episodes)} episodes, {outcomes}, {len(failures)} failed")
    if failures:
        print(f"First failure: {failures[0]}\nGive the same command again to retry the failed"
              " ones.")
    if len(failures) == len(episodes):
        raise SystemExit("every dialogue failed; expected the agent and the human to answer: see"
                         " the first failure above")


# -----------------------------------------------------------------------------
# Processes and signals: shared by the four scripts


class Process(typing.NamedTuple):
    rank: int
    world: int
    device: str | None

    @property
    def leads(self):
        return self.rank == 0

    @property
    def bar(self):
        """Options of tqdm: the leader's bar alone, which a log file gets once a minute."""
        interval = 0.1 if sys.stderr.isatty() else 60
        return {"disable": not self.leads, "mininterval": interval}

    def barrier(self):
        if self.world > 1:
            import torch.distributed

            torch.distributed.barrier()

    def finish(self, store, order):
        """Sort a file that every rank appends to, once all are done; the leader gets its rows."""
        self.barrier()
        rows = store.finish(order) if self.leads else []
        self.barrier()
        return rows


def join_processes(always=False):
    """This process among those that torchrun started.

    `always` makes a group of one process too, which sharding needs.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world == 1 and not always:
        return Process(rank, world, None)
    import torch

    cuda = torch.cuda.is_available()
    device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        # ranks finish their share of the sampling hours apart; torchrun notices a rank that dies
        options = {"timeout": datetime.timedelta(days=7)}
        if "RANK" not in os.environ:
            options |= {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        torch.distributed.init_process_group(backend, **options)
    return Process(rank, world, device)


def launch(main, args):
    """Run a script's `main`; what stops it from outside becomes one sentence with the way on."""

    def stop(signal_number, frame):
        raise KeyboardInterrupt

    for signal_number in (signal.SIGTERM, signal.SIGINT):  # background jobs start with it ignored
        signal.signal(signal_number, stop)
    way_on = "What was finished is on disk; rerun the same command to resume."
    try:
        main(args)
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"\nStopped. {way_on}", file=sys.stderr, flush=True)
        os._exit(130)  # sampling threads and process groups would keep a stopped run waiting
    except OSError as error:
        raise SystemExit(f"The disk or a file failed: {error}. {way_on}") from None
    except RuntimeError as error:
        message = str(error)
        if "Connection closed by peer" in message or "Connection reset by peer" in message:
            raise SystemExit("Another process of this run has ended; its message says why."
                             f" {way_on}") from None
        if "out of memory" not in message:
            raise
        raise SystemExit(
            f"Out of memory: {message.splitlines()[0]} Lower --batch_size (collect.py, evaluate.py)"
            " or --sampling_batch_size or --micro_batch_size (training), which the same --output"
            " allows, or lower --max_length, or use more GPUs.") from None
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


# -----------------------------------------------------------------------------
# The record of a run: the same command resumes it, another one is refused


def claim_output(path, flags, inputs, process, cost_flags):
    """Write `path` (run.json): flags, versions, world size, input hashes. Refuse another's output.

    Only `cost_flags` may differ: they do not change what is made. A command that has made nothing
    yet claims nothing.
    """
    path = Path(path)
    flags = {name: value for name, value in flags.items() if name != "output"}
    hashes = {str(name): file_hash(name) for name in inputs if name}
    if path.name == "run.json" and path.with_name("config.json").exists() and not path.exists():
        raise SystemExit(f"{path.parent}: found a checkpoint that none of these scripts wrote,"
                         " expected a new directory; choose another --output")
    if path.is_file() and has_output(path):
        changed = changes_since(read_run(path), flags, hashes, cost_flags)
        if changed:
            raise SystemExit(f"{path}: found the output of another run, which differs in"
                             f" {', '.join(changed)}; expected the same command, to resume it;"
                             " choose another --output or remove this one")
    elif process.leads:  # the record of a resumed run stays as it was
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        run = {"script": Path(sys.argv[0]).name, "flags": flags, "world_size": process.world,
               "inputs": hashes, "versions": {"python": platform.python_version()} | versions}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(run, indent=1) + "\n")


def file_hash(path):
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file; expected an input of this command: a JSONL file,"
                         " or instructions as plain text")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def changes_since(before, flags, hashes, cost_flags):
    """The names of flags and inputs that differ from an earlier run's record."""
    names = (flags.keys() | before["flags"].keys()) - set(cost_flags)
    changed = sorted(name for name in names if flags.get(name) != before["flags"].get(name))
    return changed + [name for name in hashes if hashes[name] != before["inputs"].get(name)]


def has_output(record):
    """Whether a run has made anything: beside run.json, or the file NAME.run.json belongs to."""
    if record.name == "run.json":
        return any(not path.name.startswith("run.json") for path in record.parent.iterdir())
    return record.with_name(record.name.removesuffix(".run.json")).exists()


def claim_rollout(path, flags, process):
    """claim_output for episodes; how many are played at once, and their later use, may differ."""
    tasks = flags["tasks"] if Path(flags["tasks"]).is_file() else None
    inputs = [tasks, flags["agent_prompt"], flags["human_prompt"]]
    inputs += records(flags["agent"], flags.get("critic"))
    claim_output(path, flags, inputs, process, ("batch_size", "best_of_n", "against", "report",
                                                "metrics", "draws", "leak_threshold"))


def records(*checkpoints):
    """The records of the checkpoints that these scripts trained: a retrained one is a new input."""
    paths = [Path(checkpoint, "run.json") for checkpoint in checkpoints if checkpoint]
    return [str(path) for path in paths if path.is_file()]


def read_run(path):
    """The record that claim_output wrote."""
    try:
        run = json.loads(Path(path).read_text())
        if isinstance(run["flags"], dict) and isinstance(run["inputs"], dict):
            return run
    except (ValueError, KeyError, TypeError):
        pass  # the sentence below covers every such file
    raise SystemExit(f"{path}: found a file that is no record of a run, expected what these scripts"
                     " write; choose another directory, or remove the file")


# -----------------------------------------------------------------------------
# Command line


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it stands; after each flag its default, unless the help already tells it."""

    def _get_help_string(self, action):
        plain = action.default in (None, []) or isinstance(action.default, bool)
        if plain or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


def flag_parser(description):
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)


def add_dtype_flag(group):
    action = group.add_argument(
        "--dtype", choices=("bfloat16", "float32"),
        help="what models compute in (default: bfloat16 on GPUs, float32 on CPUs); checkpoints are"
        " float32")
    return action.dest


def add_rollout_flags(parser):
    """The flags of a rollout, which collect.py and evaluate.py share; returns their names."""
    names = []

    def add(flag, **options):  # to the current group
        names.append(group.add_argument(flag, **options).dest)

    group = parser.add_argument_group("tasks")
    add("--tasks", help="task file, or toy:backend:train, toy:frontend:test, ...")
    add("--num_tasks", type=int,
        help="the first so many tasks (default: all; 1000 of a toy world)")
    add("--seed", type=int, default=0, help="seed of all sampling")
    group = parser.add_argument_group("agent")
    add("--agent", help="model name or directory, http://host:port/v1, or scripted")
    add("--agent_model", help="model name to ask an agent server for")
    add("--agent_prompt", help="file with the agent's instructions (default: the"
        " checkpoint's own, or ours)")
    add("--temperature", type=float, default=1.0, help="of the agent")
    add("--max_new_tokens", type=int, default=1024, help="of one agent message")
    names.append(add_dtype_flag(group))
    group = parser.add_argument_group("human")
    add("--human", help="as --agent (for pages: vision-language); default in a toy"
        " world: scripted")
    add("--human_model", help="model name to ask a human server for")
    add("--human_prompt", help="file with the human's instructions")
    add("--uninformed_human", action="store_true",
        help="allow a --human_prompt without {hidden_information}")
    add("--human_temperature", type=float, default=0.0, help="of the human")
    add("--human_max_new_tokens", type=int, default=1024,
        help="of one human message, its thoughts included")
    group = parser.add_argument_group("rules and judge")
    add("--max_turns", type=int, default=MAX_TURNS, help="agent messages")
    add("--reply_chars", type=int,
        help="cut human replies here (default: 400 backend, 1000 frontend)")
    add("--judge", choices=("fixed", "official"), default="fixed",
        help="grading semantics (README)")
    add("--require_protection", action="store_true",
        help="refuse to run if the sandbox lacks a protection")
    add("--clip", help="reward of pages: CLIP model or none (default:"
        " clip-vit-base-patch32; toy: none)")
    add("--clip_crop", choices=("center", "pad"), default="center",
        help="what CLIP sees of tall pages")
    add("--batch_size", type=int, default=64,
        help="dialogues played at the same time by each process")
    return names


def check_rollout_flags(args):
    for name in ("tasks", "agent"):
        if not getattr(args, name):
            raise SystemExit(f"found no --{name}; expected one (see --help)")
    require_at_least(1, args, "num_tasks", "max_new_tokens", "human_max_new_tokens", "max_turns",
                     "reply_chars", "batch_size")
    require_at_least(0, args, "temperature", "human_temperature", "seed")


def require_at_least(least, args, *names):
    """Refuse a flag that is below `least`, infinite or no number; None was not given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise SystemExit(f"found --{name} {value}, expected a number of at least {least}")


def refuse_ignored(parser, args, names, reason):
    """Refuse flags that would do nothing here; a flag at its default asks for nothing."""
    for name in names:
        value = getattr(args, name)
        if value != parser.get_default(name):
            raise SystemExit(f"found --{name} {value}, which is ignored {reason}; expected it to be"
                             " left out")


def rollout_settings(args, tasks, process):
    """The flags as records; everything that can fail without loading a model fails here."""
    checkpoint_prompt = Path(args.agent, "agent_prompt.txt")  # what a checkpoint was trained with
    if args.agent_prompt is None and checkpoint_prompt.is_file():
        agent_prompt = read_prompt(checkpoint_prompt)
    else:
        agent_prompt = read_prompt(args.agent_prompt)
    human_prompt = read_prompt(args.human_prompt)
    if human_prompt is not None and not args.uninformed_human:
        check_human_prompt(args.human_prompt, human_prompt, tasks[0])
    if not args.human and not all("toy" in task for task in tasks):
        raise SystemExit("found no --human for tasks of no toy world; expected a server or a model"
                         " (or scripted, which only says that it does not know, for a dry run)")
    agent = SpeakerSettings(args.agent_model, args.temperature, args.max_new_tokens,
                            args.batch_size, process.device, args.dtype)
    human = SpeakerSettings(args.human_model, args.human_temperature, args.human_max_new_tokens,
                            args.batch_size, process.device, args.dtype)
    workers = max(1, (os.cpu_count() or 1) // process.world)
    human_spec = args.human or "scripted"
    return RolloutSettings(
        agent=args.agent, agent_settings=agent,
        human=human_spec, human_settings=human,
        rules=Rules(agent_prompt, human_prompt, args.max_turns, args.reply_chars, args.seed),
        referee=RefereeSettings(args.judge, args.require_protection, workers, args.clip,
                                args.clip_crop, process.device),
        notes={"agent": args.agent, "human": human_spec})


def check_human_prompt(path, prompt, task):
    """A human who is not told what to want can only say that it does not know."""
    for field in DOMAINS[task["domain"]].human_prompt_fields:
        if "{" + field + "}" not in prompt:
            raise SystemExit(f"{path}: found a human prompt without {{{field}}}, expected it, since"
                             " the human would not know what to want; add it, or allow this with"
                             " --uninformed_human")


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    add_rollout_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--samples_per_task", type=int, default=3, help="episodes of each task")
    group.add_argument("--output", required=True, help="EPISODES.jsonl")
    args = parser.parse_args(argv)
    check_rollout_flags(args)
    require_at_least(1, args, "samples_per_task")
    if Path(args.output).exists() and not Path(f"{args.output}.run.json").is_file():
        raise SystemExit(f"{args.output}: found a file that collect.py did not write here (its"
                         " .run.json is missing), expected a new name or the output of the same"
                         " command; choose another --output")
    return args


if __name__ == "__main__":
    launch(main, parse_args())
