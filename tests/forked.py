"""Runs scripts as `python SCRIPT ARGUMENTS` does, without the seconds that importing torch takes.

A server imports what every script imports, once. For each request it forks a child, which runs the
script as `__main__`; or one for each rank, with what torchrun tells it in its environment.
conftest.py: run_script is its only user; tests of kills, of failing ranks and of environments start
processes of their own.
"""

import atexit
import json
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


class ScriptServer:
    """Runs one script at a time; ends with the tests."""

    def __init__(self, folder):
        self.process = subprocess.Popen([sys.executable, __file__], cwd=folder, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self.process.kill)

    def run(self, script, arguments, ranks, timeout):
        """What subprocess.run(..., capture_output=True, text=True) returns."""
        with tempfile.TemporaryDirectory() as folder:
            request = json.dumps([folder, script, arguments, ranks, timeout])
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            code = json.loads(self.process.stdout.readline())
            printed, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        if code is None:
            raise subprocess.TimeoutExpired([script, *arguments], timeout, printed, errors)
        return subprocess.CompletedProcess([script, *arguments], code, printed, errors)


def serve():
    import torch.distributed.fsdp  # noqa: F401 these take the time
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama
    import transformers.tokenization_utils_fast  # noqa: F401

    for line in sys.stdin:
        folder, script, arguments, ranks, timeout = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                if ranks > 1:
                    os.environ |= {
                        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                run_as_main(folder, script, arguments)
            children.append(child)
        print(json.dumps(wait(children, time.monotonic() + timeout)), flush=True)


def wait(children, deadline):
    """The exit code, the first failing child's if one fails; None if they took too long."""
    running, code = list(children), 0
    while running and not code and time.monotonic() < deadline:
        time.sleep(0.01)
        for child in list(running):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                running.remove(child)
                code = code or os.waitstatus_to_exitcode(status)
    for child in running:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return code if code or not running else None


def run_as_main(folder, script, arguments):
    """In the child: what the interpreter does with a script; never returns."""
    os.setsid()
    for number, name in enumerate(("/dev/null", f"{folder}/stdout", f"{folder}/stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
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


if __name__ == "__main__":
    serve()
