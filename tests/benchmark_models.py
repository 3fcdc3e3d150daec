"""The parts of benchmark.py that need torch: training, scoring, sampling and rollouts against their peers."""

import argparse
import copy
import json
import math
import random
import typing
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from benchmark import Figures, Line, interleaved
from conftest import TEMPLATES
from transformers import LogitsProcessor, LogitsProcessorList

import colbench
import train_critic
import train_policy
from collect import Rules, join_processes, rollout
from train_critic import Critic, advantage, critic_loss, critic_objective, packed_rows, pair_items, reference_tensor, score_rows
from train_policy import candidate_items, dpo_loss, dpo_objective

# the scripts' own flags and defaults, so that a new one is never missing here
FILES = "--episodes e --model m --output o --max_length 16384 --beta 0.1 --nll 0".split()
FLAGS = argparse.Namespace(**vars(train_critic.parse_args(FILES)) | vars(train_policy.parse_args(
    [*FILES, *"--method sweet --critic c --pairing best_worst".split()])))

# -----------------------------------------------------------------------------
# Both sides have to agree


def check(name, ours, peer, tolerance):
    """Both sides compute the same, or there is nothing to compare."""
    ours, peer = (torch.as_tensor(side, dtype=torch.float64).flatten() for side in (ours, peer))
    difference = ((ours - peer).norm() / peer.norm()).item()
    print(f"  {name}: relative difference {difference:.1e}, at most {tolerance:.0e}", flush=True)
    if not difference <= tolerance:
        raise SystemExit(f"{name}: found a relative difference of {difference:.1e}, expected at most {tolerance:.0e}; the two"
                         " sides do not compute the same, so their times say nothing")


def training_steps(methods, repeats, tolerance=1e-4):
    """Figures of training methods, name -> (model, call), after all have given the first one's loss and gradient."""
    (first, *others), found = methods, {}
    for name, (model, call) in methods.items():
        loss = call()
        found[name] = loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
    for name in others:
        check(f"loss, {name} and {first}", found[name][0], found[first][0], tolerance)
        check(f"gradient, {name} and {first}", found[name][1], found[first][1], tolerance)
    found.clear()
    return interleaved({name: lambda model=model, call=call: (call(), model.zero_grad())
                        for name, (model, call) in methods.items()}, repeats)


# -----------------------------------------------------------------------------
# The model and the texts


def word_tokenizer(size):
    """One word, one token: texts of an exact length, and what is sampled reads back as it was."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<end>", "<bos>", "<start>", "<stop>", "system", "user", "assistant"]
    words = marks + [f"w{number}" for number in range(size - len(marks))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": marks[1:4]})
    fast.chat_template = TEMPLATES["llama3"]
    return fast


class World(typing.NamedTuple):
    """The proportions of Llama-3.1-8B at hidden size 256: the head is 6.5 % of the arithmetic, as there."""

    tokenizer: object
    model: object
    reference: object
    folder: Path  # both as checkpoints, the critic's with its run.json
    process: object


def build_world(quick, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    tokenizer = word_tokenizer(2752)
    size = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2} if quick else \
        {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 12}
    models = []
    for name in ("critic", "reference"):
        torch.manual_seed(len(name))
        models.append(LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=16384,
            eos_token_id=0, bos_token_id=None, pad_token_id=0, **size)))
        models[-1].save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)  # an agent of the size of the toy's for the rollouts of collect.py
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3,
                                 num_attention_heads=4, num_key_value_heads=2, eos_token_id=0, bos_token_id=None,
                                 pad_token_id=0)).save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    flags = vars(FLAGS) | {"model": str(folder / "reference"), "privileged": "ground_truth"}
    (folder / "critic" / "run.json").write_text(json.dumps({"flags": flags, "inputs": {}}))
    return World(tokenizer, *models, folder, join_processes(always=True))


def words(count, draw):
    return " ".join(f"w{draw.randrange(2700)}" for _ in range(count))


def state(prompt, longest, count, draw):
    """A ranked state as in candidates.jsonl: `count` candidates of up to `longest` tokens after `prompt` tokens."""
    lengths = [draw.randint(3 * longest // 4, longest) - 1 for _ in range(count)]  # and the end-of-turn token
    return {"task_id": "task", "sample": 0, "turn": 0, "messages": [{"role": "user", "content": words(prompt - 8, draw)}],
            "candidates": [words(length, draw) for length in lengths], "finished": [True] * count,
            "advantages": [draw.random() for _ in range(count)]}


# -----------------------------------------------------------------------------
# Policy: DPO on the four pairs of one state


def concatenated(rows):
    """Peer's batch: chosen rows, then rejected ones, padded on the right, as TRL's collator makes it."""
    width = max(len(row.ids) for row in rows)
    ids, attention, completion = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for number, row in enumerate(rows):
        length = len(row.ids)
        ids[number, :length], attention[number, :length] = torch.tensor(row.ids), 1
        completion[number, :length] = (torch.tensor(row.turn_index) >= 0).long()
    chosen, rejected = torch.tensor([row.reference[0] for row in rows]).chunk(2)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion,
            "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def logits_at(model, keep, ids, attention):
    """Logits (n, V) at the n positions of `keep` (R, T) alone; older transformers take no such mask themselves."""
    hidden = model.get_decoder()(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden[keep])


def stand_in_loss(model, batch):
    """TRL's best setting in a few lines: reference given, logits at valid positions only."""
    mask = batch["completion_mask"][:, 1:] > 0
    keep = F.pad(mask, (0, 1))  # the positions that predict a completion token
    logits = logits_at(model, keep, batch["input_ids"], batch["attention_mask"])
    labels = batch["input_ids"][:, 1:][mask]
    picked = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(-1)
    sums = torch.zeros(mask.shape).masked_scatter(mask, picked).sum(1)
    return dpo_loss(*sums.chunk(2), batch["ref_chosen_logps"], batch["ref_rejected_logps"], FLAGS.beta)[0].mean()


def trl_loss(model, tokenizer, folder):
    """The loss function of TRL's DPOTrainer around `model`; None where TRL is not installed."""
    try:
        import trl.trainer.utils
        from datasets import Dataset
    except ImportError:
        return None
    trl.trainer.utils._use_triton = lambda device: True  # the head scores only valid positions, as on GPUs
    row = {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4"}
    config = trl.DPOConfig(output_dir=str(folder / "trl"), use_cpu=True, bf16=False, beta=FLAGS.beta, report_to="none",
                           precompute_ref_log_probs=True, gradient_checkpointing=False, disable_dropout=False,
                           disable_tqdm=True)
    trainer = trl.DPOTrainer(model, args=config, train_dataset=Dataset.from_list([row] * 2), processing_class=tokenizer)
    return lambda model, batch: trainer.compute_loss(model, batch)


def backward_all(losses):
    """Micro-batches one after the other: the mean loss, its gradient on the model."""
    losses = list(losses)
    total = 0.0
    for loss in losses:
        value = loss() / len(losses)
        value.backward()
        total += value.item()
    return total


def policy_methods(world, prompt, longest, draw):
    """(name -> (model, call), whether the peer is TRL itself): each call leaves a state's gradient on its model."""
    row = state(prompt, longest, 8, draw)
    items = {share: candidate_items(world.tokenizer, [row], argparse.Namespace(**vars(FLAGS) | {"share": share}))[0]
             for share in ("state", "pair", "none")}
    for share in items.values():
        score_rows(world.reference, [r for item in share for r in item.rows], world.process)
    peer_model = copy.deepcopy(world.model)
    real = trl_loss(peer_model, world.tokenizer, world.folder)
    peer_loss = real or stand_in_loss
    ordered = [[item.rows[item.pairs[0][side]] for item in items["none"]] for side in (0, 1)]
    together = concatenated(ordered[0] + ordered[1])
    single = [concatenated(list(pair)) for pair in zip(*ordered, strict=True)]

    def ours(share):
        return backward_all([lambda item=item: dpo_objective(world.model, [item], FLAGS, "cpu")["train/loss"].mean()
                             for item in items[share]])

    def peer(batches):
        return backward_all([lambda batch=batch: peer_loss(peer_model, batch) for batch in batches])

    return {"state": (world.model, lambda: ours("state")), "pair": (world.model, lambda: ours("pair")),
            "peer, 4 pairs": (peer_model, lambda: peer([together])),
            "peer, 1 pair": (peer_model, lambda: peer(single))}, real is not None


def bench_policy(world, quick, repeats):
    draw, lines = random.Random(0), []
    for suffix, prompt, longest in (("", 512, 32), ("_long", 1536, 64)):
        prompt, longest = (64, 16) if quick else (prompt, longest)
        methods, real = policy_methods(world, prompt, longest, draw)
        figures = training_steps(methods, repeats)
        best = min((figures[name] for name in methods if "peer" in name), key=lambda figure: figure.seconds)
        peer = f"{'TRL' if real else 'a stand-in for TRL'} at its best"
        for share, target in (("state", 5.0), ("pair", 1.8)):
            setting = f"DPO step, 4 pairs, prompt {prompt}, turns to {longest}, --share {share}; peer: {peer}"
            # the peer's memory is that of one pair at a time, the least it can do with
            lines.append(Line(f"policy_{share}_vs_trl{suffix}", setting, figures[share],
                              Figures(best.seconds, figures["peer, 1 pair"].megabytes), target))
    return lines


# -----------------------------------------------------------------------------
# Critic: scoring 16 candidates, and a training step on a pair of dialogues


def bench_scoring(world, quick, repeats):
    draw = random.Random(1)
    critic = Critic(world.folder / "critic", "cpu")
    prompt, longest = (64, 16) if quick else (512, 32)
    row = state(prompt - 40, longest, 16, draw)
    task = {"ground_truth": words(20, draw), "domain": "backend"}
    rows = [candidate_rows(critic, task, row, number) for number in range(16)]

    @torch.no_grad()
    def peer():
        sums = [[full_logprobs(model, r, [(0, len(r.ids))])[0] for r in rows]
                for model in (critic.model, critic.reference_model)]
        counts = torch.tensor([[sum(turn >= 0 for turn in r.turn_index)] for r in rows])
        return advantage(*(torch.stack(side)[:, None] for side in sums), counts)[:, 0]

    def ours():
        return critic.score(task, row["messages"], row["candidates"], row["finished"])

    check("advantages of 16 candidates", ours(), peer(), 1e-3)
    figures = interleaved({"ours": ours, "peer": peer}, repeats)
    setting = f"Critic.score, 16 candidates to {longest} tokens, prompt {len(rows[0].ids)}; peer: 16 full forwards a model"
    return [Line("score16_vs_full", setting, figures["ours"], figures["peer"], 7.5)]


def candidate_rows(critic, task, row, number):
    """One candidate as an ordinary row."""
    view = colbench.critic_messages(task, row["messages"], critic.privileged)
    return packed_rows(critic.tokenizer, view, [row["candidates"][number]], [True], critic.max_length)[0]


def full_logprobs(model, row, spans):
    """Log-prob sums of a row's agent tokens from one forward with all logits for each (start, stop) span of tokens."""
    sums = []
    for start, stop in spans:
        ids = torch.tensor(row.ids[:stop])
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        member = torch.tensor(row.turn_index[:stop])[1:] >= 0
        member[:max(0, start - 1)] = False
        sums.append((logprobs.gather(1, ids[1:, None])[:, 0] * member).sum())
    return sums


def dialogue_pair(tokens, draw):
    """A better and a worse episode of ten turns, together about `tokens` long, a quarter of them the agent's."""
    task = {"task_id": "pair", "domain": "backend", "ground_truth": words(max(8, tokens // 40), draw)}
    each = tokens // 2 // 10
    episodes = []
    for reward in (1.0, 0.0):
        history = []
        for _ in range(10):
            history += [{"role": "user", "content": words(each * 3 // 4 - 9, draw)},
                        {"role": "assistant", "content": words(draw.randint(each // 5, 3 * each // 10), draw)}]
        episodes.append({"task": task, "dialogue_history": history, "reward": reward, "success": reward == 1,
                         "agent_prompt": "w1"})
    return {"pair": episodes}


def critic_item(world, tokens, draw):
    items, _ = pair_items(world.tokenizer, dialogue_pair(tokens, draw), ["pair"], FLAGS, "ground_truth")
    score_rows(world.reference, items[0].rows, world.process)
    return items[0]


def critic_step(world, item):
    return backward_all([lambda: critic_objective(world.model, [item], FLAGS, "cpu")["train/loss"][0]])


def turn_spans(row):
    """(start, stop) of each agent turn."""
    places = [[place for place, turn in enumerate(row.turn_index) if turn == number] for number in range(row.turns)]
    return [(found[0], found[-1] + 1) for found in places]


def padded_pair(model, rows):
    """Turn sums of both dialogues, padded into one batch, with logits at agent tokens only."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows])
    turns = torch.tensor([row.turn_index + [-1] * (width - len(row.ids)) for row in rows])
    attention = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows])
    member = turns[:, 1:] >= 0
    logits = logits_at(model, F.pad(member, (0, 1)), ids, attention)
    picked = logits.gather(1, ids[:, 1:][member][:, None])[:, 0] - logits.logsumexp(-1)
    slots = (torch.arange(2)[:, None] * 10 + turns[:, 1:])[member]
    return torch.zeros(20).index_add(0, slots, picked).view(2, 10)


def bench_critic(world, quick, repeats):
    item = critic_item(world, 600 if quick else 2487, random.Random(2))
    counts = torch.tensor([[float(stop - start) for start, stop in turn_spans(row)] for row in item.rows])

    def step(sums_of):
        def loss():
            sums = sums_of(item.rows)
            chosen, rejected = advantage(sums, reference_tensor(item.rows, sums), counts)
            return critic_loss(chosen[None], rejected[None], FLAGS.beta)[0]
        return world.model, lambda: backward_all([loss])

    def per_turn(rows):
        return torch.stack([torch.stack(full_logprobs(world.model, row, turn_spans(row))) for row in rows])

    def whole_rows(rows):
        return torch.stack([single_forward(world.model, row) for row in rows])

    figures = training_steps({"ours": (world.model, lambda: critic_step(world, item)), "a forward a turn": step(per_turn),
                              "a forward a dialogue": step(whole_rows),
                              "both padded": step(lambda rows: padded_pair(world.model, rows))}, repeats)
    name = min(("a forward a dialogue", "both padded"), key=lambda name: figures[name].seconds)
    setting = f"critic step, two dialogues of 10 turns, {sum(len(r.ids) for r in item.rows)} tokens; peer: "
    return [Line("critic_vs_per_turn", setting + "a forward a turn", figures["ours"], figures["a forward a turn"], 5.5),
            Line("critic_vs_single_forward", setting + f"the better of two, {name}", figures["ours"], figures[name], 1.0)]


def single_forward(model, row):
    """Turn sums of one dialogue from one forward with the logits of every token."""
    ids, turns = torch.tensor(row.ids), torch.tensor(row.turn_index)[1:]
    logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.zeros(row.turns).index_add(0, turns.clamp(min=0), logprobs * (turns >= 0))


# -----------------------------------------------------------------------------
# Sampling and rollouts


def speaker(world, **options):
    return colbench.LocalSpeaker("benchmark", model=world.model, tokenizer=world.tokenizer, device="cpu", **options)


def bench_sampling(world, quick, repeats):
    prompt, new = (64, 8) if quick else (1024, 48)
    messages = state(prompt, 16, 1, random.Random(3))["messages"]
    sampler = speaker(world, max_new_tokens=new)
    ids = torch.tensor([colbench.encode_prompt(world.tokenizer, messages)])
    uniform = torch.stack([torch.from_numpy(numpy.random.default_rng(colbench.derive_seed(7, number)).random(new))
                           for number in range(16)])

    class SameNumbers(LogitsProcessor):
        """Makes `generate` pick the token that our random numbers pick."""

        def __call__(self, input_ids, scores):
            picked = colbench.pick_tokens(scores, uniform[:, input_ids.shape[1] - ids.shape[1]], 1.0)
            return torch.full_like(scores, -math.inf).scatter(1, picked[:, None], 0.0)

    def peer(**options):
        with torch.inference_mode():
            return world.model.generate(ids, max_new_tokens=new, num_return_sequences=16, **options)

    # one beam of greedy picks would be one sequence, so it samples, from distributions of a single token
    theirs = peer(do_sample=True, top_k=0, logits_processor=LogitsProcessorList([SameNumbers()]))[:, ids.shape[1]:]
    texts = [world.tokenizer.decode(row, skip_special_tokens=True).strip() for row in theirs]
    if [utterance.text for utterance in sampler.speak([messages], 16, [7])[0]] != texts:
        raise SystemExit("found other tokens than generate's for the same random numbers, expected the same")
    print("  16 samples: the tokens of generate for the same random numbers")
    figures = interleaved({"ours": lambda: sampler.speak([messages], 16, [7]),
                           "peer": lambda: peer(do_sample=True, top_k=0)}, repeats)
    setting = f"16 samples of {new} tokens, prompt {ids.shape[1]}; peer: generate(num_return_sequences=16)"
    return [Line("sample16_vs_generate", setting, figures["ours"], figures["peer"], 2.8)]


class TalkativeHuman:
    """Replies of unequal length, the same ones in every run."""

    def speak(self, conversations, seeds=None, **_):
        return [[colbench.Utterance(words(16 + seed % 49, random.Random(seed)), True)] for seed in seeds]


class ForgetfulSpeaker:
    """The same speaker without names for its dialogues: it reads every prompt from the start."""

    def __init__(self, inner):
        self.inner, self.count_tokens = inner, inner.count_tokens

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        return self.inner.speak(conversations, n, seeds)


class NoReferee:
    def human_view(self, task, history, prompt, human):
        return history

    def grade_all(self, tasks, answers):
        return [colbench.Grade(0.0, False, {}) for _ in tasks]


def bench_rollout(world, quick, repeats):
    draw, turns = random.Random(4), 3 if quick else 6
    jobs = [({"task_id": str(number), "domain": "backend", "problem_description": words(draw.randint(20, 150), draw),
              "ground_truth": "w1", "hidden_information": "w1"}, 0) for number in range(8)]
    rules = Rules("w1", "w1", turns, 10 ** 6, 0)
    keeping = speaker(world, temperature=0, max_new_tokens=4 if quick else 24)

    def play(agent):
        return [e["dialogue_history"] for e in rollout(jobs, agent, TalkativeHuman(), NoReferee(), rules, len(jobs))]

    if play(keeping) != play(ForgetfulSpeaker(keeping)):
        raise SystemExit("found other greedy dialogues with a kept cache than without, expected the same")
    print("  rollouts: greedy dialogues with and without the kept cache are identical")
    figures = interleaved({"ours": lambda: play(keeping), "peer": lambda: play(ForgetfulSpeaker(keeping))}, repeats)
    setting = f"8 dialogues of {turns} turns of unequal length (collect.rollout); peer: every prompt read anew"
    return [Line("rollout_vs_recompute", setting, figures["ours"], figures["peer"], 1.8)]


# -----------------------------------------------------------------------------
# How the cost of a critic step grows with the dialogue


def bench_growth(world, quick, repeats):
    """(tokens, figures) of critic steps on a pair of ever longer dialogues, and the exponent of a power law through them."""
    found = []
    for tokens in (256, 512) if quick else (1024, 2048, 4096, 8192):
        item = critic_item(world, 2 * tokens, random.Random(tokens))

        def step(item=item):
            critic_step(world, item)
            world.model.zero_grad()

        step()
        runs = interleaved({"step": step}, repeats)["step"]
        found.append((sum(len(row.ids) for row in item.rows) / 2, runs))
    lengths, seconds = zip(*((math.log(tokens), math.log(figures.seconds)) for tokens, figures in found), strict=True)
    return found, float(numpy.polyfit(lengths, seconds, 1)[0])


BENCHES = {"policy": bench_policy, "scoring": bench_scoring, "critic": bench_critic, "sampling": bench_sampling,
           "rollout": bench_rollout}
