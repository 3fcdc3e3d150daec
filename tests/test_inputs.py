"""Mutated files, damaged checkpoints, records, full disks: a sentence or a right result.

None of them may end in a traceback.
"""

import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
import threading
import types
from pathlib import Path

import pytest
import torch
from conftest import (
    byte_tokenizer, dialogue, episode, ranked_state, refusal, run_script, tiny_model, training,
    write_episodes, write_rows)
from transformers import AutoModelForCausalLM

import collect
import evaluate
import train_critic
import train_policy
from formats.read import complete_task, load_episodes, read_candidates, read_episodes, read_tasks
from runtime import checkpoints
from runtime.files import write_atomically, write_new
from runtime.flags import COST_FLAGS
from runtime.models import load_model, load_tokenizer, make_head_fp32, refuse_untrainable
from runtime.processes import Process
from runtime.record import claim_output, run_files

TOKENIZER = byte_tokenizer()
PROCESS = Process(0, 1, "cpu")

# -----------------------------------------------------------------------------
# Mutations

JUNK = [
    None, True, False, 0, 1, -1, 3.5, 10**30, math.nan, math.inf, -math.inf,
    "", " ", "1", "no", "x" * 5000, "\ud800", "\0", "<end>",
    [], [None], [[]], ["a", 1], {}, {"role": "user"}, {"a": {}},
]
CUTS = [
    b"", b"\xff\xfe", b"\0", b"{", b"}", b",", b"[1]", b"null", b'"text"', b"1e999", b"NaN",
    b"\xef\xbb\xbf", b"[" * 9000,
]


def spoil(draw, value):
    """Replace, remove, double or rename one of the values inside a JSON value."""
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    inner, fault = value[key], draw.choice(("replace", "replace", "remove", "move"))
    if inner and isinstance(inner, (dict, list)) and draw.random() < 0.8:
        spoil(draw, inner)
    elif fault == "replace":
        value[key] = copy.deepcopy(draw.choice(JUNK))
    elif fault == "remove":
        del value[key]
    elif isinstance(value, dict):
        value[draw.choice(("role", "content", "reward", "extra"))] = copy.deepcopy(inner)
    else:
        value.append(copy.deepcopy(inner))


def mutated(draw, row):
    """The line of a row with one to three faults in its values, or in its bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        spoil(draw, row)
    line = json.dumps(row).encode()
    if draw.random() < 0.15:
        start = draw.randrange(len(line))
        end = draw.randrange(start, len(line) + 1)
        line = line[:start] + draw.choice(CUTS) + line[end:]
    return line.replace(b"\n", b" ")


def sound_row(kind):
    """A sound row of a file, with every field that the file can have."""
    whole = episode("t", 1.0)
    if kind == "task":
        return whole["task"] | {"hidden_information": "h"}
    if kind == "episode":
        whole |= {"reasons": {"a": "passed"}, "agent": "x", "human": "y", "seed": 0}
        whole["dialogue_history"][1] |= {"output": "raw", "finished": True}
        return whole
    return ranked_state({"a": 0.5, "b": -0.25, "c": 0.0}, dialogue("task", "what?", "this"),
                        turn=1, finished=[True, False, True])


# -----------------------------------------------------------------------------
# Task, episode and candidate files


def use_tasks(path):
    for task in read_tasks(path):
        assert isinstance(task["task_id"], str)
        assert task["problem_description"] is not None and task["ground_truth"].strip()
        if task["domain"] != "frontend":
            assert all(isinstance(call, str) for call in task["test_cases"].values())


def use_episodes(path):
    episodes, _ = load_episodes([path])
    for row in episodes:
        assert type(row["reward"]) in (int, float) and 0 <= row["reward"] <= 1.000001
        success = row["reward"] == 1 if row["task"]["domain"] == "backend" else None
        assert row["success"] is success
        assert type(row["sample"]) is int
        assert row["turns"] == len(row["dialogue_history"]) // 2 >= 1
        assert 0 <= row["leak"] <= 1 and row["error"] is None
        for message in row["dialogue_history"]:
            assert message.get("finished") in (None, True, False)
            assert isinstance(message["content"], str)
    for row in episodes:
        row["row"] = train_critic.dialogue_row(TOKENIZER, row, 400, "none")
    for rule in ("all", "best_vs_rest"):
        train_critic.dialogue_pairs(episodes, rule, 0.0)
    list(collect.states_of(episodes))
    evaluate.score({"ours": [read_episodes(path)]}, draws=100)


def use_candidates(path):
    states, _ = read_candidates(path, ranked=True)
    assert all(math.isfinite(value) for state in states for value in state["advantages"])
    groups, _ = train_policy.candidate_pairs(TOKENIZER, states, "halves", 4, 8192, 0)
    assert all(row.ids for pairs in groups for pair in pairs for row in pair)


USES = {"task": use_tasks, "episode": use_episodes, "candidates": use_candidates}


@pytest.mark.parametrize("kind", USES)
def test_a_mutated_file_is_refused_with_file_and_line_or_read_right(tmp_path, kind):
    draw, refused = random.Random(kind), 0
    other = sound_row(kind)
    if kind == "episode":
        other |= {"sample": 1, "reward": 0.5, "success": False}
    else:
        other |= {"task_id": "u"}
    path = tmp_path / "rows.jsonl"
    for index in range(400):
        line = mutated(draw, sound_row(kind))
        path.write_bytes(json.dumps(other).encode() + b"\n" + line + b"\n")
        try:
            USES[kind](str(path))
        except SystemExit as error:
            refused += 1
            sentence = rf"{re.escape(str(path))}: line [12]\b.*found .*expected"
            assert re.match(sentence, str(error), re.S), (index, line, error)
        except Exception as error:
            raise AssertionError(f"mutation {index} of {kind}: {line!r}") from error
    assert 400 / 3 < refused < 400


@pytest.mark.parametrize("change, named", [
    ({"reward": True}, "'reward' of type bool"),
    ({"reward": "1"}, "'reward' of type str"),
    ({"reward": math.inf}, "reward inf"),
    ({"reward": None, "error": ""}, "'reward'"),
    ({"success": "yes"}, "'success'"),
    ({"success": True, "reward": 0.5}, "success True with reward 0.5"),
    ({"sample": "0"}, "'sample'"),
    ({"sample": -1}, "sample -1"),
    ({"sample": True}, "'sample' of type bool"),
    ({"leak": "a lot"}, "'leak'"),
    ({"leak": 2}, "leak 2"),
    ({"answer": 5}, "'answer'"),
    ({"error": True}, "'error'"),
    ({"agent_prompt": []}, "'agent_prompt'"),
    ({"reasons": "all passed"}, "'reasons'"),
    ({"dialogue_history": dialogue("t", "q")[1:]}, "dialogue_history.0. of role 'assistant'"),
    ({"dialogue_history": "text"}, "'dialogue_history' of type str"),
    ({"dialogue_history": []}, "without an agent turn"),
    ({"task": 3}, "'task' of type int"),
])
def test_a_bad_value_of_an_episode_is_refused_with_its_line(tmp_path, change, named):
    path = write_rows(tmp_path / "episodes.jsonl", [episode("t", 1.0) | change])
    with pytest.raises(SystemExit, match=f"line 1: found .*{named}.*expected"):
        read_episodes(path)


def test_failed_episodes_are_left_out_and_counted(tmp_path):
    rows = [episode("t", 1.0), episode("t", None, 1, error="human: gone")]
    found, omitted = load_episodes([write_rows(tmp_path / "e.jsonl", rows)])
    assert [row["sample"] for row in found] == [0] and omitted == 1


def test_a_field_that_is_null_is_a_field_that_is_missing(tmp_path):
    row = episode("t", 1.0) | dict.fromkeys(("sample", "turns", "leak", "reasons"))
    row["task"] |= dict.fromkeys(("domain", "hidden_information"))
    row["dialogue_history"][1]["finished"] = None
    counted = row | {"turns": 77, "sample": 1}  # turns are counted, whatever a row says
    read, other = read_episodes(write_rows(tmp_path / "episodes.jsonl", [row, counted]))
    assert (read["sample"], read["turns"], read["task"]["domain"]) == (0, 2, "backend")
    assert other["turns"] == 2
    encoded = train_policy.dialogue_row(TOKENIZER, read, 8192)
    assert encoded.ids.count(TOKENIZER.eos_token_id) == len(read["dialogue_history"])
    row["dialogue_history"][1]["finished"] = "no"
    with pytest.raises(SystemExit, match="'finished' of type str"):
        read_episodes(write_rows(tmp_path / "episodes.jsonl", [row]))
    page = {"problem_description": "A page.", "ground_truth": "<html></html>", "domain": None}
    task = complete_task(page | {"test_cases": None})
    assert task["domain"] == "frontend" and "test_cases" not in task
    code = {"problem_description": "Bold.", "ground_truth": "def f(x): return f'<b>{x}</b>'"}
    with pytest.raises(SystemExit, match="found no test"):
        complete_task(code | {"test_cases": {"test1": None}})


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
     "original_max_position_embeddings": 512},
])
def test_positions_that_change_with_a_batch_s_length_are_refused_beyond_that_length(rope, tmp_path):
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer)
    model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    limit = rope.get("original_max_position_embeddings", 4096)
    refuse_untrainable(str(tmp_path), limit)
    beyond = f"type {rope['rope_type']}.*at most --max_length {limit}"
    with pytest.raises(SystemExit, match=beyond):
        refuse_untrainable(str(tmp_path), limit + 1)


@pytest.mark.parametrize("trainer, data", [
    (train_critic, "--episodes"), (train_policy, "--candidates")])
def test_a_trainer_refuses_a_quantised_model_before_it_reads_its_data(trainer, data, tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = write_rows(tmp_path / "rows.jsonl", [{}])
    with pytest.raises(SystemExit, match="found a quantised model .awq., expected floating-point"):
        trainer.main(trainer.parse_args([
            data, str(rows), "--model", str(tmp_path), "--output", str(tmp_path / "o")]))


# -----------------------------------------------------------------------------
# Inputs and outputs that are none

def test_an_input_that_does_not_exist_is_named_and_nothing_is_made(tiny, tmp_path):
    missing = tmp_path / "none.jsonl"
    said = refusal("train_policy.py", "--candidates", missing, "--model", tiny(),
                   "--output", tmp_path / "policy")
    assert f"{missing}: no such file; expected" in said
    assert not (tmp_path / "policy").exists()


def test_a_pipe_is_no_input_and_is_called_one(tmp_path):
    os.mkfifo(tmp_path / "tasks")
    with pytest.raises(SystemExit, match="tasks: found a pipe or a device; expected a JSONL file"):
        read_tasks(tmp_path / "tasks")


def test_an_unfinished_rollout_or_ranking_is_no_input(tmp_path):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    for left, read in (("episodes.jsonl.rank0", read_episodes),
                       ("other.jsonl.rank1", read_episodes), ("c.jsonl.rank1", read_candidates)):
        shutil.copy(episodes, tmp_path / left)
        path = tmp_path / left.rsplit(".", 1)[0]
        with pytest.raises(SystemExit, match=f"{path}: found {left} beside it.*rerun its command"):
            read(path)
    (tmp_path / "episodes.jsonl.rank0").unlink()
    assert read_episodes(episodes)


@pytest.mark.parametrize("folder", ["file/critic", "file"])
def test_an_output_that_cannot_be_a_directory_is_said_to_be_none(tiny, tmp_path, folder):
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    (tmp_path / "file").touch()
    said = refusal("train_critic.py", *training(episodes, tiny(), tmp_path / folder))
    assert "choose another --output" in said and "rerun" not in said


# -----------------------------------------------------------------------------
# Checkpoints


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickled_call(folder):
    """A pickle that would make the file `owned` when it is loaded."""
    return b"cos\nsystem\n(S'touch " + str(folder / "owned").encode() + b"'\ntR."


def pickle_only(folder):
    """Weights whose loading would run a stranger's code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled_call(folder))


DAMAGES = {
    "another size": lambda folder: change_config(folder, hidden_size=64),
    "another architecture": lambda folder: change_config(
        folder, model_type="gpt2", architectures=["GPT2LMHeadModel"]),
    "truncated": truncate, "without a tensor": lose_a_tensor, "pickled": pickle_only,
    "without config": lambda folder: (folder / "config.json").unlink(),
    "broken config": lambda folder: (folder / "config.json").write_text("{broken"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_a_sentence_that_names_it(tiny, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(tiny(), folder)
    damage(folder)
    with pytest.raises(SystemExit, match=rf"(?s){re.escape(str(folder))}: .*expected"):
        load_tokenizer(str(folder))
        load_model(str(folder))
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("spec", ["runs/bsae", "./bsae", "/none/base"])
def test_a_mistyped_directory_is_refused_before_the_output_is_claimed(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/base", "base"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
    flags = ["--tasks", "toy:backend:train", "--agent", spec, "--output", "out/e.jsonl"]
    message = f"{re.escape(spec)}: no such directory; .*Hugging Face name$"
    with pytest.raises(SystemExit, match=message):
        collect.main(collect.parse_args(flags))
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_neither_a_directory_nor_on_the_hub_says_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/base").mkdir(parents=True)  # a downloaded model, beside others of the Hub

    def no_hub(path):
        raise OSError(f"{path} is not on the Hub")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", no_hub)
    with pytest.raises(SystemExit, match="no such directory here, and the .* Hub has no such model"
                                         ".*bsae is not on the Hub"):
        load_tokenizer("Qwen/bsae")


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"flags": 3}', '{"flags": {}, "inputs": {}}',
    '{"flags": {"model": "m"}, "inputs": {}}',
])
def test_a_critic_without_its_record_is_a_sentence(tiny, tmp_path, text):
    shutil.copytree(tiny(), tmp_path / "critic")
    (tmp_path / "critic/run.json").write_text(text)
    with pytest.raises(SystemExit, match=rf"{re.escape(str(tmp_path / 'critic'))}.*expected"):
        train_critic.Critic(str(tmp_path / "critic"), "cpu")


def test_a_pickled_call_in_a_training_state_is_not_executed(tiny, tmp_path):
    state = tmp_path / "output/resume"
    state.mkdir(parents=True)
    (state / "rank0.pt").write_bytes(pickled_call(tmp_path))
    model = load_model(tiny())
    with pytest.raises(SystemExit, match=rf"{re.escape(str(state))}.*found .*remove the folder"):
        checkpoints.load_state(state, model, torch.optim.AdamW(model.parameters()), PROCESS)
    assert not (tmp_path / "owned").exists()


def test_a_training_state_that_was_cut_anywhere_is_a_sentence_that_names_it(tmp_path):
    state = tmp_path / "rank0.pt"
    torch.save({"step": 3, "world": 1, "parameters": [torch.ones(3000)]}, state)
    assert checkpoints.read_state(tmp_path, PROCESS)["step"] == 3
    whole = state.read_bytes()
    for length in range(0, len(whole), 997):
        state.write_bytes(whole[:length])
        with pytest.raises(SystemExit, match=f"{state}: found a state that cannot be read"):
            checkpoints.read_state(tmp_path, PROCESS)


def test_a_run_that_max_steps_cut_is_complete_for_any_number_of_processes(tmp_path):
    (tmp_path / "resume").mkdir()
    (tmp_path / "config.json").touch()
    for rank in (0, 1):
        torch.save({"step": 3, "world": 2}, tmp_path / f"resume/rank{rank}.pt")
    assert checkpoints.is_complete(tmp_path, 3, PROCESS)
    with pytest.raises(SystemExit, match="found the state of a run of 2 processes, expected 1"):
        checkpoints.is_complete(tmp_path, 4, PROCESS)


def test_a_rank_that_does_not_see_the_leaders_state_starts_from_no_other_weights(tiny, tmp_path):
    model, state = load_model(tiny()), tmp_path / "resume"
    rank = types.SimpleNamespace(rank=1, world=2, from_leader=lambda mine: state)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(SystemExit, match=f"{state}: found the state of a run of 0 processes"):
        checkpoints.load_state(tmp_path / "unseen", model, optimizer, rank)


# -----------------------------------------------------------------------------
# The record of a run


def critic_flags(folder, *more):
    """Episodes, and the flags of a critic that is trained on them."""
    episodes = str(write_episodes(folder / "e.jsonl"))
    args = train_critic.parse_args(["--episodes", episodes, "--model", "m", "--output", "o", *more])
    return [episodes], vars(args)


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_model_stored_in_bf16_opens_in_fp32_as_transformers_opens_it(family, tmp_path):
    tiny_model(byte_tokenizer("llama3"), family).bfloat16().save_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
    assert torch.equal(load_model(str(tmp_path), dtype="float32")(ids).logits, expected)


def test_a_model_that_needs_another_package_is_a_sentence(tiny):
    def from_pretrained(*_, **__):
        raise ImportError("Using mxfp4 requires Accelerate")

    quantised = types.SimpleNamespace(from_pretrained=from_pretrained)
    with pytest.raises(SystemExit, match="could not open the model .ImportError: Using mxfp4 req"):
        load_model(tiny(), model_class=quantised)


def test_a_node_waits_for_the_leaders_record_and_refuses_a_directory_of_its_own(
        monkeypatch, tmp_path):
    follower = Process(1, 1, "cpu")  # not the leader; in a world of 1 its barriers return at once
    inputs, flags = critic_flags(tmp_path)
    own, shared = tmp_path / "own/run.json", tmp_path / "shared/run.json"
    monkeypatch.setattr("runtime.record.SEEN_WITHIN", 0.1)
    with pytest.raises(SystemExit, match="expected one directory that all nodes share"):
        claim_output(own, flags, inputs, follower)
    monkeypatch.setattr("runtime.record.SEEN_WITHIN", 60)
    leader = threading.Timer(0.2, claim_output, (shared, flags, inputs, PROCESS))
    leader.start()
    claim_output(shared, flags, inputs, follower)
    leader.join()


def test_a_resumed_run_may_change_flags_that_only_change_its_cost(tmp_path):
    def claim(*more):
        inputs, flags = critic_flags(tmp_path, *more)
        claim_output(tmp_path / "o/run.json", flags, inputs, PROCESS, COST_FLAGS)

    claim("--batch_size", "4")
    claim()  # the first command has made nothing yet, so it claims nothing
    (tmp_path / "o/metrics.jsonl").touch()
    claim("--micro_batch_size", "2", "--checkpointing_every", "1")
    with pytest.raises(SystemExit, match=r"in batch_size \(it was 8\); expected the same command"):
        claim("--batch_size", "2")


def test_a_retrained_model_is_another_input(tmp_path):
    critic = tmp_path / "critic"
    critic.mkdir()
    args = train_policy.parse_args(["--episodes", "e", "--model", str(critic), "--output", "o"])

    def claim(seed_of_critic):
        record = {"flags": {"seed": seed_of_critic}, "inputs": {}}
        (critic / "run.json").write_text(json.dumps(record))
        inputs = run_files(args.model)
        claim_output(tmp_path / "policy/run.json", vars(args), inputs, PROCESS, ())

    claim(0)
    (tmp_path / "policy/metrics.jsonl").touch()
    with pytest.raises(SystemExit, match="differs in .*critic/run.json"):
        claim(1)
    (critic / "run.json").unlink()  # another model stands where the critic was
    with pytest.raises(SystemExit, match="differs in .*critic/run.json"):
        claim_output(tmp_path / "policy/run.json", vars(args), run_files(args.model), PROCESS, ())


def critic_of(base):
    """The directory of a critic, and its flags; it was trained from the model in this folder."""
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "run.json").write_text('{"flags": {"seed": 0}, "inputs": {}}')
    flags = {"normalise": "turn", "privileged": "none", "max_length": 9, "model": str(base),
             "lora_rank": 0}
    critic = Path("critic").absolute()
    claim_output(critic / "run.json", flags, run_files(base), PROCESS, ())
    (critic / "config.json").write_text("{}")
    return critic, flags


def test_a_critic_finds_its_base_from_anywhere_and_stops_if_it_is_changed_or_gone(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    critic, flags = critic_of(Path("models/base"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    base = tmp_path / "models/base"
    assert train_critic.read_critic_flags(critic) == flags | {"model": str(base)}
    (base / "run.json").write_text('{"flags": {"seed": 1}, "inputs": {}}')
    with pytest.raises(SystemExit, match=f"{critic}: found that {base}/run.json has changed"):
        train_critic.read_critic_flags(critic)
    shutil.rmtree(base)
    with pytest.raises(SystemExit, match="models/base/run.json has changed, or is gone"):
        train_critic.read_critic_flags(critic)


def test_a_file_that_no_script_wrote_is_neither_emptied_nor_taken_for_episodes(tmp_path):
    tasks = tmp_path / "test.jsonl"
    task = json.dumps({"problem_description": "Add.", "test_cases": {"a": "f(1)"},
                       "ground_truth": "def f(x): return x"}) + "\n"
    tasks.write_text(task)
    said = refusal("collect.py", "--tasks", tasks, "--agent", "scripted", "--human", "scripted",
                   "--output", tasks)
    assert "found a file that these scripts did not write" in said
    assert tasks.read_text() == task


# -----------------------------------------------------------------------------
# Disks


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(kilobytes) -> a folder with so much space; as root only."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kilobytes):
        if os.geteuid():
            pytest.skip("a small disk can be mounted by root only")
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this machine does not let root mount a tmpfs")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder, option):
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


def rollout(folder):
    return ["--tasks", "toy:backend:train", "--num_tasks", 30, "--samples_per_task", 1,
            "--agent", "scripted", "--output", folder / "episodes.jsonl"]


def test_a_full_disk_stops_a_rollout_with_a_sentence_and_it_resumes(small_disk, tmp_path):
    folder = small_disk(24)
    said = refusal("collect.py", *rollout(folder))
    assert "No space left" in said or "part of a line" in said
    assert "same command to resume" in said
    remount(folder, "size=10000k")
    run_script("collect.py", *rollout(folder))
    run_script("collect.py", *rollout(tmp_path / "whole"))
    whole = tmp_path / "whole/episodes.jsonl"
    assert (folder / "episodes.jsonl").read_bytes() == whole.read_bytes()
    left = sorted(path.name for path in folder.glob("[!.]*"))  # the lock is hidden
    assert left == ["episodes.jsonl", "episodes.jsonl.run.json"]


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes, save_minutes", [
    pytest.param(60, 0, id="while saving a state"),
    pytest.param(110, 20, id="while saving the checkpoint"),
])
def test_a_full_disk_stops_training_with_a_sentence_and_it_resumes(
        small_disk, tiny, tmp_path, kilobytes, save_minutes):
    folder, episodes = small_disk(kilobytes), write_episodes(tmp_path / "e.jsonl")
    on_disk, elsewhere = (training(
        episodes, tiny(), output, "--max_steps", 2, "--epochs", 1, "--save_minutes", save_minutes)
        for output in (folder, tmp_path / "whole"))
    said = refusal("train_policy.py", *on_disk)
    assert "same command to resume" in said and "The disk or a file failed" in said
    assert not (folder / "config.json").exists()
    remount(folder, "size=10000k")
    run_script("train_policy.py", *on_disk)
    run_script("train_policy.py", *elsewhere)
    whole = tmp_path / "whole/model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == whole.read_bytes()


def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")

    def parts():
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, parts())
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and path.read_text() == "old"


@pytest.mark.parametrize("there, new", [(2, 3), (3, 2), (0, 1)])
def test_rows_that_begin_like_a_file_do_not_replace_it(tmp_path, there, new):
    path = write_rows(tmp_path / "rows.jsonl", [{"row": index} for index in range(there)])
    with pytest.raises(SystemExit, match="found something else than what this command writes"):
        write_new(path, [{"row": index} for index in range(new)])
    assert len(path.read_text().splitlines()) == there


def test_an_output_layer_in_fp32_leaves_tied_input_embeddings_in_bf16():
    model, ids = tiny_model(TOKENIZER, tied=True).bfloat16(), torch.arange(5)[None]
    make_head_fp32(model)
    words = model.get_input_embeddings().weight
    assert words.dtype == torch.bfloat16
    hidden = model.get_decoder()(ids).last_hidden_state
    torch.testing.assert_close(model(ids).logits, hidden.float() @ words.float().T)
