"""Rollouts: each dialogue goes on as soon as what it waits for is there."""

import json
import shutil
import threading
import types

import pytest
from chat_server import running, small_talk
from conftest import episode, read_rows, run_script, write_rows
from parties import (
    INDEX, RULES, TASKS, Failing, LenientJudge, Served, asker, collect_now, human_line, index_of,
    played, within)

import collect
import speakers
from colbench import DOMAINS, prompt_of_episode
from formats.read import custom_prompt, load_episodes, read_candidates, read_episodes
from judge.sandbox import ANSWER_MARKER
from runtime.files import ResumableJsonl, rank_files, read_prompt, refuse_unfinished
from runtime.processes import Process
from speakers import roles
from speakers.interface import SpeakerError
from toy.world import toy_tasks

ALONE = Process(0, 1, "cpu")

# -----------------------------------------------------------------------------
# A dialogue


def test_a_dialogue_is_a_plain_call_that_needs_no_threads():
    agent, human = Served(asker(lambda key: 3)), Served(human_line)
    found = collect.play(TASKS[0], 2, agent, human, LenientJudge(), RULES)
    assert [message["content"] for message in found["dialogue_history"]] == [
        TASKS[0]["problem_description"], "What about 0?", "Detail 2.", "What about 1?",
        "Detail 4.", f"{ANSWER_MARKER} x = 2"]
    assert (found["sample"], found["turns"], found["reward"], found["error"]) == (2, 3, 1.0, None)


def test_a_marker_without_an_answer_ends_the_dialogue_too():
    agent, human = Served(lambda request: ANSWER_MARKER), Served(human_line)
    found = collect.play(TASKS[0], 0, agent, human, LenientJudge(), RULES)
    assert (found["turns"], found["answer"]) == (1, "")


def test_a_turn_that_failed_is_not_counted():
    def said(request):
        if len(request.messages) > 2:  # instructions, request, and a first turn with its reply
            raise SpeakerError("gone")
        return "What?"

    found = collect.play(TASKS[0], 0, Served(said), Served(human_line), LenientJudge(), RULES)
    assert (found["turns"], found["error"]) == (1, "agent: gone")


@pytest.mark.parametrize("thoughts, error", [
    ("<think>\nThe hidden {0}\n</think>\n\n", None), ("The hidden {0}</think>", None),
    ("<think>The hidden {0}", "human: found thoughts that never end, expected"),
])
def test_the_agent_never_reads_the_humans_thoughts(thoughts, error):
    agent = Served(asker(lambda key: 2))
    human = Served(lambda request: thoughts.format("solution") + "Two digits.")
    found = collect.play(TASKS[0], 0, agent, human, LenientJudge(), RULES)
    assert "hidden" not in str([request.messages[1:] for request in agent.asked])
    if error:
        assert found["error"].startswith(error)
    else:
        assert found["dialogue_history"][2]["content"] == "Two digits."


def test_the_agent_reads_how_many_turns_it_has_and_its_checkpoint_keeps_the_placeholder():
    rules = RULES._replace(agent_prompt="Send {max_turns}.", max_turns=3)
    agent, human = Served(asker(lambda key: 2)), Served(human_line)
    found = collect.play(TASKS[0], 0, agent, human, LenientJudge(), rules)
    assert {request.messages[0]["content"] for request in agent.asked} == {"Send 3."}
    assert prompt_of_episode(found) == "Send 3."
    assert custom_prompt([found], print) == "Send {max_turns}."


@pytest.mark.parametrize("party", ["agent", "human"])
def test_a_dialogue_never_waits_for_the_slow_reply_of_another_one(party):
    slow = Served(asker(lambda key: 3) if party == "agent" else human_line,
                  held=lambda request: index_of(request) == 0)
    quick = Served(human_line if party == "agent" else asker(lambda key: 3))
    agent, human = (slow, quick) if party == "agent" else (quick, slow)
    order, episodes = played(agent, human, LenientJudge(), 10, 3, last=slow.open)
    assert order[-1] == 0 and sorted(order) == list(range(10))
    assert all(found["turns"] == 3 and not found["error"] for found in episodes)


# -----------------------------------------------------------------------------
# The same bytes, whatever the batch size and the order of arrival


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_a_served_human_gives_the_same_bytes_at_any_batch_size_and_order_and_another_seed_others(
        tmp_path, tiny, local):
    texts = []
    with running(small_talk, mean=0.01, models=["agent", "human"]) as server:
        agent = ["--agent", server.url, "--agent_model", "agent"]
        if local:
            agent = ["--agent", tiny(), "--max_new_tokens", 6, "--max_turns", 3]
        for run, (batch_size, seed) in enumerate([(1, 0), (5, 0), (24, 0), (24, 0), (24, 1)]):
            output = tmp_path / f"{run}.jsonl"
            collect_now("--tasks", "toy:backend:train", "--num_tasks", 12, "--samples_per_task", 2,
                        *agent, "--human", server.url, "--human_model", "human",
                        "--batch_size", batch_size, "--seed", seed, "--output", output)
            texts.append(output.read_text())
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert len(rows) == 24 and not any(row["error"] for row in rows)
    assert local or len({row["turns"] for row in rows}) > 2
    assert len({row["dialogue_history"][1]["content"] for row in rows}) > 12
    assert texts[:4] == [texts[0]] * 4 and texts[4] != texts[0]


# -----------------------------------------------------------------------------
# Failures


def collect_with(monkeypatch, output, agent, human, count=20, in_flight=4):
    """collect_episodes for `count` tasks, with these parties and the real judge."""
    parties = {"agent": agent, "human": human}
    monkeypatch.setattr(roles, "load_speaker", lambda spec, role, *_, **__: parties[role])
    args = collect.parse_args([
        "--tasks", "toy:backend:train", "--num_tasks", str(count), "--samples_per_task", "1",
        "--agent", "scripted", "--batch_size", str(in_flight), "--output", str(output)])
    return within(lambda: collect.collect_episodes(args, ALONE), 60)


@pytest.mark.parametrize("reply_chars, domain, expected", [
    (None, "backend", 400), (None, "frontend", 1000), (50, "backend", 50)])
def test_human_replies_are_cut_at_the_limit_of_the_domain_or_a_flag(reply_chars, domain, expected):
    flags = ["--reply_chars", str(reply_chars)] if reply_chars else []
    args = collect.parse_args(["--tasks", f"toy:{domain}:train", "--num_tasks", "1", "--agent",
                               "scripted", "--output", "o", *flags])
    _, rules, _, _ = collect.plan_episodes(args, ALONE)
    agent, human = Served(asker(lambda key: 2)), Served(lambda request: "x" * 2000)
    found = collect.play(TASKS[0], 0, agent, human, LenientJudge(), rules)
    assert found["dialogue_history"][2] == {"role": "user", "content": "x" * expected}


def rows_under(folder):
    """task index -> episode, of all files of a run."""
    found = {}
    for path in folder.glob("episodes.jsonl*"):
        if path.suffix == ".jsonl" or ".rank" in path.name:
            for row in read_rows(path):
                found[INDEX[row["task"]["task_id"]]] = row
    return found


@pytest.mark.parametrize("party", ["agent", "human"])
def test_one_failed_request_is_one_failed_episode(tmp_path, monkeypatch, party):
    def fails(request):
        return index_of(request) == 5 and len(request.messages) > 3

    lines = {"agent": asker(lambda key: 3), "human": human_line}
    parties = {name: Failing(line, fails if name == party else lambda request: False)
               for name, line in lines.items()}
    episodes = collect_with(monkeypatch, tmp_path / "episodes.jsonl", **parties)
    errors = [found["error"] for found in episodes]
    assert errors[5] == f"{party}: too long" and errors.count(None) == 19
    assert episodes[5]["reward"] is None and episodes[5]["turns"] >= 1


def test_a_bug_ends_its_dialogues_alone_and_shows_its_traceback_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speakers.fill, "FIRST_BUG", threading.Lock())

    def buggy_line(request):
        return {}[request.task["task_id"]] if index_of(request) % 5 == 0 else "Detail."

    agent = Served(asker(lambda key: 3))
    episodes = collect_with(monkeypatch, tmp_path / "e.jsonl", agent, Served(buggy_line))
    failed = [found for found in episodes if found["error"]]
    assert [INDEX[found["task"]["task_id"]] for found in failed] == [0, 5, 10, 15]
    assert all(found["error"].startswith("KeyError: ") for found in failed)
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1 and "in buggy_line" in printed

    agent = Served(asker(lambda key: 3))  # mended: only these are played again
    episodes = collect_with(monkeypatch, tmp_path / "e.jsonl", agent, Served(human_line))
    assert not any(found["error"] for found in episodes)
    assert {index_of(request) for request in agent.asked} == {0, 5, 10, 15}


def test_a_dead_server_ends_the_run_with_all_in_flight_on_disk_to_resume(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    whole = collect_with(monkeypatch, tmp_path / "whole" / "episodes.jsonl",
                         Served(asker(lambda key: 3)), Served(human_line))
    output = tmp_path / "episodes.jsonl"
    dying = Failing(asker(lambda key: 3), lives=25)
    with pytest.raises(SystemExit, match="it is down.*start it again, then rerun the same") as end:
        collect_with(monkeypatch, output, dying, Served(human_line))
    assert "\n" not in str(end.value)
    left = rows_under(tmp_path)
    finished = {index for index, row in left.items() if not row["error"]}
    started = {index_of(request) for request in dying.asked}
    assert left.keys() == started and len(started) < 20
    assert 4 <= len(finished) < len(started) <= len(finished) + 4

    alive = Served(asker(lambda key: 3))
    assert collect_with(monkeypatch, output, alive, Served(human_line)) == whole
    assert {index_of(request) for request in alive.asked} == set(range(20)) - finished


def test_a_checkpoint_with_other_instructions_does_not_resume_an_output(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "agent")
    flags = ["--tasks", "toy:backend:test", "--num_tasks", 1, "--agent", tmp_path / "agent",
             "--max_turns", 2, "--max_new_tokens", 4, "--output", tmp_path / "e.jsonl"]
    for samples, prompt in ((1, "Prompt A"), (2, "Prompt B")):
        (tmp_path / "agent/agent_prompt.txt").write_text(prompt)
        done = run_script("collect.py", *flags, "--samples_per_task", samples, check=samples == 1)
    assert "differs in" in done.stderr and "agent_prompt.txt" in done.stderr
    assert read_episodes(tmp_path / "e.jsonl")[0]["agent_prompt"] == "Prompt A"


def test_a_critic_that_plays_is_named(tiny, tmp_path):
    for number, flags in enumerate(({}, {"privileged": "ground_truth"})):
        agent = tmp_path / f"{number}"
        shutil.copytree(tiny(), agent)
        write_rows(agent / "run.json", [{"flags": flags, "inputs": {}}])
        done = run_script("collect.py", "--tasks", "toy:backend:test", "--num_tasks", 1, "--agent",
                          agent, "--max_turns", 1, "--max_new_tokens", 4, "--samples_per_task", 1,
                          "--output", f"{agent}.jsonl")
        assert ("found a critic" in done.stdout) == bool(flags)


def test_a_critic_that_a_training_starts_from_is_named(tiny, toy_episodes, tmp_path):
    critic = tmp_path / "critic"
    shutil.copytree(tiny(), critic)
    write_rows(critic / "run.json", [{"flags": {"privileged": "none"}, "inputs": {}}])
    for model, told in ((critic, True), (tiny(), False)):
        done = run_script("train_policy.py", "--episodes", toy_episodes, "--model", model,
                          "--max_steps", 1, "--output", tmp_path / f"{told}")
        assert ("found a critic" in done.stdout) == told


# -----------------------------------------------------------------------------
# Candidates


def sampled(monkeypatch, policy, folder, episodes, *more):
    """The rows that collect_states makes in these episodes, four candidates in each state."""
    monkeypatch.setattr(roles, "load_speaker", lambda *_, **__: policy)
    folder.mkdir(exist_ok=True)
    given = write_rows(folder.parent / "given.jsonl", episodes)
    args = collect.parse_args([
        "--states", str(given), "--states_fraction", "1", "--num_candidates", "4", "--batch_size",
        "8", "--agent", "http://s", "--output", str(folder / "candidates.jsonl"), *more])
    return within(lambda: collect.collect_states(args, ALONE))


def thirty_states():
    return [episode(f"task{index}", 0.0, texts=(f"request {index}", f"{ANSWER_MARKER} x"))
            for index in range(30)]


def content_of(request):
    return request.messages[-1]["content"]


def test_a_row_of_candidates_holds_all_that_later_stages_need(monkeypatch, tmp_path):
    rows = sampled(monkeypatch, Served(content_of), tmp_path / "out", thirty_states())
    assert rows[3] == {
        "task": thirty_states()[3]["task"], "sample": 0, "turn": 0,
        "messages": [{"role": "user", "content": "request 3"}], "agent_prompt": "",
        "max_turns": None,
        "candidates": ["request 3" + "+" * index for index in range(4)], "finished": [True] * 4,
        "error": None}
    states, omitted = read_candidates(tmp_path / "out/candidates.jsonl")
    assert states == rows and omitted == 0


def test_no_candidate_is_drawn_with_the_numbers_of_a_message_of_its_episode(monkeypatch, tmp_path):
    agent, human = Served(asker(lambda key: 9)), Served(human_line)
    _, episodes = played(agent, human, LenientJudge(), 5, 1)
    policy = Served(asker(lambda key: 9))
    sampled(monkeypatch, policy, tmp_path / "out", episodes)
    assert len(policy.asked) == 5 * 9
    drawn = {request.seed for request in policy.asked}
    assert len(drawn) == 5 * 9
    assert not drawn & {request.seed for request in agent.asked + human.asked}


def test_states_are_those_of_a_share_of_the_tasks_and_of_each_so_many(monkeypatch, tmp_path):
    agent = Served(asker(lambda key: 1 + INDEX[key[0]]))
    _, episodes = played(agent, Served(human_line), LenientJudge(), 10, 4)
    few = sampled(monkeypatch, Served(content_of), tmp_path / "few", episodes,
                  "--states_fraction", "0.5", "--states_per_task", "3")
    all_states = collect.choose_states(load_episodes([tmp_path / "given.jsonl"])[0], 1, None, 0)
    assert len(all_states) == sum(range(1, 11))
    counts = {}
    for row in few:
        index = INDEX[row["task"]["task_id"]]
        counts[index] = counts.get(index, 0) + 1
    assert len(counts) == 5
    assert all(count == min(3, 1 + index) for index, count in counts.items())


def test_a_share_of_few_tasks_is_one_task_and_no_order_of_the_files_changes_the_states():
    episodes = [episode(f"task{index}", 0.0, texts=("t", *["q", "r"] * 8, "x"))
                for index in range(6)]
    few = collect.choose_states(episodes, 0.05, None, 0)
    assert len({state["task"]["task_id"] for state in few}) == 1
    drawn, again = ({(state["task"]["task_id"], state["turn"])
                     for state in collect.choose_states(found, 0.5, 3, 0)}
                    for found in (episodes, episodes[::-1]))
    assert drawn == again and len(drawn) == 9  # three states of each of three tasks
    turns = {tuple(sorted(turn for found, turn in drawn if found == task)) for task, _ in drawn}
    assert len(turns) > 1  # each task draws its own


def test_a_state_that_fails_is_a_row_with_an_error_which_a_rerun_asks_again(tmp_path, monkeypatch):
    expected = sampled(monkeypatch, Served(content_of), tmp_path / "whole", thirty_states())
    refusing = Failing(content_of, fails=lambda request: content_of(request) == "request 5")
    rows = sampled(monkeypatch, refusing, tmp_path / "failed", thirty_states())
    assert rows[5]["error"] == "too long" and "candidates" not in rows[5]
    assert rows[:5] + rows[6:] == expected[:5] + expected[6:]
    states, omitted = read_candidates(tmp_path / "failed/candidates.jsonl")
    assert len(states) == 29 and omitted == 1
    alive = Served(content_of)
    assert sampled(monkeypatch, alive, tmp_path / "failed", thirty_states()) == expected
    assert len(alive.asked) == 1


# -----------------------------------------------------------------------------
# The file that grows


def store(path):
    return ResumableJsonl(path, lambda row: row["key"], ALONE)


def interrupted():
    raise KeyboardInterrupt


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def line(key, **more):
    return json.dumps({"key": key} | more) + "\n"


def test_the_files_of_a_killed_run_of_three_ranks_are_taken_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(line(0) + line(1, error="x"))
    (tmp_path / "rows.jsonl.rank0").write_text(line(3) + line(6))
    (tmp_path / "rows.jsonl.rank1").write_text(line(4) + '{"key": 7, "te')
    (tmp_path / "rows.jsonl.rank2").write_text(line(5, error="x") + '{"key": 8}')
    (tmp_path / "rows.jsonl.run.json").write_text("{}")
    found = store(path)
    assert sorted(found.rows) == [0, 3, 4, 6, 8]
    assert names(tmp_path) == ["rows.jsonl.rank0", "rows.jsonl.run.json"]
    for key in (1, 2, 5, 7):
        found.append({"key": key})
    assert [row["key"] for row in found.finish(range(9))] == list(range(9))
    assert path.read_text() == "".join(line(key) for key in range(9))
    assert names(tmp_path) == ["rows.jsonl", "rows.jsonl.run.json"]


def test_a_file_exists_only_when_it_is_finished_however_often_its_run_was_killed(tmp_path):
    path = tmp_path / "rows.jsonl"
    store(path).append({"key": 0})
    for _ in range(2):  # killed at once, again and again
        assert store(path).rows == {0: {"key": 0}}
        assert names(tmp_path) == ["rows.jsonl.rank0"]
        with pytest.raises(SystemExit, match="found rows.jsonl.rank0 beside it.*rerun"):
            refuse_unfinished(path)
    last = store(path)
    last.append({"key": 1, "error": "x"})
    last.finish([0, 1])
    finished = path.read_text()
    assert store(path).missing([0, 1]) == [1]  # a rerun that cannot begin
    assert names(tmp_path) == ["rows.jsonl"] and path.read_text() == finished
    refuse_unfinished(path)
    store(path).append({"key": 1})  # one that can
    assert names(tmp_path) == ["rows.jsonl.rank0"]
    assert store(path).finish([0, 1]) == [{"key": 0}, {"key": 1}]


def test_a_finished_file_stays_while_a_rerun_only_fails_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(line(0) + line(1, error="x") + line(2, error="x"))
    finished = path.read_text()
    rerun = store(path)
    rerun.append({"key": 1, "error": "y"})  # then its server is given up
    assert names(tmp_path) == ["rows.jsonl"] and path.read_text() == finished
    rerun.append({"key": 2, "error": "y"})
    with pytest.raises(KeyboardInterrupt):  # another rank's, which has given up
        rerun.process = types.SimpleNamespace(barrier=interrupted, leads=True)
        rerun.finish([0, 1, 2])
    assert names(tmp_path) == ["rows.jsonl"] and path.read_text() == finished
    rerun.process = ALONE
    assert [row.get("error") for row in rerun.finish([0, 1, 2])] == [None, "y", "y"]
    rerun = store(path)
    rerun.append({"key": 1, "error": "z"})
    rerun.append({"key": 2})
    assert rerun.finish([0, 1, 2]) == [{"key": 0}, {"key": 1, "error": "z"}, {"key": 2}]
    assert names(tmp_path) == ["rows.jsonl"]


def test_a_file_of_the_users_whose_name_begins_like_a_ranks_is_left_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    for name in ("rows.jsonl.ranked", "rows.jsonl.rank0.bak"):
        (tmp_path / name).write_text(line(7))
    rows = store(path)
    rows.append({"key": 0})
    assert [row["key"] for row in rows.finish([0])] == [0]
    assert names(tmp_path) == ["rows.jsonl", "rows.jsonl.rank0.bak", "rows.jsonl.ranked"]
    refuse_unfinished(path)


def test_an_output_with_brackets_in_its_name_is_resumed_like_any_other(tmp_path):
    path = tmp_path / "rows[1].jsonl"
    (tmp_path / "rows1.jsonl.rank0").write_text(line(9))  # what [1] would match
    store(path).append({"key": 0})
    assert store(path).rows == {0: {"key": 0}}
    assert rank_files(path) == [tmp_path / "rows[1].jsonl.rank0"]


def test_what_a_kill_within_a_merge_left_is_removed_and_no_file_of_another_name(tmp_path):
    halves = [tmp_path / f"rows.jsonl{ending}" for ending in (".tmp12", ".rank0.tmp345")]
    others = [tmp_path / f"rows.jsonl{ending}" for ending in ("2.tmp12", ".tmp", ".rank0.tmpx")]
    for path in halves + others:
        path.write_text("{")
    store(tmp_path / "rows.jsonl")
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_half_a_line_that_is_json_of_its_own_is_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    (tmp_path / "rows.jsonl.rank0").write_text(line(0) + "12\n" + '"key"\n' + line(1) + "3")
    assert sorted(store(path).rows) == [0, 1]


# -----------------------------------------------------------------------------
# What cannot be played is refused


@pytest.mark.parametrize("flags, found", [
    ("--tasks {tasks} --agent scripted", "found no --human, which these tasks need"),
    ("--tasks {tasks} --agent ./none --human scripted", "./none: no such directory"),
    ("--tasks {tasks} --agent scripted --human {prompt}/", "no such directory"),
    ("--tasks {logged} --agent scripted --human scripted", "tasks of your own logs.*--states"),
    ("--tasks {tasks} --agent scripted --human http://h/v1 --human_prompt {prompt}",
     "without {hidden_information}, expected it"),
    ("--tasks {tasks} --agent scripted --human scripted --agent_prompt {human_prompt}",
     "an agent prompt with {hidden_information}, expected one without it"),
    ("--tasks {tasks} --agent scripted --human scripted --clip none", "--clip none, which is"),
    ("--tasks toy:frontend:test --agent scripted --judge official", "--judge official, which is"),
    ("--tasks {tasks} --agent scripted --human scripted --output {folder}", "found a directory"),
    ("--tasks {tasks} --agent scripted --human scripted --output {folder}/p/", "found a directory"),
])
def test_what_cannot_be_played_is_refused_before_any_opening(monkeypatch, tmp_path, flags, found):
    monkeypatch.setattr(roles, "load_speaker", None)
    task = {"problem_description": "Add.", "test_cases": {"a": "f(1)"},
            "ground_truth": "def f(x): return x"}
    names = {name: tmp_path / name for name in ("tasks", "logged", "prompt", "human_prompt")}
    names["folder"] = tmp_path
    names["tasks"].write_text(json.dumps(task))
    names["logged"].write_text(json.dumps(task | {"domain": "logged"}))
    names["prompt"].write_text("Reply.")
    names["human_prompt"].write_text("Tell {hidden_information}.")
    with pytest.raises(SystemExit, match=found):
        collect_now("--output", tmp_path / "o", *flags.format(**names).split())
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob("o.*"))
    assert not (tmp_path / "p").exists()


# -----------------------------------------------------------------------------
# Who plays, and with which instructions


@pytest.mark.parametrize("party", ["agent", "human", "agent of states"])
def test_no_output_is_continued_with_a_party_that_was_trained_anew(
        tiny, toy_episodes, tmp_path, party):
    model = tmp_path / "model"
    shutil.copytree(tiny(), model)
    flags = ["--tasks", "toy:backend:test", "--num_tasks", 1, "--samples_per_task", 1,
             "--max_turns", 2, "--agent", "scripted"]
    if party == "agent":
        flags += ["--agent", model, "--max_new_tokens", 4]
    elif party == "human":
        flags += ["--human", model, "--human_max_new_tokens", 4]
    else:
        flags = ["--states", toy_episodes, "--states_fraction", 0.01, "--states_per_task", 1,
                 "--num_candidates", 2, "--agent", model, "--max_new_tokens", 4]
    for seed in (0, 1):
        write_rows(model / "run.json", [{"flags": {"seed": seed}, "inputs": {}}])
        done = run_script("collect.py", *flags, "--output", tmp_path / "out.jsonl", check=seed == 0)
    assert "model/run.json (its content)" in done.stderr


def test_blank_space_around_instructions_is_none_of_them(tmp_path):
    for written in ("\ufeff\n Ask. \n\n", "Ask."):
        (tmp_path / "prompt.txt").write_text(written, encoding="utf-8")
        assert read_prompt(tmp_path / "prompt.txt") == "Ask."


def test_what_flags_name_replaces_what_a_checkpoint_or_an_embedded_world_would_choose(tmp_path):
    (tmp_path / "agent_prompt.txt").write_text("Trained.")
    page = toy_tasks("toy:frontend:train", 1)
    for given, used in ((None, str(tmp_path / "agent_prompt.txt")), ("mine.txt", "mine.txt")):
        args = types.SimpleNamespace(agent=str(tmp_path), agent_prompt=given, num_tasks=None,
                                     human=given, clip=given, tasks="toy:frontend:train")
        roles.fill_in_flags(args, page, DOMAINS["frontend"], print)
        assert (args.agent_prompt, args.num_tasks) == (used, 1)
        assert (args.human, args.clip) == ((given, given) if given else ("scripted", "none"))


def test_a_served_party_goes_on_under_its_models_name_and_not_under_another(tmp_path):
    args = types.SimpleNamespace(agent="http://h/v1", human="http://g/v1", output="x.jsonl")
    agent, human = types.SimpleNamespace(model_name="a"), types.SimpleNamespace(model_name=None)

    def who(*earlier):
        rows = {index: {"agent": name, "human": name} for index, name in enumerate(earlier)}
        return roles.players(args, agent, human, types.SimpleNamespace(rows=rows))

    assert who() == who("a") == who("http://h/v1", "a") == {"agent": "a", "human": "http://g/v1"}
    with pytest.raises(SystemExit, match="found the model a, expected b, which has played"):
        who("a", "b")
    args.agent = "toy/base/"  # a directory, with the slash that a shell adds
    agent.model_name = None
    assert who()["agent"] == "toy/base"


def test_a_placeholder_that_no_task_has_is_told_before_any_dialogue(tmp_path, capsys):
    (tmp_path / "human.txt").write_text(
        "{hidden_information} {problem_descripton} {dialogue_history} {toy}")
    args = collect.parse_args([
        "--tasks", "toy:backend:test", "--num_tasks", "2", "--agent", "scripted",
        "--human", "http://h/v1", "--human_prompt", str(tmp_path / "human.txt"), "--output", "x"])
    roles.read_tasks_and_prompts(args, ALONE)
    said = capsys.readouterr()
    assert (said.out + said.err).count("stays as it is") == 1
    assert "human.txt: {problem_descripton} stays as it is" in said.out + said.err


def test_the_tasks_and_both_instructions_are_inputs_of_a_run(tmp_path):
    tasks, agent, human = (str(tmp_path / name) for name in ("tasks.jsonl", "a.txt", "h.txt"))
    write_rows(tmp_path / "tasks.jsonl", TASKS[:2])
    (tmp_path / "a.txt").write_text("Ask.")
    (tmp_path / "h.txt").write_text("You want {hidden_information}")
    args = collect.parse_args(["--tasks", tasks, "--agent", "scripted", "--agent_prompt", agent,
                               "--human", "http://h/v1", "--human_prompt", human, "--output", "x"])
    found, _, prompts, files = roles.read_tasks_and_prompts(args, ALONE)
    assert prompts == ("Ask.", "You want {hidden_information}")
    assert len(found) == 2 and files == [tasks, agent, human]
