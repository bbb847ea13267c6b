"""The node socket's messages as tables of real frames: what we read, what we refuse, and the very bytes we send."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from farhand.protocol.calls import ToolFailure, ToolSpec
from farhand.protocol.errors import ErrorKind, ProtocolError
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.messages import (
    FEATURES,
    FreezeReport,
    GatewayExtras,
    GatewayWelcome,
    Message,
    NodeAnswer,
    NodeExtras,
    NodeFreeze,
    NodeHello,
    NodeInfo,
    NodeQuery,
    NodeThaw,
    Ping,
    Pong,
    Resume,
    ToolAck,
    ToolCancel,
    ToolRequest,
    ToolResponse,
    ToolsUpdate,
    decode,
    encode,
)
from farhand.protocol.version import (
    HELLO_SECONDS,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    MAX_TOOL_RESPONSE_BYTES,
    PROTOCOL_VERSION,
)

NODE = NodeInfo("probe1", "sa-node-probe", "probe", "0.2.1")
UUID = "8e254805-1b39-41d5-bffe-620fc2c9d6a2"


def plain(value: Any) -> Any:
    """A message as builtins, raw JSON read."""
    if isinstance(value, Raw):
        return json.loads(bytes(value))
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


# -- what we send: the exact bytes ------------------------------------------------------------------------

SENT = [
    pytest.param(
        NodeHello(node=NODE, capabilities=["test"]),
        '{"type":"node_hello","protocol_version":1,"node":{"id":"probe1","name":"sa-node-probe","node_type":"probe",'
        '"version":"0.2.1"},"capabilities":["test"]}',
        id="hello of the reference's wire trace",
    ),
    pytest.param(
        NodeHello(
            node=NodeInfo("mac-01", "Steph's Mac", "macos", "0.2.0", ["home"]),
            capabilities=["macos.notes", "macos.clipboard"],
        ),
        '{"type":"node_hello","protocol_version":1,"node":{"id":"mac-01","name":"Steph\'s Mac","node_type":"macos",'
        '"version":"0.2.0","tags":["home"]},"capabilities":["macos.notes","macos.clipboard"]}',
        id="hello of the guide, tags present",
    ),
    pytest.param(
        NodeHello(node=NODE, capabilities=[]),
        '{"type":"node_hello","protocol_version":1,"node":{"id":"probe1","name":"sa-node-probe","node_type":"probe",'
        '"version":"0.2.1"},"capabilities":[]}',
        id="capabilities are sent even when empty",
    ),
    pytest.param(
        GatewayWelcome(gateway_version="0.2.1"),
        '{"type":"gateway_welcome","protocol_version":1,"gateway_version":"0.2.1"}',
        id="plain welcome: exactly three keys",
    ),
    pytest.param(
        ToolRequest(UUID, "test.echo", Raw(b'{"x":1}'), "sess"),
        f'{{"type":"tool_request","request_id":"{UUID}","tool":"test.echo","args":{{"x":1}},"session_key":"sess"}}',
        id="request with a session",
    ),
    pytest.param(
        ToolRequest("r1", "test.echo", Raw(b'{"query":"meeting notes"}')),
        '{"type":"tool_request","request_id":"r1","tool":"test.echo","args":{"query":"meeting notes"}}',
        id="session_key omitted when none",
    ),
    pytest.param(
        ToolRequest("r1", "test.echo"),
        '{"type":"tool_request","request_id":"r1","tool":"test.echo","args":null}',
        id="args always, also when null",
    ),
    pytest.param(
        ToolResponse(UUID, True, Raw(b'{"x":1}')),
        f'{{"type":"tool_response","request_id":"{UUID}","ok":true,"result":{{"x":1}}}}',
        id="success: no error key",
    ),
    pytest.param(
        ToolResponse("r1", True, Raw(b"null")),
        '{"type":"tool_response","request_id":"r1","ok":true,"result":null}',
        id="a tool's null is sent",
    ),
    pytest.param(
        ToolResponse("r1", False, error=ToolFailure("not_allowed", "denied")),
        '{"type":"tool_response","request_id":"r1","ok":false,"error":{"kind":"not_allowed","message":"denied"}}',
        id="failure: no result key",
    ),
    pytest.param(Ping(1794768848341), '{"type":"ping","timestamp":1794768848341}', id="ping"),
    pytest.param(Pong(1794768848341), '{"type":"pong","timestamp":1794768848341}', id="pong"),
    pytest.param(Ping(2**63 - 1), '{"type":"ping","timestamp":9223372036854775807}', id="largest timestamp"),
    pytest.param(Pong(-(2**63)), '{"type":"pong","timestamp":-9223372036854775808}', id="smallest timestamp"),
    pytest.param(
        ToolResponse("r1", True, Raw('"ünï\\n☃"'.encode())),
        '{"type":"tool_response","request_id":"r1","ok":true,"result":"ünï\\n☃"}',
        id="characters as they are, not escaped",
    ),
]


@pytest.mark.parametrize(("message", "frame"), SENT)
def test_a_message_is_sent_as_these_bytes(message: Message, frame: str) -> None:
    assert encode(message) == frame.encode()


@pytest.mark.parametrize(("message", "frame"), SENT)
def test_what_is_sent_reads_back(message: Message, frame: str) -> None:
    assert plain(decode(frame)) == plain(message)
    assert decode(frame.encode()) == decode(frame)
    assert encode(decode(frame)) == frame.encode()


ADDED = [
    pytest.param(
        NodeHello(
            node=NODE,
            capabilities=["test"],
            farhand=NodeExtras(
                features=list(FEATURES),
                tools=[ToolSpec("test.echo", "Echo.", {"type": "object"}, read_only=True)],
                max_request_bytes=5,
                resume=Resume("b1", ["r1"], ["r2"], ["r0"]),
            ),
        ),
        '{"type":"node_hello","protocol_version":1,"node":{"id":"probe1","name":"sa-node-probe","node_type":"probe",'
        '"version":"0.2.1"},"capabilities":["test"],"farhand":{"features":["cancel","resume","tools","freeze","progress"],"tools":[{'
        '"name":"test.echo","description":"Echo.","parameters":{"type":"object"},"read_only":true}],"max_request_bytes":5,'
        '"resume":{"boot":"b1","running":["r1"],"finished":["r2"],"earlier":["r0"]}}}',
        id="hello: ours stands behind the guide's fields",
    ),
    pytest.param(
        GatewayWelcome(gateway_version="1", farhand=GatewayExtras(["cancel"], "g1")),
        '{"type":"gateway_welcome","protocol_version":1,"gateway_version":"1",'
        '"farhand":{"features":["cancel"],"gateway_id":"g1"}}',
        id="welcome",
    ),
    pytest.param(
        ToolRequest("r1", "t", timeout_ms=5),
        '{"type":"tool_request","request_id":"r1","tool":"t","args":null,"timeout_ms":5}',
        id="request with a deadline",
    ),
    pytest.param(
        ToolCancel("r1", "hung up"), '{"type":"tool_cancel","request_id":"r1","reason":"hung up"}', id="cancel"
    ),
    pytest.param(
        NodeQuery(7, "output", Raw(b'{"from":0}')),
        '{"type":"node_query","query_id":7,"kind":"output","params":{"from":0}}',
        id="query",
    ),
    pytest.param(
        NodeAnswer(7, Raw(b"[1]")), '{"type":"node_answer","query_id":7,"result":[1]}', id="answer to a query"
    ),
    pytest.param(
        NodeAnswer(7, error=ToolFailure("not_found", "m")),
        '{"type":"node_answer","query_id":7,"error":{"kind":"not_found","message":"m"}}',
        id="a query that failed",
    ),
    pytest.param(
        NodeFreeze(1, FreezeOrder(5, "owner", "why", "g1")),
        '{"type":"node_freeze","number":1,"order":{"since":5,"by":"owner","reason":"why","gateway_id":"g1"}}',
        id="freeze",
    ),
    pytest.param(NodeThaw(2, "g1"), '{"type":"node_thaw","number":2,"gateway_id":"g1"}', id="thaw"),
    pytest.param(
        FreezeReport(1, True, 3), '{"type":"freeze_report","number":1,"frozen":true,"ended_processes":3}', id="report"
    ),
    pytest.param(ToolAck(["r1", "r2"]), '{"type":"tool_ack","request_ids":["r1","r2"]}', id="ack"),
    pytest.param(
        ToolsUpdate(["a"], [ToolSpec("a.b")]),
        '{"type":"tools_update","capabilities":["a"],"tools":[{"name":"a.b"}]}',
        id="update",
    ),
]


@pytest.mark.parametrize(("message", "frame"), ADDED)
def test_what_farhand_adds_is_sent_as_these_bytes_and_reads_back(message: Message, frame: str) -> None:
    assert encode(message) == frame.encode()
    assert plain(decode(frame)) == plain(message)


def test_the_constants_of_the_guide() -> None:
    assert PROTOCOL_VERSION == 1
    assert MAX_TOOL_RESPONSE_BYTES == 4 * 1024 * 1024
    assert MAX_REQUEST_BYTES == 256 * 1024
    assert MAX_RESPONSE_BYTES == 1024 * 1024
    assert HELLO_SECONDS == 10


# -- what we read -----------------------------------------------------------------------------------------

READ = [
    # 1.3: defaults and optional fields
    (
        '{"type":"node_hello","node":{"id":"a","name":"n","node_type":"t","version":"v"},"capabilities":[]}',
        NodeHello(node=NodeInfo("a", "n", "t", "v"), capabilities=[]),
    ),
    (
        '{"type":"node_hello","protocol_version":4294967295,"node":{"id":"","name":"","node_type":"","version":"",'
        '"tags":[]},"capabilities":["", "x"]}',
        NodeHello(protocol_version=2**32 - 1, node=NodeInfo("", "", "", ""), capabilities=["", "x"]),
    ),
    ('{"type":"gateway_welcome","gateway_version":""}', GatewayWelcome(gateway_version="")),
    (
        '{"type":"gateway_welcome","protocol_version":99,"gateway_version":"9"}',
        GatewayWelcome(protocol_version=99, gateway_version="9"),
    ),
    ('{"type":"tool_request","request_id":"","tool":""}', ToolRequest("", "", Raw(b"null"))),
    (
        '{"type":"tool_request","request_id":"r","tool":"t","args":[1,"2",null],"session_key":null}',
        ToolRequest("r", "t", Raw(b'[1,"2",null]'), None),
    ),
    ('{"type":"tool_request","request_id":"r","tool":"t","args":"text"}', ToolRequest("r", "t", Raw(b'"text"'))),
    # 1.4: an unknown field anywhere
    ('{"type":"ping","timestamp":5,"more":{"type":"pong"}}', Ping(5)),
    (
        '{"type":"node_hello","node":{"id":"a","name":"n","node_type":"t","version":"v","os":"x"},"capabilities":[],'
        '"session":1}',
        NodeHello(node=NodeInfo("a", "n", "t", "v"), capabilities=[]),
    ),
    (
        '{"type":"gateway_welcome","gateway_version":"1","session_id":"s","limits":{"a":[1]}}',
        GatewayWelcome(gateway_version="1"),
    ),
    ('{"type":"tool_request","request_id":"r","tool":"t","deadline":1.5}', ToolRequest("r", "t", Raw(b"null"))),
    (
        '{"type":"tool_response","request_id":"r","ok":false,"error":{"kind":"failed","message":"m","code":7}}',
        ToolResponse("r", False, error=ToolFailure("failed", "m")),
    ),
    ('{"type":"ping","timestamp":5,"a \\"quoted\\" key":1}', Ping(5)),
    # 1.4: the tag need not be first; white space is free
    ('{"timestamp":5,"type":"pong"}', Pong(5)),
    (' {\n\t"timestamp" : 5 ,\r\n "type" : "pong" , "x" : [ "a" , { "b" : "c" } ] } \n', Pong(5)),
    ('{"t\\u0079pe":"ping","timestamp":5}', Ping(5)),
    # 1.4: the array forms
    ('["ping",5]', Ping(5)),
    (' [ "pong" , -5 ] ', Pong(-5)),
    ('["tool_request","r","t",{"x":1},"s"]', ToolRequest("r", "t", Raw(b'{"x":1}'), "s")),
    ('["tool_response","r",true,1]', ToolResponse("r", True, Raw(b"1"))),
    ('["gateway_welcome",1,"0.2.1"]', GatewayWelcome(gateway_version="0.2.1")),
    (
        '{"type":"node_hello","node":["id","name","type","ver"],"capabilities":["c"]}',
        NodeHello(node=NodeInfo("id", "name", "type", "ver"), capabilities=["c"]),
    ),
    (
        '["node_hello",1,["id","name","type","ver",["home"]],["c"]]',
        NodeHello(node=NodeInfo("id", "name", "type", "ver", ["home"]), capabilities=["c"]),
    ),
    # 1.4: responses that leave something out or say too much
    ('{"type":"tool_response","request_id":"r","ok":true}', ToolResponse("r", True)),
    ('{"type":"tool_response","request_id":"r","ok":false}', ToolResponse("r", False)),
    (
        '{"type":"tool_response","request_id":"r","ok":true,"result":1,"error":{"kind":"failed","message":"m"}}',
        ToolResponse("r", True, Raw(b"1"), ToolFailure("failed", "m")),
    ),
    (
        '{"type":"tool_response","request_id":"r","ok":false,"result":null,"error":null}',
        ToolResponse("r", False, Raw(b"null"), None),
    ),
    # a kind we do not know keeps its text
    (
        '{"type":"tool_response","request_id":"r","ok":false,"error":{"kind":"exploded","message":"at dawn"}}',
        ToolResponse("r", False, error=ToolFailure("failed", "at dawn")),
    ),
    # a repeated key inside a body is the body's affair
    ('{"type":"tool_request","request_id":"r","tool":"t","args":{"a":1}}', ToolRequest("r", "t", Raw(b'{"a":1}'))),
    # our own
    ('{"type":"tool_cancel","request_id":"r"}', ToolCancel("r")),
    ('{"type":"tools_update","capabilities":["c"]}', ToolsUpdate(["c"])),
]


@pytest.mark.parametrize(("frame", "message"), READ, ids=[frame[:70] for frame, _ in READ])
def test_this_frame_reads_as(frame: str, message: Message) -> None:
    read = decode(frame)
    assert type(read) is type(message)
    assert plain(read) == plain(message)


def test_absent_and_null_stay_apart_only_where_it_matters() -> None:
    absent = decode('{"type":"tool_response","request_id":"r","ok":true}')
    assert isinstance(absent, ToolResponse)
    assert absent.result is UNSET
    assert absent.error is UNSET


def test_repeated_keys_inside_arguments_are_passed_on_unread() -> None:
    request = decode('{"type":"tool_request","request_id":"r","tool":"t","args":{"a":1,"a":2}}')
    assert isinstance(request, ToolRequest)
    assert bytes(request.args) == b'{"a":1,"a":2}'


def test_a_body_arrives_byte_for_byte() -> None:
    body = '{ "z" : 1.0, "a":\t[ 1e2, 123456789012345678901234567890, "\\u00fc\\ud83d\\ude00" ] }'
    response = decode(f'{{"type":"tool_response","request_id":"r","ok":true,"result":{body}}}')
    assert isinstance(response, ToolResponse)
    assert isinstance(response.result, Raw)
    assert bytes(response.result) == body.encode()


def hello(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "type": "node_hello",
        "node": {"id": "a", "name": "n", "node_type": "t", "version": "v"},
        "capabilities": ["c"],
        **changes,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def node(**changes: Any) -> str:
    fields = {"id": "a", "name": "n", "node_type": "t", "version": "v", **changes}
    return hello(node={name: value for name, value in fields.items() if value is not ...})


REFUSED = [
    # the outer form
    "",
    " ",
    "null",
    "true",
    "5",
    '"ping"',
    "{}",
    "[]",
    "[[]]",
    "[null]",
    "{",
    "}",
    '{"type":"ping","timestamp":5',
    '{"type":"ping","timestamp":5}}',
    '{"type":"ping","timestamp":5}{"type":"ping","timestamp":5}',
    '{"type":"ping","timestamp":5,}',
    "{'type':'ping','timestamp':5}",
    '\ufeff{"type":"ping","timestamp":5}',
    "node_hello",
    # the tag
    '{"type":"PING","timestamp":5}',
    '{"type":"Ping","timestamp":5}',
    '{"type":"","timestamp":5}',
    '{"type":null,"timestamp":5}',
    '{"type":1,"timestamp":5}',
    '{"type":["ping"],"timestamp":5}',
    '{"type":"goodbye"}',
    '{"timestamp":5}',
    '["PING",5]',
    '["goodbye",5]',
    '["tool_ack",["r"]]',
    # integers only
    '{"type":"ping","timestamp":5.0}',
    '{"type":"ping","timestamp":5e0}',
    '{"type":"ping","timestamp":"5"}',
    '{"type":"ping","timestamp":true}',
    '{"type":"ping","timestamp":null}',
    '{"type":"ping","timestamp":[5]}',
    '{"type":"ping"}',
    '{"type":"pong","timestamp":9223372036854775808}',
    '{"type":"pong","timestamp":-9223372036854775809}',
    '{"type":"pong","timestamp":' + "9" * 5000 + "}",
    '["ping"]',
    '["ping",5.0]',
    '["ping",5,6]',
    # wrong types of the other fields
    '{"type":"tool_request","request_id":7,"tool":"t"}',
    '{"type":"tool_request","request_id":null,"tool":"t"}',
    '{"type":"tool_request","tool":"t"}',
    '{"type":"tool_request","request_id":"r"}',
    '{"type":"tool_request","request_id":"r","tool":null}',
    '{"type":"tool_request","request_id":"r","tool":"t","session_key":7}',
    '{"type":"tool_response","request_id":"r","ok":"true"}',
    '{"type":"tool_response","request_id":"r","ok":1}',
    '{"type":"tool_response","request_id":"r","ok":null}',
    '{"type":"tool_response","request_id":"r"}',
    '{"type":"tool_response","request_id":5,"ok":true}',
    '{"type":"tool_response","ok":true}',
    '{"type":"tool_response","request_id":"r","ok":false,"error":"boom"}',
    '{"type":"tool_response","request_id":"r","ok":false,"error":{"kind":"failed"}}',
    '{"type":"tool_response","request_id":"r","ok":false,"error":{"message":"m"}}',
    '{"type":"tool_response","request_id":"r","ok":false,"error":{"kind":"failed","message":5}}',
    '{"type":"tool_response","request_id":"r","ok":false,"error":{"kind":5,"message":"m"}}',
    '{"type":"gateway_welcome"}',
    '{"type":"gateway_welcome","gateway_version":1}',
    '{"type":"gateway_welcome","gateway_version":"1","protocol_version":null}',
    '{"type":"gateway_welcome","gateway_version":"1","protocol_version":-1}',
    hello(protocol_version=None),
    hello(protocol_version=-1),
    hello(protocol_version=1.0),
    hello(protocol_version="1"),
    hello(protocol_version=2**32),
    hello(capabilities=...),
    hello(capabilities=None),
    hello(capabilities="c"),
    hello(capabilities=["c", 5]),
    hello(node=...),
    hello(node=None),
    hello(node="a"),
    hello(node=["a", "n", "t"]),
    node(id=...),
    node(name=...),
    node(node_type=...),
    node(version=...),
    node(id=5),
    node(tags=None),
    node(tags="home"),
    node(tags=["home", None]),
    # duplicated keys, wherever they would decide something
    '{"type":"ping","type":"ping","timestamp":5}',
    '{"type":"ping","type":"pong","timestamp":5}',
    '{"type":"ping","timestamp":5,"timestamp":5}',
    '{"type":"ping","timestamp":5,"timestamp":6}',
    '{ "type" : "ping" , "timestamp" : 5 , "timestamp" : 6 }',
    '{"type":"ping","timestamp":5,"t\\u0069mestamp":6}',
    '{"type":"ping","timestamp":5,"timestamp":6,"\\u0022\\u0022":1}',
    '{"type":"ping","timestamp":5,"timestamp":6,"\\u0022\\"\\u0022":"\\u0022"}',
    '{"type":"tool_request","request_id":"r","request_id":"s","tool":"t"}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":{},"args":{}}',
    '{"type":"tool_response","request_id":"r","ok":true,"ok":false}',
    '{"type":"tool_response","request_id":"r","ok":false,"error":{"kind":"failed","message":"m","message":"n"}}',
    '{"type":"node_hello","node":{"id":"a","id":"b","name":"n","node_type":"t","version":"v"},"capabilities":[]}',
    '{"type":"node_hello","node":["a","n","t","v"],"node":["a","n","t","v"],"capabilities":[]}',
    # broken bodies, which would otherwise be passed on unread
    '{"type":"tool_request","request_id":"r","tool":"t","args":{"a":}}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":01}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":NaN}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":Infinity}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":"\\x"}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":"\t"}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":"\\ud800"}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":"\\ud800\\u0041"}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":"\\udc00"}',
    '{"type":"tool_request","request_id":"r","tool":"t","args":"\\ud800 and more text"}',
    '{"type":"ping","timestamp":5,"\\ud800":1}',
    # text that is no Unicode
    '{"type":"tool_request","request_id":"\ud800","tool":"t"}',
    "\udfff",
    # too deep
    '{"type":"tool_request","request_id":"r","tool":"t","args":' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"type":"tool_request","request_id":"r","tool":"t","args":' + '{"a":' * 100_000,
    "[" * 100_000,
    '{"type":"node_hello","node":' + "[" * 100_000 + "]" * 100_000 + ',"capabilities":[]}',
]


@pytest.mark.parametrize("frame", REFUSED, ids=range(len(REFUSED)))
def test_this_frame_is_refused(frame: str) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        decode(frame)


@pytest.mark.parametrize(
    "frame",
    [b"\xff", b'{"type":"ping","timestamp":5,"x":"\xff"}', b'\x00{"type":"ping","timestamp":5}', b"\xfa\x01\x00\x00"],
)
def test_bytes_that_are_not_text_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        decode(frame)


def test_a_broken_character_in_an_unread_body_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(b'{"type":"tool_response","request_id":"r","ok":true,"result":"\xc3("}')


@pytest.mark.parametrize("kind", ["invalid_args", "not_allowed", "timeout", "failed", "cancelled", "not_found"])
def test_the_six_kinds_go_over_the_wire_under_their_names(kind: str) -> None:
    frame = encode(ToolResponse("r", False, error=ToolFailure(kind, "why")))
    assert json.loads(frame)["error"] == {"kind": kind, "message": "why"}
    read = decode(frame)
    assert isinstance(read, ToolResponse)
    assert read.error == ToolFailure(kind, "why")
    assert ErrorKind.read(kind).value == kind


# -- identity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"SA_NODE_ID": "mac-01", "SA_NODE_NAME": "Steph's Mac", "SA_NODE_TAGS": "home, desk ,,a b,"},
            NodeInfo("mac-01", "Steph's Mac", "macos", "1.2", ["home", "desk", "a b"]),
        ),
        ({"HOSTNAME": "studio"}, NodeInfo("macos:studio", "sa-node-macos", "macos", "1.2")),
        ({"HOST": "studio"}, NodeInfo("macos:studio", "sa-node-macos", "macos", "1.2")),
        ({"HOSTNAME": "one", "HOST": "two"}, NodeInfo("macos:one", "sa-node-macos", "macos", "1.2")),
        (
            {"SA_NODE_ID": "", "SA_NODE_NAME": "", "SA_NODE_TAGS": "", "HOSTNAME": "one"},
            NodeInfo("macos:one", "sa-node-macos", "macos", "1.2"),
        ),
        ({"SA_NODE_TAGS": " , ,", "HOSTNAME": "one"}, NodeInfo("macos:one", "sa-node-macos", "macos", "1.2")),
    ],
)
def test_identity_from_the_environment(environ: dict[str, str], expected: NodeInfo) -> None:
    assert NodeInfo.from_env("macos", "1.2", environ) == expected


def test_without_host_variables_the_system_is_asked() -> None:
    import platform

    assert NodeInfo.from_env("macos", "1.2", {}).id == f"macos:{platform.node() or 'unknown'}"


def test_identity_reads_the_real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SA_NODE_ID", "from-env")
    monkeypatch.setenv("SA_NODE_NAME", "Name")
    monkeypatch.setenv("SA_NODE_TAGS", "x,y")
    assert NodeInfo.from_env("t", "v") == NodeInfo("from-env", "Name", "t", "v", ["x", "y"])


# -- properties -------------------------------------------------------------------------------------------

text = st.text(max_size=20)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=10,
)
raws = json_values.map(lambda value: Raw(msgspec.json.encode(value)))
timestamps = st.integers(-(2**63), 2**63 - 1)
versions = st.integers(0, 2**32 - 1)
names = st.lists(text, max_size=4)
infos = st.builds(NodeInfo, text, text, text, text, names)
specs = st.builds(
    ToolSpec,
    text,
    text,
    st.dictionaries(text, json_values, max_size=3),
    st.booleans(),
    st.none() | text,
    st.none() | st.integers(0, 2**53),
)
failures = st.builds(ToolFailure, st.sampled_from([kind.value for kind in ErrorKind]) | text, text)
extras = st.builds(
    NodeExtras,
    names,
    st.lists(specs, max_size=3),
    st.dictionaries(text, json_values, max_size=3),
    text,
    st.none() | st.integers(0, 2**53),
    st.none() | st.builds(Resume, text, names, names, names),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        NodeHello,
        protocol_version=versions,
        node=infos,
        capabilities=names,
        farhand=st.just(UNSET) | extras,
    ),
    st.builds(
        GatewayWelcome,
        protocol_version=versions,
        gateway_version=text,
        farhand=st.just(UNSET) | st.builds(GatewayExtras, names, text, st.none() | st.integers(0, 2**53)),
    ),
    st.builds(ToolRequest, text, text, raws, st.just(UNSET) | st.none() | text, st.just(UNSET) | st.integers(0, 2**53)),
    st.builds(ToolResponse, text, st.booleans(), st.just(UNSET) | raws, st.just(UNSET) | st.none() | failures),
    st.builds(Ping, timestamps),
    st.builds(Pong, timestamps),
    st.builds(ToolCancel, text, text),
    st.builds(ToolAck, names),
    st.builds(NodeQuery, timestamps, text, raws),
    st.builds(NodeAnswer, timestamps, st.just(UNSET) | raws, st.just(UNSET) | failures),
    st.builds(ToolsUpdate, names, st.lists(specs, max_size=3)),
)


@given(messages)
def test_every_message_comes_back_as_it_went(message: Message) -> None:
    frame = encode(message)
    read = decode(frame)
    assert type(read) is type(message)
    assert plain(read) == plain(message)
    assert encode(read) == frame
    assert decode(frame.decode()) == read


@given(messages)
def test_the_tag_comes_first_and_the_frame_is_compact(message: Message) -> None:
    frame = encode(message).decode()
    assert frame.startswith('{"type":"')
    assert "\n" not in frame


@given(messages, st.data())
def test_an_indented_frame_with_the_fields_shuffled_reads_the_same(message: Message, data: st.DataObject) -> None:
    fields = json.loads(encode(message))
    order = data.draw(st.permutations(list(fields)))
    frame = json.dumps({name: fields[name] for name in order}, indent=data.draw(st.integers(0, 3)))
    assert plain(decode(frame)) == plain(message)


def never_anything_else(frame: str | bytes) -> None:
    """The codec's promise: a message or ProtocolError, and a message it read is one it can send."""
    try:
        message = decode(frame)
    except ProtocolError as error:
        assert str(error)
    else:
        assert isinstance(message, Message)
        json.loads(encode(message), parse_int=str)


@given(st.text(st.characters(codec=None, categories=None)))
@example("\ud800")
def test_no_text_raises_anything_else(frame: str) -> None:
    never_anything_else(frame)


@given(st.binary())
def test_no_bytes_raise_anything_else(frame: bytes) -> None:
    never_anything_else(frame)


@given(json_values)
def test_no_json_raises_anything_else(value: Any) -> None:
    never_anything_else(json.dumps(value))


KEYS = sorted(
    {"type", "request_id", "tool", "args", "session_key", "ok", "result", "error", "timestamp", "node", "farhand"}
    | {
        "capabilities",
        "protocol_version",
        "gateway_version",
        "kind",
        "message",
        "tags",
        "reason",
        "request_ids",
        "tools",
    }
)
TAGS = [
    "node_query",
    "node_answer",
    "node_hello",
    "gateway_welcome",
    "tool_request",
    "tool_response",
    "ping",
    "pong",
    "tool_cancel",
    "tool_ack",
]


@given(st.sampled_from(TAGS), st.dictionaries(st.sampled_from(KEYS), json_values, max_size=8))
def test_no_mixture_of_our_own_fields_raises_anything_else(tag: str, fields: dict[str, Any]) -> None:
    never_anything_else(json.dumps({**fields, "type": tag}))


@given(st.sampled_from([*TAGS, "tools_update"]), st.lists(json_values, max_size=6))
def test_no_array_form_raises_anything_else(tag: str, items: list[Any]) -> None:
    never_anything_else(json.dumps([tag, *items]))


@given(messages, st.data())
def test_no_damaged_frame_raises_anything_else(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        match data.draw(st.sampled_from(["cut", "flip", "insert", "remove", "repeat"])):
            case "cut":
                del frame[at:]
            case "flip" if frame:
                frame[at] = data.draw(st.integers(0, 255))
            case "insert":
                frame[at:at] = data.draw(
                    st.sampled_from([b'"', b"\\", b"\\u0022", b"\\ud800", b"{", b"[", b",", b"\x00"])
                )
            case "remove":
                del frame[at : at + data.draw(st.integers(1, 5))]
            case "repeat":
                frame[at:at] = frame[at : at + data.draw(st.integers(1, 30))]
    never_anything_else(bytes(frame))


@given(
    st.sampled_from(["[", '{"a":', '[{"b":']),
    st.integers(1, 3000),
    st.sampled_from(["args", "result", "error", "node", "farhand", "unknown", "timestamp"]),
    st.booleans(),
)
def test_no_depth_raises_anything_else(opening: str, depth: int, field: str, closed: bool) -> None:
    closing = opening[::-1].translate(str.maketrans("[{", "]}")) if closed else ""
    closing = "".join(character for character in closing if character in "]}")
    body = opening * depth + ("1" if closed else "") + closing * depth
    for tag in ("tool_request", "tool_response", "node_hello", "ping"):
        never_anything_else(
            f'{{"type":"{tag}","request_id":"r","tool":"t","ok":true,"capabilities":[],"{field}":{body}}}'
        )


@given(
    st.sampled_from(["timestamp", "protocol_version", "timeout_ms", "query_id", "args", "result", "unknown"]),
    st.integers(1, 6000),
    st.sampled_from(["", "-", "0", "1.", "1e", "1e-", "1E+"]),
)
def test_no_number_raises_anything_else(field: str, digits: int, sign: str) -> None:
    number = sign + "9" * digits
    for tag in ("ping", "tool_request", "tool_response", "gateway_welcome", "node_query", "node_answer"):
        never_anything_else(
            f'{{"type":"{tag}","request_id":"r","tool":"t","ok":true,"gateway_version":"1","kind":"k","{field}":{number}}}'
        )


@given(
    st.lists(st.sampled_from(["\\ud800", "\\udc00", "\\ud83d", "\\ude00", "a", "\\\\", '\\"', "\\u0041"]), max_size=6)
)
def test_a_body_that_is_read_has_whole_characters(parts: list[str]) -> None:
    """A lone surrogate must not slip through to a caller: it is text that cannot be written anywhere."""
    frame = f'{{"type":"tool_response","request_id":"r","ok":true,"result":"{"".join(parts)}"}}'
    try:
        read = decode(frame)
    except ProtocolError:
        return
    assert isinstance(read, ToolResponse) and isinstance(read.result, Raw)
    json.loads(bytes(read.result)).encode()


@given(messages, st.data())
def test_a_field_sent_twice_is_refused_however_it_is_written(message: Message, data: st.DataObject) -> None:
    fields = json.loads(encode(message))
    name = data.draw(st.sampled_from(list(fields)))
    written = data.draw(st.sampled_from([json.dumps(name), '"' + "".join(f"\\u{ord(c):04x}" for c in name) + '"']))
    space = data.draw(st.sampled_from(["", " ", "\n"]))
    noise = data.draw(
        st.dictionaries(st.text('"\\u02', min_size=1, max_size=6), st.text('"\\', max_size=3), max_size=2)
    )
    assume(not noise.keys() & fields.keys())
    members = [f"{json.dumps(key)}:{space}{json.dumps(value)}" for key, value in {**fields, **noise}.items()]
    members.insert(data.draw(st.integers(0, len(members))), f"{written}:{space}{json.dumps(fields[name])}")
    with pytest.raises(ProtocolError):
        decode("{" + f",{space}".join(members) + "}")


LONG = "x,[{" * 10_000


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n  ", " :\t")])
@pytest.mark.parametrize("body", [LONG, {"result": LONG, "ok": False}, ['"result":', LONG], [1] * 9_000])
def test_a_long_body_is_read_in_any_spelling(separators: tuple[str, str], body: Any) -> None:
    for fields in (
        {"type": "tool_response", "request_id": "r", "ok": True, "result": body},
        {"result": body, "more": {"result": 1}, "ok": True, "request_id": "r", "type": "tool_response"},
    ):
        read = decode(json.dumps(fields, separators=separators))
        assert isinstance(read, ToolResponse) and read.ok and isinstance(read.result, msgspec.Raw)
        assert json.loads(bytes(read.result)) == body


@pytest.mark.parametrize(
    "frame",
    [
        f'{{"type":"tool_response","request_id":"r","ok":true,"result":"{LONG}","result":1}}',
        f'{{"type":"tool_response","request_id":"r","ok":true,"result":1,"result":"{LONG}"}}',
        f'{{"type":"tool_response","ok":false,"request_id":"r","ok":true,"result":"{LONG}"}}',
        f'{{"type":"tool_response","request_id":"r","ok":true,"result":"{LONG}","res\\u0075lt":2}}',
    ],
)
def test_a_repeated_key_beside_a_long_body_is_refused(frame: str) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        '{"type":"pong","timestamp":1,%s"a":1}' % ('"b":1,' * 200_000),
        '{{"type":"pong","timestamp":1,{}"a":1}}'.format("".join(f'"{number}":1,' for number in range(20_000))),
        '{"type":"pong","timestamp":1,"a":"%s"}' % ("x" * 2_000_000),
        '["pong",%s1]' % ("1," * 600_000),
        '{"type":"tool_response","request_id":"r","ok":true,"result":[%s1]}' % ("{}," * 600_000),
        '{"type":"tool_response","request_id":"r","ok":false,"error":{%s"kind":"failed","message":""}}'
        % ('"b":1,' * 90_000),
        '{"type":"tools_update","capabilities":[%s"x"]}' % ('"x",' * 150_000),
    ],
)
def test_a_frame_that_takes_long_to_decode_is_refused_at_once(frame: str) -> None:
    began = time.process_time()
    with pytest.raises(ProtocolError):
        decode(frame)
    assert time.process_time() - began < 0.5
