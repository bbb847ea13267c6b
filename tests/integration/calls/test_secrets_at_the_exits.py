"""Secrets the gateway knows, tried at every way out: results, errors, records, streams, output, logs, model, people."""

from __future__ import annotations

import base64
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from farhand.protocol.redaction import KnownSecrets, StreamRedactor
from tests.support.channel_servers import WebhookReceiver
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, calls, text

API_KEY = "prov-7f3k9q2m5x8w1z4t"
CHANNEL = 'chan-p4ss w"rd-éclair-99'
ENVIRONMENT = "env-0123-abcdef-secret"
IN_URL = "inside-an-address-77"
SHARED = "shared-node-token"


class House:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.says: Any = lambda request: text("nothing")
        self.model = ModelServer(answer=lambda request: self.says(request))  # noqa: PLW0108
        self.receiver = WebhookReceiver(None)

    def __enter__(self) -> House:
        self.model.__enter__()
        self.receiver.up()
        home = self.folder / "home"
        home.mkdir(mode=0o700)
        (home / "farhand.toml").write_text(
            f'[channels.crm]\nkind = "webhook"\nurl = "{self.receiver.url}/in"\nsecret = {json.dumps(CHANNEL)}\n'
            f'policy = "open"\ntools = "all"\n[providers.spare]\nbase_url = "http://me:{IN_URL}@127.0.0.1:9/v1"\n'
        )
        env = {"OPENAI_BASE_URL": self.model.url, "OPENAI_API_KEY": API_KEY, "FARHAND_MODEL": "scripted"}
        self.gateway = GatewayProcess(home, env={**env, "SOME_SERVICE_TOKEN": ENVIRONMENT})
        self.gateway.start()
        self.node = NodeProcess(self.gateway, self.folder / "laptop", "laptop")
        self.node.__enter__()
        self.secrets = [API_KEY, CHANNEL, ENVIRONMENT, IN_URL, SHARED, self.gateway.token]
        return self

    def __exit__(self, *_: object) -> None:
        self.node.__exit__()
        self.gateway.stop()
        self.model.__exit__(None, None, None)
        self.receiver.down()

    def leaks(self, data: bytes | str) -> list[str]:
        """Which secrets are in there, in any spelling."""
        whole = data.decode(errors="replace") if isinstance(data, bytes) else data
        spellings = {
            secret: (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret))
            for secret in self.secrets
        }
        return [secret for secret, forms in spellings.items() if any(form in whole for form in forms)]

    def safe(self, what: str, *answers: bytes | str) -> None:
        held = sum(not self.leaks(answer) for answer in answers)
        print(f"{what}: {len(answers)} tried, {held} held")
        assert answers and [self.leaks(answer) for answer in answers] == [[]] * len(answers), answers


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("exits")) as one:
        yield one


def invoke(house: House, tool: str, args: Any, **more: Any) -> Any:
    return house.gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args, **more})


def test_results_errors_and_records(house: House) -> None:
    """Of any door to a call, the first time and once its connection is known."""
    (house.node.workspace / "all").write_text("\n".join(house.secrets))
    (house.gateway.home / "agents" / "main" / "all").write_text("\n".join(house.secrets))
    answers = []
    for tool, args in (
        ("laptop__Bash", {"command": "cat all"}),
        ("laptop__Read", {"path": "all"}),
        ("laptop__Grep", {"pattern": "-", "path": "all"}),
        ("read", {"path": "all"}),
        ("exec", {"command": "cat all"}),
        ("gsv__ReadFile", {"path": "all"}),
        *(("laptop__Bash", {"command": f"echo '{secret}'"}) for secret in house.secrets),
        *(("laptop__Read", {"path": f"/nowhere/{secret}"}) for secret in house.secrets),
        *((f"nobody.{secret}", {}) for secret in house.secrets),
    ):
        answer = invoke(house, tool, args)
        assert (answer.status == 200 and b"***" in answer.body) or "nobody" in tool, (tool, answer)
        answers.append(answer.body)
        answers.append(house.gateway.request("GET", f"/v1/calls/{answer.json()['request_id']}").body)
    answers.append(house.gateway.request("GET", "/v1/calls?limit=100").body)
    answers.append(house.gateway.request("GET", "/v1/jobs").body)
    house.safe("answers and records of calls", *answers)


def test_every_answer_of_a_connection(house: House) -> None:
    (house.node.workspace / "one").write_text(API_KEY)
    body = json.dumps({"tool": "laptop__Read", "args": {"path": "one"}}).encode()
    line = http.client.HTTPConnection("127.0.0.1", house.gateway.port, timeout=30)
    answers = []
    for _ in range(5):
        headers = {"Authorization": f"Bearer {house.gateway.token}", "Content-Type": "application/json"}
        line.request("POST", "/v1/tools/invoke", body, headers)
        answers.append(line.getresponse().read())
    line.close()
    assert all(b"***" in answer for answer in answers)
    house.safe("answers on one connection", *answers)


def test_agent_process_and_other_errors(house: House) -> None:
    answers = []
    for secret in house.secrets:
        body = {
            "session_id": "s",
            "user_id": "u",
            "input": [{"role": "user", "content": [{"type": "text", "text": "run"}]}],
            "biz_params": {"tool": "shell", "tool_input": {"command": f"echo '{secret}'"}},
        }
        answers.append(house.gateway.request("POST", "/agent/process", {**body, "stream": False}).body)
        answers.append(house.gateway.request("POST", "/agent/process", {**body, "stream": True}).body)
        answers.append(house.gateway.request("GET", f"/v1/nothing/{quote(secret, safe='')}").body)
        answers.append(house.gateway.request("GET", f"/v1/calls/{quote(secret, safe='')}").body)
        answers.append(house.gateway.request("POST", "/v1/sessions/x/messages", {"message": [secret]}).body)
    house.safe("other doors and errors", *answers)


def test_answers_of_mcp(house: House) -> None:
    (house.node.workspace / "all").write_text("\n".join(house.secrets))
    headers = {"Accept": "application/json, text/event-stream"}
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": client}
    headers["Mcp-Session-Id"] = house.gateway.request("POST", "/mcp", hello, headers=headers).headers["mcp-session-id"]
    answers = []
    for secret in house.secrets:
        for tool, arguments in (("laptop__Read", {"path": "all"}), ("laptop__Bash", {"command": f"echo '{secret}'"})):
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
            answers.append(house.gateway.request("POST", "/mcp", call, headers=headers).body)
    assert sum(b"***" in answer for answer in answers) == len(answers), answers
    house.safe("answers to MCP clients", *answers)


def test_the_journal(house: House) -> None:
    for secret in house.secrets:
        made = house.gateway.request("POST", "/v1/tokens", {"label": secret, "scopes": ["read"]})
        assert made.json()["token"].startswith("fhc_"), "a new token is shown to its creator, once"
        house.gateway.request("DELETE", f"/v1/tokens/{made.json()['id']}")
    listed = house.gateway.request("GET", "/v1/events?follow=0", headers={"Last-Event-ID": "0"}).body
    assert b"token.created" in listed and b"***" in listed
    house.safe("the journal and the list of tokens", listed, house.gateway.request("GET", "/v1/tokens").body)


def test_output_in_pieces_and_from_any_byte_on(house: House) -> None:
    """A secret is printed in two pieces, and asked for in all pairs of halves."""
    secret = house.gateway.token
    first, second = secret[:9], secret[9:]
    (house.node.workspace / "go").unlink(missing_ok=True)
    command = f"printf %s 'before {first}'; until [ -e go ]; do sleep 0.05; done; printf %s '{second} after'"
    call = house.node.begin("Bash", {"command": command})
    path = f"/v1/calls/{call}/output"

    def there() -> Any:
        answer = house.gateway.request("GET", f"{path}?wait=0")
        return answer if answer.status == 200 and answer.body else None

    early = wait_until(there, 15, "the first half")
    assert early.body == b"before " and early.headers["x-next-offset"] == "7", "what may be a secret waits"
    (house.node.workspace / "go").touch()
    house.node.end_of(call)
    whole = house.gateway.request("GET", path).body
    assert whole == b"before " + b"*" * len(secret) + b" after"
    parts = [house.gateway.request("GET", f"{path}?wait=0&offset={place}") for place in range(len(whole))]
    assert [part.body for part in parts] == [whole[place:] for place in range(len(whole))]
    assert all(part.headers["x-next-offset"] == str(len(whole)) for part in parts)
    house.safe("output from every byte on", whole, *(part.body for part in parts))
    assert first.encode() not in whole and second.encode() not in parts[16].body


def test_a_command_that_prints_a_secret_while_it_is_asked(house: House) -> None:
    """Each secret is printed in two pieces, cut at several places; the tools that tend commands are asked in between.

    Then so much follows that what they show begins in the midst of the secret.
    """
    answers: list[str] = []

    def content(answer: Any) -> str:
        result = answer.json()["result"]
        return str(result.get("content") or result.get("tail") or result.get("log") or result)

    for number, (secret, place) in enumerate((one, cut) for one in house.secrets for cut in (5, len(one) - 5)):
        first, second = secret[:place], secret[place:]
        for folder in (house.node.workspace, house.gateway.home / "agents" / "main"):
            (folder / "first").write_text(first)
            (folder / "second").write_text(second)
            for name in ("go", "more", "end"):
                (folder / name).unlink(missing_ok=True)
        for tool, folder, seen in (
            ("laptop__Bash", house.node.workspace, 4000),
            ("exec", house.gateway.home / "agents" / "main", 9981),
        ):
            wait = "until [ -e {} ]; do sleep 0.02; done; "
            command = f"printf 'before{number} %50s'; cat first; {wait.format('go')} cat second; printf ' after'; "
            command += f"{wait.format('more')} head -c {seen - 6 - len(second) // 2} /dev/zero | tr '\\0' '.'; "
            begun = invoke(house, tool, {"command": command + wait.format("end"), "background": True}).json()["result"]
            if tool == "exec":
                about = {"process_id": begun["content"].split()[-1]}
                asks = [("process", {"action": "poll", **about})]
            else:
                about = {"sessionId": begun["sessionId"]}
                asks = [("laptop__Process", {"action": action, **about}) for action in ("poll", "log")]
                asks.append(("laptop__Process", {"action": "list"}))

            def asked(what: str, asks: list[Any] = asks) -> list[str]:
                def there() -> list[str] | None:
                    found = [invoke(house, name, args) for name, args in asks]
                    return [content(one) for one in found] if what in content(found[0]) else None

                return wait_until(there, 20, what)

            reported = asked(f"before{number} ")
            wait_until(lambda reported=asked: "***" in reported("before")[0], 20, "the first half")
            reported += asked("***")
            (folder / "go").touch()
            reported += asked(" after")
            (folder / "more").touch()
            reported += asked(" after....")
            reported += wait_until(
                lambda reported=asked: found if not (found := reported("..."))[0].startswith("before") else None,
                20,
                "the end",
            )
            (folder / "end").touch()
            assert all(first not in text and second not in text for text in reported), (tool, secret, reported)
            assert "*** after" in "".join(reported) and reported[0].startswith("before")
            answers += reported
    house.safe("what was asked while secrets were printed", *answers)


def test_texts_that_are_cut(house: House) -> None:
    """Where a tool shows a part of a text alone, it shows no part of a secret."""
    own = house.gateway.home / "agents" / "main"
    secret = API_KEY
    answers = []

    def tried(tool: str, args: Any) -> None:
        answer = invoke(house, tool, args)
        assert answer.json()["ok"], answer
        answers.append(answer.body)

    for shown in (6, len(secret) - 1):  # the number of letters before the cut
        for folder in (own, house.node.workspace):
            (folder / "line").write_text("x" * (200 - shown) + secret)
        tried("laptop__Grep", {"pattern": "xx", "path": "line"})
        (own / "line").write_text("x" * (1000 - shown) + secret)
        tried("grep", {"pattern": "xx", "path": "line"})
        (own / "long").write_text("x" * (512 * 1024 - 400 - shown) + secret + "y" * 50)
        tried("read", {"path": "long"})
        tried("read", {"path": "long", "skip_bytes": 512 * 1024 - 400})
        tried("exec", {"command": f"head -c {100_000 - 33 - shown} /dev/zero | tr '\\0' x; echo {secret} {secret}"})
        tried("laptop__Bash", {"command": f"echo {secret}; head -c {4000 - 1 - shown} /dev/zero | tr '\\0' y"})
        tried("laptop__Bash", {"command": f"echo {secret}; head -c {200_000 - 1 - shown} /dev/zero | tr '\\0' y"})
        for tool, given in (
            ("shell", {"command": f"head -c {16_384 - shown} /dev/zero | tr '\\0' x; echo {secret}"}),
            ("read_file", {"path": "beginning"}),
        ):
            (own / "beginning").write_text("x" * (65_536 - shown) + secret)
            chat = {"session_id": "c", "user_id": "u", "stream": False, "biz_params": {"tool": {}}}
            chat["biz_params"] = {"tool": {"name": tool, "input": given}}
            chat["input"] = [{"role": "user", "content": [{"type": "text", "text": "run"}]}]
            answer = house.gateway.request("POST", "/agent/process", chat)
            assert answer.status == 200, answer
            answers.append(answer.body)
        slow = {"command": f"echo {secret}; head -c {1000 - 1 - shown} /dev/zero | tr '\\0' y; sleep 9"}
        late = {**chat, "biz_params": {"tool": {"name": "shell", "input": {**slow, "timeout_seconds": 1}}}}
        answer = house.gateway.request("POST", "/agent/process", late)
        assert answer.status == 500 and b"yyy" in answer.body, answer
        answers.append(answer.body)
        (own / "beginning").write_text("x" * (160 - shown) + secret + "z" * 500)
        answers.append(house.gateway.request("POST", "/agent/process", chat).body)
        named = {**chat, "session_id": f"named-{shown}"}
        named["input"] = [{"role": "user", "content": [{"type": "text", "text": "x" * (20 - shown) + secret}]}]
        answers.append(house.gateway.request("POST", "/agent/process", named).body)
        answers.append(house.gateway.request("GET", "/chats").body)
        for title in ("x" * (60 - shown) + secret, "x" * (80 - shown) + secret):
            house.says = lambda request: text("fine")
            key = f"titled-{len(answers)}"
            house.gateway.request("POST", f"/v1/sessions/{key}/messages", {"message": title, "wait_seconds": 60})
        answers.append(house.gateway.request("GET", "/v1/sessions?limit=100").body)
        line = {"tool": "Bash", "args": {"command": f"printf %s {'x' * (200 - shown)}{secret}"}, "nodes": ["laptop"]}
        answer = house.gateway.request("POST", "/v1/tools/fanout", line)
        assert answer.status == 200, answer
        answers.append(answer.body)
        (own / "MEMORY.md").write_text("remember " + "w" * (1200 - 9 - shown) + secret + " w")
        tried("memory_search", {"query": "remember", "min_score": 0})
    (own / "MEMORY.md").unlink()
    whole = b"".join(answers)
    parts = [secret[:size].encode() for size in range(5, len(secret))]
    parts += [secret[-size:].encode() for size in range(5, len(secret))]
    assert not [part for part in parts if part in whole], [part for part in parts if part in whole]
    house.safe("texts that were cut", *answers)


def test_the_model_receives_none(house: House) -> None:
    house.model.requests.clear()
    (house.gateway.home / "agents" / "main" / "all").write_text("\n".join(house.secrets))
    (house.node.workspace / "all").write_text("\n".join(house.secrets))
    uses = [("read", {"path": "all"}), ("exec", {"command": "cat all"}), ("laptop__Bash", {"command": "cat all"})]
    uses += [("read", {"path": "missing"}), ("gsv__ConfigGet", {})]
    replies = iter([calls(*uses), text("done")])
    house.says = lambda request: next(replies)
    answer = house.gateway.request("POST", "/v1/sessions/told/messages", {"message": "look", "wait_seconds": 60})
    assert answer.json()["reply"] == "done", answer
    asked = [request.body for request in house.model.requests]
    assert len(asked) == 2 and asked[1].count(b"***") >= 15
    house.safe("what the model received", *asked)
    house.safe("the transcript", house.gateway.request("GET", "/v1/sessions/told/history").body)


def test_secrets_in_streamed_replies(house: House) -> None:
    """Each piece alone is innocent; a reader who puts them together must not have the secret either."""
    said = " and ".join(house.secrets)
    house.says = lambda request: text(f"{said}.", pieces=len(said) // 2)
    streams = []
    body = {"model": "farhand", "messages": [{"role": "user", "content": "say it"}], "stream": True}
    streams.append(house.gateway.request("POST", "/v1/chat/completions", body).body)
    sent = house.gateway.request("POST", "/v1/sessions/pieces/messages", {"message": "say", "wait_seconds": 60}).json()
    streams.append(house.gateway.request("GET", f"/v1/runs/{sent['run_id']}/events").body)
    chat = {"session_id": "s2", "user_id": "u", "stream": True}
    chat["input"] = [{"role": "user", "content": [{"type": "text", "text": "say it"}]}]
    streams.append(house.gateway.request("POST", "/agent/process", chat).body)
    together = []
    for stream in streams:
        found = re.findall(r'"(?:content|text|delta)": ?"((?:[^"\\]|\\.)*)"', stream.decode())
        together.append("".join(json.loads(f'"{piece}"') for piece in found))
    assert all("***" in one for one in together), together
    house.safe("streams of what the model says, put together", *together, *streams, json.dumps(sent))


def test_messages_to_people_contain_none(house: House) -> None:
    said = " and ".join(house.secrets)
    house.says = lambda request: text(said)
    invoke(house, "gsv__Message", {"text": said, "channel": "crm", "to": "tom"})
    wait_until(lambda: house.receiver.taken, 20, "the message")
    house.safe("messages to people", *(json.dumps(one, ensure_ascii=False) for one in house.receiver.taken))


def test_logs(house: House) -> None:
    """What the gateway and the node write down; and what a node wrote that did not know better."""
    house.says = lambda request: text(f"Incorrect API key: {API_KEY}")
    invoke(house, "laptop__Bash", {"command": f"echo '{CHANNEL}' >&2; exit 3"})
    (file,) = (house.node.state / "nodes").glob("*/logs/*.log")
    last = json.loads(file.read_text().splitlines()[-1])
    with file.open("a") as log:
        log.write(json.dumps({**last, "message": f"said {API_KEY}"}) + "\n")
    fetched = invoke(house, "gsv__LogsGet", {"nodeId": "laptop", "lines": 1000}).body
    assert b"***" in fetched
    house.safe("logs", house.gateway.log.read_bytes(), fetched)
    own = [house.node.log, *(house.node.state / "nodes").glob("*/logs/*")]
    assert len(own) > 1 and not any(SHARED in log.read_text() for log in own), "a node knows its own token"


# -- the net itself -------------------------------------------------------------------------------------------


def test_wherever_a_stream_is_cut_no_secret_comes_through() -> None:
    own = "fhn_" + "Ab-_9" * 8 + "xyz"
    known = KnownSecrets(["secret-one-1", "secret-one-1-and-more", 'quo"ted\\secret', "übergeheim-ß"])
    stream = f'a secret-one-1 b secret-one-1-and-more c {own} quo"ted\\secret übergeheim-ß secret-on'.encode()
    hidden = known.redact(stream)
    tried = 0
    for size in range(1, len(stream) + 1):
        veil = StreamRedactor(known)
        pieces = [veil.feed(stream[place : place + size]) for place in range(0, len(stream), size)] + [veil.finish()]
        tried += 1
        together = b"".join(pieces)
        for secret in ("secret-one-1", own, 'quo"ted\\secret', "übergeheim-ß"):
            assert secret.encode() not in together, size
        assert together.replace(b"-and-more", b"") == hidden
    print(f"ways to cut a stream: {tried} tried, {tried} held")


def test_json_inside_of_json_inside_of_json() -> None:
    """Every spelling that programs use, nested as deep as is supported."""
    secrets = [
        'quo"ted\\secret',
        "übergeheim-ß-ünd",
        'both"ü\\n-\U0001f511-key',
        "with/slash/and+more",
        "a&b<c>d-secret",
    ]
    known = KnownSecrets(secrets)
    writers: list[Any] = [
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: msgspec.json.encode(value).decode(),
        lambda value: json.dumps(value).replace("/", "\\/"),
        lambda value: re.sub(r"[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False)),
        lambda value: re.sub(r"\\u([0-9a-f]{4})", lambda found: "\\u" + found[1].upper(), json.dumps(value)),
    ]
    tried = 0
    for secret in secrets:
        for writer in writers:
            for others in (json.dumps, writers[1]):
                written = secret
                for depth in range(5):
                    hidden = known.redact(written.encode()).decode()
                    assert "***" in hidden and len(hidden) < len(written), (secret, depth, hidden)
                    tried += 1
                    written = (others if depth else writer)({"said": written})
    print(f"spellings of secrets in JSON: {tried} tried, {tried} held")


def test_a_secret_of_several_lines_is_known_by_each_of_them() -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "\n".join(f"{line:02d}" + "aB3/" * 15 for line in range(4))
    known = KnownSecrets([key + "\n-----END PRIVATE KEY-----\n"])
    page = "\n".join(f"{number}\t{line}" for number, line in enumerate(key.splitlines(), 1))
    assert "aB3/" not in known.redact_text(page) and "BEGIN PRIVATE KEY" in known.redact_text(page)
    words = "first line of it\n\n  and the second"
    known = KnownSecrets([words + "\n"])
    for mark in "+- ":
        diff = "".join(f"{mark}{line}\n" for line in words.splitlines())
        assert known.redact_text(diff) == f"{mark}***\n"
        assert known.redact_text(json.dumps({"diff": diff})) == json.dumps({"diff": f"{mark}***\n"})


def test_parts_of_secrets_are_hidden_where_a_text_is_cut_and_nowhere_else() -> None:
    secret, own = "secret-one-1-and-more", "fhn_" + "Ab-_9" * 8 + "xyz"
    known = KnownSecrets([secret, own])
    tried = 0
    for one in (secret, own):
        text = f"before {one} after"
        for place in range(len(text) + 1):
            left = known.redact_excerpt(text[:place], after=True)
            right = known.redact_excerpt(text[place:], before=True)
            assert not any(one[:size] in left or one[-size:] in right for size in range(4, len(one) + 1)), place
            assert left.startswith("before"[:place]) and right.endswith("after"[max(0, place - len(text) + 5) :])
            tried += 2
    print(f"parts of texts with secrets in them: {tried} tried, {tried} held")
    assert known.redact_excerpt("a secret-one") == "a secret-one" and known.redact_excerpt("-and-more") == "-and-more"
    assert known.redact_excerpt("so", after=True) == "so", "a few letters are innocent"
    assert known.truncate("ab " * 100, 10) == ("ab " * 100)[:10]
    assert known.truncate(f"{'x' * 90} {secret}", 100) == f"{'x' * 90} ***"


def test_short_secrets_and_numbers_are_not_masked() -> None:
    known = KnownSecrets(["abc", "12345678901", "  "])
    assert known.redact(b'{"abc":12345678901}') == b'{"abc":12345678901}'


def test_settings_are_known_by_their_names_and_addresses_by_their_passwords() -> None:
    known = KnownSecrets()
    known.add_settings(
        {"api_key": "one-secret", "list": [{"bot_token": "two-secret"}], "url": "https://me:three-secret@host/"}
    )
    basic = base64.b64encode(b"me:three-secret").decode()
    assert known.redact_text(f"Authorization: Basic {basic}") == "Authorization: Basic ***"
    known.add_settings({"name": "not-a-secret", "tokens_used": "not-a-secret"})
    text = "one-secret two-secret three-secret not-a-secret"
    assert known.redact_text(text) == "*** *** *** not-a-secret"
