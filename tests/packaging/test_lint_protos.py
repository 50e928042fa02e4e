"""tools/lint_protos.py, on descriptors made by hand."""

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tools.lint_protos import problems_of

GOOD = """
name: "upr/v1/thing.proto" package: "upr.v1"
options { go_package: "upr/v1;uprv1" java_package: "upr.v1" java_multiple_files: true }
message_type { name: "GetThingRequest" field { name: "some_field" number: 1 } }
message_type { name: "GetThingResponse" }
enum_type {
  name: "ThingState"
  value { name: "THING_STATE_UNSPECIFIED" number: 0 }
  value { name: "THING_STATE_NEW" number: 1 }
}
service {
  name: "ThingService"
  method { name: "GetThing" input_type: ".upr.v1.GetThingRequest" output_type: ".upr.v1.GetThingResponse" }
}
"""
PLACES = (
    [4, 0],
    [4, 0, 2, 0],
    [4, 1],
    [5, 0],
    [5, 0, 2, 0],
    [5, 0, 2, 1],
    [6, 0],
    [6, 0, 2, 0],
)


def problems(text: str, uncommented: list[int] | None = None) -> list[str]:
    """Return the problems of a file whose every part but one has a comment."""
    file = text_format.Parse(text, FileDescriptorProto())
    for place in PLACES:
        words = "" if place == uncommented else " A comment."
        file.source_code_info.location.add(path=place, span=[6, 0, 1], leading_comments=words)
    return problems_of(FileDescriptorSet(file=[file]))


def test_a_good_file_has_no_problems() -> None:
    assert problems(GOOD) == []


def test_every_part_needs_a_comment() -> None:
    for place in PLACES:
        (problem,) = problems(GOOD, uncommented=place)
        assert problem.startswith("upr/v1/thing.proto:7: ")
        assert problem.endswith("has no comment")


def test_each_rule_finds_its_break() -> None:
    for old, new, words in (
        ("upr/v1/thing.proto", "upr/thing.proto", "is not the folder upr"),
        ('package: "upr.v1"', 'package: "upr"', "does not end in a version"),
        ("upr/v1;uprv1", "upr/v2;uprv2", "option go_package is 'upr/v2;uprv2'; must be"),
        ('java_package: "upr.v1"', "", "option java_package is ''; must be 'upr.v1'"),
        ("java_multiple_files: true", "", "option java_multiple_files is False; must be True"),
        ("some_field", "someField", "field someField is not lower_snake_case"),
        ('"ThingService"', '"Things"', "does not end in Service"),
        ("THING_STATE_NEW", "NEW", "does not begin with THING_STATE_"),
        ("THING_STATE_UNSPECIFIED", "THING_STATE_NONE", "is 0 and not THING_STATE_UNSPECIFIED"),
        ('output_type: ".upr.v1.GetThingResponse"', 'output_type: ".upr.v1.Thing"', "its own"),
        ('name: "GetThingResponse"', 'name: "get_thing_response"', "is not CamelCase"),
    ):
        assert old in GOOD
        found = problems(GOOD.replace(old, new))
        assert any(words in problem for problem in found), (new, found)
