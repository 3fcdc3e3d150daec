"""Rollouts against an OpenAI-compatible server that fails in every way it can."""

import email.utils
import functools
import hashlib
import itertools
import json
import re
import ssl
import threading
import time
import types
from unittest import mock
from urllib.request import ProxyHandler

import pytest
from chat_server import FAULTS, SENSELESS_BODIES, TIMEOUT, running, small_talk
from conftest import ROOT, dialogue, read_rows, run_script
from parties import ask_all, collect_now

import speakers
from colbench import without_thoughts
from runtime.files import whole_rows
from runtime.names import check_spec
from speakers import load_speaker
from speakers.interface import Request, SpeakerError, SpeakerSettings, Utterance, stop_if_given_up
from speakers.pool import run as run_jobs
from speakers.server import (
    MAX_FAILURES_IN_A_ROW, Refused, ServerSpeaker, opener_for, refused_parameter, utterances_of)

# -----------------------------------------------------------------------------
# The speaker

CONVERSATIONS = [dialogue(f"question {index}") for index in range(40)]


def echo(body, seed):
    """A text that depends on the messages and the seed and on nothing else."""
    return hashlib.sha256(json.dumps([body["messages"], seed]).encode()).hexdigest()


@pytest.fixture
def impatient(monkeypatch):
    """A client that waits milliseconds where a user's waits minutes."""
    quick = functools.partial(ServerSpeaker, pause=0.005, timeout=TIMEOUT)
    monkeypatch.setattr(speakers, "ServerSpeaker", quick)


def test_the_texts_are_those_of_the_server_for_these_messages_and_seeds():
    with running(echo) as server:
        speaker = load_speaker(server.url)
        answers = ask_all(speaker, CONVERSATIONS, n=3, seeds=range(40))
        assert answers == ask_all(speaker, CONVERSATIONS, n=3, seeds=range(40))
        other = load_speaker(server.url + "/")
        assert answers[7] == ask_all(other, [CONVERSATIONS[7]], n=3, seeds=[7])[0]
        assert len({utterance for utterances in answers for utterance in utterances}) == 120
        assert answers != ask_all(speaker, CONVERSATIONS, n=3, seeds=range(1, 41))
    assert server.seen_keys == {None}


def test_a_server_on_this_machine_is_asked_without_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody is
    with running(echo) as server:
        assert ask_all(load_speaker(server.url), CONVERSATIONS[:1])[0][0].finished


@pytest.mark.parametrize("host, direct", [
    ("localhost", True), ("node7", True), ("0.0.0.0", True), ("10.1.2.3", True), ("[::1]", True),
    ("api.openai.com", False), ("8.8.8.8", False)])
def test_a_server_of_this_network_is_asked_without_the_proxy(monkeypatch, host, direct):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    handlers = opener_for(f"http://{host}:8000/v1").handlers
    assert direct is not any(isinstance(handler, ProxyHandler) for handler in handlers)


def test_a_failure_behind_a_proxy_names_the_proxy_and_the_way_around_it(impatient, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hint = "through the proxy of .* http_proxy; no_proxy=gpu7.example.org would"
    with refusing(403) as proxy:  # a cluster's proxy, which does not know the cluster's nodes
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        error, = ask_all(load_speaker("http://gpu7.example.org:8000/v1"), CONVERSATIONS[:1])
        assert re.search(f"HTTP 403: no such thing; asked {hint}", str(error))
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")  # where nobody is
    with pytest.raises(SystemExit, match=f"found no server .*refused; asked {hint}") as end:
        load_speaker("http://gpu7.example.org:8000/v1")
    assert "secret" not in str(end.value)
    with pytest.raises(SystemExit) as end:
        load_speaker("http://127.0.0.1:9/v1")
    assert "proxy" not in str(end.value)  # it was asked directly


def test_a_host_that_refuses_urllibs_own_name_answers():
    def refuse(handler, body=None):
        return handler.headers["User-Agent"].startswith("Python-urllib") and handler.reply(403, b"")

    with running(echo, models=["m"], get=refuse, say=refuse) as server:
        assert ask_all(load_speaker(server.url), CONVERSATIONS[:1])[0][0].finished


REFUSALS = {  # of OpenAI's reasoning models, of Claude behind Bedrock, of Gemini and older Azure
    "max_tokens": "Unsupported parameter: 'max_tokens'.",
    "top_p": "`temperature` and `top_p` cannot both be specified for this model",
    "seed": 'Unknown name "seed": Cannot find field. Unrecognized request argument supplied: seed',
}


def reasoning_model(handler, body):
    """Refuses what some hosts refuse."""
    for name, words in REFUSALS.items():
        if name in body:
            return handler.reply(400, words.encode())
    return handler.choose({"content": str(body["max_completion_tokens"])})


def test_a_parameter_that_a_server_refuses_is_renamed_or_left_out(impatient):
    with running(echo, say=reasoning_model) as server:
        speaker = load_speaker(server.url, settings=SpeakerSettings(max_new_tokens=7))
        answers = ask_all(speaker, CONVERSATIONS[:3])
        assert [utterances[0].text for utterances in answers] == ["7"] * 3
        before = server.calls
        ask_all(speaker, CONVERSATIONS[:3])
        assert server.calls == before + 3  # it is not asked with them again


@pytest.mark.parametrize("reason", [
    "Unsupported parameter: 'seed'.", "'seed' is not supported with this model",
    "seed: Extra inputs are not permitted", 'Unknown name "seed": Cannot find field.',
    "Unrecognized request argument supplied: seed",
    "`temperature` and `seed` cannot both be specified for this model",
    "Input validation error: `seed` must be > 0.0 and < 1.0",
    "`seed` is deprecated for this model."])
def test_every_word_for_a_refusal_names_the_parameter(reason):
    assert refused_parameter(reason, {"seed": 0}) == "seed"


@pytest.mark.parametrize("reason, name", [
    ("invalid top_p: only 0.95 is allowed for this model", "top_p"),  # Kimi
    ("Range of top_p should be (0.0, 1.0)", "top_p"),  # Qwen
    ("Range of max_tokens should be [1, 8192]", None)])  # the user's own number is wrong
def test_a_top_p_whose_range_has_no_1_is_left_out_and_a_token_limit_stays(reason, name):
    assert refused_parameter(reason, {"max_tokens": 9000, "top_p": 1, "seed": 0}) == name


def test_a_refusal_that_no_substitute_mends_changes_no_later_request(impatient):
    def say(handler, body):
        if "BAD" in body["messages"][0]["content"]:
            return handler.reply(400, b"content type not supported: BAD, a seed of max_tokens")
        return handler.choose({"content": f"{body['seed']} {body['max_tokens']}"})

    with running(echo, say=say) as server:
        speaker = load_speaker(server.url)
        before = ask_all(speaker, CONVERSATIONS[:1])
        assert "HTTP 400" in str(ask_all(speaker, [dialogue("BAD")])[0])
        assert ask_all(speaker, CONVERSATIONS[:1]) == before


def one_choice(handler, body):
    """Ignores `n`."""
    return handler.choose({"content": f" {echo(body, body['seed'])}\n"}, "length")


def test_a_server_that_ignores_n_is_asked_until_there_are_enough():
    with running(echo, say=one_choice) as server:
        answers = ask_all(load_speaker(server.url), CONVERSATIONS[:2], n=3)
    for utterances in answers:
        assert len({utterance.text for utterance in utterances}) == 3
        assert not utterances[0].finished


def test_a_server_that_gives_more_texts_than_were_asked_for_gives_no_more_than_those():
    def say(handler, body):
        choices = [{"message": {"content": f"text {index}"}} for index in range(5)]
        return handler.reply(200, json.dumps({"choices": choices}).encode())

    with running(echo, say=say) as server:
        texts, = ask_all(load_speaker(server.url), CONVERSATIONS[:1], n=3)
    assert [utterance.text for utterance in texts] == ["text 0", "text 1", "text 2"]


def only_one(handler, body):
    """Refuses more than one choice, as it refuses what is too long."""
    if body["n"] > 1 or "too long" in body["messages"][0]["content"]:
        return handler.reply(400, b"no")
    return handler.choose({"content": echo(body, body["seed"])})


def test_a_server_that_refuses_n_is_asked_once_for_each_text(impatient):
    with running(echo, say=only_one) as server:
        speaker = load_speaker(server.url)
        with pytest.raises(SpeakerError, match="HTTP 400"):
            speaker.reply(Request(dialogue("too long"), 3))
        assert not speaker.refuses_n  # it was the length
        texts = {utterance.text for messages in CONVERSATIONS[:2]
                 for utterance in speaker.reply(Request(messages, 3))}
    assert len(texts) == 6
    assert server.calls == 2 + 1 + 6


def test_one_odd_refusal_does_not_change_the_texts_of_later_states():
    def refuses_second(handler, body):
        return handler.server.calls == 2 and handler.reply(400, b"Provider returned error")

    with running(echo) as server:
        expected = ask_all(load_speaker(server.url), CONVERSATIONS[:3], n=4)
    with running(echo, say=refuses_second) as server:
        speaker = load_speaker(server.url)
        said = [ask_all(speaker, [messages], n=4)[0] for messages in CONVERSATIONS[:3]]
    assert [said[0], said[2]] == [expected[0], expected[2]] and len(said[1]) == 4


def one_seed(body, seed):
    """Draws all choices of a request with its own seed."""
    return echo(body, body["seed"])


def test_texts_that_a_server_has_drawn_with_one_seed_are_drawn_one_by_one():
    with running(one_seed) as server:
        speaker = load_speaker(server.url)
        said = ask_all(speaker, CONVERSATIONS[:2], n=4)
        assert [len({utterance.text for utterance in of_one}) for of_one in said] == [4, 4]
        assert said == ask_all(speaker, CONVERSATIONS[:2], n=4)  # a rerun draws the same
        greedy = load_speaker(server.url, settings=SpeakerSettings(temperature=0))
        said, = ask_all(greedy, CONVERSATIONS[:1], n=4)
        assert len(said) == 4 and len(set(said)) == 1


def test_texts_that_agree_because_the_model_is_sure_are_taken_as_they_are():
    with running(lambda body, seed: "Yes.") as server:
        said, = ask_all(load_speaker(server.url), CONVERSATIONS[:1], n=16)
    assert said == [Utterance("Yes.", True)] * 16
    assert server.calls == 2


THOUGHT = {"role": "assistant", "reasoning_content": "hm"}


@pytest.mark.parametrize("message, reason, text", [
    ({"content": None}, "length", None), ({}, "length", None), ({"content": None}, "stop", ""),
    (THOUGHT | {"content": ""}, "length", None), (THOUGHT | {"content": "\n"}, "length", None),
    (THOUGHT | {"content": ""}, "stop", ""), ({"content": ""}, "length", ""),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "stop", "ab"),
    ({"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}]}, "stop",
     "a"),
    ({"content": [{"type": "thinking", "thinking": []}]}, "model_length", None),
    ({"content": None, "refusal": "I cannot"}, "stop", "I cannot"),
    *(({"content": "a"}, reason, "a") for reason in ("max_tokens", "length", "stop", "eos", None)),
])
def test_a_text_is_finished_unless_it_was_cut_and_no_content_is_a_rest_of_thoughts_or_empty(
        impatient, message, reason, text):
    with running(echo, say=lambda handler, body: handler.choose(message, reason)) as server:
        (utterance,), = ask_all(load_speaker(server.url), CONVERSATIONS[:1])
    assert utterance.finished == (reason in ("stop", "eos", None))
    assert without_thoughts(utterance.text) == text


def test_an_empty_text_after_thoughts_that_are_not_shown_is_a_rest_of_cut_thoughts():
    choice = {"message": {"content": ""}, "finish_reason": "length"}
    usage = {"completion_tokens_details": {"reasoning_tokens": 400}}
    utterance, = utterances_of({"choices": [choice], "usage": usage})
    assert without_thoughts(utterance.text) is None
    utterance, = utterances_of({"choices": [choice], "usage": {"completion_tokens": 0}})
    assert utterance.text == ""


def test_half_a_surrogate_pair_of_a_server_becomes_text_that_can_be_written():
    utterance, = utterances_of({"choices": [{"message": {"content": "a \ud83d"}}]})
    assert utterance.text == "a ?"


@pytest.mark.parametrize("choice", [
    *({"finish_reason": reason} for reason in ("error", "abort", "content_filter", "RECITATION")),
    {"finish_reason": "stop", "error": {"message": "no"}},
])
def test_a_text_that_the_server_calls_failed_is_asked_for_again(impatient, choice):
    def say(handler, body):
        whole = {"message": {"content": "half a"}} | choice
        return handler.server.calls == 1 and handler.reply(
            200, json.dumps({"choices": [whole]}).encode())

    with running(echo, say=say) as server:
        (utterance,), = ask_all(load_speaker(server.url), CONVERSATIONS[:1])
    assert utterance.text != "half a" and utterance.finished and server.calls == 2


def test_of_several_texts_only_those_that_failed_are_asked_for_again(impatient):
    def say(handler, body):
        if handler.server.calls > 1:
            return False
        choices = [{"message": {"content": text}, "finish_reason": reason} for text, reason in
                   (("first", "stop"), ("half a", "content_filter"), ("third", "length"))]
        return handler.reply(200, json.dumps({"choices": choices}).encode())

    with running(echo, say=say) as server:
        utterances, = ask_all(load_speaker(server.url), CONVERSATIONS[:1], n=3)
    assert utterances[:2] == [Utterance("first", True), Utterance("third", False)]
    assert len(utterances) == 3 and utterances[2].finished and server.calls == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_survived_and_changes_no_text(impatient, fault):
    with running(echo) as server:
        expected = ask_all(load_speaker(server.url), CONVERSATIONS, seeds=range(40))
    with running(echo, fault_rate=0.2, fault=fault) as server:
        assert ask_all(load_speaker(server.url), CONVERSATIONS, seeds=range(40)) == expected
    assert server.seen_faults == {None, fault}


@pytest.mark.parametrize("answer, quoted", [
    (SENSELESS_BODIES["an error"], "no credits left"),
    (b"<html>\n<body>Please log in, sk-this-is-secret",
     "in the answer: <html> <body>Please log in, (the API key)")])
def test_an_error_or_a_page_that_comes_as_an_answer_is_quoted_without_the_key(
        impatient, monkeypatch, answer, quoted):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret")
    with running(echo, say=lambda handler, body: handler.reply(200, answer)) as server:
        error, = ask_all(load_speaker(server.url), CONVERSATIONS[:1])
    assert quoted in str(error)


@pytest.mark.parametrize("fault", ["429", "silence"])
def test_a_server_that_has_too_much_to_do_gets_the_advice_to_ask_less(impatient, fault):
    with running(echo, fault_rate=1.0, fault=fault) as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings(), 2, pause=0.001, timeout=0.1)
        error, = ask_all(speaker, CONVERSATIONS[:1])
    assert "too many requests at once, give a smaller --batch_size" in str(error)


@pytest.mark.parametrize("address, found", [
    *((address, "an address with a query .* or a user") for address in (
        "https://x.openai.azure.com/deployments/y?api-key=secret", "http://me:secret@host/v1")),
    *((address, "no address of a server, expected one such as") for address in (
        "http://[::1/v1", f"http://{'a' * 64}.org/v1"))])
def test_an_address_that_can_be_none_or_has_more_than_the_api_is_refused_without_its_secret(
        address, found):
    with pytest.raises(SystemExit, match=f"found {found}") as end:
        check_spec(address)
    assert "secret" not in str(end.value)


def refusing(status, answers=0):
    """A server that says `status` to every request after so many answers."""
    def say(handler, body):
        return handler.server.calls > answers and handler.reply(status, b"no such thing")

    return running(echo, say=say)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_wrong_request_is_not_repeated_and_does_not_count_against_the_server(impatient, status):
    with refusing(status, answers=1) as server:
        speaker = load_speaker(server.url)
        assert isinstance(ask_all(speaker, CONVERSATIONS[:1])[0][0], Utterance)
        for _ in range(2):
            errors = ask_all(speaker, CONVERSATIONS)
            for error in errors:
                assert isinstance(error, Refused)
                assert f"HTTP {status}: no such thing" in str(error)
    assert server.calls == 81


def test_what_a_server_has_not_implemented_is_asked_once():
    with refusing(501) as server:
        error, = ask_all(ServerSpeaker(server.url, SpeakerSettings(), pause=0), CONVERSATIONS[:1])
    assert "HTTP 501" in str(error) and server.calls == 1


def test_a_server_that_has_refused_all_of_many_requests_is_given_up():
    with refusing(400) as server:
        speaker = load_speaker(server.url)
        for conversation in CONVERSATIONS:
            assert isinstance(ask_all(speaker, [conversation])[0], SpeakerError)
        with pytest.raises(SystemExit, match="a server that answers no request .*HTTP 400"):
            stop_if_given_up(speaker)
    assert server.calls == MAX_FAILURES_IN_A_ROW < len(CONVERSATIONS)


def test_a_dead_server_is_given_up_and_the_message_says_what_to_do(impatient):
    with running(echo, dies_after=0) as server:
        speaker = load_speaker(server.url)
        assert all(isinstance(error, SpeakerError) for error in ask_all(speaker, CONVERSATIONS))
        calls = server.calls
        assert all(isinstance(error, SpeakerError) for error in ask_all(speaker, CONVERSATIONS))
        assert server.calls == calls  # nothing new is asked
        message = "a server that answers no request .*HTTP 503.*start it again, then rerun the same"
        with pytest.raises(SystemExit, match=message):
            stop_if_given_up(speaker)


def test_a_server_that_answers_now_and_then_is_not_given_up():
    def say(handler, body):
        return "BAD" in body["messages"][0]["content"] and handler.reply(500, b"broken")

    with running(echo, say=say) as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings(), retries=1, pause=0)
        for _ in range(MAX_FAILURES_IN_A_ROW + 1):
            error, good = (ask_all(speaker, [messages])[0]
                           for messages in (dialogue("BAD"), CONVERSATIONS[0]))
            assert isinstance(error, SpeakerError) and isinstance(good[0], Utterance)
    assert speaker.given_up is None


@pytest.mark.parametrize("status", [401, 403, 404, 302, 308])
def test_a_wrong_key_or_address_is_given_up_at_once_unless_others_were_answered(impatient, status):
    with refusing(status) as server:
        speaker = load_speaker(server.url)
        assert isinstance(ask_all(speaker, CONVERSATIONS[:1])[0], SpeakerError)
        message = f"{server.url}: HTTP {status}: no such thing.*correct its address, .*OPENAI_API"
        with pytest.raises(SystemExit, match=message):
            stop_if_given_up(speaker)
    with refusing(status, answers=1) as server:
        speaker = load_speaker(server.url)
        assert isinstance(ask_all(speaker, CONVERSATIONS[:1])[0][0], Utterance)
        assert isinstance(ask_all(speaker, CONVERSATIONS[1:2])[0], SpeakerError)
        assert speaker.given_up is None


def test_a_silent_server_is_told_of_once_and_given_up(monkeypatch, capsys):
    monkeypatch.setattr("speakers.server.TOLD_AFTER", 0.2)
    with running(echo, fault_rate=1.0, fault="silence") as server:
        settings = SpeakerSettings(max_new_tokens=8)
        speaker = ServerSpeaker(server.url, settings, pause=0.001, timeout=0.1)
        assert all(isinstance(answer, SpeakerError) for answer in ask_all(speaker, CONVERSATIONS))
        with pytest.raises(SystemExit, match="a server that answers no request"):
            stop_if_given_up(speaker)
        assert capsys.readouterr().err.count(f"{server.url}: no answer for") == 1


def busy(calls, status, retry_after):
    """A server that asks the first so many calls to come back later."""
    def say(handler, body):
        return handler.server.calls <= calls and handler.reply(
            status, b"later", headers=[("Retry-After", retry_after)])

    return running(echo, say=say)


def paused(monkeypatch):
    """The pauses of the client, which it writes down in place of sleeping."""
    pauses = []
    clock = types.SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses))
    monkeypatch.setattr("speakers.server.time", clock)
    return pauses


@pytest.mark.parametrize("status, retry_after, asked", [
    (429, "1", 1),
    (429, "59", 59),
    (429, "0.5", 0.5),
    (503, " 7 ", 7),
    (503, "3600", 60),  # nobody waits an hour
    (429, "0", 0),
    (429, "Wed, 21 Oct 2026 07:28:00 GMT", 0),
    (503, "Wed, 21 Oct 99999999999 07:28:00 GMT", 0),
    (429, "-1", 0),
    (429, "1e9", 0),
    (429, "\xb2", 0),
])
def test_a_server_that_asks_to_wait_some_seconds_is_asked_again_after_them(
        monkeypatch, status, retry_after, asked):
    with busy(1, status, retry_after) as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings())
        pauses = paused(monkeypatch)
        assert isinstance(ask_all(speaker, CONVERSATIONS[:1])[0][0], Utterance)
    assert len(pauses) == 1 and asked < pauses[0] <= asked + speaker.pause


def test_a_server_that_names_a_date_is_asked_again_then(monkeypatch):
    date = email.utils.formatdate(time.time() + 40, usegmt=True)
    with busy(1, 429, date) as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings())
        pauses = paused(monkeypatch)
        ask_all(speaker, CONVERSATIONS[:1])
    assert 30 < sum(pauses) < 41


def test_a_server_whose_quota_is_used_up_is_asked_again_for_more_than_a_minute(monkeypatch):
    with running(echo, fault_rate=1.0, fault="429") as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings(), timeout=1e9)
        pauses = paused(monkeypatch)
        ask_all(speaker, CONVERSATIONS[:1])
    assert sum(pauses) > 60


def test_the_pause_before_each_further_try_is_twice_as_long(monkeypatch):
    with busy(100, 500, "0") as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings(), timeout=1e9)
        monkeypatch.setattr("speakers.server.random.uniform", lambda low, high: high)
        pauses = paused(monkeypatch)
        ask_all(speaker, CONVERSATIONS[:1])
    assert pauses == [speaker.pause * 2**attempt for attempt in range(speaker.retries - 1)]


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 529])
def test_a_status_that_may_pass_is_asked_again(status):
    with busy(1, status, "0") as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings(), pause=0)
        assert isinstance(ask_all(speaker, CONVERSATIONS[:1])[0][0], Utterance)
    assert server.calls == 2


def test_all_requests_are_in_flight_together_and_the_retries_of_one_hold_up_no_other():
    together = threading.Barrier(39)

    def busy_for_one(handler, body):
        text = body["messages"][0]["content"]
        if text == "question 0":
            return handler.reply(429, b"later", headers=[("Retry-After", "30")])
        together.wait(10)  # breaks unless so many are here at the same time
        return handler.choose({"content": text})

    with running(echo, say=busy_for_one) as server:
        speaker = ServerSpeaker(server.url, SpeakerSettings(batch_size=40))
        requests = [Request(conversation) for conversation in CONVERSATIONS]
        answered = (answer[0].text for answer in run_jobs(speaker.reply, requests, 40))
        texts = {next(answered) for _ in requests[1:]}
    assert texts == {conversation[0]["content"] for conversation in CONVERSATIONS[1:]}


# -----------------------------------------------------------------------------
# The check of the address and of the model's name

ADAPTERS = ["meta-llama/Llama-3.1-8B-Instruct", "sql-lora", "out/sweet"]


def named(name):
    return SpeakerSettings(model_name=name)


@pytest.mark.parametrize("models, name, asked", [
    (["org/model"], None, "org/model"),
    *[(ADAPTERS, name, name) for name in ADAPTERS],
    (ADAPTERS, str(ROOT), str(ROOT)),  # a directory, as `transformers serve` loads on demand
])
def test_a_server_is_asked_for_the_model_that_is_named_or_for_its_only_one(models, name, asked):
    with running(echo, models=models) as server:
        ask_all(load_speaker(server.url, settings=named(name)), CONVERSATIONS[:2])
    assert server.seen_models == {asked}


def test_each_party_is_asked_with_its_own_temperature_and_token_limit(impatient, tmp_path):
    bodies = []
    with running(small_talk, say=lambda handler, body: bodies.append(body)) as server:
        collected(tmp_path, server.url, server.url, more=[
            "--agent_model", "agent", "--temperature", 0.7, "--max_new_tokens", 70,
            "--human_model", "human", "--human_temperature", 0.2, "--human_max_new_tokens", 20])
    sampled = {(body["model"], body["temperature"], body["max_tokens"], body["top_p"])
               for body in bodies}
    assert sampled == {("agent", 0.7, 70, 1), ("human", 0.2, 20, 1)}


def test_an_api_on_the_internet_is_asked_for_a_name_that_it_does_not_list(monkeypatch):
    def list_models(handler):
        assert handler.path == "http://api.example.com/v1/models"
        return handler.reply(200, b'{"data": [{"id": "models/one"}, {"id": "models/two"}]}')

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with running(echo, get=list_models) as server:
        monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))  # leads to this server
        for name in ("one", "two:free"):
            speaker = load_speaker("http://api.example.com/v1", settings=named(name))
            ask_all(speaker, CONVERSATIONS[:2])
        with pytest.raises(SystemExit, match="found 2 models, expected the name of one of them"):
            load_speaker("http://api.example.com/v1")
    assert server.seen_models == {"one", "two:free"}


@pytest.mark.parametrize("name", [
    None, "Llama-3.1-8B-Instruct", "meta-llama/llama-3.1-8b-instruct", "out/sweet/", "gpt", ""])
def test_no_name_among_several_models_or_an_unknown_one_is_a_sentence_with_the_names(name):
    found = "3 models" if name is None else f"no model {name!r}"
    with running(echo, models=ADAPTERS) as server:
        with pytest.raises(SystemExit, match=f"found {found}.*expected .*one of.*--agent_model") \
                as end:
            load_speaker(server.url, settings=named(name))
    assert all(model in str(end.value) for model in ADAPTERS)
    assert server.calls == 0


@pytest.mark.parametrize("end, name, models", [
    *itertools.product(["", "/"], [None, "org/model", "unknown"], [[], ["org/model"]]),
    *((end, None, []) for end in (
        "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/"))])
def test_another_address_of_a_server_is_a_sentence_with_that_of_its_api(end, name, models):
    with running(echo, models=models) as server:
        found = f"no API there but one at {server.url}, expected"
        if "completions" in end:
            found = "expected that of the API"
        with pytest.raises(SystemExit, match=found) as message:
            load_speaker(server.url.removesuffix("/v1") + end, settings=named(name))
    assert str(message.value).endswith(f"give {server.url}")
    assert server.calls == 0 and ("completions" not in end or not server.seen_keys)


def test_a_fault_at_an_address_that_nobody_gave_is_no_sign_of_an_api_there(impatient):
    def faulty(handler):
        return handler.reply(404 if handler.path == "/v1/models" else 503, b"no")

    with running(echo, get=faulty) as server:
        ask_all(load_speaker(server.url), CONVERSATIONS[:1])
    assert server.calls == 1


def test_a_proxy_that_lists_patterns_is_asked_for_the_name_that_it_is_given():
    with running(echo, models=["openai/*"]) as server:
        ask_all(load_speaker(server.url, settings=named("openai/gpt")), CONVERSATIONS[:2])
        with pytest.raises(SystemExit, match="found 1 model, expected the name of one of them"):
            load_speaker(server.url)
    assert server.seen_models == {"openai/gpt"}


def unlisted(*reply):
    """A server that answers requests and this to each GET, which lists nothing."""
    return running(echo, get=lambda handler: handler.reply(*reply))


@pytest.mark.parametrize("get", [
    (404, b"{}"), (405, b""), (501, b""), (401, b"no"), (403, b"no"), (500, b""), (429, b""),
    (200, b"<html>"), (200, b"[]"), (200, b"{}"), (200, b'{"data": null}'), (200, b'{"data": []}'),
    (200, b'{"data": [{"name": "x"}]}'), (200, b'{"data": [{"id": {}}]}'),
])
@pytest.mark.parametrize("name", [None, "org/model"])
def test_a_server_without_a_list_of_models_is_used_all_the_same(impatient, get, name):
    with unlisted(*get) as server:
        answers = ask_all(load_speaker(server.url, settings=named(name)), CONVERSATIONS[:2])
    assert all(isinstance(answer[0], Utterance) for answer in answers)
    assert server.seen_models == {name}


def test_a_certificate_that_this_machine_does_not_trust_is_named_as_such(impatient, monkeypatch):
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed")
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", mock.Mock(side_effect=untrusted))
    with running(echo) as server, pytest.raises(SystemExit, match="does not trust .*SSL_CERT_FILE"):
        load_speaker(server.url.replace("http:", "https:"))


@pytest.mark.parametrize("address, reason", [
    ("http://127.0.0.1:9/v1", "refused"),
    ("https://127.0.0.1:9", "refused"),
    ("http://", "no host given"),
    ("http://localhost:port/v1", "nonnumeric port"),
    ("http://no.such.host.invalid/v1", ""),
])
def test_an_address_where_nobody_is_ends_the_run_with_one_sentence(impatient, address, reason):
    with pytest.raises(SystemExit, match=f"found no server .*{reason}.*expected one that") as end:
        load_speaker(address)
    assert "\n" not in str(end.value)


# -----------------------------------------------------------------------------
# Whole collections


def collected(folder, agent, human, tasks=3, more=("--agent_model", "agent")):
    """The episodes that collect.py's main makes, in this process."""
    output = folder / "episodes.jsonl"
    collect_now("--tasks", "toy:backend:train", "--num_tasks", tasks, "--samples_per_task", 1,
                "--agent", agent, "--human", human, *more, "--output", output)
    return read_rows(output)


def test_the_human_knows_what_is_hidden_and_the_agent_its_own_thoughts_and_not_the_other_way_round(
        impatient, tmp_path):
    def thoughtful(body, seed):
        said = small_talk(body, seed)
        return said if body["model"] == "human" else f"<think>My plan.</think>{said}"

    asked = []
    with running(thoughtful, say=lambda handler, body: asked.append(body)) as server:
        rows = collected(tmp_path, server.url, server.url,
                         more=["--agent_model", "agent", "--human_model", "human"])
    hidden = [row["task"]["hidden_information"] for row in rows]
    assert {body["model"] for body in asked} == {"agent", "human"}
    for body in asked:
        read = "\n".join(message["content"] for message in body["messages"])
        own = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        if body["model"] == "human":
            assert any(text in read for text in hidden) and "My plan." not in read
        else:
            assert not any(text in read for text in hidden)
            assert all(text.startswith("<think>My plan.") for text in own)


def test_a_server_that_has_another_unnamed_model_continues_no_run(impatient, tmp_path):
    with running(small_talk, models=["large"]) as server:
        rows = collected(tmp_path, "scripted", server.url, 2, more=())
        played_by = {(row["agent"], row["human"], row["judge"]) for row in rows}
        assert played_by == {("scripted", "large", "--judge fixed")}
        server.models = ["small"]
        with pytest.raises(SystemExit, match="found the model small, expected large, which has"):
            collected(tmp_path, "scripted", server.url, 3, more=())
        server.models = ["large"]
        assert collected(tmp_path, "scripted", server.url, 3, more=())[:2] == rows


def test_a_run_in_which_everything_fails_says_so(tmp_path):
    with refusing(400) as server:
        with pytest.raises(SystemExit, match="everything failed; expected agent, human"):
            collected(tmp_path, server.url, "scripted")


def test_a_human_at_a_wrong_path_ends_the_run_which_without_output_blocks_no_corrected_command(
        impatient, tmp_path):
    def run(agent, human):
        return collected(tmp_path, agent.url, human, more=("--samples_per_task", 3))

    with running(lambda body, seed: "What?") as agent, refusing(404) as wrong:
        with pytest.raises(SystemExit, match=f"answers no request .{wrong.url}: HTTP 404"):
            run(agent, wrong.url)
        assert all(row["error"] for row in whole_rows(tmp_path / "episodes.jsonl"))
        rows = run(agent, "scripted")
    assert rows and not any(row["error"] for row in rows)


# -----------------------------------------------------------------------------
# Secrets


def test_the_api_key_goes_to_the_server_and_nowhere_else(tmp_path):
    key = "sk-this-is-secret"
    with running(small_talk, fault_rate=0.2, fault="500") as server:
        done = run_script("collect.py", "--tasks", "toy:backend:train", "--num_tasks", 3,
                          "--agent", server.url, "--agent_model", "agent", "--output",
                          tmp_path / "out/episodes.jsonl", env={"OPENAI_API_KEY": key})
    assert server.seen_keys == {f"Bearer {key}"} and key not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"episodes.jsonl", "episodes.jsonl.run.json"} <= {path.name for path in files}
    assert not any(key.encode() in path.read_bytes() for path in files)


def steering(handler, body):
    """Its error would set the title of a terminal."""
    return handler.reply(400, b"no \x1b]0;title\x07")


def test_what_a_server_says_does_not_steer_the_terminal(impatient):
    with running(echo, say=steering, models=["a\x1b[2J", "b"]) as server:
        with pytest.raises(SystemExit) as end:
            load_speaker(server.url)
        error = ask_all(load_speaker(server.url, settings=named("b")), CONVERSATIONS[:1])[0]
    assert "a\\x1b[2J" in str(end.value) and "\x1b" not in str(end.value)
    assert "HTTP 400: no \\x1b]0;title\\x07" in str(error)


@pytest.mark.parametrize("words_before", [0, 270, 285, 290, 299, 300])
def test_no_part_of_a_repeated_api_key_gets_into_a_cut_error(impatient, monkeypatch, words_before):
    def repeat_the_key(handler, body):
        key = handler.headers["Authorization"].removeprefix("Bearer ")
        return handler.reply(400, b"." * words_before + f"{key}{key} is no key".encode())

    monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret")
    with running(echo, say=repeat_the_key) as server:
        error = ask_all(load_speaker(server.url), CONVERSATIONS[:1])[0]
    assert "HTTP 400: " + ("..." if words_before else "(the API key)") in str(error)
    assert "sk" not in str(error)


def test_a_line_break_after_the_api_key_is_dropped_a_bad_key_is_not_quoted(impatient, monkeypatch):
    with running(echo, models=ADAPTERS[:1]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret\n")
        assert ask_all(load_speaker(server.url), CONVERSATIONS[:1])[0][0].text
        assert server.seen_keys == {"Bearer sk-this-is-secret"}
        for key in ("sk-this\nis-secret", "sk-this\u2013is-secret", "sk-this\x7fis-secret"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            with pytest.raises(SystemExit, match="OPENAI_API_KEY: found a key with") as end:
                load_speaker(server.url)
            assert "secret" not in str(end.value) and "sk-" not in str(end.value)


def test_a_party_with_a_key_of_its_own_gets_no_other(impatient, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-all")
    monkeypatch.setenv("HUMAN_API_KEY", "sk-of-human")
    monkeypatch.setenv("GRADER_API_KEY", "")
    for role, expected in (("agent", {"Bearer sk-for-all"}), ("human", {"Bearer sk-of-human"}),
                           ("grader", {None})):
        with running(echo, models=ADAPTERS[:1]) as server:
            assert ask_all(load_speaker(server.url, role), CONVERSATIONS[:1])[0][0].text
            assert server.seen_keys == expected


def test_the_api_key_does_not_follow_a_redirect(impatient, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-this-is-secret")
    with running(echo) as other:
        headers = [("Location", other.url + "/models")]

        def move(handler, body=None):
            return handler.reply(302, b"moved " * 100, headers=headers)

        with running(echo, say=move, get=move) as server:
            speaker = load_speaker(server.url)
            assert f"HTTP 302: moved to {other.url}" in str(ask_all(speaker, CONVERSATIONS[:1])[0])
        assert other.seen_keys == set()
