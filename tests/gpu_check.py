"""Speed and sanity of the training steps on one GPU, through the scripts' own functions.

    python tests/gpu_check.py [--layers 32]     an 8B-shaped random Llama
    python tests/gpu_check.py --dry             tiny shapes on the CPU, to see that every line runs

A step is forward and backward through the sharded code path (fp32 master weights, bf16 compute,
activation checkpointing), without the optimiser. MFU counts the arithmetic of the tokens that were
run, recomputation not included, against the GPU's dense bf16 peak. Fewer --layers fit a smaller GPU
and leave the figures per layer as they are.
"""

import argparse
import dataclasses
import functools
import gc
import json
import random
import statistics
import tempfile
import time
import typing
from pathlib import Path

import benchmark_models as parts
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speakers.interface import SpeakerSettings
from speakers.local import LocalSpeaker, load_model
from speakers.lora import LINEAR_LAYERS, LoraSettings, add_matrices
from stages.processes import join_processes
from train_critic import (
    LoopSettings, Reader, TrainingLoop, critic_objective, pair_items, precompute_reference,
    reference_table, turn_sums)
from training.packing import pack_rows
from training.ranks import ShardSettings, shard
from train_policy import DpoSettings, dpo_objective

PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362}  # dense bf16


def random_llama(dry, layers, dtype, device, vocabulary=128256):
    """The shape of Llama-3.1-8B, or a tiny one."""
    if dry:
        size = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 2752}
    else:
        size = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": vocabulary}
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as speakers.local.load_model does
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=16384, eos_token_id=0,
                         bos_token_id=None, pad_token_id=0, **size)
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


def arithmetic(config, weights, lengths):
    """Floating-point operations of forward and backward on sequences of these lengths.

    Six for each weight and token, and causal attention.
    """
    width = config.num_hidden_layers * config.hidden_size
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


class Bench(typing.NamedTuple):
    """What every step is measured with."""

    tokenizer: typing.Any
    model: torch.nn.Module  # also its own reference: it has taken no step
    process: typing.Any
    peak: float  # dense bf16 operations per second of the GPU; 0: unknown

    @property
    def reference(self):
        return self.model


def report_step(bench, name, items, step):
    """One line of the table about a training step on `items`, each of which is one forward."""
    def whole():
        step()
        bench.model.zero_grad()

    seconds, gigabytes = timed(whole, bench.process.device)
    parameters = sum(p.numel() for p in bench.model.parameters())
    weights = parameters - bench.model.get_input_embeddings().weight.numel()
    packs = [pack for item in items for pack in pack_rows(item.rows)]
    lengths = [len(pack.ids) for pack in packs]  # a shared prompt is computed once
    tokens = sum(lengths)
    use = "-"
    if bench.peak:
        operations = arithmetic(bench.model.config, weights, lengths)
        use = f"{operations / seconds / bench.peak:.1%}"
    print(f"| {name} | {tokens} | {seconds:.3g} | {tokens / seconds:.0f} | {use}"
          f" | {gigabytes:.1f} | {attention_kernels(whole)} |", flush=True)


def plain_loss(model, rows, device):
    """The same dialogues with the logits of every token, as most trainers compute them."""
    total = 0.0
    for row in rows:
        ids = torch.tensor([row.ids], device=device)
        agent = torch.tensor([row.turn_index], device=device)[:, 1:] >= 0
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        total = total + (logprobs * agent).sum()
    return total


def report_critic(bench, dry):
    for tokens in (128,) if dry else (4096, 8192):
        item = parts.critic_item(bench, 2 * tokens, random.Random(tokens))

        def step(item=item):
            losses = critic_objective(bench.model, [item], parts.CRITIC)["train/loss"]
            losses.sum().backward()

        def plain_step(item=item):
            plain_loss(bench.model, item.rows, bench.process.device).backward()

        report_step(bench, f"critic, two dialogues of {tokens}", [item], step)
        if tokens <= 4096:
            report_step(bench, "the same rows, all logits", [item], plain_step)


def report_policy(bench, dry):
    """Four pairs of one state that share their prompt with all, with each other, with nobody."""
    prompt, longest = (64, 16) if dry else (2048, 256)
    ranked_state = parts.state(prompt, longest, 8, random.Random(0))
    items = {"--share state": parts.state_items(bench.tokenizer, ranked_state, "state"),
             "--share pair": parts.state_items(bench.tokenizer, ranked_state, "pair")}
    apart = []
    for item in items["--share pair"]:  # rows without a prompt are never packed
        rows = [dataclasses.replace(row, prompt_length=0) for row in item.rows]
        apart.append(dataclasses.replace(item, rows=rows))
    items["rows apart"] = apart
    for name, own in items.items():
        precompute_reference(bench.model, own, bench.process)

        def step(own=own):
            settings = DpoSettings(parts.BETA, nll=0.0)
            for item in own:
                losses = dpo_objective(bench.model, [item], settings)["train/loss"]
                losses.sum().backward()

        report_step(bench, f"policy, 4 pairs of one state, {name}", own, step)


def report_steps(args, tokenizer, process, peak):
    model = random_llama(args.dry, args.layers, torch.float32, process.device)
    shard(model, process, ShardSettings(checkpointing_every=1))
    bench = Bench(tokenizer, model, process, peak)
    print("| step | tokens | s | tokens/s | MFU | peak GB | attention kernels |"
          "\n|---|---|---|---|---|---|---|", flush=True)
    report_critic(bench, args.dry)
    report_policy(bench, args.dry)


# -----------------------------------------------------------------------------
# A short run: the optimiser, windows of lengths, every second layer recomputed, states, a resume


def report_run(args, tokenizer, process):
    """Two steps, each with a state, and two more of a run that resumes from them."""
    layers = min(args.layers, 4)  # the optimiser's moments of 32 would not fit
    draw = random.Random(0)
    lengths = (96, 64, 128, 80) if args.dry else (2048, 1024, 4096, 1536)
    reader = Reader(tokenizer, "ground_truth", parts.MAX_LENGTH)
    pairs = [[parts.dialogue_pair(2 * length, draw)] for length in lengths]
    items, _ = pair_items(reader, pairs, "pair")

    with tempfile.TemporaryDirectory() as folder:
        for max_steps in (2, 4):
            # the whole vocabulary would make states of 23 GB
            model = random_llama(args.dry, layers, torch.float32, process.device, vocabulary=8192)
            shard(model, process, ShardSettings(checkpointing_every=2, reshard=False))
            precompute_reference(model, items, process, 1, Path(folder, "reference.json"))
            loop = TrainingLoop(model, items, LoopSettings(
                Path(folder), lr=1e-6, epochs=2, batch_size=2, micro_batch_size=1,
                max_steps=max_steps, warmup=0.0, max_norm=1.0, length_window=2, save_minutes=0,
                seed=0), process)
            objective = functools.partial(critic_objective, model, settings=parts.CRITIC)
            steps, saving = [], []
            for step, batch in loop.steps():
                metrics = loop.optimise(batch, objective)
                synchronize(process.device)
                began = time.perf_counter()
                loop.log_and_save(step, metrics)
                saving.append(time.perf_counter() - began)
                steps.append(step)
            size = sum(path.stat().st_size for path in Path(folder, "state").iterdir())
            print(f"\nRun of {layers} layers, steps {steps}: loss {metrics['train/loss']:.4f}, a"
                  f" state of {size / 1e9:.3g} GB in {statistics.median(saving):.3g} s", flush=True)
            if steps != list(range(max_steps - 2, max_steps)):
                raise SystemExit(f"found the steps {steps}, expected two after the saved ones")
            del model, loop, objective


# -----------------------------------------------------------------------------
# Sampling, and parity with the CPU


def report_sampling(args, tokenizer, process):
    """Sixteen candidates a prompt, on an unsharded replica in bf16 as the scripts sample."""
    dtype = torch.float32 if process.device == "cpu" else torch.bfloat16
    model = random_llama(args.dry, args.layers, dtype, process.device)
    new, count = (8, 2) if args.dry else (128, 8)
    settings = SpeakerSettings(
        max_new_tokens=new, batch_size=16 * count, device=process.device)
    speaker = LocalSpeaker("gpu_check", settings, model, tokenizer)
    length = 64 if args.dry else 1024
    prompts = [parts.state(length, 16, 1, random.Random(n))["messages"] for n in range(count)]
    seconds, gigabytes = timed(lambda: speaker.speak(prompts, 16, list(range(count))),
                               process.device, repeats=1)
    print(f"\nSampling: {16 * count / seconds:.1f} candidates of {new} tokens a second,"
          f" {count} prompts with 16 each, {16 * count * new / seconds:.0f} tokens/s,"
          f" {gigabytes:.1f} GB", flush=True)


def report_parity(tokenizer, process):
    """The critic's loss on a small model: CPU in float64, the device in float32 and bf16."""
    reference = random_llama(True, 2, torch.float64, "cpu")
    reference.lm_head.weight.data *= 1.5  # one that differs, or every loss would be log 2
    reader = Reader(tokenizer, "ground_truth", parts.MAX_LENGTH)
    better, worse = parts.dialogue_pair(600, random.Random(2))
    items, _ = pair_items(reader, [[(better, worse)]], "pair")
    precompute_reference(reference, items, process)
    losses = []
    for device, dtype in (("cpu", torch.float64), (process.device, torch.float32),
                          (process.device, torch.bfloat16)):
        model = random_llama(True, 2, torch.float32, "cpu").to(device=device, dtype=dtype)
        losses.append(critic_objective(model, items, parts.CRITIC)["train/loss"].item())
    exact, single, half = losses
    print(f"\nLoss parity, critic: CPU float64 {exact:.6f}, {process.device} float32 {single:.6f},"
          f" bf16 {half:.6f}")
    if abs(single - exact) > 1e-4 * max(1, exact) or abs(half - exact) > 0.05 * max(1, exact):
        raise SystemExit("found losses that differ between CPU and device, expected at most 1e-4"
                         " (float32) and 5 % (bf16)")


def report_checkpoints(tokenizer, process):
    """Trained in bf16, whole and by matrices: what a later stage opens is what was trained."""
    reader = Reader(tokenizer, "ground_truth", parts.MAX_LENGTH)
    pair = parts.dialogue_pair(600, random.Random(2))
    for rank in (0, 4):
        model = random_llama(True, 2, torch.float32, process.device)
        if rank:
            add_matrices(model.to(torch.bfloat16), LoraSettings(rank, rank, LINEAR_LAYERS))
        shard(model, process, ShardSettings("bfloat16"))
        items, _ = pair_items(reader, [[pair]], "pair")
        rows = items[0].rows
        precompute_reference(model, items, process)
        objective = functools.partial(critic_objective, model, settings=parts.CRITIC)
        with tempfile.TemporaryDirectory() as folder:
            loop = TrainingLoop(model, items, LoopSettings(
                Path(folder), lr=1e-3, epochs=4, batch_size=1, micro_batch_size=1, max_steps=None,
                warmup=0.0, max_norm=1.0, length_window=1, save_minutes=20, seed=0), process)
            for step, batch in loop.steps():
                loop.log_and_save(step, loop.optimise(batch, objective))
            loop.save(tokenizer, None)
            written = json.loads(Path(folder, "config.json").read_text())["dtype"]
            opened = load_model(folder, process.device, dtype="bfloat16").eval()
        with torch.no_grad():
            trained, found = turn_sums(model, rows)[0], turn_sums(opened, rows)[0]
        update = trained - reference_table(rows, trained)
        error = ((found - trained).norm() / update.norm()).item()
        kind = f"matrices of rank {rank}" if rank else "all weights"
        print(f"\nCheckpoint of {kind}: {written}, opened in bf16 it errs by {error:.3f} of"
              " what training changed")
        if written != "float32" or error > 0.2:
            raise SystemExit("found a checkpoint that is not what was trained, expected float32"
                             " weights and an error of at most 20 %")


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
    process = join_processes(training=True)
    name = "CPU (dry: no figure here is a GPU's)"
    if process.device != "cpu":
        name = torch.cuda.get_device_name()
    peak = args.peak_tflops
    if peak is None:
        known = [tflops for part, tflops in PEAK_TFLOPS.items() if part in name]
        peak = known[0] if known else 0
    print(f"{name}, torch {torch.__version__}, {args.layers} layers, {time.strftime('%Y-%m-%d')}\n")
    tokenizer = parts.word_tokenizer(2752)
    report_steps(args, tokenizer, process, peak * 1e12)
    free_memory(process.device)
    report_run(args, tokenizer, process)
    free_memory(process.device)
    report_sampling(args, tokenizer, process)
    report_parity(tokenizer, process)
    report_checkpoints(tokenizer, process)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
