"""LoRA (arXiv 2106.09685): train small matrices beside frozen linear layers.

A layer y = W x becomes y = W x + alpha / rank B A x with A (rank, in) and B (out, rank). W is
frozen, in the type that models compute in; A and B learn in fp32. B starts at zero, so before the
first step the model is the one that it started from; and with the matrices off it always is. One
model therefore serves as policy (or critic) and as its own reference.

Omitted on purpose: dropout on x, because advantages and DPO compare log-probs of the same tokens
with and without the matrices, and noise on one side would enter every ratio; it is also off in the
usual recipes for DPO.
"""

import contextlib
import math
import typing

import torch
from torch import nn

MATRICES = "lora.safetensors"  # in a checkpoint directory, beside the merged weights
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraSettings(typing.NamedTuple):
    rank: int
    alpha: float
    targets: tuple  # last part of the names of linear layers in the decoder


class LoraLinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale, self.enabled = base, alpha / rank, True
        options = {"device": base.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.empty(rank, base.in_features, **options))  # A
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **options))  # B
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x):
        y = self.base(x)
        if self.enabled:
            y = y + self.scale * (x @ self.down.T @ self.up.T)
        return y


def add_matrices(model, settings):
    """Freeze the model and put matrices beside the target layers of its decoder. In place."""
    model.requires_grad_(False)
    decoder = model.get_decoder()
    linear_layers = {name: module for name, module in decoder.named_modules()
                     if isinstance(module, nn.Linear)}
    kinds = {name.split(".")[-1] for name in linear_layers}
    missing = set(settings.targets) - kinds
    if missing:
        raise SystemExit(f"found --lora_targets {' '.join(sorted(missing))}, expected linear layers"
                         f" of the decoder: {', '.join(sorted(kinds))}")
    for name, base in linear_layers.items():
        parent, _, child = name.rpartition(".")
        if child in settings.targets:
            setattr(decoder.get_submodule(parent), child,
                    LoraLinear(base, settings.rank, settings.alpha))
    return model


def lora_layers(model):
    return {name: module for name, module in model.named_modules()
            if isinstance(module, LoraLinear)}


@contextlib.contextmanager
def matrices_off(model):
    """The model that training started from. Nothing changes for a model without matrices."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merge(weights, model):
    """(weights of the plain architecture, W + alpha / rank B A, fp32; the matrices alone)."""
    merged, matrices = {name: weight.float() for name, weight in weights.items()}, {}
    for name, layer in lora_layers(model).items():
        for part in ("down", "up"):
            matrices[f"{name}.{part}"] = merged.pop(f"{name}.{part}")
        update = layer.scale * matrices[f"{name}.up"] @ matrices[f"{name}.down"]
        merged[f"{name}.weight"] = merged.pop(f"{name}.base.weight") + update
        if f"{name}.base.bias" in merged:
            merged[f"{name}.bias"] = merged.pop(f"{name}.base.bias")
    return merged, matrices


def load_matrices(model, path, settings):
    """A plain model with the matrices of a checkpoint directory, in the model's own type."""
    from safetensors.torch import load_file

    add_matrices(model, settings)
    dtype = model.dtype
    matrices = load_file(str(path))
    for name, layer in lora_layers(model).items():
        for part in ("down", "up"):
            own = getattr(layer, part)
            own.data = matrices[f"{name}.{part}"].to(own.device, dtype)
    return model
