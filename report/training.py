"""Training runs: what they are, from their run.json, and how far they are."""

import os
import typing
from pathlib import Path

from formats.read import group_by_task, load_episodes
from report.charts import training_curves
from runtime.files import read_jsonl
from runtime.record import file_hash, path_from, read_run
from train_critic import split_tasks


class Training(typing.NamedTuple):
    """A training run: its metrics.jsonl, and what its run.json says."""

    name: str
    script: str  # "" where there is no record
    flags: dict
    rows: list

    @property
    def last(self):
        """The last value of each metric."""
        return {key: value for row in self.rows for key, value in row.items()}


def read_training(name, path):
    """The run whose metrics these are. One that still writes may end in half a line."""
    rows = [row for _, row in read_jsonl(path)]
    if not all(isinstance(row.get("step"), int) for row in rows):
        raise SystemExit(f"{path}: found a line without a step, expected the metrics.jsonl of a"
                         " training run; give episodes without --metrics")
    return Training(name, *record_of(Path(path).with_name("run.json")), rows)


def record_of(path):
    """(script, flags) of a run's record; neither where there is no record."""
    if not os.path.isfile(path):  # unlike Path.is_file, it takes a name of any length
        return "", {}
    try:
        run = read_run(path)
    except SystemExit:  # another program's file, beside a model of its own
        return "", {}
    return Path(run.get("script", "")).name, run["flags"]


def held_out_tasks(critic):
    """The ids of the tasks in a critic's episodes that it was not trained on."""
    run = read_run(Path(critic, "run.json"))
    flags, paths = run["flags"], []
    for name in flags["episodes"]:
        path = path_from(run, name)
        if not Path(path).is_file() or file_hash(path) != run["inputs"].get(name):
            return set()  # moved or changed since
        paths.append(path)
    tasks = group_by_task(load_episodes(paths)[0])
    return set(split_tasks(tasks, flags["holdout"], flags["seed"])[1])


def training_method(script, flags):
    """A clause on what a checkpoint is; "" where its record does not say."""
    if script == "train_critic.py":
        what = "log-ratio critic"
    elif script == "value_critic.py":
        what = "critic with a value head"
    elif script == "train_policy.py" and flags.get("candidates"):
        what = "SWEET-RL, trained on candidates that a critic ranked"
    elif script == "train_policy.py":
        what = "multi-turn DPO on pairs of whole dialogues"
    elif script == "sft.py" and flags.get("successes"):
        what = "rejection fine-tuning on solved dialogues"
    elif script == "sft.py":
        what = "supervised fine-tuning on dialogues"
    else:
        return ""
    if flags.get("privileged") == "ground_truth":
        what += " that sees the solution"
    return f"{what}, from {short_name(flags['model'])}" if flags.get("model") else what


def method_among(run, training):
    """What a run's checkpoint is, with the flags in which it differs from others of its method."""
    what = training_method(run.script, run.flags)
    if not what:
        return ""
    alike = [other for other in training if training_method(other.script, other.flags) == what]
    for name, value in run.flags.items():
        given = value is not None and value is not False
        if given and any(other.flags.get(name) != value for other in alike):
            values = value if isinstance(value, list) else [value]
            what += ", " + " ".join([f"--{name}", *(f"{one}" for one in values if one is not True)])
    return what


def short_name(model):
    """A model's name in a sentence: of a path its last part, as other machines lack the rest."""
    is_path = model.startswith((".", "/")) or model.count("/") > 1
    return Path(model).name if is_path and "://" not in model else model


FEW_PAIRS = 50  # of which even guessing can rank 64 % right


def ranking_sentences(training):
    """How well critics rank the pairs that they were not trained on."""
    for run in training:
        if "holdout/accuracy" in run.last:
            pairs = run.last.get("holdout/pairs", 0)
            sentence = (f"{run.name} ranks {100 * run.last['holdout/accuracy']:.0f} % of"
                        f" {pairs:.0f} held-out pairs of dialogues right (guessing: 50 %).")
            if pairs < FEW_PAIRS:
                sentence += " So few pairs tell little."
            yield sentence


def training_sentences(training):
    """How far each run is, for a page without episodes; smoothed, as its curves are."""
    for run in training:
        parts = [f"step {run.last['step']}" if run.rows else "no step yet"]
        for curve in training_curves(run):
            if not curve["folded"]:
                _, value = curve["points"][-1]
                parts.append(f"{curve['title'].lower()} {value:.3g} {curve['y']}")
        yield f"{run.name}: {', '.join(parts)}."
