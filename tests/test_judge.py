"""The judge: values, hostile answers, limits, life and death of its processes."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import colbench

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("COLBENCH_DATA", ROOT.parent / "shared" / "data"))
DOUBLE = {"ground_truth": "def f(n):\n    return n * 2", "test_cases": {f"test{i}": f"f({i})" for i in range(1, 4)}}


def real_rows(name):
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not here; set COLBENCH_DATA to the folder that holds it")
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def judge():
    with colbench.Judge(2) as judge:
        yield judge


def value_task(value, prelude=""):
    return {"ground_truth": f"{prelude}\ndef f():\n    return {value}", "test_cases": {"test1": "f()"}}


def equal(judge, expected, actual, prelude="", profile="fixed"):
    answer = f"{prelude}\ndef f():\n    return {actual}"
    return judge.grade(value_task(expected, prelude), answer, profile).success


def test_every_known_case_gets_its_expected_reward(judge, monkeypatch):
    rows = real_rows("judge_cases.jsonl")
    monkeypatch.setenv("COLBENCH_TEST_TOKEN", "secret")
    grades = judge.grade_all(rows, [row["answer"] for row in rows])
    pairs = zip(rows, grades, strict=True)
    assert not {row["name"]: grade for row, grade in pairs if grade.reward != row["expected_reward"]}


def test_real_references_score_one_against_themselves_save_those_that_check_reports(judge):
    rows = real_rows("colbench_backend_200.jsonl")
    reported = {number for number, *_ in colbench.check_tasks(rows)[0]}
    grades = judge.grade_all(rows, [row["ground_truth"] for row in rows])
    assert {number for number, grade in enumerate(grades) if not grade.success} <= reported


@pytest.mark.parametrize("expected, actual", [
    ("1", "True"), ("1", "1.0"), ("0.5", "__import__('fractions').Fraction(1, 2)"),
    ("10", "__import__('decimal').Decimal(10)"),
    ("{1: 'a', 2: 'b'}", "{2: 'b', 1.0: 'a'}"), ("{1, 2}", "frozenset([2, 1])"), ("[0.0]", "[-0.0]"),
    ("(1, 2)", "__import__('collections').namedtuple('P', 'x y')(1, 2)"), ("b'ab'", "bytearray(b'ab')"),
    ("range(0)", "range(5, 5)"), ("'\\ud800'", "'\\ud800'"), ("10 ** 6000", "10 ** 6000"),
    ("{'b': 1, 'a': 2}", "__import__('collections').OrderedDict(a=2, b=1)"),
    ("__import__('enum').IntEnum('E', 'A B').B", "2"), ("{1: 0}.keys()", "{1}"),
    ("__import__('enum').Enum('E', 'A B').B", "__import__('enum').Enum('E', 'A B').B")])
def test_values_that_python_calls_equal_are_credited(judge, expected, actual):
    assert equal(judge, expected, actual)


@pytest.mark.parametrize("expected, actual", [
    ("(1, 2)", "[1, 2]"), ("1", "'1'"), ("'a'", "b'a'"), ("float('nan')", "float('nan')"), ("[1]", "{1}"),
    ("0.1 + 0.2", "0.3"), ("object()", "object()"), ("f", "f"), ("iter([1])", "iter([1])"),
    ("2 ** 53", "2 ** 53 + 1.5"),
    ("__import__('collections').OrderedDict(a=2, b=1)", "__import__('collections').OrderedDict(b=1, a=2)"),
    ("__import__('datetime').date(2024, 1, 1)", "__import__('datetime').datetime(2024, 1, 1)"), ("'null'", "'None'")])
def test_values_that_differ_are_not_credited(judge, expected, actual):
    assert not equal(judge, expected, actual)


def sample_values():
    import collections
    import dataclasses
    import datetime
    import decimal
    import fractions
    import uuid

    day, zone = datetime.datetime(2024, 1, 1, 12), datetime.timezone(datetime.timedelta(hours=2))
    point = dataclasses.make_dataclass("Point", ["x", ("cached", int, dataclasses.field(default=0, compare=False))])
    return [None, ..., True, 1, 1.0, 2, -1.5, 1e300, float("inf"), -float("inf"), 1 + 0j, 1 + 2j, "1", "a", b"a",
            bytearray(b"a"), [], [1, 2], [2, 1], (1, 2), {1, 2}, frozenset([2, 1]), collections.deque([1, 2]), {1: "a"},
            {True: "a"}, {"a": [1]},
            collections.Counter({1: 2}), {1: 2}, {1: 2}.keys(), {1: 2}.items(), range(3), range(0, 3), range(0), range(2, 2),
            range(5, 9, 9), range(5, 6), decimal.Decimal("1.0"), decimal.Decimal("1e9999"), decimal.Decimal("-1.5"),
            fractions.Fraction(3, 2), day, day.date(), day.time(), day.replace(tzinfo=zone),
            day.replace(hour=10, tzinfo=datetime.timezone.utc), datetime.timedelta(1), datetime.timedelta(hours=24), zone,
            uuid.UUID(int=5), Path("a/b"), Path("a") / "b", point(1), point(1, 7), point(2)]


def test_two_values_are_described_alike_exactly_when_python_calls_them_equal():
    values = sample_values()
    for one in values:
        assert colbench.describe(one).startswith("="), one
        for other in values:
            assert (colbench.describe(one) == colbench.describe(other)) == bool(one == other), (one, other)


def test_an_array_is_described_by_its_shape_and_values_and_is_no_list_while_a_numpy_scalar_is_its_number():
    import numpy

    for scalar in (numpy.int64(2), numpy.float64(-1.5), numpy.bool_(True), numpy.str_("a")):
        assert colbench.describe(scalar) == colbench.describe(scalar.item()) != "incomparable"
    arrays = [numpy.arange(4), numpy.array([0.0, 1, 2, 3]), numpy.arange(4).reshape(2, 2), [0, 1, 2, 3]]
    described = [colbench.describe(array) for array in arrays]
    assert described[0] == described[1] and len(set(described)) == 3
    assert colbench.describe(arrays[0], official=True) == "incomparable"


def test_what_has_no_value_of_its_own_or_is_too_large_is_not_comparable():
    deep, endless = [], []
    for _ in range(100):
        deep = [deep]
    endless.append(endless)
    for value in (float("nan"), object(), len, iter([1]), deep, endless, list(range(400_000)), {1: [float("nan")]}):
        assert colbench.describe(value) == "incomparable"


@pytest.mark.parametrize("profile", ["fixed", "official"])
def test_the_closed_child_reports_what_the_same_functions_give_outside(judge, profile):
    code = ("import collections\ndef f(n):\n    return n + 1\ndef g(n):\n    return f(n)\n"
            "class E(__import__('enum').Enum):\n    A = 1\n")
    tests = ["f(1)", "g(1)", "E.A", "[f(i) for i in [1]]", "{f(i) for i in [1]}", "{i: i for i in [1]}", "sum(map(f, [1, 2]))",
             "collections.OrderedDict(b=1, a=2)", "(lambda n: [i for i in range(n)])(2)", "f(", "f('')"]

    def outside(test):
        try:
            return colbench.run_test(colbench.compile_for(code, "exec", profile == "official"), test, profile == "official")
        except BaseException as error:
            return f"raised {type(error).__name__}"

    assert judge.outcomes(code, tests, profile, 5.0) == [outside(test) for test in tests]
    assert ("raised NameError" in map(outside, tests)) == (profile == "official")


def test_numpy_scalars_equal_numbers_and_arrays_equal_arrays(judge):
    pytest.importorskip("numpy")
    prelude = "import numpy as np"
    assert equal(judge, "3", "np.int64(3)", prelude) and equal(judge, "np.arange(4)", "np.array([0, 1, 2, 3])", prelude)
    assert not equal(judge, "[0, 1]", "np.arange(2)", prelude)
    assert not equal(judge, "np.arange(4)", "np.arange(4).reshape(2, 2)", prelude)
    unseeded = "np.random.rand() + __import__('random').random()"
    assert equal(judge, unseeded, unseeded, prelude), "both sides draw the same numbers"


def test_dataclasses_are_equal_by_fields_except_in_the_official_profile(judge):
    prelude = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int"
    assert equal(judge, "P(1)", "P(1)", prelude) and not equal(judge, "P(1)", "P(2)", prelude)
    inside = "def f():\n    from dataclasses import make_dataclass\n    return make_dataclass('P', ['x'])(1)"
    assert not judge.grade({"ground_truth": inside, "test_cases": {"a": "f()"}}, inside, "official").success


@pytest.mark.parametrize("code, tests, official", [
    ("def f(n):\n    return n * f(n - 1) if n else 1", ["f(0)", "f(3)"], 0.5),
    ("import math\ndef f(n):\n    return math.floor(n)", ["f(1)"], 0.0),
    ("def f(n):\n    import math\n    return math.floor(n)", ["f(1)"], 1.0),
    ("def f(n):\n    return n + 1", ["[f(i) for i in [1]]", "{f(i) for i in [1]}", "{i: f(i) for i in [1]}", "f(1)"],
     0.25),
    ("def f(n):\n    return 'sudo'", ["f(1)"], 0.0)])
def test_official_profile_gives_the_published_graders_number_on_every_python(judge, code, tests, official):
    task = {"ground_truth": code, "test_cases": {str(i): test for i, test in enumerate(tests)}}
    assert judge.grade(task, code, "official").reward == pytest.approx(official)
    assert judge.grade(task, code).reward == 1.0


@pytest.mark.parametrize("answer", [
    "```py\nX\n```", "```Python\nX\n```", "text\n```bash\npip install x\n```\n```python\nX\n```\nmore", "```\nX",
    "I WANT TO ANSWER: X", "```python3\nX\n```", "Sure.\nI WANT TO ANSWER:\n```python\nX\n```", "```X```"])
def test_code_is_found_in_fences_and_after_the_marker(answer):
    assert colbench.extract_code(answer.replace("X", DOUBLE["ground_truth"])) == DOUBLE["ground_truth"]


@pytest.mark.parametrize("answer", [None, "", "  ", 3, "```python\n```"])
def test_an_answer_without_code_gets_nothing(judge, answer):
    assert judge.grade(DOUBLE, answer) == colbench.Grade(0.0, False, dict.fromkeys(DOUBLE["test_cases"], "no code"))


def test_reasons_say_what_happened(judge):
    answer = "def f(n):\n    if n == 1: return unknown\n    if n == 2: __import__('os').abort()\n    return n * 2"
    assert judge.grade(DOUBLE, answer).reasons == {"test1": "raised NameError", "test2": "crashed", "test3": "passed"}
    assert set(judge.grade(DOUBLE, "def f(n) return").reasons.values()) == {"raised SyntaxError"}


HOSTILE = {
    "reads a file": "open('/etc/passwd').read()",
    "reads the owner": "open(f'/proc/{os.getppid()}/environ').read()",
    "reads its tasks": f"open({str(Path(__file__))!r}).read()",
    "writes outside": "open('/tmp/COLBENCH_PWNED', 'w')",
    "changes modes": "os.chmod('/tmp', 0o777)",
    "forks": "os.fork()",
    "runs programs": "subprocess.run(['id'])",
    "signals": "os.kill(os.getppid(), 0)",
    "signals all": "os.kill(-1, 0)",
    "opens sockets": "socket.socket()",
    "limits others": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    "eats memory": "bytearray(3 << 30)",
    "outlives its worker": "1 / (1 + ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))",
    "fills the disk": "open('x', 'wb').write(bytes(9 << 20))",
    "traces": "1 / (1 + ctypes.CDLL(None).ptrace(0, 0, 0, 0))",
    "forks by number": "1 / (1 + ctypes.CDLL(None).syscall(57))",
}


@pytest.mark.skipif(sys.platform != "linux", reason="these protections exist on Linux only")
@pytest.mark.parametrize("action", HOSTILE.values(), ids=HOSTILE.keys())
def test_the_machine_is_closed_to_an_answer_that(judge, action):
    assert all(judge.status[name] for name in colbench.REQUIRED)
    answer = f"import ctypes, os, resource, socket, subprocess\ndef f(n):\n    {action}\n    return n * 2"
    grade = judge.grade(DOUBLE, answer)
    assert grade.reward == 0 and all(reason.startswith("raised") for reason in grade.reasons.values())


def test_scratch_is_emptied_whatever_the_answer_left_in_it():
    answer = ("import os\ndef f(n):\n    os.makedirs('a/b'); os.mkdir('c', 0); os.symlink('/', 'l')\n"
              "    for _ in range(300): os.mkdir('d'); os.chdir('d')\n    return n * 2")
    with colbench.Judge(1) as alone:
        assert alone.grade({**DOUBLE, "test_cases": {"test1": "f(1)"}}, answer).success
        seen = alone.outcomes("import os\nassert os.listdir() == []", ["1"], "fixed", 1.0)
        assert seen == [colbench.describe(1)]


def test_an_endless_loop_costs_seconds_once_and_spares_the_other_tests_results(judge):
    task = {**DOUBLE, "test_cases": {f"test{i}": f"f({i})" for i in range(10)}}
    started = time.monotonic()
    reasons = judge.grade(task, "def f(n):\n    while n > 1: pass\n    return n * 2").reasons
    assert list(reasons.values()) == ["passed"] * 2 + ["timed out"] * 8 and time.monotonic() - started < 12


@pytest.mark.parametrize("noise", [
    "b'x' * 10 ** 7", "b'=' + b'0' * 32 + b'\\n'", "b'passed\\n' * 99", "b'[' * 100 + b'\\n'"])
def test_bytes_written_to_the_judges_socket_never_earn_credit_nor_harm_it(judge, noise):
    answer = (f"import os\ndef f(n):\n    for fd in range(3, 64):\n        try: os.write(fd, {noise})\n"
              "        except OSError: pass\n    return None")
    assert judge.grade(DOUBLE, answer).reward == 0
    assert judge.grade(DOUBLE, DOUBLE["ground_truth"]).success


def test_a_worker_that_dies_is_replaced_and_the_answer_graded(judge):
    with colbench.Judge(1) as alone:
        for worker in alone.workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_workers_and_children_die_with_an_owner_that_is_killed(tmp_path):
    code = ("import colbench, os, threading, time\njudge = colbench.Judge(1)\nworker = next(iter(judge.workers))\n"
            "loop = lambda: judge.outcomes('import time\\ntime.sleep(60)', ['1'], 'fixed', 60.0)\n"
            "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.3)\n"
            "print(worker.process.pid, worker.folder, flush=True)\ncopy = os.fork()\ntime.sleep(5)")
    # The forked copy keeps the worker's socket open: only the death signal tells.
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker, folder = owner.stdout.readline().split()
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline and any(map(running, [worker, *children])):
        time.sleep(0.05)
    assert children and not any(map(running, [worker, *children])) and not os.path.exists(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_owner_that_ends_while_its_worker_starts_leaves_no_scratch_folder(tmp_path):
    code = "import os, colbench; print(colbench.Worker().process.pid, flush=True); os._exit(9)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)},
                          capture_output=True, text=True)
    deadline = time.monotonic() + 30
    while running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done.returncode == 9 and not running(int(done.stdout)) and not os.listdir(tmp_path)


def test_a_limit_that_the_system_refuses_leaves_the_others_in_force(monkeypatch):
    asked = []

    def setrlimit(kind, values):
        asked.append(kind)
        if kind == colbench.resource.RLIMIT_AS:
            raise ValueError("as on macOS")

    monkeypatch.setattr(colbench.resource, "setrlimit", setrlimit)
    assert not colbench.set_limits(colbench.LIMITS) and len(asked) == len(colbench.LIMITS)


def test_require_protection_refuses_a_machine_that_lacks_one(monkeypatch):
    monkeypatch.setattr(colbench.Worker, "ready", lambda self: {"limits": True, "files": False})
    with pytest.raises(SystemExit, match="without these protections: system calls, files, privileges"):
        colbench.Judge(1, require_protection=True)


def test_check_reports_references_that_cannot_be_passed_with_the_reason():
    code = "import time, random\ndef f(n):\n    return [None, time.time_ns(), random.random(), float('nan'), 1][n]"
    task = {"ground_truth": code, "test_cases": {str(n): f"f({n})" for n in range(6)}}
    rows, status = colbench.check_tasks([task])
    assert {name: reason for _, _, name, reason in rows} == {
        "0": "the reference returns None", "1": "not deterministic", "3": "the value equals nothing",
        "5": "the reference raised IndexError"} and status["limits"]


def soak(count):
    """Mixed honest and hostile answers: flat memory, nothing left, even pace, the rewards of a fresh judge."""
    from benchmark import cpu_seconds
    answers = [DOUBLE["ground_truth"], "def f(n):\n    return n", "def f(n):\n    __import__('os')._exit(0)",
               "def f(n):\n    open('x', 'w').write('x' * n)\n    return n * 2", "def f(n): return (",
               "def f(n):\n    return [0] * 10 ** 6"]

    def memory(pid):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    with colbench.Judge(2) as fresh:
        expected = [fresh.grade(DOUBLE, answer) for answer in answers]
    with colbench.Judge(2) as judge:
        pids = [os.getpid(), *(worker.process.pid for worker in judge.workers)]
        costs, sizes, descriptors = [], [], []
        for _ in range(10):
            batch = [number % len(answers) for number in range(count // 10)]
            before = cpu_seconds(judge.workers)
            grades = judge.grade_all([DOUBLE] * len(batch), [answers[number] for number in batch])
            costs.append(cpu_seconds(judge.workers) - before)
            assert grades == [expected[number] for number in batch]
            sizes.append(sum(map(memory, pids)))
            descriptors.append(sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids[:1]))
        folders = [worker.folder for worker in judge.workers]
        assert pids[1:] == [worker.process.pid for worker in judge.workers]
    assert sizes[-1] < sizes[1] + (8 << 20) and descriptors[-1] <= descriptors[0]
    assert not any(map(running, pids[1:])) and not any(map(os.path.exists, folders))
    return costs


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_two_thousand_mixed_gradings_leave_nothing_and_do_not_slow_down():
    costs = soak(2000)
    assert min(costs[-3:]) < 1.5 * min(costs[:3])  # short batches on a shared machine: the long run asks for 10 %
