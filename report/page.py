"""What page.html holds: words, charts and tables as JSON, and all dialogues, compressed."""

import base64
import functools
import hashlib
import io
import json
import re
import zlib
from pathlib import Path

from colbench import DOMAINS, MAX_TURNS
from evaluate import LEAK
from formats.outcome import lacks_answer
from formats.read import group_by_task, is_finite
from judge.browser import Browser
from judge.pages import graded_page, open_picture, solution_page
from report.charts import LAST_QUESTION, ending, ranking_chart, result_charts, training_curves
from report.training import method_among, record_of, short_name, training_method
from runtime.names import is_scripted
from runtime.processes import join_processes
from runtime.text import counted
from speakers.local import in_batches
from toy.credit import has_toy_credit, toy_credit

PAGE = Path(__file__).with_name("page.html")
THUMBNAIL = 360  # pixels of width
BATCH_TOKENS = 2048  # that the critic reads at a time, with padding
PAGE_BYTES = 4_900_000  # of data; page.html itself is far below the 100 kB left to 5 MB

# -----------------------------------------------------------------------------
# Above the dialogues


def overview(results, policies, files, training):
    """All that the page shows above its dialogues, except the sentences and tables of evaluate.py.

    results: None where only training is shown; files: (policy, path) pairs.
    """
    episodes = {name: [episode for of_seed in policy for episode in of_seed]
                for name, policy in policies.items()}
    starts = {run.flags.get("model") for run in training}
    described = []
    for name in policies:
        file = next(path for owner, path in files if owner == name)  # of its first seed
        what = policy_clause(results["policies"][name], file, starts)
        described.append({"name": name, "what": what})
    runs = [{"name": run.name, "what": method_among(run, training),
             "curves": training_curves(run)} for run in training]
    logged = results and DOMAINS[results["domain"]].logged
    return {
        "title": "Which turns helped" if logged else "ColBench evaluation",
        "solution": "Known afterwards" if logged else "Solution",
        "subtitle": subtitle(results) if results else "training only, no episodes",
        "policies": described, "runs": runs,
        "results": result_charts(results, episodes) if results else [],
        "critic": [ranking_chart(run) for run in training],
    }


def subtitle(results):
    counts = [policy["episodes"] for policy in results["policies"].values()]
    over = "tasks"
    if any(policy["seeds"] > 1 for policy in results["policies"].values()):
        over = "seeds and tasks"
    words = (f"{results['domain']} · {counted(results['tasks'], 'task')} ·"
             f" {counted(sum(counts), 'episode')} · [ ]: 95 % intervals over {over},"
             f" {results['draws']:,} bootstrap draws")
    if not DOMAINS[results["domain"]].logged:  # a log's reward has no limits, so no Wilson interval
        words += ", Wilson's where all outcomes agree"
    return words


def policy_clause(facts, file, starts):
    """What a policy is and how it was played, as far as the run.json of its file says.

    facts: what evaluate.py found of it; starts: the models that the training runs start from.
    """
    _, flags = record_of(Path(f"{file}.run.json"))
    agent = facts["agent"] or flags.get("agent") or ""
    script, trained = record_of(Path(agent, "run.json")) if agent else ("", {})
    what = []
    if agent and agent in starts:
        what.append(f"{short_name(agent)}, the model that training starts from")
    elif is_scripted(agent):
        what.append("a scripted agent")
    elif agent:
        what.append(training_method(script, trained) or f"the model {short_name(agent)}")
    if flags.get("max_turns", MAX_TURNS) != MAX_TURNS:
        what.append("in one turn" if flags["max_turns"] == 1
                    else f"at most {flags['max_turns']} turns")
    return "; ".join(what)


# -----------------------------------------------------------------------------
# What the page shows of episodes besides their text


def annotate(policies, critic, held_out):
    """Add true credit in the toy and, where the page has room, advantages and pictures of pages.

    held_out: ids of tasks that the critic was not trained on.
    """
    episodes = [episode for policy in policies.values() for of_seed in policy
                for episode in of_seed]
    for episode in episodes:
        drop_unreadable(episode)
    played = [episode for episode in episodes if not episode["error"]]
    if critic:
        for episode in episodes:
            episode["advantages"] = None  # the shades have one scale, so all are the critic's
        add_advantages(critic, episodes_to_show(episodes))
    for episode in played:
        episode["held_out"] = episode["task"]["task_id"] in held_out
        if has_toy_credit(episode["task"]):
            episode["credits"] = true_credits(episode)
    if played and DOMAINS[played[0]["task"]["domain"]].pages:
        with Browser() as browser:
            add_screenshots(episodes_to_show(episodes), browser)


def drop_unreadable(episode):
    """Set to None what the page would show but cannot read: a foreign file may have anything."""
    for key, kind in (("advantages", (int, float)), ("credits", str)):
        values = episode.get(key)
        one_each_turn = isinstance(values, list) and len(values) == episode["turns"]
        if not one_each_turn or not all(isinstance(value, kind) or value is None
                                        for value in values):
            episode[key] = None
    for key in ("screenshot", "solution_screenshot"):
        if not isinstance(episode.get(key), str):
            episode[key] = None


def episodes_to_show(episodes):
    """The episodes without an error that the page has room for, and a few more, task by task as it
    shows them.
    """
    packer, size, found = zlib.compressobj(), 0, []
    for group in group_by_task(episodes).values():
        for episode in group:
            if 4 / 3 * size > PAGE_BYTES:  # of the dialogues alone, in base64
                return found
            text = " ".join(message["content"] for message in episode["dialogue_history"])
            size += len(packer.compress(text.encode()))
            if not episode["error"]:
                found.append(episode)
    return found


def add_advantages(critic, episodes):
    """Set the `advantages` of all agent turns, None for turns that are too long for the critic."""
    read = []
    for episode in episodes:
        episode["advantages"] = [None] * episode["turns"]
        row = critic.dialogue_row(episode)
        if row is not None:
            read.append((row, episode))

    def length(entry):
        return len(entry[0].ids)

    with join_processes().watch(None, "episode", "advantages", total=len(read)) as bar:
        for batch in in_batches(sorted(read, key=length), length, BATCH_TOKENS):
            values = critic.turn_advantages([row for row, _ in batch])  # (R, S)
            most = max(episode["turns"] - row.dropped for row, episode in batch)
            if values.shape[1] > most:  # a fork's rows may count tokens in place of turns
                raise SystemExit(f"found {values.shape[1]} advantages of an episode of {most}"
                                 " turns, expected one a turn; a critic of tokens has to sum them"
                                 " in turn_advantages")
            for (row, episode), of_row in zip(batch, values.tolist(), strict=True):
                end = min(row.dropped + row.turns, episode["turns"])
                episode["advantages"][row.dropped:end] = of_row[:end - row.dropped]
            bar.update(len(batch))


def true_credits(episode):
    """The kind of each agent turn, as the embedded world knows it."""
    task, history, turns = episode["task"], episode["dialogue_history"], episode["turns"]
    kinds = [toy_credit(task, history, turn, episode["success"], turns).kind
             for turn in range(turns)]
    if lacks_answer(episode):  # toy_credit takes whatever stands on the last turn for an answer
        kinds[-1] = LAST_QUESTION
    return kinds


def add_screenshots(episodes, browser):
    """Draw the pages of episodes, until there are more pictures than the file can hold."""
    pictures = []

    @functools.cache  # many episodes share a solution page
    def draw(html):
        png = browser.picture(html) if html else None
        if png is None:
            return None
        pictures.append(thumbnail(png))
        return pictures[-1]

    for episode in join_processes().watch(episodes, "episode", "screenshots"):
        if sum(map(len, pictures)) > PAGE_BYTES:
            break
        shown = graded_page(episode["answer"], episode["dialogue_history"])
        wanted = solution_page(episode["task"]["ground_truth"])
        episode["screenshot"] = draw(shown) or episode["screenshot"]
        episode["solution_screenshot"] = draw(wanted) or episode["solution_screenshot"]


def thumbnail(png):
    """A small copy of a screenshot in base64."""
    image = open_picture(png)
    image.thumbnail((THUMBNAIL, 3 * THUMBNAIL))
    small = io.BytesIO()
    image.save(small, "WEBP", quality=70)  # a fifth of a PNG's bytes, so five times as many fit
    return base64.b64encode(small.getvalue()).decode()


# -----------------------------------------------------------------------------
# The dialogues


def episode_record(name, seed_index, episode):
    """One episode as the page reads it; what belongs to its task is stored once, separately."""
    task_id = episode["task"]["task_id"]
    sample = str(episode["sample"])
    if seed_index > 0:
        sample += f", seed {seed_index}"
    dialogue = []
    for message in episode["dialogue_history"]:
        record = {key: message[key] for key in ("role", "content", "finished") if key in message}
        output = message.get("output") or message["content"]
        if output.strip() != message["content"].strip():
            record["output"] = output
        dialogue.append(record)
    # JSON has neither NaN nor infinity
    advantages = [value if value is not None and is_finite(value) else None
                  for value in episode.get("advantages") or []]
    return {
        "id": f"{name}/{task_id}/{sample}", "policy": name, "sample": sample,
        "outcome": ending(episode), "error": episode["error"], "turns": episode["turns"],
        "reward": episode["reward"], "reasons": episode["reasons"], "leak": episode["leak"],
        "leaking": episode["leak"] >= LEAK, "answer": episode["answer"],
        # in a log, the dialogues of a task may differ in these two
        "request": episode["task"]["problem_description"],
        "solution": episode["task"]["ground_truth"],
        "dialogue": dialogue, "advantages": advantages,
        "credits": episode.get("credits") or [], "heldOut": bool(episode.get("held_out")),
    }


def task_records(policies):
    """(tasks with the episodes of all policies, distinct screenshots that these point to)."""
    tasks, pictures = {}, {}

    def index_of(picture):
        return pictures.setdefault(picture, len(pictures)) if picture else None

    for name, policy in policies.items():
        for seed_index, of_seed in enumerate(policy):
            for episode in of_seed:
                task_id = episode["task"]["task_id"]
                task = tasks.setdefault(task_id, {
                    "id": task_id, "request": episode["task"]["problem_description"],
                    "tests": episode["task"].get("test_cases") or {}, "picture": None,
                    "episodes": [],
                })
                record = episode_record(name, seed_index, episode)
                record["picture"] = index_of(episode.get("screenshot"))
                task["episodes"].append(record)
                if task["picture"] is None:
                    task["picture"] = index_of(episode.get("solution_screenshot"))
    return list(tasks.values()), list(pictures)


def packed_episodes(policies, room):
    """All that the browser of dialogues shows, compressed, in at most `room` characters.

    When room runs out, screenshots are omitted first, then the last episodes.
    """
    tasks, pictures = task_records(policies)
    scale = strongest_shade(tasks)
    total = sum(len(task["episodes"]) for task in tasks)
    num_episodes, num_pictures = total, len(pictures)
    while True:
        omitted = {"episodes": total - num_episodes, "screenshots": len(pictures) - num_pictures}
        data = {"tasks": first_episodes(tasks, num_episodes), "pictures": pictures[:num_pictures],
                "scale": scale, "omitted": omitted}
        packed = base64.b64encode(zlib.compress(json.dumps(data, allow_nan=False).encode()))
        if len(packed) <= room or num_episodes == 0:
            return packed.decode()
        kept_share = max(0, 0.95 * room / len(packed))
        if num_pictures > 0:
            num_pictures = int(num_pictures * kept_share)
        else:
            num_episodes = int(num_episodes * kept_share)


def first_episodes(tasks, count):
    """The tasks with their first `count` episodes in all: in a log, one task may have most."""
    kept = []
    for task in tasks:
        if count > 0:
            kept.append(task | {"episodes": task["episodes"][:count]})
        count -= len(task["episodes"])
    return kept


def strongest_shade(tasks):
    """The size of an advantage from which on a turn has the full colour.

    It is the 95th percentile, so that one outlier does not pale all other turns.
    """
    sizes = sorted(abs(value) for task in tasks for record in task["episodes"]
                   for value in record["advantages"] if value is not None)
    shade = sizes[int(0.95 * (len(sizes) - 1))] if sizes else 0.0
    return shade or 1.0  # where all are 0, too


# -----------------------------------------------------------------------------
# The file


def page_of(data, policies):
    """page.html with its data and a Content-Security-Policy.

    The policy allows the page's style and script, by hash, its embedded pictures, and nothing else.
    """
    # in a <script> element, where without `<` no text can begin or end a tag
    filled_in = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    episodes = packed_episodes(policies, PAGE_BYTES - len(filled_in))
    page = PAGE.read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    policy = (f"default-src 'none'; script-src '{sha256(script)}'; style-src '{sha256(style)}';"
              " img-src data:; base-uri 'none'; form-action 'none'")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace("<!-- Content-Security-Policy -->", meta)
    return page.replace(">DATA<", f">{filled_in}<").replace(">EPISODES<", f">{episodes}<")


def sha256(text):
    """The hash of an inline style or script, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
