"""What the tree promises: import direction, equations, commands that parse. Run: pytest tests/test_style.py"""

import ast
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

import collect
import evaluate
import train_critic
import train_policy

ORDER = ["colbench", "collect", "train_critic", "train_policy", "evaluate"]
PARSERS = {"collect.py": collect.parse_args, "train_critic.py": train_critic.parse_args,
           "train_policy.py": train_policy.parse_args, "evaluate.py": evaluate.parse_args}


def tree(name):
    return ast.parse((ROOT / f"{name}.py").read_text())


def test_the_top_level_holds_the_five_files_and_no_other_module():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_run_one_way_along_the_pipeline_and_bring_names(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & set(ORDER)
        if isinstance(node, ast.ImportFrom) and node.module in ORDER:
            assert ORDER.index(node.module) < ORDER.index(name) and all(alias.name != "*" for alias in node.names)


def test_a_name_has_one_home():
    homes = {}
    for name in ORDER:
        for node in tree(name).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in ("main", "parse_args"):
                homes.setdefault(node.name, []).append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize("name", ORDER)
def test_functions_can_be_seen_whole(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= (110 if node.name in ("main", "parse_args") else 50), (node.name, length)


def test_each_equation_is_tagged_where_the_readme_says():
    for number, name, function in ((2, "train_critic", "critic_loss"), (3, "train_critic", "advantage"),
                                   (4, "train_policy", "dpo_loss")):
        home = next(node for node in tree(name).body if isinstance(node, ast.FunctionDef) and node.name == function)
        assert f"SWEET-RL Eq. ({number})" in ast.get_docstring(home)
        assert f"`{name}.py: {function}`" in (ROOT / "README.md").read_text()


def test_importing_colbench_loads_neither_torch_nor_transformers():
    code = "import sys, colbench; assert not {'torch', 'transformers', 'numpy', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def arrays(text):
    """The flags that a recipe keeps in shell arrays, each with those before it filled in."""
    found = {}
    for name, flags in re.findall(r"\b(\w+)=\(([^)]*)\)", text):
        for before in found:
            flags = flags.replace(f'"${{{before}[@]}}"', found[before])
        found[name] = " ".join(flags.split())
    return found


def commands(text):
    """(script, arguments) of every command of ours in shell text; variables get a value that any flag takes."""
    text = re.sub(r"\\\n", " ", text)
    for name, flags in arrays(text).items():
        text = text.replace(f'"${{{name}[@]}}"', flags)
    for line in text.splitlines():
        match = re.search(r"(?:^|[\s(]|python )(collect|train_critic|train_policy|evaluate)\.py\s+(-.*)", line)
        if match and not line.lstrip().startswith("#"):
            text = re.sub(r"\$\(\(.*?\)\)", "1", match[2])
            text = re.sub(r'"\$\{@:\d\}"|"\$\{PLAYED\[@\]\}"|\|.*|>.*|&.*|\)$', "", text)
            yield f"{match[1]}.py", [re.sub(r"\$\{.*?\}|\$\w+", "1", word) for word in shlex.split(text)]


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.sh")) + [ROOT / "README.md"], ids=lambda path: path.name)
def test_every_command_in_recipes_and_readme_parses(path):
    found = list(commands(path.read_text()))
    assert found or path.name == "toy_seeds.sh"
    for script, words in found:
        if script == "train_policy.py" and "--method" not in words:
            words += ["--method", "sft"]
        if script == "train_critic.py" and "--episodes" not in words:
            words += ["--episodes", "x"]
        if "--episodes" in words and words[words.index("--episodes") + 1].startswith("-"):
            words.insert(words.index("--episodes") + 1, "x")
        PARSERS[script](words)


@pytest.mark.parametrize("domain", ["backend", "frontend"])
@pytest.mark.parametrize("name", ["CRITIC", "SWEET", "MTDPO", "RFT"])
def test_the_flags_that_recipes_share_parse(name, domain):
    shell = f'DOMAIN={domain}; source runs/toy_flags.sh; printf "%s\\n" "${{{name}[@]}}"'
    flags = subprocess.run(["bash", "-c", shell], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert flags
    if name == "CRITIC":
        train_critic.parse_args(["--episodes", "x", "--model", "x", "--output", "x", *flags])
    else:
        critic = ["--critic", "x"] if name == "SWEET" else []
        train_policy.parse_args(["--episodes", "x", "--model", "x", "--output", "x", *critic, *flags])


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.sh")), ids=lambda path: path.name)
def test_recipes_are_short_and_valid_shell(path):
    assert len(path.read_text().splitlines()) < 41
    subprocess.run(["bash", "-n", str(path)], check=True)
