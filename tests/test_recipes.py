"""Recipes: every command of theirs parses; those for real models run in short, with SHORT=1."""

import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter

import pytest
from chat_server import running
from commands import check_command, record
from conftest import ROOT, metrics, run_python, run_script

from formats.read import read_candidates
from toy.world import SCRIPTED, toy_tasks

# -----------------------------------------------------------------------------
# Commands; those of documents and docstrings are in test_docs.py

ALL = sorted(path.name for path in (ROOT / "runs").glob("*.sh"))
RECIPES = [name for name in ALL if name != "toy_flags.sh"]


def run_recipe(name, folder, arguments=(), **variables):
    """The commands that a recipe would run, each once it was called: the words after `python`.

    The recipe runs in a copy of runs/, with stubs in place of `python` and `torchrun`; `cp` copies
    nothing, since nothing was made.
    """
    shutil.copytree(ROOT / "runs", folder / "runs", ignore=shutil.ignore_patterns("out"))
    commands = record(folder / "runs" / name, folder, ("python", "torchrun", "cp", "sleep"),
                      os.environ["PATH"], arguments, **variables)
    return [words for program, *words in commands if program not in ("cp", "sleep")]


@pytest.mark.parametrize("domain", ["backend", "frontend"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_parses(name, domain, tmp_path):
    arguments = ["1"] if name == "toy_seeds.sh" else []  # one seed
    commands = run_recipe(name, tmp_path, arguments, DOMAIN=domain)
    assert commands
    for words in commands:
        assert check_command(words), words


def test_the_toy_recipe_trains_plays_and_compares_every_policy(tmp_path):
    commands = run_recipe("toy.sh", tmp_path)
    assert Counter(map(check_command, commands)) == {
        "collect.py": 7, "train_critic.py": 2, "toy/credit.py": 1, "train_policy.py": 2,
        "variants/sft.py": 1, "evaluate.py": 1, "report/__main__.py": 1}
    [evaluation] = [words for words in commands if check_command(words) == "evaluate.py"]
    compared = [word.partition("=")[0] for word in evaluation if word.endswith(".jsonl")]
    assert compared == ["base", "single_turn", "rft", "mtdpo", "sweet"]


# -----------------------------------------------------------------------------
# Smoke runs


@pytest.mark.parametrize("name", ["backend_1gpu.sh", "backend_8b.sh", "frontend_8b.sh"])
def test_a_smoke_run_needs_no_server(name, tmp_path):
    commands = run_recipe(name, tmp_path, SHORT="1")
    assert all(map(check_command, commands))
    assert any("scripted" in words for words in commands) and "http" not in str(commands)


FAILS_WHILE_THE_OTHER_JOB_RUNS = """#!/bin/sh
case "$*" in
  *train_critic.py*) while [ ! -s "$OUT/pid" ]; do sleep 0.05; done; exit 1;;
  *--states*) echo $$ >"$OUT/pid"; exec sleep 60;;
esac
"""


def test_a_stage_that_fails_ends_what_the_other_core_runs(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(FAILS_WHILE_THE_OTHER_JOB_RUNS)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "runs/toy.sh"], capture_output=True, text=True, timeout=30,
        env=os.environ | {"OUT": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    assert done.returncode == 1, done.stderr
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.05)


def test_recipes_of_several_sizes_share_no_output(tmp_path):
    outputs = []
    for number, size in enumerate(({}, {"FULL": "1"}, {"SHORT": "1"})):
        (tmp_path / str(number)).mkdir()
        outputs.append({words[words.index("--output") + 1]
                        for words in run_recipe("iterate.sh", tmp_path / str(number), **size)
                        if "--output" in words})
    assert all(outputs) and not set.intersection(*outputs[:2]) and not outputs[0] & outputs[2]


def scripted_human(domain):
    """The embedded world's human behind a server: it finds the task by what the human wants."""
    tasks = toy_tasks(f"toy:{domain}:train", 60) + toy_tasks(f"toy:{domain}:test", 20)
    by_wish = {json.dumps(task["hidden_information"])[1:-1]: task for task in tasks}

    def answer(body, seed):
        assert body["model"] == "human"
        if domain == "frontend":  # it sees screenshots, and no page that it could read
            return "i want another color ."
        prompt = json.dumps(body["messages"][0]["content"])
        task = next(task for wish, task in by_wish.items() if wish in prompt)
        return SCRIPTED[domain, "human", ""](task, body["messages"], random.Random(seed))

    return answer


def short_run(recipe, domain, folder):
    """The table of a recipe whose commands were run one after the other."""
    with running(scripted_human(domain), models=["human"]) as server:
        for words in run_recipe(f"{recipe}.sh", folder, SHORT="1", HUMAN_URL=server.url,
                                OUT=str(folder)):
            run = run_python if words[0] == "-m" else run_script
            run(*words)
    assert server.seen_models == {"human"}
    return json.loads((folder / "test/results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["backend", "frontend"])
def test_the_paper_scale_recipe_in_short_goes_from_episodes_to_a_report(request, domain, tmp_path):
    if domain == "frontend":
        request.getfixturevalue("chromium")
    results = short_run(f"{domain}_8b", domain, tmp_path)
    for name in ("critic", "sweet", "mtdpo", "rft"):
        assert metrics(tmp_path / name), name
    assert list(results["policies"]) == ["base", "rft", "mtdpo", "sweet"]
    states, omitted = read_candidates(tmp_path / "critic/ranked.jsonl", ranked=True)
    assert states and not omitted
    assert (tmp_path / "test/report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_short_run_of_the_recipe_for_one_gpu_goes_from_episodes_to_a_report(tmp_path):
    results = short_run("backend_1gpu", "backend", tmp_path)
    assert list(results["policies"]) == ["base", "sweet"]
    assert (tmp_path / "critic/lora.matrices").is_file()
    assert (tmp_path / "report.html").stat().st_size > 10_000
