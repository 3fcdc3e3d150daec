"""`colbench.py import`: official trajectories, or logs of your own dialogues, as episodes.

A line of a log is one dialogue in the OpenAI format and its reward:

    {"messages": [{"role": "user", "content": "Book me a table"}, {"role": "assistant",
     "content": "For when?"}, ...], "reward": 0.5, "task": "table-17", "ground_truth": "tonight"}

`task` is the key within which dialogues are compared (default: what stands before the first
assistant message), `ground_truth` what was known only afterwards (default: nothing). Assistant
messages are turns; all others are what the agent read. A tool call is a turn like any other: it
becomes text, as the templates of Qwen and Hermes write it.
"""

import contextlib
import hashlib
import json
import re
from collections import Counter

from tqdm import tqdm

from colbench import agent_prompt_of
from formats.outcome import reasons_of
from formats.read import complete_episode, group_by_task, is_finite, read_episodes
from judge.sandbox import grade_all
from runtime.files import expect, read_jsonl, read_prompt, write_new
from runtime.text import counted, harmless

SMALLEST = ('{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content":'
            ' "..."}], "reward": 1.0}')
SHOWN = 20  # most faulty lines that a message lists
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
READ = {"role", "content", "refusal", "tool_calls", "function_call"}  # keys of a message
# keys of a line that may be missing -> their type
OPTIONS = {"task": (str, int), "ground_truth": str, "agent": str, "human": str}


def import_command(args):
    """Write --output, whole or not at all, and print what is in it."""
    prompt = read_prompt(args.agent_prompt)
    rows = list(read_jsonl(args.file))  # (where, row)
    if not rows:
        raise SystemExit(f"{args.file}: found no line, expected one dialogue a line, such as"
                         f" {SMALLEST}")
    _, first = rows[0]
    if "messages" in first or "dialogue_history" not in first:
        episodes, graded = log_episodes(rows, prompt), 0
    else:
        graded = grade_answers(rows, args.judge)
        episodes = official_episodes(args.file, rows, prompt)
    if args.judge != "fixed" and not graded:
        raise SystemExit(f"{args.file}: found no answer that has to be graded, expected some with"
                         f" --judge {args.judge}; omit it")
    if prompt is not None and not any(
            episode["agent_prompt"] in (prompt, agent_prompt_of(episode["task"], prompt))
            for episode in episodes):
        raise SystemExit(f"{args.file}: found instructions of the agent in all dialogues, expected"
                         f" some without, with --agent_prompt {args.agent_prompt}; omit it")
    write_new(args.output, episodes)
    print_imported(args.output, episodes, graded)


def print_imported(output, episodes, graded):
    """Print what was imported, and what may keep a critic from learning from it."""
    by_task = group_by_task(episodes)
    rewards = [{episode["reward"] for episode in group if not episode["error"]}
               for group in by_task.values()]  # of each task
    unequal = sum(len(of_task) > 1 for of_task in rewards)
    found = set().union(*rewards)
    said = (f"{output}: {counted(len(episodes), 'episode')} of {counted(len(by_task), 'task')},"
            f" {unequal} of them with different rewards")
    if found:
        said += f"; rewards from {min(found):g} to {max(found):g}"
        said += "" if graded else ", taken as they are"
    print(said)
    for caution in cautions(episodes, by_task):
        print(caution)
    if not unequal:
        print("No task has different rewards, so nothing can be compared: a critic needs dialogues"
              " that have a `task` in common and differ in reward.")


def cautions(episodes, by_task):
    """Sentences on episodes that are of no use, or mislead a critic."""
    failed = sum(bool(episode["error"]) for episode in episodes)
    if failed:
        yield f"Episodes that an error has stopped, which no stage uses: {failed}"
    unknown = sum(not episode["task"]["ground_truth"].strip() for episode in episodes)
    if unknown:
        yield (f"Dialogues without ground_truth: {unknown} of {len(episodes)}. A critic needs it in"
               " all of them, or --privileged none.")
    prompts = sum(len({episode["agent_prompt"] for episode in group}) > 1
                  for group in by_task.values())
    if prompts:
        yield (f"Tasks whose dialogues differ in the system message: {prompts} of {len(by_task)}. A"
               " critic can then read the outcome from it; give them the same, or tasks of their"
               " own.")
    differ = sum(len({episode["task"]["ground_truth"].strip() for episode in group} - {""}) > 1
                 for group in by_task.values())
    if differ:
        yield (f"Tasks whose dialogues differ in ground_truth: {differ} of {len(by_task)}. A critic"
               " can then read the outcome from it, and learn nothing of the turns; give all"
               " dialogues of a task the same text.")
    distinct = {(episode["task"]["task_id"], episode["reward"], episode["agent_prompt"],
                 *((message["role"], message["content"])
                   for message in episode["dialogue_history"])) for episode in episodes}
    repeated = len(episodes) - len(distinct)
    if repeated:
        yield ("Dialogues that repeat an earlier one word for word, and count as often:"
               f" {repeated}")


def official_episodes(path, rows, prompt):
    """The episodes of the official trajectory file, whose answers have been graded.

    The file has the agent's instructions only within `input`, the rendered prompt of each turn.
    """
    episodes, others = read_episodes(path, rows=rows), 0
    for episode in episodes:
        if episode["agent_prompt"] is None:
            episode["agent_prompt"] = agent_prompt_of(episode["task"], prompt)
        was_read = next((message.get("input") for message in episode["dialogue_history"]
                         if message["role"] == "assistant"), None)
        others += isinstance(was_read, str) and episode["agent_prompt"].strip() not in was_read
    if others:
        print(f"Dialogues whose `input` does not hold the agent's instructions: {others} of"
              f" {len(episodes)}. Later stages will use {'our' if prompt is None else 'the given'}"
              " instructions; give those that the agent had with --agent_prompt FILE.")
    return episodes


def grade_answers(rows, profile):
    """Grade the answers without a reward, as the official simulator leaves them; how many."""
    ungraded = []  # (row, its episode)
    for where, row in rows:
        if row.get("reward") is None and not row.get("error"):
            unjudged = {"reward": 0.0, "success": None, "leak": 0.0}
            episode = complete_episode(row | unjudged, where)
            if "test_cases" not in episode["task"]:
                raise SystemExit(f"{where}: found no 'reward', expected a number; only answers to"
                                 " tasks with tests are graded here")
            expect(row, "answer", str, where)
            ungraded.append((row, episode))
    parts = [ungraded[start:start + 64] for start in range(0, len(ungraded), 64)]
    for part in tqdm(parts, unit="batch", desc="grading", disable=not parts):
        tasks = [episode["task"] for _, episode in part]
        grades = grade_all(tasks, [row["answer"] for row, _ in part], profile)
        for (row, episode), grade in zip(part, grades, strict=True):
            played = episode["dialogue_history"][:2 * episode["turns"]]  # up to the agent's last
            row |= {"reward": grade.reward, "reasons": reasons_of(grade, played),
                    "judge": f"--judge {profile}"}
    if ungraded:
        print(f"Answers without a reward, which were graded: {len(ungraded)} (judge {profile})")
    return len(ungraded)


def log_episodes(rows, prompt):
    """An episode for each row of a log. If lines have faults, it stops and lists these lines."""
    episodes, faults, counts = [], [], Counter()  # counts: task id -> its dialogues so far
    for where, row in rows:
        wrong = faults_of(row)
        if wrong:
            faults.append(f"{where}: found {'; '.join(wrong)}")
            continue
        episode = log_episode(row, prompt, where)
        task_id = episode["task"]["task_id"]
        episode["sample"] = counts[task_id]
        counts[task_id] += 1
        episodes.append(episode)
    if faults:
        more = f"\nand {len(faults) - SHOWN} more lines" if len(faults) > SHOWN else ""
        raise SystemExit("\n".join(faults[:SHOWN]) + f"{more}\nexpected at least {SMALLEST}")
    ignored = set().union(*(row for _, row in rows)) - {"messages", "reward", *OPTIONS}
    if ignored:
        print(f"Keys that are ignored: {keys_of(ignored)}")
    ignored = set().union(*(message for _, row in rows for message in row["messages"])) - READ
    if ignored:
        print(f"Keys of messages that are ignored: {keys_of(ignored)}")
    roles = Counter(message["role"] for _, row in rows for message in row["messages"])
    others = sorted(roles.keys() - KNOWN_ROLES)
    if others:
        listed = ", ".join(f"{harmless(role)} ({roles[role]})" for role in others)
        print(f"Unusual roles, whose messages are no turns of the agent: {listed}")
    return episodes


def log_episode(row, prompt, where):
    """The episode of a line without faults."""
    messages = [{"role": message["role"], "content": text_of(message)}
                for message in row["messages"]]
    turn = [message["role"] for message in messages].index("assistant")
    opening = [message["content"] for message in messages[:turn]]
    task_id = row.get("task")
    if task_id in (None, ""):  # some exports write a missing one as an empty text
        text = "\n".join(opening)
        task_id = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if messages[0]["role"] in ("system", "developer"):  # two names for instructions
        del messages[0]
        # as the file of these instructions is read back from the policy's checkpoint
        prompt = re.sub("\r\n?", "\n", opening.pop(0)).strip()
    return complete_episode({
        "task": {"task_id": str(task_id), "domain": "logged",
                 "problem_description": "\n".join(opening),
                 "ground_truth": row.get("ground_truth") or ""},
        "dialogue_history": messages, "reward": row["reward"], "agent": row.get("agent"),
        "human": row.get("human"), "agent_prompt": prompt or "", "leak": 0.0}, where)


def text_of(message):
    """What a message says, its tool calls included; None if it is no text."""
    content = message.get("content")
    if not content and message.get("refusal"):
        content = message["refusal"]  # the API has it in a key of its own
    calls = message.get("tool_calls") or []
    if message.get("function_call"):  # the older format, whose results have the role "function"
        calls = [{"function": message["function_call"]}]
    if calls and not content:
        texts = []
    elif isinstance(content, list):  # the format allows parts
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    else:
        texts = [content]
    try:
        texts += [text_of_call(call) for call in calls]
    except (LookupError, TypeError):
        return None
    return "\n".join(texts) if texts and all(isinstance(text, str) for text in texts) else None


def text_of_call(call):
    """A tool call as text; LookupError or TypeError if it has no function with arguments."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if isinstance(arguments, str):
        # what a model wrote as invalid JSON, or with half a surrogate pair, stays a text
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments or "{}")
            json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
            arguments = parsed
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def faults_of(row):
    """All that is missing or wrong in a line of a log, as texts."""
    faults = []
    reward = row.get("reward")
    if type(reward) not in (int, float) or not is_finite(reward):
        faults.append(f"reward {reward!r}, which is no finite number" if "reward" in row
                      else f"no reward, but the keys {keys_of(row)}")
    for key, kind in OPTIONS.items():
        value = row.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(one.__name__ for one in kinds)
            faults.append(f"{key} of type {type(value).__name__}, not {expected}")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return [*faults, f"no list of messages, but the keys {keys_of(row)}"]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            keys = f", but with the keys {keys_of(message)}" if isinstance(message, dict) else ""
            faults.append(f"messages[{index}] without a role{keys}")
        elif text_of(message) is None:
            faults.append(f"messages[{index}] of role {harmless(message['role'])} whose content is"
                          " no text (what other parts show has to be written as text), or whose"
                          " tool_calls lack a function with name and arguments")
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    listed = keys_of(set(map(str, roles)))
    if "assistant" not in roles:
        faults.append(f"no assistant message, which would be a turn, but the roles {listed}")
    elif "user" not in roles[:roles.index("assistant")]:
        faults.append(f"the roles {listed}, with an assistant message before the first user message"
                      " (move a greeting into the system message)")
    return faults


def keys_of(row):
    """The names in a row, or in a set, in words."""
    return harmless(", ".join(sorted(map(str, row)))) or "none"
