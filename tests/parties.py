"""Parties of a dialogue that are under a test's control. None of them sleeps."""

import threading
from concurrent.futures import Future

import torch
from conftest import ROOT, dialogue

import collect
from colbench import MAX_TURNS, agent_messages, agent_prompt_of
from collect import Rules, play
from judge.sandbox import ANSWER_MARKER, Grade
from speakers import load_speaker
from speakers.interface import Request, Speaker, SpeakerError, SpeakerSettings, Utterance
from speakers.local import pick_tokens
from speakers.pool import elsewhere, gather, run
from toy.world import toy_tasks

RULES = Rules(agent_prompt="Ask.", human_prompt="Reply.", max_turns=10, reply_chars=400, seed=0)
TASKS = toy_tasks("toy:backend:train", 40)
INDEX = {task["task_id"]: index for index, task in enumerate(TASKS)}
PATIENCE = 30  # seconds until a test fails that waits for ever


def collect_now(*flags):
    """What `python collect.py flags` does, in this process."""
    collect.main(collect.parse_args([str(flag) for flag in flags]))


def within(call, seconds=PATIENCE):
    """What `call` returns or raises; a failure if it waits for ever."""
    outcome = Future()

    def carry_out():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=carry_out, daemon=True).start()
    return outcome.result(seconds)


def ask_all(speaker, conversations, n=1, seeds=None, tasks=None, keys=None):
    """The n Utterances of each conversation, or its SpeakerError; all are asked at once."""
    def column(values):
        return [None] * len(conversations) if values is None else list(values)

    seeds, tasks, keys = column(seeds), column(tasks), column(keys)

    def ask(index):
        request = Request(conversations[index], n, seeds[index] or 0, tasks[index], keys[index])
        try:
            return index, speaker.reply(request)
        except SpeakerError as error:
            return index, error

    found = dict(run(ask, range(len(conversations)), len(conversations)))
    return [found[index] for index in range(len(conversations))]


def index_of(request):
    return INDEX[request.key[0]]


def asker(turns):
    """An agent's lines: it asks until its last turn, turns(key), and then answers."""
    def line(request):
        turn = sum(message["role"] == "assistant" for message in request.messages)
        if request.key and turn == turns(request.key) - 1:
            return f"{ANSWER_MARKER} x = {turn}"
        return f"What about {turn}?"

    return line


def human_line(request):
    return f"Detail {len(request.messages)}."


def utterances(line, request):
    return [Utterance(f"{line(request)}{'+' * index}", True) for index in range(request.n)]


def first_texts(base, tasks, max_new_tokens, max_turns=MAX_TURNS):
    """What a base policy says first in these tasks, in any order."""
    settings = SpeakerSettings(max_new_tokens=max_new_tokens, device="cpu")
    speaker = load_speaker(str(ROOT / base), settings=settings)
    requests = [Request(agent_messages(dialogue(task["problem_description"]),
                                       agent_prompt_of(task, None, max_turns)), seed=seed)
                for seed, task in enumerate(tasks)]
    return [utterances[0] for utterances in run(speaker.reply, requests, len(tasks))]


def slow_text(speaker, tokenizer, ids, uniform):
    """What a local speaker says after a prompt, which is read again for each random number."""
    whole = torch.tensor([ids])
    for number in uniform:
        logits = speaker.model(input_ids=whole).logits[:, -1]
        token = pick_tokens(logits, number[None], speaker.temperature)
        whole = torch.cat([whole, token[:, None]], 1)
        if token.item() in speaker.stops:
            break
    return tokenizer.decode(whole[0, len(ids):], skip_special_tokens=True)


class Served(Speaker):
    """A speaker whose replies come when the test says so."""

    def __init__(self, line, held=lambda request: False):
        """Requests that are `held` wait for `open`; all others are answered at once."""
        self.line, self.held = line, held
        self.asked = []  # requests
        self.opened = threading.Event()

    def reply(self, request):
        self.asked.append(request)
        with elsewhere():
            if self.held(request):
                assert self.opened.wait(PATIENCE)
            return self.reply_to(request)

    def open(self):
        """Answer all requests, and hold none any more."""
        self.held = lambda request: False
        self.opened.set()

    def reply_to(self, request):
        return utterances(self.line, request)


class Failing(Served):
    """It cannot answer some requests, and dies after `lives` requests."""

    def __init__(self, line, fails=lambda request: False, lives=None):
        super().__init__(line)
        self.fails, self.lives = fails, lives

    def reply_to(self, request):
        if self.lives is not None and self.asked.index(request) >= self.lives:
            self.given_up = "it is down"
            raise SpeakerError("it is down")
        if self.fails(request):
            raise SpeakerError("too long")
        return super().reply_to(request)


class Local(Speaker):
    """A speaker that computes in this process; it calls `note` for each batch."""

    def __init__(self, line, note=lambda: None):
        self.line, self.note = line, note

    def reply(self, request):
        return gather(self.speak, request)

    def speak(self, requests):
        self.note()
        return [utterances(self.line, request) for request in requests]


class LenientJudge:
    """Every answer passes."""

    def grade(self, task, answer):
        return Grade(1.0, True, {})


def played(agent, human, judge, count, in_flight, last=lambda: None):
    """(the indices of the tasks in the order in which their dialogues end, the episodes).

    `last` is called once all dialogues but one have ended.
    """
    episodes = []

    def iterate():
        for episode in run(lambda task: play(task, 0, agent, human, judge, RULES), TASKS[:count],
                           in_flight):
            episodes.append(episode)
            if len(episodes) == count - 1:
                last()

    within(iterate)
    return [INDEX[episode["task"]["task_id"]] for episode in episodes], episodes
