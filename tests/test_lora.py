"""Matrices beside frozen layers."""

import copy
import json
import shutil
import types

import pytest
import torch
from conftest import (
    byte_tokenizer, dialogue, differing_weights, episode, metrics, run_script, tiny_model, training,
    weights, write_episodes)
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from formats.read import read_episodes
from runtime import checkpoints
from runtime.checkpoints import trained_parameters
from runtime.lora import (
    LINEAR_LAYERS, MATRICES, LoraLinear, WithoutMatrices, add_matrices, load_matrices, lora_layers,
    merge)
from runtime.models import load_model, open_to_train
from runtime.processes import Process
from train_critic import Critic

SETTINGS = {"rank": 4, "alpha": 8}
IDS = torch.arange(20)[None]
ALONE = Process(0, 1, "cpu")


def with_matrices(model, seed=0):
    add_matrices(model, **SETTINGS)
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        layer.up.data.normal_(std=0.05, generator=generator)
    return model


# -----------------------------------------------------------------------------
# The layer


def test_before_the_first_step_and_with_the_matrices_off_the_model_is_the_one_it_started_from():
    tokenizer = byte_tokenizer()
    plain, fresh = tiny_model(tokenizer), add_matrices(tiny_model(tokenizer), **SETTINGS)
    learnt = with_matrices(tiny_model(tokenizer))
    expected, with_all = plain(IDS).logits, learnt(IDS).logits
    assert torch.equal(fresh(IDS).logits, expected)
    assert not torch.allclose(with_all, expected, atol=1e-2)
    assert torch.equal(WithoutMatrices(learnt)(IDS).logits, expected)
    assert torch.equal(learnt(IDS).logits, with_all)  # all of them are on again


def test_a_layer_adds_alpha_over_rank_times_its_matrices():
    base = torch.nn.Linear(3, 2)
    layer = LoraLinear(base, rank=4, alpha=8)
    layer.up.data.normal_()
    x = torch.ones(1, 3)
    expected = base(x) + 8 / 4 * x @ (layer.up @ layer.down).T
    torch.testing.assert_close(layer(x), expected)


def test_only_matrices_are_trained_and_in_fp32():
    model = add_matrices(tiny_model(byte_tokenizer()).bfloat16(), **SETTINGS)
    assert len(trained_parameters(model)) == 2 * 7 * 2  # of seven layers in each of two blocks
    assert all(parameter.dtype == torch.float32 for parameter in trained_parameters(model))


def test_matrices_are_drawn_on_the_cpu_wherever_their_layer_is():
    torch.manual_seed(0)
    layer = LoraLinear(torch.nn.Linear(4, 4, device="meta"), rank=2, alpha=4)
    drawn = torch.get_rng_state()
    assert {layer.down.device.type, layer.up.device.type} == {"meta"}
    torch.manual_seed(0)
    torch.empty(2, 4).uniform_()
    assert torch.equal(drawn, torch.get_rng_state())


def test_logits_gradients_and_merged_weights_equal_those_of_peft():
    peft = pytest.importorskip("peft")  # pip install --no-deps peft==0.21.2 accelerate psutil
    tokenizer = byte_tokenizer()
    learnt = with_matrices(tiny_model(tokenizer))
    config = peft.LoraConfig(r=SETTINGS["rank"], lora_alpha=SETTINGS["alpha"], lora_dropout=0.0,
                             target_modules=list(LINEAR_LAYERS), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(tiny_model(tokenizer), config)
    pairs = []  # (our matrix, theirs)
    for name, layer in lora_layers(learnt).items():
        module = theirs.base_model.model.get_submodule(name)
        pairs += [(layer.down, module.lora_A["default"].weight),
                  (layer.up, module.lora_B["default"].weight)]
    for ours, other in pairs:
        other.data.copy_(ours.data)
    logits, expected = learnt(IDS).logits, theirs(IDS).logits
    torch.testing.assert_close(logits, expected)
    for output in (logits, expected):
        output.log_softmax(-1)[..., 5].sum().backward()
    for ours, other in pairs:
        torch.testing.assert_close(ours.grad, other.grad)
    merged, _ = merge(learnt.state_dict(), learnt)
    torch.testing.assert_close(merged, dict(theirs.merge_and_unload().state_dict()))


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second one's layers have biases
def test_merged_weights_give_the_matrices_logits_and_differ_in_their_layers_alone(
        monkeypatch, family):
    tokenizer = byte_tokenizer()
    plain = tiny_model(tokenizer, family)
    targets = ("q_proj", "down_proj")
    monkeypatch.setattr("runtime.lora.LINEAR_LAYERS", targets)
    learnt = with_matrices(tiny_model(tokenizer, family))
    merged, matrices = merge(dict(learnt.named_parameters()), learnt)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    changed = {name for name, weight in plain.named_parameters()
               if not torch.equal(weight, merged[name])}
    assert {name.split(".")[-2] for name in changed} == set(targets) and len(changed) == 4
    assert len(matrices) == 8
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(IDS).logits, learnt(IDS).logits, atol=1e-5, rtol=0)


def test_a_model_without_these_layers_is_refused(monkeypatch):
    monkeypatch.setattr("runtime.lora.LINEAR_LAYERS", ("q_proj", "w_proj"))
    with pytest.raises(SystemExit, match="w_proj, expected.*down_proj.*q_proj"):
        with_matrices(tiny_model(byte_tokenizer()))


# -----------------------------------------------------------------------------
# Training, and what later stages read


def lora(episodes, model, output, *more):
    return training(episodes, model, output, "--epochs", 3, "--batch_size", 2, "--lr", 1e-2,
                    "--lora_rank", 4, *more)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    episodes = write_episodes(folder / "episodes.jsonl")
    run_script("train_critic.py", *lora(episodes, tiny(), folder / "critic"))
    return folder


def test_the_critic_learns_and_its_directory_opens_as_any_other(trained, tiny):
    critic = trained / "critic"
    assert metrics(critic)[-1]["train/margin"] > 1e-3 > abs(metrics(critic)[0]["train/margin"])
    before, after = weights(tiny()), weights(critic)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        target = name.split(".")[-2] in LINEAR_LAYERS
        assert torch.equal(weight, after[name]) != target, name
    load_model(str(critic))


def test_ranking_by_the_matrices_holds_one_model_and_equals_ranking_by_the_merged_one(trained):
    task = read_episodes(trained / "episodes.jsonl")[0]["task"]
    texts, finished = ["what?", "so", "x"], [True, True, False]
    arguments = (task, dialogue("t"), texts, finished)
    critic = Critic(trained / "critic", "cpu")
    assert critic.model is critic.reference_model.model
    one = critic.advantages(*arguments)
    critic.model = load_model(str(trained / "critic"))
    critic.reference_model = load_model(
        json.loads((trained / "critic/run.json").read_text())["flags"]["model"])
    assert one == pytest.approx(critic.advantages(*arguments), abs=1e-5)
    assert max(map(abs, one)) > 1e-3


def rounded(model):
    """With weights that bf16 can hold; buffers stay exact."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def test_in_bf16_a_small_update_is_not_lost_to_the_rounding_of_merged_weights(tiny, tmp_path):
    tokenizer = byte_tokenizer()
    base = rounded(tiny_model(tokenizer))
    expected = base(IDS).logits
    learnt = with_matrices(copy.deepcopy(base))
    for layer in lora_layers(learnt).values():
        layer.up.data /= 100
    checkpoints.save_checkpoint(tmp_path, learnt, tokenizer, None, ALONE)
    change = learnt(IDS).logits - expected

    def error_of(model):  # in float32, so that the weights' rounding is all there is
        model.float()
        return ((model(IDS).logits - expected - change).norm() / change.norm()).item()

    merged = rounded(load_model(str(tmp_path), dtype="float32"))
    apart = load_model(str(tmp_path), dtype="bfloat16")
    assert apart.dtype == torch.bfloat16
    assert apart.model.rotary_emb.inv_freq.dtype == torch.float32  # as in any bf16 model
    assert error_of(merged) > 0.3 and error_of(apart) < 0.02
    assert error_of(WithoutMatrices(apart)) < 0.02  # they belong to the checkpoint


def test_a_critic_that_equals_its_reference_has_no_advantages_in_bf16(tiny, tmp_path):
    """Full training after LoRA starts from merged weights, and so does its reference model."""
    tokenizer = byte_tokenizer()
    learnt = with_matrices(tiny_model(tokenizer))
    checkpoints.save_checkpoint(tmp_path / "lora", learnt, tokenizer, None, ALONE)
    shutil.copytree(tmp_path / "lora", tmp_path / "critic")
    (tmp_path / "critic" / MATRICES).unlink()
    flags = {"normalise": "turn", "privileged": "ground_truth",
             "max_length": 600, "model": str(tmp_path / "lora"), "lora_rank": 0}
    (tmp_path / "critic/run.json").write_text(json.dumps({"flags": flags, "inputs": {}}))
    critic = Critic(str(tmp_path / "critic"), "cpu", dtype="bfloat16")
    found = critic.advantages(episode("t", 1.0)["task"], dialogue("t"), ["a", "be"], [True] * 2)
    assert found == [0.0, 0.0]


def test_the_files_of_a_checkpoint_with_matrices_have_equal_permissions(tmp_path):
    tokenizer = byte_tokenizer()
    checkpoints.save_checkpoint(tmp_path, with_matrices(tiny_model(tokenizer)), tokenizer, None,
                                ALONE)
    assert (tmp_path / MATRICES).is_file()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_second_training_of_matrices_in_bf16_keeps_first_and_base(trained, tiny, tmp_path):
    flags = "--successes", "--dtype", "bfloat16"
    for before, after in ((tiny(), "first"), (tmp_path / "first", "second")):
        run_script("variants/sft.py", *lora(trained / "episodes.jsonl", before,
                                                tmp_path / after, *flags))
    # its weights are fp32 for whoever reads it, although training froze them in bf16
    assert json.loads((tmp_path / "first/config.json").read_text())["dtype"] == "float32"
    base = load_model(tiny(), dtype="bfloat16")
    apart = load_model(str(tmp_path / "second"), dtype="bfloat16")
    layer = apart.model.layers[0].mlp.up_proj
    assert isinstance(layer.base, LoraLinear)
    assert torch.equal(layer.base.base.weight, base.model.layers[0].mlp.up_proj.weight)
    first = load_file(tmp_path / "first" / MATRICES)
    assert torch.equal(layer.base.up, first["model.layers.0.mlp.up_proj.up"].bfloat16())
    again = load_matrices(load_model(str(tmp_path / "first"), dtype="bfloat16"),
                          tmp_path / "second")
    assert torch.equal(again(IDS).logits, apart(IDS).logits)
    merged = load_model(str(tmp_path / "second"), dtype="float32")
    torch.testing.assert_close(apart.float()(IDS).logits, merged(IDS).logits, atol=0.05, rtol=0.05)


def test_a_run_cut_and_resumed_and_one_of_two_ranks_equal_the_whole(trained, tiny, tmp_path):
    episodes = trained / "episodes.jsonl"
    cut = lora(episodes, tiny(), tmp_path / "cut")
    run_script("train_critic.py", *cut, "--max_steps", 3)
    run_script("train_critic.py", *cut)
    run_script("train_critic.py", *lora(episodes, tiny(), tmp_path / "two"), processes=2)
    assert not differing_weights(trained / "critic", tmp_path / "cut")
    two = weights(tmp_path / "two")
    for name, weight in weights(trained / "critic").items():
        torch.testing.assert_close(two[name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("script, more", [
    ("variants/value_critic.py", ()), ("variants/sft.py", ("--successes",)),
    ("train_policy.py", ("--packed",)),
    ("train_critic.py", ("--dtype", "bfloat16", "--checkpointing_every", 1)),
])
def test_every_objective_trains_matrices_and_leaves_the_rest(script, more, trained, tiny, tmp_path):
    run_script(script, *lora(trained / "episodes.jsonl", tiny(), tmp_path / "out", *more))
    before, after = weights(tiny()), weights(tmp_path / "out")
    for name, weight in before.items():
        if name in after and name.split(".")[-2] not in LINEAR_LAYERS:
            torch.testing.assert_close(after[name], weight, atol=4e-3, rtol=4e-3)  # bf16
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"],
                           after["model.layers.0.mlp.up_proj.weight"])
    assert ("score.weight" in after) == ("value" in script)


def test_alpha_is_twice_the_rank_by_default(trained, tiny, tmp_path):
    run_script("train_critic.py", *lora(trained / "episodes.jsonl", tiny(), tmp_path / "critic",
                                        "--lora_alpha", 8))
    assert not differing_weights(trained / "critic", tmp_path / "critic")


def test_another_seed_begins_with_other_matrices(tiny, tmp_path):
    episodes, found = write_episodes(tmp_path / "e.jsonl"), []
    for seed in (0, 1):
        run_script("train_critic.py", *lora(episodes, tiny(), tmp_path / f"{seed}", "--lr", 0,
                                            "--max_steps", 1, "--seed", seed))
        matrices = load_file(tmp_path / f"{seed}" / MATRICES)
        found.append(matrices["model.layers.0.mlp.up_proj.down"])
    assert not torch.equal(*found)


def test_a_value_head_is_trained_in_fp32_beside_the_matrices(tiny):
    run = types.SimpleNamespace(device="cpu", world=1, process=ALONE, say=print)
    args = types.SimpleNamespace(model=tiny(), seed=0, lora_rank=4, lora_alpha=None, dtype=None,
                                 checkpointing_every=None, reshard=True)
    model = open_to_train(args, run, AutoModelForTokenClassification, num_labels=1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = {name for name, _ in model.named_parameters() if name.startswith("score")}
    assert head and head < trained and len(trained - head) == 2 * 7 * 2
    assert model.score.weight.dtype == torch.float32
