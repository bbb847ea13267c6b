"""`SA_NODE_TOKENS` and `SA_NODE_CAPS`: what they mean, and that a mistake in them never grants access."""

from __future__ import annotations

import pytest

from farhand.gateway.access.credentials import NodeTokens
from farhand.protocol.errors import FarhandError


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", {}),
        (" , ", {}),
        ("pi:p.q", {"pi": ["p.q"]}),
        ("pi:p.q,", {"pi": ["p.q"]}),
        (" pi : p.q , sp:s.t+ u ", {"pi": ["p.q"], "sp": ["s.t", "u"]}),
        ("mac:studio:macos.notes", {"mac:studio": ["macos.notes"]}),
        ("pi:", {"pi": []}),
        ("pi: ,sp:s", {"pi": [], "sp": ["s"]}),
    ],
)
def test_what_each_node_may_serve(text: str, allowed: dict[str, list[str]]) -> None:
    assert NodeTokens.from_env({"SA_NODE_CAPS": text}).capabilities == allowed


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("pi=p.q", "entry 1, 'pi=p.q'"),
        ("a:b,pi=p.q", "entry 2, 'pi=p.q'"),
        ("pi:p q", "entry 1, 'pi:p q'"),
        ("pi:p..q", "entry 1, 'pi:p..q'"),
        ("pi:p.q+", "entry 1, 'pi:p.q+'"),
        (":p.q", "entry 1, ':p.q'"),
        ("pi:p.q;sp:s.t", "entry 1, 'pi:p.q;sp:s.t'"),
        ("pi:p,pi:q", "entry 2, 'pi:q'"),
    ],
)
def test_an_allow_list_that_cannot_be_meant_is_refused_by_its_entry(text: str, entry: str) -> None:
    with pytest.raises(FarhandError, match="expected: id:prefix") as refused:
        NodeTokens.from_env({"SA_NODE_CAPS": text})
    assert str(refused.value).startswith(f"SA_NODE_CAPS: {entry}")


def test_pairs_of_ids_and_tokens() -> None:
    known = NodeTokens.from_env({"SA_NODE_TOKENS": " pi : one,mac:studio:two,", "SA_NODE_TOKEN": "shared"})
    assert known.by_node == (("pi", "one"), ("mac:studio", "two")) and known.shared is None


@pytest.mark.parametrize("text", ["", " ", ","])
def test_set_but_empty_admits_no_caller(text: str) -> None:
    assert NodeTokens.from_env({"SA_NODE_TOKENS": text, "SA_NODE_TOKEN": "shared"}).secrets == []


@pytest.mark.parametrize("entry", ["hidden", "pi:", ":hidden", "a b:hidden", "hidden:"])
def test_a_slip_among_tokens_is_refused_and_nothing_of_it_is_shown(entry: str) -> None:
    with pytest.raises(FarhandError, match="SA_NODE_TOKENS: entry 2 is not id:token") as refused:
        NodeTokens.from_env({"SA_NODE_TOKENS": f"a:b,{entry}"})
    assert "hidden" not in str(refused.value)
