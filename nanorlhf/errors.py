"""Errors that end a script with one sentence instead of a traceback."""

import errno
import os

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BAD_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.EILSEQ, errno.EIO),
)  # fmt: skip


class InputError(Exception):
    """Bad input: one sentence that names the file, line, flag or field.

    Every script prints it to stderr and exits with code 2, before anything is written.
    """


class Interrupted(Exception):
    """A signal ended the run between two steps: `sentence` for stderr, `code` to exit with."""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code


class PeerFailed(Exception):
    """Another process of the run failed or died; the message includes its traceback, if known."""


def error_sentence(error: BaseException | None) -> str | None:
    """Return the sentence for an error that the user can fix, None for any other."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError):
        where = error.filename or "the output directory"
        if isinstance(where, bytes):  # TensorBoard's
            where = os.fsdecode(where)
        if error.errno in FULL_DISK:
            return f"the disk is full ({error.strerror}) at {where}."
        if error.errno in BAD_PATH:
            return f"{where!s:.300}: {error.strerror}."
        if error.errno == errno.ENOENT and error.filename is None:  # tempfile's
            return f"{error.strerror}: set TMPDIR to a writable directory."
    return None
