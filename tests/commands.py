"""Commands of recipes, documents and docstrings: what a shell makes of them, and how they parse.

One mechanism for all: bash runs the text with stubs in place of the programs (`record`), and the
script's own parser reads the words that a stub was called with (`check_command`).
"""

import argparse
import functools
import re
import runpy
import subprocess
from unittest import mock

from conftest import ROOT

def blocks(text, language):
    """The code blocks of a document in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# In shell, since some recipes call hundreds. One write a command, as two may end at once
RECORDER = r"""#!/bin/bash
IFS=$'\x1f'
words=("${0##*/}" "$@")
printf '%s\x1e\n' "${words[*]}" >>"$RECORDED"
"""


def record(script, folder, programs, path=None, arguments=(), **variables):
    """The words of each command that a bash script would run, the program's name first.

    `programs` are stubs that record their words and do nothing. The shell finds them first, then
    the programs of `path`.
    """
    (folder / "bin").mkdir()
    for program in programs:
        (folder / "bin" / program).write_text(RECORDER)
        (folder / "bin" / program).chmod(0o755)
    recorded = folder / "recorded"
    recorded.touch()
    search = f"{folder / 'bin'}:{path}" if path else str(folder / "bin")
    environment = {"PATH": search, "RECORDED": str(recorded)}
    done = subprocess.run(["/bin/bash", str(script), *arguments], cwd=folder,
                          env=environment | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (
        f"{done.stderr}Only these programs may be called here: {', '.join(programs)}.")
    return [command.split("\x1f") for command in recorded.read_text().split("\x1e\n")[:-1]]


class Stopped(Exception):
    """Raised in place of what a script does after it has built its parser."""


@functools.cache
def names_of(script):
    return runpy.run_path(str(ROOT / script))


def parse(script, words):
    """Parse words as the script does; SystemExit if it refuses them."""
    names = names_of(script)
    if "parse_args" in names:
        names["parse_args"](words)
        return
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser, args=None, namespace=None):  # the script parses in `main`
        parse_args(parser, args, namespace)
        raise Stopped

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            names["main"](words)
        except Stopped:
            pass


@functools.cache
def parser_of(script):
    """The script's ArgumentParser, with the choices of its flags."""
    found = []

    def keep(parser, args=None, namespace=None):
        found.append(parser)
        raise Stopped

    with mock.patch.object(argparse.ArgumentParser, "parse_args", keep):
        try:
            names_of(script)["parse_args"]([])
        except Stopped:
            pass
    return found[0]


def check_command(words):
    """Parse a command of ours with its script's own parser; returns the script's path.

    Words before the script, such as torchrun's, are not looked at. None if there is no script.
    """
    for index, word in enumerate(words):
        script = script_of(words[:index + 1])
        if script:
            assert (ROOT / script).is_file(), f"{' '.join(words)}: there is no {word}; rename it"
            try:
                parse(script, words[index + 1:])
            except SystemExit as error:
                reason = error.__context__ or error  # argparse exits with a bare 2
                raise AssertionError(f"{' '.join(words)}: {word} refuses this: {reason}; mend the"
                                     f" command, or the flags in {script}") from error
            return script
    return None


def script_of(words):
    """The script that the last of these words names: a file, or a module of ours after -m."""
    if words[-1].endswith(".py"):
        return words[-1]
    if words[-2:-1] == ["-m"]:
        name = words[-1].replace(".", "/")
        for path in (f"{name}.py", f"{name}/__main__.py"):
            if (ROOT / path).is_file():
                return path
    return None
