"""Errors that end a script with a sentence instead of a traceback."""


class InputError(Exception):
    """Bad input: one sentence that names the file, line, flag or field.

    Every script prints it to stderr and exits with code 2, before anything is written.
    """


class Interrupted(Exception):
    """A signal ended the run between two steps: `sentence` for stderr, `code` to exit with."""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code
