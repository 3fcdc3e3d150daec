"""The parts of benchmark.py that need torch: training, scoring, sampling and rollouts."""

import copy
import json
import math
import random
import typing
from concurrent.futures import Future
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from benchmark import Figures, Line, interleaved
from conftest import TEMPLATES
from transformers import LogitsProcessor, LogitsProcessorList

import train_critic
from colbench import Referee, critic_messages, derive_seed, encode_prompt
from collect import Parties, Rules, interleave, play
from judge.sandbox import Grade
from speakers.interface import Speaker, SpeakerSettings, Utterance
from speakers.local import LocalSpeaker, pick_tokens
from stages.processes import join_processes
from train_critic import (
    Critic,
    CriticSettings,
    Reader,
    advantage,
    candidate_rows,
    critic_loss,
    critic_objective,
    pair_items,
    precompute_reference,
    reference_table,
)
from train_policy import DpoSettings, PairSettings, candidate_items, dpo_loss, dpo_objective

MAX_LENGTH = 16384
BETA = 0.1
CRITIC = CriticSettings(head="logratio", normalise="turn", beta=BETA, nll=0.0)

# -----------------------------------------------------------------------------
# Both sides have to agree


def check(name, ours, peer, tolerance):
    """Both sides compute the same, or there is nothing to compare."""
    ours = torch.as_tensor(ours, dtype=torch.float64).flatten()
    peer = torch.as_tensor(peer, dtype=torch.float64).flatten()
    difference = ((ours - peer).norm() / peer.norm()).item()
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
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found[name] = loss, gradient
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


def backward_all(losses):
    """Micro-batches one after the other: the mean loss, its gradient on the model."""
    total = 0.0
    for loss in losses:
        value = loss() / len(losses)
        value.backward()
        total += value.item()
    return total


# -----------------------------------------------------------------------------
# The model and the texts


def word_tokenizer(size):
    """One word, one token: texts of an exact length, and what is sampled reads back as it was."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<end>", "<bos>", "<start>", "<stop>", "system", "user", "assistant"]
    texts = marks + [f"w{index}" for index in range(size - len(marks))]
    vocabulary = {text: token for token, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": marks[1:4]})
    fast.chat_template = TEMPLATES["llama3"]
    return fast


class World(typing.NamedTuple):
    """The proportions of Llama-3.1-8B at hidden size 256: the head is 6.5 % of the arithmetic."""

    tokenizer: object
    model: object
    reference: object
    folder: Path  # both as checkpoints, the critic's with its run.json
    process: object


def build_world(quick, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    tokenizer = word_tokenizer(2752)
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": 0, "bos_token_id": None,
              "pad_token_id": 0}
    if quick:
        size = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2}
    else:
        size = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 12}
    models = []
    for name in ("critic", "reference"):
        torch.manual_seed(len(name))
        models.append(LlamaForCausalLM(LlamaConfig(
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=MAX_LENGTH,
            **tokens, **size)))
        models[-1].save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)  # an agent of the size of the toy's for the rollouts of collect.py
    small = LlamaForCausalLM(LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, **tokens))
    small.save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    flags = train_critic.parse_args(["--episodes", "e", "--model", str(folder / "reference"),
                                     "--output", "o", "--max_length", str(MAX_LENGTH)])
    record = {"flags": vars(flags), "inputs": {}}
    (folder / "critic" / "run.json").write_text(json.dumps(record))
    return World(tokenizer, *models, folder, join_processes(training=True))


def words(count, draw):
    return " ".join(f"w{draw.randrange(2700)}" for _ in range(count))


def state(prompt, longest, count, draw):
    """A ranked state as in candidates.jsonl.

    It has `count` candidates of up to `longest` tokens after `prompt` tokens.
    """
    # one less, for the end-of-turn token
    lengths = [draw.randint(3 * longest // 4, longest) - 1 for _ in range(count)]
    messages = [{"role": "user", "content": words(prompt - 8, draw)}]
    return {"task_id": "task", "sample": 0, "turn": 0, "messages": messages,
            "candidates": [words(length, draw) for length in lengths],
            "finished": [True] * count, "advantages": [draw.random() for _ in range(count)]}


def state_items(tokenizer, ranked_state, share):
    """The items of a state's four pairs, as train_policy.py makes them."""
    reader = Reader(tokenizer, "none", MAX_LENGTH)
    settings = PairSettings(
        pairing="best_worst", pairs_per_state=4, share=share, seed=0)
    return candidate_items(reader, [ranked_state], settings)[0]


# -----------------------------------------------------------------------------
# Policy: DPO on the four pairs of one state


def concatenated(rows):
    """Peer's batch: chosen rows, then rejected ones, padded on the right like TRL's collator."""
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
    """Logits (n, V) at the n positions of `keep` (R, T) alone.

    Older transformers take no such mask themselves.
    """
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
    losses, _, _ = dpo_loss(
        chosen, rejected, batch["ref_chosen_logps"], batch["ref_rejected_logps"], BETA)
    return losses.mean()


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
    """(name -> (model, call), whether the peer is TRL itself).

    Each call leaves the gradient of a state's four pairs on its model.
    """
    ranked_state = state(prompt, longest, 8, draw)
    items = {}
    for share in ("state", "pair"):
        items[share] = state_items(world.tokenizer, ranked_state, share)
        precompute_reference(world.reference, items[share], world.process)
    peer_model = copy.deepcopy(world.model)
    real = trl_loss(peer_model, world.tokenizer, world.folder)
    peer_loss = real or stand_in_loss
    # to the peer each row is a sequence of its own
    pairs = [item.pairs[0] for item in items["pair"]]
    chosen = [item.rows[a] for item, (a, _) in zip(items["pair"], pairs, strict=True)]
    rejected = [item.rows[b] for item, (_, b) in zip(items["pair"], pairs, strict=True)]
    together = concatenated(chosen + rejected)
    single = [concatenated(list(pair)) for pair in zip(chosen, rejected, strict=True)]

    def our_loss(item):
        settings = DpoSettings(BETA, nll=0.0)
        return lambda: dpo_objective(world.model, [item], settings)["train/loss"].mean()

    def ours(share):
        losses = [our_loss(item) for item in items[share]]
        return lambda: backward_all(losses)

    def peer(batches):
        losses = [lambda batch=batch: peer_loss(peer_model, batch) for batch in batches]
        return lambda: backward_all(losses)

    methods = {"state": (world.model, ours("state")), "pair": (world.model, ours("pair")),
               "peer, 4 pairs": (peer_model, peer([together])),
               "peer, 1 pair": (peer_model, peer(single))}
    return methods, real is not None


def bench_policy(world, quick, repeats):
    draw, lines = random.Random(0), []
    for suffix, prompt, longest in (("", 512, 32), ("_long", 1536, 64)):
        if quick:
            prompt, longest = 64, 16
        methods, real = policy_methods(world, prompt, longest, draw)
        figures = training_steps(methods, repeats)
        peers = [figures[name] for name in methods if "peer" in name]
        fastest = min(figure.seconds for figure in peers)
        # the peer's memory is that of one pair at a time, the least it can do with
        best = Figures(fastest, figures["peer, 1 pair"].megabytes)
        peer = "TRL" if real else "a stand-in for TRL"
        for share, target in (("state", 5.0), ("pair", 1.8)):
            setting = (f"DPO step, 4 pairs, prompt {prompt}, turns to {longest}, --share {share};"
                       f" peer: {peer} at its best")
            key = f"policy_{share}_vs_trl{suffix}"
            lines.append(Line(key, setting, figures[share], best, target))
    return lines


# -----------------------------------------------------------------------------
# Critic: scoring 16 candidates, and a training step on a pair of dialogues


def bench_scoring(world, quick, repeats):
    draw = random.Random(1)
    critic = Critic(world.folder / "critic", "cpu")
    prompt, longest = (64, 16) if quick else (512, 32)
    row = state(prompt - 40, longest, 16, draw)
    task = {"ground_truth": words(20, draw), "domain": "backend"}
    view = critic_messages(task, row["messages"], "ground_truth")
    candidates = list(zip(row["candidates"], row["finished"], strict=True))
    rows = candidate_rows(critic.reader, view, candidates)

    @torch.no_grad()
    def peer():
        sums = []
        for model in (critic.model, critic.reference_model):
            scores = [full_logprobs(model, r, [(0, len(r.ids))])[0] for r in rows]
            sums.append(torch.stack(scores)[:, None])
        counts = torch.tensor([[sum(turn >= 0 for turn in r.turn_index)] for r in rows])
        return advantage(*sums, counts)[:, 0]

    def ours():
        return critic.advantages(task, row["messages"], row["candidates"], row["finished"])

    check("advantages of 16 candidates", ours(), peer(), 1e-3)
    figures = interleaved({"ours": ours, "peer": peer}, repeats)
    setting = (f"Critic.advantages, 16 candidates to {longest} tokens, prompt {len(rows[0].ids)};"
               " peer: 16 full forwards a model")
    return [Line("score16_vs_full", setting, figures["ours"], figures["peer"], 7.5)]


def full_logprobs(model, row, spans):
    """Log-prob sums of a row's agent tokens, one for each (start, stop) span of tokens.

    Each comes from a forward of its own, with all logits.
    """
    sums = []
    for start, stop in spans:
        ids = torch.tensor(row.ids[:stop])
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        member = torch.tensor(row.turn_index[:stop])[1:] >= 0
        member[:max(0, start - 1)] = False
        sums.append((logprobs.gather(1, ids[1:, None])[:, 0] * member).sum())
    return sums


def dialogue_pair(tokens, draw):
    """A better and a worse episode of ten turns.

    Together they have about `tokens` tokens, a quarter of them the agent's.
    """
    solution = words(max(8, tokens // 40), draw)
    task = {"task_id": "pair", "domain": "backend", "ground_truth": solution}
    each = tokens // 2 // 10
    episodes = []
    for sample, reward in enumerate((1.0, 0.0)):
        history = []
        for _ in range(10):
            request = words(each * 3 // 4 - 9, draw)
            answer = words(draw.randint(each // 5, 3 * each // 10), draw)
            history += [{"role": "user", "content": request},
                        {"role": "assistant", "content": answer}]
        episodes.append({"task": task, "sample": sample, "dialogue_history": history,
                         "reward": reward, "success": reward == 1, "agent_prompt": "w1"})
    return episodes


def critic_item(world, tokens, draw):
    """A pair of dialogues as an item, with its reference."""
    better, worse = dialogue_pair(tokens, draw)
    reader = Reader(world.tokenizer, "ground_truth", MAX_LENGTH)
    items, _ = pair_items(reader, [[(better, worse)]], "pair")
    precompute_reference(world.reference, items, world.process)
    return items[0]


def critic_step(world, item):
    return backward_all([lambda: critic_objective(world.model, [item], CRITIC)["train/loss"][0]])


def turn_spans(row):
    """(start, stop) of each agent turn."""
    spans = []
    for turn in range(row.turns):
        own = [column for column, index in enumerate(row.turn_index) if index == turn]
        spans.append((own[0], own[-1] + 1))
    return spans


def single_forward(model, row):
    """Turn sums of one dialogue from one forward with the logits of every token."""
    ids, turns = torch.tensor(row.ids), torch.tensor(row.turn_index)[1:]
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.zeros(row.turns).index_add(0, turns.clamp(min=0), logprobs * (turns >= 0))


def padded_pair(model, rows):
    """Turn sums of both dialogues, padded into one batch, with logits at agent tokens only."""
    width = max(len(row.ids) for row in rows)
    gaps = [width - len(row.ids) for row in rows]
    padded = list(zip(rows, gaps, strict=True))
    ids = torch.tensor([row.ids + [0] * gap for row, gap in padded])
    turns = torch.tensor([row.turn_index + [-1] * gap for row, gap in padded])
    attention = torch.tensor([[1] * len(row.ids) + [0] * gap for row, gap in padded])
    member = turns[:, 1:] >= 0
    logits = logits_at(model, F.pad(member, (0, 1)), ids, attention)
    picked = logits.gather(1, ids[:, 1:][member][:, None])[:, 0] - logits.logsumexp(-1)
    slots = (torch.arange(2)[:, None] * 10 + turns[:, 1:])[member]
    return torch.zeros(20).index_add(0, slots, picked).view(2, 10)


def bench_critic(world, quick, repeats):
    item = critic_item(world, 600 if quick else 2487, random.Random(2))
    rows = item.rows
    counts = torch.tensor([[float(stop - start) for start, stop in turn_spans(row)]
                           for row in rows])

    def peer_step(sums_of):
        def loss():
            sums = sums_of(rows)
            chosen, rejected = advantage(sums, reference_table(rows, sums), counts)
            return critic_loss(chosen[None], rejected[None], BETA)[0]
        return world.model, lambda: backward_all([loss])

    def per_turn(rows):
        return torch.stack([torch.stack(full_logprobs(world.model, row, turn_spans(row)))
                            for row in rows])

    def per_dialogue(rows):
        return torch.stack([single_forward(world.model, row) for row in rows])

    figures = training_steps({
        "ours": (world.model, lambda: critic_step(world, item)),
        "a forward a turn": peer_step(per_turn),
        "a forward a dialogue": peer_step(per_dialogue),
        "both padded": peer_step(lambda rows: padded_pair(world.model, rows)),
    }, repeats)
    better = min(("a forward a dialogue", "both padded"), key=lambda name: figures[name].seconds)
    tokens = sum(len(row.ids) for row in rows)
    setting = f"critic step, two dialogues of 10 turns, {tokens} tokens; peer: "
    return [
        Line("critic_vs_per_turn", setting + "a forward a turn",
             figures["ours"], figures["a forward a turn"], 5.5),
        Line("critic_vs_single_forward", setting + f"the better of two, {better}",
             figures["ours"], figures[better], 1.0),
    ]


# -----------------------------------------------------------------------------
# Sampling and rollouts


def speaker(world, **settings):
    settings = SpeakerSettings(device="cpu", **settings)
    return LocalSpeaker("benchmark", settings, world.model, world.tokenizer)


def bench_sampling(world, quick, repeats):
    prompt, new = (64, 8) if quick else (1024, 48)
    messages = state(prompt, 16, 1, random.Random(3))["messages"]
    sampler = speaker(world, max_new_tokens=new)
    ids = torch.tensor([encode_prompt(world.tokenizer, messages)])
    streams = [numpy.random.default_rng(derive_seed(7, index)).random(new) for index in range(16)]
    uniform = torch.from_numpy(numpy.stack(streams))

    class SameNumbers(LogitsProcessor):
        """Makes `generate` pick the token that our random numbers pick."""

        def __call__(self, input_ids, scores):
            picked = pick_tokens(scores, uniform[:, input_ids.shape[1] - ids.shape[1]], 1.0)
            return torch.full_like(scores, -math.inf).scatter(1, picked[:, None], 0.0)

    def peer(**options):
        # not greedy: one beam of greedy picks would be one sequence
        with torch.inference_mode():
            return world.model.generate(ids, max_new_tokens=new, num_return_sequences=16,
                                        do_sample=True, top_k=0, **options)

    def ours():
        return sampler.speak([messages], 16, [7])[0]

    theirs = peer(logits_processor=LogitsProcessorList([SameNumbers()]))[:, ids.shape[1]:]
    texts = [world.tokenizer.decode(row, skip_special_tokens=True).strip() for row in theirs]
    if [utterance.text for utterance in ours()] != texts:
        raise SystemExit("found other tokens than generate's for the same random numbers, expected"
                         " the same")
    print("  16 samples: the tokens of generate for the same random numbers")
    figures = interleaved({"ours": ours, "peer": peer}, repeats)
    setting = (f"16 samples of {new} tokens, prompt {ids.shape[1]};"
               " peer: generate(num_return_sequences=16)")
    return [Line("sample16_vs_generate", setting, figures["ours"], figures["peer"], 2.8)]


class TalkativeHuman(Speaker):
    """Replies of unequal length, the same ones in every run."""

    reads_history = True

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        texts = [words(16 + seed % 49, random.Random(seed)) for seed in seeds]
        return [[Utterance(text, True)] for text in texts]


class ForgetfulSpeaker(Speaker):
    """The same speaker without names for its dialogues: it reads every prompt from the start."""

    def __init__(self, inner):
        self.inner = inner

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        return self.inner.speak(conversations, n, seeds)


class NoReferee(Referee):
    """Every answer is wrong."""

    def grade(self, task, answer):
        graded = Future()
        graded.set_result(Grade(0.0, False, {}))
        return graded


def bench_rollout(world, quick, repeats):
    draw, turns = random.Random(4), 3 if quick else 6
    tasks = []
    for index in range(8):
        request = words(draw.randint(20, 150), draw)
        tasks.append({"task_id": str(index), "domain": "backend", "problem_description": request,
                      "ground_truth": "w1", "hidden_information": "w1"})
    rules = Rules(agent_prompt="w1", human_prompt="w1", max_turns=turns, reply_chars=10**6, seed=0)
    keeping = speaker(world, temperature=0, max_new_tokens=4 if quick else 24)

    def play_all(agent):
        """task_id -> dialogue; all dialogues are played side by side."""
        parties = Parties(agent, TalkativeHuman(), NoReferee(tasks, None), rules)
        dialogues = [play(task, 0, parties, on_turn=lambda: None) for task in tasks]
        episodes = interleave(dialogues, len(tasks))
        return {episode["task"]["task_id"]: episode["dialogue_history"] for episode in episodes}

    if play_all(keeping) != play_all(ForgetfulSpeaker(keeping)):
        raise SystemExit("found other greedy dialogues with a kept cache than without, expected"
                         " the same")
    print("  rollouts: greedy dialogues with and without the kept cache are identical")
    figures = interleaved({"ours": lambda: play_all(keeping),
                           "peer": lambda: play_all(ForgetfulSpeaker(keeping))}, repeats)
    setting = (f"8 dialogues of {turns} turns of unequal length (collect.play);"
               " peer: every prompt read anew")
    return [Line("rollout_vs_recompute", setting, figures["ours"], figures["peer"], 1.8)]


# -----------------------------------------------------------------------------
# How the cost of a critic step grows with the dialogue


def bench_growth(world, quick, repeats):
    """(tokens, figures) of critic steps on pairs of ever longer dialogues.

    Then the exponent of a power law through them.
    """
    found = []
    for tokens in (256, 512) if quick else (1024, 2048, 4096, 8192):
        item = critic_item(world, 2 * tokens, random.Random(tokens))

        def step(item=item):
            critic_step(world, item)
            world.model.zero_grad()

        step()
        figures = interleaved({"step": step}, repeats)["step"]
        found.append((sum(len(row.ids) for row in item.rows) / 2, figures))
    lengths = [math.log(tokens) for tokens, _ in found]
    seconds = [math.log(figures.seconds) for _, figures in found]
    return found, float(numpy.polyfit(lengths, seconds, 1)[0])


BENCHES = {
    "policy": bench_policy,
    "scoring": bench_scoring,
    "critic": bench_critic,
    "sampling": bench_sampling,
    "rollout": bench_rollout,
}
