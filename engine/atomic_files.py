"""Files that are whole, or what they were before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def written_whole(*files: Path) -> Iterator[list[Path]]:
    """Names to write files under, which take the places of `files` once all are complete, in their order.

    Raises:
        OSError: if they cannot be written; then all that was there is as it was. safetensors has an error of its own for a full
            disk, which becomes one.
    """
    partial = [file.with_name(f".{file.name}.partial") for file in files]
    try:
        for each in partial:
            each.touch()
        modes = [each.stat().st_mode for each in partial]
        yield partial
        for each, mode in zip(partial, modes, strict=True):
            each.chmod(mode)  # safetensors 0.8 makes files that their owner alone can read
        for each, file in zip(partial, files, strict=True):
            os.replace(each, file)
    except SafetensorError as error:
        raise OSError(f"{files[0]} could not be written: {error}") from error
    finally:
        for each in partial:
            each.unlink(missing_ok=True)
