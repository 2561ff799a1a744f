"""See `python -m bench.throughput --help`."""

import os
import sys
from collections.abc import Sequence

from bench.out_file import check_out_folder
from bench.throughput.command_line import parse
from bench.throughput.options import Options
from bench.throughput.prompts import read_prompts
from engine.cli_options import shows_tracebacks


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write `table.md` and the plots; returns the exit status.

    2 for bad input, 1 for a failure, 130 after Ctrl-C, which keeps what was measured. A reader that has gone, as with `| head`,
    ends it with 1 and no word.
    """
    options, restart, report_only = parse(arguments)
    try:
        if report_only:
            return _report(options)
        _check_before_work(options)
        return _measure(options, restart)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, FileNotFoundError) as error:
        return _fail(error, 2)
    except (OSError, ImportError, MemoryError) as error:
        return _fail(error, 1)


def _check_before_work(options: Options) -> None:
    """What needs no model."""
    options.select(read_prompts(options.prompts))
    check_out_folder(options.out)


def _measure(options: Options, restart: bool) -> int:
    from bench.throughput.run import run

    try:
        run(options, restart)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {options.out}", file=sys.stderr)
        if (options.out / "records.jsonl").exists():
            _report(options)
        return 130
    return _report(options)


def _report(options: Options) -> int:
    from bench.throughput.report import write_report

    print(write_report(options.out), flush=True)
    return 0


def _fail(error: Exception, status: int) -> int:
    if shows_tracebacks():
        raise error
    print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
