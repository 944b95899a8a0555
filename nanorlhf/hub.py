"""Download files by Hub id; errors are one sentence."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from nanorlhf.errors import InputError


def hub_directory(hub_id: str, patterns: list[str], repo_type: str = "model", revision: str | None = None) -> Path:
    """Download the files of `hub_id` that match `patterns`, or find them in the cache; InputError if neither works."""
    try:
        return Path(snapshot_download(hub_id, repo_type=repo_type, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise InputError(f"{hub_id}: no such file or directory, and not a Hub id (owner/name) either.") from error
    except (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise InputError(
            f"{hub_id}: no such file or directory, and as a {repo_type} of the Hub it can't be downloaded ({reason}): "
            "correct the name, or download it elsewhere and name the directory."
        ) from error
