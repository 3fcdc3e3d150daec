"""The parent's end of a worker process: sends it jobs, reads outcomes, measures and limits time.

judge/sandbox.py keeps a pool of these. `Worker()` starts judge/worker.py in a new interpreter;
`run` has it fork a child for one job, and returns what the child said of each test. The child is
not trusted: a line that is not an outcome, or too much of anything, ends it.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

from judge.worker import empty_folder

OUTCOME = re.compile(
    rb"=[0-9a-f]{32}(,[oc][0-9a-f]{32}){0,2}|incomparable|raised [\w?]{1,61}", re.ASCII
)
MAX_OUTCOME_BYTES = 160
MAX_THREADS = 200  # of a child; more could take all that the machine has
END_SECONDS = 5  # how long a worker may take to end
CONTROL_SECONDS = 60  # how long a worker may take to start, to fork and to tidy up
WALL_PER_CPU = 4  # time in the kernel, and time asleep, are limited to so many times `seconds`
POLL = struct.pack("ll", 0, 50_000)  # seconds, microseconds: how often a silent child is looked at
# macOS counts POLL anew for each byte that arrives, so there recv must not wait for more
WAIT = socket.MSG_WAITALL if sys.platform == "linux" else 0
SUSPENDED = 1  # seconds between two looks, beyond which this process itself had been stopped
USER_CLOCK, CPU_CLOCK = 1, 2  # CPUCLOCK_VIRT: in its own code; CPUCLOCK_SCHED: with the kernel's
# What a worker's interpreter runs. It makes the package `judge` by hand, so that the folder of the
# project is never on sys.path: answers inherit that.
START = """\
import sys, types
_, _, folder, descriptor = sys.argv
sys.modules["judge"] = types.ModuleType("judge")
sys.modules["judge"].__path__ = [folder]
from judge.worker import main
main(int(descriptor))
"""
NO_ROOM = (
    "found a machine without room for another process, expected some for the judge; raise the"
    " process limit (ulimit -u) or end other programs, then rerun the same command"
)


def process_clocks(pid: int) -> tuple[float, float, float]:
    """Seconds of a process: in its own code, with those in the kernel, and asleep.

    The first one limits an answer, since a page fault can cost much time in the kernel on a busy
    machine. Of the last one, only differences say something. It waits for a core in none of them.
    """
    wall = time.monotonic()
    if sys.platform != "linux":
        return wall, wall, 0.0
    # how the kernel numbers CPU clocks: MAKE_PROCESS_CPUCLOCK in include/linux/posix-timers.h
    user = time.clock_gettime((~pid << 3) | USER_CLOCK)
    total = time.clock_gettime((~pid << 3) | CPU_CLOCK)
    return user, total, wall - waited_for_a_core(pid) - total


def waited_for_a_core(pid: int) -> float:
    """Seconds that a process could run and did not; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class Worker:
    """A worker process and its scratch folder.

    It is started by exec: a fork would carry our memory, threads and CUDA.
    """

    def __init__(self):
        self.owner = os.getpid()
        self.folder = tempfile.mkdtemp(prefix="colbench-judge-")
        self.control, theirs = blocking_pair()
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
            "MALLOC_ARENA_MAX": "1",  # else each thread takes 64 MB of a child's address space
        }
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        flags = ["-s", "-B", "-W", "ignore"]
        if sys.version_info >= (3, 11):
            flags.append("-P")  # the scratch folder is not on sys.path
        here = os.path.dirname(os.path.abspath(__file__))
        arguments = ["judge-worker", here, str(theirs.fileno())]  # the first names it in `ps`
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *flags, "-c", START, *arguments],
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
        try:
            line = self.control.makefile("rb").readline()
        except TimeoutError:
            line = b""
        if not line:
            raise SystemExit(
                f"found a judge worker that has ended, or is not ready after {CONTROL_SECONDS}"
                " seconds, expected it to start; see its message above or, without one, rerun the"
                " same command when machine and file system are less busy"
            )
        return json.loads(line)

    def run(self, job: bytes, count: int, seconds: float) -> list[str]:
        """Run a job of `count` tests in a new child; the outcomes up to the test that ended it."""
        ours, theirs = blocking_pair()
        with ours:
            with theirs:  # open until the worker has it: macOS may shut a socket that is under way
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
    ) -> list[str]:
        """Send the job, then read outcomes until the last one, an early end or a timeout."""
        outcomes = []
        rest = b""
        started, looked = process_clocks(child), time.monotonic()
        with contextlib.suppress(ConnectionError):  # an early end shows when we read
            channel.sendall(job)
            channel.shutdown(socket.SHUT_WR)
        while len(outcomes) < count:
            if thread_count(child) > MAX_THREADS:
                return [*outcomes, "crashed"]
            try:
                # Returns at the end of the stream; after POLL, with what has arrived by then.
                data = channel.recv(1 << 16, WAIT)
                if not data:
                    return [*outcomes, "crashed"]
            except BlockingIOError:
                data = b""  # nothing arrived
            except ConnectionError:
                return [*outcomes, "crashed"]
            # a job that was suspended (SIGSTOP, docker pause, scontrol) is no answer that sleeps
            stopped = time.monotonic() - looked - SUSPENDED
            if stopped > 0:
                user, total, asleep = started
                started = user, total, asleep + stopped
            looked = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines[:count - len(outcomes)]:  # an answer could write more
                if not OUTCOME.fullmatch(line):
                    return [*outcomes, "crashed"]  # not our line: the answer wrote to our socket
                outcomes.append(line.decode())
            if lines:
                started = process_clocks(child)  # of the test that runs now
            elif len(rest) > MAX_OUTCOME_BYTES:
                return [*outcomes, "crashed"]
            elif out_of_time(started, process_clocks(child), seconds):
                return [*outcomes, "timed out"]
        return outcomes


def thread_count(pid: int) -> int:
    """The threads of a process; 0 where the system does not say."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def out_of_time(started: tuple, now: tuple, seconds: float) -> bool:
    """Whether a test that began at the clocks `started` has used up its time."""
    user, total, asleep = (end - start for start, end in zip(started, now, strict=True))
    return user > seconds or max(total, asleep) > seconds * WALL_PER_CPU


def blocking_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets that block, whatever socket.setdefaulttimeout says in this process."""
    ours, theirs = socket.socketpair()
    ours.setblocking(True)
    theirs.setblocking(True)
    return ours, theirs


def close_workers(workers: set[Worker]) -> None:
    """End the workers that this process has started, and remove their scratch folders."""
    mine = [worker for worker in workers if worker.owner == os.getpid()]  # a forked copy owns none
    for worker in mine:
        with contextlib.suppress(OSError):  # the worker may have ended first
            # Unlike close, this reaches the worker even if a forked process holds a copy.
            worker.control.shutdown(socket.SHUT_RDWR)
        worker.control.close()
    for worker in mine:
        try:
            worker.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        with contextlib.suppress(OSError):
            empty_folder(worker.folder)  # rmtree would recurse, however deep an answer has nested
        shutil.rmtree(worker.folder, ignore_errors=True)
    workers.clear()
