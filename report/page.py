"""The data of the HTML report, which evaluate.html draws."""

import base64
import functools
import hashlib
import io
import json
import math
import re
import shlex
import time
import typing
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy
from tqdm import tqdm

from colbench import DOMAINS, MAX_TURNS, ResumableJsonl, counted, lacks_answer
from judge.browser import Browser
from judge.pages import graded_page, open_picture, solution_page
from judge.sandbox import SOLUTION_FAILED
from report.statistics import wilson
from report.tables import heading, main_metric
from stages.record import read_run
from toy.world import has_toy_credit, toy_credit
from train_policy import PairSettings, pairs_of_state, read_candidates

PAGE = Path(__file__).parent.with_name("evaluate.html")
EMPTY_DATA = '<script type="application/json" id="data">{}</script>'
EMPTY_EPISODES = '<script type="text/plain" id="packed"></script>'
PAGE_BYTES = 4_900_000  # of data; evaluate.html itself is far below the 100 kB left to 5 MB

# What a turn can be, as toy_credit names it; the last is ours
HELPFUL_TURNS = ("useful question", "right answer")
LAST_QUESTION = "question on the last turn"
TURNS = (*HELPFUL_TURNS, "wasted question", "repeated question", "early answer", "wrong answer",
         LAST_QUESTION)
ENDINGS = ("solved", "answered", "wrong answer", "early answer", "no answer", "out of turns", "cut",
           SOLUTION_FAILED, "error")
METHODS = {
    "sweet": "SWEET-RL, which is DPO on pairs of turns that the critic ranked",
    "mtdpo": "multi-turn DPO on pairs of whole dialogues",
    "rft": "rejection fine-tuning on solved dialogues",
    "sft": "supervised fine-tuning on dialogues",
}
HEADS = {"logratio": "log-ratio critic", "value": "critic with a value head"}


class Summary(typing.NamedTuple):
    results: dict | None  # None where only training is reported
    sentences: list
    tables: list


class Training(typing.NamedTuple):
    """A training run: its metrics.jsonl, and what its run.json says."""

    name: str
    folder: Path
    flags: dict
    rows: list

    @property
    def last(self):
        """The last value of each metric."""
        return {key: value for row in self.rows for key, value in row.items()}


def overview(summary, policies, sources, training):
    """All that the page shows above its dialogues."""
    results = summary.results
    episodes = {name: [episode for run in runs for episode in run]
                for name, runs in policies.items()}
    charts = []
    if results:
        charts += result_charts(results, episodes)
    charts += critic_charts(episodes, training)
    for run in training:
        charts += training_charts(run)
    starts = {run.flags.get("model") for run in training}
    return {
        "sentences": summary.sentences,
        "subtitle": subtitle(results) if results else "training only, no episodes",
        "policies": [policy_facts(name, episodes[name], sources[name], starts)
                     for name in policies],
        "runs": [{"name": run.name, "what": training_method(run.flags)} for run in training],
        "charts": charts,
        "pairs": [example for run in training for example in example_pairs(run)],
        "tables": [table._asdict() for table in summary.tables],
    }


def subtitle(results):
    counts = [policy["episodes"] for policy in results["policies"].values()]
    over = "tasks"
    if any(policy["seeds"] > 1 for policy in results["policies"].values()):
        over = "seeds and tasks"
    tasks = counted(results["tasks"], "task")
    if results["unsolvable"]:
        tasks += f", {results['unsolvable']:,} of them unsolvable by their own solution"
    return (f"{results['domain']} · {tasks} · {counted(sum(counts), 'episode')} ·"
            f" [ ]: 95 % intervals over {over}, {results['draws']:,} bootstrap draws,"
            " Wilson's where all outcomes agree")


# -----------------------------------------------------------------------------
# What was run


def read_training(files):
    """The training runs of (name, path) of metrics. One that still writes may end in half a line.
    """
    training = []
    for name, path in files:
        if not Path(path).is_file():
            raise SystemExit(f"{path}: no such file; expected the metrics.jsonl of a training run,"
                             " which has one from its first step on")
        folder = Path(path).parent
        rows = list(ResumableJsonl.whole_rows(path))
        if not all(isinstance(row.get("step"), int) for row in rows):
            raise SystemExit(f"{path}: found a line without a step, expected the metrics.jsonl of a"
                             " training run; give episodes as --episodes")
        training.append(Training(name, folder, flags_of(folder / "run.json"), rows))
    return training


def flags_of(path):
    """The flags in a run's record, none where there is no record."""
    return read_run(path)["flags"] if Path(path).is_file() else {}


def training_method(flags):
    """One clause on what a checkpoint is, from the flags that trained it."""
    if "method" in flags:
        return f"{METHODS.get(flags['method'], flags['method'])}, from {short_name(flags['model'])}"
    if "head" in flags:
        head = HEADS.get(flags["head"], flags["head"])
        sight = " that sees the solution" if flags["privileged"] == "ground_truth" else ""
        return f"{head}{sight}, from {short_name(flags['model'])}"
    return ""


def short_name(model):
    """A model's name in a sentence: of a path its last part, as other machines lack the rest."""
    is_path = model.startswith((".", "/")) or model.count("/") > 1
    return Path(model).name if is_path and "://" not in model else model


def from_here(path):
    """A path below the folder that the command was given in, without that folder."""
    if Path(path).is_relative_to(Path.cwd()):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def training_sentences(training):
    """How far each run is, for a report without episodes; smoothed, as its curves are."""
    sentences = []
    for run in training:
        parts = [f"step {run.last['step']}" if run.rows else "no step yet"]
        for curve in training_charts(run):
            if not curve["folded"]:
                _, value = curve["lines"][0]["points"][-1]
                parts.append(f"{curve['title'].lower()} {value:.3g} {curve['y']['title']}")
        sentences.append(f"{run.name}: {', '.join(parts)}.")
    return sentences


def policy_facts(name, episodes, files, starts):
    """What a policy is, in a clause, and how it was played: (label, text) pairs.

    starts: the models that the training runs of the report start from.
    """
    first = episodes[0]
    run, flags = {}, {}
    record = Path(f"{files[0]}.run.json")
    if record.is_file():
        run = read_run(record)
        flags = run["flags"]
    agent = str(first.get("agent") or flags.get("agent") or "unknown")
    trained = flags_of(Path(agent) / "run.json")
    if agent in starts:
        what = [f"{short_name(agent)}, the model that training starts from"]
    else:
        what = [training_method(trained) or f"the model {short_name(agent)}"]
    if flags.get("max_turns", MAX_TURNS) != MAX_TURNS:
        what.append("in one turn" if flags["max_turns"] == 1
                    else f"at most {flags['max_turns']} turns")
    if (first.get("best_of_n") or 1) > 1:
        what.append(f"each turn the best of {first['best_of_n']} candidates, chosen by"
                    f" {first.get('scorer')}")
    finished = time.strftime("%Y-%m-%d", time.gmtime(Path(files[0]).stat().st_mtime))
    facts = {
        "Model": from_here(agent), "Tasks": flags.get("tasks"), "Human": first.get("human"),
        "Judge": flags.get("judge"),
        "Last played": finished, "Commit": run.get("commit"),
        "Versions": ", ".join(f"{key} {value}" for key, value in run.get("versions", {}).items()),
        "Files": ", ".join(map(from_here, files)),
        "Played by": command_of(run.get("script", ""), flags),
        "Trained by": command_of("train_policy.py", trained),
    }
    return {"name": name, "what": "; ".join(what),
            "facts": [[label, text] for label, text in facts.items() if text]}


def command_of(script, flags):
    """The command that these flags come from, without those that are off."""
    words = []
    for flag, value in flags.items():
        if value is None or value is False or value == []:
            continue
        words.append(f"--{flag}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return shlex.join([script, *words]) if words else ""


# -----------------------------------------------------------------------------
# Charts, as the titles, units and numbers that evaluate.html draws


def chart(section, kind, title, **content):
    return {"section": section, "kind": kind, "title": title} | content


def result_charts(results, episodes):
    metric = main_metric(results)
    text, factor = heading(metric, results)
    numbers = {name: policy["numbers"][metric] for name, policy in results["policies"].items()
               if policy["numbers"][metric]}
    bars = [{"name": name} | {key: factor * value for key, value in number.items()}
            for name, number in numbers.items()]
    charts = []
    if bars:
        charts.append(chart("results", "bars", f"{text}, with 95 % intervals", rows=bars))
    charts += turn_charts(episodes)
    charts.append(stack("How episodes end, %", "episodes", ENDINGS,
                        {name: [ending(episode) for episode in found]
                         for name, found in episodes.items()}))
    sound = {name: [episode for episode in found if not episode["error"]]
             for name, found in episodes.items()}
    charts += requirement_chart(sound)
    charts += turn_limit_chart(sound, metric)
    charts += best_of_n_chart(results["policies"], numbers, text)
    return charts


def stack(title, unit, parts, names):
    """Bars of shares that add up to 100 %; names: policy -> the part that each of its things is."""
    counts = {name: Counter(found) for name, found in names.items() if found}
    shown = [part for part in parts if any(count[part] for count in counts.values())]
    rows = [{"name": name, "counts": [count[part] for part in shown]}
            for name, count in counts.items()]
    return chart("results", "stack", title, unit=unit, parts=shown, rows=rows)


def ending(episode):
    """How an episode ends: one of ENDINGS. Only the embedded world knows an early answer."""
    if episode["error"]:
        return "error"
    if episode["success"]:
        return "solved"
    if SOLUTION_FAILED in episode["reasons"].values():  # whatever the answer is
        return SOLUTION_FAILED
    if lacks_answer(episode):  # the last page counts all the same, a question does not
        return "out of turns" if episode["success"] is None else "no answer"
    if episode["dialogue_history"][-1].get("finished") is False:
        return "cut"
    if episode["success"] is None:
        return "answered"
    credits = episode.get("credits")
    return "early answer" if credits and credits[-1] == "early answer" else "wrong answer"


def turn_charts(episodes):
    """What the turns are; where that is not known, the critic's advantage by turn."""
    kinds = {name: [kind for episode in found for kind in episode.get("credits") or []]
             for name, found in episodes.items()}
    if any(kinds.values()):
        return [stack("What the turns are, %", "turns", TURNS, kinds)]
    lines = []
    for name, found in episodes.items():
        by_turn = defaultdict(list)
        for episode in found:
            for turn, advantage in enumerate(finite(episode.get("advantages")), 1):
                if advantage is not None:
                    by_turn[turn].append(advantage)
        points = [rounded([turn, numpy.mean(values)]) for turn, values in sorted(by_turn.items())]
        if points:
            lines.append({"name": name, "points": points})
    if not lines:
        return []
    return [chart("results", "lines", "Critic's advantage by turn", lines=lines,
                  x={"title": "turn", "whole": True}, y={"title": "mean advantage"})]


def share_point(x, shares):
    """[x, %, low, high] of the tasks' shares between 0 and 1, with Wilson's interval."""
    share = numpy.mean(shares)
    return rounded([x, *(100 * value for value in (share, *wilson(share, len(shares))))])


def rounded(values):
    return [float(f"{value:.5g}") for value in values]


def requirement_chart(episodes):
    """Success by the number of details that a task of the embedded world needs."""
    lines = []
    for name, found in episodes.items():
        tasks = defaultdict(list)
        for episode in found:
            if has_toy_credit(episode["task"]):
                needed = len(episode["task"]["toy"]["needed"])
                tasks[needed, episode["task"]["task_id"]].append(episode["success"])
        groups = defaultdict(list)
        for (needed, _), outcomes in tasks.items():
            groups[needed].append(numpy.mean(outcomes))
        if groups:
            points = [share_point(needed, shares) for needed, shares in sorted(groups.items())]
            lines.append({"name": name, "points": points})
    if not lines:
        return []
    x = {"title": "details that the task needs", "whole": True}
    return [chart("results", "lines", "Success by number of requirements", lines=lines, x=x,
                  y={"title": "% of tasks solved", "least": 0, "most": 100})]


def turn_limit_chart(episodes, metric):
    """How many episodes are solved (pages: have ended) after each number of turns."""
    last = max((episode["turns"] for found in episodes.values() for episode in found), default=0)
    title = "Solved within so many turns" if metric == "success" else "Ended within so many turns"
    lines = []
    for name, found in episodes.items():
        ends = [episode["turns"] for episode in found if episode["success"] in (True, None)]
        points = [rounded([turn, 100 * sum(end <= turn for end in ends) / len(found)])
                  for turn in range(1, last + 1) if found]
        if points:
            lines.append({"name": name, "points": points})
    if last < 2:
        return []
    return [chart("results", "lines", title, lines=lines, x={"title": "turns", "whole": True},
                  y={"title": "% of episodes", "least": 0, "most": 100})]


def best_of_n_chart(policies, numbers, text):
    """The main number by N, a line for each agent and scorer."""
    curves = defaultdict(list)
    for name, number in numbers.items():
        count, agent = policies[name]["best_of_n"], policies[name]["agent"]
        if count:
            percents = [100 * number[key] for key in ("value", "low", "high")]
            curves[agent, policies[name]["scorer"] or name].append(rounded([count, *percents]))
    if not curves:
        return []
    several = len({agent for agent, _ in curves}) > 1
    lines = [{"name": f"{agent}, {scorer}" if several else scorer, "points": sorted(points)}
             for (agent, scorer), points in curves.items()]
    counts = sorted({point[0] for line in lines for point in line["points"]})
    x = {"title": "candidates (N), logarithmic", "log": True, "values": counts}
    return [chart("results", "lines", f"{text} by number of candidates", lines=lines, x=x,
                  y={"title": text})]


AUC_ROWS = {
    "all": "any two candidates",
    "question_question": "two questions",
    "answer_answer": "two answers",
    "answer_question_known": "answer or question, all is known",
    "answer_question_unknown": "answer or question, something is unknown",
}


def critic_charts(episodes, training):
    charts = [critic_chart(run) for run in training] + [calibration_chart(episodes)]
    return [found for found in charts if found]


def critic_chart(run):
    """How often a critic is right on held-out tasks; None of a run that trained no critic."""
    last, rows = run.last, []
    if "holdout/accuracy" in last:
        # without an interval, as the pairs of a task are not independent
        rows.append({"name": f"held-out pairs of dialogues ({last['holdout/pairs']})",
                     "value": 100 * last["holdout/accuracy"]})
    for kind, name in AUC_ROWS.items():
        if f"credit_auc/{kind}" in last:
            rows.append({"name": f"AUC, {name}", "value": 100 * last[f"credit_auc/{kind}"]})
    if not rows:
        return None
    return chart("critic", "bars", f"{run.name}: the better one ranked higher, %", rows=rows,
                 guide=50, run=run.name)


def calibration_chart(episodes):
    """Share of truly helpful turns in groups of equal advantage; None without true credit."""
    scored = []  # (advantage, whether the turn truly helps)
    for found in episodes.values():
        for episode in found:
            advantages, kinds = finite(episode.get("advantages")), episode.get("credits") or []
            if len(advantages) == len(kinds):
                scored += [(advantage, kind in HELPFUL_TURNS)
                           for advantage, kind in zip(advantages, kinds, strict=True)
                           if advantage is not None]
    bins = min(10, len(scored) // 20)
    if bins < 2:
        return None
    groups = numpy.array_split(numpy.array(sorted(scored), float), bins)
    # without intervals, as the turns of a dialogue are not independent
    points = [rounded([group[:, 0].mean(), 100 * group[:, 1].mean()]) for group in groups]
    return chart("critic", "lines", "Advantage against true credit",
                 lines=[{"name": f"{len(scored):,} turns of all policies", "points": points}],
                 x={"title": f"critic's advantage, mean of each of {bins} equal groups"},
                 y={"title": "% that truly help", "least": 0, "most": 100})


CURVES = {  # metric -> title, unit, factor
    "train/loss": ("Loss", "nats", 1),
    "train/accuracy": ("Training pairs ranked right", "%", 100),
    "train/margin": ("Margin of chosen over rejected", "nats", 1),
    "train/nll": ("Negative log-likelihood of the chosen side", "nats a token", 1),
    "train/chosen_reward": ("Implicit reward of the chosen side", "nats", 1),
    "holdout/accuracy": ("Held-out pairs ranked right", "%", 100),
    "holdout/loss": ("Held-out loss", "nats", 1),
}
DRAWN_CURVES = ("train/loss", "train/accuracy", "train/margin")  # the others fold out


def training_charts(run):
    """A chart for each metric of a run, smoothed; a small last batch weighs as little as it is."""
    series = defaultdict(list)
    for index, row in enumerate(run.rows):
        for key, value in row.items():
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if key.startswith(("train/", "holdout/")) and is_number:
                series[key].append((row.get("step", index), value, row.get("data/tokens", 1)))
    charts = []
    keys = [*CURVES, *sorted(series.keys() - CURVES.keys())]
    for key in keys:
        if len(series[key]) <= 3:  # two points of a hold-out are no curve
            continue
        title, unit, factor = CURVES.get(key, (key, "", 1))
        points, window = smoothed(series[key])
        points = [rounded([step, factor * value]) for step, value in points]
        charts.append(chart(
            "training", "lines", title, lines=[{"name": run.name, "points": points}],
            x={"title": "step" + (f", mean of {window} steps" if window > 1 else "")},
            y={"title": unit}, run=run.name, folded=key not in DRAWN_CURVES))
    return charts


def smoothed(series):
    """(points (step, value), steps in a window): weighted means of windows around each step.

    A window spans a twentieth of the steps. At most 200 points remain.
    """
    steps, values, weights = numpy.array(series, float).T
    half = max(1, len(steps) // 40) if len(steps) >= 10 else 0
    window = numpy.ones(2 * half + 1)
    means = (numpy.convolve(values * weights, window, "same")
             / numpy.convolve(weights, window, "same"))
    kept = numpy.unique(numpy.linspace(0, len(steps) - 1, 200).round().astype(int))
    return list(zip(steps[kept], means[kept], strict=True)), len(window)


def example_pairs(run):
    """Three of the pairs that a policy learnt from, by the difference of their advantages."""
    path = run.folder / "candidates.jsonl"
    flags = {name: run.flags.get(name) for name in PairSettings._fields}
    if None in flags.values() or not path.is_file():
        return []
    settings = PairSettings(**flags)
    pairs = []
    for state in read_candidates(path)[0]:
        advantages = state["advantages"]
        for chosen, rejected in pairs_of_state(state, settings):
            pairs.append((advantages[chosen] - advantages[rejected], chosen, rejected, state))
    if not pairs:
        return []
    pairs.sort(key=lambda pair: pair[0], reverse=True)
    examples = []
    for which, share in (("A wide", 0.1), ("The median", 0.5), ("A narrow", 0.9)):
        difference, *sides, state = pairs[int(share * (len(pairs) - 1))]
        chosen, rejected = ({"text": state["candidates"][side],
                             "advantage": state["advantages"][side]} for side in sides)
        examples.append({
            "run": run.name, "title": f"{which} difference, {difference:.3f}",
            "where": f"{state['task_id']}, turn {state['turn'] + 1}, one of {len(pairs):,} pairs",
            "before": state["messages"], "chosen": chosen, "rejected": rejected})
    return examples


# -----------------------------------------------------------------------------
# Episodes


def annotate(policies, critic):
    """Add what the report shows besides text: advantages, true credit in the toy, screenshots."""
    runs = [run for policy in policies.values() for run in policy]
    episodes = [episode for run in runs for episode in run if not episode["error"]]
    if critic:
        for episode in tqdm(episodes, unit="episode", desc="advantages"):
            episode["advantages"] = critic.advantages_of_dialogue(episode)
    for episode in episodes:
        if has_toy_credit(episode["task"]):
            episode["credits"] = true_credits(episode)
    if episodes and DOMAINS[episodes[0]["task"]["domain"]].pages:
        with Browser() as browser:
            add_screenshots(episodes, browser)


def true_credits(episode):
    """The kind of each agent turn, as the toy world knows it."""
    task, history = episode["task"], episode["dialogue_history"]
    kinds = []
    for turn in range(episode["turns"]):
        credit = toy_credit(task, history, turn, episode["success"], episode["turns"])
        kinds.append(credit.kind)
    if lacks_answer(episode):  # toy_credit takes whatever stands on the last turn for an answer
        kinds[-1] = LAST_QUESTION
    return kinds


def add_screenshots(episodes, browser):
    @functools.cache  # many episodes share a solution page
    def draw(html):
        return thumbnail(browser.picture(html)) if html else None

    for episode in episodes:
        pages = {
            "screenshot": graded_page(episode["answer"], episode["dialogue_history"]),
            "solution_screenshot": solution_page(episode["task"]["ground_truth"]),
        }
        for key, html in pages.items():
            picture = draw(html)
            if picture:
                episode[key] = picture


def thumbnail(png, width=360):
    """A small copy of a screenshot in base64; None for a page that could not be drawn."""
    if png is None:
        return None
    image = open_picture(png)
    image.thumbnail((width, 3 * width))
    small = io.BytesIO()
    image.save(small, "PNG")
    return base64.b64encode(small.getvalue()).decode()


def as_json(value):
    """JSON for a <script> element: without `<`, no text in it can begin or end a tag."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def finite(values):
    """The values with None for each NaN and infinity, which JSON does not have."""
    if values is None:
        return []
    return [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]


def with_indent(text, output):
    """Text that was cut out of `output` and stripped, with the indent of its first line again."""
    if not text:
        return text
    before, found, _ = output.partition(text)
    line = before.rpartition("\n")[2]
    return line + text if found and line.isspace() and "\n" in text else text


def episode_record(name, seed_index, episode, leak_threshold):
    """One episode as the page reads it; what belongs to its task is stored once, separately."""
    task_id = episode["task"]["task_id"]
    sample = str(episode["sample"])
    if seed_index > 0:
        sample += f", seed {seed_index}"
    dialogue, output = [], ""
    for turn in episode["dialogue_history"]:
        record = {key: turn[key] for key in ("role", "content", "finished") if key in turn}
        output = turn.get("output") or turn["content"]
        if output.strip() != turn["content"].strip():
            record["output"] = output
        record["content"] = with_indent(turn["content"], output)
        dialogue.append(record)
    return {
        "id": f"{name}/{task_id}/{sample}", "policy": name, "sample": sample,
        "outcome": ending(episode), "error": episode["error"], "turns": episode["turns"],
        "reward": None if episode["error"] else episode["reward"], "reasons": episode["reasons"],
        "leak": episode["leak"], "leaking": (episode["leak"] or 0.0) >= leak_threshold,
        "answer": with_indent(episode["answer"], output), "dialogue": dialogue,
        "advantages": finite(episode.get("advantages")),
        "credits": finite(episode.get("credits")),
    }


def task_records(policies, leak_threshold):
    """(tasks with the episodes of all policies, distinct screenshots that these point to)."""
    tasks, pictures = {}, {}

    def index_of(picture):
        return pictures.setdefault(picture, len(pictures)) if picture else None

    for name, runs in policies.items():
        for seed_index, run in enumerate(runs):
            for episode in run:
                task_id = episode["task"]["task_id"]
                task = tasks.setdefault(task_id, {
                    "id": task_id, "request": episode["task"]["problem_description"],
                    "solution": episode["task"]["ground_truth"],
                    "tests": episode["task"].get("test_cases") or {}, "picture": None,
                    "episodes": [],
                })
                record = episode_record(name, seed_index, episode, leak_threshold)
                record["picture"] = index_of(episode.get("screenshot"))
                task["episodes"].append(record)
                if task["picture"] is None:
                    task["picture"] = index_of(episode.get("solution_screenshot"))
    return list(tasks.values()), list(pictures)


def packed_episodes(policies, leak_threshold, room):
    """All that the browser of dialogues shows, compressed, in at most `room` characters.

    When room runs out, screenshots are omitted first, then whole tasks.
    """
    tasks, pictures = task_records(policies, leak_threshold)
    sizes = sorted(abs(value) for task in tasks for record in task["episodes"]
                   for value in record["advantages"] if value is not None)
    # The strongest shade: the 95th percentile, so that one outlier does not pale all other turns.
    scale = sizes[int(0.95 * (len(sizes) - 1))] if sizes else 0.0
    data = {"tasks": tasks, "pictures": pictures, "scale": scale or 1.0}
    while True:
        data["omitted"] = {
            "episodes": sum(len(task["episodes"]) for task in tasks[len(data["tasks"]):]),
            "screenshots": len(pictures) - len(data["pictures"]),
        }
        packed = base64.b64encode(zlib.compress(json.dumps(data, allow_nan=False).encode()))
        if len(packed) <= room or not data["tasks"]:
            return packed.decode()
        largest = "pictures" if data["pictures"] else "tasks"
        kept = int(len(data[largest]) * 0.95 * room / len(packed))
        data[largest] = data[largest][:max(0, kept)]


def filled_page(data, episodes):
    """evaluate.html with its data and a Content-Security-Policy.

    The policy allows the page's style and script, by hash, its embedded pictures, and nothing else.
    """
    page = PAGE.read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    policy = (f"default-src 'none'; script-src '{sha256(script)}'; style-src '{sha256(style)}';"
              " img-src data:; base-uri 'none'; form-action 'none'")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace("<!-- Content-Security-Policy -->", meta)
    page = page.replace(EMPTY_EPISODES, EMPTY_EPISODES.replace("><", f">{episodes}<"))
    return page.replace(EMPTY_DATA, EMPTY_DATA.replace("{}", as_json(data)))


def sha256(text):
    """The hash of an inline style or script, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
