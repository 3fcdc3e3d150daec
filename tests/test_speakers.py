"""Speakers in this process: local models and scripts."""

import types
import weakref

import pytest
import torch
import transformers
from conftest import (
    LOSES_THOUGHTS, PLAIN, TEMPLATES, UNNESTED, byte_tokenizer, dialogue, tiny_model)
from parties import ask_all, slow_text
from tokenizers import decoders, models, pre_tokenizers

import collect
import speakers.local
from colbench import without_thoughts
from judge.sandbox import ANSWER_MARKER
from runtime.models import context_length
from runtime.templates import turn_ids
from speakers import load_speaker
from speakers.attention import SharedPrompts, shared_prompts_attention
from speakers.interface import Request, Speaker, SpeakerError, SpeakerSettings, Utterance
from speakers.local import (
    LocalSpeaker, encode_prompt, pick_tokens, refuse_unfit_layers, stop_tokens, text_of,
    uniform_numbers)
from speakers.roles import open_agent, say_if_untrainable
from toy.world import toy_tasks

# -----------------------------------------------------------------------------
# The local speaker


def speaker(template="llama3", family="llama", **settings):
    settings = SpeakerSettings(**{"max_new_tokens": 12, "device": "cpu"} | settings)
    tokenizer = byte_tokenizer(template)
    return LocalSpeaker("tiny", settings, tiny_model(tokenizer, family), tokenizer)


CONVERSATIONS = [
    [{"role": "system", "content": "s"}, {"role": "user", "content": "word " * length}]
    for length in (9, 1, 30, 4, 17)
]


@pytest.mark.parametrize("template, family", [
    ("llama3", "llama"), ("qwen2.5", "qwen2"), ("qwen3", "qwen3"), ("no_system", "llama"),
    (UNNESTED, "llama"), ("llama3", "mistral"), ("llama3", "gemma3_text"),
])
def test_greedy_texts_are_the_same_batched_and_alone(template, family):
    greedy = speaker(template, family, temperature=0)
    alone = [ask_all(greedy, [conversation])[0] for conversation in CONVERSATIONS]
    assert ask_all(greedy, CONVERSATIONS) == alone
    assert len({utterances[0].text for utterances in alone}) > 1


@pytest.mark.parametrize("counts", [(3, 3, 3, 3, 3), (3, 1, 1, 3, 6)])
def test_sampled_texts_depend_on_the_seed_and_not_on_the_rest_of_the_batch_or_its_order(counts):
    sampler = speaker(batch_size=4 if counts[-1] == 6 else 64)
    requests = [Request(messages, n, seed)
                for seed, (messages, n) in enumerate(zip(CONVERSATIONS, counts, strict=True))]
    together = sampler.speak(requests)
    assert together == [sampler.reply(request) for request in requests]
    assert together[::-1] == sampler.speak(requests[::-1])
    assert together != sampler.speak([request._replace(seed=9) for request in requests])
    assert tuple(len(utterances) for utterances in together) == counts
    assert len({utterance.text for utterance in together[0]}) > 1


def test_samples_follow_the_model_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)
    picked = pick_tokens(logits, torch.rand(20000, generator=generator), 0.7)
    shares = torch.bincount(picked, minlength=4) / 20000
    assert torch.allclose(shares, (logits[0] / 0.7).softmax(-1), atol=0.01)


def test_a_token_is_picked_with_exact_sums_and_never_one_of_no_probability():
    """In float32, the sums of a large vocabulary would miss its last tokens, or pass its end."""
    impossible_first = torch.tensor([[-torch.inf, 0.0, 0.0]])
    for temperature in (0.5, 1):
        assert pick_tokens(impossible_first, torch.tensor([0.0]), temperature).tolist() == [1]
    size, uniform = 1 << 17, torch.tensor([0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    logits = torch.linspace(0, 3e-4, size).repeat(3, 1)
    exact = logits[0].double().softmax(-1).cumsum(-1)
    wanted = [(exact <= share * exact[-1]).sum().item() for share in uniform]
    assert pick_tokens(logits, uniform, 1).tolist() == wanted
    assert wanted[-1] == size - 1


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_each_token_of_a_sample_is_drawn_with_a_random_number_of_its_own(temperature):
    sampler = speaker(max_new_tokens=20, temperature=temperature)
    ids = encode_prompt(sampler.tokenizer, CONVERSATIONS[0])
    utterances = ask_all(sampler, [CONVERSATIONS[0]], n=2, seeds=[5])[0]
    for utterance, uniform in zip(utterances, uniform_numbers([5], 2, 20), strict=True):
        assert utterance.text == slow_text(sampler, sampler.tokenizer, ids, uniform)


@pytest.mark.parametrize(
    "family", ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "hrm_text"))
def test_samples_that_share_a_prompts_cache_equal_those_of_an_attention_that_copies_it(family):
    """Samples of prompts of unequal length end at different times, so rows and prompts leave."""
    sampler, eager = (speaker(family=family, max_new_tokens=40) for _ in range(2))
    eager.model.set_attn_implementation("eager")  # a model with an attention of its own keeps it
    for of_both in (sampler, eager):
        of_both.stops |= set(range(50))  # texts end often
    shared, copied = (ask_all(of_both, CONVERSATIONS, n=4, seeds=range(5))
                      for of_both in (sampler, eager))
    assert sampler.model.config._attn_implementation == "shared_prompts"
    assert eager.model.config._attn_implementation == "eager"
    assert shared == copied
    longest = [max(len(utterance.text) for utterance in utterances) for utterances in shared]
    distinct = {utterance.text for utterances in shared for utterance in utterances}
    assert len(set(longest)) > 1 and len(distinct) > 9


def test_attention_to_shared_prompts_is_exact_in_bf16_up_to_the_rounding_of_its_result():
    generator = torch.Generator().manual_seed(0)
    G, n, H, Q, P, T, D = 2, 3, 2, 2, 9, 4, 64

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    cache = transformers.DynamicCache()
    cache.update(drawn(G, H, P, D), drawn(G, H, P, D), 0)
    shared = SharedPrompts(cache, n)
    own = drawn(G * n, H, T, D), drawn(G * n, H, T, D)
    query = 4 * drawn(G * n, H * Q, 1, D)
    found, _ = shared_prompts_attention(
        None, query, *shared.update(*own, 0), attention_mask=None, scaling=D ** -0.5)
    prompt = cache.layers[0]
    keys, values = (torch.cat([whole.repeat_interleave(n, 0), new], 2).repeat_interleave(Q, 1)
                    for whole, new in ((prompt.keys, own[0]), (prompt.values, own[1])))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), scale=D ** -0.5).transpose(1, 2)
    assert (found.double() - exact).abs().max() < 0.02


def test_long_prompts_are_computed_in_smaller_batches_with_the_same_texts(monkeypatch):
    sampler, read = speaker(temperature=0), []
    together = ask_all(sampler, CONVERSATIONS)
    monkeypatch.setattr(speakers.local, "TOKENS_AT_ONCE", 200)
    forward = sampler._read
    monkeypatch.setattr(sampler, "_read", lambda prompts, caches: (
        read.append([len(prompt) for prompt in prompts]), forward(prompts, caches))[1])
    assert ask_all(sampler, CONVERSATIONS) == together
    assert len(read) > 1 and any(len(lengths) > 1 for lengths in read)
    assert all(len(lengths) == 1 or len(lengths) * max(lengths) <= 200 for lengths in read)


def test_requests_in_any_order_make_the_same_batches_of_no_more_samples_than_batch_size(
        monkeypatch):
    sampler, computed = speaker(batch_size=4, max_new_tokens=1), []
    generate = sampler._generate
    monkeypatch.setattr(sampler, "_generate", lambda prompts, caches, n, seeds: (
        computed.append((n, seeds)), generate(prompts, caches, n, seeds))[1])
    requests = [Request(CONVERSATIONS[0], 2, seed) for seed in (4, 2, 5, 3, 1)]
    sampler.speak(requests)
    sampler.speak(requests[::-1])
    assert computed == [(2, [1, 2]), (2, [3, 4]), (2, [5])] * 2


def test_a_text_ends_where_the_context_is_full_and_a_prompt_that_fills_it_is_an_error():
    talker = speaker(temperature=0)
    talker.stops = set()
    length = len(encode_prompt(talker.tokenizer, CONVERSATIONS[1]))
    talker.context = length + 5
    short, long = ask_all(talker, [CONVERSATIONS[1], CONVERSATIONS[2]])
    whole, = speaker(temperature=0).reply(Request(CONVERSATIONS[1]))
    text = short[0].text.rstrip("\ufffd")  # of half a character
    assert not short[0].finished and text and whole.text.startswith(text)
    assert len(text) < len(whole.text)
    assert str(long) == (f"found a dialogue that fills the model's context of {length + 5} tokens,"
                         " expected a shorter one")


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_and_text_together_have_as_many_tokens_as_the_context(n):
    talker = speaker(temperature=0)
    talker.stops, talker.context = set(), 10
    samples = talker._generate([[5] * 4, [5] * 7], [None, None], n, [0, 0])
    assert [len(sample.tokens) for sample in samples] == [6] * n + [3] * n
    talker.context = len(encode_prompt(talker.tokenizer, CONVERSATIONS[1]))
    said, = talker.speak([Request(CONVERSATIONS[1])])
    assert isinstance(said, SpeakerError)  # the prompt fills it


def test_messages_that_a_template_refuses_are_an_error_of_their_dialogue_alone():
    careful = speaker("{% for message in messages if not message.content %}"
                      "{{ raise_exception('an empty message') }}{% endfor %}" + PLAIN,
                      temperature=0)
    silent = dialogue("hi", "", "Hello?")
    said = ask_all(careful, [CONVERSATIONS[0], silent, CONVERSATIONS[1]])
    assert isinstance(said[1], SpeakerError) and "an empty message" in str(said[1])
    assert said[::2] == ask_all(careful, CONVERSATIONS[:2])


def test_the_context_ends_where_positions_end_or_would_change_for_all_of_a_batch():
    config = tiny_model(byte_tokenizer()).config
    assert context_length(config) is None
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    assert context_length(config) == 512
    assert context_length(transformers.GPT2Config(n_positions=64)) == 64


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_stop_the_run(temperature):
    broken = speaker(temperature=temperature)
    with torch.no_grad():
        broken.model.lm_head.weight[0] = float("nan")
    with pytest.raises(SystemExit, match="found logits that are no numbers"):
        ask_all(broken, CONVERSATIONS[:1])


@pytest.mark.parametrize("family", ["minicpm3", "diffllama", "doge", "jetmoe"])
def test_samples_of_a_model_that_computes_with_cached_keys_have_copies_of_its_cache(family):
    sampler = speaker(family=family, temperature=0)
    several = ask_all(sampler, CONVERSATIONS, n=2)
    assert several == [2 * found for found in ask_all(sampler, CONVERSATIONS)]


def test_a_kept_cache_changes_no_greedy_token_and_only_new_tokens_are_read():
    greedy, fresh = speaker(temperature=0), speaker(temperature=0)
    widths = []
    forward = greedy.model.forward

    def watched_forward(input_ids, **options):
        widths.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    greedy.model.forward = watched_forward
    conversations = [list(conversation) for conversation in CONVERSATIONS]
    keys = list("abcde")
    for turn in range(4):
        answers = ask_all(greedy, conversations, keys=keys)
        assert answers == [ask_all(fresh, [conversation])[0] for conversation in conversations]
        for index, (conversation, utterances) in enumerate(
                zip(conversations, answers, strict=True)):
            conversation.append({"role": "assistant", "content": utterances[0].text})
            conversation.append({"role": "user", "content": "go on " * (index + turn)})
        if turn == 1:  # a dialogue ends and another takes its place
            conversations[0], keys[0] = list(CONVERSATIONS[1]), "f"
        if turn == 2:
            prompts = [encode_prompt(greedy.tokenizer, c) for c in conversations]
            widths.clear()
    assert max(widths) < max(len(ids) for ids in prompts) / 2


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_kept_dialogue_continues_alike_however_much_is_new_in_the_others(family):
    talker = speaker(family=family)
    generator = torch.Generator().manual_seed(0)
    first, second, more = (torch.randint(0, 200, (length,), generator=generator).tolist()
                           for length in (60, 40, 30))
    with torch.inference_mode():
        caches = []
        for ids in (first, second):
            cache, mask, _ = talker._read([ids], [None])
            caches.append(speakers.local.kept_cache(ids, cache, mask[0], 0))
        prompts = [first + [5, 6, 7], second + more]
        _, _, logits = talker._read(prompts, caches)
        for ids, found in zip(prompts, logits, strict=True):
            alone = talker.model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert torch.allclose(found, alone, atol=1e-4)


def test_a_model_with_recurrent_layers_is_refused_with_a_sentence():
    with pytest.raises(SystemExit, match=r"recurrent layers \(linear_attention\), .*; serve it"):
        speaker(family="qwen3_5_text")


def test_a_model_of_a_recurrent_architecture_without_recurrent_layers_is_not_refused():
    granite = types.SimpleNamespace(_is_stateful=True, config=transformers.LlamaConfig())
    for kinds in ([], ["mamba"], ["full_attention", "indexed_attention"]):
        granite.config.layer_types = kinds
        with pytest.raises(SystemExit, match="found a model with indexed, compressed or"):
            refuse_unfit_layers(granite, "granite")
    granite.config.layer_types = ["attention", "sliding_attention"]
    refuse_unfit_layers(granite, "granite")


@pytest.mark.parametrize("words, spoken", [
    ("<|channel|>analysis<|message|>It is x.<|end|><|start|>assistant<|channel|>final<|message|>Y.",
     "Y."),
    ("<|channel|>final<|message|>Y.", "Y."),
    ("<|channel|>analysis<|message|>It is", None),
    ("[THINK]It is x.[/THINK]Y.", "Y."),
    ("<|channel>thought\nIt is x.<channel|>Y.", "Y."),
    ("<seed:think>It is x.</seed:think>Y.", "Y."),
    ("<|START_THINKING|>It is x.<|END_THINKING|>Y.", "Y."),
    ("<|think|>It is x.<|end|><|begin|>assistant<|content|>Y.", "Y."),
    ("<|inner_prefix|>It is x.<|inner_suffix|>Y.", "Y."),
    ("It is x.[/THINK]Y.", "Y."),  # where the prompt opens them
    ("<think>It is x.</think>Y.", "Y."),
    ("Y.", "Y."), ("Y.[other]", "Y.")])
def test_thoughts_between_special_tokens_are_no_speech(words, spoken):
    tokenizer = byte_tokenizer("llama3")
    special = ["[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<|START_THINKING|>",
               "<|END_THINKING|>", "<|channel>", "<channel|>", "<|think|>", "<|begin|>",
               "<|content|>", "<|inner_prefix|>", "<|inner_suffix|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [
        *special, "<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>",
        "[other]"]})
    text = text_of(tokenizer, tokenizer.encode(words, add_special_tokens=False))
    assert without_thoughts(text) == spoken
    assert not set("[|") & set(text)


def test_thoughts_that_the_prompt_opens_with_a_special_token_and_that_are_cut_are_no_speech():
    tokenizer = byte_tokenizer(PLAIN.replace("<start>assistant\n", "<start>assistant\n[THINK]"))
    for words, spoken in (("It is", None), ("It is x.</think>Y.", "Y.")):
        ids = tokenizer.encode(words, add_special_tokens=False)
        assert without_thoughts(text_of(tokenizer, ids)) == spoken


def test_thoughts_that_the_template_opens_and_the_limit_cuts_do_not_pass_for_speech():
    opening = TEMPLATES["qwen2.5"].replace("assistant\n' }}", "assistant\n<think>\n' }}")
    thinker = speaker(opening, max_new_tokens=4)
    (utterance,), = ask_all(thinker, CONVERSATIONS[:1])
    assert without_thoughts(utterance.text) is None


def test_a_text_whose_thoughts_end_or_that_only_names_their_tags_stays_as_it_is():
    tokenizer = byte_tokenizer()  # for which no tag is a special token
    for text in ("It is x.</think>Y.", "[THINK] is a tag", "x<seed:think>"):
        assert text_of(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_text_keeps_the_space_that_opens_it_where_decoders_drop_one_before_a_text():
    tokenizer = byte_tokenizer(PLAIN)
    letters = {letter: token for token, letter in enumerate("▁\nabcdefghijklmnopqrstuvwxyz", 300)}
    tokenizer.backend_tokenizer.model = models.BPE(tokenizer.get_vocab() | letters, [])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    for drawn in (["▁", "s", "o"], ["s", "o"], ["\n", "▁", "s"]):
        ids = tokenizer.convert_tokens_to_ids(drawn)
        text = text_of(tokenizer, ids)
        assert text == "".join(drawn).replace("▁", " ")
        assert turn_ids(tokenizer, [text], [False]) == [ids]


def test_playing_with_a_template_that_training_refuses_is_told_at_the_start():
    only_the_last_thoughts = PLAIN.replace("m['content'] +", (
        "(m['content'] if m['role'] == 'user' or not"
        " messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list"
        " else m['content'].split('</think>')[-1]) +"))
    fills_the_last_if_empty = PLAIN.replace(
        "m['content'] +", "(m['content'] or ('-' if loop.last else '.')) +")
    for template, told in (
            ("llama3", []), (UNNESTED, [""]), (LOSES_THOUGHTS, [" with thoughts"]),
            (only_the_last_thoughts, [" with thoughts"]),
            (fills_the_last_if_empty, [" with an empty message"])):
        said = []
        say_if_untrainable(byte_tokenizer(template), said.append)
        assert len(said) == len(told)
        for line, which in zip(said, told, strict=True):
            assert line.endswith(f"Training will refuse this model's dialogues{which}")


def test_a_template_that_takes_parts_of_messages_alone_shows_no_end_and_is_not_refused():
    tokenizer = byte_tokenizer(  # as LLaVA-NeXT's
        "{% for m in messages %}{{ m['content'][0]['text'] + '<end>' }}{% endfor %}")
    assert tokenizer.eos_token_id in stop_tokens(tiny_model(tokenizer), tokenizer)
    assert text_of(tokenizer, tokenizer.encode("Yes.", add_special_tokens=False)) == "Yes."


def test_a_text_ends_at_each_token_that_checkpoint_tokenizer_or_template_name():
    tokenizer = byte_tokenizer()
    closing = tokenizer.eos_token_id
    tokenizer.eos_token = "<bos>"
    model = tiny_model(tokenizer)
    for named in ([1, 2], [1], 1, None):
        model.generation_config.eos_token_id = named
        found = {1, 2} if named == [1, 2] else {1} if named else set()
        assert stop_tokens(model, tokenizer) == found | {tokenizer.eos_token_id, closing}


def test_as_many_caches_are_kept_as_dialogues_are_played_and_those_used_last():
    talker = speaker(max_new_tokens=2, batch_size=3)
    ask_all(talker, CONVERSATIONS)
    assert not talker.kept  # of a request without a key, nothing is
    for key in "abcd":
        ask_all(talker, CONVERSATIONS[:1], keys=[key])
    assert list(talker.kept) == list("bcd")
    ask_all(talker, CONVERSATIONS[:1], keys=["b"])
    ask_all(talker, CONVERSATIONS[:1], keys=["e"])
    assert list(talker.kept) == list("dbe")


def test_caches_of_the_turn_before_are_freed_before_the_model_reads_and_writes():
    talker, alive = speaker(max_new_tokens=3), []
    ask_all(talker, CONVERSATIONS, keys=list("abcde"))
    before = [weakref.ref(kept.layers[0][0]) for kept in talker.kept.values()]

    def count_alive(*_):
        alive.append(sum(tensor() is not None for tensor in before))

    talker.model.register_forward_pre_hook(count_alive)
    turn = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]
    ask_all(talker, [conversation + turn for conversation in CONVERSATIONS], keys=list("abcde"))
    assert len(before) == 5 and alive and not any(alive)


def test_an_utterance_is_marked_finished_unless_it_was_cut():
    talker = speaker(temperature=0, max_new_tokens=5)
    assert ask_all(talker, [CONVERSATIONS[0]])[0][0].finished is False
    prompt = encode_prompt(talker.tokenizer, CONVERSATIONS[0])
    token = talker.model(torch.tensor([prompt])).logits[0, -1].argmax().item()
    talker.stops = {token}
    assert ask_all(talker, [CONVERSATIONS[0]])[0][0] == Utterance("", True)


# -----------------------------------------------------------------------------
# Scripted speakers


def test_a_scripted_text_depends_on_the_seed_and_each_sample_has_its_own():
    agent = load_speaker("scripted")
    tasks = toy_tasks("toy:backend:train", 3) * 4
    conversations = [dialogue(task["problem_description"]) for task in tasks]
    answers = ask_all(agent, conversations, n=4, seeds=range(12), tasks=tasks)
    assert answers == ask_all(agent, conversations, n=4, seeds=range(12), tasks=tasks)
    assert answers[5] == ask_all(agent, [conversations[5]], n=4, seeds=[5], tasks=[tasks[5]])[0]
    assert all(len(utterances) == 4 for utterances in answers)
    assert any(len(set(utterances)) > 1 for utterances in answers)


def test_a_manner_without_a_script_is_refused_with_those_that_exist():
    with pytest.raises(SystemExit, match="found the agent scripted:lying, expected one of: agent "
                                         "scripted, agent scripted:guessing, .*human scripted"):
        load_speaker("scripted:lying")
    with pytest.raises(SystemExit, match="found the critic scripted, expected"):
        load_speaker("scripted", "critic")


def test_tasks_of_no_embedded_world_get_the_lines_of_a_dry_run():
    task = {"domain": "backend", "problem_description": "write f", "ground_truth": "x"}
    opening, later = dialogue("write f"), dialogue("write f", "?", "!")
    agent, human = load_speaker("scripted"), load_speaker("scripted", "human")
    first, second = ask_all(agent, [opening, later], seeds=[0, 0], tasks=[task, task])
    assert first == [Utterance("What else should I know?", True)]
    assert second == [Utterance(f"{ANSWER_MARKER} pass", True)]
    reply = ask_all(human, [later], seeds=[0], tasks=[task])[0]
    assert reply == [Utterance("I do not know.", True)]


def test_an_agent_of_ones_own_needs_no_tokenizer(monkeypatch):
    own = Speaker()
    monkeypatch.setattr("speakers.roles.load_speaker", lambda *_: own)
    args = collect.parse_args(["--tasks", "toy:backend:train", "--agent", "own", "--output", "o"])
    assert open_agent(args, types.SimpleNamespace(device="cpu", say=pytest.fail)) is own
