"""ColBench: tasks, dialogue rules, what each party sees (SWEET-RL, arXiv 2503.15478, section 3).

An agent talks up to ten turns with a simulated human who has something in mind that the agent
cannot see. It delivers a Python function (backend, graded by hidden tests) or a web page
(frontend, graded by image similarity).

How it works:
  1. a task is one JSON line: what the human says first, what the human has in mind, hidden tests;
  2. agent and human each see their own view of the dialogue (`agent_messages`, `human_messages`);
     the critic also sees the solution (`critic_messages`);
  3. a referee judges the answer: model-written code and pages run only in closed child processes;
  4. DOMAINS holds all that differs between functions and pages: a third domain is one more entry.

    python colbench.py check TASKS.jsonl   grade every solution against itself, show protections
    python colbench.py show EPISODES.jsonl [TASK]   dialogues to read, of all tasks or of one
    python colbench.py websight ROWS.jsonl TRAIN.jsonl TEST.jsonl   make tasks from WebSight rows

Reads: task files of facebook/collaborative_agent_bench as they are, and `toy:backend:train` names.
`import colbench` needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import base64
import difflib
import functools
import glob
import hashlib
import importlib.machinery
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import typing
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from judge.browser import Browser, PageError
from judge.pages import (
    ClipReward, extract_html, grade_page, graded_page, last_page, official_addresses,
    solution_page)
from judge.sandbox import (
    ANSWER_MARKER, SECOND_LINES, SOLUTION_FAILED, Judge, check_solutions)

# -----------------------------------------------------------------------------
# Dialogue rules

MAX_TURNS = 10
OUTPUT_MARKER = "OUTPUT:"  # pages: the agent's thoughts stand before it, the human reads the rest


def split_message(task, text, last_turn):
    """(what the human reads, the answer or None) of one agent message, without its thoughts.

    What follows ANSWER_MARKER is the answer. At the last turn the whole message is.
    """
    content = without_thoughts(text) or ""
    if DOMAINS[task["domain"]].pages and OUTPUT_MARKER in content:
        content = content.split(OUTPUT_MARKER, 1)[1].strip()
    if ANSWER_MARKER in content:
        return content, content.split(ANSWER_MARKER, 1)[1].strip()
    return content, content if last_turn else None


THOUGHTS, END_OF_THOUGHTS = "<think>", "</think>"


def without_thoughts(text):
    """What a reasoning model says after its thoughts; None where they never end.

    Some chat templates open the thoughts, so that the text has their end alone.
    """
    _, end, said = text.rpartition(END_OF_THOUGHTS)
    if not end and text.lstrip().startswith(THOUGHTS):
        return None
    return said.strip()


# What the judge says of a text that is no Python
NO_CODE = ("no code", "raised SyntaxError", "raised IndentationError")


def reasons_of(grade, last_message):
    """Test -> "passed" or why not; "no answer" where the agent's last message was none.

    Without the marker the whole last message is graded. A question, say, is not a wrong function:
    it is no Python at all.
    """
    if ANSWER_MARKER in last_message:
        return grade.reasons
    if not set(grade.reasons.values()) <= {*NO_CODE, SOLUTION_FAILED}:
        return grade.reasons
    return {name: "no answer" if reason in NO_CODE else reason
            for name, reason in grade.reasons.items()}


def lacks_answer(episode):
    """Whether the dialogue ends without an answer, so that a question was graded in its place."""
    # only tests give such reasons; the official episodes have none
    if episode["reasons"] and "test_cases" in episode["task"]:
        return "no answer" in episode["reasons"].values()
    last = episode["dialogue_history"][1::2][-1]  # of the agent
    text = last.get("output") or last["content"]
    _, _, answer = text.partition(ANSWER_MARKER)
    return not answer.strip() and not episode["success"]


def leak_share(task, replies):
    """The longest run of the solution's tokens in one human reply, as a share of the solution."""
    solution = re.findall(r"\w+|[^\w\s]", task["ground_truth"])
    longest = 0
    for reply in replies:
        words = re.findall(r"\w+|[^\w\s]", reply)
        matcher = difflib.SequenceMatcher(None, solution, words, autojunk=False)
        longest = max(longest, matcher.find_longest_match(0, len(solution), 0, len(words)).size)
    return longest / max(1, len(solution))


# -----------------------------------------------------------------------------
# What each party sees

# With {max_turns} filled in; a dialogue of one turn has a text of its own
BACKEND_AGENT_PROMPT = (
    "You help a person who needs a Python function. The person has details in mind that the request"
    " leaves out. Each message of yours is either one short question about such a detail, or your"
    " answer. You may send {max_turns} messages in all. When you know enough, write"
    f' "{ANSWER_MARKER}" and after it the complete function as plain Python code, without comments'
    " on it. Only this code is tested, so keep to the signature that was asked for."
)
BACKEND_ONE_TURN_PROMPT = (
    "You help a person who needs a Python function. The person has details in mind that the request"
    " leaves out, but you cannot ask about them: you send one message, and it is your answer. Write"
    f' "{ANSWER_MARKER}" at once, and after it the complete function as plain Python code, guessing'
    " what is left open. Only this code is tested, so keep to the signature that was asked for."
)
FRONTEND_AGENT_PROMPT = (
    "You design a web page together with a person who has a finished look in mind and sees each"
    " page that you send as a picture. First write down what you will do, then"
    f' "{OUTPUT_MARKER}" and after it one whole page from <html> to </html>, styled with Tailwind'
    " classes; for pictures use https://picsum.photos/WIDTH/HEIGHT. You may send {max_turns} pages"
    " in all, and the last one counts. When the person has nothing more to change, write"
    f' "{ANSWER_MARKER}" after "{OUTPUT_MARKER}" and then the final page.'
)
FRONTEND_ONE_TURN_PROMPT = (
    "You design a web page for a person who has a finished look in mind. You send one message and"
    " hear nothing back. First write down what you will do, then"
    f' "{OUTPUT_MARKER} {ANSWER_MARKER}" and after it one whole page from <html> to </html>, styled'
    " with Tailwind classes; for pictures use https://picsum.photos/WIDTH/HEIGHT."
)
BACKEND_HUMAN_PROMPT = (
    "You asked a programmer for a Python function. What you asked was:\n{problem_description}\n\n"
    "This is the function that you have in mind; the programmer cannot see it:\n"
    "{hidden_information}\n\n"
    "Answer the programmer's questions from it, in one or two plain sentences. Tell only what was"
    " asked. When the function does not settle the question, say that you do not know. Never write"
    " or quote code."
)
FRONTEND_HUMAN_PROMPT = (
    "You asked a designer for a web page. What you asked was:\n{problem_description}\n\n"
    "You see two pictures: the designer's page as it is now, and the page as you have it in mind,"
    " which the designer cannot see. Name the most visible differences in a few plain sentences, as"
    " changes that you would like. If there are none, say so. Do not write HTML.\n\n"
    "The designer's last message: {message}"
)
SOLUTION_NOTE = "Solution, known in training only:\n{solution}\n\n"


def agent_prompt_of(task, prompt, max_turns=MAX_TURNS):
    """The agent's instructions: the given prompt (an empty one means none), or the domain's own."""
    domain = DOMAINS[task["domain"]]
    if prompt is None and max_turns == 1 and domain.one_turn_prompt:
        prompt = domain.one_turn_prompt
    elif prompt is None:
        prompt = domain.agent_prompt
    return filled(prompt, {"max_turns": str(max_turns)})


def prompt_of_episode(episode):
    """The instructions that the agent had; official episodes omit them."""
    max_turns = episode.get("max_turns") or MAX_TURNS
    return agent_prompt_of(episode["task"], episode.get("agent_prompt"), max_turns)


def custom_prompt(episodes):
    """The agent's instructions that all episodes share, unless they are the domain's own.

    A policy trained on these episodes needs them when it plays. The domain's own are not kept: they
    name the number of turns, which may be another one then.
    """
    prompts = set()
    for episode in episodes:
        own = agent_prompt_of(episode["task"], None, episode.get("max_turns") or MAX_TURNS)
        prompt = episode.get("agent_prompt")
        prompts.add(None if prompt == own else prompt)
    return prompts.pop() if len(prompts) == 1 else None


def read_prompt(path):
    """The instructions in a file; None where no file is named."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path}: found no instructions ({error}), expected a file of plain UTF-8"
                         " text") from None


def agent_messages(history, prompt):
    """What the agent sees: its instructions and the dialogue, with its own turns as it wrote them.

    The task does not enter here: no hidden information, no solution.
    """
    system = [{"role": "system", "content": prompt}] if prompt else []
    return system + [{"role": message["role"],
                      "content": (message.get("output") or message["content"]).strip()}
                     for message in history]


def states_of(episodes):
    """Every agent turn as a state: (episode, turn, what the agent saw before it)."""
    for episode in episodes:
        history, prompt = episode["dialogue_history"], prompt_of_episode(episode)
        for index, message in enumerate(history):
            if message["role"] == "assistant":
                yield episode, index // 2, agent_messages(history[:index], prompt)


def first_request(messages):
    """The index of the first user message, which a system message may precede."""
    return next(index for index, message in enumerate(messages) if message["role"] == "user")


def critic_messages(task, messages, privileged="ground_truth", picture=None):
    """What the critic and its reference model see: the agent's view, after the solution.

    A vision-language critic is given the solution page's `picture` (PNG bytes) for its text.
    """
    if privileged == "none":
        return messages
    if privileged != "ground_truth":
        raise ValueError(f"found privileged {privileged!r}, expected 'ground_truth' or 'none'")
    first = first_request(messages)
    request = messages[first]["content"]
    if picture:
        content = [image_part(picture), {"type": "text", "text": request}]
    else:
        content = SOLUTION_NOTE.format(solution=task["ground_truth"]) + request
    return messages[:first] + [{"role": "user", "content": content}] + messages[first + 1:]


def human_messages(task, history, prompt):
    """What the human sees: the hidden information, and the dialogue with the roles swapped.

    A prompt with the placeholder {dialogue_history}, as the official ones have, becomes one user
    message instead.
    """
    party = {"assistant": "agent", "user": "human"}
    dialogue = "\n".join(f"{party[message['role']]}: {message['content']}" for message in history)
    text = filled(prompt, task | {"dialogue_history": dialogue})
    if "{dialogue_history}" in prompt:
        return [{"role": "user", "content": text}]
    swapped = {"user": "assistant", "assistant": "user"}
    return [{"role": "system", "content": text}] + [
        {"role": swapped[message["role"]], "content": message["content"]}
        for message in history[1:]]


def human_page_messages(task, history, agent_png, solution_png, prompt):
    """What the human of pages sees: the request, the agent's last words, both screenshots.

    A screenshot is None where there is no page, or where it could not be drawn.
    """
    words = history[-1]["content"] if history[-1]["role"] == "assistant" else ""
    words = official_addresses(words)
    page = extract_html(words)
    if page:
        words = words.replace(page, "[the page below]")
    parts = [{"type": "text", "text": filled(prompt, task | {"message": words})}]
    if agent_png is None:
        parts.append({"type": "text", "text": "The designer shows no page."})
    else:
        parts += [{"type": "text", "text": "The designer's page:"}, image_part(agent_png)]
    if solution_png is None:
        parts.append({"type": "text", "text": "The page you want cannot be drawn."})
    else:
        parts += [{"type": "text", "text": "The page you want:"}, image_part(solution_png)]
    return [{"role": "user", "content": parts}]


def filled(prompt, fields):
    """The prompt with each {name} of a text field filled in, in one pass; other braces stay."""
    def fill(match):
        value = fields.get(match[1])
        return value if isinstance(value, str) else match[0]
    return re.sub(r"\{(\w+)\}", fill, prompt)


def image_part(png):
    """A screenshot as a part of a message in the OpenAI format."""
    data = base64.b64encode(png).decode()
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}


# -----------------------------------------------------------------------------
# The referee: judges answers and shows the human its view


class RefereeSettings(typing.NamedTuple):
    judge: str = "fixed"  # grading semantics of the sandbox
    require_protection: bool = False
    workers: int | None = None  # of the sandbox
    clip: str | None = None  # None: the paper's CLIP, or `none` in a toy world
    clip_crop: str = "center"
    device: str | None = None  # of CLIP


class Referee:
    """What a domain's referee does. It opens what it needs, and `close` ends it.

    `grade` and `human_view` return futures: they run beside the dialogues, which never wait for the
    judge or the browser of another dialogue.
    """

    def __init__(self, tasks, settings):
        """`tasks` are those of the run, all of one domain."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        pass

    def graded_text(self, answer, history):
        """What is graded at the end of a dialogue."""
        return answer

    def grade(self, task, answer):
        """The Future of a judge.sandbox.Grade."""
        raise NotImplementedError

    def human_view(self, task, history, prompt):
        """The Future of the messages that a human model reads."""
        view = Future()
        view.set_result(human_messages(task, history, prompt))
        return view


class BackendReferee(Referee):
    """Hidden tests in the sandbox.

    The sandbox runs Python with its standard library (sqlite3 and re included). Answers in another
    language that these can run fit a subclass whose `grade` cuts the code out of the answer
    (extract_code) and wraps it: a task with `ground_truth` and `test_cases` in Python, and the
    answer as Python. The wrapper imports inside its function, which `--judge official` needs, and
    raises SyntaxError for what is no code in that language, so that a question is no answer.
    """

    def __init__(self, tasks, settings):
        self.profile = settings.judge
        self.judge = Judge(settings.workers, require_protection=settings.require_protection)

    def close(self):
        self.judge.__exit__(None, None, None)

    def grade(self, task, answer):
        return self.judge.threads.submit(self.judge.grade, task, answer, self.profile)


class FrontendReferee(Referee):
    """Similarity of screenshots; the human sees both pages."""

    def __init__(self, tasks, settings):
        default = "none" if "toy" in tasks[0] else "openai/clip-vit-base-patch32"
        name = settings.clip or default
        if name == "none" and settings.clip_crop != "center":
            raise SystemExit(f"found --clip_crop {settings.clip_crop} without CLIP, which is what"
                             " crops; expected it to be omitted, or --clip with a model")
        self.browser = Browser()
        self.thread = ThreadPoolExecutor(1)  # one browser, one page at a time
        self.clip = None
        if name != "none":
            self.clip = ClipReward(name, settings.clip_crop, settings.device)
        # every turn of a dialogue shows the human the same solution page
        self.draw = functools.lru_cache(256)(self.browser.render)

    def close(self):
        self.thread.shutdown()
        self.browser.close()

    def graded_text(self, answer, history):
        return graded_page(answer, history)

    def grade(self, task, answer):
        return self.thread.submit(grade_page, task, answer, self.draw, self.clip)

    def human_view(self, task, history, prompt):
        return self.thread.submit(self._page_view, task, history, prompt)

    def _page_view(self, task, history, prompt):
        page = self._picture(last_page(history))
        solution = self._picture(solution_page(task["ground_truth"]))
        return human_page_messages(task, history, page, solution, prompt)

    def _picture(self, page):
        if not page:
            return None
        try:
            return self.draw(page)
        except PageError:
            return None


def open_referee(tasks, settings):
    return one_domain(tasks).referee(tasks, settings)


# -----------------------------------------------------------------------------
# Domains: all that differs between kinds of tasks


class Domain(typing.NamedTuple):
    """A kind of task. To add one, write its referee and an entry of DOMAINS; every stage takes it.

    The agent sees the task's `problem_description` and nothing else of it. The human's prompt may
    hold any text field of the task as a {placeholder}.
    """

    agent_prompt: str  # may hold {max_turns}
    human_prompt: str
    referee: type  # how answers are judged, and what the human sees
    one_turn_prompt: str | None = None  # for agents that send one message only, if it is another
    complete: typing.Callable = lambda task, where: None  # checks the fields of this domain alone
    reply_chars: int = 400  # human replies are cut here
    human_prompt_fields: tuple = ("hidden_information",)  # without these, the human knows nothing
    # whether an answer is right, with a reward of 1, or wrong; otherwise the reward is all there is
    has_success: bool = True
    reward_heading: str = "Reward × 100"
    pages: bool = False  # answers are web pages: drawn for human, critic and report
    flags: tuple = ()  # fields of RefereeSettings that this domain uses; others are refused
    check: typing.Callable | None = None  # (tasks, judge, require_protection): see check_command


def complete_backend(task, where):
    """Backend tasks need tests, calls whose values are compared with the solution's."""
    cases = expect(task, "test_cases", dict, where)
    task["test_cases"] = without_nulls(cases)
    if not task["test_cases"]:
        raise SystemExit(f"{where}: found no test in 'test_cases', expected at least one call"
                         " expression")
    for name in task["test_cases"]:
        expect(task["test_cases"], name, str, f"{where}, test_cases")


def one_domain(tasks):
    """The Domain that all tasks belong to."""
    domains = {task["domain"] for task in tasks}
    if len(domains) > 1:
        raise SystemExit(f"found {' and '.join(sorted(domains))} tasks together, expected one"
                         " domain; put them in separate files")
    return DOMAINS[domains.pop()]


DOMAINS = {
    "backend": Domain(
        agent_prompt=BACKEND_AGENT_PROMPT,
        human_prompt=BACKEND_HUMAN_PROMPT,
        referee=BackendReferee,
        one_turn_prompt=BACKEND_ONE_TURN_PROMPT,
        complete=complete_backend,
        reward_heading="Tests passed %",
        flags=("judge", "require_protection"),
        check=check_solutions,
    ),
    "frontend": Domain(
        agent_prompt=FRONTEND_AGENT_PROMPT,
        human_prompt=FRONTEND_HUMAN_PROMPT,
        referee=FrontendReferee,
        one_turn_prompt=FRONTEND_ONE_TURN_PROMPT,
        reply_chars=1000,
        human_prompt_fields=(),  # the solution comes as a picture
        has_success=False,
        reward_heading="Similarity × 100",
        pages=True,
        flags=("clip", "clip_crop"),
    ),
}


# -----------------------------------------------------------------------------
# Tasks and episodes: JSON lines, checked at the door


def complete_task(row, where="task"):
    """A task with every field filled in; unknown keys stay.

    Official rows have neither `task_id` nor `domain`: tests make a backend task, a page a frontend
    one.
    """
    row = without_nulls(row)
    description = expect(row, "problem_description", str, where)
    solution = expect(row, "ground_truth", str, where)
    if not solution.strip():
        raise SystemExit(f"{where}: found an empty 'ground_truth', expected the solution: code or"
                         " a page")
    if "domain" in row:
        domain = row["domain"]
    elif "test_cases" in row or not re.search(r"</?[a-zA-Z][^<>]*>", solution):
        domain = "backend"
    else:
        domain = "frontend"
    if not isinstance(domain, str) or domain not in DOMAINS:
        names = " or ".join(repr(name) for name in DOMAINS)
        raise SystemExit(f"{where}: found domain {domain!r}, expected {names}")
    content = "\0".join((description, solution)).encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(content).hexdigest()[:16]
    task = {"task_id": digest, "hidden_information": solution} | row | {"domain": domain}
    for key in ("task_id", "hidden_information"):
        expect(task, key, str, where)
    DOMAINS[domain].complete(task, where)
    return task


TOY_TASKS = 1000  # of an embedded world, unless a number is given


def read_tasks(spec, num_tasks=None):
    """Tasks of a file, or of an embedded world: `toy:backend:train`, `toy:frontend:test`, ..."""
    if spec.startswith("toy:"):
        from toy.world import toy_tasks  # late: the toy world imports this file

        return toy_tasks(spec, num_tasks or TOY_TASKS)
    tasks, first_seen = [], {}
    for where, row in read_jsonl(spec):
        task = complete_task(row, where)
        while "task_id" not in row and task["task_id"] in first_seen:
            task["task_id"] += "+"  # official rows have no ids: a repeated one is a task of its own
        earlier = first_seen.setdefault(task["task_id"], where)
        if earlier != where:
            raise SystemExit(f"{where}: found task_id {task['task_id']!r} again (first at"
                             f" {earlier}), expected each task once; remove one of the two lines")
        tasks.append(task)
        if len(tasks) == num_tasks:
            break
    if not tasks:
        raise SystemExit(f"{spec}: found no line, expected one task a line")
    return tasks


def complete_episode(row, where="episode"):
    """A checked episode, with defaults for what rows of the official trajectory file lack."""
    row = without_nulls(row)
    task = complete_task(expect(row, "task", dict, where), f"{where}, task")
    history = expect(row, "dialogue_history", list, where)
    check_history(history, where)
    error = expect(row, "error", str, where, optional=True) or None
    reward = expect(row, "reward", (int, float), where, optional=error is not None)
    if not error and not (0 <= reward <= 1.000001):
        raise SystemExit(f"{where}: found reward {reward}, expected a number between 0 and 1")
    if not error and len(history) < 2:
        raise SystemExit(f"{where}: found a dialogue of {len(history)} messages, expected at least"
                         " one agent turn")
    success = None
    if DOMAINS[task["domain"]].has_success and not error:
        success = reward == 1
    if expect(row, "success", bool, where, optional=True) not in (None, success):
        raise SystemExit(f"{where}: found success {row['success']} with reward {reward}, expected"
                         f" {success}: true for a reward of 1, false below, null for failed"
                         " episodes and domains without success, such as pages")
    leak = 0.0
    if "leak" not in row:
        leak = leak_share(task, [message["content"] for message in history[2::2]])
    defaults = {"sample": 0, "answer": None, "reasons": {}, "leak": leak,
                "agent": None, "human": None, "seed": None}
    episode = defaults | row
    episode |= {"task": task, "success": success, "turns": len(history) // 2, "error": error}
    for key, kind in (("sample", int), ("leak", (int, float)), ("reasons", dict)):
        expect(episode, key, kind, where)
    for key, kind in (("answer", str), ("agent", str), ("human", str), ("agent_prompt", str),
                      ("agent_tokens", int), ("max_turns", int), ("advantages", list),
                      ("credits", list)):
        expect(episode, key, kind, where, optional=True)
    if episode["sample"] < 0 or not 0 <= episode["leak"] <= 1:
        raise SystemExit(f"{where}: found sample {episode['sample']} and leak {episode['leak']},"
                         " expected an index from 0 up and a share between 0 and 1")
    return episode


def check_history(history, where):
    """User and assistant speak in turn, the user first."""
    roles = ("user", "assistant")
    for index, message in enumerate(history):
        if not isinstance(message, dict) or message.get("role") != roles[index % 2]:
            raise SystemExit(f"{where}: found dialogue_history[{index}] that is no message of role"
                             f" '{roles[index % 2]}', expected user and assistant in turn, the user"
                             " first")
        expect(message, "content", str, f"{where}, dialogue_history[{index}]")
        expect(message, "output", str, f"{where}, dialogue_history[{index}]", optional=True)
        expect(message, "finished", bool, f"{where}, dialogue_history[{index}]", optional=True)


def read_episodes(path, tasks=None):
    """All episodes of a file; the same task and sample twice is an error.

    `tasks` holds those of earlier files, see `check_same_task`.
    """
    ResumableJsonl.refuse_unfinished(path)
    tasks = {} if tasks is None else tasks
    episodes, seen, counts = [], set(), {}
    for where, row in read_jsonl(path):
        episode = complete_episode(row, where)
        check_same_task(tasks, episode["task"], where)
        task_id = episode["task"]["task_id"]
        if row.get("sample") is None:  # official: the task list k times, one copy after the other
            counts[task_id] = counts.get(task_id, -1) + 1
            episode["sample"] = counts[task_id]
        key = (task_id, episode["sample"])
        if key in seen:
            raise SystemExit(f"{where}: found task {key[0]!r}, sample {key[1]} a second time,"
                             " expected it once")
        seen.add(key)
        episodes.append(episode)
    if not episodes:
        raise SystemExit(f"{path}: found no episode, expected one a line; run collect.py first")
    return episodes


def load_episodes(paths, agent_prompt=None):
    """Episodes that can be trained on, and how many were omitted because of an error.

    Samples of a task that an earlier file has too are numbered on from there. `agent_prompt` names
    a file with the agent's instructions for episodes that omit them, such as the official ones.
    """
    episodes, tasks, next_sample, prompt = [], {}, {}, read_prompt(agent_prompt)
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise SystemExit(f"{' '.join(map(str, paths))}: found a file of episodes twice, expected"
                         " each once")
    for path in paths:
        found = read_episodes(path, tasks)
        offset = {task_id: next_sample.get(task_id, 0) for task_id in group_by_task(found)}
        for episode in found:
            task_id = episode["task"]["task_id"]
            episode["sample"] += offset[task_id]
            next_sample[task_id] = max(next_sample.get(task_id, 0), episode["sample"] + 1)
        episodes += found
    without_prompt = [episode for episode in episodes if episode.get("agent_prompt") is None]
    for episode in without_prompt:
        episode["agent_prompt"] = prompt
    if agent_prompt and not without_prompt:
        raise SystemExit(f"{' '.join(map(str, paths))}: found that all episodes have the agent's"
                         f" instructions, so --agent_prompt {agent_prompt} does nothing, expected"
                         " some that omit them; omit the flag, or collect with other instructions")
    one_domain([episode["task"] for episode in episodes])
    sound = [episode for episode in episodes if not episode["error"]]
    return sound, len(episodes) - len(sound)


def check_same_task(tasks, task, where):
    """Refuse another task of the same task_id, such as that of another world, or of an edited file.

    tasks: task_id -> what the task says, of those that have been seen; this one is added.
    """
    content = [task.get(key) for key in ("problem_description", "ground_truth", "test_cases")]
    if tasks.setdefault(task["task_id"], content) != content:
        raise SystemExit(f"{where}: found the task_id {task['task_id']!r} with two different tasks,"
                         " expected one; give only files made from the same task file, or give the"
                         " tasks different ids")


def group_by_task(episodes):
    """task_id -> its episodes."""
    groups = {}
    for episode in episodes:
        groups.setdefault(episode["task"]["task_id"], []).append(episode)
    return groups


# -----------------------------------------------------------------------------
# Token ids of a dialogue, and which agent turn each belongs to


def encode_dialogue(tokenizer, messages, finished=()):
    """Token ids of a dialogue, and for each the index of its agent turn (-1: not an agent token).

    A turn is its text and, when finished, its end-of-turn token. The prompt before it and the turn
    itself are tokenised separately, as in sampling. With <u> <a> </> for the template's tokens and
    the second turn cut at the token limit (finished = [True, False]):

        <u> hi </> <a> hello </> <u> more </> <a> some
        -1  -1 -1  -1  0     0   -1  -1   -1  -1  1

    A dialogue that ends with a user message is a prompt: the generation prompt closes it.
    """
    end_id, end_text = end_of_turn(tokenizer)
    texts, turns, closed = [], [], []  # pieces of text, their turn, whether a token closes them
    rendered, turn = "", 0  # the template's text that the pieces make up so far
    for index in range(len(messages) + 1):
        is_turn = index < len(messages) and messages[index]["role"] == "assistant"
        is_prompt = index == len(messages) and messages[-1]["role"] != "assistant"
        if not is_turn and not is_prompt:
            continue
        prompt = render(tokenizer, messages[:index])
        if not prompt.startswith(rendered):
            raise UnnestedTemplate(
                f"{tokenizer.name_or_path}: the chat template does not nest (it changes earlier"
                " turns when later ones come), so a dialogue is not one sequence; expected a"
                " template like Llama's")
        texts.append(prompt[len(rendered):])
        turns.append(-1)
        closed.append(False)
        if is_turn:
            content = messages[index]["content"]
            done = finished[turn] if turn < len(finished) else True
            texts.append(content)
            turns.append(turn)
            closed.append(done)
            rendered = prompt + content + (end_text if done else "")
            turn += 1
    ids, turn_index = [], []
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for tokens, piece_turn, done in zip(encoded, turns, closed, strict=True):
        if done:
            tokens = tokens + [end_id]
        ids += tokens
        turn_index += [piece_turn] * len(tokens)
    return ids, turn_index


def encode_prompt(tokenizer, messages):
    """Token ids to sample from. A template that does not nest can speak, but cannot be trained."""
    try:
        return encode_dialogue(tokenizer, messages)[0]
    except UnnestedTemplate:
        return tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)


class UnnestedTemplate(SystemExit):
    """The chat template rewrites earlier turns, so a dialogue is not one sequence of tokens."""


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer):
    """(id, text) of the token that closes an agent turn: in the template, what follows its text."""
    if not getattr(tokenizer, "chat_template", None):
        raise SystemExit(f"{tokenizer.name_or_path}: found a tokenizer without chat template,"
                         " expected an instruct model")
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"},
                {"role": "user", "content": "z"}]
    opening = render(tokenizer, dialogue[:1])
    whole = render(tokenizer, dialogue, add_generation_prompt=False)
    if not whole.startswith(opening + "y"):
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template does not nest (an agent turn does not"
            " begin with the generation prompt), so turns cannot be told apart; expected a template"
            " like Llama's")
    closing = whole[len(opening) + 1:]
    if not closing or closing.startswith("z"):
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template closes no agent turn, so a model cannot"
            " tell when to stop; expected a template like Llama's")
    token = tokenizer.encode(closing, add_special_tokens=False)[0]
    text = tokenizer.decode([token])
    if token not in tokenizer.added_tokens_decoder:
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template closes an agent turn with the ordinary"
            f" text {text!r}, which a turn may hold itself; expected a token of its own, as"
            " Llama's template has")
    return token, text


def render(tokenizer, messages, add_generation_prompt=True):
    """The chat template's text. Without a system role, that message opens the first request."""
    import jinja2

    # Llama 3.2 and others print today's date unless they are given one: prompts would change daily
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt,
               "date_string": "26 Jul 2024"}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except jinja2.TemplateError as error:
        if messages[0]["role"] != "system" or len(messages) < 2:
            raise SystemExit(
                f"the chat template of {tokenizer.name_or_path} refuses the dialogue ({error});"
                " expected one that takes user and assistant turns; give a model with such a"
                " template") from None
        system, content = messages[0]["content"] + "\n\n", messages[1]["content"]
        if isinstance(content, str):
            content = system + content
        else:
            content = [{"type": "text", "text": system}, *content]
        first = {"role": "user", "content": content}
        return render(tokenizer, [first] + messages[2:], add_generation_prompt)


# -----------------------------------------------------------------------------
# Files


def derive_seed(*parts) -> int:
    """A 63-bit seed from `parts` alone: world size, batches and PYTHONHASHSEED do not matter."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def read_jsonl(path):
    """Yield (where, object) for each line; a line that is no JSON object stops with a sentence."""
    if Path(path).is_dir():
        names = sorted(file.name for file in Path(path).glob("*.jsonl")
                       if not file.name.startswith(("candidates", "metrics")))
        some = ", ".join(str(Path(path, name)) for name in names[:5])
        advice = f"give one of: {some}" if some else "it holds none"
        raise SystemExit(f"{path}: found a directory, expected a JSONL file; {advice}")
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file; expected a JSONL file, one JSON object a line")
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}: line {line_number}"
            try:
                row = json.loads(line)
                if b"\\u" in line:  # half a surrogate pair would break the tokenizer later
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise SystemExit(f"{where}: found broken JSON ({error}), expected one JSON"
                                 " object") from None
            if not isinstance(row, dict):
                raise SystemExit(f"{where}: found {type(row).__name__}, expected a JSON object")
            yield where, row


def without_nulls(row):
    """The fields that a row has: Arrow conversions fill those that it lacks with None."""
    return {key: value for key, value in row.items() if value is not None}


def expect(row, key, kind, where, optional=False):
    """row[key], which must be of type `kind`; the message says what was found and expected."""
    value = row.get(key)
    if value is None and optional:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(k.__name__ for k in kinds)
        found = f"'{key}' of type {type(value).__name__}" if key in row else f"no '{key}'"
        raise SystemExit(f"{where}: found {found}, expected '{key}' of type {names}")
    return value


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
        temporary.unlink(missing_ok=True)  # on a full disk, half a file would be in the way
        raise


def write_jsonl(path, rows):
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


class ResumableJsonl:
    """A JSONL file that ranks fill row by row, that survives a kill at any moment and ends sorted.

    `key(row)` identifies a row. Each rank appends to a file of its own, FILE.rank0 and so on, since
    network file systems cannot append to one file from several machines. The leader merges them: at
    the end into FILE, which therefore exists only when it is finished; at the start into FILE.rank0
    all that earlier runs left, of whatever number of ranks. Rows for which `keep(row)` is false
    (failed ones) are dropped at the start, to be made again.
    """

    def __init__(self, path, key, process, keep=lambda row: True):
        self.path, self.key, self.process = Path(path), key, process
        self.part = Path(f"{path}.rank{process.rank}")
        if process.leads:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = [row for row in self._usable_rows() if keep(row)]
            self._merge({key(row): row for row in rows}.values(), self.part)
        process.barrier()  # nobody reads or appends before the leader has tidied up
        self.rows = {key(row): row for row in self._usable_rows()}
        process.barrier()  # nobody appends before all have read

    def append(self, row):
        line = (json.dumps(row) + "\n").encode()
        descriptor = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(f"{self.part}: only part of a line could be written")
        finally:
            os.close(descriptor)

    def discard(self, keys):
        """Remove rows that this process has appended."""
        if self.part.exists():
            rows = [json.loads(line) for line in self.part.read_bytes().splitlines()]
            write_jsonl(self.part, [row for row in rows if self.key(row) not in keys])

    def finish(self, order):
        """Merge the ranks' files, in the order of the keys in `order`: same command, same bytes.

        The leader gets the rows, other ranks none. A row that is missing is an error.
        """
        self.process.barrier()
        ordered = []
        if self.process.leads:
            rows = {self.key(row): row for row in self._usable_rows()}
            missing = [key for key in order if key not in rows]
            if missing:
                raise SystemExit(f"{self.path}: found no row of {missing[0]} ({len(missing)} of"
                                 f" {len(order)} are missing), expected all; rerun the same command"
                                 " to make them")
            ordered = [rows[key] for key in order]
            self._merge(ordered, self.path)
        self.process.barrier()
        return ordered

    @staticmethod
    def files(path):
        """The file, and those of the ranks that are not merged yet."""
        path = Path(path)
        parts = [file for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.rank*"))
                 if re.fullmatch(r"\.rank\d+", file.name.removeprefix(path.name))]
        return [file for file in (path, *parts) if file.exists()]

    @staticmethod
    def refuse_unfinished(path):
        """Stop if the run that makes the file at `path` has not finished it."""
        unfinished = [file.name for file in ResumableJsonl.files(path) if file != Path(path)]
        if unfinished:
            raise SystemExit(f"{path}: found {unfinished[0]} beside it, so the run that makes this"
                             " file has not finished, expected all of its rows; rerun its command")

    @staticmethod
    def whole_rows(path):
        """The rows of all these files, without the half line that a kill left behind."""
        for file in ResumableJsonl.files(path):
            for line in file.read_bytes().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row

    def _usable_rows(self):
        for row in self.whole_rows(self.path):
            try:
                self.key(row)
            except (KeyError, TypeError):
                continue
            yield row

    def _merge(self, rows, target):
        """Write `rows` to `target`, and remove the other files, which they came from."""
        if rows or self.files(self.path):
            write_jsonl(target, rows)
        for file in self.files(self.path):
            if file != target:
                file.unlink()


# -----------------------------------------------------------------------------
# Commands

WEBSIGHT_TRAIN = 10_000  # the paper trains on the first 10,000 WebSight rows, tests on later ones


def check_command(path, judge, require_protection):
    """The table of tests that cannot be passed, then the sandbox's protections.

    Returns whether all tasks can be solved in full.
    """
    tasks = read_tasks(path)
    check = one_domain(tasks).check
    if check is None:
        raise SystemExit(f"{path}: found {tasks[0]['domain']} tasks, expected tasks that have tests"
                         " to check, such as backend tasks")
    rows, status = check(tasks, judge, require_protection)
    for index, name, reason in rows:
        why = solution_advice(tasks[index], name, reason)
        print(f"{path}: line {index + 1}, {harmless(name)}: {reason}{why}")
    broken = {index for index, _, _ in rows}
    print(f"{len(tasks) - len(broken)} of {len(tasks)} tasks can be solved in full (judge {judge})")
    for name, active in status.items():
        if active:
            state = "active"
        elif name in SECOND_LINES:
            state = "MISSING (a second line of defence; answers are confined without it, too)"
        else:
            state = "MISSING"
        print(f"protection {name:14s} {state}")
    if rows and len(rows) == sum(len(task.get("test_cases", ())) for task in tasks):
        raise SystemExit("found no test that can be passed, expected at least one: check the task"
                         " file.")
    return not broken


def solution_advice(task, name, reason):
    """What is wrong with a test that the task's own solution does not pass; "" if that is open."""
    if re.match(r"\s*assert\b", task.get("test_cases", {}).get(name, "")):
        return (" (a test is a call such as f(1), not `assert f(1) == 2`: the judge compares its"
                " value with the solution's)")
    if reason == "the solution raised ModuleNotFoundError":
        missing = " and ".join(missing_modules(task["ground_truth"]))
        if missing:
            return f" (it needs the module {missing}, which the judge does not have)"
    return ""


def missing_modules(code):
    """The modules that code imports and that this interpreter, which is the judge's, lacks."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return sorted(name for name in names - sys.stdlib_module_names
                  if importlib.machinery.PathFinder.find_spec(name) is None)


BOLD, FAINT, BLUE, ORANGE, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[34m", "\x1b[33m", "\x1b[0m"


def show_command(path, task_id, colour):
    """Print the dialogues of a file task by task, or of one task; its solution comes first."""
    groups = group_by_task(read_episodes(path))
    if task_id is None:
        shown = list(groups)
    elif task_id in groups:
        shown = [task_id]
    elif task_id.isdecimal() and 1 <= int(task_id) <= len(groups):
        shown = [list(groups)[int(task_id) - 1]]
    else:
        close = difflib.get_close_matches(task_id, groups, 3, cutoff=0)
        raise SystemExit(f"{path}: found no task {task_id!r}, expected a number from 1 to"
                         f" {len(groups)}, or a task_id such as {', '.join(map(harmless, close))}")
    for name in shown:
        parts = [(BOLD, "task", name), (FAINT, "solution", groups[name][0]["task"]["ground_truth"])]
        for episode in groups[name]:
            parts += [("", "", ""), *dialogue_parts(episode)]
        for style, label, text in parts:
            print_part(style if colour else "", label, text)
        print()


def dialogue_parts(episode):
    """Yield (style, label, text): the outcome, each message with what is known of it, the tests."""
    outcome = f"sample {episode['sample']}"
    if episode["agent"]:
        outcome += f" of {episode['agent']}"
    outcome += f": {counted(episode['turns'], 'turn')}, "
    if episode["error"]:
        outcome += f"stopped by an error: {episode['error']}"
    else:
        if episode["success"] is not None:
            outcome += "solved, " if episode["success"] else "not solved, "
        outcome += f"reward {episode['reward']:.3f}"
    yield BOLD, "episode", outcome
    for index, message in enumerate(episode["dialogue_history"]):
        if message["role"] == "user":
            yield FAINT, "human", message["content"]
        else:
            yield "", f"agent {index // 2 + 1}", message.get("output") or message["content"]
            yield from turn_notes(episode, index // 2, message)
    if episode["reasons"]:
        yield BOLD, "tests", counted_reasons(episode["reasons"])


def counted(count, thing):
    """Such as "1 turn" or "2,000 turns"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def counted_reasons(reasons):
    """Such as "7 passed; 2 wrong (test3, test5); 1 timed out (test9)"."""
    tests_of = {}
    for test, reason in reasons.items():
        tests_of.setdefault(str(reason), []).append(test)
    parts = []
    for reason, tests in tests_of.items():
        part = f"{len(tests)} {reason}"
        if len(tests_of) > 1 and reason != "passed":
            part += f" ({', '.join(tests)})"
        parts.append(part)
    return "; ".join(parts)


def turn_notes(episode, turn, message):
    """What the episode carries on an agent turn: the critic's advantage, the toy's true credit."""
    notes, style = [], FAINT
    advantages, credits = episode.get("advantages") or [], episode.get("credits") or []
    if turn < len(advantages) and isinstance(advantages[turn], (int, float)):
        notes.append(f"advantage {advantages[turn]:+.3f}")
        style = BLUE if advantages[turn] > 0 else ORANGE
    if turn < len(credits):
        notes.append(f"true credit: {credits[turn]}")
    if message.get("finished") is False:
        notes.append("cut at the token limit")
    if notes:
        yield style, "", f"[{'; '.join(notes)}]"


def print_part(style, label, text):
    """Print a text beside its label; no line of the text begins where labels do."""
    columns = max(40, min(100, shutil.get_terminal_size().columns))
    for line in harmless(text).split("\n"):
        for part in textwrap.wrap(line, columns - 10, break_on_hyphens=False) or [""]:
            print(f"{style}{label:10s}{part}".rstrip() + (PLAIN if style else ""))
            label = ""


def harmless(text):
    """The text with whatever could steer a terminal spelled out, such as escape sequences."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(character if character.isprintable() or character == "\n"
                   else character.encode("unicode_escape").decode() for character in text)


def websight(rows_path, train_path, test_path=None):
    """WebSight rows as tasks: the first 10,000 go to train_path, those after them to test_path."""
    for path in filter(None, (train_path, test_path)):
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path(train_path).absolute().parent) as folder:
        parts = [Path(folder, "train"), Path(folder, "test")]
        with open(parts[0], "w") as train, open(parts[1], "w") as test:
            for index, (where, row) in enumerate(read_jsonl(rows_path)):
                page = official_addresses(expect(row, "text", str, where))
                request = expect(row, "llm_generated_idea", str, where)
                task = {"problem_description": request, "domain": "frontend",
                        "ground_truth": page, "hidden_information": page}
                print(json.dumps(task), file=train if index < WEBSIGHT_TRAIN else test)
        os.replace(parts[0], train_path)
        if test_path:
            os.replace(parts[1], test_path)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="grade every solution against itself; exit status 1"
                                " if a task cannot be solved in full")
    check.add_argument("tasks", help="task file, or toy:backend:train")
    check.add_argument("--judge", choices=("fixed", "official"), default="fixed",
                       help="grading semantics")
    check.add_argument("--require_protection", action="store_true",
                       help="refuse if the sandbox lacks a protection")
    show = commands.add_parser("show", help="print dialogues to read")
    show.add_argument("episodes", help="file of collect.py or evaluate.py, or the official one")
    show.add_argument("task", nargs="?", help="task_id of the one task to show, or its number from"
                      " 1 on (default: all)")
    convert = commands.add_parser("websight", help="turn WebSight rows into frontend tasks")
    convert.add_argument("rows", help="JSONL with llm_generated_idea and text")
    convert.add_argument("train", help="task file for the first 10,000 rows")
    convert.add_argument("test", nargs="?", help="task file for the rows after them")
    args = parser.parse_args(argv)
    try:
        run_command(args)
    except OSError as error:
        raise SystemExit(f"The disk or a file failed: {error}; expected files that can be read and"
                         " folders that can be written to") from None


def run_command(args):
    if args.command == "check":
        if not check_command(args.tasks, args.judge, args.require_protection):
            raise SystemExit(1)  # the table above says why
    elif args.command == "show":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly with the pager
        sys.stdout.reconfigure(errors="backslashreplace")
        show_command(args.episodes, args.task,
                     colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    else:
        websight(args.rows, args.train, args.test)


if __name__ == "__main__":
    main()
