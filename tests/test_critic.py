"""The critic: equations, rows, packs, pairs, reports. Run: pytest tests/test_critic.py"""

import copy
import dataclasses
import json
import math
import types

import pytest
import torch
from conftest import (
    byte_tokenizer, dialogue, episode, metrics, run_script, tiny_model, weights, write_episodes)
from transformers import AutoModelForTokenClassification

import train_critic
import train_policy
from colbench import critic_messages, encode_dialogue, states_of
from speakers.local import load_model
from stages.processes import Process, join_processes
from train_critic import (
    Critic, CriticSettings, Item, Reader, Row, TrainingLoop, accuracy, advantage,
    candidate_rows, critic_loss, critic_objective, dialogue_row, encode_row,
    holdout_metrics, learning_rate, loop_settings, open_reader, pair_episodes, pair_items,
    precompute_reference, split_tasks, turn_logprobs, turn_sums, turn_values, value_loss,
    value_objective)
from training.packing import Pack, can_pack, collate, pack_rows, packed_mask
from train_policy import DpoSettings, dpo_objective
from training import checkpoints

DIALOGUES = [
    dialogue("a task", "y", "no", "a much longer turn of the agent", "so", "z"),
    dialogue("b", "one"),
]
CANDIDATES = [("what is it?", True), ("x", False), ("tell me more about that", True),
              ("I WANT TO ANSWER: def f(): pass", True)]
SUMS = CriticSettings(head="logratio", normalise="none", beta=1.0, nll=0.0)


@pytest.fixture
def process():
    """This process as a group of one, which is what the trainers start from."""
    join_processes(training=True)
    yield Process(0, 1, "cpu")
    torch.distributed.destroy_process_group()


def reader_of(tokenizer, max_length=8192):
    return Reader(tokenizer, "none", max_length)


def rows_of(tokenizer, *dialogues):
    encoded = [encode_dialogue(tokenizer, messages) for messages in dialogues]
    return [Row(ids, turn_index, max(turn_index) + 1) for ids, turn_index in encoded]


def value_model(tokenizer):
    """A tiny random model with a value head."""
    config = tiny_model(tokenizer).config
    config.num_labels = 1
    torch.manual_seed(0)
    return AutoModelForTokenClassification.from_config(config)


def parsed(*more):
    """The flags of a run without files, for what is tested inside this process."""
    return train_critic.parse_args(["--episodes", "x", "--model", "x", "--output", "x", *more])


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


def test_turn_logprobs_sums_and_counts_each_turn():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0, -8.0], [-1.0, -1.0, -3.0, -5.0]])
    turn_index = torch.tensor([[-1, 0, 0, 1], [2, -1, -1, 0]])
    sums, counts = turn_logprobs(logprobs, turn_index, 3)
    assert sums.tolist() == [[-6, -8, 0], [-5, 0, -1]]
    assert counts.tolist() == [[2, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("family, tied", [
    ("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)])
def test_equations_2_and_3_equal_a_slow_float64_loop_over_ragged_and_one_token_turns(
        family, tied):
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, *DIALOGUES)
    critic, reference = (tiny_model(tokenizer, family, tied, seed).double() for seed in (1, 2))
    sums, counts = turn_sums(critic, rows)
    reference_sums, _ = turn_sums(reference, rows)
    advantages = advantage(sums, reference_sums, counts)
    totals = []
    for index, row in enumerate(rows):
        slow = []
        turns = zip(slow_turn_logprobs(critic, row), slow_turn_logprobs(reference, row),
                    strict=True)
        for new, old in turns:
            slow.append(sum(a - b for a, b in zip(new, old, strict=True)) / len(new))
        assert advantages[index, :row.turns].tolist() == pytest.approx(slow, abs=1e-9)
        assert not advantages[index, row.turns:].any()
        totals.append(sum(slow))
    loss = critic_loss(advantages[:1], advantages[1:], 0.3).item()
    expected = -math.log(1 / (1 + math.exp(-0.3 * totals[0] + 0.3 * totals[1])))
    assert loss == pytest.approx(expected, abs=1e-9)


def test_normalisation_is_per_turn_per_trajectory_or_none():
    sums, reference = torch.tensor([[2.0, 12.0]]), torch.tensor([[0.0, 0.0]])
    counts = torch.tensor([[1.0, 3.0]])
    assert advantage(sums, reference, counts, "turn").tolist() == [[2, 4]]
    assert advantage(sums, reference, counts, "trajectory").tolist() == [[0.5, 3]]
    assert advantage(sums, reference, counts, "none").tolist() == [[2, 12]]


def test_the_loss_falls_when_the_chosen_side_gains():
    chosen = torch.tensor([[0.2, 0.1]], requires_grad=True)
    rejected = torch.tensor([[0.3, 0.3]], requires_grad=True)
    critic_loss(chosen, rejected, 1.0).sum().backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()


@pytest.mark.parametrize("pair, margin", [((0, 1), 4.0), ((1, 0), -4.0)])
def test_the_first_index_of_a_pair_is_the_chosen_row(pair, margin):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).double()
    rows = [encode_row(reader_of(tokenizer), dialogue("t", text, "r", text), [True, True])
            for text in ("ab", "cd")]
    sums, _ = turn_sums(model, rows)
    rows[0].reference, rows[1].reference = (sums[0] - 1).tolist(), (sums[1] + 1).tolist()
    found = critic_objective(model, [Item(rows, [pair])], SUMS)
    assert found["train/margin"].item() == pytest.approx(margin)
    assert found["train/accuracy"].item() == (margin > 0)
    assert found["train/loss"].item() == pytest.approx(math.log1p(math.exp(-margin)))


def test_the_value_head_learns_the_outcome_at_every_existing_turn():
    logits = torch.tensor([[2.0, -1.0], [0.5, 9.0]])
    loss = value_loss(logits, torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    first = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert loss.tolist() == pytest.approx([first, math.log(1 + math.exp(0.5))])


def test_a_value_is_the_head_at_the_mean_state_of_all_tokens_up_to_the_end_of_the_turn():
    tokenizer = byte_tokenizer()
    model = value_model(tokenizer).eval()
    row = rows_of(tokenizer, DIALOGUES[0])[0]
    values, exists = turn_values(model, [row])
    assert exists.tolist() == [[1.0] * row.turns] and row.turns > 1
    states = model.model(torch.tensor([row.ids])).last_hidden_state[0]  # (T, hidden)
    for turn in range(row.turns):
        end = max(column for column, index in enumerate(row.turn_index) if index == turn)
        expected = model.score(states[:end + 1].mean(0))
        torch.testing.assert_close(values[0, turn], expected[0], atol=1e-5, rtol=0)


def test_the_value_head_learns_0_or_1_and_of_a_page_its_reward():
    reader = reader_of(byte_tokenizer())
    for changes, outcome in (({"reward": 0.7, "success": False}, 0.0),
                             ({"reward": 1.0, "success": True}, 1.0),
                             ({"reward": 0.7, "success": None}, 0.7)):
        row = dialogue_row(reader, episode("t", 1.0) | changes)
        assert row.outcome == outcome


def test_a_margin_that_only_rounding_misses_is_kept():
    group = [episode("t", reward, sample) for sample, reward in enumerate((0.3, 0.2))]
    assert 0.3 - 0.2 < 0.1
    assert len(pair_episodes(group, "all", margin=0.1)) == 1
    assert not pair_episodes(group, "all", margin=0.11)


def test_pairs_that_only_rounding_tells_apart_are_ties_in_the_accuracy():
    assert accuracy(torch.tensor([2e-8, -2e-8, 1e-3, -1e-3])).tolist() == [0.5, 0.5, 1.0, 0.0]


# -----------------------------------------------------------------------------
# Modes that do not exist, and flags that would do nothing


def test_an_unknown_mode_is_an_error_and_never_silently_another_mode():
    reader = reader_of(byte_tokenizer())
    table, group = torch.ones(1, 1), [episode("t", 1.0), episode("t", 0.0, 1)]
    task, messages = group[0]["task"], dialogue("t")
    pairs = pair_episodes(group)
    with pytest.raises(KeyError, match="turns"):
        advantage(table, table, table, "turns")
    unknown = {
        "rule": lambda: pair_episodes(group, "best"),
        "share": lambda: pair_items(reader, [pairs], "none"),
        "privileged": lambda: critic_messages(task, messages, "solution"),
    }
    found = {"rule": "best", "share": "none", "privileged": "solution"}
    for name, call in unknown.items():
        with pytest.raises(ValueError, match=f"{name}.*'{found[name]}'.*expected"):
            call()


@pytest.mark.parametrize("flag, value, more", [
    ("normalise", "none", ("--head", "value")),
    ("beta", "0.5", ("--head", "value")),
    ("nll", "0.5", ("--head", "value")),
    ("success_reward", "0.5", ()),
    ("success_reward", "0.5", ("--pairs", "all")),
])
def test_a_flag_that_would_do_nothing_is_refused_by_name(flag, value, more):
    parsed(*more)
    with pytest.raises(SystemExit, match=f"--{flag} {value}.*ignored"):
        parsed(*more, f"--{flag}", value)


def test_flags_that_do_something_are_not_refused():
    assert parsed("--normalise", "none", "--beta", "0.5", "--nll", "0.5").beta == 0.5
    args = parsed("--pairs", "success_vs_failure", "--success_reward", "0.5", "--head", "value")
    assert args.success_reward == 0.5


def test_a_critic_that_sees_computes_its_rows_one_by_one_and_refuses_to_share_them(monkeypatch):
    monkeypatch.setattr(train_critic, "sees_pictures", lambda path: True)
    with pytest.raises(SystemExit, match="--share state.*vision-language.*--share pair"):
        open_reader(parsed("--head", "value", "--share", "state"))


# -----------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_padded_rows_score_as_rows_alone(family):
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, *DIALOGUES, dialogue("c", "two words", "more", "three"))
    model = tiny_model(tokenizer, family).double()
    together, counts = turn_sums(model, rows)
    for index, row in enumerate(rows):
        alone, count = turn_sums(model, [row])
        assert torch.allclose(together[index, :row.turns], alone[0], atol=1e-10)
        assert counts[index, :row.turns].tolist() == count[0].tolist()


def test_truncation_drops_whole_oldest_turns_and_never_part_of_a_scored_one():
    tokenizer = byte_tokenizer()
    messages = dialogue("task", "first", "reply", "second", "reply", "third")

    def encode(finished, max_length):
        return encode_row(reader_of(tokenizer, max_length), messages, finished)

    full = encode([True] * 3, 10_000)
    assert full.dropped == 0 and full.turns == 3
    shorter = encode([True] * 3, len(full.ids) - 1)
    assert shorter.dropped == 1 and shorter.turns == 2
    text = tokenizer.decode(shorter.ids)
    assert "task" in text and "first" not in text and "second" in text and "third" in text
    cut = encode([True, True, False], len(full.ids) - 2)
    # `finished` belongs to the turns that are left: the last of them was cut at the token limit
    assert cut.ids == shorter.ids[:-1]
    assert encode([True] * 3, 10) is None


@pytest.mark.parametrize("texts", [("t", ""), ("t", "a question", "r", "")])
def test_a_turn_that_is_empty_because_it_was_cut_counts_as_a_turn_with_no_effect(texts):
    tokenizer, played = byte_tokenizer(), episode("a", 0.0, texts=texts)
    played["dialogue_history"][-1] |= {"output": "\n\n", "finished": False}
    row = dialogue_row(reader_of(tokenizer), played)
    assert row.turns == played["turns"]
    sums, counts = turn_sums(tiny_model(tokenizer), [row])
    assert sums.shape == counts.shape == (1, row.turns)
    assert sums[0, -1] == counts[0, -1] == 0
    values, exists = turn_values(value_model(tokenizer), [row])
    assert values[0, -1] == exists[0, -1] == 0


def test_a_chosen_dialogue_without_a_token_to_learn_leaves_losses_finite():
    # of a page whose turns did not fit but for an empty last one, an earlier page was graded
    empty = Row([1, 2, 3], [-1, -1, -1], 1, reference=[0.0])
    items = [Item([empty, Row([1, 2, 3], [-1, 0, 0], 1, reference=[-3.0])], [(0, 1)])]
    model = tiny_model(byte_tokenizer())
    for found in (dpo_objective(model, items, DpoSettings(beta=0.1, nll=0.01)),
                  critic_objective(model, items, SUMS._replace(nll=0.01))):
        assert found["train/loss"].isfinite() and found["train/nll"] == 0


def test_each_candidate_is_a_plain_row_after_the_same_prompt():
    tokenizer = byte_tokenizer()
    messages = dialogue("the task", "a question", "its reply")
    rows = candidate_rows(reader_of(tokenizer), messages, CANDIDATES)
    assert len(rows) == len(CANDIDATES)
    prompt = rows[0].ids[:rows[0].prompt_length]
    shown = tokenizer.decode(prompt)
    assert "the task" in shown and "a question" in shown and "its reply" in shown
    for row, (text, finished) in zip(rows, CANDIDATES, strict=True):
        turn = row.ids[row.prompt_length:]
        assert type(row) is Row and row.turns == 1
        assert row.ids[:row.prompt_length] == prompt
        assert row.turn_index == [-1] * len(prompt) + [0] * len(turn)
        assert tokenizer.decode(turn) == text + ("<end>" if finished else "")
    # the row is what the critic would read of a dialogue that ends with this turn
    whole = rows_of(tokenizer, [*messages, {"role": "assistant", "content": "what is it?"}])[0]
    assert rows[0].ids == whole.ids


def test_a_cut_candidate_keeps_no_end_of_turn_token():
    tokenizer = byte_tokenizer()
    finished, cut = (candidate_rows(reader_of(tokenizer), dialogue("t"), [("ab", done)])[0]
                     for done in (True, False))
    assert finished.ids == cut.ids + [tokenizer.eos_token_id]


def test_candidates_that_do_not_fit_after_their_prompt_are_no_rows():
    reader = reader_of(byte_tokenizer(), 80)
    assert candidate_rows(reader, dialogue("t"), CANDIDATES)
    assert candidate_rows(reader, dialogue("t" * 100), CANDIDATES) is None


# -----------------------------------------------------------------------------
# Packs: candidates that share a prompt are computed as one sequence


def scores_and_gradients(model, batches):
    """(turn sums of all rows, gradients), where each batch of rows is scored by itself."""
    model.zero_grad()
    sums = []
    for rows in batches:
        table, _ = turn_sums(model, rows)
        sums += [line[:row.turns] for line, row in zip(table, rows, strict=True)]
    sums = torch.cat(sums)
    (sums * torch.arange(1.0, len(sums) + 1)).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    return sums.detach(), torch.cat(gradients)


@pytest.mark.parametrize("family, tied", [
    ("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False), ("mistral", False),
    ("gemma3_text", False)])
def test_packed_candidates_have_the_logprobs_and_gradients_of_rows_alone(family, tied):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, family, tied).double()
    messages = dialogue("the task", "a question", "its reply")
    rows = candidate_rows(reader_of(tokenizer), messages, CANDIDATES)
    assert len(pack_rows(rows)) == 1
    assert can_pack(model) == (family not in ("mistral", "gemma3_text"))
    alone, alone_gradient = scores_and_gradients(model, [[row] for row in rows])
    together, together_gradient = scores_and_gradients(model, [rows])
    assert (together - alone).abs().max() < 1e-10
    assert (together_gradient - alone_gradient).norm() < 1e-6 * alone_gradient.norm()


def test_states_and_dialogues_in_one_batch_score_as_rows_alone():
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).double()
    reader = reader_of(tokenizer)
    rows = [*candidate_rows(reader, dialogue("one"), CANDIDATES[:2]),
            *rows_of(tokenizer, DIALOGUES[0]),
            *candidate_rows(reader, dialogue("another task"), CANDIDATES)]
    assert [len(pack.rows) for pack in pack_rows(rows)] == [2, 1, 4]
    alone, alone_gradient = scores_and_gradients(model, [[row] for row in rows])
    together, together_gradient = scores_and_gradients(model, [rows])
    assert (together - alone).abs().max() < 1e-10
    assert (together_gradient - alone_gradient).norm() < 1e-6 * alone_gradient.norm()


def forward_shapes(model, rows, **options):
    """The shape of the token ids of each forward in which turn_sums computes these rows."""
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda module, arguments, inputs: shapes.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True)
    turn_sums(model, rows, **options)
    hook.remove()
    return shapes


def test_a_shared_prompt_is_computed_once_where_the_model_allows_it():
    tokenizer = byte_tokenizer()
    rows = candidate_rows(reader_of(tokenizer), dialogue("t"), CANDIDATES)
    packed = rows[0].prompt_length + sum(len(row.ids) - row.prompt_length for row in rows)
    longest = max(len(row.ids) for row in rows)
    assert forward_shapes(tiny_model(tokenizer), rows) == [(1, packed)]
    assert forward_shapes(tiny_model(tokenizer, "mistral"), rows) == [(4, longest)]
    apart = [(1, len(row.ids)) for row in rows]
    assert forward_shapes(tiny_model(tokenizer, "mistral"), rows, packs_at_once=1) == apart


def test_candidates_that_are_too_long_for_one_pack_fill_several_with_the_same_scores(monkeypatch):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).double()
    rows = candidate_rows(reader_of(tokenizer), dialogue("t"), CANDIDATES)
    parts = pack_rows(rows, 80)
    assert 1 < len(parts) < len(rows) and all(len(pack.ids) <= 80 for pack in parts)
    assert [row for pack in parts for row in pack.rows] == rows
    whole, _ = turn_sums(model, rows)
    monkeypatch.setattr("training.packing.PACK_LIMIT", 80)
    assert forward_shapes(model, rows) == [(len(parts), max(len(pack.ids) for pack in parts))]
    in_parts, _ = turn_sums(model, rows)
    assert torch.allclose(whole, in_parts, atol=1e-10)


def test_long_candidates_fill_packs_of_few_scored_tokens_with_the_same_scores(monkeypatch):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).double()
    rows = candidate_rows(reader_of(tokenizer), dialogue("t"), CANDIDATES)
    whole, _ = turn_sums(model, rows)
    longest = max(len(row.ids) - row.prompt_length for row in rows)
    monkeypatch.setattr("training.packing.SCORED_LIMIT", longest + 1)
    parts = pack_rows(rows)
    scored = [sum(turn >= 0 for turn in pack.turn_index) for pack in parts]
    assert 1 < len(parts) and max(scored) <= longest + 1
    assert [row for pack in parts for row in pack.rows] == rows
    assert torch.allclose(whole, turn_sums(model, rows)[0], atol=1e-10)


def test_only_the_tokens_of_turns_have_logits_whatever_their_columns_in_other_rows():
    tokenizer = byte_tokenizer()
    model, shapes = tiny_model(tokenizer), []
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(output.shape)))
    rows = [row for messages in DIALOGUES for row in rows_of(tokenizer, messages)]
    scored = sum(turn >= 0 for row in rows for turn in row.turn_index)
    turn_sums(model, rows)
    assert shapes == [(1, scored, len(tokenizer))]
    assert model(torch.arange(9)[None]).logits.shape[1] == 9  # afterwards it computes all again


def test_no_candidate_sees_another():
    rows = [Row([0] * 4, [-1, -1, 0, 0], 1, prompt_length=2),
            Row([0] * 5, [-1, -1, 0, 0, 0], 1, prompt_length=2)]
    pack, = pack_rows(rows)
    assert len(pack.ids) == 7 and pack.turn_index == [-1, -1, 0, 0, 1, 1, 1]
    mask = packed_mask([pack], torch.tensor([pack.turn_index]))[0, 0]
    assert mask.int().tolist() == [  # the two tokens of the prompt need no mask
        [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]]
    assert pack.positions(9) == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert pack.sources()[2:] == [1, 2, 1, 4, 5]


def test_only_rows_side_by_side_with_the_same_prompt_and_no_pictures_are_packed():
    tokenizer = byte_tokenizer()
    reader = reader_of(tokenizer)
    one = candidate_rows(reader, dialogue("one state"), CANDIDATES[:2])
    other = candidate_rows(reader, dialogue("two state"), CANDIDATES[:2])
    again = candidate_rows(reader, dialogue("one state"), CANDIDATES[2:])
    assert one[0].prompt_length == other[0].prompt_length  # of the same length, but another text

    def packed(rows):
        return [pack.rows for pack in pack_rows(rows)]

    assert packed([*one, *other]) == [one, other]
    assert packed([*one, *again]) == [[*one, *again]]
    assert packed([*one, *other, *again]) == [one, other, again]
    same_dialogue = rows_of(tokenizer, DIALOGUES[0], DIALOGUES[0])
    assert packed(same_dialogue) == [[row] for row in same_dialogue]
    seeing = [dataclasses.replace(row, opening=dict) for row in one]
    assert packed(seeing) == [[row] for row in seeing]
    assert packed([one[0], seeing[1]]) == [[one[0]], [seeing[1]]]


def test_padding_goes_on_counting_so_that_transformers_sees_one_sequence_and_makes_no_mask():
    rows = [Row(list(range(5)), [-1, 0, 0, 0, 0], 1), Row(list(range(9)), [-1] + [0] * 8, 1)]
    batch = collate([Pack(row) for row in rows], "cpu")
    assert batch["positions"].tolist() == [list(range(9))] * 2 and batch["mask"] is None


def test_a_step_reports_the_tokens_of_the_packs_it_computed(tmp_path, process):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    rows = candidate_rows(reader_of(tokenizer), dialogue("t"), CANDIDATES)
    plain = rows_of(tokenizer, *DIALOGUES)
    items = [Item(rows, [(0, 1), (2, 3)]), Item(plain, [(0, 1)])]
    precompute_reference(model, items, process)
    loop = TrainingLoop(model, items, loop_settings(parsed("--output", str(tmp_path))), process)
    found = loop.optimise(items, lambda batch: critic_objective(model, batch, SUMS))
    tokens = rows[0].prompt_length + sum(len(row.ids) - row.prompt_length for row in rows)
    assert found["data/tokens"] == tokens + sum(len(row.ids) for row in plain)


@pytest.mark.parametrize("micro_batch_size", ["1", "2"])
def test_every_pair_of_a_batch_counts_the_same_however_many_share_its_item(
        tmp_path, process, micro_batch_size):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    rows = candidate_rows(reader_of(tokenizer), dialogue("t"), CANDIDATES)
    items = [Item(rows, [(0, 1), (2, 3), (1, 3)]), Item(rows_of(tokenizer, *DIALOGUES), [(0, 1)])]
    for row in rows + items[1].rows:
        row.reference = [-1.0] * row.turns
    alone = [critic_objective(model, [Item(item.rows, [pair])], SUMS)["train/loss"].item()
             for item in items for pair in item.pairs]
    args = parsed("--output", str(tmp_path), "--micro_batch_size", micro_batch_size)
    loop = TrainingLoop(model, items, loop_settings(args), process)
    found = loop.optimise(items, lambda batch: critic_objective(model, batch, SUMS))
    assert found["train/loss"] == pytest.approx(sum(alone) / 4, rel=1e-5)
    assert max(alone) - min(alone) > 1  # so that other weights would give another mean


# -----------------------------------------------------------------------------
# Pairs


def test_best_vs_rest_needs_a_full_pass_and_pairs_it_with_all_worse_ones():
    group = [episode("t", reward) for reward in (0.5, 1.0, 1.0, 0.0)]
    assert pair_episodes(group) == [(group[1], group[0]), (group[1], group[3])]
    assert pair_episodes([episode("t", 0.9), episode("t", 0.1)]) == []
    assert len(pair_episodes(group, "all")) == 5
    assert len(pair_episodes(group, "all", margin=0.6)) == 2
    assert pair_episodes(group, margin=0.6) == [(group[1], group[3])]


@pytest.mark.parametrize("domain, rewards", [
    ("backend", (0.9, 1.0, 1.0, 0.0)), ("frontend", (0.7, 0.9, 0.95, 0.0))])
def test_success_vs_failure_pairs_every_success_with_every_failure(domain, rewards):
    group = [episode("t", reward) for reward in rewards]
    for one in group:
        one["task"]["domain"] = domain
        if domain == "frontend":
            one["success"] = None
    expected = [(group[1], group[0]), (group[1], group[3]),
                (group[2], group[0]), (group[2], group[3])]
    assert pair_episodes(group, "success_vs_failure") == expected
    assert pair_episodes(group[1:3], "success_vs_failure") == []


def items_of_stage(stage, share, tokenizer, group):
    """(items, report, objective) of one task's pairs, as the trainer of this stage makes them."""
    pairs = pair_episodes(group, "success_vs_failure")
    if stage == "mtdpo":
        args = train_policy.parse_args([
            "--method", "mtdpo", "--episodes", "x", "--model", "x", "--output", "x",
            "--pairs", "success_vs_failure", "--share", share])
        items, report = train_policy.method_items(args, reader_of(tokenizer), group, None)
        settings = DpoSettings(args.beta, args.nll)
        return items, report, lambda model: dpo_objective(model, items, settings)
    items, report = pair_items(reader_of(tokenizer), [pairs], share)
    if stage == "value":
        return items, report, lambda model: value_objective(model, items)
    args = parsed()
    settings = CriticSettings(args.head, args.normalise, args.beta, args.nll)
    return items, report, lambda model: critic_objective(model, items, settings)


@pytest.mark.parametrize("stage", ["logratio", "value", "mtdpo"])
def test_pairs_of_a_task_together_have_the_metrics_and_gradients_of_pairs_apart(stage):
    tokenizer = byte_tokenizer()
    group = []
    for sample, reward in enumerate((1.0, 0.0, 1.0, 0.0)):
        texts = ("t", f"question {sample}" * sample, "r", f"I WANT TO ANSWER: {sample}")
        group.append(episode("t", reward, sample, texts))
    results, rows_per_item = [], {"state": [4], "pair": [2] * 4}
    for share in ("state", "pair"):
        model = value_model(tokenizer) if stage == "value" else tiny_model(tokenizer)
        model = model.double().eval()
        items, report, objective = items_of_stage(stage, share, tokenizer, group)
        assert [len(item.rows) for item in items] == rows_per_item[share]
        assert report["pairs"] == 4
        for row in [row for item in items for row in item.rows]:
            row.reference = [0.5 * len(row.ids) - turn for turn in range(row.turns)]
        found = objective(model)
        found["train/loss"].mean().backward()
        means = {name: values.mean().item() for name, values in found.items()}
        results.append((means, [parameter.grad for parameter in model.parameters()]))
    (together, gradients), (apart, other_gradients) = results
    assert together == pytest.approx(apart)
    assert all(torch.allclose(one, two, atol=1e-6)
               for one, two in zip(gradients, other_gradients, strict=True))


def test_held_out_tasks_are_whole_and_seeded():
    groups = {f"t{index}": [] for index in range(40)}
    training, held_out = split_tasks(groups, 0.05, 0)
    assert len(held_out) == 2 and not set(training) & set(held_out) and len(training) == 38
    assert split_tasks(groups, 0.05, 0) == (training, held_out)
    assert split_tasks(groups, 0.05, 1) != (training, held_out)


# -----------------------------------------------------------------------------
# The reference, and held-out pairs


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_every_row_gets_its_reference_sums_and_the_margin_is_0_before_the_first_step(
        process, micro_batch_size):
    tokenizer = byte_tokenizer()
    reader = reader_of(tokenizer)
    model = tiny_model(tokenizer)
    group = [episode("t", reward, sample, ("t", "what " * (sample + 1), "r", "I WANT TO ANSWER: x"))
             for sample, reward in enumerate((1.0, 0.0, 0.0))]
    items, _ = pair_items(reader, [pair_episodes(group)], "pair")
    items.append(Item(candidate_rows(reader, dialogue("one"), CANDIDATES), [(0, 1), (2, 3)]))
    items.append(Item(candidate_rows(reader, dialogue("one"), CANDIDATES[:2]), [(1, 0)]))
    items.append(Item(candidate_rows(reader, dialogue("other"), CANDIDATES[:2]), [(1, 0)]))
    precompute_reference(model, items, process, micro_batch_size)
    for item in items:
        for row in item.rows:
            sums, _ = turn_sums(model, [row])
            assert row.reference == pytest.approx(sums[0].tolist(), abs=1e-4)
    both = (critic_objective(model, items, SUMS),
            dpo_objective(model, items, DpoSettings(1.0, 0.0)))
    for found in both:
        assert found["train/margin"].tolist() == pytest.approx([0.0] * len(items), abs=1e-4)
        assert found["train/loss"].tolist() == pytest.approx([math.log(2)] * len(items), abs=1e-4)


@pytest.mark.parametrize("head, right", [("logratio", 0.0), ("value", 1.0)])
def test_held_out_pairs_are_ranked_as_the_loss_ranks_them_by_sum_or_by_mean_value(
        process, monkeypatch, head, right):
    # the chosen dialogue has eight turns, each a little better than the three of the rejected one,
    # but all advantages are negative: by the sum the rejected one is ahead, by the mean the other
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, dialogue(*(f"text {index}" for index in range(16))),
                   dialogue(*(f"words {index}" for index in range(6))))
    if head == "logratio":
        model = tiny_model(tokenizer)
        sums, _ = turn_sums(model, rows)
        rows[0].reference = (sums[0] + 1.0).tolist()
        rows[1].reference = (sums[1, :3] + 1.2).tolist()
    else:
        model = value_model(tokenizer).eval()
        with torch.no_grad():
            values, exists = turn_values(model, rows)
            means = values.sum(1) / exists.sum(1)
            sign = torch.sign(means[0] - means[1])
            model.score.weight *= 0.01 * sign  # so the mean of the first is greater
            model.score.bias.fill_(-1.0)
    settings = CriticSettings(head, "none", 1.0, 0.0)
    found = holdout_metrics(model, [Item(rows, [(0, 1)])], settings, process, 1)
    assert found["holdout/accuracy"] == right and found["holdout/pairs"] == 1
    tie = holdout_metrics(model, [Item(rows, [(0, 0)])], settings, process, 1)
    assert tie["holdout/accuracy"] == 0.5
    assert found["holdout/other_chosen"] == pytest.approx(-1.0, abs=0.1)
    assert found["holdout/other_rejected"] < found["holdout/other_chosen"]
    if head == "logratio":
        loss = math.log1p(math.exp(8 * 1.0 - 3 * 1.2))
        assert found["holdout/loss"] == pytest.approx(loss, rel=1e-3)
        monkeypatch.setattr(train_critic, "critic_loss", lambda chosen, *_: chosen.sum(1) - 8)
        found = holdout_metrics(model, [Item(rows, [(0, 1)])], settings, process, 1)
        assert found["holdout/loss"] == pytest.approx(-16.0, rel=1e-3)  # one loss, also here
    else:
        assert "holdout/loss" not in found


# -----------------------------------------------------------------------------
# The script


def flags(path, model, output, *more):
    return ["--episodes", path, "--model", model, "--output", output, "--epochs", 2,
            "--batch_size", 4, "--lr", 1e-3, "--holdout", 0.2, "--max_length", 600,
            "--dtype", "float32", *more]  # on a GPU, too


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    episodes = write_episodes(folder / "episodes.jsonl")
    done = run_script("train_critic.py", *flags(episodes, tiny(), folder / "critic"))
    return folder, done.stdout


def assert_same_weights(a, b, tolerance=1e-5):
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=tolerance), name


def test_training_reports_pairs_and_the_level_of_answers_on_held_out_tasks(trained):
    folder, printed = trained
    assert "8 pairs from 4 tasks" in printed and "2 tasks held out" in printed
    last = metrics(folder / "critic")[-1]
    for name in ("accuracy", "loss", "length_correlation", "answer_chosen", "answer_rejected",
                 "other_chosen"):
        assert math.isfinite(last[f"holdout/{name}"]) and f"holdout/{name}" in printed


def test_the_first_step_starts_from_the_reference(trained):
    folder, _ = trained
    first = metrics(folder / "critic")[0]
    assert first["train/margin"] == pytest.approx(0, abs=1e-5)
    assert first["train/loss"] == pytest.approx(math.log(2) + 0.01 * first["train/nll"], abs=1e-5)


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_a_tenth():
    settings = types.SimpleNamespace(lr=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, settings) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == max(rates) == 1.0
    assert rates[11:] == sorted(rates[11:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_the_saved_directory_reproduces_the_trained_logits(tiny, tmp_path):
    model = load_model(tiny())
    with torch.no_grad():
        model.lm_head.weight += 0.01
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    checkpoints.save_checkpoint(
        tmp_path, model, byte_tokenizer(), "prompt", Process(0, 1, "cpu"))
    assert torch.equal(load_model(str(tmp_path)).eval()(ids).logits, expected)
    assert (tmp_path / "agent_prompt.txt").read_text() == "prompt\n"


@pytest.mark.parametrize("processes, more", [
    (1, ("--checkpointing_every", 2)), (1, ("--micro_batch_size", 3)), (2, ()),
    (2, ("--checkpointing_every", 1)), (2, ("--micro_batch_size", 3)), (3, ()),
    (2, ("--micro_batch_size", 3, "--no-reshard")),
])
def test_ranks_checkpointing_and_micro_batches_do_not_change_the_weights(
        trained, tiny, tmp_path, processes, more):
    folder, _ = trained
    output = tmp_path / "critic"
    run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(), output, *more),
               processes=processes)
    assert_same_weights(folder / "critic", output)
    losses = [[line["train/loss"] for line in metrics(path)]
              for path in (folder / "critic", output)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_two_ranks_train_tied_embeddings_as_one_does(trained, tiny, tmp_path):
    folder, _ = trained
    for processes in (1, 2):
        output = tmp_path / str(processes)
        run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(tied=True), output),
                   processes=processes)
    assert_same_weights(tmp_path / "1", tmp_path / "2")
    assert "lm_head.weight" not in weights(tmp_path / "1")


@pytest.mark.parametrize("change", [
    ("--privileged", "none"), ("--normalise", "trajectory"), ("--normalise", "none"),
    ("--nll", "0"), ("--beta", "1"), ("--pairs", "all"), ("--margin", "0.6"), ("--share", "state"),
    ("--dtype", "bfloat16"),
])
def test_each_ablation_flag_has_its_effect(trained, tiny, tmp_path, change):
    folder, _ = trained
    output = tmp_path / "critic"
    run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(), output, *change))
    changed = weights(output)
    assert not all(torch.equal(changed[name], value)
                   for name, value in weights(folder / "critic").items())


def test_the_value_head_trains_and_scores(trained, tiny, tmp_path):
    folder, _ = trained
    output = tmp_path / "critic"
    run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(), output,
                                         "--head", "value", "--epochs", 12))
    losses = [line["train/loss"] for line in metrics(output)]
    assert losses[-1] < losses[0]
    critic = Critic(str(output), "cpu")
    task = episode("t", 1.0)["task"]
    scores = critic.advantages(task, dialogue("t"), ["a b", "c", "a b"], [True] * 3)
    assert scores[0] == scores[2] != scores[1]


def test_no_mixed_outcome_is_a_sentence(tiny, tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(episode("t", 1.0)) + "\n")
    done = run_script("train_critic.py", *flags(path, tiny(), tmp_path / "critic"), check=False)
    assert done.returncode == 1 and str(path) in done.stderr
    assert "no task with a better and a worse episode" in done.stderr
    assert "Traceback" not in done.stderr


def test_failed_episodes_are_left_out_and_counted(tiny, tmp_path):
    path = write_episodes(tmp_path / "episodes.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps(episode("task0", None, 9, error="human: gone")) + "\n")
    done = run_script("train_critic.py",
                      *flags(path, tiny(), tmp_path / "critic", "--max_steps", 1))
    assert "18 episodes of 6 tasks (1 failed" in done.stdout


def test_ranks_whose_items_have_different_numbers_of_rows_train_as_one_process_does(
        tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl", samples=2, more=1)
    for processes in (1, 2):
        output = tmp_path / str(processes)
        run_script("train_critic.py",
                   *flags(episodes, tiny(), output, "--share", "state", "--batch_size", 3),
                   processes=processes, timeout=120)
    assert_same_weights(tmp_path / "1", tmp_path / "2")


def test_a_second_kill_between_the_renames_of_a_state_still_leaves_one_to_resume_from(
        tiny, tmp_path, monkeypatch):
    model, process = load_model(tiny()), Process(0, 1, "cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def killed(*_):
        raise KeyboardInterrupt

    checkpoints.save_state(tmp_path / "state", 3, model, optimizer, process)
    (tmp_path / "state").rename(tmp_path / "state.old")  # the first kill
    monkeypatch.setattr(type(tmp_path), "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save_state(tmp_path / "state", 5, model, optimizer, process)
    assert checkpoints.load_state(tmp_path / "state", model, optimizer, process) == 3


# -----------------------------------------------------------------------------
# The critic as a scorer


def test_candidates_scored_together_score_as_each_alone_and_see_nothing_of_each_other(trained):
    folder, _ = trained
    critic = Critic(str(folder / "critic"), "cpu")
    task = episode("t", 1.0)["task"]
    texts = ["what is it?", "x", "tell me more about that", "what is it?"]
    finished = [True, False, True, True]
    together = critic.advantages(task, dialogue("t"), texts, finished)
    alone = [critic.advantages(task, dialogue("t"), [text], [done])[0]
             for text, done in zip(texts, finished, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5) and together[0] == together[3]
    changed = critic.advantages(task, dialogue("t"), ["completely other", *texts[1:]], finished)
    assert changed[1:] == pytest.approx(together[1:], abs=1e-5)


def test_a_dialogue_scored_at_once_has_the_advantages_of_its_turns_scored_one_by_one(trained):
    folder, _ = trained
    critic = Critic(str(folder / "critic"), "cpu")
    texts = ("t", "what is it?", "two", "and then?", "no", "I WANT TO ANSWER: x")
    whole = episode("t", 1.0, texts=texts)
    single = []
    for _, turn, messages in states_of([whole]):
        text = whole["dialogue_history"][2 * turn + 1]["content"]
        single += critic.advantages(whole["task"], messages, [text], [True])
    together = critic.advantages_of_dialogue(whole)
    assert together == pytest.approx(single, abs=1e-5) and len(single) == 3


def test_an_advantage_that_is_no_finite_number_ends_the_run_with_a_sentence(trained, monkeypatch):
    critic = Critic(str(trained[0] / "critic"), "cpu")
    monkeypatch.setattr(train_critic, "advantage", lambda *_: torch.tensor([[0.5], [math.nan]]))
    with pytest.raises(SystemExit, match="no finite numbers .*nan.*--dtype float32"):
        critic.advantages(episode("t", 1.0)["task"], dialogue("t"), ["a", "b"], [True, True])


def test_the_critics_logits_are_exact_where_its_model_is_not():
    exact = tiny_model(byte_tokenizer(), tied=True)
    ids = torch.arange(40)[None]
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    errors = [(rounded(ids).logits.float() - exact(ids).logits).abs().mean().item()]
    rounded.set_output_embeddings(train_critic.fp32_head(rounded.get_output_embeddings()))
    errors.append((rounded(ids).logits - exact(ids).logits).abs().mean().item())
    assert rounded(ids).logits.dtype == torch.float32 and errors[1] < errors[0]
    assert rounded.get_input_embeddings().weight.dtype == torch.bfloat16


def test_a_value_head_tells_close_candidates_apart_where_its_model_is_rounded():
    rounded = value_model(byte_tokenizer()).eval().to(torch.bfloat16)
    ids = torch.arange(200)[None]
    distinct = rounded(ids).logits.unique().numel()
    rounded.score = train_critic.fp32_head(rounded.score)
    assert rounded(ids).logits.unique().numel() > distinct
