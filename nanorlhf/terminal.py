"""Text for the terminal."""


def printable(text: str) -> str:
    """`text` stripped, with its control characters replaced: sampled ones could move the cursor or change colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text).strip()
