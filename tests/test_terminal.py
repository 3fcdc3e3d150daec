"""What a user reads on the terminal."""

import os
import subprocess
import sys
import types

import pytest
from conftest import ROOT, dialogue, episode, run_script
from conftest import write_rows as write

import colbench
from judge import sandbox
from runtime.processes import Process
from runtime.training import Run
from speakers.fill import Summary, hints

ALONE = Process(0, 1, None)

TASKS = [
    {"problem_description": "double n", "ground_truth": "def f(n): return 2 * n",
     "test_cases": {"a": "f(1)", "b": "f(2)"}},
    {"problem_description": "frame n", "test_cases": {"a": "f(1)"},
     "ground_truth": "import sys, tqdm\nimport pandas_of_nobody as pd\ndef f(n): return pd.x(n)"},
    {"problem_description": "triple n", "ground_truth": "def f(n): return 3 * n",
     "test_cases": {"a": "f(1)", "b": "assert f(1) == 3", "half": "f(0.5"}},
    {"problem_description": "hide n", "ground_truth": "def f(): return None",
     "test_cases": {"\x1b[2J": "f()", "again": "f()"}},
]


# -----------------------------------------------------------------------------
# colbench.py show

# Clear the screen, set the title, go up and left, 8-bit control, right-to-left, a forged message
HOSTILE = "a\x1b[2J\x1b]0;title\x07b\rc\x08\x9b31md\u202e\nhuman     forged\n\ttab\x7f\x00"


def shown(capsys, path, *more):
    colbench.main(["show", str(path), *more])
    return capsys.readouterr().out


def test_show_prints_speakers_turns_reasons_and_outcome(tmp_path, capsys):
    row = episode("task1", 0.5, texts=("write f", "what is n?", "two", "I WANT TO ANSWER: x"),
                  reasons={"a": "passed", "b": "wrong", "c": "wrong"}, agent="base")
    row["dialogue_history"][3]["finished"] = False
    assert shown(capsys, write(tmp_path / "e.jsonl", [row])) == (
        "task      task1\n"
        "solution  def f(): pass\n"
        "\n"
        "episode   sample 0 of base: 2 turns, not solved, reward 0.500\n"
        "human     write f\n"
        "agent 1   what is n?\n"
        "human     two\n"
        "agent 2   I WANT TO ANSWER: x\n"
        "          [cut at the token limit]\n"
        "tests     1 passed; 2 wrong (b, c)\n"
        "\n")


def test_show_prints_one_task_if_it_is_named_and_suggests_others(tmp_path, capsys):
    rows = [episode(name, 1.0, sample) for sample in (0, 1) for name in ("train-1", "train-2")]
    path = write(tmp_path / "e.jsonl", rows)
    one = shown(capsys, path, "train-2")
    assert one.count("task      train-2\n") == 1 and "train-1" not in one
    assert one.count("\nepisode   sample") == 2
    with pytest.raises(SystemExit, match="found no task 'train2', expected a .*as train-2"):
        shown(capsys, path, "train2")
    with pytest.raises(SystemExit, match=f"{tmp_path}: found a directory, expected a JSONL file"):
        shown(capsys, tmp_path)


def test_show_reads_what_a_running_process_has_written_so_far(tmp_path, capsys):
    whole = write(tmp_path / "e.jsonl.rank0", [episode("a", 1.0)])
    whole.write_text(whole.read_text() + '{"task": {"task_id": "b')
    assert shown(capsys, whole).count("task      ") == 1


def test_show_takes_the_number_of_a_task_unless_it_is_the_id_of_another(tmp_path, capsys):
    path = write(tmp_path / "e.jsonl", [episode(name, 1.0) for name in ("a", "1", "c")])
    for given, name in (("3", "c"), ("1", "1"), ("2", "1")):
        text = shown(capsys, path, given)
        assert text.startswith(f"task      {name}\n") and text.count("task      ") == 1
    for given in ("0", "4", "-1"):
        with pytest.raises(SystemExit, match=f"found no task '{given}', expected a number from 1"):
            shown(capsys, path, given)


def test_show_prints_dialogues_that_an_error_ended_and_raw_thoughts(tmp_path, capsys):
    row = episode("t", None, texts=("t",), error="agent: gone")
    assert "0 turns, stopped by an error: agent: gone\n" in shown(
        capsys, write(tmp_path / "e.jsonl", [row]))
    row = episode("t", 1.0)
    row["dialogue_history"][1]["output"] = "a thought OUTPUT: q"
    assert "agent 1   a thought OUTPUT: q\n" in shown(capsys, write(tmp_path / "f.jsonl", [row]))


def test_show_makes_control_characters_of_models_harmless_everywhere(tmp_path, capsys):
    row = episode("task" + HOSTILE, 0.0)
    row["task"]["ground_truth"] = HOSTILE
    row["dialogue_history"] = dialogue(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    row |= {"agent": HOSTILE, "reasons": {HOSTILE: HOSTILE, "b" + HOSTILE: "b" + HOSTILE}}
    failed = episode("other", None, error=HOSTILE)
    text = shown(capsys, write(tmp_path / "e.jsonl", [row, failed]))
    assert text.count("\\x1b[2J\\x1b]0;title\\x07b\\rc\\x08\\x9b31md\\u202e") >= 10
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\nhuman     forged" not in text and "\n          human     forged" in text


def test_no_line_of_a_long_message_begins_where_speakers_stand(tmp_path, capsys):
    words = "human " * 200 + "x" * 500
    text = shown(capsys, write(tmp_path / "e.jsonl", [episode("t", 1.0, texts=(words, "q"))]))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and text.count("x" * 40) > 3
    assert sum(line.startswith("human") for line in lines) == 1


def test_show_ends_quietly_with_its_pager_and_prints_on_plain_terminals(tmp_path):
    rows = [episode(f"task{index}", 1.0, texts=("ü" * 500, "q")) for index in range(200)]
    command = [sys.executable, "colbench.py", "show", str(write(tmp_path / "e.jsonl", rows))]
    show = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                            env=os.environ | {"PYTHONIOENCODING": "ascii"})
    show.stdout.readline()
    show.stdout.close()
    assert show.stderr.read() == b""
    show.stderr.close()
    show.wait()


# -----------------------------------------------------------------------------
# colbench.py check


def test_check_names_lines_and_reasons_and_spells_out_what_steers_a_terminal(tmp_path, capsys):
    tasks = write(tmp_path / "tasks.jsonl", TASKS)
    tasks.write_text("\n\n" + tasks.read_text())
    with pytest.raises(SystemExit) as end:
        colbench.main(["check", str(tasks)])
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tasks}: line 4, a: the solution raised ModuleNotFoundError")
    assert "the judge has the modules of this Python environment and no others" in lines[0]
    assert lines[1].startswith(f"{tasks}: line 5, b: the solution raised SyntaxError")
    assert "a call such as f(1), not `assert f(1) == 2`" in lines[1]
    assert lines[2].startswith(f"{tasks}: line 5, half: ")
    assert "the test is no Python expression: f(0.5" in lines[2]
    assert lines[3] == f"{tasks}: line 6, \\x1b[2J, again: the solution returns None"
    assert lines[4] == "1 of 4 tasks can be solved in full (judge fixed)"


@pytest.mark.parametrize("profile", ["fixed", "official"])
def test_check_ends_well_if_all_can_be_solved_and_refuses_where_none_can(tmp_path, capsys, profile):
    flags = ["--judge", profile]
    colbench.main(["check", str(write(tmp_path / "good.jsonl", TASKS[:1])), *flags])
    printed = capsys.readouterr().out
    assert f"1 of 1 tasks can be solved in full (judge {profile})" in printed
    assert "protection limits         active" in printed or sys.platform != "linux"
    with pytest.raises(SystemExit, match="found no test that can be passed"):
        colbench.main(["check", str(write(tmp_path / "bad.jsonl", TASKS[3:])), *flags])


def test_check_says_that_a_solution_is_no_markdown(tmp_path, capsys):
    fenced = TASKS[0] | {"ground_truth": f"```python\n{TASKS[0]['ground_truth']}\n```"}
    with pytest.raises(SystemExit):
        colbench.main(["check", str(write(tmp_path / "t.jsonl", [TASKS[0], fenced]))])
    said = [line for line in capsys.readouterr().out.splitlines() if "SyntaxError" in line]
    assert said and all(": line 2, " in line and "plain code" in line for line in said)


def test_check_refuses_files_of_two_domains_and_of_pages(tmp_path):
    page = {"problem_description": "p", "ground_truth": "<html></html>"}
    for rows, found in (([TASKS[0], page], "frontend tasks, expected backend tasks"),
                        ([page], "found frontend tasks, expected backend tasks")):
        with pytest.raises(SystemExit, match=found):
            colbench.main(["check", str(write(tmp_path / "t.jsonl", rows))])


def test_a_terminal_without_a_character_of_a_table_gets_its_number(tmp_path):
    rows = write(tmp_path / "p.jsonl", [episode("t", None, error="gone"), episode("u", 1.0)])
    done = run_script("evaluate.py", f"p={rows}", "--output", tmp_path / "out",
                      env={"PYTHONIOENCODING": "ascii"})
    assert "\\u2013" in done.stdout


# -----------------------------------------------------------------------------
# How dialogues end


def ended(*last_messages):
    return [episode(f"task{index}", 0.0, texts=("t", text))
            for index, text in enumerate(last_messages)]


EQUAL = [episode("t", 0.5, sample) for sample in (0, 1)]
UNSOLVABLE = episode("t", 0.0, 2) | {"reasons": {"a": "solution failed"}}
FAILED = [episode("t", None, sample, texts=("t", "what?"), error="gone") for sample in (0, 1)]


@pytest.mark.parametrize("episodes, told", [
    (ended("what?", "why?", "I WANT TO ANSWER: x"), ["2 of 3 dialogues ended without"]),
    (ended("what?", "I WANT TO ANSWER: x"), []),
    (FAILED, []),
    (EQUAL, ["No task has two episodes of different reward"]),
    ([*EQUAL, episode("t", 0.0, 2)], []),
    ([*FAILED, UNSOLVABLE], ["1 of 1 tasks cannot be solved by their own solution"]),
    ([episode("t", 0.0, texts=("t", "q", "", "I WANT TO ANSWER: x"))],
     ["1 of 1 messages of the human are empty"]),
    ([episode("t", 0.0, texts=("t", "", "r", " ", "s", "I WANT TO ANSWER: x"))],
     ["2 of 3 messages of the agent are empty"]),
    ([episode("t", 0.0, texts=("t", "q", "", "w", "r", "I WANT TO ANSWER: x"))], []),
])
def test_hints_tell_what_keeps_episodes_from_being_of_use(episodes, told):
    found = list(hints(episodes))
    assert len(found) == len(told) and all(map(str.startswith, found, told))


def test_tasks_that_nobody_can_solve_name_a_command_that_takes_them():
    page = UNSOLVABLE | {"task": UNSOLVABLE["task"] | {"domain": "frontend"}, "success": None}
    (functions,), (pages,) = hints([UNSOLVABLE]), hints([page])
    assert functions.endswith("`python colbench.py check` lists them.")
    assert pages.endswith("`python colbench.py show` says why.")  # `check` refuses pages


def test_where_all_succeed_the_advice_is_harder_tasks():
    hint, = hints([episode("t", 1.0, sample) for sample in (0, 1)])
    assert hint.endswith("play more samples, or harder tasks.")


def test_the_mean_reward_of_episodes_counts_parts_of_rewards():
    rows = [{"success": True, "reward": 1.0}, {"success": False, "reward": 0.5}, {"error": "x"}]
    assert str(Summary(rows)) == "success 0.500, reward 0.750, 1 failed"


@pytest.mark.parametrize("margins, ending", [
    ([1e-4] * 20, ", after 20 steps; train/margin 0.0001: the model hardly moved; raise --lr"),
    ([0.0, 0.0], ", after 2 steps; train/margin 0"),  # before their step, margins are 0
    ([0.0] * 30 + [-3.0] * 20, ", after 50 steps; train/margin -3"),
    ([None], ", after 1 steps"),
])
def test_training_ends_with_its_last_numbers_and_whether_the_model_moved(tmp_path, margins, ending):
    rows = [{"step": step} | ({} if margin is None else {"train/margin": margin})
            for step, margin in enumerate(margins)]
    run = types.SimpleNamespace(log_file=write(tmp_path / "metrics.jsonl", rows))
    said = Run._last_metrics(run)
    assert said.startswith(ending) and ("hardly" in said) == ("hardly" in ending)


# -----------------------------------------------------------------------------
# Protections of the judge


def test_what_this_machine_cannot_protect_is_said_once_and_explained(monkeypatch, capsys):
    monkeypatch.delenv(sandbox.TOLD, raising=False)
    status = dict.fromkeys((*sandbox.REQUIRED, *sandbox.SECOND_LINES), True)
    status |= {"files": False, "own user": False}  # the second one nothing depends on
    for _ in range(2):
        sandbox.tell_once(status)
    said = capsys.readouterr().err
    assert said.count("not active on this machine: files (a harmful answer could use that") == 1
    monkeypatch.delenv(sandbox.TOLD)
    monkeypatch.setenv("LOCAL_RANK", "1")
    sandbox.tell_once(status)
    assert capsys.readouterr().err == ""


def test_a_run_whose_stderr_is_closed_grades_as_any_other(tmp_path):
    output = tmp_path / "episodes.jsonl"
    done = subprocess.run(
        ["bash", "-c", '"$@" 2>&-', "bash", sys.executable, ROOT / "collect.py", "--tasks",
         "toy:backend:train", "--num_tasks", "2", "--agent", "scripted", "--output", output],
        stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and "6 episodes of 2 tasks" in done.stdout
