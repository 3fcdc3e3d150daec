"""The worker: a clean interpreter that locks itself down once, then forks one child per answer.

judge/handle.py starts it in a process of its own (`main`) and sends it a socket for each job. The
worker forks a child, which puts on the last locks, reads the job from that socket, runs the
answer's code and the tests, and writes one line for each test. The worker itself never reads a job.

Order: the worker's loop; its locks; the child, which runs the tests. A child inherits all that the
worker has loaded and locked, so nothing here may know tasks, solutions or secrets.
"""

import ast
import builtins
import contextlib
import ctypes
import gc
import json
import os
import platform
import random
import re
import resource
import signal
import socket
import struct
import sys
import time
import types

from judge.calls import MACHINES, child_filter, install_filter, worker_filter
from judge.values import describe

# -----------------------------------------------------------------------------
# The loop of the worker

# Modules that answers import often. The worker loads them once, so that no child has to.
PRELOADED = (
    "base64", "concurrent.futures.thread", "dataclasses", "difflib", "functools", "itertools",
    "pathlib", "shutil", "string", "subprocess", "tempfile", "textwrap", "typing", "weakref")


def main(descriptor: int) -> None:
    """Serve answers over the parent's socket until the parent is gone."""
    folder = os.getcwd()
    try:
        serve_answers(socket.socket(fileno=descriptor), folder)
    finally:  # the parent may have been killed, even before the first job
        empty_folder(folder)
        os.rmdir(folder)


def serve_answers(control: socket.socket, folder: str) -> None:
    """Lock down, report what worked, then fork a child for each job.

    The jobs stay unread here: no child finds another one's in its memory.
    """
    owner, worker = os.getppid(), os.getpid()
    settle_imports()

    def end_with_owner(*_):
        if os.getppid() != owner:  # the signal is also sent when a mere thread of the owner ends
            with contextlib.suppress(OSError):  # what reads it ends; no cleaning up is cut short
                control.shutdown(socket.SHUT_RDWR)

    signal.signal(signal.SIGUSR1, end_with_owner)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an owner may ignore it, and hands that on
    status = {"limits": set_limits(LIMITS)}
    libc, rules, filters = None, -1, False
    fork = os.fork
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        fork = ctypes.PyDLL(None).fork  # os.fork also repairs in the child what no child needs
        locks, rules = lock_down(libc, folder)
        status |= locks
        filters = status["system calls"]
    os.dup2(0, 2)  # /dev/null
    control.send(json.dumps(status).encode() + b"\n")
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
            run_child(libc, descriptors[0], worker, rules, filters)
        try:
            os.close(descriptors[0])
            control.send(struct.pack("i", child))
            control.recv(1)  # the parent has what it wants
        finally:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still this child's
            os.waitpid(child, 0)
            empty_folder(folder)


def settle_imports() -> None:
    """Import what answers often need, and leave nothing of ours for them to import."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the scratch folder; Python 3.10 has no -P
    for name in PRELOADED:
        __import__(name)
    for name in ("judge.worker", "judge.values", "judge.calls", "judge"):
        del sys.modules[name]  # they work on, but no answer can import them
    for function in (settle_imports, describe):  # of this file and of values.py
        # An answer that rebinds builtins.int does not rebind ours.
        function.__globals__.update(vars(builtins))


def run_child(
    libc: ctypes.CDLL | None, descriptor: int, worker: int, rules: int, filters: bool
) -> None:
    """Put the last locks on this new child, then do its work. Never returns."""
    try:
        # The parent's clock is the limit; this one is for when the parent is gone.
        set_limits({"CPU": 300})  # seconds
        if libc is None:  # not Linux: no filter of system calls forbids new processes
            set_limits({"NPROC": 0})
        else:
            libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            if rules >= 0 and libc.syscall(RESTRICT_SELF, rules, 0) != 0:
                os._exit(1)
            if filters and not install_filter(libc, child_filter(os.getpid())):
                os._exit(1)
        if os.getppid() == worker:
            run_job(descriptor)
    finally:
        os._exit(1)


def empty_folder(folder: str) -> None:
    """Delete everything below, however deep, without following links.

    Folders inside folders are moved up first, so that no path grows too long.
    """
    if os.path.islink(folder):  # an answer's, where no file rules keep it from that
        os.unlink(folder)
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


# -----------------------------------------------------------------------------
# Locks: limits, a user of its own, file rules

LIMITS = {"AS": 1 << 30, "NOFILE": 64, "FSIZE": 8 << 20, "CORE": 0, "STACK": 16 << 20}

DEATH_SIGNAL, NO_DUMP, NO_NEW_PRIVILEGES = 1, 4, 38  # options of prctl
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


def set_limits(limits: dict[str, int]) -> bool:
    """Lower limits of the process for good; false where the system refuses one."""
    worked = True
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
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
    root = os.getuid() == 0
    if not root:
        namespaces |= NEW_USERS
    status = {"own network": libc.unshare(namespaces) == 0}
    status["own user"] = drop_user(folder)
    # A limit on processes and threads counts all of the real user, so that has to be another than
    # the owner; since Linux 5.14, it counts those of a user namespace apart.
    if root:
        counted_apart = os.getuid() != 0
    else:
        release = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
        counted_apart = status["own network"] and release >= [5, 14]
    if counted_apart:
        set_limits({"NPROC": 64})
    no_capability = libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)) == 0
    no_new_privileges = libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    status["privileges"] = no_new_privileges and no_capability
    libc.prctl(NO_DUMP, 0, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGUSR1, 0, 0, 0)
    rules = landlock_rules(libc, folder)
    status["files"] = rules >= 0
    known = platform.machine() in MACHINES and struct.calcsize("P") == 8
    status["system calls"] = known and install_filter(libc, worker_filter())
    return status, rules


def drop_user(folder: str) -> bool:
    """Become a user that owns nothing else, if this is root and that user can read the interpreter.

    Returns whether it worked; if not, the process stays root in all but its real user, which is
    whom limits count.
    """
    if os.getuid() != 0:
        return False
    user = 0x60000000 + os.getpid()  # no two live workers share it, whoever started them
    needed = [*readable_paths(), os.__file__, folder]  # listed while all of them can be seen
    real = user
    try:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
        allowed = all(os.access(path, os.R_OK) for path in needed)
    except OSError:
        allowed, real = False, 0
    kept = user if allowed else 0
    os.setresuid(real, kept, kept)
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
        "/etc/mime.types",
        "/etc/ld.so.cache",
        "/dev/urandom",
    ]
    return [path for path in paths if os.path.isabs(path) and os.path.exists(path)]


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


# -----------------------------------------------------------------------------
# The child: run the tests, report values and never verdicts


def run_job(descriptor: int) -> None:
    """Run the tests of the job that the parent sends, write a line on each, and end the process."""
    # The worker holds what it has opened: a lock that an answer puts on that would stay for later
    # answers. So the child opens /dev/null anew, and closes all else but its socket.
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, LIMITS["NOFILE"])
    with open(descriptor, "rb", buffering=0, closefd=False) as channel:
        job = json.loads(channel.read())
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
    os.close(descriptor)  # the parent continues while the rest of the process is taken down
    os._exit(0)


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
    value = eval(compile_for(test, "eval", official), shared, local)
    return describe(value, official)


def compile_for(source: str, mode: str, official: bool):
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
        self.generic_visit(node)  # its first iterable runs outside of it
        items = ast.Starred(ast.GeneratorExp(node.elt, node.generators), ast.Load())
        if isinstance(node, ast.SetComp):
            return ast.Set([items])
        return ast.List([items], ast.Load())

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node):
        self.generic_visit(node)
        pair = ast.Tuple([node.key, node.value], ast.Load())
        pairs = ast.GeneratorExp(pair, node.generators)
        # {}.__class__, since an answer may have something else that it calls dict
        kind = ast.Attribute(ast.Dict([], []), "__class__", ast.Load())
        return ast.Call(kind, [pairs], [])

    def visit_FunctionDef(self, node):
        body, node.body = node.body, []  # comprehensions inside functions behave alike everywhere
        self.generic_visit(node)  # its decorators and defaults run outside of it
        node.body = body
        return node

    visit_Lambda = visit_FunctionDef
    visit_AsyncFunctionDef = visit_FunctionDef
    visit_ClassDef = visit_FunctionDef
