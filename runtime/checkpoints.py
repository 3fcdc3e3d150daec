"""Checkpoints that from_pretrained opens, and states from which a killed run resumes exactly."""

import contextlib
import math
import os
import pickle
import shutil
import time

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from runtime.lora import MATRICES, merge
from runtime.record import RESUME


def save_checkpoint(output, model, tokenizer, agent_prompt, process):
    """A directory that from_pretrained opens, with fp32 weights: bf16 would lose small steps.

    config.json comes last, so that a half-written checkpoint never opens.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = {name for name, _ in named}  # a tied weight has one name here
    weights = {name: weight for name, weight in weights.items() if name in kept}
    if process.leads:
        partial = output / "checkpoint.partial"
        shutil.rmtree(partial, ignore_errors=True)
        weights, matrices = merge(weights, model)
        with writing(partial):
            model.save_pretrained(partial, state_dict=weights)
            # save_pretrained has noted the dtype in memory; LoRA keeps frozen weights in bf16
            model.config.dtype = torch.float32
            model.config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            if matrices:
                save_file(matrices, partial / MATRICES)
        # safetensors writes its files for their owner alone
        for path in [*partial.glob("*.safetensors"), *partial.glob(MATRICES)]:
            shutil.copymode(partial / "config.json", path)
        if agent_prompt is not None:  # the instructions travel with the weights trained on them
            (partial / "agent_prompt.txt").write_text(agent_prompt + "\n", encoding="utf-8")
        to_disk(path for path in partial.rglob("*") if path.is_file())
        move_into_place(partial, output)


def to_disk(paths):
    """Have the disk write files before they take the place of others: they are the only copy, and
    a node that loses power may forget what it has not written.
    """
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def move_into_place(partial, output):
    """Move all files of a checkpoint, config.json last."""
    names = [path.name for path in partial.iterdir() if path.name != "config.json"]
    for name in [*names, "config.json"]:
        # a folder, such as additional_chat_templates, replaces only an empty one
        if (partial / name).is_dir():
            shutil.rmtree(output / name, ignore_errors=True)
        os.replace(partial / name, output / name)
    partial.rmdir()


def trained_parameters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def is_complete(output, max_steps, process):
    """Whether the directory holds the finished checkpoint of this very command.

    A run that --max_steps has cut keeps its state, and a larger --max_steps resumes it.
    """
    if not process.from_leader((output / "config.json").is_file()):
        return False
    state = output / RESUME
    if not process.from_leader(state.is_dir()):
        return True
    # all parts are of one step, so it is complete for any number of processes
    step = process.from_leader(read_part(state / "rank0.pt")["step"] if process.leads else None)
    if step >= (max_steps or math.inf):
        return True
    read_state(state, process)  # refuses another number of processes before anything is computed
    return False


def close_complete(output, process):
    """On the leader, remove leftovers of a complete run and say that it is complete."""
    process.barrier()  # all ranks have looked at what is there
    if process.leads:
        remove_leftovers(output)
        cut = " up to --max_steps; a larger one trains on" if (output / RESUME).is_dir() else ""
        print(f"{output}: training is complete{cut}")


def remove_leftovers(output):
    """What a complete run does not need, such as what a kill left half written."""
    for path in [*output.glob("resume.*"), output / "checkpoint.partial"]:
        shutil.rmtree(path, ignore_errors=True)


def save_state(folder, step, model, optimizer, process):
    """Save what an exact resume needs; each rank writes its own shards.

    A state is written under a name of its own, `resume.STEP.partial`, and renamed when it is whole.
    NFS clients remember names for a while: under a name that was used before, a node could write
    into the state that is still good.
    """
    partial = folder.with_name(f"resume.{step}.partial")
    if process.leads:
        for left_by_a_kill in folder.parent.glob("resume.*.partial"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
        partial.mkdir(parents=True)
    process.barrier()
    parameters = trained_parameters(model)
    moments = [{name: local(value) for name, value in optimizer.state[parameter].items()}
               for parameter in parameters]
    state = {"step": step, "world": process.world, "moments": moments,
             "parameters": [local(parameter) for parameter in parameters]}
    path = partial / f"rank{process.rank}.pt"
    with writing(partial):
        torch.save(state, path)
    to_disk([path])
    process.barrier()
    if process.leads:
        wait_for_files(partial, process.world)
        old = folder.with_name("resume.old")
        # `folder` is missing before the first state, and after a kill between the two renames. In
        # the second case `old` is the only state, and must stay until the new one is in place
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    process.barrier()  # torchrun would stop the leader between the renames if a rank ended earlier


def wait_for_files(folder, count, patience=120):
    """Wait until this node sees the files of all ranks; NFS may show them late."""
    deadline = time.monotonic() + patience
    while (found := len(list(folder.iterdir()))) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"{folder}: found the files of {found} processes, expected {count};"
                             " all nodes need the same --output folder")
        time.sleep(1)


def load_state(folder, model, optimizer, process):
    """The step to resume from, 0 without a state; restores weights and moments bit for bit."""
    old = folder.with_name("resume.old")
    if not folder.is_dir() and old.is_dir():
        folder = old  # killed between the two renames of save_state
    # the leader decides for all: nodes may see a shared folder at different times
    folder = process.from_leader(folder if folder.is_dir() else None)
    if folder is None:
        return 0
    state = read_state(folder, process)
    saved = list(zip(trained_parameters(model), state["parameters"], state["moments"], strict=True))
    # a parameter that has had no gradient yet has no moments either
    make_moments(optimizer, [parameter for parameter, _, moments in saved if moments])
    with torch.no_grad():
        for parameter, weights, moments in saved:
            local(parameter).copy_(weights)
            for name, value in moments.items():
                if torch.is_tensor(value):
                    local(optimizer.state[parameter][name]).copy_(value)
                else:  # some optimisers, such as Adafactor, count steps in a plain number
                    optimizer.state[parameter][name] = value
    return state["step"]


def make_moments(optimizer, parameters):
    """Make the optimiser create its moments, by a step with gradients of 0.

    With weight decay, the step changes the weights; load_state copies the saved ones back.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def read_state(folder, process):
    """This rank's part of a saved state; a state of another number of processes is refused."""
    path = folder / f"rank{process.rank}.pt"
    found = len(list(folder.glob("*")))
    state = read_part(path) if path.is_file() else None
    if state is None or state["world"] != process.world:
        raise SystemExit(f"{folder}: found the state of a run of {found} processes, expected"
                         f" {process.world}; use as many as before, or remove the folder"
                         f" {folder.parent} to start again")
    return state


def read_part(path):
    """The part of a saved state that is in one file."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
        raise SystemExit(f"{path}: found a state that cannot be read"
                         f" ({str(error).splitlines()[0]}), expected one that this command saved;"
                         f" remove the folder {path.parent.parent} to start again") from None


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def writing(folder):
    """Turn write errors of torch, safetensors and tokenizers, such as a full disk, into an OSError.

    That of tokenizers is a plain Exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (RuntimeError, SafetensorError)) or type(error) is Exception:
            raise OSError(f"{folder} could not be written ({error})") from None
        raise
