"""ColBench: tasks, speakers, dialogue rules, judges and the embedded toy world (SWEET-RL, arXiv 2503.15478, section 3).

An agent talks up to ten turns with a simulated human who has something in mind that the agent cannot see, and
delivers a Python function (backend, graded by hidden tests) or a web page (frontend, graded by image similarity).

How it works:
  1. a task is one JSON line: what the human says first, what the human has in mind, and hidden tests;
  2. a speaker answers conversations: a scripted toy, a local transformers model, or an OpenAI-compatible server;
  3. the agent and the human each see their own view of the dialogue (`agent_messages`; `human_messages`, or with both
     screenshots `human_frontend_messages`), and the critic sees the reference solution besides (`critic_messages`);
  4. a judge grades the answer: model-written code and pages run only in closed child processes.

    python colbench.py check TASKS.jsonl   grade every reference against itself, show active protections
    python colbench.py websight ROWS.jsonl TRAIN.jsonl TEST.jsonl   turn WebSight rows into frontend tasks

Reads: task files of facebook/collaborative_agent_bench as they are, and `toy:backend:train` style names.
`import colbench` needs the standard library alone, so that the judge's workers start in milliseconds.
"""

from __future__ import annotations

import argparse
import ast
import base64
import builtins
import contextlib
import ctypes
import difflib
import functools
import gc
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import queue
import random
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
import typing
import weakref
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from pathlib import Path

# -----------------------------------------------------------------------------
# Tasks and episodes: JSON lines, checked at the door


def derive_seed(*parts) -> int:
    """A 63-bit seed that depends on nothing but `parts`: not on world size, batch composition or PYTHONHASHSEED."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def read_jsonl(path):
    """Yield (where, object) for each line of a JSONL file; a line that is not a JSON object stops with a sentence."""
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file; expected a JSONL file, one JSON object a line")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            try:
                row = json.loads(line)
                if b"\\u" in line:  # half a surrogate pair is JSON, but no text: it would break the tokenizer later
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{where}: found broken JSON ({error}), expected one JSON object") from None
            if not isinstance(row, dict):
                raise SystemExit(f"{where}: found {type(row).__name__}, expected a JSON object")
            yield where, row


def write_atomically(path, text):
    """Replace `path` in one step, so that a reader or a kill never meets half a file."""
    temporary = Path(f"{path}.tmp{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk, half a file would be in the way of the rest
        raise


def expect(row, key, kind, where, optional=False):
    """row[key], which must be of type `kind`; the message says what was found and what was expected."""
    value = row.get(key)
    if value is None and optional:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        found = f"no '{key}'" if key not in row else f"'{key}' of type {type(value).__name__}"
        raise SystemExit(f"{where}: found {found}, expected '{key}' of type {names}")
    return value


def complete_task(row, where="task"):
    """A task with every field filled in; unknown keys stay. Official rows have neither task_id nor domain."""
    description = expect(row, "problem_description", str, where)
    reference = expect(row, "ground_truth", str, where)
    if not reference.strip():
        raise SystemExit(f"{where}: found an empty 'ground_truth', expected the reference code or page")
    domain = row.get("domain", "backend" if "test_cases" in row or "<" not in reference else "frontend")
    if domain not in ("backend", "frontend"):
        raise SystemExit(f"{where}: found domain {domain!r}, expected 'backend' or 'frontend'")
    digest = hashlib.sha256("\0".join((description, reference)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    task = {"task_id": digest, "hidden_information": reference} | row | {"domain": domain}
    for key in ("task_id", "hidden_information"):
        expect(task, key, str, where)
    if domain == "backend":
        cases = expect(row, "test_cases", dict, where)
        # Arrow conversions of the official files join the keys of all rows and fill the gaps with None
        task["test_cases"] = {name: call for name, call in cases.items() if call is not None}
        if not task["test_cases"]:
            raise SystemExit(f"{where}: found no test in 'test_cases', expected at least one call expression")
        for name in task["test_cases"]:
            expect(task["test_cases"], name, str, f"{where}, test_cases")
    return task


def read_tasks(spec, num_tasks=None):
    """Tasks of a file, or of the embedded world: `toy:backend:train`, `toy:frontend:test`, ..."""
    if spec.startswith("toy:"):
        return toy_tasks(spec, num_tasks or 1000)
    tasks, first_seen = [], {}
    for where, row in read_jsonl(spec):
        task = complete_task(row, where)
        while "task_id" not in row and task["task_id"] in first_seen:
            task["task_id"] += "+"  # official rows have no ids: one that comes again is a task of its own
        if first_seen.setdefault(task["task_id"], where) != where:
            raise SystemExit(f"{where}: found task_id {task['task_id']!r} again (first at {first_seen[task['task_id']]}),"
                             " expected each task once; remove one of the two lines")
        tasks.append(task)
        if len(tasks) == num_tasks:
            break
    if not tasks:
        raise SystemExit(f"{spec}: found no line, expected one task a line")
    return tasks


def complete_episode(row, where="episode"):
    """An episode with every field filled in; a row of the official trajectory file becomes one, too."""
    task = complete_task(expect(row, "task", dict, where), f"{where}, task")
    history = expect(row, "dialogue_history", list, where)
    roles = ("user", "assistant")
    for number, message in enumerate(history):
        if not isinstance(message, dict) or message.get("role") != roles[number % 2]:
            raise SystemExit(f"{where}: found dialogue_history[{number}] that is no message of role "
                             f"'{roles[number % 2]}', expected user and assistant in turn, the user first")
        expect(message, "content", str, f"{where}, dialogue_history[{number}]")
        expect(message, "output", str, f"{where}, dialogue_history[{number}]", optional=True)
        expect(message, "finished", bool, f"{where}, dialogue_history[{number}]", optional=True)
    error = expect(row, "error", str, where, optional=True) or None
    reward = expect(row, "reward", (int, float), where, optional=error is not None)
    if not error and not (0 <= reward <= 1.000001):
        raise SystemExit(f"{where}: found reward {reward}, expected a number between 0 and 1")
    if not error and len(history) < 2:
        raise SystemExit(f"{where}: found a dialogue of {len(history)} messages, expected at least one agent turn")
    success = reward == 1 if task["domain"] == "backend" and not error else None
    if expect(row, "success", bool, where, optional=True) not in (None, success):
        raise SystemExit(f"{where}: found success {row['success']} with reward {reward}, expected {success}: true for a"
                         " backend reward of 1, false below, null for pages and failed episodes")
    replies = [message["content"] for message in history[2::2]]
    episode = {
        "sample": 0, "answer": None, "reasons": {},
        "leak": leak_share(task, replies) if "leak" not in row else 0.0,
        "agent": None, "human": None, "seed": None,
    } | row | {"task": task, "success": success, "turns": len(history) // 2, "error": error}
    for key, kind, optional in (("sample", int, False), ("leak", (int, float), False), ("reasons", dict, False),
                                ("answer", str, True), ("agent_prompt", str, True),
                                ("agent_tokens", int, True)):
        expect(episode, key, kind, where, optional)
    if episode["sample"] < 0 or not 0 <= episode["leak"] <= 1:
        raise SystemExit(f"{where}: found sample {episode['sample']} and leak {episode['leak']}, expected a number from 0"
                         " up and a share between 0 and 1")
    return episode


def read_episodes(path):
    """All episodes of a file; (task_id, sample) twice is an error."""
    episodes, seen, counts = [], set(), {}
    for where, row in read_jsonl(path):
        episode = complete_episode(row, where)
        task_id = episode["task"]["task_id"]
        if "sample" not in row:  # official rows are not numbered: k copies of the task list, one after the other
            episode["sample"] = counts[task_id] = counts.get(task_id, -1) + 1
        key = (task_id, episode["sample"])
        if key in seen:
            raise SystemExit(f"{where}: found task {key[0]!r}, sample {key[1]} a second time, expected it once")
        seen.add(key)
        episodes.append(episode)
    if not episodes:
        raise SystemExit(f"{path}: found no episode, expected one a line; run collect.py first")
    return episodes


class ResumableJsonl:
    """A JSONL file that grows line by line, survives a kill at any moment and ends up sorted.

    `key(row)` identifies a row. Rows for which `keep(row)` is false (failed ones) are dropped at the start, to be
    made again. Several processes may append to the same file: each line is one write in append mode.
    """

    def __init__(self, path, key, keep=lambda row: True, leader=True):
        self.path, self.key = Path(path), key
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = {}
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                try:
                    row = json.loads(line)
                    usable = keep(row)
                    row_key = key(row)
                except (ValueError, KeyError, TypeError):  # the half line that a kill left behind
                    usable = False
                if usable:
                    self.rows[row_key] = row
        if leader and self.path.exists():
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows.values()))

    def append(self, row):
        line = (json.dumps(row) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{self.path}: only part of a line could be written")
        finally:
            os.close(descriptor)

    def finish(self, order):
        """Rewrite the file in the order of the keys in `order`: same command and seed, same bytes."""
        rows = {self.key(row): row for _, row in read_jsonl(self.path)} if self.path.exists() else {}
        write_atomically(self.path, "".join(json.dumps(rows[key]) + "\n" for key in order if key in rows))
        return [rows[key] for key in order if key in rows]


# -----------------------------------------------------------------------------
# Dialogue rules, and what each party sees

MAX_TURNS = 10
REPLY_CHARACTERS = {"backend": 400, "frontend": 1000}
ANSWER_MARKER = "I WANT TO ANSWER:"
OUTPUT_MARKER = "OUTPUT:"

AGENT_PROMPT = {
    "backend": "You help a person who needs a Python function. The person has details in mind that the request leaves"
    " out. Each message of yours is either one short question about such a detail, or your answer. You may send ten"
    f' messages in all. When you know enough, write "{ANSWER_MARKER}" and after it the complete function as plain'
    " Python code, without comments on it. Only this code is tested, so keep to the signature that was asked for.",
    "frontend": "You design a web page together with a person who has a finished look in mind and sees each page that"
    f' you send as a picture. First write down what you will do, then "{OUTPUT_MARKER}" and after it one whole page from'
    " <html> to </html>, styled with Tailwind classes; for pictures use https://picsum.photos/WIDTH/HEIGHT. You may send"
    " ten pages in all, and the last one counts. When the person has nothing more to change, write"
    f' "{ANSWER_MARKER}" after "{OUTPUT_MARKER}" and then the final page.',
}
HUMAN_PROMPT = {
    "backend": "You asked a programmer for a Python function. What you asked was:\n{problem_description}\n\n"
    "This is the function that you have in mind; the programmer cannot see it:\n{hidden_information}\n\n"
    "Answer the programmer's questions from it, in one or two plain sentences. Tell only what was asked. When the"
    " function does not settle the question, say that you do not know. Never write or quote code.",
    "frontend": "You asked a designer for a web page. What you asked was:\n{problem_description}\n\n"
    "You see two pictures: the designer's page as it is now, and the page as you have it in mind, which the designer"
    " cannot see. Name the most visible differences in a few plain sentences, as changes that you would like. If there"
    " are none, say so. Do not write HTML.\n\nThe designer's last message: {message}",
}
REFERENCE_NOTE = "Reference solution, known in training only:\n{reference}\n\n"


def instructions(task, prompt):
    """What the agent is told to do: the given prompt (an empty one is none), or ours where nothing was given."""
    return AGENT_PROMPT[task["domain"]] if prompt is None else prompt


def read_prompt(path):
    """The instructions in a file; None where no file is named."""
    try:
        return path and Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path}: found no instructions ({error}), expected a file of plain UTF-8 text") from None


def agent_messages(task, history, prompt):
    """What the agent sees: its instructions and the dialogue. Its own turns are the raw texts that it wrote."""
    system = [{"role": "system", "content": prompt}] if prompt else []
    turns = [{"role": m["role"], "content": (m.get("output") or m["content"]).strip()} for m in history]
    return system + (turns or [{"role": "user", "content": task["problem_description"]}])


def first_request(messages):
    """The place of the first user message, which a system message may precede."""
    return next(number for number, message in enumerate(messages) if message["role"] == "user")


def critic_messages(task, messages, privileged="ground_truth", picture=None):
    """What the critic and its reference model see: the agent's view, and before the first request the reference.

    A vision-language critic is given the reference page's `picture` (PNG bytes) in place of its text.
    """
    if privileged == "none":
        return messages
    first = first_request(messages)
    content = messages[first]["content"]
    seen = REFERENCE_NOTE.format(reference=task["ground_truth"]) + content
    if picture:
        seen = [image_part(picture), {"type": "text", "text": content}]
    return messages[:first] + [{"role": "user", "content": seen}] + messages[first + 1:]


def human_messages(task, history, prompt):
    """What the human sees: the hidden information and the dialogue, in which the human has the assistant's role.

    A prompt with the placeholder {dialogue_history}, as the official ones have, becomes one user message instead.
    """
    fields = {"problem_description": task["problem_description"], "hidden_information": task["hidden_information"]}
    fields["dialogue_history"] = "\n".join(
        f"{'agent' if message['role'] == 'assistant' else 'human'}: {message['content']}" for message in history)
    text = re.sub(r"\{(problem_description|hidden_information|dialogue_history)\}", lambda m: fields[m[1]], prompt)
    if "{dialogue_history}" in prompt:
        return [{"role": "user", "content": text}]
    flipped = {"user": "assistant", "assistant": "user"}
    return [{"role": "system", "content": text}] + [
        {"role": flipped[message["role"]], "content": message["content"]} for message in history[1:]]


def split_message(task, text, last_turn):
    """(what the human reads, the answer or None) of one agent message. At the last turn the message is the answer."""
    content = text.strip()
    if task["domain"] == "frontend" and OUTPUT_MARKER in content:
        content = content.split(OUTPUT_MARKER, 1)[1].strip()
    if ANSWER_MARKER in content:
        return content, content.split(ANSWER_MARKER, 1)[1].strip()
    return content, content if last_turn else None


def leak_share(task, replies):
    """The longest run of reference tokens that one human turn repeats, as a share of the reference."""
    reference = re.findall(r"\w+|[^\w\s]", task["ground_truth"])
    longest = 0
    for reply in replies:
        words = re.findall(r"\w+|[^\w\s]", reply)
        matcher = difflib.SequenceMatcher(None, reference, words, autojunk=False)
        longest = max(longest, matcher.find_longest_match(0, len(reference), 0, len(words)).size)
    return longest / max(1, len(reference))


# -----------------------------------------------------------------------------
# Token ids of a dialogue, and which agent turn each belongs to


def render(tokenizer, messages, add_generation_prompt=True):
    """The chat template's text. A template that refuses the system role gets it at the head of the first request."""
    import jinja2

    # Llama 3.2 and others print today's date unless they are given one, which would change prompts from day to day
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "date_string": "26 Jul 2024"}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except jinja2.TemplateError as error:
        if messages[0]["role"] != "system" or len(messages) < 2:
            raise SystemExit(f"the chat template of {tokenizer.name_or_path} refuses the dialogue ({error}); expected one"
                             " that takes user and assistant turns; give a model with such a template") from None
        system, content = messages[0]["content"] + "\n\n", messages[1]["content"]
        joined = system + content if isinstance(content, str) else [{"type": "text", "text": system}, *content]
        first = {"role": "user", "content": joined}
        return render(tokenizer, [first] + messages[2:], add_generation_prompt)


class UnnestedTemplate(SystemExit):
    """The chat template changes what came before when the dialogue goes on: dialogues are then not one sequence."""


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer):
    """(id, text) of the token that closes an agent turn, read off the template: what follows the agent's words."""
    if not getattr(tokenizer, "chat_template", None):
        raise SystemExit(f"{tokenizer.name_or_path}: found a tokenizer without chat template, expected an instruct model")
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    opening, whole = render(tokenizer, dialogue[:1]), render(tokenizer, dialogue, False)
    if not whole.startswith(opening + "y"):
        raise UnnestedTemplate(f"{tokenizer.name_or_path}: the chat template does not nest (an agent turn does not begin with"
                         " the generation prompt), so turns cannot be told apart; expected a template like Llama's")
    closing = whole[len(opening) + 1:]
    if not closing or closing.startswith("z"):
        raise UnnestedTemplate(f"{tokenizer.name_or_path}: the chat template closes no agent turn, so a model cannot tell"
                               " when to stop; expected a template like Llama's")
    token = tokenizer.encode(closing, add_special_tokens=False)[0]
    return token, tokenizer.decode([token])


def encode_dialogue(tokenizer, messages, finished=()):
    """Token ids of a dialogue, and for each the number of the agent turn it belongs to (-1: not an agent token).

    A turn is its text and, when finished, its end-of-turn token, as sampled: the prompt before it and the turn itself
    are tokenised apart, so training scores exactly the tokens that generation makes. With <u> <a> </> for the
    template's tokens and the second turn cut at the token limit (finished = [True, False]):

        <u> hi </> <a> hello </> <u> more </> <a> some
        -1  -1 -1  -1  0     0   -1  -1   -1  -1  1

    A dialogue that ends with a user message is a prompt: the generation prompt closes it.
    """
    end_id, end_text = end_of_turn(tokenizer)
    pieces, text, turn = [], "", 0  # pieces: (text, turn it belongs to)
    positions = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for position in positions + ([len(messages)] if messages[-1]["role"] != "assistant" else []):
        prompt = render(tokenizer, messages[:position])
        if not prompt.startswith(text):
            raise UnnestedTemplate(f"{tokenizer.name_or_path}: the chat template does not nest (it changes earlier turns when"
                             " later ones come), so a dialogue is not one sequence; expected a template like Llama's")
        pieces.append((prompt[len(text):], -1))
        if position < len(messages):
            done = finished[turn] if turn < len(finished) else True
            content = messages[position]["content"]
            pieces.append((content, turn))
            text, turn = prompt + content + (end_text if done else ""), turn + 1
            pieces.append((None, turn - 1) if done else ("", -1))
    texts = [piece for piece, _ in pieces if piece]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    ids, turn_index = [], []
    for piece, turn in pieces:
        tokens = [end_id] if piece is None else next(encoded) if piece else []
        ids += tokens
        turn_index += [turn] * len(tokens)
    return ids, turn_index


def encode_prompt(tokenizer, messages):
    """Token ids to sample from. A template that does not nest can still speak (though not be trained on)."""
    try:
        return encode_dialogue(tokenizer, messages)[0]
    except UnnestedTemplate:
        return tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)


# -----------------------------------------------------------------------------
# Speakers: one interface for agent and human


class Utterance(typing.NamedTuple):
    text: str
    finished: bool  # false when it was cut at the token limit


class SpeakerError(Exception):
    """One conversation could not be answered; stands in its place in the list that `speak` returns.

    `refused`: the request itself is wrong (too long, mostly), so that asking again is no use.
    """

    def __init__(self, reason, refused=False):
        super().__init__(reason)
        self.refused = refused


def load_speaker(spec, role="agent", model_name=None, temperature=1.0, max_new_tokens=1024, batch_size=64, device=None,
                 dtype=None, pictures=False):
    """The speaker that `spec` names: `scripted`, `http://host:port/v1`, or a model name or directory.

    With `pictures` in the conversations, a model must be a vision-language one.
    """
    name, _, manner = spec.partition(":")
    if name == "scripted":
        return ScriptedSpeaker(role, manner)
    if spec.startswith(("http://", "https://")):
        return ServerSpeaker(spec, model_name, temperature, max_new_tokens, batch_size)
    if pictures and not sees_pictures(spec):
        raise SystemExit(f"{spec}: found a text-only model, expected a vision-language one, since the {role} of frontend tasks"
                         " looks at pictures of pages; choose one such as Qwen/Qwen2-VL-7B-Instruct, or a server of one")
    if pictures:
        return VisionSpeaker(spec, temperature, max_new_tokens, batch_size, device, dtype)
    return LocalSpeaker(spec, temperature, max_new_tokens, batch_size, device, dtype)


class ScriptedSpeaker:
    """The toy worlds' own human, or their noisy demonstrator as agent (`scripted:informed` knows the reference)."""

    def __init__(self, role, manner=""):
        if manner not in ("", "informed"):
            raise SystemExit(f"found the {role} scripted:{manner}, expected scripted or scripted:informed")
        self.role, self.manner = role, manner

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        return [[Utterance(self._say(task, messages, derive_seed(seed, number)), True) for number in range(n)]
                for messages, seed, task in zip(conversations, seeds, tasks, strict=True)]

    def count_tokens(self, texts):
        return None  # has no tokens

    def _say(self, task, messages, seed):
        if "toy" not in task:  # nothing is scripted for real tasks; a dry run of the machinery is all this gives
            asked = any(message["role"] == "assistant" for message in messages)
            agent_says = f"{ANSWER_MARKER} pass" if asked else "What else should I know?"
            return "I do not know." if self.role == "human" else agent_says
        human, demonstrator = TOY_SPEAKERS[task["domain"]]
        messages = [message for message in messages if message["role"] != "system"]
        if self.role == "human":
            return human(task, messages)
        return demonstrator(task, messages, random.Random(seed), self.manner == "informed")


class ServerSpeaker:
    """Any server that speaks the OpenAI chat protocol; many requests in flight, retried with back-off."""

    def __init__(self, url, model_name, temperature, max_new_tokens, in_flight=64, retries=8, pause=0.2, timeout=300):
        self.url, self.model_name = url.rstrip("/"), model_name
        self.retries, self.pause, self.timeout = retries, pause, timeout  # seconds: before the first retry, of silence
        # a server's own default is mostly what the checkpoint recommends: not the policy itself, but its likelier words
        self.settings = {"temperature": temperature, "max_tokens": max_new_tokens, "top_p": 1}
        self.pool = ThreadPoolExecutor(in_flight)
        self.failures_in_a_row, self.failing_since, self.given_up = 0, None, None  # given_up: the reason, once it is

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        if self.given_up:  # what was in flight has its errors on disk; nothing new is begun with a dead server
            raise SystemExit(f"{self.url}: found no answer to many requests in a row ({self.given_up}), expected a running"
                             " server; start it again, then give the same command again to go on")
        self.failing_since = None  # the time since the last call says nothing
        seeds = seeds or [0] * len(conversations)
        return list(self.pool.map(lambda pair: self._answer(pair[0], n, pair[1]), zip(conversations, seeds, strict=True)))

    def count_tokens(self, texts):
        return None  # the server's tokenizer is not known

    def _answer(self, messages, n, seed):
        """n utterances for one conversation, or the SpeakerError that stands for them."""
        utterances = []
        while len(utterances) < n:  # some servers ignore n, so ask until there are enough
            try:
                choices = self._request(messages, n - len(utterances), derive_seed(seed, len(utterances)) % 2**31)
            except SpeakerError as error:
                return error
            texts = [choice["message"]["content"].encode(errors="replace").decode() for choice in choices]  # sound Unicode
            utterances += [Utterance(text.strip(), choice.get("finish_reason") != "length")
                           for text, choice in zip(texts, choices, strict=True)]
        return utterances[:n]

    def _request(self, messages, n, seed):
        import http.client

        body = {"model": self.model_name, "messages": messages, "n": n, "seed": seed} | self.settings
        refused = False
        for attempt in range(self.retries):
            if self.given_up:
                raise SpeakerError(f"{self.url} was given up: {self.given_up}")
            began = time.monotonic()
            try:
                choices = self._post(body)
                self.failures_in_a_row, self.failing_since = 0, None
                return choices
            except SpeakerError as error:
                reason, refused = str(error), error.refused
                break
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"  # closed connection, silence, cut or senseless body
            since = self.failing_since = self.failing_since or began
            if time.monotonic() - since > 6 * self.timeout:
                self.given_up = reason  # half an hour without any answer, in whatever request
            elif attempt < self.retries - 1:
                time.sleep(self.pause * 2**attempt * random.uniform(0.5, 1))
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= 20:
            self.given_up = self.given_up or reason
        raise SpeakerError(f"{self.url}: {reason}", refused)

    def _post(self, body):
        """The choices of one answer; SpeakerError for a request that is wrong and stays wrong, other errors may pass."""
        import urllib.error
        import urllib.request

        headers, key = {"Content-Type": "application/json"}, os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                choices = json.loads(response.read())["choices"]
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            reason = f"HTTP {error.code}: {said.replace(key, '(the API key)') if key else said}"  # servers may repeat it
            if error.code in (408, 409, 425, 429) or error.code >= 500:
                raise OSError(reason) from None
            if error.code == 400:
                self.failures_in_a_row = 0  # the server lives, only this request is wrong
            raise SpeakerError(reason, refused=error.code == 400) from None
        if not choices or any(not isinstance(choice["message"]["content"], str) for choice in choices):
            raise ValueError("an answer without choices or without text")
        return choices


def load_tokenizer(path):
    from transformers import AutoTokenizer, logging

    logging.disable_progress_bar()

    check_checkpoint(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: could not open the tokenizer ({error}); expected a Hugging Face name or directory") from None


def check_checkpoint(path):
    """A directory in which training has not finished, or that holds no safetensors, is no model."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        hint = "its training has not finished: give its command again" if (Path(path) / "run.json").is_file() else \
            "expected a checkpoint directory that from_pretrained opens"
        raise SystemExit(f"{path}: found a directory without config.json; {hint}")
    if not Path(path).is_dir() and (path.startswith((".", "/")) or path.count("/") > 1):
        raise SystemExit(f"{path}: no such directory; expected a checkpoint directory or a Hugging Face name")


def sees_pictures(path):
    """Whether the checkpoint is a vision-language model, as its config says."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    check_checkpoint(path)
    try:
        return type(AutoConfig.from_pretrained(path)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: could not open config.json ({error}); expected a Hugging Face name or directory") from None


def load_processor(path):
    """The processor of a vision-language checkpoint: its tokenizer, and what turns pictures into inputs of the model."""
    from transformers import PROCESSOR_MAPPING, AutoConfig

    class StillProcessor(PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(path))]):
        @classmethod
        def get_attributes(cls):  # without the part for videos, which needs torchvision
            return [name for name in super().get_attributes() if name != "video_processor"]

    StillProcessor.__name__ = StillProcessor.__base__.__name__  # what save_pretrained writes down
    try:
        processor = StillProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise SystemExit(f"{path}: could not open the processor ({error}); expected a vision-language checkpoint with its"
                         " tokenizer and preprocessor_config.json; choose another") from None
    tokenizer = processor.tokenizer
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template  # older checkpoints keep it in one place
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return processor


def picture_inputs(processor, conversations):
    """What a vision-language model reads of conversations with pictures, as tensors padded on the left."""
    # A special token that a speaker spells out is left out: a picture's token without a picture would stop the run
    special = "|".join(re.escape(str(token)) for token in processor.tokenizer.added_tokens_decoder.values() if token.special)
    conversations = [local_images(messages, special) for messages in conversations]
    texts = [render(processor.tokenizer, messages) for messages in conversations]
    pictures = [[part["image"] for message in messages if not isinstance(message["content"], str)
                 for part in message["content"] if part["type"] == "image"] for messages in conversations]
    return processor(text=texts, images=pictures if any(pictures) else None, padding=True, padding_side="left",
                     add_special_tokens=False, return_tensors="pt")


def default_device():
    """Where to compute when torchrun has given this process no device."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def say_device(device):
    """Where this run computes, said once: a driver that does not fit leaves torch on the CPU without a word."""
    import torch

    if os.environ.get("RANK", "0") == "0":
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"
        print(f"computing on {device} ({name})", file=sys.stderr)


def compute_dtype(device, dtype=None):
    """The name of what models compute in: --dtype, or bf16 on GPUs and fp32 on a CPU."""
    return dtype or ("float32" if str(device) == "cpu" else "bfloat16")


def load_model(path, device="cpu", auto_class="AutoModelForCausalLM", dtype=None, **options):
    """A transformers model in `compute_dtype`, or as `dtype` says, from safetensors only; what cannot be opened is named."""
    import safetensors
    import torch
    import transformers

    check_checkpoint(path)
    # cuDNN, the first choice on H100s, gives NaN gradients under some masks (pytorch#196678) and plans for each new length
    torch.backends.cuda.enable_cudnn_sdp(False)
    model_class = getattr(transformers, auto_class) if isinstance(auto_class, str) else auto_class
    options |= {"dtype": compute_dtype(device, dtype)}
    say_device(str(device))
    gc.collect()  # what is left of an earlier model goes before the next one comes
    try:
        model, report = model_class.from_pretrained(path, use_safetensors=True, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, safetensors.SafetensorError) as error:
        raise SystemExit(f"{path}: could not open the model ({type(error).__name__}: {error}); expected a complete"
                         " checkpoint with safetensors weights; train it again or choose another") from None
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("score."))  # a new value head is fresh
    if missing or report["mismatched_keys"]:
        raise SystemExit(f"{path}: weights do not fit config.json (first of them: {(missing or ['a shape'])[0]});"
                         " expected a checkpoint of one architecture; train it again or choose another")
    return model.to(device)


class LocalSpeaker:
    """A transformers model that answers many conversations at once, and keeps its cache from turn to turn.

    `keys` name the dialogues. What the model has read of a dialogue stays in `kept` until the next call, so a turn
    costs only its new tokens. Each conversation draws from its own random stream, so its text does not depend on
    its neighbours in the batch.
    """

    def __init__(self, path, temperature=1.0, max_new_tokens=1024, batch_size=64, device=None, dtype=None, model=None,
                 tokenizer=None):
        self.device = device or default_device()
        self.tokenizer = tokenizer or load_tokenizer(path)
        self.model = (model or load_model(path, self.device, dtype=dtype)).eval()
        self.temperature, self.max_new_tokens, self.batch_size = temperature, max_new_tokens, batch_size
        self.stops = stop_tokens(self.model, self.tokenizer)
        self.kept = {}

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        import torch

        prompts = [encode_prompt(self.tokenizer, messages) for messages in conversations]
        stops = self.stops | {closing_token(self.tokenizer)}
        seeds = seeds or [0] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        answers, previous, self.kept = [None] * len(prompts), self.kept, {}
        rows = max(1, self.batch_size // n)
        with torch.inference_mode():
            for start in range(0, len(order), rows):
                chosen = order[start:start + rows]
                known = [previous.pop(keys[number], None) for number in chosen] if keys else [None] * len(chosen)
                texts, states = self._generate([prompts[i] for i in chosen], known, n, [seeds[i] for i in chosen], stops)
                for place, number in enumerate(chosen):
                    answers[number] = texts[place * n:place * n + n]
                    if keys:
                        self.kept[keys[number]] = states[place]
        return answers

    def count_tokens(self, texts):
        return sum(len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"])

    def _generate(self, prompts, known, n, seeds, stops):
        """Utterances of n samples a prompt, and for each sample the tokens and cache to go on from."""
        import torch

        cache, mask, logits = self._read(prompts, known)
        if n > 1:  # the prompt was read once, and its n samples look at it together
            cache = share_prompts(self.model, cache, n)
            mask, logits = mask.repeat_interleave(n, 0), logits.repeat_interleave(n, 0)
        total = len(prompts) * n
        uniform = uniform_numbers(seeds, n, self.max_new_tokens)
        tokens, finished, states = [[] for _ in range(total)], [False] * total, [None] * total
        live = list(range(total))  # samples still in the batch, in the order of its rows
        for step in range(self.max_new_tokens):
            picked = pick_tokens(logits, uniform[live, step], self.temperature).tolist()
            for number, token in zip(live, picked, strict=True):
                finished[number] = token in stops
                if not finished[number]:
                    tokens[number].append(token)
            cut = step == self.max_new_tokens - 1
            going = [place for place, number in enumerate(live) if not finished[number] and not cut]
            if len(going) < len(live):  # finished samples leave the batch at once
                for place, number in enumerate(live):
                    if place not in going and n == 1:
                        states[number] = self._keep(prompts[number] + tokens[number], cache, mask, place)
                if not going:
                    break
                live, picked = [live[place] for place in going], [picked[place] for place in going]
                index = torch.tensor(going, device=self.device)
                cache.batch_select_indices(index)
                mask = mask[index]
            fed = torch.tensor(picked, device=self.device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], 1)
            positions = mask.sum(1, keepdim=True) - 1
            logits = self.model(input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache,
                                use_cache=True).logits[:, -1]
        texts = [self.tokenizer.decode(t, skip_special_tokens=True).strip() for t in tokens]
        return [Utterance(text, done) for text, done in zip(texts, finished, strict=True)], states

    def _read(self, prompts, known):
        """Prefill: (cache, mask (R, T), logits of the last position (R, V)). Only what no cache holds is computed.

        The cache is a copy of what `known` holds, which is emptied.
        """
        import torch
        from transformers import DynamicCache

        shared = [common_prefix(ids, state[0]) if state else 0 for ids, state in zip(prompts, known, strict=True)]
        chunks = [ids[count:] for ids, count in zip(prompts, shared, strict=True)]
        past, width = max(shared), max(len(chunk) for chunk in chunks)
        mask = torch.zeros(len(prompts), past + width, dtype=torch.long, device=self.device)
        fed = torch.zeros(len(prompts), width, dtype=torch.long, device=self.device)
        for row, (chunk, count) in enumerate(zip(chunks, shared, strict=True)):
            mask[row, past - count:past] = 1
            mask[row, past + width - len(chunk):] = 1
            fed[row, width - len(chunk):] = torch.tensor(chunk, device=self.device)
        cache = DynamicCache()
        for layer in range(len(next(state for state in known if state)[1]) if past else 0):
            pairs = [state[1][layer] if count else None for state, count in zip(known, shared, strict=True)]
            example = next(pair for pair in pairs if pair)
            stacked = [torch.stack([left_padded(pair[side] if pair else example[side][:, :0], count, past)
                                    for pair, count in zip(pairs, shared, strict=True)]) for side in (0, 1)]
            cache.update(*stacked, layer)
            for state in filter(None, known):
                state[1][layer] = None  # copied: kept until the end, all caches would be there twice
        known.clear()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        logits = self.model(input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache,
                            use_cache=True, logits_to_keep=1).logits[:, -1]
        return cache, mask, logits

    def _keep(self, ids, cache, mask, row):
        """The tokens that row `row` of the cache stands for and their keys and values, without padding: (H, T, D)."""
        columns = mask[row].nonzero().squeeze(1)
        layers = [(layer.keys[row][:, columns], layer.values[row][:, columns]) for layer in cache.layers]
        return ids[:len(columns)], layers


def use_attention(model, name, function):
    """Let the model attend by `function`, with the masks that it makes for scaled_dot_product_attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)


def share_prompts(model, cache, n):
    """The cache of n samples for each row of `cache`."""
    if model.config._attn_implementation == "eager":  # sinks, soft caps: what `shared_prompts_attention` does not know
        cache.batch_repeat_interleave(n)
        return cache
    use_attention(model, "shared_prompts", shared_prompts_attention)
    return SharedPrompts(cache, n)


class SharedPrompts:
    """The cache of n samples of each prompt, which holds a prompt's keys and values once and not n times.

    For transformers it is a cache of R rows, one for each sample that is still being written. Letters in shapes:
    G prompts, K heads of keys, Q heads of queries to each of them, D numbers in a head.
    """

    def __init__(self, prompts, n):
        import torch
        from transformers import DynamicCache

        self.prompts, self.samples, self.n = prompts, DynamicCache(), n
        keys = prompts.layers[0].keys  # (G, K, P, D)
        self.slots = torch.arange(len(keys) * n, device=keys.device)  # row r is sample slots[r] of the G n that there were
        self.prompt_length = keys.shape[2]

    def get_seq_length(self, layer_idx=0):
        return self.prompt_length + self.samples.get_seq_length(layer_idx)

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *query):
        length, offset = self.samples.get_mask_sizes(*query)
        return self.prompt_length + length, offset

    def update(self, keys, values, layer_idx, *_, **__):
        """Prompts and samples apart, as `shared_prompts_attention` takes them."""
        keys, values = self.samples.update(keys, values, layer_idx)
        shared = self.prompts.layers[layer_idx]
        return (shared.keys, keys), (shared.values, values, self)

    def batch_select_indices(self, rows):
        """Only these samples go on, and only prompts that have one are kept."""
        self.samples.batch_select_indices(rows)
        slots = self.slots[rows]
        prompts, place = (slots // self.n).unique(return_inverse=True)
        self.slots = place * self.n + slots % self.n
        self.prompts.batch_select_indices(prompts)

    def by_prompt(self, rows):
        """(R, K, Q, X) -> (G, K, n Q, X): the samples of a prompt side by side, 0 for those that are finished."""
        groups = len(self.prompts.layers[0].keys)
        table = rows.new_zeros(groups * self.n, *rows.shape[1:]).index_copy(0, self.slots, rows)
        return table.unflatten(0, (groups, self.n)).transpose(1, 2).flatten(2, 3)

    def by_sample(self, groups):
        """(G, K, n Q, X) -> (R, K, Q, X)"""
        return groups.unflatten(2, (self.n, -1)).transpose(1, 2).flatten(0, 1)[self.slots]


def shared_prompts_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of the next token of each sample, (R, K Q, 1, D): one product for all samples of a prompt, not one each."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(key, torch.Tensor):  # whole prompts are being read
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    (prompt_keys, keys), (prompt_values, values, cache) = key, value
    query = query.squeeze(2).unflatten(1, (keys.shape[1], -1)) * scaling  # (R, K, Q, D)
    scores = torch.cat([cache.by_sample(cache.by_prompt(query) @ prompt_keys.mT), query @ keys.mT], -1)  # (R, K, Q, T)
    if attention_mask is not None:  # (R, 1, 1, T)
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(values)
    at_prompt, at_own = weights.split([prompt_keys.shape[2], keys.shape[2]], -1)
    seen = cache.by_sample(cache.by_prompt(at_prompt) @ prompt_values) + at_own @ values  # (R, K, Q, D)
    return seen.flatten(1, 2)[:, None], None


class VisionSpeaker:
    """A vision-language transformers model that answers conversations with pictures, as frontend humans have them.

    It draws like LocalSpeaker, but keeps no cache from turn to turn: the pictures stand in front, and each turn has new ones.
    """

    def __init__(self, path, temperature=0.0, max_new_tokens=1024, batch_size=64, device=None, dtype=None):
        from transformers import GenerationConfig

        self.device = device or default_device()
        self.processor = load_processor(path)
        self.model = load_model(path, self.device, "AutoModelForImageTextToText", dtype).eval()
        self.temperature, self.max_new_tokens, self.batch_size = temperature, max_new_tokens, batch_size
        tokenizer = self.processor.tokenizer
        self.stops = stop_tokens(self.model, tokenizer) | {closing_token(tokenizer)}
        # the checkpoint's own top_p and penalties stay out, as in LocalSpeaker
        self.model.generation_config = GenerationConfig(eos_token_id=sorted(self.stops), pad_token_id=tokenizer.pad_token_id)

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        import torch

        uniform = uniform_numbers(seeds or [0] * len(conversations), n, self.max_new_tokens)
        copies = [messages for messages in conversations for _ in range(n)]
        said = []
        with torch.inference_mode():
            for start in range(0, len(copies), self.batch_size):
                end = start + self.batch_size
                said += self._generate(copies[start:end], uniform[start:end])
        return [said[start:start + n] for start in range(0, len(said), n)]

    def _generate(self, conversations, uniform):
        import torch
        from transformers import LogitsProcessorList

        inputs = picture_inputs(self.processor, conversations).to(self.device, self.model.dtype)
        width = inputs["input_ids"].shape[1]

        def pick(ids, logits):
            picked = pick_tokens(logits, uniform[:, ids.shape[1] - width], self.temperature)
            return torch.full_like(logits, -torch.inf).scatter(1, picked[:, None], 0.0)  # the others become impossible

        written = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens,
                                      logits_processor=LogitsProcessorList([pick]))[:, width:].tolist()
        ends = [next((place for place, token in enumerate(ids) if token in self.stops), None) for ids in written]
        texts = [self.processor.tokenizer.decode(ids[:end], skip_special_tokens=True).strip()
                 for ids, end in zip(written, ends, strict=True)]
        return [Utterance(text, end is not None) for text, end in zip(texts, ends, strict=True)]


def stop_tokens(model, tokenizer):
    """The tokens that end a text, as the checkpoint says."""
    ends = model.generation_config.eos_token_id
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}


def uniform_numbers(seeds, n, length):
    """What n samples for each seed draw with, (R, length): a stream for each sample, whoever else is in the batch."""
    import numpy
    import torch

    return torch.from_numpy(numpy.stack([
        numpy.random.default_rng(derive_seed(seed, number)).random(length) for seed in seeds for number in range(n)]))


def pick_tokens(logits, uniform, temperature):
    """One token a row by inverse transform sampling; logits (R, V), uniform (R,) in [0, 1); temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1)
    totals = (logits.double() / temperature).softmax(-1).cumsum(-1)  # float64: 128k float32 terms would lose mass
    return (totals <= (uniform.to(totals) * totals[:, -1])[:, None]).sum(-1)


def common_prefix(ids, known):
    """How many leading tokens agree; at least one token of `ids` is left to be read, for its logits."""
    limit = min(len(ids) - 1, len(known))
    return next((place for place in range(limit) if ids[place] != known[place]), limit)


def left_padded(states, count, length):
    """The first `count` positions of `states` (H, T, D), at the right end of `length` positions."""
    padded = states.new_zeros(states.shape[0], length, states.shape[2])
    padded[:, length - count:] = states[:, :count]
    return padded


def closing_token(tokenizer):
    """The end-of-turn token where the template shows one, else the tokenizer's end of text."""
    try:
        return end_of_turn(tokenizer)[0]
    except UnnestedTemplate:
        return tokenizer.eos_token_id


# -----------------------------------------------------------------------------
# Judge, inside the child: run the tests, report values and never verdicts

NODE_COST, VALUE_CHARS, VALUE_DEPTH = 12, 4_000_000, 60  # above these a value is not comparable
NAMED_VALUES = {"uuid.UUID", "pathlib.PurePath", "pathlib._local.PurePath", "ipaddress._BaseAddress"}
ENCLOSED = {list: "[]", tuple: "()", deque: "||", set: "{}", frozenset: "{}", type({}.keys()): "{}",
            type({}.items()): "{}"}


class Incomparable(Exception):
    """The value equals nothing: NaN, a function, a plain object, something too large to write out."""


class Canonical:
    """Writes a value as text, so that two values are equal under `==` exactly when their texts are.

    Subclasses are reduced to their base value and the parent compares digests of the texts: no code of the
    answer takes part in a comparison, and nothing of the answer's size or depth ever reaches the parent.
    """

    def __init__(self, official: bool, ordered: bool = False):
        self.official, self.ordered, self.saw_ordered, self.left = official, ordered, False, VALUE_CHARS

    def text(self, value, depth: int = 0) -> str:
        if depth > VALUE_DEPTH or self.left < 0:
            raise Incomparable
        written = self.scalar(value)
        self.left -= NODE_COST + len(written)
        return written or self.container(value, depth + 1) or self.library(value, depth + 1)

    def scalar(self, value) -> str:
        if value is None or value is Ellipsis:
            return repr(value)
        if isinstance(value, str):
            return encode_basestring_ascii(value)
        if isinstance(value, int):
            return format(int.__index__(value), "x")  # hexadecimal: decimal digits are limited and quadratic
        if isinstance(value, float):
            return self.ratio(float.__float__(value))
        if isinstance(value, complex):
            imaginary = self.ratio(value.imag)
            return self.ratio(value.real) + ("" if imaginary == "0" else f"+{imaginary}j")
        return "b" + bytes(value).hex() if isinstance(value, (bytes, bytearray)) else ""

    def ratio(self, number) -> str:
        """The exact rational value: 1, 1.0, True, Decimal(1) and Fraction(1) are one number."""
        if number != number:
            raise Incomparable
        if number in (float("inf"), float("-inf")):
            return "inf" if number > 0 else "-inf"
        top, bottom = number.as_integer_ratio()
        return f"{top:x}" if bottom == 1 else f"{top:x}/{bottom:x}"

    def container(self, value, depth: int) -> str:
        if isinstance(value, dict):
            pairs = [f"{self.text(key, depth)}:{self.text(item, depth)}" for key, item in dict.items(value)]
            in_order = any(base.__name__ == "OrderedDict" for base in type(value).__mro__)
            self.saw_ordered |= in_order
            return f"<o{','.join(pairs)}>" if in_order and self.ordered else f"<{','.join(sorted(pairs))}>"
        for base, (opening, closing) in ENCLOSED.items():
            if isinstance(value, base):
                if base.__len__(value) * NODE_COST > self.left:
                    raise Incomparable
                parts = [self.text(item, depth) for item in base.__iter__(value)]
                return opening + ",".join(sorted(parts) if opening == "{" else parts) + closing
        if isinstance(value, range):
            ends = value[:1] if value[:1] == value else (value[0], value[-1], value.step)
            return f"range{[format(end, 'x') for end in ends]}"
        return ""

    def library(self, value, depth: int) -> str:
        """Values of known library types, told by name so that no library is imported for them."""
        kind = type(value)
        names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
        if "decimal.Decimal" in names and value.is_finite() and abs(value.adjusted()) > 5000:
            return f"decimal{value.normalize()}"
        if names & {"decimal.Decimal", "fractions.Fraction"}:
            return self.ratio(value)
        if names & {"datetime.datetime", "datetime.time"}:
            offset = value.utcoffset()
            if offset is not None and "datetime.datetime" in names:
                value, offset = value - offset, "UTC"
            return f"time {value.replace(tzinfo=None, fold=0).isoformat()} {offset}"
        if "datetime.date" in names:
            return f"date {value.isoformat()}"
        if "datetime.timedelta" in names:
            return f"delta {value.days} {value.seconds} {value.microseconds}"
        if "datetime.timezone" in names:
            return f"zone {value.utcoffset(None)}"
        if "numpy.ndarray" in names and value.shape:
            if self.official and value.size != 1:
                raise Incomparable  # `if expected == array` raises in the published grader
            return f"array{value.shape}{self.text(value.ravel().tolist(), depth)}"
        if names & {"numpy.ndarray", "numpy.generic"} and type(value.item()) is not kind:
            return self.text(value.item(), depth)
        if names & NAMED_VALUES:
            return f"{kind.__name__}{encode_basestring_ascii(str(value))}"
        if self.official:
            raise Incomparable  # the published grader meets two different classes of the same name
        if "enum.Enum" in names:
            return f"{kind.__name__}.{value._name_ or self.text(value._value_, depth)}"
        if hasattr(kind, "__dataclass_fields__"):
            fields = [entry.name for entry in kind.__dataclass_fields__.values() if entry.compare]
            shown = [name for name in fields if hasattr(value, name)]  # not those of __init__ alone
            return f"{kind.__name__}({','.join(f'{name}={self.text(getattr(value, name), depth)}' for name in shown)})"
        raise Incomparable


def describe(value, official: bool = False) -> str:
    """What the child reports of a value: `=digest`, and a second digest where an OrderedDict minds its order."""
    def digest(writer):
        return blake2b(writer.text(value).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    try:
        loose = Canonical(official)
        return f"={digest(loose)}" + (f",{digest(Canonical(official, ordered=True))}" if loose.saw_ordered else "")
    except BaseException:  # the answer's own classes may raise anything while they are read
        return "incomparable"


class Outlined(ast.NodeTransformer):
    """Undoes PEP 709: Python 3.12 lets top-level comprehensions see local names, which 3.10 and 3.11 do not."""

    def visit_ListComp(self, node):
        return ast.List([ast.Starred(ast.GeneratorExp(node.elt, node.generators), ast.Load())], ast.Load())

    def visit_SetComp(self, node):
        return ast.Set([ast.Starred(ast.GeneratorExp(node.elt, node.generators), ast.Load())])

    def visit_DictComp(self, node):
        pairs = ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)
        return ast.Call(ast.Name("dict", ast.Load()), [pairs], [])

    def visit_FunctionDef(self, node):
        return node

    visit_Lambda = visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef


def compile_for(source: str, mode: str, official: bool):
    if official:
        source = ast.fix_missing_locations(Outlined().visit(ast.parse(source, "answer", mode)))
    return compile(source, "answer", mode, dont_inherit=True)


def run_test(program, test: str, official: bool) -> str:
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses and typing look their module up by name
    shared = module.__dict__
    local = {} if official else shared  # two namespaces: helpers, imports and recursion are out of reach
    if official:
        shared.update(signal=signal)  # what the published grader's own module happens to offer
    exec(program, shared, local)
    return describe(eval(compile_for(test.strip(), "eval", official), shared, local), official)


def run_job(text: bytes, descriptor: int) -> None:
    """Write one line per test of a job: what came out of it."""
    job = json.loads(text)
    official = job["profile"] == "official"
    sys.setswitchinterval(1e-4)  # a thread that an answer left spinning hardly delays the tests that follow
    reseed, generator = super(random.Random, random._inst).seed, random._inst
    failure, program = "", None
    with contextlib.suppress(ImportError):
        if "numpy" in job["code"]:
            __import__("numpy")  # before the first test, so that its generator can be seeded for it
    try:
        program = compile_for(job["code"], "exec", official)
    except BaseException as error:
        failure = f"raised {type(error).__name__}"
    for test in job["tests"]:
        reseed(0)
        generator.gauss_next = None
        try:
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            outcome = failure or run_test(program, test, official)
        except BaseException as error:
            outcome = f"raised {type(error).__name__}"
        os.write(descriptor, outcome.encode("ascii", "replace") + b"\n")


def answer_job(descriptor: int) -> None:
    """A child's work: the job that the parent sends, and the end."""
    run_job(b"".join(iter(lambda: os.read(descriptor, 1 << 16), b"")), descriptor)
    os.close(descriptor)  # the parent goes on while the rest of the process is taken down
    os._exit(0)


def rehearse() -> None:
    """A job of our own before any fork: Python rewrites code in its first runs, and each child would do so in its own copy."""
    job = {"code": "def f(n):\n    return {str(i): [i, 0.5] for i in range(n)}", "tests": ["f(2)", "f()"], "profile": "fixed"}
    with open(os.devnull, "wb") as nowhere:
        for _ in range(10):
            run_job(json.dumps(job).encode(), nowhere.fileno())


# -----------------------------------------------------------------------------
# Judge, the worker: a clean interpreter that locks itself down once, then forks one child per answer

# Allowed system calls, as name:x86_64:aarch64 ("-": absent there). Everything else fails with EPERM.
SYSTEM_CALLS = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 ioctl:16:29 pread64:17:67
pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216
msync:26:227 mincore:27:232 madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102
alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71 recvfrom:45:207 recvmsg:47:212 shutdown:48:210
getsockname:51:204 getpeername:52:205 setsockopt:54:208 getsockopt:55:209 exit:60:93 wait4:61:260 uname:63:160
fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 ftruncate:77:46 getdents:78:- getcwd:79:17 chdir:80:49
fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- getdents64:217:61 link:86:- unlink:87:- symlink:88:- readlink:89:-
umask:95:166 gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174
getgid:104:176 geteuid:107:175 getegid:108:177 getppid:110:173 getpgrp:111:- getgroups:115:158 getresuid:118:148
getresgid:120:150 getpgid:121:155 getsid:124:156 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133
sigaltstack:131:132 statfs:137:43 fstatfs:138:44 getpriority:140:141 sched_getparam:143:121
sched_getscheduler:145:120 arch_prctl:158:- setrlimit:160:164 gettid:186:178 time:201:- futex:202:98
sched_getaffinity:204:123 set_tid_address:218:96 restart_syscall:219:128 fadvise64:221:223 clock_gettime:228:113
clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 waitid:247:95
openat:257:56 mkdirat:258:34 newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36
readlinkat:267:78 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99 get_robust_list:274:100
epoll_pwait:281:22 fallocate:285:47 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59 getcpu:309:168
renameat2:316:276 getrandom:318:278 membarrier:324:283 copy_file_range:326:285 statx:332:291 rseq:334:293
close_range:436:436 faccessat2:439:439"""
WORKER_CALLS = "prctl:157:167 chmod:90:- fchmodat:268:53 landlock_restrict_self:446:446"  # refused in the child
# Allowed with one argument fixed, as name:x86_64:aarch64:argument:value; the others only inside a child.
CONDITIONS = "socketpair:53:199:0:1 sendto:44:206:4:0 prlimit64:302:261:0:0"
CLONE, KILLS, CLONE3 = "clone:56:220", "kill:62:129 tgkill:234:131", "clone3:435:435"
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH of seccomp
ALLOW, REFUSE, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # SECCOMP_RET_...
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: load a word, jump if equal, jump if any bit is set, return


def numbers(calls: str) -> list[int]:
    """System call numbers of this machine."""
    column = MACHINES[platform.machine()][0]
    return [int(call.split(":")[1 + column]) for call in calls.split() if call.split(":")[1 + column] != "-"]


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def answer_calls(calls: str, action: int) -> bytes:
    return b"".join(instruction(EQUAL, call, 0, 1) + instruction(RETURN, action) for call in numbers(calls))


def fixed_argument(number: int, argument: int, value: int, test: int = EQUAL) -> bytes:
    """Allow the call when the low half of its argument passes the test and the high half is zero, else refuse."""
    low = 16 + 8 * argument
    return b"".join((instruction(EQUAL, number, 0, 6), instruction(LOAD, low), instruction(test, value, 0, 3),
                     instruction(LOAD, low + 4), instruction(EQUAL, 0, 0, 1), instruction(RETURN, ALLOW),
                     instruction(RETURN, REFUSE)))


def worker_filter() -> bytes:
    """The allow-list; built once and inherited by every child."""
    program = instruction(LOAD, 4) + instruction(EQUAL, MACHINES[platform.machine()][1], 1, 0)
    program += instruction(RETURN, KILL) + instruction(LOAD, 0)
    program += answer_calls(f"{SYSTEM_CALLS} {WORKER_CALLS} {CLONE} {KILLS}", ALLOW)
    for entry in CONDITIONS.split():
        argument, value = map(int, entry.split(":")[3:])
        program += fixed_argument(numbers(entry)[0], argument, value)
    return program + answer_calls(CLONE3, NO_SUCH_CALL) + instruction(RETURN, REFUSE)


def child_filter(process: int) -> bytes:
    """On top of it, in the child alone: no new process, no signal to others, no way to undo its own chains."""
    thread = 0x10000  # CLONE_THREAD
    program = instruction(LOAD, 0) + fixed_argument(numbers(CLONE)[0], 0, thread, ANY_BIT)
    program += b"".join(fixed_argument(number, 0, process) for number in numbers(KILLS))
    return program + answer_calls(WORKER_CALLS, REFUSE) + instruction(RETURN, ALLOW)


REQUIRED = ("system calls", "files", "privileges", "limits")  # what --require_protection insists on
SECOND_LINES = ("own user", "own network")  # not everywhere possible, and nothing depends on them
MEMORY, SECONDS_OF_CHILD = 1 << 30, 300
LIMITS = {"AS": MEMORY, "NOFILE": 64, "FSIZE": 8 << 20, "CORE": 0, "STACK": 16 << 20}
DEATH_SIGNAL, NO_DUMP, FILTER, NO_NEW_PRIVILEGES = 1, 4, 22, 38  # options of prctl
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock, the same numbers on every machine
PROCESS_MARK = 0x7A7A7A7A  # stands in the child's filter where its process id goes


def set_limits(limits: dict[str, int]) -> bool:
    worked = True
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # macOS knows the name RLIMIT_AS and refuses the limit
            worked = False
    return worked


def readable_places() -> list[str]:
    """What answers may read: the interpreter, its installed packages, shared libraries, time zones."""
    places = [*sys.path, os.path.join(sys.base_prefix, "lib"), *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
              "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom"]
    return [place for place in dict.fromkeys(places) if os.path.isabs(place) and os.path.exists(place)]


def drop_user(folder: str) -> bool:
    """Become a user of nobody else's, where this is root and the interpreter stays readable without being root."""
    user = 0x60000000 + os.getpid()  # no two live workers share it, whoever started them
    places = [*readable_places(), os.__file__, folder]
    if os.getuid() != 0:
        return False
    try:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
        allowed = all(os.access(place, os.R_OK) for place in places)
    except OSError:
        allowed = False
    kept = user if allowed else 0
    os.setresuid(kept, kept, kept)
    os.setresgid(kept, kept, kept)
    if not allowed:
        os.chown(folder, 0, 0)
    return allowed


def landlock_rules(libc: ctypes.CDLL, folder: str) -> int:
    """Descriptor of the rules that children put on: read the interpreter, write the scratch folder. -1: no Landlock."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return -1
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    write_file, read_file, read_folder = 1 << 1, 1 << 2, 1 << 3
    inside = rights & ~sum(1 << bit for bit in (0, 6, 9, 10, 11))  # all but execution, devices, sockets and pipes
    attributes = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)  # and TCP, signals
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    granted = dict.fromkeys(readable_places(), read_file | read_folder)
    for place, right in {**granted, "/dev/null": read_file | write_file, folder: inside}.items():
        descriptor = os.open(place, os.O_PATH)
        right = right if os.path.isdir(place) else right & (read_file | write_file)
        libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", right, descriptor), 0)
        os.close(descriptor)
    return rules


def install_filter(libc: ctypes.CDLL, program: ctypes.Array) -> bool:
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(program))
    return libc.prctl(FILTER, 2, header, 0, 0) == 0


def lock_down(libc: ctypes.CDLL, folder: str) -> tuple[dict[str, bool], int]:
    """Give up, for good, whatever an answer does not need. Returns what worked and the children's file rules."""
    network, messages, names, users = 0x40000000, 0x08000000, 0x04000000, 0x10000000  # CLONE_NEWNET, IPC, UTS, USER
    namespaces = network | messages | names | (users if os.getuid() else 0)
    status = {"own network": libc.unshare(namespaces) == 0, "own user": drop_user(folder)}
    if status["own user"]:
        set_limits({"NPROC": 64})
    no_capability = libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
    status["privileges"] = libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and no_capability
    libc.prctl(NO_DUMP, 0, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGUSR1, 0, 0, 0)
    rules = landlock_rules(libc, folder)
    known = platform.machine() in MACHINES and struct.calcsize("P") == 8
    filtered = known and install_filter(libc, ctypes.create_string_buffer(worker_filter()))
    return status | {"files": rules >= 0, "system calls": filtered}, rules


def empty_folder(folder: str) -> None:
    """Delete everything below, however deep, without following links: what lies deeper is moved up first."""
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            os.chmod(entry, 0o700)
            for inner in os.scandir(entry):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)
                    os.rename(inner, os.path.join(folder, os.urandom(16).hex()))
                else:
                    os.unlink(inner)
            os.rmdir(entry)


def run_child(libc: ctypes.CDLL | None, descriptor: int, worker: int, rules: int, program: ctypes.Array | None) -> None:
    try:
        set_limits({"CPU": SECONDS_OF_CHILD})  # the parent's clock is the limit; this one is for when it is gone
        if libc:
            libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            confined = rules < 0 or libc.syscall(RESTRICT_SELF, rules, 0) == 0
            if program:
                program.raw = program.raw.replace(struct.pack("I", PROCESS_MARK), struct.pack("I", os.getpid()))
                confined = confined and install_filter(libc, program)
            if not confined:
                os._exit(1)
        if os.getppid() == worker:
            answer_job(descriptor)
    finally:
        os._exit(1)


def serve_answers(control: socket.socket, folder: str) -> None:
    """The worker's work: lock itself down, say what worked, then a child for each job until the parent is gone."""
    owner, itself = os.getppid(), os.getpid()
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # Python 3.10 has no -P
    globals().update(vars(builtins))  # an answer that rebinds builtins.int does not rebind ours
    signal.signal(signal.SIGUSR1, lambda *_: os.getppid() == owner or sys.exit())  # also sent when a mere thread ends
    status, rules, program, libc, fork = {"limits": set_limits(LIMITS)}, -1, None, None, os.fork
    if sys.platform == "linux":
        libc, fork = ctypes.CDLL(None), ctypes.PyDLL(None).fork  # os.fork seeds and repairs in the child what no child needs
        locks, rules = lock_down(libc, folder)
        status |= locks
        program = ctypes.create_string_buffer(child_filter(PROCESS_MARK)) if status["system calls"] else None
    os.dup2(0, 2)
    control.send(json.dumps(status).encode() + b"\n")
    rehearse()
    gc.collect()
    gc.freeze()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        child = fork()
        if child == 0:
            control.close()
            run_child(libc, descriptors[0], itself, rules, program)
        try:
            os.close(descriptors[0])
            control.send(struct.pack("i", child))
            control.recv(1)
        finally:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still this child's
            os.waitpid(child, 0)
            empty_folder(folder)


def judge_worker(descriptor: int) -> None:
    """Main of the worker process: it never reads a job, so that no child finds another one's in its memory."""
    folder = os.getcwd()
    try:
        serve_answers(socket.socket(fileno=descriptor), folder)
    finally:
        os.rmdir(folder)  # the parent may have been killed, even before the first job


# -----------------------------------------------------------------------------
# Judge, the parent: workers, limits, comparison

PYTHON_TAGS = {"python", "python3", "py", "py3"}
# Profile `official`: the published grader gives 0 to an answer that contains one of these anywhere.
BANNED = ("import os", "from os", "import sys", "from sys", "sudo", "transformers", "exit(", "quit(", "argparse")
OUTCOME = re.compile(rb"=[0-9a-f]{32}(,[0-9a-f]{32})?|incomparable|raised [A-Za-z_?]\w{0,60}", re.ASCII)
LINE_LENGTH, CONTROL_SECONDS, WALL_PER_CPU, REFERENCE_FACTOR = 160, 60, 4, 4
POLL = struct.pack("ll", 0, 50_000)  # how often, in microseconds, a silent child's clocks are read
NOTHING = describe(None)


@dataclass
class Grade:
    """Fraction of hidden tests passed, whether all were, and per test "passed" or why not."""
    reward: float
    success: bool
    reasons: dict[str, str] = field(default_factory=dict)


def extract_code(answer: object, profile: str = "fixed") -> str:
    """The code of an answer, "" if there is none."""
    text = answer if isinstance(answer, str) else ""
    if profile == "official":
        if any(word in text for word in BANNED):
            return ""
        for fence in ("```python", "```"):
            text = text.split(fence)[1].split("```")[0] if fence in text else text
        return text
    parts = text.split(ANSWER_MARKER)
    text = parts[1] if len(parts) > 1 and parts[1].strip() else parts[0]
    blocks = []
    for block in text.split("```")[1::2]:
        tag, newline, body = block.partition("\n")
        tagged = newline and len(tag.split()) < 2
        blocks.append((tag.strip().lower() if tagged else "", body if tagged else block))
    blocks.sort(key=lambda block: block[0] not in PYTHON_TAGS)  # the first Python block, else the first block
    return (blocks[0][1] if blocks else text).strip()


def process_clocks(process: int) -> tuple[float, float, float]:
    """CPU seconds of a process in its own code, with those in the kernel, and the seconds on the wall.

    The first is what an answer is held to: what a page fault costs on a busy machine is not the answer's doing.
    """
    wall = time.monotonic()
    if sys.platform != "linux":
        return wall, wall, wall
    user, total = (time.clock_gettime((~process << 3) | kind) for kind in (1, 2))
    return user, total, wall


class Worker:
    """A worker process and its scratch folder. Started by exec: a fork would carry our memory, threads and CUDA."""

    def __init__(self):
        self.owner, self.folder = os.getpid(), tempfile.mkdtemp(prefix="colbench-judge-")
        self.control, theirs = socket.socketpair()
        self.control.settimeout(CONTROL_SECONDS)
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0",
                       "HOME": self.folder, "TMPDIR": self.folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        flags = ["-s", "-B", "-W", "ignore", *(["-P"] if sys.version_info >= (3, 11) else [])]
        command = [sys.executable, *flags, os.path.abspath(__file__), "judge-worker", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.folder, pass_fds=(theirs.fileno(),), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ready(self) -> dict[str, bool]:
        """Wait for the worker and return which protections it could put on."""
        line = self.control.makefile("rb").readline()
        if not line:
            raise SystemExit("found a judge worker that ended before it was ready, expected it to start; "
                             "see its message above.")
        return json.loads(line)

    def run(self, job: bytes, count: int, seconds: float) -> tuple[list[str], str]:
        """Outcomes of the tests that a fresh child finished, and why it did not finish the rest ("" if it did)."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self.control, [b"j"], [theirs.fileno()])
            message = self.control.recv(4)
            if len(message) < 4:
                raise ConnectionError("the judge's worker is gone")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, POLL)
            try:
                return self.collect(ours, job, struct.unpack("i", message)[0], count, seconds)
            finally:
                self.control.send(b"k")  # the worker kills the child, whatever it is doing

    def collect(self, child: socket.socket, job: bytes, process: int, count: int, seconds: float):
        outcomes, rest, started = [], b"", process_clocks(process)
        with contextlib.suppress(ConnectionError):  # an early end shows below
            child.sendall(job)
            child.shutdown(socket.SHUT_WR)
        while len(outcomes) < count:
            try:
                data = child.recv(1 << 16, socket.MSG_WAITALL)  # returns at the end, or with what came so far
                if not data:
                    return outcomes, "crashed"
            except BlockingIOError:
                data = b""
            except ConnectionError:
                return outcomes, "crashed"
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not OUTCOME.fullmatch(line):
                    return outcomes, "crashed"  # not our line: the answer wrote to our socket
                outcomes.append(line.decode())
            user, total, wall = (now - then for now, then in zip(process_clocks(process), started, strict=True))
            if lines:
                started = process_clocks(process)
            elif len(rest) > LINE_LENGTH:
                return outcomes, "crashed"
            elif user > seconds or max(total, wall - total) > seconds * WALL_PER_CPU:  # loops; kernel time, sleep
                return outcomes, "timed out"
        return outcomes[:count], ""


def close_workers(workers: set[Worker]) -> None:
    mine = [worker for worker in workers if worker.owner == os.getpid()]  # a forked copy of us owns none
    for worker in mine:
        with contextlib.suppress(OSError):  # the worker may have ended first
            worker.control.shutdown(socket.SHUT_RDWR)  # unlike close, also when a forked process holds a copy
        worker.control.close()
    for worker in mine:
        try:
            worker.process.wait(5)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        shutil.rmtree(worker.folder, ignore_errors=True)
    workers.clear()


class Judge:
    """A pool of workers, and what the references returned. Keep one open for as long as there are answers to grade."""

    def __init__(self, workers: int | None = None, max_timeouts: int = 2, seconds: float = 1.0,
                 require_protection: bool = False):
        self.max_timeouts, self.seconds, self.expected = max_timeouts, seconds, {}
        count = workers or min(os.cpu_count() or 1, 8)
        self.workers: set[Worker] = set()
        self.close = weakref.finalize(self, close_workers, self.workers)
        self.workers.update(Worker() for _ in range(count))
        self.status = {name: False for name in (*REQUIRED, *SECOND_LINES)}
        for worker in self.workers:
            self.status |= worker.ready()
        self.idle = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="judge")
        inactive = [name for name, active in self.status.items() if not active]
        if inactive:
            print(f"judge: protections not active on this machine: {', '.join(inactive)}", file=sys.stderr)
        missing = [name for name in inactive if name in REQUIRED]
        if require_protection and missing:
            self.close()
            raise SystemExit(f"found a machine without these protections: {', '.join(missing)}, expected all of them "
                             "because of --require_protection; use Linux 5.13 or newer with Landlock and seccomp, "
                             "or drop the flag for answers you trust.")
        if self.outcomes("", ["1"], "fixed", REFERENCE_FACTOR * seconds) != [describe(1)]:
            self.close()
            raise SystemExit("found a judge whose child cannot evaluate 1, expected 1; check process limits.")

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_) -> None:
        self.threads.shutdown()
        self.close()

    def outcomes(self, code: str, tests: list[str], profile: str, seconds: float) -> list[str]:
        """What came out of each test, on an idle worker; a worker that dies is replaced and the answer run again."""
        worker = self.idle.get()
        try:
            for _ in range(3):
                try:
                    return self.run_all(worker, code, tests, profile, seconds)
                except OSError:
                    close_workers({worker})
                self.workers.discard(worker)
                worker = Worker()
                self.workers.add(worker)
                worker.ready()
            return ["crashed"] * len(tests)
        finally:
            self.idle.put(worker)

    def run_all(self, worker: Worker, code: str, tests: list[str], profile: str, seconds: float) -> list[str]:
        outcomes, timeouts = [], 0
        while len(outcomes) < len(tests):
            if timeouts == self.max_timeouts:
                return outcomes + ["timed out"] * (len(tests) - len(outcomes))
            left = tests[len(outcomes):]
            job = json.dumps({"code": code, "tests": left, "profile": profile}).encode()
            done, ending = worker.run(job, len(left), seconds)
            outcomes += done + ([ending] if ending else [])
            timeouts += ending == "timed out"
        return outcomes

    def key(self, task: dict, profile: str) -> bytes:
        content = json.dumps([task["ground_truth"], task["test_cases"], profile])
        return blake2b(content.encode(), digest_size=16).digest()

    def learn(self, task: dict, profile: str) -> None:
        """Run a reference, under four times an answer's limits, and keep what came out."""
        tests = list(task["test_cases"].values())
        seconds = self.seconds * REFERENCE_FACTOR
        self.expected[self.key(task, profile)] = self.outcomes(task["ground_truth"], tests, profile, seconds)

    def grade(self, task: dict, answer: object, profile: str = "fixed") -> Grade:
        key, tests, code = self.key(task, profile), task["test_cases"], extract_code(answer, profile)
        if key not in self.expected:
            self.learn(task, profile)
        expected = dict(zip(tests, self.expected[key], strict=True))
        usable = [name for name in tests if expected[name].startswith("=") and expected[name] != NOTHING]
        reasons = dict.fromkeys(tests, "reference failed") | dict.fromkeys(usable, "no code")
        if code and usable:
            actual = self.outcomes(code, [tests[name] for name in usable], profile, self.seconds)
            reasons |= {name: reason_of(expected[name], outcome) for name, outcome in zip(usable, actual, strict=True)}
        passed = sum(reason == "passed" for reason in reasons.values())
        return Grade(passed / max(len(tests), 1), 0 < passed == len(tests), reasons)

    def grade_all(self, tasks: list[dict], answers: list, profile: str = "fixed") -> list[Grade]:
        """Grade answers side by side; the references that are new go first, each once."""
        unknown = {key: task for task in tasks if (key := self.key(task, profile)) not in self.expected}
        list(self.threads.map(lambda task: self.learn(task, profile), unknown.values()))
        return list(self.threads.map(lambda task, answer: self.grade(task, answer, profile), tasks, answers))


def reason_of(expected: str, outcome: str) -> str:
    """The reason of one test. Digests pair up: order counts only between two OrderedDicts."""
    if not outcome.startswith("="):
        return "wrong" if outcome == "incomparable" else outcome
    (loose, *order), (other_loose, *other_order) = expected.split(","), outcome.split(",")
    return "passed" if loose == other_loose and (order == other_order or not order or not other_order) else "wrong"


@functools.cache
def shared_judge(process: int, workers: int | None) -> Judge:
    """The judge of `grade` and `grade_all`, kept until this process ends; a forked process gets its own."""
    return Judge(workers)


def grade(task: dict, answer: object, profile: str = "fixed") -> Grade:
    """Grade one answer on the hidden tests of its task."""
    return shared_judge(os.getpid(), None).grade(task, answer, profile)


def grade_all(tasks: list[dict], answers: list, profile: str = "fixed", workers: int | None = None) -> list[Grade]:
    """Grade many answers at once."""
    return shared_judge(os.getpid(), workers).grade_all(tasks, answers, profile)


def check_tasks(tasks: list[dict], profile: str = "fixed", require_protection: bool = False):
    """Grade each reference against itself, twice in fresh processes.

    Returns one row (number of the task, task, test, reason) per test that nobody can pass, and the protections.
    """
    runs = []
    for _ in range(2):  # two pools: addresses and clocks differ between them
        with Judge(require_protection=require_protection) as judge:
            list(judge.threads.map(lambda task: judge.learn(task, profile), tasks))
            runs.append([judge.expected[judge.key(task, profile)] for task in tasks])
    rows, unusable = [], {NOTHING: "the reference returns None", "incomparable": "the value equals nothing"}
    for number, (task, first, second) in enumerate(zip(tasks, *runs, strict=True)):
        for name, one, other in zip(task["test_cases"], first, second, strict=True):
            if one != other:
                rows.append((number, task, name, "not deterministic"))
            elif one == NOTHING or not one.startswith("="):
                rows.append((number, task, name, unusable.get(one, f"the reference {one}")))
    return rows, judge.status


def check_command(args) -> None:
    """`python colbench.py check TASKS.jsonl`: the table of tests that cannot be passed, then the protections."""
    tasks = read_tasks(args.tasks)
    if any(task["domain"] == "frontend" for task in tasks):
        raise SystemExit(f"{args.tasks}: found tasks about pages, expected backend tasks: a page has no tests to check")
    rows, status = check_tasks(tasks, args.profile, args.require_protection)
    for number, task, name, reason in rows:
        print(f"{number:6d}  {task.get('task_id', ''):16s}  {name:8s}  {reason}")
    broken = len({number for number, *_ in rows})
    print(f"{len(tasks) - broken} of {len(tasks)} tasks can be solved in full (profile {args.profile})")
    for name, active in status.items():
        print(f"protection {name:14s} {'active' if active else 'MISSING'}")
    if len(rows) == sum(len(task["test_cases"]) for task in tasks):
        raise SystemExit("found no test that can be passed, expected at least one: check the task file.")


# -----------------------------------------------------------------------------
# Frontend pages: extraction and the official rewriting of picture addresses

TAILWIND_FILE = Path(__file__).parent / "toy" / "tailwind-2.2.19.min.css.gz"
TAILWIND_ADDRESS = re.compile(r"https?://(cdn\.tailwindcss\.com|[^/]+/([^?#]*/)?tailwindcss(@(\^|%5E)?|/)2)")
PICTURE_HOST = re.compile(r"https?://(fastly\.)?(picsum\.photos|source\.unsplash\.com|images\.unsplash\.com)/")
WEBSIGHT_TRAIN = 10_000  # the paper trains on the first 10,000 WebSight rows and tests on those after them


def official_addresses(text):
    """The text with random pictures pinned to picsum's picture 48, as in the published tasks."""
    picture = r"https://picsum.photos/id/48/\1/\2"
    text = re.sub(r"https://source\.unsplash\.com/random/(\d+)x(\d+)/\?[\w=]+", picture, text)
    return re.sub(r"https://picsum\.photos/(\d+)/(\d+)", picture, text)


def extract_html(text):
    """The first <html> block of a message, else its first <body> block, else the empty string (the official rule)."""
    text = official_addresses(text or "")
    block = re.search(r"<html.*?>.*?</html>", text, re.DOTALL) or re.search(r"<body.*?>.*?</body>", text, re.DOTALL)
    return block.group(0) if block else ""


def last_page(history):
    """The last page that the agent showed, or the empty string."""
    pages = (extract_html(entry["content"]) for entry in reversed(history) if entry["role"] == "assistant")
    return next(filter(None, pages), "")


def graded_page(answer, history):
    """The page that counts: the answer's, or the last one shown where the answer holds none."""
    return extract_html(answer) or last_page(history)


def websight(rows_path, train_path, test_path=None):
    """WebSight rows as tasks: the first 10,000 go to train_path, those after them to test_path when it is given."""
    with tempfile.TemporaryDirectory(dir=Path(train_path).absolute().parent) as folder:
        parts = [Path(folder, "train"), Path(folder, "test")]
        with open(parts[0], "w") as train, open(parts[1], "w") as test:
            for number, (where, row) in enumerate(read_jsonl(rows_path)):
                page = official_addresses(expect(row, "text", str, where))
                task = {"problem_description": expect(row, "llm_generated_idea", str, where), "domain": "frontend",
                        "ground_truth": page, "hidden_information": page}
                print(json.dumps(task), file=train if number < WEBSIGHT_TRAIN else test)
        os.replace(parts[0], train_path)
        if test_path:
            os.replace(parts[1], test_path)


# -----------------------------------------------------------------------------
# Frontend browser: one headless Chromium over the DevTools pipe, script off, no network

PAGE_WIDTH, VIEW_HEIGHT, MAX_HEIGHT = 1280, 800, 4000
MAX_PAGE_CHARACTERS = 500_000
CHROMIUM_FLAGS = [
    "--headless", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-breakpad", "--disable-dev-shm-usage",
    # Requests are answered or failed in _answer; these close the network for what never becomes a request there
    # (preconnect, DNS prefetch): every host is unknown, and the proxy, loopback included, is a closed port.
    "--proxy-server=127.0.0.1:1", "--proxy-bypass-list=<-loopback>", "--host-resolver-rules=MAP * ~NOTFOUND",
]
# The shell gives Chromium the pipe as descriptors 3 and 4 and removes the profile even if our process was killed:
# Chromium quits when its pipe closes.
CHROMIUM_SHELL = '"$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1; rm -rf "$HOME"'


class PageError(Exception):
    """A page that could not be rendered; the text is the reason."""


def find_chromium():
    """The path of Chromium: the environment variable CHROMIUM, else the first known name on PATH."""
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else ["chromium", "chromium-browser", "google-chrome"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise SystemExit(
            f"found no program {' or '.join(names)}, expected Chromium to render pages with; "
            "run `apt-get install chromium`, or set the environment variable CHROMIUM to its path"
        )
    return path


def placeholder_picture(address):
    """A PNG of the size that the address asks for, in one colour made from the address."""
    # Sizes are written /300/200, /300x200, /300 (a square) or ?w=300&h=200.
    path = re.sub(r"/id/\d+|/seed/[^/]+|/photo-[^?]*", "", address.split("//", 1)[-1])
    size = re.search(r"/(\d+)(?:[/x](\d+))?", path) or re.search(r"[?&]w=(\d+)(?:.*[?&]h=(\d+))?", address)
    width, height = (size.group(1), size.group(2) or size.group(1)) if size else (800, 600)
    width, height = (max(1, min(int(str(side)[:6]), 2000)) for side in (width, height))
    colour = bytes(64 + byte // 2 for byte in hashlib.sha256(address.encode()).digest()[:3])

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # one byte per pixel, into a palette of one
    pixels = zlib.compress(bytes((width + 1) * height), 9)
    parts = [chunk(b"IHDR", header), chunk(b"PLTE", colour), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class Browser:
    """Renders pages to PNG bytes; one Chromium for many pages, started when needed and ended with this process."""

    def __init__(self, seconds_per_page=6.0, pages_per_start=200):
        self.executable = find_chromium()
        self.seconds_per_page, self.pages_per_start = seconds_per_page, pages_per_start
        self.process, self.starts = None, 0
        self.stylesheet = base64.b64encode(gzip.decompress(TAILWIND_FILE.read_bytes())).decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def render(self, html):
        """The full page as PNG bytes; PageError says why there is none."""
        if len(html) > MAX_PAGE_CHARACTERS:
            raise PageError(f"page of {len(html)} characters, at most {MAX_PAGE_CHARACTERS} are rendered")
        if self.process is None or self.pages_left == 0:
            self._start()
        self.pages_left -= 1
        self.deadline = time.monotonic() + self.seconds_per_page
        try:
            if self.navigated:  # the page before wanted to leave: a delayed refresh would strike this one
                self._open_page()
            return self._draw(html)
        except PageError:
            self.close()  # whatever the page did to the browser ends here; the next page gets a new one
            raise

    def picture(self, html):
        """The PNG of a page, None where it could not be rendered."""
        try:
            return self.render(html)
        except PageError:
            return None

    def close(self):
        """End Chromium with all its children and remove its profile."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        shutil.rmtree(self.profile, ignore_errors=True)
        self.process = None

    def _start(self):
        self.close()
        self.profile = tempfile.mkdtemp(prefix="colbench-chromium-")
        command = [self.executable, *CHROMIUM_FLAGS, f"--user-data-dir={self.profile}"]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium refuses root with its sandbox
        self.process = subprocess.Popen(
            ["sh", "-c", CHROMIUM_SHELL, "sh", *command], bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": self.profile},
        )
        os.set_blocking(self.process.stdin.fileno(), False)
        self.received, self.last_id, self.target, self.session = bytearray(), 0, None, None
        self.pages_left, self.starts = self.pages_per_start, self.starts + 1
        self.deadline = time.monotonic() + 30
        try:
            self._open_page()
        except PageError as error:
            self.close()
            raise SystemExit(
                f"found that {self.executable} does not start ({error}), expected a headless Chromium; "
                "try `chromium --headless --dump-dom about:blank` in a shell"
            ) from error

    def _open_page(self):
        """A fresh page in a context of its own, for many documents: without script they leave nothing behind."""
        self.navigated = False
        if self.session:
            self.session = None  # what follows is said to the browser, not to a page
            self._call("Target.disposeBrowserContext", browserContextId=self.context)
        self.context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call("Fetch.enable")
        self._call("Emulation.setScriptExecutionDisabled", value=True)
        size = {"width": PAGE_WIDTH, "height": VIEW_HEIGHT}
        self._call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        self.frame = self._call("Page.getFrameTree")["frameTree"]["frame"]["id"]

    def _draw(self, html):
        self.loaded = False
        # Written into the same blank document each time: Chromium then keeps the 3 MB style sheet parsed.
        self._call("Page.setDocumentContent", frameId=self.frame, html=settled_page(html))
        while not self.loaded:
            self._handle(self._receive())
        height = self._call("Page.getLayoutMetrics")["cssContentSize"]["height"]
        clip = {"x": 0, "y": 0, "width": PAGE_WIDTH, "height": max(1, min(height, MAX_HEIGHT)), "scale": 1}
        options = {"format": "png", "captureBeyondViewport": True, "optimizeForSpeed": True}
        return base64.b64decode(self._call("Page.captureScreenshot", clip=clip, **options)["data"])

    def _send(self, method, parameters):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        unsent = memoryview(json.dumps(message).encode() + b"\0")
        while unsent:
            self._wait([], [self.process.stdin])
            try:
                unsent = unsent[os.write(self.process.stdin.fileno(), unsent):]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PageError("the browser crashed") from error
        return self.last_id

    def _receive(self):
        while b"\0" not in self.received:
            self._wait([self.process.stdout], [])
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            if not data:
                raise PageError("the browser crashed")
            self.received += data
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def _wait(self, readable, writable):
        left = self.deadline - time.monotonic()
        if left <= 0 or not any(select.select(readable, writable, [], left)):
            raise PageError(f"the page took more than {self.seconds_per_page:g} seconds")

    def _call(self, method, **parameters):
        number = self._send(method, parameters)
        while (message := self._receive()).get("id") != number:
            self._handle(message)
        if "error" in message:
            raise PageError(f"the browser refused {method}: {message['error'].get('message')}")
        return message["result"]

    def _handle(self, message):
        method, parameters = message.get("method", ""), message.get("params", {})
        if method == "Fetch.requestPaused":
            self._answer(parameters["requestId"], parameters["request"]["url"], parameters["resourceType"])
        elif method == "Inspector.targetCrashed":
            raise PageError("the page crashed")
        elif method == "Page.loadEventFired":
            self.loaded = True
        elif method in ("Page.frameScheduledNavigation", "Page.frameRequestedNavigation", "Page.frameNavigated"):
            self.navigated = True

    def _answer(self, request, address, kind):
        """Answer a page's request from our own files, or fail it; nothing is ever let through but data: addresses."""
        if TAILWIND_ADDRESS.match(address):
            content, body = "text/css", self.stylesheet
        elif PICTURE_HOST.match(address):
            content, body = "image/png", base64.b64encode(placeholder_picture(address)).decode()
        elif address.startswith("data:"):
            self._send("Fetch.continueRequest", {"requestId": request})
            return
        else:
            # "Aborted" leaves the page as it is; any other reason replaces it by Chromium's own error page.
            reason = "Aborted" if kind == "Document" else "BlockedByClient"
            self._send("Fetch.failRequest", {"requestId": request, "errorReason": reason})
            return
        fields = {"Content-Type": content, "Cache-Control": "max-age=31536000", "Access-Control-Allow-Origin": "*"}
        headers = [{"name": name, "value": value} for name, value in fields.items()]
        answer = {"requestId": request, "responseCode": 200, "responseHeaders": headers, "body": body}
        self._send("Fetch.fulfillRequest", answer)


def settled_page(html):
    """The page with animations stopped and Tailwind's script replaced by its style sheet, as script is off."""
    link = r'<link rel="stylesheet" href="https://cdn.tailwindcss.com">'
    html = html.encode(errors="replace").decode()  # half of a surrogate pair cannot be sent
    html = re.sub(r"<script[^>]+cdn\.tailwindcss\.com[^>]*>\s*</script>", link, html, flags=re.IGNORECASE)
    still = r"\g<0><style>*,::before,::after{animation:none!important;transition:none!important}</style>"
    return re.sub(r"^\s*(<!doctype[^>]*>)?", still, html, count=1, flags=re.IGNORECASE)


# -----------------------------------------------------------------------------
# Frontend reward: similarity of two screenshots


def open_picture(png):
    """The PIL image of PNG bytes."""
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


def page_features(png):
    """Mean colour and contrast of each 20-pixel cell (rows, 64, 3), and the share of each of 64 colours in the page."""
    import numpy
    from PIL import Image

    picture = open_picture(png)
    rows = max(1, round(picture.height / 20))
    picture = picture.resize((64 * 5, rows * 5), Image.Resampling.BOX)  # a quarter of the size: 5 pixels a cell
    pixels = numpy.asarray(picture)
    cells = pixels.reshape(rows, 5, 64, 5, 3).astype(numpy.float32) / 255
    quarters = pixels // 64  # four levels of each of red, green and blue
    colours = quarters[..., 0] * 16 + quarters[..., 1] * 4 + quarters[..., 2]
    shares = numpy.bincount(colours.ravel(), minlength=64) / colours.size
    return cells.mean(axis=(1, 3)), cells.std(axis=(1, 3)), shares


def embedded_similarity(png_a, png_b):
    """Similarity in [0, 1] of two screenshots without a model: the mean of layout, detail and colour agreement.

    Layout compares mean colours cell by cell, so that a block in the wrong place or colour counts by its area; detail
    compares contrast, which is where text and edges are, so that a blank page in the right colour is not half
    right; colour compares histograms, which forgives a block that only moved. A page longer than the other
    disagrees with it over the excess.
    """
    import numpy

    (mean_a, contrast_a, shares_a), (mean_b, contrast_b, shares_b) = page_features(png_a), page_features(png_b)
    shared, rows = min(len(mean_a), len(mean_b)), max(len(mean_a), len(mean_b))
    difference = numpy.abs(mean_a[:shared] - mean_b[:shared]).max(axis=2)
    layout = numpy.clip(1 - 2 * difference, 0, 1).mean() * shared / rows
    common = numpy.minimum(contrast_a[:shared], contrast_b[:shared]).sum()
    either = contrast_a.sum() + contrast_b.sum() - common
    detail = common / either if either > 1e-6 else 1.0
    colour = numpy.minimum(shares_a, shares_b).sum()
    return float(min(1.0, (layout + detail + colour) / 3))


class ClipReward:
    """Cosine of CLIP image embeddings: the paper's frontend reward.

    crop="center" is what CLIP's processor does and the official numbers are made with: of a tall page only the middle
    square is compared. crop="pad" pads a page with white to a square first, so that all of it counts.
    """

    def __init__(self, name="openai/clip-vit-base-patch32", crop="center", device="cpu", batch_size=32):
        # The PIL processor: the other one needs torchvision and scales pictures a little differently.
        from transformers import CLIPImageProcessorPil, CLIPModel

        try:
            self.model = CLIPModel.from_pretrained(name).to(device).eval()
            self.processor = CLIPImageProcessorPil.from_pretrained(name)
        except OSError as error:
            raise SystemExit(
                f"found no CLIP model {name} ({error}), expected its name or directory; "
                "download it on a machine with network, or pass --clip none for the embedded similarity"
            ) from error
        self.crop, self.device, self.batch_size, self.known = crop, device, batch_size, {}

    def similarities(self, pictures, references):
        """Cosine in [0, 1] of each screenshot with its reference; each reference is embedded once."""
        import torch

        keys = [hashlib.sha256(png).digest() for png in references]
        missing = {key: png for key, png in zip(keys, references, strict=True) if key not in self.known}
        self.known.update(zip(missing, self._embed(list(missing.values())), strict=True))
        if not pictures:
            return []
        cosines = (torch.stack(self._embed(pictures)) * torch.stack([self.known[key] for key in keys])).sum(dim=1)
        return cosines.clamp(0, 1).tolist()

    def _embed(self, pictures):
        import torch

        embeddings = []
        for start in range(0, len(pictures), self.batch_size):
            images = [self._square(open_picture(png)) for png in pictures[start:start + self.batch_size]]
            pixels = self.processor(images=images, return_tensors="pt")["pixel_values"].to(self.device)
            with torch.inference_mode():
                pooled = self.model.vision_model(pixel_values=pixels).pooler_output  # [B, hidden]
                projected = self.model.visual_projection(pooled)  # [B, dimension]
                embeddings += torch.nn.functional.normalize(projected.float(), dim=1).cpu().unbind()
        return embeddings

    def _square(self, image):
        if self.crop == "center":
            return image
        from PIL import ImageOps

        return ImageOps.pad(image, (max(image.size),) * 2, color="white")


def grade_frontend_all(tasks, answers, browser, clip=None):
    """A Grade for each answer: its last page against the reference page; an answer without a page scores 0."""
    grades, pictures, references, places, known = [None] * len(tasks), [], [], [], {}
    for place, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
        part, html = "page", extract_html(answer)
        try:
            if not html:
                raise PageError("no page in the answer")
            picture = browser.render(html)
            part, reference = "reference", official_addresses(task["ground_truth"])
            known[reference] = known.get(reference) or browser.render(reference)
        except PageError as error:
            grades[place] = Grade(0.0, None, {part: str(error)})
            continue
        pictures.append(picture)
        references.append(known[reference])
        places.append(place)
    if clip:
        rewards = clip.similarities(pictures, references)
    else:
        rewards = [embedded_similarity(*pair) for pair in zip(pictures, references, strict=True)]
    for place, reward in zip(places, rewards, strict=True):
        grades[place] = Grade(reward, None, {"page": "rendered"})
    return grades


# -----------------------------------------------------------------------------
# Frontend human: a vision-language model that sees both screenshots


def image_part(png):
    """A screenshot as a part of a message in the OpenAI format, for servers."""
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}


def local_images(messages, unwanted=""):
    """The same messages with PIL images instead of addresses, as the chat templates of local models take them.

    What matches the pattern `unwanted` is left out of the texts.
    """

    def local(part):
        if part["type"] != "image_url":
            return {**part, "text": re.sub(unwanted, "", part["text"])}
        return {"type": "image", "image": open_picture(base64.b64decode(part["image_url"]["url"].split(",", 1)[1]))}

    contents = [message["content"] for message in messages]
    contents = [re.sub(unwanted, "", part) if isinstance(part, str) else [*map(local, part)] for part in contents]
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]


def human_frontend_messages(task, history, agent_png, reference_png, prompt):
    """What the human sees: the request, the agent's last words without the page, both screenshots."""
    words = history[-1]["content"] if history[-1]["role"] == "assistant" else ""
    words = official_addresses(words).replace(extract_html(words) or "\0", "[the page below]")
    values = {"problem_description": task["problem_description"], "message": words}
    text = re.sub(r"\{(problem_description|message)\}", lambda match: values[match.group(1)], prompt)
    parts = [{"type": "text", "text": text}]
    if agent_png is None:
        parts.append({"type": "text", "text": "The designer shows no page."})
    else:
        parts += [{"type": "text", "text": "The designer's page:"}, image_part(agent_png)]
    parts += [{"type": "text", "text": "The page you want:"}, image_part(reference_png)]
    return [{"role": "user", "content": parts}]


# -----------------------------------------------------------------------------
# The embedded backend world: every requirement is hidden, and the true worth of each turn is known
#
# A topic ("invoice") makes five of sixteen details likely, and a task needs two to five of those. Which details go
# with which topic is in no prompt: a policy has to learn it, while whoever sees the reference can read off what matters.

# detail -> its four options: (what the human says, the clause of the reference); applied in this order
TOY_DETAILS = {
    "margin": [("strip both ends", "text.strip()"), ("strip the start", "text.lstrip()"),
               ("strip the finish", "text.rstrip()"), ("strip dashes", "text.strip('-')")],
    "zeros": [("drop each zero", "text.replace('0','')"), ("write o for zero", "text.replace('0','o')"),
              ("write nil for zero", "text.replace('0','nil')"), ("double each zero", "text.replace('0','00')")],
    "vowels": [("write at for a", "text.replace('a','@')"), ("write three for e", "text.replace('e','3')"),
               ("drop each e", "text.replace('e','')"), ("drop each a", "text.replace('a','')")],
    "case": [("use lower case", "text.lower()"), ("use upper case", "text.upper()"),
             ("use title case", "text.title()"), ("use swapped case", "text.swapcase()")],
    "joiner": [("join by underscores", "'_'.join(text.split())"), ("join by hyphens", "'-'.join(text.split())"),
               ("join by slashes", "'/'.join(text.split())"), ("join by pluses", "'+'.join(text.split())")],
    "direction": [("turn it backwards", "text[::-1]"), ("take every second letter", "text[::2]"),
                  ("move the first letter last", "text[1:]+text[:1]"), ("move the last letter first", "text[-1:]+text[:-1]")],
    "length": [("cut to six", "text[:6]"), ("cut to eight", "text[:8]"),
               ("cut to ten", "text[:10]"), ("cut to five", "text[:5]")],
    "copies": [("say it twice", "text*2"), ("say it thrice", "text*3"),
               ("mirror it", "text+text[::-1]"), ("repeat the opening", "text+text[:3]")],
    "width": [("fill the right with dots", "text.ljust(28,'.')"), ("fill the left with dots", "text.rjust(28,'.')"),
              ("center it in dots", "text.center(28,'.')"), ("fill with leading noughts", "text.zfill(28)")],
    "counter": [("append its size", "text+str(len(text))"), ("append the count of spaces", "text+str(text.count(' '))"),
                ("append the count of e", "text+str(text.count('e'))"),
                ("append the count of ones", "text+str(text.count('1'))")],
    "unit": [("append kilos", "text+'kg'"), ("append meters", "text+'cm'"),
             ("append points", "text+'pt'"), ("append pixels", "text+'px'")],
    "greeting": [("begin with dear", "'Dear:'+text"), ("begin with hello", "'Hello:'+text"),
                 ("begin with welcome", "'Welcome:'+text"), ("begin with hi", "'Hi:'+text")],
    "ending": [("finish with an exclamation", "text+'!'"), ("finish with a query", "text+'?'"),
               ("finish with a semicolon", "text+';'"), ("finish with a colon", "text+':'")],
    "brackets": [("wrap in round brackets", "'('+text+')'"), ("wrap in square brackets", "'['+text+']'"),
                 ("wrap in angle brackets", "'<'+text+'>'"), ("wrap in curly brackets", "'{'+text+'}'")],
    "frame": [("frame with stars", "'*'+text+'*'"), ("frame with waves", "'~'+text+'~'"),
              ("frame with bars", "'|'+text+'|'"), ("frame with equals", "'='+text+'='")],
    "tag": [("tag as new", "text+'#new'"), ("tag as old", "text+'#old'"),
            ("tag as hot", "text+'#hot'"), ("tag as sale", "text+'#sale'")],
}
TOY_TOPICS = (
    "invoice ticket badge parcel recipe poster ledger voucher caption banner album receipt lesson memo locker shelf"
    " coupon menu passport playlist bottle crate folder garden harbor island jacket kettle lantern market needle orchard"
    " pencil quilt rocket saddle temple umbrella violin wagon yacht zipper anchor basket candle diary engine feather"
    " guitar helmet inkwell journal kitchen ladder mirror notebook oven puzzle ribbon statue tractor vase window bridge"
).split()
TOY_LIKELY = {topic: random.Random(f"topic {topic}").sample(list(TOY_DETAILS), 5) for topic in TOY_TOPICS}
TOY_NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}
TOY_QUESTIONS = ("What about the {}?", "Which {} do you want?", "Tell me the {}.")


def toy_tasks(spec, num_tasks):
    """The first `num_tasks` tasks of `toy:DOMAIN:SPLIT`. A task's content decides its split, so splits are disjoint."""
    parts = spec.split(":")
    if len(parts) != 3 or parts[1] not in TOY_SPEAKERS or parts[2] not in ("train", "valid", "test"):
        raise SystemExit(f"found --tasks {spec}, expected toy:backend:train, toy:frontend:test, ... (train, valid or test)")
    if parts[1] == "frontend":
        return [toy_frontend_task(parts[2], index) for index in range(min(num_tasks, len(toy_pages(parts[2]))))]
    tasks, seen, draw = [], set(), random.Random(spec)
    while len(tasks) < num_tasks:
        topic = draw.choice(TOY_TOPICS)
        needed = draw.sample(TOY_LIKELY[topic], draw.randint(2, 5))
        choice = tuple((detail, draw.randrange(4)) for detail in TOY_DETAILS if detail in needed)
        bucket = derive_seed(topic, choice) % 10
        inside = {"test": bucket < 2, "valid": bucket == 2, "train": bucket > 2}[parts[2]]
        calls = toy_calls(choice, random.Random(derive_seed("inputs", topic, choice)))
        if inside and calls and (topic, choice) not in seen:
            seen.add((topic, choice))
            tasks.append(toy_backend_task(f"{parts[2]}-{len(tasks):05d}", topic, choice, calls))
    return tasks


def toy_backend_task(name, topic, choice, calls):
    """One task in the ColBench format; `toy` holds its topic and needed details, for the scripted parties only."""
    return complete_task({
        "task_id": f"toy-backend-{name}",
        "domain": "backend",
        "problem_description": f"Write a function that makes the {topic} label by {TOY_NUMBERS[len(choice)]} rules."
                               " The signature of the function is: def label(text)",
        "ground_truth": toy_code(choice),
        "test_cases": {f"test{number}": f"label({text!r})" for number, text in enumerate(calls, 1)},
        "toy": {"topic": topic, "needed": dict(choice)},
    })


def toy_code(choice):
    """The function that has the given clauses, ((detail, option), ...), in the order of TOY_DETAILS."""
    lines = [f"    text = {TOY_DETAILS[detail][option][1]}\n" for detail, option in choice]
    return "def label(text):\n" + "".join(lines) + "    return text"


@functools.cache
def toy_clause(detail, option):
    return eval(f"lambda text: {TOY_DETAILS[detail][option][1]}")  # our own table above, never model text


def toy_calls(choice, draw):
    """Ten inputs on which each clause matters: leaving one out, or another option for it, fails at least one test."""

    def outputs(clauses):
        return [functools.reduce(lambda text, clause: toy_clause(*clause)(text), clauses, text) for text in texts]

    words = "red apple Boat seven tea Green see lamp"
    texts = ["-" * draw.randint(0, 1) + " " * draw.randint(0, 2) + " ".join(draw.sample(words.split(), draw.randint(1, 3)))
             + f" {draw.choice((10, 100, 201, 35, 1))}" + " " * draw.randint(0, 2) + "-" * draw.randint(0, 1)
             for _ in range(10)]
    expected = outputs(choice)
    for place, (detail, option) in enumerate(choice):
        others = [((detail, other),) for other in range(4) if other != option] + [()]
        if any(outputs(choice[:place] + other + choice[place + 1:]) == expected for other in others):
            return None
    return texts


def has_toy_credit(task):
    """Whether the task is one of the embedded backend world, whose true credit is known."""
    return isinstance(task.get("toy"), dict) and "needed" in task["toy"]


def toy_asked(text):
    """The first detail that a message mentions, or None."""
    return next((word for word in re.findall(r"[a-z]+", text.lower()) if word in TOY_DETAILS), None)


def toy_backend_human(task, messages):
    """Tells a needed detail when it is asked for, one at a time; else has no wish about it, or does not know."""
    detail = toy_asked(messages[-1]["content"])
    needed = task["toy"]["needed"]
    if detail in needed:
        return f"Please {TOY_DETAILS[detail][needed[detail]][0]}."
    return "No wish there." if detail else "I do not know."


def toy_backend_demonstrator(task, messages, draw, informed):
    """A noisy agent. It hardly knows which details a topic needs, stops too early, and dithers past the limit.

    `informed` asks mostly for what the reference needs and answers when it knows all: episodes of this kind show the
    tiny base model how to read a reference in its context, which a pretrained model can do from the start.
    """
    asked = [toy_asked(m["content"]) for m in messages if m["role"] == "assistant"]
    needed = task["toy"]["needed"]
    known = tuple((detail, needed[detail]) for detail in TOY_DETAILS if detail in asked and detail in needed)
    stop, preferred, share = (0.2 if len(known) == len(needed) else 0.05), TOY_LIKELY[task["toy"]["topic"]], 0.5
    if informed:
        stop, preferred, share = (0.5 if len(known) == len(needed) else 0.02), list(needed), 0.6
    if draw.random() < stop:
        if draw.random() < 0.06 and known:  # a slip of the pen: one clause forgotten or mistaken
            place = draw.randrange(len(known))
            slip = ((known[place][0], draw.randrange(4)),) if draw.random() < 0.5 else ()
            known = known[:place] + slip + known[place + 1:]
        return f"{ANSWER_MARKER}\n{toy_code(known)}"
    fresh = [detail for detail in TOY_DETAILS if detail not in asked]
    hoped = [detail for detail in preferred if detail not in asked]
    if asked and draw.random() < 0.05:
        detail = draw.choice(asked)  # has forgotten what was said
    else:
        detail = draw.choice(hoped if hoped and draw.random() < share else fresh or asked)
    return draw.choice(TOY_QUESTIONS).format(detail)


class ToyCredit(typing.NamedTuple):
    kind: str  # "right answer", "useful question", "wasted question", "repeated question", "early answer", "wrong answer"
    worth: float  # a better turn of the same state has the greater worth


def toy_credit(task, history, turn, right=None, max_turns=MAX_TURNS):
    """The true worth of agent turn `turn` of a dialogue on an embedded task, given everything said before it.

    `right` is the judge's word on an answer, when it is known already; otherwise the judge is asked.
    """
    before, message = history[:2 * turn + 1], history[2 * turn + 1]
    asked = {toy_asked(m["content"]) for m in before if m["role"] == "assistant"}
    unknown = set(task["toy"]["needed"]) - asked
    content, answer = split_message(task, message["content"], turn == max_turns - 1)
    if answer is not None:
        if right is None:
            right = answer == task["ground_truth"] or grade(task, answer).success
        return ToyCredit("right answer", 1.0) if right else ToyCredit("early answer" if unknown else "wrong answer", 0.0)
    detail = toy_asked(content)
    if detail in unknown:
        return ToyCredit("useful question", 0.6)
    return ToyCredit("repeated question" if detail in asked else "wasted question", 0.3)


# -----------------------------------------------------------------------------
# Toy frontend: a page grammar, its human and its noisy demonstrator

# Slot -> word that the human uses -> text in the page, the largest difference (by embedded_similarity) first. No word
# and no page text belongs to two slots, so that a tiny model can learn which word stands for which text.
TOY_SLOTS = {
    "page": {"white": "bg-white", "gray": "bg-gray-300", "dark": "bg-gray-600"},
    "title": {"small": "text-xl", "huge": "text-6xl"},
    "footer": {"low": "h-8", "high": "h-64"},
    "cards": {"two": "grid-cols-2", "three": "grid-cols-3", "four": "grid-cols-4"},
    "header": {"red": "bg-red-600", "blue": "bg-blue-600", "green": "bg-green-600"},
    "button": {"yellow": "bg-yellow-400", "pink": "bg-pink-400", "purple": "bg-purple-600"},
}
TOY_PAGE_TOPICS = ["bakery", "museum", "garden", "school", "hotel", "cinema"]
TOY_PAGE = """<html> <link rel=stylesheet href=https://cdn.tailwindcss.com>
<body class={page}>
<h1 class="{header} {title}"> {topic} </h1>
<main class="grid text-8xl {cards}"> {card_list} </main>
<b class={button}> open </b>
<footer class="bg-indigo-400 {footer}"> </footer> </html>"""
TOY_CARD = {"two": 2, "three": 3, "four": 4}


def toy_page(topic, choice):
    """The HTML of a page whose choice maps each slot to its word."""
    texts = {slot: TOY_SLOTS[slot][word] for slot, word in choice.items()}
    cards = " ".join(["<p> card"] * TOY_CARD[choice["cards"]])
    return TOY_PAGE.format(topic=topic, card_list=cards, **texts)


def toy_page_choice(html):
    """Slot -> word read from a page; None where the page shows none of the slot's texts, or contradicts itself."""
    choice = {}
    for slot, words in TOY_SLOTS.items():
        shown = [word for word, text in words.items() if re.search(rf"[\s\"=]{text}[\s\">]", html)]
        choice[slot] = shown[0] if len(shown) == 1 else None
    # The cards must be there as well as their grid, or a page could look right and render wrong.
    if choice["cards"] and html.count("<p> ") != TOY_CARD[choice["cards"]]:
        choice["cards"] = None
    return choice


@functools.cache
def toy_pages(split):
    """The pages (topic, word, ...) of a split: of every five pages of the grammar one is for test and one for valid."""
    pages = itertools.product(TOY_PAGE_TOPICS, *TOY_SLOTS.values())
    places = {"test": (0,), "valid": (1,), "train": (2, 3, 4)}[split]
    return [page for number, page in enumerate(pages) if number % 5 in places]


def toy_frontend_task(split, index):
    """Task number `index` of a split of the toy's pages."""
    pages = toy_pages(split)
    topic, *words = pages[index * 997 % len(pages)]  # 997 is prime to all sizes: neighbours differ in many slots
    choice = dict(zip(TOY_SLOTS, words, strict=True))
    rng = random.Random(f"{split}{index}")
    told = rng.sample(sorted(choice), rng.choice([0, 1, 2]))
    wishes = "".join(f" {choice[slot]} {slot}" for slot in told)
    html = toy_page(topic, choice)
    return {
        "task_id": f"toy-frontend-{split}-{index}",
        "domain": "frontend",
        "problem_description": f"make a page for a {topic} ." + (f" i want{wishes} ." if told else ""),
        "ground_truth": html,
        "hidden_information": html,
        "toy": {"topic": topic, "wanted": choice},
    }


def toy_frontend_human(task, history):
    """The largest difference between the agent's last page and the wanted one, named in a few words."""
    html = extract_html(history[-1]["content"]) if history[-1]["role"] == "assistant" else ""
    if not html:
        return "show me a page ."
    shown, wanted = toy_page_choice(html), toy_page_choice(task["ground_truth"])
    for slot, word in wanted.items():
        if shown[slot] != word:
            return f"i want {word} {slot} ."
    return "looks right ."


def toy_frontend_demonstrator(task, history, rng, informed=False):
    """A message of the toy's noisy designer.

    It mostly applies what it is told, and sometimes ignores it, misreads it, breaks another slot, answers too early
    or goes on when all is right: haste and dithering must both fail at times, or outcomes teach nothing about them.
    `informed` follows the reference besides, so that the tiny base model learns to read one.
    """
    wanted = toy_page_choice(task["ground_truth"]) if informed else {}
    said, page = history[-1]["content"], last_page(history)
    shown = toy_page_choice(page)
    choice = {slot: shown[slot] or rng.choice(list(words)) for slot, words in TOY_SLOTS.items()}
    topic = next((topic for topic in TOY_PAGE_TOPICS if topic in history[0]["content"]), TOY_PAGE_TOPICS[0])
    thoughts = []
    for slot, words in TOY_SLOTS.items():
        told = next((word for word in words if f"{word} {slot}" in said), wanted.get(slot))
        if told and rng.random() < 0.75:
            choice[slot] = told if rng.random() < 0.85 else rng.choice(list(words))
            thoughts.append(f"{choice[slot]} {slot}")
    if page and rng.random() < 0.2:
        broken = rng.choice(list(TOY_SLOTS))
        choice[broken] = rng.choice(list(TOY_SLOTS[broken]))
    answers = rng.random() < (0.4 if "looks right" in said else 0.15 if page else 0)
    marker = "I WANT TO ANSWER: " if answers else ""
    return f"set {' '.join(thoughts) or 'nothing'} . OUTPUT: {marker}{toy_page(topic, choice)}"


TOY_SPEAKERS = {  # domain -> human, demonstrator
    "backend": (toy_backend_human, toy_backend_demonstrator),
    "frontend": (toy_frontend_human, toy_frontend_demonstrator),
}


# -----------------------------------------------------------------------------
# One referee for both domains, and the command line


class Referee:
    """Judges the answers of a run and shows the human its view; opens only what the run's tasks need."""

    def __init__(self, args, tasks, process):
        self.args, self.process = args, process
        self.judge = self.browser = self.clip = None
        domains = {task["domain"] for task in tasks}
        if len(domains) > 1:
            raise SystemExit("found backend and frontend tasks together, expected one domain; give them in two files")
        if "backend" in domains:
            share = max(1, (os.cpu_count() or 1) // process.world)
            self.judge = Judge(share, require_protection=args.require_protection)
        if "frontend" in domains:
            self.browser = Browser()
            # every turn of a dialogue shows the human the same reference page
            self.draw = functools.lru_cache(256)(self.browser.picture)
            name = args.clip or ("none" if "toy" in tasks[0] else "openai/clip-vit-base-patch32")
            self.clip = None if name == "none" else ClipReward(name, args.clip_crop, process.device or default_device())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for opened in filter(None, (self.judge, self.browser)):
            opened.__exit__(None, None, None)

    def grade_all(self, tasks, answers):
        if not tasks:
            return []
        if tasks[0]["domain"] == "backend":
            return self.judge.grade_all(tasks, answers, self.args.judge)
        return grade_frontend_all(tasks, answers, self.browser, self.clip)

    def human_view(self, task, history, prompt, human):
        """What the human speaker gets: the plain history (scripted), a chat, or a chat with both pages as pictures."""
        if isinstance(human, ScriptedSpeaker):
            return history
        if task["domain"] == "backend":
            return human_messages(task, history, prompt)
        page, reference = self.draw(last_page(history)), self.draw(extract_html(task["ground_truth"]))
        return human_frontend_messages(task, history, page, reference, prompt)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="grade every reference against itself, show active protections")
    check.add_argument("tasks", help="task file, or toy:backend:train")
    check.add_argument("--profile", choices=("fixed", "official"), default="fixed", help="grading semantics")
    check.add_argument("--require_protection", action="store_true", help="refuse if the sandbox lacks a protection")
    convert = commands.add_parser("websight", help="turn WebSight rows into frontend tasks")
    convert.add_argument("rows", help="JSONL with llm_generated_idea and text")
    convert.add_argument("train", help="task file for the first 10,000 rows")
    convert.add_argument("test", nargs="?", help="task file for the rows after them")
    args = parser.parse_args(argv)
    if args.command == "check":
        check_command(args)
    else:
        websight(args.rows, args.train, args.test)


if __name__ == "__main__":
    if sys.argv[1:2] == ["judge-worker"]:
        judge_worker(int(sys.argv[2]))
    else:
        main()
