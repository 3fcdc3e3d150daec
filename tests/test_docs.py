"""The documents: their commands parse, their links resolve, what they name exists.

Shell blocks stand between ```bash and ```; bash runs them with stubs, so that variables, quotes and
continued lines count as a shell counts them (commands.py). What a test says is what to mend.
"""

import ast
import json
import os
import re
import subprocess
import sys
import types

import pytest
from commands import blocks, check_command, parser_of, record
from conftest import ROOT, run_script

from formats.read import complete_episode, complete_task, read_candidates
from judge.sandbox import grade_all

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "toy/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("**/*.md"))
SCRIPTS = ("colbench.py", "collect.py", "train_critic.py", "train_policy.py", "evaluate.py")
VARIANTS = ("variants/sft.py", "variants/value_critic.py", "variants/best_of_n.py")
STAGES = (*SCRIPTS[1:], *VARIANTS)
LAUNCHERS = ("python", "torchrun")
PROGRAMS = (*LAUNCHERS, "make", "bash", "hf", "vllm")  # that shell blocks may call; add a new one
# of no Python script of ours
OTHERS_FLAGS = ("--generation-config", "--nproc_per_node", "--standalone")
MADE_BY_RUNS = ("agent_prompt.txt", "results.md", "resume/")


def name_of(path):
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)


def prose(path):
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def inline_code(path):
    return re.findall(r"`([^`\n]+)`", prose(path))


# -----------------------------------------------------------------------------
# Commands


def commands_of(shell, folder):
    """The words of every command in a piece of shell."""
    script = folder / "commands.sh"
    script.write_text("set -e\n" + shell)
    return record(script, folder, PROGRAMS)


@documents
def test_every_command_of_a_document_parses(path, tmp_path):
    text = path.read_text()
    indented = re.findall(r"^ {4,}(?:python|torchrun|make) .*", prose(path), re.MULTILINE)
    assert not indented, f"{name_of(path)}: put these between ```bash and ```: {indented}"
    for program, *words in commands_of("".join(blocks(text, "bash")), tmp_path):
        if program in LAUNCHERS:
            assert check_command(words), f"{name_of(path)}: {words} names no script of ours"


@pytest.mark.parametrize("script", (*SCRIPTS, *VARIANTS))
def test_every_command_of_a_docstring_parses(script, tmp_path):
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text()))
    joined = docstring.replace("\\\n", " ")
    lines = re.findall(r"^    ((?:python|torchrun) .*)", joined, re.MULTILINE)
    assert lines, f"{script}: show at least one command in the docstring"
    # three blanks after the words of a command begin what it does, in words
    shell = "\n".join(re.sub(r"   +(?=[a-z]).*", "", line) for line in lines)
    for _, *words in commands_of(shell, tmp_path):
        assert check_command(words) == script, words
        if "toy/base" in words and "--model" in words:
            assert "--lr" in words, f"{script}: the default hardly moves toy/base: {words}"


@documents
def test_every_flag_that_a_document_names_exists_and_takes_this_value(path):
    for code in inline_code(path):
        words = code.split()
        flags = [word for word in words if word.startswith("--")]
        if not flags or flags[0] in OTHERS_FLAGS or words[0] in LAUNCHERS:
            continue
        scripts = [word for word in words if word.endswith(".py")] or STAGES
        for flag in flags:
            value = words[words.index(flag) + 1:][:1]
            actions = [parser_of(script)._option_string_actions.get(flag) for script in scripts]
            actions = [action for action in actions if action]
            assert actions, f"{name_of(path)}: `{code}`: {' and '.join(scripts)} have no {flag}"
            choices = [choice for action in actions for choice in action.choices or value]
            assert not value or value[0] in choices, (
                f"{name_of(path)}: `{code}`: {flag} takes {', '.join(choices)}")


@documents
def test_every_whole_command_in_a_line_of_text_parses(path):
    if path.parent.name == "forks":  # its commands need the patches: test_forks.py runs them
        return
    for code in inline_code(path):
        program, *words = code.split()
        if program in LAUNCHERS:
            assert check_command(words), f"{name_of(path)}: `{code}` names no script of ours"


def test_ci_runs_the_commands_of_the_quickstart(tmp_path):
    """`.ci/run` makes a new environment and then runs them, `make toy` in its short form."""
    quickstart = (ROOT / "README.md").read_text().partition("## Quickstart")[2]
    shell = blocks(quickstart.partition("\n## ")[0], "bash")
    ci = (ROOT / ".ci/run").read_text()
    commands = commands_of("".join(shell), tmp_path)
    assert commands, "README.md: the quickstart has no ```bash block"
    for words in [*commands, ["make", "test"]]:
        assert " ".join(words) in ci, f".ci/run: run `{' '.join(words)}`, as the quickstart does"


# -----------------------------------------------------------------------------
# Examples: what a reader copies works


def test_the_tasks_of_the_readme_load_and_can_be_solved():
    example = blocks((ROOT / "README.md").read_text(), "json")[0]
    tasks = [complete_task(json.loads(line)) for line in example.splitlines()]
    assert tasks
    for task, grade in zip(tasks, grade_all(tasks, [t["ground_truth"] for t in tasks]),
                           strict=True):
        assert grade.success, f"README.md: {task['problem_description']}: {grade.reasons}"


def test_the_episode_and_the_candidates_of_the_formats_load(tmp_path):
    episode, candidates = blocks((ROOT / "docs/formats.md").read_text(), "json")
    assert complete_episode(json.loads(episode))["reward"] == 0.5
    (tmp_path / "ranked.jsonl").write_text(json.dumps(json.loads(candidates)))
    states, omitted = read_candidates(tmp_path / "ranked.jsonl", ranked=True)
    assert len(states) == 1 and not omitted


def test_the_formats_send_metrics_to_a_logger(tmp_path, monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)))
    wandb = types.SimpleNamespace(init=lambda project: run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/sweet").mkdir(parents=True)
    (tmp_path / "out/sweet/metrics.jsonl").write_text('{"step": 3, "train/loss": 0.5}\n')
    exec(blocks((ROOT / "docs/formats.md").read_text(), "python")[0], {})
    assert logged == [(3, {"train/loss": 0.5})]


DECIMAL = r"[-+]?\d+\.\d+"


@pytest.mark.slow
def test_the_tour_prints_what_it_says(tmp_path):
    text = (ROOT / "docs/tour.md").read_text()
    [collecting] = blocks(text, "bash")
    [(_, *words)] = commands_of(collecting, tmp_path)
    (tmp_path / "toy").symlink_to(ROOT / "toy")  # it names toy/base
    assert words[-2:] == ["--output", "out/tour.jsonl"]
    run_script(*words[:-1], tmp_path / "out/tour.jsonl")
    # as pasted into a prompt, where an empty line ends a loop
    typed = "\nprint('#')\n".join(blocks(text, "python"))
    done = subprocess.run([sys.executable, "-i", "-q"], input=typed, cwd=tmp_path, text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "Error" not in done.stderr, done.stderr
    expected = "#\n".join(blocks(text, "text"))
    assert re.sub(DECIMAL, "", done.stdout) == re.sub(DECIMAL, "", expected)
    found = [float(number) for number in re.findall(DECIMAL, done.stdout)]
    stated = [float(number) for number in re.findall(DECIMAL, expected)]
    assert found == pytest.approx(stated, rel=0.03, abs=0.002)  # processors round differently


# -----------------------------------------------------------------------------
# Links, files and functions


def anchors(path):
    """The anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.*)", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_links_resolve(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name_of(path)}: the link {link} leads nowhere: {target}"
        if anchor:
            assert anchor in anchors(target), (
                f"{name_of(path)}: {link}: the headings there are {sorted(anchors(target))}")


@documents
def test_files_that_a_document_names_exist(path):
    """Inline code that looks like a path: with a folder, or with the ending of a source file."""
    for code in inline_code(path):
        word = code.split(":")[0]
        is_path = re.fullmatch(r"[\w./-]*[a-z](/|\.(py|sh|md|html|png|svg|txt|cff|gz))", word)
        if not is_path or word in MADE_BY_RUNS:
            continue
        homes = [ROOT / word, path.parent / word]
        assert any(home.exists() for home in homes), (
            f"{name_of(path)}: there is no file {word}; mend its name, or add it to MADE_BY_RUNS"
            " if a script writes it")


@documents
def test_functions_that_a_document_names_exist(path):
    """Inline code such as `train_critic.py: critic_loss`."""
    for code in inline_code(path):
        match = re.fullmatch(r"([\w/]+\.py): ([\w, ]+)", code)
        if match:
            tree = ast.parse((ROOT / match[1]).read_text())
            names = {getattr(node, "name", None) for node in tree.body}
            missing = set(match[2].split(", ")) - names
            assert not missing, f"{name_of(path)}: {match[1]} has no {', '.join(missing)}"


def test_the_package_has_every_module_and_the_pins_have_one_home():
    project = (ROOT / "pyproject.toml").read_text()
    for script in SCRIPTS:
        assert f'"{script.removesuffix(".py")}"' in project, f"pyproject.toml: py-modules: {script}"
    for folder in ("judge", "runtime", "formats", "speakers", "toy", "fast", "variants", "report"):
        assert f'"{folder}"' in project, f"pyproject.toml: packages: {folder}"
    assert "==" not in project, "pyproject.toml: versions belong into requirements.txt"
    runtime = (ROOT / "requirements.txt").read_text()
    assert "\npytest" not in runtime, "requirements.txt: pytest belongs into tests/requirements.txt"
