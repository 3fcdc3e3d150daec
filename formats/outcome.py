"""How dialogues ended: why tests failed, whether there was an answer, what the human gave away."""

import difflib
import re

from colbench import DOMAINS
from judge.sandbox import ANSWER_MARKER, SOLUTION_FAILED

MOST_REWARD = 1.000001  # of all but logs; a cosine may round to a little above 1
# What the judge says of a text that is no Python
NO_CODE = ("no code", "raised SyntaxError", "raised IndentationError")


def outcome_of(task, history, grade):
    """What an episode says of its end; `grade` is None where an error has ended it."""
    outcome = {"reward": None, "success": None, "reasons": {}}
    if grade is not None:
        refuse_grade(task, grade)
        outcome = {"reward": grade.reward, "success": grade.success,
                   "reasons": reasons_of(grade, history)}
    return outcome | {"leak": leak_share(task, history)}


def refuse_grade(task, grade):
    """Refuse a grade that no later stage would read, at the first dialogue of a new domain."""
    reward = grade.reward
    number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
    success = bool(reward == 1) if DOMAINS[task["domain"]].has_success else None
    if not number or not 0 <= reward <= MOST_REWARD or grade.success is not success:
        raise SystemExit(f"the judge of {task['domain']} tasks: found reward {reward!r} and"
                         f" success {grade.success!r}, expected a number from 0 to 1 as the reward,"
                         " and as success whether it is 1 (None if the domain has no success)")


def reasons_of(grade, history):
    """Test -> "passed" or why not; "no answer" if the agent's last message is not an answer.

    Without the marker, the whole last message is graded. If it is not Python (a question, for
    example), its tests count as "no answer", not as failures.
    """
    if ANSWER_MARKER in history[-1]["content"]:
        return grade.reasons
    if not set(grade.reasons.values()) <= {*NO_CODE, SOLUTION_FAILED}:
        return grade.reasons
    return {name: "no answer" if reason in NO_CODE else reason
            for name, reason in grade.reasons.items()}


def lacks_answer(episode):
    """Whether the dialogue ends without an answer, so that a question was graded in its place."""
    if DOMAINS[episode["task"]["domain"]].logged:
        return False  # a log has no answers
    said = episode["dialogue_history"][1::2][-1]["content"]
    if ANSWER_MARKER not in said and episode["reasons"] and "test_cases" in episode["task"]:
        return "no answer" in episode["reasons"].values()  # `reasons_of` has marked them
    # an answer may be empty; pages and imported episodes have no reasons
    _, _, answer = said.partition(ANSWER_MARKER)
    return not answer.strip() and not episode["success"]


def leak_share(task, history):
    """The longest run of the solution's tokens in one human reply, as a share of the solution."""
    solution = re.findall(r"\w+|[^\w\s]", task["ground_truth"])
    longest = 0
    replies = [message["content"] for message in history[1:] if message["role"] == "user"]
    for reply in replies:
        words = re.findall(r"\w+|[^\w\s]", reply)
        matcher = difflib.SequenceMatcher(None, solution, words, autojunk=False)
        longest = max(longest, matcher.find_longest_match(0, len(solution), 0, len(words)).size)
    return longest / max(1, len(solution))
