"""Tasks, views, dialogue rules and token ids."""

import gzip
import json

import numpy
import pytest
from conftest import LOSES_THOUGHTS, PLAIN, TEMPLATES, UNNESTED, byte_tokenizer, dialogue, episode
from tokenizers import AddedToken, models, pre_tokenizers, processors

from colbench import (
    DOMAINS, agent_messages, agent_prompt_of, agent_view, encode_candidates, encode_dialogue,
    human_messages, prompt_of_episode, split_message, without_thoughts)
from formats.outcome import leak_share, outcome_of, reasons_of
from formats.read import complete_task, custom_prompt, load_episodes, read_episodes, read_tasks
from judge.sandbox import Grade, grade
from runtime.models import load_tokenizer
from runtime.templates import prompt_ids, render, without_system
from speakers.local import encode_prompt
from train_critic import critic_messages

TASK = {
    "problem_description": "write f",
    "ground_truth": "def f(n):\n    return n * SECRET",
    "test_cases": {"test1": "f(1)", "gap": None},
    "extra": {"kept": [1]},
}
DIALOGUE = dialogue("write f", "what is it?", "times two", "I WANT TO ANSWER: def f(n): ...")


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


# -----------------------------------------------------------------------------
# Tasks and episodes


def test_an_official_row_loads_and_keeps_unknown_keys(tmp_path):
    task = read_tasks(write(tmp_path / "t.jsonl", TASK))[0]
    assert task["extra"] == {"kept": [1]} and task["domain"] == "backend"
    assert task["test_cases"] == {"test1": "f(1)"}
    assert task["hidden_information"] == TASK["ground_truth"]
    assert read_tasks(write(tmp_path / "again.jsonl", task))[0] == task


@pytest.mark.parametrize("line, found", [
    ("{broken", "broken JSON"),
    ("[1]", "found a JSON array"),
    ("7", "found int"),
    ({"ground_truth": "x"}, "no 'problem_description'"),
    (TASK | {"test_cases": {}}, "no test"),
    (TASK | {"test_cases": {"a": None}}, "no test"),
    (TASK | {"test_cases": {"a": 3}}, "type int"),
    (TASK | {"ground_truth": 5}, "type int"),
    (TASK | {"ground_truth": " "}, "empty 'ground_truth'"),
    (TASK | {"domain": "other"}, "domain 'other'"),
    # no tag: a function that compares, whose tests are missing
    ({"problem_description": "p", "ground_truth": "def f(a, b): return a <b"}, "no 'test_cases'"),
])
def test_a_bad_task_line_is_named_with_file_line_and_what_was_expected(tmp_path, line, found):
    path = write(tmp_path / "t.jsonl", TASK, line)
    with pytest.raises(SystemExit, match=r"t\.jsonl: line 2.*" + found + ".*expected"):
        read_tasks(path)


@pytest.mark.parametrize("encode, advice", [
    (lambda line: b"\xef\xbb\xbf[" + line + b"]", r"jq -c '\.\[\]' .*t\.jsonl"),
    (lambda line: line.decode().encode("utf-16"), r"iconv -f UTF-16 -t UTF-8 .*t\.jsonl"),
    (gzip.compress, "gunzip it first"),
])
def test_a_file_that_other_programs_turn_into_lines_is_refused_with_their_names(
        tmp_path, encode, advice):
    (tmp_path / "t.jsonl").write_bytes(encode(2 * (json.dumps(TASK).encode() + b"\n")))
    with pytest.raises(SystemExit, match=rf"t\.jsonl: line 1: found .*expected .*{advice}"):
        read_tasks(tmp_path / "t.jsonl")


def test_a_repeated_official_row_is_another_task_and_a_repeated_id_is_refused(tmp_path):
    first, second = read_tasks(write(tmp_path / "t.jsonl", TASK, TASK))
    assert first["task_id"] != second["task_id"]
    assert first | {"task_id": ""} == second | {"task_id": ""}
    named = TASK | {"task_id": "a"}
    found = r"t\.jsonl: line 2: found task_id 'a' again .*line 1.*remove one"
    with pytest.raises(SystemExit, match=found):
        read_tasks(write(tmp_path / "t.jsonl", named, named))


def test_another_solution_to_the_same_request_is_another_task():
    one, other = (complete_task(TASK | {"ground_truth": code})["task_id"] for code in ("x", "y"))
    assert one != other and one == complete_task(TASK | {"ground_truth": "x"})["task_id"]


def test_a_file_of_episodes_given_twice_and_domains_together_are_refused(tmp_path):
    row = {"task": TASK, "dialogue_history": DIALOGUE, "answer": "x", "reward": 1.0}
    page = {"problem_description": "p", "ground_truth": "<html></html>"}
    functions = write(tmp_path / "functions.jsonl", row)
    pages = write(tmp_path / "pages.jsonl", row | {"task": page})
    with pytest.raises(SystemExit, match="found a file of episodes twice"):
        load_episodes([functions, f"{tmp_path}/./functions.jsonl"])
    with pytest.raises(SystemExit, match="found backend and frontend tasks together"):
        load_episodes([functions, pages])


def test_blank_lines_are_no_tasks_and_a_missing_or_empty_file_is_a_sentence(tmp_path):
    assert len(read_tasks(write(tmp_path / "t.jsonl", TASK, "", TASK, " "))) == 2
    with pytest.raises(SystemExit, match="no such file"):
        read_tasks(str(tmp_path / "none.jsonl"))
    with pytest.raises(SystemExit, match="found no line"):
        read_tasks(write(tmp_path / "empty.jsonl"))


def test_only_the_first_tasks_are_read_if_a_number_is_given(tmp_path):
    path = write(tmp_path / "t.jsonl", TASK, TASK, TASK)
    assert [len(read_tasks(path, count)) for count in (1, 2, 3, 9, None)] == [1, 2, 3, 3, 3]


def test_an_official_trajectory_file_loads_and_numbers_its_samples(tmp_path):
    told = dialogue("p", "q", TASK["ground_truth"], "x")
    rows = [{"task": TASK, "dialogue_history": told, "answer": "x", "reward": reward}
            for reward in (1.0, 0.5)]
    first, second = read_episodes(write(tmp_path / "e.jsonl", *rows))
    assert (first["sample"], second["sample"]) == (0, 1)
    assert (first["success"], second["success"]) == (True, False)
    assert first["turns"] == 2 and first["leak"] == 1.0 and first["error"] is None
    assert first["task"]["task_id"] == second["task"]["task_id"]


def test_samples_are_numbered_on_after_the_highest_of_the_files_before(tmp_path):
    files = [write(tmp_path / f"{samples}.jsonl", *(episode("t", 0.5, int(sample))
                                                    for sample in samples))
             for samples in ("20", "10", "01")]
    assert [row["sample"] for row in load_episodes(files)[0]] == [2, 0, 4, 3, 5, 6]


@pytest.mark.parametrize("reward", [-0.1, 1.1, 2, float("nan")])
def test_a_reward_outside_of_0_to_1_is_refused_except_in_logs(reward):
    with pytest.raises(SystemExit, match=f"found reward {reward}, expected a number between 0"):
        episode("t", reward)
    assert reward != reward or episode("t", reward, domain="logged")["reward"] == reward


def test_almost_all_tests_passed_are_no_success():
    assert [episode("t", reward)["success"] for reward in (1, 1.0, 0.9999, 0)] == [
        True, True, False, False]


def test_real_rows_load_and_survive_a_round_trip(real_data, tmp_path):
    tasks = read_tasks(real_data("colbench_backend_200.jsonl"))
    assert len(tasks) == 200
    assert read_tasks(write(tmp_path / "t.jsonl", *tasks)) == tasks
    pages = read_tasks(real_data("colbench_frontend_40.jsonl"))
    assert {task["domain"] for task in pages} == {"frontend"}


# -----------------------------------------------------------------------------
# What each party sees, and the rules of a dialogue


def test_no_privileged_byte_reaches_the_agent_and_the_critic_sees_it():
    task = complete_task(TASK | {"hidden_information": "HIDDEN"})
    view = agent_messages(DIALOGUE, "prompt")
    assert "SECRET" not in json.dumps(view) and "HIDDEN" not in json.dumps(view)
    privileged = critic_messages(task, view)
    assert "SECRET" in privileged[1]["content"]  # before the request
    assert privileged[1]["content"].endswith(view[1]["content"])
    assert privileged[2:] == view[2:] and privileged[0] == view[0]
    assert critic_messages(task, view, "none") == view


def test_the_human_sees_the_hidden_information_and_the_dialogue_with_roles_swapped():
    task = complete_task(TASK | {"hidden_information": "HIDDEN {problem_description}"})
    messages = human_messages(task, DIALOGUE, DOMAINS["backend"].human_prompt)
    # placeholders in the data stay as they are
    assert "HIDDEN {problem_description}" in messages[0]["content"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]


def test_a_human_with_the_dialogue_in_its_prompt_reads_what_the_official_one_reads():
    prompt = "{problem_description}|{dialogue_history}|{test_cases}|{missing}"
    task = TASK | {"problem_description": "write {ground_truth}"}
    system, message = human_messages(task, dialogue("write f", "what?", "so"), prompt)
    assert system == {"role": "system", "content": "You are a helpful assistant."}
    assert message == {"role": "user", "content": (
        "write {ground_truth}|user:write f\n\n\n\nassistant:what?\n\n\n\nuser:so\n\n\n\nagent:"
        "|{test_cases}|{missing}")}


@pytest.mark.parametrize("domain, text, content, answer", [
    ("backend", "ask?", "ask?", None),
    ("backend", "I WANT TO ANSWER: x I WANT TO ANSWER: y", ..., "x"),
    ("backend", "I WANT TO ANSWER:\nI WANT TO ANSWER: y", ..., "y"),
    ("backend", "a OUTPUT: b", "a OUTPUT: b", None),
    ("frontend", "thought OUTPUT: <html>", "<html>", None),
    ("frontend", "plan OUTPUT: I WANT TO ANSWER: <html> OUTPUT: 3",
     "I WANT TO ANSWER: <html> OUTPUT: 3", "<html> OUTPUT: 3"),
    # thoughts neither reach the human nor end the dialogue
    ("backend", "<think>\nI WANT TO ANSWER: not yet\n</think>\n\nask?", "ask?", None),
    ("backend", "opened by the template, I WANT TO ANSWER: no</think>ask?", "ask?", None),
    ("backend", "<think>a</think>b</think>ask?", "ask?", None),
    ("backend", "<think>so</think>I WANT TO ANSWER: x", "I WANT TO ANSWER: x", "x"),
    ("backend", "<think>cut: I WANT TO ANSWER: no", "", None),
])
def test_the_human_reads_no_thought_and_answers_follow_the_marker(domain, text, content, answer):
    found = split_message({"domain": domain}, text, False)
    assert found == (text if content is ... else content, answer)


def test_thoughts_that_never_end_are_no_speech_whatever_space_stands_before_them():
    assert without_thoughts("\n <think>It is x") is None
    assert without_thoughts("<think>a</think>b</think> c ") == "c"


def test_the_whole_last_message_is_the_answer():
    assert split_message({"domain": "backend"}, "ask?", True) == ("ask?", "ask?")


def test_an_old_turn_without_a_word_on_its_end_is_finished():
    history = dialogue("t", "a", "b", " c ", "d", "e")
    history[1]["finished"], history[3]["finished"] = True, False
    history[3]["output"] = " <think>x</think> c\n"
    played = episode("t", 1.0, agent_prompt="p") | {"dialogue_history": history}
    messages, finished = agent_view(played)
    assert finished == [True, False, True]
    assert [message["content"] for message in messages] == [
        "p", "t", "a", "b", "<think>x</think> c", "d", "e"]


@pytest.mark.parametrize("domain", ["backend", "frontend"])
def test_the_agents_instructions_state_the_number_of_turns_and_one_turn_has_its_own(domain):
    task = {"domain": domain}
    assert "10 " in agent_prompt_of(task, None)
    assert "2 " in agent_prompt_of(task, None, max_turns=2)
    once = agent_prompt_of(task, None, max_turns=1)
    assert "send one message" in once and "I WANT TO ANSWER:" in once
    for prompt in (once, agent_prompt_of(task, None)):
        assert "{" not in prompt
    assert agent_prompt_of(task, "", max_turns=1) == ""
    given = agent_prompt_of(task, "Send {max_turns} of {these}.", max_turns=4)
    assert given == "Send 4 of {these}."
    logged = {"domain": "logged"}  # which has no others for one turn
    assert agent_prompt_of(logged, None, 1) == agent_prompt_of(logged, None, 10) == ""


def test_an_episode_says_how_many_turns_its_agent_had():
    for max_turns, words in ((3, "send 3 messages"), (None, "send 10 messages")):
        played = episode("t", 1.0, agent_prompt=None, max_turns=max_turns)
        assert words in prompt_of_episode(played)


@pytest.mark.parametrize("prompts, expected", [
    ([(None, 10)] * 2, None),  # the domain's own
    ([(None, 10), (None, 1)], None),
    ([("Ask.", 10)] * 2, "Ask."),
    ([("", 10)] * 2, ""),
    ([("Ask.", 10), ("Answer.", 10)], None),
    ([("Ask.", 10), (None, 10)], None),
])
def test_only_instructions_of_all_episodes_and_no_domain_stay_with_the_weights(prompts, expected):
    task = {"domain": "backend"}
    episodes = [{"task": task, "max_turns": turns,
                 "agent_prompt": agent_prompt_of(task, given, turns)} for given, turns in prompts]
    said = []
    assert custom_prompt(episodes, said.append) == expected
    assert bool(said) == (prompts[0][0] != prompts[1][0])
    official = [{"task": task, "agent_prompt": given} for given, _ in prompts]  # no max_turns
    assert custom_prompt(official, said.append) == expected


@pytest.mark.parametrize("message, reason", [
    ("What about the joiner?", "no answer"),
    ("", "no answer"),
    ("I WANT TO ANSWER: What about the joiner?", "raised SyntaxError"),
    ("I WANT TO ANSWER:", "no code"),
    ("def f(n): return n", "wrong"),
    ("def f(n): return 2 * n", "passed"),
    ("joiner", "raised NameError"),
])
def test_a_last_message_without_marker_that_is_no_code_is_no_answer(message, reason):
    task = {"ground_truth": "def f(n): return 2 * n", "test_cases": {"a": "f(1)", "b": "f(2)"}}
    _, answer = split_message({"domain": "backend"}, message, last_turn=True)
    history = [{"role": "assistant", "content": message}]
    assert reasons_of(grade(task, answer), history) == {"a": reason, "b": reason}


@pytest.mark.parametrize("reward, success", [
    (7, None), (7, True), (True, True), (float("nan"), False), (-0.1, False),
    (numpy.float32(1), True), (1.0, None), (1.0, False), (0.5, True)])
def test_a_new_domains_grade_that_no_stage_would_read_is_refused_at_its_first_dialogue(
        reward, success):
    task = {"domain": "backend", "ground_truth": "x"}
    history = [{"role": "assistant", "content": "y"}]
    for good in (Grade(1.0, True, {}), Grade(0, False, {}), Grade(numpy.float64(0.5), False, {})):
        assert outcome_of(task, history, good)["success"] == good.success
    with pytest.raises(SystemExit, match="the judge of backend tasks: found reward .*expected a n"):
        outcome_of(task, history, Grade(reward, success, {}))


def test_no_answer_leaves_the_tests_that_the_solution_fails_as_they_are():
    graded = Grade(0.0, False, {"a": "raised SyntaxError", "b": "solution failed"})
    asked, guessed = ([{"role": "assistant", "content": text}] for text in ("What?", "f = eval"))
    assert reasons_of(graded, asked) == {"a": "no answer", "b": "solution failed"}
    some = Grade(0.0, False, {"a": "raised SyntaxError", "b": "wrong"})
    assert reasons_of(some, guessed) == some.reasons


def test_the_leak_meter_measures_the_longest_repeated_run():
    task = {"ground_truth": "a b c d e f g h i j"}

    def leak(*replies):
        history = [{"role": "user", "content": task["ground_truth"]}]  # the request leaks nothing
        for reply in replies:
            history += [{"role": "assistant", "content": task["ground_truth"]},  # nor the agent
                        {"role": "user", "content": reply}]
        return leak_share(task, history)

    assert leak("nothing", "c d e f") == 0.4
    assert leak("a x b x c") == 0.1
    assert leak(task["ground_truth"]) == 1.0
    assert leak() == 0.0
    task["ground_truth"] = "x = (1 + 2) * 3\n" * 30  # it is long and repeats itself
    assert leak(f"It is: {task['ground_truth']}") == 1.0


# -----------------------------------------------------------------------------
# Token ids


@pytest.mark.parametrize("template", TEMPLATES)
def test_turn_index_marks_each_turn_and_its_closing_token_and_nothing_else(template):
    tokenizer = byte_tokenizer(template)
    messages = [{"role": "system", "content": "rules"}] + DIALOGUE
    ids, turn_index = encode_dialogue(tokenizer, messages, [True, False])

    def text_of(turn):
        return tokenizer.decode(
            [token for token, index in zip(ids, turn_index, strict=True) if index == turn])

    assert text_of(0) == DIALOGUE[1]["content"] + "<end>"
    assert text_of(1) == DIALOGUE[3]["content"]
    assert "rules" in text_of(-1) and "what is it?" not in text_of(-1)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_the_beginning_of_the_dialogue_that_it_becomes(template):
    tokenizer = byte_tokenizer(template)
    whole, _ = encode_dialogue(tokenizer, DIALOGUE)
    for length in (1, 3):
        prompt, turn_index = encode_dialogue(tokenizer, DIALOGUE[:length], generation_prompt=True)
        assert whole[:len(prompt)] == prompt and turn_index[-1] == -1


@pytest.mark.parametrize("template", [
    name for name in TEMPLATES if name != "qwen3"])  # which adds thoughts to the first of two turns
def test_a_candidate_is_the_turn_that_it_becomes_even_after_a_turn_of_the_agent(template):
    tokenizer = byte_tokenizer(template)
    spoken = [{"role": "assistant", "content": text} for text in ("I call.", "It is done.")]
    whole, _ = encode_dialogue(tokenizer, [DIALOGUE[0], *spoken])
    (ids, turn_index, _), = encode_candidates(  # which just fits
        tokenizer, [DIALOGUE[0], spoken[0]], ["It is done."], [True], len(whole))
    assert ids == whole and tokenizer.decode(ids[turn_index.index(0):]) == "It is done.<end>"
    (short, _, dropped), = encode_candidates(
        tokenizer, [DIALOGUE[0], spoken[0]], ["It is done."], [True], len(whole) - 1)
    assert short == encode_dialogue(tokenizer, [DIALOGUE[0], spoken[1]])[0] and dropped == 1


def test_rows_share_one_object_for_each_id_so_a_token_takes_16_bytes_not_48():
    tokenizer = load_tokenizer("toy/base")
    turns = ["Which discount do you want?"] * 3
    rows = [encode_dialogue(tokenizer, dialogue(*turns, turn))[0] for turn in turns]
    rows += [row for row, _, _ in encode_candidates(
        tokenizer, dialogue(*turns), turns, [True, True, False], 8192)]
    tokens = [token for row in rows for token in row]
    assert max(tokens) > 256  # smaller ones are shared by Python itself
    assert len(set(map(id, tokens))) == len(set(tokens))


NO_OTHER_ROLES = (  # it writes nothing of them, and does not say so
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<start>user\n' + m['content'] + '<end>' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<start>agent\n' + m['content'] + '<end>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>agent\n' }}{% endif %}")


def test_what_a_template_would_leave_out_opens_the_request_or_is_refused():
    tokenizer = byte_tokenizer(NO_OTHER_ROLES)
    told = [{"role": "system", "content": "Be brief."}, *dialogue("t", "a", "b")]
    assert render(tokenizer, told) == render(tokenizer, dialogue("Be brief.\n\nt", "a", "b"))
    tokenizer = byte_tokenizer("{# of tools and functions #}" + NO_OTHER_ROLES)
    silent = [*dialogue("t"), {"role": "tool", "content": ""}]  # of which nothing is left out
    assert render(tokenizer, silent) == render(tokenizer, dialogue("t"))
    for role in ("tool", "function", "system"):
        with pytest.raises(SystemExit, match=f"leaves out what messages of the role '{role}' say"):
            render(tokenizer, [*dialogue("t"), {"role": role, "content": "It rains."}])
        assert "It rains." in render(byte_tokenizer(PLAIN), [
            *dialogue("t"), {"role": role, "content": "It rains."}])
    writes_the_first = byte_tokenizer(  # as SmolLM3's
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
        + NO_OTHER_ROLES)
    assert "Be brief." in render(writes_the_first, told)
    with pytest.raises(SystemExit, match="leaves out what messages of the role 'system' say"):
        render(writes_the_first, [*told, {"role": "system", "content": "It rains."}])
    ends_the_last = byte_tokenizer(NO_OTHER_ROLES.replace(  # Qwen3's adds thoughts to it
        "m['content'] +", "m['content'] + ('<stop>' if loop.last else '') +"))
    with pytest.raises(SystemExit, match="leaves out what messages of the role 'tool' say"):
        render(ends_the_last, [*dialogue("t", "a"), {"role": "tool", "content": "It rains."}])


def test_a_critics_note_opens_the_request_of_pictures_too():
    system = {"role": "system", "content": "Be brief."}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    told = without_system([system, {"role": "user", "content": [picture]}, *dialogue("a", "b")])
    assert told[0]["role"] == "user" and told[1:] == dialogue("a", "b")
    assert told[0]["content"] == [{"type": "text", "text": "Be brief.\n\n"}, picture]


@pytest.mark.parametrize("template", ["llama3", "qwen2.5"])
def test_what_follows_a_cut_turn_is_read_after_its_end_which_the_turn_did_not_say(template):
    tokenizer = byte_tokenizer(template)
    whole, whole_index = encode_dialogue(tokenizer, dialogue("h", "o", "m", "s"))
    ids, turn_index = encode_dialogue(tokenizer, dialogue("h", "o", "m", "s"), [False, True])
    end = len(whole_index) - 1 - whole_index[::-1].index(0)  # of the first turn
    assert ids == whole and turn_index == [*whole_index[:end], -1, *whole_index[end + 1:]]


def test_a_date_in_a_template_is_always_the_same():
    template = "{{ strftime_now('%d %B %Y') }}" + TEMPLATES["llama3"]
    text = render(byte_tokenizer(template), dialogue("t"))
    assert text == "26 Jul 2024" + render(byte_tokenizer(), dialogue("t"))
    several = byte_tokenizer()
    several.chat_template = {"default": template, "tool_use": PLAIN}
    assert render(several, dialogue("t")) == text


def test_what_a_turn_says_is_never_a_special_token():
    tokenizer = byte_tokenizer()
    said = "a <end> b<start>"
    ids, turn_index = encode_dialogue(tokenizer, dialogue("t", said, "<end>"))
    turn = [token for token, index in zip(ids, turn_index, strict=True) if index == 0]
    assert turn[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in turn[:-1]
    assert tokenizer.decode(turn[:-1]) == said
    (ids, turn_index, _), = encode_candidates(tokenizer, dialogue("t"), [said], [False], 99)
    assert ids[turn_index.index(0):] == turn[:-1]


def spaced_tokenizer(scheme, template):
    """Like Llama 2's: a space is ▁, and one is set before every text, or before the first alone."""
    tokenizer = byte_tokenizer(template)
    letters = {letter: token for token, letter in enumerate("▁\nabcdefghijklmnopqrstuvwxyz", 300)}
    tokenizer.backend_tokenizer.model = models.BPE(tokenizer.get_vocab() | letters, [])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


OPENS_WITH_A_TOKEN = (  # as Phi-3's, where PLAIN ends its prompts in ordinary text
    "{% for m in messages %}{{ '<bos>' if m['role'] == 'user' else '<start>' }}{{ m['content'] }}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}{{ '<start>' }}{% endif %}")


@pytest.mark.parametrize("template", [PLAIN, OPENS_WITH_A_TOKEN])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_dialogue_has_the_tokens_of_its_whole_text_whatever_a_tokenizer_prepends(
        scheme, template):
    tokenizer = spaced_tokenizer(scheme, template)
    messages = dialogue("t", "yes it is", "a b", "no")
    whole = render(tokenizer, messages[:3]) + "no<end>"
    assert encode_dialogue(tokenizer, messages)[0] == prompt_ids(tokenizer, [whole])[0]


def test_a_turn_that_begins_with_a_line_end_keeps_it_where_two_of_them_are_one_token():
    tokenizer = spaced_tokenizer("first", PLAIN)
    lines = {"\n": tokenizer.convert_tokens_to_ids("\n"), "\n\n": 400}
    tokenizer.backend_tokenizer.model = models.BPE(
        tokenizer.get_vocab() | lines, [("\n", "\n")])
    texts = ["\nyes it is", "\n\nyes", "yes", " yes"]
    rows = encode_candidates(tokenizer, dialogue("t"), texts, [False] * len(texts), 99)
    said = [tokenizer.convert_ids_to_tokens(ids[turn_index.index(0):])
            for ids, turn_index, _ in rows]
    assert ["".join(tokens).replace("▁", " ") for tokens in said] == texts
    assert said[1][0] == "\n\n"


def test_an_end_of_turn_token_takes_in_the_line_end_after_it_as_in_the_whole_text():
    tokenizer = spaced_tokenizer("first", OPENS_WITH_A_TOKEN)
    tokenizer.add_tokens([AddedToken("<end>", rstrip=True, special=True)])
    messages = dialogue("t", "yes it is", "a b")
    ids, _ = encode_dialogue(tokenizer, messages, generation_prompt=True)
    assert ids == prompt_ids(tokenizer, [render(tokenizer, messages)])[0]
    assert tokenizer.convert_tokens_to_ids("\n") not in ids


def test_a_tokenizer_that_opens_every_text_opens_no_part_of_a_dialogue():
    """As Llama's does with its token for the beginning, which the template writes itself."""
    plain, opening = byte_tokenizer(), byte_tokenizer()
    token = opening.convert_tokens_to_ids("<bos>")
    opening.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", token)])
    assert opening.encode("x")[0] == token
    assert encode_dialogue(opening, DIALOGUE) == encode_dialogue(plain, DIALOGUE)
    assert encode_candidates(opening, DIALOGUE[:1], ["a", "b"], [True, False], 999) == (
        encode_candidates(plain, DIALOGUE[:1], ["a", "b"], [True, False], 999))
    unnested = byte_tokenizer(UNNESTED)
    wanted = encode_prompt(unnested, DIALOGUE[:1])
    unnested.backend_tokenizer.post_processor = opening.backend_tokenizer.post_processor
    assert encode_prompt(unnested, DIALOGUE[:1]) == wanted


def test_a_turn_that_the_template_changes_later_is_quoted():
    messages = dialogue("a", "<think>x</think>b", "c", "d")
    with pytest.raises(SystemExit, match="does not nest .*, here from '<think>x</think>b<end>"):
        encode_dialogue(byte_tokenizer(LOSES_THOUGHTS), messages)


@pytest.mark.parametrize("template, found", [
    (None, "without chat template"),
    ("{% for %}", "the chat template of .* refuses the dialogue"),
    (UNNESTED, "does not nest"),
    ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "closes no agent turn"),
    (PLAIN.replace("<end>", ""), r"with the ordinary text '\\n'"),
])
def test_a_template_without_closed_turns_that_nest_is_refused(template, found):
    with pytest.raises(SystemExit, match=f"{found}.*expected"):
        encode_dialogue(byte_tokenizer(template), dialogue("a", "b"))
