"""The file or the folder that a benchmark writes to: checked before its work, and written whole."""

from pathlib import Path

from engine.atomic_files import written_whole


def check_out(file: Path) -> None:
    """Look whether a file can be written there; what is there is left as it is.

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


def check_out_folder(folder: Path) -> None:
    """Make a folder, if need be, and look whether files can be written there.

    Raises:
        ValueError: if they cannot.
    """
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out must be a folder that can be written, got {folder}: {error.strerror}") from error


def write_whole(file: Path, text: str) -> None:
    """So that the file appears whole or not at all; what was there before stays until then."""
    with written_whole(file) as (partial,):
        partial.write_text(text, encoding="utf-8")
