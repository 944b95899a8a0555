"""Errors that end a script with a sentence instead of a traceback."""


class InputError(Exception):
    """Bad input, said in one sentence that names the file, line, flag or field and what to do.

    Every script prints the sentence to stderr and exits with code 2, before anything is written.
    """


class Interrupted(Exception):
    """A signal ended the run between two steps: the sentence goes to stderr, `code` is the exit code."""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code
