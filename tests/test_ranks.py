"""What ranks of a training run need: equal work, memory, states, and an end to hangs."""

import re
import time
import types

import pytest
import torch
from conftest import (
    ROOT, byte_tokenizer, changed_trainer, metrics, read_rows, run_script, tiny_model, training,
    write_episodes)

from runtime.checkpoints import read_state, wait_for_files
from runtime.models import open_to_train, remove_noise, shard
from runtime.processes import Process, join_processes
from runtime.training import Run

ALONE = Process(0, 1, "cpu")
MACHINE = types.SimpleNamespace(dtype=None, checkpointing_every=None, reshard=True, lora_rank=0)


# -----------------------------------------------------------------------------
# What torchrun, or a cluster, puts into the environment


def test_world_size_without_rank_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="WORLD_SIZE 4 without RANK"):
        join_processes()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_alone_leads_and_reads_no_port_of_the_cluster(monkeypatch, rank):
    for name, value in {"RANK": rank, "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "of another script"}.items():
        monkeypatch.setenv(name, value)
    assert join_processes().leads
    assert join_processes(training=True).leads


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


def test_a_state_that_lacks_a_ranks_file_is_refused(tmp_path):
    (tmp_path / "rank0.pt").touch()
    wait_for_files(tmp_path, 1, patience=0)
    with pytest.raises(SystemExit, match="files of 1 processes, expected 2; all nodes need"):
        wait_for_files(tmp_path, 2, patience=0)


# -----------------------------------------------------------------------------
# Hangs

HANGING = """
import runtime.training
from runtime import processes
processes.STEP_MINUTES = 0.05
holder, name = eval("HOLDER"), "NAME"
original = getattr(holder, name)

def hanging(*arguments):
    if os.environ["RANK"] == "RANK_THAT_HANGS":
        time.sleep(600)
    return original(*arguments)

setattr(holder, name, hanging)
"""


@pytest.mark.parametrize("holder, name, rank", [
    ("runtime.training.Run", "add", "1"),
    ("runtime.training.Run", "save_state_if_due", "0"),
])
def test_a_rank_that_hangs_in_a_step_ends_the_run_in_a_sentence(tiny, tmp_path, holder, name, rank):
    script = changed_trainer(tmp_path, HANGING.replace("HOLDER", holder).replace("NAME", name)
                             .replace("RANK_THAT_HANGS", rank))
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    began = time.monotonic()
    done = run_script(script, *training(episodes, tiny(), tmp_path / "out"), processes=2,
                      check=False)
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


def test_ranks_that_hold_other_data_stop_and_are_named(tiny, tmp_path):
    script = changed_trainer(tmp_path, OTHER_DATA)
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    done = run_script(script, *training(episodes, tiny(), tmp_path / "out"), processes=2,
                      check=False)
    assert done.returncode != 0 and "on the ranks [1] than on rank 0" in done.stderr


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


def test_a_state_of_more_processes_is_refused(tmp_path):
    for rank in range(2):
        torch.save({"step": 1, "world": 2}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(SystemExit, match="a run of 2 processes, expected 1"):
        read_state(tmp_path, ALONE)
