"""Rollouts against a real OpenAI-compatible server that fails in every way it can. Run: pytest tests/test_servers.py"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT

import colbench
import collect
import train_policy
from colbench import SpeakerError, Utterance, derive_seed, load_speaker, read_tasks

TIMEOUT = 0.3  # of the client, in seconds
FAULTS = ("429", "500", "503", "error without end", "cut body", "not JSON", "not an object", "empty choices",
          "no text", "silence", "closed connection")

# -----------------------------------------------------------------------------
# The server


class Server(ThreadingHTTPServer):
    """Answers from (messages, seed) alone; a seeded share of the calls fails instead, and all do once it is dead."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer, fault_rate=0.0, faults=FAULTS, dies_after=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.fault_rate, self.faults, self.dies_after = answer, fault_rate, faults, dies_after
        self.draw, self.lock, self.calls, self.seen, self.keys = random.Random(0), threading.Lock(), 0, set(), set()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def fault(self):
        with self.lock:
            self.calls += 1
            if self.dies_after is not None and self.calls > self.dies_after:
                return "503"
            fault = self.draw.choice(self.faults) if self.draw.random() < self.fault_rate else None
            self.seen.add(fault)
            return fault

    def handle_error(self, request, client_address):
        """Clients that hang up are part of the game."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Quiet."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers.get("Authorization"))
        fault = self.server.fault()
        choices = [{"message": {"role": "assistant", "content": self.server.answer(body, derive_seed(body["seed"], number))},
                    "finish_reason": "stop"} for number in range(body["n"])]
        whole = json.dumps({"choices": choices}).encode()
        if fault == "closed connection":
            self.close_connection = True
        elif fault == "silence":
            time.sleep(2 * TIMEOUT)
        elif fault == "error without end":
            self.reply(500, b"{", length=100)
            self.wfile.flush()
            time.sleep(2 * TIMEOUT)
        elif fault == "cut body":
            self.reply(200, whole[:len(whole) // 2], length=len(whole))
        elif fault in ("429", "500", "503"):
            self.reply(int(fault), f"busy, {self.headers.get('Authorization')}".encode())
        else:
            self.reply(200, {"not JSON": b"<html>", "not an object": b'["choices"]', "empty choices": b'{"choices": []}',
                             "no text": b'{"choices": [{"message": {"content": null}}]}'}.get(fault, whole))

    def reply(self, status, body, length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def running(answer, **options):
    server = Server(answer, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def echo(body, seed):
    """A text that depends on the messages and the seed and on nothing else."""
    return hashlib.sha256(json.dumps([body["messages"], seed]).encode()).hexdigest()


def toy_answer(tasks):
    """The scripted agent and human behind a server: the model name says which, the request says which task."""
    by_request = {task["problem_description"]: task for task in tasks}

    def answer(body, seed):
        text = json.dumps([message["content"] for message in body["messages"][:2]])
        task = next(task for request, task in by_request.items() if json.dumps(request)[1:-1] in text)
        human, demonstrator = colbench.TOY_SPEAKERS["backend"]
        messages = [message for message in body["messages"] if message["role"] != "system"]
        if body["model"] == "human":
            return human(task, messages)
        return demonstrator(task, messages, random.Random(seed), False)

    return answer


def toy_tasks(folder, count):
    """(file, tasks): embedded tasks whose requests are all different, so that the server can tell them apart."""
    tasks = [task | {"problem_description": f"{task['problem_description']} Ticket {number} of {count}."}
             for number, task in enumerate(read_tasks("toy:backend:train", count))]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder / "tasks.jsonl", tasks


@pytest.fixture
def impatient(monkeypatch):
    """A client that waits milliseconds where a user's waits minutes."""
    patient = colbench.ServerSpeaker
    monkeypatch.setattr(colbench, "ServerSpeaker", functools.partial(patient, pause=0.005, timeout=TIMEOUT))


# -----------------------------------------------------------------------------
# The speaker

CONVERSATIONS = [[{"role": "user", "content": f"question {number}"}] for number in range(40)]


def test_the_texts_are_those_of_the_server_for_these_messages_and_seeds():
    with running(echo) as server:
        speaker = load_speaker(server.url)
        said = speaker.speak(CONVERSATIONS, n=3, seeds=range(40))
        assert said == speaker.speak(CONVERSATIONS, n=3, seeds=range(40))
        assert said[7] == load_speaker(server.url + "/").speak([CONVERSATIONS[7]], n=3, seeds=[7])[0]
        assert len({utterance for utterances in said for utterance in utterances}) == 120
        assert said != speaker.speak(CONVERSATIONS, n=3, seeds=range(1, 41))
    assert server.keys == {None}


def test_as_many_requests_are_in_flight_as_dialogues_are_played():
    together = threading.Barrier(100)

    def answer(body, seed):
        together.wait(10)  # breaks unless so many are here at the same time
        return echo(body, seed)

    with running(answer) as server:
        load_speaker(server.url, batch_size=100).speak([CONVERSATIONS[0]] * 100)
    assert not together.broken


def test_a_server_that_ignores_n_is_asked_until_there_are_enough():
    with running(echo) as server:
        answer = server.answer
        server.RequestHandlerClass = type("One", (Handler,), {"do_POST": lambda self: one_choice(self, answer)})
        said = load_speaker(server.url).speak(CONVERSATIONS[:2], n=3)
    assert all(len({u.text for u in utterances}) == 3 and not utterances[0].finished for utterances in said)


def one_choice(handler, answer):
    body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
    choice = {"message": {"content": f" {answer(body, body['seed'])}\n"}, "finish_reason": "length"}
    handler.reply(200, json.dumps({"choices": [choice]}).encode())


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_survived_and_changes_no_text(impatient, fault):
    with running(echo) as server:
        expected = load_speaker(server.url).speak(CONVERSATIONS, seeds=range(40))
    with running(echo, fault_rate=0.2, faults=[fault]) as server:
        assert load_speaker(server.url).speak(CONVERSATIONS, seeds=range(40)) == expected
    assert server.seen == {None, fault}


def test_a_request_that_is_wrong_is_not_repeated_and_does_not_speak_against_the_server(impatient):
    with running(echo) as server:
        server.RequestHandlerClass = type("Refusing", (Handler,), {"do_POST": lambda self: self.reply(400, b"too long")})
        speaker, calls = load_speaker(server.url), []
        speaker._post = lambda body, post=speaker._post: calls.append(body) or post(body)
        for _ in range(2):
            said = speaker.speak(CONVERSATIONS)
            assert all(isinstance(error, SpeakerError) and "HTTP 400: too long" in str(error) for error in said)
            assert all(error.refused for error in said)
        assert len(calls) == 80


class Short(Handler):
    """Takes one message and no more."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choices = [{"message": {"content": "said"}, "finish_reason": "stop"}] * body["n"]
        short = len(body["messages"]) == 1
        self.reply(200 if short else 400, json.dumps({"choices": choices}).encode() if short else b"too long")


def test_a_state_that_a_server_refuses_is_left_out_of_the_candidates_and_the_rest_is_kept(tmp_path, capsys):
    states = [(None, turn, [{"role": "user", "content": "x"}] * (turn + 1)) for turn in range(3)]
    with running(echo) as server:
        server.RequestHandlerClass = Short
        args = train_policy.parse_args(["--method", "sweet", "--critic", "c", "--episodes", "e", "--model", "m", "--output",
                                        str(tmp_path), "--sampler", server.url, "--num_candidates", "2"])
        rows = train_policy.sample_candidates(states, [("t", 0, turn) for turn in range(3)], args,
                                              collect.Process(0, 1, "cpu"))
    assert [(row["turn"], row["candidates"]) for row in rows] == [(0, ["said", "said"])]
    assert capsys.readouterr().out.count("left out") == 2


def test_a_dead_server_is_given_up_and_the_message_says_what_to_do(impatient):
    with running(echo, dies_after=0) as server:
        speaker = load_speaker(server.url)
        assert all(isinstance(said, SpeakerError) for said in speaker.speak(CONVERSATIONS))
        with pytest.raises(SystemExit, match="no answer to many requests .*HTTP 503.*start it again, then give the same"):
            speaker.speak(CONVERSATIONS)


def test_a_silent_server_costs_six_time_limits_and_not_one_for_every_conversation():
    with running(echo, fault_rate=1.0, faults=["silence"]) as server:
        speaker, began = colbench.ServerSpeaker(server.url, None, 1.0, 8, pause=0.001, timeout=0.1), time.monotonic()
        with pytest.raises(SystemExit, match="no answer to many requests in a row"):
            for conversation in CONVERSATIONS:  # one at a time: the slowest way to notice
                speaker.speak([conversation])
        assert 0.6 < time.monotonic() - began < 5


def test_by_default_no_refused_request_waits_longer_than_a_minute():
    speaker = colbench.ServerSpeaker("http://127.0.0.1:9/v1", None, 1.0, 8)
    assert sum(speaker.pause * 2**attempt for attempt in range(speaker.retries - 1)) < 60


# -----------------------------------------------------------------------------
# Whole collections


def collected(folder, tasks, url, human="scripted", batch_size=64):
    """The bytes of the episodes that collect.py's main makes of `tasks`, in this process."""
    argv = ["--tasks", tasks, "--agent", url, "--agent_model", "agent", "--human", human, "--human_model", "human",
            "--batch_size", batch_size, "--samples_per_task", 1, "--output", folder / "episodes.jsonl"]
    collect.main(collect.parse_args(list(map(str, argv))))
    return (folder / "episodes.jsonl").read_text()


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_dialogues_are_the_same_with_a_fifth_of_the_calls_failing(impatient, tmp_path, count):
    file, tasks = toy_tasks(tmp_path, count)
    texts = []
    for name, rate in (("healthy", 0.0), ("failing", 0.2)):
        (tmp_path / name).mkdir()
        with running(toy_answer(tasks), fault_rate=rate) as server:
            texts.append(collected(tmp_path / name, file, server.url, server.url).replace(server.url, "URL"))
    assert texts[0] == texts[1] and texts[0].count("\n") == count and server.seen == {None, *FAULTS}
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert not any(row["error"] for row in rows) and len({row["reward"] for row in rows}) > 1


def test_a_server_that_dies_leaves_what_was_finished_and_a_rerun_completes(impatient, tmp_path):
    file, tasks = toy_tasks(tmp_path, 40)
    (tmp_path / "whole").mkdir()
    with running(toy_answer(tasks)) as server:
        expected = collected(tmp_path / "whole", file, server.url, batch_size=8).replace(server.url, "URL")
    with running(toy_answer(tasks), dies_after=120) as server:
        with pytest.raises(SystemExit, match="give the same command again to go on"):
            collected(tmp_path, file, server.url, batch_size=8)
        rows = [json.loads(line) for line in open(tmp_path / "episodes.jsonl")]
        finished = {row["task"]["task_id"]: row for row in rows if not row["error"]}
        assert finished and all("HTTP 503" in row["error"] for row in rows if row["error"])
        server.dies_after = None
        text = collected(tmp_path, file, server.url, batch_size=8)
    assert text.replace(server.url, "URL") == expected
    again = {row["task"]["task_id"]: row for row in map(json.loads, text.splitlines())}
    assert {name: again[name] for name in finished} == finished


def test_no_server_at_all_ends_at_once_with_the_reason_and_what_to_do(impatient, tmp_path, capsys):
    file, _ = toy_tasks(tmp_path, 3)
    with pytest.raises(SystemExit, match="every dialogue failed"):  # a recipe stops here
        collected(tmp_path, file, "http://127.0.0.1:9/v1")
    rows = [json.loads(line) for line in open(tmp_path / "episodes.jsonl")]
    assert len(rows) == 3 and all("refused" in row["error"] and row["reward"] is None for row in rows)
    assert "Give the same command again" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# Secrets


def test_the_api_key_goes_to_the_server_and_nowhere_else(tmp_path):
    key = "sk-this-is-secret"
    file, tasks = toy_tasks(tmp_path, 3)
    with running(toy_answer(tasks), fault_rate=0.2, faults=["500"]) as server:
        command = [sys.executable, ROOT / "collect.py", "--tasks", file, "--agent", server.url, "--agent_model", "agent",
                   "--output", tmp_path / "out/episodes.jsonl"]
        run = subprocess.Popen(list(map(str, command)), env=os.environ | {"OPENAI_API_KEY": key}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        environments = set()
        while run.poll() is None:
            environments |= children_environments(run.pid)
            time.sleep(0.01)
        printed = run.stdout.read()
    assert run.returncode == 0, printed
    assert server.keys == {f"Bearer {key}"} and key not in printed
    assert environments and not any(key.encode() in environment for environment in environments)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3 and not any(key.encode() in path.read_bytes() for path in files)


def children_environments(parent):
    """The environments of the judge's workers that `parent` has started; before its exec, a child still has the parent's."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rsplit(")", 1)[1].split()[1]) == parent and \
                    b"judge-worker" in (status.parent / "cmdline").read_bytes():
                found.add((status.parent / "environ").read_bytes())
    return found


def test_a_server_that_repeats_the_api_key_does_not_get_it_into_an_error(impatient, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret")
    with running(echo, dies_after=0) as server:
        errors = load_speaker(server.url).speak(CONVERSATIONS[:2])
    assert all("busy, Bearer (the API key)" in str(error) and "sk-" not in str(error) for error in errors)


# -----------------------------------------------------------------------------
# A real server


@pytest.mark.slow
def test_transformers_serve_answers_as_the_local_speaker_does(tiny):
    if not importlib.util.find_spec("fastapi") or not importlib.util.find_spec("uvicorn"):
        pytest.skip("transformers serve is not installed; pip install 'transformers[serving]==5.23.0'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, conversation = f"http://127.0.0.1:{port}/v1", [{"role": "user", "content": "word " * 9}]
        speaker, deadline = load_speaker(url, model_name=tiny(), temperature=0.0, max_new_tokens=8), time.monotonic() + 120
        while isinstance(said := speaker.speak([conversation])[0], SpeakerError) and time.monotonic() < deadline:
            speaker.failures_in_a_row = 0
        local = load_speaker(tiny(), temperature=0.0, max_new_tokens=8).speak([conversation])[0]
        assert isinstance(said[0], Utterance) and said[0].text == local[0].text
    finally:
        server.terminate()
        server.wait(30)
