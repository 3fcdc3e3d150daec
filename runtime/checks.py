"""What a row of a file must hold; a sentence says what it holds instead."""

import math

NUMBER = (int, float)
MESSAGE_OPTIONS = {"output": str, "finished": bool}


def without_nulls(row):
    """The fields that a row has: Arrow conversions fill those that it lacks with None."""
    return {key: value for key, value in row.items() if value is not None}


def expect(row, key, kind, where, optional=False):
    """row[key], which must be of type `kind`; the message says what was found and expected."""
    value = row.get(key)
    if value is None and optional:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(k.__name__ for k in kinds)
        found = f"'{key}' of type {type(value).__name__}" if key in row else f"no '{key}'"
        raise SystemExit(f"{where}: found {found}, expected '{key}' of type {names}")
    return value


def check_keys(row, needed, optional, where):
    """Refuse a row without the `needed` keys, or with a value of another type; key -> type."""
    for key, kind in needed.items():
        expect(row, key, kind, where)
    for key, kind in optional.items():
        expect(row, key, kind, where, optional=True)


def check_history(history, where, in_turn=True):
    """User and assistant speak in turn, the user first; in a log, the user speaks first."""
    roles = ("user", "assistant")
    for index, message in enumerate(history):
        role = message.get("role") if isinstance(message, dict) else None
        if in_turn and role != roles[index % 2]:
            raise SystemExit(f"{where}: found dialogue_history[{index}] that is no message of role"
                             f" '{roles[index % 2]}', expected user and assistant in turn, the user"
                             " first")
        if not isinstance(role, str) or (index == 0 and role == "assistant"):
            raise SystemExit(f"{where}: found dialogue_history[{index}] of role {role!r}, expected"
                             " messages with roles, the user first")
        check_keys(message, {"content": str}, MESSAGE_OPTIONS,
                   f"{where}, dialogue_history[{index}]")


def check_lists(state, ranked, where):
    """Refuse candidates whose lists differ in length, or hold other things than they should."""
    names = ["candidates", "finished"]
    sound = (all(isinstance(text, str) for text in state["candidates"])
             and all(isinstance(flag, bool) for flag in state["finished"])
             and is_prompt(state["messages"]))
    if ranked:
        names.append("advantages")
        sound = sound and all(type(value) in NUMBER and math.isfinite(value)
                              for value in state["advantages"])
    lengths = {name: len(state[name]) for name in names}
    if len(set(lengths.values())) > 1 or not state["candidates"]:
        raise SystemExit(f"{where}: found lists of lengths {lengths}, expected as many finished"
                         " flags and advantages as candidates, at least one")
    if not sound:
        raise SystemExit(f"{where}: found messages, candidates, finished flags or advantages of"
                         " another type, expected a dialogue that ends before an agent turn, texts,"
                         " booleans and finite numbers; make the file with collect.py --states")


def is_prompt(messages):
    """Whether these are messages after which the agent can speak."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return False
    roles = [message.get("role") for message in messages]
    return "user" in roles and all(isinstance(role, str) for role in roles)
