"""Exception for faults that the user can fix: shown as a single line, exit code 2, no traceback."""


class UserError(ValueError):
    """Unusable setting, file, model or reward function; the message names it and what is allowed."""


def one_line(problem: object, limit: int = 300) -> str:
    """Return a text, or that of an error, on one line: errors of other programs may have many lines."""
    return " ".join(str(problem).split())[:limit]
