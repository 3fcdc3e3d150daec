"""Agent, human and judge as collect.py's flags name them: checked, told what to do, opened."""

import contextlib
import re
from pathlib import Path

from colbench import DOMAINS, END_OF_THOUGHTS, THOUGHTS, agent_prompt_of, encode_dialogue
from formats.read import one_domain, read_tasks
from runtime.files import read_prompt
from runtime.flags import refuse_flag
from runtime.names import check_spec, is_scripted, is_server
from runtime.record import is_critic
from speakers import load_speaker
from speakers.interface import SpeakerSettings
from speakers.pool import JudgeElsewhere
from toy.world import toy_tasks

OF_THE_DIALOGUE = ("message", "dialogue_history")  # placeholders that stand for no field of a task


def refuse_unused(parser, args, *others):
    """Refuse flags that do nothing for the speakers that --agent and --human name, and `others`."""
    human = args.human or "scripted"
    no_model = all(is_server(spec) or is_scripted(spec) for spec in (args.agent, human, *others))
    no_effect = [  # (when, flags, reason)
        (not is_server(args.agent), ["agent_model"],
         f"because {args.agent} is not the address of a server"),
        (not is_server(human), ["human_model"], "because --human is not the address of a server"),
        (is_scripted(args.agent), ["temperature", "max_new_tokens"], "by a scripted agent"),
        (is_scripted(human), ["human_prompt", "human_temperature", "human_max_new_tokens"],
         "by a scripted human"),
        (no_model, ["dtype"], "where no model computes in this process"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            parser.refuse_ignored(args, names, reason)


def read_tasks_and_prompts(args, process):
    """(tasks, their domain, (the agent's instructions, the human's), the files that were read).

    No model is loaded yet. Sets --human, --agent_prompt and --clip where they were omitted, and
    --num_tasks to the number of tasks found.
    """
    if args.tasks.startswith("toy:"):
        tasks, files = toy_tasks(args.tasks, args.num_tasks), []
    else:
        tasks, files = read_tasks(args.tasks, args.num_tasks), [args.tasks]
    check_spec(args.agent)
    check_spec(args.human or "scripted")
    domain = one_domain(tasks)
    fill_in_flags(args, tasks, domain, process.say)
    refuse_unplayable(args, domain)
    if is_critic(args.agent):
        process.say(f"{args.agent}: found a critic, which was trained to judge turns;"
                    " as the agent, usually a policy plays, or the critic's --model")
    prompts = read_prompts(args, tasks, domain, process.say)
    return tasks, domain, prompts, [*files, args.agent_prompt, args.human_prompt]


def fill_in_flags(args, tasks, domain, say):
    """Set the flags that the tasks and the agent's checkpoint decide, for the record, too."""
    if len(tasks) < (args.num_tasks or 0):
        say(f"{args.tasks}: {len(tasks)} tasks, fewer than --num_tasks {args.num_tasks}")
    args.num_tasks = len(tasks)  # a rerun cannot shrink the output
    trained_with = Path(args.agent, "agent_prompt.txt")  # in a checkpoint
    if args.agent_prompt is None and trained_with.is_file():
        args.agent_prompt = str(trained_with)  # another text must not resume this output
    if all("toy" in task for task in tasks):  # also in a file
        args.human = args.human or "scripted"
        if domain.pages:
            args.clip = args.clip or "none"
    elif args.human == "scripted":
        say("--human scripted answers every question with 'I do not know', so this is a dry run"
            " of the stages")


def refuse_unplayable(args, domain):
    """Refuse tasks that nobody can judge or answer, and flags that do nothing for them."""
    if domain.logged:
        raise SystemExit(f"{args.tasks}: found tasks of your own logs, which nobody can judge,"
                         " expected tasks to play; --states samples candidates in logged episodes")
    for other in DOMAINS.values():
        for name, default in other.flags.items():
            # a domain of a fork may have a flag that this parser lacks
            if name not in domain.flags and getattr(args, name, default) != default:
                refuse_flag(args, name, "for these tasks")
    if args.human is None:
        raise SystemExit("found no --human, which these tasks need; expected a server or a model"
                         " (or scripted, which only says that it does not know, for a dry run)")


def read_prompts(args, tasks, domain, say):
    """(the agent's instructions, the human's): those in the files that flags name, or ours."""
    human_prompt = read_prompt(args.human_prompt)
    if human_prompt is None:
        human_prompt = domain.human_prompt
    for name in re.findall(r"\{(\w+)\}", human_prompt):
        if name not in OF_THE_DIALOGUE and not any(name in task for task in tasks):
            say(f"{args.human_prompt}: {{{name}}} stays as it is, since no task has such a field")
    # the human of pages sees the solution as a picture
    if "{hidden_information}" not in human_prompt and not domain.pages:
        raise SystemExit(f"{args.human_prompt}: found a human prompt without {{hidden_information}}"
                         ", expected it, since it tells the human what to want; add it")
    agent_prompt = read_prompt(args.agent_prompt)
    if agent_prompt is None:
        agent_prompt = agent_prompt_of(tasks[0], None, args.max_turns)
    for field in ("hidden_information", "problem_description"):
        if args.agent_prompt and "{" + field + "}" in agent_prompt:
            raise SystemExit(f"{args.agent_prompt}: found an agent prompt with {{{field}}},"
                             " expected one without it, since only {max_turns} is filled in; give"
                             " the human's prompt as --human_prompt")
    return agent_prompt, human_prompt


def open_agent(args, process):
    agent = load_speaker(args.agent, "agent", SpeakerSettings(
        model_name=args.agent_model, temperature=args.temperature,
        max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, device=process.device,
        dtype=args.dtype))
    if agent.tokenizer is not None:
        say_if_untrainable(agent.tokenizer, process.say)
    return agent


def say_if_untrainable(tokenizer, say):
    """Say, before hours of play, if training will refuse what this model plays."""
    for text, which in (("y", ""), (f"{THOUGHTS}\nx\n{END_OF_THOUGHTS}\n\ny", " with thoughts"),
                        ("", " with an empty message")):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                    {"role": "assistant", "content": text}, {"role": "user", "content": "v"}]
        messages += messages[2:]  # some templates keep the thoughts of the last turn alone
        try:
            encode_dialogue(tokenizer, messages, generation_prompt=True)
        except SystemExit as reason:
            say(f"{reason}. Training will refuse this model's dialogues{which}")
            return


def players(args, agent, human, store):
    """Who plays, as episodes say it: {"agent": ..., "human": ...}, a server by its model's name.

    A server whose model is another one than when the run began is refused.
    """
    names = {}
    for role, speaker in (("agent", agent), ("human", human)):
        spec = getattr(args, role).rstrip("/")  # as the record of the run has it
        name = getattr(speaker, "model_name", None) or spec
        # an address stands where the server listed no model then
        others = {row[role] for row in store.rows.values() if not is_server(row[role])} - {name}
        if name != spec and others:
            raise SystemExit(f"{spec}: found the model {name}, expected {min(others)}, which has"
                             f" played the episodes in {args.output} so far; serve it again, or"
                             " choose another --output")
        names[role] = name
    return names


@contextlib.contextmanager
def open_parties(args, process, domain, store):
    """(agent, human, judge, played_by) for the dialogues that `store` lacks.

    `played_by` says in each episode who they are. While the judge grades a dialogue, models answer
    others (JudgeElsewhere).
    """
    flags = {flag: getattr(args, flag) for flag in domain.flags}
    with domain.open_judge(**flags) as judge:
        # --require_protection changes no grade, so it is left out
        judge_flags = " ".join(f"--{flag} {value}" for flag, value in flags.items()
                               if flag != "require_protection" and value is not None)
        settings = SpeakerSettings(
            model_name=args.human_model, temperature=args.human_temperature,
            max_new_tokens=args.human_max_new_tokens, batch_size=args.batch_size,
            device=process.device, dtype=args.dtype)
        human = load_speaker(args.human, "human", settings, pictures=domain.pages)
        agent = open_agent(args, process)
        played_by = players(args, agent, human, store) | {"judge": judge_flags}
        yield agent, human, JudgeElsewhere(judge), played_by
