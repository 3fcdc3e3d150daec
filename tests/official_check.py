"""Runs the official code beside this one, on the same inputs, and prints whether the two agree.

    git clone https://github.com/facebookresearch/sweet_rl
    git clone https://github.com/YifeiZhou02/collab_openrlhf
    python tests/official_check.py sweet_rl collab_openrlhf

Their functions run unchanged, on the CPU, with tiny random models and random data. The flags that
restore the official behaviour are set; docs/differences.md says where the two differ on purpose.
The exit status is 1 if they differ elsewhere.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import os
import random
import re
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

from conftest import byte_tokenizer, dialogue, episode, read_rows, tiny_model, write_rows
from parties import LenientJudge, Served

import torch
from transformers import get_scheduler

import train_critic
import train_policy
from colbench import agent_messages, agent_view, encode_candidates, turn_starts
from collect import Rules, play
from formats.logs import import_command
from formats.read import complete_task, group_by_task, load_episodes, read_tasks
from judge.pages import extract_html
from judge.sandbox import BackendJudge, Grade
from runtime.templates import render

# what the official files import at their heads and these functions do not use
UNUSED = ("datasets", "fire", "flash_attn", "flash_attn.utils", "flash_attn.utils.distributed",
          "huggingface_hub", "openai", "qwen_vl_utils", "vllm", "selenium", "selenium.webdriver",
          "selenium.webdriver.firefox", "selenium.webdriver.firefox.service", "openrlhf.utils",
          "openrlhf.utils.distributed_sampler")
MODULES = {  # what it is called here -> the module
    "trainer": "openrlhf.trainer.dpo_trainer", "dataset": "openrlhf.datasets.reward_dataset",
    "evaluate": "evaluate_code", "halves": "generate_random_pairs_from_ranks",
    "grader": "sweet_rl.utils.code_utils", "pages": "sweet_rl.utils.webpage_utils",
    "human": "sweet_rl.environments.human_interaction_env", "simulator": "simulate_interactions",
    "designs": "sweet_rl.environments.human_design_interaction_env",
}
SOLUTION = "def f(n):\n    return n * 2"
WORDS = "sum of the list even numbers first name price is it rounded or not return x".split()


def official_modules(sweet_rl, trainer):
    """The official modules, by name."""
    sys.path += [str(sweet_rl), str(Path(sweet_rl, "scripts"))]
    stubs = {name: mock.MagicMock() for name in UNUSED}
    # the packages without their __init__.py, which import what only a cluster needs
    for name in ("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.datasets"):
        stubs[name] = types.ModuleType(name)
        stubs[name].__path__ = [str(Path(trainer, *name.split(".")))]
    with mock.patch.dict(sys.modules, stubs):
        loss = importlib.import_module("openrlhf.models.loss")
        stubs["openrlhf.models"].DPOLoss = loss.DPOLoss
        return types.SimpleNamespace(loss=loss, **{
            key: importlib.import_module(name) for key, name in MODULES.items()})


def sentence(draw, words=8):
    return " ".join(draw.choices(WORDS, k=draw.randint(1, words)))


# -----------------------------------------------------------------------------
# The losses


def official_tokens(theirs, tokenizer, text, response_template):
    """(token ids, mask of the tokens that count) of a text, as the official data set gives them.
    """
    data = types.SimpleNamespace(
        prompts=[""], chosens=[text], rejects=[text], extras=[0], tokenizer=tokenizer,
        max_length=8192, response_template=response_template)
    ids, _, _, _, mask, _, _ = theirs.dataset.RewardDataset.__getitem__(data, 0)
    return ids[0], mask[0]


def official_losses(theirs, tokenizer, models, pairs, beta, nll, mean):
    """Loss and gradients of the official trainer; pairs of (ids, mask) for chosen and rejected."""
    trainer = object.__new__(theirs.trainer.DPOTrainer)  # without what only a cluster needs
    trainer.tokenizer, trainer.mean_log_prob = tokenizer, mean
    loss_of = theirs.loss.DPOLoss(beta)
    losses = []
    for (chosen, chosen_mask), (rejected, rejected_mask) in pairs:  # their micro-batch is a pair
        found = []
        for model in models:  # the trained one and the reference
            def forward(ids, attention_mask, return_output, model=model):
                return model(ids, attention_mask=attention_mask)
            found.append(trainer.concatenated_forward(
                forward, chosen[None], torch.ones_like(chosen)[None], rejected[None],
                torch.ones_like(rejected)[None], chosen_mask[None], rejected_mask[None], [0]))
        (better, worse, _, chosen_nll), (better_reference, worse_reference, _, _) = found
        loss, _, _ = loss_of(better, worse, better_reference.detach(), worse_reference.detach())
        losses.append(loss + nll * chosen_nll)
    return gradients_of(models[0], torch.stack(losses).mean())


def gradients_of(model, loss):
    """(loss, all gradients as one vector)"""
    model.zero_grad()
    loss.backward()
    return loss.item(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def row_of(ids, mask):
    """The Row of official tokens: each run of tokens that count is a turn."""
    turn_index, turn = [], -1
    for before, counts in itertools.pairwise([0, *mask.tolist()]):
        turn += counts > before
        turn_index.append(turn if counts else -1)
    return train_critic.Row(ids.tolist(), turn_index)


def with_references(model, pairs):
    """The pairs, whose rows have got their log-probs under the reference."""
    for row in itertools.chain(*pairs):
        with torch.no_grad():
            row.reference = train_critic.turn_logprobs(model, [row])[0][0]
    return pairs


def compared(what, cases, official, ours):
    """The line on a loss and its gradients."""
    (their_loss, their_gradient), (our_loss, our_gradient) = official, ours
    loss = abs(their_loss - our_loss) / abs(their_loss)
    gradient = ((their_gradient - our_gradient).norm() / their_gradient.norm()).item()
    words = f"loss by {loss:.1e}, gradient by {gradient:.1e} (relative)"
    return what, cases, words, max(loss, gradient) < 1e-5


def check_critic_loss(theirs, tokenizer, models, draw, count=8):
    pairs = []
    for _ in range(count):
        pair = []
        for _ in range(2):
            texts = [sentence(draw) for _ in range(2 * draw.randint(1, 4))]
            messages = [{"role": "system", "content": "Help."}, *dialogue(*texts)]
            # as evaluate_code.py writes it: the last turn's prompt, and what the agent said
            text = (f"In light that the final answer is: {sentence(draw)}."
                    + render(tokenizer, messages[:-1]) + texts[-1])
            pair.append(official_tokens(theirs, tokenizer, text, "<start>assistant<stop>"))
        pairs.append(pair)
    official = official_losses(theirs, tokenizer, models, pairs, beta=0.1, nll=0, mean=True)
    rows = with_references(models[1], [[row_of(*side) for side in pair] for pair in pairs])
    metrics = train_critic.critic_objective(models[0], rows, 0.1, 0.0, "trajectory")
    ours = gradients_of(models[0], metrics["loss"].mean())
    yield compared("critic's loss, --normalise trajectory --nll 0", count, official, ours)


def check_policy_loss(theirs, tokenizer, models, draw, count=8):
    texts_of, pairs, everything = [], [], []
    for _ in range(count):
        messages = [{"role": "system", "content": "Help."}, *dialogue(sentence(draw))]
        texts = [sentence(draw), sentence(draw, 20) + " x"]
        encoded = encode_candidates(tokenizer, messages, texts, [True, True], 8192)
        pairs.append([train_policy.Row(*fields) for fields in encoded])
        # as generate_random_pairs_from_ranks.py --no_prompt writes it
        tokens = [official_tokens(theirs, tokenizer,
                                  render(tokenizer, messages) + text + tokenizer.eos_token, None)
                  for text in texts]
        texts_of.append(tokens)
        everything.append([row_of(*side) for side in tokens])
    equal = sum(row.ids == ids.tolist() for pair, tokens in zip(pairs, texts_of, strict=True)
                for row, (ids, _) in zip(pair, tokens, strict=True))
    yield ("tokens of prompt and candidate", 2 * count, f"{2 * count - equal} texts",
           equal == 2 * count)
    official = official_losses(theirs, tokenizer, models, texts_of, beta=0.1, nll=0, mean=False)
    metrics = train_policy.dpo_objective(models[0], with_references(models[1], pairs), 0.1, 0.0)
    yield compared("policy's loss, --nll 0", count, official,
                   gradients_of(models[0], metrics["loss"].mean()))
    official = official_losses(theirs, tokenizer, models, texts_of, beta=0.1, nll=0.01, mean=False)
    rows = with_references(models[1], everything)
    metrics = train_policy.dpo_objective(models[0], rows, 0.1, 0.01)
    yield compared("policy's loss, --nll 0.01 also on the prompt's tokens", count, official,
                   gradients_of(models[0], metrics["loss"].mean()))


def check_schedule(steps=1000, peak=2e-7):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=peak)
    warmup, most = round(0.03 * steps), 0
    schedule = get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=warmup,
        num_training_steps=steps, scheduler_specific_kwargs={"min_lr": 0.1 * peak})
    for step in range(steps):
        # their warm-up is a step behind: its first step has a learning rate of 0
        ours = train_critic.learning_rate(step - 1 if step <= warmup else step, steps, peak)
        most = max(most, abs(schedule.get_last_lr()[0] - ours) / peak)
        optimizer.step()
        schedule.step()
    yield ("learning rate, the warm-up a step later", steps, f"by {most:.1e} of the peak",
           most < 1e-9)


# -----------------------------------------------------------------------------
# Pairs


def official_pairs(theirs, rows, samples):
    """(chosen, rejected) texts of the pairs that evaluate_code.py makes of a file's rows."""
    with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
        target = Path(folder, "pairs.jsonl")
        theirs.evaluate.main(write_rows(Path(folder, "episodes.jsonl"), rows), samples, target)
        return {(pair["chosen"], pair["rejected"]) for pair in read_rows(target)}


def check_pairs_of_episodes(theirs, draw, tasks=200, samples=4):
    """best_vs_rest against evaluate_code.py, which reads samples one after the other."""
    rows, ours = [], set()
    rewards = {(task, sample): draw.choice((0.0, 0.5, 0.5, 0.9, 1.0))
               for sample in range(samples) for task in range(tasks)}
    for (task, sample), reward in rewards.items():
        last = {"role": "assistant", "input": f"{task} ", "output": f"{sample}"}
        rows.append({"task": {"problem_description": f"{task}", "ground_truth": "x"},
                     "dialogue_history": [last], "reward": reward})
    for task in range(tasks):
        group = [episode(f"{task}", rewards[task, sample], sample) for sample in range(samples)]
        ours |= {tuple(f"{task} {side['sample']}" for side in pair)
                 for pair in train_critic.pair_episodes(group)}
    official = official_pairs(theirs, rows, samples)
    yield ("pairs of episodes, --pairs best_vs_rest", len(official),
           f"{len(official ^ ours)} pairs", official == ours)


def check_halves(theirs, draw, states=200):
    differ = 0
    for _ in range(states):
        advantages = [draw.gauss(0, 1) for _ in range(16)]
        texts = [f"{index}" for index in range(16)]
        ours = set(train_policy.make_pairs(texts, advantages, "halves", 64, draw))  # all of them
        for _ in range(20):
            first, second = map(int, theirs.halves.extract_indices(advantages))
            if advantages[first] < advantages[second]:
                first, second = second, first  # as their main does
            differ += (first, second) not in ours
    yield ("pairs of candidates, --pairing halves", 20 * states,
           f"{differ} of theirs cannot be drawn here", not differ)


# -----------------------------------------------------------------------------
# The benchmark


def says(lines):
    """A speaker that says these lines in their order."""
    left = iter(lines)
    return Served(lambda request: next(left))


def talk(environment, said):
    """Say this to the official environment until it calls the dialogue done."""
    for text in said:
        _, _, done = environment.step(text)
        if done:
            return


def check_dialogues(theirs, sweet_rl, draw, count=500):
    """`play` against HumanInteractionEnv; messages without OUTPUT:, with the marker at most once.
    """
    prompt = Path(sweet_rl, "prompts", "human_simulator_code_prompt.txt").read_text()
    differ = 0
    for _ in range(count):
        said = [sentence(draw) + draw.choice(("", "", "\n\n", " I WANT TO ANSWER:", "")) +
                sentence(draw) for _ in range(10)]
        replies = [sentence(draw, 200) for _ in range(10)]
        client, human = mock.MagicMock(), says(replies)
        create = client.chat.completions.create
        create.side_effect = [
            mock.Mock(choices=[mock.Mock(message=mock.Mock(content=reply))]) for reply in replies]
        environment = theirs.human.HumanInteractionEnv(client, prompt, "")
        environment.reset("request", "hidden")
        talk(environment, said)
        task = episode("t", 0.0)["task"] | {"problem_description": "request",
                                            "hidden_information": "hidden"}
        ours = play(task, 0, says(said), human, LenientJudge(), Rules("", prompt, 10, 400, 0))
        plain = [(message["role"], message["content"]) for message in ours["dialogue_history"]]
        official = [(message["role"], message["content"])
                    for message in environment.dialogue_history]
        seen = agent_messages(ours["dialogue_history"], "")
        read = [message | {"content": message["content"].strip()}
                for message in environment.get_dialogue_history()]
        asked = [call.kwargs["messages"] for call in create.call_args_list]
        heard = [request.messages for request in human.asked]
        differ += (plain, ours["answer"], seen, heard) != (
            official, environment.answer, read, asked)
    yield ("dialogues: messages, answer, what both parties read", count, f"{differ} dialogues",
           not differ)


def check_page_dialogues(theirs, draw, count=500):
    """As above, of pages, up to spaces; messages with OUTPUT: at most once. Nothing is drawn."""
    pages = ("", "<html><p>{}</p></html>", "<body>{}</body>", "<html>{}",
             " see https://picsum.photos/2/3 <html lang=x>https://picsum.photos/20/30 {}</html> .")
    page = "<html>the solution</html>"
    task = complete_task({"problem_description": "request", "ground_truth": page})
    drawn = {"get_driver": mock.Mock(), "render_full_html": lambda driver, html, *_: html,
             "encode_image": lambda picture, _: picture}
    differ = 0
    for _ in range(count):
        said = ["".join((sentence(draw), draw.choice(("\nOUTPUT:\n", " OUTPUT: ", "")),
                         draw.choice(("", "", "I WANT TO ANSWER: ")),
                         draw.choice(pages).format(turn))) for turn in range(10)]
        replies = [sentence(draw, 400) for _ in range(10)]
        with mock.patch.multiple(theirs.designs, **drawn):
            environment = theirs.designs.HumanDesignInteractionEnv(None, "", "")
            environment.invoke_model = mock.Mock(side_effect=replies)
            environment.reset("request", page)
            talk(environment, said)
        graded = []
        judge = types.SimpleNamespace(
            grade=lambda task, page, graded=graded: graded.append(page) or Grade(0.0, None, {}),
            picture=lambda page: None)
        ours = play(task, 0, says(said), says(replies), judge, Rules("", "", 10, 1000, 0))
        official = [message["content"].strip() for message in environment.dialogue_history]
        plain = [message["content"].strip() for message in ours["dialogue_history"]]
        shown = "" if environment.answer == "No answer" else environment.answer
        differ += (plain, graded) != (official, [shown])
    yield "dialogues on pages: messages, page", count, f"{differ} dialogues", not differ


def simulated(theirs, tokenizer, prompt, draw, tasks, samples):
    """A file of the official simulator: its agent says what `draw` gives, its human, too."""
    def answer():
        wrong = SOLUTION.replace("2", draw.choice("2356"))
        return f"I WANT TO ANSWER:{draw.choice((SOLUTION, SOLUTION, wrong, 'What is n?'))}"

    def get_action(histories):
        prompts = [history and tokenizer.apply_chat_template(
            [{"role": "system", "content": prompt}, *history], tokenize=False,
            add_generation_prompt=True) for history in histories]
        said = [history and (answer() if draw.random() < 0.3 else f" {sentence(draw)}?\n")
                for history in histories]
        return prompts, said

    rows = [{"problem_description": f"request {index}", "ground_truth": SOLUTION,
             "test_cases": {"a": "f(2)", "b": "f(0)"}} for index in range(tasks)]
    rows *= samples  # sample by sample, as their main does
    environments = [theirs.human.HumanInteractionEnv(None, "", "", max_steps=6) for _ in rows]
    for environment in environments:
        environment.invoke_model = lambda: sentence(draw, 100)
    agent = types.SimpleNamespace(get_action=get_action)
    return theirs.simulator.batch_interact_environment(agent, environments, rows)


def check_import(theirs, tokenizer, sweet_rl, draw, tasks=40, samples=3):
    """A file of theirs through `colbench.py import` and the pairs, against evaluate_code.py."""
    prompt_file = Path(sweet_rl, "prompts", "llm_agent_code_prompt.txt")
    rows = simulated(theirs, tokenizer, prompt_file.read_text(), draw, tasks, samples)
    turns = [[message for message in row["dialogue_history"] if message["role"] == "assistant"]
             for row in rows]
    with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
        source, target = write_rows(Path(folder, "theirs"), rows), Path(folder, "ours")
        import_command(argparse.Namespace(
            file=source, output=target, agent_prompt=prompt_file, judge="official"))
        episodes, _ = load_episodes([target])
        rewards = theirs.grader.code_evaluate(rows)
    yield ("rewards of the simulator's file, imported", len(rows),
           f"{sum(a['reward'] != b for a, b in zip(episodes, rewards, strict=True))} rewards",
           [found["reward"] for found in episodes] == rewards)
    differ = 0
    for found, said in zip(episodes, turns, strict=True):
        messages, _ = agent_view(found)
        starts = turn_starts(messages, generation_prompt=False)
        differ += [render(tokenizer, messages[:start]) for start in starts] != [
            message["input"] for message in said]
        found["text"] = said[-1]["input"] + said[-1]["output"]
    yield "what its agent reads, turn by turn", len(rows), f"{differ} dialogues", not differ
    official = official_pairs(theirs, rows, samples)
    ours = {(chosen["text"], rejected["text"])
            for group in group_by_task(episodes).values()
            for chosen, rejected in train_critic.pair_episodes(group)}
    yield ("its pairs of dialogues", len(official), f"{len(official ^ ours)} pairs",
           official == ours)


def check_pages(theirs, draw, count=2000):
    pieces = ["<html>", "<html lang='en'>", "</html>", "<body>", "<body class=a>", "</body>",
              "<p>x</p>", "\n", " see ", "https://picsum.photos/200/300",
              "https://source.unsplash.com/random/300x200/?cat",
              "https://picsum.photos/id/7/200/300"]
    differ = 0
    for _ in range(count):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        _, page = theirs.pages.extract_html_snippet(text)
        differ += (page or "") != extract_html(text)
    yield "pages cut out of messages", count, f"{differ} pages", not differ


def check_grades(theirs):
    """The official grader against --judge official, on answers of every kind that it treats apart.
    """
    answers = [SOLUTION, "def f(n):\n    return n + n if n else 0.0", "def f(n):\n    return 4", "",
               f"```python\n{SOLUTION}\n```", f"Here:\n```\n{SOLUTION}\n```\nDone.",
               f"import os\n{SOLUTION}", f"import math\n{SOLUTION.replace('2', 'math.floor(2)')}",
               "def g(n):\n    return 2 * n\ndef f(n):\n    return g(n)",
               "def f(n):\n    return 0 if n < 1 else 2 + f(n - 1)", "What is n?", "def f(n):",
               f"{SOLUTION}  # exit(", "def f(n):\n    import math\n    return math.fsum([n, n])",
               "def f(n):\n    while True:\n        pass", "def f(n):\n    raise ValueError"]
    task = {"ground_truth": SOLUTION, "test_cases": {"a": "f(2)", "b": "f(0)", "c": "f(-1)",
                                                     "d": "f(2) == 4"}}
    yield compared_grades(theirs, "grades", [(task, answer) for answer in answers])


def check_real_tasks(theirs, path, draw, answers=6):
    """Grades of changed solutions of a task file."""
    yield compared_grades(theirs, "grades of changed solutions", [
        (task, changed(task["ground_truth"], draw))
        for task in read_tasks(path) for _ in range(answers)])


def compared_grades(theirs, what, answered):
    """The line on the grades of (task, answer) pairs.

    The official grader runs the answers in this process. Some print, and some write files: here to
    a folder that is removed.
    """
    differ, home = 0, os.getcwd()
    with (BackendJudge("official") as judge, tempfile.TemporaryDirectory() as folder,
          contextlib.redirect_stdout(io.StringIO())):
        os.chdir(folder)
        for task, answer in answered:
            official = theirs.grader.check_correctness(
                task["ground_truth"], answer, task["test_cases"])
            differ += official != judge.grade(task, answer).reward
        os.chdir(home)
    return f"{what}, --judge official", len(answered), f"{differ} grades", not differ


def changed(code, draw):
    """A solution as it is, with another number or operator, without a line, or put another way."""
    numbers, operators = (list(re.finditer(pattern, code)) for pattern in (
        r"\b\d+\b", r" (<=|>=|<|>|\+|-|\*|==) "))
    lines, name = code.split("\n"), re.search(r"def (\w+)\(", code)[1]
    dropped = draw.randrange(len(lines))
    helper = code.replace(f"{name}(", f"inner_{name}(")
    ways = [code, f"```python\n{code}\n```\nSo.", f"Sure!\n```\n{code}\n```",
            f"import math\n{code}", f"{code}\n# exit(",
            "\n".join(lines[:dropped] + lines[dropped + 1:]),
            f"{helper}\ndef {name}(*values):\n    return inner_{name}(*values)"]
    for found, others in ((numbers, ("0", "1", "2", "7")), (operators, (" < ", " + ", " - "))):
        for match in found[:3]:
            ways.append(code[:match.start()] + draw.choice(others) + code[match.end():])
    return draw.choice(ways)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweet_rl", help="clone of facebookresearch/sweet_rl")
    parser.add_argument("trainer", help="clone of YifeiZhou02/collab_openrlhf")
    parser.add_argument("--tasks", help="a task file of ColBench, such as backend_tasks/test.jsonl,"
                        " whose solutions are changed and graded, too; the official grader runs"
                        " them without a sandbox")
    args = parser.parse_args(argv)
    if sys.version_info >= (3, 13):
        raise SystemExit("found Python 3.13 or newer, expected 3.10 to 3.12: in later ones, the"
                         " official grader gives 0 to every answer")
    theirs, draw = official_modules(args.sweet_rl, args.trainer), random.Random(0)
    tokenizer = byte_tokenizer()
    models = [tiny_model(tokenizer, seed=seed) for seed in (0, 1)]  # trained one, reference
    lines = itertools.chain(
        check_critic_loss(theirs, tokenizer, models, draw),
        check_policy_loss(theirs, tokenizer, models, draw), check_schedule(),
        check_pairs_of_episodes(theirs, draw), check_halves(theirs, draw),
        check_dialogues(theirs, args.sweet_rl, draw), check_page_dialogues(theirs, draw),
        check_import(theirs, tokenizer, args.sweet_rl, draw), check_pages(theirs, draw),
        check_grades(theirs),
        check_real_tasks(theirs, args.tasks, draw) if args.tasks else ())
    differ = False
    for what, cases, difference, agrees in lines:
        verdict = "equal" if agrees else "DIFFERENT"
        print(f"{what:54s} {cases:5d} cases   {verdict} (differ: {difference})")
        differ |= not agrees
    raise SystemExit(int(differ))


if __name__ == "__main__":
    main()
