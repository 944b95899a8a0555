"""The one kind of error that is the user's to mend."""


class InputError(Exception):
    """Bad input, said in one sentence that names the file, line, flag or field and what to do.

    Every script prints the sentence to stderr and exits with code 2, before anything is written.
    """
