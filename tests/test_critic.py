"""The critic: equations, rows, pairs, reports. Run: pytest tests/test_critic.py"""

import copy
import json
import math
import types

import pytest
import torch
from conftest import byte_tokenizer, run_script, tiny_model

import train_critic
import train_policy
from colbench import complete_episode, encode_dialogue
from train_critic import (
    Row,
    advantage,
    critic_loss,
    forward_turns,
    pair_episodes,
    turn_logprobs,
    turn_scores,
    value_loss,
)


def dialogue(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def rows_of(tokenizer, *dialogues):
    encoded = [encode_dialogue(tokenizer, messages) for messages in dialogues]
    return [Row(ids, turn_index, max(turn_index) + 1) for ids, turn_index in encoded]


DIALOGUES = [dialogue("a task", "y", "no", "a much longer turn of the agent", "so", "z"), dialogue("b", "one")]


# -----------------------------------------------------------------------------
# The equations, against slow loops written from the paper


def slow_turn_logprobs(model, row):
    """Per turn, the list of log pi(a_l | o, a_<l) of its tokens, one softmax at a time."""
    logits = model(torch.tensor([row.ids])).logits[0].double()
    turns = [[] for _ in range(row.turns)]
    for place in range(1, len(row.ids)):
        if row.turn_index[place] >= 0:
            exponentials = [math.exp(value) for value in logits[place - 1].tolist()]
            turns[row.turn_index[place]].append(math.log(exponentials[row.ids[place]] / sum(exponentials)))
    return turns


def test_turn_logprobs_sums_and_counts_each_turn():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0, -8.0], [-1.0, -1.0, -3.0, -5.0]])
    turn_index = torch.tensor([[-1, 0, 0, 1], [2, -1, -1, 0]])
    sums, counts = turn_logprobs(logprobs, turn_index, 3)
    assert sums.tolist() == [[-6, -8, 0], [-5, 0, -1]] and counts.tolist() == [[2, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("family, tied", [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)])
def test_equations_2_and_3_equal_a_slow_float64_loop_over_ragged_and_one_token_turns(family, tied):
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, *DIALOGUES)
    critic, reference = (tiny_model(tokenizer, family, tied, seed).double() for seed in (1, 2))
    sums, counts = turn_scores(critic, rows, "cpu")
    reference_sums, _ = turn_scores(reference, rows, "cpu")
    advantages = advantage(sums, reference_sums, counts)
    totals = []
    for number, row in enumerate(rows):
        slow = [sum(a - b for a, b in zip(new, old, strict=True)) / len(new) for new, old in zip(
            slow_turn_logprobs(critic, row), slow_turn_logprobs(reference, row), strict=True)]
        assert advantages[number, :row.turns].tolist() == pytest.approx(slow, abs=1e-9)
        assert not advantages[number, row.turns:].any()
        totals.append(sum(slow))
    loss = critic_loss(advantages[:1], advantages[1:], 0.3).item()
    assert loss == pytest.approx(-math.log(1 / (1 + math.exp(-0.3 * totals[0] + 0.3 * totals[1]))), abs=1e-9)


def test_normalisation_is_per_turn_per_trajectory_or_none():
    sums, reference, counts = torch.tensor([[2.0, 12.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]])
    assert advantage(sums, reference, counts, "turn").tolist() == [[2, 4]]
    assert advantage(sums, reference, counts, "trajectory").tolist() == [[0.5, 3]]
    assert advantage(sums, reference, counts, "none").tolist() == [[2, 12]]


def test_the_loss_falls_when_the_chosen_side_gains():
    chosen = torch.tensor([[0.2, 0.1]], requires_grad=True)
    rejected = torch.tensor([[0.3, 0.3]], requires_grad=True)
    critic_loss(chosen, rejected, 1.0).sum().backward()
    assert (chosen.grad < 0).all() and (rejected.grad > 0).all()


def test_the_first_row_of_an_item_is_the_chosen_one():
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).double()
    rows = [train_critic.encode_row(tokenizer, dialogue("t", text, "r", text), [True, True], 8192)[0] for text in ("ab", "cd")]
    sums, _ = train_critic.turn_scores(model, rows, "cpu")
    rows[0].reference, rows[1].reference = (sums[0] - 1).tolist(), (sums[1] + 1).tolist()
    args = types.SimpleNamespace(head="logratio", micro_batch_size=1, normalise="none", beta=1.0, nll=0.0)
    metrics = train_critic.critic_objective(model, [train_critic.Item(rows, [1.0, 0.0], [(0, 1)])], args, "cpu")
    assert metrics["train/margin"].item() == pytest.approx(4) and metrics["train/accuracy"].item() == 1
    assert metrics["train/loss"].item() == pytest.approx(math.log1p(math.exp(-4)))


def test_the_value_head_learns_the_outcome_at_every_existing_turn():
    logits = torch.tensor([[2.0, -1.0], [0.5, 9.0]])
    loss = value_loss(logits, torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    first = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert loss.tolist() == pytest.approx([first, math.log(1 + math.exp(0.5))])


# -----------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_padded_rows_score_as_rows_alone(family):
    tokenizer = byte_tokenizer()
    rows = rows_of(tokenizer, *DIALOGUES, dialogue("c", "two words", "more", "three"))
    model = tiny_model(tokenizer, family).double()
    together, counts = turn_scores(model, rows, "cpu", micro_batch_size=8)
    for number, row in enumerate(rows):
        alone, count = forward_turns(model, [row], "cpu")
        assert torch.allclose(together[number, :row.turns], alone[0], atol=1e-10)
        assert counts[number, :row.turns].tolist() == count[0].tolist()


def test_logits_are_computed_only_where_an_agent_token_is_next():
    tokenizer = byte_tokenizer()
    row = rows_of(tokenizer, DIALOGUES[0])[0]
    model = tiny_model(tokenizer)
    widths = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[1]))
    forward_turns(model, [row], "cpu")
    assert widths == [sum(index >= 0 for index in row.turn_index)]


def test_truncation_drops_whole_oldest_turns_and_never_part_of_a_scored_one():
    tokenizer = byte_tokenizer()
    messages = dialogue("task", "first", "reply", "second", "reply", "third")
    full, dropped = train_critic.encode_row(tokenizer, messages, [True] * 3, 10_000)
    assert dropped == 0 and full.turns == 3
    shorter, dropped = train_critic.encode_row(tokenizer, messages, [True] * 3, len(full.ids) - 1)
    assert dropped == 1 and shorter.turns == 2
    text = tokenizer.decode(shorter.ids)
    assert "task" in text and "first" not in text and "second" in text and "third" in text
    cut, _ = train_critic.encode_row(tokenizer, messages, [True, True, False], len(full.ids) - 2)
    assert cut.ids == shorter.ids[:-1]  # the last turn that is left is the one that was cut at the token limit
    assert train_critic.encode_row(tokenizer, messages, [True] * 3, 10)[0] is None


# -----------------------------------------------------------------------------
# Pairs


def episode(task_id, reward, sample=0, texts=("t", "q", "r", "I WANT TO ANSWER: x"), error=None):
    task = {"task_id": task_id, "problem_description": "t", "ground_truth": "def f(): pass", "test_cases": {"a": "f()"}}
    return complete_episode({"task": task, "sample": sample, "dialogue_history": dialogue(*texts), "answer": "x",
                             "reward": reward, "error": error, "agent_prompt": ""})


def test_best_vs_rest_needs_a_full_pass_and_pairs_it_with_all_worse_ones():
    group = [episode("t", reward) for reward in (0.5, 1.0, 1.0, 0.0)]
    assert pair_episodes(group) == [(group[1], group[0]), (group[1], group[3])]
    assert pair_episodes([episode("t", 0.9), episode("t", 0.1)]) == []
    assert len(pair_episodes(group, "all")) == 5
    assert len(pair_episodes(group, "all", margin=0.6)) == 2
    assert pair_episodes(group, margin=0.6) == [(group[1], group[3])]


@pytest.mark.parametrize("domain, rewards", [("backend", (0.9, 1.0, 1.0, 0.0)), ("frontend", (0.7, 0.9, 0.95, 0.0))])
def test_success_vs_failure_pairs_every_success_with_every_failure(domain, rewards):
    group = [episode("t", reward) for reward in rewards]
    for one in group:
        one["task"]["domain"], one["success"] = domain, None if domain == "frontend" else one["success"]
    expected = [(group[1], group[0]), (group[1], group[3]), (group[2], group[0]), (group[2], group[3])]
    assert pair_episodes(group, "success_vs_failure") == expected
    assert pair_episodes(group[1:3], "success_vs_failure") == []


@pytest.mark.parametrize("stage, more", [("critic", ("--head", "logratio")), ("critic", ("--head", "value")), ("mtdpo", ())])
def test_pairs_of_a_task_together_have_the_metrics_and_gradients_of_pairs_apart(stage, more):
    from transformers import AutoModelForTokenClassification

    tokenizer, results = byte_tokenizer(), []
    texts = [("t", f"question {number}" * number, "r", f"I WANT TO ANSWER: {number}") for number in range(4)]
    group = [episode("t", reward, number, texts[number]) for number, reward in enumerate((1.0, 0.0, 1.0, 0.0))]
    for share in ("state", "pair"):
        flags = ["--episodes", "x", "--model", "x", "--output", "x", "--pairs", "success_vs_failure", "--share", share]
        args = (train_critic if stage == "critic" else train_policy).parse_args(
            [*flags, *(more if stage == "critic" else ("--method", "mtdpo"))])
        model = tiny_model(tokenizer)
        if more == ("--head", "value"):
            model.config.num_labels = 1
            torch.manual_seed(0)
            model = AutoModelForTokenClassification.from_config(model.config)
        model = model.double().eval()
        items, report = train_critic.pair_items(tokenizer, {"t": group}, ["t"], args, "none") if stage == "critic" \
            else train_policy.method_items(tokenizer, group, args, None)
        assert [len(item.rows) for item in items] == {"state": [4], "pair": [2] * 4}[share] and report["pairs"] == 4
        for row in [row for item in items for row in item.rows]:
            row.reference = [0.5 * len(row.ids) - number for number in range(row.turns)]
        objective = train_critic.critic_objective if stage == "critic" else train_policy.dpo_objective
        metrics = objective(model, items, args, "cpu")
        metrics["train/loss"].mean().backward()
        results.append([{name: values.mean().item() for name, values in metrics.items()},
                        [parameter.grad for parameter in model.parameters()]])
    assert results[0][0] == pytest.approx(results[1][0])
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(results[0][1], results[1][1], strict=True))


def test_held_out_tasks_are_whole_and_seeded():
    groups = {f"t{number}": [] for number in range(40)}
    training, held_out = train_critic.split_tasks(groups, 0.05, 0)
    assert len(held_out) == 2 and not set(training) & set(held_out) and len(training) == 38
    assert train_critic.split_tasks(groups, 0.05, 0) == (training, held_out)
    assert train_critic.split_tasks(groups, 0.05, 1) != (training, held_out)


def test_credit_pairs_know_their_kind():
    from colbench import ToyCredit

    useful, wasted = ToyCredit("useful question", 0.6), ToyCredit("wasted question", 0.3)
    right, wrong = ToyCredit("right answer", 1.0), ToyCredit("wrong answer", 0.0)
    found = list(train_critic.credit_pairs([useful, wasted, wrong], known=False))
    assert found == [("question_question", 0, 1), ("answer_question_unknown", 0, 2), ("answer_question_unknown", 1, 2)]
    assert list(train_critic.credit_pairs([wrong, right], known=True)) == [("answer_answer", 1, 0)]


# -----------------------------------------------------------------------------
# The script


def write_episodes(path, tasks=6, samples=3, more=0):
    """Each task has `more` samples more than the one before."""
    with open(path, "w") as file:
        for number in range(tasks):
            for sample in range(samples + more * number):
                texts = ("t" * (number + 1), "what " * (sample + 1), "r", f"I WANT TO ANSWER: {number} {sample}")
                file.write(json.dumps(episode(f"task{number}", float(sample == 1), sample, texts)) + "\n")
    return path


def flags(path, model, output, *more):
    return ["--episodes", path, "--model", model, "--output", output, "--epochs", 2, "--batch_size", 4, "--lr", 1e-3,
            "--holdout", 0.2, "--max_length", 600, *more]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")


def metrics(folder):
    return [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    episodes = write_episodes(folder / "episodes.jsonl")
    done = run_script("train_critic.py", *flags(episodes, tiny(), folder / "critic"))
    return folder, done.stdout


def test_training_reports_pairs_and_the_level_of_answers_on_held_out_tasks(trained):
    folder, printed = trained
    assert "8 pairs from 4 tasks" in printed and "2 tasks held out" in printed
    last = metrics(folder / "critic")[-1]
    for name in ("accuracy", "loss", "length_correlation", "answer_chosen", "answer_rejected", "other_chosen"):
        assert math.isfinite(last[f"holdout/{name}"]) and f"holdout/{name}" in printed


def test_the_first_step_starts_from_the_reference(trained):
    folder, _ = trained
    first = metrics(folder / "critic")[0]
    assert first["train/margin"] == pytest.approx(0, abs=1e-5)
    assert first["train/loss"] == pytest.approx(math.log(2) + 0.01 * first["train/nll"], abs=1e-5)


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_a_tenth():
    args = types.SimpleNamespace(lr=1.0, warmup=0.1)
    rates = [train_critic.learning_rate(step, 100, args) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)]) and rates[10] == max(rates) == 1.0
    assert rates[11:] == sorted(rates[11:], reverse=True) and rates[100] == pytest.approx(0.1)


def test_the_saved_directory_reproduces_the_trained_logits(tiny, tmp_path):
    from colbench import load_model
    from collect import Process

    model = load_model(tiny())
    with torch.no_grad():
        model.lm_head.weight += 0.01
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    (tmp_path / "state").mkdir()
    train_critic.save_checkpoint(tmp_path, model, byte_tokenizer(), "prompt", Process(0, 1, "cpu"))
    assert torch.equal(load_model(str(tmp_path)).eval()(ids).logits, expected)
    assert (tmp_path / "agent_prompt.txt").read_text() == "prompt\n" and not (tmp_path / "state").exists()


@pytest.mark.parametrize("processes, more", [
    (1, ("--checkpointing",)), (1, ("--micro_batch_size", 3)), (2, ()), (2, ("--checkpointing",)),
    (2, ("--micro_batch_size", 3)), (3, ()),
])
def test_ranks_checkpointing_and_micro_batches_do_not_change_the_weights(trained, tiny, tmp_path, processes, more):
    folder, _ = trained
    run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(), tmp_path / "critic", *more), processes=processes)
    for name, value in weights(folder / "critic").items():
        assert torch.allclose(weights(tmp_path / "critic")[name], value, atol=1e-5), name
    losses = [[line["train/loss"] for line in metrics(path)] for path in (folder / "critic", tmp_path / "critic")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_two_ranks_train_tied_embeddings_as_one_does(trained, tiny, tmp_path):
    folder, _ = trained
    for processes in (1, 2):
        run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(tied=True), tmp_path / str(processes)),
                   processes=processes)
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert one.keys() == two.keys() and "lm_head.weight" not in one
    assert all(torch.allclose(two[name], value, atol=1e-5) for name, value in one.items())


@pytest.mark.parametrize("change, differs", [
    (("--privileged", "none"), True), (("--normalise", "trajectory"), True), (("--normalise", "none"), True),
    (("--nll", "0"), True), (("--pairs", "all"), False), (("--seed", "0"), False),
    (("--dtype", "bfloat16"), True), (("--dtype", "float32"), False),
])
def test_each_ablation_flag_has_its_effect(trained, tiny, tmp_path, change, differs):
    folder, _ = trained
    run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(), tmp_path / "critic", *change))
    same = all(torch.equal(weights(tmp_path / "critic")[name], value) for name, value in weights(folder / "critic").items())
    assert same != differs


def test_the_value_head_trains_and_scores(trained, tiny, tmp_path):
    folder, _ = trained
    output = tmp_path / "critic"
    run_script("train_critic.py", *flags(folder / "episodes.jsonl", tiny(), output, "--head", "value", "--epochs", 12))
    losses = [line["train/loss"] for line in metrics(output)]
    assert losses[-1] < losses[0]
    critic = train_critic.Critic(str(output), "cpu")
    task = episode("t", 1.0)["task"]
    scores = critic.score(task, dialogue("t"), ["a b", "c", "a b"], [True] * 3)
    assert scores[0] == scores[2] != scores[1]


def test_no_mixed_outcome_is_a_sentence(tiny, tmp_path):
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(episode("t", 1.0)) + "\n")
    done = run_script("train_critic.py", *flags(path, tiny(), tmp_path / "critic"), check=False)
    assert done.returncode == 1 and "no task with a better and a worse episode" in done.stderr
    assert "Traceback" not in done.stderr


def test_failed_episodes_are_left_out_and_counted(tiny, tmp_path):
    path = write_episodes(tmp_path / "episodes.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps(episode("task0", None, 9, error="human: gone")) + "\n")
    done = run_script("train_critic.py", *flags(path, tiny(), tmp_path / "critic", "--max_steps", 1))
    assert "18 episodes of 6 tasks (1 failed ones left out)" in done.stdout


# -----------------------------------------------------------------------------
# The critic as a scorer


def test_candidates_in_one_row_score_as_each_alone_and_see_nothing_of_each_other(trained):
    folder, _ = trained
    critic = train_critic.Critic(str(folder / "critic"), "cpu")
    task = episode("t", 1.0)["task"]
    texts = ["what is it?", "x", "tell me more about that", "what is it?"]
    finished = [True, False, True, True]
    together = critic.score(task, dialogue("t"), texts, finished)
    alone = [critic.score(task, dialogue("t"), [text], [done])[0] for text, done in zip(texts, finished, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5) and together[0] == together[3]
    changed = critic.score(task, dialogue("t"), ["completely other", *texts[1:]], finished)
    assert changed[1:] == pytest.approx(together[1:], abs=1e-5)


def test_a_dialogue_scored_at_once_has_the_advantages_of_its_turns_scored_one_by_one(trained):
    folder, _ = trained
    critic = train_critic.Critic(str(folder / "critic"), "cpu")
    whole = episode("t", 1.0, texts=("t", "what is it?", "two", "and then?", "no", "I WANT TO ANSWER: x"))
    single = [critic.score(whole["task"], messages, [whole["dialogue_history"][2 * turn + 1]["content"]], [True])[0]
              for _, turn, messages in train_critic.states_of([whole])]
    assert critic.score_dialogue(whole) == pytest.approx(single, abs=1e-5) and len(single) == 3


def test_ranks_whose_items_have_different_numbers_of_rows_train_as_one_process_does(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl", samples=2, more=1)
    for processes in (1, 2):
        run_script("train_critic.py", *flags(episodes, tiny(), tmp_path / str(processes), "--share", "state",
                                             "--batch_size", 3), processes=processes, timeout=120)
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all(torch.allclose(two[name], value, atol=1e-5) for name, value in one.items())


def test_the_critics_logits_are_exact_where_its_model_is_not():
    exact = tiny_model(byte_tokenizer(), tied=True)
    ids = torch.arange(40)[None]
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    errors = [(rounded(ids).logits.float() - exact(ids).logits).abs().mean().item()]
    rounded.set_output_embeddings(train_critic.exact(rounded.get_output_embeddings()))
    errors.append((rounded(ids).logits - exact(ids).logits).abs().mean().item())
    assert rounded(ids).logits.dtype == torch.float32 and errors[1] < errors[0]
    assert rounded.get_input_embeddings().weight.dtype == torch.bfloat16


def test_a_value_head_tells_close_candidates_apart_where_its_model_is_rounded():
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)
    config = tiny_model(byte_tokenizer()).config
    config.num_labels = 1
    rounded, ids = AutoModelForTokenClassification.from_config(config).eval().to(torch.bfloat16), torch.arange(200)[None]
    distinct = [rounded(ids).logits.unique().numel()]
    rounded.score = train_critic.exact(rounded.score)
    assert rounded(ids).logits.unique().numel() > distinct[0]


def test_padding_goes_on_counting_so_that_transformers_sees_one_sequence_and_makes_no_mask():
    rows = [Row(list(range(5)), [-1, 0, 0, 0, 0], 1), Row(list(range(9)), [-1] + [0] * 8, 1)]
    batch = train_critic.collate(rows, "cpu")
    assert batch["positions"].tolist() == [list(range(9))] * 2 and batch["mask"] is None


@pytest.mark.parametrize("head, right", [("logratio", 0.0), ("value", 1.0)])
def test_held_out_pairs_are_ranked_as_the_loss_ranks_them_by_sum_or_by_mean_value(monkeypatch, head, right):
    rows = [Row([0], [-1], 8), Row([0], [-1], 3)]  # eight turns, each a little better than the three of the other
    monkeypatch.setattr(train_critic, "share_scores", lambda *_: [([-1.0] * 8, [1.0] * 8), ([-1.2] * 3, [1.0] * 3)])
    found = train_critic.holdout_metrics(None, [train_critic.Item(rows, [1.0, 0.0], [(0, 1)])],
                                         types.SimpleNamespace(head=head, beta=1.0, micro_batch_size=1), None)
    assert found["holdout/accuracy"] == right and ("holdout/loss" in found) == (head == "logratio")


def test_a_second_kill_between_the_renames_of_a_state_still_leaves_one_to_go_on_from(tiny, tmp_path, monkeypatch):
    from colbench import load_model
    from collect import Process

    model, process = load_model(tiny()), Process(0, 1, "cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def killed(*_):
        raise KeyboardInterrupt

    train_critic.save_state(tmp_path / "state", 3, model, optimizer, process)
    (tmp_path / "state").rename(tmp_path / "state.old")  # the first kill
    monkeypatch.setattr(type(tmp_path), "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        train_critic.save_state(tmp_path / "state", 5, model, optimizer, process)
    assert train_critic.load_state(tmp_path / "state", model, optimizer, process) == 3
