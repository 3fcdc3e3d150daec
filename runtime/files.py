"""Files: what is wrong with them is said in a sentence, what is written survives a kill."""

import glob
import itertools
import json
import os
import re
import threading
from pathlib import Path


def read_jsonl(path):
    """Yield (where, object) for each line; a line that is no JSON object stops with a sentence."""
    if Path(path).is_dir():
        raise SystemExit(f"{path}: found a directory, expected a JSONL file; give one in it")
    if not Path(path).is_file():
        found = "found a pipe or a device" if Path(path).exists() else "no such file"
        raise SystemExit(f"{path}: {found}; expected a JSONL file, one JSON object a line")
    grows = re.search(r"(\.rank\d+|(^|/)metrics\.jsonl)$", str(path))
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if grows and not line.endswith(b"\n"):
                continue  # a running or killed process has written half of it
            where = f"{path}: line {line_number}"
            yield where, parse_line(line, where, path)


def parse_line(line, where, path):
    """The JSON object in a line, of bytes."""
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise SystemExit(f"{where}: found a JSON array, expected one JSON object a line;"
                         f" jq -c '.[]' {path} writes them so")
    try:
        row = json.loads(line)
        if b"\\u" in line or b"\xed" in line:  # half a surrogate pair breaks tokenizers
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        advice = ""
        if line.startswith(b"\x1f\x8b"):
            advice = "; the file is compressed, so gunzip it first"
        elif line.startswith((b"\xff\xfe", b"\xfe\xff")):
            advice = f"; iconv -f UTF-16 -t UTF-8 {path} writes it so"
        raise SystemExit(f"{where}: found text that is not UTF-8 ({error}), expected UTF-8"
                         f"{advice}") from None
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{where}: found broken JSON ({error}), expected one JSON object on one"
                         f" line; jq -c . {path} writes objects so, unless one is cut") from None
    if not isinstance(row, dict):
        raise SystemExit(f"{where}: found {type(row).__name__}, expected a JSON object")
    return row


def without_nulls(row):
    """The row without its null fields: conversions by Arrow add a null for each missing field."""
    return {key: value for key, value in row.items() if value is not None}


def expect(row, key, kind, where):
    """row[key], which must be of type `kind`; the message says what was found and expected."""
    value = row.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(k.__name__ for k in kinds)
        found = f"'{key}' of type {type(value).__name__}" if key in row else f"no '{key}'"
        raise SystemExit(f"{where}: found {found}, expected '{key}' of type {names}")
    return value


def read_prompt(path):
    """The instructions in a file; None where no file is named."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path}: found no instructions ({error}), expected a file of plain UTF-8"
                         " text") from None


def write_atomically(path, text):
    """Replace `path` in one step, so that a reader or a kill never meets half a file.

    The text may come in parts: a large one takes too much memory as a whole.
    """
    temporary = Path(f"{path}.tmp{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # such as a full disk, or Ctrl-C
        temporary.unlink(missing_ok=True)  # half a file would be in the way
        raise


def as_jsonl(rows):
    """The lines of a file, one by one."""
    return (json.dumps(row) + "\n" for row in rows)


def write_new(path, rows):
    """Write a file, unless something else than these rows stands there, which is refused."""
    path = Path(path)
    if path.exists() and (not path.is_file() or not holds(path, rows)):
        raise SystemExit(f"{path}: found something else than what this command writes, such as the"
                         " output for an earlier input, expected a new name; choose another, or"
                         " remove what is there")
    write_jsonl(path, rows)


def holds(path, rows):
    """Whether a file consists of these rows, byte by byte."""
    with open(path, "rb") as file:
        lines = itertools.zip_longest(file, as_jsonl(rows), fillvalue="")
        return all(found == line.encode() for found, line in lines)


def write_jsonl(path, rows):
    write_atomically(path, as_jsonl(rows))


# -----------------------------------------------------------------------------
# Files that ranks fill: FILE.rank0, FILE.rank1, ..., and FILE once they are merged


def rank_files(path):
    """The files of the ranks that are not merged yet."""
    return files_that_end(path, r"\.rank\d+")


def files_that_end(path, ending):
    """The files whose name is that of `path` with this ending, a pattern."""
    path = Path(path)
    return [file for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.*"))
            if re.fullmatch(ending, file.name.removeprefix(path.name))]


def files_with_rows(path):
    """The file, where it is there, and those of the ranks."""
    path = Path(path)
    return [path, *rank_files(path)] if path.exists() else rank_files(path)


def whole_rows(path):
    """The rows of the file and of the ranks' files, without half lines that a kill left."""
    for file in files_with_rows(path):
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row


def refuse_unfinished(path):
    """Stop if the run that makes the file at `path` has not finished it."""
    parts = rank_files(path)
    if parts:
        raise SystemExit(f"{path}: found {parts[0].name} beside it, so the run that makes this"
                         " file has not finished, expected all of its rows; rerun its command"
                         f" (python colbench.py show {parts[0]} prints what there is)")


class ResumableJsonl:
    """A JSONL file that ranks fill row by row, that survives a kill at any moment and ends sorted.

    `key(row)` identifies a row. Each rank appends to a file of its own, FILE.rank0 and so on, since
    network file systems cannot append to one file from several machines. At the end, the leader
    merges them into FILE, which therefore exists only when it is finished. At the start, it merges
    all that an unfinished run left, with any number of ranks, into FILE.rank0. Rows with an `error`
    are dropped, to be made again. A finished FILE stays until the leader's first new row without an
    error, or until `finish`.
    """

    def __init__(self, path, key, process):
        self.path, self.key, self.process = Path(path), key, process
        self.part = Path(f"{path}.rank{process.rank}")
        self.lock = threading.Lock()  # threads append rows
        self.failed_again = []  # rows with an error, as long as FILE of an earlier run stays
        if process.leads:
            for half in files_that_end(path, r"(\.rank\d+)?\.tmp\d+"):
                half.unlink()  # a merge that a kill has cut
            if rank_files(path):
                self._merge(self._sound_rows().values(), self.part)
        process.barrier()  # nobody reads or appends before the leader has tidied up
        self.rows = self._sound_rows()
        process.barrier()  # nobody appends before all have read

    def _sound_rows(self):
        """Key -> row, of all rows without an error."""
        rows = whole_rows(self.path)
        return {self.key(row): row for row in rows if not row.get("error")}

    def missing(self, keys):
        """This rank's share of those `keys` whose row is not there."""
        missing = [key for key in keys if key not in self.rows]
        return missing[self.process.rank::self.process.world]

    def append(self, row):
        with self.lock:
            if self.path.exists():  # finished by an earlier run
                if row.get("error"):
                    self.failed_again.append(row)
                    return
                if self.process.leads:
                    write_jsonl(self.part, self.rows.values())
                    self.path.unlink()
            self._write(row)

    def _write(self, row):
        line = (json.dumps(row) + "\n").encode()
        with open(self.part, "ab", buffering=0) as file:
            if file.write(line) != len(line):
                raise OSError(f"{self.part}: only part of a line could be written")

    def finish(self, order):
        """Merge the ranks' files, in the order of the keys in `order`: same command, same bytes.

        The leader gets the rows, other ranks none. A row that is missing is an error.
        """
        self.process.barrier()  # no rank has given up: from here on, FILE is made anew
        self.rows = {}  # the leader reads all of them again, and memory holds them once
        for row in self.failed_again:
            self._write(row)
        self.process.barrier()
        ordered = []
        if self.process.leads:
            # of two rows with one key, a failed one and its retry, the later one counts
            rows = {self.key(row): row for row in whole_rows(self.path)}
            missing = [key for key in order if key not in rows]
            if missing:
                raise SystemExit(f"{self.path}: found no row of {missing[0]} ({len(missing)} of"
                                 f" {len(order)} are missing), expected all; rerun the same command"
                                 " to make them")
            ordered = [rows[key] for key in order]
            self._merge(ordered, self.path)
        self.process.barrier()
        return ordered

    def _merge(self, rows, target):
        """Write `rows` to `target`, and remove the other files, which they came from."""
        write_jsonl(target, rows)
        for file in files_with_rows(self.path):
            if file != target:
                file.unlink()
