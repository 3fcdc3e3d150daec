"""Vision-language models: the human who looks at pages, and the critic who sees the reference page.

Run: pytest tests/test_vision.py
"""


import json

import pytest
import torch
from conftest import byte_tokenizer, run_script
from test_frontend import needs_chromium

import colbench
import train_critic
from colbench import (
    VisionSpeaker,
    agent_messages,
    critic_messages,
    human_frontend_messages,
    load_model,
    load_speaker,
    picture_inputs,
    read_episodes,
    read_tasks,
    toy_page,
)
from collect import Process

# The structure of Qwen2-VL's template: a picture is a token of its own between two others
TEMPLATE = "{% for m in messages %}{{ '<start>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}" \
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}" \
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}" \
    "{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory):
    """Directory of a tiny random Qwen2-VL."""
    from transformers import AutoModelForImageTextToText, Qwen2VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = byte_tokenizer(TEMPLATE)
    names = {f"{name}_token_id": f"<|{name}|>" for name in ("vision_start", "vision_end")} | {
        f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<bos>", "<start>", "<stop>", *names.values()]})
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(Qwen2VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}))
    folder = str(tmp_path_factory.mktemp("vision"))
    for part in (model, tokenizer, Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=12 * 28 * 28)):
        part.save_pretrained(folder)
    return folder


def png(colour, height=60):
    import io

    from PIL import Image

    stored = io.BytesIO()
    Image.new("RGB", (100, height), colour).save(stored, "PNG")
    return stored.getvalue()


def conversation(shown="red", wanted="blue", words="what now?", height=60):
    history = [{"role": "user", "content": "a page"}, {"role": "assistant", "content": words}]
    return human_frontend_messages({"problem_description": "a page"}, history, shown and png(shown, height), png(wanted),
                                   "Say what differs in {message}")


# -----------------------------------------------------------------------------
# The human who looks at pages


def test_the_human_sees_both_pictures(tiny_vision):
    speaker = VisionSpeaker(tiny_vision, max_new_tokens=24)
    said = [speaker.speak([conversation(*colours)])[0] for colours in (("red", "blue"), ("green", "blue"), ("red", "white"))]
    assert len(set(map(str, said))) == 3 and said[0] == speaker.speak([conversation()])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_conversations_answered_together_are_answered_as_one_by_one(tiny_vision, temperature):
    talks = [conversation(), conversation(None, "white", "a much longer message " * 4), conversation("green", height=300)]
    together = VisionSpeaker(tiny_vision, temperature, 16).speak(talks, n=2, seeds=[5, 6, 7])
    for number, talk in enumerate(talks):
        alone = VisionSpeaker(tiny_vision, temperature, 16, batch_size=1).speak([talk], n=2, seeds=[5 + number])
        assert alone == [together[number]] and (alone[0][0] == alone[0][1]) == (temperature == 0)


def test_text_alone_is_answered_as_a_text_model_would(tiny_vision):
    speaker = VisionSpeaker(tiny_vision, 1.0, 16)
    talk = [{"role": "user", "content": "what is it?"}]
    ids = torch.tensor([colbench.encode_prompt(speaker.processor.tokenizer, talk)])
    uniform = colbench.uniform_numbers([3], 1, 16)
    for step in range(16):
        token = colbench.pick_tokens(speaker.model(input_ids=ids).logits[:, -1], uniform[:, step], 1.0)
        if token.item() in speaker.stops:
            break
        ids = torch.cat([ids, token[None]], 1)
    expected = speaker.processor.tokenizer.decode(ids[0], skip_special_tokens=True)
    assert expected.endswith(speaker.speak([talk], seeds=[3])[0][0].text)


def test_a_spelt_out_picture_token_is_only_left_out(tiny_vision):
    speaker = VisionSpeaker(tiny_vision, max_new_tokens=8)
    assert speaker.speak([conversation(words="what <|image_pad|>now<end>?")]) == speaker.speak([conversation()])


def test_a_text_model_as_human_of_pages_is_refused_in_a_sentence_before_anything_is_played(tiny, tmp_path):
    with pytest.raises(SystemExit, match="found a text-only model, expected a vision-language one"):
        load_speaker(tiny(), "human", pictures=True)
    done = run_script("collect.py", "--tasks", "toy:frontend:train", "--num_tasks", 1, "--agent", "scripted", "--human",
                      tiny(), "--output", tmp_path / "episodes.jsonl", check=False)
    assert done.returncode == 1 and "text-only" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "episodes.jsonl").exists()


@needs_chromium
@pytest.mark.slow
def test_collect_plays_with_a_human_who_looks_at_pages(tiny_vision, tmp_path):
    run_script("collect.py", "--tasks", "toy:frontend:train", "--num_tasks", 2, "--samples_per_task", 1, "--agent", "scripted",
               "--human", tiny_vision, "--max_turns", 3, "--reply_chars", 50, "--output", tmp_path / "episodes.jsonl")
    episodes = read_episodes(tmp_path / "episodes.jsonl")
    assert len(episodes) == 2 and not any(episode["error"] for episode in episodes)
    assert any(len(episode["dialogue_history"]) > 2 for episode in episodes)


# -----------------------------------------------------------------------------
# The critic who sees the reference page

MESSAGES = [{"role": "user", "content": "make a page ."}]


def page_task(number=0, **changes):
    task = read_tasks("toy:frontend:train", number + 1)[number]
    choice = task["toy"]["wanted"] | changes
    return task | {"ground_truth": toy_page(task["toy"]["topic"], choice)}


def page_episode(task, words, reward):
    """A dialogue whose agent turns are `words`; the last one is cut at the token limit."""
    history = [{"role": "user", "content": "make a page ."}]
    for number, word in enumerate(words):
        history.append({"role": "assistant", "content": word, "finished": number < len(words) - 1})
        history.append({"role": "user", "content": "more <|image_pad|>"})
    row = {"task": task, "dialogue_history": history[:-1], "reward": reward, "agent_prompt": "Draw."}
    return colbench.complete_episode(row)


def save_critic(folder, tiny_vision, privileged):
    """A checkpoint as train_critic.py writes it, with a head of known size; returns the model in memory."""
    model = load_model(tiny_vision, auto_class=train_critic.vision_value_class(tiny_vision))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.score.weight)
    folder.mkdir()
    flags = {"head": "value", "normalise": "turn", "privileged": privileged, "max_length": 2000, "model": tiny_vision}
    (folder / "run.json").write_text(json.dumps({"flags": flags, "inputs": {}}))
    train_critic.save_checkpoint(folder, model, colbench.load_processor(tiny_vision), None, Process(0, 1, "cpu"))
    return model.eval()


@pytest.fixture(scope="module")
def critic(tiny_vision, tmp_path_factory):
    """(critic reopened from its directory, the model that was saved there)"""
    folder = tmp_path_factory.mktemp("critics") / "seeing"
    model = save_critic(folder, tiny_vision, "ground_truth")
    return train_critic.Critic(str(folder), "cpu"), model


@needs_chromium
def test_a_turn_is_valued_by_the_head_on_the_mean_of_all_hidden_states_so_far(critic, tiny_vision):
    reopened, model = critic
    task = page_task()
    episode = page_episode(task, ["one page", "another <|image_pad|>", "the last"], 0.5)
    scores = reopened.score_dialogue(episode)
    view = agent_messages(task, [m | {"content": m["content"].replace("<|image_pad|>", "!")} for m in
                                 episode["dialogue_history"]], "Draw.")
    picture = reopened.sight.draw(task["ground_truth"])
    inputs = picture_inputs(reopened.sight.processor, [critic_messages(task, view, picture=picture)])
    with torch.no_grad():
        hidden = model.model(**inputs).last_hidden_state[0]
    row, _ = train_critic.dialogue_row(reopened.tokenizer, episode, "ground_truth", 2000, reopened.sight)
    ends = [max(place for place, turn in enumerate(row.turn_index) if turn == wanted) for wanted in range(3)]
    means = torch.stack([hidden[:end + 1].mean(0) for end in ends])
    assert scores == pytest.approx(model.score(means)[:, 0].tolist(), abs=1e-4) and len({round(s, 3) for s in scores}) == 3


@needs_chromium
def test_another_reference_page_changes_the_scores_and_other_candidates_do_not(critic):
    reopened, _ = critic
    texts = ["a page", "another page", "a page"]
    scores = reopened.score(page_task(page="white"), MESSAGES, texts, [True] * 3)
    other = reopened.score(page_task(page="dark"), MESSAGES, texts, [True] * 3)
    assert scores[0] == scores[2] != scores[1]
    assert scores[1:] == [reopened.score(page_task(page="white"), MESSAGES, [text], [True])[0] for text in texts[1:]]
    assert all(abs(a - b) > 1e-4 for a, b in zip(scores, other, strict=True))


@needs_chromium
def test_a_dialogue_scored_at_once_has_the_scores_of_its_turns_one_by_one(critic):
    reopened, _ = critic
    episode = page_episode(page_task(), ["one page", "another", "the last"], 0.5)
    single = [reopened.score(episode["task"], messages, [episode["dialogue_history"][2 * turn + 1]["content"]], [turn < 2])[0]
              for _, turn, messages in train_critic.states_of([episode])]
    assert reopened.score_dialogue(episode) == pytest.approx(single, abs=1e-4)


def test_without_privileged_information_no_picture_is_drawn_or_seen(tiny_vision, tmp_path, monkeypatch):
    monkeypatch.setattr(train_critic, "Browser", None)
    save_critic(tmp_path / "blind", tiny_vision, "none")
    blind = train_critic.Critic(str(tmp_path / "blind"), "cpu")
    texts = ["a page", "b <|image_pad|>"]
    scores = [blind.score(page_task(page=page), MESSAGES, texts, [True] * 2) for page in ("white", "dark")]
    assert scores[0] == scores[1] and scores[0][0] != scores[0][1]


def test_every_row_gives_every_weight_a_gradient_so_that_ranks_reduce_the_same_ones(tiny_vision):
    model = load_model(tiny_vision, auto_class=train_critic.vision_value_class(tiny_vision))
    inputs = picture_inputs(colbench.load_processor(tiny_vision), [MESSAGES])  # the page could not be drawn: words alone
    assert "pixel_values" not in inputs
    model(**inputs).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@needs_chromium
def test_a_picture_counts_towards_the_length_and_is_never_cut(critic):
    reopened, _ = critic
    episode = page_episode(page_task(), ["one page " * 20, "another", "the last"], 0.5)
    whole, _ = train_critic.dialogue_row(reopened.tokenizer, episode, "ground_truth", 2000, reopened.sight)
    length = len(whole.ids)
    row, dropped = train_critic.dialogue_row(reopened.tokenizer, episode, "ground_truth", length - 1, reopened.sight)
    image = reopened.model.config.image_token_id
    opening = whole.turn_index.index(0)
    assert dropped == 1 and row.ids[:opening] == whole.ids[:opening] and row.ids[:opening].count(image) > 4
    assert train_critic.dialogue_row(reopened.tokenizer, episode, "ground_truth", 20, reopened.sight)[0] is None


def training_flags(episodes, model, output, *more):
    return ["--episodes", episodes, "--model", model, "--output", output, "--head", "value", "--pairs", "all", "--lr", 3e-3,
            "--batch_size", 4, "--epochs", 6, "--max_length", 2000, "--holdout", 0.3, *more]


@pytest.fixture(scope="module")
def page_episodes(tmp_path_factory):
    """Three tasks, each with three short dialogues: the words tell the outcome."""
    path = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    with open(path, "w") as file:
        for number in range(3):
            for sample, (word, reward) in enumerate((("red red", 0.9), ("blue blue", 0.1), ("blue", 0.2))):
                episode = page_episode(page_task(number), [word] * (2 + sample), reward) | {"sample": sample}
                file.write(json.dumps(episode) + "\n")
    return path


@needs_chromium
@pytest.mark.slow
def test_training_lowers_the_loss_and_the_checkpoint_scores(page_episodes, tiny_vision, tmp_path):
    output = tmp_path / "critic"
    done = run_script("train_critic.py", *training_flags(page_episodes, tiny_vision, output))
    lines = [json.loads(line) for line in open(output / "metrics.jsonl")]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.05 and "holdout/accuracy" in done.stdout
    scores = train_critic.Critic(str(output), "cpu").score(page_task(), MESSAGES, ["red red", "blue"], [True] * 2)
    assert scores[0] > scores[1]


@needs_chromium
@pytest.mark.slow
def test_two_ranks_checkpointing_and_micro_batches_train_the_same_weights(page_episodes, tiny_vision, tmp_path):
    from safetensors.torch import load_file

    for name, processes, more in (("one", 1, ()), ("two", 2, ("--checkpointing",)), ("micro", 1, ("--micro_batch_size", 3))):
        run_script("train_critic.py", *training_flags(page_episodes, tiny_vision, tmp_path / name, "--max_steps", 3, *more),
                   processes=processes)
    one, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "micro"))
    assert all(torch.allclose(other[name], value, atol=1e-5) for other in others for name, value in one.items())


@needs_chromium
def test_training_goes_on_from_its_state_as_if_never_stopped(page_episodes, tiny_vision, tmp_path):
    process = Process(0, 1, "cpu")
    arguments = train_critic.parse_args([*map(str, training_flags(page_episodes, tiny_vision, tmp_path))])
    arguments.max_norm, sight = float("inf"), train_critic.Sight(tiny_vision, "ground_truth")
    groups = train_critic.group_by_task(read_episodes(page_episodes))
    items, _ = train_critic.pair_items(sight.processor.tokenizer, groups, sorted(groups)[:1], arguments, "ground_truth", sight)
    models = []
    for stops in (False, True):
        model, optimizer = started(tiny_vision, process)
        for step in range(2):
            (train_critic.critic_objective(model, items, arguments, "cpu")["train/loss"].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stops and step == 0:
                train_critic.save_state(tmp_path / "state", 1, model, optimizer, process)
                model, optimizer = started(tiny_vision, process)
                assert train_critic.load_state(tmp_path / "state", model, optimizer, process) == 1
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3
        models.append(model)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


def started(tiny_vision, process):
    torch.manual_seed(2)
    model = train_critic.load_trainable(tiny_vision, process, train_critic.vision_value_class(tiny_vision))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
