from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.memory.index import FileText, Index
from farhand.memory.words import MOST_TERMS, query_terms


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    notes = [
        "The café in Zürich is called Sprüngli; straße.",
        "黒猫の名前はミミです。東京で拾いました。",
        "北京的服务器密码在保险箱里。",
        "서울의 서버는 월요일에 다시 시작한다.",
        "รหัสผ่านเซิร์ฟเวอร์อยู่ในตู้เซฟ",
        "हिन्दी में पासवर्ड सुरक्षित है",
        "ＡＰＩキー is kept in the vault, error 0x80070005, see node.fs.read_text and user_name.",
        "We deployed the servers on Friday.",
    ]
    found = Index(tmp_path_factory.mktemp("words") / "memory.db")
    found.update("here", [FileText(f"memory/{n}.md", "1", text.encode()) for n, text in enumerate(notes)], [])
    return found


@pytest.mark.parametrize(
    ("query", "note"),
    [
        ("cafe", 0), ("CAFÉ", 0), ("cafe\u0301", 0), ("zurich", 0), ("STRASSE", 0),
        ("黒猫", 1), ("猫", 1), ("名前", 1), ("東京", 1), ("ミミ", 1), ("す", 1),
        ("服务器", 2), ("密码", 2), ("箱", 2), ("里", 2),
        ("서버", 3), ("월요일", 3), ("เซิร์ฟเวอร์", 4), ("पासवर्ड", 5),
        ("API", 6), ("キー", 6), ("0x80070005", 6), ("read_text", 6), ("node.fs.read_text", 6), ("user name", 6),
        ("deploying a server", 7),
    ],
)  # fmt: skip
def test_a_word_is_found_in_any_language(index: Index, query: str, note: int) -> None:
    ids = index.by_keyword(["here"], query)
    assert index.entries(ids[:1])[0].path == f"memory/{note}.md"


@pytest.mark.parametrize(
    "query",
    [
        '"', "'", '"unclosed', "a AND", "NOT", "NEAR(a b)", "text:foo", "*", "foo*", "^foo", "(", ")", "a OR OR b",
        "{a b}: c", "-x", "+", "\\", ";DROP TABLE chunks;--", "\0", "a\0b", "🎉", "🎉🎉 party", "\u200b", "\ufeff",
        "\U0010ffff", "?" * 5000, "word " * 50_000, "猫" * 20_000, "e\u0301" * 9000, " \n\t ", "",
    ],
)  # fmt: skip
def test_any_query_is_safe(index: Index, query: str) -> None:
    ids = index.by_keyword(["here"], query)
    index.keyword_scores(index.entries(ids), query)
    assert len(query_terms(query)) <= MOST_TERMS


@given(query=st.text(max_size=60))
def test_no_text_breaks_the_index(index: Index, query: str) -> None:
    found = index.entries(index.by_keyword(["here"], query))
    scores = index.keyword_scores(found, query)
    assert all(0 < score <= 1 for score in scores.values())


def test_words_that_stand_nowhere_lower_the_score(index: Index) -> None:
    def best(query: str) -> float:
        ids = index.by_keyword(["here"], query)
        return max(index.keyword_scores(index.entries(ids), query).values())

    assert best("deployed servers") > best("deployed servers zebra") > best("deployed zebra unicorn")
