"""The policy and its baselines: DPO, pairs of candidates. Run: pytest tests/test_policy.py"""

import copy
import json
import math
import random
import shutil
from collections import Counter

import pytest
import torch
from conftest import (
    ROOT, byte_tokenizer, dialogue, episode, metrics, run_script, tiny_model, weights,
    write_episodes)

import train_critic
import train_policy
from colbench import (
    agent_prompt_of, load_episodes, read_episodes, read_jsonl, read_tasks, states_of, write_jsonl)
from speakers.interface import SpeakerSettings
from speakers.local import LocalSpeaker, load_tokenizer
from train_critic import Critic, Item, Reader, candidate_rows, dialogue_row, encode_row, turn_sums
from training.packing import pack_rows
from train_policy import (
    IGNORED, PAIRINGS, SAMPLING_FLAGS, DpoSettings, PairSettings, candidate_items, check_critic,
    dpo_loss, dpo_objective, few_per_task, make_pairs, method_items, read_candidates,
    supervised_objective)

# -----------------------------------------------------------------------------
# The equation, and pairs


def test_dpo_is_log_2_at_the_start_and_equals_the_formula_elsewhere():
    same = torch.tensor([-3.0, -9.0])
    losses, better, worse = dpo_loss(same, same, same, same, 0.1)
    assert losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert not better.any() and not worse.any()
    loss, _, _ = dpo_loss(*torch.tensor([[-3.0], [-7.0], [-4.0], [-5.0]]), 0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5 * ((-3 + 4) - (-7 + 5)))))


def test_dpo_raises_the_chosen_and_lowers_the_rejected():
    sides = [torch.tensor([-2.0], requires_grad=True) for _ in range(2)]
    dpo_loss(*sides, torch.tensor([-2.0]), torch.tensor([-2.0]), 1.0)[0].sum().backward()
    assert sides[0].grad < 0 < sides[1].grad


def test_the_other_losses_of_a_pair_equal_their_formulas():
    sides = torch.tensor([[-3.0], [-7.0], [-4.0], [-5.0]])
    log_ratio = (-3 + 4) - (-7 + 5)
    for beta in (0.1, 0.5):
        hinge, _, _ = dpo_loss(*sides, beta, "hinge")
        assert hinge.item() == pytest.approx(max(0.0, 1 - beta * log_ratio))
        ipo, _, _ = dpo_loss(*sides, beta, "ipo")
        assert ipo.item() == pytest.approx((log_ratio - 1 / (2 * beta)) ** 2)


TEXTS = list("abcdefgh")
ADVANTAGES = [0.1, 0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2]


def test_halves_pairs_one_of_the_better_with_one_of_the_worse_half():
    pairs = make_pairs(TEXTS, ADVANTAGES, "halves", 100, random.Random(0))
    assert {ADVANTAGES[a] for a, _ in pairs} == {0.8, 0.7, 0.6, 0.5}
    assert {ADVANTAGES[b] for _, b in pairs} == {0.4, 0.3, 0.2, 0.1}
    assert len(pairs) == len(set(pairs)) == 16
    assert len(make_pairs(TEXTS, ADVANTAGES, "halves", 4, random.Random(0))) == 4


def test_best_worst_and_random_pair_as_their_names_say():
    assert make_pairs(TEXTS, ADVANTAGES, "best_worst", 2, None) == [(1, 0), (6, 7)]
    pairs = make_pairs(TEXTS, ADVANTAGES, "random", 100, random.Random(0))
    assert len(pairs) == 28 and all(ADVANTAGES[a] > ADVANTAGES[b] for a, b in pairs)


def test_a_text_that_came_up_often_is_in_as_many_pairs_but_computed_once():
    pairs = make_pairs(["a", "b", "b", "b", "c", "d"], [0.1, 0.9, 0.9, 0.9, 0.5, 0.3], "halves",
                       100, random.Random(0))
    assert sorted(pairs) == [(1, 0)] * 3 + [(1, 4)] * 3 + [(1, 5)] * 3


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_equal_texts_ties_and_empty_texts_are_never_a_pair(pairing):
    assert make_pairs(["x"] * 4, [0.1] * 4, pairing, 4, random.Random(0)) == []
    assert make_pairs(["x", "y"], [0.5, 0.5], pairing, 4, random.Random(0)) == []
    assert make_pairs(["x", ""], [0.9, 0.1], pairing, 4, random.Random(0)) == []
    pairs = make_pairs(["x", "y", "x", "z", "y"], [0.9, -0.1, 0.9, 0.5, -0.1], pairing, 9,
                       random.Random(0))
    assert set(pairs) <= {(0, 1), (0, 3), (3, 1)}


def test_positive_against_negative_pairs_across_zero_wherever_the_halves_part():
    def pairs(*advantages):
        return set(make_pairs(TEXTS[:len(advantages)], advantages, "positive_vs_negative", 100,
                              random.Random(0)))

    assert pairs(0.3, -0.1, 0.0, -0.2, -0.3) == {(0, 1), (0, 3), (0, 4)}
    assert pairs(0.3, 0.1, 0.2) == pairs(-0.3, -0.1, -0.2) == set()


def test_an_unknown_pairing_share_or_loss_is_an_error_and_never_silently_another_one():
    with pytest.raises(KeyError, match="dpo"):
        dpo_loss(*torch.zeros(4, 1), 0.1, "dpo")
    with pytest.raises(ValueError, match="pairing.*'half'.*expected"):
        make_pairs(TEXTS, ADVANTAGES, "half", 4, random.Random(0))
    with pytest.raises(ValueError, match="share.*'none'.*expected"):
        candidate_items(READER, [ranked_state({"a": 0.0, "b": 1.0})], pair_settings("none"))


def test_candidates_of_blanks_alone_are_no_pair():
    assert make_pairs(["a", " \n"], [0.0, 1.0], "halves", 4, random.Random(0)) == []


# -----------------------------------------------------------------------------
# Items of ranked candidates

READER = Reader(byte_tokenizer(), "none", 8192)


def pair_settings(share, pairing="halves", pairs_per_state=4):
    return PairSettings(pairing, pairs_per_state, share, seed=0)


def ranked_state(advantages, messages=None):
    """A state whose candidates have these advantages: {text: advantage}."""
    return {"task_id": "t", "sample": 0, "turn": 0, "messages": messages or dialogue("t"),
            "candidates": list(advantages), "finished": [True] * len(advantages),
            "advantages": list(advantages.values())}


@pytest.mark.parametrize("share", ["state", "pair"])
def test_the_chosen_row_of_every_pair_is_the_text_of_the_greater_advantage(share):
    advantages = {"aa": 0.1, "b": 0.9, "cccc": 0.3, "ddd": 0.5, "e": 0.2, "ff": 0.8}
    settings = pair_settings(share, "random", 99)
    items, _ = candidate_items(READER, [ranked_state(advantages)], settings)
    pairs = []
    for item in items:
        texts = [READER.tokenizer.decode(row.ids[row.prompt_length:], skip_special_tokens=True)
                 for row in item.rows]
        pairs += [(texts[chosen], texts[rejected]) for chosen, rejected in item.pairs]
    assert len(set(pairs)) == 15
    assert all(advantages[chosen] > advantages[rejected] for chosen, rejected in pairs)


def test_the_rows_of_an_item_share_one_pack_and_an_item_is_a_pair_or_all_pairs_of_a_state(trained):
    states, _ = read_candidates(trained / "sweet/candidates.jsonl")
    for share in ("state", "pair"):
        items, report = candidate_items(READER, states, pair_settings(share))
        for item in items:
            used = {index for pair in item.pairs for index in pair}
            assert used == set(range(len(item.rows))) and len(pack_rows(item.rows)) == 1
            assert share == "state" or (len(item.rows), len(item.pairs)) == (2, 1)
        assert sum(len(item.pairs) for item in items) == report["pairs"]
        assert (len(items) < report["pairs"]) == (share == "state")


@pytest.mark.parametrize("share", ["state", "pair"])
def test_the_pairs_of_a_state_encode_their_prompt_and_each_candidate_once(share, monkeypatch):
    calls = []

    def counted(reader, messages, candidates):
        calls.append(len(candidates))
        return candidate_rows(reader, messages, candidates)

    monkeypatch.setattr(train_policy, "candidate_rows", counted)
    advantages = {text: index / 8 for index, text in enumerate("abcdefgh")}
    settings = pair_settings(share, "random", 99)
    items, _ = candidate_items(READER, [ranked_state(advantages)], settings)
    assert calls == [8]
    assert len({id(row) for item in items for row in item.rows}) == 8


def test_training_reads_the_very_tokens_that_sampling_made():
    settings = SpeakerSettings(temperature=1.0, max_new_tokens=64, batch_size=64)
    policy = LocalSpeaker(str(ROOT / "toy/base"), settings)
    sampled, utterance = [], policy._utterance

    def recorded(sample):
        made = utterance(sample)
        sampled.append((made.text, made.finished, sample.tokens))
        return made

    policy._utterance = recorded
    prompts = [[{"role": "user", "content": task["problem_description"]}]
               for task in read_tasks("toy:backend:train", 8)]
    policy.speak(prompts, n=16, seeds=range(8))
    reader = Reader(policy.tokenizer, "none", 8192)
    assert len(sampled) == 128
    for text, finished, tokens in sampled:
        row = candidate_rows(reader, prompts[0], [(text, finished)])[0]
        own = row.ids[row.prompt_length:]
        assert (own[:-1] if finished else own) == tokens


def test_both_sides_of_a_pair_have_the_same_prompt_however_little_room_there_is():
    state = ranked_state({"a": 0.0, "a long candidate " * 3: 1.0},
                         dialogue("t", "one question", "its reply"))
    lengths = set()
    for room in range(60, 140, 5):
        reader = READER._replace(max_length=room)
        for item in candidate_items(reader, [state], pair_settings("pair"))[0]:
            prompts = [row.ids[:row.prompt_length] for row in item.rows]
            assert len(prompts) == 2 and prompts[0] == prompts[1]
            assert all(len(row.ids) <= room for row in item.rows)
            lengths.add(len(prompts[0]))
    assert len(lengths) == 2  # with the older turn, and without it


def test_what_the_length_leaves_out_of_states_is_counted(tmp_path):
    state = ranked_state({"a": 1.0, "b": -1.0}) | {"messages": dialogue("t", "x" * 99, "r")}
    path = tmp_path / "candidates.jsonl"
    write_jsonl(path, [state, state | {"task_id": "longer", "advantages": None}])
    states, too_long = read_candidates(path)
    assert len(states) == too_long == 1
    for max_length, dropped in ((8192, 0), (99, 1)):
        reader = READER._replace(max_length=max_length)
        _, report = candidate_items(reader, states, pair_settings("pair"))
        assert report["turns_dropped"] == dropped and report["pairs"] == 1
    write_jsonl(path, [state | {"advantages": None}])
    with pytest.raises(SystemExit, match="no ranked state and 1 that are too long for the critic"):
        read_candidates(path)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_pairs_do_not_depend_on_the_scale_of_advantages(trained, pairing):
    states, _ = read_candidates(trained / "sweet/candidates.jsonl")
    larger = [state | {"advantages": [1024 * value for value in state["advantages"]]}
              for state in states]
    settings = pair_settings("pair", pairing)
    items, report = candidate_items(READER, states, settings)
    assert report["pairs"] > 0
    again, _ = candidate_items(READER, larger, settings)
    assert [[row.ids for row in item.rows] for item in items] == [
        [row.ids for row in item.rows] for item in again]


# -----------------------------------------------------------------------------
# Flags

NON_DEFAULT = {
    "critic": "x", "candidates": "x", "data_fraction": "0.5", "states": "successes",
    "states_per_task": "2", "num_candidates": "8", "temperature": "0.5", "max_new_tokens": "8",
    "sampling_batch_size": "8", "sampler": "http://x/v1", "sampler_model": "x",
    "reference": "plain", "pairs_per_state": "2", "pairing": "random",
    "pairs": "all", "margin": "0.5", "success_reward": "0.5", "share": "state", "beta": "0.5",
    "nll": "0.5", "loss": "ipo", "privileged_episodes": "x", "stop_after": "sampling",
}


def parsed(method, *more):
    """The flags of a run without files, for what is tested inside this process."""
    return train_policy.parse_args(
        ["--method", method, "--episodes", "x", "--model", "x", "--output", "x", *more])


# what a method cannot do without
SOURCES = {method: () if "critic" in ignored else ("--critic", "x")
           for method, ignored in IGNORED.items()}


@pytest.mark.parametrize("method, flag", [
    (method, flag) for method in IGNORED for flag in IGNORED[method]])
def test_a_flag_that_the_method_ignores_is_refused_by_name(method, flag):
    parsed(method, *SOURCES[method])
    with pytest.raises(SystemExit, match=f"--{flag} .*ignored by --method {method};"):
        parsed(method, *SOURCES[method], f"--{flag}", NON_DEFAULT[flag])


@pytest.mark.parametrize("flag", SAMPLING_FLAGS)
def test_candidates_of_a_file_are_not_sampled_so_flags_of_sampling_are_refused(flag):
    for critic in ((), ("--critic", "x")):
        with pytest.raises(SystemExit, match=f"--{flag} .*ignored with --candidates"):
            parsed("sweet", "--candidates", "x", *critic, f"--{flag}", NON_DEFAULT[flag])


def test_ranked_candidates_are_not_ranked_so_a_reference_of_the_ranking_is_refused():
    parsed("sweet", "--candidates", "x", "--critic", "x", "--reference", "plain")
    with pytest.raises(SystemExit, match="--reference plain.*ignored without --critic"):
        parsed("sweet", "--candidates", "x", "--reference", "plain")


def test_a_sampler_is_a_server():
    with pytest.raises(SystemExit, match="found --sampler scripted, expected the address"):
        parsed("sweet", "--critic", "c", "--sampler", "scripted")


@pytest.mark.parametrize("method, more", [
    ("sweet", ("--critic", "x")), ("sweet", ("--candidates", "x")), ("mtdpo", ()),
    ("mtdpo", ("--pairs", "all"))])
def test_a_success_reward_is_refused_where_no_success_is_looked_for(method, more):
    parsed(method, *more)
    with pytest.raises(SystemExit, match="--success_reward 0.5.*ignored"):
        parsed(method, *more, "--success_reward", "0.5")


@pytest.mark.parametrize("method, more", [
    ("sweet", ("--critic", "x", "--states", "successes", "--success_reward", "0.5",
               "--temperature", "0.5", "--reference", "plain", "--share", "state")),
    ("sweet", ("--candidates", "x", "--pairing", "random", "--beta", "0.5", "--nll", "1.0")),
    ("mtdpo", ("--pairs", "success_vs_failure", "--success_reward", "0.5", "--margin", "0.1",
               "--beta", "0.5", "--share", "state")),
    ("rft", ("--success_reward", "0.5")),
    ("sft", ("--privileged_episodes", "x")),
])
def test_flags_that_do_something_are_not_refused(method, more):
    args = vars(parsed(method, *more))
    for flag, value in zip(more[::2], more[1::2], strict=True):
        assert str(args[flag.removeprefix("--")]) in (value, f"['{value}']")


def test_a_plain_reference_is_refused_with_a_value_head_which_has_no_reference(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "critic")
    for head in ("logratio", "value"):
        flags = {"head": head, "normalise": "turn", "privileged": "ground_truth",
                 "max_length": 600, "model": tiny(), "lora_rank": 0}
        (tmp_path / "critic/run.json").write_text(json.dumps({"flags": flags, "inputs": {}}))
        args = parsed("sweet", "--critic", str(tmp_path / "critic"), "--reference", "plain")
        if head == "logratio":
            check_critic(args)
        else:
            with pytest.raises(SystemExit, match="--reference plain.*value head"):
                check_critic(args)
            args = parsed("sweet", "--critic", str(tmp_path / "critic"),
                          "--pairing", "positive_vs_negative")
            with pytest.raises(SystemExit, match="positive_vs_negative.*value head.*even odds"):
                check_critic(args)
        check_critic(parsed("sweet", "--critic", str(tmp_path / "critic")))


@pytest.mark.parametrize("flag, value", [("--num_candidates", "1"), ("--temperature", "0")])
def test_candidates_of_which_none_could_make_a_pair_are_refused(flag, value):
    with pytest.raises(SystemExit, match=f"found {flag} {value}"):
        parsed("sweet", "--critic", "x", flag, value)


def test_defaults_are_those_of_table_5():
    args = [parsed(method, *SOURCES[method]) for method in ("sweet", "mtdpo", "rft")]
    assert [method.batch_size for method in args] == [8, 8, 32]
    assert [method.epochs for method in args] == [1, 4, 4]
    assert all((method.lr, method.beta, method.nll) == (2e-7, 0.1, 0.01) for method in args)
    critic = train_critic.parse_args(["--episodes", "e", "--model", "m", "--output", "o"])
    assert (critic.batch_size, critic.epochs, critic.lr) == (8, 4, 2e-7)
    assert (critic.beta, critic.nll) == (0.1, 0.01)


def test_defaults_are_those_of_section_4():
    sweet = parsed("sweet", *SOURCES["sweet"])
    assert (sweet.num_candidates, sweet.pairs_per_state, sweet.pairing) == (16, 4, "halves")
    assert (sweet.loss, sweet.reference, sweet.data_fraction) == ("sigmoid", "privileged", 0.1)
    critic = train_critic.parse_args(["--episodes", "e", "--model", "m", "--output", "o"])
    assert (critic.head, critic.normalise) == ("logratio", "turn")
    assert (critic.privileged, critic.pairs) == ("ground_truth", "best_vs_rest")


def test_few_states_of_each_task_are_drawn_with_a_seed():
    texts = ("t", *("q", "r") * 5, "x")
    states = list(states_of(episode(f"t{task}", 1.0, sample, texts)
                            for task in range(4) for sample in range(task)))

    def drawn(seed):
        return [(one["task"]["task_id"], one["sample"], turn)
                for one, turn, _ in few_per_task(states, 8, seed)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) == len(drawn(0))
    assert Counter(task for task, *_ in drawn(0)) == {"t1": 6, "t2": 8, "t3": 8}


# -----------------------------------------------------------------------------
# Baselines


def baseline_items(method, episodes, *more):
    args = parsed(method, *more)
    items, _ = method_items(args, READER, episodes, None)
    return items, args


def test_multi_turn_dpo_compares_the_log_probs_of_whole_dialogues():
    model = tiny_model(READER.tokenizer)
    episodes = [episode("t", 1.0),
                episode("t", 0.0, 1, ("t", "why?", "so", "longer", "r", "no"))]
    items, args = baseline_items("mtdpo", episodes, "--nll", "0")
    # its rows are dialogues with all their turns, as the critic's are
    as_read = [dialogue_row(READER, one) for one in episodes]
    assert len(items) == 1 and items[0].pairs == [(0, 1)]
    assert list(map(vars, items[0].rows)) == list(map(vars, as_read))
    assert [row.turns for row in items[0].rows] == [2, 3]
    log_ratios = []  # over all agent tokens of each dialogue, which is read by itself
    for row, read_alone in zip(items[0].rows, as_read, strict=True):
        row.reference = [-1.0 - turn for turn in range(row.turns)]
        sums, _ = turn_sums(model, [read_alone])
        log_ratios.append(sums.sum().item() - sum(row.reference))
    before = copy.deepcopy(list(map(vars, items[0].rows)))
    found = dpo_objective(model, items, DpoSettings(args.beta, args.nll))
    expected = args.beta * (log_ratios[0] - log_ratios[1])
    assert found["train/margin"].item() == pytest.approx(expected, rel=1e-4)
    assert found["train/chosen_reward"].item() == pytest.approx(args.beta * log_ratios[0], rel=1e-4)
    assert list(map(vars, items[0].rows)) == before


@pytest.mark.parametrize("method", ["mtdpo", "rft", "sft"])
def test_no_baseline_reads_the_solution_unless_it_is_asked_to(tmp_path, method):
    episodes = [episode("t", 1.0), episode("t", 0.0, 1)]

    def read(*more):
        items, _ = baseline_items(method, episodes, *more)
        return [READER.tokenizer.decode(row.ids) for item in items for row in item.rows]

    solution = episodes[0]["task"]["ground_truth"]
    assert read() and not any(solution in text for text in read())
    if method == "sft":
        (tmp_path / "informed.jsonl").write_text(json.dumps(episodes[0]) + "\n")
        texts = read("--privileged_episodes", str(tmp_path / "informed.jsonl"))
        assert sum(solution in text for text in texts) == 1


def test_supervised_training_weighs_every_token_alike_however_long_its_dialogue():
    model, total, length = tiny_model(READER.tokenizer), 0.0, 0
    items = []
    for messages in (dialogue("task", "a"),
                     dialogue("task", "what is it?", "this", "a much longer answer")):
        row = encode_row(READER, messages, [True] * 3)
        items.append(Item([row], []))
        sums, counts = turn_sums(model, [row])
        total, length = total + sums.sum().item(), length + counts.sum().item()
    short, long = supervised_objective(model, items, length / 2)["train/loss"].tolist()
    assert (short + long) / 2 == pytest.approx(-total / length, rel=1e-5)
    # means over each dialogue's own tokens would be about equal
    assert long / short == pytest.approx((length - 2) / 2, rel=0.5)


def test_rft_takes_successes_only_and_sft_everything(trained):
    episodes, _ = load_episodes([trained / "episodes.jsonl"])
    sizes = {method: len(baseline_items(method, episodes)[0]) for method in ("rft", "sft")}
    assert sizes == {"rft": 6, "sft": 18}


# -----------------------------------------------------------------------------
# Episodes of several files


def test_samples_of_a_task_in_two_files_are_numbered_on_so_that_no_state_has_two_dialogues(
        trained, tmp_path):
    once, _ = load_episodes([trained / "episodes.jsonl"])
    shutil.copy(trained / "episodes.jsonl", tmp_path / "more.jsonl")
    twice, _ = load_episodes([trained / "episodes.jsonl", tmp_path / "more.jsonl"])
    keys = [(episode["task"]["task_id"], episode["sample"]) for episode in twice]
    assert len({*keys}) == len(keys) == 2 * len(once) and twice[:len(once)] == once
    other = once[0] | {"task": once[0]["task"] | {"task_id": "other"}}
    (tmp_path / "others.jsonl").write_text(json.dumps(other) + "\n")
    apart, _ = load_episodes([trained / "episodes.jsonl", tmp_path / "others.jsonl"])
    assert apart[-1]["sample"] == once[0]["sample"]


def test_episodes_that_omit_their_instructions_get_those_of_the_agent_prompt_flag(
        trained, tmp_path):
    told, _ = load_episodes([trained / "episodes.jsonl"])
    (tmp_path / "prompt.txt").write_text("as published\n")
    untold = {name: value for name, value in told[0].items() if name != "agent_prompt"}
    ours = untold | {"sample": 9, "agent_prompt": "ours"}
    official = tmp_path / "official.jsonl"
    official.write_text(json.dumps(untold) + "\n" + json.dumps(ours) + "\n")
    for flag, expected in ((tmp_path / "prompt.txt", ["as published", "ours"]),
                           (None, [None, "ours"])):
        episodes, _ = load_episodes([official], flag)
        assert [episode["agent_prompt"] for episode in episodes] == expected
        _, _, messages = next(states_of(episodes))
        default = agent_prompt_of(episodes[0]["task"], None)
        assert messages[0]["content"] == (expected[0] or default)
    with pytest.raises(SystemExit, match="all episodes have the agent's instructions"):
        load_episodes([trained / "episodes.jsonl"], tmp_path / "prompt.txt")


# -----------------------------------------------------------------------------
# The script


def flags(method, folder, model, output, *more):
    return ["--method", method, "--episodes", folder / "episodes.jsonl", "--model", model,
            "--output", output, "--batch_size", 4, "--lr", 1e-3, "--max_length", 600,
            "--epochs", 1, "--dtype", "float32", *more]  # on a GPU, too


def sweet(folder, model, output, *more):
    return flags("sweet", folder, model, output, "--critic", folder / "critic",
                 "--data_fraction", 0.5, "--num_candidates", 6, "--max_new_tokens", 8, *more)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Episodes, a critic and a SWEET-RL policy."""
    folder = tmp_path_factory.mktemp("policy")
    write_episodes(folder / "episodes.jsonl")
    run_script("train_critic.py", "--episodes", folder / "episodes.jsonl", "--model", tiny(),
               "--output", folder / "critic", "--epochs", 2, "--lr", 1e-2, "--batch_size", 4,
               "--max_length", 600, "--dtype", "float32")
    run_script("train_policy.py", *sweet(folder, tiny(), folder / "sweet"))
    return folder


# Sums in another order differ by rounding. Adam turns a gradient that is all rounding, such as that
# of the embedding of a token that hardly counts, into a part of a step. A step is 1e-3
ROUNDING = 3e-4


def same_weights(a, b, tolerance=0.0):
    one, two = weights(a), weights(b)
    return one.keys() == two.keys() and all(
        torch.allclose(one[name], value, atol=tolerance, rtol=0) for name, value in two.items())


def candidates_of(folder):
    return [row for _, row in read_jsonl(folder / "candidates.jsonl")]


def test_candidates_hold_every_turn_of_the_chosen_tasks_and_no_privileged_byte(trained):
    rows = candidates_of(trained / "sweet")
    tasks = {row["task_id"] for row in rows}
    assert len(tasks) == 3 and len(rows) == 3 * 3 * 2
    for row in rows:
        assert len(row["candidates"]) == len(row["finished"]) == len(row["advantages"]) == 6
        assert "def f(): pass" not in json.dumps(row["messages"])


def test_only_turns_of_successes_are_states_where_these_are_asked_for(trained, tiny, tmp_path):
    run_script("train_policy.py",
               *sweet(trained, tiny(), tmp_path / "out", "--states", "successes"))
    keys, everything = ([(row["task_id"], row["sample"]) for row in candidates_of(folder)]
                        for folder in (tmp_path / "out", trained / "sweet"))
    # of the three samples of a task, the second is right
    assert keys == [key for key in everything if key[1] == 1]


def test_a_run_that_stops_after_sampling_is_continued_by_the_command_without_that_flag(
        trained, tiny, tmp_path):
    command = sweet(trained, tiny(), tmp_path / "out")
    done = run_script("train_policy.py", *command, "--stop_after", "sampling")
    assert "give the same command without --stop_after" in done.stdout
    left = sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".")
    assert left == ["candidates.sampled.jsonl", "run.json"]
    copied = tmp_path / "copied/candidates.sampled.jsonl"  # as for another critic
    copied.parent.mkdir()
    (tmp_path / "of_others").mkdir()
    shutil.copy(tmp_path / "out/candidates.sampled.jsonl", copied)
    refused = run_script("train_policy.py", *sweet(trained, tiny(), copied.parent,
                                                   "--num_candidates", 3), check=False)
    assert f"{copied}: found 6 candidates of a state, expected --num_cand" in refused.stderr
    other = [row | {"messages": [{"role": "user", "content": "other"}]}
             for _, row in read_jsonl(tmp_path / "out/candidates.sampled.jsonl")]
    write_jsonl(tmp_path / "of_others/candidates.sampled.jsonl", other)
    refused = run_script("train_policy.py", *sweet(trained, tiny(), tmp_path / "of_others"),
                         check=False)
    assert "of_others/candidates.sampled.jsonl: found other messages before turn 0 of task" \
        in refused.stderr
    run_script("train_policy.py", *command)
    assert same_weights(trained / "sweet", tmp_path / "out")


def test_candidates_of_an_earlier_run_are_ranked_by_the_critic_that_is_given(
        trained, tiny, tmp_path):
    def ranked(name, critic, *more):
        run_script("train_policy.py", *flags(
            "sweet", trained, tiny(), tmp_path / name, "--critic", critic, *more,
            "--candidates", trained / "sweet/candidates.jsonl"))
        return candidates_of(tmp_path / name)

    before = candidates_of(trained / "sweet")
    assert ranked("same", trained / "critic") == before
    assert same_weights(trained / "sweet", tmp_path / "same")
    run_script("train_critic.py", "--episodes", trained / "episodes.jsonl", "--model", tiny(),
               "--output", tmp_path / "critic", "--epochs", 1, "--lr", 1e-2, "--batch_size", 4,
               "--max_length", 600, "--dtype", "float32", "--privileged", "none")
    other = ranked("other", tmp_path / "critic")
    assert [row["candidates"] for row in other] == [row["candidates"] for row in before]
    assert all(one["advantages"] != two["advantages"]
               for one, two in zip(before, other, strict=True))

    write_jsonl(tmp_path / "of_others.jsonl", [row | {"task_id": "unknown"} for row in before])
    refused = run_script("train_policy.py", *flags(
        "sweet", trained, tiny(), tmp_path / "out", "--critic", trained / "critic",
        "--candidates", tmp_path / "of_others.jsonl"), check=False)
    assert "line 1: found the task 'unknown', which --episodes do not have" in refused.stderr


def test_two_ranks_make_the_candidates_and_weights_of_one(trained, tiny, tmp_path):
    run_script("train_policy.py", *sweet(trained, tiny(), tmp_path / "sweet"), processes=2)
    rows = zip(candidates_of(trained / "sweet"), candidates_of(tmp_path / "sweet"), strict=True)
    for one, two in rows:
        assert one.pop("advantages") == pytest.approx(two.pop("advantages"), abs=1e-5)
        assert one == two
    assert same_weights(trained / "sweet", tmp_path / "sweet", ROUNDING)


@pytest.mark.parametrize("more, same", [
    (("--share", "pair", "--micro_batch_size", 4), True), (("--checkpointing_every", 1), True),
    (("--pairing", "best_worst"), False), (("--pairing", "random"), False),
    (("--pairing", "positive_vs_negative"), False),
    (("--nll", "1"), False), (("--pairs_per_state", "1"), False),
])
def test_given_candidates_each_flag_changes_the_weights_or_only_their_cost(
        trained, tiny, tmp_path, more, same):
    run_script("train_policy.py", *flags("sweet", trained, tiny(), tmp_path / "again",
                                         "--candidates", trained / "sweet/candidates.jsonl", *more))
    assert same_weights(trained / "sweet", tmp_path / "again", ROUNDING) == same


def test_training_without_packs_ends_with_the_same_weights(trained, tiny, tmp_path):
    (tmp_path / "plain.py").write_text(
        "import training.packing, train_policy\n"
        "training.packing.PACK_LIMIT = 0\n"
        "train_policy.launch(train_policy.main, train_policy.parse_args())\n")
    run_script(tmp_path / "plain.py", *flags("sweet", trained, tiny(), tmp_path / "again",
                                             "--candidates", trained / "sweet/candidates.jsonl"),
               env={"PYTHONPATH": str(ROOT)})
    assert same_weights(trained / "sweet", tmp_path / "again", ROUNDING)


def test_the_plain_reference_changes_the_ranking(trained):
    task, texts = episode("t", 1.0)["task"], ["aa", "b", "cccc"]
    advantages = []
    for reference in ("privileged", "plain"):
        critic = Critic(str(trained / "critic"), "cpu", reference)
        advantages.append(critic.advantages(task, dialogue("t"), texts, [True] * 3))
    assert advantages[0] != pytest.approx(advantages[1], abs=1e-3)


@pytest.mark.parametrize("method", ["mtdpo", "rft", "sft"])
def test_each_baseline_learns_what_it_should(trained, tiny, tmp_path, method):
    run_script("train_policy.py",
               *flags(method, trained, tiny(), tmp_path / method, "--epochs", 6))
    lines = metrics(tmp_path / method)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    if method == "mtdpo":
        assert lines[0]["train/margin"] == pytest.approx(0, abs=1e-5)


def test_the_toy_model_speaks_and_round_trips_its_texts(toy_episodes, tmp_path):
    run_script("train_policy.py", "--method", "sft", "--model", "toy", "--episodes", toy_episodes,
               "--output", tmp_path / "toy", "--max_steps", 2, "--batch_size", 8,
               "--micro_batch_size", 8, "--lr", 1e-3)
    tokenizer = load_tokenizer(str(tmp_path / "toy"))
    for row in read_episodes(toy_episodes):
        for message in row["dialogue_history"]:
            ids = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.decode(ids) == message["content"]
    assert (tmp_path / "toy/agent_prompt.txt").is_file()


# -----------------------------------------------------------------------------
# Resume

# A kill between two steps leaves the state of the last one: here the process stops in save_state.
CRASH = """\
import os, train_critic, train_policy
save = train_critic.save_state
def crash(folder, step, *rest):
    save(folder, step, *rest)
    if step == 4: os._exit(9)
train_critic.save_state = crash
train_policy.launch(train_policy.main, train_policy.parse_args())
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_killed_and_resumed_ends_bit_equal(trained, tiny, tmp_path, processes):
    cut, whole = tmp_path / "cut", tmp_path / "whole"

    def command(output):
        return flags("mtdpo", trained, tiny(), output, "--epochs", 3, "--save_minutes", 0)

    run_script("train_policy.py", *command(whole), processes=processes)
    (tmp_path / "crash.py").write_text(CRASH)
    done = run_script(tmp_path / "crash.py", *command(cut), processes=processes, check=False,
                      env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert (cut / "state").is_dir() and not (cut / "config.json").exists()
    run_script("train_policy.py", *command(cut), processes=processes)
    assert same_weights(cut, whole) and not (cut / "state").exists()
    assert [line["step"] for line in metrics(cut)] == list(range(len(metrics(whole))))


def test_another_command_on_the_same_output_is_refused(trained, tiny):
    done = run_script("train_policy.py",
                      *sweet(trained, tiny(), trained / "sweet", "--beta", "0.3"), check=False)
    assert done.returncode == 1 and "differs in beta" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_complete_run_given_again_does_nothing(trained, tiny):
    before = (trained / "sweet/model.safetensors").stat().st_mtime_ns
    done = run_script("train_policy.py", *sweet(trained, tiny(), trained / "sweet"))
    assert "complete" in done.stdout
    assert (trained / "sweet/model.safetensors").stat().st_mtime_ns == before
