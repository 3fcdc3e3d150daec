"""Readers of the files that stages exchange: tasks, episodes, candidates.

Each kind of file has one reader, which checks every row against one table and fills in what may be
missing. A row that does not fit stops the script with file, line, what was found and expected.
"""

import hashlib
import re
from pathlib import Path

from colbench import DOMAINS, prompt_of_episode
from formats.outcome import MOST_REWARD, leak_share
from runtime.files import expect, read_jsonl, refuse_unfinished, without_nulls

NUMBER = (int, float)
TASK_KEYS = {"problem_description": str, "ground_truth": str}
EPISODE_KEYS = {"task": dict, "dialogue_history": list}
# these may be missing or null
EPISODE_OPTIONS = {
    "sample": int, "answer": str, "reward": NUMBER, "success": bool, "reasons": dict,
    "leak": NUMBER, "agent": str, "human": str, "judge": str, "agent_prompt": str,
    "max_turns": int, "seed": int, "error": str, "best_of_n": int, "scorer": str,
}
STATE_KEYS = {"task": dict, "sample": int, "turn": int, "messages": list}
CANDIDATE_KEYS = {"candidates": list, "finished": list}
RANKED_KEYS = CANDIDATE_KEYS | {"advantages": list, "ranker": str}
CANDIDATE_OPTIONS = {"agent_prompt": str, "max_turns": int, "error": str}
MESSAGE_OPTIONS = {"output": str, "finished": bool}

# -----------------------------------------------------------------------------
# Readers


def complete_task(row, where="task"):
    """A task with every field filled in; unknown keys stay.

    Official rows have neither `task_id` nor `domain`: tests make a backend task, a page a frontend
    one.
    """
    row = without_nulls(row)
    check_keys(row, TASK_KEYS, {"task_id": str, "hidden_information": str, "domain": str}, where)
    solution = row["ground_truth"]
    if "domain" not in row:
        is_page = re.search(r"</?[a-zA-Z][^<>]*>", solution) and "test_cases" not in row
        row["domain"] = "frontend" if is_page else "backend"
    if row["domain"] not in DOMAINS:
        names = " or ".join(repr(name) for name in DOMAINS)
        raise SystemExit(f"{where}: found domain {row['domain']!r}, expected {names}")
    if not solution.strip() and row["domain"] != "logged":
        raise SystemExit(f"{where}: found an empty 'ground_truth', expected the solution: code or"
                         " a page")
    content = "\0".join((row["problem_description"], solution))
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    task = {"task_id": digest, "hidden_information": solution} | row
    DOMAINS[task["domain"]].check_task(task, where)
    return task


def read_tasks(path, num_tasks=None):
    """The first `num_tasks` tasks of a file."""
    tasks, first_seen = [], {}
    for where, row in read_jsonl(path):
        refuse_other_kind(row, "tasks", where)
        task = complete_task(row, where)
        while row.get("task_id") is None and task["task_id"] in first_seen:
            task["task_id"] += "+"  # official rows have no ids: a repeated one is a task of its own
        earlier = first_seen.setdefault(task["task_id"], where)
        if earlier != where:
            raise SystemExit(f"{where}: found task_id {task['task_id']!r} again (first at"
                             f" {earlier}), expected each task once; remove one of the two lines")
        tasks.append(task)
        if len(tasks) == num_tasks:
            break
    if not tasks:
        raise SystemExit(f"{path}: found no line, expected one task a line")
    return tasks


def complete_episode(row, where="episode"):
    """A checked episode, with defaults for what may be missing."""
    row = without_nulls(row)
    check_keys(row, EPISODE_KEYS, EPISODE_OPTIONS, where)
    task = complete_task(row["task"], f"{where}, task")
    domain = DOMAINS[task["domain"]]
    history = row["dialogue_history"]
    error = row.get("error") or None  # an empty text is no error
    check_history(history, where, in_turn=not domain.logged)
    turns = sum(message["role"] == "assistant" for message in history)
    reward = success = None
    if not error:
        if not turns:
            raise SystemExit(f"{where}: found a dialogue of {len(history)} messages without an"
                             " agent turn, expected at least one")
        reward = expect(row, "reward", NUMBER, where)
        if not (0 <= reward <= MOST_REWARD or (domain.logged and is_finite(reward))):
            raise SystemExit(f"{where}: found reward {reward}, expected a number between 0 and 1;"
                             " only logs may have others, which are finite")
        if domain.has_success:
            success = reward == 1
    if row.get("success") not in (None, success):
        raise SystemExit(f"{where}: found success {row['success']} with reward {reward}, expected"
                         f" {success}: true for a reward of 1, false below, null for failed"
                         " episodes and domains without success, such as pages")
    defaults = {"sample": 0, "answer": None, "reasons": {}, "agent": None, "human": None,
                "judge": None, "seed": None, "agent_prompt": None, "max_turns": None}
    if "leak" not in row:
        defaults["leak"] = leak_share(task, history)
    episode = defaults | row
    episode |= {"task": task, "reward": reward, "success": success, "turns": turns, "error": error,
                "reasons": {test: str(reason) for test, reason in episode["reasons"].items()}}
    if episode["sample"] < 0 or not 0 <= episode["leak"] <= 1:
        raise SystemExit(f"{where}: found sample {episode['sample']} and leak {episode['leak']},"
                         " expected an index from 0 up and a share between 0 and 1")
    return episode


def read_episodes(path, tasks=None, rows=None):
    """All episodes of a file; the same task and sample twice is an error.

    `tasks` holds those of earlier files, see `check_same_task`. `rows` are those of the file if
    something was added to them.
    """
    refuse_unfinished(path)
    tasks = {} if tasks is None else tasks
    episodes, seen, counts = [], set(), {}
    for where, row in rows or read_jsonl(path):
        refuse_other_kind(row, "episodes", where)
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


def load_episodes(paths):
    """Episodes that can be trained on, and how many were omitted because of an error.

    If an earlier file has samples of the same task, the numbering continues after them.
    """
    episodes, tasks, next_sample = [], {}, {}
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise SystemExit(f"{' '.join(map(str, paths))}: found a file of episodes twice, expected"
                         " each once")
    for path in paths:
        found = read_episodes(path, tasks)
        offset = dict(next_sample)  # after the files before this one
        for episode in found:
            task_id = episode["task"]["task_id"]
            episode["sample"] += offset.get(task_id, 0)
            next_sample[task_id] = max(next_sample.get(task_id, 0), episode["sample"] + 1)
        episodes += found
    one_domain([episode["task"] for episode in episodes])
    sound = [episode for episode in episodes if not episode["error"]]
    if not sound:
        raise SystemExit(f"{' '.join(map(str, paths))}: found only failed episodes"
                         f" ({len(episodes)}), expected at least one without an error; rerun the"
                         " command that collected them")
    return sound, len(episodes) - len(sound)


def truncation_in_words(rows, max_length):
    """How many dialogues `max_length` has cut, in words; `rows` holds None for an omitted one."""
    shorter, omitted = sum(row.dropped > 0 for row in rows if row), rows.count(None)
    if not shorter and not omitted:
        return f"all fit into --max_length {max_length}"
    return (f"with --max_length {max_length}, {shorter} lose their oldest turns, and {omitted} are"
            " omitted, since their last turn does not fit")


def solution_of(task):
    """The solution, for a critic that reads it. Only logs may lack it, which ends the script."""
    if not task["ground_truth"].strip():
        raise SystemExit(f"task {task.get('task_id')}: found no ground_truth, expected what was"
                         " known only afterwards; add it to the logs, leave out the dialogues that"
                         " lack it, or train with --privileged none")
    return task["ground_truth"]


def state_key(state):
    return state["task"]["task_id"], state["sample"], state["turn"]


def read_candidates(path, ranked=False):
    """The states of a file of candidates, of ranked ones if `ranked`, and how many it omits.

    Omitted are states that failed (`error`), and those that were too long for the ranker, which
    have no advantages.
    """
    refuse_unfinished(path)
    states, seen, omitted = [], set(), 0
    for where, row in read_jsonl(path):
        refuse_other_kind(row, "ranked candidates" if ranked else "candidates", where)
        too_long = "advantages" in row and row["advantages"] is None  # for the ranker
        omit = row.get("error") or (ranked and too_long)
        keys = STATE_KEYS
        if not omit:
            keys = keys | (RANKED_KEYS if ranked else CANDIDATE_KEYS)
        check_keys(row, keys, CANDIDATE_OPTIONS, where)
        row["task"] = complete_task(row["task"], f"{where}, task")
        if state_key(row) in seen:
            raise SystemExit(f"{where}: found the state {state_key(row)} a second time, expected it"
                             " once")
        seen.add(state_key(row))
        if omit:
            omitted += 1
            continue
        check_lists(row, ranked, where)
        states.append(row)
    if not states:
        raise SystemExit(f"{path}: found no state with {'ranked ' if ranked else ''}candidates, but"
                         f" {omitted} that failed or are too long for the ranker, expected at least"
                         " one; sample them again, or train a critic with a greater --max_length")
    return states, omitted


def check_same_task(tasks, task, where):
    """Refuse another task of the same task_id, such as that of another world, or of an edited file.

    tasks: task_id -> task, of those that have been seen; this one is added. In logs, a task_id is
    the key within which dialogues are compared, and its dialogues may differ.
    """
    if DOMAINS[task["domain"]].logged:
        return
    if tasks.setdefault(task["task_id"], task) != task:
        raise SystemExit(f"{where}: found the task_id {task['task_id']!r} with two different tasks,"
                         " expected one; give only files made from the same task file, or give the"
                         " tasks different ids")


def group_by_task(episodes):
    """task_id -> its episodes."""
    groups = {}
    for episode in episodes:
        groups.setdefault(episode["task"]["task_id"], []).append(episode)
    return groups


def custom_prompt(records, say):
    """The agent's instructions, if all records share them and they are not the domain's own.

    A policy that was trained with such instructions needs them when it plays. The domain's own are
    not stored with it, because they name the number of turns, which may differ when it plays.
    `say` prints a sentence if the records differ.
    """
    prompts = set()
    for record in records:
        own = prompt_of_episode(record | {"agent_prompt": None})
        prompt = record.get("agent_prompt")
        prompts.add(None if prompt == own else prompt)
    if len(prompts) > 1:
        say(f"found {len(prompts)} different instructions of the agent, so the policy is saved"
            " without any; give --agent_prompt when it plays")
    return prompts.pop() if len(prompts) == 1 else None


def is_finite(number):
    """Whether a number is finite as a float. math.isfinite fails on an int that is too large."""
    return -1e300 < number < 1e300


def one_domain(tasks):
    """The Domain that all tasks belong to."""
    domains = {task["domain"] for task in tasks}
    if len(domains) > 1:
        raise SystemExit(f"found {' and '.join(sorted(domains))} tasks together, expected one"
                         " domain; put them in separate files")
    return DOMAINS[domains.pop()]


# -----------------------------------------------------------------------------
# Checks of a row


# Kind of a file -> (a key that shows it, where it comes from). Ranked files have "candidates", too,
# so their entry comes first
KINDS = {
    "episodes": ("dialogue_history", "collect.py --tasks writes them"),
    "ranked candidates": ("advantages", "train_critic.py --candidates writes them"),
    "candidates": ("candidates", "collect.py --states writes them"),
    "tasks": ("problem_description", "docs/formats.md describes them"),
}


def refuse_other_kind(row, wanted, where):
    """Refuse a row of another kind of file; ranked candidates may be ranked again."""
    if {"messages", "reward"} <= row.keys():
        raise SystemExit(f"{where}: found a log of dialogues, expected {wanted}; `colbench.py"
                         " import` turns it into episodes")
    found = [kind for kind, (key, _) in KINDS.items() if key in row]
    if found and wanted not in found:
        raise SystemExit(f"{where}: found {found[0]}, expected {wanted}; {KINDS[wanted][1]}")


def check_keys(row, needed, optional, where):
    """Refuse a row without the `needed` keys, or with a value of another type; key -> type."""
    for key, kind in needed.items():
        expect(row, key, kind, where)
    for key, kind in optional.items():
        if row.get(key) is not None:
            expect(row, key, kind, where)


def check_history(history, where, in_turn):
    """Refuse a dialogue in which user and assistant do not take turns, the user first.

    In a log, roles may follow each other in any order, but a user comes before the assistant.
    """
    roles, asked = ("user", "assistant"), False
    for index, message in enumerate(history):
        role = message.get("role") if isinstance(message, dict) else None
        asked = asked or role == "user"
        if in_turn:
            sound = role == roles[index % 2]
        else:
            sound = isinstance(role, str) and (asked or role != "assistant")
        if not sound:
            raise SystemExit(f"{where}: found dialogue_history[{index}] of role {role!r}, expected"
                             " user and assistant in turn, the user first; only logs may have other"
                             " roles, and several messages of one")
        check_keys(message, {"content": str}, MESSAGE_OPTIONS,
                   f"{where}, dialogue_history[{index}]")


def check_lists(state, ranked, where):
    """Refuse candidates whose lists differ in length, or hold other things than they should."""
    names = ["candidates", "finished"]
    sound = (all(isinstance(text, str) for text in state["candidates"])
             and all(isinstance(flag, bool) for flag in state["finished"])
             and is_dialogue(state["messages"]))
    if ranked:
        names.append("advantages")
        sound = sound and all(type(value) in NUMBER and is_finite(value)
                              for value in state["advantages"])
    lengths = {name: len(state[name]) for name in names}
    if len(set(lengths.values())) > 1 or not state["candidates"]:
        raise SystemExit(f"{where}: found lists of lengths {lengths}, expected as many finished"
                         " flags and advantages as candidates, at least one")
    if not sound:
        raise SystemExit(f"{where}: found messages, candidates, finished flags or advantages of"
                         " another type, expected a dialogue that ends before an agent turn, texts,"
                         " booleans and finite numbers; make the file with collect.py --states")


def is_dialogue(messages):
    """Whether these are messages with a role and a text, at least one of them a user's."""
    sound = all(isinstance(message, dict) and isinstance(message.get("role"), str)
                and isinstance(message.get("content"), str) for message in messages)
    return sound and any(message["role"] == "user" for message in messages)
