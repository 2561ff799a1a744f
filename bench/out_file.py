"""The file that a benchmark writes at its end."""

from pathlib import Path


def check_out(file: Path) -> None:
    """Look whether a file can be written there, before the work that it is for; what is there is left as it is.

    Raises:
        ValueError: if it cannot.
    """
    if not file.resolve().parent.is_dir():
        raise ValueError(f"--out must be in a folder that exists, got {file}")
    is_new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"--out must be a file that can be written, got {file}: {error.strerror}") from error
    if is_new:
        file.unlink()
