"""Rank candidates with a critic: the loop over states, and the file that all processes fill."""

from pathlib import Path

from formats.read import read_candidates, state_key
from runtime.processes import join_processes
from runtime.record import edited_since, open_rows, read_run


def refuse_unrankable(path, privileged):
    """Refuse candidates that a critic could not rank, before it is trained.

    privileged(task) gives what the critic sees of a task, and exits if the task lacks it.
    """
    states, _ = read_candidates(path)
    for state in states:
        privileged(state["task"])


def rank_states(args, critic_class, **flags):
    """Write --ranked: the states of --candidates, with advantages from the critic in --output.

    `flags` are flags of the ranking that only this class of critics takes.
    """
    process = join_processes()
    path = args.ranked or Path(args.output, "ranked.jsonl")
    record = Path(args.output, "run.json")
    run = read_run(record)
    states, omitted = read_candidates(args.candidates)
    recorded = flags | {"candidates": args.candidates, "critic": args.output, "dtype": args.dtype}
    inputs = [args.candidates, record]
    # rows are appended one by one, so a killed command goes on where it stopped
    store = open_rows(path, recorded, inputs, process, state_key, flag="--ranked")
    for script in edited_since(run):
        process.say(f"{args.output}: {script} was edited since this critic was trained; the"
                    " advantages are those of the code as it is now")
    jobs = {state_key(state): state for state in states}
    mine = store.missing(jobs)
    if mine:  # a model is loaded only for states that are left to rank
        critic = critic_class(args.output, process.device, args.dtype, **flags)
        for key in process.watch(mine, "state", "ranking"):
            state = jobs[key]
            advantages = critic.advantages(state["task"], state["messages"], state["candidates"],
                                           state["finished"])
            store.append(state | {"advantages": advantages, "ranker": str(args.output).rstrip("/")})
    ranked = store.finish(jobs)
    if process.leads:
        too_long = sum(state["advantages"] is None for state in ranked)
        print(f"{path}: {len(ranked)} ranked states ({omitted} failed ones omitted); {too_long}"
              " have no advantages, because they are too long for the critic (--max_length"
              f" {run['flags']['max_length']})")
