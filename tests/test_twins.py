"""What stands in both trainers is the same."""

import ast

import pytest
from conftest import ROOT

SCRIPTS = ("train_critic.py", "train_policy.py")
# of the same name, but not the same thing: what the critic reads, its pairs, its run, its flags.
# To Row a fork adds what its loss knows
OWN = {"main", "parse_args", "dialogue_row", "Row"}


def definitions(script):
    """Name -> source of every function, class and constant of a script."""
    text = (ROOT / script).read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_source_segment(text, node)
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.get_source_segment(text, node)
    return found


def loop_lines(script):
    """The lines of the loop of steps."""
    text = (ROOT / script).read_text()
    loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For)
             and "run.resume" in ast.get_source_segment(text, node.iter)]
    assert len(loops) == 1
    return ast.unparse(loops[0]).splitlines()  # a statement a line, however it is wrapped


CRITIC, POLICY = map(definitions, SCRIPTS)
TWINS = sorted(CRITIC.keys() & POLICY.keys() - OWN)


def test_the_trainers_have_twins():
    assert {"PAIRS", "turn_logprobs", "pair_episodes", "learning_rate",
            "plan_batches"} <= set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_what_stands_in_both_trainers_is_the_same(name):
    assert CRITIC[name] == POLICY[name], (
        f"change {name} in both trainers; a fork that means to change one adds it to OWN")


@pytest.mark.parametrize("script", [
    "train_policy.py", "variants/sft.py", "variants/value_critic.py"])
def test_the_loops_differ_in_the_objective_and_in_held_out_numbers_alone(script):
    def plain(path):
        lines = [line.replace(", 'holdout/pairs': len(held_out)", "")
                 .replace("for (mine, weight)", "for mine, weight")  # as Python 3.10 writes it
                 for line in loop_lines(path)]
        return [line for line in lines
                if line.strip() and not line.strip().startswith("#")
                and "held_out" not in line and "holdout" not in line
                and "_objective(" not in line and "for mine, weight" not in line
                and "batch = sorted" not in line and "scoring" not in line]

    assert plain(script) == plain("train_critic.py"), (
        f"the loop of steps in {script} differs from that in train_critic.py: change both")
    assert any("_objective(" in line for line in loop_lines(script))
