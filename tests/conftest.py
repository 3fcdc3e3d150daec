"""What several tests need: tiny random models with real chat templates, episodes, and scripts.

Everything is made here; nothing is downloaded.
"""

import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
for key in ("OPENAI_API_KEY", "AGENT_API_KEY", "HUMAN_API_KEY", "GRADER_API_KEY"):
    os.environ.pop(key, None)  # tests look for a key of their own
if "TEST_GPU" not in os.environ:  # tests/gpu_check.sh sets it
    # tests compare exact numbers, and start more processes than most machines have GPUs
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Some virtual machines announce AMX and end whoever uses it with SIGILL, as bf16 products do
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# -----------------------------------------------------------------------------
# Command line of pytest


def pytest_addoption(parser):
    parser.addoption(
        "--part", default="1/1",
        help="K/N: every N-th test file from the K-th on, to run N commands side by side")


# The files that take longest come first, in an order that makes two halves about equally long
LONGEST = ("interruptions", "recipes", "pipeline", "benchmark", "browser", "fullsize", "critic",
           "servers", "vision", "judge", "best_of_n", "ranks", "rollout", "lora")


def pytest_collection_modifyitems(config, items):
    def order(path):
        name = path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), name

    first, parts = map(int, config.getoption("part").split("/"))
    files = sorted({item.path for item in items}, key=order)
    chosen = set(files[first - 1::parts])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
    items[:] = [item for item in items if item.path in chosen]


# -----------------------------------------------------------------------------
# Tokenizers and models

PLAIN = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<end>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
# It begins with the count of messages so far, so each message changes all text before it
UNNESTED = "{{ messages | length }}" + PLAIN
# Earlier turns keep their words, but not their thoughts
LOSES_THOUGHTS = PLAIN.replace(
    "m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +")
# In our own words, with the structure of each family: what surrounds a message, how a turn ends,
# and what becomes of the system role
TEMPLATES = {
    "llama3": "{{ '<bos>' }}{% for m in messages %}"
    "{{ '<start>' + m['role'] + '<stop>\n\n' }}{{ m['content'] | trim }}{{ '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant<stop>\n\n' }}{% endif %}",
    "qwen2.5": "{% if messages[0]['role'] != 'system' %}"
    "{{ '<start>system\nYou help.<end>\n' }}{% endif %}" + PLAIN,
    # the last agent turn gets an empty thought, earlier ones lose theirs
    "qwen3": "{% for m in messages %}{{ '<start>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}",
    "no_system": "{{ '<bos>' }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<start>' + m['role'] + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}",
}


def byte_tokenizer(template="llama3"):
    """One token for each byte; `template` is a name in TEMPLATES or a template itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token for token, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return chat_tokenizer(tokenizer, template)


def chat_tokenizer(tokenizer, template):
    """The tokenizer with the tokens that surround messages, and this template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": ["<bos>", "<start>", "<stop>"]})
    fast.chat_template = TEMPLATES.get(template, template)
    return fast


WINDOWS = ("mistral", "gemma2", "gemma3_text", "gpt_oss")  # families that attend to the last tokens


def tiny_model(tokenizer, family="llama", tied=False, seed=0, layers=2):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4 if family == "minicpm3" else 2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        # large, so that next-token distributions are sharp and a wrong mask shows
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        sliding_window=16 if family in WINDOWS else None,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(template, family, tied) -> directory of a tiny random checkpoint."""
    @functools.cache
    def make(template="llama3", family="llama", tied=False):
        folder, tokenizer = str(tmp_path_factory.mktemp("tiny")), byte_tokenizer(template)
        tiny_model(tokenizer, family, tied).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


# -----------------------------------------------------------------------------
# Rows, dialogues and episodes


def read_rows(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def write_rows(path, rows):
    """The path, which then holds these rows."""
    from runtime.files import write_jsonl

    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, rows)
    return path


def dialogue(*texts):
    """Messages of these texts; the user speaks first."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def episode(task_id, reward, sample=0, texts=("t", "q", "r", "I WANT TO ANSWER: x"),
            domain="backend", **more):
    """A complete episode; `more` are fields of it."""
    from formats.read import complete_episode

    task = {"task_id": task_id, "problem_description": "t", "ground_truth": "def f(): pass",
            "test_cases": {"a": "f()"}, "domain": domain}
    return complete_episode({
        "task": task, "sample": sample, "dialogue_history": dialogue(*texts), "answer": "x",
        "reward": reward, "agent_prompt": ""} | more)


def ranked_state(advantages, messages=None, **more):
    """A line of ranked candidates, which have these advantages: {text: advantage}."""
    return {"task": episode("t", 1.0)["task"], "sample": 0, "turn": 0,
            "messages": messages or dialogue("t"), "agent_prompt": "", "error": None,
            "candidates": list(advantages), "finished": [True] * len(advantages),
            "advantages": list(advantages.values()), "ranker": "a test"} | more


def write_episodes(path, tasks=6, samples=3):
    rewards, rows = {1: 1.0, 2: 0.5}, []
    for index in range(tasks):
        for sample in range(samples):
            texts = ("t" * (index + 1), "what " * (sample + 1), "r",
                     f"I WANT TO ANSWER: {index} {sample}")
            rows.append(episode(f"task{index}", rewards.get(sample, 0.0), sample, texts))
    return write_rows(path, rows)


@pytest.fixture(scope="session")
def toy_episodes(tmp_path_factory):
    """Some dozens of episodes of the toy's noisy demonstrator, graded by the real judge."""
    path = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    (path.parent / "prompt.txt").write_text("Ask, then answer.")
    run_script("collect.py", "--tasks", "toy:backend:train", "--num_tasks", 12,
               "--samples_per_task", 6, "--agent", "scripted",
               "--agent_prompt", path.parent / "prompt.txt", "--output", path)
    return path


@pytest.fixture(scope="session")
def real_data():
    """real_data(name) -> a file of real ColBench rows, where it is there."""
    folder = Path(os.environ.get("COLBENCH_DATA", ROOT.parent / "shared/data"))

    def find(name):
        if not (folder / name).exists():
            pytest.skip(f"no real rows here: {folder / name}; set COLBENCH_DATA to their folder")
        return folder / name

    return find


# -----------------------------------------------------------------------------
# Pages

TAILWIND = "https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css"
LINK = f'<link href="{TAILWIND}" rel="stylesheet">'
PAGE = f'<html>{LINK}<body class="bg-red-500"><h1 class="text-6xl p-8">A page</h1></body></html>'
needs_chromium = pytest.mark.usefixtures("chromium")


def png(colour, width=100, height=60):
    """A picture of one colour."""
    from PIL import Image

    picture, stored = Image.new("RGB", (width, height), colour), io.BytesIO()
    picture.save(stored, "PNG")
    return stored.getvalue()


@pytest.fixture(scope="session")
def chromium():
    """Whoever needs it is skipped where Chromium is not installed, or does not start."""
    from judge.browser import Browser

    try:
        with Browser() as one:
            one.picture("<html></html>")
    except SystemExit as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def browser(chromium):
    from judge.browser import Browser

    with Browser(seconds_per_page=5) as shared:
        yield shared


@pytest.fixture(scope="session")
def real_pages(real_data):
    return [row["ground_truth"] for row in read_rows(real_data("colbench_frontend_40.jsonl"))]


# -----------------------------------------------------------------------------
# Scripts, and what they leave


def run_script(script, *arguments, processes=1, check=True, env=None, timeout=300,
               folder=ROOT):
    """Run a script as a user does, alone or under torchrun."""
    script, arguments = str(ROOT / script), [str(argument) for argument in arguments]
    if env is None and (processes == 1 or check):  # torchrun itself reports a failing rank
        done = forked.run(script, arguments, processes, timeout, folder)
    else:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1",
                        "--nproc_per_node", str(processes)]
        done = subprocess.run([*command, script, *arguments], capture_output=True, text=True,
                              cwd=folder, timeout=timeout, env=os.environ | (env or {}))
    if check:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def refusal(script, *arguments):
    """The sentence with which a script refuses, without a traceback."""
    done = run_script(script, *arguments, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


def run_python(*words, folder=ROOT, **variables):
    """What `python words` prints, in a folder from which the project can be imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, *map(str, words)], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def training(episodes, model, output, *more):
    """The flags of a short training run, of which later ones win."""
    return ["--episodes", episodes, "--model", model, "--output", output, "--epochs", 2,
            "--batch_size", 4, "--lr", 1e-3, "--max_length", 600, *more]


def changed_trainer(folder, change):
    """The path of a train_policy.py that begins with these lines of Python."""
    script = folder / "train_policy.py"
    script.write_text(f"import os, sys, time\nsys.path[0] = {str(ROOT)!r}\nimport train_policy\n"
                      f"{change}\n"
                      "train_policy.launch(train_policy.main, train_policy.parse_args())\n")
    return script


def weights(folder):
    """The tensors of a checkpoint directory by name."""
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")


def differing_weights(a, b, tolerance=0.0):
    """The names of the tensors that are not the same in two checkpoint directories."""
    import torch

    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    same = functools.partial(torch.allclose, atol=tolerance) if tolerance else torch.equal
    return [name for name, value in one.items() if not same(two[name], value)]


def metrics(folder):
    """The lines of a training run's metrics.jsonl."""
    return read_rows(f"{folder}/metrics.jsonl")
