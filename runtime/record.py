"""run.json, the record of a run: the same command resumes its output, another one is refused."""

import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from runtime.files import (
    ResumableJsonl, files_with_rows, refuse_unfinished, whole_rows, write_atomically)
from runtime.names import GRADER, check_checkpoint, is_server

RESUME = "resume"  # the folder of a run's training state, in its output
RUNNERS = ("pytest", "__main__.py", "-c", "ipykernel_launcher.py")  # they run any script's `main`
SEEN_WITHIN = 60  # seconds in which all nodes see a new file of a directory that they share
COUNTS = ("num_tasks", "samples_per_task", "max_steps")  # a larger one continues what is there


def claim_output(path, flags, inputs, process, may_differ=(), flag="--output"):
    """Write `path` (run.json), the record of this command; refuse the output of another command.

    The record holds flags, versions, the world size and hashes of the inputs. The flags in
    `may_differ` do not change what is made, so they may differ from those of an earlier run; COUNTS
    may grow. A command that has produced no output yet may be replaced by another.

    If a training's --max_steps has grown, it returns the leader's record in place of writing it.
    """
    path = Path(path)
    # the shell's completion ends directories in a slash
    flags = {name: value.rstrip("/") if isinstance(value, str) else value
             for name, value in flags.items() if name != "output"}
    hashes = {str(name): file_hash(name) for name in inputs if name}
    refuse_foreign_directory(path)
    if process.leads:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            hold_lock(path)
        except OSError as error:
            raise SystemExit(f"{path.parent}: found that nothing can be written there ({error}),"
                             f" expected a directory for the output; choose another {flag}"
                             ) from None
    resumes, grows = path.is_file() and has_output(path), False
    if resumes:  # or is refused
        before = read_run(path)
        refuse_other_command(path, before, changes_since(before, flags, hashes, may_differ), flag)
        refuse_other_code(path, before, flag)
        if process.leads and before.get("commit") != code_commit():
            print(f"{path}: resuming the output of commit {before.get('commit')} with the code of"
                  f" {code_commit()}", file=sys.stderr)
        grows = not is_finished(path) and any(
            has_grown(name, before["flags"], flags) for name in COUNTS)
    process.barrier()  # all ranks have read the record and the output before they change
    # The checkpoint of fewer steps can be opened until Run.resume removes it, and until then its
    # record stays: it is an input of what is made with this checkpoint
    waits = grows and path.name == "run.json"
    record = None
    if process.leads and (grows or not resumes):
        record = json.dumps(record_of_command(flags, hashes, process.world), indent=1) + "\n"
        if not waits:
            write_atomically(path, record)
    process.barrier()
    refuse_unshared_directory(path, flag)
    return record if waits else None


def record_of_command(flags, hashes, world_size):
    """What run.json holds: what the result depends on, and how it was made."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"script": Path(sys.argv[0]).name, "flags": flags, "world_size": world_size,
            "directory": os.getcwd(), "inputs": hashes,
            "versions": {"python": platform.python_version()} | versions,
            "commit": code_commit(), "code": code_of_scripts()}


def refuse_unshared_directory(path, flag):
    """Refuse a node's own directory, in which the leader has not written its record."""
    end = time.monotonic() + SEEN_WITHIN
    while not path.is_file():
        if time.monotonic() > end:
            raise SystemExit(f"{path}: found on {platform.node()} no record that rank 0 has"
                             " written, expected one directory that all nodes share; choose"
                             f" another {flag}")
        time.sleep(1)


def refuse_foreign_directory(path):
    """Refuse a directory that holds a training of other programs, without our record."""
    made = [name for name in ("config.json", RESUME, "metrics.jsonl")
            if path.with_name(name).exists()]
    if path.name == "run.json" and made and not path.exists():
        raise SystemExit(f"{path.parent}: found {made[0]} without the run.json that these scripts"
                         " write, expected a new directory; choose another --output")


def refuse_other_command(path, before, changed, flag):
    """Refuse an output whose record `before` differs from this command in what has `changed`.

    Another script is another command even with the same flags: it may be an edited copy.
    """
    scripts = {before.get("script"), Path(sys.argv[0]).name}
    if len(scripts) > 1 and (changed or scripts.isdisjoint(RUNNERS)):
        raise SystemExit(f"{path}: found the output of {before.get('script')}, expected that of"
                         f" the same command, or none; choose another {flag}")
    if not changed:
        return
    words = [f"{name} (it was {before['flags'][name]})" if name in before["flags"] else name
             for name in changed]
    counts = ", ".join(name for name in COUNTS if name in before["flags"])
    may_grow = f" ({counts} may grow)" if counts else ""
    raise SystemExit(f"{path}: found the output of another run, which differs in"
                     f" {', '.join(words)}; expected the same command, to resume it{may_grow};"
                     f" choose another {flag} or remove {files_of(path)}")


def edited_since(run):
    """The scripts that were edited since the run of this record."""
    before = run.get("code", {})
    return [name for name, code in code_of_scripts().items() if before.get(name, code) != code]


def refuse_other_code(path, before, flag):
    """Refuse an output if a script that made it was edited since."""
    edited = edited_since(before)
    if edited:
        raise SystemExit(f"{path}: found an output that other code has made, since"
                         f" {', '.join(edited)} was edited; expected the same code, to resume"
                         f" it; choose another {flag} or remove {files_of(path)} (or, if the"
                         f' edit changes no result, remove "code" from {path.name})')


def is_finished(record):
    """Whether a training has taken all its steps, to which a larger --max_steps adds none."""
    folder = record.parent
    finished = (folder / "config.json").is_file() and not (folder / RESUME).is_dir()
    return record.name == "run.json" and finished


def output_of(record):
    """The directory, or the file, whose record this is."""
    if record.name == "run.json":
        return record.parent
    return record.with_name(record.name.removesuffix(".run.json"))


def files_of(record):
    """What to remove, in words, to begin this output anew."""
    output = output_of(record)
    return f"the directory {output}" if output.is_dir() else f"{output}*"


def open_rows(path, flags, inputs, process, key, models=(), flag="--output"):
    """A ResumableJsonl whose record of the command is PATH.run.json; `models` are inputs, too.

    --batch_size, how many conversations are answered at a time, may differ on resuming.
    """
    record = Path(f"{path}.run.json")
    if Path(path).is_dir() or str(path).endswith("/"):
        raise SystemExit(f"{path}: found a directory, expected the name of a file; choose another"
                         f" {flag}")
    if files_with_rows(path) and not record.is_file():
        raise SystemExit(f"{path}: found a file that these scripts did not write here (its"
                         " .run.json is missing), expected a new name or the output of the same"
                         f" command; choose another {flag}")
    inputs = [*inputs, *run_files(*models)]
    claim_output(record, flags, inputs, process, may_differ=("batch_size",), flag=flag)
    return ResumableJsonl(path, key, process)


def code_of_scripts():
    """Script -> hash of its code: the script that runs, and those of ours that it imports.

    They say what is computed; what stands elsewhere says how. Comments on lines of their own do not
    count.
    """
    root, hashes = Path(__file__).resolve().parent.parent, {}
    script = Path(sys.argv[0]).resolve()
    waiting = [script]
    while waiting:
        path = waiting.pop()
        name = str(path.relative_to(root) if root in path.parents else path)
        ours = path == script or path.parent in (root, root / "variants")
        if not ours or not path.is_file() or name in hashes:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")  # the script may be an archive
        lines = [line for line in text.splitlines()
                 if line.strip() and not line.lstrip().startswith("#")]
        hashes[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        imported = re.findall(r"^(?:from|import) ([\w.]+)", "\n".join(lines), re.MULTILINE)
        waiting += [root / f"{module.replace('.', '/')}.py" for module in imported]
    return dict(sorted(hashes.items()))


@functools.cache
def code_commit():
    """The commit of this code, "-dirty" where files differ from it; None outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


@functools.cache
def hold_lock(path):
    """Keep other runs from writing to the same output for as long as this process lives.

    A kill releases the lock.
    """
    lock = open(path.with_name(f".{path.name}.lock"), "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise SystemExit(f"{path}: found another run that writes to this output"
                         f" ({lock.read().strip()}), expected it to be free; wait for that run or"
                         " stop it") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        print(f"{path.parent}: this file system has no locks; make sure that no other run writes"
              " to this output", file=sys.stderr)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock  # open, and so held, until the process ends


def file_hash(path):
    refuse_unfinished(path)
    if Path(path).is_dir():
        inside = Path(path, "ranked.jsonl")
        raise SystemExit(f"{path}: found a directory, expected a file"
                         + (f"; give {inside}" if inside.is_file() else ""))
    if not Path(path).is_file():
        raise SystemExit(f"{path}: no such file; expected an input of this command: a JSONL file,"
                         " or instructions as plain text")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def changes_since(before, flags, hashes, may_differ):
    """In words, the flags and inputs that differ from those of an earlier run's record."""
    changed = []
    for name in sorted((flags.keys() | before["flags"].keys()) - set(may_differ)):
        same = (flags.get(name) == before["flags"].get(name)
                or has_grown(name, before["flags"], flags)
                or server_moved(name, before["flags"], flags))
        if not same:
            changed.append(name if name in before["flags"] else f"{name} (a new flag)")
    for name in hashes | before["inputs"]:  # the run.json of a model may have come or gone
        if hashes.get(name) != before["inputs"].get(name):
            both = name in hashes and name in before["inputs"]
            changed.append(f"{name} (its content)" if both else name)
    return changed


def has_grown(name, old_flags, new_flags):
    """Whether a flag is a count that is larger than it was; None stands for no limit."""
    old, new = old_flags.get(name), new_flags.get(name)
    return name in COUNTS and old is not None and (new is None or new > old)


def server_moved(name, old_flags, new_flags):
    """Whether a flag is, in both commands, the address of a server whose model another flag names.

    Such a server may be started again elsewhere, as on a cluster; its model's name is compared.
    """
    return all(flags.get(f"{name}_model") and is_server(flags[name].removeprefix(GRADER))
               for flags in (old_flags, new_flags))


def has_output(record):
    """Whether a run has made anything that a corrected command could not replace.

    For run.json, any file beside it; for NAME.run.json, a row without error in NAME.
    """
    if record.name == "run.json":
        own = ("run.json", ".run.json")
        return any(not path.name.startswith(own) for path in record.parent.iterdir())
    rows = whole_rows(output_of(record))
    return any(not row.get("error") for row in rows)


def run_files(*checkpoints):
    """The run.json of checkpoints that these scripts trained: a retrained one is a new input."""
    paths = [Path(checkpoint, "run.json") for checkpoint in checkpoints if checkpoint]
    return [path for path in paths if path.is_file()]


def is_critic(path):
    """Whether a directory holds a critic, as its record says."""
    record = Path(path, "run.json")
    try:
        return record.is_file() and "privileged" in read_run(record)["flags"]
    except SystemExit:  # another program's file
        return False


def read_run(path):
    """The record that claim_output wrote."""
    try:
        run = json.loads(Path(path).read_text())
        if isinstance(run["flags"], dict) and isinstance(run["inputs"], dict):
            return run
    except (ValueError, KeyError, TypeError):
        pass  # the sentence below covers every such file
    raise SystemExit(f"{path}: found a file that is no record of a run, expected what these scripts"
                     " write; choose another directory")


def path_from(run, name):
    """A path from a run's flags, relative to the directory where the run was started.

    What is not there is returned as it is; it may be a Hugging Face name.
    """
    there = Path(run.get("directory", ""), name)
    return str(there) if there.exists() else name


def read_flags(path, needed):
    """The flags that a checkpoint was trained with, `model` as its path from here. Stops if they
    lack one of those `needed`, or if the model has changed since.
    """
    record = Path(path, "run.json")
    check_checkpoint(path)
    if not record.is_file():
        raise SystemExit(f"{path}: found no run.json, expected a directory that a trainer of these"
                         " scripts wrote")
    run = read_run(record)
    flags = run["flags"]
    missing = set(needed) - flags.keys()
    if missing:
        raise SystemExit(f"{path}: found what {run.get('script')} has trained, expected a"
                         f" checkpoint whose run.json has the flags {', '.join(needed)}")
    model = path_from(run, flags["model"])
    try:
        check_checkpoint(model)
    except SystemExit as reason:  # moved, or on another machine
        raise SystemExit(f"{path}: found no model that it was trained from, expected that of its"
                         f" run.json ({reason}); put or link it there") from None
    before = run["inputs"].get(str(Path(flags["model"], "run.json")))
    trained = Path(model, "run.json")  # a model that these scripts did not train has none
    now = file_hash(trained) if trained.is_file() else None
    if now != before:
        raise SystemExit(f"{path}: found that {model}/run.json has changed, or is gone, since this"
                         " checkpoint was trained, expected the model that it started from; train"
                         " it again")
    return flags | {"model": model}
