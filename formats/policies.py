"""The policies that evaluate.py and the report compare: each NAME=FILE holds a run's episodes."""

from collections import Counter
from pathlib import Path

from formats.read import one_domain, read_episodes


def named_files(specs):
    """(name, path) of each NAME=FILE."""
    pairs = []
    for spec in specs:
        name, equals, path = spec.partition("=")
        if not name or not path:
            raise SystemExit(f"found {spec}, expected NAME=FILE; put a name for tables and charts"
                             " in front of the file")
        pairs.append((name, path))
    return pairs


def read_policies(specs):
    """Policy name -> runs, each the episodes of one file; a NAME= given again is another seed."""
    policies, tasks, files = {}, {}, set()
    for name, path in named_files(specs):
        if (name, Path(path).resolve()) in files:
            raise SystemExit(f"found {name}={path} twice, expected each file once: a NAME that is"
                             " given again is another seed, with episodes of its own")
        files.add((name, Path(path).resolve()))
        policies.setdefault(name, []).append(read_episodes(path, tasks))
    return policies


def shared_tasks(policies):
    """(task ids in order of appearance, their domain). All runs must have played the same tasks."""
    runs = [(name, run) for name, policy in policies.items() for run in policy]
    tasks = {episode["task"]["task_id"]: episode["task"] for _, run in runs for episode in run}
    for name, run in runs:
        played = {episode["task"]["task_id"] for episode in run}
        missing = [task_id for task_id in tasks if task_id not in played]
        if missing:
            raise SystemExit(f"found no episode of {len(missing)} of {len(tasks)} tasks in a run of"
                             f" {name!r} (such as {', '.join(missing[:5])}), expected all runs on"
                             " the same tasks; play these or omit the file")
    one_domain(tasks.values())
    return list(tasks), next(iter(tasks.values()))["domain"]


def facts_of(policy):
    """Who played the runs of a policy, and what went wrong."""
    episodes = [episode for run in policy for episode in run]
    return {"seeds": len(policy), "episodes": len(episodes), "agent": episodes[0]["agent"],
            "humans": sorted({episode["human"] for episode in episodes if episode["human"]}),
            "max_turns": max(episode["max_turns"] or 0 for episode in episodes) or None,
            "errors": Counter(episode["error"] for episode in episodes if episode["error"])}
