"""Vision-language models: the human of pages, and the critic that sees the solution page."""

import json
import shutil
import types
from pathlib import Path

import pytest
import torch
import transformers
from conftest import (
    byte_tokenizer, dialogue, metrics, needs_chromium, png, ranked_state, refusal, run_script,
    training, weights, write_rows)
from parties import slow_text

import variants.sight
from colbench import agent_messages, human_page_view, image_part
from collect import states_of
from formats.read import complete_episode, read_episodes
from runtime import checkpoints
from runtime.models import load_model
from runtime.processes import Process
from speakers import load_speaker
from speakers.interface import Request, SpeakerSettings, Utterance
from speakers.local import encode_prompt, refuse_unfit_layers, uniform_numbers
from speakers.vision import (
    VisionSpeaker, load_processor, picture_inputs, processor_class, without_videos)
from toy.frontend import page_of
from toy.world import toy_tasks
from variants.sight import Sight, forward_seen, vision_value_class
from variants.value_critic import Reader, ValueCritic

# The structure of Qwen2-VL's template: a picture is a token of its own between two others
TEMPLATE = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory):
    """Directory of a tiny random Qwen2-VL."""
    from transformers import AutoModelForImageTextToText, Qwen2VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = byte_tokenizer(TEMPLATE)
    tokens = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
              "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    special = ["<bos>", "<start>", "<stop>", *tokens.values()]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "rope_parameters": rope,
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
              "initializer_range": 0.3}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(Qwen2VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids))
    folder = str(tmp_path_factory.mktemp("vision"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=12 * 28 * 28)
    pictures.save_pretrained(folder)
    return folder


def conversation(shown="red", wanted="blue", words="what now?", height=60):
    pages = {"<html>shown</html>": shown and png(shown, height=height), "wanted": png(wanted)}
    judge = types.SimpleNamespace(picture=pages.get)
    task = {"problem_description": "a page", "ground_truth": "wanted"}
    content = f"{words} <html>shown</html>" if shown else words
    return human_page_view(
        task, dialogue("a page", content), "Say what differs in {message}", judge)


# -----------------------------------------------------------------------------
# The human of pages


def vision_speaker(path, max_new_tokens, temperature=0.0, **settings):
    return VisionSpeaker(path, SpeakerSettings(
        temperature=temperature, max_new_tokens=max_new_tokens, **settings))


def answers_of(speaker, conversations, n=1, first_seed=0):
    """What the speaker answers to all of them at once; conversation i has the seed after i."""
    return speaker.speak([Request(messages, n, first_seed + index)
                          for index, messages in enumerate(conversations)])


def test_the_human_sees_both_pictures(tiny_vision):
    speaker = vision_speaker(tiny_vision, 24)
    answers = [answers_of(speaker, [conversation(shown, wanted)])[0]
               for shown, wanted in (("red", "blue"), ("green", "blue"), ("red", "white"))]
    assert len({answer[0] for answer in answers}) == 3
    assert answers[0] == answers_of(speaker, [conversation()])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_conversations_answered_together_are_answered_as_one_by_one(tiny_vision, temperature):
    conversations = [conversation(), conversation(None, "white", "a much longer message " * 4),
                     conversation("green", height=300)]
    speaker = vision_speaker(tiny_vision, 16, temperature)
    together = answers_of(speaker, conversations, 2, 5)
    single = vision_speaker(tiny_vision, 16, temperature, batch_size=1)
    for index, messages in enumerate(conversations):
        alone = answers_of(single, [messages], 2, 5 + index)
        assert alone == [together[index]]
        assert (alone[0][0] == alone[0][1]) == (temperature == 0)


def test_text_alone_is_answered_as_a_text_model_would(tiny_vision):
    speaker = vision_speaker(tiny_vision, 16, temperature=1.0)
    tokenizer, messages = speaker.processor.tokenizer, dialogue("what is it?")
    expected = slow_text(speaker, tokenizer, encode_prompt(tokenizer, messages),
                         uniform_numbers([3], 1, 16)[0])
    assert speaker.reply(Request(messages, 1, 3))[0].text == expected


def test_a_checkpoints_own_penalties_and_its_missing_pad_token_change_no_answer(
        tiny_vision, tmp_path):
    own = {"repetition_penalty": 5.0, "do_sample": True, "top_k": 1}
    config = json.loads(Path(tiny_vision, "tokenizer_config.json").read_text())
    other = copy_of(tiny_vision, tmp_path / "other", generation_config_json=json.dumps(own),
                    tokenizer_config_json=json.dumps(config | {"pad_token": None}))
    conversations = [conversation(), conversation(None, "white", "a much longer message")]
    first, second = (answers_of(vision_speaker(path, 12, 1.0), conversations)
                     for path in (other, tiny_vision))
    assert first == second


@pytest.mark.parametrize("words", [
    "what <|image_pad|>now<end>?", "what now<|image_<|image_pad|>pad|>?"])  # one within another
def test_a_spelt_out_picture_token_is_only_removed(tiny_vision, words):
    speaker = vision_speaker(tiny_vision, 8)
    spelt_out = conversation(words=words)
    assert answers_of(speaker, [spelt_out]) == answers_of(speaker, [conversation()])


@needs_chromium  # which the judge opens first
def test_a_text_model_as_human_of_pages_is_refused_before_anything_is_played(tiny, tmp_path):
    message = "found a text-only model, expected a vision-language one"
    with pytest.raises(SystemExit, match=message):
        load_speaker(tiny(), "human", pictures=True)
    output = tmp_path / "episodes.jsonl"
    assert "text-only" in refusal("collect.py", "--tasks", "toy:frontend:train", "--num_tasks", 1,
                                  "--agent", "scripted", "--human", tiny(), "--output", output)
    assert not output.exists()


def copy_of(checkpoint, folder, **files):
    """A copy of a checkpoint's directory with other files, NAME_EXTENSION=what is in it."""
    shutil.copytree(checkpoint, folder)
    for name, text in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text(text)
    return str(folder)


TEXT_TEMPLATE = "{% for m in messages %}{{ m['role'] + m['content'] + '<end>' }}{% endfor %}"
BLIND_TEMPLATE = "{% for m in messages %}{{ m['content'][-1]['text'] + '<end>' }}{% endfor %}"


def test_a_text_models_template_beside_the_processors_own_is_not_used(tiny_vision, tmp_path):
    config = json.loads(Path(tiny_vision, "tokenizer_config.json").read_text())
    both = copy_of(tiny_vision, tmp_path / "both",
                   tokenizer_config_json=json.dumps(config | {"chat_template": TEXT_TEMPLATE}),
                   chat_template_json=json.dumps({"chat_template": TEMPLATE}))
    Path(both, "chat_template.jinja").unlink()
    first, second = (answers_of(vision_speaker(path, 8), [conversation()])
                     for path in (both, tiny_vision))
    assert first == second


@pytest.mark.parametrize("template, reason", [
    (TEXT_TEMPLATE, "can only concatenate str"), (BLIND_TEMPLATE, "Found total 0 ")])
def test_a_template_that_takes_no_pictures_is_refused_before_a_model_is_loaded(
        tiny_vision, tmp_path, template, reason):
    path = copy_of(tiny_vision, tmp_path / "blind", chat_template_jinja=template)
    Path(path, "model.safetensors").unlink()
    with pytest.raises(SystemExit, match=f"chat template that takes no pictures .*{reason}"):
        load_speaker(path, "human", pictures=True)


def test_the_checkpoint_says_which_processor_it_has(tiny_vision, tmp_path):
    assert processor_class(tiny_vision) is transformers.Qwen2VLProcessor
    named = copy_of(tiny_vision, tmp_path / "named",
                    processor_config_json='{"processor_class": "Qwen2_5_VLProcessor"}')
    assert processor_class(named) is transformers.Qwen2_5_VLProcessor
    without = copy_of(tiny_vision, tmp_path / "without",
                      config_json=transformers.Kosmos2Config().to_json_string())
    with pytest.raises(SystemExit, match="found a model of type kosmos-2 whose files name no proc"):
        processor_class(without)


def test_the_part_for_videos_is_left_out_unless_the_processor_insists_on_it():
    assert "video_processor" in transformers.Qwen2VLProcessor.get_attributes()
    still = without_videos(transformers.Qwen2VLProcessor)
    assert still.get_attributes() == ["image_processor", "tokenizer"]
    assert still.__name__ == "Qwen2VLProcessor"
    for base in (transformers.SmolVLMProcessor, transformers.LlavaProcessor):
        assert without_videos(base) is base


def test_models_that_look_at_pictures_are_refused_where_texts_alone_are_read(tiny_vision):
    with pytest.raises(SystemExit, match="found a vision-language model, expected a model of text"):
        load_speaker(tiny_vision)
    llama_vision = types.SimpleNamespace(config=transformers.MllamaConfig())
    with pytest.raises(SystemExit, match="found a model with layers that attend to pictures"):
        refuse_unfit_layers(llama_vision, "llama")


@needs_chromium
@pytest.mark.slow
def test_collect_plays_with_a_human_who_looks_at_pages(tiny_vision, tmp_path):
    output = tmp_path / "episodes.jsonl"
    run_script("collect.py", "--tasks", "toy:frontend:train", "--num_tasks", 2,
               "--samples_per_task", 1, "--agent", "scripted", "--human", tiny_vision,
               "--max_turns", 3, "--reply_chars", 50, "--output", output)
    episodes = read_episodes(output)
    assert len(episodes) == 2 and not any(episode["error"] for episode in episodes)
    assert any(len(episode["dialogue_history"]) > 2 for episode in episodes)


# -----------------------------------------------------------------------------
# The critic that sees the solution page

MESSAGES = dialogue("make a page .")


def page_task(index=0, **changes):
    task = toy_tasks("toy:frontend:train", index + 1)[index]
    choice = task["toy"]["wanted"] | changes
    return task | {"ground_truth": page_of(task["toy"]["topic"], choice)}


def page_episode(task, words, reward):
    """A dialogue whose agent turns are `words`; the last one is cut at the token limit."""
    texts = [text for word in words for text in (word, "more <|image_pad|>")]
    history = dialogue("make a page .", *texts[:-1])
    history[-1]["finished"] = False
    return complete_episode({
        "task": task, "dialogue_history": history, "reward": reward, "agent_prompt": "Draw."})


def save_critic(folder, tiny_vision, privileged):
    """A checkpoint as train_critic.py writes it, with a head of known size; returns its model."""
    model = load_model(tiny_vision, model_class=vision_value_class(tiny_vision))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.score.weight)
    folder.mkdir()
    flags = {"privileged": privileged, "max_length": 2000, "model": tiny_vision, "holdout": 0.1}
    (folder / "run.json").write_text(json.dumps({"flags": flags, "inputs": {}}))
    processor = load_processor(tiny_vision)
    checkpoints.save_checkpoint(folder, model, processor, None, Process(0, 1, "cpu"))
    return model.eval()


@pytest.fixture(scope="module")
def critic(tiny_vision, tmp_path_factory):
    """A critic reopened from its directory; `saved` is the model that was saved there."""
    folder = tmp_path_factory.mktemp("critics") / "seeing"
    saved = save_critic(folder, tiny_vision, "ground_truth")
    reopened = ValueCritic(str(folder), "cpu")
    reopened.saved = saved
    return reopened


@needs_chromium
def test_a_turns_value_is_the_head_on_the_mean_of_all_hidden_states_so_far(critic):
    model, sight = critic.saved, critic.reader.sight
    task = page_task()
    episode = page_episode(task, ["one page", "another", "the last"], 0.5)
    scores = critic.turn_advantages([critic.dialogue_row(episode)])[0].tolist()

    plain = [message | {"content": message["content"].replace("<|image_pad|>", "!")}
             for message in episode["dialogue_history"]]
    system, request, *later = agent_messages(plain, "Draw.")
    picture = image_part(sight.draw(task["ground_truth"]))
    seen = [picture, {"type": "text", "text": request["content"]}]
    view = [system, request | {"content": seen}, *later]
    with torch.no_grad():
        inputs = picture_inputs(sight.processor, [view])
        hidden = model.model(**inputs).last_hidden_state[0]  # (T, D)
    turns = critic.reader.dialogue_row(episode).turn_index
    ends = [len(turns) - turns[::-1].index(turn) for turn in range(3)]
    expected = model.score(torch.stack([hidden[:end].mean(0) for end in ends]))[:, 0].tolist()
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 3) for score in scores}) == 3


@needs_chromium
def test_another_solution_page_changes_the_scores_and_other_candidates_do_not(critic):
    white, dark = page_task(page="white"), page_task(page="dark")
    texts = ["a page", "another page", "a page"]
    scores = critic.advantages(white, MESSAGES, texts, [True] * 3)
    assert scores[0] == scores[2] != scores[1]
    alone = [critic.advantages(white, MESSAGES, [text], [True])[0] for text in texts[1:]]
    assert scores[1:] == alone
    other = critic.advantages(dark, MESSAGES, texts, [True] * 3)
    assert all(abs(a - b) > 1e-4 for a, b in zip(scores, other, strict=True))


@needs_chromium
def test_a_dialogue_scored_at_once_has_the_scores_of_its_turns_one_by_one(critic):
    episode = page_episode(page_task(), ["one page", "another", "the last"], 0.5)
    single = []
    for state in states_of([episode]):
        text = episode["dialogue_history"][2 * state["turn"] + 1]["content"]
        single += critic.advantages(episode["task"], state["messages"], [text],
                                      [state["turn"] < 2])
    scores = critic.turn_advantages([critic.dialogue_row(episode)])[0].tolist()
    assert scores == pytest.approx(single, abs=1e-4)


@needs_chromium
def test_one_browser_draws_each_solution_page_once(critic):
    sight, browsers, drawn = critic.reader.sight, set(), []
    for page in ("<p>first", "<p>second", "<p>first"):
        sight.draw(page)
        browsers.add(sight.browser)
        drawn.append(sight.browser.pages_left)
    assert len(browsers) == 1 and drawn[0] - 1 == drawn[1] == drawn[2]


def test_no_picture_is_drawn_or_seen_without_privileged_access(tiny_vision, tmp_path, monkeypatch):
    monkeypatch.setattr(variants.sight, "Browser", None)
    save_critic(tmp_path / "blind", tiny_vision, "none")
    blind = ValueCritic(str(tmp_path / "blind"), "cpu")
    texts = ["a page", "b <|image_pad|>"]
    white, dark = (blind.advantages(page_task(page=page), MESSAGES, texts, [True] * 2)
                   for page in ("white", "dark"))
    assert white == dark and white[0] != white[1]


@pytest.mark.parametrize("seen", [
    MESSAGES,  # as if no page was drawn
    [{"role": "user", "content": [image_part(png("red")), {"type": "text", "text": "a page"}]}]])
def test_every_row_gives_every_weight_a_gradient_so_that_ranks_reduce_the_same_ones(
        tiny_vision, seen):
    model = load_model(tiny_vision, model_class=vision_value_class(tiny_vision))
    model.model.visual.unused = torch.nn.Parameter(torch.ones(2))  # LLaVA has such
    inputs = picture_inputs(load_processor(tiny_vision), [seen])
    assert ("pixel_values" in inputs) == (seen is not MESSAGES)
    model(**inputs).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tokens_after_the_opening_see_the_pictures_that_its_last_token_sees():
    class LlamaVision:
        config = transformers.MllamaConfig()

        def __call__(self, **inputs):
            return inputs

    opening = torch.tensor([[1, 2, 3]])
    mask = torch.tensor([0, 1, 1]).view(1, 3, 1, 1)  # (1, T, pictures, tiles)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    inputs = forward_seen(LlamaVision(), ids, opening, torch.ones(1, 3), cross_attention_mask=mask)
    assert inputs["cross_attention_mask"].flatten().tolist() == [0, 1, 1, 1, 1]


@needs_chromium
def test_a_picture_counts_towards_the_length_and_is_never_cut(critic):
    episode = page_episode(page_task(), ["one page " * 20, "another", "the last"], 0.5)
    reader = critic.reader
    whole, limit = reader.dialogue_row(episode), reader.max_length
    try:
        reader.max_length = len(whole.ids) - 1
        row = reader.dialogue_row(episode)
        opening = whole.turn_index.index(0)
        assert max(row.turn_index) == 1 and row.ids[:opening] == whole.ids[:opening]
        assert row.ids[:opening].count(critic.model.config.image_token_id) > 4
        reader.max_length = 20
        assert reader.dialogue_row(episode) is None
    finally:
        reader.max_length = limit


def training_flags(episodes, model, output, *more):
    return training(episodes, model, output, "--pairs", "all", "--lr", 3e-3, "--epochs", 6,
                    "--max_length", 2000, "--holdout", 0.3, *more)


@pytest.fixture(scope="module")
def page_episodes(tmp_path_factory):
    """Three tasks, each with three short dialogues: the words tell the outcome."""
    outcomes = (("red red", 0.9), ("blue blue", 0.1), ("blue", 0.2))
    return write_rows(tmp_path_factory.mktemp("episodes") / "episodes.jsonl", [
        page_episode(page_task(index), [word] * (2 + sample), reward) | {"sample": sample}
        for index in range(3) for sample, (word, reward) in enumerate(outcomes)])


@needs_chromium
@pytest.mark.slow
def test_training_lowers_the_loss_and_the_checkpoint_scores(page_episodes, tiny_vision, tmp_path):
    output = tmp_path / "critic"
    flags = training_flags(page_episodes, tiny_vision, output)
    done = run_script("variants/value_critic.py", *flags)
    lines = metrics(output)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.05
    assert "holdout/accuracy" in done.stdout
    trained = ValueCritic(str(output), "cpu")
    scores = trained.advantages(page_task(), MESSAGES, ["red red", "blue"], [True] * 2)
    assert scores[0] > scores[1]


@needs_chromium
@pytest.mark.slow
def test_ranks_checkpointing_and_micro_batches_train_the_same(page_episodes, tiny_vision, tmp_path):
    for name, processes, more in (("one", 1, []), ("two", 2, ["--checkpointing_every", 1]),
                                  ("micro", 1, ["--micro_batch_size", 3])):
        run_script("variants/value_critic.py", *training_flags(
            page_episodes, tiny_vision, tmp_path / name, "--max_steps", 3, *more),
            processes=processes)
    one = weights(tmp_path / "one")
    for other in (weights(tmp_path / "two"), weights(tmp_path / "micro")):
        for name, value in one.items():
            bound = torch.full_like(value, 1e-5)
            if name.endswith("qkv.bias"):
                # keys' biases have no gradient but rounding, which Adam makes as large as any
                _, keys, _ = bound.chunk(3)
                keys.fill_(5e-5)
            assert ((other[name] - value).abs() <= bound + 1e-5 * value.abs()).all(), name


def test_dialogues_of_logs_are_refused_by_a_critic_that_sees(tiny_vision):
    task = {"domain": "logged", "ground_truth": ""}
    with pytest.raises(SystemExit, match="found dialogues of your own logs, which have no pict"):
        Reader(tiny_vision, "none", 2000).candidate_rows(task, dialogue("x"), ["y"], [True])


def test_a_critic_that_sees_reads_functions_without_a_browser(tiny_vision, monkeypatch):
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    sight = Sight(tiny_vision, "ground_truth")
    task = {"domain": "backend", "ground_truth": "def f(x): return 2 * x"}
    inputs = sight.opening_reader(task, dialogue("double a number"))()
    assert "return 2 * x" in sight.processor.tokenizer.decode(inputs["input_ids"][0])


@needs_chromium
def test_the_value_critic_of_pages_ranks_candidates(critic, tiny_vision, tmp_path):
    save_critic(tmp_path / "critic", tiny_vision, "ground_truth")
    state = ranked_state({"a page": 0.0, "another": 0.0}, MESSAGES, task=page_task(),
                         finished=[True, False])  # whose advantages are replaced
    candidates = write_rows(tmp_path / "candidates.jsonl", [state])
    run_script("variants/value_critic.py", "--output", tmp_path / "critic", "--candidates",
               candidates)
    ranked = json.loads((tmp_path / "critic/ranked.jsonl").read_text())
    expected = critic.advantages(state["task"], MESSAGES, state["candidates"], state["finished"])
    assert ranked["advantages"] == pytest.approx(expected, abs=1e-4)


def test_an_answer_is_marked_finished_unless_it_was_cut_and_ends_at_its_first_end(tiny_vision):
    speaker = vision_speaker(tiny_vision, 3)
    (cut,), = answers_of(speaker, [dialogue("what is it?")])
    assert not cut.finished
    end = min(speaker.stops)
    ids = speaker.processor.tokenizer.encode("so", add_special_tokens=False)
    assert speaker._utterance([*ids, end, *ids, end]) == Utterance("so", True)
    assert speaker._utterance(ids) == Utterance("so", False)
