"""The one exception for what a user can put right: shown as a single line, exit code 2, no traceback."""


class UserError(ValueError):
    """A setting, file, model or reward function that cannot be used; the message names it and what is allowed."""
