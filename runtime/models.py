"""Models and tokenizers from disk: what cannot be opened is named."""

import copy
import functools
import gc
import os
import sys
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

from runtime.lora import MATRICES, WithoutMatrices, add_matrices, load_matrices, take_apart
from runtime.names import check_checkpoint
from runtime.processes import own_rank
from runtime.record import is_critic


def load_tokenizer(path):
    transformers.logging.disable_progress_bar()
    return load_part(transformers.AutoTokenizer, "the tokenizer", path)


def load_config(path):
    return load_part(transformers.AutoConfig, "config.json", path)


def load_part(auto_class, name, path):
    """A checkpoint's tokenizer or config."""
    check_checkpoint(path)
    try:
        return auto_class.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error)
        if not os.path.isdir(path):  # both places that were tried
            reason = ("there is no such directory here, and the Hugging Face Hub has no such model,"
                      f" or cannot be reached: {reason}")
        elif auto_class is transformers.AutoTokenizer and not any(Path(path).glob("*token*")):
            reason = f"it has no file named *token*; save the tokenizer there, too: {reason}"
        raise SystemExit(f"{path}: could not open {name} ({reason}); expected a Hugging Face name"
                         " or directory") from None


def is_quantised(config):
    return getattr(config, "quantization_config", None) is not None


def sees_pictures(path):
    """Whether the checkpoint is a vision-language model, as its config says."""
    return type(load_config(path)) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def refuse_vision_language(config, path):
    """Refuse a vision-language model that cannot be opened as a model of texts."""
    kind = type(config)
    if (kind in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and kind not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        raise SystemExit(f"{path}: found a vision-language model, expected a model of texts (only"
                         " the human of pages and variants/value_critic.py look at pictures);"
                         " choose one, or serve it and give the server's address")


def refuse_untrainable(path, max_length):
    """Refuse what cannot be trained here: quantised weights, and positions that change.

    No gradient can move weights that are integers. And some models encode all positions anew once a
    batch is longer than a limit: the log-probs of a row would then depend on the rows beside it.
    """
    config = load_config(path)
    if is_quantised(config):
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise SystemExit(f"{path}: found a quantised model ({method}), expected floating-point"
                         " weights to train; give the model that it was made from")
    limit = limit_of_changing_positions(config)
    if limit and max_length > limit:
        kind = config.get_text_config().rope_parameters["rope_type"]
        raise SystemExit(f"{path}: found --max_length {max_length} with rotary positions of type"
                         f" {kind}, which change beyond {limit} tokens, expected at most"
                         f" --max_length {limit}")


def limit_of_changing_positions(config):
    """The tokens beyond which a model encodes all positions anew; None if it never does."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return None
    return rope.get("original_max_position_embeddings") or config.max_position_embeddings


def context_length(config):
    """The most tokens that a model can read; None if it can read any number.

    Rotary positions go on beyond what a model was trained on, learned ones end.
    """
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):
        return limit_of_changing_positions(config)
    return getattr(text, "max_position_embeddings", None)


@functools.cache
def announce_device(device):
    """Print once where this run computes: with a driver too old, torch silently uses the CPU."""
    if own_rank() == 0:
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"
        advice = ""
        if not device.startswith("cuda") and "OMP_NUM_THREADS" not in os.environ:
            advice = "; where other jobs keep the cores busy, OMP_NUM_THREADS=1 is faster"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if device == "cpu" and not hidden and os.path.exists("/dev/nvidiactl"):
            advice = ("; this machine seems to have one: its driver may be too old for this torch,"
                      " or torch came without CUDA (remove .venv, then `make CPU_TORCH="
                      " .venv/ready`)")
        print(f"computing on {device} ({name}){advice}", file=sys.stderr)


def compute_dtype(device, dtype=None):
    """The name of the type that models compute in: `dtype` if given, else by device."""
    if dtype:
        return dtype
    return "float32" if str(device) == "cpu" else "bfloat16"


def load_model(path, device="cpu", model_class=transformers.AutoModelForCausalLM, dtype=None,
               merged=False, move=True, **options):
    """A transformers model, from safetensors only; what cannot be opened is named.

    `device` is None where torchrun has given this process none: a GPU is taken if there is one.
    With move=False, it stays in host memory. In bf16, a LoRA checkpoint opens as its frozen
    weights with the matrices beside them, unless `merged` is true.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load_config(path)
    # cuDNN, the first choice on H100s, gives NaN gradients under some masks (pytorch#196678) and
    # plans anew for each length
    torch.backends.cuda.enable_cudnn_sdp(False)
    announce_device(str(device))
    gc.collect()  # frees what is left of an earlier model before the next one is loaded
    torch.cuda.empty_cache()  # NCCL and other processes cannot use what torch keeps
    dtype = compute_dtype(device, dtype)
    if model_class is transformers.AutoModelForCausalLM:
        refuse_vision_language(config, path)
    apart = dtype == "bfloat16" and Path(path, MATRICES).is_file() and not merged
    read_as = "auto"  # the type in its files; converted below, parameter by parameter
    if is_quantised(config):
        read_as = dtype
    elif apart or dtype == "float32":
        # matrices are subtracted in fp32; and what is no parameter, such as the scale of Gemma's
        # embeddings, would keep the rounding of the files' type
        read_as = "float32"
    model = read_checkpoint(path, model_class, read_as, options)
    if apart:
        model = take_apart(model, path)
    elif dtype != read_as:  # one by one, so that no rank ever holds the model twice
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device if move else "cpu", getattr(torch, dtype))
    return model.to(device) if move else model


def read_checkpoint(path, model_class, dtype, options):
    """The model in a checkpoint, whose weights must be those that its config.json describes."""
    try:
        model, report = model_class.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).partition("Model type should be one of")[0].strip()  # 200 names follow
        raise SystemExit(
            f"{path}: could not open the model ({type(error).__name__}: {reason}); expected a"
            " complete checkpoint with safetensors weights; train it again or choose another"
        ) from None
    # a new value head has no weights yet
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("score."))
    if missing or report["mismatched_keys"]:
        first = missing[0] if missing else "a shape"
        raise SystemExit(
            f"{path}: weights do not fit config.json (first of them: {first}); expected a"
            " checkpoint of one architecture; train it again or choose another")
    return model


# -----------------------------------------------------------------------------
# Models to train


def open_to_train(args, run, model_class=transformers.AutoModelForCausalLM, **options):
    """`args.model`, sharded over the ranks: fp32 weights, compute in `--dtype`.

    With --lora_rank, only the matrices and a value head are trained; all else is frozen, in the
    type that models compute in.
    """
    if is_critic(args.model):
        run.say(f"{args.model}: found a critic, which was trained to judge turns; a training"
                " usually starts from a policy, or from the critic's --model")
    torch.manual_seed(args.seed)  # what starts from random weights is equal on every rank
    if args.lora_rank:
        model = load_model(args.model, run.device, model_class, dtype=args.dtype,
                           move=run.world == 1, **options)
        add_matrices(model, args.lora_rank, args.lora_alpha or 2 * args.lora_rank)
        if hasattr(model, "score"):
            model.score.float().requires_grad_()
    else:  # in bf16 as it is stored: `shard` makes it fp32 and moves it, layer by layer
        in_fp32 = compute_dtype(run.device, args.dtype) == "float32"
        model = load_model(args.model, run.device, model_class, move=False,
                           dtype="float32" if in_fp32 else "auto", **options)
    # transformers gives the pad token's embedding no gradient; where that token is a real one, too
    # (many models' end of text), it has to learn. Padding never reaches a loss here
    model.get_input_embeddings().padding_idx = None
    remove_noise(model)
    model.train()
    shard(model, run, args)
    return model


def remove_noise(model):
    """Set dropout and jitter to 0: pi_ref has none, so they would enter every log-ratio."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def shard(model, run, args):
    """Apply FSDP2 to each decoder layer and the root: fp32 weights, compute in --dtype. In place.

    It goes layer by layer, so that with several GPUs none ever holds the weights of the whole
    model. It also turns on activation checkpointing. In fp32, one process on a CPU is left without
    FSDP.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise SystemExit(f"{args.model}: found the architecture {type(model).__name__} without"
                         " `layers`, expected one like Llama's or Qwen's; choose another model")
    every = args.checkpointing_every
    if every is None:
        every = 0 if run.device == "cpu" else 1
    if every:
        enable = getattr(model, "activation_checkpointing_enable",  # its newer name
                         model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index % every == 0
    run.process.barrier()  # nodes load at different speeds; from here on, no rank waits long
    dtype = compute_dtype(run.device, args.dtype)
    if run.world == 1 and run.device == "cpu" and dtype == "float32":
        make_fp32(model.parameters())
        return  # nothing to share, and DTensors would slow small models down
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(run.process.group, run.device.split(":")[0])
    ignored = None
    if args.lora_rank and run.world == 1:  # FSDP would only copy the frozen weights
        ignored = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for layer in layers:
        make_fp32(layer.parameters())
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard,
                    ignored_params=ignored)
    make_fp32(set(model.parameters()) - set(layers.parameters()))
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)


def make_fp32(parameters):
    for parameter in parameters:
        if parameter.requires_grad:  # LoRA's frozen ones keep their type
            parameter.data = parameter.data.float()


# -----------------------------------------------------------------------------
# Models whose log-probs are compared


def open_with_reference(path, base, device=None, dtype=None, lora=False):
    """(model, reference) to compare: a trained checkpoint, and the model that it started from.

    With LoRA both are one model in memory: without its matrices, the first is the second.
    """
    reference = load_model(base, device, dtype=dtype, merged=not lora).eval()
    make_head_fp32(reference)
    if lora:
        model = load_matrices(reference, path)
        return model, WithoutMatrices(model)
    model = load_model(path, device, dtype=dtype).eval()
    make_head_fp32(model)
    return model, reference


def make_head_fp32(model):
    """Let the output layer compute in fp32: some advantages are as small as bf16's rounding."""
    model.set_output_embeddings(fp32_head(model.get_output_embeddings()))


def fp32_head(head):
    if head.weight.dtype == torch.float32:
        return head
    head = copy.deepcopy(head).float()  # a copy, since it may be the input embeddings, too
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    return head
