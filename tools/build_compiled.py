"""Build hook of hatchling: compiles the modules in C where there is a C compiler, and else leaves them out.

Nothing needs them: without them the same is done in Python. So no failure here ends a build.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES: Final = (
    "client/upr_protocol/_rows.c",
    "upr/storage/_merge.c",
    "upr/storage/_search.c",
    "upr/service/buckets/_writer.c",
)
SECONDS: Final = 120.0
"""Longest time for the compiler."""


def compiled(source: Path, folder: Path) -> Path | None:
    """Compile a module's source into a folder. Return the module's file, None if that was not possible.

    ``CC`` of the environment names the compiler; else it is the one that Python was built with.
    """
    if sys.implementation.name != "cpython":
        return None
    target = folder / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
    # Beside it and moved there: a running process may have the old one loaded.
    made = target.with_suffix(f".{os.getpid()}")
    include = sysconfig.get_paths()["include"]
    options = ["-O3", "-shared", "-fPIC", "-pthread", f"-I{include}", str(source), "-o", str(made)]
    nothing = subprocess.DEVNULL
    try:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        folder.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        # No pipes: what the compiler starts would hold them open beyond the time.
        subprocess.run(
            [*compiler, *options], check=True, stdout=nothing, stderr=nothing, timeout=SECONDS
        )
        made.replace(target)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    finally:
        made.unlink(missing_ok=True)
    return target


class CompiledHook(BuildHookInterface[Any]):
    """Adds the compiled modules to wheels, and puts each beside its source for editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; ``version`` is "editable" or "standard"."""
        for source in [Path(self.root) / source for source in SOURCES]:
            if version == "editable":
                compiled(source, source.parent)
                continue
            module = compiled(source, Path(self.directory) / "compiled")
            if module is not None:
                package = source.parent.relative_to(self.root).as_posix().removeprefix("client/")
                build_data["pure_python"] = False
                build_data["infer_tag"] = True
                build_data["force_include"][str(module)] = f"{package}/{module.name}"
