"""Several processes: loading and sharding the model, sharing the work, equal inputs."""

import contextlib
import hashlib
import json
import math
import typing

import torch

from speakers.local import compute_dtype, load_model
from speakers.lora import LoraSettings, add_matrices
from training.packing import pack_limit, pack_rows


def load_trainable(args, process, auto_class="AutoModelForCausalLM", **options):
    """fp32 master weights, converted on the device, which spares the host's memory.

    With --lora_rank, only the matrices and a value head are trained; all else is frozen, in the
    type that models compute in.
    """
    torch.manual_seed(args.seed)  # what starts from random weights is equal on every rank
    dtype = args.dtype if args.lora_rank else "auto"
    model = load_model(args.model, process.device, auto_class, dtype=dtype, **options)
    if not args.lora_rank:
        return model.float()
    add_matrices(model, lora_settings(vars(args)))
    if hasattr(model, "score"):
        model.score.float().requires_grad_()
    return model


def lora_settings(flags):
    alpha = flags["lora_alpha"] or 2 * flags["lora_rank"]
    return LoraSettings(flags["lora_rank"], alpha, tuple(flags["lora_targets"]))


def trained_parameters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class ShardSettings(typing.NamedTuple):
    """How a model is spread over the ranks, and what a backward recomputes.

    Arithmetic for an 8B Llama, 32 layers, in bf16. A layer keeps some 170 kB of activations a
    token, a recomputed layer 8 kB: a pair of dialogues of 8,192 tokens takes 88 GB without
    recomputation, 46 with every second layer, 4 with all. So all are recomputed by default; every
    second one is faster where dialogues are short. Without resharding, every GPU keeps the gathered
    weights, 16 GB, from forward to backward, and saves one gather of three.
    """

    dtype: str | None = None  # that models compute in; None: bf16 on GPUs
    checkpointing_every: int | None = None  # None: 1 on GPUs, 0 on CPUs
    reshard: bool = True


def shard_settings(args):
    return ShardSettings(args.dtype, args.checkpointing_every, args.reshard)


def shard(model, process, settings):
    """FSDP2: each decoder layer and the root; fp32 weights that compute in a dtype. In place."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = model.get_decoder().layers
    every = settings.checkpointing_every
    if every is None:
        every = 0 if process.device == "cpu" else 1
    if every:
        enable = getattr(model, "activation_checkpointing_enable",  # its newer name
                         model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index % every == 0
    # transformers gives the pad token's embedding no gradient; where that token is a real one, too
    # (many models' end of text), it has to learn. Padding never reaches a loss here
    model.get_input_embeddings().padding_idx = None
    model.train()
    process.barrier()  # nodes load at different speeds; from here on, no rank waits long
    dtype = compute_dtype(process.device, settings.dtype)
    if process.world == 1 and process.device == "cpu" and dtype == "float32":
        return  # nothing to share, and DTensors would slow small models down
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(process.group, process.device.split(":")[0])
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def split_over_ranks(entries, process):
    """[(entry, whether it counts)] of this rank. Every rank gets equally many.

    Each forward gathers the weights from all ranks, so ranks with fewer entries would leave the
    others waiting forever; they repeat the first entry, which does not count.
    """
    count = math.ceil(len(entries) / process.world)
    mine = [(entry, True) for entry in entries[process.rank::process.world]]
    return mine + [(entries[0], False)] * (count - len(mine))


def gather_shares(mine, process, count):
    """The results of all `count` entries in order, from what every rank found for its share."""
    gathered = [None] * process.world
    torch.distributed.all_gather_object(gathered, mine)
    return [gathered[index % process.world][index // process.world] for index in range(count)]


def score_on_all_ranks(model, rows, score, process, micro_batch_size):
    """For each row the lists over its turns that `score(rows)` gives as tables (R, S).

    Ranks split the rows by packs, so that candidates of a state stay together; a forward takes as
    many packs as the pairs of a micro-batch have rows.
    """
    packs = pack_rows(rows, pack_limit(model))
    packs.sort(key=lambda pack: len(pack.ids))
    mine = [pack for pack, _ in split_over_ranks(packs, process)]
    found, size = [], 2 * micro_batch_size  # for each pack the lists of its rows
    with no_grad(model):
        for start in range(0, len(mine), size):
            group = mine[start:start + size]
            group_rows = [row for pack in group for row in pack.rows]
            tables = score(group_rows)
            lists = [[line[:row.turns].tolist() for line in lines]
                     for row, *lines in zip(group_rows, *tables, strict=True)]
            start_of_pack = 0
            for pack in group:
                found.append(lists[start_of_pack:start_of_pack + len(pack.rows)])
                start_of_pack += len(pack.rows)
    scores = {}
    for pack, pack_scores in zip(packs, gather_shares(found, process, len(packs)), strict=True):
        scores |= zip(pack.rows, pack_scores, strict=True)
    return [scores[row] for row in rows]


@contextlib.contextmanager
def no_grad(model):
    """Neither gradients nor dropout; afterwards the model is as training needs it.

    FSDP2 leaves the root's parameters unsharded after a forward, and with --no-reshard those of the
    layers, too, to spare the backward a gather; here comes none.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()


def check_same_items(items, process):
    """Stops if ranks hold different items, from other copies of the input files."""
    digests = [None] * process.world
    torch.distributed.all_gather_object(digests, items_digest(items))
    others = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if others:
        raise SystemExit(f"found other training items on the ranks {others} than on rank 0,"
                         " expected the same everywhere; give all nodes the same episodes,"
                         " candidates and tokenizer")


def items_digest(items):
    digest = hashlib.sha256()
    for item in items:
        rows = [(row.ids, row.turn_index) for row in item.rows]
        digest.update(json.dumps([rows, item.pairs]).encode())
    return digest.hexdigest()
