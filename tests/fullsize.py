"""GB that a training step takes on one card at full size, counted without GPU and weights.

    python tests/fullsize.py critic_8b lora_7b     these of RECIPES; without a name, all

The project's own `open_to_train`, `set_reference` and objectives run with --packed on tensors
without data (torch's FakeTensorMode), as the last of ranks that do not exist (a fake process
group). `Memory` sees each operation. The device is called cpu:0, which the project takes for a GPU:
torch without CUDA cannot differentiate fake CUDA tensors.
"""

import argparse
import collections
import types
import weakref
from unittest import mock

from conftest import ROOT  # noqa: F401 first, since it puts the project's folder on the path

import torch
import transformers
from torch._subclasses import fake_tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

import train_critic
import train_policy
from fast import packed
from runtime import models
from runtime.checkpoints import make_moments, trained_parameters
from runtime.processes import Process
from runtime.training import Run
from train_critic import Row
from variants import sft

MODELS = {  # family, width, of the MLP, layers, heads, heads of keys, vocabulary, whether tied
    "Llama 8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Llama 70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
    "Qwen 0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen 1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen 7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
}
LORA = {"lora_rank": 16}
RECIPES = {  # model, ranks, stage, tokens, share of agent tokens, flags
    "critic_8b": ("Llama 8B", 8, "critic", (2000, 3000), 0.5, {}),
    "critic_8b_longest": ("Llama 8B", 8, "critic", (8192, 8192), 0.8, {}),
    "policy_8b": ("Llama 8B", 8, "policy", (1500, 300), 0.5, {}),
    "rft_8b": ("Llama 8B", 8, "rft", (2000,), 0.5, {}),
    "critic_8b_every_2": ("Llama 8B", 8, "critic", (8192, 8192), 0.8, {"checkpointing_every": 2}),
    "critic_8b_no_reshard": ("Llama 8B", 8, "critic", (2000, 3000), 0.5, {"reshard": False}),
    "critic_8b_four_longest": ("Llama 8B", 4, "critic", (8192, 8192), 0.8, {}),
    "critic_8b_two_longest": ("Llama 8B", 2, "critic", (8192, 8192), 0.8, {}),
    "critic_8b_h200": ("Llama 8B", 1, "critic", (2000, 3000), 0.5, {}),
    "critic_8b_h200_longest": ("Llama 8B", 1, "critic", (8192, 8192), 0.8, {}),
    "full_0.5b_longest": ("Qwen 0.5B", 1, "critic", (4096, 4096), 0.8, {}),
    "lora_7b_longest": ("Qwen 7B", 1, "critic", (4096, 4096), 0.8, LORA),
    "lora_8b_longest": ("Llama 8B", 1, "critic", (4096, 4096), 0.8, LORA),
    "full_1.5b": ("Qwen 1.5B", 1, "critic", (2000, 3000), 0.5, {}),
    "critic_70b_64": ("Llama 70B", 64, "critic", (2000, 3000), 0.5, {}),
}


class Memory(TorchDispatchMode):
    """The bytes of all storages that are alive on the card, and their peak."""

    def __init__(self):
        super().__init__()
        self.sizes, self.off = {}, set()  # id of a storage -> bytes; those in host memory
        self.total = self.peak = 0
        self.planning = self.moving = False  # DTensor tries operations; FSDP moves to the card

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_book(untyped, size):  # how FSDP frees and fills gathered weights, unseen
            resize(untyped, size)
            if id(untyped) in self.sizes:
                self.book(id(untyped), size)

        torch.UntypedStorage.resize_ = resize_and_book
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def book(self, key, size):
        size = -(-size // 512) * 512  # CUDA's allocator gives whole blocks
        if key not in self.off:
            self.total += size - self.sizes[key]
            self.peak = max(self.peak, self.total)
        self.sizes[key] = size

    def see(self, tensor, host=False):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        untyped = tensor.untyped_storage()
        key = id(untyped)
        if key not in self.sizes:
            self.sizes[key] = 0
            if host:
                self.off.add(key)
            weakref.finalize(untyped, self.end, key)
        self.book(key, untyped.nbytes())
        return key

    def end(self, key):
        self.book(key, 0)
        del self.sizes[key]
        self.off.discard(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operations on its shards come here next
        if function is torch.ops.aten._local_scalar_dense.default and args[0].dtype in (
                torch.bool, torch.float32):
            return True if args[0].dtype == torch.bool else 1.0  # all is finite; any number
        result = function(*args, **(kwargs or {}))
        if not self.planning:
            inputs, outputs = ([leaf for leaf in tree_leaves(tree)
                                if isinstance(leaf, torch.Tensor)]
                               for tree in ((args, kwargs), result))
            seen = set(map(self.see, inputs))
            for tensor in outputs:
                self.see(tensor, host=bool(seen) and seen <= self.off and not self.moving)
            if "attention_backward" in function.name():  # CUDA's workspace: dQ in fp32, dK and dV
                self.peak = max(self.peak, self.total + args[1].numel() * 8)
        return result


class LoneProcess(Process):
    """The last of several ranks that do not exist."""

    def barrier(self):
        pass


class LoneRun(Run):
    def __init__(self, world):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.world, self.rank, self.device, self.totals = world, world - 1, "cpu:0", {}
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=self.rank,
                                             world_size=world)
        self.process = LoneProcess(self.rank, world, self.device, torch.distributed.group.WORLD)

    def gather(self, mine):  # the other ranks have found the same
        return collections.defaultdict(lambda: next(iter(mine.values())), mine)


def replace_parts(memory, built):
    """Let `load_model` return what was built, and FSDP's move to the GPU be booked; --packed."""
    def load_model(path, device="cpu", model_class=None, move=True, **options):
        for tensor in (*built.parameters(), *built.buffers()):
            memory.see(tensor, host=not move)
        return built

    def move(parameters, buffers, device):
        memory.moving = True
        for tensor in (*parameters, *buffers):
            if memory.see(tensor) in memory.off:
                tensor.data = tensor.data.clone()
        memory.moving = False

    for script in (train_critic, train_policy, sft):
        script.turn_logprobs = packed.turn_logprobs
    models.load_model = load_model
    _fsdp_init._move_states_to_device = move
    ShardingPropagator._fake_mode_lock = mock.patch.object(memory, "planning", True)


def entry(stage, tokens, agent):
    """What a micro-batch has: a pair or, for rejection fine-tuning, a row."""
    if stage == "policy":
        prompt, own = tokens
        return tuple(Row([1] * prompt + [2 + index] * own, [-1] * prompt + [0] * own)
                     for index in range(2))
    rows = []
    for token, length in enumerate(tokens, 1):  # equal rows would be computed once
        turn, own = length // 6, int(length // 6 * agent)
        turn_index = [-1] * (length - 6 * turn)
        for index in range(6):
            turn_index += [-1] * (turn - own) + [index] * own
        rows.append(Row([token] * length, turn_index))
    return rows[0] if stage == "rft" else tuple(rows)


def objective(stage, model, mine):
    if stage == "critic":
        return train_critic.critic_objective(model, mine, 0.1, 0.01, "turn")
    if stage == "rft":
        return sft.supervised_objective(model, mine, 500.0)
    return train_policy.dpo_objective(model, mine, 0.1, 0.01)


def peaks(model, world, stage, tokens, agent, flags):
    """GB: {"loading": ..., "reference": ..., "step": ...}"""
    family, width, mlp, layers, heads, key_heads, vocabulary, tied = MODELS[model]
    fake_tensor.CONSTANT_NUMEL_LIMIT = 10**9  # token ids, with which shapes are computed, are kept
    masking_utils.is_tracing = lambda *_: False  # it would take fake tensors for a traced graph's
    memory, found = Memory(), {}

    def note(part):
        found[part], memory.peak = memory.peak / 1e9, memory.total

    with fake_tensor.FakeTensorMode():
        config = transformers.AutoConfig.for_model(
            family, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=key_heads, vocab_size=vocabulary,
            tie_word_embeddings=tied, max_position_embeddings=131072, pad_token_id=0)
        replace_parts(memory, transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16))
        with memory:
            run = LoneRun(world)
            args = types.SimpleNamespace(**{
                "model": "", "seed": 0, "dtype": None, "lora_rank": 0, "lora_alpha": None,
                "checkpointing_every": None, "reshard": True} | flags)
            model = models.open_to_train(args, run)
            note("loading")
            # 8 pairs or 32 dialogues a step; of a rank's micro-batches, the third is as the second
            count = min(2, max(1, (32 if stage == "rft" else 8) // world))
            batch = [entry(stage, tokens, agent) for _ in range(count * world)]
            if stage != "rft":
                rows = [row for pair in batch for row in pair]
                train_critic.set_reference(model, rows[:2 * world], run, 2)
                note("reference")
                mine = rows[0].reference
                for row in rows:
                    row.reference = mine  # that of other ranks' rows is as large
            optimizer = torch.optim.AdamW(model.parameters(), 0.0, betas=(0.9, 0.95),
                                          weight_decay=0.0, fused=True)
            make_moments(optimizer, trained_parameters(model))
            memory.peak = memory.total
            for part, weight in run.share(batch, 1):
                (weight * objective(stage, model, part)["loss"].sum() / len(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            note("step")
    return found


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of RECIPES (default: all)")
    return parser.parse_args(argv)


def main(args):
    for name in args.names or RECIPES:
        print(name, *(f"{part} {size:.2f}" for part, size in peaks(*RECIPES[name]).items()),
              flush=True)


if __name__ == "__main__":
    main(parse_args())
