"""Grades Python that a model wrote, on the hidden tests of its task, without trusting it.

    grade(task, answer) -> Grade(reward, success, reasons)

A task holds a solution (`ground_truth`) and tests: call expressions such as "f(3)". An answer
passes a test when its value equals the solution's value. Three kinds of process take part:

    parent                        worker, one per core           child, one per answer
    knows tasks and solutions,    a clean interpreter that       runs the answer's code and the
    compares values,       --->   locks itself down once   --->  tests, reports a line for each
    measures CPU time,     job's  and never reads a job    fork     |
    has the child killed   socket                                   |
        ^                                                           |
        +---- outcomes: "=digest", "incomparable", "raised X" ------+

  - The child reports values and never verdicts. A solution's values never enter an answer's child.
  - A value is reported as the digest of a text that is the same for equal values. So no `__eq__`,
    `__hash__` or metaclass of the answer takes part in a comparison, and nothing large comes back.
    Of a test that compares with a literal, "f(3) == 5", the value of f(3) is reported.
  - Time is CPU time, which the parent reads from the child's clock: a busy machine fails no answer,
    and an answer that swallows signals is killed from outside.

Protected, on Linux (x86-64, aarch64): files other than the interpreter's and a scratch folder;
other processes; network; environment; memory. An answer starts no process, signals nobody, and
leaves nothing behind for the next. System calls are an allow-list (seccomp); Landlock closes
files; namespaces and a user of its own are added where the machine allows them. The judge's
`status` says which protections are active. Other systems have separate processes and limits,
nothing else.

Not protected against: bugs of the kernel, side channels, and an answer that special-cases the test
expressions, which it can read, or whose own operators decide a test such as "f(3) > 5". A file has
at most 8 MB, but only time limits how many an answer writes to its scratch folder, some GB on a
fast disk, before the folder is removed.

Profile "fixed" grades as a reader expects. "official" gives the published grader's number on honest
answers, with its quirks: banned words, and two namespaces, so that helpers, imports at the top and
recursion fail.

This file is the parent. judge/handle.py is its end of a worker, judge/worker.py the process itself
with its children, judge/values.py the comparison, judge/calls.py the filter of system calls. The
five need the standard library alone and nothing else of the project.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import queue
import re
import sys
import textwrap
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from judge.handle import NO_ROOM, Worker, close_workers
from judge.values import NOTHING, describe, is_value, reason_of

# -----------------------------------------------------------------------------
# Grades

SOLUTION_FAILED = "solution failed"  # the reason of a test that the solution does not pass
SOLUTION_FACTOR = 4  # a solution may take this many times as long as an answer
MAX_TIMEOUTS = 2  # of an answer's tests, after which the others are not run
# Protections, as in the judge's `status`
REQUIRED = ("system calls", "files", "privileges", "limits")  # what --require_protection asks for
SECOND_LINES = ("own user", "own network")  # not possible everywhere, and nothing depends on them
TOLD = "COLBENCH_PROTECTIONS_TOLD"  # environment variable: the line on protections was printed


@dataclass
class Grade:
    """The share of hidden tests passed, whether all were, and per test "passed" or why not."""

    reward: float
    success: bool | None  # None: the domain knows no success, as for pages
    reasons: dict[str, str] = field(default_factory=dict)


def grade(task: dict, answer: object, profile: str = "fixed") -> Grade:
    """Grade one answer on the hidden tests of its task."""
    return shared_judge(os.getpid(), profile).grade(task, answer)


def grade_all(tasks: list[dict], answers: list, profile: str = "fixed") -> list[Grade]:
    """Grade many answers at once."""
    return shared_judge(os.getpid(), profile).grade_all(tasks, answers)


@functools.cache
def shared_judge(process: int, profile: str) -> BackendJudge:
    """The judge of `grade` and `grade_all`, open until this process ends; a fork gets its own."""
    return BackendJudge(profile, workers=min(usable_cores(), 8))


def check_solutions(tasks: list[dict], profile: str = "fixed", require_protection: bool = False,
                    watch=iter):
    """Run each solution twice, in new processes; the second time it has as long as an answer.

    `watch` is given what comes of each task, and may draw a bar.
    Returns one failure (task index, test name, reason) per test that nobody can pass, or that the
    solution is too slow for, and which protections are active.
    """
    runs = []
    for factor in (SOLUTION_FACTOR, 1):  # two pools: addresses and clocks differ between them
        with BackendJudge(profile, require_protection) as judge:
            run = functools.partial(judge.expected_of, factor=factor)
            runs.append(list(watch(judge.threads.map(run, tasks))))
    failures = []
    for index, (first, second) in enumerate(zip(*runs, strict=True)):
        for name, one in first.items():
            other = second[name]
            if other not in (one, "timed out"):
                failures.append((index, name, "not deterministic"))
            elif one == NOTHING:
                failures.append((index, name, "the solution returns None"))
            elif one == "incomparable":
                failures.append((index, name, "the value equals nothing"))
            elif not is_value(one):
                failures.append((index, name, f"the solution {one}"))
            elif other == "timed out":
                # but a faster answer may pass
                failures.append((index, name, "the solution takes longer than an answer may"))
    return failures, judge.status


class BackendJudge:
    """A pool of workers, and the values of the solutions. Keep it open while there are answers.

    `judge` is the profile, and like `require_protection` a flag of collect.py. A test may take
    `seconds`. Once MAX_TIMEOUTS tests of an answer have timed out, the rest count as timed out,
    too; the published grader runs them, and so does the profile "official".
    """

    def __init__(
        self, judge: str = "fixed", require_protection: bool = False, workers: int | None = None,
        seconds: float = 1.0,
    ):
        if judge not in ("fixed", "official"):
            raise ValueError(f"found the profile {judge!r}, expected 'fixed' or 'official'")
        self.profile, self.seconds = judge, seconds
        self.expected = {}  # key of a task -> test -> what came out of it with the solution
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # that share this machine
        # 64: as many dialogues are played at a time by default (--batch_size)
        count = workers or min(max(1, usable_cores() // processes), 64)
        self.workers: set[Worker] = set()
        self.close = weakref.finalize(self, close_workers, self.workers)
        for _ in range(count):
            self.workers.add(Worker())  # they start side by side
        self.status = dict.fromkeys((*REQUIRED, *SECOND_LINES), False)
        self.idle = queue.SimpleQueue()
        for worker in self.workers:
            self.status |= worker.ready()
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="judge")

        missing = [name for name in REQUIRED if not self.status[name]]
        tell_once(self.status)
        if require_protection and missing:
            self.close()
            raise SystemExit(
                f"found a machine without these protections: {', '.join(missing)}, expected all of "
                "them because of --require_protection; use Linux 5.13 or newer with Landlock and "
                "seccomp, or drop the flag for answers you trust."
            )
        if self.outcomes("", ["1"], SOLUTION_FACTOR * seconds) != [describe(1)]:
            self.close()
            raise SystemExit(
                "found a judge that cannot run any code, expected it to; raise the process limits."
            )

    def __enter__(self) -> BackendJudge:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind:  # such as Ctrl-C: what still runs is of no use
            self.close()
        self.threads.shutdown(cancel_futures=True)
        self.close()

    def grade(self, task: dict, answer: object) -> Grade:
        tests = tests_of(task)
        code = extract_code(answer, self.profile)
        expected = self.expected_of(task)

        usable = [name for name in tests if is_value(expected[name]) and expected[name] != NOTHING]
        reasons = dict.fromkeys(tests, SOLUTION_FAILED) | dict.fromkeys(usable, "no code")
        if code and usable:
            expressions = [tests[name] for name in usable]
            most = MAX_TIMEOUTS if self.profile == "fixed" else None
            actual = self.outcomes(code, expressions, self.seconds, most)
            for name, outcome in zip(usable, actual, strict=True):
                reasons[name] = reason_of(expected[name], outcome)

        passed = sum(reason == "passed" for reason in reasons.values())
        success = passed > 0 and passed == len(tests)
        return Grade(passed / max(len(tests), 1), success, reasons)

    def grade_all(self, tasks: list[dict], answers: list) -> list[Grade]:
        """Grade answers side by side. Solutions that are new run first, each once."""
        if len(tasks) != len(answers):
            raise ValueError(f"found {len(answers)} answers to {len(tasks)} tasks, expected one"
                             " answer to each task")
        distinct = {self.key(task): task for task in tasks}
        list(self.threads.map(self.expected_of, distinct.values()))
        return list(self.threads.map(self.grade, tasks, answers))

    def key(self, task: dict) -> str:
        return json.dumps([task["ground_truth"], tests_of(task)])

    def expected_of(self, task: dict, factor: float = SOLUTION_FACTOR) -> dict:
        """Name of a test -> what came out of it with the solution; kept for later answers."""
        key = self.key(task)
        if key not in self.expected:
            tests, seconds = tests_of(task), factor * self.seconds
            found = self.outcomes(task["ground_truth"], list(tests.values()), seconds)
            self.expected[key] = dict(zip(tests, found, strict=True))
        return self.expected[key]

    def outcomes(
        self, code: str, tests: list[str], seconds: float, max_timeouts: int | None = None
    ) -> list[str]:
        """What came out of each test, on an idle worker.

        After `max_timeouts` tests that timed out, the others count as timed out, too (None: never).
        A worker that dies is replaced, and the code runs again.
        """
        tests = [test.strip() for test in tests]
        if self.profile != "official":  # not in the child, where an answer could read the literal
            tests = [without_comparison(test) for test in tests]
        worker = self.idle.get()
        try:
            for _ in range(3):
                try:
                    return self.run_all(worker, code, tests, seconds, max_timeouts)
                except OSError as error:
                    no_room = isinstance(error, TimeoutError)  # the worker could start no child
                    close_workers({worker})
                self.workers.discard(worker)
                if self.close.alive:
                    worker = Worker()
                    self.workers.add(worker)
                if not self.close.alive:  # closed while this code ran, or the worker started
                    close_workers({worker})
                    raise SystemExit("the judge is closed")
                worker.ready()
            if no_room:
                raise SystemExit(NO_ROOM)
            return ["crashed"] * len(tests)
        except KeyboardInterrupt:  # it leaves the worker in the middle of a job
            close_workers({worker})  # the next job finds it dead, and replaces it
            raise
        finally:
            self.idle.put(worker)

    def run_all(
        self, worker: Worker, code: str, tests: list[str], seconds: float,
        max_timeouts: int | None,
    ) -> list[str]:
        """What came out of each test; a child that ended early is followed by one for the rest."""
        outcomes = []
        while len(outcomes) < len(tests):
            left = tests[len(outcomes):]
            if outcomes.count("timed out") == max_timeouts:
                return outcomes + ["timed out"] * len(left)
            job = json.dumps({"code": code, "tests": left, "profile": self.profile}).encode()
            outcomes += worker.run(job, len(left), seconds)
        return outcomes


@functools.lru_cache(4096)
def without_comparison(test: str) -> str:
    """`f(1)` for a test `f(1) == 3`: the parent compares its value with the solution's.

    Otherwise the answer's own `__eq__` would decide. And where the 3 is wrong, the comparison is
    false for the solution, and for every answer that does not return 3.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in a test's texts
            expression = ast.parse(test, mode="eval").body
        match expression:
            case ast.Compare(left=value, ops=[ast.Eq()], comparators=[literal]):
                if ast.literal_eval(literal) is not None:  # None is no value of a solution
                    return ast.unparse(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass  # no expression, no literal, {{}: 1} (a TypeError), too deep: the test runs as it is
    return test


def usable_cores() -> int:
    """The cores that this process may use: on a cluster, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tests_of(task: dict) -> dict[str, str]:
    """Name -> test. Arrow conversions fill the names that a task lacks with None."""
    return {name: test for name, test in task["test_cases"].items() if test is not None}


def tell_once(status: dict[str, bool]) -> None:
    """Print which protections this machine lacks, if the sandbox is weaker without them.

    Later judges stay silent, also those of processes that this one starts, and so do all but one
    of the processes that torchrun starts on a machine.
    """
    missing = [name for name in REQUIRED if not status[name]]
    if not missing or TOLD in os.environ:
        return
    os.environ[TOLD] = "1"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"judge: not active on this machine: {', '.join(missing)} (a harmful answer could use"
            " that, so grade only code of models that you trust, or use Linux 5.13 or newer)",
            file=sys.stderr,
        )


# -----------------------------------------------------------------------------
# The code of an answer

ANSWER_MARKER = "I WANT TO ANSWER:"
PYTHON_TAGS = ("python", "python3", "py", "py3")
# Three backticks that begin a line, or end one with nothing but a tag behind them. In code, they
# may stand elsewhere: in a text, a comment, or the indented example of a docstring.
FENCE = re.compile(r"^ {0,3}```|(?<=[^\s#])[ \t]*```(?=\w*[ \t]*\r?$)", re.MULTILINE)
INDENTED_FENCE = re.compile(r"^[ \t]+```", re.MULTILINE)
# What Markdown leaves of a marker in bold or in backticks
EMPHASIS = re.compile(r"\A\s*[*_`]{1,2}[ \t]*\r?\n")
# Profile "official": the published grader gives 0 to an answer that contains one of these anywhere.
BANNED = ("import os", "from os", "import sys", "from sys")
BANNED += ("sudo", "transformers", "exit(", "quit(", "argparse")


def extract_code(answer: object, profile: str = "fixed") -> str:
    """The code of an answer, "" if there is none."""
    if not isinstance(answer, str):
        return ""
    if profile == "official":
        return extract_code_officially(answer)
    if profile != "fixed":
        raise ValueError(f"found the profile {profile!r}, expected 'fixed' or 'official'")
    text, *after_marker = answer.split(ANSWER_MARKER)
    answers = [part for part in after_marker if part.strip()]
    if answers:
        text = answers[0].lstrip(" \t")  # behind the marker, this is no indentation
    text = EMPHASIS.sub("", text)
    parts = FENCE.split(text)
    if len(parts) == 1:  # perhaps its fences are those of a list
        in_list = INDENTED_FENCE.split(text)
        if not re.search("\"{3}|'{3}", in_list[0]):  # quotes: they may stand in a docstring
            parts = in_list
    if len(parts) == 2:
        tag, _ = read_block(parts[1])
        if not parts[1].strip() or (not tag and re.search("^def ", parts[0], re.MULTILINE)):
            return unindented(parts[0])  # the marker stood behind the opening fence
    blocks = [read_block(block) for block in parts[1::2]]
    for tag, code in blocks:
        if tag in PYTHON_TAGS:
            return unindented(code)
    return unindented(blocks[0][1] if blocks else text)


def unindented(code: str) -> str:
    """The code without a byte order mark, and without the indentation that it has in a list."""
    code = code.lstrip("\ufeff\r\n").rstrip()
    if not code.startswith((" ", "\t")):
        return code
    moved = textwrap.dedent(code.replace("\r\n", "\n")).strip()
    first, _, rest = moved.partition("\n")
    if first.rstrip().endswith(":") and not rest.startswith((" ", "\t", "\n")):
        return code.strip()  # only its first line was indented
    return moved


def read_block(block: str) -> tuple[str, str]:
    """Tag and code of what stands between two fences.

    A first line of several words is code, unless the first is a tag, as in "python solution.py".
    """
    first_line, newline, rest = block.partition("\n")
    tag, *words = first_line.lower().split() or [""]
    if newline and (not words or tag in PYTHON_TAGS):
        return tag, rest
    return "", block


def extract_code_officially(answer: str) -> str:
    """The published grader's rule: banned words, then the first fence with its own idea of tags."""
    if any(word in answer for word in BANNED):
        return ""
    text = answer
    for fence in ("```python", "```"):
        if fence in text:
            text = text.split(fence)[1].split("```")[0]
    return text
