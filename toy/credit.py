"""True credit: in the embedded backend world, the worth of every agent turn is known.

    python -m toy.credit rank candidates.jsonl --output true.ranked.jsonl
    python -m toy.credit auc critic/ranked.jsonl --metrics critic/metrics.jsonl

`rank` gives each candidate its true credit as its advantage. A policy trained on the file shows
what a perfect ranking gives, with --pairing halves alone: true credit is never below 0. With
--ranker random, the advantages are drawn at random.

`auc` compares the advantages of any ranker with the truth: how often the truly better of two
candidates of a state has the greater one, and how many of the pairs that the halves rule draws from
them prefer the truly better candidate.

Reads: candidates (collect.py --states), or ranked ones. Writes: ranked candidates; `auc` adds a
line to --metrics, the log of a critic's training.
"""

import argparse
import random
import typing
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from colbench import MAX_TURNS, request_index, split_message, without_thoughts
from formats.read import read_candidates, state_key
from judge.sandbox import grade
from runtime.files import read_jsonl, write_jsonl, write_new
from runtime.processes import join_processes
from runtime.seeds import derive_seed
from toy.backend import asked_about


class ToyCredit(typing.NamedTuple):
    """The true credit of one agent turn."""

    # "right answer", "useful question", "wasted question", "repeated question", "early answer"
    # or "wrong answer"
    kind: str
    value: float  # of two turns from the same state, the better one has the greater value


def details_asked(messages):
    """What the agent has asked about, its thoughts not included."""
    return {asked_about(without_thoughts(message["content"]) or "") for message in messages
            if message["role"] == "assistant"}


def has_toy_credit(task):
    """Whether the task is one of the embedded backend world, whose true credit is known."""
    return isinstance(task.get("toy"), dict) and "needed" in task["toy"]


def toy_credit(task, history, turn, right=None, max_turns=MAX_TURNS):
    """The true credit of agent turn `turn`, given everything before it; supposes an honest human.

    `history` is the dialogue without a system message. `right` says whether an answer is right,
    where that is known; otherwise the judge grades it.
    """
    asked = details_asked(history[:2 * turn])
    unknown = set(task["toy"]["needed"]) - asked
    last_turn = turn == max_turns - 1
    content, answer = split_message(task, history[2 * turn + 1]["content"], last_turn)
    if answer is not None:
        if right is None:
            # the tests call `label`: a question on the last turn needs no judge
            right = "label" in answer and (
                answer == task["ground_truth"] or grade(task, answer).success)
        if right:
            return ToyCredit("right answer", 1.0)
        return ToyCredit("early answer" if unknown else "wrong answer", 0.0)
    detail = asked_about(content)
    if detail in unknown:
        return ToyCredit("useful question", 0.6)
    return ToyCredit("repeated question" if detail in asked else "wasted question", 0.3)


# -----------------------------------------------------------------------------
# Of candidates


def credits_of(states):
    """For each state, a list of its candidates' ToyCredits; the judge works beside this process."""
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(credits_of_state, states)
        return list(join_processes().watch(found, "state", "true credit", total=len(states)))


def credits_of_state(state):
    """The ToyCredit of each candidate of a state; equal texts are graded once."""
    task, messages = state["task"], state["messages"]
    history = messages[request_index(messages):]
    max_turns = state.get("max_turns") or MAX_TURNS
    credit_of = {}  # text -> its ToyCredit
    for text in dict.fromkeys(state["candidates"]):
        dialogue = history + [{"role": "assistant", "content": text}]
        credit_of[text] = toy_credit(task, dialogue, state["turn"], max_turns=max_turns)
    return [credit_of[text] for text in state["candidates"]]


def random_advantages(state, seed):
    draw = random.Random(derive_seed(seed, "random advantages", *state_key(state)))
    return [draw.uniform(-1, 1) for _ in state["candidates"]]


# -----------------------------------------------------------------------------
# How well a ranker's advantages agree with true credit

KINDS = ("all", "question_question", "answer_answer", "answer_question_known",
         "answer_question_unknown")


def credit_pairs(credits, known):
    """Yield (kind, better index, worse index) for each two candidates whose true credit differs.

    `credits` are those of the candidates of one state; `known` says whether everything that the
    task needs has been asked for in that state.
    """
    for better, first in enumerate(credits):
        for worse, second in enumerate(credits):
            if first.value <= second.value:
                continue
            answers = [credit.kind.endswith("answer") for credit in (first, second)]
            if all(answers):
                kind = "answer_answer"
            elif not any(answers):
                kind = "question_question"
            elif known:
                kind = "answer_question_known"
            else:
                kind = "answer_question_unknown"
            yield kind, better, worse


def credit_auc(states, credits_of_states):
    """{"credit_auc/KIND": AUC} for the kinds that occur: how often the truly better of two
    candidates of a state has the greater advantage.

    `credits_of_states` is what `credits_of` returns. Ties count half; equal texts are one
    candidate.
    """
    hits = {kind: [] for kind in KINDS}
    for state, credits in zip(states, credits_of_states, strict=True):
        texts = state["candidates"]
        distinct = [index for index, text in enumerate(texts) if texts.index(text) == index]
        advantages = [state["advantages"][index] for index in distinct]
        of_distinct = [credits[index] for index in distinct]
        known = details_asked(state["messages"]).issuperset(state["task"]["toy"]["needed"])
        for kind, better, worse in credit_pairs(of_distinct, known):
            if advantages[better] > advantages[worse]:
                hit = 1.0
            elif advantages[better] == advantages[worse]:
                hit = 0.5
            else:
                hit = 0.0
            hits[kind].append(hit)
            hits["all"].append(hit)
    return {f"credit_auc/{kind}": sum(found) / len(found) for kind, found in hits.items() if found}


def halves_shares(states, credits_of_states):
    """{"halves/right": share, ...} of the pairs that train_policy.py draws by its defaults.

    A pair is right if its chosen candidate is truly better, equal if both have the same credit.
    """
    from train_policy import state_pairs  # late: toy/ stands below the scripts

    counts = Counter()
    for state, credits in zip(states, credits_of_states, strict=True):
        for chosen, rejected in state_pairs(state, "halves", pairs_per_state=4, seed=0):
            chosen_value, rejected_value = credits[chosen].value, credits[rejected].value
            if chosen_value > rejected_value:
                counts["right"] += 1
            elif chosen_value == rejected_value:
                counts["equal"] += 1
            else:
                counts["wrong"] += 1
    if not counts:
        return {}
    return {f"halves/{kind}": counts[kind] / counts.total() for kind in ("right", "equal", "wrong")}


# -----------------------------------------------------------------------------
# Commands


def rank_command(args):
    """Write the candidates with true or random advantages."""
    states, omitted = read_candidates(args.candidates)
    if args.ranker == "random":
        advantages, ranker = [random_advantages(state, args.seed) for state in states], "random"
    else:
        if args.seed:
            raise SystemExit(f"found --seed {args.seed}, which is ignored by true credit; expected"
                             " it to be omitted")
        check_world(states, args.candidates)
        advantages = [[credit.value for credit in credits] for credits in credits_of(states)]
        ranker = "true credit"
    rows = [state | {"advantages": values, "ranker": ranker}
            for state, values in zip(states, advantages, strict=True)]
    write_new(args.output, rows)
    print(f"{args.output}: {len(rows)} states, ranked by {ranker}; {omitted} failed ones omitted")


def auc_command(args):
    """Print how true a ranker's advantages are, and add that to a log, such as its training's."""
    states, _ = read_candidates(args.candidates, ranked=True)
    check_world(states, args.candidates)
    lines = []  # rankers that were not trained have no log
    if args.metrics and Path(args.metrics).exists():
        lines = [line for _, line in read_jsonl(args.metrics)]
    if not all(isinstance(line.get("step"), int) for line in lines):
        raise SystemExit(f"{args.metrics}: found a line without a step, expected the metrics.jsonl"
                         " of a training run")
    credits_of_states = credits_of(states)
    found = credit_auc(states, credits_of_states) | halves_shares(states, credits_of_states)
    for name, value in found.items():
        print(f"{name:40s} {value:.4f}")
    if args.metrics:
        lines = [line for line in lines if not found.keys() & line.keys()]  # of an earlier ranking
        lines.append({"step": lines[-1]["step"] + 1 if lines else 0} | found)
        write_jsonl(args.metrics, lines)


def check_world(states, path):
    """Refuse states whose true credit nobody knows."""
    for state in states:
        if not has_toy_credit(state["task"]):
            raise SystemExit(f"{path}: found the task {state['task']['task_id']!r}, expected tasks"
                             " of the embedded backend world, toy:backend:train, whose true credit"
                             " is known")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    rank = commands.add_parser("rank", help="rank candidates by true credit, or at random")
    rank.add_argument("candidates", help="CANDIDATES.jsonl of collect.py --states")
    rank.add_argument("--output", required=True, help="RANKED.jsonl to write")
    rank.add_argument("--ranker", choices=("credit", "random"), default="credit",
                      help="what gives the advantages")
    rank.add_argument("--seed", type=int, default=0, help="of random advantages")
    rank.set_defaults(command=rank_command)
    auc = commands.add_parser("auc", help="compare ranked candidates with true credit")
    auc.add_argument("candidates", help="RANKED.jsonl of any ranker")
    auc.add_argument("--metrics", help="metrics.jsonl to add the AUC to")
    auc.set_defaults(command=auc_command)
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
