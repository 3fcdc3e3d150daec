"""fast/packed.py equals the plain function that it stands in for."""

import random

import pytest
import torch
from conftest import WINDOWS, byte_tokenizer, dialogue, tiny_model

from colbench import encode_candidates, encode_dialogue
from fast import packed
from train_critic import Row, turn_logprobs

TOKENIZER = byte_tokenizer()
FAMILIES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False),
            ("phi3", False), ("smollm3", False), ("olmo2", False), ("mixtral", False)]
ALONE = (*WINDOWS, "mpt", "minimax", "bart")  # biased scores, linear attention, own positions
FAMILIES += [(family, False) for family in ALONE]


def candidate_rows(request, texts):
    finished = [len(text) % 2 == 0 for text in texts]
    return [Row(*one) for one in encode_candidates(TOKENIZER, dialogue(request), texts, finished,
                                                   8192)]


def random_rows(seed):
    """Candidates of several states, dialogues, rows that come twice, one without a turn, one
    without a prompt, whose first token nothing predicts, and one of its ids with other turns."""
    draw = random.Random(seed)

    def text():
        return "".join(draw.choice("abcd") for _ in range(draw.randint(1, 12)))

    rows = []
    for _ in range(draw.randint(1, 3)):
        rows += candidate_rows(text(), [text() for _ in range(draw.randint(1, 5))])
    for _ in range(draw.randint(0, 2)):
        rows.append(Row(*encode_dialogue(TOKENIZER, dialogue(*(text() for _ in range(6))))))
    rows += [Row([1, 2, 3], [-1, -1, -1]), Row([3, 2, 1], [0, 0, 1]), Row([3, 2, 1], [-1, 0, 0])]
    rows += draw.choices(rows, k=3)
    draw.shuffle(rows)
    return rows


def values_and_gradient(function, model, rows):
    model.zero_grad()
    logprobs, tokens = function(model, rows)
    weights = torch.arange(1.0, logprobs.numel() + 1).reshape(logprobs.shape)
    (logprobs * weights.sin()).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()
                          if parameter.grad is not None])  # bart has some for an encoder
    return logprobs.detach(), tokens, gradient


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_values_and_gradients_are_those_of_the_plain_function(family, tied):
    model = tiny_model(TOKENIZER, family, tied).eval()
    assert packed.can_pack(model) == (family not in ALONE)
    for seed in range(4):  # the plain one also after the packed one
        rows = random_rows(seed)
        plain, tokens, gradient = values_and_gradient(turn_logprobs, model, rows)
        fast, same_tokens, other_gradient = values_and_gradient(packed.turn_logprobs, model, rows)
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-5)
        assert torch.equal(tokens, same_tokens)
        assert (gradient - other_gradient).norm() < 1e-4 * gradient.norm()


FOUR_ROWS = candidate_rows("t", ["what is it?", "x", "tell me more about that", "I want"])


@pytest.mark.parametrize("limit, value, rows, atol, rtol", [
    ("PACK_TOKENS", 60, FOUR_ROWS, 1e-4, 1e-5),
    ("LOGITS_AT_ONCE", 3, random_rows(0), 1e-5, 1e-6)])
def test_packs_and_logits_in_parts_have_equal_values(monkeypatch, limit, value, rows, atol, rtol):
    model = tiny_model(TOKENIZER)
    whole, _ = packed.turn_logprobs(model, rows)
    monkeypatch.setattr(packed, limit, value)
    torch.testing.assert_close(packed.turn_logprobs(model, rows)[0], whole, atol=atol, rtol=rtol)
    assert 1 < len(packed.pack_rows(FOUR_ROWS, 60)) < len(FOUR_ROWS)


def shapes_computed(model, rows):
    """Token ids of each forward, and logits that the output layer makes of them."""
    ids, logits = [], []
    hooks = [model.register_forward_pre_hook(
        lambda module, arguments, inputs: ids.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True), model.lm_head.register_forward_hook(
        lambda module, inputs, output: logits.append(tuple(output.shape[:2])))]
    packed.turn_logprobs(model, rows)
    for hook in hooks:
        hook.remove()
    return ids, logits


def test_a_shared_prompt_and_an_equal_row_are_computed_once_and_logits_of_turns_alone():
    prompt = FOUR_ROWS[0].turn_index.index(0)
    own = sum(len(row.ids) - prompt for row in FOUR_ROWS)
    assert shapes_computed(tiny_model(TOKENIZER), [*FOUR_ROWS, FOUR_ROWS[0]]) == (
        [(1, prompt + own)], [(1, own)])
    longest = max(len(row.ids) for row in FOUR_ROWS)
    assert shapes_computed(tiny_model(TOKENIZER, "mistral"), FOUR_ROWS)[0] == [(4, longest)]


def test_turns_of_one_token_share_their_prompt_as_whole_turns_do():
    """A loss for each token numbers the tokens of a candidate in place of its only turn."""
    rows = candidate_rows("t", ["what is it?", "x", "tell me more about that"])
    prompt = rows[0].turn_index.index(0)
    for row in rows:
        row.turn_index[prompt:] = range(len(row.ids) - prompt)
    assert packed.pack_rows(rows, 8192) == [rows]
    model = tiny_model(TOKENIZER)
    for fast, plain in zip(packed.turn_logprobs(model, rows), turn_logprobs(model, rows),
                           strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-5)


def test_only_the_same_prompt_is_shared_wherever_its_candidates_stand():
    one, other = candidate_rows("one state", ["a", "b"]), candidate_rows("two state", ["a", "b"])
    assert one[0].turn_index == other[0].turn_index  # of the same length, but another text
    mixed = [one[0], other[0], one[1], other[1]]
    assert packed.pack_rows(mixed, 8192) == [one, other]
    dialogues = [Row(*encode_dialogue(TOKENIZER, dialogue("t", "a", "b", "c"))) for _ in range(2)]
    assert packed.pack_rows(dialogues, 8192) == [[row] for row in dialogues]


def test_a_pack_is_as_large_as_its_limit_and_no_larger():
    prompt = FOUR_ROWS[0].turn_index.index(0)
    whole = prompt + sum(len(row.ids) - prompt for row in FOUR_ROWS)
    assert packed.pack_rows(FOUR_ROWS, whole) == [FOUR_ROWS]
    assert packed.pack_rows(FOUR_ROWS, whole - 1) == [FOUR_ROWS[:3], FOUR_ROWS[3:]]
    assert packed.pack_rows(FOUR_ROWS, 0) == [[row] for row in FOUR_ROWS]


def test_log_probs_of_logits_in_bf16_are_in_fp32():
    logits, target = torch.randn(5, 300).bfloat16(), torch.arange(5)
    found = packed.picked_logprobs(logits, target)
    wanted = logits.double().log_softmax(-1)[range(5), target]
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
