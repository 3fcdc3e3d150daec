"""Logs in, pairs and advantages out: the commands of docs/logs.md on made-up dialogues."""

import json
import random
import re

import pytest
from commands import blocks, record
from conftest import (
    PLAIN, ROOT, byte_tokenizer, dialogue, episode, ranked_state, read_rows, refusal, run_python,
    run_script, write_rows)

from colbench import agent_view, encode_dialogue
from formats.read import read_candidates, read_episodes, read_tasks
import report.__main__ as command
from report import show
from report.page import task_records
from report.training import held_out_tasks

PAGE = (ROOT / "docs/logs.md").read_text()


def log_line(**fields):
    return {"messages": dialogue("hi", "which?"), "reward": 1.0} | fields


def made_up_logs(path):
    """Forty dialogues of ten tasks; whoever asks for the number gets a better score."""
    draw, lines = random.Random(0), []
    for index in range(40):
        asks = draw.random() < 0.5
        question = "Which number?" if asks else "Are you sure?"
        lines.append({
            "task": f"ticket-{index // 4}", "ground_truth": f"order {index // 4} was late",
            "reward": 1.0 if asks else draw.choice([0.0, 0.5]),
            "messages": [
                {"role": "system", "content": "You help customers."},
                *dialogue(f"Order {index // 4} is lost", question, "Hm", "It comes tomorrow.")]})
    return write_rows(path, lines)


def import_of(folder, *lines):
    """The words that import a log of these lines."""
    path = write_rows(folder / "log", lines)
    return "colbench.py", "import", path, "--output", f"{path}.episodes"


def official_line(answer):
    """What the official simulator writes of a dialogue, before its answer is graded."""
    said = f"I WANT TO ANSWER: {answer}"
    return {"task": {"problem_description": "Double it: def f(x)", "test_cases": {"test1": "f(2)",
                     "test2": "f('a')"}, "ground_truth": "def f(x):\n    return 2 * x"},
            "dialogue_history": [
                {"role": "user", "content": "Double it: def f(x)"},
                {"role": "assistant", "content": said, "input": "rendered prompt", "output": said}],
            "answer": answer}


def test_official_trajectories_are_graded_on_import_if_nobody_has_graded_them(tmp_path):
    answers = ("def f(x): return x + x", "def f(x): return x * 2 if x == 2 else 0", "no code")
    graded = [official_line("def f(x): return 2 * x") | {"reward": reward} for reward in (0.25, 0)]
    episodes, said = imported(tmp_path, *map(official_line, answers), *graded)
    assert [episode["reward"] for episode in episodes] == [1.0, 0.5, 0.0, 0.25, 0.0]
    assert [episode["success"] for episode in episodes] == [True] + 4 * [False]
    assert [episode["sample"] for episode in episodes] == [0, 1, 2, 3, 4]
    assert "which were graded: 3" in said
    asked = official_line("")
    asked["answer"] = asked["dialogue_history"][1]["content"] = "Which unit do you want?"
    (episode,), _ = imported(tmp_path / "asked", asked)
    assert set(episode["reasons"].values()) == {"no answer"}  # as if it had been played here
    thanked = official_line("def f(x) return x")
    thanked["dialogue_history"].append({"role": "user", "content": "Thank you."})
    (episode,), _ = imported(tmp_path / "thanked", thanked)  # it stays an answer
    assert set(episode["reasons"].values()) == {"raised SyntaxError"}
    page = {"problem_description": "p", "ground_truth": "<html></html>"}
    said = refusal(*import_of(tmp_path / "pages", official_line("x") | {"task": page}))
    assert "line 1: found no 'reward', expected a number; only answers to tasks with" in said


def test_official_answers_are_graded_by_the_chosen_rules_and_other_instructions_are_noticed(
        tmp_path):
    helped = official_line("def g(x):\n    return 2 * x\ndef f(x):\n    return g(x)")
    for judge, reward in (("fixed", 1.0), ("official", 0.0)):
        arguments = import_of(tmp_path / judge, helped)
        said = run_script(*arguments, "--judge", judge).stdout
        (episode,) = read_episodes(tmp_path / judge / "log.episodes")
        assert (episode["reward"], episode["judge"]) == (reward, f"--judge {judge}")
        assert f"rewards from {reward:g} to {reward:g}\n" in said and f"1 (judge {judge})" in said
        assert "Dialogues whose `input` does not hold the agent's instructions: 1 of 1." in said
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("rendered")
    done = run_script(*import_of(tmp_path / "known", helped), "--agent_prompt", prompt)
    assert "instructions" not in done.stdout
    told = import_of(tmp_path / "told", helped | {"agent_prompt": "Another."})
    assert "expected some without, with --agent_prompt" in refusal(*told, "--agent_prompt", prompt)
    said = refusal(*import_of(tmp_path / "graded", helped | {"reward": 0.5}), "--judge", "official")
    assert "found no answer that has to be graded" in said


def imported(folder, *lines):
    """(the episodes that a log of these lines becomes, what is said of them)"""
    done = run_script(*import_of(folder, *lines))
    return read_episodes(folder / "log.episodes"), done.stdout


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_dialogues_to_a_shaded_report(tmp_path, monkeypatch):
    made_up_logs(tmp_path / "logs.jsonl")
    script = tmp_path / "commands.sh"
    script.write_text("set -e\n" + "".join(blocks(PAGE, "bash")))
    (tmp_path / "base").symlink_to(ROOT / "toy/base")  # bash splits $MODEL at a space
    monkeypatch.chdir(tmp_path)
    for _, *words in record(script, tmp_path, ["python"], MODEL="base"):
        if "--agent" in words:
            words += ["--max_new_tokens", "8", "--num_candidates", "4"]
        if "--model" in words:
            words += ["--max_steps", "2"]
        if words[0] == "-m":
            command.main(command.parse_args(words[2:]))
        else:
            run_script(*words, folder=tmp_path)
    assert all(part in (tmp_path / "report.html").read_text() for part in (
        "<html", "held-out pairs of dialogues", "Which turns helped", "Known afterwards"))
    held_out = held_out_tasks("critic")
    assert len(held_out) == 1  # a twentieth of ten tasks, rounded up
    monkeypatch.chdir(ROOT)
    assert held_out_tasks(tmp_path / "critic") == held_out  # from any directory
    pairs = read_rows(tmp_path / "pairs.jsonl")
    assert all(chosen > rejected for chosen, rejected in (pair["advantages"] for pair in pairs))
    assert pairs and pairs[0]["prompt"][-1]["role"] == "user"
    assert pairs[0]["chosen"][0]["role"] == pairs[0]["rejected"][0]["role"] == "assistant"
    monkeypatch.chdir(tmp_path)
    exec(python_of_page("train_critic", f"""
task = {read_episodes(tmp_path / "episodes.jsonl")[0]["task"]!r}
messages = [{{"role": "user", "content": "x"}}]
values = reward(task, messages, ["Which number?", "no"])
assert len(values) == 2 and values[0] != values[1]
"""), {})


def python_of_page(word, more=""):
    """The Python of docs/interchange.md that has this word in it, and more lines after it."""
    page = (ROOT / "docs/interchange.md").read_text()
    return next(block for block in blocks(page, "python") if word in block) + more


def test_trl_takes_the_exported_pairs(tmp_path):
    """Two steps of its DPOTrainer on toy/base, as docs/interchange.md has them."""
    pytest.importorskip("trl", reason="trl is not installed; pip install trl==1.16.0")
    texts = ["what about units ?", "i see .", "what is the order ?"]
    ranked = write_rows(tmp_path / "ranked.jsonl", [
        ranked_state(dict(zip(texts, (0.3, -0.1, 0.0), strict=True)), dialogue("hi"), turn=turn,
                     finished=[True, True, False]) for turn in range(8)])
    run_python("-m", "report", "pairs", ranked, "--output", tmp_path / "pairs.jsonl")
    code = python_of_page("from trl", "assert trainer.state.global_step == 2")
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(ROOT / "toy/base"))
    code = code.replace("num_train_epochs=1", "max_steps=2, use_cpu=True, bf16=False")
    run_python("-c", code, folder=tmp_path)


def test_a_log_keeps_its_system_message_its_context_and_two_turns_in_a_row(tmp_path):
    messages = [{"role": role, "content": role[0] * 2} for role in (
        "system", "user", "assistant", "assistant", "tool", "assistant")]
    (episode,), _ = imported(tmp_path, log_line(messages=messages, reward=-2.5, task=7))
    assert episode["agent_prompt"] == "ss" and episode["turns"] == 3
    assert [m["role"] for m in episode["dialogue_history"]] == [m["role"] for m in messages[1:]]
    assert (episode["reward"], episode["success"]) == (-2.5, None)
    assert episode["task"]["task_id"] == "7"


def test_dialogues_without_a_task_are_compared_if_all_before_the_first_turn_is_the_same(tmp_path):
    def told(system, request="hi", **more):
        system = {"role": "system", "content": system}
        return log_line(messages=[system, *dialogue(request, "yes")], **more)

    poem = "Write a poem."
    episodes, _ = imported(tmp_path, told("Book a table.\r\nNow.\n"), told(poem, "ho"), told(poem),
                           told(poem), told(poem, task=""))  # an empty one is none
    one, other, *same = (episode["task"]["task_id"] for episode in episodes)
    assert len({one, other, *same}) == 3 and len(set(same)) == 1
    # as a policy's checkpoint gives its instructions back
    assert episodes[0]["agent_prompt"] == "Book a table.\nNow."


def test_a_developer_message_is_a_system_message_parts_are_a_text_and_other_keys_drop(tmp_path):
    messages = [{"role": "developer", "content": "Be brief."}, *dialogue("hi", "yes")]
    messages[1]["content"] = [{"type": "text", "text": text} for text in ("hi", "there")]
    messages[2]["output"] = "another text"
    (episode,), _ = imported(tmp_path, log_line(messages=messages))
    assert episode["agent_prompt"] == "Be brief."
    assert [message["content"] for message in agent_view(episode)[0]] == [
        "Be brief.", "hi\nthere", "yes"]


def test_instructions_from_a_file_go_into_a_log_as_they_are(tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("At most {max_turns} turns.")
    run_script(*import_of(tmp_path, log_line()), "--agent_prompt", prompt)
    (episode,) = read_episodes(tmp_path / "log.episodes")
    assert episode["agent_prompt"] == "At most {max_turns} turns."


def test_dialogues_of_one_task_are_numbered_and_may_have_different_solutions(tmp_path):
    episodes, _ = imported(tmp_path, *(log_line(task=task, ground_truth=truth)
                                       for task, truth in ("ax", "by", "ay", "az")))
    assert [episode["sample"] for episode in episodes] == [0, 0, 1, 2]
    assert [episode["task"]["ground_truth"] for episode in episodes] == list("xyyz")


def with_system(text):
    return {"messages": [{"role": "system", "content": text}, *log_line()["messages"]]}


# from either, a critic could read the outcome
@pytest.mark.parametrize("what, fields, other", [
    ("ground_truth", lambda text: {"ground_truth": text}, {"ground_truth": "z"}),
    ("the system message", with_system, {})])
def test_import_warns_of_dialogues_of_a_task_that_differ_in(tmp_path, what, fields, other):
    warning = f"Tasks whose dialogues differ in {what}: 1 of 2."
    lines = [log_line(task=task, reward=reward, **fields(text))
             for task, reward, text in (("a", 1, "x"), ("a", 0, "x"), ("b", 1, "y"))]
    assert warning not in imported(tmp_path / "same", *lines)[1]
    worse = log_line(task="b", reward=0, **other)
    assert warning in imported(tmp_path / "other", *lines, worse)[1]


@pytest.mark.parametrize("kind", ["the log", "other episodes", "a directory", "its own output"])
def test_import_replaces_nothing_but_what_it_writes_itself(tmp_path, kind):
    path, output = write_rows(tmp_path / "log", [log_line()]), tmp_path / "there"
    if kind == "the log":
        output = path
    elif kind == "other episodes":
        write_rows(output, [episode("t", 1.0)])
    elif kind == "a directory":
        output.mkdir()
    else:
        run_script("colbench.py", "import", path, "--output", output)
    before = output.is_file() and output.read_text()
    done = run_script("colbench.py", "import", path, "--output", output, check=False)
    own = kind == "its own output"
    assert done.returncode == (not own)
    assert own or f"{output}: found something else than what this command writes" in done.stderr
    assert (output.is_file() and output.read_text()) == before


def test_what_import_does_not_use_is_told(tmp_path):
    messages = [*dialogue("q", "a"), {"role": "asistant", "content": "b"}]
    _, said = imported(tmp_path, log_line(messages=messages, groundtruth="x"),
                       log_line(ground_truth="known"))
    assert "Keys that are ignored: groundtruth" in said
    assert "no turns of the agent: asistant (1)" in said
    assert "Dialogues without ground_truth: 1 of 2" in said
    _, said = imported(tmp_path / "sound", log_line(ground_truth="known"))
    assert not re.search("ignored|roles|without ground_truth", said)


def test_a_log_is_told_from_the_files_of_the_stages(tmp_path):
    path = write_rows(tmp_path / "log", [log_line()])
    for read in (read_episodes, read_tasks, read_candidates):
        with pytest.raises(SystemExit, match="line 1: found a log of dialogues, .* import"):
            read(path)


@pytest.mark.parametrize("line, found", [
    (log_line(reward=float("nan")), "reward nan"),
    (log_line(reward="good"), "reward 'good'"),
    (log_line(reward=10**400), "which is no finite number"),
    (log_line(ground_truth={}), "ground_truth of type dict, not str"),
    ({"messages": log_line()["messages"]}, "no reward"),
    ({"reward": 1, "text": "hi"}, "the keys reward, text"),
    (log_line(messages=[]), "no list of messages"),
    (log_line(messages=[{"role": "user", "content": "hi"}]), "a turn, but the roles user"),
    (log_line(messages=log_line()["messages"][::-1]), "before the first user message"),
    (log_line(messages=[{"role": "user", "content": None}]), "messages[0] of role user whose"),
    (log_line(messages=[{"role": "user", "content": "hi"}, {
        "role": "assistant", "content": None, "tool_calls": [{}]}]), "whose tool_calls lack"),
    (log_line(messages=["hi"], task=[]), "messages[0] without a role"),
])
def test_a_line_that_does_not_fit_is_told_with_all_faults_and_writes_nothing(line, found, tmp_path):
    said = refusal(*import_of(tmp_path, log_line(), line))
    assert "line 2: found" in said and found in said and "expected at least {" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log"]


def test_all_lines_that_do_not_fit_are_named_at_once(tmp_path):
    said = refusal(*import_of(tmp_path, *(log_line(reward=reward) for reward in ("a", 1, "b"))))
    lines = said.splitlines()
    assert ["line 1" in lines[0], "line 3" in lines[1], len(lines)] == [True, True, 3]


@pytest.mark.parametrize("lines, told", [
    ([log_line(), log_line(reward=0.0), log_line()], "count as often: 1"),
    ([log_line(task=name) for name in "abc"], "nothing can be compared"),
])
def test_dialogues_that_repeat_others_or_are_alone_are_kept_and_told(tmp_path, lines, told):
    episodes, said = imported(tmp_path, *lines)
    assert told in said and len(episodes) == 3


def test_a_tool_call_is_a_turn_written_as_the_templates_of_qwen_write_it(tmp_path):
    arguments = {"order": 12, "name": "Zoë"}
    call = {"id": "1", "type": "function",
            "function": {"name": "find", "arguments": json.dumps(arguments)}}
    answer = [{"role": "tool", "content": "late", "tool_call_id": "1"},
              {"role": "assistant", "content": "It comes tomorrow."}]
    (silent, speaking), _ = imported(tmp_path, *(
        log_line(messages=[{"role": "user", "content": "lost"},
                           {"role": "assistant", "content": content, "tool_calls": [call]},
                           *answer]) for content in (None, "I look.")))
    text = '<tool_call>\n{"name": "find", "arguments": {"order": 12, "name": "Zoë"}}\n</tool_call>'
    assert silent["dialogue_history"][1]["content"] == text
    assert speaking["dialogue_history"][1]["content"] == f"I look.\n{text}"
    assert silent["turns"] == 2 and silent["dialogue_history"][2]["role"] == "tool"


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_a_call_in_the_older_format_is_a_turn_too(tmp_path, content):
    messages = [*dialogue("lost", content), {"role": "function", "content": "late"}]
    messages[1]["function_call"] = {"name": "find", "arguments": '{"order": 12}'}
    (episode,), _ = imported(tmp_path, log_line(messages=messages))
    call = '<tool_call>\n{"name": "find", "arguments": {"order": 12}}\n</tool_call>'
    said = episode["dialogue_history"][1]["content"]
    assert said == (f"{content}\n{call}" if content else call)


def test_a_refusal_is_what_the_agent_said_and_keys_that_nothing_reads_are_told(tmp_path):
    messages = dialogue("the code?", None)
    messages[1] |= {"refusal": "I cannot tell.", "weight": 0}
    (episode,), said = imported(tmp_path, log_line(messages=messages))
    assert episode["dialogue_history"][1]["content"] == "I cannot tell."
    assert "Keys of messages that are ignored: weight" in said


def test_each_dialogue_is_shown_with_its_own_request_and_ground_truth(tmp_path):
    episodes, _ = imported(tmp_path, *(
        log_line(task="t", messages=dialogue(request, "a"), ground_truth=truth)
        for request, truth in (("refund", "it was due"), ("parcel", "it was lost"))))
    (task,), _ = task_records({"log": [episodes]})
    assert [(record["request"], record["solution"]) for record in task["episodes"]] == [
        ("refund", "it was due"), ("parcel", "it was lost")]
    shown = run_script("colbench.py", "show", tmp_path / "log.episodes").stdout
    assert shown.index("it was due") < shown.index("refund") < shown.index("it was lost")


def test_the_words_of_a_log_look_like_no_label_and_a_small_reward_is_not_rounded_away(
        tmp_path, capsys):
    role = "tool\nagent 2   I WANT TO ANSWER: forged\nhuman"
    episodes, _ = imported(tmp_path, log_line(reward=1e-5, messages=[
        *dialogue("lost", "a"), {"role": role, "content": "x"}, *dialogue("found", "b")]))
    show.print_episode(episodes[0])
    printed = capsys.readouterr().out
    assert not any(line.strip().startswith("agent 2   I WANT") for line in printed.splitlines())
    assert "reward 1e-05" in printed


@pytest.mark.parametrize("arguments, written", [
    ("", "{}"), ("{'a': 1}", '"{\'a\': 1}"'), (r'{"a": "\ud83d"}', json.dumps(r'{"a": "\ud83d"}')),
    ('{"a": 1e400}', json.dumps('{"a": 1e400}'))])
def test_arguments_that_are_no_json_stay_what_the_model_wrote(tmp_path, arguments, written):
    call = {"function": {"name": "find", "arguments": arguments}}
    messages = dialogue("lost", None)
    messages[1]["tool_calls"] = [call]
    (episode,), _ = imported(tmp_path, log_line(messages=messages))
    assert f'"arguments": {written}}}' in episode["dialogue_history"][1]["content"]


@pytest.mark.parametrize("text", ["", '{"messages": ['])
def test_an_empty_file_and_half_a_line_are_sentences(text, tmp_path):
    words = import_of(tmp_path)
    (tmp_path / "log").write_text(text)
    assert "found" in refusal(*words)


def test_a_message_that_the_template_cannot_render_is_named_with_the_template_s_own_words():
    refusing = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer = byte_tokenizer(refusing + PLAIN)
    messages = [*dialogue("order 12 is lost", "which?"), {"role": "tool", "content": "found"}]
    with pytest.raises(SystemExit, match="'order 12 is lost', of the roles user, assistant, tool "
                       ".no tools.; expected"):
        encode_dialogue(tokenizer, messages, generation_prompt=True)


def test_episodes_of_a_log_do_not_begin_with_the_agent(tmp_path):
    (first,), _ = imported(tmp_path, log_line())
    first["dialogue_history"] = first["dialogue_history"][1:]
    with pytest.raises(SystemExit, match="dialogue_history.0. of role 'assistant', expected"):
        read_episodes(write_rows(tmp_path / "episodes.jsonl", [first]))
    first["dialogue_history"].insert(0, {"role": "tool", "content": "It is open."})
    with pytest.raises(SystemExit, match="dialogue_history.1. of role 'assistant', expected"):
        read_episodes(write_rows(tmp_path / "episodes.jsonl", [first]))


def test_more_answers_than_are_graded_at_once_are_all_graded(tmp_path):
    episodes, said = imported(tmp_path, *[official_line("def f(x): return 2 * x")] * 66)
    assert "were graded: 66" in said and all(episode["success"] for episode in episodes)


def test_a_ground_truth_that_some_dialogues_lack_does_not_differ(tmp_path):
    _, said = imported(tmp_path, log_line(task="a", ground_truth="x"), log_line(task="a", reward=0))
    assert "Dialogues without ground_truth: 1 of 2" in said and "differ in ground_truth" not in said


def test_a_log_has_no_leak_whatever_its_user_says(tmp_path):
    messages = dialogue("hi", "which?", "known only afterwards", "so")
    (episode,), _ = imported(tmp_path, log_line(
        messages=messages, ground_truth="known only afterwards"))
    assert episode["leak"] == 0.0


def test_a_dialogue_that_an_error_stopped_has_no_reward_to_compare(tmp_path):
    graded = official_line("x") | {"reward": 0.25}
    _, said = imported(tmp_path, graded, official_line("x") | {"error": "server gone"})
    assert "0 of them with different rewards; rewards from 0.25 to 0.25" in said
    assert "Episodes that an error has stopped, which no stage uses: 1" in said
