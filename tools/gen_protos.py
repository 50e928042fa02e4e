"""Generate the wire code from ``protos/`` into ``client/upr_protocol/wire/v1``.

``python tools/gen_protos.py`` writes, ``--check`` compares whole texts and the set of files and exits 1 when
they differ. The generator is the oldest one supported, pinned in pyproject's group "codegen": a protobuf
runtime refuses code from a newer generator, so its version is the users' lower bound.

protoc writes ``from upr.v1 import x_pb2``, which would be this project's server package; that one pattern is
rewritten to a relative import.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "client" / "upr_protocol" / "wire" / "v1"
IMPORT = re.compile(r"^from upr\.v1 import (\w+)", re.MULTILINE)
INIT = '"""Generated from protos/upr/v1 by tools/gen_protos.py. Never edited."""\n'


def generate() -> dict[str, str]:
    """Run protoc in a temporary folder and return file name -> text."""
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
        command += [
            f"--{kind}={out}"
            for kind in ("python_out", "mypy_out", "grpc_python_out", "mypy_grpc_out")
        ]
        # protoc finds its plugins on the PATH, where a virtual environment that is not activated is missing.
        path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        subprocess.run([*command, *map(str, protos)], check=True, env=path)
        texts = {"__init__.py": INIT}
        for file in sorted((out / "upr" / "v1").iterdir()):
            text = IMPORT.sub(r"from . import \1", file.read_text())
            if "_pb2_grpc" in file.name and "Stub" not in text:
                continue
            texts[file.name] = text
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    texts = generate()
    present = {file.name: file.read_text() for file in TARGET.glob("*.py*") if file.is_file()}
    differing = sorted(
        name for name in texts.keys() | present.keys() if texts.get(name) != present.get(name)
    )
    if options.check:
        for name in differing:
            print(f"not fresh: {TARGET.relative_to(ROOT) / name}", file=sys.stderr)
        return 1 if differing else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in present.keys() - texts.keys():
        (TARGET / name).unlink()
    for name, text in texts.items():
        (TARGET / name).write_text(text)
    print(f"{len(texts)} files, {len(differing)} changed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
