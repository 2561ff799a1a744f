"""What is built, what is imported, and that our `kernels/` stands in the way of no other package's name."""

import ast
import configparser
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import engine

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "pyproject.toml", "setup.cfg", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "engine", "kernels", "tests",
)  # fmt: skip


def run_python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a fresh interpreter in `cwd`, with `path` before everything installed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules(folder: Path, prefix: str) -> set[str]:
    """Every Python file below `folder`, as a path in a wheel; a symlinked folder is not entered."""
    return {
        f"{prefix}/{(Path(top) / name).relative_to(folder).as_posix()}"
        for top, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py")
    }


def built(kind: str, source: Path, target: Path) -> Path:
    """The "wheel" or "sdist" of a source tree, by its build backend: no front end, and no environment that it would fill."""
    run_python(f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})", cwd=source)
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build from: nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout."""
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modes = [info.external_attr >> 16 for info in archive.infolist()]
    assert wheel.name.startswith("speculative_engine-")
    assert all(stat.S_ISREG(mode) for mode in modes)  # no symlink in particular
    kernels = modules(ROOT / "kernels", "engine/kernels")
    assert kernels
    assert {name for name in names if name.endswith(".py")} == modules(ROOT / "engine", "engine") | kernels
    assert "engine/py.typed" in names
    heads = [path.parent.name for path in (ROOT / "engine" / "heads").glob("*/config.json")]
    assert heads
    for head in heads:
        for file in ("config.json", "model.safetensors", "README.md"):
            assert f"engine/heads/{head}/{file}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"engine"}


def test_sdist_holds_what_the_wheel_is_built_from(source: Path, wheel: Path, tmp_path: Path) -> None:
    """And no part of the tests, which would fail without the rest of them."""
    sdist = built("sdist", source, tmp_path)
    with tarfile.open(sdist) as archive:
        files = [
            Path(member.name).relative_to(sdist.name.removesuffix(".tar.gz")) for member in archive if member.isreg()
        ]
    tops = {file.parts[0] for file in files} - {"PKG-INFO", "speculative_engine.egg-info"}
    assert tops == set(SOURCES) - {"tests"}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    sources = {re.sub(r"^engine/kernels/", "kernels/", name) for name in names}
    assert sources <= {file.as_posix() for file in files}


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        infos = [name for name in archive.namelist() if ".dist-info/" in name]
        texts = {name.split("/", 1)[1]: archive.read(name).decode() for name in infos}
    scripts = configparser.ConfigParser()
    scripts.read_string(texts["entry_points.txt"])
    assert scripts["console_scripts"]["speculative-engine"] == "engine.cli:main"
    assert texts["top_level.txt"].split() == ["engine"]
    assert "Requires-Python: >=3.11" in texts["METADATA"]
    assert "Apache License" in texts["licenses/LICENSE"]


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout, engine.kernels comes out of the wheel, and `kernels` is no module of ours."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
    code = f"""
import importlib, importlib.util, sys
import engine
print(engine.__file__)
for name in {names!r}:
    print(importlib.import_module("engine.kernels." + name).__file__)
spec = importlib.util.find_spec("kernels")
assert spec is None or "site-packages" in str(spec.origin), spec  # somebody may have installed the other one
assert "kernels" not in sys.modules
"""
    files = run_python(code, cwd=tmp_path, path=site).splitlines()
    assert len(files) == 1 + len(names)
    assert all(Path(file).is_relative_to(site) for file in files), files


def test_kernels_is_a_folder_behind_a_symlink() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert os.path.islink(ROOT / "engine" / "kernels")
    assert os.readlink(ROOT / "engine" / "kernels") == "../kernels"


def imported_modules(path: Path) -> set[str]:
    """The absolute names of what a file of the repository imports, names in modules included."""
    place = path.relative_to(ROOT).parent.parts
    package = ("engine", *place) if place[:1] == ("kernels",) else place
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def test_nothing_imports_kernels_by_its_own_name() -> None:
    folders = [ROOT / name for name in ("engine", "kernels", "tests", "bench")]
    files = [path for folder in folders for path in folder.rglob("*.py")] + [ROOT / "noxfile.py"]
    assert len(files) > 4
    guilty = [path for path in files if any(name.split(".")[0] == "kernels" for name in imported_modules(path))]
    assert guilty == []


def test_kernels_import_nothing_of_engine() -> None:
    """The kernels serve other engines too: of this one they know only each other."""
    known = "engine.kernels"
    for path in (ROOT / "kernels").glob("*.py"):
        names = {name for name in imported_modules(path) if name.split(".")[0] == "engine"}
        assert all(name == known or name.startswith(f"{known}.") for name in names), (path, names)


def test_the_engine_has_one_door_to_the_kernels() -> None:
    folder = ROOT / "engine"
    files = [path for path in folder.rglob("*.py") if not path.is_relative_to(folder / "kernels")]
    guilty = {
        path.name for path in files if any(f"{name}.".startswith("engine.kernels.") for name in imported_modules(path))
    }
    assert guilty == {"backend.py"}


def test_transformers_does_not_mistake_our_folder() -> None:
    """From the root of the checkout `import kernels` finds our folder, which is no package."""
    code = """
import importlib.metadata
import transformers
from transformers.utils import is_kernels_available
import transformers.integrations.hub_kernels
from transformers import LlamaForCausalLM, PreTrainedModel
try:
    importlib.metadata.version("kernels")
except importlib.metadata.PackageNotFoundError:
    assert not is_kernels_available()
print("fine")
"""
    assert run_python(code, cwd=ROOT).splitlines()[-1] == "fine"


def test_installed_kernels_package_wins_over_our_folder(tmp_path: Path) -> None:
    """Without an `__init__.py`, the folder yields to a package of that name anywhere on the path."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.0'\n")
    found = run_python("import kernels; print(kernels.__file__)", cwd=ROOT, path=tmp_path)
    assert Path(found) == package / "__init__.py"


def test_import_engine_is_light() -> None:
    code = """
import sys
import engine
heavy = {"triton", "transformers"} & set(sys.modules)
assert not heavy, heavy
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
print("light")
"""
    assert run_python(code, cwd=ROOT) == "light"


def test_the_public_names_are_those_of_type_checkers() -> None:
    """engine/__init__.py lists them three times: for type checkers, for whoever imports all, and to be imported at first use."""
    tree = ast.parse((ROOT / "engine" / "__init__.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    homes = {name.name: node.module for node in found for name in node.names}
    assert homes == engine._HOME
    assert engine.__all__ == sorted(homes)
    assert all(getattr(engine, name).__name__ == name for name in engine.__all__)
