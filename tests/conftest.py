"""Tiny random models with real chat templates, made in memory; nothing is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# Each in our own words, with the structure of the family: what surrounds a message, how a turn ends, the system role
TEMPLATES = {
    "llama3": "{{ '<bos>' }}{% for m in messages %}{{ '<start>' + m['role'] + '<stop>\n\n' }}{{ m['content'] | trim }}"
    "{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant<stop>\n\n' }}{% endif %}",
    "qwen2.5": "{% if messages[0]['role'] != 'system' %}{{ '<start>system\nYou help.<end>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}",
    # the last agent turn gets an empty thought, earlier ones lose it
    "qwen3": "{% for m in messages %}{{ '<start>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}",
    "no_system": "{{ '<bos>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ '<start>' + m['role'] + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}",
}
# the numbers of turns so far stand in front, so earlier text changes when the dialogue goes on
UNNESTED = "{{ messages | length }}{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<end>\n' }}" \
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"


def byte_tokenizer(template="llama3"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": ["<bos>", "<start>", "<stop>"]})
    fast.chat_template = TEMPLATES.get(template, template)
    return fast


def tiny_model(tokenizer, family="llama", tied=False, seed=0):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    # a large init makes the random model's next-token distributions sharp, so that a wrong mask shows
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, tie_word_embeddings=tied, initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
        sliding_window=16 if family in ("mistral", "gemma3_text") else None))


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="K/N: every N-th test file from the K-th on, for N commands at a time")


def pytest_collection_modifyitems(config, items):
    first, parts = map(int, config.getoption("part").split("/"))
    files = set(sorted({item.path for item in items})[first - 1::parts])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
    items[:] = [item for item in items if item.path in files]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(template, family, tied) -> directory of a tiny random checkpoint."""
    made = {}

    def make(template="llama3", family="llama", tied=False):
        key = (template, family, tied)
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("tiny"))
            tokenizer = byte_tokenizer(template)
            tiny_model(tokenizer, family, tied).save_pretrained(made[key])
            tokenizer.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def toy_episodes(tmp_path_factory):
    """A few dozen episodes of the toy's noisy demonstrator, judged for real."""
    path = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    (path.parent / "prompt.txt").write_text("Ask, then answer.")
    run_script("collect.py", "--tasks", "toy:backend:train", "--num_tasks", 12, "--samples_per_task", 6, "--agent",
               "scripted", "--agent_prompt", path.parent / "prompt.txt", "--output", path)
    return path


@pytest.fixture
def real_data():
    """The folder with real ColBench rows, where there is one."""
    folder = Path(os.environ.get("COLBENCH_DATA", ROOT.parent / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no real ColBench rows here ({folder}); set COLBENCH_DATA to their folder")
    return folder


def run_script(script, *arguments, processes=1, check=True, env=None, timeout=300):
    """Run a script as a user does, alone or under torchrun."""
    command = [sys.executable] if processes == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(command + [str(ROOT / script), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT,
                          timeout=timeout, env=os.environ | (env or {}))
    if check:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
