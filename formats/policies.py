"""The policies that evaluate.py and the report compare: each NAME=FILE is one seed."""

from collections import Counter
from pathlib import Path

from tqdm import tqdm

from formats.read import one_domain, read_episodes
from judge.sandbox import SOLUTION_FAILED


def named_files(specs):
    """(name, path) of each NAME=FILE."""
    pairs = []
    for spec in specs:
        name, _, path = spec.partition("=")
        if not name or not path:
            raise SystemExit(f"found {spec}, expected NAME=FILE; put a name for tables and charts"
                             " in front of the file")
        if not name.isprintable():
            raise SystemExit(f"found the name {name!r}, expected printable characters, for tables")
        pairs.append((name, path))
    return pairs


def read_policies(specs):
    """Policy name -> its seeds, each the episodes of one file; a NAME= given again is another."""
    policies, tasks, files = {}, {}, set()
    for name, path in tqdm(named_files(specs), unit="file", desc="reading", delay=2):
        file = name, Path(path).resolve()
        if file in files:
            raise SystemExit(f"found {name}={path} twice, expected each file once: a NAME that is"
                             " given again is another seed, with episodes of its own")
        files.add(file)
        policies.setdefault(name, []).append(read_episodes(path, tasks))
    return policies


def shared_tasks(policies):
    """(task ids in order of appearance, their domain, number of tasks that their solution fails).

    Every seed must have the same tasks.
    """
    episodes = [episode for policy in policies.values() for of_seed in policy
                for episode in of_seed]
    tasks = {episode["task"]["task_id"]: episode["task"] for episode in episodes}
    # of each seed: the name of its policy, the ids of its tasks
    played = [(name, {episode["task"]["task_id"] for episode in of_seed})
              for name, policy in policies.items() for of_seed in policy]
    missing = [task_id for task_id in tasks if not all(task_id in found for _, found in played)]
    if missing:
        counts = ", ".join(f"{name} {len(found)}" for name, found in played)
        raise SystemExit(f"found files with different tasks, of {len(tasks)} in all: {counts}"
                         f" (not in every file: {', '.join(missing[:5])}), expected the same tasks"
                         " in all files; play what is missing, or omit a file")
    one_domain(tasks.values())
    unsolvable = {episode["task"]["task_id"] for episode in episodes
                  if SOLUTION_FAILED in episode["reasons"].values()}
    return list(tasks), next(iter(tasks.values()))["domain"], len(unsolvable)


def facts_of(policy):
    """Who played the episodes of a policy, how they were graded, and what went wrong."""
    episodes = [episode for of_seed in policy for episode in of_seed]
    copies = [index for index, of_seed in enumerate(policy) if of_seed in policy[:index]]
    return {"seeds": len(policy), "copies": len(copies),
            "episodes": len(episodes), "agent": episodes[0]["agent"],
            "humans": sorted({episode["human"] for episode in episodes if episode["human"]}),
            "judges": values_of(episodes, "judge"), "prompts": values_of(episodes, "agent_prompt"),
            "best_of": sorted({(episode["best_of_n"], episode.get("scorer") or "a critic")
                               for episode in episodes if (episode.get("best_of_n") or 1) > 1}),
            "max_turns": max(episode["max_turns"] or 0 for episode in episodes) or None,
            "errors": Counter(episode["error"] for episode in episodes if episode["error"])}


def values_of(episodes, key):
    """The values of a key, each once, in order; an episode may have None."""
    return sorted({episode[key] for episode in episodes if episode[key] is not None})
