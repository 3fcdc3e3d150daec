"""LoRA (arXiv 2106.09685): train small matrices beside frozen linear layers.

A layer y = W x becomes y = W x + alpha / rank B A x with A (rank, in) and B (out, rank). W is
frozen, in the type that models compute in; A and B learn in fp32. B starts at zero, so before the
first step the model is the one that it started from. With the matrices off, it is that model at any
time, so one model serves as policy (or critic) and as its own reference.

Omitted on purpose: dropout on x, because advantages and DPO compare log-probs of the same tokens
with and without the matrices, and noise on one side would enter every ratio; it is also off in the
usual recipes for DPO.

A checkpoint has the merged weights W + alpha / rank B A in fp32, which any program opens, and the
matrices. In bf16, merged weights would lose most of a small update to rounding, so models that
compute in bf16 get W and the matrices apart again, as they were in training (`take_apart`).
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

# The file of A and B in a checkpoint directory, beside the merged weights. It is not named
# *.safetensors, because vLLM would load all such files as weights of the model. LAYER.down and
# LAYER.up are those of the last training, LAYER.base.down and LAYER.base.up those of the one before
# (and so on), because LoraLinear holds the layer that it started from as `base`
MATRICES = "lora.matrices"
EARLIER = ".base"
# the linear layers that get matrices, by the last part of their names
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A linear layer with matrices. `base` may have matrices too, those of an earlier training."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale, self.enabled = base, alpha / rank, True
        self.earlier = False  # whether the matrices belong to what training started from
        self.in_features, self.out_features = base.in_features, base.out_features
        device = next(base.parameters()).device
        # drawn on the CPU, where several processes hold the model now; a GPU draws other numbers
        down = nn.init.kaiming_uniform_(torch.empty(rank, base.in_features), a=math.sqrt(5))
        self.down = nn.Parameter(down.to(device))  # A, in fp32 as B
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))  # B

    def forward(self, x):
        y = self.base(x)
        if self.enabled:
            y = y + self.scale * (x @ self.down.T @ self.up.T)
        return y


def add_matrices(model, rank, alpha):
    """Freeze the model and put matrices beside the LINEAR_LAYERS of its decoder, in place."""
    model.requires_grad_(False)
    decoder = model.get_decoder()
    layers = {name: module for name, module in decoder.named_modules()
              if isinstance(module, nn.Linear | LoraLinear) and not name.endswith(EARLIER)}
    kinds = {name.split(".")[-1] for name in layers}
    missing = set(LINEAR_LAYERS) - kinds
    if missing:
        raise SystemExit(f"--lora_rank: found no {' '.join(sorted(missing))}, expected a decoder"
                         f" with all of {', '.join(LINEAR_LAYERS)} (this one's linear layers are"
                         f" {', '.join(sorted(kinds))}); train it without --lora_rank")
    for name, base in layers.items():
        if name.split(".")[-1] in LINEAR_LAYERS:
            decoder.set_submodule(name, LoraLinear(base, rank, alpha))
    return model


def lora_layers(model):
    return {name: module for name, module in model.named_modules()
            if isinstance(module, LoraLinear)}


class WithoutMatrices:
    """The model that training started from, in the memory of the one that it became."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *inputs, **options):
        layers = [layer for layer in lora_layers(self.model).values() if not layer.earlier]
        for layer in layers:
            layer.enabled = False
        try:
            return self.model(*inputs, **options)
        finally:
            for layer in layers:
                layer.enabled = True


# -----------------------------------------------------------------------------
# Checkpoints


def merge(weights, model):
    """(merged weights, matrices) of a checkpoint: name -> fp32 tensor.

    The merged weights W + alpha / rank B A have the names of the plain architecture. The matrices
    are A and alpha / rank B, named as MATRICES says. `weights` is emptied on the way, so that
    memory never holds all weights twice.
    """
    merged = {name: weights.pop(name).float() for name in list(weights)}
    matrices = {}
    for name, layer in reversed(lora_layers(model).items()):  # the innermost first
        down, up = merged.pop(f"{name}.down"), layer.scale * merged.pop(f"{name}.up")
        matrices |= {f"{name}.down": down, f"{name}.up": up}
        merged[f"{name}.weight"] = merged.pop(f"{name}.base.weight") + up @ down
        if f"{name}.base.bias" in merged:
            merged[f"{name}.bias"] = merged.pop(f"{name}.base.bias")
    return merged, matrices


def read_matrices(path):
    """[(name, A, alpha / rank B)] of a checkpoint; of each layer, the first training first."""
    matrices = load_file(Path(path, MATRICES))
    names = {name.removesuffix(".down") for name in matrices if name.endswith(".down")}
    return [(name, matrices[f"{name}.down"], matrices[f"{name}.up"])
            for name in sorted(names, key=len, reverse=True)]


def attach(model, name, down, up):
    """Matrices beside a layer, in the model's own type. In place; returns the new layer."""
    rank = len(down)
    layer = LoraLinear(model.get_submodule(name), rank, alpha=rank)
    for own, values in ((layer.down, down), (layer.up, up)):
        own.data = values.to(own.device, model.dtype)
    model.set_submodule(name, layer)
    return layer


def load_matrices(model, path):
    """The model that training started from, with the matrices that it has trained. In place."""
    for name, down, up in read_matrices(path):
        if not name.endswith(EARLIER):  # the model that training started from has the earlier ones
            attach(model, name, down, up)
    return model


def take_apart(model, path):
    """Split merged fp32 weights into the frozen weights, in bf16, and the matrices. In place."""
    matrices = [(name.partition(EARLIER)[0], down, up) for name, down, up in read_matrices(path)]
    for name, down, up in matrices:
        model.get_submodule(name).weight.data -= up @ down
    for parameter in model.parameters():  # buffers, such as rotary frequencies, stay exact
        parameter.data = parameter.data.bfloat16()
    for name, down, up in matrices:
        attach(model, name, down, up).earlier = True
    return model
