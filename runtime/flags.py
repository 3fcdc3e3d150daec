"""What the command lines of all scripts share."""

import argparse
import difflib
import math
import re
import sys


SMALLEST = 1e-9  # of a flag that must be above 0


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it stands; after each flag its default, unless the help states it."""

    def _get_help_string(self, action):
        plain = action.default in (None, []) or isinstance(action.default, bool)
        if plain or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


class FlagParser(argparse.ArgumentParser):
    """Names the flag that a mistyped one is closest to; refuses what is out of bounds or no use.

    bounds: flag -> (least, below). needs: flag -> the flag without which it would do nothing.
    """

    bounds, needs = {}, {}

    def parse_known_args(self, args=None, namespace=None):
        known = ["--help", *re.findall(r"--[\w-]+", self.format_usage())]
        for word in sys.argv[1:] if args is None else args:
            flag = word.partition("=")[0]
            if not flag.startswith("--") or any(name.startswith(flag) for name in known):
                continue
            closest = difflib.get_close_matches(flag, known, 1)
            meant = f"; did you mean {closest[0]}?" if closest else ""
            raise SystemExit(f"found {flag}, expected a flag of {self.prog} (see --help){meant}")
        return super().parse_known_args(args, namespace)

    def parse_args(self, args=None, namespace=None):
        args = super().parse_args(args, namespace)
        for name, (least, below) in self.bounds.items():
            value = getattr(args, name)
            if value is None or least <= value < below:
                continue
            limit = "" if below == math.inf else f" and below {below:g}"
            raise SystemExit(f"found --{name} {value}, expected a number of at least {least:g}"
                             f"{limit}")
        for name, needed in self.needs.items():
            if not getattr(args, needed):
                self.refuse_ignored(args, [name], f"without --{needed}")
        return args

    def refuse_ignored(self, args, names, reason):
        """Refuse flags that would do nothing here; a flag at its default asks for nothing."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                refuse_flag(args, name, reason)


def flag_parser(description, bounds=(), needs=()):
    parser = FlagParser(description=description, formatter_class=HelpFormatter)
    parser.bounds, parser.needs = dict(bounds), dict(needs)
    return parser


def add_dtype_flag(group):
    action = group.add_argument(
        "--dtype", choices=("bfloat16", "float32"),
        help="what models compute in (default: bfloat16 on GPUs, float32 on CPUs); checkpoints are"
        " float32")
    return action.dest


def require_at_least(least, args, *names):
    """Refuse a flag that is below `least`, infinite or no number. None: it was not given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise SystemExit(f"found --{name} {value}, expected a number of at least {least}")


def refuse_ignored(parser, args, names, reason):
    """Refuse flags that would do nothing here; a flag at its default asks for nothing."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            refuse_flag(args, name, reason)


def refuse_flag(args, name, reason):
    value = getattr(args, name)
    given = f"--{name}" if value is True else f"--{name} {value}"
    raise SystemExit(f"found {given}, which is ignored {reason}; expected it to be omitted")


# what may differ in a command that resumes a run: the result is the same but for rounding
COST_FLAGS = ("packed", "micro_batch_size", "checkpointing_every", "reshard", "save_minutes")


def machine_flags(parser):
    """Flags of both trainers that say how something is computed, not what; results differ by
    rounding only. LoRA is the exception: it trains other weights."""
    group = parser.add_argument_group("machine")
    group.add_argument("--packed", action="store_true",
                       help="compute what rows share once (fast/packed.py)")
    group.add_argument("--micro_batch_size", type=int, default=1,
                       help="pairs per forward and backward")
    add_dtype_flag(group)
    group.add_argument("--checkpointing_every", type=int, metavar="N",
                       help="recompute the activations of every N-th layer in the backward; 0: of"
                       " none (default: 1 on GPUs, 0 on CPUs)")
    group.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True,
                       help="free a layer's gathered weights between forward and backward")
    group.add_argument("--save_minutes", type=float, default=20,
                       help="minutes between saved training states")
    group.add_argument("--max_steps", type=int,
                       help="stop after this many steps; a larger one resumes the run")
    group.add_argument("--lora_rank", type=int, default=0,
                       help="train matrices of this rank beside frozen layers (0: all weights)")
    group.add_argument("--lora_alpha", type=float,
                       help="their output is scaled by alpha / rank (default: twice the rank)")
    parser.bounds |= {
        "micro_batch_size": (1, math.inf), "max_steps": (1, math.inf),
        "checkpointing_every": (0, math.inf), "save_minutes": (0, math.inf),
        "lora_rank": (0, math.inf), "lora_alpha": (SMALLEST, math.inf)}
    parser.needs["lora_alpha"] = "lora_rank"
