"""Errors meant for the person at the keyboard."""


class UserError(Exception):
    """Something the user can put right; commands print its message in one line and exit with code 2.

    Example:
        >>> raise UserError("--epochs: got 0, expected at least 1")
        Traceback (most recent call last):
        ...
        spotlights.runtime.errors.UserError: --epochs: got 0, expected at least 1
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its type where it has none.

    Example:
        >>> first_line(ValueError("no such file\\nin a long story"))
        'no such file'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, on whichever device.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    # torch has a class of its own for devices, and a plain RuntimeError for the CPU.
    named = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or named
