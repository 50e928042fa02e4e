"""Generate the wire code from ``protos/``: ``protos/upr/v1`` into ``client/upr_protocol/wire/v1``, and the part of etcd's API
in ``protos/etcd`` into ``upr/cluster/wire``.

``python -m tools.gen_protos`` writes, ``--check`` compares whole texts and the set of files and exits 1 when
they differ. The generator is the oldest one supported, pinned in pyproject's group "codegen": a protobuf
runtime refuses code from a newer generator, so its version is the users' lower bound.

protoc writes ``from upr.v1 import x_pb2``, which would be this project's server package; imports of that kind are
rewritten to relative ones.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.unasync import ROOT, refresh

TARGETS = {
    "upr/v1": ROOT / "client" / "upr_protocol" / "wire" / "v1",
    "etcd": ROOT / "upr" / "cluster" / "wire",
}
"""Folder of the code by folder of the protos."""
IMPORT = re.compile(r"^(?:from (?:upr\.v1|etcd) )import (\w+)", re.MULTILINE)


def generate() -> dict[Path, str]:
    """Run protoc in a temporary folder and return file -> text."""
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
        texts = {}
        for source, target in TARGETS.items():
            words = f"Generated from protos/{source} by tools/gen_protos.py. Never edited."
            texts[target / "__init__.py"] = f'"""{words}"""\n'
            for file in sorted((out / source).iterdir()):
                text = IMPORT.sub(r"from . import \1", file.read_text())
                if "_pb2_grpc" in file.name and "Stub" not in text:
                    continue
                texts[target / file.name] = text
    return texts


if __name__ == "__main__":
    sys.exit(refresh(__doc__, generate, list(TARGETS.values())))
