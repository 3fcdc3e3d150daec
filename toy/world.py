"""The embedded worlds: two small ColBench domains whose tasks are drawn by a program.

They serve to run every stage on a CPU in minutes, to test it, and to measure how true a critic's
credit is. Nothing here is needed to understand SWEET-RL or to run it on real data.

The backend world (toy/backend.py) asks for functions on a text, the frontend world
(toy/frontend.py) for web pages. In both, the request leaves out most of what the human has in mind.
Each world has

  - tasks in the ColBench format, in splits that share no task: `toy_tasks`;
  - a scripted human, who looks only at the task and at the agent's last message;
  - a scripted agent, the noisy demonstrator that the base policies in toy/base and
    toy/base_frontend imitate. It knows what the human said and the rules of the world, and nothing
    else of the task; only the `informed` one reads the solution.

In the backend world, the right credit of each turn is known, so that a critic's advantages can be
compared with the truth: toy/credit.py. toy/make_base.py makes what the base policies start from.
"""

import functools
import re
import typing

from toy.backend import (
    DETAILS, NUMBERS, OMITTED, TOPICS, backend_demonstrator, backend_human, backend_tasks,
    guessing_backend_demonstrator)
from toy.frontend import frontend_demonstrator, frontend_human, frontend_tasks

# -----------------------------------------------------------------------------
# The backend world's parameters


class World(typing.NamedTuple):
    """How much there is to find out. `toy:backend:train:64/10/5/4-5` names all four.

    A dialogue has nine turns (--max_turns 9 in runs/toy_flags.sh): eight questions, at least three
    more than a task needs, and the answer. docs/measured.md says what other worlds give.
    """

    topics: int = 64  # 500 tasks are some eight of each: too few to learn a topic from outcomes
    details: int = 10  # about half of them are useful; with 3 of 16, most pairs would be ties
    likely: int = 5  # details that a topic makes likely: what a policy can learn of it
    needed: tuple = (4, 5)  # details that a task needs: one right question is not enough


class Habits(typing.NamedTuple):
    """The habits of a demonstrator, which a base policy imitates, as probabilities."""

    # It answers at about the right time, so what is left to learn is what to ask
    answer_incomplete: float = 0.01  # answer although some detail is not known yet
    answer_complete: float = 0.9  # answer once all details are known
    ask_preferred: float = 0.0  # ask for a likely detail instead of any: what it knows of topics
    ask_again: float = 0.05  # ask for a detail whose reply it has forgotten
    slip: float = 0.06  # forget a clause, or mistake its option


NOISY = Habits()
KNOWING = NOISY._replace(ask_preferred=0.5)
INFORMED = NOISY._replace(ask_preferred=0.6)  # of those that the solution names

# -----------------------------------------------------------------------------
# Tasks


def toy_tasks(spec, num_tasks=None):
    """The first tasks of `toy:DOMAIN:SPLIT` or `toy:backend:SPLIT:WORLD`, 1,000 by default.

    WORLD is the number of topics, or all parameters, as in 64/10/5/4-5.
    """
    num_tasks = num_tasks or 1000
    found = re.fullmatch(r"toy:(backend|frontend):(train|valid|test)(?::([\d/-]+))?", spec)
    if found is None or (found[3] and found[1] != "backend"):
        raise SystemExit(
            f"found --tasks {spec}, expected toy:backend:train, toy:frontend:test, ..."
            " (train, valid or test)"
        )
    domain, split, name = found.groups()
    if domain == "frontend":
        return frontend_tasks(split, num_tasks)
    return backend_tasks(split, num_tasks, read_world(name, spec) if name else World())


def read_world(name, spec):
    """The World of a name such as 256 or 64/16/5/2-3."""
    found = re.fullmatch(r"(\d+)(?:/(\d+)/(\d+)/(\d+)-(\d+))?", name)
    world = None
    if found and found[2]:
        topics, details, likely, least, most = map(int, found.groups())
        world = World(topics, details, likely, tuple(range(least, most + 1)))
    elif found:
        world = World(topics=int(found[1]))
    fewest = len(DETAILS) - len(OMITTED)
    if not (world and world.needed and 1 <= world.topics <= len(TOPICS)
            and fewest <= world.details <= len(DETAILS) and world.likely <= world.details
            and 1 <= world.needed[0] and world.needed[-1] <= min(world.likely, max(NUMBERS))):
        raise SystemExit(
            f"found --tasks {spec}, expected 1 to {len(TOPICS)} topics, or TOPICS/DETAILS/LIKELY/"
            f"LEAST-MOST as in 64/10/5/4-5: {fewest} to {len(DETAILS)} details, of which a topic"
            f" makes LIKELY likely and a task needs LEAST to MOST (at most {max(NUMBERS)})"
        )
    return world


# -----------------------------------------------------------------------------
# The scripted parties: (domain, role, manner) -> function(task, messages, draw)
#
# `messages` is the dialogue without a system message, the request first; `draw` is a random.Random.
# The manner stands after `scripted:` on the command line. A new party, such as a human that lies,
# is one function and one entry; for tasks without a key `toy`, it needs a manner.

SCRIPTED = {
    ("backend", "human", ""): backend_human,
    ("backend", "agent", ""): functools.partial(backend_demonstrator, habits=NOISY),
    ("backend", "agent", "knowing"): functools.partial(backend_demonstrator, habits=KNOWING),
    ("backend", "agent", "guessing"): guessing_backend_demonstrator,
    ("backend", "agent", "informed"): functools.partial(
        backend_demonstrator, habits=INFORMED, informed=True),
    ("frontend", "human", ""): frontend_human,
    ("frontend", "agent", ""): frontend_demonstrator,
    ("frontend", "agent", "informed"): functools.partial(frontend_demonstrator, informed=True),
}
