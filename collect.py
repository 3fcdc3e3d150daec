r"""Collect episodes: roll an agent out against the simulated human and judge its answers (SWEET-RL section 3).

How it works:
  1. each task is played `--samples_per_task` times; ranks of torchrun share the (task, sample) jobs;
  2. all dialogues of a batch advance one turn at a time; a finished one leaves at once and the next job takes its place;
  3. answers are judged by hidden tests (backend) or image similarity (frontend), and the episode is appended at once.
After a kill, the same command goes on where it stopped; episodes with an `error` are tried again.

    python collect.py --tasks toy:backend:train --num_tasks 500 --samples_per_task 6 --agent toy/base \
        --human scripted --output runs/out/episodes.jsonl
    torchrun --nproc_per_node 8 collect.py --tasks train.jsonl --agent meta-llama/Llama-3.1-8B-Instruct \
        --human http://localhost:8000/v1 --human_model meta-llama/Llama-3.1-70B-Instruct --output episodes.jsonl

Reads: task files (see colbench.py). Writes: EPISODES.jsonl, one episode a line, and EPISODES.jsonl.run.json.

Differences from the paper: prompts are in our own words (`--agent_prompt`, `--human_prompt` take the official ones);
the human sees the dialogue as a chat with the roles swapped; the agent sees its own thoughts before "OUTPUT:" again.
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
    HUMAN_PROMPT,
    MAX_TURNS,
    REPLY_CHARACTERS,
    Referee,
    ResumableJsonl,
    SpeakerError,
    agent_messages,
    derive_seed,
    graded_page,
    instructions,
    leak_share,
    load_speaker,
    read_prompt,
    read_tasks,
    split_message,
    write_atomically,
)

# -----------------------------------------------------------------------------
# Processes, signals and the record of a run: shared by the four scripts


class Process(typing.NamedTuple):
    rank: int
    world: int
    device: str

    @property
    def leads(self):
        return self.rank == 0

    @property
    def bar(self):
        """Options of tqdm: the leader's bar alone, which a log file gets once a minute."""
        return {"disable": not self.leads, "mininterval": 0.1 if sys.stderr.isatty() else 60}

    def barrier(self):
        if self.world > 1:
            import torch.distributed

            torch.distributed.barrier()

    def finish(self, store, order):
        """All rows of a file that every rank appends to, sorted by the leader once all are there; [] on other ranks."""
        self.barrier()
        rows = store.finish(order) if self.leads else []
        self.barrier()
        return rows


def join_processes(always=False):
    """This process among those that torchrun started. `always` makes a group of one too, which sharding needs."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world == 1 and not always:
        return Process(rank, world, None)
    import torch

    cuda = torch.cuda.is_available()
    device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        # ranks finish their share of the sampling hours apart; a rank that dies is noticed by torchrun, not by a timeout
        options = {"timeout": datetime.timedelta(days=7)}
        if "RANK" not in os.environ:
            options |= {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **options)
    return Process(rank, world, device)


def launch(main, args):
    """Run a script's `main`; turn what stops it from outside into one sentence that says how to go on."""

    def stop(number, frame):
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):  # SIGINT, too: a shell's background jobs start with it ignored
        signal.signal(number, stop)
    go_on = "What was finished is on disk; give the same command again to go on."
    try:
        main(args)
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"\nStopped. {go_on}", file=sys.stderr, flush=True)
        os._exit(130)  # sampling threads and process groups would keep a stopped run waiting
    except OSError as error:
        raise SystemExit(f"The disk or a file failed: {error}. {go_on}") from None
    except RuntimeError as error:
        if "Connection closed by peer" in str(error) or "Connection reset by peer" in str(error):
            raise SystemExit(f"Another process of this run has ended; its message says why. {go_on}") from None
        if "out of memory" not in str(error):
            raise
        raise SystemExit(f"Out of memory: {str(error).splitlines()[0]} Lower --batch_size (collect.py, evaluate.py),"
                         " --sampling_batch_size or --micro_batch_size (training), with which the same --output goes on,"
                         " or --max_length, or use more GPUs.") from None
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def records(*checkpoints):
    """The records of those checkpoints that these scripts trained, as inputs: a retrained one is another input."""
    return [str(Path(path, "run.json")) for path in checkpoints if path and Path(path, "run.json").is_file()]


def claim_output(path, args, inputs, process, cost_flags):
    """Write `path` (run.json): all flags, versions, world size and input hashes. Another command's output is refused.

    Only `cost_flags` may differ: they change nothing of what is made. A command that has made nothing yet claims nothing.
    """
    flags = {name: value for name, value in vars(args).items() if name != "output"}
    run = {"script": Path(sys.argv[0]).name, "flags": flags, "world_size": process.world, "inputs": {}}
    for name in filter(None, inputs):
        if not Path(name).is_file():
            raise SystemExit(f"{name}: no such file; expected an input of this command: a JSONL file, or instructions as"
                             " plain text")
        with open(name, "rb") as file:
            run["inputs"][str(name)] = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") \
                else hashlib.sha256(file.read()).hexdigest()
    if Path(path).name == "run.json" and Path(path).with_name("config.json").exists() and not Path(path).exists():
        raise SystemExit(f"{Path(path).parent}: found a checkpoint that none of these scripts wrote, expected a new"
                         " directory; choose another --output")
    run["versions"] = {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if Path(path).is_file() and has_output(Path(path)):
        before = read_run(path)
        changed = sorted(name for name in (flags.keys() | before["flags"].keys()) - set(cost_flags)
                         if flags.get(name) != before["flags"].get(name)) + [
                             name for name in run["inputs"] if run["inputs"][name] != before["inputs"].get(name)]
        if changed:
            raise SystemExit(f"{path}: found the output of another run, which differs in {', '.join(changed)}; expected"
                             " the same command, to go on with it; choose another --output or remove this one")
    elif process.leads:  # the record of a run that goes on stays as it was
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(run, indent=1) + "\n")


def has_output(record):
    """Whether the run of this record has made anything: beside run.json, or the file that NAME.run.json belongs to."""
    if record.name == "run.json":
        return any(not path.name.startswith("run.json") for path in record.parent.iterdir())
    return record.with_name(record.name.removesuffix(".run.json")).exists()


def claim_rollout(path, args, process):
    """claim_output for a file of episodes: free are the number played at the same time, and what is done with them later."""
    inputs = [args.tasks if Path(args.tasks).is_file() else None, args.agent_prompt, args.human_prompt]
    claim_output(path, args, inputs + records(args.agent, getattr(args, "critic", None)), process,
                 ("batch_size", "best_of_n", "against", "report", "metrics", "draws", "leak_threshold"))


def read_run(path):
    """The record of a run that claim_output wrote."""
    try:
        run = json.loads(Path(path).read_text())
        if isinstance(run["flags"], dict) and isinstance(run["inputs"], dict):
            return run
    except (ValueError, KeyError, TypeError):
        pass  # said below
    raise SystemExit(f"{path}: found a file that is no record of a run, expected what these scripts write; choose another"
                     " directory, or remove the file")


# -----------------------------------------------------------------------------
# Dialogues


@dataclasses.dataclass
class Dialogue:
    task: dict
    sample: int
    history: list
    answer: str | None = None
    error: str | None = None

    @property
    def key(self):
        return self.task["task_id"], self.sample


@dataclasses.dataclass
class Rules:
    agent_prompt: str | None  # None: the domain's own
    human_prompt: str | None
    max_turns: int
    reply_chars: int | None
    seed: int


def agent_turn(dialogues, agent, rules):
    """One message of the agent in each dialogue; sets `answer` where it ends the dialogue."""
    conversations = [agent_messages(d.task, d.history, instructions(d.task, rules.agent_prompt)) for d in dialogues]
    seeds = [derive_seed(rules.seed, *d.key, len(d.history)) for d in dialogues]
    spoken = agent.speak(conversations, seeds=seeds, tasks=[d.task for d in dialogues], keys=[d.key for d in dialogues])
    for dialogue, said in zip(dialogues, spoken, strict=True):
        if isinstance(said, SpeakerError):
            dialogue.error = f"agent: {said}"
            continue
        last_turn = len(dialogue.history) // 2 == rules.max_turns - 1
        content, dialogue.answer = split_message(dialogue.task, said[0].text, last_turn)
        dialogue.history.append({"role": "assistant", "content": content, "output": said[0].text,
                                 "finished": said[0].finished})


def human_turn(dialogues, human, rules, referee):
    """One reply of the human in each dialogue, cut at the domain's limit."""
    conversations = [referee.human_view(d.task, d.history, rules.human_prompt or HUMAN_PROMPT[d.task["domain"]], human)
                     for d in dialogues]
    seeds = [derive_seed(rules.seed, *d.key, len(d.history)) for d in dialogues]
    spoken = human.speak(conversations, seeds=seeds, tasks=[d.task for d in dialogues], keys=[d.key for d in dialogues])
    for dialogue, said in zip(dialogues, spoken, strict=True):
        if isinstance(said, SpeakerError):
            dialogue.error = f"human: {said}"
            continue
        limit = rules.reply_chars or REPLY_CHARACTERS[dialogue.task["domain"]]
        dialogue.history.append({"role": "user", "content": said[0].text[:limit]})


def rollout(jobs, agent, human, referee, rules, batch_size):
    """Play the (task, sample) `jobs`; yield each episode as soon as it is judged."""
    waiting, active = iter(jobs), []
    while True:
        for task, sample in itertools.islice(waiting, batch_size - len(active)):
            active.append(Dialogue(task, sample, [{"role": "user", "content": task["problem_description"]}]))
        if not active:
            return
        agent_turn(active, agent, rules)
        done = [d for d in active if d.answer is not None or d.error]
        active = [d for d in active if d.answer is None and not d.error]
        if active:
            human_turn(active, human, rules, referee)
            done += [d for d in active if d.error]
            active = [d for d in active if not d.error]
        yield from judged(done, referee, rules, agent)


def judged(dialogues, referee, rules, agent):
    """Episodes of finished dialogues; one that could not be finished has an error and no reward."""
    sound = [d for d in dialogues if not d.error]
    grades = dict(zip(map(id, sound), referee.grade_all([d.task for d in sound],
                                                        [final_answer(d) for d in sound]), strict=True))
    for dialogue in dialogues:
        grade = grades.get(id(dialogue))
        outputs = [m["output"] for m in dialogue.history if m["role"] == "assistant"]
        yield {
            "task": dialogue.task, "sample": dialogue.sample, "dialogue_history": dialogue.history,
            "answer": dialogue.answer, "reward": grade and grade.reward, "success": grade and grade.success,
            "turns": len(outputs), "agent_tokens": agent.count_tokens(outputs), "reasons": grade.reasons if grade else {},
            "leak": leak_share(dialogue.task, [m["content"] for m in dialogue.history[2::2]]),
            "seed": rules.seed, "agent_prompt": instructions(dialogue.task, rules.agent_prompt),
            "error": dialogue.error,
        }


def count(totals, episodes):
    """Add episodes to the counts that `summary` tells; one with an error has no outcome. Returns the counts."""
    for episode in episodes:
        if not episode["error"]:
            totals.update(played=1, tested=episode["success"] is not None, passed=bool(episode["success"]),
                          reward=episode["reward"])
    return totals


def summary(totals):
    """Mean success, which pages do not have, and mean reward."""
    success = f"success {totals['passed'] / totals['tested']:.3f}, " if totals["tested"] else ""
    return f"{success}reward {totals['reward'] / max(1, totals['played']):.3f}"


def final_answer(dialogue):
    """The answer to judge. In the frontend domain an answer without a page stands for the last page that was shown."""
    return graded_page(dialogue.answer, dialogue.history) if dialogue.task["domain"] == "frontend" else dialogue.answer


# -----------------------------------------------------------------------------
# Command line


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it stands, and behind each flag its default, where it has one that its help does not tell."""

    def _get_help_string(self, action):
        plain = action.default in (None, []) or isinstance(action.default, bool) or "default" in action.help
        return action.help if plain else super()._get_help_string(action)


def flag_parser(description):
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)


def add_dtype_flag(parser):
    parser.add_argument("--dtype", choices=("bfloat16", "float32"),
                        help="what models compute in (default: bfloat16 on GPUs, float32 on CPUs); checkpoints are float32")


def add_rollout_flags(parser):
    """The flags of a rollout, which collect.py and evaluate.py share."""
    # data
    parser.add_argument("--tasks", help="task file, or toy:backend:train, toy:frontend:test, ...")
    parser.add_argument("--num_tasks", type=int, help="the first so many tasks (default: all; 1000 of a toy world)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all sampling")
    # speakers
    parser.add_argument("--agent", help="model name or directory, http://host:port/v1, or scripted")
    parser.add_argument("--agent_model", help="model name to ask an agent server for")
    parser.add_argument("--agent_prompt", help="file with the agent's instructions (default: the checkpoint's own, or ours)")
    parser.add_argument("--human", help="as --agent (for pages: vision-language); default in a toy world: scripted")
    parser.add_argument("--human_model", help="model name to ask a human server for")
    parser.add_argument("--human_prompt", help="file with the human's instructions")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the agent; the human's is --human_temperature")
    parser.add_argument("--human_temperature", type=float, default=0.0, help="of the human")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="of one agent message")
    parser.add_argument("--human_max_new_tokens", type=int, default=1024, help="of one human message, its thoughts included")
    add_dtype_flag(parser)
    # rules and judge
    parser.add_argument("--max_turns", type=int, default=MAX_TURNS, help="agent messages in a dialogue")
    parser.add_argument("--reply_chars", type=int, help="cut human replies here (default: 400 backend, 1000 frontend)")
    parser.add_argument("--judge", choices=("fixed", "official"), default="fixed", help="grading semantics (README)")
    parser.add_argument("--require_protection", action="store_true", help="refuse to run if the sandbox lacks a protection")
    parser.add_argument("--clip", help="frontend reward: CLIP model or none (default: clip-vit-base-patch32; toy: none)")
    parser.add_argument("--clip_crop", choices=("center", "pad"), default="center", help="what CLIP sees of tall pages")
    parser.add_argument("--batch_size", type=int, default=64, help="dialogues played at the same time by each process")


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    add_rollout_flags(parser)
    parser.add_argument("--samples_per_task", type=int, default=3, help="episodes of each task (paper: 3)")
    parser.add_argument("--output", required=True, help="EPISODES.jsonl")
    args = parser.parse_args(argv)
    check_rollout_flags(args)
    require_at_least(1, args, "samples_per_task")
    if Path(args.output).exists() and not Path(f"{args.output}.run.json").is_file():
        raise SystemExit(f"{args.output}: found a file that collect.py did not write here (its .run.json is missing),"
                         " expected a new name or the output of the same command; choose another --output")
    return args


def check_rollout_flags(args):
    for name in ("tasks", "agent"):
        if not getattr(args, name):
            raise SystemExit(f"found no --{name}; expected one (see --help)")
    require_at_least(1, args, "num_tasks", "max_new_tokens", "human_max_new_tokens", "max_turns", "reply_chars", "batch_size")
    require_at_least(0, args, "temperature", "human_temperature", "seed")


def require_at_least(least, args, *names):
    """Refuse a flag that is below `least`, infinite or no number; None is one that was not given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise SystemExit(f"found --{name} {value}, expected a number of at least {least}")


def load_rollout(args, tasks, process):
    """(agent, human, referee, rules) as the flags ask; everything that can fail early fails here."""
    own = Path(args.agent, "agent_prompt.txt")  # what a checkpoint was trained with
    prompts = [read_prompt(args.agent_prompt or (own if own.is_file() else None)), read_prompt(args.human_prompt)]
    if not args.human and not all("toy" in task for task in tasks):
        raise SystemExit("found no --human for tasks that are of no toy world; expected a server or a model (with scripted,"
                         " which says that it does not know, a dry run)")
    referee = Referee(args, tasks, process)
    human = load_speaker(args.human or "scripted", "human", args.human_model, args.human_temperature,
                         args.human_max_new_tokens, args.batch_size, process.device, args.dtype,
                         pictures=any(task["domain"] == "frontend" for task in tasks))
    agent = load_speaker(args.agent, "agent", args.agent_model, args.temperature, args.max_new_tokens,
                         args.batch_size, process.device, args.dtype)
    return agent, human, referee, Rules(*prompts, args.max_turns, args.reply_chars, args.seed)


def collect(tasks, samples, args, process, output, choose=lambda agent: agent, **notes):
    """Play what `output` does not hold yet, with a progress bar; return all episodes in the order of the jobs.

    `choose` may put something between the agent and the dialogue, such as evaluate.py's best of N; `notes` go into every
    episode.
    """
    jobs = [(task, sample) for sample in range(samples) for task in tasks]
    store = ResumableJsonl(output, lambda row: (row["task"]["task_id"], row["sample"]),
                           lambda row: not row["error"], process.leads)
    process.barrier()  # nobody appends before the leader has tidied the file
    mine = [job for number, job in enumerate(jobs) if number % process.world == process.rank
            and (job[0]["task_id"], job[1]) not in store.rows]
    if mine:
        agent, human, referee, rules = load_rollout(args, tasks, process)
        totals = count(Counter(), store.rows.values())
        with referee, tqdm(total=len(jobs), initial=len(jobs) - len(mine) * process.world, unit="episode",
                           **process.bar) as bar:
            for episode in rollout(mine, choose(agent), human, referee, rules, args.batch_size):
                store.append(episode | {"agent": args.agent, "human": args.human or "scripted"} | notes)
                bar.update(process.world)
                bar.set_postfix_str(summary(count(totals, [episode])), refresh=False)
    return process.finish(store, [(task["task_id"], sample) for task, sample in jobs])


def main(args):
    process = join_processes()
    tasks = read_tasks(args.tasks, args.num_tasks)
    claim_rollout(f"{args.output}.run.json", args, process)
    episodes = collect(tasks, args.samples_per_task, args, process, args.output)
    if process.leads:
        failures = [episode["error"] for episode in episodes if episode["error"]]
        print(f"{args.output}: {len(episodes)} episodes, {summary(count(Counter(), episodes))}, {len(failures)} failed")
        if failures:
            print(f"First failure: {failures[0]}\nGive the same command again to retry the failed ones.")
        if len(failures) == len(episodes):
            raise SystemExit("every dialogue failed; expected the agent and the human to answer: see the first failure above")


if __name__ == "__main__":
    launch(main, parse_args())
