"""Every script is killed at random moments and loses nothing.

The scripts run in processes forked from one that has imported torch already (forked.py), so that a
moment of a run is not mostly a moment of its imports. Some tests run torchrun itself.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from conftest import ROOT, differing_weights, run_script, write_episodes

from runtime.models import load_model

MINUTE = 60
GRACE = 0.5  # seconds between the signal and SIGKILL for the ranks that are left

# -----------------------------------------------------------------------------
# Runs


class Command:
    """One script with its arguments, to be run in folder after folder."""

    def __init__(self, script, arguments, log):
        self.script, self.log = script, log
        self.arguments = list(map(str, arguments))
        self.expected = {}  # ranks -> (what an uninterrupted run leaves, its seconds)

    def argv(self, folder):
        output = folder / "rows.jsonl" if self.script == "collect.py" else folder
        return [*self.arguments, "--output", str(output)]

    def start(self, folder, ranks=1):
        return forked.start(ROOT / self.script, self.argv(folder), self.log, self.log, ranks)

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
    """Every file of a finished run, without step times, locks, and half files that a kill left."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".tmp" not in path.name and path.suffix != ".lock":
            name = str(path.relative_to(folder))
            text = path.read_bytes().replace(str(folder).encode(), b"OUTPUT")
            files[name] = re.sub(rb'"time/step": [0-9.e-]+', b"", text)
    return files


@pytest.fixture(scope="module")
def commands(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interruptions")
    episodes, model = write_episodes(folder / "episodes.jsonl"), tiny()
    (folder / "prompt.txt").write_text("Ask, then answer.")
    training = ["--episodes", episodes, "--model", model, "--batch_size", 2, "--lr", 1e-3,
                "--max_length", 600, "--save_minutes", 0, "--packed"]
    rollout = ["--tasks", "toy:backend:train", "--num_tasks", 20, "--samples_per_task", 2,
               "--agent", "scripted", "--agent_prompt", folder / "prompt.txt", "--batch_size", 4]
    candidates = folder / "candidates.jsonl"
    states = ["--states", episodes, "--states_fraction", 0.5, "--num_candidates", 4,
              "--max_new_tokens", 6, "--batch_size", 8, "--agent", model]
    run_script("collect.py", *states, "--output", candidates)
    arguments = {
        "collect": ("collect.py", rollout),
        "states": ("collect.py", states),
        "critic": ("train_critic.py", [*training, "--holdout", 0.2, "--candidates", candidates]),
        "mtdpo": ("train_policy.py", [*training, "--epochs", 2]),
    }
    made = {}
    for name, (script, given) in arguments.items():
        (folder / name).mkdir()
        made[name] = Command(script, given, folder / name / "log.txt")
    return made


# -----------------------------------------------------------------------------
# SIGKILL


def kill_again_and_again(command, folder, kills, ranks):
    """Kill one process at seeded random moments of a run, restart it, and compare how it ends."""
    expected, seconds = command.whole(ranks)
    draw = random.Random(f"{command.script} {kills} {ranks}")
    run, lines = 0, set()
    while kills:
        output = folder / str(run)
        processes = command.start(output, ranks)
        victim = draw.choice(processes)
        victim.join(draw.uniform(0, seconds))
        if victim.exitcode is not None:  # it was faster than the kill: a new run
            assert victim.exitcode == 0, command.log.read_text()[-3000:]
            stop_others(processes, signal.SIGCONT)
            assert contents(output) == expected
            run, lines = run + 1, set()
            continue
        victim.kill()
        stop_others(processes, signal.SIGTERM)
        kills -= 1
        lines = no_line_lost(output, lines)
        if not (output / "config.json").exists() and "model.safetensors" in expected:
            with pytest.raises(SystemExit, match="without config.json|no such directory"):
                load_model(str(output))
    output = folder / str(run)
    command.complete(output, ranks)
    assert contents(output) == expected
    assert not list(output.glob("*.partial")) and not list(output.glob("resume*"))


def stop_others(processes, signal_number):
    """What torchrun does when one of its processes has died: a signal, and SIGKILL in the end.

    A rank that waits for another inside a collective does not react to SIGTERM. torchrun gives it
    30 seconds; here it gets fewer. SIGCONT stops nobody: it waits for ranks that end by themselves.
    """
    for process in processes:
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal_number)
    for process in processes:
        process.join(MINUTE if signal_number == signal.SIGCONT else GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()


def no_line_lost(folder, before):
    """The whole lines of all JSONL files that grow; those `before` the last kill are still there.

    Ranks have files of their own, NAME.jsonl.rank0 and so on, until they are merged.
    """
    lines = set()
    for path in [*folder.glob("*.jsonl"), *folder.glob("*.jsonl.rank*")]:
        name = path.name.split(".rank")[0]
        if name != "metrics.jsonl":  # steps after the last saved state are repeated
            lines |= {(name, line) for line in path.read_bytes().split(b"\n")[:-1]}
    assert before <= lines
    return lines


@pytest.mark.parametrize("kills, ranks", [(5, 1), pytest.param(8, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["collect", "states", "critic", "mtdpo"])
def test_kills_at_random_moments_change_nothing_in_the_end(commands, tmp_path, name, kills, ranks):
    kill_again_and_again(commands[name], tmp_path, kills, ranks)


# -----------------------------------------------------------------------------
# Under torchrun


def torchrun(command, folder):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]
    return subprocess.Popen(
        [*start, str(ROOT / command.script), *command.argv(folder)],
        text=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)})


def children(parent):
    return list(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


def wait_for_file(folder, pattern, lives):
    """Return as soon as `folder` holds such a file, or the run does not live any more."""
    deadline = time.monotonic() + MINUTE
    while not list(folder.glob(pattern)) and lives():
        assert time.monotonic() < deadline, f"no {pattern} in {folder} after a minute"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name, begun, victim", [
    ("collect", "rows.jsonl.rank*", 0), ("mtdpo", "resume", "torchrun")])
def test_all_ends_soon_after_the_kill_of_a_rank_or_of_torchrun_and_its_command_resumes(
        commands, tmp_path, name, begun, victim):
    run = torchrun(commands[name], tmp_path)
    wait_for_file(tmp_path, begun, lambda: run.poll() is None)
    os.kill(run.pid if victim == "torchrun" else children(run.pid)[victim], signal.SIGKILL)
    run.communicate(timeout=MINUTE)  # until all have ended that could print
    assert run.returncode != 0
    run = torchrun(commands[name], tmp_path)
    printed = run.communicate(timeout=3 * MINUTE)[0]
    assert run.returncode == 0, printed
    assert contents(tmp_path) == commands[name].whole(2)[0]


# -----------------------------------------------------------------------------
# SIGTERM and Ctrl-C


@pytest.mark.parametrize("name, signal_number", [
    ("collect", signal.SIGINT), ("collect", signal.SIGTERM), ("mtdpo", signal.SIGINT),
    ("states", signal.SIGTERM), ("critic", signal.SIGTERM),
])
def test_a_stop_is_clean_and_says_how_to_resume(commands, tmp_path, name, signal_number):
    command = commands[name]
    expected, _ = command.whole()
    command.log.write_text("")
    process, = command.start(tmp_path / "output")
    wait_for_file(tmp_path, "output/[!.]*.json*", process.is_alive)
    os.kill(process.pid, signal_number)
    process.join(MINUTE)
    printed = command.log.read_text()
    assert process.exitcode == 130, printed
    assert "Stopped." in printed and "rerun the same command" in printed, printed
    assert "Traceback" not in printed
    command.complete(tmp_path / "output")
    assert contents(tmp_path / "output") == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks, signalled", [(1, [0]), (2, [0, 1]), (2, [1])])
def test_a_stopped_training_repeats_no_step_that_was_taken(commands, tmp_path, ranks, signalled):
    given = commands["mtdpo"]
    command = Command(given.script, [*given.arguments, "--epochs", 1000, "--save_minutes", 60],
                      tmp_path / "log.txt")
    log, steps = tmp_path / "output/metrics.jsonl", []
    for _ in range(2):
        processes = command.start(tmp_path / "output", ranks)
        while not log.exists() or len(log.read_text().splitlines()) < len(steps) + 2:
            assert all(process.exitcode is None for process in processes), command.log.read_text()
            time.sleep(0.01)
        for rank in signalled:
            os.kill(processes[rank].pid, signal.SIGTERM)
        for process in processes:
            process.join(MINUTE)
            assert process.exitcode == 130, command.log.read_text()
        now = log.read_text().splitlines()  # with the time that each step took
        assert now[:len(steps)] == steps and len(now) > len(steps)
        steps = now
    assert ("Stopping after this step" in command.log.read_text()) == (0 in signalled)


# -----------------------------------------------------------------------------
# Numbers and ranks


def test_a_loss_that_is_no_number_stops_the_run_with_its_numbers(commands, tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "model")
    model = load_model(tiny())
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    command = commands["mtdpo"]
    broken = Command(command.script, [*command.arguments, "--model", tmp_path / "model"],
                     tmp_path / "log.txt")
    process, = broken.start(tmp_path / "output")
    process.join(MINUTE)
    printed = broken.log.read_text()
    assert process.exitcode == 1 and "Traceback" not in printed, printed
    assert "step 0: found" in printed and "nan" in printed and "lower --lr" in printed
    assert not (tmp_path / "output/config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name, more", [
    ("mtdpo", ()),
    ("critic", ("--holdout", 0)),
    ("collect", ("--num_tasks", 1, "--samples_per_task", 1)),
    ("collect", ()),
])
def test_two_ranks_make_what_one_makes_even_without_data(commands, tmp_path, name, more):
    command = commands[name]
    if name != "collect":
        more = *more, "--episodes", write_episodes(tmp_path / "one.jsonl", tasks=1, samples=2)
    one = Command(command.script, [*command.arguments, *more], tmp_path / "log.txt")
    for ranks in (1, 2):
        one.complete(tmp_path / str(ranks), ranks)
    if name == "collect":
        alone, two = (tmp_path / ranks / "rows.jsonl" for ranks in ("1", "2"))
        assert alone.read_bytes() == two.read_bytes()
    else:
        assert not differing_weights(tmp_path / "1", tmp_path / "2", 1e-5)
