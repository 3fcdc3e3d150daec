"""The embedded backend world is what it says, before anything is trained on it. Run: pytest tests/test_toy.py"""

import random
from collections import Counter, defaultdict

import pytest

import colbench
from colbench import (
    ANSWER_MARKER,
    MAX_TURNS,
    TOY_DETAILS,
    TOY_LIKELY,
    agent_messages,
    derive_seed,
    grade_all,
    read_tasks,
    split_message,
    toy_asked,
    toy_backend_demonstrator,
    toy_backend_human,
    toy_code,
    toy_credit,
)


@pytest.fixture(scope="module")
def tasks():
    return read_tasks("toy:backend:test", 120)


def go_on(task, agent, history, seed=0):
    """The history of a dialogue that `agent(task, messages, draw)` carries on from `history` to its end."""
    history = list(history)
    while True:
        turn = len(history) // 2
        text = agent(task, agent_messages(task, history, ""), random.Random(derive_seed(seed, task["task_id"], turn)))
        content, answer = split_message(task, text, turn == MAX_TURNS - 1)
        history.append({"role": "assistant", "content": content})
        if answer is not None:
            return history, answer
        history.append({"role": "user", "content": toy_backend_human(task, history)})


def play(task, agent, seed=0):
    return go_on(task, agent, [{"role": "user", "content": task["problem_description"]}], seed)


def told(task, messages):
    """The details asked so far, and the function that the replies to them describe."""
    asked = [toy_asked(m["content"]) for m in messages if m["role"] == "assistant"]
    needed = task["toy"]["needed"]
    return asked, toy_code(tuple((d, needed[d]) for d in TOY_DETAILS if d in asked and d in needed))


def asks_first(order):
    """An agent that asks for the details of `order(task)` and then answers with what it was told."""

    def agent(task, messages, draw):
        asked, code = told(task, messages)
        left = [detail for detail in order(task) if detail not in asked]
        return f"What about the {left[0]}?" if left and len(asked) < MAX_TURNS - 1 else f"{ANSWER_MARKER}\n{code}"

    return agent


def demonstrator(task, messages, draw):
    return toy_backend_demonstrator(task, messages, draw, False)


def success(tasks, agent):
    return sum(grade.success for grade in grade_all(tasks, [play(task, agent)[1] for task in tasks])) / len(tasks)


def test_a_perfect_agent_succeeds_always_and_one_that_answers_at_once_hardly_ever(tasks):
    assert success(tasks, asks_first(lambda task: TOY_LIKELY[task["toy"]["topic"]])) == 1.0
    assert success(tasks, asks_first(lambda task: [])) < 0.02


def test_asking_everything_in_a_fixed_order_runs_out_of_turns(tasks):
    assert success(tasks, asks_first(lambda task: list(TOY_DETAILS))) < 0.3


def test_the_demonstrator_often_stops_early_and_often_runs_out_of_turns(tasks):
    early = late = right = 0
    for task in tasks:
        for seed in range(4):
            history, answer = play(task, demonstrator, seed)
            missing = set(task["toy"]["needed"]) - set(told(task, history)[0])
            marked = ANSWER_MARKER in history[-1]["content"]
            late, early = late + (not marked), early + (marked and bool(missing))
            right += answer == task["ground_truth"]
    total = 4 * len(tasks)
    assert 0.15 < right / total < 0.4 and early / total > 0.2 and late / total > 0.2


def test_train_valid_and_test_share_no_task_and_requirements_vary():
    splits = [read_tasks(f"toy:backend:{split}", 400) for split in ("train", "valid", "test")]
    contents = [{(task["problem_description"], task["ground_truth"]) for task in split} for split in splits]
    assert all(len(content) == 400 for content in contents) and not contents[0] & contents[1] | contents[0] & contents[2] \
        and not contents[1] & contents[2]
    assert set(Counter(len(task["toy"]["needed"]) for task in splits[0])) == {2, 3, 4, 5}
    assert read_tasks("toy:backend:train", 100) == splits[0][:100]  # the first tasks do not depend on how many are asked for


def test_every_requirement_matters_in_some_hidden_test(tasks):
    for task in tasks[:30]:
        needed = task["toy"]["needed"]
        partial = [toy_code(tuple((d, o) for d, o in needed.items() if d != left_out)) for left_out in needed]
        assert not any(grade.success for grade in grade_all([task] * len(partial), partial))


def test_the_request_reveals_no_requirement_and_the_human_tells_one_only_when_asked(tasks):
    task = tasks[0]
    detail = next(iter(task["toy"]["needed"]))
    phrase = TOY_DETAILS[detail][task["toy"]["needed"][detail]][0]
    other = next(d for d in TOY_DETAILS if d not in task["toy"]["needed"])
    assert phrase not in task["problem_description"]
    reply = {text: toy_backend_human(task, [{"role": "assistant", "content": text}])
             for text in (f"Which {detail}?", f"Which {other}?", "Hello?")}
    assert phrase in reply[f"Which {detail}?"] and reply[f"Which {other}?"] == "No wish there." and \
        reply["Hello?"] == "I do not know."


def test_toy_credit_names_each_kind_of_turn(tasks):
    task = next(task for task in tasks if len(task["toy"]["needed"]) == 2)
    first, second = task["toy"]["needed"]
    other = next(d for d in TOY_DETAILS if d not in task["toy"]["needed"])
    start = [{"role": "user", "content": task["problem_description"]}]

    def kind(history, text):
        return toy_credit(task, history + [{"role": "assistant", "content": text}], len(history) // 2).kind

    asked_first = start + [{"role": "assistant", "content": f"Tell me the {first}."}, {"role": "user", "content": "..."}]
    known = asked_first + [{"role": "assistant", "content": f"Tell me the {second}."}, {"role": "user", "content": "..."}]
    right = f"{ANSWER_MARKER}\n{task['ground_truth']}"
    assert kind(start, f"Tell me the {first}.") == "useful question" and kind(start, f"The {other}?") == "wasted question"
    assert kind(asked_first, f"The {first}?") == "repeated question"
    assert kind(asked_first, f"{ANSWER_MARKER} def label(text): return text") == "early answer"
    assert kind(known, right) == "right answer" and kind(known, f"{ANSWER_MARKER} x") == "wrong answer"
    question = {"role": "assistant", "content": f"Tell me the {first}."}
    assert toy_credit(task, start + [question], 0, max_turns=1).kind == "early answer"  # the last message is the answer


def test_toy_credit_orders_turns_as_the_returns_of_rollouts_do(tasks):
    """From a state on, the demonstrator succeeds more often after a turn of greater worth."""
    returns = defaultdict(list)  # (needed details unknown before the turn, turns left) are the same for what is compared
    for task in tasks[:60]:
        history, _ = play(task, demonstrator, 1)
        for turn in range(1, min(4, len(history) // 2)):
            before = history[:2 * turn + 1]
            asked = told(task, before)[0]
            unknown = [detail for detail in task["toy"]["needed"] if detail not in asked]
            wasted = next(d for d in TOY_DETAILS if d not in task["toy"]["needed"] and d not in asked)
            texts = [f"Tell me the {wasted}.", f"{ANSWER_MARKER}\n{told(task, before)[1]}"]
            texts += [f"Tell me the {detail}." for detail in unknown[:1]]
            for text in texts:
                after = before + [{"role": "assistant", "content": text}]
                worth = toy_credit(task, after, turn, right=not unknown).worth
                if ANSWER_MARKER in text:
                    outcomes = [not unknown]
                else:
                    after.append({"role": "user", "content": toy_backend_human(task, after)})
                    outcomes = [go_on(task, demonstrator, after, seed)[1] == task["ground_truth"] for seed in range(6)]
                returns[bool(unknown), worth].append(sum(outcomes) / len(outcomes))
    means = {key: sum(values) / len(values) for key, values in returns.items()}
    assert means[True, 0.6] > means[True, 0.3] + 0.03 > means[True, 0.0] == 0.0
    assert means[False, 1.0] == 1.0 > means[False, 0.3]


def test_the_base_policy_speaks_the_language_of_the_world():
    speaker = colbench.LocalSpeaker("toy/base", max_new_tokens=128, device="cpu")
    tasks = read_tasks("toy:backend:valid", 60)
    said = speaker.speak([agent_messages(task, [], "Ask what is missing, then answer.") for task in tasks], seeds=range(60))
    kinds = [toy_asked(utterances[0].text) is not None or ANSWER_MARKER in utterances[0].text for utterances in said]
    assert sum(kinds) >= 58 and all(utterances[0].finished for utterances in said)
