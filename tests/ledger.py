"""Memory, arithmetic, kernels and collectives of what runs on one rank, operation by operation.

With tensors that hold data or none (torch's FakeTensorMode), for tests/fullsize.py. The device is
the CPU, which stands for the card; what belongs to host memory is booked apart.
"""

import collections
import dataclasses
import weakref

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclasses.dataclass(eq=False)
class Storage:
    """One allocation; what it was for is known once its life has ended."""

    born: tuple  # micro-batch, phase
    shape: tuple
    place: str  # card, host (private to the rank), or mapped: the checkpoint's file
    size: int = 0
    role: str | None = None
    died: tuple | None = None


class Ledger(TorchDispatchMode):
    """Memory, arithmetic, kernels and collectives of all that runs within."""

    def __init__(self, vocabulary, workspace):
        super().__init__()
        self.vocabulary, self.workspace = vocabulary, workspace
        self.alive = {}  # id of a torch storage -> Storage
        self.total = {"card": 0, "host": 0, "mapped": 0}  # bytes
        self.moving = False  # from host memory to the card
        self.planning = False  # DTensor tries operations on whole tensors without data
        self.begin("loading")

    def begin(self, stage):
        """Forget all but what is alive."""
        self.stage, self.micro_batch = stage, 0
        self.tally = collections.Counter()
        self.events = [(storage, storage.size) for storage in self.alive.values()]
        self.peak, self.peak_at = dict(self.total), len(self.events)

    def phase(self):
        phase = self.stage
        if phase == "step":
            phase = "forward"
            if torch._C._current_graph_task_id() != -1:
                phase = "recomputation" if torch.is_grad_enabled() else "backward"
        return self.micro_batch, phase

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_book(untyped, size):  # how FSDP frees and fills gathered weights, unseen
            resize(untyped, size)
            if id(untyped) in self.alive:
                storage = self.alive[id(untyped)]
                storage.role = storage.role or "gathered weights"
                self.book(storage, size)

        torch.UntypedStorage.resize_ = resize_and_book
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def book(self, storage, size):
        size = -(-size // 512) * 512  # CUDA's allocator gives whole blocks
        if size == storage.size:
            return
        self.events.append((storage, size - storage.size))
        place, storage.size, change = storage.place, size, size - storage.size
        self.total[place] += change
        if self.total[place] > self.peak[place]:
            self.peak[place] = self.total[place]
            if place == "card":
                self.peak_at = len(self.events)

    def see(self, tensor, role=None, place="card"):
        """Book the tensor's memory."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        untyped = tensor.untyped_storage()
        storage = self.alive.get(id(untyped))
        if storage is None:
            storage = Storage(self.phase(), tuple(tensor.shape), place)
            self.alive[id(untyped)] = storage
            weakref.finalize(untyped, self.end, id(untyped))
        storage.role = role or storage.role
        self.book(storage, untyped.nbytes())
        return storage

    def end(self, key):
        storage = self.alive.pop(key)
        self.book(storage, 0)
        storage.died = self.phase()

    def parts_of_peak(self):
        """Bytes on the card at the peak, by what they are for, the largest first."""
        parts = collections.Counter()
        for storage, change in self.events[:self.peak_at]:
            parts[self.kind(storage)] += change if storage.place == "card" else 0
        return {kind: size for kind, size in parts.most_common() if size}

    def kind(self, storage):
        if storage.role:
            return storage.role
        if len(storage.shape) > 1 and storage.shape[-1] == self.vocabulary:
            return "logits"
        phase = storage.born[1]
        if phase == "backward" and storage.died != storage.born:
            return "gradients"  # whole ones, until FSDP reduces them
        if phase == "forward" and storage.died != storage.born:
            return "activations kept"
        return "activations recomputed" if phase == "recomputation" else "temporaries"

    # Operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operations on its shards come here next
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            try:
                return function(*args, **kwargs)
            except DataDependentOutputException:
                if args[0].dtype == torch.bool:
                    return True  # all is finite, all rows begin at position 0
                if not args[0].is_floating_point():
                    raise  # a shape would depend on it
                return 1.0
        result = function(*args, **kwargs)
        if self.planning:
            return result
        inputs, outputs = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
                           for tree in ((args, kwargs), result))
        seen = [self.see(tensor) for tensor in inputs]
        on_host = seen and not self.moving and all(storage.place != "card" for storage in seen)
        made = [self.see(tensor, place="host" if on_host else "card") for tensor in outputs]
        name = function.name().split("::")[1]
        if "gather" in name and "all" in name:
            self.name(seen, "gathered weights")
        if "chunk_cat" in name or "reduce_scatter" in name:
            self.name(seen, "gradients on their way")
        if function.namespace in ("c10d", "_c10d_functional"):
            if "gather" in name or "reduce" in name:
                self.tally["collectives", name.strip("_")] += 1
                self.tally["bytes", name.strip("_")] += max(tensor.nbytes for tensor in inputs)
        elif function._schema.is_mutable or made and not set(made) <= set(seen):  # not a view
            self.count(function, args, kwargs, inputs, outputs, result)
        return result

    def name(self, storages, role):
        for storage in storages:
            storage.role = storage.role or role

    def count(self, function, args, kwargs, inputs, outputs, result):
        """Book a kernel: its arithmetic or, if it has none, the memory that it moves."""
        self.tally["kernels"] += 1
        packet, kind = function._overloadpacket, "matmul"
        if "scaled_dot_product" in function.name():
            kind, flops = "attention", self.attention(function, args, kwargs)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            if any(self.vocabulary in tensor.shape for tensor in (*inputs, *outputs)):
                kind = "logits"
        else:
            self.tally["traffic"] += sum(tensor.nbytes for tensor in (*inputs, *outputs))
            return
        self.tally["flops", kind, self.phase()[1] == "recomputation"] += flops

    def attention(self, function, args, kwargs):
        """Two matrix products, in the backward five; half of them if causal."""
        named = dict(zip([a.name for a in function._schema.arguments], args, strict=False))
        named |= kwargs
        query, key = named["query"], named["key"]
        flops = 4 * query.numel() * key.shape[2]
        if "backward" in function.name():
            flops = flops * 5 // 2
            if self.workspace:  # of CUDA's kernel: dQ in fp32, dK and dV for each query's head
                room = Storage(self.phase(), (), "card", role="temporaries")
                self.book(room, query.numel() * (4 + 2 * 2))
                self.book(room, 0)
        return flops // 2 if named.get("is_causal") else flops
