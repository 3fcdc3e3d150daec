"""Vision-language models: the human who looks at pages, and the critic who sees the reference page.

Run: pytest tests/test_vision.py
"""


import pytest
import torch
from conftest import byte_tokenizer, run_script
from test_frontend import needs_chromium

import colbench
from colbench import VisionSpeaker, human_frontend_messages, load_speaker, read_episodes

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
