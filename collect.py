r"""Collect episodes: roll an agent out against the simulated human, judge its answers (section 3).

How it works:
  1. each task is played `--samples_per_task` times; ranks share the (task, sample) jobs;
  2. a dialogue (`play`) continues as soon as what it waits for arrives: a server's reply, a grade,
     or the next batch of a local model, which takes all that are waiting (`interleave`);
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
the official ones). From the official code: the human sees the dialogue as a chat with the roles
swapped; on pages, the agent sees its own thoughts before "OUTPUT:" again.
"""

import itertools
import os
import sys
import typing
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from tqdm import tqdm

from colbench import (
    DOMAINS, MAX_TURNS, TOY_TASKS, RefereeSettings, ResumableJsonl, agent_messages, agent_prompt_of,
    counted, derive_seed, leak_share, one_domain, open_referee, read_prompt, read_tasks, reasons_of,
    split_message, without_thoughts)
from judge.sandbox import ANSWER_MARKER, TOO_SLOW
from speakers import load_speaker
from speakers.interface import Request, SpeakerError, SpeakerSettings
from speakers.names import check_spec, is_scripted, is_server
from stages.flags import (
    add_dtype_flag, flag_parser, refuse_flag, refuse_ignored, require_at_least)
from stages.processes import join_processes, launch
from stages.record import claim_output, records

# -----------------------------------------------------------------------------
# A dialogue


class Rules(typing.NamedTuple):
    agent_prompt: str  # may hold {max_turns}; "": none
    human_prompt: str
    max_turns: int
    reply_chars: int
    seed: int


class Parties(typing.NamedTuple):
    agent: typing.Any
    human: typing.Any
    referee: typing.Any
    rules: Rules


def play(task, sample, parties, on_turn):
    """One dialogue, from the request to the reward; returns the episode.

    A generator: it yields what it waits for (see `interleave`) and is sent the reply. What the
    speakers draw depends on the task, the sample and the turn alone, never on other dialogues.
    """
    agent, human, referee, rules = parties
    history = [{"role": "user", "content": task["problem_description"]}]
    agent_prompt = agent_prompt_of(task, rules.agent_prompt, rules.max_turns)
    answer = error = grade = None

    def request(messages):
        key = (task["task_id"], sample)
        return Request(messages, seed=derive_seed(rules.seed, *key, len(history)), task=task,
                       key=key)

    while True:
        view = agent_messages(history, agent_prompt)
        spoken = yield from agent.reply(request(view))
        if isinstance(spoken, SpeakerError):
            error = f"agent: {spoken}"
            break
        utterance = spoken[0]
        last_turn = len(history) // 2 == rules.max_turns - 1
        content, answer = split_message(task, utterance.text, last_turn)
        history.append({"role": "assistant", "content": content, "output": utterance.text,
                        "finished": utterance.finished})
        on_turn()
        if answer is not None:
            break
        if human.reads_history:
            view = history
        else:
            view = yield referee.human_view(task, history, rules.human_prompt)
        spoken = yield from human.reply(request(view))
        if isinstance(spoken, SpeakerError):
            error = f"human: {spoken}"
            break
        said = without_thoughts(spoken[0].text)  # thoughts would tell the agent the solution
        if said is None:
            error = ("human: found thoughts that never end, expected a reply after them; raise"
                     " --human_max_new_tokens, or turn the model's thinking off")
            break
        history.append({"role": "user", "content": said[:rules.reply_chars]})

    if not error:
        grade = yield referee.grade(task, referee.graded_text(answer, history))
    outputs = [message["output"] for message in history if message["role"] == "assistant"]
    replies = [message["content"] for message in history[2::2]]
    return {
        "task": task, "sample": sample, "dialogue_history": history, "answer": answer,
        "reward": grade.reward if grade else None, "success": grade.success if grade else None,
        "turns": len(outputs), "max_turns": rules.max_turns,
        "agent_tokens": agent.count_tokens(outputs),
        "reasons": reasons_of(grade, content) if grade else {}, "leak": leak_share(task, replies),
        "seed": rules.seed, "agent_prompt": rules.agent_prompt, "error": error,
    }


# -----------------------------------------------------------------------------
# Many dialogues at a time: each continues as soon as what it waits for arrives


def interleave(dialogues, in_flight, on_wait=lambda futures: None):
    """Run generators side by side, `in_flight` at a time; yield what each returns, as it ends.

    A generator yields what it waits for. A Future is the reply of a server, or a grade. A
    LocalRequest goes to a speaker in this process, which answers all that are waiting for it as one
    batch; the futures are under way meanwhile.
    """
    waiting_to_start = iter(dialogues)
    running, ready = 0, []  # ready: (dialogue, the reply that it continues with)
    futures, local = {}, []  # Future -> dialogue; (LocalRequest, dialogue)
    while True:
        for dialogue in itertools.islice(waiting_to_start, in_flight - running):
            ready.append((dialogue, None))
            running += 1
        if not running:
            return
        if not ready:  # all wait: compute one batch here, then take the futures that are done
            if local:
                ready, local = answer_batch(local)
            on_wait(len(futures))
            timeout = 0 if ready else None  # a computed batch waits for nobody
            done, _ = wait(futures, timeout, FIRST_COMPLETED)
            ready += [(futures.pop(future), future.result()) for future in done]
        resumed, ready = ready, []
        for dialogue, reply in resumed:
            try:
                awaited = dialogue.send(reply)
            except StopIteration as end:
                running -= 1
                yield end.value
                continue
            if isinstance(awaited, Future):
                futures[awaited] = dialogue
            else:
                local.append((awaited, dialogue))


def answer_batch(local):
    """Ask the speaker that most dialogues wait for: (dialogues with replies, requests left)."""
    groups = {}  # a batch is for one speaker, and one number of samples
    for entry in local:
        speaker, request = entry[0]
        groups.setdefault((id(speaker), request.n), []).append(entry)
    batch = max(groups.values(), key=len)
    left = [entry for group in groups.values() if group is not batch for entry in group]
    speaker = batch[0][0].speaker
    requests = [asked.request for asked, _ in batch]
    replies = speaker.speak(
        [request.messages for request in requests], requests[0].n,
        [request.seed for request in requests], [request.task for request in requests],
        [request.key for request in requests])
    dialogues = [dialogue for _, dialogue in batch]
    return list(zip(dialogues, replies, strict=True)), left


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
    store = ResumableJsonl(output, lambda row: (row["task"]["task_id"], row["sample"]), process,
                           lambda row: not row["error"])
    mine = [(task, sample) for task, sample in jobs[process.rank::process.world]
            if (task["task_id"], sample) not in store.rows]
    if mine:
        domain = DOMAINS[mine[0][0]["domain"]]
        with open_referee([task for task, _ in jobs], settings.referee) as referee:
            human = load_speaker(settings.human, "human", settings.human_settings, domain.pages)
            agent = load_speaker(settings.agent, "agent", settings.agent_settings)
            if wrap_agent:
                agent = wrap_agent(agent)
            parties = Parties(agent, human, referee, settings.rules)
            with Progress(len(jobs), store.rows.values(), process) as progress:
                dialogues = (play(task, sample, parties, progress.turn) for task, sample in mine
                             if not (agent.given_up or human.given_up))
                for episode in interleave(dialogues, settings.agent_settings.batch_size,
                                          progress.show):
                    store.append(episode | settings.notes)
                    progress.episode(episode)
            if human.given_up and not human.has_answered:
                # what has ended without a human reply must not block a corrected --human
                store.discard({(task["task_id"], sample) for task, sample in mine})
            stop_if_given_up(agent, human)
    return store.finish([(task["task_id"], sample) for task, sample in jobs])


def stop_if_given_up(*speakers):
    """End a run whose server does not answer, once all that was in flight is on disk."""
    for speaker in speakers:
        if speaker.given_up:
            raise SystemExit(f"found a server that answers no request ({speaker.given_up}),"
                             " expected one that does; start it again, then rerun the same command"
                             " to resume; or correct its address, the model's name or"
                             " OPENAI_API_KEY")


class Progress:
    """The leader's bar: episodes, and between them turns, and requests and grades in flight."""

    def __init__(self, total, episodes, process):
        self.totals, self.turns, self.in_flight = Counter(), 0, 0
        self.world = process.world
        add_outcomes(self.totals, episodes)
        self.bar = tqdm(total=total, initial=len(episodes), unit="episode", **process.bar)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.show(0)
        self.bar.close()

    def turn(self):
        self.turns += 1

    def show(self, in_flight):
        self.in_flight = in_flight
        self.draw(0)

    def episode(self, episode):
        add_outcomes(self.totals, [episode])
        self.draw(self.world)

    def draw(self, episodes):
        waiting = f", {self.in_flight} in flight" if self.in_flight else ""
        self.bar.set_postfix_str(f"{summary(self.totals)}, {counted(self.turns, 'turn')}"
                                 f"{waiting}", refresh=False)
        self.bar.update(episodes)


def add_outcomes(totals, episodes):
    """Add episodes to the counts that `summary` prints; one with an error has no outcome."""
    for episode in episodes:
        if not episode["error"]:
            totals["played"] += 1
            if episode["success"] is not None:
                totals["tested"] += 1
            if episode["success"]:
                totals["passed"] += 1
            totals["reward"] += episode["reward"]
    return totals


def summary(totals):
    """Mean success, which pages do not have, and mean reward."""
    reward = f"reward {totals['reward'] / max(1, totals['played']):.3f}"
    if not totals["tested"]:
        return reward
    return f"success {totals['passed'] / totals['tested']:.3f}, {reward}"


def marker_hint(episodes):
    """A hint if most dialogues ended without the marker. Pages do without: the last one counts."""
    last = [episode["dialogue_history"][-1] for episode in episodes
            if not episode["error"] and not DOMAINS[episode["task"]["domain"]].pages]
    unmarked = [message for message in last if ANSWER_MARKER not in message["content"]]
    if len(unmarked) <= len(last) / 2:
        return ""
    cut = sum(not message["finished"] for message in unmarked)
    return (f"Most dialogues ({len(unmarked)} of {len(last)}) ended without the marker"
            f" '{ANSWER_MARKER}', so that their last message was graded as it is. Read some with"
            " `python colbench.py show`; then name the marker in the agent's prompt, take an agent"
            " that follows instructions, or raise --max_turns or --max_new_tokens"
            f" ({cut} of these messages were cut).\n")


def main(args):
    process = join_processes()
    tasks = rollout_tasks(args, process)
    settings = rollout_settings(args, tasks, process)
    claim_rollout(args.output, vars(args), process, COST_FLAGS)
    jobs = all_jobs(tasks, args.samples_per_task)
    episodes = collect_episodes(jobs, settings, args.output, process)
    if not process.leads:
        return
    failures = [episode["error"] for episode in episodes if episode["error"]]
    outcomes = summary(add_outcomes(Counter(), episodes))
    print(f"{args.output}: {counted(len(episodes), 'episode')}, {outcomes}, {len(failures)} failed")
    print(marker_hint(episodes), end="")
    if failures:
        print(f"First failure: {failures[0]}\nGive the same command again to retry the failed"
              " ones.")
    if len(failures) == len(episodes):
        raise SystemExit("every dialogue failed; expected the agent and the human to answer: see"
                         " the first failure above")


COST_FLAGS = ("batch_size",)  # they do not change what is played


def claim_rollout(output, flags, process, cost_flags):
    """claim_output for episodes."""
    record = Path(f"{output}.run.json")
    if Path(output).exists() and not record.is_file():
        raise SystemExit(f"{output}: found a file that these scripts did not write here (its"
                         " .run.json is missing), expected a new name or the output of the same"
                         " command; choose another --output")
    tasks = flags["tasks"] if Path(flags["tasks"]).is_file() else None
    inputs = [tasks, flags["agent_prompt"], flags["human_prompt"]]
    inputs += records(flags["agent"], flags["human"], flags.get("critic"))
    claim_output(record, flags, inputs, process, cost_flags)


# -----------------------------------------------------------------------------
# Command line


def add_rollout_flags(parser):
    """The flags of a rollout, which collect.py and evaluate.py share; returns their names."""
    names = []

    def add(flag, **options):  # to the current group
        names.append(group.add_argument(flag, **options).dest)

    group = parser.add_argument_group("tasks")
    add("--tasks", help="task file, or toy:backend:train, toy:frontend:test, ...")
    add("--num_tasks", type=int,
        help=f"play only the first NUM_TASKS tasks (default: all; of a toy world {TOY_TASKS})")
    add("--skip_unsolvable", action="store_true",
        help="omit tasks that their own solution cannot solve")
    add("--seed", type=int, default=0, help="seed of all sampling")
    group = parser.add_argument_group("agent")
    add("--agent", help="model name or directory, http://host:port/v1, scripted, or scripted:NAME,"
        " a function of toy/world.py: SCRIPTED")
    add("--agent_model", help="model name to ask an agent server for")
    add("--agent_prompt", help="file with the agent's instructions (default: the"
        " checkpoint's own, or ours)")
    add("--temperature", type=float, default=1.0, help="of the agent")
    add("--max_new_tokens", type=int, default=1024, help="of one agent message")
    names.append(add_dtype_flag(group))
    group = parser.add_argument_group("human")
    add("--human", help="model name or directory (for pages: of a vision-language model),"
        " http://host:port/v1, scripted (the default in a toy world), or scripted:NAME, a function"
        " of toy/world.py: SCRIPTED, which can be yours")
    add("--human_model", help="model name to ask a human server for")
    add("--human_prompt", help="file with the human's instructions, with {hidden_information} and"
        " other text fields of the task in braces (default: ours)")
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
        help="fixed: our grading; official: that of the official code, with its quirks")
    add("--require_protection", action="store_true",
        help="refuse to run if the sandbox lacks a protection")
    add("--clip", help="reward of pages: CLIP model or none (default:"
        " clip-vit-base-patch32; toy: none)")
    add("--clip_crop", choices=("center", "pad"), default="center",
        help="what CLIP sees of tall pages: the middle square (official code), or all of it")
    add("--batch_size", type=int, default=64,
        help="dialogues played at the same time by each process")
    return names


def check_rollout_flags(parser, args):
    for name in ("tasks", "agent"):
        if not getattr(args, name):
            raise SystemExit(f"found no --{name}; expected one (see --help)")
    require_at_least(1, args, "num_tasks", "max_new_tokens", "human_max_new_tokens", "max_turns",
                     "reply_chars", "batch_size")
    require_at_least(0, args, "temperature", "human_temperature", "seed")
    refuse_party_flags(parser, args, args.human or "scripted")
    if args.num_tasks is None and args.tasks.startswith("toy:"):
        args.num_tasks = TOY_TASKS  # in the record, so that a rerun never shrinks the output


def rollout_tasks(args, process):
    """The tasks of --tasks, without those that --skip_unsolvable omits."""
    tasks = read_tasks(args.tasks, args.num_tasks)
    unsolvable = unsolvable_tasks(tasks, args, process)
    if not unsolvable:
        return tasks
    if process.leads:
        lines = ", ".join(str(index + 1) for index in unsolvable[:5])
        if len(unsolvable) > 5:
            lines += ", ..."
        if args.skip_unsolvable:
            what = "are omitted"
        else:
            what = "are played all the same (--skip_unsolvable omits them)"
        print(f"{len(unsolvable)} of {len(tasks)} tasks cannot be solved by their own solution and"
              f" {what}: {args.tasks}, line {lines}; `python colbench.py check {args.tasks}` says"
              " why", file=sys.stderr)
    if not args.skip_unsolvable:
        return tasks
    solvable = [task for index, task in enumerate(tasks) if index not in unsolvable]
    if not solvable:
        raise SystemExit(f"{args.tasks}: found no task that its own solution solves, expected at"
                         " least one; mend the tests or the solutions")
    return solvable


def unsolvable_tasks(tasks, args, process):
    """The indices of the tasks that have a test which their own solution does not pass.

    The leader finds them for all ranks, which must not disagree on what is played.
    """
    check = one_domain(tasks).check
    if args.skip_unsolvable and not check:
        refuse_flag(args, "skip_unsolvable", "for tasks without tests")
    solvable_by_construction = "toy" in tasks[0] and not args.skip_unsolvable
    if solvable_by_construction or not check:
        return []
    found = []
    if process.leads:
        rows, _ = check(tasks, args.judge, args.require_protection)
        # a task whose solution is slow is kept: a faster answer passes, and times vary
        found = sorted({index for index, _, reason in rows if reason != TOO_SLOW})
    return process.from_leader(found)


def rollout_settings(args, tasks, process):
    """The flags as records; everything that can fail without loading a model fails here."""
    human_spec = args.human or "scripted"
    check_spec(args.agent)
    check_spec(human_spec)
    checkpoint_prompt = Path(args.agent, "agent_prompt.txt")  # what a checkpoint was trained with
    if args.agent_prompt is None and checkpoint_prompt.is_file():
        agent_prompt = read_prompt(checkpoint_prompt)
    else:
        agent_prompt = read_prompt(args.agent_prompt)
    human_prompt = read_prompt(args.human_prompt)
    if human_prompt is not None and not args.uninformed_human:
        check_human_prompt(args.human_prompt, human_prompt, tasks[0])
    if not args.human and not all("toy" in task for task in tasks):
        raise SystemExit("found no --human, which these tasks need; expected a server or a model"
                         " (or scripted, which only says that it does not know, for a dry run)")
    agent = SpeakerSettings(args.agent_model, args.temperature, args.max_new_tokens,
                            args.batch_size, process.device, args.dtype)
    human = SpeakerSettings(args.human_model, args.human_temperature, args.human_max_new_tokens,
                            args.batch_size, process.device, args.dtype)
    domain = DOMAINS[tasks[0]["domain"]]
    refuse_other_domains(args, domain)
    if agent_prompt is None:
        agent_prompt = agent_prompt_of(tasks[0], None, args.max_turns)
    if human_prompt is None:
        human_prompt = domain.human_prompt
    rules = Rules(agent_prompt, human_prompt, args.max_turns,
                  args.reply_chars or domain.reply_chars, args.seed)
    workers = max(1, (os.cpu_count() or 1) // process.world)
    return RolloutSettings(
        agent=args.agent, agent_settings=agent,
        human=human_spec, human_settings=human,
        rules=rules,
        referee=RefereeSettings(args.judge, args.require_protection, workers, args.clip,
                                args.clip_crop, process.device),
        notes={"agent": args.agent, "human": args.human_model or human_spec})


def refuse_party_flags(parser, args, human_spec):
    """Refuse model names without a server, and sampling flags of scripted parties."""
    for name, spec in (("agent_model", args.agent), ("human_model", human_spec)):
        if not is_server(spec):
            refuse_ignored(parser, args, [name], f"because {spec} is not the address of a server")
    if is_scripted(args.agent):
        refuse_ignored(parser, args, ["temperature", "max_new_tokens"], "by a scripted agent")
    if is_scripted(human_spec):
        refuse_ignored(parser, args, ["human_prompt", "human_temperature", "human_max_new_tokens"],
                       "by a scripted human")
    if args.human_prompt is None:
        refuse_ignored(parser, args, ["uninformed_human"], "without --human_prompt")


def refuse_other_domains(args, domain):
    """Flags of the judge that this domain ignores, such as --clip for functions."""
    names = {name for other in DOMAINS.values() for name in other.flags}
    for name in sorted(names - set(domain.flags)):
        if getattr(args, name) != RefereeSettings._field_defaults[name]:
            refuse_flag(args, name, "for these tasks")


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
    check_rollout_flags(parser, args)
    require_at_least(1, args, "samples_per_task")
    return args


if __name__ == "__main__":
    launch(main, parse_args())
