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
  - Time is CPU time, which the parent reads from the child's clock: a busy machine fails no answer,
    and an answer that swallows signals is killed from outside.

Protected, on Linux (x86-64, aarch64): files other than the interpreter's and a scratch folder;
other processes; network; environment; memory. An answer starts no process, signals nobody, and
leaves nothing behind for the next. System calls are an allow-list (seccomp); Landlock closes
files; namespaces and a user of its own are added where the machine allows them. `Judge.status` says
which protections are active. Other systems have separate processes and limits, nothing else.

Not protected: against bugs of the kernel, side channels, and an answer that special-cases the test
expressions, which it can read. A file has at most 8 MB, but only time limits how many an answer
writes to its scratch folder, some GB on a fast disk, before the folder is removed.

Profile "fixed" grades as a reader expects. "official" gives the published grader's number on honest
answers, with its quirks: banned words, and two namespaces, so that helpers, imports at the top and
recursion fail. This file needs the standard library alone and works alone.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import queue
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from json.encoder import encode_basestring_ascii

# -----------------------------------------------------------------------------
# The judge: solutions, answers, comparison

ANSWER_MARKER = "I WANT TO ANSWER:"
PYTHON_TAGS = ("python", "python3", "py", "py3")
# Profile "official": the published grader gives 0 to an answer that contains one of these anywhere.
BANNED = ("import os", "from os", "import sys", "from sys")
BANNED += ("sudo", "transformers", "exit(", "quit(", "argparse")
SOLUTION_FAILED = "solution failed"  # the reason of a test that the solution does not pass
SOLUTION_FACTOR = 4  # a solution may take this many times as long as an answer
TOO_SLOW = "the solution takes longer than an answer may"  # but a faster answer may pass
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
    return shared_judge(os.getpid(), None).grade(task, answer, profile)


def grade_all(
    tasks: list[dict], answers: list, profile: str = "fixed", workers: int | None = None
) -> list[Grade]:
    """Grade many answers at once."""
    return shared_judge(os.getpid(), workers).grade_all(tasks, answers, profile)


@functools.cache
def shared_judge(process: int, workers: int | None) -> Judge:
    """The judge of `grade` and `grade_all`, open until this process ends; a fork gets its own."""
    return Judge(workers)


def check_solutions(tasks: list[dict], profile: str = "fixed", require_protection: bool = False):
    """Run each solution twice, in new processes; the second time it has as long as an answer.

    Returns one row (task index, test name, reason) per test that nobody can pass, or that the
    solution is too slow for, and which protections are active.
    """
    runs = []
    for factor in (SOLUTION_FACTOR, 1):  # two pools: addresses and clocks differ between them
        with Judge(require_protection=require_protection) as judge:
            run = functools.partial(judge.run_solution, profile=profile, factor=factor)
            list(judge.threads.map(run, tasks))
            runs.append([judge.expected[judge.key(task, profile)] for task in tasks])
    rows = []
    for index, (task, first, second) in enumerate(zip(tasks, *runs, strict=True)):
        for name, one, other in zip(task["test_cases"], first, second, strict=True):
            if is_value(one) and other == "timed out":
                rows.append((index, name, TOO_SLOW))
            elif one != other:
                rows.append((index, name, "not deterministic"))
            elif one == NOTHING:
                rows.append((index, name, "the solution returns None"))
            elif one == "incomparable":
                rows.append((index, name, "the value equals nothing"))
            elif not is_value(one):
                rows.append((index, name, f"the solution {one}"))
    return rows, judge.status


class Judge:
    """A pool of workers, and the values of the solutions. Keep it open while there are answers."""

    def __init__(
        self,
        workers: int | None = None,
        max_timeouts: int = 2,
        seconds: float = 1.0,
        require_protection: bool = False,
    ):
        self.max_timeouts = max_timeouts
        self.seconds = seconds
        self.expected = {}  # key of a task -> what came out of its solution, test by test
        count = workers or min(os.cpu_count() or 1, 8)
        self.workers: set[Worker] = set()
        self.close = weakref.finalize(self, close_workers, self.workers)
        for _ in range(count):
            self.workers.add(Worker())  # they start side by side
        self.status = dict.fromkeys((*REQUIRED, *SECOND_LINES), False)
        for worker in self.workers:
            self.status |= worker.ready()
        self.idle = queue.SimpleQueue()
        for worker in self.workers:
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
        if self.outcomes("", ["1"], "fixed", SOLUTION_FACTOR * seconds) != [describe(1)]:
            self.close()
            raise SystemExit(
                "found a judge that cannot run any code, expected it to; raise the process limits."
            )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_) -> None:
        self.threads.shutdown()
        self.close()

    def grade(self, task: dict, answer: object, profile: str = "fixed") -> Grade:
        tests = task["test_cases"]
        key = self.key(task, profile)
        code = extract_code(answer, profile)
        if key not in self.expected:
            self.run_solution(task, profile)
        expected = dict(zip(tests, self.expected[key], strict=True))

        usable = []
        reasons = {}
        for name in tests:
            if is_value(expected[name]) and expected[name] != NOTHING:
                usable.append(name)
                reasons[name] = "no code"
            else:
                reasons[name] = SOLUTION_FAILED
        if code and usable:
            expressions = [tests[name] for name in usable]
            actual = self.outcomes(code, expressions, profile, self.seconds)
            for name, outcome in zip(usable, actual, strict=True):
                reasons[name] = reason_of(expected[name], outcome)

        passed = sum(reason == "passed" for reason in reasons.values())
        success = passed > 0 and passed == len(tests)
        return Grade(passed / max(len(tests), 1), success, reasons)

    def grade_all(self, tasks: list[dict], answers: list, profile: str = "fixed") -> list[Grade]:
        """Grade answers side by side. Solutions that are new run first, each once."""
        unknown = {}
        for task in tasks:
            key = self.key(task, profile)
            if key not in self.expected:
                unknown[key] = task
        list(self.threads.map(lambda task: self.run_solution(task, profile), unknown.values()))
        return list(
            self.threads.map(lambda task, answer: self.grade(task, answer, profile), tasks, answers)
        )

    def key(self, task: dict, profile: str) -> bytes:
        content = json.dumps([task["ground_truth"], task["test_cases"], profile])
        return blake2b(content.encode(), digest_size=16).digest()

    def run_solution(self, task: dict, profile: str, factor: float = SOLUTION_FACTOR) -> None:
        """Run the solution and keep what came out of each test."""
        tests = list(task["test_cases"].values())
        outcomes = self.outcomes(task["ground_truth"], tests, profile, factor * self.seconds)
        self.expected[self.key(task, profile)] = outcomes

    def outcomes(self, code: str, tests: list[str], profile: str, seconds: float) -> list[str]:
        """What came out of each test, on an idle worker.

        A worker that dies is replaced, and the code runs again.
        """
        if profile not in ("fixed", "official"):
            raise ValueError(f"found the profile {profile!r}, expected 'fixed' or 'official'")
        worker = self.idle.get()
        try:
            for _ in range(3):
                try:
                    return self.run_all(worker, code, tests, profile, seconds)
                except OSError as error:
                    no_room = isinstance(error, TimeoutError)  # the worker could start no child
                    close_workers({worker})
                self.workers.discard(worker)
                worker = Worker()
                self.workers.add(worker)
                worker.ready()
            if no_room:
                raise SystemExit(NO_ROOM)
            return ["crashed"] * len(tests)
        finally:
            self.idle.put(worker)

    def run_all(
        self, worker: Worker, code: str, tests: list[str], profile: str, seconds: float
    ) -> list[str]:
        """What came out of each test; a child that ended early is followed by one for the rest."""
        outcomes = []
        timeouts = 0
        while len(outcomes) < len(tests):
            left = tests[len(outcomes):]
            if timeouts == self.max_timeouts:
                return outcomes + ["timed out"] * len(left)
            job = json.dumps({"code": code, "tests": left, "profile": profile}).encode()
            finished, ending = worker.run(job, len(left), seconds)
            outcomes += finished
            if ending:  # the test after those that finished is the one that ended the child
                outcomes.append(ending)
            if ending == "timed out":
                timeouts += 1
        return outcomes


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


def is_value(outcome: str) -> bool:
    """Whether a test gave a value, as opposed to an error or something incomparable."""
    return outcome.startswith("=")


def reason_of(expected: str, outcome: str) -> str:
    """The reason of one test: "passed", "wrong", or why there is no value.

    A second digest stands where a value holds an OrderedDict. It includes the order, which Python
    compares between two OrderedDicts only.
    """
    if outcome == "incomparable":
        return "wrong"
    if not is_value(outcome):
        return outcome
    expected_digest, *expected_order = expected.split(",")
    digest, *order = outcome.split(",")
    if digest != expected_digest:
        return "wrong"
    if order and expected_order and order != expected_order:
        return "wrong"
    return "passed"


def extract_code(answer: object, profile: str = "fixed") -> str:
    """The code of an answer, "" if there is none."""
    if not isinstance(answer, str):
        return ""
    if profile == "official":
        return extract_code_officially(answer)
    if profile != "fixed":
        raise ValueError(f"found the profile {profile!r}, expected 'fixed' or 'official'")
    parts = answer.split(ANSWER_MARKER)
    text = parts[0]
    if len(parts) > 1 and parts[1].strip():
        text = parts[1]
    blocks = [read_block(block) for block in text.split("```")[1::2]]
    for tag, code in blocks:
        if tag in PYTHON_TAGS:
            return code.strip()
    if blocks:
        return blocks[0][1].strip()
    return text.strip()


def read_block(block: str) -> tuple[str, str]:
    """Tag and code of what stands between two fences; a first line of several words is code."""
    first_line, newline, rest = block.partition("\n")
    if newline and len(first_line.split()) < 2:
        return first_line.strip().lower(), rest
    return "", block


def extract_code_officially(answer: str) -> str:
    if any(word in answer for word in BANNED):
        return ""
    text = answer
    for fence in ("```python", "```"):
        if fence in text:
            text = text.split(fence)[1].split("```")[0]
    return text


# -----------------------------------------------------------------------------
# The parent's end of a worker: jobs, outcomes, limits of time

OUTCOME = re.compile(
    rb"=[0-9a-f]{32}(,[0-9a-f]{32})?|incomparable|raised [A-Za-z_?]\w{0,60}", re.ASCII
)
MAX_OUTCOME_BYTES = 160
MAX_THREADS = 200  # of a child; more could take all that the machine has
CONTROL_SECONDS = 60  # how long a worker may take to start, to fork and to tidy up
WALL_PER_CPU = 4  # time in the kernel, and time asleep, are limited to so many times `seconds`
POLL = struct.pack("ll", 0, 50_000)  # seconds, microseconds: how often a silent child is looked at
USER_CLOCK, CPU_CLOCK = 1, 2  # CPUCLOCK_VIRT: in its own code; CPUCLOCK_SCHED: with the kernel's


def cpu_clock_of(pid: int, kind: int) -> int:
    """The id of another process's CPU clock, for `time.clock_gettime`.

    The kernel encodes it so (MAKE_PROCESS_CPUCLOCK in include/linux/posix-timers.h): the
    complement of the process id, shifted left by three bits, with the kind in those bits.
    """
    return (~pid << 3) | kind


def process_clocks(pid: int) -> tuple[float, float, float]:
    """CPU seconds of a process in its own code, with those in the kernel, and the wall clock.

    An answer is held to the first: what a page fault costs on a busy machine is not its fault.
    """
    wall = time.monotonic()
    if sys.platform != "linux":
        return wall, wall, wall
    user = time.clock_gettime(cpu_clock_of(pid, USER_CLOCK))
    total = time.clock_gettime(cpu_clock_of(pid, CPU_CLOCK))
    return user, total, wall


NO_ROOM = (
    "found a machine without room for another process, expected some for the judge; raise the"
    " process limit (ulimit -u) or end other programs, then rerun the same command"
)


class Worker:
    """A worker process and its scratch folder.

    It is started by exec: a fork would carry our memory, threads and CUDA.
    """

    def __init__(self):
        self.owner = os.getpid()
        self.folder = tempfile.mkdtemp(prefix="colbench-judge-")
        self.control, theirs = socket.socketpair()
        self.control.settimeout(CONTROL_SECONDS)
        environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",  # sets have one order, in solutions and answers alike
            "HOME": self.folder,
            "TMPDIR": self.folder,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        flags = ["-s", "-B", "-W", "ignore"]
        if sys.version_info >= (3, 11):
            flags.append("-P")  # this file's folder is not on sys.path
        script = os.path.abspath(__file__)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *flags, script, "judge-worker", str(theirs.fileno())],
                    env=environment,
                    cwd=self.folder,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        except BlockingIOError:
            os.rmdir(self.folder)
            raise SystemExit(NO_ROOM) from None

    def ready(self) -> dict[str, bool]:
        """Wait for the worker and return which protections are active in it."""
        line = self.control.makefile("rb").readline()
        if not line:
            raise SystemExit(
                "found a judge worker that ended before it was ready, expected it to start; "
                "see its message above."
            )
        return json.loads(line)

    def run(self, job: bytes, count: int, seconds: float) -> tuple[list[str], str]:
        """Run a job of `count` tests in a new child.

        Returns the outcomes of the tests that finished, and why the child did not finish the rest
        ("" if it did).
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self.control, [b"j"], [theirs.fileno()])
            message = self.control.recv(4)
            if len(message) < 4:
                raise ConnectionError("the judge's worker is gone")
            (child,) = struct.unpack("i", message)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, POLL)
            try:
                return self.collect(ours, child, job, count, seconds)
            finally:
                self.control.send(b"k")  # the worker kills the child, whatever it is doing

    def collect(
        self, channel: socket.socket, child: int, job: bytes, count: int, seconds: float
    ) -> tuple[list[str], str]:
        """Send the job, then read outcomes until the last one, an early end or a timeout."""
        outcomes = []
        rest = b""
        started = process_clocks(child)
        with contextlib.suppress(ConnectionError):  # an early end shows when we read
            channel.sendall(job)
            channel.shutdown(socket.SHUT_WR)
        while len(outcomes) < count:
            if thread_count(child) > MAX_THREADS:
                return outcomes, "crashed"
            try:
                # Returns at the end of the stream; after POLL, with what has arrived by then.
                data = channel.recv(1 << 16, socket.MSG_WAITALL)
                if not data:
                    return outcomes, "crashed"
            except BlockingIOError:
                data = b""  # nothing arrived
            except ConnectionError:
                return outcomes, "crashed"
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not OUTCOME.fullmatch(line):
                    return outcomes, "crashed"  # not our line: the answer wrote to our socket
                outcomes.append(line.decode())
            if lines:
                started = process_clocks(child)  # of the test that runs now
            elif len(rest) > MAX_OUTCOME_BYTES:
                return outcomes, "crashed"
            elif out_of_time(started, process_clocks(child), seconds):
                return outcomes, "timed out"
        return outcomes[:count], ""


def thread_count(pid: int) -> int:
    """The threads of a process; 0 where the system does not say."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def out_of_time(started: tuple, now: tuple, seconds: float) -> bool:
    """Whether a test that began at the clocks `started` has used up its time."""
    user = now[0] - started[0]
    total = now[1] - started[1]
    wall = now[2] - started[2]
    computes = user > seconds
    stays_in_the_kernel = total > seconds * WALL_PER_CPU
    sleeps = wall - total > seconds * WALL_PER_CPU
    return computes or stays_in_the_kernel or sleeps


def close_workers(workers: set[Worker]) -> None:
    mine = [worker for worker in workers if worker.owner == os.getpid()]  # a forked copy owns none
    for worker in mine:
        with contextlib.suppress(OSError):  # the worker may have ended first
            # Unlike close, this reaches the worker even if a forked process holds a copy.
            worker.control.shutdown(socket.SHUT_RDWR)
        worker.control.close()
    for worker in mine:
        try:
            worker.process.wait(5)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        with contextlib.suppress(OSError):
            empty_folder(worker.folder)  # rmtree would recurse, however deep an answer has nested
        shutil.rmtree(worker.folder, ignore_errors=True)
    workers.clear()


# -----------------------------------------------------------------------------
# The worker: a clean interpreter that locks itself down once, then forks one child per answer

MEMORY = 1 << 30
SECONDS_OF_CHILD = 300
LIMITS = {"AS": MEMORY, "NOFILE": 64, "FSIZE": 8 << 20, "CORE": 0, "STACK": 16 << 20}
PROCESS_MARK = 0x7A7A7A7A  # stands in the child's filter where its process id goes
# Modules that answers import often. The worker loads them once, so that no child has to.
PRELOADED = ("base64", "difflib", "itertools", "pathlib", "string", "textwrap", "typing")

# Options of prctl
DEATH_SIGNAL, NO_DUMP, INSTALL_FILTER, NO_NEW_PRIVILEGES = 1, 4, 22, 38
FILTER_MODE = 2
# Flags of unshare: CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWUSER
NEW_NETWORK, NEW_MESSAGES, NEW_NAMES, NEW_USERS = 0x40000000, 0x08000000, 0x04000000, 0x10000000
CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
# Landlock's system calls have the same numbers on every machine.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULESET_VERSION = 1  # flag: return the version instead
PATH_BENEATH = 1  # kind of rule
# Rights of Landlock, LANDLOCK_ACCESS_FS_...
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}  # how many rights it knows; later ones: 16


def judge_worker(descriptor: int) -> None:
    """Main of the worker. It never reads a job: no child finds another one's in its memory."""
    folder = os.getcwd()
    try:
        serve_answers(socket.socket(fileno=descriptor), folder)
    finally:
        os.rmdir(folder)  # the parent may have been killed, even before the first job


def serve_answers(control: socket.socket, folder: str) -> None:
    """Lock down, report what worked, then fork a child for each job until the parent is gone."""
    owner, worker = os.getppid(), os.getpid()
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder; Python 3.10 has no -P
    for name in PRELOADED:
        __import__(name)
    globals().update(vars(builtins))  # an answer that rebinds builtins.int does not rebind ours

    def end_with_owner(*_):
        if os.getppid() != owner:  # the signal is also sent when a mere thread of the owner ends
            sys.exit()

    signal.signal(signal.SIGUSR1, end_with_owner)
    status = {"limits": set_limits(LIMITS)}
    libc, rules, program = None, -1, None
    fork = os.fork
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        fork = ctypes.PyDLL(None).fork  # os.fork also repairs in the child what no child needs
        locks, rules = lock_down(libc, folder)
        status |= locks
        if status["system calls"]:
            program = ctypes.create_string_buffer(child_filter(PROCESS_MARK))
    os.dup2(0, 2)  # /dev/null
    control.send(json.dumps(status).encode() + b"\n")
    rehearse()
    gc.collect()
    gc.freeze()
    while True:
        descriptors = socket.recv_fds(control, 1, 1)[1]
        if not descriptors:
            return
        while (child := fork()) < 0:  # the C library's fork does not raise
            time.sleep(0.1)  # until the machine has room for another process
        if child == 0:
            control.close()
            run_child(libc, descriptors[0], worker, rules, program)
        try:
            os.close(descriptors[0])
            control.send(struct.pack("i", child))
            control.recv(1)  # the parent has what it wants
        finally:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still this child's
            os.waitpid(child, 0)
            empty_folder(folder)


def run_child(
    libc: ctypes.CDLL | None,
    descriptor: int,
    worker: int,
    rules: int,
    program: ctypes.Array | None,
) -> None:
    """Put the last locks on this new child, then do its work. Never returns."""
    try:
        # The parent's clock is the limit; this one is for when the parent is gone.
        set_limits({"CPU": SECONDS_OF_CHILD})
        if libc:
            libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            if rules >= 0 and libc.syscall(RESTRICT_SELF, rules, 0) != 0:
                os._exit(1)
            if program:
                mark, pid = struct.pack("I", PROCESS_MARK), struct.pack("I", os.getpid())
                program.raw = program.raw.replace(mark, pid)
                if not install_filter(libc, program):
                    os._exit(1)
        if os.getppid() == worker:
            answer_job(descriptor)
    finally:
        os._exit(1)


def empty_folder(folder: str) -> None:
    """Delete everything below, however deep, without following links.

    Folders inside folders are moved up first, so that no path grows too long.
    """
    while True:
        entries = list(os.scandir(folder))
        if not entries:
            return
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            os.chmod(entry, 0o700)
            for inner in os.scandir(entry):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)
                    os.rename(inner, os.path.join(folder, os.urandom(16).hex()))
                else:
                    os.unlink(inner)
            os.rmdir(entry)


def set_limits(limits: dict[str, int]) -> bool:
    """Lower limits of the process for good; false where the system refuses one."""
    worked = True
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = wanted
        if hard != resource.RLIM_INFINITY:
            value = min(wanted, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # macOS knows the name RLIMIT_AS and refuses the limit
            worked = False
    return worked


def lock_down(libc: ctypes.CDLL, folder: str) -> tuple[dict[str, bool], int]:
    """Give up, for good, whatever an answer does not need.

    Returns what worked, and the file rules that children put on.
    """
    namespaces = NEW_NETWORK | NEW_MESSAGES | NEW_NAMES
    if os.getuid() != 0:
        namespaces |= NEW_USERS
    status = {"own network": libc.unshare(namespaces) == 0}
    status["own user"] = drop_user(folder)
    if status["own user"]:
        set_limits({"NPROC": 64})
    no_capability = libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)) == 0
    no_new_privileges = libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    status["privileges"] = no_new_privileges and no_capability
    libc.prctl(NO_DUMP, 0, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGUSR1, 0, 0, 0)
    rules = landlock_rules(libc, folder)
    status["files"] = rules >= 0
    status["system calls"] = False
    if platform.machine() in MACHINES and struct.calcsize("P") == 8:
        program = ctypes.create_string_buffer(worker_filter())
        status["system calls"] = install_filter(libc, program)
    return status, rules


def drop_user(folder: str) -> bool:
    """Become a user that owns nothing else, if this is root and that user can read the interpreter.

    Returns whether it worked; if not, the process stays root.
    """
    if os.getuid() != 0:
        return False
    user = 0x60000000 + os.getpid()  # no two live workers share it, whoever started them
    needed = [*readable_paths(), os.__file__, folder]  # listed while all of them can be seen
    try:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
        allowed = all(os.access(path, os.R_OK) for path in needed)
    except OSError:
        allowed = False
    kept = user if allowed else 0
    os.setresuid(kept, kept, kept)
    os.setresgid(kept, kept, kept)
    if not allowed:
        os.chown(folder, 0, 0)
    return allowed


def readable_paths() -> list[str]:
    """What answers may read: the interpreter, its packages, shared libraries, time zones."""
    # a .pth file, such as that of an editable install, can put any folder on sys.path
    roots = (os.path.join(sys.prefix, ""), os.path.join(sys.base_prefix, ""))
    paths = [
        *(path for path in sys.path if path.startswith(roots)),
        os.path.join(sys.base_prefix, "lib"),
        *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/share/zoneinfo",
        "/etc/ld.so.cache",
        "/dev/urandom",
    ]
    unique = dict.fromkeys(paths)
    return [path for path in unique if os.path.isabs(path) and os.path.exists(path)]


def landlock_rules(libc: ctypes.CDLL, folder: str) -> int:
    """Descriptor of the file rules that children put on; -1 where the kernel has no Landlock.

    They read the interpreter and write the scratch folder.
    """
    version = libc.syscall(CREATE_RULESET, None, 0, RULESET_VERSION)
    if version < 1:
        return -1
    rights = (1 << RIGHTS_OF_VERSION.get(version, 16)) - 1
    network = 3 if version >= 4 else 0  # neither bind nor connect TCP
    scope = 3 if version >= 6 else 0  # neither abstract sockets nor signals of others
    attributes = struct.pack("QQQ", rights, network, scope)
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)

    granted = {path: READ_FILE | READ_DIR for path in readable_paths()}
    granted["/dev/null"] = READ_FILE | WRITE_FILE
    granted[folder] = rights & ~(EXECUTE | MAKE_CHAR | MAKE_SOCK | MAKE_FIFO | MAKE_BLOCK)
    for path, allowed in granted.items():
        if not os.path.isdir(path):
            allowed &= READ_FILE | WRITE_FILE
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, descriptor)
        libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, 0)
        os.close(descriptor)
    return rules


def install_filter(libc: ctypes.CDLL, program: ctypes.Array) -> bool:
    """Have the kernel check every further system call with a BPF program."""
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(program))
    return libc.prctl(INSTALL_FILTER, FILTER_MODE, header, 0, 0) == 0


# -----------------------------------------------------------------------------
# The child: run the tests, report values and never verdicts


def rehearse() -> None:
    """Run a job of our own before any fork.

    Python rewrites code in its first runs, and each child would do so in its own copy.
    """
    job = {
        "code": "def f(n):\n    return {str(i): [i, 0.5] for i in range(n)}",
        "tests": ["f(2)", "f()"],
        "profile": "fixed",
    }
    with open(os.devnull, "wb") as nowhere:
        for _ in range(10):
            run_job(json.dumps(job).encode(), nowhere.fileno())


def answer_job(descriptor: int) -> None:
    """A child's work: the job that the parent sends, and the end."""
    chunks = []
    while True:
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
    run_job(b"".join(chunks), descriptor)
    os.close(descriptor)  # the parent continues while the rest of the process is taken down
    os._exit(0)


def run_job(text: bytes, descriptor: int) -> None:
    """Run the tests of a job and write one line for each: what came out of it."""
    job = json.loads(text)
    official = job["profile"] == "official"
    sys.setswitchinterval(1e-4)  # a thread that a test left spinning hardly delays the next tests
    generator = random._inst
    reseed = super(random.Random, generator).seed  # C's, taken before the answer can replace it
    if "numpy" in job["code"]:
        with contextlib.suppress(ImportError):
            __import__("numpy")  # before the first test, which its generator is seeded for
    program, failure = None, ""
    try:
        program = compile_for(job["code"], "exec", official)
    except BaseException as error:
        failure = f"raised {type(error).__name__}"
    for test in job["tests"]:
        reseed(0)
        generator.gauss_next = None
        try:
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            outcome = failure or run_test(program, test, official)
        except BaseException as error:
            outcome = f"raised {type(error).__name__}"
        os.write(descriptor, outcome.encode("ascii", "replace") + b"\n")


def run_test(program, test: str, official: bool) -> str:
    """Run the code in a new module, then the test in it; what came out of it."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses and typing look their module up by name
    shared = module.__dict__
    local = shared
    if official:
        local = {}  # two namespaces: helpers, imports and recursion are out of reach
        shared["signal"] = signal  # what the published grader's own module happens to offer
    exec(program, shared, local)
    value = eval(compile_for(test.strip(), "eval", official), shared, local)
    return describe(value, official)


def compile_for(source: str, mode: str, official: bool):
    """Compile an answer or a test."""
    if official:
        tree = Outlined().visit(ast.parse(source, "answer", mode))
        source = ast.fix_missing_locations(tree)
    return compile(source, "answer", mode, dont_inherit=True)


class Outlined(ast.NodeTransformer):
    """Undoes PEP 709 for the official profile.

    Since Python 3.12 top-level comprehensions see local names; in 3.10 and 3.11 they do not.
    Generator expressions never do, so each comprehension becomes one.
    """

    def visit_ListComp(self, node):
        items = ast.GeneratorExp(node.elt, node.generators)
        return ast.List([ast.Starred(items, ast.Load())], ast.Load())

    def visit_SetComp(self, node):
        items = ast.GeneratorExp(node.elt, node.generators)
        return ast.Set([ast.Starred(items, ast.Load())], ast.Load())

    def visit_DictComp(self, node):
        pair = ast.Tuple([node.key, node.value], ast.Load())
        pairs = ast.GeneratorExp(pair, node.generators)
        return ast.Call(ast.Name("dict", ast.Load()), [pairs], [])

    def visit_FunctionDef(self, node):
        return node  # comprehensions inside functions behave alike everywhere

    visit_Lambda = visit_FunctionDef
    visit_AsyncFunctionDef = visit_FunctionDef
    visit_ClassDef = visit_FunctionDef


# -----------------------------------------------------------------------------
# Values as text: two values are equal exactly when their texts are

# A value that costs more than this, or is deeper, is not comparable.
MAX_VALUE_CHARACTERS, MAX_VALUE_DEPTH = 4_000_000, 60
NODE_COST = 12
ENCLOSED = {
    list: "[]",
    tuple: "()",
    deque: "||",
    set: "{}",
    frozenset: "{}",
    type({}.keys()): "{}",
    type({}.items()): "{}",
}
# Library types that equal each other when they print alike
NAMED_VALUES = {
    "uuid.UUID",
    "pathlib.PurePath",
    "pathlib._local.PurePath",
    "ipaddress._BaseAddress",
}


class Incomparable(Exception):
    """The value equals nothing: NaN, a function, a plain object, something too large to write."""


def describe(value, official: bool = False) -> str:
    """What the child reports of a value: "=digest" or "incomparable".

    A second digest follows where the value holds an OrderedDict; it includes the order.
    """
    try:
        writer = Canonical(official)
        described = f"={digest_of(writer.text(value))}"
        if writer.saw_ordered:
            ordered = Canonical(official, ordered=True)
            described += f",{digest_of(ordered.text(value))}"
        return described
    except BaseException:  # the answer's own classes may raise anything while they are read
        return "incomparable"


def digest_of(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Canonical:
    """Writes a value as text, so that two values are equal under `==` exactly when their texts are.

    Subclasses are reduced to their base value by methods of the base, such as `int.__index__`, so
    that no method of the answer decides. The parent compares digests of the texts.
    """

    def __init__(self, official: bool, ordered: bool = False):
        self.official = official
        self.ordered = ordered
        self.saw_ordered = False
        self.left = MAX_VALUE_CHARACTERS

    def text(self, value, depth: int = 0) -> str:
        if depth > MAX_VALUE_DEPTH or self.left < 0:
            raise Incomparable
        written = self.scalar(value)
        self.left -= NODE_COST + len(written)
        return written or self.container(value, depth + 1) or self.library(value, depth + 1)

    def scalar(self, value) -> str:
        """The text of a scalar, "" for other values."""
        if value is None or value is Ellipsis:
            return repr(value)
        if isinstance(value, str):
            return encode_basestring_ascii(value)
        if isinstance(value, int):
            # Hexadecimal, as decimal digits are limited in number and take quadratic time.
            return format(int.__index__(value), "x")
        if isinstance(value, float):
            return self.ratio(float.__float__(value))
        if isinstance(value, complex):
            real, imaginary = self.ratio(value.real), self.ratio(value.imag)
            return real if imaginary == "0" else f"{real}+{imaginary}j"
        if isinstance(value, (bytes, bytearray)):
            return "bytes " + bytes(value).hex()  # hexadecimal alone is an int
        return ""

    def ratio(self, number) -> str:
        """The exact rational value: 1, 1.0, True, Decimal(1) and Fraction(1) are one number."""
        if number != number:
            raise Incomparable
        if number in (float("inf"), float("-inf")):
            return "inf" if number > 0 else "-inf"
        top, bottom = number.as_integer_ratio()
        return f"{top:x}" if bottom == 1 else f"{top:x}/{bottom:x}"

    def container(self, value, depth: int) -> str:
        """The text of a built-in container, "" for other values."""
        if isinstance(value, dict):
            return self.dictionary(value, depth)
        for base, (opening, closing) in ENCLOSED.items():
            if isinstance(value, base):
                if base.__len__(value) * NODE_COST > self.left:
                    raise Incomparable
                parts = [self.text(item, depth) for item in base.__iter__(value)]
                if opening == "{":
                    parts.sort()
                return opening + ",".join(parts) + closing
        if isinstance(value, range):
            if value[:1] == value:  # empty or one number, whatever its step
                ends = value
            else:
                ends = (value[0], value[-1], value.step)
            return f"range{[format(end, 'x') for end in ends]}"
        return ""

    def dictionary(self, value, depth: int) -> str:
        pairs = []
        for key, item in dict.items(value):
            pairs.append(f"{self.text(key, depth)}:{self.text(item, depth)}")
        if any(base.__name__ == "OrderedDict" for base in type(value).__mro__):
            self.saw_ordered = True
            if self.ordered:
                return f"<o{','.join(pairs)}>"
        return f"<{','.join(sorted(pairs))}>"

    def library(self, value, depth: int) -> str:
        """The text of a value of a known library type, a dataclass or an enum.

        Types are known by name, so that no library is imported for them.
        """
        kind = type(value)
        names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
        if "decimal.Decimal" in names and value.is_finite() and abs(value.adjusted()) > 5000:
            return f"decimal{value.normalize()}"
        if names & {"decimal.Decimal", "fractions.Fraction"}:
            return self.ratio(value)
        if names & {"datetime.datetime", "datetime.time"}:
            offset = value.utcoffset()
            if offset is not None and "datetime.datetime" in names:
                value, offset = value - offset, "UTC"
            return f"time {value.replace(tzinfo=None, fold=0).isoformat()} {offset}"
        if "datetime.date" in names:
            return f"date {value.isoformat()}"
        if "datetime.timedelta" in names:
            return f"delta {value.days} {value.seconds} {value.microseconds}"
        if "datetime.timezone" in names:
            return f"zone {value.utcoffset(None)}"
        if "numpy.ndarray" in names and value.shape:
            if self.official and value.size != 1:
                raise Incomparable  # `if expected == array` raises in the published grader
            return f"array{value.shape}{self.text(value.ravel().tolist(), depth)}"
        if names & {"numpy.ndarray", "numpy.generic"} and type(value.item()) is not kind:
            return self.text(value.item(), depth)
        if names & NAMED_VALUES:
            return f"{kind.__name__}{encode_basestring_ascii(str(value))}"
        if self.official:
            raise Incomparable  # the published grader meets two different classes of the same name
        if "enum.Enum" in names:
            return f"{kind.__name__}.{value._name_ or self.text(value._value_, depth)}"
        if hasattr(kind, "__dataclass_fields__"):
            return f"{kind.__name__}({','.join(self.fields(value, kind, depth))})"
        raise Incomparable

    def fields(self, value, kind: type, depth: int) -> list[str]:
        """The fields of a dataclass that its `==` compares."""
        names = [entry.name for entry in kind.__dataclass_fields__.values() if entry.compare]
        written = []
        for name in names:
            if hasattr(value, name):  # some exist as arguments of __init__ alone
                written.append(f"{name}={self.text(getattr(value, name), depth)}")
        return written


NOTHING = describe(None)  # a solution that returns None has failed


# -----------------------------------------------------------------------------
# The filter of system calls: an allow-list in BPF, on x86-64 and aarch64

# Each call is name:x86_64:aarch64, with "-" where it is absent. All other calls fail with EPERM.
SYSTEM_CALLS = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 ioctl:16:29 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66
access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232
madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:-
setitimer:38:103 getpid:39:172 sendfile:40:71 recvfrom:45:207 recvmsg:47:212 shutdown:48:210
getsockname:51:204 getpeername:52:205 setsockopt:54:208 getsockopt:55:209 exit:60:93
wait4:61:260 uname:63:160 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 ftruncate:77:46
getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:-
getdents64:217:61 link:86:- unlink:87:- symlink:88:- readlink:89:- umask:95:166
gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153
getuid:102:174 getgid:104:176 geteuid:107:175 getegid:108:177 getppid:110:173 getpgrp:111:-
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getsid:124:156
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132
statfs:137:43 fstatfs:138:44 getpriority:140:141 sched_getparam:143:121
sched_getscheduler:145:120 arch_prctl:158:- setrlimit:160:164 gettid:186:178 time:201:-
futex:202:98 sched_getaffinity:204:123 set_tid_address:218:96 restart_syscall:219:128
fadvise64:221:223 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 waitid:247:95 openat:257:56 mkdirat:258:34
newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36
readlinkat:267:78 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
get_robust_list:274:100 epoll_pwait:281:22 eventfd2:290:19 epoll_create1:291:20
dup3:292:24 pipe2:293:59 getcpu:309:168 renameat2:316:276 getrandom:318:278 membarrier:324:283
copy_file_range:326:285 statx:332:291 rseq:334:293 close_range:436:436 faccessat2:439:439"""
# What the worker alone needs; a child is refused them.
WORKER_CALLS = "prctl:157:167 chmod:90:- fchmodat:268:53 landlock_restrict_self:446:446"
# Allowed with one argument fixed: name:x86_64:aarch64:argument:value. Sockets of a pair are local
# (AF_UNIX), messages have no address, limits are those of the process itself.
CONDITIONS = "socketpair:53:199:0:1 sendto:44:206:4:0 prlimit64:302:261:0:0"
# Refused with one argument of this value, in the same form: F_SETOWN, F_SETOWN_EX, FIOSETOWN and
# SIOCSPGRP name another process that a file is to send its signals to.
SIGNAL_OWNERS = "fcntl:72:25:1:8 fcntl:72:25:1:15 ioctl:16:29:1:35073 ioctl:16:29:1:35074"
# Opening a file with these bits among O_TRUNC and O_ACCMODE is refused: "read only, but empty it",
# which Landlock knows since Linux 6.2, and access mode 3, of which it never asks anything.
OPEN_BITS, ODD_OPENINGS = 0o1003, (0o1000, 0o1003, 0o3)
OPENINGS = "open:2:-:1 openat:257:56:2"
# Allowed in the worker, and in a child under a condition: new threads, signals to itself
CLONE = "clone:56:220"
KILLS = "kill:62:129 tgkill:234:131"
# Its flags are out of a filter's sight. "No such call" makes the C library use clone.
CLONE3 = "clone3:435:435"
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

# Results of a filter, SECCOMP_RET_...: allow; fail with EPERM; fail with ENOSYS; end the process
ALLOW, REFUSE, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
# BPF instructions: load a word, mask it, jump if equal, jump if any bit is set, return
LOAD, MASK, EQUAL, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
# Offsets of what a filter can load: call number, machine, arguments of 8 bytes each
CALL_NUMBER, MACHINE, ARGUMENTS = 0, 4, 16
THREAD = 0x10000  # CLONE_THREAD


def worker_filter() -> bytes:
    """The allow-list. It is built once, and every child inherits it."""
    machine = MACHINES[platform.machine()][1]
    program = [
        instruction(LOAD, MACHINE),
        instruction(EQUAL, machine, 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, CALL_NUMBER),
        answer_calls(f"{SYSTEM_CALLS} {WORKER_CALLS} {CLONE} {KILLS}", ALLOW),
    ]
    for entry in CONDITIONS.split():
        number = call_numbers(entry)[0]
        argument, value = entry.split(":")[3:]
        program.append(fixed_argument(number, int(argument), int(value)))
    program.append(answer_calls(CLONE3, NO_SUCH_CALL))
    program.append(instruction(RETURN, REFUSE))
    return b"".join(program)


def child_filter(process: int) -> bytes:
    """On top of it, in a child: threads but no processes, signals to itself alone, no new locks."""
    program = [
        instruction(LOAD, CALL_NUMBER),
        fixed_argument(call_numbers(CLONE)[0], 0, THREAD, ANY_BIT),
    ]
    for number in call_numbers(KILLS):
        program.append(fixed_argument(number, 0, process))
    for entry in SIGNAL_OWNERS.split():
        number = call_numbers(entry)[0]
        argument, value = entry.split(":")[3:]
        program.append(refused_argument(number, int(argument), int(value)))
    for entry in OPENINGS.split():
        for number in call_numbers(entry):  # aarch64 has no "open"
            for bits in ODD_OPENINGS:
                argument = int(entry.split(":")[3])
                program.append(refused_argument(number, argument, bits, OPEN_BITS))
    program.append(answer_calls(WORKER_CALLS, REFUSE))
    program.append(instruction(RETURN, ALLOW))
    return b"".join(program)


def call_numbers(calls: str) -> list[int]:
    """The numbers of system calls on this machine."""
    column = 1 + MACHINES[platform.machine()][0]
    numbers = [call.split(":")[column] for call in calls.split()]
    return [int(number) for number in numbers if number != "-"]


def answer_calls(calls: str, action: int) -> bytes:
    """Return the action if the call is one of these."""
    program = []
    for number in call_numbers(calls):
        program.append(instruction(EQUAL, number, 0, 1))
        program.append(instruction(RETURN, action))
    return b"".join(program)


def fixed_argument(number: int, argument: int, value: int, test: int = EQUAL) -> bytes:
    """Allow the call if the low half of an argument passes the test and its high half is zero.

    Refuse it otherwise; skip all this for other calls.
    """
    low_half = ARGUMENTS + 8 * argument
    program = [
        instruction(EQUAL, number, 0, 6),
        instruction(LOAD, low_half),
        instruction(test, value, 0, 3),
        instruction(LOAD, low_half + 4),
        instruction(EQUAL, 0, 0, 1),
        instruction(RETURN, ALLOW),
        instruction(RETURN, REFUSE),
    ]
    return b"".join(program)


def refused_argument(number: int, argument: int, value: int, mask: int = 0xFFFFFFFF) -> bytes:
    """Refuse the call if an argument, of which the kernel reads the low half, has this value.

    Only the bits of the mask are compared.
    """
    program = [
        instruction(EQUAL, number, 0, 5),
        instruction(LOAD, ARGUMENTS + 8 * argument),
        instruction(MASK, mask),
        instruction(EQUAL, value, 0, 1),
        instruction(RETURN, REFUSE),
        instruction(LOAD, CALL_NUMBER),
    ]
    return b"".join(program)


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction; a jump skips `if_true` or `if_false` instructions."""
    return struct.pack("HBBI", code, if_true, if_false, value)


if __name__ == "__main__":
    if sys.argv[1:2] != ["judge-worker"]:
        raise SystemExit("found no worker to run: this file is a module, import grade from it")
    judge_worker(int(sys.argv[2]))
