"""What the command lines of all scripts share."""

import argparse
import difflib
import math
import operator


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it stands; after each flag its default, unless the help states it."""

    def _get_help_string(self, action):
        plain = action.default in (None, []) or isinstance(action.default, bool)
        if plain or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


# name of a limit, as a keyword -> (its words in a message, the comparison that a value must pass)
LIMITS = {
    "least": ("of at least", operator.ge), "above": ("above", operator.gt),
    "most": ("of at most", operator.le), "below": ("below", operator.lt),
}


class FlagParser(argparse.ArgumentParser):
    """Refuses numbers outside their limits, empty texts and flags without effect."""

    def __init__(self, description):
        self.limits = {}  # flag -> its limits
        self.needs = {}  # flag -> the flag that it needs
        super().__init__(description=description, formatter_class=HelpFormatter)

    def error(self, message):
        """As argparse's, without the list of all flags, and with the nearest to an unknown one."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = [flag for word in unknown if word.startswith("--")
                for flag in difflib.get_close_matches(word, self._option_string_actions, 1)]
        hint = f"; did you mean {' '.join(near)}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message} (see --help){hint}\n")

    def add_argument(self, *names, needs=None, group=None, **options):
        """Besides argparse's options, a number may have LIMITS, such as `least=1`; without the flag
        `needs`, this one is refused, as it would do nothing. `group` is where --help lists it.
        """
        limits = {word: options.pop(word) for word in LIMITS if word in options}
        action = (group or super()).add_argument(*names, **options)
        if limits:
            self.limits[action.dest] = limits
        if needs:
            self.needs[action.dest] = needs
        return action

    def parse_args(self, args=None, namespace=None):
        args = super().parse_args(args, namespace)
        for name, value in vars(args).items():
            if "" in (value if isinstance(value, list) else [value]):
                raise SystemExit(f"found --{name} with an empty text, expected a value, or the flag"
                                 " to be omitted; is a variable of the shell unset?")
        for name, limits in self.limits.items():
            value = getattr(args, name)
            if value is None:
                continue
            within = all(LIMITS[word][1](value, limit) for word, limit in limits.items())
            if not within or not math.isfinite(value):
                words = " and ".join(f"{LIMITS[word][0]} {limit}" for word, limit in limits.items())
                raise SystemExit(f"found --{name} {value}, expected a number {words}")
        for name, needed in self.needs.items():
            if not getattr(args, needed):
                self.refuse_ignored(args, [name], f"without --{needed}")
        return args

    def refuse_ignored(self, args, names, reason):
        """Refuse flags that would do nothing here; a flag at its default asks for nothing."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                refuse_flag(args, name, reason)

    def refuse_idle_critic(self, args, ranking_flags):
        """For a script that trains a critic on --episodes, ranks --candidates with it, or both:
        refuse a command that does neither, and flags of the training where nothing is trained.
        """
        if args.episodes and not args.model:
            raise SystemExit("found --episodes without --model, expected a model to start from")
        if not args.episodes:
            if not args.candidates:
                raise SystemExit("found neither --episodes nor --candidates, expected episodes to"
                                 " train a critic on, or candidates that the critic in --output"
                                 " ranks")
            training_flags = vars(args).keys() - {"output", "packed", "dtype", *ranking_flags}
            self.refuse_ignored(args, sorted(training_flags), "without --episodes to train on")

    def add_dtype_flag(self, group=None):
        self.add_argument("--dtype", choices=("bfloat16", "float32"), group=group,
                          help="what models compute in (default: bfloat16 on GPUs, float32 on"
                          " CPUs); checkpoints are float32")

    def add_machine_flags(self):
        """Flags of training that say how something is computed, not what; results differ by
        rounding only. The exceptions: --lora_rank trains other weights, --max_steps ends earlier.
        """
        group = self.add_argument_group("machine")
        group.add_argument("--packed", action="store_true",
                           help="compute only once what rows share (fast/packed.py)")
        self.add_argument("--micro_batch_size", type=int, least=1, default=1, group=group,
                          help="pairs (sft.py: dialogues) per process in a forward and backward")
        self.add_dtype_flag(group)
        self.add_argument("--checkpointing_every", type=int, least=0, metavar="N", group=group,
                          help="activation checkpointing: recompute every N-th layer in the"
                          " backward; 0: none (default: 1 on GPUs, 0 on CPUs)")
        group.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True,
                           help="free a layer's gathered weights between forward and backward")
        self.add_argument("--save_minutes", type=float, least=0, default=20, group=group,
                          help="minutes between saved training states")
        self.add_argument("--max_steps", type=int, least=1, group=group,
                          help="stop after this many steps; a larger one resumes the run")
        self.add_argument("--lora_rank", type=int, least=0, default=0, group=group,
                          help="train matrices of this rank beside frozen layers (0: all weights)")
        self.add_argument("--lora_alpha", type=float, above=0, needs="lora_rank", group=group,
                          help="their output is scaled by alpha / rank (default: twice the rank)")


def refuse_flag(args, name, reason):
    value = getattr(args, name)
    given = f"--{name} {value}"
    if isinstance(value, bool):
        given = f"--{name}" if value else f"--no-{name}"
    raise SystemExit(f"found {given}, which is ignored {reason}; expected it to be omitted")


# what may differ in a command that resumes a run: the result is the same but for rounding
COST_FLAGS = ("packed", "micro_batch_size", "checkpointing_every", "reshard", "save_minutes")
