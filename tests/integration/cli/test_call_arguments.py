"""Arguments at the prompt: typed by the tool's schema, from files, as JSON; mistakes name what was meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from farhand.cli.calls.arguments import ToolSchema, read_arguments
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "either": {"type": ["string", "integer"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "table": {"type": "object"},
        "choice": {"enum": ["a", "1"]},
        "named": {"$ref": "#/$defs/Name"},
        "any": {},
        "odd": 5,
    },
    "$defs": {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
}


def read(*arguments: str) -> Any:
    return read_arguments(arguments, ToolSchema(SCHEMA, {"content": "text"}))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("text=false", "false"),
        ("text=2", "2"),
        ("text=null", "null"),
        ("text={}", "{}"),
        ("text=", ""),
        ("text=a=b", "a=b"),
        ("text=@@home", "@home"),
        ("content=7", "7"),
        ("maybe=null", "null"),
        ("maybe:=null", None),
        ("count=5", 5),
        ("count:=5", 5),
        ("ratio=1", 1),
        ("ratio=0.5", 0.5),
        ("ratio=null", None),
        ("flag=true", True),
        ("either=5", 5),
        ("either=five", "five"),
        ("words=one", ["one"]),
        ("words=5", ["5"]),
        ('words=["a", "b"]', ["a", "b"]),
        ("sizes=5", [5]),
        ('table={"a": 1}', {"a": 1}),
        ("choice=1", "1"),
        ("named=5", "5"),
        ("any=5", 5),
        ("any=five", "five"),
        ("odd=5", 5),
        ("unknown=5", 5),
    ],
)
def test_a_value_has_the_type_of_its_parameter(argument: str, value: Any) -> None:
    key = argument.partition("=")[0].removesuffix(":")
    assert read(argument) == {key: value}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("count=five", "'count' takes a value of type integer"),
        ("count=1.5", "integer"),
        ("flag=yes", "boolean"),
        ("table=5", "object"),
        ("text:=five", "takes JSON"),
        ("text=@/no/such/file", "cannot read /no/such/file"),
        ("text=@", "a file without a name"),
        ("=5", "KEY=VALUE"),
        (":=5", "KEY=VALUE"),
    ],
)
def test_a_wrong_value_is_named(argument: str, said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        read(argument)
    assert said in caught.value.format_message()


def test_lists_are_repeated_and_other_keys_are_not(tmp_path: Path) -> None:
    assert read("words=a", "words=b") == {"words": ["a", "b"]}
    with pytest.raises(click.UsageError):
        read("text=a", "text=b")
    (tmp_path / "n").write_text("12\n")
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    assert read(f"count=@{tmp_path}/n", f"text=@{tmp_path}/n") == {"count": 12, "text": "12\n"}
    assert read(f"any=@{tmp_path}/n", f"table:=@{tmp_path}/n") == {"any": "12\n", "table": 12}
    with pytest.raises(click.UsageError):
        read(f"text=@{tmp_path}/b")


@pytest.fixture(scope="module")
def command(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("laptop"), "laptop"):
        yield Command(shared_gateway.home)


def test_text_that_looks_like_json_reaches_a_node_as_text(command: Command, tmp_path: Path) -> None:
    ran = command("call", "laptop__Bash", "command=false", "--json").json()
    assert ran["ok"] is True and ran["result"]["exitCode"] == 1
    file, source = tmp_path / "a", tmp_path / "source"
    source.write_text("ünï\n1\n")
    assert command("call", "laptop__Write", f"path={file}", f"content=@{source}").status == 0
    assert command("call", "laptop__Edit", f"path={file}", "oldString=1", "newString=2").status == 0
    assert file.read_text() == "ünï\n2\n"
    many = command("call", "--on", "laptop", "Bash", "command=true", "--json").json()
    assert many["results"][0]["exit_code"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cal", "laptop__Bash"], "did you mean call"),
        (["token", "creat"], "did you mean create"),
        (["call", "latop__Bash", "command=id"], "did you mean 'laptop'?"),
        (["call", "laptop__Bsh", "command=id"], "did you mean laptop__Bash?"),
        (["call", "gsv__ReadFil", "path=a"], "did you mean gsv__ReadFile"),
        (["call", "laptop__Bash", "comand=id"], "did you mean 'command'?"),
        (["tools", "laptop__Bsh"], "did you mean laptop__Bash"),
        (["call", "Read", "path=a"], "did you mean laptop__Read?"),
        (["call", "laptop__Read"], "parameter 'path' is missing"),
        (["logs", "latop"], "did you mean 'laptop'?"),
        (["attach", "latop", "x"], "there is no node 'latop'; `farhand nodes`"),
        (["nodes", "forget", "latop"], "did you mean 'laptop'?"),
        (["token", "revoke", "zzz"], "`farhand token list`"),
        (["undo", "zzz"], "`farhand calls`"),
        (["trial", "show", "zzz"], "`farhand calls`"),
        (["config", "get", "gatway.port"], "did you mean gateway.port?"),
    ],
)
def test_mistakes_name_what_was_meant(command: Command, arguments: list[str], said: str) -> None:
    found = command(*arguments)
    assert found.status != 0 or arguments[0] == "tools"
    assert said in found.err, found


def test_a_token_for_one_tool_lists_what_it_may_use(command: Command, shared_gateway: GatewayProcess) -> None:
    made = command("token", "create", "--tool", "laptop__Read", "--json").json()
    narrow = Command(shared_gateway.home)
    narrow.env |= {"FARHAND_TOKEN": made["token"], "FARHAND_URL": shared_gateway.url}
    assert [one["name"] for one in narrow("tools", "--json").json()["tools"]] == ["laptop__Read"]
    assert narrow("tools", "laptop__Read").status == 0
    assert narrow("call", "laptop__Read", "path=/etc/hostname").status == 0
    similar = shared_gateway.request("GET", "/v1/tools?name=laptop__Reads", token=made["token"]).json()["similar"]
    assert similar == ["laptop__Read"]
    blind = command("token", "create", "--scope", "freeze", "--json").json()
    assert shared_gateway.request("GET", "/v1/tools", token=blind["token"]).status == 403


def test_a_hostile_schema_breaks_nothing() -> None:
    for schema in ({"properties": {"a": {"$ref": "#/$defs/Loop"}}, **SCHEMA}, {"properties": []}, [], None, 5):
        assert read_arguments(["zz=5"], ToolSchema(json.loads(json.dumps(schema)))) == {"zz": 5}
    looped = {"properties": {"a": {"$ref": "#/$defs/Loop"}}, "$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}
    assert read_arguments(["a=5"], ToolSchema(looped)) == {"a": 5}
