"""Runs scripts as `python SCRIPT ARGUMENTS` does, without the seconds that importing torch takes.

multiprocessing's fork server imports what every script imports, once. Each run is a process that is
forked from it; or one for each rank, with what torchrun tells it in its environment.
"""

import atexit
import contextlib
import functools
import multiprocessing.connection
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = [
    "pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_fast"]


@functools.cache
def fork_server():
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def start(script, arguments, output, errors, ranks=1, folder=ROOT):
    """The processes of a run, which appends to the files `output` and `errors`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables = {} if ranks == 1 else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(fork_server().Process(
            target=run_as_main,
            args=(str(script), arguments, output, errors, variables, str(folder))))
        processes[-1].start()
        atexit.register(processes[-1].kill)
    return processes


def run(script, arguments, ranks, timeout, folder=ROOT):
    """What subprocess.run(..., capture_output=True, text=True) returns."""
    with tempfile.TemporaryDirectory() as printed_to:
        files = [Path(printed_to, name) for name in ("stdout", "stderr")]
        code = wait(start(script, arguments, *files, ranks, folder), time.monotonic() + timeout)
        printed, errors = (file.read_text() if file.exists() else "" for file in files)
    if code is None:
        raise subprocess.TimeoutExpired([script, *arguments], timeout, printed, errors)
    return subprocess.CompletedProcess([script, *arguments], code, printed, errors)


def wait(processes, deadline):
    """The exit code, the first failing process's if one fails; None if they took too long."""
    running, code = list(processes), 0
    while running and not code and time.monotonic() < deadline:
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=1)
        for process in list(running):
            if process.exitcode is not None:
                running.remove(process)
                code = code or process.exitcode
    for process in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return code if code or not running else None


def run_as_main(script, arguments, output, errors, variables, folder):
    """In the forked process: what the interpreter does with a script; never returns."""
    os.setsid()
    os.chdir(folder)
    for number, name in enumerate(("/dev/null", output, errors)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.environ |= variables
    ours = {"", str(ROOT), str(ROOT / "tests")}
    sys.path[:] = [os.path.dirname(script), *(path for path in sys.path if path not in ours)]
    sys.argv = [script, *arguments]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        code = exit.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
