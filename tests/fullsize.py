"""What a step takes at full size: memory, arithmetic and collectives, without GPU and weights.

    python tests/fullsize.py critic_8b lora_7b     these of RECIPES; without a name, all
    python tests/fullsize.py --table               their table, which docs/scaling.md has
    python tests/fullsize.py --validate            the same count on small models that really run

The project's own `open_to_train`, `set_reference`, objectives and `turn_advantages` run with
--packed on tensors without data (torch's FakeTensorMode), as the last of ranks that do not exist (a
fake process group; the last rank gets the longest rows). ledger.py sees each operation, and books
memory, arithmetic, kernels and collectives.

The device is called cpu:0, which the project takes for a GPU: torch without CUDA cannot
differentiate fake CUDA tensors. So attention is the CPU's flash kernel. It keeps what CUDA's keeps,
whose workspace is added. The stand-in for a checkpoint is booked as mapped from its file, and what
is computed from it as host memory, until FSDP moves it to the GPU.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import types
from unittest import mock

from conftest import ROOT  # noqa: F401 first, since it puts the project's folder on the path
from ledger import Ledger

import torch
import transformers
from torch._subclasses import fake_tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import masking_utils
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

import train_critic
import train_policy
from fast import packed
from runtime import models
from runtime.checkpoints import local, make_moments, trained_parameters
from runtime.lora import add_matrices
from runtime.processes import Process
from runtime.training import Run
from train_critic import Row
from variants import sft, sight, value_critic

GB = 1e9

# -----------------------------------------------------------------------------
# Recipes

MODELS = {  # family, width, of the MLP, layers, heads, heads of keys, vocabulary, whether tied
    "Llama 8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Llama 70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
    "Qwen 0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen 1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen 7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2-VL 7B": ("qwen2_vl", 3584, 18944, 28, 28, 4, 152064, False),
    "small": ("llama", 512, 1792, 6, 8, 2, 8000, False),
    "small, sees": ("qwen2_vl", 512, 1792, 6, 4, 2, 8000, False),
}
ENCODERS = {  # of pictures; all Qwen2-VL models have transformers' default
    "Qwen2-VL 7B": {},
    "small, sees": {"depth": 4, "embed_dim": 256, "num_heads": 4},
}
PICTURE_TOKEN = 1
CARDS = {  # GB that PyTorch can allocate. Assumed: what drivers report, less 0.6 GB for CUDA
    "H100": 81559 * 2**20 / GB - 0.6, "H200": 143771 * 2**20 / GB - 0.6,
    "24 GB": 24564 * 2**20 / GB - 0.6}
NCCL = 1.0  # GB, where there are several ranks. Assumed
ASSUMED = {  # rates of an H100, of which kernels commonly reach a share; per second
    "matmul": 0.65 * 989e12, "attention": 0.35 * 989e12,  # dense bf16
    "traffic": 0.80 * 3.35e12,  # bytes of memory
    "wire": 0.75 * 450e9,  # bytes over NVLink
    "launches": 200e3}


@dataclasses.dataclass
class Recipe:
    """A step of one of the project's commands."""

    model: str
    card: str = "H100"
    world: int = 8
    stage: str = "critic"  # or value, mtdpo, policy, rft, ranking
    # of the two dialogues of a pair; rft: of one; policy and ranking: of the prompt, of a candidate
    tokens: tuple = (2000, 3000)
    agent: float = 0.5  # the share of agent tokens in a dialogue
    picture: tuple = (180, 144)  # its height and width in patches; four patches are a token
    micro_batches: int = 1  # of a rank and step
    beside: float = 0.0  # GB that other programs take on the card
    flags: dict = dataclasses.field(default_factory=dict)

    @property
    def room(self):
        return CARDS[self.card] - self.beside - NCCL * (self.world > 1)


def longest(tokens):
    """Options of pairs as long as --max_length allows; the agent has most of them."""
    return {"tokens": (tokens, tokens), "agent": 0.8}


POLICY = {"stage": "policy", "tokens": (1500, 300)}
RFT = {"stage": "rft", "tokens": (2000,)}  # 32 dialogues a step
ONE = {"world": 1, "micro_batches": 8}  # 8 pairs a step
HUMAN = {"beside": 0.4 * 24564 * 2**20 / GB}  # vLLM with --gpu-memory-utilization 0.4
LORA = ONE | {"card": "24 GB", "flags": {"lora_rank": 16}}
RECIPES = {
    # runs/backend_8b.sh; the policies of runs/frontend_8b.sh have the same model and flags
    "critic_8b": Recipe("Llama 8B"),
    "critic_8b_longest": Recipe("Llama 8B", **longest(8192)),
    "ranking_8b": Recipe("Llama 8B", stage="ranking", tokens=(1500, 300)),
    "policy_8b": Recipe("Llama 8B", **POLICY),
    "policy_8b_longest": Recipe("Llama 8B", stage="policy", tokens=(7168, 1024)),
    "mtdpo_8b": Recipe("Llama 8B", stage="mtdpo"),
    "rft_8b": Recipe("Llama 8B", **RFT, micro_batches=4),
    # runs/frontend_8b.sh; 6,480 of the tokens are a picture of the solution
    "pages_8b": Recipe("Qwen2-VL 7B", stage="value", tokens=(9500, 11500), agent=0.8),
    "pages_8b_longest": Recipe("Qwen2-VL 7B", stage="value", **longest(16384)),
    "pages_8b_ranking": Recipe("Qwen2-VL 7B", stage="ranking", tokens=(9500, 1000)),
    # the same with other flags
    "critic_8b_every_2": Recipe("Llama 8B", flags={"checkpointing_every": 2}, **longest(8192)),
    "critic_8b_every_0": Recipe("Llama 8B", flags={"checkpointing_every": 0}, **longest(8192)),
    "critic_8b_no_reshard": Recipe("Llama 8B", flags={"reshard": False}),
    # fewer cards
    "critic_8b_four": Recipe("Llama 8B", world=4, micro_batches=2),
    "critic_8b_four_longest": Recipe("Llama 8B", world=4, micro_batches=2, **longest(8192)),
    "critic_8b_two": Recipe("Llama 8B", world=2, micro_batches=4),
    "critic_8b_two_longest": Recipe("Llama 8B", world=2, micro_batches=4, **longest(8192)),
    "critic_8b_h200": Recipe("Llama 8B", "H200", **ONE),
    "critic_8b_h200_longest": Recipe("Llama 8B", "H200", **ONE, **longest(8192)),
    "policy_8b_h200": Recipe("Llama 8B", "H200", **ONE, **POLICY),
    "mtdpo_8b_h200": Recipe("Llama 8B", "H200", **ONE, stage="mtdpo"),
    "rft_8b_h200": Recipe("Llama 8B", "H200", world=1, micro_batches=32, **RFT),
    # runs/backend_1gpu.sh
    "full_0.5b": Recipe("Qwen 0.5B", "24 GB", **ONE, **HUMAN),
    "full_0.5b_longest": Recipe("Qwen 0.5B", "24 GB", **ONE, **HUMAN, **longest(4096)),
    "lora_7b": Recipe("Qwen 7B", **LORA),
    "lora_7b_longest": Recipe("Qwen 7B", **LORA, **longest(4096)),
    "lora_7b_policy_longest": Recipe("Qwen 7B", **LORA, stage="policy", tokens=(3584, 512)),
    "lora_7b_ranking_longest": Recipe("Qwen 7B", **LORA | {"micro_batches": 1}, stage="ranking",
                                      tokens=(3584, 512)),
    # what no script runs
    "lora_8b_longest": Recipe("Llama 8B", **LORA, **longest(4096)),
    "full_1.5b": Recipe("Qwen 1.5B", "24 GB", **ONE),
    "critic_70b_64": Recipe("Llama 70B", world=64),
}

# -----------------------------------------------------------------------------
# Running


class LoneProcess(Process):
    """The last of several ranks that do not exist."""

    bar = {"disable": True}

    def barrier(self):
        pass


class LoneRun(Run):
    def __init__(self, recipe):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.world, self.rank, self.device = recipe.world, recipe.world - 1, "cpu:0"
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=self.rank,
                                             world_size=self.world)
        self.process = LoneProcess(self.rank, self.world, self.device,
                                   torch.distributed.group.WORLD)
        self.totals = {}

    def gather(self, mine):
        return mine


def fake_mode():
    # token ids and positions, with which shapes are computed, keep their values
    fake_tensor.CONSTANT_NUMEL_LIMIT = 10**9
    # transformers would take fake tensors for a graph being traced, which needs other masks
    masking_utils.is_tracing = lambda *_: False
    return fake_tensor.FakeTensorMode()


def build(recipe):
    """A model in bf16, as checkpoints are stored."""
    family, width, mlp, layers, heads, key_heads, vocabulary, tied = MODELS[recipe.model]
    text = {
        "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 131072, "pad_token_id": 0}
    if recipe.model not in ENCODERS:
        config = transformers.AutoConfig.for_model(family, **text)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config = transformers.AutoConfig.for_model(
        family, text_config=text, image_token_id=PICTURE_TOKEN,
        vision_config={"hidden_size": width} | ENCODERS[recipe.model])
    sight.load_config = lambda path: config
    return sight.vision_value_class("")._from_config(config, dtype=torch.bfloat16)


def rope_index(model, input_ids, **pictures):
    """Positions of the right shape; transformers computes them from values."""
    return input_ids.new_zeros(3, *input_ids.shape), input_ids.new_zeros(len(input_ids), 1)


def replace_parts(ledger, built):
    """Let `load_model` return what was built, and FSDP's move to the GPU be booked; --packed."""
    def load_model(path, device="cpu", auto_class=None, move=True, **options):
        model = built.pop()
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.see(tensor, "weights", place="card" if move else "mapped")
        return model

    def move(parameters, buffers, device):
        ledger.moving = True
        for tensor in (*parameters, *buffers):
            if ledger.see(tensor).place != "card":
                tensor.data = tensor.data.clone()
        ledger.moving = False

    for script in (train_critic, train_policy, sft):
        script.turn_logprobs = packed.turn_logprobs
    models.load_model = load_model
    qwen2_vl.Qwen2VLModel.get_rope_index = rope_index
    _fsdp_init._move_states_to_device = move
    ShardingPropagator._fake_mode_lock = mock.patch.object(ledger, "planning", True)


def dialogue(token, tokens, agent, turns=6):
    """A row of one token, whose agent turns are evenly spread over it."""
    length = tokens // turns
    own = int(length * agent)
    turn_index = [-1] * (tokens - turns * length)
    for turn in range(turns):
        turn_index += [-1] * (length - own) + [turn] * own
    return Row([token] * tokens, turn_index)


def candidates(prompt, tokens, count):
    return [Row([1] * prompt + [2 + index] * tokens, [-1] * prompt + [0] * tokens)
            for index in range(count)]


def page(picture, row):
    """The row as a value critic reads it, which shows a picture of the solution first."""
    height, width = picture
    shown = [PICTURE_TOKEN] * (height * width // 4)

    def opening():
        ids = torch.tensor([shown])
        return transformers.BatchFeature({
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.ones_like(ids),
            "pixel_values": torch.zeros(height * width, 3 * 2 * 14 * 14),  # a still is two frames
            "image_grid_thw": torch.tensor([[1, height, width]])})

    return value_critic.ValueRow(shown + row.ids[len(shown):],
                                 [-1] * len(shown) + row.turn_index[len(shown):],
                                 outcome=1.0, opening=opening)


def entry(recipe):
    """What a micro-batch has: a pair or, for rejection fine-tuning, a row."""
    if recipe.stage == "policy":
        return tuple(candidates(*recipe.tokens, 2))
    rows = [dialogue(token, tokens, recipe.agent)  # equal rows would be computed once
            for token, tokens in enumerate(recipe.tokens, 1)]
    if recipe.stage == "value":
        rows = [page(recipe.picture, row) for row in rows]
    return rows[0] if recipe.stage == "rft" else tuple(rows)


def objective(recipe, model, mine):
    if recipe.stage == "critic":
        return train_critic.critic_objective(model, mine, 0.1, 0.01, "turn")
    if recipe.stage == "value":
        return value_critic.value_objective(model, mine)
    if recipe.stage == "rft":
        return sft.supervised_objective(model, mine, 500.0)
    return train_policy.dpo_objective(model, mine, 0.1, 0.01)


def train(recipe, ledger, figures, watches):
    """Load, read the reference, take a step."""
    run = LoneRun(recipe)
    args = types.SimpleNamespace(**{
        "model": "", "seed": 0, "dtype": None, "lora_rank": 0, "lora_alpha": None,
        "checkpointing_every": None, "reshard": True} | recipe.flags)
    head = [sight.vision_value_class("")] if recipe.stage == "value" else []
    model = models.open_to_train(args, run, *head)
    figures["loading"], figures["host"] = ledger.peak["card"], ledger.peak["host"]
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.see(tensor.data, "weights")
    counted = min(recipe.micro_batches, 2)  # the others are as the first
    batch = [entry(recipe) for _ in range(counted * run.world)]
    if recipe.stage not in ("rft", "value"):
        ledger.begin("reference")
        rows = [row for pair in batch for row in pair]
        train_critic.set_reference(model, rows[:2 * run.world], run, 2)
        figures["reference"], figures["pass"] = ledger.peak["card"], copy.copy(ledger.tally)
        mine = next(row.reference for row in rows if row.reference is not None)
        for row in rows:
            row.reference = mine  # that of other ranks' rows is as large

    optimizer = torch.optim.AdamW(model.parameters(), 0.0, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=run.device != "cpu")
    make_moments(optimizer, trained_parameters(model))
    for state in optimizer.state.values():
        for value in state.values():
            ledger.see(local(value), "moments")

    for watch in watches:
        ledger.begin("step")
        figures["before"] = ledger.total["card"]
        with watch:
            step(recipe, ledger, run, model, optimizer, batch)


def step(recipe, ledger, run, model, optimizer, batch):
    """As in the trainers."""
    for mine, weight in run.share(batch, 1):
        ledger.micro_batch += 1
        metrics = objective(recipe, model, mine)
        (weight * metrics["loss"].sum() / len(batch)).backward()
        run.add("train", metrics, weight / len(batch))
        for parameter in trained_parameters(model):
            if parameter.grad is not None:
                ledger.see(parameter.grad, "gradients")
        if ledger.micro_batch == 1:
            first = copy.copy(ledger.tally)
    for key, value in first.items():
        ledger.tally[key] += value * (recipe.micro_batches - ledger.micro_batch)
    ledger.stage = "update"
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def rank(recipe, ledger, figures, watches):
    """Open the critic, and its reference if it has one, and score 16 candidates of a state."""
    matrices = recipe.flags.get("lora_rank")
    models.fp32_head = fp32_head
    models.load_matrices = lambda model, path: add_matrices(model, matrices, 2 * matrices)
    rows = candidates(*recipe.tokens, 16)
    if recipe.model in ENCODERS:
        rows = [page(recipe.picture, row) for row in rows]
        critic = object.__new__(value_critic.ValueCritic)  # its __init__ reads directories
        critic.model = models.load_model("critic", "cpu:0")
        critic.model.score = fp32_head(critic.model.score)
        opened = [critic.model]
    else:
        critic = object.__new__(train_critic.Critic)
        critic.normalise = "turn"
        opened = critic.model, critic.reference = models.open_with_reference(
            "critic", "base", "cpu:0", lora=bool(matrices))
    figures["loading"] = ledger.peak["card"]
    figures["parameters"] = sum(parameter.numel() for parameter in critic.model.parameters())
    for model in opened:
        for tensor in model.parameters():
            ledger.see(tensor, "weights")
    ledger.begin("step")
    critic.turn_advantages(rows)


def fp32_head(head):
    """As in runtime.models, without deepcopy, which tensors without data do not survive."""
    head = torch.nn.Linear(head.in_features, head.out_features, False, dtype=torch.float32)
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return head


def figures_of(recipe, mode=None, watches=None):
    """Peaks in bytes, and what the step takes; in fake `mode`, or on real tensors."""
    figures = {}
    with mode or contextlib.nullcontext():
        built = [build(recipe) for _ in range(1 + (recipe.stage == "ranking"))]
        ledger = Ledger(MODELS[recipe.model][-2], workspace=not recipe.model.startswith("small"))
        replace_parts(ledger, built)
        with ledger:
            stage = rank if recipe.stage == "ranking" else train
            stage(recipe, ledger, figures, watches or [contextlib.nullcontext()])
    return figures | {"step": ledger.peak["card"], "tally": ledger.tally,
                      "parts": ledger.parts_of_peak()}


def simulate(recipe):
    return figures_of(recipe, fake_mode())


# -----------------------------------------------------------------------------
# Reports


def of(tally, group):
    return {key[1:]: value for key, value in tally.items() if key[0] == group}


def shares(tally):
    """(floating-point operations, kind -> its share)"""
    parts = collections.Counter()
    for (kind, again), flops in of(tally, "flops").items():
        parts["recomputation" if again else kind] += flops
    total = parts.total()
    return total, {kind: parts[kind] / total
                   for kind in ("matmul", "attention", "logits", "recomputation")}


def seconds(tally, world):
    """On an H100 at the ASSUMED rates: with collectives hidden behind kernels, and not at all."""
    busy = tally["traffic"] / ASSUMED["traffic"]
    for (kind, _), flops in of(tally, "flops").items():
        busy += flops / ASSUMED["attention" if kind == "attention" else "matmul"]
    busy = max(busy, tally["kernels"] / ASSUMED["launches"])
    wire = sum(of(tally, "bytes").values()) * (world - 1) / world / ASSUMED["wire"]
    return f"{max(busy, wire):.2f} to {busy + wire:.2f} s"


def tokens_of(recipe):
    prompt, *rest = (f"{tokens:,}" for tokens in recipe.tokens)
    if recipe.stage == "rft":
        return prompt
    count = {"policy": "2 x ", "ranking": "16 x "}.get(recipe.stage, "")
    return f"{prompt} + {count}{rest[0]}"


HEAD = """| recipe | cards | tokens | loading | reference | step | room | TFLOP | %, by kind |\
 collectives | kernels |
|---|---|---|---|---|---|---|---|---|---|---|"""


def row(name, recipe, figures):
    tally = figures["tally"]
    total, kinds = shares(tally)
    cells = [f"`{name}`", f"{recipe.world} x {recipe.card}",
             f"{recipe.micro_batches} x ({tokens_of(recipe)})"]
    for stage in ("loading", "reference", "step"):
        peak = figures.get(stage, 0) / GB
        text = f"{peak:.2f}" if peak else "-"
        cells.append(f"**{text}**" if peak > recipe.room else text)
    number, moved = (sum(of(tally, group).values()) for group in ("collectives", "bytes"))
    cells += [f"{recipe.room:.1f}", f"{total / 1e12:,.0f}",
              ", ".join(f"{100 * share:.0f}" for share in kinds.values()),
              f"{number}: {moved / GB:.1f} GB" if number else "-", f"{tally['kernels']:,}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def details(recipe, figures):
    """What the table has no room for."""
    print(f"{figures['parameters'] / GB:.3g} bn parameters. GB at the step's peak: " + ", ".join(
        f"{kind} {size / GB:.2f}" for kind, size in figures["parts"].items() if size > 5e6))
    if "host" in figures:
        print("GB of host memory of each rank while loading, beside the mapped checkpoint:"
              f" {figures['host'] / GB:.2f}")
    if recipe.card != "24 GB":
        print(f"At the assumed rates of an H100 {seconds(figures['tally'], recipe.world)}" + (
            f", a forward of the reference {seconds(figures['pass'], recipe.world)}"
            if "pass" in figures else ""), flush=True)


# -----------------------------------------------------------------------------
# The same count where it can be checked: small models that really run on this CPU

SMALL = {
    "critic": Recipe("small", world=1, tokens=(400, 600), micro_batches=2),
    "nothing_recomputed": Recipe("small", world=1, tokens=(400, 600),
                                 flags={"checkpointing_every": 0}),
    "policy": Recipe("small", world=1, stage="policy", tokens=(300, 100)),
    "lora": Recipe("small", world=1, tokens=(400, 600), flags={"lora_rank": 8}),
    "eight_ranks": Recipe("small", tokens=(400, 600)),
    "pages": Recipe("small, sees", world=1, stage="value", tokens=(400, 600), picture=(24, 20)),
}


@contextlib.contextmanager
def allocator(found):
    """Add the peak of what the allocator itself reports."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    found["allocator"] = total = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            found["allocator"] = max(found["allocator"], total)


def validate(names):
    print("| | simulated, MB | counted on real tensors | the allocator's peak | matrix products /"
          " FlopCounterMode | all FLOPs, collectives |\n|---|---|---|---|---|---|")
    for name in names or SMALL:
        found, counter = {}, FlopCounterMode(display=False)
        real = figures_of(SMALL[name], watches=(counter, allocator(found)))
        fake = simulate(SMALL[name])
        products = sum(flops for (kind, _), flops in of(fake["tally"], "flops").items()
                       if kind != "attention")
        equal = all(of(real["tally"], group) == of(fake["tally"], group)
                    for group in ("flops", "collectives", "bytes"))
        peaks = fake["step"], real["step"], real["before"] + found["allocator"]
        print(f"| {name} | " + " | ".join(f"{peak / 1e6:.2f}" for peak in peaks)
              + f" | {products / counter.get_total_flops():.4f}"
              f" | {'equal' if equal else 'different'} |", flush=True)


def main(args):
    if args.validate:
        validate(args.names)
        return
    print(HEAD)
    for name in args.names or RECIPES:
        figures = simulate(RECIPES[name])
        row(name, RECIPES[name], figures)
        if not args.table:
            details(RECIPES[name], figures)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of RECIPES; with --validate, of SMALL")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--validate", action="store_true")
    args = parser.parse_args(argv)
    unknown = set(args.names) - set(SMALL if args.validate else RECIPES)
    if unknown:
        parser.error(f"found {' '.join(sorted(unknown))}, expected names of"
                     f" {', '.join(SMALL if args.validate else RECIPES)}")
    return args


if __name__ == "__main__":
    main(parse_args())
