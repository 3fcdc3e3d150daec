"""The project's own functions against their peers, interleaved in one process, on one CPU thread.

    OMP_NUM_THREADS=1 python tests/benchmark.py     everything, medians of 5: a quarter of an hour
    python tests/benchmark.py --only policy critic --repeats 7                    some sections
    python tests/benchmark.py --quick     a smoke run on tiny shapes; its ratios mean nothing

Both sides of every comparison first have to agree on the same tokens (section "Checks" of the
output). Seconds are CPU time of the process, MB the peak memory over what was resident before the
call, gradients included. The table's keys, in square brackets, stay the same from version to
version.

The policy's peer is the real DPOTrainer of TRL where it is importable (`pip install trl==1.16.0`
into an environment of its own, and run this file with that Python), in its best setting: reference
precomputed and its output head on valid positions only, which TRL itself does on GPUs alone.
Without TRL a peer of the same shape stands in, and the table says so.
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import gc
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
import typing
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

from conftest import chat_tokenizer, dialogue  # first: it puts the project on the path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import train_critic
import train_policy
from colbench import encode_candidates
from fast import packed
from speakers.interface import Request, SpeakerSettings
from speakers.local import LocalSpeaker, encode_prompt, pick_tokens, uniform_numbers

MAX_LENGTH = 16384
BETA = 0.1

# -----------------------------------------------------------------------------
# Measuring


class Figures(typing.NamedTuple):
    seconds: float
    megabytes: float


class Line(typing.NamedTuple):
    """A line of the table."""

    key: str
    setting: str
    ours: Figures
    peer: Figures
    target: float


def status_kilobytes(name):
    """A figure of /proc/self/status, 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


def measured(call):
    """CPU seconds and peak megabytes of one call."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        # freed memory that the allocator keeps would hide what the call needs
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    resident = status_kilobytes("VmRSS")
    began = time.process_time()
    call()
    seconds = time.process_time() - began
    return Figures(seconds, max(0, status_kilobytes("VmHWM") - resident) / 1024)


def interleaved(methods, repeats):
    """name -> medians. The methods take turns, so that a busy machine slows all of them alike."""
    found = {name: [] for name in methods}
    for _ in range(repeats):
        for name, call in methods.items():
            found[name].append(measured(call))
    medians = {}
    for name, runs in found.items():
        seconds, megabytes = zip(*runs, strict=True)
        medians[name] = Figures(statistics.median(seconds), statistics.median(megabytes))
    return medians


# -----------------------------------------------------------------------------
# Both sides have to agree


def relative_difference(found, expected):
    found, expected = (torch.as_tensor(values, dtype=torch.float64).flatten()
                       for values in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


def check(name, ours, peer, tolerance):
    """Both sides compute the same, or there is nothing to compare."""
    difference = relative_difference(ours, peer)
    print(f"  {name}: relative difference {difference:.1e}, at most {tolerance:.0e}", flush=True)
    if not difference <= tolerance:
        raise SystemExit(
            f"{name}: found a relative difference of {difference:.1e}, expected at most"
            f" {tolerance:.0e}; the two sides do not compute the same, so their times say nothing")


def training_steps(methods, repeats, tolerance=1e-4):
    """Figures of training methods, name -> (model, call).

    All of them first have to give the first one's loss and gradient.
    """
    first, *others = methods
    found = {}
    for name, (model, call) in methods.items():
        loss = call()
        found[name] = loss, torch.cat([value.grad.flatten() for value in model.parameters()])
        model.zero_grad()
    for name in others:
        check(f"loss, {name} and {first}", found[name][0], found[first][0], tolerance)
        check(f"gradient, {name} and {first}", found[name][1], found[first][1], tolerance)
    found.clear()

    def step_of(model, call):
        def step():
            call()
            model.zero_grad()
        return step

    return interleaved({name: step_of(*method) for name, method in methods.items()}, repeats)


def training_step(mean_loss, entries, at_once):
    """The mean loss of a batch, `at_once` entries a forward; its gradient is left on the model."""
    total = 0.0
    for start in range(0, len(entries), at_once):
        part = entries[start:start + at_once]
        loss = mean_loss(part) * (len(part) / len(entries))
        loss.backward()
        total += loss.item()
    return total


def critic_step(model, pairs, at_once):
    """A step of train_critic.py without the optimiser."""
    def mean_loss(part):
        return train_critic.critic_objective(model, part, BETA, 0.0, "turn")["loss"].mean()
    return training_step(mean_loss, pairs, at_once)


def policy_step(model, pairs, at_once):
    """A step of train_policy.py without the optimiser."""
    def mean_loss(part):
        return train_policy.dpo_objective(model, part, BETA, 0.0)["loss"].mean()
    return training_step(mean_loss, pairs, at_once)


def with_packed(function, *arguments):
    """What the scripts' function does with --packed, as a call without arguments."""
    for script in (train_critic, train_policy):
        function = mock.patch.object(script, "turn_logprobs", packed.turn_logprobs)(function)
    return functools.partial(function, *arguments)


# -----------------------------------------------------------------------------
# Models


def word_tokenizer(size):
    """One word, one token: texts of an exact length, and what is sampled reads back as it was."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    marks = ["<end>", "<bos>", "<start>", "<stop>", "system", "user", "assistant"]
    texts = marks + [f"w{index}" for index in range(size - len(marks))]
    vocabulary = {text: token for token, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return chat_tokenizer(tokenizer, "llama3")


class World(typing.NamedTuple):
    """Two models of one shape with random weights, and the lengths of what they read."""

    tokenizer: object
    model: object
    reference: object
    critic: Path  # the model as a critic's directory, which names the reference's
    prompt: int  # tokens of a state
    turn: int  # tokens of a candidate at most
    dialogue: int  # tokens of a dialogue of ten turns


def own_world(quick, folder):
    """The proportions of Llama-3.1-8B at hidden size 256: the head is 6.5 % of the arithmetic."""
    size = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 12}
    lengths = {"prompt": 512, "turn": 32, "dialogue": 1250}
    if quick:
        size = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2}
        lengths = {"prompt": 64, "turn": 16, "dialogue": 300}
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, vocab_size=2752,
                         max_position_embeddings=MAX_LENGTH, eos_token_id=0, bos_token_id=None,
                         pad_token_id=0, **size)
    return build_world(config, lengths, folder / "own")


def build_world(config, lengths, folder):
    torch.set_num_threads(1)
    tokenizer = word_tokenizer(config.vocab_size)
    models = []
    for seed, name in enumerate(("critic", "reference")):
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(config))
        models[-1].save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    flags = train_critic.parse_args(["--episodes", "e", "--model", str(folder / "reference"),
                                     "--output", "o", "--max_length", str(MAX_LENGTH)])
    record = {"flags": vars(flags), "inputs": {}}
    (folder / "critic" / "run.json").write_text(json.dumps(record))
    return World(tokenizer, *models, folder / "critic", **lengths)


# -----------------------------------------------------------------------------
# What they read


def words(count, draw):
    return " ".join(f"w{draw.randrange(1500)}" for _ in range(count))


def messages_of(prompt, draw):
    """A request that is a prompt of so many tokens."""
    return dialogue(words(prompt - 8, draw))


def texts_of(longest, count, draw):
    """Candidates of up to `longest` tokens."""
    # one less, for the end-of-turn token
    return [words(draw.randint(3 * longest // 4, longest) - 1, draw) for _ in range(count)]


def with_reference(model, pairs):
    """The pairs, each row with its log-probs under `model`."""
    with torch.no_grad():
        for pair in pairs:
            for row in pair:
                row.reference = packed.turn_logprobs(model, [row])[0][0]
    return pairs


def policy_pairs(tokenizer, prompt, longest, draw):
    """Four pairs of one state, of eight candidates."""
    encoded = encode_candidates(tokenizer, messages_of(prompt, draw), texts_of(longest, 8, draw),
                                [True] * 8, MAX_LENGTH)
    rows = [train_policy.Row(*one) for one in encoded]
    return list(zip(rows[:4], rows[4:], strict=True))


def episodes_of(tokens, count, draw, name="task"):
    """Episodes of one task, of ten turns and about `tokens` tokens, a quarter of them the agent's.

    The first one succeeded.
    """
    task = {"task_id": name, "domain": "backend", "problem_description": "w1",
            "ground_truth": words(tokens // 20, draw), "test_cases": {"test": "w1"}}
    each = tokens // 10
    episodes = []
    for sample in range(count):
        texts = []
        for _ in range(10):
            texts.append(words(max(1, each * 3 // 4 - 9), draw))
            texts.append(words(draw.randint(each // 5, 3 * each // 10), draw))
        episodes.append({
            "task": task, "sample": sample, "dialogue_history": dialogue(*texts),
            "agent_prompt": "w1", "max_turns": 10, "reward": float(sample == 0),
            "success": sample == 0, "error": None})
    return episodes


def critic_pairs(tokenizer, tokens, count, draw):
    """The best of `count` dialogues with each other one."""
    episodes = episodes_of(tokens, count, draw)
    for episode in episodes:
        episode["row"] = train_critic.dialogue_row(tokenizer, episode, MAX_LENGTH, "ground_truth")
    pairs, = train_critic.dialogue_pairs(episodes, "best_vs_rest", 0.0).values()
    return pairs


# -----------------------------------------------------------------------------
# Policy: DPO on the four pairs of one state, against TRL


def concatenated(pairs):
    """Peer's batch: chosen rows, then rejected ones, padded on the right like TRL's collator."""
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    width = max(len(row.ids) for row in rows)
    shape = (len(rows), width)
    ids = torch.zeros(shape, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.long)
    completion = torch.zeros(shape, dtype=torch.long)
    for index, row in enumerate(rows):
        length = len(row.ids)
        ids[index, :length] = torch.tensor(row.ids)
        attention[index, :length] = 1
        completion[index, :length] = (torch.tensor(row.turn_index) >= 0).long()
    chosen, rejected = torch.tensor([row.reference[0] for row in rows]).chunk(2)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion,
            "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def logits_at(model, keep, ids, attention):
    """Logits (n, V) at the n positions of `keep` (R, T) alone."""
    hidden = model.get_decoder()(
        input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden[keep])


def stand_in_loss(model, batch):
    """TRL's best setting in a few lines: reference given, logits at valid positions only."""
    mask = batch["completion_mask"][:, 1:] > 0
    keep = F.pad(mask, (0, 1))  # the positions that predict a completion token
    logits = logits_at(model, keep, batch["input_ids"], batch["attention_mask"])
    labels = batch["input_ids"][:, 1:][mask]
    picked = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(-1)
    sums = torch.zeros(mask.shape).masked_scatter(mask, picked).sum(1)
    chosen, rejected = sums.chunk(2)
    return train_policy.dpo_loss(chosen - batch["ref_chosen_logps"],
                                 rejected - batch["ref_rejected_logps"], BETA).mean()


def trl_loss(model, tokenizer, folder):
    """The loss function of TRL's DPOTrainer around `model`; None where TRL is not installed."""
    try:
        import trl.trainer.utils
        from datasets import Dataset
    except ImportError:
        return None
    # the head scores only valid positions, as on GPUs
    trl.trainer.utils._use_triton = lambda device: True
    row = {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4"}
    config = trl.DPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, beta=BETA, report_to="none",
        precompute_ref_log_probs=True, gradient_checkpointing=False, disable_dropout=False,
        disable_tqdm=True)
    trainer = trl.DPOTrainer(model, args=config, train_dataset=Dataset.from_list([row] * 2),
                             processing_class=tokenizer)
    return lambda model, batch: trainer.compute_loss(model, batch)


def policy_methods(world, prompt, longest, draw):
    """(name -> (model, call), whether the peer is TRL itself)."""
    pairs = with_reference(world.reference, policy_pairs(world.tokenizer, prompt, longest, draw))
    peer_model = copy.deepcopy(world.model)
    real = trl_loss(peer_model, world.tokenizer, world.critic)
    peer_loss = real or stand_in_loss

    def peer_step(at_once):
        batches = [concatenated(pairs[start:start + at_once]) for start in range(0, 4, at_once)]
        return lambda: training_step(lambda part: peer_loss(peer_model, *part), batches, 1)

    methods = {
        "4 packed pairs": (world.model, with_packed(policy_step, world.model, pairs, 4)),
        "1 packed pair": (world.model, with_packed(policy_step, world.model, pairs, 1)),
        "peer, 4 pairs": (peer_model, peer_step(4)),
        "peer, 1 pair": (peer_model, peer_step(1))}
    return methods, real is not None


def bench_policy(world, quick, repeats):
    draw, lines = random.Random(0), []
    for suffix, prompt, longest in (("", 512, 32), ("_long", 1536, 64)):
        if quick:
            prompt, longest = 64, 16
        methods, real = policy_methods(world, prompt, longest, draw)
        figures = training_steps(methods, repeats)
        fastest = min(figures[name].seconds for name in ("peer, 4 pairs", "peer, 1 pair"))
        # the peer's memory is that of one pair at a time, the least it can do with
        best = Figures(fastest, figures["peer, 1 pair"].megabytes)
        peer = "TRL" if real else "a stand-in for TRL"
        for key, name, target in (("policy_state_vs_trl", "4 packed pairs", 5.0),
                                  ("policy_pair_vs_trl", "1 packed pair", 1.8)):
            setting = (f"DPO step, 4 pairs of a state, prompt {prompt}, turns to {longest}, {name}"
                       f" a forward; peer: {peer} at its best")
            lines.append(Line(key + suffix, setting, figures[name], best, target))
    return lines


# -----------------------------------------------------------------------------
# Critic: scoring 16 candidates, and a training step on a pair of dialogues


def bench_scoring(world, quick, repeats):
    critic, draw = train_critic.Critic(world.critic, "cpu"), random.Random(1)
    task = {"ground_truth": words(world.prompt // 16, draw)}
    messages, texts = messages_of(world.prompt, draw), texts_of(world.turn, 16, draw)
    seen = train_critic.critic_messages(task, messages)
    rows = [train_critic.Row(*one) for one in encode_candidates(
        critic.tokenizer, seen, texts, [True] * len(texts), MAX_LENGTH)]

    @torch.no_grad()
    def peer():
        sums = []
        for model in (critic.model, critic.reference_model):
            scores = [full_logprobs(model, row, [(0, len(row.ids))])[0] for row in rows]
            sums.append(torch.stack(scores)[:, None])
        tokens = torch.tensor([[sum(turn >= 0 for turn in row.turn_index)] for row in rows])
        return train_critic.advantage(*sums, tokens)[:, 0]

    ours = with_packed(critic.advantages, task, messages, texts, [True] * 16)
    check("advantages of 16 candidates", ours(), peer(), 1e-3)
    figures = interleaved({"ours": ours, "peer": peer}, repeats)
    setting = (f"Critic.advantages, 16 candidates to {world.turn} tokens, prompt"
               f" {rows[0].turn_index.index(0)}; peer: 16 full forwards a model")
    return [Line("score16_vs_full", setting, figures["ours"], figures["peer"], 7.5)]


def token_logprobs(model, ids, turn_index):
    """(log-probs of all tokens but the first, with the logits of every token; their turns)"""
    ids = torch.tensor(ids)
    logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0], torch.tensor(turn_index)[1:]


def full_logprobs(model, row, spans):
    """Log-prob sums of a row's agent tokens, one for each (start, stop) span of tokens.

    Each comes from a forward of its own, with all logits.
    """
    sums = []
    for start, stop in spans:
        logprobs, turns = token_logprobs(model, row.ids[:stop], row.turn_index[:stop])
        turns[:max(0, start - 1)] = -1
        sums.append((logprobs * (turns >= 0)).sum())
    return sums


def turn_spans(row):
    """(start, stop) of each agent turn."""
    spans = []
    for turn in range(row.turns):
        own = [column for column, index in enumerate(row.turn_index) if index == turn]
        spans.append((own[0], own[-1] + 1))
    return spans


def single_forward(model, row):
    """Turn sums of one dialogue from one forward with the logits of every token."""
    logprobs, turns = token_logprobs(model, row.ids, row.turn_index)
    return torch.zeros(10).index_add(0, turns.clamp(min=0), logprobs * (turns >= 0))


def bench_critic(world, quick, repeats):
    pairs = critic_pairs(world.tokenizer, world.dialogue, 2, random.Random(2))
    pair, = with_reference(world.reference, pairs)
    spans = [turn_spans(row) for row in pair]
    tokens = torch.tensor([[stop - start for start, stop in own] for own in spans])
    reference = torch.stack([row.reference for row in pair])

    def peer_step(sums_of):
        def mean_loss(rows):
            sums = torch.stack([sums_of(row) for row in rows])
            chosen, rejected = train_critic.advantage(sums, reference, tokens).chunk(2)
            return train_critic.critic_loss(chosen, rejected, BETA).mean()
        return world.model, lambda: training_step(mean_loss, pair, 2)

    figures = training_steps({
        "packed": (world.model, with_packed(critic_step, world.model, [pair], 1)),
        "a forward a turn": peer_step(lambda row: torch.stack(
            full_logprobs(world.model, row, turn_spans(row)))),
        "a forward a dialogue": peer_step(functools.partial(single_forward, world.model)),
    }, repeats)
    length = sum(len(row.ids) for row in pair)
    setting = f"critic step, two dialogues of 10 turns, {length} tokens; peer: "
    return [
        Line("critic_vs_per_turn", setting + "a forward a turn",
             figures["packed"], figures["a forward a turn"], 5.5),
        Line("critic_vs_single_forward", setting + "a forward a dialogue, with all logits",
             figures["packed"], figures["a forward a dialogue"], 1.0),
    ]


# -----------------------------------------------------------------------------
# Sampling


def speaker(world, **settings):
    settings = SpeakerSettings(device="cpu", **settings)
    return LocalSpeaker("benchmark", settings, world.model, world.tokenizer)


def bench_sampling(world, quick, repeats):
    prompt, new = (64, 8) if quick else (1024, 48)
    messages = messages_of(prompt, random.Random(3))
    sampler = speaker(world, max_new_tokens=new)
    ids = torch.tensor([encode_prompt(world.tokenizer, messages)])
    uniform = uniform_numbers([7], 16, new)

    def same_numbers(input_ids, scores):
        """Makes `generate` pick the token that our random numbers pick."""
        picked = pick_tokens(scores, uniform[:, input_ids.shape[1] - ids.shape[1]], 1.0)
        return torch.full_like(scores, -math.inf).scatter(1, picked[:, None], 0.0)

    def peer(**options):
        # not greedy: one beam of greedy picks would be one sequence
        with torch.inference_mode():
            return world.model.generate(ids, max_new_tokens=new, num_return_sequences=16,
                                        do_sample=True, top_k=0, **options)

    def ours():
        return sampler.reply(Request(messages, 16, 7))

    theirs = peer(logits_processor=LogitsProcessorList([same_numbers]))[:, ids.shape[1]:]
    texts = [world.tokenizer.decode(row, skip_special_tokens=True) for row in theirs]
    if [utterance.text for utterance in ours()] != texts:
        raise SystemExit("found other tokens than generate's for the same random numbers, expected"
                         " the same")
    print("  16 samples: the tokens of generate for the same random numbers")
    figures = interleaved({"ours": ours, "peer": peer}, repeats)
    setting = (f"16 samples of {new} tokens, prompt {ids.shape[1]};"
               " peer: generate(num_return_sequences=16)")
    return [Line("sample16_vs_generate", setting, figures["ours"], figures["peer"], 2.8)]


BENCHES = {
    "policy": bench_policy,
    "scoring": bench_scoring,
    "critic": bench_critic,
    "sampling": bench_sampling,
}


# -----------------------------------------------------------------------------
# The tables, and the command line


def table(lines):
    yield "| key | what | ours CPU s | peer CPU s | ratio | target | ours MB | peer MB |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in lines:
        ratio = line.peer.seconds / line.ours.seconds
        missed = "" if ratio >= line.target else " (missed)"
        yield (f"| [{line.key}] | {line.setting} | {line.ours.seconds:.3g}"
               f" | {line.peer.seconds:.3g} | {ratio:.2f}{missed} | {line.target:.2g}"
               f" | {line.ours.megabytes:.0f} | {line.peer.megabytes:.0f} |")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES,
                        help="sections to run (default: all)")
    parser.add_argument("--repeats", type=int, default=5,
                        help="runs of each method; their median counts")
    parser.add_argument("--quick", action="store_true",
                        help="tiny shapes, to see that everything runs")
    return parser.parse_args(argv)


def main(args):
    repeats = 1 if args.quick else args.repeats
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,"
          f" load {os.getloadavg()[0]:.1f}, one thread, medians of {repeats}\n\nChecks")
    with tempfile.TemporaryDirectory() as folder:
        world = own_world(args.quick, Path(folder))
        lines = [line for section in args.only
                 for line in BENCHES[section](world, args.quick, repeats)]
    print("", *table(lines), sep="\n", flush=True)


if __name__ == "__main__":
    main(parse_args())
