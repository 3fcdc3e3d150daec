"""What ranks of a training run need: equal work, memory, states, and an end to hangs.

Run: pytest tests/test_ranks.py
"""

import json
import random
import re
import statistics
import time

import pytest
import torch
from conftest import ROOT, byte_tokenizer, metrics, run_script, tiny_model, weights, write_episodes

from stages.processes import Process, join_processes
from train_critic import (
    Item, Row, loop_settings, parse_args, plan_batches, precompute_reference)
from training.checkpoints import save_state, wait_for_files
from training.ranks import ShardSettings, check_same_items, shard

ALONE = Process(0, 1, "cpu")


@pytest.fixture(scope="module")
def process():
    return join_processes(training=True)


def settings(*flags):
    return loop_settings(parse_args(["--episodes", "e", "--model", "m", "--output", "o", *flags]))


# -----------------------------------------------------------------------------
# Batches of items that are about equally long


def lengths_of_dialogues(count):
    """Log-normal, with mean 1,500 and standard deviation 500 tokens."""
    draw = random.Random(0)
    return [draw.lognormvariate(7.26, 0.325) for _ in range(count)]


def waiting(batches, lengths):
    """Time of a step over its mean work: the longest of eight ranks over the mean rank."""
    longest = sum(max(lengths[index] for index in batch) for batch in batches)
    return longest / sum(statistics.mean(lengths[index] for index in batch) for batch in batches)


def test_windows_let_eight_ranks_wait_a_tenth_at_most_where_a_shuffle_costs_a_third():
    lengths = lengths_of_dialogues(4000)
    plain, windows = (
        plan_batches(len(lengths), lengths.__getitem__, settings("--epochs", "1", *more))
        for more in ((), ("--length_window", "16")))
    assert waiting(plain, lengths) > 1.33
    assert waiting(windows, lengths) < 1.1


@pytest.mark.parametrize("window", ["1", "3", "1000"])
def test_every_item_comes_once_an_epoch_in_an_order_that_the_seed_alone_decides(window):
    lengths = lengths_of_dialogues(101)
    chosen = settings("--length_window", window, "--epochs", "3", "--seed", "5")
    batches = plan_batches(len(lengths), lengths.__getitem__, chosen)
    steps = 13
    assert len(batches) == 3 * steps and max(map(len, batches)) == 8
    epochs = [sum(batches[start:start + steps], []) for start in range(0, 3 * steps, steps)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert plan_batches(len(lengths), lengths.__getitem__, chosen) == batches
    assert plan_batches(len(lengths), lengths.__getitem__, chosen._replace(seed=6)) != batches


def training(path, model, output, *more):
    return ["--episodes", path, "--model", model, "--output", output, "--method", "mtdpo",
            "--epochs", 2, "--batch_size", 4, "--lr", 1e-3, "--max_length", 600,
            "--length_window", 2, *more]


def test_two_ranks_with_windows_train_as_one_does(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    for ranks in (1, 2):
        run_script("train_policy.py", *training(episodes, tiny(), tmp_path / str(ranks)),
                   processes=ranks)
    for name, value in weights(tmp_path / "1").items():
        torch.testing.assert_close(weights(tmp_path / "2")[name], value, atol=1e-5, rtol=0)


# -----------------------------------------------------------------------------
# Memory and collectives


def figures(*flags, ranks):
    done = run_script("tests/rank_figures.py", *flags, processes=ranks)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_takes_no_more_than_weights_gradients_moments_and_two_layers(ranks):
    found = figures("--layers", 24, "--tokens", 8, ranks=ranks)
    assert len(found) == ranks
    for line in found:
        assert 16 < line["bytes_per_parameter"] < 16.8


@pytest.mark.slow
def test_a_step_takes_six_bytes_for_each_logit_of_an_agent_token():
    peaks = {}
    for vocabulary in (1000, 3000):
        found, = figures("--layers", 1, "--width", 16, "--tokens", 4000, "--batch_size", 1,
                         "--vocabulary", vocabulary, ranks=1)
        peaks[vocabulary] = found["peak"]
    weights_of_a_column = 16.5 * 2 * 16  # of embeddings and output layer
    of_a_column = (peaks[3000] - peaks[1000]) / 2000 - weights_of_a_column
    assert of_a_column / 4000 < 6


@pytest.mark.slow
def test_all_ranks_run_the_same_collectives_once_for_each_pair_whatever_the_batch():
    for batch_size, pairs_of_a_rank in ((2, 1), (3, 2), (4, 2)):
        found = figures("--batch_size", batch_size, ranks=2)
        counts = found[0]["collectives"]
        assert found[1]["collectives"] == counts
        # four layers and the root, gathered before forward and backward, the root once
        assert counts == {"_allgather_base_": 9 * pairs_of_a_rank,
                          "_reduce_scatter_base_": 5 * pairs_of_a_rank, "allreduce_": 1}


@pytest.mark.slow
def test_neither_resharding_nor_recomputation_changes_loss_and_gradient():
    plain = figures(ranks=2)[0]
    kept = figures("--no-reshard", "--checkpointing_every", 3, ranks=2)[0]
    assert kept["collectives"]["_allgather_base_"] == 5 < plain["collectives"]["_allgather_base_"]
    assert kept["loss"] == plain["loss"]
    assert kept["gradient"] == pytest.approx(plain["gradient"], rel=1e-6)


def test_every_nth_layer_is_recomputed():
    model = tiny_model(byte_tokenizer(), layers=5)
    shard(model, ALONE, ShardSettings(checkpointing_every=2))
    layers = model.get_decoder().layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False, True]


def test_more_processes_than_items_of_a_batch_are_told_of(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    command = training(episodes, tiny(), tmp_path / "out", "--max_steps", 1)
    command[command.index("--batch_size") + 1] = 1
    done = run_script("train_policy.py", *command, processes=2)
    assert ("--batch_size 1 is smaller than the number of processes, 2: 1 of them add nothing"
            in done.stdout)


# -----------------------------------------------------------------------------
# States by the leader's clock

CLOCKS = f"""
import os, sys, time
sys.path[0] = {str(ROOT)!r}
import train_critic, train_policy

rank = int(os.environ["RANK"])
clock, saved = iter(range(10**9)), []

class Time:
    perf_counter, sleep = time.perf_counter, time.sleep

    @staticmethod
    def monotonic():  # the leader's clock ticks once a call; the other one is far ahead
        return 60 * next(clock) if rank == 0 else 1e12

def save_state(folder, step, *_):
    saved.append(step)

train_critic.time = Time
train_critic.save_state = save_state
train_policy.launch(train_policy.main, train_policy.parse_args())
open(sys.argv[sys.argv.index("--output") + 1] + f"/saved{{rank}}", "w").write(str(saved))
"""


def test_states_are_saved_when_the_leaders_clock_says_so_on_all_ranks_at_once(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    script = tmp_path / "train_policy.py"
    script.write_text(CLOCKS)
    run_script(script, *training(episodes, tiny(), tmp_path / "out", "--save_minutes", 2,
                                 "--batch_size", 1), processes=2)
    saved = [(tmp_path / f"out/saved{rank}").read_text() for rank in (0, 1)]
    assert saved[0] == saved[1]
    # a tick for each step, and one for each state
    assert saved[0] == str(list(range(2, len(metrics(tmp_path / "out")), 2)))


def test_a_state_is_written_under_a_name_of_its_own_and_counted_before_it_gets_its_name(
        tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr("training.checkpoints.wait_for_files",
                        lambda folder, count: counted.append((folder.name, count)))
    model = tiny_model(byte_tokenizer())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (3, 7):
        save_state(tmp_path / "state", step, model, optimizer, ALONE)
    assert counted == [("state.3.partial", 1), ("state.7.partial", 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_state_that_lacks_a_ranks_file_is_refused(tmp_path):
    (tmp_path / "rank0.pt").touch()
    wait_for_files(tmp_path, 1, patience=0)
    with pytest.raises(SystemExit, match="files of 1 processes, expected 2; all nodes need"):
        wait_for_files(tmp_path, 2, patience=0)


# -----------------------------------------------------------------------------
# References of a resumed run


def items_of(tokens):
    rows = [Row([1, 2, token, 4], [-1, -1, 0, 0], 1) for token in tokens]
    return [Item(rows, [(0, 1)])]


def test_a_resumed_run_reads_its_references_and_other_items_are_scored_anew(tmp_path, process):
    model, path = tiny_model(byte_tokenizer()), tmp_path / "reference.json"
    first, again, other = items_of([5, 6]), items_of([5, 6]), items_of([5, 7])
    precompute_reference(model, first, process, 1, path)
    with torch.no_grad():
        model.lm_head.weight += torch.randn_like(model.lm_head.weight)  # steps have been taken
    precompute_reference(model, again, process, 1, path)
    references = [[row.reference for row in items[0].rows] for items in (first, again)]
    assert references[0] == references[1]
    precompute_reference(model, other, process, 1, path)
    assert other[0].rows[0].reference != first[0].rows[0].reference


# -----------------------------------------------------------------------------
# Hangs

HANGING = f"""
import os, sys, time
sys.path[0] = {str(ROOT)!r}
import train_critic, train_policy
from stages import processes

processes.STEP_MINUTES = 0.05
holder, name = eval("HOLDER"), "NAME"
original = getattr(holder, name)

def hanging(*arguments):
    if os.environ["RANK"] == "RANK_THAT_HANGS":
        time.sleep(60)
    return original(*arguments)

setattr(holder, name, hanging)
train_policy.launch(train_policy.main, train_policy.parse_args())
"""


@pytest.mark.parametrize("holder, name, rank", [
    ("train_critic.TrainingLoop", "optimise", "1"),
    ("train_critic.MetricsLog", "write", "0"),  # only the leader's disk can keep it waiting here
])
def test_a_rank_that_hangs_within_a_step_ends_the_run_with_a_sentence(
        tiny, tmp_path, holder, name, rank):
    script = tmp_path / "train_policy.py"
    script.write_text(HANGING.replace("HOLDER", holder).replace("NAME", name)
                      .replace("RANK_THAT_HANGS", rank))
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    began = time.monotonic()
    done = run_script(script, *training(episodes, tiny(), tmp_path / "out"), processes=2,
                      check=False)
    assert time.monotonic() - began < 50
    assert done.returncode != 0
    assert "Another process of this run has been silent" in done.stderr, done.stderr[-3000:]


LEADER_FAILS_LAST = f"""
import sys, time
sys.path[0] = {str(ROOT)!r}
from stages import processes

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


# -----------------------------------------------------------------------------
# What a trainable model and its inputs need


def test_the_pad_token_learns_where_it_is_a_real_one():
    tokenizer = byte_tokenizer()
    token = tokenizer.pad_token_id
    ids = torch.tensor([[5, token, 7, token, 9]])
    gradients = []
    for trainable in (True, False):
        model = tiny_model(tokenizer)
        if trainable:
            shard(model, ALONE, ShardSettings())
        else:
            model.get_input_embeddings().padding_idx = None  # plain autograd
        model(ids, labels=ids).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad[token])
    assert gradients[0].abs().min() > 0
    assert torch.equal(*gradients)


def test_ranks_that_hold_other_items_stop_and_are_named(tmp_path, process):
    script = tmp_path / "ranks.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from stages.processes import join_processes\n"
        "from train_critic import Item, Row, check_same_items\n"
        "process = join_processes(training=True)\n"
        "items = [Item([Row([1, 2, process.rank], [-1, 0, 0], 1)], [])]\n"
        "check_same_items([items[0]], process._replace(rank=0))\n")
    done = run_script(script, processes=2, check=False)
    assert done.returncode != 0 and "on the ranks [1] than on rank 0" in done.stderr
    check_same_items([], process)
