"""The sandbox: values, hostile answers, limits, life and death of its processes."""

import collections
import ctypes
import dataclasses
import datetime
import decimal
import enum
import errno
import fractions
import functools
import ipaddress
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
import uuid
import venv
from pathlib import Path

import pytest
from conftest import ROOT, read_rows, run_python

from judge import sandbox
from judge.calls import install_filter
from judge.handle import START, Worker, close_workers
from judge.sandbox import (
    REQUIRED, SOLUTION_FAILED, BackendJudge, Grade, check_solutions, extract_code)
from judge.values import describe, is_value, reason_of
from judge.worker import run_child

DOUBLE = {
    "ground_truth": "def f(n):\n    return n * 2",
    "test_cases": {"test1": "f(1)", "test2": "f(2)", "test3": "f(3)"},
}
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc or protections that exist on Linux only")
# asked of the kernel, not of the judge: LANDLOCK_CREATE_RULESET_VERSION of landlock_create_ruleset
needs_landlock = pytest.mark.skipif(
    sys.platform != "linux" or ctypes.CDLL(None).syscall(444, None, 0, 1) < 1,
    reason="this kernel has no Landlock, or a container hides it: files are open to answers")


@pytest.fixture(scope="module")
def judge():
    with BackendJudge(workers=2) as judge:
        yield judge


# -----------------------------------------------------------------------------
# Values


def test_every_known_case_gets_its_expected_reward(judge, real_data, monkeypatch):
    rows = read_rows(real_data("judge_cases.jsonl"))
    monkeypatch.setenv("COLBENCH_TEST_TOKEN", "secret")
    grades = judge.grade_all(rows, [row["answer"] for row in rows])
    wrong = {}
    for row, grade in zip(rows, grades, strict=True):
        if grade.reward != row["expected_reward"]:
            wrong[row["name"]] = grade
    assert not wrong


def test_real_solutions_pass_their_own_tests_except_those_that_check_reports(judge, real_data):
    rows = read_rows(real_data("colbench_backend_200.jsonl"))
    reported = {index for index, _, _ in check_solutions(rows)[0]}
    grades = judge.grade_all(rows, [row["ground_truth"] for row in rows])
    assert {index for index, grade in enumerate(grades) if not grade.success} <= reported


def sample_values():
    day = datetime.datetime(2024, 1, 1, 12)
    zone = datetime.timezone(datetime.timedelta(hours=2))
    cached = ("cached", int, dataclasses.field(default=0, compare=False))
    point = dataclasses.make_dataclass("Point", ["x", cached])
    scalars = [None, ..., True, 1, 1.0, 2, -1.5, 1e300, float("inf"), -float("inf")]
    scalars += [1 + 0j, 1 + 2j, "1", "a", b"a", bytearray(b"a"), "\ud800", "null", "None"]
    scalars += ["\U0001F600", "\ud83d\ude00"]
    scalars += [0.1 + 0.2, 0.3, 2**53, 2**53 + 1.5, 10**6000, 0xb12, b"\x12", 0.5, 10]
    scalars += [enum.IntEnum("E", "A B").B, enum.Enum("E", "A B").B]
    sequences = [[], [1], [0.0], [-0.0], [1, 2], [2, 1], (1, 2), collections.deque([1, 2])]
    sequences += [collections.namedtuple("P", "x y")(1, 2)]
    sequences += [range(3), range(0, 3), range(0), range(2, 2), range(5, 9, 9), range(5, 6)]
    tables = [{1}, {1, 2}, frozenset([2, 1]), {1: "a"}, {True: "a"}, {"a": [1]}]
    tables += [collections.Counter({1: 2}), {1: 2}, {1: 2}.keys(), {1: 2}.items()]
    tables += [collections.Counter({1: 2, 3: 0}), {1: 2, 3: 0}, [collections.Counter({3: 0})], [{}]]
    tables += [{1: 2, 3: 4}, {3: 4, 1.0: 2}]
    tables += [[none, collections.Counter({1: 2})]
               for none in ({}, collections.Counter(), collections.Counter({3: 0}))]
    tables += [type("Counter", (dict,), {})({1: 2, 3: 0}), type("OrderedDict", (dict,), {})({1: 2})]
    tables += [collections.OrderedDict(pairs) for pairs in ([(1, 2), (3, 4)], [(3, 4), (1, 2)])]
    numbers = [decimal.Decimal("1.0"), decimal.Decimal("1e9999"), decimal.Decimal("-1.5")]
    numbers += [decimal.Decimal(10), fractions.Fraction(3, 2), fractions.Fraction(1, 2)]
    times = [day, day.replace(hour=0), day.date(), day.time(), day.replace(tzinfo=zone), zone]
    times += [day.replace(hour=10, tzinfo=datetime.timezone.utc)]
    times += [datetime.timedelta(1), datetime.timedelta(hours=24)]
    objects = [uuid.UUID(int=5), Path("a/b"), Path("a") / "b", point(1), point(1, 7), point(2)]
    objects += [address(text) for address in (ipaddress.ip_address, ipaddress.ip_network)
                for text in ("10.0.0.1", "10.0.0.2", "10.0.0.1")]
    return scalars + sequences + tables + numbers + times + objects


def test_a_value_passes_for_another_exactly_when_python_calls_them_equal():
    values = [(value, describe(value)) for value in sample_values()]
    for one, expected in values:
        assert is_value(expected), one
        for other, described in values:
            passed = reason_of(expected, described) == "passed"
            assert passed == bool(one == other), (one, other)


def test_classes_of_one_name_are_one_class_except_in_the_official_profile():
    """Solution and answer have each their own."""
    def instances():
        return enum.Enum("E", "A B").B, dataclasses.make_dataclass("P", ["x"])(1)

    for one, other in zip(instances(), instances(), strict=True):
        assert one != other and describe(one) == describe(other) != "incomparable"
        assert describe(one, official=True) == "incomparable"


def test_an_array_is_its_shape_and_values_and_a_numpy_scalar_is_its_number():
    import numpy

    for scalar in (numpy.int64(2), numpy.float64(-1.5), numpy.bool_(True), numpy.str_("a")):
        assert describe(scalar) == describe(scalar.item()) != "incomparable"
    array = numpy.arange(4)
    described = describe(array)
    assert described == describe(numpy.array([0.0, 1, 2, 3]))
    assert len({described, describe(array.reshape(2, 2)), describe([0, 1, 2, 3])}) == 3
    assert describe(array, official=True) == "incomparable"
    of_one = describe(numpy.array([2]), official=True)  # equals a number: so does == say there
    assert of_one == describe(numpy.array([2.0]), official=True) == describe(2) != "incomparable"


def test_a_value_without_equality_or_too_large_is_not_comparable():
    deep, endless = [], []
    for _ in range(100):
        deep = [deep]
    endless.append(endless)
    shared = "x"  # written out, 2 ** 22 times
    for _ in range(22):
        shared = {0: shared, 1: shared}
    huge = list(range(400_000))
    plain = (float("nan"), object(), len, iter([1]), {1: [float("nan")]})
    for value in (*plain, deep, endless, shared, huge):
        assert describe(value) == "incomparable"
    assert reason_of("incomparable", "incomparable") == "wrong"


@pytest.mark.parametrize("call", ["random.random()", "random.gauss(0, 1)", "numpy.random.rand()"])
def test_every_test_of_every_answer_begins_with_the_same_random_numbers(judge, call):
    pytest.importorskip("numpy")
    code, calls = "import numpy, random", [call, call]
    first, *others = judge.outcomes(code, calls, 1.0) + judge.outcomes(code, calls, 1.0)
    assert others == [first] * 3 and is_value(first)


def test_sets_have_one_order_in_all_workers():
    found = []
    for _ in range(2):
        with BackendJudge(workers=1) as alone:
            found += alone.outcomes("", ["str(set('abcdefghijkl'))"], 1.0)
    assert found[0] == found[1] and is_value(found[0])


FACTORIAL = "def f(n):\n    return n * f(n - 1) if n else 1"
IMPORT_OUTSIDE = "import math\ndef f(n):\n    return math.floor(n)"
IMPORT_INSIDE = "def f(n):\n    import math\n    return math.floor(n)"
PLUS_ONE = "def f(n):\n    return n + 1"
COMPREHENSIONS = ["[f(i) for i in [1]]", "{f(i) for i in [1]}", "{i: f(i) for i in [1]}", "f(1)"]
BANNED_WORD = "def f(n):\n    return 'sudo'"
A_CLASS = "import enum\nclass E(enum.Enum):\n    A = 1"


@pytest.mark.parametrize("code, tests, official_reward", [
    (FACTORIAL, ["f(0)", "f(3)"], 0.5),
    (IMPORT_OUTSIDE, ["f(1)"], 0.0),
    (IMPORT_INSIDE, ["f(1)"], 1.0),
    (PLUS_ONE, COMPREHENSIONS, 0.25),
    (PLUS_ONE, ["f(1)", "[x for x in [f(i) for i in [1]]]"], 0.5),
    (f"S = {{i % 3 for i in range(9)}}\n{PLUS_ONE}", ["f(1)", "{i for i in [1]}"], 1.0),
    ("N = 3\ndef f(n, table=[N * i for i in range(5)]):\n    return table[n]", ["f(1)"], 0.0),
    (f"dict = {{1: 2}}\nD = {{k: v for k, v in dict.items()}}\n{PLUS_ONE}", ["f(1)"], 1.0),
    (BANNED_WORD, ["f(1)"], 0.0),
    (A_CLASS, ["E.A"], 0.0),
])
def test_official_profile_gives_the_published_graders_number_on_every_python(
        judge, code, tests, official_reward):
    task = {"ground_truth": code, "test_cases": {str(i): test for i, test in enumerate(tests)}}
    assert sandbox.grade(task, code, "official").reward == pytest.approx(official_reward)
    assert judge.grade(task, code).reward == 1.0


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="'fixed' or 'official'"):
        sandbox.grade(DOUBLE, DOUBLE["ground_truth"], "offical")


# -----------------------------------------------------------------------------
# Answers


@pytest.mark.parametrize("answer", [
    "```py\nX\n```",
    "```Python\nX\n```",
    "text\n```bash\npip install x\n```\n```python\nX\n```\nmore",
    "```\nX",
    "I WANT TO ANSWER: X",
    "I WANT TO ANSWER: I WANT TO ANSWER:\nX",
    "```python3\nX\n```",
    "```python # solution\nX\n```",
    "```text\nf(1) is 2\n```\n```Python solution.py\nX\n```",
    "Sure.\nI WANT TO ANSWER:\n```python\nX\n```",
    "```X```",
    "Here it is: ```python\nX\n``` That is all.",
    "  ```python\nX\n  ```",
    "text\r\nHere it is: ```python\r\nX\r\n```\r\n",
    "\n\ufeffX",
    "```python\n    X\n```",  # only its first line is indented
    "```python\nI WANT TO ANSWER:\nX\n```",
    "```python\nI WANT TO ANSWER:\nX\n```\n\nThis doubles n.",
    "**I WANT TO ANSWER:**\nX",
    "`I WANT TO ANSWER:`\n```python\nX\n```",
])
def test_code_is_found_in_fences_and_after_the_marker(answer):
    code = DOUBLE["ground_truth"]
    assert extract_code(answer.replace("X", code)) == code


@pytest.mark.parametrize("answer", ["1. Code:\n{}", "- Code:\n{}", "{}"])
def test_code_in_a_list_loses_the_lists_indentation(answer):
    code = f"import math\n\n{DOUBLE['ground_truth']}"
    for indentation in ("   ", "    ", "\t"):
        indented = textwrap.indent(code if answer == "{}" else f"```python\n{code}\n```",
                                   indentation)
        assert extract_code(answer.format(indented)) == code
        assert extract_code(answer.format(indented).replace("\n", "\r\n")) == code


@pytest.mark.parametrize("word", ["import os", "from os", "import sys", "from sys", "sudo",
                                  "transformers", "exit(", "quit(", "argparse"])
def test_the_official_profile_takes_no_code_with_a_word_that_it_bans(word):
    code = f"def f(n):\n    return {word!r}"
    assert extract_code(code, "official") == "" and extract_code(code) == code


@pytest.mark.parametrize("fence", ["X", "```python\nX\n```"])
@pytest.mark.parametrize("code", [
    'def f(n):\n    """Doubles.\n\n    ```\n    f(1)\n    ```\n    """\n    return n * 2',
    'def f(n):\n    return n * len("a```b".split("```"))',
    "# Example:\n# ```python\n# f(1)\n# ```\ndef f(n):\n    return n * 2",
])
def test_backticks_in_code_are_no_fence(judge, code, fence):
    assert judge.grade(DOUBLE, fence.replace("X", code)).reward == 1.0


EQUALS_ALL = "class Same:\n    __eq__ = lambda *_: True\n\n\ndef f(n):\n    return Same()"
OTHER_INT = "class int:\n    pass\n\n\ndef f(n):\n    return int, type(None)"


@pytest.mark.parametrize("odd", [None, "f(2) == {{'a': 1}}", "f(" + "-" * 20_000 + "1)"],
                         ids=["none", "double braces", "deep"])
def test_an_odd_test_fails_no_other_and_none_is_no_test(judge, odd):
    solution = "def f(a): return a + 1"
    task = {"ground_truth": solution, "test_cases": {"a": "f(1)", "odd": odd, "b": "f(2)"}}
    found = judge.grade(task, solution).reasons
    assert found.pop("odd", None) == (SOLUTION_FAILED if odd else None)
    assert found == {"a": "passed", "b": "passed"}


def test_as_many_answers_as_tasks_are_graded(judge):
    with pytest.raises(ValueError, match="found 1 answers to 2 tasks"):
        judge.grade_all([DOUBLE, DOUBLE], ["pass"])


@pytest.mark.parametrize("solution, test, wrong", [
    # right or wrong, a literal decides nothing: the solution's value does
    *[(DOUBLE["ground_truth"], f"f(1) == {literal}", wrong)
      for literal in (2, 9) for wrong in ("def f(n):\n    return 0", EQUALS_ALL)],
    ("def f(n):\n    pass", "f(1) == None", "def f(n):\n    return n"),
    ("def f(n):\n    return type(n), type(None)", "f(1)", OTHER_INT),
])
def test_an_answer_passes_by_its_value_alone(judge, solution, test, wrong):
    task = {"ground_truth": solution, "test_cases": {"a": test}}
    assert judge.grade(task, solution).success
    assert judge.grade(task, wrong).reasons == {"a": "wrong"}


def test_no_answer_reads_what_a_test_compares_with(judge):
    reads = ("import ast, sys\ndef f(n):\n    frame = sys._getframe()\n    while frame:\n"
             "        for found in frame.f_locals.values():\n"
             "            for text in found['tests'] if isinstance(found, dict)"
             " and 'tests' in found else ():\n"
             "                return ast.literal_eval(text.split('==')[1])\n"
             "        frame = frame.f_back")
    task = {"ground_truth": "def f(n): return n * n + 7", "test_cases": {"a": "f(3) == 16"}}
    assert judge.grade(task, reads).reward == 0
    assert judge.grade(task, task["ground_truth"]).success


@pytest.mark.parametrize("answer", [None, "", "  ", 3, "```python\n```"])
def test_an_answer_without_code_gets_nothing(judge, answer):
    reasons = dict.fromkeys(DOUBLE["test_cases"], "no code")
    assert judge.grade(DOUBLE, answer) == Grade(0.0, False, reasons)


def test_reasons_say_what_happened(judge):
    answer = (
        "def f(n):\n"
        "    if n == 1: return unknown\n"
        "    if n == 2: __import__('os').abort()\n"
        "    return n * 2"
    )
    reasons = judge.grade(DOUBLE, answer).reasons
    assert reasons == {"test1": "raised NameError", "test2": "crashed", "test3": "passed"}
    reasons = judge.grade(DOUBLE, "def f(n) return").reasons
    assert set(reasons.values()) == {"raised SyntaxError"}


def test_the_name_of_an_exception_is_told_in_ascii(judge):
    code = "def f(name): raise type(name, (Exception,), {})"
    outcomes = judge.outcomes(code, ["f('Übel')", "f('TürZu')", "f('数据')", "1"], 1.0)
    assert outcomes == ["raised ?bel", "raised T?rZu", "raised ??", describe(1)]


def test_a_test_that_the_solution_fails_stays_in_the_denominator(judge):
    code = "def f(n):\n    return None if n == 1 else n"
    task = {"ground_truth": code, "test_cases": {"a": "f(1)", "b": "f(2)", "c": "f()", "d": "f(3)"}}
    reasons = {"a": "solution failed", "b": "passed", "c": "solution failed", "d": "passed"}
    assert judge.grade(task, code) == Grade(0.5, False, reasons)


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
    "signals by a file": "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "signals by a file and a structure": "fcntl.fcntl(0, 15, struct.pack('ii', 1, os.getppid()))",
    "signals by a socket": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', 1))",
    "signals by a socket's group": "fcntl.ioctl(socket.socketpair()[0], 0x8902, bytes(4))",
    "leases a file": "fcntl.fcntl(os.open('x', os.O_CREAT), 1024, fcntl.F_RDLCK)",
    "leaves a number at its folder": "fcntl.fcntl(os.open('.', 0), 1036, struct.pack('Q', 5))",
    "changes the flags of a file": "fcntl.ioctl(os.open('x', os.O_CREAT), 0x40086602, bytes(8))",
    "signals by a high half": "1 / (1 + ctypes.CDLL(None).syscall(72, 0, (1 << 32) + 8, 1))",
    "opens sockets": "socket.socket()",
    "limits others": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    "eats memory": "bytearray(3 << 30)",
    "outlives its worker": "1 / (1 + ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))",
    "fills the disk": "open('x', 'wb').write(bytes(9 << 20))",
    "reserves the disk": "os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 9)",
    "empties what it may only read": "os.open(os.open('x', os.O_CREAT) and 'x', os.O_TRUNC)",
    "opens for neither reading nor writing": "os.open(os.open('x', os.O_CREAT) and 'x', 3)",
    "traces": "1 / (1 + ctypes.CDLL(None).ptrace(0, 0, 0, 0))",
    "forks by number": "1 / (1 + ctypes.CDLL(None).syscall(57))",
}


@needs_landlock
def test_a_folder_that_a_pth_file_puts_on_the_path_is_closed_to_answers(monkeypatch, tmp_path):
    venv.create(tmp_path / "venv")
    data, = (tmp_path / "venv").glob("lib/python*/site-packages")
    data.joinpath("editable.pth").write_text(f"{tmp_path}\n")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    with BackendJudge(workers=1) as alone:
        assert alone.status["files"]
        tests = [f"{str(tmp_path)!r} in sys.path", f"open({str(secret)!r}).read()"]
        found = alone.outcomes("import sys", tests, 1.0)
    assert found == [describe(True), "raised PermissionError"]


OPENS_FILES = ("reads a file", "reads its tasks", "writes outside")  # Landlock alone stops these


@needs_linux
@pytest.mark.parametrize("action", [
    pytest.param(action, id=name, marks=[needs_landlock] if name in OPENS_FILES else [])
    for name, action in HOSTILE.items()])
def test_the_machine_is_closed_to_an_answer_that(judge, action):
    assert all(judge.status[name] for name in REQUIRED if name != "files")
    imports = "import ctypes, fcntl, os, resource, socket, struct, subprocess"
    grade = judge.grade(DOUBLE, f"{imports}\ndef f(n):\n    {action}\n    return n * 2")
    assert grade.reward == 0
    assert all(reason.startswith("raised") for reason in grade.reasons.values())


# -----------------------------------------------------------------------------
# Each lock alone: behind the others, a hole in one would not show

FILTERED = """
import ctypes, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from judge.calls import child_filter, install_filter, worker_filter
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)  # no new privileges
assert install_filter(libc, worker_filter()) and install_filter(libc, child_filter(os.getpid()))
"""
TRY_CALLS = """
found = {}
for name, number, *arguments in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    found[name] = ctypes.get_errno()
print(json.dumps(found))
"""
# with arguments of -1, each one fails or does nothing where it is allowed, and not with EPERM
NEVER = """socket:41 connect:42 accept:43 sendmsg:46 bind:49 listen:50 execve:59 truncate:76
chmod:90 chown:92 ptrace:101 setresuid:117 mknod:133 prctl:157 mount:165 tkill:200
io_setup:206 add_key:248 keyctl:250 mknodat:259 fchmodat:268 unshare:272 perf_event_open:298
sendmmsg:307 setns:308 process_vm_readv:310 process_vm_writev:311 memfd_create:319 bpf:321
execveat:322 userfaultfd:323 pidfd_open:434 pidfd_getfd:438 io_uring_setup:425
io_uring_enter:426 landlock_restrict_self:446"""
SOMETIMES = {
    "a new process": (56, 0x800), "a signal": (62, 1, 0), "a signal to a thread": (234, 1, 1, 0),
    "a message to an address": (44, -1, 0, 0, 0, 8, 16),
    "one to an address without a low half": (44, -1, 0, 0, 0, 1 << 32, 16),
    "the limits of another process": (302, 1, 7, 0, 0), "a pair for the network": (53, 2, 1, 0, 0),
    "a lease of a file": (72, -1, 1024, 1), "a delegation of a file": (72, -1, 1040, 0),
    "flags of a file": (16, -1, 0x40086602, 0),
    **{f"open, bits {bits:o}": (2, 0, bits) for bits in (0o1000, 0o1003, 0o3)},
    **{f"openat, bits {bits:o}": (257, -1, 0, bits) for bits in (0o1000, 0o1003, 0o3)},
}
needs_x86 = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="names calls by number")


@needs_x86
def test_the_filters_of_system_calls_alone_refuse_what_no_answer_needs():
    calls = [(name, int(number), -1, -1, -1, -1, -1, -1)
             for name, number in (call.split(":") for call in NEVER.split())]
    calls += [(name, *call) for name, call in SOMETIMES.items()]
    calls.append(("clone3", 435, 0, 0))
    found = json.loads(run_python("-c", FILTERED + TRY_CALLS, json.dumps(calls)))
    assert found.pop("clone3") == errno.ENOSYS  # with which the C library takes clone instead
    assert len(found) == len(calls) - 1
    assert [name for name, code in found.items() if code != errno.EPERM] == []


@needs_x86
def test_a_call_by_the_interface_of_32_bits_ends_the_process():
    code = FILTERED + (
        "import mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid: eax = 20, int 0x80, return
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=60)
    assert done.stdout == ""
    assert done.returncode in (-signal.SIGSYS, -signal.SIGSEGV)  # a kernel without it says SEGV


RULED = """
import ctypes, json, os, socket, sys
from judge.worker import landlock_rules
folder, actions = sys.argv[1], json.loads(sys.argv[2])
os.chdir(folder)
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.syscall(446, landlock_rules(libc, folder), 0) == 0
for action in actions:
    try:
        exec(action)
        print(0)
    except OSError as error:
        print(error.errno)
"""


@needs_landlock
def test_the_file_rules_alone_refuse_what_no_answer_needs(tmp_path):
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.write_text("secret")
    scratch.mkdir()
    version = ctypes.CDLL(None).syscall(444, None, 0, 1)
    expected = [(code, action) for since, code, action in (
        (1, 0, "open('mine', 'w')"), (1, 0, "open('/dev/null', 'r+')"),
        (1, 0, "open('/dev/urandom')"),
        (1, 0, "open(os.__file__)"), (1, errno.EACCES, "open(os.__file__, 'r+')"),
        (1, errno.EACCES, f"open({str(outside)!r})"), (1, errno.EACCES, "os.mkfifo('fifo')"),
        (1, errno.EACCES, f"os.mkdir({str(tmp_path / 'new')!r})"),
        (1, errno.EACCES, "os.execv(sys.executable, ['python', '-c', ''])"),
        (3, errno.EACCES, f"os.truncate({str(outside)!r}, 0)"),
        (4, errno.EACCES, "socket.socket().bind(('127.0.0.1', 0))"),
        (4, errno.EACCES, "socket.socket().connect(('127.0.0.1', 1))"),
        (6, errno.EPERM, "os.kill(os.getppid(), 0)"),
    ) if since <= version]
    printed = run_python("-c", RULED, scratch, json.dumps([action for _, action in expected]))
    assert list(map(int, printed.split())) == [code for code, _ in expected]
    assert outside.read_text() == "secret"


def test_a_filter_that_the_kernel_refuses_is_not_said_to_be_active():
    refusing = types.SimpleNamespace(prctl=lambda *_: -1)
    assert install_filter(refusing, bytes(8)) is False


@pytest.mark.parametrize("filtered, ruled", [(-1, 0), (0, -1)])
def test_a_child_that_cannot_put_on_its_locks_reads_no_job(monkeypatch, filtered, ruled):
    def end(code):
        raise SystemExit(code)

    jobs = []
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("judge.worker.set_limits", lambda limits: True)
    monkeypatch.setattr("judge.worker.child_filter", lambda process: bytes(8))
    monkeypatch.setattr("judge.worker.run_job", jobs.append)
    libc = types.SimpleNamespace(
        prctl=lambda option, *_: filtered if option == 22 else 0, syscall=lambda *_: ruled)
    with pytest.raises(SystemExit, match="1"):
        run_child(libc, 0, os.getppid(), 3, True)
    assert jobs == []


@needs_linux
@pytest.mark.parametrize("name, most", [
    ("AS", 1 << 30), ("NOFILE", 64), ("FSIZE", 8 << 20), ("CORE", 0), ("STACK", 16 << 20),
    ("CPU", 300)])
def test_no_answer_can_raise_its_limits(judge, name, most):
    test = f"(lambda soft, hard: 0 <= soft == hard <= {most})(*resource.getrlimit({{}}))"
    found = judge.outcomes("import resource", [test.format(f"resource.RLIMIT_{name}")], 1)
    assert found == [describe(True)]


def status_of(worker):
    """What the kernel says of a worker: name -> words."""
    lines = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
    return {name: words.split() for name, words in (line.split(":", 1) for line in lines)}


def change_worker(monkeypatch, change):
    """Let new workers begin with a line that changes the module `judge.worker`."""
    line = "from judge.worker import main"
    assert line in START
    monkeypatch.setattr("judge.handle.START", START.replace(
        line, f"import judge.worker\njudge.worker.{change}\n{line}"))


@needs_linux
@pytest.mark.parametrize("drops_user", [True, False])
def test_no_worker_has_a_capability_nor_can_gain_one(monkeypatch, drops_user):
    if not drops_user:
        change_worker(monkeypatch, "drop_user = lambda folder: False")
    with BackendJudge(workers=1) as alone:
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
        worker, = alone.workers
        status = status_of(worker)
    assert drops_user or not alone.status["own user"]
    assert alone.status["privileges"] and status["NoNewPrivs"] == ["1"]
    for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[kind][0], 16) == 0, kind


needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="looks at what only root can see or do")


@pytest.fixture
def apart(monkeypatch):
    """A judge whose workers have users of their own, with an interpreter that all can read."""
    name = f"python3.{sys.version_info.minor}"
    path = shutil.which(name, path="/usr/local/bin:/usr/bin")
    if path:
        monkeypatch.setattr(sys, "executable", path)
    groups = os.getgroups()
    try:
        os.setgroups([*groups, 4])
    except PermissionError:
        pytest.skip("needs a root that may set its groups")
    try:
        with BackendJudge(workers=2) as judge:
            if not (judge.status["own user"] and judge.status["own network"]):
                pytest.skip(f"found no {name} that other users can read, or no own network")
            yield judge
    finally:
        os.setgroups(groups)


@needs_root
def test_a_worker_of_root_has_its_own_user_for_good_and_its_own_network(apart):
    users = set()
    for worker in apart.workers:
        status, folder = status_of(worker), Path(f"/proc/{worker.process.pid}")
        user, = set(status["Uid"])  # also the saved one, and that of files
        assert user != "0" and set(status["Gid"]) == {user} and status["Groups"] == []
        users.add(user)
        for kind in ("net", "ipc", "uts"):
            assert os.readlink(folder / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")
    assert len(users) == len(apart.workers)
    test = "resource.getrlimit(resource.RLIMIT_NPROC)"  # of a user, so it needs one of its own
    assert apart.outcomes("import resource", [test], 1.0) == [describe((64, 64))]


@needs_root
def test_a_worker_with_its_own_user_removes_folders_that_an_answer_has_closed(apart):
    before = set(apart.workers)
    for _ in range(4):  # two on each worker
        assert apart.outcomes("import os\nos.makedirs('a/b', 0)", ["1"], 1.0) == [describe(1)]
    assert set(apart.workers) == before


@needs_root
def test_a_worker_stays_root_where_another_user_could_not_read_the_interpreter(
        monkeypatch, tmp_path):
    tmp_path.joinpath("private").mkdir(0o700)
    change_worker(monkeypatch, f"readable_paths = lambda: [{str(tmp_path / 'private')!r}]")
    worker = Worker()
    try:
        assert worker.ready()["own user"] is False
        assert status_of(worker)["Uid"][1:] == ["0"] * 3  # the first, the real one, is for limits
        assert os.stat(worker.folder).st_uid == 0
    finally:
        close_workers({worker})


def test_what_an_answer_prints_never_reaches_the_terminal(capfd):
    with BackendJudge(workers=1) as alone:
        found = alone.outcomes("import os", ["os.write(1, b'HELLO')", "os.write(2, b'HELLO')"], 1.0)
    assert found == [describe(5)] * 2
    assert "HELLO" not in "".join(capfd.readouterr())


# -----------------------------------------------------------------------------
# What workers keep from answers


@needs_linux
def test_a_worker_gets_no_secret_of_its_owners_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret")
    tests = ["'HOME' in os.environ", "'secret' in str(os.environ)"]
    with BackendJudge(workers=1) as alone:
        found = alone.outcomes("import os", tests, 1.0)
        if os.geteuid() == 0:  # nobody else may read that of the closed process
            (worker,) = alone.workers
            environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes()
            assert b"HOME" in environment and b"secret" not in environment
    assert found == [describe(True), describe(False)]


def test_an_answer_finds_no_file_of_ours_among_its_modules_nor_on_its_path(judge):
    path = subprocess.check_output(
        [sys.executable, "-I", "-c", "import sys; print(sys.path)"], text=True)
    code = "import sys\nours = [name for name in sys.modules if name.split('.')[0] == 'judge']"
    outcomes = judge.outcomes(code, ["ours", "str(sys.path)"], 1.0)
    assert outcomes == [describe([]), describe(path.strip())]


def test_an_answer_that_rebinds_builtins_changes_nothing_of_what_is_said_of_it(judge):
    code = (
        "import builtins\n"
        "for name in ('int', 'format', 'isinstance', 'type', 'len', 'BaseException'):\n"
        "    setattr(builtins, name, None)\n"
    )
    outcomes = judge.outcomes(code, ["4", "[1.5, {'a': ()}]", "1 / 0"], 1.0)
    assert outcomes == [describe(4), describe([1.5, {"a": ()}]), "raised ZeroDivisionError"]


def test_an_answer_may_define_classes_that_look_up_their_module(judge):
    code = ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int'\n"
            "def f(n):\n    return P(n).x * 2")
    assert judge.grade(DOUBLE, code).success


def test_scratch_is_emptied_whatever_the_answer_left_in_it_and_no_link_is_followed(tmp_path):
    (tmp_path / "mine").touch()
    answer = (
        "import os\n"
        "def f(n):\n"
        "    os.makedirs('a/b')\n"
        "    os.mkdir('c', 0)\n"
        f"    os.symlink({str(tmp_path)!r}, 'l')\n"
        "    for _ in range(3000):\n"
        "        os.mkdir('d')\n"
        "        os.chdir('d')\n"
        "    return n * 2"
    )
    with BackendJudge(workers=1) as alone:
        assert alone.grade({**DOUBLE, "test_cases": {"test1": "f(1)"}}, answer).success
        seen = alone.outcomes("import os\nassert os.listdir() == []", ["1"], 1.0)
        assert seen == [describe(1)]
    assert (tmp_path / "mine").exists()


def test_nothing_is_deleted_through_a_link_that_an_answer_puts_in_place_of_scratch(
        monkeypatch, tmp_path):
    """Where no file rules hold, an answer can do that, and an owner who is root would follow."""
    (tmp_path / "mine").touch()
    change_worker(monkeypatch, "landlock_rules = lambda libc, folder: -1")
    answer = ("import os\nhere = os.getcwd()\nos.rmdir(here)\n"
              f"os.symlink({str(tmp_path)!r}, here)")
    with BackendJudge(workers=1) as alone:
        assert alone.outcomes(answer, ["1"], 1.0) == [describe(1)]
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
    assert (tmp_path / "mine").exists()


@needs_linux
def test_no_lock_nor_flag_of_an_answer_is_left_to_the_next_one():
    leaves = (
        "import contextlib, fcntl, os\n"
        "for fd in range(64):\n"
        "    with contextlib.suppress(OSError):\n"
        "        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)\n"
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    finds = (
        "import fcntl, os\n"
        "flags = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK for fd in range(3)]\n"
        "fcntl.flock(os.open('/dev/null', os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    with BackendJudge(workers=1) as alone:
        assert alone.outcomes(leaves, ["1"], 1.0) == [describe(1)]
        assert alone.outcomes(finds, ["flags"], 1.0) == [describe([0, 0, 0])]


LOOPS = "def f(n):\n    while n < 3: pass\n    return n"


def test_tests_after_time_outs_of_the_solution_can_be_passed():
    task = {"ground_truth": LOOPS, "test_cases": {str(n): f"f({n})" for n in range(5)}}
    with BackendJudge(workers=1, seconds=0.1) as quick:
        reasons = quick.grade(task, "def f(n): return n").reasons
    assert list(reasons.values()) == ["solution failed"] * 3 + ["passed"] * 2


@pytest.mark.parametrize("profile, last", [("fixed", "timed out"), ("official", "passed")])
def test_tests_after_two_time_outs_of_an_answer_run_in_the_official_profile_alone(profile, last):
    task = {"ground_truth": "def f(n): return n",
            "test_cases": {str(n): f"f({n})" for n in (3, 0, 1, 4)}}
    with BackendJudge(profile, workers=1, seconds=0.1) as quick:
        reasons = quick.grade(task, LOOPS).reasons
    assert list(reasons.values()) == ["passed", "timed out", "timed out", last]


@pytest.mark.parametrize("wait", [
    "time.sleep(20)",  # it computes nothing
    pytest.param("with open('/dev/urandom', 'rb', buffering=0) as file:\n"
                 "        while time.process_time() < 5: file.read(1 << 24)",  # it is in the kernel
                 marks=needs_linux)], ids=["sleeps", "stays in the kernel"])
def test_an_answer_is_out_of_time_that(wait):
    task = {"ground_truth": "def f(n):\n    return n", "test_cases": {"test1": "f(1)"}}
    with BackendJudge(workers=1, seconds=0.2) as quick:
        found = quick.grade(task, f"import time\ndef f(n):\n    {wait}\n    return n")
    assert found.reasons == {"test1": "timed out"}


@pytest.mark.parametrize("noise", [
    "b'x' * 10 ** 7",
    "b'=' + b'0' * 32 + b'\\n'",
    "b'passed\\n' * 99",
    "b'[' * 100 + b'\\n'",
    "(b'=' + b'0' * 32 + b'\\n') * 3 + b'[\\n'",
    "b'incomparable\\xff\\n'",
])
def test_bytes_written_to_the_judges_socket_never_earn_credit_nor_harm_it(judge, noise):
    answer = (
        "import os\n"
        "def f(n):\n"
        "    for fd in range(3, 64):\n"
        f"        try: os.write(fd, {noise})\n"
        "        except OSError: pass\n"
        "    return None"
    )
    assert judge.grade(DOUBLE, answer).reward == 0
    assert judge.grade(DOUBLE, DOUBLE["ground_truth"]).success


def test_an_answer_that_writes_without_an_end_is_ended_at_its_first_bytes(judge):
    answer = (
        "import contextlib, os\n"
        "def f(n):\n"
        "    while True:\n"
        "        for fd in range(3, 64):\n"
        "            with contextlib.suppress(OSError): os.write(fd, b'x' * 4096)\n"
    )
    assert set(judge.grade(DOUBLE, answer).reasons.values()) == {"crashed"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_time_that_an_answer_waits_for_a_core_is_not_its_own():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the judge and the others share one
    code = ("import time\ndef f(n):\n    end = time.process_time() + n\n"
            "    while time.process_time() < end: pass\n    return n")
    task, others = {"ground_truth": code, "test_cases": {"test1": "f(0.25)"}}, []
    try:
        with BackendJudge(workers=1, seconds=0.5) as crowded:
            crowded.expected_of(task)
            others += [subprocess.Popen([sys.executable, "-Sc", "while True: pass"],
                                        start_new_session=True) for _ in range(15)]
            assert crowded.grade(task, code).reasons == {"test1": "passed"}
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()


# -----------------------------------------------------------------------------
# Processes


def test_a_worker_that_dies_is_replaced_and_the_answer_graded():
    with BackendJudge(workers=1) as alone:
        for worker in alone.workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success


def test_a_worker_that_has_ended_before_it_forked_is_noticed():
    worker = Worker.__new__(Worker)
    worker.control, its_end = socket.socketpair()
    with worker.control, its_end:
        its_end.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            worker.run(b"", 1, 1.0)


def test_a_default_timeout_of_the_owners_sockets_changes_no_grade():
    socket.setdefaulttimeout(0.3)
    try:
        with BackendJudge(workers=1) as alone:
            assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
            asleep = f"import time\ntime.sleep(0.6)\n{DOUBLE['ground_truth']}"
            assert alone.grade(DOUBLE, asleep).success
    finally:
        socket.setdefaulttimeout(None)


def test_an_owner_that_ignores_the_end_of_children_keeps_its_workers_and_grades_the_same():
    crashes = "import os\ndef f(n):\n    return os._exit(0) if n == 2 else n * 2"
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with BackendJudge(workers=1) as alone:
            workers = set(alone.workers)
            reasons = list(alone.grade(DOUBLE, crashes).reasons.values())
            assert set(alone.workers) == workers
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert reasons == ["passed", "crashed", "passed"]


def test_a_worker_that_hangs_is_told_and_ended_with_its_folder(monkeypatch):
    monkeypatch.setattr("judge.handle.CONTROL_SECONDS", 0.1)
    monkeypatch.setattr("judge.handle.END_SECONDS", 0.1)
    change_worker(monkeypatch, "main = lambda _: __import__('time').sleep(60)")
    worker = Worker()
    assert worker.control.gettimeout() == 0.1  # else this test would hang, too
    with pytest.raises(SystemExit, match="not ready after 0.1 seconds"):
        worker.ready()
    close_workers({worker})
    assert worker.process.returncode == -signal.SIGKILL and not os.path.exists(worker.folder)


def test_ctrl_c_in_a_terminal_does_not_reach_a_worker(judge):
    for worker in judge.workers:
        assert os.getsid(worker.process.pid) == worker.process.pid


def test_a_forked_copy_of_the_owner_ends_no_worker():
    with BackendJudge(workers=1) as alone:
        before = set(alone.workers)
        copy = os.fork()
        if copy == 0:
            try:
                alone.close()
            finally:
                os._exit(0)
        os.waitpid(copy, 0)
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
        assert set(alone.workers) == before


def test_a_worker_outlives_the_thread_that_has_started_it():
    started = []
    thread = threading.Thread(target=lambda: started.append(BackendJudge(workers=1)))
    thread.start()
    thread.join()
    with started[0] as alone:
        before = set(alone.workers)
        time.sleep(0.2)
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
        assert set(alone.workers) == before


@needs_linux
def test_a_child_dies_with_a_worker_that_is_killed():
    worker = Worker()
    try:
        worker.ready()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(worker.control, [b"j"], [theirs.fileno()])
                child, = struct.unpack("i", worker.control.recv(4))
            ours.settimeout(30)
            tests = ["1", "__import__('time').sleep(60)"]
            ours.sendall(json.dumps({"code": "", "tests": tests, "profile": "fixed"}).encode())
            ours.shutdown(socket.SHUT_WR)
            assert ours.recv(100)  # it has put on its locks, and runs the second test
            worker.process.kill()
            wait_for_the_end_of([child], seconds=5)
    finally:
        close_workers({worker})
    assert not os.path.exists(worker.folder)


@pytest.fixture
def ctrl_c():
    """A function that presses Ctrl-C in half a second."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


ASLEEP = "import time\ntime.sleep(9)\n"


def test_an_answer_after_ctrl_c_is_graded_at_once(ctrl_c):
    with BackendJudge(workers=1) as alone:
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            alone.grade(DOUBLE, ASLEEP)
        began = time.monotonic()
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success
        assert time.monotonic() - began < 10  # a worker in the middle of a job would take 60


def test_ctrl_c_ends_the_grading_of_many_answers(ctrl_c):
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), BackendJudge("official", workers=2) as judge:
        ctrl_c()
        judge.grade_all([DOUBLE] * 40, [ASLEEP] * 40)  # 20 seconds or more
    assert time.monotonic() - began < 10


def test_a_machine_without_room_for_a_process_ends_the_run_and_fails_no_answer(monkeypatch):
    with BackendJudge(workers=1) as alone:
        def no_child(*arguments):
            raise TimeoutError  # what the worker's silence becomes after CONTROL_SECONDS

        def no_worker(*arguments, **options):
            raise BlockingIOError  # EAGAIN of fork

        with monkeypatch.context() as patch:
            patch.setattr("judge.handle.Worker.run", no_child)
            with pytest.raises(SystemExit, match="found a machine without room.*rerun"):
                alone.grade(DOUBLE, DOUBLE["ground_truth"])
            patch.setattr("judge.handle.subprocess.Popen", no_worker)
            with pytest.raises(SystemExit, match="found a machine without room.*rerun"):
                alone.grade(DOUBLE, DOUBLE["ground_truth"])
        assert alone.grade(DOUBLE, DOUBLE["ground_truth"]).success


@needs_linux
def test_an_answer_with_too_many_threads_is_ended(judge, monkeypatch):
    monkeypatch.setattr("judge.handle.MAX_THREADS", 8)  # as root, a limit of 64 comes first
    start = (
        "import _thread, time\n"
        "for _ in range(16):\n"
        "    _thread.start_new_thread(time.sleep, (9,))\n"
        "time.sleep(0.5)\n"
    )
    grade = judge.grade(DOUBLE, start + DOUBLE["ground_truth"])
    assert set(grade.reasons.values()) == {"crashed"}
    assert judge.grade(DOUBLE, DOUBLE["ground_truth"]).success


@needs_linux
@pytest.mark.skipif(os.geteuid() != 0 and
                    [int(part) for part in platform.release().split(".")[:2]] < [5, 14],
                    reason="counts the processes of a user namespace apart since Linux 5.14")
def test_the_kernel_itself_keeps_an_answer_to_few_threads(judge):
    if not (os.geteuid() == 0 or judge.status["own network"]):
        pytest.skip("found no user namespace")
    start = (
        "import _thread, threading\n"
        "threading.stack_size(1 << 16)\n"
        "count, gate = 0, _thread.allocate_lock()\n"
        "gate.acquire()\n"
        "try:\n"
        "    while count < 150:\n"
        "        _thread.start_new_thread(gate.acquire, ())\n"
        "        count += 1\n"
        "except RuntimeError:\n"
        "    pass\n"
    )
    assert judge.outcomes(start, ["count < 64"], 1.0) == [describe(True)]


def test_as_many_threads_as_a_pool_has_by_default_find_room(judge):
    code = ("from concurrent.futures import ThreadPoolExecutor\nimport time\n"
            "def f(n):\n    with ThreadPoolExecutor(32) as pool:\n"
            "        list(pool.map(lambda _: time.sleep(0.1), range(32)))\n    return n * 2")
    assert judge.grade(DOUBLE, code).success


def running(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return fields[0] != "Z"


def wait_for_the_end_of(pids, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(running, pids)):
        time.sleep(0.05)
    assert not any(map(running, pids))


def test_there_are_as_many_workers_as_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    with BackendJudge() as judge:
        assert len(judge.workers) == 3


@needs_linux
def test_workers_and_children_die_with_an_owner_that_is_killed():
    # The forked copy keeps the worker's socket open: only the death signal tells.
    code = (
        "import os, threading, time\n"
        "from judge.sandbox import BackendJudge\n"
        "judge = BackendJudge(workers=1)\n"
        "worker = next(iter(judge.workers))\n"
        "def loop():\n"
        "    judge.outcomes('import time\\ntime.sleep(60)', ['1'], 60.0)\n"
        "threading.Thread(target=loop, daemon=True).start()\n"
        "children = f'/proc/{worker.process.pid}/task/{worker.process.pid}/children'\n"
        "seen = ''\n"
        "while not seen or open(children).read() != seen:\n"  # until one stays: others may be short
        "    seen = open(children).read()\n"
        "    time.sleep(0.3)\n"
        "print(worker.process.pid, worker.folder, flush=True)\n"
        "copy = os.fork()\n"
        "time.sleep(5)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker, folder = owner.stdout.readline().split()
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert children
    wait_for_the_end_of([worker, *children], seconds=4)
    assert not os.path.exists(folder)


def test_require_protection_refuses_a_machine_that_lacks_one(monkeypatch):
    monkeypatch.setattr(Worker, "ready", lambda self: {"limits": True, "files": False})
    with pytest.raises(SystemExit, match="protections: system calls, files, privileges"):
        BackendJudge(workers=1, require_protection=True)


@pytest.mark.slow
def test_check_reports_solutions_that_cannot_be_passed_with_the_reason(monkeypatch):
    monkeypatch.setattr(sandbox, "BackendJudge", functools.partial(BackendJudge, seconds=0.25))
    code = (
        "import time, random\n"
        "def f(n):\n"
        "    return [None, time.time_ns(), random.random(), float('nan'), 1][n]"
    )
    slow = (
        "import time\n"
        "def f(n):\n"
        "    while time.process_time() < n:\n"
        "        sum(range(20000))\n"  # else most of the time is the kernel's
        "    return 1 if n != 0.6 else {}[n]"
    )
    tests = [str(n) for n in range(6)], ["0", "0.5", "0.6", "99"]
    rows, status = check_solutions([DOUBLE, *(
        {"ground_truth": solution, "test_cases": {n: f"f({n})" for n in numbers}}
        for solution, numbers in zip((code, slow), tests, strict=True))])
    assert rows == [
        (1, "0", "the solution returns None"),
        (1, "1", "not deterministic"),
        (1, "3", "the value equals nothing"),
        (1, "5", "the solution raised IndexError"),
        (2, "0.5", "the solution takes longer than an answer may"),
        (2, "0.6", "the solution raised KeyError"),
        (2, "99", "the solution timed out"),
    ]
    assert status["limits"] or sys.platform != "linux"


def memory(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def cpu_seconds(workers):
    """Of the workers and their dead children, user and system."""
    ticks = 0
    for worker in workers:
        status = Path(f"/proc/{worker.process.pid}/stat").read_text()
        ticks += sum(map(int, status.rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def soak(count):
    """Mixed honest and hostile answers: flat memory, nothing left, a new judge's rewards.

    Returns the CPU seconds of ten batches.
    """
    answers = [
        DOUBLE["ground_truth"],
        "def f(n):\n    return n",
        "def f(n):\n    __import__('os')._exit(0)",
        "def f(n):\n    open('x', 'w').write('x' * n)\n    return n * 2",
        "def f(n): return (",
        "def f(n):\n    return [0] * 10 ** 6",
    ]
    with BackendJudge(workers=2) as fresh:
        expected = [fresh.grade(DOUBLE, answer) for answer in answers]
    batch = [index % len(answers) for index in range(count // 10)]
    with BackendJudge(workers=2) as judge:
        workers = [worker.process.pid for worker in judge.workers]
        costs, sizes, descriptors = [], [], []
        for _ in range(10):
            before = cpu_seconds(judge.workers)
            grades = judge.grade_all([DOUBLE] * len(batch), [answers[index] for index in batch])
            costs.append(cpu_seconds(judge.workers) - before)
            assert grades == [expected[index] for index in batch]
            sizes.append(sum(map(memory, [os.getpid(), *workers])))
            descriptors.append(len(os.listdir("/proc/self/fd")))
        folders = [worker.folder for worker in judge.workers]
        assert workers == [worker.process.pid for worker in judge.workers]
    assert sizes[-1] < sizes[1] + (8 << 20)
    assert descriptors[-1] <= descriptors[0]
    assert not any(map(running, workers))
    assert not any(map(os.path.exists, folders))
    return costs


@pytest.mark.slow
@needs_linux
def test_two_thousand_mixed_gradings_leave_nothing_and_do_not_slow_down():
    costs = soak(2000)
    # Batches are short and the machine is shared; a long run asks for 10 %.
    assert min(costs[-3:]) < 1.5 * min(costs[:3])


def descendants(pid):
    """This process, and all that it and they have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


@needs_linux
@pytest.mark.slow
def test_a_job_that_was_suspended_times_no_answer_out():
    code = "def f(n):\n    for _ in range(4_000_000):\n        pass\n    return n"
    task = {"ground_truth": code, "test_cases": {str(n): f"f({n})" for n in range(6)}}
    script = (f"from judge.sandbox import BackendJudge\ntask = {task!r}\n"
              "with BackendJudge(workers=1, seconds=0.5) as judge:\n"
              "    judge.expected_of(task)\n    print('ready', flush=True)\n"
              "    print(judge.grade(task, task['ground_truth']).reward)")
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        suspended = descendants(process.pid)
        for pid in suspended:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3)  # a call that sleeps may take 2
        for pid in suspended:
            os.kill(pid, signal.SIGCONT)
        assert process.stdout.read() == "1.0\n"
