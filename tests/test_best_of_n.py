"""Best of N: a critic or a grader model chooses each turn."""

import json
import threading

import pytest
from chat_server import running
from conftest import dialogue, read_rows, refusal, run_script
from parties import RULES, TASKS, Failing, LenientJudge, Local, Served, asker, human_line, played

from collect import play
from judge.sandbox import ANSWER_MARKER
from speakers.interface import Request, SpeakerError, Utterance
from variants.best_of_n import BestOfN, CriticChoice, GraderChoice, number_named

REQUEST = Request(dialogue("x"), task={"task_id": "t"}, key=("t", 0))


def pick_plus_signs(count):
    """A grader's line: it names the candidate that ends in `count` plus signs."""
    def line(request):
        lines = request.messages[0]["content"].splitlines()
        named = [text for text in lines if text.endswith("?" + "+" * count)]
        return named[-1][:3] if named else "none of them"

    return line


class Critic:
    """Prefers the candidate with so many plus signs, and notes what it was asked."""

    def __init__(self, favourite=2):
        self.favourite, self.asked = favourite, []

    def advantages(self, task, messages, texts, finished):
        self.asked.append((task, messages, finished))
        return [float(text.count("+") == self.favourite) for text in texts]


def said(episode):
    return [message["output"] for message in episode["dialogue_history"][1::2]]


# -----------------------------------------------------------------------------
# The choice


def test_a_critic_chooses_every_message_and_sees_the_task_and_the_dialogue():
    critic, agent = Critic(), Served(asker(lambda key: 3))
    best = BestOfN(agent, CriticChoice(critic), 4)
    episode = play(TASKS[0], 0, best, Served(human_line), LenientJudge(), RULES)
    assert said(episode) == ["What about 0?++", "What about 1?++", f"{ANSWER_MARKER} x = 2++"]
    assert all(request.n == 4 for request in agent.asked)
    tasks, dialogues, finished = zip(*critic.asked, strict=True)
    assert tasks == (TASKS[0],) * 3 and finished == ([True] * 4,) * 3
    assert dialogues == tuple(request.messages for request in agent.asked)


@pytest.mark.parametrize("texts, advantages, index", [
    ("abc", [0.5, 0.2, 0.5], 0),  # the first of equals
    ("abc", [-0.5, -0.2, -0.9], 1),
    ("abc", None, 0),  # of a state that is too long
    ([" \n", "b"], [9.0, -1.0], 1),  # an empty message wins only where all are empty
    (["", " "], [9.0, -1.0], 0),
    (["", "b", "c"], None, 1),
])
def test_the_greatest_advantage_of_what_says_something_wins(texts, advantages, index):
    critic, agent = Critic(), Served(None)
    values = dict(zip(texts, advantages or (), strict=False))
    critic.advantages = lambda task, messages, read, finished: (
        [values[text] for text in read] if advantages else None)
    agent.reply_to = lambda request: [Utterance(text, True) for text in texts]
    best = BestOfN(agent, CriticChoice(critic), len(texts))
    assert best.reply(REQUEST) == [Utterance(texts[index], True)]


def test_a_critic_and_a_local_agent_compute_in_one_thread_in_batches():
    threads, sizes = set(), []

    class Noting(CriticChoice):
        def advantages(self, states):
            threads.add(threading.current_thread())
            sizes.append(len(states))
            return super().advantages(states)

    agent = Local(asker(lambda key: 2), note=lambda: threads.add(threading.current_thread()))
    best = BestOfN(agent, Noting(Critic()), 4)
    order, episodes = played(best, Served(human_line), LenientJudge(), 8, 4)
    assert len(threads) == 1 and sum(sizes) == 16 and max(sizes) == 4
    assert all(said(episode)[0] == "What about 0?++" for episode in episodes)


# -----------------------------------------------------------------------------
# A grader model


def test_a_served_agent_and_grader_wait_for_no_other_dialogue():
    task_0 = TASKS[0]["problem_description"]
    grader = Served(pick_plus_signs(2), held=lambda request: task_0 in str(request.messages))
    agent = Served(asker(lambda key: 3))
    best = BestOfN(agent, GraderChoice(grader), 4)
    order, episodes = played(best, Served(human_line), LenientJudge(), 10, 3, last=grader.open)
    assert order[-1] == 0 and sorted(order) == list(range(10))
    for episode in episodes:
        assert said(episode)[:2] == ["What about 0?++", "What about 1?++"]
        assert said(episode)[2] == f"{ANSWER_MARKER} x = 2"  # the grader names none: the first


@pytest.mark.parametrize("line, error", [
    ("<think>2, I think", "grader: found thoughts that never end"),
    ("<think>1?</think> [2] is best", None)])
def test_a_grader_may_think_but_must_come_to_an_end(line, error):
    best = BestOfN(Served(asker(lambda key: 9)), GraderChoice(Served(lambda request: line)), 3)
    if error:
        with pytest.raises(SpeakerError, match=error):
            best.reply(REQUEST)
    else:
        assert best.reply(REQUEST)[0].text == "What about 0?+"


@pytest.mark.parametrize("line, number", [
    ("2", 2), (" [2]\n", 2), ("**Candidate 2** has 3 questions", 2), ("2/4", 2), ("2 of the 4", 2),
    ("The best is number 2.", 2), ("It is 2, yes, 2.", 2), ("Of the 4, number 2 is best.", None),
    ("None.", None), ("", None)])
def test_a_reply_names_the_number_that_it_begins_with_or_its_only_one(line, number):
    assert number_named(line) == number


def test_a_grader_that_names_no_candidate_is_noticed(capsys):
    choice = GraderChoice(Served(lambda request: "Yes, it should."))
    for _ in range(2):
        assert BestOfN(Served(asker(lambda key: 9)), choice, 3).reply(REQUEST)
    said = capsys.readouterr().err
    assert said.startswith("the grader's reply 'Yes, it should.' names no candidate, expected a")
    assert said.count("\n") == 1  # once
    for _ in range(20):
        BestOfN(Served(asker(lambda key: 9)), choice, 3).reply(REQUEST)
    said = capsys.readouterr().err
    assert "after such replies (so far 10)" in said and said.count("\n") == 1


def test_a_grader_that_dies_is_given_up_and_passes_no_unchosen_candidate():
    grader = Failing(pick_plus_signs(1), lives=0)
    best = BestOfN(Served(asker(lambda key: 9)), GraderChoice(grader), 3)
    with pytest.raises(SpeakerError, match="grader: it is down"):
        best.reply(REQUEST)
    assert best.given_up == "it is down"


# -----------------------------------------------------------------------------
# The script


FLAGS = ["--tasks", "toy:backend:test", "--num_tasks", 4, "--samples_per_task", 1,
         "--max_new_tokens", 16, "--max_turns", 3]


def test_a_grader_is_asked_as_its_flags_say_and_may_move_while_its_model_stays(tmp_path):
    bodies = []
    for model, samples in (("m", 1), ("m", 2), ("other", 3)):
        with running(lambda body, seed: "2", models=["m", "other"],
                     say=lambda handler, body: bodies.append(body)) as server:
            done = run_script(
                "variants/best_of_n.py", "--tasks", "toy:backend:test", "--num_tasks", 1,
                "--samples_per_task", samples, "--agent", "scripted", "--n", 2,
                "--critic", f"grader:{server.url}", "--critic_model", model,
                "--critic_temperature", 0.5, "--critic_max_new_tokens", 99,
                "--output", tmp_path / "e.jsonl", check=model == "m")
    assert "differs in critic_model (it was m)" in done.stderr
    episodes = read_rows(tmp_path / "e.jsonl")
    assert len(episodes) == 2 and {row["scorer"] for row in episodes} == {"grader:m"}
    asked = {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies}
    assert asked == {("m", 0.5, 99)}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["train_critic.py", "variants/value_critic.py"])
def test_critics_of_either_kind_choose_and_episodes_note_it(tiny, toy_episodes, tmp_path, trainer):
    critic = tmp_path / "critic"
    run_script(trainer, "--episodes", toy_episodes, "--model", tiny(), "--output", critic,
               "--max_steps", 1)
    flags = [*FLAGS, "--agent", tiny(), "--critic", f"{critic}/"]
    for n in (1, 3):
        run_script("variants/best_of_n.py", *flags, "--n", n, "--output", tmp_path / f"{n}.jsonl")
    run_script("collect.py", *FLAGS, "--agent", tiny(), "--output", tmp_path / "plain.jsonl")
    one, three, plain = (read_rows(tmp_path / f"{name}.jsonl") for name in ("1", "3", "plain"))
    assert not any(row["error"] for row in three)
    assert {(row["best_of_n"], row["scorer"]) for row in three} == {(3, str(critic))}
    assert {row["judge"] for row in plain} == {"--judge fixed"}
    assert one == [row | {"best_of_n": 1, "scorer": str(critic)} for row in plain]
    assert list(map(said, one)) != list(map(said, three))


# 0 and 5 name no candidate, so the first is taken; a sign is not read
@pytest.mark.parametrize("said, index", [("1", 0), ("4", 3), ("0", 0), ("5", 0), ("-2", 1)])
def test_the_number_that_a_grader_says_counts_from_1_to_the_last_candidate(said, index):
    candidates = [Utterance(text, True) for text in "abcd"]
    assert GraderChoice(Served(lambda request: said)).best(REQUEST, candidates) == index


def test_no_output_is_continued_with_a_critic_that_was_trained_anew(tiny, toy_episodes, tmp_path):
    critic = tmp_path / "critic"
    run_script("train_critic.py", "--episodes", toy_episodes, "--model", tiny(), "--output", critic,
               "--max_steps", 1)
    flags = ["--tasks", "toy:backend:test", "--num_tasks", 1, "--max_turns", 1, "--agent",
             "scripted:guessing", "--n", 2, "--critic", critic, "--output", tmp_path / "e.jsonl"]
    run_script("variants/best_of_n.py", *flags, "--samples_per_task", 1)
    run = json.loads((critic / "run.json").read_text())
    run["flags"]["seed"] = 1
    (critic / "run.json").write_text(json.dumps(run))
    assert "critic/run.json (its content)" in refusal(
        "variants/best_of_n.py", *flags, "--samples_per_task", 2)


def test_what_is_no_critic_is_refused_before_the_output_is_claimed(tiny, tmp_path):
    said = refusal("variants/best_of_n.py", "--tasks", "toy:backend:test", "--agent", "scripted",
                   "--n", 2, "--critic", tiny(), "--output", tmp_path / "out/e.jsonl")
    assert "found no run.json" in said and not (tmp_path / "out").exists()
