"""The embedded backend world is what it says, before anything is trained on it."""

import random
from collections import Counter

import pytest
from conftest import dialogue, episode, read_rows, run_script, write_rows
from parties import LenientJudge, Served, first_texts

import collect
import toy.backend
from colbench import agent_messages, agent_prompt_of
from formats.read import load_episodes, read_candidates
from judge.sandbox import ANSWER_MARKER, grade_all
from runtime.files import write_jsonl
from speakers import load_speaker
from speakers.interface import Request, SpeakerSettings
from toy import make_base
from toy.backend import (
    DETAILS, NUM_OPTIONS, PHRASES, TOPICS, asked_about, backend_human, backend_split, code_of,
    detail_to_ask, details_in, details_told, phrase_of, with_slips)
from toy.credit import (
    KINDS, ToyCredit, credit_auc, credit_pairs, credits_of, halves_shares, main, random_advantages,
    toy_credit)
from toy.world import SCRIPTED, Habits, World, toy_tasks
from train_critic import SOLUTION_NOTE, dialogue_row
from train_policy import state_pairs

MAX_TURNS = 9  # of the recipes
DEMONSTRATOR, INFORMED, GUESSING = (
    SCRIPTED["backend", "agent", manner] for manner in ("", "informed", "guessing"))


@pytest.fixture(scope="module")
def tasks():
    return toy_tasks("toy:backend:test", 120)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def play(task, agent):
    """(history, answer) of the dialogue that `agent(task, messages, draw)` plays to its end."""
    speaker = Served(lambda request: agent(task, request.messages, random.Random(request.seed)))
    rules = collect.Rules("", "", MAX_TURNS, reply_chars=400, seed=0)
    found = collect.play(task, 0, speaker, load_speaker("scripted", "human"), LenientJudge(), rules)
    return found["dialogue_history"], found["answer"]


def details_asked(messages):
    return [asked_about(m["content"]) for m in messages if m["role"] == "assistant"]


def asks_first(order):
    """An agent that asks for the details of `order(task)` and then answers with what it knows."""

    def agent(task, messages, draw):
        asked = details_asked(messages)
        remaining = [detail for detail in order(task) if detail not in asked]
        if remaining and len(asked) < MAX_TURNS - 1:
            return f"What about the {remaining[0]}?"
        needed = task["toy"]["needed"].items()
        known = code_of([(detail, option) for detail, option in needed if detail in asked])
        return f"{ANSWER_MARKER}\n{known}"

    return agent


def success(tasks, agent):
    answers = [play(task, agent)[1] for task in tasks]
    return sum(grade.success for grade in grade_all(tasks, answers)) / len(tasks)


# -----------------------------------------------------------------------------
# Tasks


def test_asking_for_what_is_likely_always_succeeds_and_for_all_or_nothing_does_not(tasks):
    assert success(tasks, asks_first(lambda task: task["toy"]["likely"])) == 1.0
    assert success(tasks, asks_first(lambda task: task["toy"]["details"])) < 0.6
    assert success(tasks, asks_first(lambda task: [])) < 0.02


def test_train_valid_and_test_share_no_task_and_requirements_vary():
    splits = [toy_tasks(f"toy:backend:{split}", 400) for split in ("train", "valid", "test")]
    found = {(task["problem_description"], task["ground_truth"])
             for split in splits for task in split}
    assert len(found) == 3 * 400
    assert set(Counter(len(task["toy"]["needed"]) for task in splits[0])) == {4, 5}


def test_of_ten_tasks_two_are_for_test_and_one_for_valid():
    counts = Counter(backend_split(topic, (("case", option),))
                     for topic in TOPICS for option in range(NUM_OPTIONS))
    share = {split: count / counts.total() for split, count in counts.items()}
    assert abs(share["test"] - 0.2) < 0.04 and abs(share["valid"] - 0.1) < 0.03


def test_a_world_has_all_its_tasks_however_long_the_search_for_them_takes(monkeypatch):
    small = World(topics=1, details=10, likely=3, needed=(1, 2, 3))
    every = len(toy.backend.backend_tasks("train", 10**6, small))
    monkeypatch.setattr(toy.backend, "MAX_MISSES", 300)  # in a row, not in all
    assert len(toy.backend.backend_tasks("train", 10**6, small)) == every == 85


@pytest.mark.parametrize("name, world", [
    ("16", World(topics=16)), ("256", World(topics=256)), ("64/16/5/2-3", World(64, 16, 5, (2, 3))),
    ("8/12/6/3-3", World(8, 12, 6, (3,)))])
def test_a_world_is_as_its_name_says(name, world):
    tasks = toy_tasks(f"toy:backend:train:{name}", 2000)
    assert {task["toy"]["topic"] for task in tasks} == set(TOPICS[:world.topics])
    assert {len(task["toy"]["needed"]) for task in tasks} == set(world.needed)
    likely = {task["toy"]["topic"]: task["toy"]["likely"] for task in tasks}
    for task in tasks:
        toy = task["toy"]
        assert len(toy["details"]) == world.details and len(toy["likely"]) == world.likely
        assert set(toy["needed"]) <= set(likely[toy["topic"]]) <= set(toy["details"])


@pytest.mark.parametrize("name", ["", ":64", ":64/10/5/4-5"])
def test_the_default_world_has_names_and_its_first_tasks_do_not_depend_on_their_number(name):
    assert len(set(TOPICS)) == 256
    assert toy_tasks(f"toy:backend:train{name}", 50) == toy_tasks("toy:backend:train", 400)[:50]


def test_every_requirement_matters_in_some_hidden_test(tasks):
    for task in tasks[:30]:
        needed = task["toy"]["needed"]
        partial = [code_of([(d, option) for d, option in needed.items() if d != omitted])
                   for omitted in needed]
        assert not any(grade.success for grade in grade_all([task] * len(partial), partial))


@pytest.mark.parametrize("spec", [
    "backend", "sql:train", "backend:dev", "frontend:test:64", "backend:test:0", "backend:test:257",
    *[f"backend:test:64/{rest}" for rest in ("10", "9/5/4-5", "17/5/4-5", "10/11/4-5", "10/5/4-6",
                                             "10/5/0-1", "10/5/5-4")]])
def test_an_unknown_world_or_split_is_refused(spec):
    with pytest.raises(SystemExit, match=f"toy:{spec}"):
        toy_tasks(f"toy:{spec}", 1)


def test_the_request_reveals_no_requirement_and_the_human_only_what_is_asked_for(tasks):
    task = tasks[0]
    needed = task["toy"]["needed"]
    detail = next(iter(needed))
    other = next(d for d in task["toy"]["details"] if d not in needed)
    phrase = phrase_of(detail, needed[detail])

    def reply(text):
        return backend_human(task, [assistant(text)], None)

    assert phrase not in task["problem_description"]
    assert phrase in reply(f"Which {detail}?")
    assert reply(f"Which {other}?") == "No wish there."
    assert reply("Hello?") == "I do not know."


def test_the_human_answers_the_last_message_alone_and_reads_capitals(tasks):
    task = tasks[0]
    wanted = next(iter(task["toy"]["needed"]))
    unwanted = next(detail for detail in DETAILS if detail not in task["toy"]["needed"])
    said = dialogue("t", f"What about the {wanted}?", "so", f"Which {unwanted.upper()}?")
    draw = random.Random(0)
    assert backend_human(task, said, draw) == "No wish there."
    assert backend_human(task, [*said, {"role": "user", "content": "No wish there."},
                                {"role": "assistant", "content": "And now?"}],
                         draw) == "I do not know."


# -----------------------------------------------------------------------------
# The demonstrator


def test_who_may_not_ask_guesses_a_function_with_the_number_of_rules_asked_for(tasks):
    for task in tasks:
        _, answer = play(task, GUESSING)
        assert len(details_in(answer)) == len(task["toy"]["needed"])
    assert success(tasks, GUESSING) < 0.03


def test_the_demonstrator_learns_what_is_wanted_from_the_dialogue_alone(tasks):
    task = tasks[0]
    rules = {key: task["toy"][key] for key in ("details", "likely")}
    blank = {"task_id": "blank", "domain": "backend", "toy": rules}
    informed = blank | {"ground_truth": task["ground_truth"]}
    history, _ = play(task, DEMONSTRATOR)
    for end in range(1, len(history), 2):
        for seed in range(20):
            for agent, known in ((DEMONSTRATOR, blank), (INFORMED, informed)):
                with_task = agent(task, history[:end], random.Random(seed))
                assert agent(known, history[:end], random.Random(seed)) == with_task


def test_a_demonstrator_asks_again_and_prefers_as_often_as_its_habits_say():
    details = list(DETAILS)

    def share(**habits):
        asked = Counter(detail_to_ask(["case", "unit"], details, ["unit", "tag"], Habits(**habits),
                                      random.Random(seed)) for seed in range(2000))
        return (asked["case"] + asked["unit"]) / 2000, asked["tag"] / 2000

    for again, preferred in ((0.2, 0.0), (0.0, 0.5), (0.0, 1.0)):
        repeated, hoped_for = share(ask_again=again, ask_preferred=preferred)
        assert abs(repeated - again) < 0.04
        others = (1 - again) * (1 - preferred) / (len(details) - 2)
        assert abs(hoped_for - (1 - again) * preferred - others) < 0.04
    for asked in ([], details):  # nothing to repeat, nothing new
        assert detail_to_ask(asked, details, [], Habits(), random.Random(0)) in details


def test_a_slip_forgets_a_clause_or_mistakes_its_option_equally_often():
    known = [("case", 0), ("unit", 1), ("tag", 2)]
    found = [with_slips(known, Habits(slip=0.4), random.Random(seed)) for seed in range(2000)]
    forgotten = sum(len(written) == 2 for written in found) / 2000
    mistaken = sum(len(written) == 3 and written != known for written in found) / 2000
    assert abs(forgotten - 0.2) < 0.03 and abs(mistaken - 0.15) < 0.03  # 3 of 4 options are wrong
    assert with_slips([], Habits(slip=1.0), random.Random(0)) == []
    assert known == [("case", 0), ("unit", 1), ("tag", 2)]


def test_the_wish_stated_last_counts_and_what_the_agent_says_is_none():
    first, last, other = (f"Please {phrase_of('case', option)}." for option in (0, 1, 2))
    assert details_told(dialogue("t", "q", first, other, last, other)) == {"case": 1}
    assert details_told(dialogue(f"{first} Please go.", "q", "no")) == {"case": 0}


def test_each_phrase_clause_and_question_names_one_detail():
    pairs = [(detail, option) for detail in DETAILS for option in range(NUM_OPTIONS)]
    assert sorted(PHRASES.values()) == sorted(pairs)
    assert all(asked_about(f"Tell me the {detail}.") == detail for detail in DETAILS)
    assert all(details_in(code_of([pair])) == [pair[0]] for pair in pairs)


# -----------------------------------------------------------------------------
# True credit


def few_wishes():
    """A task that needs two details."""
    return toy_tasks("toy:backend:train:64/10/5/2-2", 1)[0]


def test_toy_credit_names_each_kind_of_turn_and_values_what_finds_out_most():
    task = few_wishes()
    first, second = task["toy"]["needed"]
    other = next(d for d in task["toy"]["details"] if d not in task["toy"]["needed"])

    def credit(history, text):
        return toy_credit(task, history + [assistant(text)], len(history) // 2)

    def kind(history, text):
        return credit(history, text).kind

    texts = [task["problem_description"], f"Tell me the {first}.", "...", f"Tell me the {second}.",
             "..."]
    start, asked_first, known = (dialogue(*texts[:length]) for length in (1, 3, 5))
    assert kind(start, f"Tell me the {first}.") == "useful question"
    assert kind(start, f"The {other}?") == "wasted question"
    assert kind(asked_first, f"The {first}?") == "repeated question"
    assert kind(asked_first, f"{ANSWER_MARKER} def label(text): return text") == "early answer"
    assert kind(known, f"{ANSWER_MARKER}\n{task['ground_truth']}") == "right answer"
    assert kind(known, f"{ANSWER_MARKER} x") == "wrong answer"
    values = [credit(start, text).value for text in (
        f"Tell me the {first}.", f"The {other}?", f"{ANSWER_MARKER} x")]
    assert values[0] > values[1] > values[2]
    # the last message is the answer, whatever it says
    history = start + [assistant(f"Tell me the {first}.")]
    assert toy_credit(task, history, 0, max_turns=1).kind == "early answer"


def test_credit_pairs_know_their_kind():
    useful, wasted = ToyCredit("useful question", 0.6), ToyCredit("wasted question", 0.3)
    right, wrong = ToyCredit("right answer", 1.0), ToyCredit("wrong answer", 0.0)
    assert list(credit_pairs([useful, wasted, wrong], known=False)) == [
        ("question_question", 0, 1), ("answer_question_unknown", 0, 2),
        ("answer_question_unknown", 1, 2)]
    assert list(credit_pairs([wrong, right], known=True)) == [("answer_answer", 1, 0)]


def state(task, advantages_of=None, **more):
    """The first state of a task: a question about each detail, an early answer, and copies."""
    prompt = agent_prompt_of(task, None)
    texts = [f"Tell me the {detail}." for detail in DETAILS] + [f"{ANSWER_MARKER} x"]
    texts += texts[:3]
    row = {"task": task, "sample": 0, "turn": 0, "candidates": texts,
           "finished": [True] * len(texts),
           "messages": agent_messages([user(task["problem_description"])], prompt),
           "agent_prompt": prompt, "error": None} | more
    if advantages_of:
        row |= {"advantages": advantages_of(row), "ranker": "test"}
    return row


def true_credit(row, factor=1):
    return [factor * credit.value for credit in credits_of([row])[0]]


@pytest.mark.parametrize("factor, auc", [(1, 1.0), (0, 0.5), (-1, 0.0)])
def test_the_auc_is_1_for_true_credit_half_for_a_constant_0_for_its_opposite(tasks, factor, auc):
    states = [state(task, lambda row: true_credit(row, factor)) for task in tasks[:5]]
    found = credit_auc(states, credits_of(states))
    kinds = ("all", "question_question", "answer_question_unknown")
    assert found == {f"credit_auc/{kind}": auc for kind in kinds}
    assert set(kinds) < set(KINDS)


def test_the_auc_counts_a_text_once_however_often_it_was_sampled(tasks):
    once = state(tasks[0])
    once |= {"advantages": list(range(len(once["candidates"]))), "ranker": "test"}
    often = once | {key: once[key] + 4 * once[key][:1] for key in ("candidates", "advantages")}
    assert credit_auc([often], credits_of([often])) == credit_auc([once], credits_of([once]))


def test_true_credit_of_a_candidate_is_that_of_the_turn_it_would_be_and_thoughts_ask_nothing():
    task = few_wishes()
    first, second = task["toy"]["needed"]
    history = dialogue(task["problem_description"], f"The {first}?", "...",
                       f"<think>The zeros?</think>Tell me the {second}.", "...")
    texts = [f"{ANSWER_MARKER}\n{task['ground_truth']}", f"The {first}?", f"The {second}?"]
    row = state(task, turn=2, messages=agent_messages(history, "Ask."), candidates=texts)
    kinds = [credit.kind for credit in credits_of([row])[0]]
    assert kinds == ["right answer", "repeated question", "repeated question"]


def test_at_the_last_turn_that_was_allowed_every_message_is_an_answer(tasks):
    states = [state(tasks[0], true_credit, max_turns=1)]
    credits = credits_of(states)
    assert {credit.kind for credit in credits[0]} == {"early answer"}
    assert credit_auc(states, credits) == {}


def test_shares_of_halves_are_those_of_the_pairs_that_the_policy_draws(tasks):
    states = [state(task, lambda row: [-index for index in range(len(row["candidates"]))])
              for task in tasks[:10]]
    credits = credits_of(states)
    counts = Counter()
    for one, credit in zip(states, credits, strict=True):
        for chosen, rejected in state_pairs(one, "halves", 4, 0):
            better, worse = credit[chosen].value, credit[rejected].value
            counts["halves/right"] += better > worse
            counts["halves/equal"] += better == worse
            counts["halves/wrong"] += better < worse
    assert halves_shares(states, credits) == {kind: counts[kind] / 40 for kind in counts}
    assert all(counts.values())


def test_candidates_are_ranked_by_true_credit_or_at_random(tasks, tmp_path, capsys):
    source, true, drawn = (tmp_path / f"{name}.jsonl" for name in ("source", "true", "random"))
    failed = {"task": tasks[3], "sample": 0, "turn": 0, "messages": [], "error": "refused"}
    write_jsonl(source, [*map(state, tasks[:3]), failed])
    with pytest.raises(SystemExit, match="--seed 3, which is ignored by true credit"):
        main(["rank", str(source), "--output", str(true), "--seed", "3"])
    main(["rank", str(source), "--output", str(true)])
    main(["rank", str(source), "--output", str(drawn), "--ranker", "random", "--seed", "3"])
    assert "1 failed" in capsys.readouterr().out
    rows, _ = read_candidates(true, ranked=True)
    assert [row["advantages"] for row in rows] == [true_credit(row) for row in rows]
    assert {row["ranker"] for row in rows} == {"true credit"}
    rows, _ = read_candidates(drawn, ranked=True)
    values = [value for row in rows for value in row["advantages"]]
    assert len(set(values)) == len(values) and min(values) < 0 < max(values)

    log = tmp_path / "metrics.jsonl"
    write_jsonl(log, [{"step": 0, "train/loss": 0.7}, {"step": 1, "train/loss": 0.6}])
    for ranked in (drawn, true):  # the second command replaces what the first one found
        main(["auc", str(ranked), "--metrics", str(log)])
    lines = read_rows(log)
    assert len(lines) == 3
    assert lines[2]["step"] == 2 and lines[2]["credit_auc/all"] == 1
    assert "halves/right" in capsys.readouterr().out


def test_random_advantages_are_those_of_a_seed(tasks):
    drawn = [random_advantages(state(tasks[0]), seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_tasks_without_true_credit_are_refused(tmp_path):
    task = toy_tasks("toy:frontend:train", 1)[0]
    write_jsonl(tmp_path / "pages.jsonl", [state(task)])
    with pytest.raises(SystemExit, match="expected tasks of the embedded backend world"):
        main(["rank", str(tmp_path / "pages.jsonl"), "--output", str(tmp_path / "ranked.jsonl")])


# -----------------------------------------------------------------------------
# The base policy


def test_the_base_policy_speaks_the_language_of_the_world_and_answers_if_it_may_not_ask():
    tasks = toy_tasks("toy:backend:valid", 60)
    said = first_texts("toy/base", tasks, 128, MAX_TURNS)
    understood = [asked_about(text) is not None or ANSWER_MARKER in text for text, _ in said]
    assert sum(understood) >= 58
    assert all(utterance.finished for utterance in said)
    alone = first_texts("toy/base", tasks, 128, max_turns=1)
    assert sum(ANSWER_MARKER in text for text, _ in alone) >= 58


@pytest.mark.slow
def test_a_base_is_made_from_demonstrations_and_reads_informed_ones_as_a_critic_does(tmp_path):
    plain, informed, model = (tmp_path / name for name in ("plain.jsonl", "informed.jsonl", "base"))
    run_script("collect.py", "--tasks", "toy:backend:train", "--num_tasks", 8, "--output", plain,
               "--samples_per_task", 2, "--agent", "scripted:informed")
    run_script("toy/make_base.py", "model", plain, "--output", model)
    run_script("toy/make_base.py", "inform", plain, "--output", informed)
    speaker = load_speaker(str(model), settings=SpeakerSettings(max_new_tokens=4, device="cpu"))
    tokenizer = speaker.tokenizer
    note = SOLUTION_NOTE.format(solution="def label(text):\n    return text")
    assert tokenizer.decode(tokenizer.encode(note)) == note
    before, after = load_episodes([plain])[0], load_episodes([informed])[0]
    for one, other in zip(before, after, strict=True):
        as_critic = dialogue_row(tokenizer, one, 8192)
        as_policy = dialogue_row(tokenizer, other, 8192, privileged="none")
        assert (as_critic.ids, as_critic.turn_index) == (as_policy.ids, as_policy.turn_index)
    assert len(speaker.reply(Request([user("Label a text.")]))) == 1


def test_who_recites_says_each_reply_but_the_answer_and_nothing_where_nothing_was_asked(tmp_path):
    rows = [episode("a", 1.0, texts=("t", "q", "r", "p", "s", "I WANT TO ANSWER: x")),
            episode("b", 0.0, texts=("t", "I WANT TO ANSWER: x"))]
    plain, recited = write_rows(tmp_path / "plain.jsonl", rows), tmp_path / "recited.jsonl"
    make_base.main(["recite", str(plain), "--output", str(recited)])
    row, = read_rows(recited)
    first, *others = row["dialogue_history"]
    assert first["content"] == SOLUTION_NOTE.format(solution=rows[0]["task"]["ground_truth"]) + (
        "t\nq")
    assert others == [{"role": "assistant", "content": "r"}, {"role": "user", "content": "p"},
                      {"role": "assistant", "content": "s"}]


def test_the_tokenizer_of_a_base_knows_what_the_agent_wrote_and_the_notes():
    row = episode("a", 1.0)
    row["dialogue_history"][1]["output"] = "thoughts and q"
    note = SOLUTION_NOTE.format(solution=row["task"]["ground_truth"])
    assert list(make_base.texts_to_read([row])) == [
        note, "t", "thoughts and q", "r", "I WANT TO ANSWER: x"]
