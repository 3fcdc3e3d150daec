"""`colbench.py check`: tasks that their own solutions cannot solve.

It prints the line of each such task, the tests that nobody can pass, the reason and, where that is
known, what to mend; then which protections the sandbox has on this machine.
"""

import ast
import re

from formats.read import read_tasks
from judge.sandbox import SECOND_LINES, check_solutions
from runtime.files import read_jsonl
from runtime.text import harmless


def check_tasks(path, profile, require_protection):
    """Print the table for a file of tasks; return whether all can be solved in full."""
    tasks = read_tasks(path)
    others = {task["domain"] for task in tasks} - {"backend"}
    if others:
        raise SystemExit(f"{path}: found {' and '.join(sorted(others))} tasks, expected backend"
                         " tasks, whose tests can be checked")
    rows, status = check_solutions(tasks, profile, require_protection)
    lines = [where for where, _ in read_jsonl(path)]
    tests = {}  # (index of the task, what is wrong) -> names of its tests
    for index, name, reason in rows:
        wrong = reason + solution_advice(tasks[index], name, reason)
        tests.setdefault((index, wrong), []).append(harmless(name))
    for (index, wrong), names in tests.items():
        print(f"{lines[index]}, {', '.join(names)}: {wrong}")
    broken = {index for index, _, _ in rows}
    solvable = len(tasks) - len(broken)
    print(f"{solvable} of {len(tasks)} tasks can be solved in full (judge {profile})")
    for name, active in status.items():
        missing = "MISSING"
        if name in SECOND_LINES:
            missing += " (a second line of defence; answers are confined without it, too)"
        print(f"protection {name:14s} {'active' if active else missing}")
    if rows and len(rows) == sum(len(task["test_cases"]) for task in tasks):
        raise SystemExit("found no test that can be passed, expected at least one: check the task"
                         " file.")
    return not broken


def solution_advice(task, name, reason):
    """What is wrong with a test that the task's own solution does not pass; "" if that is open."""
    if reason == "the value equals nothing":
        return " (as a generator does, an object of a class of its own, or a very large value)"
    test = task["test_cases"][name]
    if re.match(r"\s*assert\b", test):
        return (" (a test is a call such as f(1), not `assert f(1) == 2`: the judge compares its"
                " value with the solution's)")
    if not is_expression(test):
        return f" (the test is no Python expression: {harmless(test)})"
    if reason == "the solution raised ModuleNotFoundError":
        return " (the judge has the modules of this Python environment and no others)"
    return ""


def is_expression(text):
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last three: odd or deep
        return False
    return True
