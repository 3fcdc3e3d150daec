"""Variants beside the core: their objectives on plain numbers; and the step that all trainers take.
"""

import math

import pytest
import torch
from conftest import (
    byte_tokenizer, differing_weights, metrics, read_rows, run_script, tiny_model,
    training, write_episodes, write_rows)
from transformers import AutoModelForCausalLM

from train_policy import Row
from variants.sft import supervised_objective
from variants.value_critic import value_loss


def test_the_supervised_loss_is_the_summed_log_prob_over_the_mean_length_of_all_dialogues():
    model = tiny_model(byte_tokenizer())
    rows = [Row([1, 2, 3, 4, 5], [-1, 0, 0, -1, 1]), Row([6, 7], [-1, 0])]
    losses = supervised_objective(model, rows, mean_tokens=2.5)["loss"]
    for row, loss in zip(rows, losses, strict=True):
        logprobs = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        of_agent = [logprobs[index - 1, row.ids[index]].item()
                    for index, turn in enumerate(row.turn_index) if turn >= 0]
        assert loss.item() == pytest.approx(-sum(of_agent) / 2.5, rel=1e-5)


def test_the_value_loss_is_the_mean_cross_entropy_of_the_turns_that_exist():
    logits = torch.tensor([[2.0, -1.0, 0.0], [0.5, 9.0, 9.0]])
    exists = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    outcomes = [1.0, 0.3]
    losses = value_loss(logits, torch.tensor(outcomes), exists)

    def cross_entropy(logit, outcome):
        p = 1 / (1 + math.exp(-logit))
        return -outcome * math.log(p) - (1 - outcome) * math.log(1 - p)

    expected = [sum(cross_entropy(x, 1.0) for x in (2.0, -1.0, 0.0)) / 3, cross_entropy(0.5, 0.3)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


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
