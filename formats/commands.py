"""The commands of colbench.py: check, import, show, websight."""

import argparse
import ast
import functools
import re

from tqdm import tqdm

from formats.logs import import_command
from formats.read import read_tasks
from judge.pages import official_addresses
from judge.sandbox import REQUIRED, SECOND_LINES, check_solutions
from runtime.files import expect, read_jsonl, write_new
from runtime.processes import launch
from runtime.text import counted, harmless

TRAIN_ROWS = 10_000  # the paper trains on the first 10,000 WebSight rows, tests on later ones


def main(description, argv=None):
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="grade every solution against itself; exit status 1"
                                " if a task cannot be solved in full")
    check.add_argument("tasks", help="task file")
    check.add_argument("--judge", choices=("fixed", "official"), default="fixed",
                       help="grading semantics")
    check.add_argument("--require_protection", action="store_true",
                       help="refuse if the sandbox lacks one of its four main protections")
    load = commands.add_parser("import", help="make episodes of official trajectories or of logs")
    load.add_argument("file", help="JSONL: the official trajectories, or one object a line with"
                      " `messages` and `reward`")
    load.add_argument("--output", required=True, help="EPISODES.jsonl to write")
    load.add_argument("--agent_prompt", help="file with the instructions that the agent had, where"
                      " the file omits them (default: ours; of logs none)")
    load.add_argument("--judge", choices=("fixed", "official"), default="fixed",
                      help="how official answers without a reward are graded")
    show = commands.add_parser("show", help="print dialogues to read")
    show.add_argument("episodes", help="file of episodes")
    show.add_argument("task", nargs="?", help="task_id of the one task to show, or its number from"
                      " 1 on (default: all)")
    convert = commands.add_parser("websight", help="turn WebSight rows into frontend tasks")
    convert.add_argument("rows", help="JSONL with llm_generated_idea and text")
    convert.add_argument("train", help="task file for the first 10,000 rows")
    convert.add_argument("test", help="task file for the rows after them")
    launch(run_command, parser.parse_args(argv), advice="Rerun the same command.")


def run_command(args):
    if args.command == "check":
        check_tasks(args.tasks, args.judge, args.require_protection)
    elif args.command == "import":
        import_command(args)
    elif args.command == "show":
        from report.show import show_command  # late: report/ stands above
        show_command(args)
    else:
        websight(args.rows, args.train, args.test)


def check_tasks(path, profile, require_protection):
    """Print the tests of a file that nobody can pass; if there are any, end with status 1."""
    tasks = read_tasks(path)
    others = {task["domain"] for task in tasks} - {"backend"}
    if others:
        raise SystemExit(f"{path}: found {' and '.join(sorted(others))} tasks, expected backend"
                         " tasks, whose tests can be checked")
    watch = functools.partial(tqdm, total=len(tasks), unit="task", desc="solutions")
    # one failure for each test that nobody can pass: (index of its task, its name, why)
    failures, protections = check_solutions(tasks, profile, require_protection, watch)
    print_failures(path, tasks, failures)
    broken = {index for index, _, _ in failures}
    solvable = len(tasks) - len(broken)
    print(f"{solvable} of {len(tasks)} tasks can be solved in full (judge {profile})")
    print_protections(protections)
    if failures and len(failures) == sum(len(task["test_cases"]) for task in tasks):
        raise SystemExit("found no test that can be passed, expected at least one: check the task"
                         " file.")
    if broken:
        raise SystemExit(1)  # the lines above say why


def print_failures(path, tasks, failures):
    """A line for each task and reason, with the names of all tests that fail for it."""
    lines = [where for where, _ in read_jsonl(path)]
    tests = {}  # (index of the task, what is wrong) -> names of its tests
    for index, name, reason in failures:
        wrong = reason + solution_advice(tasks[index], name, reason)
        tests.setdefault((index, wrong), []).append(harmless(name))
    for (index, wrong), names in tests.items():
        print(f"{lines[index]}, {', '.join(names)}: {wrong}")


def print_protections(protections):
    """A line for each protection of the sandbox. protections: name -> whether it is active."""
    for name, active in protections.items():
        missing = "MISSING"
        if name in SECOND_LINES and all(protections[first] for first in REQUIRED):
            missing += " (a second line of defence; answers are confined without it, too)"
        print(f"protection {name:14s} {'active' if active else missing}")


def solution_advice(task, name, reason):
    """What is wrong with a test that the task's own solution does not pass; "" if that is open."""
    if reason == "the value equals nothing":
        return (" (as NaN does, a generator, an object of most classes, such as a DataFrame, or a"
                " very large or deep value)")
    test = task["test_cases"][name]
    if re.match(r"\s*assert\b", test):
        return (" (a test is a call such as f(1), not `assert f(1) == 2`: the judge compares its"
                " value with the solution's)")
    try:
        ast.parse(test.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last three: odd or deep
        return f" (the test is no Python expression: {harmless(test)})"
    if reason == "the solution raised ModuleNotFoundError":
        return " (the judge has the modules of this Python environment and no others)"
    if "```" in task["ground_truth"] and reason == "the solution raised SyntaxError":
        return " (a solution is plain code, without ``` around it)"
    return ""


def websight(rows_path, train_path, test_path):
    """WebSight rows as tasks: the first 10,000 go to train_path, those after them to test_path."""
    tasks = []
    for where, row in read_jsonl(rows_path):
        page = official_addresses(expect(row, "text", str, where))
        request = expect(row, "llm_generated_idea", str, where)
        tasks.append({"problem_description": request, "domain": "frontend", "ground_truth": page,
                      "hidden_information": page})
    for path, part in (train_path, tasks[:TRAIN_ROWS]), (test_path, tasks[TRAIN_ROWS:]):
        write_new(path, part)
        print(f"{path}: {counted(len(part), 'task')}")
