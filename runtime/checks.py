"""A field of a row: what it must hold; a sentence says what it holds instead."""


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
