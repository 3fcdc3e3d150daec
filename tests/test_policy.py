"""The policy: DPO on pairs of candidates, and of dialogues."""

import json
import math
import random
import shutil

import pytest
import torch
from conftest import (
    ROOT, byte_tokenizer, dialogue, differing_weights, episode, metrics, ranked_state, refusal,
    run_script, tiny_model, write_episodes, write_rows)

import train_policy
from colbench import agent_prompt_of, encode_candidates
from formats.read import group_by_task, load_episodes, read_candidates
from speakers.interface import SpeakerSettings
from speakers.local import LocalSpeaker, encode_prompt
from speakers.local import text_of as sampled_text
from toy.world import toy_tasks
from train_policy import (
    PAIRINGS, candidate_pairs, dialogue_pairs, dialogue_row, dpo_loss, dpo_objective,
    make_pairs, turn_logprobs)

TOKENIZER = byte_tokenizer()

# -----------------------------------------------------------------------------
# The equation, and pairs


def test_dpo_is_log_2_at_the_start_and_equals_the_formula_elsewhere():
    start = torch.zeros(2)
    assert dpo_loss(start, start, 0.1).tolist() == pytest.approx([math.log(2)] * 2)
    loss = dpo_loss(torch.tensor([-3.0 + 4.0]), torch.tensor([-7.0 + 5.0]), 0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5 * ((-3 + 4) - (-7 + 5)))))


TEXTS = list("abcdefgh")
ADVANTAGES = [0.1, 0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2]


def test_halves_pairs_one_of_the_better_with_one_of_the_worse_half():
    pairs = make_pairs(TEXTS, ADVANTAGES, "halves", 100, random.Random(0))
    assert {ADVANTAGES[a] for a, _ in pairs} == {0.8, 0.7, 0.6, 0.5}
    assert {ADVANTAGES[b] for _, b in pairs} == {0.4, 0.3, 0.2, 0.1}
    assert len(pairs) == len(set(pairs)) == 16
    assert len(make_pairs(TEXTS, ADVANTAGES, "halves", 4, random.Random(0))) == 4
    assert make_pairs("abc", [3, 2, 1], "halves", 9, random.Random(0)) == [(0, 2)]


def test_a_text_that_came_up_often_is_in_as_many_pairs():
    texts = ["a", "b", "b", "b", "c", "d"]
    pairs = make_pairs(texts, [0.1, 0.9, 0.9, 0.9, 0.5, 0.3], "halves", 100, random.Random(0))
    assert sorted((texts[a], texts[b]) for a, b in pairs) == (
        [("b", "a")] * 3 + [("b", "c")] * 3 + [("b", "d")] * 3)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_equal_texts_ties_and_empty_texts_are_never_a_pair(pairing):
    for texts, advantages in ((["x"] * 4, [0.1] * 4), (["x", "y"], [0.5, 0.5]),
                              (["x", ""], [0.9, -0.1]), (["a", " \n"], [-1.0, 1.0])):
        assert make_pairs(texts, advantages, pairing, 4, random.Random(0)) == []
    texts, advantages = ["x", "y", "x", "z", "y"], [0.9, -0.1, 0.9, 0.5, -0.1]
    pairs = make_pairs(texts, advantages, pairing, 9, random.Random(0))
    assert {(texts[a], texts[b]) for a, b in pairs} <= {("x", "y"), ("x", "z"), ("z", "y")}


def test_positive_against_negative_pairs_across_zero_wherever_the_halves_part():
    def pairs(*advantages):
        return set(make_pairs(TEXTS[:len(advantages)], advantages, "positive_vs_negative", 100,
                              random.Random(0)))

    assert pairs(0.3, -0.1, 0.0, -0.2, -0.3) == {(0, 1), (0, 3), (0, 4)}
    assert pairs(0.3, 0.1, 0.2) == pairs(-0.3, -0.1, -0.2) == set()


# -----------------------------------------------------------------------------
# Rows of ranked candidates


def rows_of(states, pairing="halves", count=99, max_length=8192):
    return candidate_pairs(TOKENIZER, states, pairing, count, max_length, 0)


def with_rows(episodes):
    return [one | {"row": dialogue_row(TOKENIZER, one, 8192)} for one in episodes]


def text_of(row):
    ids = [token for token, turn in zip(row.ids, row.turn_index, strict=True) if turn == 0]
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def prompt_of(row):
    return row.ids[:row.turn_index.index(0)]


def test_the_chosen_row_of_every_pair_is_the_text_of_the_greater_advantage():
    advantages = {"aa": 0.1, "b": 0.9, "cccc": 0.3, "ddd": 0.5, "e": 0.2, "ff": 0.8}
    (pairs,), too_long = rows_of([ranked_state(advantages)])
    assert len(pairs) == 9 and not too_long
    for chosen, rejected in pairs:
        assert advantages[text_of(chosen)] > advantages[text_of(rejected)]
        assert prompt_of(chosen) == prompt_of(rejected)


def test_the_pairs_of_a_state_do_not_depend_on_other_states_or_on_the_scale_of_advantages():
    state = ranked_state(dict(zip(TEXTS, ADVANTAGES, strict=True)))
    larger = state | {"advantages": [1024 * value for value in ADVANTAGES]}
    other = state | {"turn": 1}

    def texts(states):
        groups, _ = rows_of(states, count=4)
        return [(text_of(a), text_of(b)) for a, b in groups[-1]]

    assert texts([state]) == texts([other, state]) == texts([larger])
    assert texts([state]) != texts([other])


def test_another_seed_draws_other_pairs_of_a_state():
    state = ranked_state(dict(zip(TEXTS, ADVANTAGES, strict=True)))
    drawn = [train_policy.state_pairs(state, "halves", 4, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_both_sides_of_a_pair_have_the_same_prompt_however_little_room_there_is():
    state = ranked_state({"a": 0.0, "a long candidate " * 3: 1.0},
                         dialogue("t", "one question", "its reply"))
    lengths, omitted = set(), 0
    for room in range(60, 140, 5):
        groups, too_long = rows_of([state], max_length=room)
        omitted += too_long
        for chosen, rejected in sum(groups, []):
            assert prompt_of(chosen) == prompt_of(rejected)
            assert max(len(chosen.ids), len(rejected.ids)) <= room
            lengths.add((len(prompt_of(chosen)), chosen.dropped))
    (_, lost), (_, kept) = sorted(lengths)  # the prompt without the older turn, and with it
    assert omitted and lost == 1 and kept == 0


def test_training_reads_the_very_tokens_that_sampling_made():
    policy = LocalSpeaker(str(ROOT / "toy/base"), SpeakerSettings(max_new_tokens=64))
    for seed, task in enumerate(toy_tasks("toy:backend:train", 8)):
        messages = dialogue(task["problem_description"])
        prompt = encode_prompt(policy.tokenizer, messages)
        samples = policy._generate([prompt], [None], 16, [seed])
        texts = [sampled_text(policy.tokenizer, sample.tokens) for sample in samples]
        finished = [sample.finished for sample in samples]
        rows = encode_candidates(policy.tokenizer, messages, texts, finished, 8192)
        for sample, (ids, _, _) in zip(samples, rows, strict=True):
            assert ids == prompt + sample.tokens + ids[-1:] * sample.finished
            assert ids[-1] == policy.tokenizer.eos_token_id or not sample.finished


def test_multi_turn_dpo_compares_the_log_probs_of_whole_dialogues():
    model = tiny_model(TOKENIZER)
    group = [episode("t", 1.0), episode("t", 0.0, 1, ("t", "why?", "so", "longer", "r", "no"))]
    pairs_of = dialogue_pairs(with_rows(group), "best_vs_rest", 0.0)
    pair, = pairs_of["t"]
    log_ratios = []  # over all agent tokens of each dialogue, which is read by itself
    for row, one in zip(pair, group, strict=True):
        again = dialogue_row(TOKENIZER, one, 8192)  # the chosen one is the first
        assert (row.ids, row.turn_index) == (again.ids, again.turn_index)
        row.reference = -1.0 - torch.arange(row.turns)
        log_ratios.append(turn_logprobs(model, [row])[0].sum().item() - row.reference.sum().item())
    found = dpo_objective(model, [pair], 0.1, 0.0)
    expected = 0.1 * (log_ratios[0] - log_ratios[1])
    assert found["margin"].item() == pytest.approx(expected, rel=1e-4)
    assert found["chosen_reward"].item() == pytest.approx(0.1 * log_ratios[0], rel=1e-4)
    assert found["loss"].item() == pytest.approx(math.log1p(math.exp(-expected)), rel=1e-4)


def test_a_success_that_is_too_long_leaves_the_others_to_be_paired():
    group = with_rows([episode("t", 1.0), episode("t", 1.0, 1), episode("t", 0.0, 2)])
    group[0]["row"] = None
    pair = group[1]["row"], group[2]["row"]
    assert dialogue_pairs(group, "best_vs_rest", 0.0) == {"t": [pair]}
    too_long = [one | {"row": None} for one in group]
    assert dialogue_pairs(too_long, "best_vs_rest", 0.0) == {"t": []}


# -----------------------------------------------------------------------------
# The file of ranked candidates


def read_ranked(folder, *states):
    return read_candidates(write_rows(folder / "ranked.jsonl", states), ranked=True)


def test_states_without_advantages_are_omitted_and_counted_but_can_be_ranked_again(tmp_path):
    state = ranked_state({"a": 1.0, "b": -1.0})
    unranked = state | {"turn": 1, "advantages": None}
    failed = {key: state[key] for key in ("task", "sample", "messages")}
    failed |= {"turn": 2, "error": "too long"}
    states, omitted = read_ranked(tmp_path, state, unranked, failed)
    assert len(states) == 1 and omitted == 2
    with pytest.raises(SystemExit, match="no state with ranked candidates, but 1 that failed or"):
        read_ranked(tmp_path, unranked)
    states, omitted = read_candidates(tmp_path / "ranked.jsonl")  # too long for one ranker alone
    assert len(states) == 1 and omitted == 0


@pytest.mark.parametrize("change, found", [
    ({"advantages": [1.0]}, "lists of lengths"), ({"advantages": [1.0, "b"]}, "of another type"),
    ({"advantages": [1.0, float("nan")]}, "of another type"), ({"finished": [1, 0]}, "type"),
    ({"candidates": ["a", None]}, "of another type"), ({"messages": [{"role": "user"}]}, "type"),
    ({"messages": []}, "of another type"), ({"ranker": 3}, "'ranker' of type int"),
    ({"task": {}}, "no 'problem_description'"), ({"turn": "1"}, "'turn' of type str"),
    ({"candidates": [], "finished": [], "advantages": []}, "lists of lengths"),
])
def test_a_bad_line_of_candidates_is_named(tmp_path, change, found):
    state = ranked_state({"a": 1.0, "b": 0.0})
    with pytest.raises(SystemExit, match=f"line 2.*{found}"):
        read_ranked(tmp_path, state | {"turn": 9}, state | change)


def test_unranked_candidates_and_a_repeated_state_are_refused(tmp_path):
    state = ranked_state({"a": 1.0, "b": 0.0})
    with pytest.raises(SystemExit, match="line 2.*a second time"):
        read_ranked(tmp_path, state, state)
    del state["advantages"]
    with pytest.raises(SystemExit, match="line 1: found candidates, expected ranked candidates"):
        read_ranked(tmp_path, state)
    assert read_candidates(tmp_path / "ranked.jsonl")[0]


def test_defaults_are_those_of_the_paper():
    args = train_policy.parse_args(["--candidates", "c", "--model", "m", "--output", "o"])
    assert (args.batch_size, args.epochs, args.lr, args.beta, args.nll) == (8, 1, 2e-7, 0.1, 0.01)
    assert (args.pairing, args.pairs_per_state) == ("halves", 4)


# -----------------------------------------------------------------------------
# The script


def flags(output, *more):
    return ["--output", output, "--batch_size", 4, "--lr", 1e-3, "--max_length", 600,
            "--dtype", "float32", *more]


def train(candidates, model, output, *more, run=run_script, **options):
    return run("train_policy.py", "--candidates", candidates, "--model", model,
               *flags(output, *more), **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_episodes(folder / "episodes.jsonl")
    write_rows(folder / "ranked.jsonl", [
        ranked_state({f"{turn} {n}" * n: 0.1 * (n - 2) for n in range(1, 6)},
                     dialogue("t", *["q", "r"] * turn), turn=turn, agent_prompt="Ask.")
        for turn in range(5)])
    return folder


@pytest.fixture(scope="module")
def trained(files, tiny):
    train(files / "ranked.jsonl", tiny(), files / "sweet")
    return files / "sweet"


def test_training_starts_at_the_reference_learns_its_pairs_and_records_its_script(trained):
    assert json.loads((trained / "run.json").read_text())["script"] == "train_policy.py"
    lines = metrics(trained)
    assert len(lines) == 5
    assert lines[0]["train/margin"] == pytest.approx(0, abs=1e-4)
    assert lines[0]["train/loss"] == pytest.approx(
        math.log(2) + 0.01 * lines[0]["train/nll"], abs=1e-4)
    assert lines[-1]["train/margin"] > 0


def test_a_model_with_dropout_learns_without_it(files, tiny, tmp_path):
    """With a rate of 0 and no NLL, every loss is that of the start."""
    model = shutil.copytree(tiny(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    train(files / "ranked.jsonl", model, tmp_path / "out", "--lr", 0, "--nll", 0)
    for line in metrics(tmp_path / "out"):
        assert line["train/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_the_agents_own_prompt_travels_with_the_weights_and_ours_does_not(trained, files, tiny):
    assert (trained / "agent_prompt.txt").read_text() == "Ask.\n"
    ours = agent_prompt_of(ranked_state({"a": 1.0})["task"], None, 7)
    write_rows(files / "ours.jsonl", [ranked_state({"a": 1.0, "b": 0.0}, agent_prompt=ours)
                                     | {"max_turns": 7}])
    train(files / "ours.jsonl", tiny(), files / "ours")
    assert not (files / "ours/agent_prompt.txt").exists()


def test_packing_ranks_and_micro_batches_do_not_change_the_weights(trained, files, tiny, tmp_path):
    train(files / "ranked.jsonl", tiny(), tmp_path / "out", "--packed", "--micro_batch_size", 2,
          processes=2)
    assert not differing_weights(trained, tmp_path / "out", 1e-5)


@pytest.mark.parametrize("change", [
    ("--pairing", "positive_vs_negative"), ("--pairs_per_state", "1"), ("--beta", "1"),
    ("--nll", "1"), ("--shuffle", "groups"), ("--seed", "1")])
def test_each_ablation_flag_has_its_effect(trained, files, tiny, tmp_path, change):
    train(files / "ranked.jsonl", tiny(), tmp_path / "out", *change)
    assert differing_weights(trained, tmp_path / "out", 1e-5)


def test_whoever_ranked_the_policy_is_the_same(trained, files, tiny, tmp_path):
    states, _ = read_candidates(files / "ranked.jsonl", ranked=True)
    write_rows(tmp_path / "other.jsonl", [state | {"ranker": "somebody"} for state in states])
    done = train(tmp_path / "other.jsonl", tiny(), tmp_path / "out")
    assert "ranked by somebody" in done.stdout
    assert not differing_weights(trained, tmp_path / "out")


@pytest.mark.parametrize("more", [(), ("--pairs", "all"), ("--packed", "--shuffle", "groups")])
def test_multi_turn_dpo_learns_from_episodes(files, tiny, tmp_path, more):
    done = run_script("train_policy.py", "--episodes", files / "episodes.jsonl", "--model", tiny(),
                      *flags(tmp_path / "out", "--epochs", 2, *more))
    episodes, _ = load_episodes([files / "episodes.jsonl"])
    rule = "all" if "all" in more else "best_vs_rest"
    count = sum(len(train_policy.pair_episodes(group, rule))
                for group in group_by_task(episodes).values())
    assert f"{count} pairs" in done.stdout
    assert metrics(tmp_path / "out")[-1]["train/margin"] > 0


def test_states_that_lose_turns_and_pairs_that_are_omitted_are_counted(tiny, tmp_path):
    long = dialogue("t", "q" * 200, "r")
    write_rows(tmp_path / "ranked.jsonl", [
        ranked_state({"a": 1.0, "b": -1.0}, long), ranked_state({"a": 1.0, "b": 0.0}, turn=1),
        ranked_state({"a" * 200: 1.0, "b": 0.0}, turn=2)])
    done = train(tmp_path / "ranked.jsonl", tiny(), tmp_path / "out", "--max_length", 200)
    assert "2 pairs; with --max_length 200, 1 states lose their oldest turns" in done.stdout
    assert "and 1 more pairs are omitted" in done.stdout


def test_candidates_to_learn_nothing_from_are_a_sentence(tiny, tmp_path):
    write_rows(tmp_path / "ranked.jsonl", [ranked_state({"a": 1.0, "b": 1.0})])
    said = train(tmp_path / "ranked.jsonl", tiny(), tmp_path / "out", run=refusal)
    assert "found no pair" in said and "computing on" not in said


def test_no_privileged_byte_reaches_the_rows_of_the_policy(files):
    states, _ = read_candidates(files / "ranked.jsonl", ranked=True)
    episodes, _ = load_episodes([files / "episodes.jsonl"])
    pairs_of = dialogue_pairs(with_rows(episodes), "all", 0.0)
    groups = [*rows_of(states)[0], *pairs_of.values()]
    texts = [TOKENIZER.decode(row.ids) for pairs in groups for pair in pairs for row in pair]
    assert len(texts) > 50
    assert not any(episodes[0]["task"]["ground_truth"] in text for text in texts)


@pytest.mark.parametrize("script", ["train_policy.py", "variants/sft.py"])
def test_the_instructions_of_episodes_are_saved_with_the_policy_too(tiny, tmp_path, script):
    path = write_rows(tmp_path / "e.jsonl", [
        episode("t", reward, sample, agent_prompt="Ask.")
        for sample, reward in enumerate((1.0, 0.0))])
    run_script(script, "--episodes", path, "--model", tiny(), *flags(tmp_path / "out"))
    assert (tmp_path / "out/agent_prompt.txt").read_text() == "Ask.\n"
