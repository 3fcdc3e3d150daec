"""Tasks, views, rules, encoding and speakers. Run: pytest tests/test_dialogue.py"""

import json
import weakref

import pytest
import torch
from conftest import TEMPLATES, UNNESTED, byte_tokenizer, tiny_model

import colbench
from colbench import (
    LocalSpeaker,
    Utterance,
    agent_messages,
    critic_messages,
    encode_dialogue,
    end_of_turn,
    human_messages,
    leak_share,
    read_episodes,
    read_tasks,
    split_message,
)

TASK = {"problem_description": "write f", "ground_truth": "def f(n):\n    return n * SECRET",
        "test_cases": {"test1": "f(1)", "gap": None}, "extra": {"kept": [1]}}
DIALOGUE = [{"role": "user", "content": "write f"}, {"role": "assistant", "content": "what is it?"},
            {"role": "user", "content": "times two"}, {"role": "assistant", "content": "I WANT TO ANSWER: def f(n): ..."}]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


# -----------------------------------------------------------------------------
# Tasks and episodes


def test_an_official_row_loads_and_keeps_unknown_keys(tmp_path):
    task = read_tasks(write(tmp_path / "t.jsonl", TASK))[0]
    assert task["extra"] == {"kept": [1]} and task["domain"] == "backend"
    assert task["test_cases"] == {"test1": "f(1)"} and task["hidden_information"] == TASK["ground_truth"]
    assert read_tasks(write(tmp_path / "again.jsonl", task))[0] == task


@pytest.mark.parametrize("line, found", [
    ("{broken", "broken JSON"), ("[1]", "found list"), ({"ground_truth": "x"}, "no 'problem_description'"),
    (TASK | {"test_cases": {}}, "no test"), (TASK | {"test_cases": {"a": None}}, "no test"),
    (TASK | {"test_cases": {"a": 3}}, "type int"), (TASK | {"ground_truth": 5}, "type int"),
    (TASK | {"ground_truth": " "}, "empty 'ground_truth'"), (TASK | {"domain": "other"}, "domain 'other'"),
])
def test_a_bad_task_line_is_named_with_file_line_and_what_was_expected(tmp_path, line, found):
    path = write(tmp_path / "t.jsonl", TASK, line)
    with pytest.raises(SystemExit, match=r"t\.jsonl: line 2.*" + found + ".*expected"):
        read_tasks(path)


def test_an_official_row_that_comes_again_is_another_task_and_an_id_that_does_is_refused(tmp_path):
    first, second = read_tasks(write(tmp_path / "t.jsonl", TASK, TASK))
    assert first["task_id"] != second["task_id"] and first | {"task_id": ""} == second | {"task_id": ""}
    with pytest.raises(SystemExit, match=r"t\.jsonl: line 2: found task_id 'a' again .*line 1.*remove one"):
        read_tasks(write(tmp_path / "t.jsonl", TASK | {"task_id": "a"}, TASK | {"task_id": "a"}))


def test_a_missing_or_empty_file_is_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="no such file"):
        read_tasks(str(tmp_path / "none.jsonl"))
    with pytest.raises(SystemExit, match="found no line"):
        read_tasks(write(tmp_path / "empty.jsonl"))


def test_an_official_trajectory_file_loads_and_numbers_its_samples(tmp_path):
    rows = [{"task": TASK, "dialogue_history": DIALOGUE, "answer": "x", "reward": reward} for reward in (1.0, 0.5)]
    first, second = read_episodes(write(tmp_path / "e.jsonl", *rows))
    assert (first["sample"], second["sample"]) == (0, 1) and (first["success"], second["success"]) == (True, False)
    assert first["turns"] == 2 and first["task"]["task_id"] == second["task"]["task_id"] and first["error"] is None


@pytest.mark.parametrize("change, found", [
    ({"reward": None}, "'reward'"), ({"reward": 7}, "reward 7"), ({"dialogue_history": DIALOGUE[1:]}, "no message of role"),
    ({"dialogue_history": "text"}, "type str"), ({"task": 3}, "type int"), ({"dialogue_history": []}, "0 messages"),
])
def test_a_bad_episode_line_is_named(tmp_path, change, found):
    row = {"task": TASK, "dialogue_history": DIALOGUE, "answer": "x", "reward": 1.0}
    with pytest.raises(SystemExit, match="line 2.*" + found):
        read_episodes(write(tmp_path / "e.jsonl", row, row | change))


def test_real_rows_load_and_survive_a_round_trip(real_data, tmp_path):
    tasks = read_tasks(str(real_data / "colbench_backend_200.jsonl"))
    assert len(tasks) == 200 and read_tasks(write(tmp_path / "t.jsonl", *tasks)) == tasks
    assert {task["domain"] for task in read_tasks(str(real_data / "colbench_frontend_40.jsonl"))} == {"frontend"}


# -----------------------------------------------------------------------------
# Views and rules


def test_no_privileged_byte_reaches_the_agent_and_the_critic_sees_it():
    task = colbench.complete_task(TASK | {"hidden_information": "HIDDEN"})
    seen = json.dumps(agent_messages(task, DIALOGUE, "prompt"))
    assert "SECRET" not in seen and "HIDDEN" not in seen
    view = agent_messages(task, DIALOGUE, "prompt")
    privileged = critic_messages(task, view)
    assert "SECRET" in privileged[1]["content"] and critic_messages(task, view, "none") == view
    assert privileged[2:] == view[2:] and privileged[0] == view[0]


def test_the_human_sees_the_hidden_information_and_the_dialogue_with_roles_swapped():
    task = colbench.complete_task(TASK | {"hidden_information": "HIDDEN {problem_description}"})
    messages = human_messages(task, DIALOGUE, colbench.HUMAN_PROMPT["backend"])
    assert "HIDDEN {problem_description}" in messages[0]["content"]  # placeholders in the data are left alone
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    official = human_messages(task, DIALOGUE, "{dialogue_history} | {hidden_information}")
    assert len(official) == 1 and "agent: what is it?" in official[0]["content"]


def test_the_answer_is_what_follows_the_marker_or_the_whole_last_message():
    backend, frontend = {"domain": "backend"}, {"domain": "frontend"}
    assert split_message(backend, "ask?", False) == ("ask?", None)
    assert split_message(backend, "ask?", True) == ("ask?", "ask?")
    assert split_message(backend, "so I WANT TO ANSWER: x I WANT TO ANSWER: y", False)[1] == "x I WANT TO ANSWER: y"
    assert split_message(backend, "a OUTPUT: b", False)[0] == "a OUTPUT: b"
    assert split_message(frontend, "thought OUTPUT: <html>", False) == ("<html>", None)


def test_the_leak_meter_measures_the_longest_repeated_run():
    task = {"ground_truth": "a b c d e f g h i j"}
    assert leak_share(task, ["nothing", "c d e f"]) == 0.4 and leak_share(task, ["a x b x c"]) == 0.1
    assert leak_share(task, [task["ground_truth"]]) == 1.0 and leak_share(task, []) == 0.0


# -----------------------------------------------------------------------------
# Encoding


@pytest.mark.parametrize("template", TEMPLATES)
def test_turn_index_marks_each_turn_and_its_closing_token_and_nothing_else(template):
    tokenizer = byte_tokenizer(template)
    messages = [{"role": "system", "content": "rules"}] + DIALOGUE
    ids, turn_index = encode_dialogue(tokenizer, messages, [True, False])
    for turn, closed in ((0, "<end>"), (1, "")):
        text = tokenizer.decode([token for token, index in zip(ids, turn_index, strict=True) if index == turn])
        assert text == DIALOGUE[2 * turn + 1]["content"] + closed
    rest = tokenizer.decode([token for token, index in zip(ids, turn_index, strict=True) if index < 0])
    assert "rules" in rest and "what is it?" not in rest


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_the_beginning_of_the_dialogue_that_it_becomes(template):
    tokenizer = byte_tokenizer(template)
    whole, _ = encode_dialogue(tokenizer, DIALOGUE)
    for length in (1, 3):
        prompt, index = encode_dialogue(tokenizer, DIALOGUE[:length])
        assert whole[:len(prompt)] == prompt and index[-1] == -1


def test_the_example_in_the_docstring_holds():
    tokenizer = byte_tokenizer("{% for m in messages %}{{ '<bos>' if m['role'] == 'user' else '<start>' }}{{ m['content'] }}"
                               "{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>' }}{% endif %}")
    messages = [{"role": role, "content": text} for role, text in
                (("user", "h"), ("assistant", "o"), ("user", "m"), ("assistant", "s"))]
    ids, index = encode_dialogue(tokenizer, messages, [True, False])
    assert tokenizer.convert_ids_to_tokens(ids) == "<bos> h <end> <start> o <end> <bos> m <end> <start> s".split()
    assert index == [-1, -1, -1, -1, 0, 0, -1, -1, -1, -1, 1]


def test_templates_that_do_not_nest_are_refused_for_training_and_missing_ones_altogether():
    with pytest.raises(SystemExit, match="does not nest"):
        encode_dialogue(byte_tokenizer(UNNESTED), DIALOGUE)
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(SystemExit, match="without chat template"):
        end_of_turn(bare)


@pytest.mark.parametrize("reply_chars, domain, expected", [(None, "backend", 400), (None, "frontend", 1000),
                                                           (50, "backend", 50)])
def test_replies_of_the_human_are_cut_at_the_limit_of_the_domain_or_the_flag(reply_chars, domain, expected):
    from collect import Dialogue, Rules, human_turn

    class Wordy:
        def speak(self, conversations, **options):
            return [[Utterance("x" * 2000, True)] for _ in conversations]

        def human_view(self, *dialogue):
            return []

    dialogue = Dialogue({"task_id": "t", "domain": domain}, 0, DIALOGUE[:2])
    human_turn([dialogue], Wordy(), Rules(None, None, 10, reply_chars, 0), Wordy())
    assert dialogue.history[2] == {"role": "user", "content": "x" * expected}


# -----------------------------------------------------------------------------
# The local speaker


def speaker(template="llama3", family="llama", **options):
    tokenizer = byte_tokenizer(template)
    options = {"max_new_tokens": 12, "device": "cpu"} | options
    return LocalSpeaker("tiny", model=tiny_model(tokenizer, family), tokenizer=tokenizer, **options)


CONVERSATIONS = [[{"role": "system", "content": "s"}, {"role": "user", "content": "word " * length}]
                 for length in (9, 1, 30, 4, 17)]


@pytest.mark.parametrize("template, family", [("llama3", "llama"), ("qwen2.5", "qwen2"), ("qwen3", "qwen3"),
                                              ("no_system", "llama"), (UNNESTED, "llama"), ("llama3", "mistral"),
                                              ("llama3", "gemma3_text")])
def test_greedy_texts_are_the_same_batched_and_alone(template, family):
    greedy = speaker(template, family, temperature=0)
    alone = [greedy.speak([conversation])[0] for conversation in CONVERSATIONS]
    assert greedy.speak(CONVERSATIONS) == alone and len({said[0].text for said in alone}) > 1


def test_sampled_texts_depend_on_the_seed_and_not_on_the_neighbours():
    sampler = speaker()
    seeds = [11, 12, 13, 14, 15]
    together = sampler.speak(CONVERSATIONS, n=3, seeds=seeds)
    alone = [sampler.speak([c], n=3, seeds=[s])[0] for c, s in zip(CONVERSATIONS, seeds, strict=True)]
    assert together == alone and together != sampler.speak(CONVERSATIONS, n=3, seeds=[1, 2, 3, 4, 5])
    assert len({utterance.text for utterance in together[0]}) > 1


def test_samples_follow_the_model_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)
    picked = colbench.pick_tokens(logits, torch.rand(20000, generator=generator), 0.7)
    shares = torch.bincount(picked, minlength=4) / 20000
    assert torch.allclose(shares, (logits[0] / 0.7).softmax(-1), atol=0.01)


def test_each_token_of_a_sample_is_drawn_with_a_number_of_its_own():
    sampler = speaker(max_new_tokens=12)
    ids = colbench.encode_prompt(sampler.tokenizer, CONVERSATIONS[0])
    said, uniform, start = sampler.speak([CONVERSATIONS[0]], n=2, seeds=[5])[0], colbench.uniform_numbers([5], 2, 12), len(ids)
    for sample in range(2):
        longer = torch.tensor([ids])
        for step in range(12):  # the whole prefix again for each token
            logits = sampler.model(longer).logits[:, -1]
            longer = torch.cat([longer, colbench.pick_tokens(logits, uniform[[sample], step], 1.0)[:, None]], 1)
            if longer[0, -1].item() in sampler.stops:
                break
        assert said[sample].text == sampler.tokenizer.decode(longer[0, start:], skip_special_tokens=True).strip()


@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3", "mistral", "gemma3_text"))
def test_samples_that_look_at_one_prompt_together_say_what_samples_with_copies_of_it_say(family, monkeypatch):
    """Samples of prompts of unequal length end at different times, so rows and whole prompts leave the batch."""
    sampler = speaker(family=family, max_new_tokens=40)
    sampler.stops |= set(range(50))  # texts end often
    together = sampler.speak(CONVERSATIONS, n=4, seeds=range(5))
    assert sampler.model.config._attn_implementation == "shared_prompts"
    monkeypatch.setattr(colbench, "share_prompts", lambda model, cache, n: cache.batch_repeat_interleave(n) or cache)
    assert together == sampler.speak(CONVERSATIONS, n=4, seeds=range(5))
    longest = [max(len(utterance.text) for utterance in said) for said in together]
    assert len(set(longest)) > 2 and len({utterance.text for said in together for utterance in said}) > 9


def test_a_model_with_an_attention_of_its_own_keeps_it_for_samples():
    sampler, eager = speaker(), speaker()
    eager.model.set_attn_implementation("eager")
    assert eager.speak(CONVERSATIONS, n=3, seeds=range(5)) == sampler.speak(CONVERSATIONS, n=3, seeds=range(5))
    assert eager.model.config._attn_implementation == "eager"


def test_greedy_equals_the_generate_of_transformers():
    greedy = speaker(temperature=0, max_new_tokens=20)
    ids = colbench.encode_prompt(greedy.tokenizer, CONVERSATIONS[0])
    output = greedy.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False,
                                   eos_token_id=list(greedy.stops))[0, len(ids):]
    assert greedy.speak([CONVERSATIONS[0]])[0][0].text == greedy.tokenizer.decode(output, skip_special_tokens=True).strip()


def test_a_kept_cache_changes_no_greedy_token_and_reads_only_what_is_new():
    greedy, fresh = speaker(temperature=0), speaker(temperature=0)
    read = []
    forward = greedy.model.forward
    greedy.model.forward = lambda input_ids, **rest: read.append(input_ids.shape[1]) or forward(input_ids=input_ids, **rest)
    conversations = [list(conversation) for conversation in CONVERSATIONS]
    names = list("abcde")
    for turn in range(4):
        said = greedy.speak(conversations, keys=names)
        assert said == [fresh.speak([conversation])[0] for conversation in conversations]
        for number, (conversation, utterances) in enumerate(zip(conversations, said, strict=True)):
            conversation += [{"role": "assistant", "content": utterances[0].text},
                             {"role": "user", "content": "go on " * (number + turn)}]
        if turn == 1:  # a dialogue ends and another takes its place
            conversations[0], names[0] = list(CONVERSATIONS[1]), "f"
        if turn == 2:
            longest_prompt = max(len(colbench.encode_prompt(greedy.tokenizer, c)) for c in conversations)
            read.clear()
    assert max(read) < longest_prompt / 2


def test_caches_of_the_turn_before_are_gone_while_the_model_reads_and_writes():
    talker, alive = speaker(max_new_tokens=3), []
    talker.speak(CONVERSATIONS, keys=list("abcde"))
    before = [weakref.ref(layers[0][0]) for _, layers in talker.kept.values()]
    talker.model.register_forward_pre_hook(lambda *_: alive.append(sum(tensor() is not None for tensor in before)))
    talker.speak([[*conversation, *said] for conversation in CONVERSATIONS for said in [
        [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]]], keys=list("abcde"))
    assert len(before) == 5 and alive and not any(alive)


def test_an_utterance_says_whether_it_was_finished():
    talker = speaker(temperature=0, max_new_tokens=5)
    assert talker.speak([CONVERSATIONS[0]])[0][0].finished is False
    stop = colbench.encode_prompt(talker.tokenizer, CONVERSATIONS[0])
    token = talker.model(torch.tensor([stop])).logits[0, -1].argmax().item()
    talker.stops = {token}
    assert talker.speak([CONVERSATIONS[0]])[0][0] == Utterance("", True)
