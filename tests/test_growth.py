"""Outputs that grow, are locked, are taken over."""

import errno
import fcntl
import json
import subprocess
import sys

import pytest
from conftest import (
    ROOT, changed_trainer, differing_weights, metrics, refusal, run_script, training,
    write_episodes)

from runtime.processes import Process
from runtime.record import (
    COUNTS, changes_since, claim_output, has_grown, open_rows, read_run)


def rollout(path, *more, run=run_script):
    return run("collect.py", "--tasks", "toy:backend:train", "--agent", "scripted",
               "--output", path, *more)


# -----------------------------------------------------------------------------
# Growing


def test_a_pilot_of_few_tasks_and_samples_becomes_the_run_of_more_with_the_same_bytes(tmp_path):
    pilot, whole = tmp_path / "pilot.jsonl", tmp_path / "whole.jsonl"
    rollout(pilot, "--num_tasks", 3, "--samples_per_task", 1)
    first = pilot.read_text()
    rollout(pilot, "--num_tasks", 5, "--samples_per_task", 1)
    rollout(pilot, "--num_tasks", 5, "--samples_per_task", 2)
    rollout(whole, "--num_tasks", 5, "--samples_per_task", 2)
    assert pilot.read_text() == whole.read_text()
    assert pilot.read_text().startswith(first)
    assert json.loads((tmp_path / "pilot.jsonl.run.json").read_text())["flags"]["num_tasks"] == 5


SERVED = {"human": "http://one:8000/v1", "human_model": "llama"}
MOVED = {"human": "http://two:8000/v1"}


@pytest.mark.parametrize("before, now, differing, grows", [
    ({}, {"loss": "x"}, ["loss (a new flag)"], False),
    ({"num_tasks": 2}, {"num_tasks": 2}, [], False),
    ({"num_tasks": 2}, {"num_tasks": 3}, [], True),
    ({"num_tasks": 3}, {"num_tasks": 2}, ["num_tasks"], False),
    ({"num_tasks": 5}, {"num_tasks": None}, [], True),  # no limit is more than any number
    ({"num_tasks": None}, {"num_tasks": 5}, ["num_tasks"], False),
    # a server may move if its model has a name that stays
    (SERVED, SERVED | MOVED, [], False),
    (SERVED, SERVED | MOVED | {"human_model": "qwen"}, ["human_model"], False),
    (SERVED | {"human_model": None}, MOVED | {"human_model": None}, ["human"], False),
    (SERVED, {"human": "toy/base", "human_model": None}, ["human", "human_model"], False),
])
def test_changed_flags_are_named_unless_outputs_grow_or_servers_move(before, now, differing, grows):
    record = {"flags": before | {"seed": 0}, "inputs": {}}
    assert changes_since(record, now | {"seed": 0}, {}, ()) == differing
    assert changes_since(record, now | {"seed": 1}, {}, ()) == [*differing, "seed"]
    assert any(has_grown(name, before, now) for name in COUNTS) == grows


def test_an_edited_copy_of_a_script_does_not_take_over_the_output_of_the_original(
        tmp_path, monkeypatch):
    def claim(script):
        monkeypatch.setattr(sys, "argv", [script])
        claim_output(tmp_path / "run.json", {}, [], Process(0, 1, "cpu"))

    claim("train_policy.py")
    (tmp_path / "metrics.jsonl").touch()
    claim("train_policy.py")
    with pytest.raises(SystemExit, match="the output of train_policy.py, expected"):
        claim("train_policy_ipo.py")


def test_a_slash_that_the_shell_adds_to_a_directory_makes_no_other_command(tmp_path):
    for model in ("toy/base", "toy/base/"):
        claim_output(tmp_path / "run.json", {"model": model}, [], Process(0, 1, "cpu"))
        (tmp_path / "metrics.jsonl").touch()


def test_a_larger_max_steps_changes_nothing_where_all_steps_were_taken(tiny, tmp_path):
    command = training(write_episodes(tmp_path / "episodes.jsonl"), tiny(), tmp_path / "run",
                       "--epochs", 1, "--batch_size", 4)
    run_script("train_policy.py", *command, "--max_steps", 50)
    record = (tmp_path / "run/run.json").read_bytes()  # an input of all that the model makes
    assert "training is complete" in run_script("train_policy.py", *command,
                                                "--max_steps", 60).stdout
    assert (tmp_path / "run/run.json").read_bytes() == record


@pytest.mark.slow
def test_training_that_max_steps_cut_is_resumed_by_a_larger_one_as_if_never_cut(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")

    def train(name, *more):
        return run_script("train_policy.py", *training(
            episodes, tiny(), tmp_path / name, "--epochs", 3, "--batch_size", 2, *more))

    train("cut", "--max_steps", 2)
    assert len(metrics(tmp_path / "cut")) == 2
    assert "training is complete up to --max_steps" in train("cut", "--max_steps", 2).stdout
    ending = changed_trainer(tmp_path, "train_policy.open_to_train = lambda *_: os._exit(0)")
    run_script(ending, *training(
        episodes, tiny(), tmp_path / "cut", "--epochs", 3, "--batch_size", 2, "--max_steps", 4))
    # before its first step the model stays usable, and its record is that of its steps
    assert (tmp_path / "cut/config.json").is_file()
    assert read_run(tmp_path / "cut/run.json")["flags"]["max_steps"] == 2
    train("cut", "--max_steps", 4)
    assert len(metrics(tmp_path / "cut")) == 4
    assert read_run(tmp_path / "cut/run.json")["flags"]["max_steps"] == 4
    train("cut")
    train("whole")
    assert not differing_weights(tmp_path / "whole", tmp_path / "cut")
    assert not (tmp_path / "cut/resume").exists()


# -----------------------------------------------------------------------------
# Taken over, and locked


@pytest.mark.parametrize("made, record", [
    ("e.jsonl.rank0", "e.jsonl.run.json"), ("resume", "run.json"), ("metrics.jsonl", "run.json"),
    ("config.json", "run.json")])  # the last one is a stranger's checkpoint
def test_what_a_run_has_left_without_its_record_is_not_taken_over(tmp_path, made, record):
    (tmp_path / made).write_text('{"a": 1}\n')
    with pytest.raises(SystemExit, match="run.json.* choose another --output"):
        if record == "run.json":
            claim_output(tmp_path / record, {}, [], Process(0, 1, "cpu"))
        else:
            open_rows(tmp_path / "e.jsonl", {}, [], Process(0, 1, "cpu"), str)
    assert not (tmp_path / record).exists()


def test_two_runs_on_the_same_output_are_refused_and_a_lock_left_by_a_kill_is_not(tmp_path):
    path = tmp_path / "e.jsonl"
    record = path.with_name("e.jsonl.run.json")
    code = ("import time, pathlib\nfrom runtime.record import hold_lock\n"
            f"hold_lock(pathlib.Path({str(record)!r}))\n"
            "print('held', flush=True)\ntime.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                              text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert f"process {holder.pid}" in rollout(path, "--num_tasks", 2, run=refusal)
        assert not path.exists()
    finally:
        holder.kill()
        holder.communicate()
    rollout(path, "--num_tasks", 2)
    assert len(path.read_text().splitlines()) == 6


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys, code):
    def no_locks(*_):
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    record = tmp_path / "run.json"
    claim_output(record, {"seed": 0}, [], Process(0, 1, "cpu"), ())
    assert record.is_file()
    assert f"{tmp_path}: this file system has no locks" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_goes_on_leaves_no_checkpoint_of_fewer_steps(tiny, tmp_path):
    command = training(write_episodes(tmp_path / "e.jsonl"), tiny(), tmp_path / "cut")
    run_script("train_policy.py", *command, "--max_steps", 1)
    ending = changed_trainer(tmp_path, "train_policy.learning_rate = lambda *_: os._exit(0)")
    run_script(ending, *command, "--max_steps", 2)  # ends within its first step
    assert not (tmp_path / "cut/config.json").exists()
