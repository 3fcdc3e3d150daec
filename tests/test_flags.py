"""Flags: what is misspelt, out of range or without effect is refused, in a sentence."""

import math
import random
import re

import pytest

import collect
import evaluate
import report.__main__ as report
import train_critic
import train_policy
from judge.pages import PAPERS_CLIP
from variants import best_of_n

SCRIPTS = {
    collect: "--tasks toy:backend:train --agent scripted --output {}/e.jsonl",
    train_critic: "--episodes e --model m --output o",
    train_policy: "--episodes e --model m --output o",
    evaluate: "base=e.jsonl --output o",
}
VALUES = [
    "-1", "0", "1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "", " ", "x", "True",
    "None", "0.5", "[]", "\0", "toy", "toy:backend", "http://", "--beta",
]
MAY_BE_ZERO = (
    "holdout", "nll", "beta", "lr", "margin", "seed", "temperature", "human_temperature",
    "lora_rank", "save_minutes", "states_fraction", "checkpointing_every")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_mutated_flags_stop_at_once_or_hold_numbers_in_their_range(tmp_path, script, capsys):
    draw, given = random.Random(script.__name__), SCRIPTS[script].format(tmp_path).split()
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    names = sorted(set(re.findall(r"--[a-z_]+", capsys.readouterr().out)) - {"--help"})
    for _ in range(200):
        argv = list(given)
        for _ in range(draw.choice((1, 1, 2))):
            argv += [draw.choice(names), draw.choice(VALUES)]
        try:
            args = script.parse_args(argv)
        except SystemExit as error:
            printed = capsys.readouterr().err
            by_argparse = error.code == 2 and "error: " in printed
            sentence = re.search("found .*expected", str(error), re.S)
            assert by_argparse or sentence, (argv, error)
            continue
        for name, value in vars(args).items():
            if type(value) in (int, float):
                assert math.isfinite(value), (argv, name)
                assert value > 0 or (value == 0 and name in MAY_BE_ZERO), (
                    argv, f"--{name}: least=0, and a place in MAY_BE_ZERO, or above=0")


@pytest.mark.parametrize("script, flag", [
    (collect, "--num_taks"), (collect, "--samples-per-task=3"), (collect, "--zzz"),
    (train_critic, "--normalize"), (train_policy, "--candidate_file"), (evaluate, "--outptu"),
])
def test_a_mistyped_flag_is_refused_by_name(script, flag, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.parse_args([*SCRIPTS[script].format(tmp_path).split(), flag, "3"])
    printed = capsys.readouterr().err
    assert f"error: unrecognized arguments: {flag} 3 (see --help)" in printed
    assert ("did you mean --" in printed) == (flag != "--zzz")


def test_files_may_follow_one_flag_or_one_flag_each():
    for files in (["a", "b"], ["a", "--episodes", "b"]):
        given = ["--model", "m", "--output", "o", "--episodes", *files]
        assert train_critic.parse_args(given).episodes == ["a", "b"]
        assert train_policy.parse_args(given).episodes == ["a", "b"]


def test_an_abbreviation_is_fine(tmp_path):
    args = collect.parse_args([*SCRIPTS[collect].format(tmp_path).split(), "--num_t", "7"])
    assert args.num_tasks == 7


# -----------------------------------------------------------------------------
# Flags that would do nothing

BASES = {collect: "--agent scripted --output o", train_critic: "--output o",
         train_policy: "--model m --output o", report: "",
         best_of_n: "--agent scripted --n 2 --critic critic --output o"}
TASKS, STATES = "--tasks toy:backend:train", "--states e.jsonl"
TRAIN, RANK = "--episodes e --model m", "--candidates c"


def parsed(script, words):
    return script.parse_args([*words.split(), *BASES[script].split()])


@pytest.mark.parametrize("script, words, found", [
    (collect, f"{TASKS} --states_per_task 2", "--states_per_task 2, .* without --states"),
    (collect, f"{TASKS} --num_candidates 4", "--num_candidates 4, .* without --states"),
    (collect, f"{STATES} --num_tasks 2", "--num_tasks 2, .* without --tasks"),
    (collect, f"{STATES} --samples_per_task 5", "--samples_per_task 5, .* without --tasks"),
    (collect, f"{STATES} --human http://h/v1", "--human http://h/v1, .* without --tasks"),
    (collect, f"{STATES} --states_fraction 1.5", "--states_fraction 1.5"),
    (collect, f"{STATES} --num_candidates 0", "--num_candidates 0"),
    (collect, f"{TASKS} --temperature 0.5", "--temperature 0.5, .* by a scripted agent"),
    (collect, f"{TASKS} --max_new_tokens 9", "--max_new_tokens 9, .* ignored"),
    (collect, f"{TASKS} --agent_model m", "--agent_model m, .* not the address of a"),
    (collect, f"{TASKS} --human_model m", "--human_model m, .* not the address of a"),
    (collect, f"{TASKS} --dtype float32", "--dtype float32, .* where no model computes"),
    (collect, f"{TASKS} --human_prompt p", "--human_prompt p, .* by a scripted human"),
    (collect, f"{TASKS} --human_temperature 1", "--human_temperature 1.0, .* ignored"),
    (train_critic, f"{TRAIN} --ranked r", "--ranked.*ignored without --candidates"),
    (train_critic, f"{TRAIN} --reference plain", "--reference.*ignored without --candidates"),
    (train_critic, f"{TRAIN} {RANK} --reference plain --privileged none",
     "--reference plain.*ignored by a critic that does not"),
    (train_critic, f"{RANK} --lr 1", "--lr 1.*ignored without --episodes"),
    (train_critic, f"{RANK} --pairs all", "--pairs all.*ignored without --episodes"),
    (train_critic, f"{RANK} --epochs 9", "--epochs 9.*ignored without --episodes"),
    (train_critic, f"{RANK} --lora_rank 1", "--lora_rank 1.*ignored without --episodes"),
    (train_critic, f"{RANK} --no-reshard", "--no-reshard.*ignored without --episodes"),
    (train_critic, f"{TRAIN} --lora_alpha 3", "--lora_alpha .*ignored without --lora_rank"),
    (train_policy, "--episodes e --lora_alpha 3", "--lora_alpha .*ignored without --lora_rank"),
    *[(train_critic, f"{TRAIN} --lora_rank 2 --lora_alpha {alpha}", "--lora_alpha ")
      for alpha in ("0", "-1", "nan")],  # 0 is not "not given"
    (train_policy, f"{RANK} --pairs all", "--pairs .*ignored without --episodes"),
    (train_policy, f"{RANK} --margin 0.5", "--margin .*ignored without --episodes"),
    (train_policy, "--episodes e --pairing positive_vs_negative",
     "--pairing .*ignored without --candidates"),
    (train_policy, "--episodes e --pairs_per_state 2",
     "--pairs_per_state .*ignored without --candidates"),
    (best_of_n, f"{TASKS} --critic_model m", "--critic_model m, which is ignored because critic"),
    (best_of_n, f"{TASKS} --critic_temperature 1",
     "--critic_temperature 1.0, which is ignored because critic is not a grader"),
    (best_of_n, f"{TASKS} --critic_max_new_tokens 9", "--critic_max_new_tokens 9, .* not a grader"),
    (best_of_n, STATES, "--n 2, which is ignored without --tasks"),
    (report, "--output r.html", "neither episodes nor --metrics"),
    (report, "a=e.jsonl --output r.json", "--output r.json"),
    (report, "--metrics m=m.jsonl --critic c --output r.html", "--critic c, which is ignored"),
    (report, "pairs r.jsonl --pairs_per_state 0 --output p", "--pairs_per_state 0"),
])
def test_flags_without_effect_or_out_of_range_are_refused(script, words, found):
    with pytest.raises(SystemExit, match=f"found {found}.*expected"):
        parsed(script, words)


@pytest.mark.parametrize("script, words", [
    (train_critic, f"{TRAIN} {RANK} --ranked r --reference plain"),
    (train_critic, f"{TRAIN} --lora_rank 2 --lora_alpha 3"),
    (train_policy, "--episodes e --lora_rank 2 --lora_alpha 3 --pairs all --margin 0.5"),
    (train_policy, f"{RANK} --pairing positive_vs_negative --pairs_per_state 2"),
])
def test_the_same_flags_are_taken_where_they_have_an_effect(script, words):
    assert parsed(script, words)


@pytest.mark.parametrize("name", ["--candidates", "--episodes"])
def test_the_name_of_no_file_is_refused(name):
    with pytest.raises(SystemExit, match=f"found {name} with an empty text"):
        train_critic.parse_args(["--output", "o", name, ""])


def test_the_help_of_clip_names_a_model_that_can_be_given():
    help_text = collect.collect_parser("")._option_string_actions["--clip"].help
    assert f" {PAPERS_CLIP};" in help_text
