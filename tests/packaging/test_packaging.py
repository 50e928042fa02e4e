"""What the packages promise to those who install them, and the sources to those who read them."""

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import upr
from tools import build_compiled

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("upr", "upr_backup", "upr_cli_kit", "upr_client", "upr_protocol", "upr_spark")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
SOURCES = sorted(
    path
    for folder in ("upr", "client", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not GENERATED.search(path.name)
)


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of all sources but those of tests."""
    return {
        path: ast.parse(path.read_text())
        for path in SOURCES
        if "tests" not in path.relative_to(ROOT).parts
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    (folder,) = importlib.import_module(package).__path__
    assert (Path(folder) / "py.typed").is_file()


@pytest.mark.parametrize("name", ["client", "tests", "tools"])
def test_folders_are_no_packages(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None


def test_all_names_are_importable() -> None:
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names)
        assert [name for name in names if not hasattr(module, name)] == []


def test_the_version_is_one() -> None:
    assert upr.__version__ == PROJECT["project"]["version"]
    heading = "Unreleased" if ".dev" in upr.__version__ else upr.__version__
    assert f"## [{heading}]" in (ROOT / "CHANGELOG.md").read_text()


def test_lower_bounds_are_those_of_the_generator() -> None:
    """A runtime refuses code that a newer generator wrote."""
    wire = ROOT / "client" / "upr_protocol" / "wire" / "v1"
    (grpc_version,) = {
        found[1]
        for file in wire.glob("*_pb2_grpc.py")
        if (found := re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", file.read_text()))
    }
    (protobuf_version,) = {
        found[1]
        for file in wire.glob("*_pb2.py")
        if (found := re.search(r"Protobuf Python Version: ([\d.]+)", file.read_text()))
    }
    bounds = {
        re.split(r"[>=<]", requirement)[0]: requirement
        for requirement in PROJECT["project"]["dependencies"]
    }
    assert bounds["grpcio"] == f"grpcio>={grpc_version}"
    assert bounds["protobuf"].startswith(f"protobuf>={protobuf_version},")
    assert f"grpcio-tools=={grpc_version}" in PROJECT["dependency-groups"]["codegen"]


@pytest.mark.parametrize("module", ["upr_client", "upr_protocol.handshake"])
def test_the_sdk_needs_base_dependencies_only(module: str) -> None:
    heavy = "{'lmdb', 'click', 'pyarrow', 'upr'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_commands_to_explain_need_nothing_of_the_server() -> None:
    """They are installed without it, and show what its page shows."""
    heavy = "{'lmdb', 'pyarrow', 'prometheus_client', 'grpc_health', 'upr.engine'}"
    modules = "upr.cli.admin, upr.cli.admin_commands.explain, upr.service.sight.explanation"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_modules_and_functions_stay_short() -> None:
    long = []
    for path in SOURCES:
        lines = path.read_text().count("\n")
        if lines > 900:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
    # A test that tells a story from beginning to end may be longer.
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                # The docstring is not counted: explaining every argument makes nothing harder to read.
                first = node.body[min(ast.get_docstring(node) is not None, len(node.body) - 1)]
                length = node.end_lineno - first.lineno + 1
                if length > 70:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno}: {length} lines")
    assert long == []


def test_modules_classes_and_longer_functions_have_docstrings() -> None:
    bare = []
    for path, tree in trees().items():
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and node.name != "main"
            and (isinstance(node, ast.ClassDef) or len(node.body) > 3)
        ]
        for node in (tree, *public):
            if ast.get_docstring(node) is None and not (node is tree and not tree.body):
                name = "" if isinstance(node, ast.Module) else node.name
                bare.append(f"{path.relative_to(ROOT)}: {name}")
    assert bare == []


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    for command in ("demo", "test"):
        assert f"python3 tools/dev.py {command}" in text
    assert "tools/dev.py test" in (ROOT / ".ci" / "run").read_text()


def test_links_between_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *ROOT.glob("*/*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.long
def test_the_install_lines_of_the_readme_work(tmp_path: Path) -> None:
    """In a copy of what git has, with a home of its own; what it needs from elsewhere is that of this environment."""
    text = (ROOT / "README.md").read_text().partition("\n## Install\n")[2].partition("\n## ")[0]
    blocks = re.findall("```sh\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    extras = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    files = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "upr",
            "client",
            "tools",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, files):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "here" / name)
    # So pip finds all dependencies, and what builds a wheel, in their versions, and takes none from the index.
    (tmp_path / "packages").mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("pip", "upr_stream")) and package.suffix != ".pth":
            (tmp_path / "packages" / package.name).symlink_to(package)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path / "packages"),
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
        # Another test compiles the modules; and what is started but once need not be kept.
        "CC": "no-such-compiler",
        "PIP_NO_COMPILE": "1",
    }
    for count, block in enumerate(blocks):
        # The second way begins without the first, and with the wheel of another version where its wheel is made.
        before = "" if count == 0 else ". ~/upr/bin/activate; pip uninstall -q -y upr-stream\n"
        before += "test ! -e ~/upr/bin/upr-admin\n" if count else ""
        before += "mkdir -p dist; touch dist/upr_stream-0.0.1-py3-none-any.whl\n"
        script = f"set -eu\n{before}{block}\ncd /\nupr-server --version; command -v upr-admin\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path / "here",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"upr-server {upr.__version__}, wire upr.v1" in done.stdout
        assert f"{tmp_path}/upr/bin/upr-admin" in done.stdout


def wheel(folder: Path, compiler: str) -> zipfile.ZipFile:
    """Build the wheel into a folder, with this C compiler."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(
        build, cwd=ROOT, env={**os.environ, "CC": compiler}, check=True, capture_output=True
    )
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


def test_a_wheel_without_a_compiler_is_pure(tmp_path: Path) -> None:
    with wheel(tmp_path, "no-such-compiler") as made:
        assert made.filename is not None
        assert made.filename.endswith("-py3-none-any.whl")
        names = set(made.namelist())
    assert {f"upr/service/sight/page/page.{kind}" for kind in ("html", "css", "js")} <= names
    assert {
        "upr_protocol/block.py",
        "upr_protocol/_rows.pyi",
        "upr/storage/_merge.pyi",
        "upr/storage/_search.pyi",
        "upr/service/buckets/_writer.pyi",
        "pyspark_upr.py",
    } <= names
    assert [name for name in names if name.endswith((".so", ".c", ".h"))] == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_wheel_with_a_compiler_has_the_compiled_modules(tmp_path: Path) -> None:
    with wheel(tmp_path, "cc") as made:
        assert made.filename is not None
        assert not made.filename.endswith("-none-any.whl")
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        modules = {
            source.removesuffix(".c").removeprefix("client/") for source in build_compiled.SOURCES
        }
        assert {module + suffix for module in modules} <= set(made.namelist())
        made.extractall(tmp_path / "installed")
    code = (
        "from upr_protocol import block; from upr.storage import blocks; from upr.service.buckets import disk_threads;"
        "print(block.COMPILED.__name__, blocks.MERGE.__module__, blocks.OPENED.__module__, disk_threads.WRITER.__module__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True
    )
    assert (
        done.stdout
        == b"upr_protocol._rows upr.storage._merge upr.storage._search upr.service.buckets._writer\n"
    )
