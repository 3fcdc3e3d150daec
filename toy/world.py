"""The embedded worlds: two small ColBench domains whose tasks are drawn by a program.

For whoever wants to run every stage on a CPU in minutes, to test it, or to measure how true a
critic's credit is. Nothing here is needed to understand SWEET-RL or to run it on real data.

The backend world (toy/backend.py) asks for functions on a text, the frontend world
(toy/frontend.py) for web pages. In both, the request leaves out most of what the human has in mind.
Each world has

  - tasks in the ColBench format, in splits that share no task: `toy_tasks`;
  - a scripted human, who looks only at the task and at the agent's last message;
  - a scripted agent, the noisy demonstrator that the base policies in toy/base and
    toy/base_frontend imitate. It knows what the human said and nothing else of the task; only the
    `informed` one reads the solution.

In the backend world, the right credit of each turn is known, so that a critic's advantages can be
compared with the truth: toy/credit.py. toy/make_base.py makes what the base policies start from.
"""

import re

from toy.backend import (
    NUM_TOPICS,
    TOPICS,
    backend_demonstrator,
    backend_human,
    backend_tasks,
    guessing_backend_demonstrator,
    informed_backend_demonstrator,
    knowing_backend_demonstrator,
)
from toy.frontend import (
    frontend_demonstrator,
    frontend_human,
    frontend_tasks,
    informed_frontend_demonstrator,
)

TOY_TASKS = 1000  # unless a number is given


def toy_tasks(spec, num_tasks=None):
    """The first `num_tasks` tasks of `toy:DOMAIN:SPLIT`.

    `toy:backend:SPLIT:TOPICS` names a world with so many topics.
    """
    num_tasks = num_tasks or TOY_TASKS
    found = re.fullmatch(r"toy:(backend|frontend):(train|valid|test)(?::(\d+))?", spec)
    if found is None or (found[3] and found[1] != "backend"):
        raise SystemExit(
            f"found --tasks {spec}, expected toy:backend:train, toy:frontend:test, ..."
            " (train, valid or test)"
        )
    domain, split, num_topics = found.groups()
    if domain == "frontend":
        return frontend_tasks(split, num_tasks)
    num_topics = int(num_topics or NUM_TOPICS)
    if not 1 <= num_topics <= len(TOPICS):
        raise SystemExit(f"found --tasks {spec}, expected 1 to {len(TOPICS)} topics")
    return backend_tasks(split, num_tasks, num_topics)


# -----------------------------------------------------------------------------
# The scripted parties: (domain, role, manner) -> function(task, messages, draw)
#
# `messages` is the dialogue without a system message, the request first; `draw` is a random.Random.
# The manner stands after `scripted:` on the command line. A new party, such as a human that lies,
# is one function and one entry.

SCRIPTED = {
    ("backend", "human", ""): backend_human,
    ("backend", "agent", ""): backend_demonstrator,
    ("backend", "agent", "knowing"): knowing_backend_demonstrator,
    ("backend", "agent", "guessing"): guessing_backend_demonstrator,
    ("backend", "agent", "informed"): informed_backend_demonstrator,
    ("frontend", "human", ""): frontend_human,
    ("frontend", "agent", ""): frontend_demonstrator,
    ("frontend", "agent", "informed"): informed_frontend_demonstrator,
}
