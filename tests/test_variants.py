"""Variants beside the core: their objectives on plain numbers; and the step that all trainers take.
"""

import math

import pytest
import torch
from conftest import (
    byte_tokenizer, dialogue, differing_weights, episode, metrics, ranked_state, read_rows,
    refusal, run_script, tiny_model, training, write_episodes, write_rows)
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from formats.read import load_episodes
from runtime.models import load_model
from train_policy import Row, dialogue_row, turn_logprobs
from variants.sft import supervised_objective
from variants.value_critic import Reader, ValueCritic, turn_values, value_objective


def test_the_supervised_loss_is_the_summed_log_prob_over_the_mean_length_of_all_dialogues():
    model = tiny_model(byte_tokenizer())
    rows = [Row([1, 2, 3, 4, 5], [-1, 0, 0, -1, 1]), Row([6, 7], [-1, 0])]
    losses = supervised_objective(model, rows, mean_tokens=2.5)["loss"]
    for row, loss in zip(rows, losses, strict=True):
        logprobs = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        of_agent = [logprobs[index - 1, row.ids[index]].item()
                    for index, turn in enumerate(row.turn_index) if turn >= 0]
        assert loss.item() == pytest.approx(-sum(of_agent) / 2.5, rel=1e-5)


def test_rejection_fine_tuning_learns_from_the_successes_alone(tiny, tmp_path):
    model = tiny()
    mixed = write_episodes(tmp_path / "mixed.jsonl")
    rows = read_rows(mixed)
    successes = write_rows(tmp_path / "successes.jsonl", [row for row in rows if row["success"]])
    assert 0 < len(read_rows(successes)) < len(rows)
    for name, path, flags in [("all", mixed, ()), ("chosen", mixed, ("--successes",)),
                              ("given", successes, ())]:
        run_script("variants/sft.py", *training(path, model, tmp_path / name, *flags))
    assert differing_weights(tmp_path / "chosen", tmp_path / "given") == []
    assert differing_weights(tmp_path / "chosen", tmp_path / "all")


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("script", [
    "train_critic.py", "train_policy.py", "variants/sft.py", "variants/value_critic.py"])
def test_a_step_is_adamw_without_decay_on_the_clipped_gradient(tiny, tmp_path, script, max_norm):
    model, output = tiny(), tmp_path / "out"
    episodes = write_episodes(tmp_path / "episodes.jsonl")
    run_script(script, *training(episodes, model, output, "--max_steps", 1, "--max_norm", max_norm,
                                 "--dtype", "float32"))
    state = torch.load(output / "resume/rank0.pt")
    gradients = [moments["exp_avg"] / (1 - 0.9) for moments in state["moments"]]
    logged, = metrics(output)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert norm == pytest.approx(min(logged["optim/grad_norm"], max_norm), rel=1e-3)
    for gradient, moments in zip(gradients, state["moments"], strict=True):
        torch.testing.assert_close(moments["exp_avg_sq"], (1 - 0.95) * gradient ** 2,
                                   rtol=1e-3, atol=0)
    if script == "variants/value_critic.py":
        return  # its head is new, so its first weights are on no disk
    for before, after, gradient in zip(AutoModelForCausalLM.from_pretrained(model).parameters(),
                                       state["parameters"], gradients, strict=True):
        moved = logged["optim/lr"] * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after, before.detach() - moved, rtol=0, atol=1e-6)


def test_held_out_numbers_of_a_value_head_do_not_depend_on_the_batch(tiny, tmp_path):
    episodes, found = write_episodes(tmp_path / "episodes.jsonl"), []
    for size in (3, 4):
        run_script("variants/value_critic.py", *training(
            episodes, tiny(), tmp_path / f"{size}", "--holdout", 0.2, "--lr", 0, "--max_steps", 1,
            "--batch_size", size))
        line, = metrics(tmp_path / f"{size}")
        found.append([line["holdout/loss"], line["holdout/accuracy"]])
    assert found[0] == pytest.approx(found[1])


def test_dialogues_without_a_token_of_the_agent_are_none_to_learn_from(tiny, tmp_path):
    cut = episode("t", 1.0)
    cut["dialogue_history"] = [{"role": "user", "content": "t"},
                               {"role": "assistant", "content": "", "finished": False}]
    said = refusal("variants/sft.py", "--episodes", write_rows(tmp_path / "e.jsonl", [cut]),
                   "--model", tiny(), "--output", tmp_path / "out")
    assert "found no episode to learn from" in said


@pytest.mark.parametrize("bias", [-5.0, 0.0, 5.0])
def test_the_values_of_the_last_turns_of_a_pair_give_its_bradley_terry_loss(tiny, bias):
    model = load_model(tiny(), model_class=AutoModelForTokenClassification, num_labels=1).eval()
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight)
    torch.nn.init.constant_(model.score.bias, bias)
    reader = Reader(tiny(), "none", 600)
    pair = [reader.dialogue_row(episode("t", reward, texts=texts))
            for reward, texts in ((1.0, ("t", "q", "r", "x")), (0.0, ("t", "no")))]
    last = []
    for row in pair:
        logits = model(torch.tensor([row.ids])).logits[0, :, 0]
        # the means of all tokens up to the end of each turn
        means = [logits[:len(row.ids) - row.turn_index[::-1].index(turn)].mean().item()
                 for turn in range(row.turns)]
        assert turn_values(model, [row])[0].tolist() == pytest.approx(means, abs=1e-4)
        last.append(means[-1])
    for better, worse in ([0, 1], [1, 0]):
        found = value_objective(model, [(pair[better], pair[worse])])
        margin = last[better] - last[worse]
        assert found["accuracy"].item() == (margin > 0)
        assert found["margin"].item() == pytest.approx(margin, abs=1e-4)
        assert found["loss"].item() == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-4)


def test_rewards_of_any_size_train_a_value_head_that_only_compares_them(tiny, tmp_path):
    rows = read_rows(write_episodes(tmp_path / "e.jsonl"))
    scaled = [row | {"reward": 40 * row["reward"] - 7, "success": None,
                     "task": row["task"] | {"domain": "logged"}} for row in rows]
    for name, found in (("whole", rows), ("scaled", scaled)):
        path = write_rows(tmp_path / f"{name}.jsonl", found)
        run_script("variants/value_critic.py", *training(
            path, tiny(), tmp_path / name, "--pairs", "all", "--max_steps", 2))
    assert differing_weights(tmp_path / "whole", tmp_path / "scaled") == []


def test_spaces_around_a_candidate_change_no_value(tiny, tmp_path):
    run_script("variants/value_critic.py", *training(
        write_episodes(tmp_path / "e.jsonl"), tiny(), tmp_path / "critic", "--max_steps", 1))
    critic = ValueCritic(tmp_path / "critic", "cpu")
    task = episode("t", 1.0)["task"]
    bare, spaced = (critic.advantages(task, dialogue("t"), [text], [True])
                    for text in ("what?", " what?\n"))
    assert bare == spaced


def test_a_critic_of_log_ratios_is_refused_before_anything_is_written(tiny, tmp_path):
    run_script("train_critic.py", *training(
        write_episodes(tmp_path / "e.jsonl"), tiny(), tmp_path / "critic", "--max_steps", 1))
    state = ranked_state({"a": 0.0, "b": 0.0})
    said = refusal("variants/value_critic.py", "--output", tmp_path / "critic", "--candidates",
                   write_rows(tmp_path / "c.jsonl", [state]))
    assert "found a critic of log-ratios, expected one with a value head" in said
    assert not list((tmp_path / "critic").glob("ranked*"))


def test_the_loss_of_a_batch_of_all_dialogues_is_the_mean_over_all_tokens_of_the_agent(
        tiny, tmp_path):
    path = write_episodes(tmp_path / "e.jsonl")
    run_script("variants/sft.py", *training(path, tiny(), tmp_path / "out", "--batch_size", 99,
                                            "--max_steps", 1))
    model, tokenizer = load_model(tiny()), byte_tokenizer()
    rows = [dialogue_row(tokenizer, one, 600) for one in load_episodes([path])[0]]
    with torch.no_grad():
        logprobs, tokens = turn_logprobs(model, rows)
    line, = metrics(tmp_path / "out")
    assert line["train/loss"] == pytest.approx((-logprobs.sum() / tokens.sum()).item(), rel=1e-4)


def test_a_page_that_is_similar_enough_is_a_success_to_learn_from(tiny, tmp_path):
    rows = [episode("t", reward, sample, domain="frontend")
            for sample, reward in enumerate((0.95, 0.5))]
    done = run_script("variants/sft.py", *training(
        write_rows(tmp_path / "e.jsonl", rows), tiny(), tmp_path / "out", "--successes"))
    assert "2 episodes (0 failed ones omitted): 1 to learn from" in done.stdout
