"""Judge against the usual ways to run model-written code: CPU seconds per answer, side by side in one run.

python tests/benchmark_judge.py [samples]     Expected: at least 3.3x, at least 7.5x, at most 3x a bare fork.
"""
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import colbench  # noqa: E402

FUNCTIONS = [
    ("def f(n):\n    total = 0\n    for i in range(n):\n        total += i * i\n    return total", "f({})"),
    ("def f(n):\n    words = ['a%d' % i for i in range(n)]\n    return {w: len(w) for w in words}", "f({})"),
    ("def f(n):\n    return sorted(set(i * 7 % 11 for i in range(n)), reverse=True)", "f({})"),
    ("def f(n):\n    return 'even' if n % 2 == 0 else 'odd'", "f({})"),
]


def tasks_and_answers(count: int) -> tuple[list[dict], list[str]]:
    """Ten tests each; one answer in eight is wrong."""
    tasks, answers = [], []
    for number in range(count):
        code, call = FUNCTIONS[number % len(FUNCTIONS)]
        tests = {f"test{i}": call.format(i * 3) for i in range(10)}
        tasks.append({"ground_truth": code, "test_cases": tests})
        answers.append(code.replace("n", "n", 1) if number % 8 else "def f(n):\n    return n")
    return tasks, answers


def run_tests(code: str, tests: list[str], results) -> None:
    for test in tests:
        names: dict = {}
        exec(code, names)
        results.append(repr(eval(test, names)))


def process_per_answer(task: dict, answer: str) -> None:
    """human-eval style: a Manager and a Process for each answer."""
    with multiprocessing.Manager() as manager:
        results = manager.list()
        process = multiprocessing.Process(target=run_tests, args=(answer, list(task["test_cases"].values()), results))
        process.start()
        process.join(2)
        process.kill()


def one_test(code: str, test: str, results) -> None:
    names: dict = {}
    exec(code, names)
    results.put(repr(eval(test, names)))


def process_per_test(task: dict, answer: str) -> None:
    """A Process and a Queue for each test."""
    for test in task["test_cases"].values():
        results = multiprocessing.Queue()
        process = multiprocessing.Process(target=one_test, args=(answer, test, results))
        process.start()
        results.get(timeout=2)
        process.join(2)


def bare_fork(task: dict, answer: str) -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)


def cpu_seconds(workers=()) -> float:
    """Of this process, its dead children, and the judge's live workers with theirs."""
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for worker in workers:
        fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return used


def milliseconds(call, pairs, workers=()) -> float:
    before = cpu_seconds(workers)
    call(pairs)
    return 1000 * (cpu_seconds(workers) - before) / len(pairs)


def main(count: int) -> None:
    multiprocessing.set_start_method("fork")
    tasks, answers = tasks_and_answers(count)
    pairs = list(zip(tasks, answers, strict=True))
    with colbench.Judge(2) as judge:
        judge.grade_all(tasks, answers)
        started = time.perf_counter()
        ours = milliseconds(lambda _: judge.grade_all(tasks, answers), pairs, judge.workers)
        wall = time.perf_counter() - started
    print(f"judge               {ours:7.2f} CPU ms an answer, {count / wall:.0f} answers a second")
    for peer, share in ((process_per_answer, 10), (process_per_test, 20), (bare_fork, 1)):
        some = pairs[: max(5, count // share)]
        cost = milliseconds(lambda some, peer=peer: [peer(*pair) for pair in some], some)
        print(f"{peer.__name__:19s} {cost:7.2f} CPU ms an answer, ratio to the judge {cost / ours:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
