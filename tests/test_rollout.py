"""Rollouts that never wait: each dialogue goes on as soon as what it waits for is there.

Run: pytest tests/test_rollout.py
"""

import functools
import hashlib
import json
import threading
import time
from concurrent.futures import Future

import pytest
from slow_server import slow_server

import collect
import evaluate
import speakers
import train_policy
from colbench import (
    Referee, RefereeSettings, ResumableJsonl, custom_prompt, prompt_of_episode, read_tasks,
    states_of)
from collect import Parties, Rules, interleave, play
from judge.sandbox import ANSWER_MARKER, Grade
from speakers.interface import Speaker, SpeakerError, SpeakerSettings, Utterance
from speakers.server import ServerSpeaker
from stages.processes import Process

ALONE = Process(0, 1, "cpu")
RULES = Rules(agent_prompt="Ask.", human_prompt="Reply.", max_turns=10, reply_chars=400, seed=0)

# -----------------------------------------------------------------------------
# Parties under the test's control. Nothing here sleeps


def within(call, seconds=30):
    """What `call` returns; a failure if it waits for ever, as a lockstep would."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)


def asker(turns):
    """An agent's lines: it asks until its last turn, turns(key), and then answers."""
    def line(request):
        turn = sum(message["role"] == "assistant" for message in request.messages)
        if turn == turns(request.key) - 1:
            return f"{ANSWER_MARKER} x = {turn}"
        return f"What about {turn}?"

    return line


def human_line(request):
    return f"Detail {len(request.messages)}."


def utterances(line, request):
    return [Utterance(f"{line(request)}{'+' * index}", True) for index in range(request.n)]


class Served(Speaker):
    """A speaker whose replies come when the test says so."""

    def __init__(self, line, held=lambda request: False):
        """Requests that are `held` wait for `release`; all others are answered at once."""
        self.line, self.held = line, held
        self.asked = []  # requests
        self.waiting = []  # (request, Future)

    def reply(self, request):
        return (yield self.submit(request))

    def submit(self, request):
        self.asked.append(request)
        reply = Future()
        self.waiting.append((request, reply))
        if not self.held(request):
            self.release()
        return reply

    def release(self, chosen=None):
        """Answer all requests, or those that `chosen` takes: all that are not held if None."""
        for request, reply in list(self.waiting):
            if chosen(request) if chosen else not self.held(request):
                self.waiting.remove((request, reply))
                reply.set_result(self.reply_to(request))

    def open(self):
        """Answer all requests, and hold none any more."""
        self.held = lambda request: False
        self.release()

    def reply_to(self, request):
        return utterances(self.line, request)


class Local(Speaker):
    """A speaker that computes in this process; it writes down its batches."""

    def __init__(self, line, name="", batches=None, note=lambda: None):
        self.line, self.name, self.note = line, name, note
        self.batches = [] if batches is None else batches  # (name, size, what `note` found)

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        self.batches.append((self.name, len(conversations), self.note()))
        requests = [speakers.interface.Request(messages, n, seed, task, key)
                    for messages, seed, task, key
                    in zip(conversations, seeds, tasks, keys, strict=True)]
        return [utterances(self.line, request) for request in requests]


class HeldReferee(Referee):
    """Its grades and views wait where `held` says so; all others are there at once."""

    def __init__(self, held=lambda what, task: False):
        self.held = held
        self.waiting = []  # (Future, its result)

    def answer(self, what, task, result):
        future = Future()
        if self.held(what, task):
            self.waiting.append((future, result))
        else:
            future.set_result(result)
        return future

    def grade(self, task, answer):
        return self.answer("grade", task, Grade(1.0, True, {}))

    def human_view(self, task, history, prompt):
        view = super().human_view(task, history, prompt).result()
        return self.answer("view", task, view)

    def open(self):
        """Answer all, and hold none any more."""
        self.held = lambda what, task: False
        for future, result in self.waiting:
            future.set_result(result)


TASKS = read_tasks("toy:backend:train", 40)
INDEX = {task["task_id"]: index for index, task in enumerate(TASKS)}


def index_of(request):
    return INDEX[request.key[0]]


def played(parties, count, in_flight, on_wait=lambda futures: None, last=lambda: None):
    """(the indices of the tasks in the order in which their dialogues end, the episodes).

    `last` is called once all dialogues but one have ended.
    """
    episodes = []

    def run():
        dialogues = (play(task, 0, parties, lambda: None) for task in TASKS[:count])
        for episode in interleave(dialogues, in_flight, on_wait):
            episodes.append(episode)
            if len(episodes) == count - 1:
                last()

    within(run)
    return [INDEX[episode["task"]["task_id"]] for episode in episodes], episodes


# -----------------------------------------------------------------------------
# Nobody waits for the slow reply of another dialogue


@pytest.mark.parametrize("party", ["agent", "human"])
def test_a_dialogue_never_waits_for_the_slow_reply_of_another_one(party):
    slow = Served(asker(lambda key: 3) if party == "agent" else human_line,
                  held=lambda request: index_of(request) == 0)
    quick = Served(human_line if party == "agent" else asker(lambda key: 3))
    agent, human = (slow, quick) if party == "agent" else (quick, slow)
    order, episodes = played(Parties(agent, human, HeldReferee(), RULES), 10, 3, last=slow.open)
    assert order[-1] == 0 and sorted(order) == list(range(10))
    assert all(episode["turns"] == 3 and not episode["error"] for episode in episodes)


@pytest.mark.parametrize("thoughts, error", [
    ("<think>\nThe hidden {0}\n</think>\n\n", None), ("The hidden {0}</think>", None),
    ("<think>The hidden {0}", "human: found thoughts that never end, expected"),
])
def test_the_agent_never_reads_the_humans_thoughts(thoughts, error):
    agent = Served(asker(lambda key: 2))
    human = Served(lambda request: thoughts.format("solution") + "Two digits.")
    _, (episode,) = played(Parties(agent, human, HeldReferee(), RULES), 1, 1)
    assert "hidden" not in str([request.messages[1:] for request in agent.asked])
    if error:
        assert episode["error"].startswith(error)
    else:
        assert episode["dialogue_history"][2]["content"] == "Two digits."


def test_the_agent_reads_how_many_turns_it_has_and_its_checkpoint_keeps_the_placeholder():
    rules = RULES._replace(agent_prompt="Send {max_turns}.", max_turns=3)
    agent, human = Served(asker(lambda key: 2)), Served(human_line)
    _, (episode,) = played(Parties(agent, human, HeldReferee(), rules), 1, 1)
    assert {request.messages[0]["content"] for request in agent.asked} == {"Send 3."}
    assert prompt_of_episode(episode) == "Send 3."
    assert custom_prompt([episode]) == "Send {max_turns}."


def test_as_many_dialogues_are_in_flight_as_the_batch_size_says():
    agent = Served(asker(lambda key: 1), held=lambda request: True)
    seen = []  # (dialogues that have started, futures under way)

    def release_one(futures):
        seen.append((len(agent.asked), futures))
        if agent.waiting:
            first = agent.waiting[0][0]
            agent.release(lambda request: request is first)

    played(Parties(agent, Served(human_line), HeldReferee(), RULES), 20, 6, release_one)
    assert max(futures for _, futures in seen) == 6
    assert all(futures == 6 for started, futures in seen if started < 20)


@pytest.mark.parametrize("what", ["grade", "view"])
@pytest.mark.parametrize("kind_of_party", [Served, Local])
def test_a_slow_judge_or_browser_does_not_stop_the_other_dialogues(what, kind_of_party):
    referee = HeldReferee(lambda kind, task: kind == what and INDEX[task["task_id"]] == 0)
    agent, human = asker(lambda key: 3), human_line
    parties = Parties(kind_of_party(agent), kind_of_party(human), referee, RULES)
    order, _ = played(parties, 10, 3, last=referee.open)
    assert order[-1] == 0 and sorted(order) == list(range(10))


# -----------------------------------------------------------------------------
# Local speakers


def test_a_local_agent_takes_all_that_wait_as_one_batch_while_replies_are_under_way():
    human = Served(human_line, held=lambda request: True)
    agent = Local(asker(lambda key: 2), note=lambda: len(human.waiting))

    def release_three(futures):
        first = [request for request, _ in human.waiting[:3]]
        human.release(lambda request: any(request is chosen for chosen in first))

    order, _ = played(Parties(agent, human, HeldReferee(), RULES), 8, 8, release_three)
    # all eight start; three replies come, and these three go on while five are under way
    assert agent.batches == [("", 8, 0), ("", 3, 5), ("", 3, 2), ("", 2, 0)]
    assert sorted(order) == list(range(8))


def test_two_local_speakers_alternate_with_full_batches():
    batches = []
    parties = Parties(Local(asker(lambda key: 4), "agent", batches),
                      Local(human_line, "human", batches), HeldReferee(), RULES)
    played(parties, 16, 8)
    round_of_four = [("agent", 8, None), ("human", 8, None)] * 3 + [("agent", 8, None)]
    assert batches == round_of_four * 2


def test_two_local_speakers_alternate_when_dialogues_end_at_different_times():
    batches = []
    agent = Local(asker(lambda key: 1 + INDEX[key[0]] % 5), "agent", batches)
    played(Parties(agent, Local(human_line, "human", batches), HeldReferee(), RULES), 40, 8)
    names = [name for name, _, _ in batches]
    alternations = sum(one != other for one, other in zip(names, names[1:], strict=False))
    assert alternations > 0.8 * len(names)
    turns = sum(1 + index % 5 for index in range(40))
    lockstep_calls = turns / 8  # of the agent, with every batch full to the end
    assert names.count("agent") < 1.6 * lockstep_calls


def test_the_local_speaker_that_most_wait_for_comes_first():
    batches = []
    first, second = Local(human_line, "first", batches), Local(human_line, "second", batches)

    def ask(speaker):
        request = speakers.interface.Request([{"role": "user", "content": "x"}])
        return (yield from speaker.reply(request))

    list(interleave([ask(first), ask(second), ask(second), ask(first), ask(second)], 5))
    assert [(name, size) for name, size, _ in batches] == [("second", 3), ("first", 2)]


# -----------------------------------------------------------------------------
# The same bytes, whatever the batch size and the order of arrival


def collected(folder, url, batch_size, agent=None, more=()):
    """The text of the episodes that collect.py's main makes with servers at `url`."""
    folder.mkdir()
    flags = ["--tasks", "toy:backend:train", "--num_tasks", 12, "--samples_per_task", 2,
             "--human", url, "--human_model", "human", "--batch_size", batch_size,
             "--output", folder / "episodes.jsonl", *more]
    flags += ["--agent", agent] if agent else ["--agent", url, "--agent_model", "agent"]
    collect.main(collect.parse_args([str(flag) for flag in flags]))
    return (folder / "episodes.jsonl").read_text()


def test_two_served_parties_give_the_same_bytes_at_any_batch_size_and_order_of_arrival(tmp_path):
    with slow_server(mean=0.01) as server:  # its latencies are drawn anew for each request
        texts = [collected(tmp_path / str(run), server.url, batch_size)
                 for run, batch_size in enumerate([1, 5, 24, 24])]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert len(rows) == 24 and not any(row["error"] for row in rows)
    assert len({row["turns"] for row in rows}) > 2
    assert texts == [texts[0]] * 4


def test_a_local_agent_and_a_served_human_give_the_same_bytes_at_any_batch_size(tmp_path, tiny):
    more = ["--max_new_tokens", 6, "--max_turns", 3]
    with slow_server(mean=0.01) as server:
        texts = [collected(tmp_path / str(run), server.url, batch_size, tiny(), more)
                 for run, batch_size in enumerate([1, 5, 24, 24])]
    assert texts[0].count("\n") == 24
    assert len({json.loads(line)["dialogue_history"][1]["content"]
                for line in texts[0].splitlines()}) > 12
    assert texts == [texts[0]] * 4


# -----------------------------------------------------------------------------
# Failures


class Failing(Served):
    """It cannot answer some requests, and dies after `lives` requests."""

    def __init__(self, line, fails=lambda request: False, lives=None):
        super().__init__(line)
        self.fails, self.lives = fails, lives

    def reply_to(self, request):
        if self.lives is not None and len(self.asked) > self.lives:
            self.given_up = "it is down"
            return SpeakerError("it is down")
        if self.fails(request):
            return SpeakerError("too long", refused=True)
        return super().reply_to(request)


def collect_with(monkeypatch, output, agent, human, count=20, in_flight=4):
    """collect_episodes for `count` tasks, with these parties and the real judge."""
    parties = {"agent": agent, "human": human}
    monkeypatch.setattr(collect, "load_speaker", lambda spec, role, *_: parties[role])
    settings = collect.RolloutSettings(
        "a", SpeakerSettings(batch_size=in_flight), "h", SpeakerSettings(), RULES,
        RefereeSettings(workers=1), {"agent": "a", "human": "h"})
    jobs = collect.all_jobs(TASKS[:count], 1)
    return within(lambda: collect.collect_episodes(jobs, settings, output, ALONE), 60)


def rows_under(folder):
    """task index -> episode, of all files of a run."""
    found = {}
    for path in folder.glob("episodes.jsonl*"):
        if path.suffix == ".jsonl" or ".rank" in path.name:
            for line in path.read_text().splitlines():
                row = json.loads(line)
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
    errors = [episode["error"] for episode in episodes]
    assert errors[5] == f"{party}: too long" and errors.count(None) == 19
    assert episodes[5]["reward"] is None and episodes[5]["turns"] >= 1


def test_a_dead_server_ends_the_run_with_what_was_in_flight_on_disk_and_a_rerun_resumes(
        tmp_path, monkeypatch):
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


# -----------------------------------------------------------------------------
# Best of N


def pick_plus_signs(count):
    """A grader's line: it names the candidate that ends in `count` plus signs."""
    def line(request):
        lines = request.messages[0]["content"].splitlines()
        named = [text for text in lines if text.endswith("?" + "+" * count)]
        return named[-1][:3] if named else "none of them"

    return line


def best_of(monkeypatch, agent, grader, count):
    monkeypatch.setattr(evaluate, "load_speaker", lambda *_: grader)
    return evaluate.BestOfN(agent, evaluate.GraderModel("spec", SpeakerSettings()), count)


def test_best_of_n_with_a_served_agent_and_grader_waits_for_no_other_dialogue(monkeypatch):
    task_0 = TASKS[0]["problem_description"]
    grader = Served(pick_plus_signs(2), held=lambda request: task_0 in str(request.messages))
    agent = Served(asker(lambda key: 3))
    parties = Parties(best_of(monkeypatch, agent, grader, 4), Served(human_line), HeldReferee(),
                      RULES)
    order, episodes = played(parties, 10, 3, last=grader.open)
    assert order[-1] == 0 and sorted(order) == list(range(10))
    assert all(request.n == 4 for request in agent.asked)
    for episode in episodes:
        said = [message["output"] for message in episode["dialogue_history"]
                if message["role"] == "assistant"]
        assert said[:2] == ["What about 0?++", "What about 1?++"]
        assert said[2] == f"{ANSWER_MARKER} x = 2"  # the grader names none: the first


def test_a_grader_that_dies_ends_the_run_and_no_candidate_passes_that_it_did_not_choose(
        tmp_path, monkeypatch):
    grader = Failing(pick_plus_signs(1), lives=5)
    agent = best_of(monkeypatch, Served(asker(lambda key: 3)), grader, 2)
    assert agent.given_up is None
    output = tmp_path / "episodes.jsonl"
    with pytest.raises(SystemExit, match="it is down.*rerun the same command to resume"):
        collect_with(monkeypatch, output, agent, Served(human_line))
    rows = rows_under(tmp_path).values()
    assert len(rows) == 4  # what was in flight
    assert all(row["error"] == "agent: grader: it is down" for row in rows)  # a rerun plays them
    outputs = [turn["output"] for row in rows for turn in row["dialogue_history"][1::2]]
    assert len(outputs) == 5 and all(output.endswith("+") for output in outputs)


# -----------------------------------------------------------------------------
# Candidates


def states(count):
    return [({"task": task, "sample": 0}, 0, [{"role": "user", "content": task["task_id"]}])
            for task in TASKS[:count]]


def sample(monkeypatch, policy, folder, batch_size=8):
    """sample_candidates of 30 states, 4 candidates each."""
    monkeypatch.setattr(train_policy, "load_speaker", lambda *_: policy)
    sampling = train_policy.Sampling("http://s", SpeakerSettings(batch_size=batch_size), 4, seed=0)
    return within(lambda: train_policy.sample_candidates(states(30), sampling, folder, ALONE))


def test_no_candidate_is_drawn_with_the_numbers_of_a_message_of_its_episode(
        monkeypatch, tmp_path):
    agent, human = Served(asker(lambda key: 9)), Served(human_line)
    _, episodes = played(Parties(agent, human, HeldReferee(), RULES), 5, 1)
    policy = Served(asker(lambda key: 9))
    monkeypatch.setattr(train_policy, "load_speaker", lambda *_: policy)
    sampling = train_policy.Sampling("http://s", SpeakerSettings(), 4, seed=RULES.seed)
    of_episodes = list(states_of(episodes))
    within(lambda: train_policy.sample_candidates(of_episodes, sampling, tmp_path, ALONE))
    assert len(policy.asked) == 5 * 9
    drawn = {request.seed for request in policy.asked}
    assert len(drawn) == 5 * 9
    assert not drawn & {request.seed for request in agent.asked + human.asked}


class UntilTheLast(Served):
    """Its first reply comes once the last of `count` requests is there."""

    def __init__(self, line, count):
        super().__init__(line, held=lambda request: request is self.asked[0])
        self.count = count

    def submit(self, request):
        reply = super().submit(request)
        if len(self.asked) == self.count:
            self.open()
        return reply


def content_of(request):
    return request.messages[0]["content"]


def test_candidates_of_a_server_are_sampled_without_waiting_for_the_slowest(tmp_path, monkeypatch):
    expected = sample(monkeypatch, Served(content_of), tmp_path / "quick")
    rows = sample(monkeypatch, UntilTheLast(content_of, 30), tmp_path / "slow")
    assert rows == expected
    assert [row["task_id"] for row in rows] == [task["task_id"] for task in TASKS[:30]]
    assert rows[3]["candidates"] == [TASKS[3]["task_id"] + "+" * index for index in range(4)]
    files = [(tmp_path / name / "candidates.sampled.jsonl").read_bytes()
             for name in ("quick", "slow")]
    assert files[0] == files[1]


def test_sampling_stops_at_a_failure_with_what_was_in_flight_on_disk_and_a_rerun_resumes(
        tmp_path, monkeypatch):
    expected = sample(monkeypatch, Served(content_of), tmp_path / "whole")
    dying = Failing(content_of, lives=10)
    with pytest.raises(SystemExit, match="it is down.*rerun the same command to resume"):
        sample(monkeypatch, dying, tmp_path / "died")
    assert 10 < len(dying.asked) < 30
    alive = Served(content_of)
    assert sample(monkeypatch, alive, tmp_path / "died") == expected
    assert len(alive.asked) == 20


# -----------------------------------------------------------------------------
# The file that grows


def store(path):
    return ResumableJsonl(path, lambda row: row["key"], ALONE, lambda row: not row.get("error"))


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
            store(path).refuse_unfinished(path)
    store(path).finish([0])
    assert names(tmp_path) == ["rows.jsonl"]
    store(path).append({"key": 1})  # a rerun that is to make more rows
    assert names(tmp_path) == ["rows.jsonl.rank0"]
    assert [row["key"] for row in store(path).finish([0, 1])] == [0, 1]


def test_a_file_of_the_users_whose_name_begins_like_a_ranks_is_left_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    for name in ("rows.jsonl.ranked", "rows.jsonl.rank0.bak"):
        (tmp_path / name).write_text(line(7))
    rows = store(path)
    rows.append({"key": 0})
    assert [row["key"] for row in rows.finish([0])] == [0]
    assert names(tmp_path) == ["rows.jsonl", "rows.jsonl.rank0.bak", "rows.jsonl.ranked"]
    rows.refuse_unfinished(path)


def test_a_row_that_is_missing_at_the_end_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = store(path)
    rows.append({"key": "a"})
    with pytest.raises(SystemExit, match=r"no row of b \(2 of 3 are missing\).*same command"):
        rows.finish(["a", "b", "c"])
    assert store(path).rows == {"a": {"key": "a"}}


def test_nothing_is_played_twice_after_a_run_of_another_world_size(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    whole = collect_with(monkeypatch, tmp_path / "whole" / "episodes.jsonl",
                         Served(asker(lambda key: 3)), Served(human_line))
    output = tmp_path / "episodes.jsonl"
    for rank in range(3):
        mine = "".join(json.dumps(row) + "\n" for row in whole[rank:15:3])
        half = json.dumps(whole[15 + rank])[:200]
        (tmp_path / f"episodes.jsonl.rank{rank}").write_text(mine + half)
    agent = Served(asker(lambda key: 3))
    assert collect_with(monkeypatch, output, agent, Served(human_line)) == whole
    assert {index_of(request) for request in agent.asked} == set(range(15, 20))
    assert sorted(file.name for file in tmp_path.glob("*rank*")) == []
    assert output.read_bytes() == (tmp_path / "whole" / "episodes.jsonl").read_bytes()


# -----------------------------------------------------------------------------
# A large run against a server that fails


@pytest.mark.slow
def test_two_thousand_dialogues_survive_a_fifth_of_faults_in_time(tmp_path, monkeypatch, capsys):
    timeout, in_flight = 1.6, 64
    quick = functools.partial(ServerSpeaker, pause=0.005, timeout=timeout)
    monkeypatch.setattr(speakers, "ServerSpeaker", quick)
    seconds, digests = {}, {}
    for name, fault_rate in (("healthy", 0.0), ("failing", 0.2)):
        with slow_server(mean=0.3, fault_rate=fault_rate, answer_rate=0.6) as server:
            began = time.monotonic()
            flags = ["--tasks", "toy:backend:train", "--num_tasks", 500, "--samples_per_task", 4,
                     "--agent", server.url, "--agent_model", "agent", "--human", server.url,
                     "--human_model", "human", "--batch_size", in_flight,
                     "--output", tmp_path / name]
            collect.main(collect.parse_args([str(flag) for flag in flags]))
            seconds[name] = time.monotonic() - began
            figures = server.figures()
        text = (tmp_path / name).read_text().replace(server.url, "URL")
        assert text.count("\n") == 2000 and text.count('"error": null') == 2000
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    assert digests["healthy"] == digests["failing"]
    counts = figures["counts"]
    assert counts["requests"] - counts["replies"] > 0.15 * counts["requests"]
    timeouts = counts["silence"] * timeout / in_flight
    with capsys.disabled():
        print(f"\n2,000 dialogues: {seconds['healthy']:.1f} s without faults,"
              f" {seconds['failing']:.1f} s with {counts}, time-outs {timeouts:.1f} s")
    assert seconds["failing"] <= 1.5 * seconds["healthy"] + timeouts
