"""Speed and sanity of the training steps on one GPU: an 8B-shaped random Llama through the scripts' own functions.

python tests/gpu_check.py [--dry] [--layers 32]       --dry: tiny shapes on the CPU, to see that every line runs

A step is forward and backward through the sharded code path (fp32 master weights, bf16 compute, activation
checkpointing), without the optimiser. MFU counts the arithmetic of the tokens that were run, recomputation not included,
against the GPU's dense bf16 peak. Fewer --layers fit a smaller GPU and leave the figures per layer as they are.
"""

import argparse
import gc
import random
import statistics
import time
import types

import benchmark_models as parts
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colbench
from collect import join_processes
from train_critic import critic_objective, score_rows, shard
from train_policy import candidate_items, dpo_objective

PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362}  # dense bf16


def random_llama(args, dtype, device):
    """The shape of Llama-3.1-8B, or a tiny one."""
    size = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 2752} if args.dry else \
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256}
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as colbench.load_model does
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=args.layers, max_position_embeddings=16384, eos_token_id=0,
                                            bos_token_id=None, pad_token_id=0, **size)).to(dtype)


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
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 1e9 if device != "cpu" else float("nan")


def arithmetic(config, weights, rows):
    """Floating-point operations of forward and backward on rows: six a weight and token, and causal attention."""
    width = config.num_hidden_layers * config.hidden_size
    return sum(6 * weights * len(row.ids) + 6 * width * len(row.ids) ** 2 for row in rows)


def attention_kernels(call):
    """Names of the attention kernels that a call ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:  # names need no GPU events
        call()
    prefix = "aten::_scaled_dot_product_"
    return ", ".join(sorted({e.key.removeprefix(prefix) for e in profile.key_averages()
                             if e.key.startswith(prefix) and not e.key.endswith("backward")}))


def report_step(name, model, rows, step, process, peak):
    """One line of the table about a training step on `rows`."""
    def whole():
        step()
        model.zero_grad()

    seconds, gigabytes = timed(whole, process.device)
    weights = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    tokens = sum(len(row.ids) for row in rows)
    use = f"{arithmetic(model.config, weights, rows) / seconds / peak:.1%}" if peak else "-"
    print(f"| {name} | {tokens} | {seconds:.3g} | {tokens / seconds:.0f} | {use} | {gigabytes:.1f} |"
          f" {attention_kernels(whole)} |", flush=True)


def report_sampling(args, tokenizer, process):
    """Sixteen candidates a prompt, on an unsharded replica in bf16 as the scripts sample."""
    model = random_llama(args, torch.float32 if process.device == "cpu" else torch.bfloat16, process.device)
    new, count = (8, 2) if args.dry else (128, 8)
    speaker = colbench.LocalSpeaker("gpu_check", max_new_tokens=new, batch_size=16 * count, device=process.device, model=model,
                                    tokenizer=tokenizer)
    prompts = [parts.state(64 if args.dry else 1024, 16, 1, random.Random(n))["messages"] for n in range(count)]
    seconds, gigabytes = timed(lambda: speaker.speak(prompts, 16, list(range(count))), process.device, repeats=1)
    print(f"\nSampling: {16 * count / seconds:.1f} candidates of {new} tokens a second, {count} prompts with 16 each,"
          f" {16 * count * new / seconds:.0f} tokens/s, {gigabytes:.1f} GB", flush=True)


def report_parity(tokenizer, process):
    """The critic's loss on a small model: CPU in float64 against the device in float32 and bf16."""
    small, losses = argparse.Namespace(dry=True, layers=2), []
    for device, dtype in (("cpu", torch.float64), (process.device, torch.float32), (process.device, torch.bfloat16)):
        model = random_llama(small, torch.float32, "cpu").to(device=device, dtype=dtype)
        rows_model = random_llama(small, torch.float64, "cpu")
        rows_model.lm_head.weight.data *= 1.5  # a reference that differs, or every loss would be log 2
        world = types.SimpleNamespace(tokenizer=tokenizer, reference=rows_model, process=process._replace(device="cpu"))
        item = parts.critic_item(world, 600, random.Random(2))
        losses.append(critic_objective(model, [item], parts.FLAGS, device)["train/loss"].item())
    print(f"\nLoss parity, critic: CPU float64 {losses[0]:.6f}, {process.device} float32 {losses[1]:.6f},"
          f" bf16 {losses[2]:.6f}")
    if abs(losses[1] - losses[0]) > 1e-4 * max(1, losses[0]) or abs(losses[2] - losses[0]) > 0.05 * max(1, losses[0]):
        raise SystemExit("found losses that differ between CPU and device, expected 1e-4 (float32) and 5 % (bf16) at most")


def plain_loss(model, rows, device):
    """The same dialogues with the logits of every token, as most trainers compute them."""
    total = 0.0
    for row in rows:
        ids = torch.tensor([row.ids], device=device)
        agent = torch.tensor([row.turn_index], device=device)[:, 1:] >= 0
        logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        total = total + (logprobs.gather(2, ids[:, 1:, None])[..., 0] * agent).sum()
    return total


def report_steps(args, tokenizer, process, peak):
    model = random_llama(args, torch.float32, process.device)
    shard(model, process, checkpointing=True)
    world = types.SimpleNamespace(tokenizer=tokenizer, model=model, reference=model, process=process)
    print("| step | tokens | s | tokens/s | MFU | peak GB | attention kernels |\n|---|---|---|---|---|---|---|", flush=True)
    for tokens in (128,) if args.dry else (4096, 8192):
        item = parts.critic_item(world, 2 * tokens, random.Random(tokens))
        report_step(f"critic, two dialogues of {tokens}", model, item.rows, lambda item=item: critic_objective(
            model, [item], parts.FLAGS, process.device)["train/loss"].sum().backward(), process, peak)
        if tokens <= 4096:
            report_step("the same rows, all logits", model, item.rows,
                        lambda item=item: plain_loss(model, item.rows, process.device).backward(), process, peak)
    row = parts.state(*((64, 16) if args.dry else (2048, 256)), 8, random.Random(0))
    for share in ("state", "pair", "none"):
        items = candidate_items(tokenizer, [row], argparse.Namespace(**vars(parts.FLAGS) | {"share": share}))[0]
        rows = [row for item in items for row in item.rows]
        score_rows(model, rows, process)
        report_step(f"policy, 4 pairs of one state, --share {share}", model, rows, lambda items=items: [
            dpo_objective(model, [item], parts.FLAGS, process.device)["train/loss"].sum().backward() for item in items],
            process, peak)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; its figures mean nothing")
    parser.add_argument("--layers", type=int, default=None, help="decoder layers (default: 32; dry: 2)")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 peak of the GPU (default: by its name)")
    args = parser.parse_args(argv)
    args.layers = args.layers or (2 if args.dry else 32)
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit("found no CUDA GPU, expected one; give --dry to run the same code on tiny shapes on the CPU")
    return args


def main(args):
    process = join_processes(always=True)
    name = torch.cuda.get_device_name() if process.device != "cpu" else "CPU (dry: no figure here is a GPU's)"
    peak = args.peak_tflops or next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), 0)
    print(f"{name}, torch {torch.__version__}, {args.layers} layers, {time.strftime('%Y-%m-%d')}\n")
    tokenizer = parts.word_tokenizer(2752)
    report_steps(args, tokenizer, process, peak * 1e12)
    if process.device != "cpu":
        gc.collect()  # a sharded model is part of cycles
        torch.cuda.empty_cache()
    report_sampling(args, tokenizer, process)
    report_parity(tokenizer, process)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
