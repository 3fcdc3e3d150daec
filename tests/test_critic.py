"""The critic: equations, pairs, rows, training, ranking."""

import functools
import json
import math
import os
import random
import shutil

import pytest
import torch
import transformers
from conftest import (
    byte_tokenizer, dialogue, differing_weights, episode, metrics, ranked_state, read_rows,
    refusal, run_script, tiny_model, training, weights, write_episodes, write_rows)

import train_critic
import train_policy
from collect import states_of
from colbench import encode_dialogue, encode_within
from fast import packed
from report import page
from runtime.checkpoints import load_state, remove_leftovers, save_checkpoint, save_state
from runtime.models import load_model
from runtime.processes import Process
from train_critic import (
    Critic, Row, advantage, critic_loss, critic_messages, critic_objective, dialogue_row,
    learning_rate, pair_episodes, plan_batches, split_tasks, turn_logprobs)
from variants.value_critic import open_critic

DIALOGUES = [
    dialogue("a task", "y", "no", "a much longer turn of the agent", "so", "z"),
    dialogue("b", "one"),
]
TASK = episode("t", 1.0)["task"]
ALONE = Process(0, 1, "cpu")


def rows_of(tokenizer, *dialogues):
    return [Row(*encode_dialogue(tokenizer, messages)) for messages in dialogues]


def with_rewards(*rewards, **more):
    return [episode("t", reward, sample, **more) for sample, reward in enumerate(rewards)]


def test_a_critic_that_has_not_moved_gives_advantages_of_0_whatever_its_files_hold(tmp_path):
    tokenizer = byte_tokenizer("llama3")
    tiny_model(tokenizer, "gemma3_text").bfloat16().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    episodes = write_episodes(tmp_path / "e.jsonl", tasks=2)
    run_script("train_critic.py", *training(episodes, tmp_path / "base", tmp_path / "critic",
                                            "--lr", 0, "--holdout", 0, "--max_steps", 1))
    critic = Critic(str(tmp_path / "critic"), "cpu")
    values = critic.advantages(TASK, dialogue("x"), ["one turn", "another"], [True, True])
    assert values == [0.0, 0.0]


# -----------------------------------------------------------------------------
# The equations, against slow loops written from the paper


def slow_turn_logprobs(model, row):
    """Per turn, the list of log pi(a_l | o, a_<l) of its tokens, one softmax at a time."""
    logits = model(torch.tensor([row.ids])).logits[0].double()
    turns = [[] for _ in range(row.turns)]
    for index in range(1, len(row.ids)):
        turn = row.turn_index[index]
        if turn >= 0:
            exponentials = [math.exp(value) for value in logits[index - 1].tolist()]
            turns[turn].append(math.log(exponentials[row.ids[index]] / sum(exponentials)))
    return turns


@pytest.mark.parametrize("family, tied", [
    ("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False), ("mistral", False),
    ("gemma3_text", False)])
def test_equations_2_and_3_equal_a_slow_float64_loop_over_ragged_and_one_token_turns(family, tied):
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, *DIALOGUES)
    critic, reference = (tiny_model(tokenizer, family, tied, seed) for seed in (1, 2))
    logprobs, tokens = turn_logprobs(critic, rows)
    advantages = advantage(logprobs, turn_logprobs(reference, rows)[0], tokens)
    totals = []
    for index, row in enumerate(rows):
        pairs = zip(slow_turn_logprobs(critic, row), slow_turn_logprobs(reference, row),
                    strict=True)
        slow = [sum(a - b for a, b in zip(new, old, strict=True)) / len(new) for new, old in pairs]
        assert advantages[index, :len(slow)].tolist() == pytest.approx(slow, abs=1e-4)
        assert not advantages[index, len(slow):].any()
        totals.append(sum(slow))
    loss = critic_loss(advantages[:1], advantages[1:], 0.3).item()
    expected = -math.log(1 / (1 + math.exp(-0.3 * totals[0] + 0.3 * totals[1])))
    assert loss == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("normalise, expected", [
    ("turn", [2, 4, 0]), ("trajectory", [0.5, 3, 0]), ("none", [2, 12, 0])])
def test_normalisation_is_per_turn_trajectory_or_none_and_empty_turns_get_0(normalise, expected):
    logprobs, tokens = torch.tensor([[2.0, 12.0, 0.0]]), torch.tensor([[1, 3, 0]])
    assert advantage(logprobs, torch.zeros(1, 3), tokens, normalise).tolist() == [expected]


def objective_of(row_a, row_b, nll=0.0, beta=1.0):
    model = tiny_model(byte_tokenizer())
    return model, critic_objective(model, [(row_a, row_b)], beta, nll, "none")


def test_the_first_row_of_a_pair_is_the_chosen_one_and_beta_scales_margin_and_loss():
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, dialogue("t", "ab", "r", "ab"), dialogue("t", "cd", "r", "cd"))
    logprobs, _ = turn_logprobs(tiny_model(tokenizer), rows)
    rows[0].reference, rows[1].reference = logprobs[0] - 1, logprobs[1] + 1
    for pair, beta, margin in ((rows, 1.0, 4.0), (rows[::-1], 1.0, -4.0), (rows, 0.5, 2.0)):
        _, found = objective_of(*pair, beta=beta)
        assert found["margin"].item() == pytest.approx(margin, abs=1e-4)
        assert found["accuracy"].item() == (margin > 0)
        assert found["loss"].item() == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-4)


def test_the_nll_term_is_the_mean_over_the_agent_tokens_of_the_chosen_dialogue():
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, *DIALOGUES)
    for row in rows:
        row.reference = torch.zeros(row.turns)
    model, found = objective_of(*rows, nll=2.0)
    slow = sum(slow_turn_logprobs(model, rows[0]), [])
    assert found["nll"].item() == pytest.approx(-sum(slow) / len(slow), abs=1e-4)
    _, without = objective_of(*rows)
    assert (found["loss"] - without["loss"]).item() == pytest.approx(2 * found["nll"].item(),
                                                                   abs=1e-4)


@pytest.mark.parametrize("script, name, more", [
    (train_critic, "critic_objective", ["none"]), (train_policy, "dpo_objective", [])])
def test_a_chosen_side_without_a_token_to_learn_leaves_the_loss_finite(script, name, more):
    # of a page whose turns did not fit but for an empty last one, an earlier page was graded
    empty = Row([1, 2, 3], [-1, -1, -1], reference=torch.zeros(0))
    other = Row([1, 2, 3], [-1, 0, 0], reference=torch.tensor([-3.0]))
    objective = getattr(script, name)  # a fork may have renamed one of them
    found = objective(tiny_model(byte_tokenizer()), [(empty, other)], 0.1, 0.01, *more)
    assert found["loss"].isfinite() and found["nll"] == 0


def test_an_unknown_mode_is_an_error_and_never_silently_another_mode(tmp_path):
    group, table = [episode("t", 1.0), episode("t", 0.0, 1)], torch.ones(1, 1)
    with pytest.raises(KeyError, match="turns"):
        advantage(table, table, table, "turns")
    with pytest.raises(ValueError, match="rule 'best'.*expected"):
        pair_episodes(group, "best")
    with pytest.raises(KeyError, match="solution"):
        critic_messages(group[0]["task"], dialogue("t"), "solution")
    with pytest.raises(ValueError, match="shuffle 'tasks', expected"):
        plan_batches([[1]], 1, 1, "tasks", 0)
    with pytest.raises(ValueError, match="reference 'none', expected"):
        Critic(tmp_path, reference="none")
    with pytest.raises(ValueError, match="pairing.*'half'.*expected"):
        train_policy.make_pairs("ab", [0.1, 0.2], "half", 4, random.Random(0))


# -----------------------------------------------------------------------------
# Rows


def test_truncation_drops_the_fewest_turns_with_which_a_dialogue_fits():
    tokenizer, draw = byte_tokenizer(), random.Random(0)
    messages = dialogue("task", *("x" * draw.randint(0, 30) for _ in range(23)))
    finished = [draw.random() < 0.5 for _ in range(12)]
    rests = [encode_dialogue(tokenizer, messages[:1] + messages[1 + 2 * dropped:],
                             finished[dropped:]) for dropped in range(12)]
    lengths = [len(ids) for ids, _ in rests]
    for limit in {length + change for length in lengths for change in (-1, 0, 1)}:
        found = encode_within(tokenizer, messages, limit, finished)
        fewest = next((dropped for dropped, length in enumerate(lengths) if length <= limit), None)
        assert found == (None if fewest is None else (*rests[fewest], fewest))


def test_truncation_drops_nothing_that_the_agent_read_before_its_first_turn():
    tokenizer = byte_tokenizer()
    letter = {"role": "user", "content": "a letter"}
    messages = [letter, *dialogue("sum it up", "first", "and?", "second")]
    ids, _, dropped = encode_within(tokenizer, messages, 10_000)
    assert dropped == 0
    shorter, _, dropped = encode_within(tokenizer, messages, len(ids) - 1)
    text = tokenizer.decode(shorter)
    assert dropped == 1 and "a letter" in text and "sum it up" in text and "first" not in text
    assert encode_within(tokenizer, messages, len(shorter) - 1) is None


@pytest.mark.parametrize("texts", [("t", ""), ("t", "a question", "r", "")])
def test_a_turn_that_is_empty_because_it_was_cut_has_no_effect(texts):
    tokenizer, played = byte_tokenizer(), episode("a", 0.0, texts=texts)
    played["dialogue_history"][-1] |= {"output": "\n\n", "finished": False}
    row = dialogue_row(tokenizer, played, 8192)
    logprobs, tokens = turn_logprobs(tiny_model(tokenizer), [row])
    assert logprobs.shape == tokens.shape == (1, len(texts) // 2 - 1)


# -----------------------------------------------------------------------------
# Pairs, tasks and batches


def test_best_vs_rest_pairs_a_best_one_that_passed_or_has_no_tests_with_all_worse_ones():
    group = with_rewards(0.5, 1.0, 1.0, 0.0)
    assert pair_episodes(group) == [(group[1], group[0]), (group[1], group[3])]
    assert pair_episodes(with_rewards(0.9, 0.1)) == []
    assert len(pair_episodes(group, "all")) == 5
    assert len(pair_episodes(group, "all", margin=0.6)) == 2
    assert pair_episodes(group, margin=0.6) == [(group[1], group[3])]
    pages = with_rewards(0.7, 0.2, 0.4, domain="frontend")  # they have no success, but a best one
    assert pair_episodes(pages) == [(pages[0], pages[1]), (pages[0], pages[2])]
    near = with_rewards(0.3, 0.2)
    assert 0.3 - 0.2 < 0.1  # a margin that only rounding misses is kept
    assert len(pair_episodes(near, "all", margin=0.1)) == 1
    assert not pair_episodes(near, "all", margin=0.11)
    pages = with_rewards(0.7, 0.2, 0.4, domain="frontend")  # whose best one is no success
    assert pair_episodes(pages) == [(pages[0], pages[1]), (pages[0], pages[2])]


@pytest.mark.parametrize("domain, rewards", [
    ("backend", (0.9, 1.0, 1.0, 0.0)), ("frontend", (0.7, 0.9, 0.95, 0.0))])
def test_success_vs_failure_pairs_every_success_with_every_failure(domain, rewards):
    group = with_rewards(*rewards, domain=domain)
    expected = [(group[1], group[0]), (group[1], group[3]),
                (group[2], group[0]), (group[2], group[3])]
    assert pair_episodes(group, "success_vs_failure") == expected
    assert pair_episodes(group[1:3], "success_vs_failure") == []


def test_held_out_tasks_are_whole_and_seeded():
    groups = {f"t{index}": [] for index in range(40)}
    training, held_out = split_tasks(groups, 0.05, 0)
    assert len(held_out) == 2 and not set(training) & set(held_out) and len(training) == 38
    assert split_tasks(list(groups)[::-1], 0.05, 0) == (training, held_out)
    assert len(split_tasks(list(map(str, range(100))), 0.07, 0)[1]) == 7
    assert split_tasks(groups, 0.05, 1) != (training, held_out)


@pytest.mark.parametrize("shuffle", ["pairs", "groups"])
def test_every_pair_comes_once_an_epoch_in_an_order_that_the_seed_alone_decides(shuffle):
    groups = [[(task, pair) for pair in range(task % 4)] for task in range(20)]
    pairs = sorted(pair for group in groups for pair in group)
    batches = plan_batches(groups, 3, 8, shuffle, 5)
    assert len(batches) == 3 * 4 and max(map(len, batches)) == 8
    epochs = [sum(batches[start:start + 4], []) for start in range(0, 12, 4)]
    assert all(sorted(epoch) == pairs for epoch in epochs) and epochs[0] != epochs[1]
    assert plan_batches(groups, 3, 8, shuffle, 5) == batches
    assert plan_batches(groups, 3, 8, shuffle, 6) != batches
    changes = sum(one[0] != two[0] for one, two in zip(epochs[0], epochs[0][1:], strict=False))
    assert (changes == 14) == (shuffle == "groups")  # fifteen tasks have pairs


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_a_tenth():
    rates = [learning_rate(step, 100, 1.0) for step in range(101)]
    assert rates[:3] == pytest.approx([(step + 1) / 3 for step in range(3)])
    assert rates[3] == max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


# -----------------------------------------------------------------------------
# The script


def train(episodes, model, output, *more, run=run_script, **options):
    return run("train_critic.py", *training(
        episodes, model, output, "--holdout", 0.2, "--dtype", "float32", *more), **options)


def write_candidates(path, states=6):
    rows = [ranked_state({f"why {n}" * n: 0.0 for n in range(1, 5)},
                         dialogue("t", *["what", "so"] * turn), turn=turn, agent_prompt="Ask.",
                         finished=[True, True, False, True]) for turn in range(states)]
    for row in rows:
        del row["advantages"], row["ranker"]
    return write_rows(path, rows)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    done = train(write_episodes(folder / "episodes.jsonl"), tiny(), folder / "critic")
    (folder / "printed").write_text(done.stdout)
    return folder


def test_training_reports_its_pairs_and_how_it_does_on_held_out_tasks(trained):
    printed = (trained / "printed").read_text()
    assert "8 pairs from 4 tasks" in printed and "2 tasks held out" in printed
    lines = metrics(trained / "critic")
    assert [line["step"] for line in lines] == list(range(4))
    assert ["holdout/loss" in line for line in lines] == [False, True, False, True]
    for name in ("loss", "accuracy"):
        assert math.isfinite(lines[-1][f"holdout/{name}"]) and f"holdout/{name}" in printed
    assert f"and {lines[-1]['holdout/pairs']:.0f} pairs of 2 tasks held out" in printed


def test_held_out_numbers_are_means_over_held_out_pairs_without_nll_also_where_max_steps_ends(
        tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    train(episodes, tiny(), tmp_path / "critic", "--lr", 0, "--nll", 5, "--batch_size", 3,
          "--max_steps", 1)
    line, = metrics(tmp_path / "critic")
    assert line["holdout/pairs"] == 4
    assert line["holdout/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_the_first_step_starts_from_the_reference(trained):
    first = metrics(trained / "critic")[0]
    assert first["train/margin"] == pytest.approx(0, abs=1e-5)
    assert first["train/loss"] == pytest.approx(math.log(2) + 0.01 * first["train/nll"], abs=1e-5)


def test_the_saved_directory_reproduces_the_trained_logits(tiny, tmp_path):
    model = load_model(tiny())
    with torch.no_grad():
        model.lm_head.weight += 0.01
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "rag": "x"}  # makes a folder
    for _ in range(2):  # a larger --max_steps saves again
        save_checkpoint(tmp_path, model, tokenizer, "prompt", ALONE)
    assert torch.equal(load_model(str(tmp_path)).eval()(ids).logits, expected)
    assert (tmp_path / "agent_prompt.txt").read_text() == "prompt\n"


def test_a_checkpoint_opens_once_all_of_it_is_there_and_its_files_have_equal_permissions(
        tiny, tmp_path, monkeypatch):
    moved, replace = [], os.replace

    def killed_after(count):
        def move(*paths):
            if len(moved) == count:
                raise KeyboardInterrupt
            moved.append(replace(*paths))

        return move

    model, tokenizer = load_model(tiny()), byte_tokenizer()
    for count in range(3):
        moved.clear()
        monkeypatch.setattr(os, "replace", killed_after(count))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, model, tokenizer, None, ALONE)
        assert not (tmp_path / "config.json").exists()
    monkeypatch.undo()
    save_checkpoint(tmp_path, model, tokenizer, None, ALONE)
    modes = {path.stat().st_mode for path in tmp_path.iterdir() if path.is_file()}
    assert len(modes) == 1


def test_files_of_checkpoints_and_states_are_on_disk_before_they_replace_others(
        tiny, tmp_path, monkeypatch):
    on_disk = set()
    for name in ("replace", "rename"):
        move = getattr(os, name)

        def checked(old, new, move=move):
            files = [old] if os.path.isfile(old) else os.listdir(old)
            assert {os.stat(os.path.join(old, file)).st_ino for file in files} <= on_disk
            move(old, new)

        monkeypatch.setattr(os, name, checked)
    monkeypatch.setattr(os, "fsync", lambda file: on_disk.add(os.fstat(file).st_ino))
    model = load_model(tiny())
    save_checkpoint(tmp_path, model, byte_tokenizer(), "prompt", ALONE)
    save_state(tmp_path / "resume", 1, model, torch.optim.AdamW(model.parameters()), ALONE)
    assert len(on_disk) == len(list(tmp_path.glob("*.*"))) + 1


def test_half_a_checkpoint_that_a_kill_has_left_is_no_part_of_the_next_one(tiny, tmp_path):
    partial = tmp_path / "checkpoint.partial"
    partial.mkdir()
    (partial / "left.json").touch()
    save_checkpoint(tmp_path, load_model(tiny()), byte_tokenizer(), None, ALONE)
    assert not (tmp_path / "left.json").exists() and not partial.exists()


@pytest.mark.parametrize("processes, more", [
    (1, ("--checkpointing_every", 2)), (1, ("--micro_batch_size", 3)),
    (1, ("--packed", "--micro_batch_size", 3)), (2, ()), (3, ("--micro_batch_size", 2)),
    (2, ("--packed", "--micro_batch_size", 3, "--no-reshard", "--checkpointing_every", 1)),
])
def test_ranks_packing_recomputation_and_micro_batches_do_not_change_the_weights(
        trained, tiny, tmp_path, processes, more):
    output = tmp_path / "critic"
    train(trained / "episodes.jsonl", tiny(), output, *more, processes=processes)
    assert not differing_weights(trained / "critic", output, 1e-5)
    losses = [[line["train/loss"] for line in metrics(path)]
              for path in (trained / "critic", output)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_two_ranks_train_tied_embeddings_as_one_does(trained, tiny, tmp_path):
    for processes in (1, 2):
        train(trained / "episodes.jsonl", tiny(tied=True), tmp_path / str(processes),
              processes=processes)
    assert not differing_weights(tmp_path / "1", tmp_path / "2", 1e-5)
    assert "lm_head.weight" not in weights(tmp_path / "1")


@pytest.mark.parametrize("change", [
    ("--privileged", "none"), ("--normalise", "trajectory"), ("--normalise", "none"),
    ("--nll", "0"), ("--beta", "1"), ("--pairs", "all"), ("--margin", "0.6"),
    ("--shuffle", "groups"), ("--dtype", "bfloat16"),
])
def test_each_ablation_flag_has_its_effect(trained, tiny, tmp_path, change):
    train(trained / "episodes.jsonl", tiny(), tmp_path / "critic", *change)
    assert differing_weights(trained / "critic", tmp_path / "critic")


@pytest.mark.parametrize("script", ["train_critic.py", "train_policy.py"])
def test_dialogues_that_lose_turns_and_those_that_are_omitted_are_counted(tiny, tmp_path, script):
    short, long = ("t", "q", "r", "I WANT TO ANSWER: x"), ("t", "q" * 200, "r", "x")
    rows = [episode("t", 1.0, 0, short), episode("t", 0.0, 1, long),
            episode("t", 0.5, 2, ("t", "y" * 600))]
    # an empty last turn has no token, but is not lost
    rows += [episode("t", 0.2, 3, ("t", "q", "r", ""))]
    rows[-1]["dialogue_history"][-1]["finished"] = False
    path = write_rows(tmp_path / "e.jsonl", rows)
    done = run_script(script, "--episodes", path, "--model", tiny(), "--output", tmp_path / "o",
                      "--max_length", 200, "--pairs", "all", "--max_steps", 1)
    assert "with --max_length 200, 1 " in done.stdout
    assert "lose their oldest turns, and 1 are omitted" in done.stdout
    assert "(the train/ numbers are from before this step)" in done.stdout
    is_cut = script == "train_critic.py"  # four epochs; the policy has one
    assert ("the state from which a larger --max_steps goes on" in done.stdout) == is_cut


def test_an_entry_of_privileged_may_show_what_logs_without_ground_truth_have(monkeypatch):
    monkeypatch.setitem(train_critic.PRIVILEGED, "hint", lambda task: f"{task['hint']}\n")
    task = {"task_id": "t", "ground_truth": "", "hint": "try tea"}
    assert critic_messages(task, dialogue("x", "y"), "hint") == dialogue("try tea\nx", "y")


def test_a_log_without_ground_truth_is_refused_by_a_critic_that_would_show_it(tiny, tmp_path):
    rows = with_rewards(1.0, 0.0)
    for row in rows:
        row["task"] |= {"domain": "logged", "ground_truth": ""}
        row["success"] = None
    given = write_rows(tmp_path / "e.jsonl", rows), tiny(), tmp_path / "o"
    assert "task t: found no ground_truth" in train(*given, run=refusal)
    train(*given, "--privileged", "none")


@pytest.mark.parametrize("script", ["train_critic.py", "variants/value_critic.py"])
def test_candidates_without_the_solution_are_refused_before_the_training(tiny, tmp_path, script):
    candidates = write_candidates(tmp_path / "c.jsonl")
    rows = read_rows(candidates)
    rows[3]["task"] |= {"task_id": "u", "domain": "logged", "ground_truth": ""}
    write_rows(candidates, rows)
    said = refusal(script, *training(write_episodes(tmp_path / "e.jsonl"), tiny(), tmp_path / "o",
                                     "--candidates", candidates))
    assert "task u: found no ground_truth" in said and not (tmp_path / "o").exists()


@pytest.mark.parametrize("script, rewards, max_length", [
    ("train_critic.py", [1.0], 600), ("train_critic.py", [0.5, 0.2], 600),
    ("train_critic.py", [0.0, 0.0], 600), ("train_critic.py", [0.0, 1.0], 8),
    ("train_policy.py", [1.0, 1.0], 600), ("train_policy.py", [0.0, 1.0], 8)])
def test_no_pair_is_a_sentence_with_what_helps(tiny, tmp_path, script, rewards, max_length):
    path = write_rows(tmp_path / "episodes.jsonl", with_rewards(*rewards))
    said = refusal(script, *training(path, tiny(), tmp_path / "o", "--max_length", max_length))
    assert f"{path}: found no pair" in said and "computing on" not in said
    for advice in ("more episodes of each task", "--pairs all", "--margin",
                   f"--max_length {max_length}"):
        assert advice in said
    assert ("demonstrations" in said) == (script == "train_critic.py")


def test_a_second_kill_between_renames_of_a_state_leaves_one_to_resume(tiny, tmp_path, monkeypatch):
    model = load_model(tiny())
    optimizer = torch.optim.AdamW(model.parameters())

    def killed(*_):
        raise KeyboardInterrupt

    save_state(tmp_path / "resume", 3, model, optimizer, ALONE)
    (tmp_path / "resume").rename(tmp_path / "resume.old")  # the first kill
    monkeypatch.setattr(type(tmp_path), "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path / "resume", 5, model, optimizer, ALONE)
    assert load_state(tmp_path / "resume", model, optimizer, ALONE) == 3


def test_a_complete_run_leaves_nothing_half_written_and_keeps_its_state(tmp_path):
    for name in ("checkpoint.partial", "resume.old", "resume.5.partial", "resume"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["resume"]


def resumes_as_it_would_have_gone_on(folder, begin, first, second):
    """Two steps, each a function of model and optimiser: without a break, and saved between."""
    straight, resumed = begin(), begin()
    first(*straight)
    save_state(folder / "resume", 1, *straight, ALONE)
    load_state(folder / "resume", *resumed, ALONE)
    for model, optimizer in (straight, resumed):
        second(model, optimizer)
    return all(torch.equal(one, other) for one, other in zip(
        straight[0].parameters(), resumed[0].parameters(), strict=True))


def test_an_optimiser_that_counts_steps_in_a_plain_number_resumes_as_it_would_have_gone_on(
        tmp_path):
    def begin():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        return model, transformers.Adafactor(model.parameters(), lr=0.1, relative_step=False)

    def step(model, optimizer):
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert resumes_as_it_would_have_gone_on(tmp_path, begin, step, step)


def test_two_groups_resume_as_they_would_have_gone_on_one_without_a_gradient_so_far(tmp_path):
    def step(model, optimizer, both=True):
        model[0](torch.ones(1, 2)).sum().backward()
        if both:
            model[1](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def begin():
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}]
        return model, torch.optim.AdamW(groups, 0.1)

    one_group = functools.partial(step, both=False)
    assert resumes_as_it_would_have_gone_on(tmp_path, begin, one_group, step)


# -----------------------------------------------------------------------------
# The critic as a ranker


def test_a_complete_critic_ranks_without_training_whatever_ranks_and_packing(trained, tmp_path):
    critic, candidates = trained / "critic", write_candidates(tmp_path / "candidates.jsonl")
    before = (critic / "model.safetensors").stat().st_mtime
    for name, processes, more in (("one", 1, ()), ("two", 2, ("--packed",))):
        done = run_script("train_critic.py", "--output", critic, "--candidates", candidates,
                          "--ranked", tmp_path / name, *more, processes=processes)
        assert "6 ranked states" in done.stdout
    assert (critic / "model.safetensors").stat().st_mtime == before
    ranked, again = read_rows(tmp_path / "one"), read_rows(tmp_path / "two")
    assert [{key: state[key] for key in state.keys() - {"advantages", "ranker"}}
            for state in ranked] == read_rows(candidates)
    opened = Critic(critic, "cpu")
    for state, other in zip(ranked, again, strict=True):
        expected = opened.advantages(state["task"], state["messages"], state["candidates"],
                                     state["finished"])
        assert state["advantages"] == pytest.approx(expected, abs=1e-5)
        assert other["advantages"] == pytest.approx(expected, abs=1e-5)
        assert state["ranker"] == str(critic)


def test_a_ranking_goes_on_with_the_same_candidates_critic_and_dtype_alone(trained, tmp_path):
    shutil.copytree(trained / "critic", tmp_path / "critic")
    two, three = (write_candidates(tmp_path / f"{states}.jsonl", states) for states in (2, 3))
    given = ["--output", tmp_path / "critic", "--ranked", tmp_path / "ranked",
             "--dtype", "bfloat16", "--candidates", two]
    run_script("train_critic.py", *given)
    said = refusal("train_critic.py", *given, "--candidates", three)
    assert "choose another --ranked" in said and f"in candidates (it was {two})" in said
    said = refusal("train_critic.py", *given, "--dtype", "float32")
    assert "differs in dtype (it was bfloat16)" in said
    run = json.loads((tmp_path / "critic/run.json").read_text())
    run["flags"]["seed"] = 1  # as if it was trained anew
    (tmp_path / "critic/run.json").write_text(json.dumps(run))
    assert "critic/run.json (its content)" in refusal("train_critic.py", *given)
    assert len(read_rows(tmp_path / "ranked")) == 2


def test_a_ranking_says_if_the_script_was_edited_since_the_training(trained, tmp_path):
    candidates = write_candidates(tmp_path / "candidates.jsonl", 1)
    shutil.copytree(trained / "critic", tmp_path / "critic")
    for code, told in (({}, False), ({"train_critic.py": "another"}, True)):
        run = json.loads((trained / "critic/run.json").read_text())
        run["code"] |= code
        (tmp_path / "critic/run.json").write_text(json.dumps(run))
        done = run_script("train_critic.py", "--output", tmp_path / "critic", "--candidates",
                          candidates, "--ranked", tmp_path / f"ranked_{told}")
        assert ("train_critic.py was edited since this critic was trained" in done.stdout) == told


def test_a_state_that_is_too_long_has_no_advantages(trained):
    critic = Critic(trained / "critic", "cpu")
    assert critic.advantages(TASK, dialogue("t" * 600), ["a"], [True]) is None
    assert critic.dialogue_row(episode("t", 1.0, texts=("t" * 600, "q", "r", "x"))) is None


@pytest.mark.parametrize("forward", [turn_logprobs, packed.turn_logprobs])
def test_candidates_without_a_token_have_no_advantage(trained, monkeypatch, forward):
    monkeypatch.setattr(train_critic, "turn_logprobs", forward)
    critic = Critic(trained / "critic", "cpu")
    assert critic.advantages(TASK, dialogue("t"), ["\n", ""], [False, False]) == [0.0, 0.0]
    assert critic.advantages(TASK, dialogue("t"), ["\n", "x"], [False, False])[0] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("script, killed", [
    ("train_critic.py", False), ("train_critic.py", True), ("variants/value_critic.py", False)])
def test_more_steps_rank_again_even_after_a_ranking_was_killed(
        trained, tiny, tmp_path, script, killed):
    candidates = write_candidates(tmp_path / "candidates.jsonl")
    for steps in (1, 2):
        run_script(script, *training(
            trained / "episodes.jsonl", tiny(), tmp_path / "critic", "--dtype", "float32",
            "--candidates", candidates, "--max_steps", steps))
        file = tmp_path / "critic/ranked.jsonl"
        ranked = read_rows(file)
        if killed:
            file.rename(f"{file}.rank0")
        opened = open_critic(tmp_path / "critic", dtype="float32")  # on the device that ranked
        assert ranked[0]["advantages"] == pytest.approx(opened.advantages(
            *(ranked[0][key] for key in ("task", "messages", "candidates", "finished"))), abs=1e-6)


def test_the_rankings_reference_sees_the_solution_unless_it_is_plain(trained):
    arguments = (TASK, dialogue("t"), ["what is it?"], [True])
    privileged, plain = (Critic(trained / "critic", "cpu", reference=name)
                         for name in ("privileged", "plain"))
    for critic in (privileged, plain):
        critic.model = critic.reference_model  # untrained: only the solution can tell the two apart
    assert privileged.advantages(*arguments) == pytest.approx([0.0], abs=1e-6)
    assert abs(plain.advantages(*arguments)[0]) > 1e-3


def test_a_dialogue_scored_at_once_has_the_advantages_of_its_turns_scored_one_by_one(trained):
    critic = Critic(trained / "critic", "cpu")
    texts = ("t", "what is it?", "two", "and then?", "no", "I WANT TO ANSWER: x")
    whole = episode("t", 1.0, texts=texts)
    single = []
    for state in states_of([whole]):
        text = whole["dialogue_history"][2 * state["turn"] + 1]["content"]
        single += critic.advantages(whole["task"], state["messages"], [text], [True])
    together = critic.turn_advantages([critic.dialogue_row(whole)])[0].tolist()
    assert together == pytest.approx(single, abs=1e-5) and len(single) == 3


def test_the_report_reads_dialogues_in_batches_with_the_advantages_of_each_alone(
        trained, monkeypatch):
    critic = Critic(trained / "critic", "cpu")
    replies = ("what is it?", "two", "and then?", "no", "I WANT TO ANSWER: x")
    episodes = [episode(f"t{number}", 1.0, texts=("t" * (1 + 3 * number), *replies[:number % 3 * 2],
                                                  replies[-1])) for number in range(7)]
    found, sizes = {}, []
    score = critic.turn_advantages

    def scored(rows):
        sizes.append((len(rows), len(rows) * max(len(row.ids) for row in rows)))
        return score(rows)

    monkeypatch.setattr(critic, "turn_advantages", scored)
    for limit in (1, 400):
        monkeypatch.setattr(page, "BATCH_TOKENS", limit)
        page.add_advantages(critic, episodes)
        found[limit] = [entry["advantages"] for entry in episodes]
    alone, batches = sizes[:7], sizes[7:]
    assert [rows for rows, _ in alone] == [1] * 7 and 1 < len(batches) < 7
    assert all(rows == 1 or tokens <= 400 for rows, tokens in batches)
    for each, together in zip(found[1], found[400], strict=True):
        assert together == pytest.approx(each, abs=1e-5)
    assert [len(values) for values in found[1]] == [entry["turns"] for entry in episodes]
    assert any(abs(value) > 1e-3 for values in found[1] for value in values)


def test_an_advantage_that_is_no_finite_number_ends_the_run_with_a_sentence(trained, monkeypatch):
    critic = Critic(trained / "critic", "cpu")
    monkeypatch.setattr(train_critic, "advantage", lambda *_: torch.tensor([[0.5], [math.nan]]))
    with pytest.raises(SystemExit, match="not finite .*--dtype float32"):
        critic.advantages(TASK, dialogue("t"), ["a", "b"], [True, True])


def test_a_policy_or_a_stranger_is_refused_as_critic(trained, tiny, tmp_path):
    candidates = write_candidates(tmp_path / "candidates.jsonl")
    shutil.copytree(tiny(), tmp_path / "stranger")
    shutil.copytree(trained / "critic", tmp_path / "policy")
    run = json.loads((tmp_path / "policy/run.json").read_text())
    del run["flags"]["privileged"]
    (tmp_path / "policy/run.json").write_text(json.dumps(run | {"script": "train_policy.py"}))
    run = json.loads((trained / "critic/run.json").read_text())
    run["flags"]["normalise"] = "sqrt"
    shutil.copytree(trained / "critic", tmp_path / "fork")
    (tmp_path / "fork/run.json").write_text(json.dumps(run))
    for name, found in (("stranger", "no run.json"), ("policy", "what train_policy.py has trained"),
                        ("nowhere", "no such directory"), ("fork", "--normalise sqrt, expected")):
        assert found in refusal("train_critic.py", "--output", tmp_path / name,
                                "--candidates", candidates)


def test_a_critic_whose_reference_is_gone_says_that_it_needs_that_model(trained, tmp_path):
    shutil.copytree(trained / "critic", tmp_path / "critic")
    record = tmp_path / "critic/run.json"
    run = json.loads(record.read_text())
    run["flags"]["model"] = "./elsewhere/base"
    record.write_text(json.dumps(run))
    said = refusal("train_critic.py", "--output", tmp_path / "critic", "--candidates",
                   write_candidates(tmp_path / "candidates.jsonl"))
    assert (f"{tmp_path / 'critic'}: found no model that it was trained from, expected that of its"
            " run.json (./elsewhere/base: no such directory") in said


def test_a_plain_reference_of_a_critic_that_sees_no_solution_is_refused(trained, tiny, tmp_path):
    candidates = write_candidates(tmp_path / "candidates.jsonl", 1)
    train(trained / "episodes.jsonl", tiny(), tmp_path / "critic", "--privileged", "none",
          "--max_steps", 1)
    said = refusal("train_critic.py", "--output", tmp_path / "critic", "--candidates", candidates,
                   "--reference", "plain")
    assert "found --reference plain with a critic that does not see the solution" in said
    assert not list((tmp_path / "critic").glob("ranked*"))
