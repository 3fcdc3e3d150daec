"""What one training step of the critic takes on each rank: memory and collectives.

    torchrun --nproc_per_node 2 tests/rank_figures.py --layers 16 --width 256

Run by tests/test_ranks.py. The model is a Llama with random weights that computes in bf16 under
FSDP, as on GPUs; bytes are counted tensor by tensor and so do not depend on the machine. The leader
prints one line of JSON for each rank.
"""

import argparse
import json
import sys
import types
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_critic
from fast import packed
from runtime.checkpoints import local, trained_parameters
from runtime.lora import LINEAR_LAYERS, LoraSettings, add_matrices
from runtime.models import shard
from runtime.processes import join_processes
from runtime.training import Run
from train_critic import Row, critic_objective

train_critic.turn_logprobs = packed.turn_logprobs  # as --packed does


class StepFigures(TorchDispatchMode):
    """Counts collectives, and the bytes of all storages that are alive where most may be."""

    PEAKS = "aten::mm", "aten::exp", "aten::mul.Tensor", "aten::_to_copy"

    def __init__(self, model):
        super().__init__()
        self.storages = WeakIdKeyDictionary()
        self.collectives = {}
        self.peak = 0
        for parameter in model.parameters():
            self.storages[local(parameter.data).untyped_storage()] = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operations on its shards come here next
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            name = function.name().split("::")[1]
            self.collectives[name] = self.collectives.get(name, 0) + 1
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                self.storages[tensor.untyped_storage()] = True
        # FSDP resizes storages in place, so all are summed up anew; seldom, since that is slow
        if function.namespace == "c10d" or function.name() in self.PEAKS:
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result


def pair(tokens):
    """A pair of two dialogues of one turn each."""
    half = tokens // 2
    return tuple(Row([1] * tokens, [-1] * half + [0] * (tokens - half), torch.zeros(1))
                 for _ in range(2))


def step(model, optimizer, batch, run):
    """One step of train_critic.py's loop; its loss, summed over this rank, and gradient norm."""
    loss = 0.0
    for mine, weight in Run.share(run, batch, 1):
        metrics = critic_objective(model, mine, beta=0.1, nll=0.01, normalise="turn")
        (weight * metrics["loss"].sum() / len(batch)).backward()
        loss += weight * metrics["loss"].sum().item() / len(batch)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss, local(norm).item()


def main(args):
    process = join_processes(training=True)
    run = types.SimpleNamespace(process=process, rank=process.rank, world=process.world,
                                device=process.device, reduce_once=args.reduce_once, model=None)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=args.layers, hidden_size=args.width, intermediate_size=4 * args.width,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=args.vocabulary,
        pad_token_id=0)).train().to(torch.bfloat16)  # as checkpoints are stored
    if args.lora_rank:
        model = add_matrices(model, LoraSettings(args.lora_rank, args.lora_rank, LINEAR_LAYERS))
    with StepFigures(model) as loading:
        shard(model, run, args)
    run.model = model
    batch = [pair(args.tokens) for _ in range(args.batch_size)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    with StepFigures(model) as figures:
        for _ in range(2):  # the optimiser makes its moments in the first step
            figures.collectives = {}
            loss, norm = step(model, optimizer, batch, run)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    of_ranks = [None] * process.world
    torch.distributed.all_gather_object(of_ranks, {
        "rank": process.rank, "parameters": parameters,
        "trained": sum(parameter.numel() for parameter in trained_parameters(model)),
        "collectives": figures.collectives,
        "peak": figures.peak, "bytes_per_parameter": figures.peak * process.world / parameters,
        "loading": loading.peak / parameters, "loss": loss, "gradient": norm})
    if process.leads:  # lines of several ranks could run into one another
        print("\n".join(map(json.dumps, of_ranks)), flush=True)
    torch.distributed.destroy_process_group()


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16, help="of a dialogue")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--checkpointing_every", type=int, default=1)
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--reduce_once", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
