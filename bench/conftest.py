"""Options of `pytest bench`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the whole matrix on CPU too, where it takes hours")
