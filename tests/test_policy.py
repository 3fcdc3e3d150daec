"""The policy and its baselines: DPO, pairs, prefix sharing, candidates. Run: pytest tests/test_policy.py"""

import json
import math
import random

import pytest
import torch
from conftest import byte_tokenizer, run_script, tiny_model
from test_critic import dialogue, episode, metrics, weights, write_episodes

import colbench
import train_critic
import train_policy
from colbench import read_jsonl
from train_critic import Row, packed_rows, turn_scores
from train_policy import dpo_loss, make_pairs

# -----------------------------------------------------------------------------
# The equation, and pairs


def test_dpo_is_log_2_at_the_start_and_equals_the_formula_elsewhere():
    same = torch.tensor([-3.0, -9.0])
    losses, better, worse = dpo_loss(same, same, same, same, 0.1)
    assert losses.tolist() == pytest.approx([math.log(2)] * 2) and not better.any() and not worse.any()
    loss, _, _ = dpo_loss(*torch.tensor([[-3.0], [-7.0], [-4.0], [-5.0]]), 0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5 * ((-3 + 4) - (-7 + 5)))))


def test_dpo_raises_the_chosen_and_lowers_the_rejected():
    sides = [torch.tensor([-2.0], requires_grad=True) for _ in range(2)]
    dpo_loss(*sides, torch.tensor([-2.0]), torch.tensor([-2.0]), 1.0)[0].sum().backward()
    assert sides[0].grad < 0 < sides[1].grad


TEXTS = list("abcdefgh")
SCORES = [0.1, 0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2]


def test_halves_pairs_one_of_the_better_with_one_of_the_worse_half():
    pairs = make_pairs(TEXTS, SCORES, "halves", 100, random.Random(0))
    assert {SCORES[a] for a, _ in pairs} == {0.8, 0.7, 0.6, 0.5} and {SCORES[b] for _, b in pairs} == {0.4, 0.3, 0.2, 0.1}
    assert len(pairs) == len(set(pairs)) == 16
    assert len(make_pairs(TEXTS, SCORES, "halves", 4, random.Random(0))) == 4


def test_best_worst_and_random_pair_as_their_names_say():
    assert make_pairs(TEXTS, SCORES, "best_worst", 2, None) == [(1, 0), (6, 7)]
    pairs = make_pairs(TEXTS, SCORES, "random", 100, random.Random(0))
    assert len(pairs) == 28 and all(SCORES[a] > SCORES[b] for a, b in pairs)


def test_a_text_that_came_up_often_is_in_as_many_pairs_but_computed_once():
    pairs = make_pairs(["a", "b", "b", "b", "c", "d"], [0.1, 0.9, 0.9, 0.9, 0.5, 0.3], "halves", 100, random.Random(0))
    assert sorted(pairs) == [(1, 0)] * 3 + [(1, 4)] * 3 + [(1, 5)] * 3


@pytest.mark.parametrize("pairing", ["halves", "best_worst", "random"])
def test_equal_texts_and_ties_are_never_a_pair(pairing):
    assert make_pairs(["x"] * 4, [0.1] * 4, pairing, 4, random.Random(0)) == []
    assert make_pairs(["x", "y"], [0.5, 0.5], pairing, 4, random.Random(0)) == []
    assert make_pairs(["x", ""], [0.9, 0.1], pairing, 4, random.Random(0)) == []  # nothing to learn from
    for a, b in make_pairs(["x", "y", "x", "z", "y"], [0.9, 0.1, 0.9, 0.5, 0.1], pairing, 9, random.Random(0)):
        assert (a, b) in {(0, 1), (0, 3), (3, 1)}


@pytest.mark.parametrize("pairing", ["halves", "best_worst", "random"])
def test_advantages_that_the_critic_hardly_tells_apart_are_no_pair(pairing):
    pairs = make_pairs(TEXTS, SCORES, pairing, 100, random.Random(0), min_gap=0.35)
    assert pairs and all(SCORES[a] - SCORES[b] > 0.35 for a, b in pairs)
    assert len(pairs) < len(make_pairs(TEXTS, SCORES, pairing, 100, random.Random(0)))


# -----------------------------------------------------------------------------
# Prefix sharing

CANDIDATES = ["what is it?", "x", "tell me more about that", "I WANT TO ANSWER: def f(): pass"]


def gradients(model, rows):
    model.zero_grad()
    sums, _ = turn_scores(model, rows, "cpu")
    flat = torch.cat([table[:row.turns] for table, row in zip(sums, rows, strict=True)])
    (flat * torch.arange(1.0, len(flat) + 1)).sum().backward()
    return flat.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("family, tied", [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False),
                                          ("mistral", False), ("gemma3_text", False)])
def test_a_packed_row_has_the_logprobs_and_gradients_of_separate_rows(family, tied):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, family, tied).double()
    messages = dialogue("the task", "a question", "its reply")
    finished = [True, False, True, True]
    packed = packed_rows(tokenizer, messages, CANDIDATES, finished, 8192)
    assert len(packed) == 1 and packed[0].turns == 4
    separate = [packed_rows(tokenizer, messages, [text], [done], 8192)[0]
                for text, done in zip(CANDIDATES, finished, strict=True)]
    together, together_gradient = gradients(model, packed)
    alone, alone_gradient = gradients(model, separate)
    assert (together - alone).abs().max() < 1e-10
    assert (together_gradient - alone_gradient).norm() < 1e-6 * alone_gradient.norm()


def test_a_packed_row_that_is_too_long_becomes_several_with_the_same_scores():
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer).double()
    whole = packed_rows(tokenizer, dialogue("t"), CANDIDATES, [True] * 4, 8192)
    parts = packed_rows(tokenizer, dialogue("t"), CANDIDATES, [True] * 4, 80)
    assert len(parts) > 1 and all(len(row.ids) <= 80 for row in parts)
    sums = [torch.cat([t[:r.turns] for t, r in zip(turn_scores(model, rows, "cpu")[0], rows, strict=True)])
            for rows in (whole, parts)]
    assert torch.allclose(*sums, atol=1e-10)
    assert packed_rows(tokenizer, dialogue("t" * 100), CANDIDATES, [True] * 4, 80) is None


def test_a_cut_candidate_keeps_no_end_of_turn_token():
    tokenizer = byte_tokenizer()
    finished, cut = (packed_rows(tokenizer, dialogue("t"), ["ab"], [done], 8192)[0] for done in (True, False))
    assert finished.ids == cut.ids + [tokenizer.eos_token_id]


def test_no_candidate_sees_another():
    row = Row([0] * 7, [-1, -1, 0, 0, 1, 1, 1], 2, prompt=2)
    mask = train_critic.packed_mask([row], torch.tensor([row.turn_index]))[0, 0]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0],  # the prompt's two tokens need no mask
                                   [1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]]
    assert row.positions(9) == [0, 1, 2, 3, 2, 3, 4, 5, 6] and row.sources()[2:] == [1, 2, 1, 4, 5]


# -----------------------------------------------------------------------------
# The script


def parsed(method, *more):
    """The flags of a run without files, for what is tested inside this process."""
    return train_policy.parse_args(["--method", method, "--episodes", "x", "--model", "x", "--output", "x", *more])


def flags(method, folder, model, output, *more):
    return ["--method", method, "--episodes", folder / "episodes.jsonl", "--model", model, "--output", output,
            "--batch_size", 4, "--lr", 1e-3, "--max_length", 600, "--epochs", 1, *more]


def sweet(folder, model, output, *more):
    return flags("sweet", folder, model, output, "--critic", folder / "critic", "--data_fraction", 0.5, "--num_candidates", 6,
                 "--max_new_tokens", 8, *more)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Episodes, a critic and a SWEET-RL policy."""
    folder = tmp_path_factory.mktemp("policy")
    write_episodes(folder / "episodes.jsonl")
    run_script("train_critic.py", "--episodes", folder / "episodes.jsonl", "--model", tiny(), "--output", folder / "critic",
               "--epochs", 2, "--lr", 1e-2, "--batch_size", 4, "--max_length", 600)
    run_script("train_policy.py", *sweet(folder, tiny(), folder / "sweet"))
    return folder


def same_weights(a, b, tolerance=0.0):
    return all(torch.allclose(weights(a)[name], value, atol=tolerance, rtol=0) for name, value in weights(b).items())


def test_candidates_hold_every_turn_of_the_chosen_tasks_and_no_privileged_byte(trained):
    rows = [json.loads(line) for line in open(trained / "sweet/candidates.jsonl")]
    tasks = {row["task_id"] for row in rows}
    assert len(tasks) == 3 and len(rows) == 3 * 3 * 2
    for row in rows:
        assert len(row["candidates"]) == len(row["finished"]) == len(row["advantages"]) == 6
        assert "def f(): pass" not in json.dumps(row["messages"])


def test_only_turns_of_successes_are_states_where_these_are_asked_for(trained, tiny, tmp_path):
    run_script("train_policy.py", *sweet(trained, tiny(), tmp_path / "out"), "--states", "successes")
    keys = [(row["task_id"], row["sample"]) for _, row in read_jsonl(tmp_path / "out/candidates.jsonl")]
    everything = [(row["task_id"], row["sample"]) for _, row in read_jsonl(trained / "sweet/candidates.jsonl")]
    assert keys == [key for key in everything if key[1] == 1]  # of three samples of a task, the second is right


def test_samples_of_a_task_in_two_files_are_numbered_on_so_that_no_state_has_two_dialogues(trained, tmp_path):
    once, _ = train_critic.load_episodes([trained / "episodes.jsonl"])
    twice, _ = train_critic.load_episodes([trained / "episodes.jsonl"] * 2)
    keys = [(episode["task"]["task_id"], episode["sample"]) for episode in twice]
    assert len({*keys}) == len(keys) == 2 * len(once) and twice[:len(once)] == once
    others = [json.dumps(episode | {"task": episode["task"] | {"task_id": "other"}}) for episode in once[:1]]
    (tmp_path / "others.jsonl").write_text(others[0] + "\n")
    apart, _ = train_critic.load_episodes([trained / "episodes.jsonl", tmp_path / "others.jsonl"])
    assert apart[-1]["sample"] == once[0]["sample"]


def test_episodes_that_tell_no_instructions_get_those_of_the_agent_prompt_flag(trained, tmp_path):
    told, _ = train_critic.load_episodes([trained / "episodes.jsonl"])
    (tmp_path / "prompt.txt").write_text("as published\n")
    untold = [{name: value for name, value in episode.items() if name != "agent_prompt"} for episode in told[:1]]
    (tmp_path / "official.jsonl").write_text(json.dumps(untold[0]) + "\n")
    row = json.loads((tmp_path / "official.jsonl").read_text()) | {"sample": 9, "agent_prompt": "ours"}
    with open(tmp_path / "official.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    for flag, expected in ((tmp_path / "prompt.txt", ["as published", "ours"]), (None, [None, "ours"])):
        episodes, _ = train_critic.load_episodes([tmp_path / "official.jsonl"], flag)
        assert [episode["agent_prompt"] for episode in episodes] == expected
        _, _, messages = next(train_critic.states_of(episodes))
        assert messages[0]["content"] == (expected[0] or colbench.AGENT_PROMPT["backend"])


def test_two_ranks_make_the_candidates_and_weights_of_one(trained, tiny, tmp_path):
    run_script("train_policy.py", *sweet(trained, tiny(), tmp_path / "sweet"), processes=2)
    ours, theirs = ([json.loads(line) for line in open(folder / "candidates.jsonl")] for folder in (trained / "sweet",
                                                                                                    tmp_path / "sweet"))
    for one, two in zip(ours, theirs, strict=True):
        assert {k: v for k, v in one.items() if k != "advantages"} == {k: v for k, v in two.items() if k != "advantages"}
        assert one["advantages"] == pytest.approx(two["advantages"], abs=1e-5)
    assert same_weights(trained / "sweet", tmp_path / "sweet", 1e-5)


@pytest.mark.parametrize("more, same", [
    (("--share", "none"), True), (("--share", "pair", "--micro_batch_size", 4), True), (("--checkpointing",), True),
    (("--pairing", "best_worst"), False), (("--pairing", "random"), False), (("--nll", "1"), False),
    (("--pairs_per_state", "1"), False), (("--min_gap", "1"), False),
])
def test_given_candidates_each_flag_changes_the_weights_or_only_their_cost(trained, tiny, tmp_path, more, same):
    run_script("train_policy.py", *flags("sweet", trained, tiny(), tmp_path / "again", "--candidates",
                                         trained / "sweet/candidates.jsonl", *more))
    assert same_weights(trained / "sweet", tmp_path / "again", 1e-5) == same


@pytest.mark.parametrize("share", ["state", "pair", "none"])
def test_the_chosen_turn_of_every_pair_is_the_text_of_the_greater_advantage(share):
    tokenizer, worth = byte_tokenizer(), {"aa": 0.1, "b": 0.9, "cccc": 0.3, "ddd": 0.5, "e": 0.2, "ff": 0.8}
    row = {"task_id": "t", "sample": 0, "turn": 0, "messages": dialogue("t"), "candidates": list(worth),
           "finished": [True] * 6, "advantages": list(worth.values())}
    args = parsed("sweet", "--candidates", "x", "--share", share, "--pairing", "random", "--pairs_per_state", "99")
    pairs = []
    for item in train_policy.candidate_items(tokenizer, [row], args)[0]:
        texts = [tokenizer.decode([i for i, t in zip(part.ids, part.turn_index, strict=True) if t == turn],
                                  skip_special_tokens=True) for part in item.rows for turn in range(part.turns)]
        pairs += [(texts[chosen], texts[rejected]) for chosen, rejected in item.pairs]
    assert len(set(pairs)) == 15 and all(worth[chosen] > worth[rejected] for chosen, rejected in pairs)


def test_state_sharing_takes_all_pairs_of_a_state_in_one_row(trained):
    rows = train_policy.read_candidates(trained / "sweet/candidates.jsonl")
    for share, expected in (("state", 1), ("pair", 1), ("none", 2)):
        args = parsed("sweet", "--candidates", "x", "--share", share)
        items, report = train_policy.candidate_items(byte_tokenizer(), rows, args)
        assert all(len(item.rows) == expected for item in items)
        assert sum(len(item.pairs) for item in items) == report["pairs"]
        assert (len(items) < report["pairs"]) == (share == "state")


def test_both_sides_of_a_pair_have_the_same_prompt_however_little_room_there_is():
    row = {"task_id": "t", "sample": 0, "turn": 1, "messages": dialogue("t", "one question", "its reply"),
           "candidates": ["a", "a long candidate " * 3], "finished": [True] * 2, "advantages": [0.0, 1.0]}
    for room in range(60, 140, 5):
        args = parsed("sweet", "--candidates", "x", "--share", "none", "--max_length", str(room))
        for item in train_policy.candidate_items(byte_tokenizer(), [row], args)[0]:
            prompts = [[i for i, turn in zip(part.ids, part.turn_index, strict=True) if turn < 0] for part in item.rows]
            assert len(prompts) == 2 and prompts[0] == prompts[1]


def test_the_least_gap_of_a_pair_means_the_same_for_advantages_on_any_scale(trained):
    rows = train_policy.read_candidates(trained / "sweet/candidates.jsonl")
    args = parsed("sweet", "--candidates", "x", "--min_gap", "1")
    pairs = train_policy.candidate_items(byte_tokenizer(), rows, args)[1]["pairs"]
    larger = [row | {"advantages": [1024 * value for value in row["advantages"]]} for row in rows]
    assert train_policy.candidate_items(byte_tokenizer(), larger, args)[1]["pairs"] == pairs > 0
    args.min_gap = 0.0
    assert train_policy.candidate_items(byte_tokenizer(), rows, args)[1]["pairs"] > pairs


def test_the_plain_reference_changes_the_ranking(trained):
    task, texts = episode("t", 1.0)["task"], ["aa", "b", "cccc"]
    scores = [train_critic.Critic(str(trained / "critic"), "cpu", reference).score(task, dialogue("t"), texts, [True] * 3)
              for reference in ("privileged", "plain")]
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize("method", ["mtdpo", "rft", "sft"])
def test_each_baseline_learns_what_it_should(trained, tiny, tmp_path, method):
    run_script("train_policy.py", *flags(method, trained, tiny(), tmp_path / method, "--epochs", 6))
    lines = metrics(tmp_path / method)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    if method == "mtdpo":
        assert lines[0]["train/margin"] == pytest.approx(0, abs=1e-5)


def test_multi_turn_dpo_compares_the_log_probs_of_whole_dialogues():
    tokenizer = byte_tokenizer()
    model, episodes = tiny_model(tokenizer), [episode("t", 1.0), episode("t", 0.0, 1, ("t", "why?", "so", "longer", "r", "no"))]
    args = parsed("mtdpo", "--nll", "0")
    items, _ = train_policy.method_items(tokenizer, episodes, args, None)
    sums = []  # over all agent tokens of each dialogue, read one turn at a time
    for one in episodes:
        row, _ = train_critic.dialogue_row(tokenizer, one, "none", 999)
        sums.append(turn_scores(model, [row], "cpu")[0].sum())
    for row in items[0].rows:
        row.reference = [0.0] * row.turns
    margin = train_policy.dpo_objective(model, items, args, "cpu")["train/margin"]
    assert margin.item() == pytest.approx(args.beta * (sums[0] - sums[1]).item(), rel=1e-4)


@pytest.mark.parametrize("method", ["mtdpo", "rft", "sft"])
def test_no_baseline_reads_the_solution_unless_it_is_asked_to(tmp_path, method):
    tokenizer, episodes = byte_tokenizer(), [episode("t", 1.0), episode("t", 0.0, 1)]

    def read(*more):
        args = parsed(method, *more)
        items, _ = train_policy.method_items(tokenizer, episodes, args, None)
        return [tokenizer.decode(row.ids) for item in items for row in item.rows]

    solution = episodes[0]["task"]["ground_truth"]
    assert read() and not any(solution in text for text in read())
    if method == "sft":
        (tmp_path / "informed.jsonl").write_text(json.dumps(episodes[0]) + "\n")
        assert sum(solution in text for text in read("--privileged_episodes", str(tmp_path / "informed.jsonl"))) == 1


def test_supervised_training_weighs_every_token_alike_however_long_its_dialogue():
    tokenizer = byte_tokenizer()
    model, sums, length = tiny_model(tokenizer), 0.0, 0
    items = [train_policy.Item([train_critic.encode_row(tokenizer, messages, [True] * 3, 999)[0]], [1.0], [(0, 0)])
             for messages in (dialogue("task", "a"), dialogue("task", "what is it?", "this", "a much longer answer"))]
    args = parsed("sft")
    for item in items:
        turns, counts = turn_scores(model, item.rows, "cpu")
        sums, length = sums + turns.sum().item(), length + counts.sum().item()
    losses = train_policy.supervised_objective(model, items, args, "cpu", length / 2)["train/loss"]
    short, long = losses.tolist()
    assert (short + long) / 2 == pytest.approx(-sums / length, rel=1e-5)
    assert long / short == pytest.approx((length - 2) / 2, rel=0.5)  # not 1, as means over each dialogue would be


def test_rft_takes_successes_only_and_sft_everything(trained):
    tokenizer = byte_tokenizer()
    episodes = train_critic.load_episodes([trained / "episodes.jsonl"])[0]
    sizes = {}
    for method in ("rft", "sft"):
        args = parsed(method)
        items, _ = train_policy.method_items(tokenizer, episodes, args, None)
        sizes[method] = len(items)
    assert sizes == {"rft": 6, "sft": 18}


def test_the_toy_model_speaks_and_round_trips_its_texts(toy_episodes, tmp_path):
    run_script("train_policy.py", "--method", "sft", "--model", "toy", "--episodes", toy_episodes, "--output",
               tmp_path / "toy", "--max_steps", 2, "--batch_size", 8, "--micro_batch_size", 8, "--lr", 1e-3)
    from colbench import load_tokenizer, read_episodes

    tokenizer = load_tokenizer(str(tmp_path / "toy"))
    for row in read_episodes(toy_episodes):
        for message in row["dialogue_history"]:
            ids = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.decode(ids) == message["content"]
    assert (tmp_path / "toy/agent_prompt.txt").is_file()


# -----------------------------------------------------------------------------
# Resume


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_cut_and_resumed_ends_bit_equal(trained, tiny, tmp_path, processes):
    command = flags("mtdpo", trained, tiny(), tmp_path / "cut", "--epochs", 3, "--save_every", 1)
    whole = [*command[:7], tmp_path / "whole", *command[8:]]
    assert command[6] == "--output"
    run_script("train_policy.py", *whole, processes=processes)
    # a kill between two steps leaves the state of the last one: the crash is made by a full stop in save_state
    crash = "import sys, os, train_critic, train_policy\n" \
        "save = train_critic.save_state\n" \
        "def crash(folder, step, *rest):\n" \
        "    save(folder, step, *rest)\n" \
        "    if step == 4: os._exit(9)\n" \
        "train_critic.save_state = crash\n" \
        "train_policy.launch(train_policy.main, train_policy.parse_args())\n"
    (tmp_path / "crash.py").write_text(crash)
    from conftest import ROOT

    done = run_script(tmp_path / "crash.py", *command, processes=processes, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0 and (tmp_path / "cut/state").is_dir() and not (tmp_path / "cut/config.json").exists()
    # give exactly the same command as the user would
    run_script("train_policy.py", *command, processes=processes)
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    assert [line["step"] for line in metrics(tmp_path / "cut")] == list(range(len(metrics(tmp_path / "whole"))))


def test_another_command_on_the_same_output_is_refused(trained, tiny):
    done = run_script("train_policy.py", *sweet(trained, tiny(), trained / "sweet", "--beta", "0.3"), check=False)
    assert done.returncode == 1 and "differs in beta" in done.stderr and "Traceback" not in done.stderr


def test_a_complete_run_given_again_does_nothing(trained, tiny):
    before = (trained / "sweet/model.safetensors").stat().st_mtime_ns
    done = run_script("train_policy.py", *sweet(trained, tiny(), trained / "sweet"))
    assert "complete" in done.stdout and (trained / "sweet/model.safetensors").stat().st_mtime_ns == before
