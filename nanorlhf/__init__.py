"""RLHF with nothing hidden. docs/stability.md says what stays as it is, and until when."""

__version__ = "1.0.0"
