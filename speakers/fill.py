"""Fill a file with rows: jobs that ask speakers side by side, a progress bar, and a summary."""

import sys
import threading
import traceback
from collections import Counter

from tqdm import tqdm

from colbench import DOMAINS
from formats.outcome import lacks_answer
from formats.read import group_by_task
from judge.sandbox import ANSWER_MARKER, SOLUTION_FAILED
from runtime.text import counted
from speakers.interface import stop_if_given_up
from speakers.pool import run

FIRST_BUG = threading.Lock()


def fill(store, keys, work, speakers, in_flight):
    """Append the row work(key) of each key that is missing, `in_flight` at a time.

    If a speaker (or judge) is `given_up`, no further job starts, and the script exits.
    """
    waiting = (key for key in store.missing(keys)
               if not any(speaker.given_up for speaker in speakers))
    progress = Progress(store.rows.values(), len(keys), store.process)

    def work_and_keep(key):  # in a thread of its own: a kill loses nothing that was finished
        row = work(key)
        store.append(row)
        progress.add_row(row)

    with progress.bar:
        for _ in run(work_and_keep, waiting, in_flight, on_answer=progress.add_call):
            pass  # the threads have stored their rows
    stop_if_given_up(*speakers)


class Summary:
    """Mean success and mean reward of rows, where they have them, and how many rows failed."""

    def __init__(self, rows):
        self.counts = Counter()
        for row in rows:
            self.add(row)

    def add(self, row):
        self.counts["failed"] += bool(row.get("error"))
        for name in ("success", "reward"):
            if row.get(name) is not None:
                self.counts[name] += row[name]
                self.counts[f"with {name}"] += 1

    def __str__(self):
        means = [f"{name} {self.counts[name] / self.counts[f'with {name}']:.3f}"
                 for name in ("success", "reward") if self.counts[f"with {name}"]]
        return ", ".join([*means, f"{self.counts['failed']} failed"])


class Progress:
    """The leader's bar. Threads tell it of rows, and of calls, which move it between rows."""

    def __init__(self, rows, total, process):
        self.lock, self.summary, self.calls = threading.Lock(), Summary(rows), 0
        self.step = process.world  # rows for each of ours: the other ranks are about as fast
        self.bar = tqdm(total=total, initial=len(rows), miniters=0, **process.bar_args)

    def add_call(self):
        """A model, a server or the judge has answered a job."""
        with self.lock:
            self.calls += 1
            self._draw(new_rows=0)

    def add_row(self, row):
        with self.lock:
            self.summary.add(row)
            self._draw(self.step)

    def _draw(self, new_rows):
        shown = f"{self.summary}, {counted(self.calls, 'call')}"
        if self.step > 1:
            shown = f"of the first process: {shown}"
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(min(new_rows, self.bar.total - self.bar.n))


def show_bug():
    """Print the traceback of an exception that nobody expected, of the first one alone."""
    if FIRST_BUG.acquire(blocking=False):  # it is never released
        tqdm.write(traceback.format_exc(), file=sys.stderr)


def print_summary(rows, args):
    """Print what a finished run has made, and the first failure; stop if all have failed."""
    what = counted(len(rows), "state" if args.states else "episode")
    tasks = counted(len(group_by_task(rows)), "task")
    print(f"{args.output}: {what} of {tasks}, {Summary(rows)}")
    if not args.states:
        for hint in hints(rows):
            print(hint)
    failures = [row["error"] for row in rows if row.get("error")]
    if failures:
        print(f"First failure: {failures[0]}\nRerun the command to retry.")
    if len(failures) == len(rows):
        raise SystemExit("everything failed; expected agent, human and judge to work: see the"
                         " reason above")


def hints(episodes):
    """Sentences on what keeps these episodes from being of use."""
    played = [episode for episode in episodes if not episode["error"]]
    by_task = group_by_task(played)
    unsolvable = sum(SOLUTION_FAILED in group[0]["reasons"].values() for group in by_task.values())
    if unsolvable:
        command, tells = "show", "says why"
        if played[0]["task"]["domain"] == "backend":  # `check` takes no others
            command, tells = "check", "lists them"
        yield (f"{unsolvable} of {len(by_task)} tasks cannot be solved by their own solution;"
               f" `python colbench.py {command}` {tells}.")
    # pages always end with an answer, and the toy's base has yet to learn to answer
    talks = [episode for episode in played if "toy" not in episode["task"]
             and not DOMAINS[episode["task"]["domain"]].pages]
    silent = sum(map(lacks_answer, talks))
    if silent > len(talks) / 2:
        yield (f"{silent} of {len(talks)} dialogues ended without an answer; `python colbench.py"
               f" show` prints them. Name '{ANSWER_MARKER}' in the agent's prompt, raise"
               " --max_turns or --max_new_tokens, or start from a model that was trained on"
               " demonstrations (variants/sft.py).")
    for party, role in (("agent", "assistant"), ("human", "user")):
        said = [message.get("output") or message["content"] for episode in played
                for message in episode["dialogue_history"][1:] if message["role"] == role]
        empty = sum(not text.strip() for text in said)
        if empty > len(said) / 2:
            yield (f"{empty} of {len(said)} messages of the {party} are empty; check its model and"
                   " server.")
    differ = any(len({episode["reward"] for episode in group}) > 1 for group in by_task.values())
    if len(played) > len(by_task) and not differ:
        other = "easier tasks, or start from a model that succeeds now and then"
        if all(episode["success"] for episode in played):
            other = "harder tasks"
        yield ("No task has two episodes of different reward, so a critic cannot learn from this"
               f" file: play more samples, or {other}.")
