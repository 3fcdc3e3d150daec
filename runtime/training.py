"""All of a training run but the method: its processes, its directory, its log, its saved states.

`Run` computes no loss and knows neither pairs nor rows. Some of its messages quote metrics, such as
train/margin. `train` in train_critic.py shows how a trainer uses it.
"""

import array
import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from runtime.checkpoints import (
    close_complete, is_complete, load_state, remove_leftovers, save_checkpoint, save_state)
from runtime.files import whole_rows, write_atomically, write_jsonl
from runtime.flags import COST_FLAGS
from runtime.models import refuse_untrainable
from runtime.processes import join_processes
from runtime.record import RESUME, claim_output, run_files

HARDLY_MOVED = 1e-3  # a margin starts at 0, and a model that has learnt its pairs is far above


class Run:
    """One training run. It is `complete` if an earlier run of its command left nothing to train."""

    def __init__(self, args, inputs, may_differ=()):
        self.process = join_processes(training=True)
        self.rank = self.process.rank
        self.world = self.process.world
        self.device = self.process.device
        self.output = Path(args.output)
        self.log_file = self.output / "metrics.jsonl"
        self.max_steps = args.max_steps
        self.save_seconds = 60 * args.save_minutes
        self.grown_record = claim_output(  # for `resume` to write, if --max_steps has grown
            self.output / "run.json", vars(args), [*inputs, *run_files(args.model)],
            self.process, (*COST_FLAGS, *may_differ))
        self.complete = is_complete(self.output, args.max_steps, self.process)
        if self.complete:
            close_complete(self.output, self.process)
        else:
            refuse_untrainable(args.model, args.max_length)
            if args.batch_size < self.world:
                self.say(f"--batch_size {args.batch_size} is less than the {self.world} processes,"
                         " so in every step some of them only repeat the work of another")
        self.totals = {}  # name -> weighted sum over what this rank has added since the last log
        self.saved = time.monotonic()  # when the last state was saved
        self.began = time.perf_counter()  # when this step began
        self.planned = 0  # steps of the whole training
        self.last = 0  # the step at which this run ends, earlier with --max_steps
        self.stopping = False  # whether Ctrl-C or SIGTERM has asked for the end of this run
        self.bar = None
        self.handlers = {}  # signal -> what it did before the first step

    def say(self, text):
        self.process.say(text)

    def watch(self, items, unit):
        return self.process.watch(items, unit, "reading")

    def remove(self, *patterns):
        """Remove files of an earlier run from the output."""
        if self.process.leads:
            for pattern in patterns:
                for path in self.output.glob(pattern):
                    path.unlink()

    # -------------------------------------------------------------------------
    # Ranks

    def share(self, batch, size):
        """Parts of a batch for this rank, at most `size` entries each, and the weight of each part.

        Every rank gets the same number of parts. The loop in train_critic.py says what weights and
        repeated entries are for.
        """
        at_once = size * self.world
        for start in range(0, len(batch), at_once):
            part = batch[start:start + at_once]
            first = len(part) * self.rank // self.world
            end = len(part) * (self.rank + 1) // self.world
            if first < end:
                yield part[first:end], self.world
            else:
                yield part[:1], 0

    def map(self, function, items, size, description):
        """The result of each item; the ranks share the items.

        `function` takes a list of at most `size` items, and returns as many results.
        """
        found = {}  # index of an item -> its result
        parts = list(self.share(range(len(items)), size))
        for mine, _ in self.process.watch(parts, "batch", description):
            found.update(zip(mine, function([items[index] for index in mine]), strict=True))
        found = self.gather(found)
        return [found[index] for index in range(len(items))]

    def gather(self, mine):
        """One dictionary with what all ranks have found."""
        parts = [None] * self.world
        torch.distributed.all_gather_object(parts, mine)
        return {key: value for part in parts for key, value in part.items()}

    @contextlib.contextmanager
    def scoring(self, model):
        """Eval mode without gradients; afterwards train mode, with the weights sharded again.

        FSDP2 may keep gathered weights after a forward, to save the backward an all-gather; no
        backward follows here.
        """
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train()
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()

    def refuse_unequal_data(self, data):
        """Stop if ranks hold different data, lists of token ids, from other copies of the files."""
        digest = hashlib.sha256()
        for ids in data:
            digest.update(array.array("q", [len(ids), *ids]).tobytes())
        digests = self.gather({self.rank: digest.hexdigest()})  # rank -> digest
        others = [rank for rank, found in digests.items() if found != digests[0]]
        if others:
            raise SystemExit(f"found other training data on the ranks {others} than on rank 0,"
                             " expected the same everywhere; give all nodes the same input files"
                             " and tokenizer")

    # -------------------------------------------------------------------------
    # Steps

    def limit(self, planned):
        """The number of steps to take: those `planned`, or fewer with --max_steps."""
        self.planned, self.last = planned, min(self.max_steps or planned, planned)
        return self.last

    def resume(self, model, optimizer):
        """The step to begin with: 0, or where the last saved state of this command ends."""
        start = load_state(self.output / RESUME, model, optimizer, self.process)
        if self.process.leads:
            # nothing may open the checkpoint of fewer steps any more
            (self.output / "config.json").unlink(missing_ok=True)
            if self.grown_record:
                write_atomically(self.output / "run.json", self.grown_record)
            # steps after the state are taken again; a kill may have left half a line
            if self.log_file.exists():
                rows = whole_rows(self.log_file)
                write_jsonl(self.log_file, [row for row in rows if row["step"] < start])
        self.process.barrier()  # nodes read at different speeds; from here on, no rank waits long
        self.bar = tqdm(initial=start, total=self.last, unit="step", **self.process.bar_args)
        self.began = time.perf_counter()
        self.handlers = {number: signal.signal(number, self._stop_after_step)
                         for number in (signal.SIGINT, signal.SIGTERM)}
        return start

    def _stop_after_step(self, signal_number, frame):
        if self.stopping:
            if signal_number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # torchrun passes a SIGTERM on that systemd, say, has sent to all processes
        self.stopping = True
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once on each node
            tqdm.write("Stopping after this step, with its state saved; Ctrl-C again: at once",
                       sys.stderr)

    def add(self, group, metrics, weight):
        """Add metrics of a part of a batch, name -> (B,), to what `log` writes as group/name.

        For their mean, `weight` is that of `share`, divided by the length of the whole batch.
        """
        for name, values in metrics.items():
            key = f"{group}/{name}"
            total = weight * values.detach().double().sum()
            self.totals[key] = self.totals.get(key, 0) + total

    def log(self, step, metrics):
        """A line of metrics.jsonl, with what was added; numbers that are not finite end the run.

        Returns its means, the same on all ranks.
        """
        sums = torch.stack(list(self.totals.values()))
        torch.distributed.all_reduce(sums, group=self.process.group)
        means = sums / self.world  # since the weight from `share` is the number of ranks
        line = dict(zip(self.totals, means.tolist(), strict=True))
        self.totals = {}
        for name, value in metrics.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value  # of FSDP
            line[name] = float(value)
        if not all(map(math.isfinite, line.values())):
            raise SystemExit(f"step {step}: found {line}, expected finite numbers; lower --lr, with"
                             " a new --output")
        if self.process.leads:
            line = {"step": step} | line | {"time/step": time.perf_counter() - self.began}
            with open(self.log_file, "a") as file:
                file.write(json.dumps(line) + "\n")
            shown = {name: f"{line[f'train/{name}']:.3g}" for name in ("loss", "accuracy", "margin")
                     if f"train/{name}" in line}
            self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        self.began = time.perf_counter()
        return line

    def save_state_if_due(self, done, model, optimizer):
        """Save what a resumed run needs: every --save_minutes, and when --max_steps or a signal
        ends the run. After a signal, it raises KeyboardInterrupt.
        """
        if done == self.last:  # `save` follows, which minds a signal
            due, stopping = self.last < self.planned, False
        else:
            due, stopping = self._due_and_stopping()
        if due or stopping:
            save_state(self.output / RESUME, done, model, optimizer, self.process)
            self.saved = time.monotonic()
            self.began = time.perf_counter()  # the next step begins after the save
        if stopping:
            raise KeyboardInterrupt

    def _due_and_stopping(self):
        """Whether a state is due by the leader's clock; whether a signal has reached any rank.

        The answer is the same on all ranks, so that all save after the same step.
        """
        due = self.process.leads and time.monotonic() - self.saved >= self.save_seconds
        asked = torch.tensor([due, self.stopping], dtype=torch.int32, device=self.device)
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX, self.process.group)
        due, stopping = map(bool, asked.tolist())
        return due, stopping

    def save(self, model, tokenizer, agent_prompt=None):
        """A checkpoint that from_pretrained opens; the state of an unfinished run stays.

        After a signal in the last step, or meanwhile, it raises KeyboardInterrupt at its end.
        """
        self.bar.close()
        save_checkpoint(self.output, model, tokenizer, agent_prompt, self.process)
        if self.process.leads:
            state = self.output / RESUME
            if self.last == self.planned:
                if state.is_dir():
                    state.rename(self.output / f"{RESUME}.done")  # never half a state
                remove_leftovers(self.output)
            print(f"{self.output}: the checkpoint{self._last_metrics()}")
            if state.is_dir():
                size = sum(path.stat().st_size for path in state.iterdir())
                print(f"{state}: the state from which a larger --max_steps goes on"
                      f" ({size / 1e9:.2g} GB)")
        self.process.barrier()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        _, stopping = self._due_and_stopping()
        if stopping:  # a critic would go on and rank
            raise KeyboardInterrupt

    def _last_metrics(self):
        """In words, the last step's numbers, and a warning if the model hardly moved."""
        lines = [json.loads(line) for line in self.log_file.read_text().splitlines()]
        words = f", after {len(lines)} steps"
        for name, value in lines[-1].items():
            if name.startswith(("train/", "holdout/")):
                words += f"; {name} {value:.3g}"
        if len(lines) == 1:
            words += " (the train/ numbers are from before this step)"
        if hardly_moved(lines):
            words += ": the model hardly moved; raise --lr, or train for more steps"
        return words


def hardly_moved(lines):
    """Whether the margins in the lines of a log show that the model has learnt next to nothing.

    Accuracy cannot show this: a difference in the last digit is enough to rank all pairs right.
    """
    margin = lines[-1].get("holdout/margin")
    if margin is None:
        # a train/margin is that before its step, so the first ones are near 0 in any run
        margins = [line["train/margin"] for line in lines[-20:] if "train/margin" in line]
        if len(margins) < 20:
            return False
        margin = sum(margins) / 20
    return abs(margin) < HARDLY_MOVED
