"""Check the naming and comment rules of ``protos/``, on what protoc understood of them. What is etcd's has etcd's names.

Runs where the code generator is installed (``.venv-codegen``); needs no network.

- A file's folder is its package, and the package ends in a version; its packages in Go and Java follow from that.
- A service ends in ``Service``; each RPC has a request and a response of its own, ``XRequest`` and ``XResponse``.
- An enum's values begin with the enum's name, and the one for 0 ends in ``_UNSPECIFIED``.
- Messages, enums, services and RPCs are CamelCase, fields and oneofs lower_snake_case.
- Every message, field, oneof, enum, enum value, service and RPC has a comment.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
CAMEL = re.compile(r"[A-Z][A-Za-z0-9]*")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

# Field numbers of descriptor.proto, of which the paths in the source information are made.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
ENUM_VALUE = 2
SERVICE_METHOD = 2

Place = tuple[int, ...]


def describe(protos: Path) -> FileDescriptorSet:
    """Return what protoc understands of all files of our own under a folder, with their comments."""
    files = sorted(str(file) for file in (protos / "upr").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"-I{protos}",
                f"--descriptor_set_out={out}",
                "--include_source_info",
                *files,
            ],
            check=True,
        )
        return FileDescriptorSet.FromString(out.read_bytes())


class FileRules:
    """The rules for one file, by its descriptor with source information."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): location.leading_comments.strip()
            for location in file.source_code_info.location
        }
        self._lines = {
            tuple(location.path): location.span[0] + 1
            for location in file.source_code_info.location
            if location.span
        }

    def problems(self) -> Iterator[str]:
        """Yield a line for each break of a rule."""
        file = self._file
        folder = str(PurePosixPath(file.name).parent).replace("/", ".")
        if folder != file.package:
            yield self._at((), f"the package {file.package} is not the folder {folder}")
        if not re.fullmatch(r".*\.v[1-9][0-9]*", file.package):
            yield self._at((), f"the package {file.package} does not end in a version")
        # So that the files of a folder become one package there as well.
        for option, wanted in (
            ("go_package", f"{folder.replace('.', '/')};{folder.replace('.', '')}"),
            ("java_package", folder),
            ("java_multiple_files", True),
        ):
            if (found := getattr(file.options, option)) != wanted:
                yield self._at((), f"option {option} is {found!r}; must be {wanted!r}")
        for index, message in enumerate(file.message_type):
            yield from self._message(message, (FILE_MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            yield from self._enum(enum, (FILE_ENUM, index))
        for index, service in enumerate(file.service):
            yield from self._service(service, (FILE_SERVICE, index))

    def _at(self, place: Place, words: str) -> str:
        return f"{self._file.name}:{self._lines.get(place, 1)}: {words}"

    def _named(self, place: Place, kind: str, name: str, form: re.Pattern[str]) -> Iterator[str]:
        if not form.fullmatch(name):
            yield self._at(
                place,
                f"{kind} {name} is not {'CamelCase' if form is CAMEL else 'lower_snake_case'}",
            )
        if not self._comments.get(place):
            yield self._at(place, f"{kind} {name} has no comment")

    def _message(self, message: DescriptorProto, place: Place) -> Iterator[str]:
        yield from self._named(place, "message", message.name, CAMEL)
        optional = FieldDescriptorProto.Label.LABEL_OPTIONAL
        synthetic = {
            field.oneof_index
            for field in message.field
            if field.proto3_optional and field.label == optional
        }
        for index, field in enumerate(message.field):
            yield from self._named((*place, MESSAGE_FIELD, index), "field", field.name, SNAKE)
        for index, oneof in enumerate(message.oneof_decl):
            if index not in synthetic:
                yield from self._named((*place, MESSAGE_ONEOF, index), "oneof", oneof.name, SNAKE)
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*place, MESSAGE_NESTED, index))
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*place, MESSAGE_ENUM, index))

    def _enum(self, enum: EnumDescriptorProto, place: Place) -> Iterator[str]:
        yield from self._named(place, "enum", enum.name, CAMEL)
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        for index, value in enumerate(enum.value):
            at = (*place, ENUM_VALUE, index)
            if not value.name.startswith(prefix):
                yield self._at(at, f"enum value {value.name} does not begin with {prefix}")
            if value.number == 0 and value.name != f"{prefix}UNSPECIFIED":
                yield self._at(at, f"enum value {value.name} is 0 and not {prefix}UNSPECIFIED")
            if not self._comments.get(at):
                yield self._at(at, f"enum value {value.name} has no comment")

    def _service(self, service: ServiceDescriptorProto, place: Place) -> Iterator[str]:
        yield from self._named(place, "service", service.name, CAMEL)
        if not service.name.endswith("Service"):
            yield self._at(place, f"service {service.name} does not end in Service")
        for index, method in enumerate(service.method):
            at = (*place, SERVICE_METHOD, index)
            yield from self._named(at, "rpc", method.name, CAMEL)
            for found, wanted in (
                (method.input_type, f"{method.name}Request"),
                (method.output_type, f"{method.name}Response"),
            ):
                if found != f".{self._file.package}.{wanted}":
                    yield self._at(at, f"rpc {method.name} uses {found[1:]}, not its own {wanted}")


def problems_of(files: FileDescriptorSet) -> list[str]:
    """Return a line for each break of a rule in the files."""
    problems = [problem for file in files.file for problem in FileRules(file).problems()]
    names = Counter(method.name for f in files.file for s in f.service for method in s.method)
    problems += [f"rpc {name} is there {count} times" for name, count in names.items() if count > 1]
    return problems


def main() -> int:
    """Check protos/ and print what is wrong; status 1 if anything is."""
    problems = problems_of(describe(ROOT / "protos"))
    for problem in problems:
        print(f"protos/{problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
