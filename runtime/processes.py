"""The processes of a script: those that torchrun started, their groups, and how they stop."""

import ctypes
import datetime
import errno
import functools
import os
import resource
import signal
import sys
import typing

from tqdm import tqdm

from runtime.text import counted, harmless


class Process(typing.NamedTuple):
    rank: int
    world: int
    device: str | None
    group: typing.Any = None  # of the collectives within a training step, see `join_processes`

    @property
    def leads(self):
        return self.rank == 0

    @property
    def bar_args(self):
        """Options of tqdm: the leader's bar alone, which a log file gets once a minute."""
        interval = 0.1 if sys.stderr.isatty() else 60
        return {"disable": not self.leads, "mininterval": interval}

    def watch(self, items, unit, description, total=None):
        """The items, with the leader's bar for who waits."""
        return tqdm(items, total=total, unit=unit, desc=description, **self.bar_args)

    def say(self, text):
        """Print a text once, on the leader."""
        if self.leads:
            print(text)

    def barrier(self):
        if self.world > 1:
            import torch.distributed

            torch.distributed.barrier()

    def from_leader(self, value):
        """The value that the leader has, on every rank."""
        if self.world == 1:
            return value
        import torch.distributed

        values = [value]
        torch.distributed.broadcast_object_list(values)
        return values[0]


PARENT = os.getppid()  # when it dies, this process gets another parent
SIGNAL_OF_PARENTS_DEATH = 1  # option of prctl

# Within a training step no rank waits for long, so one that is silent for this many minutes hangs.
# With nccl, torch's watchdog then ends the process and says which collective timed out.
STEP_MINUTES = 30
OPEN_FILES = 4096


def own_rank():
    """The rank that torchrun gave this process; 0 if it is alone, whatever a cluster has set."""
    alone = (os.environ.get("WORLD_SIZE") or "1") == "1"
    return 0 if alone else int(os.environ.get("RANK", 0))


def join_processes(training=False):
    """This process among those that torchrun started.

    With `training`, it also has the group of training steps, even if it is the only process.
    """
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world > 1 and "RANK" not in os.environ:
        raise SystemExit(f"found WORLD_SIZE {world} without RANK, expected both, as torchrun sets"
                         " them, or neither; start the script with torchrun, or unset WORLD_SIZE")
    rank = own_rank()
    if world == 1 and not training:
        return Process(rank, world, None)
    import torch

    device = own_device(world)
    if not torch.distributed.is_initialized():
        join_group(world)
    group = None
    if training:
        group = torch.distributed.new_group(
            timeout=datetime.timedelta(minutes=STEP_MINUTES),
            backend="gloo" if device == "cpu" else "nccl")
    return Process(rank, world, device, group)


def own_device(world):
    """Where this process computes: on a GPU of its own, or on the CPU if the machine has no GPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    index = int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else 0
    gpus = torch.cuda.device_count()
    if index >= gpus:
        raise SystemExit(f"found {counted(gpus, 'GPU')} for more processes, expected one for"
                         f" each; give torchrun --nproc_per_node {gpus}, or set"
                         " CUDA_VISIBLE_DEVICES= to compute on the CPU, or LOCAL_RANK=0 if the"
                         " cluster shows each process its own GPU alone (srun --gpus-per-task)")
    device = f"cuda:{index}"
    torch.cuda.set_device(device)
    return device


def join_group(world):
    """Join torch's default group, by which ranks wait for each other outside of training steps."""
    import torch

    # inside init_process_group Python handles no signal, so only SIGKILL ends this process
    end_with_parent(signal.SIGKILL)
    # between steps, ranks may finish hours apart; torchrun notices one that dies
    options = {"timeout": datetime.timedelta(days=7)}
    if world == 1:  # also where a cluster sets RANK and a port, which several scripts may share
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of other nodes; this needs no network
        options |= {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **options)
    end_with_parent(signal.SIGTERM)


def end_with_parent(number):
    """Let Linux send this signal once torchrun has died, even if it was killed.

    Otherwise its processes would go on alone, or wait for each other for days.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(SIGNAL_OF_PARENTS_DEATH, int(number), 0, 0, 0)
        if os.getppid() != PARENT:
            raise SystemExit("torchrun has ended")


def allow_connections():
    """Raise the limit of open files, such as a server's connections: macOS begins with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def launch(main, args,
           advice="What was finished is on disk; rerun the same command to resume."):
    """Run a script's `main`; what stops it from outside becomes a sentence with this advice."""
    # shells start background jobs with SIGINT ignored, so it is set here, too
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.default_int_handler)  # raises KeyboardInterrupt
    sys.unraisablehook = functools.partial(stop_or_report, advice)
    if sys.stderr is None:  # closed (2>&-); what is opened next would take its number, 2
        sys.stderr = open(os.devnull, "w")
        os.set_inheritable(sys.stderr.fileno(), True)  # so, too, in the judge's workers
    allow_connections()
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has it not
        sys.stdout.reconfigure(errors="backslashreplace")  # for what its encoding lacks
    try:
        main(args)
        print(end="", flush=True)  # a closed pipe shows here, not at the exit
        leave_processes()
    except SystemExit as stop:
        if isinstance(stop.code, str):  # it may quote a file
            raise SystemExit(harmless(stop.code)) from None
        raise
    except KeyboardInterrupt:
        end_stopped(advice)
    except BrokenPipeError:
        os._exit(141)  # whoever read the output, such as `head`, has seen enough
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise SystemExit("found no room for another open file or connection"
                             f" ({error.strerror}), expected some for each dialogue; lower"
                             f" --batch_size, or raise the limit (ulimit -n). {advice}") from None
        raise SystemExit(f"The disk or a file failed: {error}. Mend this, or choose another"
                         f" --output. {advice}") from None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            end_stopped(advice)  # a second signal came while a lock handled the first
        message = str(error) or "out of memory."
        if "Connection closed by peer" in message or "Connection reset by peer" in message:
            raise SystemExit("Another process of this run has ended; its message says why."
                             f" {advice}") from None
        if "imed out waiting" in message:
            raise SystemExit("Another process of this run has been silent for longer than a"
                             f" training step may wait ({STEP_MINUTES} minutes); look at its"
                             f" machine. {advice}") from None
        if "connectFullMesh failed" in message or "Unable to find address" in message:  # of gloo
            raise SystemExit("found that the processes of this run cannot connect"
                             f" ({message.splitlines()[0]}), expected a network that joins them;"
                             " name it in GLOO_SOCKET_IFNAME (ip addr lists those of a node). Do"
                             f" not let torchrun restart them (--max_restarts). {advice}") from None
        if "can't start new thread" in message:
            raise SystemExit("found no room for another thread, expected one for each dialogue;"
                             " lower --batch_size, or raise the limits of processes and memory"
                             f" (ulimit -u, -v). {advice}") from None
        # the second is a CPU's, where memory is limited (ulimit -v, as some clusters set it)
        if "out of memory" not in message and "can't allocate memory" not in message:
            raise
        raise SystemExit(
            f"Out of memory: {message.splitlines()[0]} Lower --batch_size (collect.py) or"
            " --micro_batch_size (training), or rank with --packed, and rerun to resume; or train"
            " with a new --output and a lower --max_length, --lora_rank 16 or more GPUs."
        ) from None


def stop_or_report(advice, error):
    """Python calls this for an exception that it would ignore, such as one within a __del__."""
    if isinstance(error.exc_value, KeyboardInterrupt):
        end_stopped(advice)
    sys.__unraisablehook__(error)


def end_stopped(advice):
    """End a run that a signal has stopped, at once."""
    print(end="", flush=True)  # does nothing where stdout is closed
    print(f"\nStopped. {advice}", file=sys.stderr, flush=True)
    os._exit(130)  # sampling threads and process groups would keep a stopped run waiting


def leave_processes():
    """Wait for the other processes, which may still be at work, and leave their group."""
    if "torch" in sys.modules:
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
