"""What the tree promises: import direction, equations, recipes whose commands parse.

Run: pytest tests/test_style.py
"""

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from commands import check_command, record
from conftest import ROOT

# A room may import from those before it and from itself; judge/ is where it begins
ROOMS = ["judge", "colbench", "toy", "speakers", "stages", "collect", "training", "train_critic",
         "train_policy", "report", "evaluate"]
FOLDERS = ("judge", "toy", "speakers", "stages", "training", "report")
STAGES = ["colbench", "collect", "train_critic", "train_policy", "evaluate"]
LATE = {("colbench", "toy.world")}  # for `toy:` task names alone; only inside a function
SELF_CONTAINED = ["judge.sandbox", "judge.browser"]  # the standard library alone


def our_modules():
    """Dotted name -> path of every module that the scripts are made of."""
    paths = list(ROOT.glob("*.py"))
    for folder in FOLDERS:
        paths += (ROOT / folder).glob("*.py")
    modules = {}
    for path in sorted(paths):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    return modules


MODULES = our_modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def room_of(module):
    return module.split(".")[0]


def imports_of(name, top_level=False):
    """(module, imported names) of each import statement; names are None for `import module`."""
    nodes = TREES[name].body if top_level else ast.walk(TREES[name])
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            yield node.module, [alias.name for alias in node.names]


# -----------------------------------------------------------------------------
# Imports and names


def test_the_top_level_holds_the_five_stages_and_no_other_module():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(STAGES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_one_way_along_the_rooms_and_bring_names(name):
    for module, names in imports_of(name):
        assert module is not None, "a relative import"
        if room_of(module) not in ROOMS:
            continue
        assert names is not None, f"import {module}: expected from {module} import ..."
        assert module in MODULES, f"from {module} import: expected a module of ours, not a folder"
        assert "*" not in names
        if (name, module) not in LATE:
            assert ROOMS.index(room_of(module)) <= ROOMS.index(room_of(name)), module


def test_late_imports_are_late():
    for name, late in LATE:
        assert late not in [module for module, _ in imports_of(name, top_level=True)]


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_the_sandbox_and_the_browser_need_the_standard_library_alone(name):
    for module, _ in imports_of(name):
        assert room_of(module) in sys.stdlib_module_names, module


def test_modules_import_each_other_in_no_circle():
    uses = {}
    for name in MODULES:
        found = {module for module, _ in imports_of(name) if module in MODULES}
        uses[name] = {module for module in found if (name, module) not in LATE}
    while uses:
        free = [name for name, needed in uses.items() if not needed & uses.keys()]
        assert free, f"a circle among {sorted(uses)}"
        for name in free:
            del uses[name]


def test_a_name_has_one_home():
    homes = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                homes.setdefault(node.name, []).append(name)
    for own in ("main", "parse_args"):  # every script has its own
        homes.pop(own, None)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_importing_colbench_needs_the_standard_library_alone():
    heavy = ("torch", "transformers", "numpy", "PIL", "tqdm")
    code = f"import sys, colbench; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
                          text=True)
    assert done.stdout.split() == []


# -----------------------------------------------------------------------------
# Equations and lines


@pytest.mark.parametrize("number, module, function", [
    (2, "train_critic", "critic_loss"),
    (3, "train_critic", "advantage"),
    (4, "train_policy", "dpo_loss"),
])
def test_each_equation_is_tagged_where_the_readme_says(number, module, function):
    home = next(node for node in TREES[module].body
                if isinstance(node, ast.FunctionDef) and node.name == function)
    assert f"SWEET-RL Eq. ({number})" in ast.get_docstring(home)
    assert f"`{module}.py: {function}`" in (ROOT / "README.md").read_text()


def python_files():
    folders = [ROOT, *(ROOT / name for name in (*FOLDERS, "runs", "tests"))]
    return sorted(path for folder in folders for path in folder.glob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_have_at_most_100_characters(path):
    lines = path.read_text().splitlines()
    assert [index for index, line in enumerate(lines, 1) if len(line) > 100] == []


# -----------------------------------------------------------------------------
# Commands of recipes; those of documents and docstrings are in test_docs.py


def run_recipe(name, folder, arguments=(), **variables):
    """The commands that a recipe would run, each once it was called: the words after `python`.

    The recipe runs in a copy of runs/, with stubs in place of `python` and `torchrun`; `cp` copies
    nothing, since nothing was made.
    """
    shutil.copytree(ROOT / "runs", folder / "runs", ignore=shutil.ignore_patterns("out"))
    commands = record(folder / "runs" / name, folder, ("python", "torchrun", "cp"),
                      os.environ["PATH"], arguments, **variables)
    return [words for program, *words in commands if program != "cp"]


RECIPES = sorted(path.name for path in (ROOT / "runs").glob("*.sh") if path.name != "toy_flags.sh")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "runs").glob("*.sh")))
def test_recipes_are_valid_shell(name):
    subprocess.run(["bash", "-n", str(ROOT / "runs" / name)], check=True)


@pytest.mark.parametrize("domain", ["backend", "frontend"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_parses(name, domain, tmp_path):
    arguments = ["1"] if name in ("toy_seeds.sh", "toy_grid.sh") else []  # one seed
    commands = run_recipe(name, tmp_path, arguments, DOMAIN=domain)
    assert commands
    for words in commands:
        assert check_command(words), words


def test_the_toy_recipe_trains_plays_and_compares_every_policy(tmp_path):
    counts = Counter(check_command(words) for words in run_recipe("toy.sh", tmp_path))
    assert counts == {"collect.py": 1, "train_critic.py": 1, "train_policy.py": 3, "evaluate.py": 6}


def test_the_grid_resumes_a_cell_that_was_killed_in_its_last_play_and_no_finished_one(tmp_path):
    for cell in ("16-0-200", "64-0-200"):
        (tmp_path / f"grid/{cell}/0/test").mkdir(parents=True)
        (tmp_path / f"grid/{cell}/0/test/sweet_no_privileged.jsonl").touch()
    (tmp_path / "grid/16-0-200/0/episodes.jsonl").touch()
    commands = run_recipe("toy_grid.sh", tmp_path, ["1"], ROOT="grid")
    words = {word for command in commands for word in command}
    assert any(word.startswith("grid/16-0-200/0/") for word in words)
    assert not any(word.startswith("grid/64-0-200/0/") for word in words)
