"""The one exception for what a user can put right: shown as a single line, exit code 2, no traceback."""


class UserError(ValueError):
    """A setting, file, model or reward function that cannot be used; the message names it and what is allowed."""


def one_line(problem: object, limit: int = 300) -> str:
    """Return a text, or that of an error, on one line: what other programs say may have many."""
    return " ".join(str(problem).split())[:limit]
