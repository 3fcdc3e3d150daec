"""What the project does on one CUDA GPU: throughput, memory, and numbers that have to agree.

    python tests/gpu_check.py [--layers 32]     an 8B-shaped random Llama; some six minutes
    python tests/gpu_check.py --dry             tiny shapes on the CPU, to see that every line runs

First steps of the trainers, plain and with --packed: forward and backward through the sharded code
path (fp32 weights, bf16 compute, recomputation), without the optimiser. MFU counts the arithmetic
of the tokens that were run, recomputation not included, against the GPU's dense bf16 peak. Fewer
--layers fit a smaller GPU and leave the figures per layer as they are. Then sampling; the parity of
packed and plain log-probs with the CPU's; the scripts themselves, one after the other: resumed
runs, packed runs, runs on two GPUs (if there are two) and checkpoints have to be what the plain run
makes; and train_critic.py at full size, with the optimiser, if the GPU has 140 GB.
"""

import argparse
import functools
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ["TEST_GPU"] = "1"  # otherwise conftest hides all GPUs

import benchmark as parts
import torch
from conftest import ROOT, metrics, run_script
from transformers import LlamaConfig, LlamaForCausalLM

import train_critic
import train_policy
from fast import packed
from runtime.files import write_jsonl
from runtime.models import shard
from runtime.processes import launch
from runtime.training import Run
from speakers.interface import Request, SpeakerSettings
from speakers.local import LocalSpeaker

PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362}  # dense bf16
WORDS = 2752  # of the tokenizer


def random_llama(dry, layers, dtype, device, vocabulary=128256, spread=0.02):
    """The shape of Llama-3.1-8B, or a tiny one; `spread` is that of its weights."""
    if dry:
        size = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": WORDS}
    else:
        size = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": vocabulary}
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as runtime.models.load_model does
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=16384, eos_token_id=0,
                         bos_token_id=None, pad_token_id=0, initializer_range=spread, **size)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype)


# -----------------------------------------------------------------------------
# Measuring


def free_memory(device):
    gc.collect()  # a sharded model is part of cycles
    if device != "cpu":
        torch.cuda.empty_cache()


def synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


def timed(call, device, repeats=3):
    """(median wall seconds, peak gigabytes) of a call that has been warmed up."""
    call()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    gigabytes = float("nan")
    if device != "cpu":
        gigabytes = torch.cuda.max_memory_allocated() / 1e9
    return statistics.median(seconds), gigabytes


def sequences_of(model, call):
    """Lengths of the sequences that the model reads in a call."""
    lengths = []

    def note(module, arguments, inputs):
        ids = arguments[0] if arguments else inputs["input_ids"]
        lengths.extend([ids.shape[1]] * len(ids))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    call()
    hook.remove()
    return lengths


def arithmetic(model, lengths):
    """Floating-point operations of forward and backward on sequences of these lengths.

    Six for each weight and token, and causal attention.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= model.get_input_embeddings().weight.numel()
    width = model.config.num_hidden_layers * model.config.hidden_size
    return sum(6 * weights * length + 6 * width * length**2 for length in lengths)


def attention_kernels(call):
    """Names of the attention kernels that a call ran."""
    # names need no GPU events
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
    prefix = "aten::_scaled_dot_product_"
    names = {event.key for event in profile.key_averages() if event.key.startswith(prefix)}
    kernels = [name.removeprefix(prefix) for name in names if not name.endswith("backward")]
    return ", ".join(sorted(kernels))


# -----------------------------------------------------------------------------
# Training steps


def report_step(name, model, step, peak, device):
    """One line of the table."""
    def whole():
        step()
        model.zero_grad()

    lengths = sequences_of(model, whole)
    seconds, gigabytes = timed(whole, device)
    tokens, use = sum(lengths), "-"
    if peak:
        use = f"{arithmetic(model, lengths) / seconds / peak:.1%}"
    print(f"| {name} | {tokens} | {seconds:.3g} | {tokens / seconds:.0f} | {use}"
          f" | {gigabytes:.1f} | {attention_kernels(whole)} |", flush=True)


def report_steps(args, run, tokenizer, peak):
    model = random_llama(args.dry, args.layers, torch.float32, run.device).train()
    shard(model, run, train_critic.parse_args(
        ["--episodes", "e", "--model", "m", "--output", "o", "--checkpointing_every", "1"]))
    print("| step | tokens | s | tokens/s | MFU | peak GB | attention kernels |"
          "\n|---|---|---|---|---|---|---|", flush=True)

    def report(script, step, name, pairs, at_once):
        script.set_reference(model, [row for pair in pairs for row in pair], run, 2)
        plain = functools.partial(step, model, pairs, at_once)
        report_step(f"{name}, packed", model, parts.with_packed(plain), peak, run.device)
        report_step(f"{name}, plain", model, plain, peak, run.device)

    for tokens in (128,) if args.dry else (4096, 8192):
        pairs = parts.critic_pairs(tokenizer, tokens, 2, random.Random(tokens))
        report(train_critic, parts.critic_step, f"critic, two dialogues of {tokens}", pairs, 1)
    prompt, longest = (64, 16) if args.dry else (2048, 256)
    pairs = parts.policy_pairs(tokenizer, prompt, longest, random.Random(0))
    for at_once in (4, 1):
        report(train_policy, parts.policy_step,
               f"policy, 4 pairs of a state, {at_once} a forward", pairs, at_once)


# -----------------------------------------------------------------------------
# Sampling, and parity with the CPU


def report_sampling(args, device, tokenizer):
    """Sixteen candidates a prompt, on an unsharded model in bf16 as collect.py samples."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = random_llama(args.dry, args.layers, dtype, device)
    new, count = (8, 2) if args.dry else (128, 8)
    length = 64 if args.dry else 1024
    speaker = LocalSpeaker("gpu_check", SpeakerSettings(
        max_new_tokens=new, batch_size=16 * count, device=device), model, tokenizer)
    requests = [Request(parts.messages_of(length, random.Random(seed)), 16, seed)
                for seed in range(count)]
    seconds, gigabytes = timed(lambda: speaker.speak(requests), device, repeats=1)
    print(f"\nSampling: {16 * count / seconds:.1f} candidates of up to {new} tokens a second,"
          f" {count} prompts with 16 each, {gigabytes:.1f} GB", flush=True)


def report_parity(device, tokenizer):
    """Log-probs of turns and their gradient on a small model: against the CPU in float64."""
    pairs = [*parts.critic_pairs(tokenizer, 600, 3, random.Random(2)),
             *parts.policy_pairs(tokenizer, 200, 20, random.Random(3))]
    rows = [row for pair in pairs for row in pair]
    print("\n| parity with the CPU in float64 | log-probs | gradient |\n|---|---|---|")
    exact = logprobs_and_gradient(train_critic.turn_logprobs, "cpu", torch.float64, rows)
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
        for name, function in (("plain", train_critic.turn_logprobs),
                               ("packed", packed.turn_logprobs)):
            found = logprobs_and_gradient(function, device, dtype, rows)
            errors = list(map(parts.relative_difference, found, exact))
            print(f"| {name}, {device}, {str(dtype).removeprefix('torch.')} | {errors[0]:.1e}"
                  f" | {errors[1]:.1e} |", flush=True)
            if not max(errors) <= limit:
                raise SystemExit(f"found relative errors of {errors}, expected at most {limit}")


def logprobs_and_gradient(function, device, dtype, rows):
    # with weights as usual, next tokens would be all alike, and a wrong mask would hardly show
    model = random_llama(True, 2, torch.float32, "cpu", spread=0.1).to(device, dtype)
    logprobs, tokens = function(model, rows)
    (logprobs.double() / tokens.clamp(min=1)).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return logprobs.detach().cpu(), gradient.cpu()


# -----------------------------------------------------------------------------
# The scripts: a resumed run, a packed run, checkpoints, ranking, the policy


def report_scripts(args, tokenizer, folder):
    # of 32 layers, the optimiser's moments would not fit
    model = random_llama(args.dry, min(args.layers, 2), torch.float32, "cpu", vocabulary=WORDS)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    del model
    draw = random.Random(0)
    lengths = (300, 200, 400, 250, 300) if args.dry else (2000, 1000, 4000, 1500, 2000)
    episodes = [episode for index, length in enumerate(lengths)
                for episode in parts.episodes_of(length, 3, draw, name=f"task{index}")]
    write_jsonl(folder / "episodes.jsonl", episodes)

    def train(script, name, *more, processes=1):
        run_script(script, "--model", folder / "base", "--output", folder / name, "--epochs", 2,
                   "--batch_size", 2, "--shuffle", "groups", "--lr", 1e-3 if args.dry else 1e-4,
                   "--dtype", "bfloat16", *more, processes=processes)
        return metrics(folder / name)

    critic = functools.partial(train, "train_critic.py")
    options = "--episodes", folder / "episodes.jsonl", "--holdout", 0.2, "--checkpointing_every", 2
    began = time.perf_counter()
    plain = critic("plain", *options)
    print(f"\nThe scripts on {min(args.layers, 2)} layers. {len(plain)} steps of the critic took"
          f" {sum(line['time/step'] for line in plain):.3g} s, the whole run"
          f" {time.perf_counter() - began:.3g} s")
    compare("packed critic", critic("packed", *options, "--packed"), plain)
    if args.dry or torch.cuda.device_count() > 1:
        compare("critic of two ranks", critic("two", *options, processes=2), plain)
    critic("resumed", *options, "--max_steps", 3)
    compare("resumed critic", critic("resumed", *options), plain)
    # matrices that begin at 0 learn slowly, and what they learn has to exceed the rounding of bf16
    rate = 3e-2 if args.dry else 1e-3
    critic("lora", *options, "--lora_rank", 4, "--no-reshard", "--lr", rate)
    for name in ("plain", "lora"):
        compare_checkpoint(name, folder)

    run_script("collect.py", "--states", folder / "episodes.jsonl", "--agent", folder / "base",
               "--states_fraction", 1, "--states_per_task", 2, "--num_candidates", 4,
               "--max_new_tokens", 8, "--output", folder / "candidates.jsonl")
    run_script("train_critic.py", "--output", folder / "lora", "--candidates",
               folder / "candidates.jsonl", "--packed")
    policy = functools.partial(train, "train_policy.py")
    options = "--candidates", folder / "lora/ranked.jsonl"
    plain = policy("policy", *options)
    compare("packed policy", policy("packed_policy", *options, "--packed"), plain)


def compare(name, found, expected):
    report_error(name, *([line["train/margin"] for line in lines] for lines in (found, expected)))


def compare_checkpoint(name, folder):
    """The held-out margin of the run's last step, and that of the critic that it saved."""
    flags = json.loads(Path(folder, name, "run.json").read_text())["flags"]
    critic = train_critic.Critic(folder / name, dtype="bfloat16")
    episodes, _ = train_critic.load_episodes([folder / "episodes.jsonl"])
    tasks = train_critic.group_by_task(episodes)
    _, (held_out,) = train_critic.split_tasks(tasks, flags["holdout"], flags["seed"])
    margins = []
    for pair in train_critic.pair_episodes(tasks[held_out]):
        better, worse = [critic.turn_advantages([critic.dialogue_row(episode)]).sum().item()
                         for episode in pair]
        margins.append(flags["beta"] * (better - worse))
    report_error(f"checkpoint of the run {name}", [statistics.mean(margins)],
                 [metrics(folder / name)[-1]["holdout/margin"]])


def report_error(name, found, expected):
    error = parts.relative_difference(found, expected)
    print(f"Margins of the {name} differ by {error:.1e} of what training changed", flush=True)
    if not error <= 0.2:
        raise SystemExit(f"found the margins {found}, expected {expected} but for the rounding of"
                         " bf16, and a relative difference of at most 0.2")


def report_full_size(args, device, tokenizer, folder):
    """Steps of train_critic.py, whose peak docs/scaling.md counts in its row `critic_8b_h200`."""
    if not args.dry and torch.cuda.get_device_properties(0).total_memory < 140e9:
        print("\nA whole step at full size needs a GPU of 140 GB", flush=True)
        return
    random_llama(args.dry, args.layers, torch.bfloat16, device).save_pretrained(folder / "large")
    tokenizer.save_pretrained(folder / "large")
    free_memory(device)
    draw, tokens = random.Random(0), 200 if args.dry else 2500
    write_jsonl(folder / "large.jsonl", [
        episode for index in range(8)
        for episode in parts.episodes_of(tokens, 2, draw, name=f"task{index}")])
    if not args.dry:
        torch.cuda.reset_peak_memory_stats()
    launch(train_critic.main, train_critic.parse_args([str(word) for word in (
        "--episodes", folder / "large.jsonl", "--model", folder / "large", "--holdout", 0,
        "--epochs", 3, "--packed", "--dtype", "bfloat16", "--output", folder / "large_critic")]))
    seconds = [line["time/step"] for line in metrics(folder / "large_critic")]
    peak = "" if args.dry else (
        f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB,"
        f" {torch.cuda.max_memory_reserved() / 1e9:.2f} reserved")
    print(f"train_critic.py, {args.layers} layers, 8 pairs of dialogues of {tokens} a step:"
          f" {statistics.median(seconds):.3g} s{peak}", flush=True)


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true",
                        help="tiny shapes on the CPU; its figures mean nothing")
    parser.add_argument("--layers", type=int, help="decoder layers (default: 32; dry: 2)")
    parser.add_argument("--peak_tflops", type=float,
                        help="dense bf16 peak of the GPU (default: by its name)")
    args = parser.parse_args(argv)
    if args.layers is None:
        args.layers = 2 if args.dry else 32
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit("found no CUDA GPU, expected one; give --dry to run the same code on tiny"
                         " shapes on the CPU")
    return args


def main(args):
    tokenizer = parts.word_tokenizer(WORDS)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--episodes", "e", "--model", f"{ROOT}/toy/base", "--output", f"{folder}/run"]
        run = Run(train_critic.parse_args(flags), [])
        name, peak = "CPU (dry: no figure here is a GPU's)", 0
        if run.device != "cpu":
            name = torch.cuda.get_device_name()
            known = [tflops for part, tflops in PEAK_TFLOPS.items() if part in name]
            peak = args.peak_tflops or sum(known[:1])
        print(f"{name}, torch {torch.__version__}, {args.layers} layers,"
              f" {time.strftime('%Y-%m-%d')}\n")
        report_steps(args, run, tokenizer, 1e12 * peak)
        free_memory(run.device)
        report_sampling(args, run.device, tokenizer)
        free_memory(run.device)
        report_parity(run.device, tokenizer)
        free_memory(run.device)
        report_scripts(args, tokenizer, Path(folder))
        torch.distributed.destroy_process_group()
        report_full_size(args, run.device, tokenizer, Path(folder))


if __name__ == "__main__":
    main(parse_args())
