r"""Train the policy from turn-level credit, or with one of the paper's baselines (SWEET-RL section 4.2).

How it works (`--method sweet`):
  1. each agent turn of a share of the tasks is a state; the policy samples 16 candidate turns for it;
  2. the critic, which sees the reference solution, gives every candidate its advantage (candidates.jsonl);
  3. pairs of one candidate of the better and one of the worse half are drawn (`make_pairs`);
  4. DPO on these pairs trains the policy, which sees only the dialogue (Eq. 4, `dpo_loss`).
`--method mtdpo` is DPO on whole dialogues, `rft` supervised training on successful ones, `sft` on all that are given.

    python train_policy.py --method sweet --episodes episodes.jsonl --model toy/base --critic runs/out/critic \
        --output runs/out/sweet
    torchrun --nproc_per_node 8 train_policy.py --method sweet --episodes episodes.jsonl --critic critic \
        --model meta-llama/Llama-3.1-8B-Instruct --output policy

Reads: episodes, a critic's checkpoint directory. Writes: a checkpoint directory with run.json, metrics.jsonl and
candidates.jsonl. Letters in shapes: B pairs, R rows of a forward, S turns, N candidates.

Differences from the paper: none known. Differences from the official code: the reference model of the ranking sees the
solution, too (`--reference plain` is theirs); NLL trains agent tokens only; candidates that were cut at the token limit
get no end-of-turn token; the share of the data is whole tasks after a shuffle; equal texts are never a pair.
"""

import functools
import math
import random
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from tqdm import tqdm

from colbench import (
    REFERENCE_NOTE,
    ResumableJsonl,
    SpeakerError,
    derive_seed,
    expect,
    load_speaker,
    load_tokenizer,
    read_jsonl,
)
from collect import claim_output, flag_parser, join_processes, launch, records, require_at_least
from train_critic import (
    TRAINING_COST_FLAGS,
    Critic,
    Item,
    add_training_flags,
    batch_pairs,
    check_training_flags,
    critic_flags,
    dialogue_row,
    group_by_task,
    is_complete,
    load_episodes,
    load_trainable,
    mean_by_item,
    packed_rows,
    pair_items,
    pairs_by_item,
    reference_tensor,
    save_checkpoint,
    score_rows,
    shard,
    states_of,
    succeeded,
    train,
    turn_scores,
    turns_in_order,
)

# -----------------------------------------------------------------------------
# The equations


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta):
    """SWEET-RL Eq. (4), DPO: -log sigma(beta log pi/pi_ref(a+|o) - beta log pi/pi_ref(a-|o)).

    Log-probs of whole turns (or dialogues) under policy and reference, (B,) each. Returns the losses and the implicit
    rewards of both sides, (B,) each.
    """
    chosen_reward = beta * (chosen - reference_chosen)
    rejected_reward = beta * (rejected - reference_rejected)
    return -F.logsigmoid(chosen_reward - rejected_reward), chosen_reward, rejected_reward


def make_pairs(texts, advantages, pairing, count, draw, min_gap=0.0):
    """Up to `count` (chosen, rejected) places among the N candidates of a state.

    halves (paper): one of the better and one of the worse half by advantage; best_worst: from both ends inwards;
    random: any two, the better one chosen. A text that came up k times is k candidates, so pairs follow the policy's own
    odds, but all k go by the first one's place, so that it is computed once. Equal texts or advantages are no pair, nor
    are advantages that differ by no more than `min_gap`: what the critic hardly tells apart teaches its noise. An empty
    text is in no pair, since it has no words to learn from.
    """
    first = {text: place for place, text in reversed(list(enumerate(texts)))}
    ranked = sorted((first[text] for text in texts), key=lambda place: -advantages[place])
    half = len(ranked) // 2
    if pairing == "best_worst":
        pool = list(zip(ranked[:half], reversed(ranked), strict=False))
    elif pairing == "halves":
        pool = [(a, b) for a in ranked[:half] for b in ranked[len(ranked) - half:]]
    else:
        pool = [(a, b) for number, a in enumerate(ranked) for b in ranked[number + 1:]]
    pool = [(a, b) for a, b in pool if advantages[a] - advantages[b] > min_gap and texts[a] and texts[b]]
    return pool[:count] if pairing == "best_worst" else draw.sample(pool, min(count, len(pool)))


# -----------------------------------------------------------------------------
# Candidates: sampled from the policy, ranked by the critic


def candidate_key(row):
    return row["task_id"], row["sample"], row["turn"]


def few_per_task(states, count, seed):
    """At most `count` states of each task, drawn by a seeded shuffle: more tasks for the same sampling."""
    groups = {}
    for state in states:
        groups.setdefault(state[0]["task"]["task_id"], []).append(state)
    return [state for task_id, group in groups.items() for state in
            random.Random(derive_seed(seed, "states", task_id)).sample(group, min(count, len(group)))]


def sample_candidates(states, keys, args, process):
    """The rows of candidates.sampled.jsonl: --num_candidates texts of the policy for each state."""
    store = ResumableJsonl(Path(args.output) / "candidates.sampled.jsonl", candidate_key, leader=process.leads)
    process.barrier()
    mine = [n for n in range(len(states)) if n % process.world == process.rank and keys[n] not in store.rows]
    if mine:
        policy = load_speaker(args.sampler or args.model, "agent", args.sampler_model, args.temperature,
                              args.max_new_tokens, args.sampling_batch_size, process.device, args.dtype)
    chunk = max(1, 8 * args.sampling_batch_size // args.num_candidates)  # the speaker batches states of like length
    for start in tqdm(range(0, len(mine), chunk), desc="sampling", **process.bar):
        numbers = mine[start:start + chunk]
        spoken = policy.speak([states[n][2] for n in numbers], args.num_candidates,
                              [derive_seed(args.seed, *keys[n]) for n in numbers])
        for n, said in zip(numbers, spoken, strict=True):
            if isinstance(said, SpeakerError):
                if said.refused:
                    print(f"{keys[n]}: left out, since the server refuses this state ({said})")
                    continue
                raise SystemExit(f"sampling candidates failed: {said}; give the same command again to go on")
            row = dict(zip(("task_id", "sample", "turn"), keys[n], strict=True)) | {"messages": states[n][2]}
            store.append(row | {"candidates": [u.text for u in said], "finished": [u.finished for u in said]})
    process.finish(store, keys)
    return [row for _, row in read_jsonl(store.path)]


def rank_candidates(episodes, args, process):
    """Sample and score the candidates of every state; ranks share the states, and a killed run goes on."""
    if args.states == "successes":
        episodes = [episode for episode in episodes if succeeded(episode, args.success_reward)]
    states = list(states_of(episodes))
    if args.states_per_task:
        states = few_per_task(states, args.states_per_task, args.seed)
    tasks = {episode["task"]["task_id"]: episode["task"] for episode in episodes}
    keys = [(episode["task"]["task_id"], episode["sample"], turn) for episode, turn, _ in states]
    rows = sample_candidates(states, keys, args, process)

    store = ResumableJsonl(Path(args.output) / "candidates.jsonl", candidate_key, leader=process.leads)
    process.barrier()
    mine = [row for row in rows[process.rank::process.world] if candidate_key(row) not in store.rows]
    critic = Critic(args.critic, process.device, args.reference, args.dtype) if mine else None
    for row in tqdm(mine, unit="state", desc="scoring", **process.bar):
        scores = critic.score(tasks[row["task_id"]], row["messages"], row["candidates"], row["finished"])
        store.append(row | {"advantages": scores})
    process.finish(store, keys)
    return store.path


def is_prompt(messages):
    """Whether these are the messages of a dialogue in which the agent is to speak next."""
    roles = [message.get("role") if isinstance(message, dict) and isinstance(message.get("content"), str) else None
             for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    return len(turns) % 2 == 1 and turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]


def read_candidates(path):
    """Ranked candidates of a file, checked; states that were too long to be scored have no advantages."""
    rows, seen = [], set()
    for where, row in read_jsonl(path):
        lengths = {name: len(row[name]) if isinstance(row.get(name), list) else None
                   for name in ("messages", "candidates", "finished", "advantages")}
        if row.get("advantages", 0) is None:
            continue
        if None in lengths.values() or not lengths["candidates"] == lengths["finished"] == lengths["advantages"]:
            raise SystemExit(f"{where}: found lists of lengths {lengths}, expected messages, and as many candidates as"
                             " finished flags and advantages; make the file with train_policy.py --method sweet")
        for key, kind in (("task_id", str), ("sample", int), ("turn", int)):
            expect(row, key, kind, where)
        sound = all(type(a) in (int, float) and math.isfinite(a) for a in row["advantages"]) and \
            all(isinstance(text, str) for text in row["candidates"]) and all(type(done) is bool for done in row["finished"])
        if not sound or not is_prompt(row["messages"]):
            raise SystemExit(f"{where}: found messages, candidates, finished flags or advantages of another type, expected"
                             " a dialogue that ends with the user, texts, booleans and finite numbers; make the file with"
                             " train_policy.py --method sweet")
        if candidate_key(row) in seen:
            raise SystemExit(f"{where}: found the state {candidate_key(row)} a second time, expected it once")
        seen.add(candidate_key(row))
        rows.append(row)
    if not rows:
        raise SystemExit(f"{path}: found no ranked state, expected at least one")
    return rows


# -----------------------------------------------------------------------------
# Items: what one term of the loss needs


def candidate_items(tokenizer, rows, args):
    """Items of ranked candidates: a state's prompt is shared by all its pairs (state), by each pair (pair), or by none."""
    items, skipped = [], 0
    gap = args.min_gap and args.min_gap * numpy.std([advantage for row in rows for advantage in row["advantages"]])
    for row in rows:
        draw = random.Random(derive_seed(args.seed, "pairs", *candidate_key(row)))
        pairs = make_pairs(row["candidates"], row["advantages"], args.pairing, args.pairs_per_state, draw, gap)
        for wanted in pairs_by_item(pairs, args.share):
            used = sorted({place for pair in wanted for place in pair})
            texts, finished = ([row[name][place] for place in used] for name in ("candidates", "finished"))
            packed = packed_rows(tokenizer, row["messages"], texts, finished, args.max_length)
            if packed is None:
                skipped += len(wanted)
                continue
            if args.share == "none":
                packed = [single for shared in packed for single in shared.apart()]
            items.append(Item(packed, [], [(used.index(a), used.index(b)) for a, b in wanted]))
    return items, {"states": len(rows), "pairs": sum(len(item.pairs) for item in items), "pairs_too_long": skipped}


def dialogue_items(tokenizer, episodes, args, privileged="none"):
    """One item per episode, for supervised training."""
    items, report = [], {"episodes": 0, "turns_dropped": 0, "too_long": 0}
    for episode in episodes:
        row, dropped = dialogue_row(tokenizer, episode, privileged, args.max_length)
        report["turns_dropped"] += dropped if row else 0
        report["too_long"] += row is None
        if row:
            items.append(Item([row], [episode["reward"]], [(0, 0)]))  # no pair, but it counts as one
    report["episodes"] = len(items)
    return items, report


def method_items(tokenizer, episodes, args, process):
    """The items of --method, and the counts to print."""
    if args.method == "sweet":
        names = sorted(group_by_task(episodes))
        random.Random(derive_seed(args.seed, "fraction")).shuffle(names)
        chosen = set(names[:max(1, round(args.data_fraction * len(names)))])
        path = args.candidates or rank_candidates(
            [episode for episode in episodes if episode["task"]["task_id"] in chosen], args, process)
        return candidate_items(tokenizer, read_candidates(path), args)
    if args.method == "mtdpo":
        groups = group_by_task(episodes)
        items, report = pair_items(tokenizer, groups, sorted(groups), args, "none")
        for row in {id(row): row for item in items for row in item.rows}.values():  # each dialogue is one turn
            row.turn_index, row.turns = [min(turn, 0) for turn in row.turn_index], 1
        return items, report
    if args.method == "rft":
        return dialogue_items(tokenizer, [episode for episode in episodes if succeeded(episode, args.success_reward)], args)
    items, report = dialogue_items(tokenizer, episodes, args)
    if args.privileged_episodes:
        informed, _ = load_episodes(args.privileged_episodes, args.agent_prompt)
        informed, more = dialogue_items(tokenizer, informed, args, "ground_truth")
        items, report = items + informed, report | {"privileged_episodes": more["episodes"]}
    return items, report


# -----------------------------------------------------------------------------
# Objectives


def dpo_objective(model, items, args, device):
    """DPO on the items' pairs of turns; each item counts as the mean over its pairs. All metrics (items,)."""
    rows = [row for item in items for row in item.rows]
    sums, counts = turn_scores(model, rows, device, args.micro_batch_size)
    turns, reference, length = (turns_in_order(table, rows) for table in (sums, reference_tensor(rows, sums), counts))
    pairs = batch_pairs(items, [sum(row.turns for row in item.rows) for item in items])
    chosen, rejected = torch.tensor(pairs, device=device).unbind(1)
    losses, better, worse = dpo_loss(turns[chosen], turns[rejected], reference[chosen], reference[rejected], args.beta)
    nll = -turns[chosen] / length[chosen]
    metrics = {"train/loss": losses + args.nll * nll, "train/accuracy": (better > worse).float(),
               "train/margin": better - worse, "train/chosen_reward": better, "train/nll": nll}
    return {name: mean_by_item(values, items) for name, values in metrics.items()}


def supervised_objective(model, items, args, device, mean_length):
    """Negative log-likelihood of each dialogue over the mean number of agent tokens of all dialogues, (items,).

    So every token weighs the same. A mean over each dialogue's own tokens would teach more from short ones, and with
    them to stop early.
    """
    sums, _ = turn_scores(model, [item.rows[0] for item in items], device, args.micro_batch_size)
    return {"train/loss": -sums.sum(1) / mean_length}


# -----------------------------------------------------------------------------
# The toy's model from nothing


def toy_model(episodes, seed):
    """A Llama of 0.7 million parameters and a tokenizer learnt from the episodes, chat template included."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    marks = ["<end>", "<human>", "<agent>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        # the answer's marker, a line of code and a tag are one token each: an answer is about as long as a question
        pre_tokenizers.Split(Regex(r" ?I WANT TO ANSWER:|\n(?:def |    )[^\n]+|\s?<[^>]*>|\n *\S+| ?[^\s?.:]+|[?.:]|\s+"),
                             "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2304, special_tokens=marks, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = (text for episode in episodes for text in [REFERENCE_NOTE.format(reference=episode["task"]["ground_truth"])]
             + [message.get("output") or message["content"] for message in episode["dialogue_history"]])
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<agent>' if m['role'] == 'assistant' else '<human>' }}"
        "{{ m['content'] }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}")
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(fast), hidden_size=128, intermediate_size=320, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
                         tie_word_embeddings=True, eos_token_id=0, pad_token_id=0, bos_token_id=None)
    return LlamaForCausalLM(config), fast


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = flag_parser(__doc__)
    parser.add_argument("--method", choices=("sweet", "mtdpo", "rft", "sft"), required=True, help="see above")
    add_training_flags(parser, epochs=None)
    # candidates
    parser.add_argument("--critic", help="checkpoint directory of train_critic.py")
    parser.add_argument("--candidates", help="ranked candidates of an earlier run, instead of sampling and scoring")
    parser.add_argument("--data_fraction", type=float, default=0.1, help="share of the tasks whose turns are states")
    parser.add_argument("--states", choices=("all", "successes"), default="all",
                        help="turns of which episodes are states; the trained policy's own resemble those of successes")
    parser.add_argument("--states_per_task", type=int, help="draw so many states of each task (default: every turn)")
    parser.add_argument("--num_candidates", type=int, default=16, help="candidates of a state")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the candidates")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="of a candidate")
    parser.add_argument("--sampling_batch_size", type=int, default=64, help="candidates sampled at the same time")
    parser.add_argument("--sampler", help="server that samples for the policy, http://host:port/v1 (default: --model here)")
    parser.add_argument("--sampler_model", help="model name to ask that server for")
    parser.add_argument("--reference", choices=("privileged", "plain"), default="privileged",
                        help="whether the reference of the ranking sees the solution (paper) or not (official code)")
    # pairs
    parser.add_argument("--pairs_per_state", type=int, default=4, help="pairs drawn from a state's candidates")
    parser.add_argument("--pairing", choices=("halves", "best_worst", "random"), default="halves", help="how pairs are drawn")
    parser.add_argument("--share", choices=("state", "pair", "none"), default="pair",
                        help="how far pairs share the computation of what they have in common (README: what each costs)")
    parser.add_argument("--min_gap", type=float, default=0.0,
                        help="a pair's advantages differ by more than so many standard deviations (paper: 0)")
    # supervised
    parser.add_argument("--privileged_episodes", nargs="+", default=[],
                        help="sft: episodes to learn with the reference in front, so that a tiny model can read one")
    args = parser.parse_args(argv)
    if args.epochs is None:
        args.epochs = 1 if args.method == "sweet" else 4
    check_training_flags(args)
    if args.method == "sweet" and bool(args.critic) == bool(args.candidates):
        found = "both --critic and" if args.critic else "neither --critic nor"
        raise SystemExit(f"--method sweet: found {found} --candidates, expected one: a critic that ranks what is sampled, or"
                         " candidates that are ranked already (to rank the same candidates by another critic, copy their"
                         " candidates.sampled.jsonl into the new --output)")
    for name, method in (("critic", "sweet"), ("candidates", "sweet"), ("privileged_episodes", "sft")):
        if getattr(args, name) and args.method != method:
            raise SystemExit(f"--method {args.method}: found --{name}, expected it with --method {method} alone; leave it out")
    require_at_least(1, args, "num_candidates", "pairs_per_state", "max_new_tokens", "sampling_batch_size", "states_per_task")
    require_at_least(0, args, "temperature", "min_gap")
    if not 0 < args.data_fraction <= 1:
        raise SystemExit(f"found --data_fraction {args.data_fraction}, expected more than 0 and at most 1")
    if args.model == "toy" and args.method != "sft":
        raise SystemExit("--model toy starts a model from nothing, which needs --method sft; elsewhere give toy/base")
    return args


def main(args):
    process = join_processes(always=True)
    episodes, failed = load_episodes(args.episodes, args.agent_prompt)
    scratch, tokenizer = toy_model(episodes, args.seed) if args.model == "toy" else (None, load_tokenizer(args.model))
    output = Path(args.output)
    if args.critic:
        critic_flags(args.critic)  # a wrong one shows here, and not after hours of sampling
    inputs = [*args.episodes, *args.privileged_episodes, args.candidates, args.agent_prompt, *records(args.model, args.critic)]
    claim_output(output / "run.json", args, inputs, process, TRAINING_COST_FLAGS)
    if is_complete(output, process):
        return
    items, report = method_items(tokenizer, episodes, args, process)
    if process.leads:
        print(f"{len(episodes)} episodes ({failed} failed ones left out): "
              + ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in report.items()))
    if not items:
        raise SystemExit(f"{' '.join(args.episodes)}: found nothing for --method {args.method} to learn from; expected"
                         " mixed outcomes (mtdpo), successes (rft) or states with candidates of different worth (sweet)")
    model = load_trainable(args.model, process) if scratch is None else scratch
    shard(model, process, args.checkpointing, args.dtype)
    if args.method in ("sft", "rft"):
        mean_length = sum(turn >= 0 for item in items for turn in item.rows[0].turn_index) / len(items)
        objective = functools.partial(supervised_objective, mean_length=mean_length)
    else:
        objective = dpo_objective
        score_rows(model, [row for item in items for row in item.rows], process, args.micro_batch_size)
    train(model, items, lambda model, batch: objective(model, batch, args, process.device), args, process)
    save_checkpoint(output, model, tokenizer, episodes[0].get("agent_prompt"), process)


if __name__ == "__main__":
    launch(main, parse_args())
