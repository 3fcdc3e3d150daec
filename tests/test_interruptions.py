"""Every script is killed at random moments and loses nothing. Run: pytest tests/test_interruptions.py

The scripts run in processes forked from one that has imported torch already, so that a moment of a run is not mostly a
moment of its imports; two ranks are two such processes with the variables that torchrun sets. Some tests run torchrun.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_critic import weights, write_episodes

from colbench import load_model

MINUTE, GRACE = 60, 2
KILLS = [3, pytest.param(20, marks=pytest.mark.slow)]

# -----------------------------------------------------------------------------
# Runs


def run_main(script, argv, log, variables):
    """What `python script *argv` does, in a process that was forked for it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(variables)
    sys.argv = [script, *argv]
    module = importlib.import_module(Path(script).stem)
    module.launch(module.main, module.parse_args(argv))


@pytest.fixture(scope="module")
def fork():
    """fork(script, argv, log, variables) -> a started process."""
    paths, before = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")], dict(os.environ)
    os.environ.update({"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers", "transformers.models.llama.modeling_llama", "evaluate", "train_policy",
                                    "test_interruptions", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
    started = []

    def start(*arguments):
        process = context.Process(target=run_main, args=arguments)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
    for name in ("PYTHONPATH", "TOKENIZERS_PARALLELISM"):
        os.environ.pop(name)
    os.environ.update(before)


class Command:
    """One script with its arguments, to be run in folder after folder."""

    def __init__(self, fork, script, arguments, log):
        self.fork, self.script, self.arguments, self.log = fork, script, list(map(str, arguments)), log
        self.expected = {}  # ranks -> (what an uninterrupted run leaves, its seconds)

    def argv(self, folder):
        return [*self.arguments, "--output", str(folder / "episodes.jsonl" if self.script == "collect.py" else folder)]

    def start(self, folder, ranks=1):
        if ranks == 1:
            return [self.fork(self.script, self.argv(folder), self.log, {})]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        return [self.fork(self.script, self.argv(folder), self.log, {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port}) for rank in range(ranks)]

    def complete(self, folder, ranks=1):
        processes = self.start(folder, ranks)
        for process in processes:
            process.join(2 * MINUTE)
            assert process.exitcode == 0, self.log.read_text()[-3000:]

    def whole(self, ranks=1):
        """(what a run without interruption leaves, its seconds)."""
        if ranks not in self.expected:
            folder, began = self.log.parent / f"whole{ranks}", time.monotonic()
            self.complete(folder, ranks)
            self.expected[ranks] = contents(folder), time.monotonic() - began
        return self.expected[ranks]


def contents(folder):
    """Every file of a finished run, without the times in its metrics and half-written files that a kill left."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and ".tmp" not in path.name):
        files[str(path.relative_to(folder))] = re.sub(rb'"time/step": [0-9.e-]+', b"", path.read_bytes())
    return files


@pytest.fixture(scope="module")
def commands(fork, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interruptions")
    episodes, model = write_episodes(folder / "episodes.jsonl"), tiny()
    (folder / "prompt.txt").write_text("Ask, then answer.")
    training = ["--episodes", episodes, "--model", model, "--batch_size", 2, "--lr", 1e-3, "--max_length", 600,
                "--save_every", 1]
    rollout = ["--tasks", "toy:backend:train", "--num_tasks", 20, "--agent", "scripted", "--agent_prompt",
               folder / "prompt.txt", "--batch_size", 4]
    arguments = {
        "collect": ("collect.py", [*rollout, "--samples_per_task", 2]),
        "evaluate": ("evaluate.py", [*rollout, "--repeats", 2, "--draws", 100, "--report", folder / "report.html"]),
        "critic": ("train_critic.py", [*training, "--holdout", 0.2]),
        "mtdpo": ("train_policy.py", [*training, "--method", "mtdpo", "--epochs", 2]),
        "sweet": ("train_policy.py", [*training, "--method", "sweet", "--critic", folder / "critic/whole1", "--data_fraction",
                                      0.5, "--num_candidates", 4, "--max_new_tokens", 6, "--sampling_batch_size", 8]),
    }
    made = {}
    for name, (script, given) in arguments.items():
        (folder / name).mkdir()
        made[name] = Command(fork, script, given, folder / name / "log.txt")
    made["critic"].whole()
    return made


# -----------------------------------------------------------------------------
# SIGKILL


def kill_again_and_again(command, folder, kills, ranks):
    """Kill one process at seeded random moments of a run, start it again each time, and compare how it ends."""
    (expected, seconds), draw = command.whole(ranks), random.Random(f"{command.script} {kills} {ranks}")
    (number, known) = 0, set()
    while kills:
        processes = command.start(folder / str(number), ranks)
        victim = draw.choice(processes)
        victim.join(draw.uniform(0, seconds))
        if victim.exitcode is not None:  # it was faster: a new run
            assert victim.exitcode == 0, command.log.read_text()[-3000:]
            stop_others(processes, signal.SIGCONT)
            assert contents(folder / str(number)) == expected
            number, known = number + 1, set()
            continue
        victim.kill()
        stop_others(processes, signal.SIGTERM)
        kills -= 1
        known = no_line_lost(folder / str(number), known)
        if not (folder / str(number) / "config.json").exists() and "model.safetensors" in expected:
            with pytest.raises(SystemExit, match="without config.json|no such directory"):
                load_model(str(folder / str(number)))
    command.complete(folder / str(number), ranks)
    assert contents(folder / str(number)) == expected
    assert not list((folder / str(number)).glob("*.partial")) and not list((folder / str(number)).glob("state*"))


def stop_others(processes, number):
    """What torchrun does when one of its processes has died: a signal, and SIGKILL for those that do not hear it.

    A rank that waits for another inside a collective hears no SIGTERM. torchrun gives it 30 seconds, we give it fewer.
    """
    for process in processes:
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
    for process in processes:
        process.join(MINUTE if number == signal.SIGCONT else GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()


def no_line_lost(folder, known):
    """The whole lines of all JSONL files that grow; those of before the last kill must still be there."""
    lines = set()
    for path in folder.glob("*.jsonl"):
        if path.name != "metrics.jsonl":  # steps after the last saved state are made again
            lines |= {(path.name, line) for line in path.read_bytes().split(b"\n")[:-1]}
    assert known <= lines
    return lines


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("name", ["collect", "evaluate", "critic", "mtdpo", "sweet"])
def test_kills_at_random_moments_change_nothing_in_the_end(commands, tmp_path, name, kills):
    kill_again_and_again(commands[name], tmp_path, kills, ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collect", "evaluate", "critic", "mtdpo", "sweet"])
def test_kills_of_one_of_two_ranks_change_nothing_in_the_end(commands, tmp_path, name):
    kill_again_and_again(commands[name], tmp_path, 20, ranks=2)


# -----------------------------------------------------------------------------
# Under torchrun


def torchrun(command, folder, script=None):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.Popen([*start, str(script or ROOT / command.script), *command.argv(folder)], text=True, cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def children(parent):
    return list(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name, begun", [("collect", "episodes.jsonl"), ("mtdpo", "state")])
def test_torchrun_ends_within_a_minute_of_the_kill_of_a_rank_and_its_command_goes_on(commands, tmp_path, name, begun, victim):
    run = torchrun(commands[name], tmp_path)
    while not (tmp_path / begun).exists() and run.poll() is None:
        time.sleep(0.02)
    os.kill(children(run.pid)[victim], signal.SIGKILL)
    run.communicate(timeout=MINUTE)
    assert run.returncode != 0
    run = torchrun(commands[name], tmp_path)
    printed = run.communicate(timeout=3 * MINUTE)[0]
    assert run.returncode == 0, printed
    assert contents(tmp_path) == commands[name].whole(2)[0]


@pytest.mark.slow
def test_a_rank_that_fails_takes_the_other_down_within_a_minute_with_its_own_message_on_top(commands, tmp_path):
    script = tmp_path / "train_policy.py"
    script.write_text("import os, sys\n"
                      f"sys.path[0] = {str(ROOT)!r}\n"
                      "import train_critic, train_policy\n"
                      "step = train_critic.train_step\n"
                      "def failing(*arguments):\n"
                      "    if os.environ['RANK'] == '1':\n"
                      "        raise SystemExit('rank 1 has something to say')\n"
                      "    return step(*arguments)\n"
                      "train_critic.train_step = failing\n"
                      "train_policy.launch(train_policy.main, train_policy.parse_args())\n")
    run = torchrun(commands["mtdpo"], tmp_path / "output", script)
    began = time.monotonic()
    printed = run.communicate(timeout=3 * MINUTE)[0]
    assert run.returncode != 0 and time.monotonic() - began < 2 * MINUTE
    assert "rank 1 has something to say" in printed.split("Traceback")[0], printed


# -----------------------------------------------------------------------------
# SIGTERM and Ctrl-C


@pytest.mark.parametrize("name, number", [("collect", signal.SIGINT), ("collect", signal.SIGTERM), ("mtdpo", signal.SIGINT),
                                          ("sweet", signal.SIGTERM), ("evaluate", signal.SIGTERM)])
def test_a_stop_is_clean_and_says_how_to_go_on(commands, tmp_path, name, number):
    command = commands[name]
    expected, _ = command.whole()
    command.log.write_text("")
    process, = command.start(tmp_path / "output")
    while process.is_alive() and not list(tmp_path.glob("output/*.json*")):
        time.sleep(0.002)
    os.kill(process.pid, number)
    process.join(MINUTE)
    printed = command.log.read_text()
    assert process.exitcode == 130 and "Stopped." in printed and "give the same command again to go on" in printed, printed
    assert "Traceback" not in printed
    command.complete(tmp_path / "output")
    assert contents(tmp_path / "output") == expected


# -----------------------------------------------------------------------------
# Numbers and ranks


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(commands, tmp_path):
    for name, command in [(name, commands[name]) for name in ("collect", "mtdpo")]:
        expected, _ = command.whole()
        command.complete(tmp_path / name)
        assert contents(tmp_path / name) == expected
        other = Command(command.fork, command.script, [*command.arguments, "--seed", 1], command.log)
        other.complete(tmp_path / f"other {name}")
        assert contents(tmp_path / f"other {name}") != expected


def test_a_loss_that_is_no_number_stops_with_the_batch_written_down(commands, tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "model")
    model = load_model(tiny())
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    command = commands["mtdpo"]
    arguments = [str(tmp_path / "model") if value == tiny() else value for value in command.arguments]
    process, = Command(command.fork, command.script, arguments, tmp_path / "log.txt").start(tmp_path / "output")
    process.join(MINUTE)
    printed = (tmp_path / "log.txt").read_text()
    assert process.exitcode == 1 and "found loss nan" in printed and "bad_batch.json" in printed and "Traceback" not in printed
    bad = json.loads((tmp_path / "output/bad_batch.json").read_text())
    assert bad["step"] == 0 and len(bad["items"]) == 2 and not (tmp_path / "output/config.json").exists()


@pytest.mark.parametrize("name, changes", [("mtdpo", {}), ("sweet", {"--states_per_task": 1, "--data_fraction": 1}),
                                           ("collect", {"--num_tasks": 1, "--samples_per_task": 1})])
def test_a_rank_without_data_neither_hangs_nor_skews(commands, tmp_path, name, changes):
    command = commands[name]
    changes = {str(flag): str(value) for flag, value in changes.items()}
    arguments = [changes.pop(flag, value) for flag, value in zip(["", *command.arguments], command.arguments, strict=False)]
    arguments += [text for pair in changes.items() for text in pair]
    if name != "collect":
        arguments[1] = str(write_episodes(tmp_path / "one.jsonl", tasks=1, samples=2))
    one = Command(command.fork, command.script, arguments, tmp_path / "log.txt")
    for ranks in (1, 2):
        one.complete(tmp_path / str(ranks), ranks)
    if name == "collect":
        assert (tmp_path / "1/episodes.jsonl").read_bytes() == (tmp_path / "2/episodes.jsonl").read_bytes()
        return
    for key, value in weights(tmp_path / "1").items():
        assert torch.allclose(weights(tmp_path / "2")[key], value, atol=1e-5), key
