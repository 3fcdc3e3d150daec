"""The bar of a run that makes rows, and the sentence that sums them up."""

import threading
from collections import Counter

from tqdm import tqdm

from runtime.text import counted


class Outcome:
    """Mean success and mean reward of rows, where they have them, and how many rows failed."""

    def __init__(self, rows=()):
        self.counts = Counter()
        for row in rows:
            self.add(row)

    def add(self, row):
        self.counts["failed"] += bool(row.get("error"))
        for name in ("success", "reward"):
            if row.get(name) is not None:
                self.counts[name] += row[name]
                self.counts[f"with {name}"] += 1

    def __str__(self):
        means = [f"{name} {self.counts[name] / self.counts[f'with {name}']:.3f}"
                 for name in ("success", "reward") if self.counts[f"with {name}"]]
        return ", ".join([*means, f"{self.counts['failed']} failed"])


class Progress:
    """The leader's bar. Threads tell it of rows, and of turns, which move it between rows."""

    def __init__(self, rows, total, process):
        self.lock, self.outcome, self.turns = threading.Lock(), Outcome(rows), 0
        self.step = process.world  # the other ranks are about as fast
        self.bar = tqdm(total=total, initial=len(rows), miniters=0, **process.bar)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()

    def turn(self):
        with self.lock:
            self.turns += 1
            self._draw(0)

    def row(self, row):
        with self.lock:
            self.outcome.add(row)
            self._draw(self.step)

    def _draw(self, rows):
        turns = [counted(self.turns, "turn")] if self.turns else []
        self.bar.set_postfix_str(", ".join([str(self.outcome), *turns]), refresh=False)
        self.bar.update(rows)
