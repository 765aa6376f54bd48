"""Errors meant for the person at the keyboard."""


class UserError(Exception):
    """Something the user can put right; commands print its message in one line and exit with code 2.

    Example:
        >>> raise UserError("--epochs: got 0, expected at least 1")
        Traceback (most recent call last):
        ...
        spotlights.runtime.errors.UserError: --epochs: got 0, expected at least 1
    """
