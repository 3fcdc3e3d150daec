"""What the command lines of all scripts share."""

import argparse
import difflib
import re
import sys


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it stands; after each flag its default, unless the help states it."""

    def _get_help_string(self, action):
        plain = action.default in (None, []) or isinstance(action.default, bool)
        if plain or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


class FlagParser(argparse.ArgumentParser):
    """Names the flag that a mistyped one is closest to."""

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


def flag_parser(description):
    return FlagParser(description=description, formatter_class=HelpFormatter)


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
