"""The patches of docs/forks: each applies to a copy of the project, and its command runs."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess

import forked
import pytest
from chat_server import running
from conftest import (
    ROOT, dialogue, metrics, ranked_state, read_rows, write_episodes, write_rows)

from formats.read import read_candidates
from train_policy import state_pairs

README = (ROOT / "docs/forks/README.md").read_text()
FORKS = dict(re.findall(r"^\| `(\w+)` \|.*\| `(python [^`]+)` \|$", README, re.MULTILINE))
COPIED = ("*.py", "judge", "runtime", "formats", "speakers", "fast", "variants", "toy",
          "docs/forks")


@pytest.fixture
def fork(tmp_path):
    """fork(name) -> a copy of the project with the patch applied, and inputs for its command."""
    def copy(name):
        for pattern in COPIED:
            for path in ROOT.glob(pattern):
                target = tmp_path / path.relative_to(ROOT)
                target.parent.mkdir(exist_ok=True)
                (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
        applied = subprocess.run(
            ["git", "apply", f"docs/forks/{name}.patch"], cwd=tmp_path, capture_output=True,
            text=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
        assert applied.returncode == 0, (
            f"{applied.stderr}A fork to which this patch does not apply any more may delete it,"
            " together with its test.")
        write_ranked(tmp_path / "ranked.jsonl")
        write_episodes(tmp_path / "episodes.jsonl")
        return tmp_path

    return copy


def run(command, folder, *more):
    script, *words = shlex.split(command)[1:]
    done = forked.run(folder / script, [*words, *more], 1, 300, folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_code(code, folder):
    (folder / "check.py").write_text(code)
    return run("python check.py", folder)


def write_ranked(path):
    """Two states with candidates of rising advantage."""
    write_rows(path, [ranked_state({f"what {10**index}": 0.1 * index for index in range(8)},
                                   dialogue("t", *["q", "q"] * turn), turn=turn)
                      for turn in range(2)])


def test_the_table_names_every_patch():
    assert FORKS.keys() == {path.stem for path in (ROOT / "docs/forks").glob("*.patch")}


def test_a_square_root_normaliser_trains_and_ranks(fork):
    folder = fork("sqrt_normaliser")
    run(FORKS["sqrt_normaliser"], folder, "--max_steps", "2")
    flags = json.loads((folder / "critic/run.json").read_text())["flags"]
    assert flags["normalise"] == "sqrt"
    code = """
from train_critic import Critic
critic, texts = Critic("critic"), ["what", "what about the suffix"]
def advantages():
    return critic.advantages({"ground_truth": "x"}, [{"role": "user", "content": "y"}], texts,
                             [True, True])
roots, critic.normalise = advantages(), "none"
for whole, root, ids in zip(advantages(), roots, critic.tokenizer(texts)["input_ids"]):
    print((whole / root) ** 2, len(ids) + 1)  # with the token that ends a turn
"""
    for line in run_code(code, folder).splitlines():
        square, length = map(float, line.split())
        assert square == pytest.approx(length, rel=1e-3) and length > 2


@pytest.mark.parametrize("name, first_loss", [("ipo", 25.0), ("hinge", 1.0)])
def test_another_loss_has_its_value_before_the_first_step(fork, name, first_loss):
    folder = fork(name)
    run(FORKS[name], folder, "--nll", "0")
    assert metrics(folder / name)[0]["train/loss"] == pytest.approx(first_loss, rel=1e-3)


def test_a_loss_without_reference_compares_mean_log_probs(fork):
    folder = fork("simpo")
    run(FORKS["simpo"], folder, "--nll", "0", "--batch_size", "1", "--max_steps", "2")
    first = metrics(folder / "simpo")[0]
    assert first["train/margin"] != pytest.approx(0, abs=1e-3)  # of log-ratios, it would be 0
    assert first["train/loss"] == pytest.approx(softplus(1 - first["train/margin"]), rel=1e-4)


def test_a_loss_that_knows_the_advantages_starts_at_their_differences(fork):
    folder = fork("odpo")
    run(FORKS["odpo"], folder, "--nll", "0")
    states, _ = read_candidates(folder / "ranked.jsonl", ranked=True)
    losses = [softplus(state["advantages"][chosen] - state["advantages"][rejected])
              for state in states for chosen, rejected in state_pairs(state, "halves", 4, 0)]
    assert metrics(folder / "odpo")[0]["train/loss"] == pytest.approx(
        sum(losses) / len(losses), rel=1e-3)


def softplus(value):
    return math.log1p(math.exp(value))


def test_an_output_is_held_to_the_code_that_made_it_and_to_what_that_imports(fork):
    folder = fork("hinge")
    (folder / "mine").mkdir()
    mine = folder / "mine/train.py"
    code = ("import sys, pathlib\n"
            "sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))\n"
            "import train_policy\nfrom runtime.processes import launch\n"
            "launch(train_policy.main, train_policy.parse_args())\n")
    mine.write_text(code)
    command = FORKS["hinge"].replace("train_policy.py", "mine/train.py")
    run(command, folder, "--max_steps", "1")
    mine.write_text(code + "print()\n")
    with pytest.raises(AssertionError, match="since mine/train.py was edited"):
        run(command, folder, "--max_steps", "2")
    mine.write_text(code)
    script = folder / "train_policy.py"
    loss = script.read_text()
    script.write_text("# a comment\n\n" + loss)
    run(command, folder, "--max_steps", "1")
    script.write_text(loss.replace("F.relu(1 -", "F.relu(2 -"))
    with pytest.raises(AssertionError, match="since train_policy.py was edited"):
        run(command, folder, "--max_steps", "2")


def test_a_critic_of_ones_own_ranks_for_the_policy(tmp_path):
    write_ranked(tmp_path / "candidates.jsonl")  # whose advantages are replaced
    script = shlex.quote(f"{ROOT}/docs/forks/own_critic.py")
    run(f"python {script} candidates.jsonl ranked.jsonl", tmp_path)
    (first, *_), omitted = read_candidates(tmp_path / "ranked.jsonl", ranked=True)
    assert first["ranker"] == "shortest" and omitted == 0
    assert first["advantages"] == sorted(first["advantages"], reverse=True)  # the shortest is first
    assert first["advantages"][0] > 0 > first["advantages"][-1]


def test_the_gap_rule_pairs_only_what_is_far_apart(fork):
    folder = fork("gap_pairing")
    run(FORKS["gap_pairing"], folder)
    code = ("import random; from train_policy import make_pairs; advantages = [0, 1, 2, 9]; "
            "print(sorted(make_pairs(list('abcd'), advantages, 'gap', 99, random.Random(0))))")
    assert run_code(code, folder).strip() == "[(3, 0), (3, 1), (3, 2)]"


def test_the_lying_human_denies_a_wish_that_it_has(fork):
    folder = fork("lying_human")
    run(FORKS["lying_human"], folder)
    lies = 0
    for played in read_rows(folder / "lied.jsonl"):
        needed, history = played["task"]["toy"]["needed"], played["dialogue_history"]
        for asked, reply in zip(history[1::2], history[2::2], strict=False):
            words = set(re.findall(r"[a-z]+", asked["content"].lower()))
            lies += bool(words & needed.keys()) and reply["content"] == "No wish there."
    assert lies


def test_a_model_names_the_reward_and_a_run_whose_grader_is_down_stops(fork):
    folder, command = fork("model_judge"), FORKS["model_judge"]
    address = command.split("--grader ")[1].split()[0]
    with running(lambda body, seed: "I give it 7.") as server:
        run(command.replace(address, server.url), folder)
    assert {played["reward"] for played in read_rows(folder / "letters.jsonl")} == {0.7}

    def refuse(handler, body):
        return handler.reply(404, b"no such model")

    with running(None, say=refuse) as server:
        other = command.replace(address, server.url).replace("letters.jsonl", "more.jsonl")
        with pytest.raises(AssertionError, match="found a server that answers no request"):
            run(other, folder)


def test_queries_are_graded_by_their_rows(fork):
    folder = fork("sql_domain")
    run(FORKS["sql_domain"], folder)
    assert {played["reward"] for played in read_rows(folder / "queries.jsonl")} == {0.0}
    code = ("from colbench import DOMAINS\n"
            "from formats.read import read_tasks\n"
            "tasks = read_tasks('docs/forks/sql_tasks.jsonl')\n"
            "with DOMAINS['sql'].open_judge() as judge:\n"
            "    print([judge.grade(task, task['ground_truth']).reward for task in tasks],\n"
            "          judge.grade(tasks[0], 'SELECT id FROM orders').reward)\n")
    assert run_code(code, folder).startswith("[1.0, 1.0] 0.3")
