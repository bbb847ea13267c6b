"""The tables of the index, and the queries on its words."""

from __future__ import annotations

from typing import Final

from farhand.memory.words import TOKENIZER

VERSION: Final = 2
TABLES = f"""
CREATE TABLE files (
    id INTEGER PRIMARY KEY, space TEXT NOT NULL, path TEXT NOT NULL, stamp TEXT NOT NULL, hash BLOB NOT NULL,
    UNIQUE (space, path)
);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY, file INTEGER NOT NULL, space TEXT NOT NULL, path TEXT NOT NULL,
    start_line INTEGER NOT NULL, end_line INTEGER NOT NULL, headings TEXT NOT NULL, text TEXT NOT NULL,
    hash BLOB NOT NULL
);
CREATE INDEX chunks_of_file ON chunks (file);
CREATE INDEX chunks_by_hash ON chunks (hash);
CREATE VIRTUAL TABLE words USING fts5(
    text, content='', contentless_delete=1, detail=full,
    tokenize="{" ".join(f"'{word}'" if " " in word else word for word in TOKENIZER)}"
);
CREATE VIRTUAL TABLE terms USING fts5vocab(words, row);
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY, embedder TEXT NOT NULL, hash BLOB NOT NULL, bits BLOB NOT NULL, UNIQUE (embedder, hash)
);
CREATE TABLE coordinates (id INTEGER PRIMARY KEY, vector BLOB NOT NULL); -- separate: most queries do not need them
CREATE TABLE centres (embedder TEXT PRIMARY KEY, centre BLOB NOT NULL, counted INTEGER NOT NULL);
PRAGMA user_version = {VERSION};
"""


# CROSS JOIN fixes the order: first the words, then the chunk of each.
_MATCHING = """
SELECT chunks.id FROM words CROSS JOIN chunks ON chunks.id = words.rowid
WHERE words MATCH ? AND words.rowid > ? AND chunks.space IN (SELECT value FROM json_each(?)) """
RANKED = _MATCHING + "ORDER BY rank LIMIT ?"
LATEST = _MATCHING + "ORDER BY words.rowid DESC LIMIT ?"
COUNTED = """
SELECT count(*), min(rowid) FROM (SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid DESC LIMIT ?)"""
