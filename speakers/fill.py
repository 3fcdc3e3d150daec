"""Rows of a file, made side by side by jobs that ask speakers."""

import sys
import threading
import traceback

from tqdm import tqdm

from runtime.progress import Progress
from speakers.interface import stop_if_given_up
from speakers.pool import run

FIRST_BUG = threading.Lock()


def fill(store, jobs, keys, work, speakers, in_flight):
    """Append work(job, on_turn) of each job as soon as it is there, `in_flight` at a time.

    `keys` are those of all rows that the file will have. Jobs stop if a speaker is given up.
    """
    waiting = (job for job in jobs if not any(speaker.given_up for speaker in speakers))
    with Progress(store.rows.values(), len(keys), store.process) as progress:

        def work_and_keep(job):  # in the job's thread: a kill loses nothing that was finished
            row = work(job, progress.turn)
            store.append(row)
            progress.row(row)

        for _ in run(work_and_keep, waiting, in_flight):
            pass  # the jobs' threads have stored their rows
    if any(speaker.given_up and not speaker.has_answered for speaker in speakers):
        # what ended without, say, a human's reply must not block a corrected --human
        store.discard(set(keys) - store.rows.keys())
    stop_if_given_up(*speakers)


def show_bug():
    """Print the traceback of an exception that nobody expected, of the first one alone."""
    if FIRST_BUG.acquire(blocking=False):  # it is never released
        tqdm.write(traceback.format_exc(), file=sys.stderr)
