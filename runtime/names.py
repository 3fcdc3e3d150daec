"""What --agent, --human and --model may name, checked before anything is loaded or asked."""

import re
import urllib.parse
from pathlib import Path

REQUEST_PATH = re.compile(r"(/chat)?/completions/*$")  # what a client appends to an API's address
GRADER = "grader:"  # in front of a speaker, as --critic of best_of_n.py names it


def is_server(spec):
    """Whether this names a server by its address."""
    return spec.startswith(("http://", "https://"))


def is_scripted(spec):
    """Whether this names a party of the embedded world, which needs no model."""
    return spec.partition(":")[0] == "scripted"


def check_spec(spec):
    """Refuse what can be no speaker: a mistyped address, a directory that is not there."""
    if is_scripted(spec):
        return
    if is_server(spec):
        try:
            parts = urllib.parse.urlsplit(spec)
            (parts.hostname or "").encode("idna")
        except ValueError:
            raise SystemExit(f"{spec}: found no address of a server, expected one such as"
                             " http://localhost:8000/v1") from None
        if parts.query or parts.username:  # either may hold a key, so neither is quoted
            raise SystemExit(f"{parts.scheme}://{parts.hostname}: found an address with a query"
                             " (?...) or a user (...@), expected that of the API alone, such as"
                             " http://localhost:8000/v1, or Azure's"
                             " https://NAME.openai.azure.com/openai/v1; a key goes into the"
                             " environment variable OPENAI_API_KEY")
        if REQUEST_PATH.search(spec):
            raise SystemExit(f"{spec}: found the address of single requests, expected that of the"
                             f" API; give {REQUEST_PATH.sub('', spec)}")
        return
    if re.fullmatch(r"(localhost|[\w.-]+:\d+)(/.*)?", spec) and not Path(spec).exists():
        raise SystemExit(f"{spec}: found the address of a server without http://, expected it in"
                         f" front; give http://{spec}")
    check_checkpoint(spec)


def check_checkpoint(path):
    """Refuse a directory that is no checkpoint, or one whose training has not finished.

    A name like toy/base means a directory where toy holds what these scripts train; the Hub, which
    could have an organisation of that name, is not asked then.
    """
    folder = Path(path)
    if folder.is_file():
        raise SystemExit(f"{path}: no such directory, but a file; expected a checkpoint directory"
                         " or a Hugging Face name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        if (folder / "run.json").is_file():
            hint = "its training has not finished, or it was refused: give its command again"
        else:
            hint = "expected a checkpoint directory that from_pretrained opens"
        raise SystemExit(f"{path}: found a directory without config.json; {hint}")
    means_directory = str(path).startswith((".", "/")) or str(path).count("/") > 1
    if folder.parent != Path() and any(folder.parent.glob("*/run.json")):
        means_directory = True
    if means_directory and not folder.is_dir():
        raise SystemExit(f"{path}: no such directory; expected a checkpoint directory or a Hugging"
                         " Face name")
