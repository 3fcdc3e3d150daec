"""The table of `python colbench.py check TASKS.jsonl`: tasks that their own solutions cannot solve.

colbench.py reads the tasks and calls `check_tasks`. For each test that nobody can pass, it prints
the line of the task, the reason and, where that is known, what to mend; then which protections the
sandbox has on this machine.
"""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys

from judge.sandbox import SECOND_LINES


def check_tasks(path, tasks, check, profile, require_protection, harmless):
    """Print the table for the tasks of the file `path`; return whether all can be solved in full.

    `check` is that of the tasks' domain, such as check_solutions, or None. `harmless(text)` spells
    out what could steer a terminal.
    """
    if check is None:
        raise SystemExit(f"{path}: found {tasks[0]['domain']} tasks, expected tasks that have tests"
                         " to check, such as backend tasks")
    rows, status = check(tasks, profile, require_protection)
    for index, name, reason in rows:
        advice = solution_advice(tasks[index], name, reason)
        print(f"{path}: line {index + 1}, {harmless(name)}: {reason}{advice}")
    broken = {index for index, _, _ in rows}
    solvable = len(tasks) - len(broken)
    print(f"{solvable} of {len(tasks)} tasks can be solved in full (judge {profile})")
    for name, active in status.items():
        print(f"protection {name:14s} {protection_state(name, active)}")
    if rows and len(rows) == sum(len(task.get("test_cases", ())) for task in tasks):
        raise SystemExit("found no test that can be passed, expected at least one: check the task"
                         " file.")
    return not broken


def protection_state(name, active):
    """What the table says of one protection."""
    if active:
        return "active"
    if name in SECOND_LINES:
        return "MISSING (a second line of defence; answers are confined without it, too)"
    return "MISSING"


def solution_advice(task, name, reason):
    """What is wrong with a test that the task's own solution does not pass; "" if that is open."""
    if re.match(r"\s*assert\b", task.get("test_cases", {}).get(name, "")):
        return (" (a test is a call such as f(1), not `assert f(1) == 2`: the judge compares its"
                " value with the solution's)")
    if reason == "the solution raised ModuleNotFoundError":
        missing = " and ".join(missing_modules(task["ground_truth"]))
        if missing:
            return f" (it needs the module {missing}, which the judge does not have)"
    return ""


def missing_modules(code):
    """The modules that code imports and that this interpreter, which is the judge's, lacks."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return sorted(name for name in names - sys.stdlib_module_names
                  if importlib.machinery.PathFinder.find_spec(name) is None)
