r"""Train the policy from the advantages of turns, or by one of the paper's baselines (section 4.3).

How it works (`--method sweet`):
  1. each agent turn of a share of the tasks is a state; the policy samples 16 candidates for it;
  2. the critic, which sees the solution, gives every candidate its advantage (candidates.jsonl);
  3. pairs are drawn: one candidate from the better half, one from the worse (`make_pairs`);
  4. DPO on these pairs trains the policy, which sees only the dialogue (Eq. 4, `dpo_loss`).
`--method mtdpo` is DPO on whole dialogues, `rft` supervised training on successful ones, `sft` on
all that are given.

    python train_policy.py --method sweet --episodes episodes.jsonl --model toy/base \
        --critic critic --output sweet --lr 3e-4
    torchrun --nproc_per_node 8 train_policy.py --method sweet --episodes episodes.jsonl \
        --critic critic --model meta-llama/Llama-3.1-8B-Instruct --output policy

Reads: episodes, a critic's checkpoint directory. Writes: a checkpoint directory with run.json,
metrics.jsonl, candidates.sampled.jsonl and candidates.jsonl.
Letters in shapes: B pairs, R rows, S turns, N candidates.

To change the loss: `dpo_loss` and LOSSES; the pairs: `make_pairs`; which turns are states:
`sample_states`. Another method is a branch of `method_items`, its objective in `main`, and a line
of IGNORED.

Differences from the paper: none known. Differences from the official code: the reference model of
the ranking sees the solution, too (`--reference plain` is theirs); NLL trains agent tokens only;
candidates that were cut at the token limit get no end-of-turn token; the share of the data is whole
tasks after a shuffle; equal texts are never a pair.
"""

import functools
import math
import random
import typing
from pathlib import Path

import torch.nn.functional as F
from tqdm import tqdm

from colbench import (
    ResumableJsonl, custom_prompt, derive_seed, expect, group_by_task, load_episodes, read_jsonl,
    states_of)
from collect import interleave
from speakers import load_speaker
from speakers.interface import Request, SpeakerError, SpeakerSettings
from speakers.local import load_tokenizer, refuse_changing_positions
from speakers.names import is_server
from stages.flags import flag_parser, refuse_ignored, require_at_least
from stages.processes import join_processes, launch
from stages.record import claim_output, records
from toy.world import toy_model, toy_tokenizer
from train_critic import (
    COST_FLAGS, Critic, Item, Reader, TrainingLoop, accuracy, add_training_flags, candidate_rows,
    check_training_flags, critic_flags, dialogue_row, group_pairs, length_advice, loop_settings,
    mean_by_item, pair_episodes, pair_indices, pair_items, precompute_reference, reference_table,
    refuse_page_flags, succeeded, turn_sums)
from training.checkpoints import REFERENCE, is_complete
from training.ranks import check_same_items, load_trainable, shard, shard_settings

# -----------------------------------------------------------------------------
# The equation


LOSSES = {  # name -> loss of a pair, from h: the chosen minus the rejected implicit reward, (B,)
    "sigmoid": lambda h, beta: -F.logsigmoid(h),  # DPO
    "hinge": lambda h, beta: F.relu(1 - h),  # SLiC, arXiv 2305.10425
    "ipo": lambda h, beta: (h / beta - 1 / (2 * beta)) ** 2,  # arXiv 2310.12036, Eq. (17)
}


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta, loss="sigmoid"):
    """SWEET-RL Eq. (4), DPO: -log sigma(beta log pi/pi_ref(a+|o) - beta log pi/pi_ref(a-|o)).

    Log-probs of whole turns (or dialogues) under policy and reference, (B,) each. Returns the
    losses and the implicit rewards of both sides, (B,) each.
    """
    chosen_reward = beta * (chosen - reference_chosen)
    rejected_reward = beta * (rejected - reference_rejected)
    losses = LOSSES[loss](chosen_reward - rejected_reward, beta)
    return losses, chosen_reward, rejected_reward


# -----------------------------------------------------------------------------
# Pairs of candidates


def make_pairs(texts, advantages, pairing, count, draw):
    """Up to `count` (chosen, rejected) indices among the N candidates of a state.

    halves (paper): one of the better and one of the worse half by advantage; positive_vs_negative:
    one of positive and one of negative advantage, if the state has both; best_worst: from both
    ends inwards; random: any two, the better one chosen.

    A text sampled k times counts k times, so frequent texts are paired more often; all copies share
    the index of the first, so that it is encoded once. (A text that was once finished and once cut
    has two advantages.) Dropped are pairs of equal texts, of equal advantages, and with an empty
    text, which has no words to learn from.
    """
    first = {}
    for index, candidate in enumerate(zip(texts, advantages, strict=True)):
        first.setdefault(candidate, index)
    sampled = [first[candidate] for candidate in zip(texts, advantages, strict=True)]
    ranked = sorted(sampled, key=lambda index: -advantages[index])
    half = len(ranked) // 2  # of an odd number, the middle one is in neither half
    better, worse = ranked[:half], ranked[len(ranked) - half:]
    if pairing == "halves":
        pool = [(a, b) for a in better for b in worse]
    elif pairing == "positive_vs_negative":
        pool = [(a, b) for a in ranked for b in ranked if advantages[a] > 0 > advantages[b]]
    elif pairing == "best_worst":
        pool = list(zip(better, reversed(worse), strict=True))
    elif pairing == "random":
        pool = [(a, b) for rank, a in enumerate(ranked) for b in ranked[rank + 1:]]
    else:
        raise ValueError(f"found pairing {pairing!r}, expected one of {', '.join(PAIRINGS)}")
    pool = [(a, b) for a, b in pool if advantages[a] > advantages[b]
            and texts[a].strip() and texts[b].strip() and texts[a] != texts[b]]
    if pairing == "best_worst":
        return pool[:count]
    return draw.sample(pool, min(count, len(pool)))


PAIRINGS = ("halves", "positive_vs_negative", "best_worst", "random")


class PairSettings(typing.NamedTuple):
    pairing: str
    pairs_per_state: int
    share: str
    seed: int


def pairs_of_state(state, settings):
    """The (chosen, rejected) indices of its candidates, whatever other states there are."""
    draw = random.Random(derive_seed(settings.seed, "pairs", *candidate_key(state)))
    return make_pairs(state["candidates"], state["advantages"], settings.pairing,
                      settings.pairs_per_state, draw)


def candidate_items(reader, ranked_states, settings):
    """(items, report) of ranked candidates: pairs of rows that share their state's prompt."""
    items, too_long, turns_dropped = [], 0, 0
    for state in ranked_states:
        pairs = pairs_of_state(state, settings)
        if not pairs:
            continue
        used = sorted({index for pair in pairs for index in pair})
        candidates = [(state["candidates"][i], state["finished"][i]) for i in used]
        rows = candidate_rows(reader, state["messages"], candidates)
        if rows is None:
            too_long += len(pairs)
            continue
        turns_dropped += rows[0].dropped
        row_of = dict(zip(used, rows, strict=True))
        for group in group_pairs(pairs, settings.share):
            members = sorted({index for pair in group for index in pair})
            items.append(Item([row_of[index] for index in members],
                              [(members.index(a), members.index(b)) for a, b in group]))
    return items, {"states": len(ranked_states), "pairs": sum(len(item.pairs) for item in items),
                   "pairs_too_long": too_long, "turns_dropped": turns_dropped}


# -----------------------------------------------------------------------------
# Objectives


class DpoSettings(typing.NamedTuple):
    beta: float
    nll: float
    loss: str = "sigmoid"


def dpo_objective(model, items, settings):
    """DPO on the items' pairs of rows: turns, or whole dialogues. All metrics (items,)."""
    rows = [row for item in items for row in item.rows]
    chosen, rejected = pair_indices(items, model.device)
    sums, counts = turn_sums(model, rows)
    reference = reference_table(rows, sums).sum(1)
    logprob, length = sums.sum(1), counts.sum(1).clamp(min=1)
    losses, better, worse = dpo_loss(logprob[chosen], logprob[rejected],
                                     reference[chosen], reference[rejected],
                                     settings.beta, settings.loss)
    nll = -logprob[chosen] / length[chosen]
    metrics = {"train/loss": losses + settings.nll * nll,
               "train/accuracy": accuracy(better - worse), "train/margin": better - worse,
               "train/chosen_reward": better, "train/nll": nll}
    return {name: mean_by_item(values, items) for name, values in metrics.items()}


def supervised_objective(model, items, mean_length):
    """Negative log-likelihood of each dialogue over the mean agent tokens of a dialogue, (items,).

    Every token thus has the same weight. A mean over each dialogue's own tokens would teach more
    from short ones, and with them to stop early.
    """
    sums, _ = turn_sums(model, [row for item in items for row in item.rows])
    return {"train/loss": -sums.sum(1) / mean_length}


# -----------------------------------------------------------------------------
# The run


def main(args):
    process = join_processes(training=True)
    output = Path(args.output)
    episodes, failed = load_episodes(args.episodes, args.agent_prompt)
    refuse_page_flags(args, episodes)
    tokenizer = open_tokenizer(args, episodes)
    reader = Reader(tokenizer, "none", args.max_length)  # the policy never sees the solution
    # fail now rather than after hours of sampling: a critic, or a chat template, that does not fit
    if args.critic:
        check_critic(args)
    if episodes:
        dialogue_row(reader, max(episodes, key=lambda episode: episode["turns"]))
    inputs = [*args.episodes, *args.privileged_episodes, args.candidates, args.agent_prompt,
              *records(args.model, args.critic)]
    claim_output(output / "run.json", vars(args), inputs, process,
                 (*COST_FLAGS, "sampling_batch_size", "stop_after"))
    if is_complete(output, args.max_steps, process):
        return

    if args.stop_after == "sampling":  # the rest then finds the candidates on disk
        rows = sample_states(args, episodes, process)
        if process.leads:
            print(f"{output}: candidates of {len(rows)} states; give the same command without"
                  " --stop_after to rank them and to train")
        return

    # 1. what the policy learns from
    items, report = method_items(args, reader, episodes, process)
    if process.leads:
        counts = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in report.items())
        print(f"{len(episodes)} episodes ({failed} failed ones omitted): {counts}")
    if not items:
        raise SystemExit(f"{' '.join(args.episodes)}: found nothing for --method {args.method} to"
                         " learn from; expected mixed outcomes (mtdpo), successes (rft) or states"
                         " with candidates of different advantage (sweet)"
                         f"{length_advice(report, args.max_length)}")

    check_same_items(items, process)

    # 2. the model. No step has been taken yet: now it is pi_ref
    model = open_model(args, tokenizer, process)
    if args.method in ("sweet", "mtdpo"):
        precompute_reference(model, items, process, args.micro_batch_size, output / REFERENCE)
        settings = DpoSettings(args.beta, args.nll, args.loss)
        objective = functools.partial(dpo_objective, model, settings=settings)
    elif args.method in ("rft", "sft"):
        objective = functools.partial(supervised_objective, model,
                                      mean_length=mean_agent_tokens(items))
    else:
        raise ValueError(f"found no objective for method {args.method!r}")

    # 3. steps: Eq. (4), or maximum likelihood
    loop = TrainingLoop(model, items, loop_settings(args), process)
    for step, batch in loop.steps():
        loop.log_and_save(step, loop.optimise(batch, objective))
    loop.save(tokenizer, custom_prompt(episodes))


def method_items(args, reader, episodes, process):
    """The items of --method, and counts to print."""
    if args.method == "sweet":
        path = rank_candidates(args, episodes, process) if args.critic else args.candidates
        ranked, too_long = read_candidates(path)
        settings = PairSettings(args.pairing, args.pairs_per_state, args.share, args.seed)
        items, report = candidate_items(reader, ranked, settings)
        return items, report | {"states_too_long": too_long}
    if args.method == "mtdpo":
        groups = group_by_task(episodes)
        pairs = [pair_episodes(groups[task_id], args.pairs, args.margin, args.success_reward)
                 for task_id in sorted(groups)]
        return pair_items(reader, pairs, args.share)
    if args.method == "rft":
        successes = [episode for episode in episodes if succeeded(episode, args.success_reward)]
        return dialogue_items(reader, successes)
    if args.method != "sft":
        raise ValueError(f"found method {args.method!r}, expected one of {', '.join(IGNORED)}")
    items, report = dialogue_items(reader, episodes)
    if args.privileged_episodes:
        informed, _ = load_episodes(args.privileged_episodes)
        more, counts = dialogue_items(reader._replace(privileged="ground_truth"), informed)
        items += more
        report["privileged_episodes"] = counts["episodes"]
    return items, report


def rank_candidates(args, episodes, process):
    """The file of ranked candidates: sample the policy in every state, then ask the critic."""
    tasks = {episode["task"]["task_id"]: episode["task"] for episode in episodes}

    # candidates a ~ pi(. | o_t) of each state
    if args.candidates:
        rows = candidates_to_rank(args.candidates, tasks)
    else:
        rows = sample_states(args, episodes, process)

    # A(o_t, a, c) of each: `Critic.advantages` puts c in front and applies Eq. (3) to that one turn
    def open_critic():
        return Critic(args.critic, process.device, args.reference, args.dtype)

    return add_advantages(rows, tasks, open_critic, args.output, process)


def sample_states(args, episodes, process):
    """Rows of candidates for every turn of a share of the tasks."""
    groups = group_by_task(episodes)
    task_ids = sorted(groups)
    random.Random(derive_seed(args.seed, "fraction")).shuffle(task_ids)
    used = set(task_ids[:max(1, round(args.data_fraction * len(task_ids)))])
    episodes = [episode for episode in episodes if episode["task"]["task_id"] in used]
    if args.states == "successes":
        episodes = [episode for episode in episodes if succeeded(episode, args.success_reward)]
    states = list(states_of(episodes))
    if args.states_per_task:
        states = few_per_task(states, args.states_per_task, args.seed)

    if not states:
        raise SystemExit(f"{' '.join(args.episodes)}: found no state among the tasks of"
                         f" --data_fraction {args.data_fraction} with --states {args.states},"
                         " expected at least one; raise the fraction or take all states")

    settings = SpeakerSettings(args.sampler_model or args.model, args.temperature,
                               args.max_new_tokens, args.sampling_batch_size, process.device,
                               args.dtype)
    sampling = Sampling(args.sampler or args.model, settings, args.num_candidates, args.seed)
    return sample_candidates(states, sampling, args.output, process)


# The algorithm ends here. What follows is how candidates are made, stored and read.
# -----------------------------------------------------------------------------
# Candidates: sampled from the policy, ranked by the critic


class Sampling(typing.NamedTuple):
    speaker: str
    settings: SpeakerSettings
    num_candidates: int
    seed: int


def candidate_key(row):
    return row["task_id"], row["sample"], row["turn"]


def few_per_task(states, count, seed):
    """At most `count` states of each task, drawn with a seed: more tasks for the same sampling."""
    groups, chosen = {}, []
    for state in states:
        groups.setdefault(state[0]["task"]["task_id"], []).append(state)
    for task_id, group in groups.items():
        draw = random.Random(derive_seed(seed, "states", task_id))
        chosen += draw.sample(group, min(count, len(group)))
    return chosen


def sample_candidates(states, sampling, output, process):
    """The rows of candidates.sampled.jsonl: texts of the policy for each (episode, turn, messages).

    Ranks share the states; a rerun resumes.
    """
    keys = [(episode["task"]["task_id"], episode["sample"], turn) for episode, turn, _ in states]
    store = ResumableJsonl(Path(output) / "candidates.sampled.jsonl", candidate_key, process)
    counts = {len(row["candidates"]) for row in store.rows.values() if not row.get("error")}
    if counts - {sampling.num_candidates}:
        raise SystemExit(f"{store.path}: found {max(counts)} candidates of a state, expected"
                         f" --num_candidates {sampling.num_candidates}; give the same number")
    mine = []
    for episode, turn, messages in states[process.rank::process.world]:
        key = (episode["task"]["task_id"], episode["sample"], turn)
        if key not in store.rows:
            mine.append((key, messages))
        elif store.rows[key]["messages"] != messages:
            raise SystemExit(f"{store.path}: found other messages before turn {turn} of task"
                             f" {key[0]}, sample {key[1]} than in --episodes, expected candidates"
                             " of these episodes; give the file that belongs to them")
    failed = None
    if mine:
        policy = load_speaker(sampling.speaker, "agent", sampling.settings)

        def sample_state(key, messages):
            # "candidates": without it, turn 1 would repeat the draws of turn 0, turn 3 of turn 1
            seed = derive_seed(sampling.seed, "candidates", *key)
            reply = yield from policy.reply(Request(messages, sampling.num_candidates, seed))
            return key, messages, reply

        samples = sampling.settings.batch_size
        if not is_server(sampling.speaker):  # a local one sorts several batches of states by length
            samples *= 8
        in_flight = max(1, samples // sampling.num_candidates)
        # lazy: after the first failure (`failed`, below) no further state starts
        waiting = (sample_state(*state) for state in mine if not failed)
        for key, messages, reply in tqdm(interleave(waiting, in_flight), total=len(mine),
                                         unit="state", desc="sampling", **process.bar):
            row = dict(zip(("task_id", "sample", "turn"), key, strict=True))
            row["messages"] = messages
            if not isinstance(reply, SpeakerError):
                row["candidates"] = [utterance.text for utterance in reply]
                row["finished"] = [utterance.finished for utterance in reply]
            elif reply.refused:
                task_id, sample, turn = key
                print(f"task {task_id}, sample {sample}, turn {turn}: omitted, since the server"
                      f" refuses this state ({reply})")
                row["error"] = str(reply)
            else:
                failed = reply
                continue
            store.append(row)
        if policy.given_up and not policy.has_answered:
            store.discard({key for key, _ in mine})  # they must not block a corrected --sampler
    if failed:
        raise SystemExit(f"sampling candidates failed: {failed}; rerun the same command to resume")
    store.finish(keys)
    rows = [row for _, row in read_jsonl(store.path)]
    sampled = [row for row in rows if not row.get("error")]
    if not sampled:
        raise SystemExit(f"{store.path}: found that the server refuses all {len(rows)} states"
                         f" ({rows[0]['error']}), expected candidates of at least one; start it"
                         " with a longer context, or remove the file and give another --sampler")
    return sampled


def add_advantages(rows, tasks, open_critic, output, process):
    """The path of candidates.jsonl: `rows` with the critic's advantages; a rerun resumes."""
    store = ResumableJsonl(Path(output) / "candidates.jsonl", candidate_key, process)
    mine = [row for row in rows[process.rank::process.world]
            if candidate_key(row) not in store.rows]
    if mine:
        critic = open_critic()
    for row in tqdm(mine, unit="state", desc="ranking", **process.bar):
        advantages = critic.advantages(tasks[row["task_id"]], row["messages"], row["candidates"],
                                       row["finished"])
        store.append(row | {"advantages": advantages})
    store.finish([candidate_key(row) for row in rows])
    return store.path


def check_critic(args):
    flags = critic_flags(args.critic)
    if flags["head"] == "value" and args.reference == "plain":
        raise SystemExit("found --reference plain with a critic that has a value head, which needs"
                         " no reference model; omit --reference")
    if flags["head"] == "value" and args.pairing == "positive_vs_negative":
        raise SystemExit("found --pairing positive_vs_negative with a critic that has a value head,"
                         " whose zero means even odds of success; expected a critic of log-ratios,"
                         " or another --pairing")
    if flags["privileged"] == "none" and args.reference == "plain":
        raise SystemExit("found --reference plain with a critic that does not see the solution"
                         " either, so it changes nothing; omit --reference")


def open_tokenizer(args, episodes):
    if args.model == "toy":
        return toy_tokenizer(episodes)
    refuse_changing_positions(args.model, args.max_length)
    return load_tokenizer(args.model)


def open_model(args, tokenizer, process):
    """The model to train, sharded over the ranks; --model toy starts one from nothing."""
    if args.model == "toy":
        model = toy_model(tokenizer, args.seed)
    else:
        model = load_trainable(args, process)
    shard(model, process, shard_settings(args))
    return model


def mean_agent_tokens(items):
    tokens = sum(turn >= 0 for item in items for turn in item.rows[0].turn_index)
    return tokens / len(items)


def dialogue_items(reader, episodes):
    """One item per episode, for supervised training."""
    items, report = [], {"episodes": 0, "turns_dropped": 0, "too_long": 0}
    for episode in episodes:
        row = dialogue_row(reader, episode)
        if row is None:
            report["too_long"] += 1
            continue
        report["turns_dropped"] += row.dropped
        items.append(Item([row], []))
    report["episodes"] = len(items)
    return items, report


def read_candidates(path):
    """(rows, too long) of a file of ranked candidates, checked.

    The second is how many states were too long for the critic, and so have no advantages.
    """
    rows, too_long = [], 0
    for where, row in states_in(path):
        if "advantages" in row and row["advantages"] is None:
            too_long += 1
            continue
        check_candidates(row, where)
        rows.append(row)
    if not rows:
        raise SystemExit(f"{path}: found no ranked state and {too_long} that are too long for the"
                         " critic, expected a ranked one; if there are such, train the critic with"
                         " a greater --max_length")
    return rows, too_long


def candidates_to_rank(path, tasks):
    """The rows of a file of candidates, sampled or ranked by another critic, checked."""
    rows = []
    for where, row in states_in(path):
        if row.get("error"):  # the server refused this state
            continue
        check_candidates(row, where, ranked=False)
        if row["task_id"] not in tasks:
            raise SystemExit(f"{where}: found the task {row['task_id']!r}, which --episodes do not"
                             " have, expected candidates of these episodes; give both of one run")
        rows.append(row)
    if not rows:
        raise SystemExit(f"{path}: found no candidates, expected those of at least one state")
    return rows


def states_in(path):
    """(where, row) of each line of a file of candidates; the same state twice is an error."""
    ResumableJsonl.refuse_unfinished(path)
    seen = set()
    for where, row in read_jsonl(path):
        for key, kind in (("task_id", str), ("sample", int), ("turn", int)):
            expect(row, key, kind, where)
        if candidate_key(row) in seen:
            raise SystemExit(f"{where}: found the state {candidate_key(row)} a second time,"
                             " expected it once")
        seen.add(candidate_key(row))
        yield where, row


def check_candidates(row, where, ranked=True):
    """Refuse a row of other lists, or of lists of other things; advantages count if `ranked`."""
    lists = ["candidates", "finished"]
    if ranked:
        lists.append("advantages")
    lengths = {}
    for name in ("messages", *lists):
        lengths[name] = len(row[name]) if isinstance(row.get(name), list) else None
    same = len({lengths[name] for name in lists}) == 1
    if None in lengths.values() or not same:
        raise SystemExit(f"{where}: found lists of lengths {lengths}, expected messages, and as"
                         " many candidates as finished flags and advantages; make the file with"
                         " train_policy.py --method sweet")
    advantages = row["advantages"] if ranked else []
    sound = (all(type(a) in (int, float) and math.isfinite(a) for a in advantages)
             and all(isinstance(text, str) for text in row["candidates"])
             and all(type(finished) is bool for finished in row["finished"]))
    if not sound or not is_prompt(row["messages"]):
        raise SystemExit(f"{where}: found messages, candidates, finished flags or advantages of"
                         " another type, expected a dialogue that ends with the user, texts,"
                         " booleans and finite numbers; make the file with train_policy.py"
                         " --method sweet")


def is_prompt(messages):
    """Whether these are the messages of a dialogue in which the agent is to speak next."""
    roles = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return False
        roles.append(message.get("role"))
    if roles[:1] == ["system"]:
        roles = roles[1:]
    return roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


# -----------------------------------------------------------------------------
# Command line

SAMPLING_FLAGS = ("data_fraction", "states", "states_per_task", "num_candidates", "temperature",
                  "max_new_tokens", "sampling_batch_size", "sampler", "sampler_model", "stop_after")
SWEET_FLAGS = ("critic", "candidates", *SAMPLING_FLAGS, "reference", "pairs_per_state", "pairing")
IGNORED = {  # flags that would do nothing
    "sweet": ("pairs", "margin", "privileged_episodes"),
    "mtdpo": (*SWEET_FLAGS, "privileged_episodes"),
    "rft": (*SWEET_FLAGS, "pairs", "margin", "share", "beta", "nll", "loss",
            "privileged_episodes"),
    "sft": (*SWEET_FLAGS, "pairs", "margin", "success_reward", "share", "beta", "nll", "loss"),
}


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    parser.add_argument("--method", choices=tuple(IGNORED), required=True, help="see above")
    add_training_flags(parser, epochs=None, batch_size=None)
    add = parser.add_argument_group("DPO (sweet, mtdpo)").add_argument
    add("--loss", choices=tuple(LOSSES), default="sigmoid", help="of a pair (paper: sigmoid)")
    add = parser.add_argument_group("candidates (sweet)").add_argument
    add("--critic", help="checkpoint directory of train_critic.py")
    add("--candidates", help="candidates.jsonl of an earlier run: nothing is sampled, and nothing"
        " ranked either unless --critic is given, too")
    add("--data_fraction", type=float, default=0.1,
        help="share of the tasks whose turns are states")
    add("--states", choices=("all", "successes"), default="all",
        help="episodes whose turns are states; those of successes resemble the states that the"
        " trained policy meets")
    add("--states_per_task", type=int, help="draw this many states of each task (default: all)")
    add("--num_candidates", type=int, default=16, help="candidates of a state")
    add("--temperature", type=float, default=1.0, help="of the candidates")
    add("--max_new_tokens", type=int, default=1024, help="of a candidate")
    add("--sampling_batch_size", type=int, default=64,
        help="candidates sampled at the same time; with --sampler, give as many as the server"
        " can take")
    add("--sampler", help="server that samples for the policy, http://host:port/v1 (default:"
        " --model here)")
    add("--sampler_model", help="model name to ask that server for (default: --model)")
    add("--stop_after", choices=("sampling",),
        help="stop after sampling, for example to end the server; the same command without this"
        " flag ranks and trains")
    add("--reference", choices=("privileged", "plain"), default="privileged",
        help="whether the reference of the ranking sees the solution (paper) or not (official)")
    add = parser.add_argument_group("pairs of candidates (sweet)").add_argument
    add("--pairs_per_state", type=int, default=4, help="pairs drawn from a state's candidates")
    add("--pairing", choices=PAIRINGS, default="halves",
        help="which candidates are paired: halves: one of the better half with one of the worse"
        " (paper); positive_vs_negative: one of positive with one of negative advantage;"
        " best_worst: from both ends inwards; random: any two")
    add = parser.add_argument_group("supervised (sft)").add_argument
    add("--privileged_episodes", nargs="+", default=[],
        help="more episodes, trained on with the solution in front, so that a tiny model learns"
        " to read solutions")
    args = parser.parse_args(argv)
    if args.epochs is None:
        args.epochs = 4 if "critic" in IGNORED[args.method] else 1
    if args.batch_size is None:
        args.batch_size = 32 if args.method == "rft" else 8
    check_training_flags(parser, args)
    check_method_flags(parser, args)
    require_at_least(1, args, "pairs_per_state", "max_new_tokens", "sampling_batch_size",
                     "states_per_task")
    require_at_least(2, args, "num_candidates")  # a pair
    if not 0 < args.temperature < math.inf:
        raise SystemExit(f"found --temperature {args.temperature}, expected a number above 0, or"
                         " all candidates of a state would be equal")
    if not 0 < args.data_fraction <= 1:
        raise SystemExit(f"found --data_fraction {args.data_fraction}, expected more than 0 and at"
                         " most 1")
    return args


def check_method_flags(parser, args):
    refuse_ignored(parser, args, IGNORED[args.method], f"by --method {args.method}")
    if "critic" not in IGNORED[args.method]:  # it learns from ranked candidates
        if not args.critic and not args.candidates:
            raise SystemExit(f"--method {args.method}: found neither --critic nor --candidates,"
                             " expected a critic that ranks what is sampled, or candidates that are"
                             " ranked already")
        if args.candidates:
            refuse_ignored(parser, args, SAMPLING_FLAGS, "with --candidates")
        if not args.critic:
            refuse_ignored(parser, args, ("reference",), "without --critic")
        if not args.sampler:
            refuse_ignored(parser, args, ("sampler_model",), "without --sampler")
        elif not is_server(args.sampler):
            raise SystemExit(f"found --sampler {args.sampler}, expected the address of a server,"
                             " http://host:port/v1; to sample from --model itself, omit --sampler")
        if args.states != "successes":
            refuse_ignored(parser, args, ("success_reward",), "by --states all")
    if args.method == "mtdpo" and args.pairs != "success_vs_failure":
        refuse_ignored(parser, args, ("success_reward",), f"with --pairs {args.pairs}")
    if args.loss == "ipo" and args.beta == 0:
        raise SystemExit("found --beta 0 with --loss ipo, expected above 0: ipo divides by beta")
    if args.model == "toy" and args.method != "sft":
        raise SystemExit(f"found --model toy with --method {args.method}, expected --method sft, as"
                         " toy starts from random weights; give toy/base or another checkpoint")
    if args.model == "toy" and args.lora_rank:
        raise SystemExit("found --lora_rank with --model toy, whose weights are random; expected a"
                         " trained model to start from")


if __name__ == "__main__":
    launch(main, parse_args())
