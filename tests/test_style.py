"""What the tree promises: import direction, narrow doors, tagged equations, short lines."""

import ast
import sys

import pytest
from conftest import ROOT, run_python

# A room may import from those before it and from itself; judge/ is where it begins. No script
# imports another, see SCRIPTS
ROOMS = ["judge", "runtime", "colbench", "formats", "toy", "speakers", "collect", "train_critic",
         "train_policy", "evaluate", "fast", "variants", "report"]
FOLDERS = ("judge", "runtime", "formats", "toy", "speakers", "fast", "variants", "report")
SCRIPTS = ["collect", "train_critic", "train_policy", "evaluate"]
# inside functions: one line that swaps in a plug-in, commands, a leaf that is run as a script
LATE = {("colbench", "formats.commands"), ("formats.commands", "report.show"),
        ("train_critic", "fast.packed"),
        ("train_policy", "fast.packed"), ("toy.credit", "train_policy"),
        ("toy.make_base", "train_critic")}
SELF_CONTAINED = ["judge.sandbox", "judge.handle", "judge.worker", "judge.values", "judge.calls",
                  "judge.browser"]
DOORS = {"collect": 24, "train_critic": 19, "train_policy": 16, "evaluate": 12}  # names of ours
METHOD_FLAGS = 20  # of a trainer


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


def test_the_top_level_holds_the_five_scripts_and_no_other_module():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(["colbench", *SCRIPTS])


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


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_imports_another_and_its_doors_are_narrow(name):
    brought = set()
    for module, names in imports_of(name, top_level=True):
        assert module not in SCRIPTS
        if room_of(module) in ROOMS:
            brought |= {(module, imported) for imported in names}
    assert len(brought) <= DOORS[name], (
        f"{sorted(brought)}: move something out of the script; a fork raises DOORS")


def test_late_imports_are_late():
    for name, late in LATE:
        if name in MODULES:
            assert late not in [module for module, _ in imports_of(name, top_level=True)]


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_the_sandbox_and_the_browser_need_the_standard_library_alone(name):
    for module, _ in imports_of(name):
        own = room_of(module) == "judge" and name != "judge.browser"
        assert own or room_of(module) in sys.stdlib_module_names, module


@pytest.mark.parametrize("code, heavy", [
    ("import colbench", {"torch", "transformers", "numpy", "PIL", "tqdm"}),
    ("import evaluate", {"torch", "transformers"}),
    ("from speakers import load_speaker, server; load_speaker('scripted')", {"torch"}),
])
def test_what_needs_no_model_loads_no_library_of_models(code, heavy):
    code += f"; import sys; print(*{heavy} & sys.modules.keys())"
    assert run_python("-c", code).split() == []


@pytest.mark.parametrize("name", ["train_critic", "train_policy"])
def test_a_trainer_has_at_most_twenty_flags_of_the_method(name):
    home = next(node for node in TREES[name].body if getattr(node, "name", "") == "parse_args")
    flags = [node.args[0].value for node in ast.walk(home) if isinstance(node, ast.Call)
             and getattr(node.func, "attr", "") == "add_argument"]
    assert len(flags) <= METHOD_FLAGS, (
        "a flag of how something is computed belongs to runtime/flags.py; a fork raises"
        " METHOD_FLAGS")


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
    assert f"SWEET-RL Eq. ({number})" in ast.get_docstring(home), (
        "a fork with another equation removes its line above")
    assert f"`{module}.py: {function}`" in (ROOT / "README.md").read_text()


def python_files():
    folders = [ROOT, *(ROOT / name for name in (*FOLDERS, "runs", "tests"))]
    return sorted(path for folder in folders for path in folder.glob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_have_at_most_100_characters(path):
    lines = path.read_text().splitlines()
    assert [index for index, line in enumerate(lines, 1) if len(line) > 100] == []
