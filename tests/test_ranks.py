"""What ranks of a training run need: equal work, memory, states, and an end to hangs."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
import types

import forked
import pytest
import torch
from conftest import (
    ROOT, byte_tokenizer, changed_trainer, metrics, read_rows, run_python, run_script, tiny_model,
    training, write_episodes)
from safetensors import SafetensorError
from tqdm import tqdm

from runtime.checkpoints import read_state, save_state, wait_for_files, writing
from runtime.models import open_to_train, remove_noise, shard
from runtime.processes import Process, join_processes, own_device, own_rank
from runtime.training import Run

ALONE = Process(0, 1, "cpu")
MACHINE = types.SimpleNamespace(dtype=None, checkpointing_every=None, reshard=True, lora_rank=0)


# -----------------------------------------------------------------------------
# What torchrun, or a cluster, puts into the environment


def test_world_size_without_rank_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="WORLD_SIZE 4 without RANK"):
        join_processes()


def test_an_empty_world_size_is_a_process_alone_whatever_rank_a_cluster_has_set(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("RANK", "3")
    assert join_processes().leads and own_rank() == 0


def test_a_process_alone_has_the_first_gpu_whatever_rank_a_cluster_has_set(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"cuda.is_available": True, "cuda.device_count": 1, "cuda.set_device": None,
                        "distributed.is_initialized": True, "distributed.new_group": None}.items():
        monkeypatch.setattr(f"torch.{name}", lambda *_, value=value, **__: value)
    assert join_processes(training=True).device == "cuda:0"


JOINS = """
from runtime import processes
signals = []
processes.end_with_parent = lambda number: signals.append(int(number))
print(processes.join_processes(training=True).leads, signals)
"""


def test_a_process_alone_needs_no_network_and_its_parents_death_kills_it_only_while_it_joins():
    cluster = {"RANK": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
               "MASTER_PORT": "of another script", "GLOO_SOCKET_IFNAME": "of another node"}
    printed = run_python("-c", JOINS, **cluster)
    assert printed == f"True [{signal.SIGKILL:d}, {signal.SIGTERM:d}]\n"  # SIGTERM saves a state


def launched(main, script='exec "$@"'):
    """A run of `main`, lines of code, started by this shell script."""
    code = f"import errno, threading\nfrom runtime.processes import launch\n{main}launch(main, 0)"
    return subprocess.run(["sh", "-c", script, "sh", sys.executable, "-c", code],
                          cwd=ROOT, capture_output=True, text=True)


def test_a_run_in_the_background_of_a_shell_stops_at_sigint():
    done = launched("import os, signal\ndef main(_): os.kill(os.getpid(), signal.SIGINT)\n",
                    "trap '' INT; exec \"$@\"")  # so a shell starts what has a & behind it
    assert done.returncode == 130 and "Stopped. What was finished is on disk" in done.stderr


@pytest.mark.parametrize("main, script", [
    # a second signal, while a lock handles the first
    ("def main(_):\n  try:\n    raise KeyboardInterrupt\n"
     "  finally:\n    threading.Lock().release()\n", 'exec "$@"'),
    # one within a __del__, where Python would ignore it
    ("class Freed:\n  def __del__(self):\n    raise KeyboardInterrupt\n"
     "def main(_):\n  Freed()\n  print('went on', flush=True)\n", 'exec "$@"'),
    # a run without stdout
    ("def main(_):\n  raise KeyboardInterrupt\n", 'exec "$@" >&-')])
def test_a_signal_at_an_odd_moment_stops_a_run_as_any_other_does(main, script):
    done = launched(main, script)
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Stopped." in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("main", [
    "def main(_):\n  threading.stack_size(2**50)\n  threading.Thread(target=print).start()\n",
    "def main(_):\n  raise OSError(errno.EMFILE, 'Too many open files')\n"])
def test_no_room_for_another_thread_or_file_is_a_sentence_about_the_batch_size(main):
    done = launched(main)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "lower --batch_size" in done.stderr and "rerun the same" in done.stderr


def test_processes_that_cannot_connect_are_a_sentence_about_their_network():
    # what gloo raises for the address of a process that has died; restarts by torchrun keep it
    refused = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: ..."
    dead = launched(f"def main(_): raise RuntimeError({refused!r})\n")
    main = ("from torch import distributed\ndef main(_): distributed.init_process_group('gloo',"
            " store=distributed.HashStore(), rank=0, world_size=1)\n")
    missing = launched(main, 'export GLOO_SOCKET_IFNAME=missing; exec "$@"')
    for done in (dead, missing):
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "name it in GLOO_SOCKET_IFNAME" in done.stderr and "rerun the same" in done.stderr


# -----------------------------------------------------------------------------
# The share of each rank


@pytest.mark.parametrize("world, size, count", [
    (1, 3, 8), (2, 1, 8), (2, 3, 8), (3, 2, 8), (3, 4, 5), (4, 1, 2), (4, 8, 3)])
def test_ranks_share_a_batch_in_as_many_parts_and_each_entry_counts_once(world, size, count):
    batch, parts, counted = list(range(count)), set(), []
    for rank in range(world):
        run = types.SimpleNamespace(rank=rank, world=world)
        mine = list(Run.share(run, batch, size))
        parts.add(len(mine))
        assert all(part and len(part) <= size for part, _ in mine)
        assert {weight for _, weight in mine} <= {0, world}
        counted += [entry for part, weight in mine if weight for entry in part]
    assert len(parts) == 1 and sorted(counted) == batch


@pytest.mark.parametrize("batch_size, named", [(1, True), (2, False)])
def test_a_batch_of_fewer_pairs_than_processes_is_named(tiny, tmp_path, batch_size, named):
    done = run_script("train_critic.py", *training(
        write_episodes(tmp_path / "episodes.jsonl"), tiny(), tmp_path / "out", "--max_steps", 1,
        "--batch_size", batch_size), processes=2)
    assert done.stdout.count("--batch_size 1 is less than the 2 processes") == named


def run_of(process):
    return types.SimpleNamespace(process=process, device="cpu", world=process.world)


def test_every_nth_layer_is_recomputed():
    model = tiny_model(byte_tokenizer(), layers=5)
    shard(model, run_of(ALONE), types.SimpleNamespace(**vars(MACHINE) | {"checkpointing_every": 2}))
    layers = model.get_decoder().layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False, True]


# -----------------------------------------------------------------------------
# States by the leader's clock

CLOCKS = """
import runtime.training
rank = int(os.environ["RANK"])
clock = iter(range(10**9))

class Time:
    perf_counter, sleep = time.perf_counter, time.sleep

    @staticmethod
    def monotonic():  # the leader's clock ticks once a call; the other one races ahead
        return 60 * next(clock) if rank == 0 else 1e12 * next(clock)

def save_state(folder, step, *_):
    print(step, file=open(folder.with_name(f"saved{rank}"), "a"))

runtime.training.time, runtime.training.save_state = Time, save_state
"""


def test_states_are_saved_when_the_leaders_clock_says_so_on_all_ranks_at_once(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    run_script(changed_trainer(tmp_path, CLOCKS), *training(
        episodes, tiny(), tmp_path / "out", "--save_minutes", 2, "--batch_size", 1), processes=2)
    saved = [read_rows(tmp_path / f"out/saved{rank}") for rank in (0, 1)]
    # a tick for each step, and one for each state; the last step saves the checkpoint instead
    assert saved == [list(range(2, len(metrics(tmp_path / "out")), 2))] * 2


def of_two(rank=0):
    """A process of two that waits for nobody."""
    return types.SimpleNamespace(rank=rank, world=2, leads=rank == 0, barrier=lambda: None)


def test_a_state_replaces_the_last_one_once_the_files_of_all_ranks_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.checkpoints.wait_for_files",
                        functools.partial(wait_for_files, patience=0))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_state(tmp_path / "resume", 1, model, optimizer, ALONE)
    with pytest.raises(SystemExit, match="files of 1 processes, expected 2; all nodes need"):
        save_state(tmp_path / "resume", 2, model, optimizer, of_two())
    assert read_state(tmp_path / "resume", ALONE)["step"] == 1


def test_states_that_kills_have_left_half_written_are_replaced(tmp_path):
    model = torch.nn.Linear(2, 2)
    for name in ("resume.1.partial", "resume.2.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.pt").touch()
    save_state(tmp_path / "resume", 2, model, torch.optim.AdamW(model.parameters()), ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["resume"]
    assert read_state(tmp_path / "resume", ALONE)["step"] == 2


@pytest.mark.parametrize("raised", [RuntimeError, SafetensorError, Exception])
def test_what_a_library_raises_when_it_cannot_write_is_an_error_of_the_disk(tmp_path, raised):
    with pytest.raises(OSError, match="could not be written .no space"), writing(tmp_path):
        raise raised("no space")
    with pytest.raises(KeyError), writing(tmp_path):  # a mistake in the code stays one
        raise KeyError("name")


@pytest.mark.parametrize("done, planned, stopping, saved, ends", [
    (2, 9, False, False, False), (2, 9, True, True, True),
    (4, 4, True, False, False),  # after the last step the checkpoint is saved, and no state
    (4, 9, True, True, False), (4, 9, False, True, False)])  # where --max_steps ends the run
def test_a_signal_saves_a_state_and_ends_the_run_unless_its_last_step_is_done(
        monkeypatch, tmp_path, done, planned, stopping, saved, ends):
    states = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)
    monkeypatch.setattr("runtime.training.save_state",
                        lambda *given: states.append((given[1], time.perf_counter())))
    run = Run.__new__(Run)
    vars(run).update(process=ALONE, device="cpu", output=tmp_path, last=4, planned=planned,
                     stopping=stopping, save_seconds=1e9, saved=0, began=0)
    with pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext():
        Run.save_state_if_due(run, done, None, None)
    assert [step for step, _ in states] == [done] * saved
    assert all(run.began >= ended for _, ended in states)  # the save is no part of the next step


def test_a_signal_while_the_checkpoint_is_written_ends_the_run_once_it_is_whole(
        monkeypatch, tmp_path):
    def written(output, *_):
        os.kill(os.getpid(), signal.SIGTERM)
        (output / "config.json").touch()

    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)
    monkeypatch.setattr("runtime.training.save_checkpoint", written)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    run = Run.__new__(Run)
    before = signal.signal(signal.SIGTERM, run._stop_after_step)
    vars(run).update(process=ALONE, device="cpu", output=tmp_path, last=4, planned=4, saved=0,
                     save_seconds=1e9, stopping=False, log_file=tmp_path / "metrics.jsonl",
                     bar=tqdm(disable=True), handlers={signal.SIGTERM: before})
    with pytest.raises(KeyboardInterrupt):
        Run.save(run, None, None)
    assert (tmp_path / "config.json").exists() and signal.getsignal(signal.SIGTERM) is before


def test_any_number_of_a_step_that_is_not_finite_ends_the_run(monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    process = types.SimpleNamespace(leads=False, group=None)
    run = types.SimpleNamespace(totals={"train/loss": torch.tensor(1.0)}, world=1, process=process)
    with pytest.raises(SystemExit, match="step 3: found .*inf.*; lower --lr"):
        Run.log(run, 3, {"train/gradient": torch.tensor(float("inf"))})


def test_a_second_ctrl_c_ends_the_run_at_once_and_a_sigterm_that_comes_twice_does_not():
    run = types.SimpleNamespace(stopping=False)
    Run._stop_after_step(run, signal.SIGTERM, None)
    Run._stop_after_step(run, signal.SIGTERM, None)  # the same one, passed on by torchrun
    assert run.stopping
    with pytest.raises(KeyboardInterrupt):
        Run._stop_after_step(run, signal.SIGINT, None)


# -----------------------------------------------------------------------------
# Hangs

HANGING = """
import signal
import runtime.training
from runtime import processes
processes.STEP_MINUTES = 0.05
holder, name = eval("HOLDER"), "NAME"
original = getattr(holder, name)

def hanging(*arguments):
    if os.environ["RANK"] == "RANK_THAT_HANGS":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun need not wait 30 seconds to kill
        time.sleep(600)
    return original(*arguments)

setattr(holder, name, hanging)
"""


@pytest.mark.slow
@pytest.mark.parametrize("holder, name, rank", [
    ("runtime.training.Run", "add", "1"),
    ("runtime.training.Run", "save_state_if_due", "0"),
])
def test_a_rank_that_hangs_in_a_step_ends_the_run_in_a_sentence(tiny, tmp_path, holder, name, rank):
    script = changed_trainer(tmp_path, HANGING.replace("HOLDER", holder).replace("NAME", name)
                             .replace("RANK_THAT_HANGS", rank))
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    began = time.monotonic()
    done = forked.run(script, list(map(str, training(episodes, tiny(), tmp_path / "out"))), 2, 300)
    assert time.monotonic() - began < 300
    assert done.returncode != 0
    assert "Another process of this run has been silent" in done.stderr, done.stderr[-3000:]


LEADER_FAILS_LAST = f"""
import sys, time
sys.path[0] = {str(ROOT)!r}
from runtime import processes

def main(args):
    process = processes.join_processes()
    process.barrier()
    if process.leads:
        time.sleep(1)  # the other rank is done by now
        raise SystemExit("every dialogue failed")

processes.launch(main, None)
"""


def test_a_rank_that_is_done_ends_with_a_sentence_if_the_leader_fails_after_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEADER_FAILS_LAST)
    done = run_script(script, processes=2, check=False)
    assert done.returncode != 0
    assert "every dialogue failed" in done.stderr
    assert re.search("Another process of this run has ended|Stopped", done.stderr), done.stderr
    assert "RuntimeError" not in done.stderr


def test_more_processes_than_gpus_stop_with_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = "found 1 GPU for more processes, expected one for each; .*--nproc_per_node 1"
    with pytest.raises(SystemExit, match=found):
        join_processes()


def test_a_process_that_sees_its_own_gpu_alone_is_told_how_to_take_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit, match="LOCAL_RANK=0 if the cluster shows"):
        own_device(world=4)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert own_device(world=4) == "cuda:0"


# -----------------------------------------------------------------------------
# What a trainable model and its inputs need


def test_the_pad_token_learns_where_it_is_a_real_one(tiny):
    args = types.SimpleNamespace(**vars(MACHINE), model=tiny(), seed=0)
    model = open_to_train(args, run_of(ALONE))
    token = byte_tokenizer().pad_token_id
    ids = torch.tensor([[5, token, 7, token, 9]])
    model(ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[token].abs().min() > 0


OTHER_DATA = """
row = train_policy.dialogue_row

def other(*arguments):
    found = row(*arguments)
    found.ids[0] = int(os.environ["RANK"])
    return found

train_policy.dialogue_row = other
"""


@pytest.mark.slow
def test_ranks_that_hold_other_data_stop_and_are_named(tiny, tmp_path):
    script = changed_trainer(tmp_path, OTHER_DATA)
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    done = forked.run(script, list(map(str, training(episodes, tiny(), tmp_path / "out"))), 2, 300)
    assert done.returncode != 0 and "on the ranks [1] than on rank 0" in done.stderr


def test_data_that_is_cut_elsewhere_is_other_data():
    found = []
    run = types.SimpleNamespace(rank=0, gather=lambda mine: found.append(mine[0]) or mine)
    for data in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [3]]):
        Run.refuse_unequal_data(run, data)
    assert len(set(found)) == 3 and found[0] == found[3]


def test_nothing_random_is_left_in_a_model_that_is_trained():
    model = tiny_model(byte_tokenizer())
    for layer in model.get_decoder().layers:
        layer.self_attn.attention_dropout = layer.mlp.router_jitter_noise = 0.5
    model.dropout = torch.nn.Dropout(0.5)
    remove_noise(model.train())
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.dropout.p == model.model.layers[0].mlp.router_jitter_noise == 0.0


def test_scoring_is_without_gradients_and_leaves_the_model_in_training():
    model = tiny_model(byte_tokenizer()).train()  # layers are recomputed in training mode only
    with Run.scoring(None, model):
        assert not model.training and not model(torch.arange(9)[None]).logits.requires_grad
    assert model.training and all(module.training for module in model.modules())
