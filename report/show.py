"""Dialogues to read on a terminal: `colbench.py show`."""

import difflib
import shutil
import textwrap

from colbench import DOMAINS
from formats.read import group_by_task, read_episodes
from runtime.text import counted, harmless


def show_command(args):
    """Print the dialogues of a file task by task, or of one task; the solution comes first."""
    groups = group_by_task(read_episodes(args.episodes))
    for task_id in chosen_tasks(groups, args):
        print_part("task", task_id)
        solution = None
        for episode in groups[task_id]:
            if episode["task"]["ground_truth"] != solution:  # a log may have several for a task
                solution = episode["task"]["ground_truth"]
                print_part("solution", solution)
            print_episode(episode)
        print()


def chosen_tasks(groups, args):
    """The task_ids to show: all of them, or the one that the command names."""
    ids = list(groups)
    if args.task is None:
        return ids
    if args.task in groups:
        return [args.task]
    if args.task.isdecimal() and 1 <= int(args.task) <= len(ids):
        return [ids[int(args.task) - 1]]
    close = difflib.get_close_matches(args.task, ids, 3, cutoff=0)
    raise SystemExit(f"{args.episodes}: found no task {args.task!r}, expected a number from 1 to"
                     f" {len(ids)}, or a task_id such as {', '.join(map(harmless, close))}")


def print_episode(episode):
    """The outcome, each message with what is known of it, the tests."""
    print()
    print_part("episode", outcome_line(episode))
    turn = 0
    for message in episode["dialogue_history"]:
        text = message.get("output") or message["content"]
        if message["role"] == "assistant":
            turn += 1
            print_part(f"agent {turn}", text)
            if message.get("finished") is False:
                print_part("", "[cut at the token limit]")
        else:
            role = " ".join(message["role"].split())  # of a log: any text
            print_part("human" if role == "user" else role, text)
    if episode["reasons"]:
        print_part("tests", counted_reasons(episode["reasons"]))


def outcome_line(episode):
    """Such as "sample 0 of base: 2 turns, not solved, reward 0.500"."""
    outcome = f"sample {episode['sample']}"
    if episode["agent"]:
        outcome += f" of {episode['agent']}"
    outcome += f": {counted(episode['turns'], 'turn')}, "
    if episode["error"]:
        return f"{outcome}stopped by an error: {episode['error']}"
    if episode["success"] is not None:
        outcome += "solved, " if episode["success"] else "not solved, "
    digits = "g" if DOMAINS[episode["task"]["domain"]].logged else ".3f"  # a log's may be tiny
    return f"{outcome}reward {episode['reward']:{digits}}"


def counted_reasons(reasons):
    """Such as "7 passed; 2 wrong (test3, test5); 1 timed out (test9)"."""
    tests_of = {}
    for test, reason in reasons.items():
        tests_of.setdefault(reason, []).append(test)
    parts = []
    for reason, tests in tests_of.items():
        part = f"{len(tests)} {reason}"
        if len(tests_of) > 1 and reason != "passed":
            part += f" ({', '.join(tests)})"
        parts.append(part)
    return "; ".join(parts)


def print_part(label, text):
    """Print a text beside its label; no line of the text begins where labels do."""
    columns = max(40, min(100, shutil.get_terminal_size().columns))
    for line in harmless(text).split("\n"):
        for part in textwrap.wrap(line, columns - 10, break_on_hyphens=False) or [""]:
            print(f"{harmless(label):9s} {part}".rstrip())
            label = ""
