"""Mutated files, flags, templates, checkpoints and full disks: a sentence or a right result, never a traceback.

Run: pytest tests/test_inputs.py
"""

import contextlib
import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import TEMPLATES, UNNESTED, byte_tokenizer, run_script
from test_critic import dialogue, episode, write_episodes

import collect
import evaluate
import train_critic
import train_policy
from colbench import encode_dialogue, encode_prompt, load_model, load_tokenizer, read_episodes, read_tasks, render

JUNK = [None, True, False, 0, 1, -1, 3.5, 10**30, math.nan, math.inf, -math.inf, "", " ", "1", "no", "x" * 5000, "\ud800", "\0",
        "<end>", [], [None], [[]], ["a", 1], {}, {"role": "user"}, {"a": {}}]
CUTS = [b"", b"\xff\xfe", b"\0", b"{", b"}", b",", b"[1]", b"null", b'"text"', b"1e999", b"NaN", b"\xef\xbb\xbf", b"[" * 9000]


def row_of(kind):
    """A sound row of a file, with every field that the file can have."""
    ranked = {"task_id": "t", "sample": 0, "turn": 1, "messages": dialogue("task", "what?", "this"),
              "candidates": ["a", "b", "c"], "finished": [True, False, True], "advantages": [0.5, -0.25, 0.0]}
    whole = episode("t", 1.0) | {"reasons": {"a": "passed"}, "agent": "x", "human": "y", "seed": 0, "agent_tokens": 7}
    whole["dialogue_history"][1] |= {"output": "raw", "finished": True}
    return {"task": whole["task"] | {"hidden_information": "h"}, "episode": whole, "candidates": ranked}[kind]


def places(value, path=()):
    """Every place inside a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def mutated(draw, row):
    """The line of a row with one to three faults in it: a value replaced, removed, doubled or renamed, or bytes cut."""
    row = json.loads(json.dumps(row))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice(list(places(row))[1:] or [("task_id",)])
        parent = row
        for key in path[:-1]:
            parent = parent[key]
        fault = draw.choice(("replace", "replace", "remove", "double", "rename"))
        if fault == "replace" or isinstance(parent, list) and fault == "rename":
            parent[path[-1]] = copy.deepcopy(draw.choice(JUNK))
        elif fault == "remove":
            del parent[path[-1]]
        elif fault == "double" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        elif isinstance(parent, dict):
            parent[draw.choice(("role", "content", "reward", "extra"))] = copy.deepcopy(parent.get(path[-1]))
    line = json.dumps(row).encode()
    if draw.random() < 0.15:
        start = draw.randrange(len(line))
        line = line[:start] + draw.choice(CUTS) + line[start + draw.randrange(1 + len(line) - start):]
    return line.replace(b"\n", b" ")


# -----------------------------------------------------------------------------
# Task, episode and candidate files

TOKENIZER = byte_tokenizer()


def use_tasks(path):
    for task in read_tasks(path):
        assert isinstance(task["task_id"], str) and task["problem_description"] is not None and task["ground_truth"].strip()
        assert task["domain"] == "frontend" or all(isinstance(call, str) for call in task["test_cases"].values())


def use_episodes(path):
    episodes, _ = train_critic.load_episodes([path])
    for row in episodes:
        assert type(row["reward"]) in (int, float) and 0 <= row["reward"] <= 1.000001
        assert row["success"] is (row["reward"] == 1 if row["task"]["domain"] == "backend" else None)
        assert type(row["sample"]) is int and row["turns"] == len(row["dialogue_history"]) // 2 >= 1
        assert 0 <= row["leak"] <= 1 and row["error"] is None
        for message in row["dialogue_history"]:
            assert message.get("finished") in (None, True, False) and isinstance(message["content"], str)
    groups = train_critic.group_by_task(episodes)
    for flags in (["--pairs", "all"], []):
        args = train_critic.parse_args(["--episodes", path, "--model", "m", "--output", "o", "--max_length", "400", *flags])
        items, _ = train_critic.pair_items(TOKENIZER, groups, sorted(groups), args, "ground_truth")
        assert all(item.rewards[0] > item.rewards[1] for item in items)
    list(train_critic.states_of(episodes))
    evaluate.score({"ours": [read_episodes(path)]}, FLAGS["evaluate"])


def use_candidates(path):
    rows = train_policy.read_candidates(path)
    assert all(math.isfinite(value) for row in rows for value in row["advantages"])
    items, report = train_policy.candidate_items(TOKENIZER, rows, FLAGS["policy"])
    assert report["states"] == len(rows) and all(row.ids for item in items for row in item.rows)


FLAGS = {"policy": train_policy.parse_args("--method sweet --episodes e --model m --output o --candidates c".split()),
         "evaluate": evaluate.parse_args("--episodes e --output o --draws 100".split())}
USES = {"task": use_tasks, "episode": use_episodes, "candidates": use_candidates}


@pytest.mark.parametrize("kind, count", [(kind, 700) for kind in USES])
def test_mutated_files_are_a_sentence_with_file_and_line_or_a_right_result(tmp_path, kind, count):
    draw, refused = random.Random(kind), 0
    other = row_of(kind)
    other = other | ({"task_id": "u"} if kind != "episode" else {"sample": 1, "reward": 0.5, "success": False})
    for number in range(count):
        path = tmp_path / "rows.jsonl"
        line = mutated(draw, row_of(kind))
        path.write_bytes(json.dumps(other).encode() + b"\n" + line + b"\n")
        try:
            USES[kind](str(path))
        except SystemExit as error:
            refused += 1
            assert re.match(rf"{re.escape(str(path))}: line [12]\b.*(found .*expected|of another)", str(error), re.S), (
                number, line, error)
        except Exception as error:
            raise AssertionError(f"mutation {number} of {kind}: {line!r}") from error
    assert count / 3 < refused < count


@pytest.mark.parametrize("change, named", [
    ({"reward": True}, "'reward' of type bool"), ({"reward": "1"}, "'reward' of type str"),
    ({"reward": math.nan}, "reward nan"), ({"reward": math.inf}, "reward inf"), ({"reward": None, "error": ""}, "'reward'"),
    ({"success": "yes"}, "'success'"), ({"success": True, "reward": 0.5}, "success True with reward 0.5"),
    ({"sample": "0"}, "'sample'"), ({"sample": -1}, "sample -1"), ({"sample": True}, "'sample' of type bool"),
    ({"leak": "a lot"}, "'leak'"), ({"leak": 2}, "leak 2"), ({"answer": 5}, "'answer'"), ({"error": True}, "'error'"),
    ({"agent_prompt": []}, "'agent_prompt'"), ({"reasons": "all passed"}, "'reasons'"),
])
def test_a_value_of_another_kind_is_never_taken_for_the_right_one(tmp_path, change, named):
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(episode("t", 1.0) | change) + "\n")
    with pytest.raises(SystemExit, match=f"line 1: found .*{named}.*expected"):
        read_episodes(path)


def test_finished_is_yes_no_or_unsaid_and_turns_are_counted(tmp_path):
    path, row = tmp_path / "episodes.jsonl", episode("t", 1.0) | {"turns": 77}
    row["dialogue_history"][1]["finished"] = None
    path.write_text(json.dumps(row) + "\n")
    read, = read_episodes(path)
    encoded, _ = train_critic.dialogue_row(TOKENIZER, read, "none", 8192)
    assert read["turns"] == 2 and encoded.ids.count(TOKENIZER.eos_token_id) == len(read["dialogue_history"])
    row["dialogue_history"][1]["finished"] = "no"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit, match="'finished' of type str"):
        read_episodes(path)


# -----------------------------------------------------------------------------
# Flags

SCRIPTS = {
    collect: "--tasks toy:backend:train --agent scripted --output {}/e.jsonl",
    train_critic: "--episodes e --model m --output o",
    train_policy: "--method mtdpo --episodes e --model m --output o",
    evaluate: "--tasks toy:backend:test --agent scripted --output o",
}
VALUES = ["-1", "0", "1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "", " ", "x", "True", "None", "0.5", "[]",
          "\0", "toy", "toy:backend", "http://", "--beta"]
RANGES = ("warmup", "holdout", "nll", "beta", "lr", "margin", "max_norm", "seed", "success_reward", "min_gap", "temperature",
          "human_temperature", "leak_threshold")  # numbers that may be 0


@pytest.mark.parametrize("script", [collect, train_critic, train_policy, evaluate], ids=lambda script: script.__name__)
def test_mutated_flags_stop_at_once_or_hold_numbers_in_their_range(tmp_path, script, capsys):
    draw, given = random.Random(script.__name__), SCRIPTS[script].format(tmp_path).split()
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    names = sorted(set(re.findall(r"--[a-z_]+", capsys.readouterr().out)) - {"--help"})
    for _ in range(200):
        argv = [*given, *(text for _ in range(draw.choice((1, 1, 2))) for text in (draw.choice(names), draw.choice(VALUES)))]
        try:
            args = script.parse_args(argv)
        except SystemExit as error:  # argparse has printed its sentence and exits with 2
            assert error.code == 2 and "error: " in capsys.readouterr().err or re.search(
                "found .*expected|needs --method|but no", str(error)), (argv, error)
            continue
        for name, value in vars(args).items():
            if type(value) in (int, float):
                assert math.isfinite(value) and (value > 0 or value == 0 and name in RANGES or name == "seed"), (argv, name)


def test_an_input_that_is_not_there_is_named_and_nothing_is_made(tiny, tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    result = run_script("train_policy.py", "--method", "sweet", "--candidates", tmp_path / "none.jsonl", "--episodes", episodes,
                        "--model", tiny(), "--output", tmp_path / "policy", check=False)
    assert result.returncode == 1 and f"{tmp_path / 'none.jsonl'}: no such file; expected an input" in result.stderr
    assert not (tmp_path / "policy").exists()


def test_a_file_that_collect_did_not_write_is_never_overwritten(tmp_path):
    precious = tmp_path / "tasks.jsonl"
    precious.write_text("mine\n")
    with pytest.raises(SystemExit, match="did not write.*choose another --output"):
        collect.parse_args(["--tasks", str(precious), "--agent", "scripted", "--output", str(precious)])
    assert precious.read_text() == "mine\n"


# -----------------------------------------------------------------------------
# Chat templates


def test_mutated_templates_are_refused_in_a_sentence_or_give_the_turns_of_the_dialogue():
    draw, told = random.Random(0), 0
    messages = [{"role": "system", "content": "rules"}, *dialogue("ask", "what?", "this", "I WANT TO ANSWER: x")]
    for _ in range(300):
        template = draw.choice([*TEMPLATES.values(), UNNESTED])
        start = draw.randrange(len(template))
        template = template[:start] + draw.choice(["", "{", "%}", "{{ x }}", "{{ messages[9] }}", "'", "{{ 1 / 0 }}", "<end>",
                                                   "{% for %}"]) + template[start + draw.choice((0, 1, 5, 40)):]
        tokenizer = byte_tokenizer(template)
        try:
            encode_prompt(tokenizer, messages[:2])
            ids, turn_index = encode_dialogue(tokenizer, messages)
        except SystemExit as error:
            told += 1
            assert "template" in str(error) and "expected" in str(error), (template, error)
            continue
        except Exception as error:
            raise AssertionError(template) from error
        for turn, text in enumerate(("what?", "I WANT TO ANSWER: x")):
            said = tokenizer.decode([token for token, index in zip(ids, turn_index, strict=True) if index == turn])
            assert said.startswith(text) and len(ids) == len(turn_index)
    assert 50 < told < 300


def test_a_template_without_a_closing_token_is_refused():
    with pytest.raises(SystemExit, match="closes no agent turn"):
        encode_dialogue(byte_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}"), dialogue("a", "b"))
    assert render(byte_tokenizer(), dialogue("a"))


# -----------------------------------------------------------------------------
# Checkpoints


def break_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


def another_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))


def truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def lose_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickle_only(folder):
    """Weights whose loading would run a stranger's code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(folder / "owned").encode() + b"'\ntR.")


def no_config(folder):
    (folder / "config.json").unlink()


def no_json(folder):
    (folder / "config.json").write_text("{broken")


@pytest.mark.parametrize("damage", [break_config, another_architecture, truncate, lose_a_tensor, pickle_only, no_config,
                                    no_json])
def test_a_damaged_checkpoint_is_a_sentence_that_names_it(tiny, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(tiny(), folder)
    damage(folder)
    with pytest.raises(SystemExit, match=rf"{folder}: .*(expected|train it again)"):
        load_tokenizer(str(folder))
        load_model(str(folder))
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"flags": 3}', '{"flags": {}, "inputs": {}}',
                                  '{"flags": {"head": "logratio"}, "inputs": {}}'])
def test_a_critic_without_its_record_is_a_sentence(tiny, tmp_path, text):
    shutil.copytree(tiny(), tmp_path / "critic")
    (tmp_path / "critic/run.json").write_text(text)
    with pytest.raises(SystemExit, match="critic.*expected"):
        train_critic.Critic(str(tmp_path / "critic"), "cpu")


def test_a_training_state_with_a_pickled_call_is_not_executed(tiny, tmp_path):
    (tmp_path / "output/state").mkdir(parents=True)
    (tmp_path / "output/state/rank0.pt").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR.")
    model = load_model(tiny())
    with pytest.raises(SystemExit, match="state.*remove the folder"):
        train_critic.load_state(tmp_path / "output/state", model, torch.optim.AdamW(model.parameters()),
                                collect.Process(0, 1, "cpu"))
    assert not (tmp_path / "owned").exists()


def test_a_checkpoint_of_strangers_is_never_taken_for_the_output(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "model")
    args = train_critic.parse_args(["--episodes", str(write_episodes(tmp_path / "e.jsonl")), "--model", "m", "--output", "o"])
    with pytest.raises(SystemExit, match="none of these scripts wrote"):
        collect.claim_output(tmp_path / "model/run.json", args, args.episodes, collect.Process(0, 1, "cpu"), ())
    assert not (tmp_path / "model/run.json").exists()


def test_flags_that_change_cost_only_may_differ_when_a_run_goes_on(tmp_path):
    command = ["--episodes", str(write_episodes(tmp_path / "e.jsonl")), "--model", "m", "--output", "o"]

    def claim(*more):
        collect.claim_output(tmp_path / "o/run.json", train_critic.parse_args(command + list(more)), command[1:2],
                             collect.Process(0, 1, "cpu"), train_critic.TRAINING_COST_FLAGS)

    claim("--batch_size", "4")
    claim()  # the first one has made nothing, a typing error mostly
    (tmp_path / "o/metrics.jsonl").touch()
    claim("--micro_batch_size", "2", "--checkpointing")
    with pytest.raises(SystemExit, match="differs in batch_size; expected the same command"):
        claim("--batch_size", "2")


def test_a_critic_that_was_trained_anew_is_another_input(tmp_path):
    (tmp_path / "critic").mkdir()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/candidates.jsonl").touch()
    args = train_policy.parse_args(["--method", "sweet", "--critic", str(tmp_path / "critic"), "--episodes", "e",
                                    "--model", "m", "--output", "o"])
    for number, refused in enumerate((False, True)):
        (tmp_path / "critic/run.json").write_text(json.dumps({"flags": {"seed": number}, "inputs": {}}))
        with pytest.raises(SystemExit, match="differs in .*critic/run.json") if refused else contextlib.nullcontext():
            collect.claim_output(tmp_path / "policy/run.json", args, collect.records(args.model, args.critic),
                                 collect.Process(0, 1, "cpu"), ())


def test_instructions_that_were_edited_do_not_go_on_with_episodes_of_the_old_ones(tmp_path):
    (tmp_path / "prompt.txt").write_text("Ask.")
    args = collect.parse_args(["--tasks", "toy:backend:train", "--agent", "scripted", "--agent_prompt",
                               str(tmp_path / "prompt.txt"), "--output", str(tmp_path / "episodes.jsonl")])
    for text, refused in (("Ask.", False), ("Answer.", True)):
        (tmp_path / "prompt.txt").write_text(text)
        with pytest.raises(SystemExit, match="differs in .*prompt.txt") if refused else contextlib.nullcontext():
            collect.claim_rollout(f"{args.output}.run.json", args, collect.Process(0, 1, "cpu"))
        (tmp_path / "episodes.jsonl").touch()


def test_a_wrong_critic_stops_before_anything_is_sampled(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "no_critic")
    result = run_script("train_policy.py", "--method", "sweet", "--episodes", write_episodes(tmp_path / "episodes.jsonl"),
                        "--model", tiny(), "--critic", tmp_path / "no_critic", "--output", tmp_path / "policy", check=False)
    assert result.returncode == 1 and "found no run.json" in result.stderr and not (tmp_path / "policy").exists()


@pytest.mark.parametrize("flags", [["--method", "mtdpo", "--critic", "c"], ["--method", "rft", "--privileged_episodes", "e"],
                                   ["--method", "sweet", "--critic", "c", "--candidates", "r"]])
def test_a_flag_that_would_do_nothing_is_refused(flags):
    with pytest.raises(SystemExit, match="found .*expected"):
        train_policy.parse_args([*flags, "--episodes", "e", "--model", "m", "--output", "o"])


def test_real_tasks_need_a_human(tmp_path):
    task = {"problem_description": "d", "ground_truth": "def f(): return 1", "test_cases": {"a": "f()"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    result = run_script("collect.py", "--tasks", tmp_path / "tasks.jsonl", "--agent", "scripted", "--output",
                        tmp_path / "e.jsonl", check=False)
    assert result.returncode == 1 and "found no --human" in result.stderr and not (tmp_path / "e.jsonl").exists()


# -----------------------------------------------------------------------------
# Disks


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(kilobytes) -> a folder with so much space; as root only."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kilobytes, *options):
        if os.geteuid():
            pytest.skip("a small disk can be mounted by root only")
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={kilobytes}k", *options]), "tmpfs", folder]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this machine does not let root mount a tmpfs")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder, *options):
    subprocess.run(["mount", "-o", ",".join(["remount", *options]), folder], check=True)


def rollout(folder, *more):
    return ["--tasks", "toy:backend:train", "--num_tasks", 30, "--samples_per_task", 1, "--agent", "scripted",
            "--output", folder / "episodes.jsonl", *more]


def test_a_full_disk_stops_collection_with_a_sentence_and_it_goes_on_when_there_is_space(small_disk, tmp_path):
    folder = small_disk(24)
    done = run_script("collect.py", *rollout(folder), check=False)
    assert done.returncode == 1 and "No space left" in done.stderr + done.stdout or "part of a line" in done.stderr, done.stderr
    assert "give the same command again" in done.stderr and "Traceback" not in done.stderr
    remount(folder, "size=10000k")
    run_script("collect.py", *rollout(folder))
    run_script("collect.py", *rollout(tmp_path / "whole"))
    assert (folder / "episodes.jsonl").read_bytes() == (tmp_path / "whole/episodes.jsonl").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["episodes.jsonl", "episodes.jsonl.run.json"]


def test_a_state_that_does_not_fit_on_the_disk_is_no_state(small_disk, tiny):
    folder, model, process = small_disk(60), load_model(tiny()), collect.Process(0, 1, "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OSError, match="could not be written"):
        train_critic.save_state(folder / "state", 1, model, optimizer, process)
    assert train_critic.load_state(folder / "state", model, optimizer, process) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [60, 110])  # full while saving a state, and while saving the checkpoint
def test_a_full_disk_stops_training_with_a_sentence_and_it_goes_on_when_there_is_space(small_disk, tiny, tmp_path, kilobytes):
    folder, episodes = small_disk(kilobytes), write_episodes(tmp_path / "e.jsonl")
    command = ["--method", "mtdpo", "--episodes", episodes, "--model", tiny(), "--batch_size", 4, "--max_length", 600,
               "--max_steps", 2, "--epochs", 1, "--save_every", 1 if kilobytes == 60 else 9, "--output"]
    done = run_script("train_policy.py", *command, folder, check=False)
    assert done.returncode == 1 and "The disk or a file failed" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "config.json").exists()
    remount(folder, "size=10000k")
    run_script("train_policy.py", *command, folder)
    run_script("train_policy.py", *command, tmp_path / "whole")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_a_folder_that_is_read_only_is_a_sentence(small_disk):
    folder = small_disk(100)
    remount(folder, "ro")
    done = run_script("collect.py", *rollout(folder), check=False)
    assert done.returncode == 1 and "Read-only" in done.stderr and "Traceback" not in done.stderr
    assert not list(Path(folder).iterdir())
