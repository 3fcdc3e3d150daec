r"""Collect episodes: agent and simulated human talk, and a judge grades the answer (section 3).

  1. Each task is played `--samples_per_task` times.                             play
  2. `--batch_size` dialogues run at a time, a thread for each; a local model
     answers all that wait for it as one batch.                                  speakers/pool.py
  3. With `--states EPISODES`, nothing is played: in each state chosen from these
     episodes, `--num_candidates` candidates are sampled, for a critic to rank.  candidates

    python collect.py --tasks toy:backend:train --num_tasks 500 --samples_per_task 6 \
        --agent toy/base --output episodes.jsonl
    torchrun --nproc_per_node 8 collect.py --tasks train.jsonl \
        --agent meta-llama/Llama-3.1-8B-Instruct --human http://localhost:8000/v1 \
        --human_model meta-llama/Llama-3.1-70B-Instruct --output episodes.jsonl
    python collect.py --states episodes.jsonl --agent toy/base --output candidates.jsonl

Reads tasks and writes episodes, one dialogue a line:

    {"task": {...}, "sample": 0, "dialogue_history": [{"role": "user", "content": "..."}, ...],
     "answer": "def price ...", "reward": 0.5, "success": false, "turns": 3, "error": null, ...}

With --states, reads episodes and writes candidates, one state a line:

    {"task": {...}, "sample": 0, "turn": 2, "messages": [...], "agent_prompt": "You help ...",
     "max_turns": 10, "candidates": ["Which unit?", ...], "finished": [true, ...], "error": null}

OUTPUT.run.json, beside the output, records the command. After a kill, give the same command again;
lines with an `error` are retried as well. A larger --num_tasks or --samples_per_task extends the
output.

To change                          edit
    the loop of a dialogue         play
    what is sampled in a state     candidates
    which states are used          choose_states
    what the agent reads           agent_messages in colbench.py; the trainers read it, too
    what the human reads           human_view in DOMAINS of colbench.py; `view` in play for scripts
    rewards                        open_judge in DOMAINS of colbench.py
    who speaks                     a subclass of Speaker (speakers/interface.py), load_speaker
variants/best_of_n.py shows how to put something between agent and dialogue. To hide messages from
the human, leave them out of both branches of `view` in play.

Differences from the paper: prompts are in our own words (`--agent_prompt`, `--human_prompt` take
the official ones). From the official code: answers are graded without its grader's quirks (`--judge
official` has them); the human sees the dialogue as a chat with the roles swapped; in page tasks,
the agent also sees its earlier plans, which stand before "OUTPUT:". docs/differences.md has the
rest.
"""

import itertools
import random
import typing

from colbench import (
    DOMAINS, MAX_TURNS, agent_messages, agent_prompt_of, agent_view, split_message)
from formats.outcome import outcome_of
from formats.read import group_by_task, load_episodes, state_key
from runtime.flags import FlagParser
from runtime.processes import join_processes, launch
from runtime.record import open_rows
from runtime.seeds import derive_seed
from speakers.fill import fill, print_summary, show_bug
from speakers.interface import Request, SpeakerError
from speakers.roles import open_agent, open_parties, read_tasks_and_prompts, refuse_unused

# -----------------------------------------------------------------------------
# The game


class Rules(typing.NamedTuple):
    agent_prompt: str  # may hold {max_turns}; "" means no instructions
    human_prompt: str  # may hold text fields of the task
    max_turns: int
    reply_chars: int  # human replies are cut to this length
    seed: int


def play(task, sample, agent, human, judge, rules):
    """One dialogue, from the request to the reward; returns the episode.

    Sampling is seeded by task, sample and call, so dialogues do not affect each other. An error
    ends only this dialogue, and is noted in its episode.
    """
    domain = DOMAINS[task["domain"]]
    history = [{"role": "user", "content": task["problem_description"]}]
    prompt = agent_prompt_of(task, rules.agent_prompt, rules.max_turns)
    answer, grade, error = None, None, None
    key = (task["task_id"], sample)
    call_numbers = itertools.count(1)  # each call has a seed of its own

    def ask(speaker, messages):
        seed = derive_seed(rules.seed, *key, next(call_numbers))
        # agent and human models read the messages alone; `task` is for scripts and the critic of
        # best of N, and `key` lets a model keep its cache
        return speaker.reply(Request(messages, n=1, seed=seed, task=task, key=key))[0]

    try:
        for turn in range(1, rules.max_turns + 1):
            party = "agent"  # who has to speak, for an error's message
            utterance = ask(agent, agent_messages(history, prompt))
            # content: what the human reads; answer: None unless this message gives one
            content, answer = split_message(
                task, utterance.text, last_turn=turn == rules.max_turns)
            history.append({"role": "assistant", "content": content,
                            "output": utterance.text,  # all that the agent wrote, with its thoughts
                            "finished": utterance.finished})
            if answer is not None:
                break
            party = "human"
            if human.reads_history:  # a script
                view = history
            else:
                view = domain.human_view(task, history, rules.human_prompt, judge)
            reply = ask(human, view).spoken[:rules.reply_chars]  # without a model's thoughts
            history.append({"role": "user", "content": reply})
        party = "judge"  # which may ask a model, too
        grade = judge.grade(task, domain.graded_text(answer, history))
    except SpeakerError as reason:
        error = f"{party}: {reason}"
    except Exception as bug:  # one odd dialogue must not end hours of play
        error = f"{type(bug).__name__}: {bug}"
        show_bug()

    return {
        "task": task, "sample": sample, "dialogue_history": history, "answer": answer,
        **outcome_of(task, history, grade),  # reward, success, reasons, leak
        "turns": len(history) // 2, "max_turns": rules.max_turns, "seed": rules.seed,
        "agent_prompt": rules.agent_prompt, "error": error,
    }


# -----------------------------------------------------------------------------
# Candidates in the states of episodes


def states_of(episodes):
    """Every agent turn, counted from 0, as a state: what the agent saw before it."""
    for episode in episodes:
        messages, _ = agent_view(episode)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, index in enumerate(turns):
            yield {"task": episode["task"], "sample": episode["sample"], "turn": turn,
                   "messages": messages[:index],
                   "agent_prompt": episode["agent_prompt"], "max_turns": episode["max_turns"]}


def choose_states(episodes, fraction, states_per_task, seed):
    """The states of a share of the tasks, at most `states_per_task` of each.

    At the same cost, fewer states of each task leave room for more tasks.
    """
    task_ids = sorted(group_by_task(episodes))
    random.Random(derive_seed(seed, "fraction")).shuffle(task_ids)
    used = set(task_ids[:max(1, round(fraction * len(task_ids)))])
    states = list(states_of(
        episode for episode in episodes if episode["task"]["task_id"] in used))
    if not states_per_task:
        return states
    drawn = []
    for task_id, group in group_by_task(states).items():
        rng = random.Random(derive_seed(seed, "states", task_id))
        drawn += rng.sample(group, min(states_per_task, len(group)))
    return drawn


def candidates(state, agent, n, seed):
    """The state with n candidates sampled from the agent, or with the error that prevented them."""
    # "candidates" keeps this seed apart from the dialogue's
    seed = derive_seed(seed, "candidates", *state_key(state))
    try:
        utterances = agent.reply(Request(state["messages"], n=n, seed=seed, task=state["task"]))
    except SpeakerError as reason:
        return state | {"error": str(reason)}
    return state | {"candidates": [utterance.text for utterance in utterances],
                    "finished": [utterance.finished for utterance in utterances], "error": None}


# -----------------------------------------------------------------------------
# The run


def episode_key(episode):
    return episode["task"]["task_id"], episode["sample"]


def plan_episodes(args, process):
    """What to play: (task id and sample -> task, the Rules, the Domain, the files that were read).

    Flags that the tasks decide, such as --num_tasks, are set in `args`, for the record of the run.
    """
    tasks, domain, prompts, inputs = read_tasks_and_prompts(args, process)
    rules = Rules(*prompts, args.max_turns, args.reply_chars or domain.reply_chars, args.seed)
    jobs = {(task["task_id"], sample): task
            for sample in range(args.samples_per_task) for task in tasks}
    return jobs, rules, domain, inputs


def collect_episodes(args, process):
    """Play what `args.output` lacks; returns all episodes, on the leader."""
    jobs, rules, domain, inputs = plan_episodes(args, process)
    # what an earlier run of this command has finished; another command's output is refused
    store = open_rows(args.output, vars(args), inputs, process, episode_key,
                      models=(args.agent, args.human))
    if store.missing(jobs):
        with open_parties(args, process, domain, store) as (agent, human, judge, played_by):
            def work(key):
                _, sample = key
                return play(jobs[key], sample, agent, human, judge, rules) | played_by

            # no further dialogue starts once one of the three has given up (a server that is down)
            fill(store, jobs, work, (agent, human, judge), in_flight=args.batch_size)
    return store.finish(jobs)


def collect_states(args, process):
    """Sample what `args.output` lacks; returns all states, on the leader."""
    episodes, _ = load_episodes(args.states)
    states = choose_states(episodes, args.states_fraction, args.states_per_task, args.seed)
    jobs = {state_key(state): state for state in states}
    store = open_rows(args.output, vars(args), args.states, process, state_key,
                      models=(args.agent,))
    if store.missing(jobs):
        agent = open_agent(args, process)
        # how many states: enough for several batches of a local model, which sorts them by length
        in_flight = max(1, args.batch_size * agent.batches_at_once // args.num_candidates)

        def work(key):
            return candidates(jobs[key], agent, args.num_candidates, args.seed)

        fill(store, jobs, work, (agent,), in_flight)
    return store.finish(jobs)


def main(args):
    process = join_processes()
    if args.states:
        rows = collect_states(args, process)
    else:
        rows = collect_episodes(args, process)
    if process.leads:
        print_summary(rows, args)


# -----------------------------------------------------------------------------
# Command line


def collect_parser(description):
    """The parser of this script; variants/best_of_n.py adds its flags."""
    parser = FlagParser(description)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", help="tasks to play: a file, or toy:backend:train,"
                      " toy:frontend:test, ...")
    what.add_argument("--states", nargs="+", action="extend", default=[],
                      help="episode files; candidates are sampled for their agent turns")
    parser.add_argument("--output", required=True,
                        help="file to write: episodes, or candidates with --states")
    parser.add_argument("--num_tasks", type=int, least=1, needs="tasks",
                        help="only the first NUM_TASKS tasks (default: all; of an embedded world"
                        " 1,000)")
    parser.add_argument("--samples_per_task", type=int, least=1, needs="tasks", default=3,
                        help="episodes of each task")
    parser.add_argument("--states_fraction", type=float, above=0, most=1, needs="states",
                        default=0.1, help="share of the tasks that give states")
    parser.add_argument("--states_per_task", type=int, least=1, needs="states",
                        help="draw at most this many states of each task (default: all)")
    parser.add_argument("--num_candidates", type=int, least=1, needs="states", default=16,
                        help="candidates sampled in each state")
    parser.add_argument("--agent", required=True,
                        help="model name or directory, http://host:port/v1, scripted, or"
                        " scripted:NAME with a NAME of SCRIPTED in toy/world.py")
    parser.add_argument("--agent_model", help="name of the agent's model on a server")
    parser.add_argument("--agent_prompt", needs="tasks",
                        help="file with the agent's instructions; {max_turns} is filled in"
                        " (default: those in its checkpoint, or the domain's own)")
    parser.add_argument("--temperature", type=float, least=0, default=1.0,
                        help="sampling temperature of the agent")
    parser.add_argument("--max_new_tokens", type=int, least=1, default=1024,
                        help="token limit of one agent message")
    parser.add_argument("--human", needs="tasks",
                        help="as --agent; for pages, a vision-language model (default in an"
                        " embedded world: scripted)")
    parser.add_argument("--human_model", needs="tasks",
                        help="name of the human's model on a server")
    parser.add_argument("--human_prompt", needs="tasks",
                        help="file with the human's instructions; {hidden_information},"
                        " {problem_description} and other text fields of the task are filled in;"
                        " without {problem_description}, the human of a backend task does not see"
                        " the request (default: the domain's own)")
    parser.add_argument("--human_temperature", type=float, least=0, needs="tasks", default=0.0,
                        help="sampling temperature of the human")
    parser.add_argument("--human_max_new_tokens", type=int, least=1, needs="tasks", default=1024,
                        help="token limit of one human message, its thoughts included")
    parser.add_argument("--max_turns", type=int, least=1, needs="tasks", default=MAX_TURNS,
                        help="maximum number of agent turns in a dialogue")
    parser.add_argument("--reply_chars", type=int, least=1, needs="tasks",
                        help="human replies are cut to this many characters (default: 400"
                        " backend, 1000 frontend)")
    parser.add_argument("--judge", needs="tasks", choices=("fixed", "official"), default="fixed",
                        help="fixed: our grading; official: that of the official code, with its"
                        " quirks")
    parser.add_argument("--require_protection", needs="tasks", action="store_true",
                        help="refuse to run if the sandbox lacks one of its four main protections")
    parser.add_argument("--clip", needs="tasks",
                        help="reward of pages: CLIP model, or none (default:"
                        " openai/clip-vit-base-patch32; in an embedded world: none)")
    parser.add_argument("--batch_size", type=int, least=1, default=64,
                        help="dialogues (with --states: candidates) that each process works on at"
                        " a time")
    parser.add_dtype_flag()
    parser.add_argument("--seed", type=int, least=0, default=0, help="seed of all sampling")
    return parser


def parse_args(argv=None):
    parser = collect_parser(__doc__)
    args = parser.parse_args(argv)
    refuse_unused(parser, args)
    return args


if __name__ == "__main__":
    launch(main, parse_args())
