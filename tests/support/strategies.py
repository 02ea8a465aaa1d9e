"""Hypothesis strategies: difficult messages, and keys that are easily confused."""

import unicodedata
from itertools import product
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from support.store_calls import Call

NASTY_TEXTS = (
    "",
    "\x00",
    "a\x00b",
    "\ud800",
    "before \udfff after",
    "\udc00\ud800",
    "\u2028\u2029\x85\x0b\x0c\x1c",
    "line\nbreak\r\n",
    '"}',
    '{"kind":"message","seq":1,"at":"',
    ',"crc":"00000000"}\n',
    "back\\slash \\u0041 \\ud83d",
    "\ufeff\ufffe\uffff",
    "e\u0301 \u00e9 \u212b",
    "\U0001f600\U0010ffff",
    "\u202eabc\u200b\u200d",
    "\x7f\x80\x9f",
)


def texts() -> SearchStrategy[str]:
    """Generate any text that can be stored, including lone surrogates and NUL."""
    return st.one_of(st.text(max_size=40), st.sampled_from(NASTY_TEXTS))


def numbers() -> SearchStrategy[int | float]:
    """Generate integers of any size that can be stored, and finite floats."""
    return st.one_of(
        st.integers(),
        st.sampled_from([2**53 + 1, -(2**63) - 1, 2**64, 10**4300 - 1, 1 - 10**4300]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from([0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22]),
    )


def values() -> SearchStrategy[Any]:
    """Generate any value that JSON can represent."""
    return st.recursive(
        st.one_of(st.none(), st.booleans(), numbers(), texts()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(texts(), inner, max_size=4)
        ),
        max_leaves=8,
    )


def messages() -> SearchStrategy[dict[str, Any]]:
    """Generate messages: mostly chat messages with unknown fields, but also other objects."""
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    chat_messages = st.builds(
        lambda role, content, more: {"role": role, "content": content, **more},
        roles,
        st.one_of(texts(), values()),
        st.dictionaries(texts(), values(), max_size=3),
    )
    return st.one_of(chat_messages, st.dictionaries(texts(), values(), max_size=4))


def keys() -> SearchStrategy[str]:
    """Generate session keys."""
    return st.one_of(st.text(min_size=1, max_size=60), st.sampled_from(hostile_keys()))


def hostile_keys() -> list[str]:
    """Return 300 different keys that a store may confuse, such as keys that differ only in case."""
    separators = ":_/\\|-.%+~#?*&;,@=!$'\"`^<>()[]{} \t\n\r\x00\x01\x1b\x7f\u00a0\u2028\u3000"
    keys = [f"a{separator}b" for separator in separators]
    keys += [f"{separator}a" for separator in separators[:24]]
    keys += [f"a{separator}" for separator in separators[:24]]
    keys += ["A:B", "A:b", "a:B", "ab", "AB", "Ab", "aB", "a::b", "a__b", "a//b", "a%3Ab"]
    keys += ["a%3ab", "a%253Ab", "%41", "%61", "%", "%%", "%2e", "%2e%2e", "%2F", "%00", "%zz"]
    # Names with a meaning for file systems, shells or stores.
    keys += [".", "..", "...", "./a", "../x", "../../x", "a/..", "a/../b", "/", "//", "/tmp/x"]
    keys += ["/etc/passwd", "../sessions", "../../../../tmp/x", "C:\\x", "C:/x", "\\\\host\\x"]
    keys += ["~", "~root", "-", "--", "-rf", "--help", "*", "?", "$HOME", "`id`", "$(id)", "!!"]
    keys += ["CON", "con", "Con", "PRN", "AUX", "NUL", "nul", "COM1", "LPT9", "CON.jsonl"]
    keys += ["archive", "sessions", "notes", "trash", "archive/x", "sessions/x", ".lock", ".tmp"]
    keys += ["x.jsonl", "x.jsonl.gz", "x.JSONL", "x.json", "x.tmp", "x.lock", "x~", ".x", "x."]
    keys += [" ", "  ", "\t", "\n", "x ", " x", "x  y", "x\ty", "\x00", "\x00\x00", "0", "00", "1"]
    keys += ["None", "null", "true", "[]", "{}", '""', "''", "SELECT 1; --", "'; DROP TABLE x"]
    # Characters that look alike, are equal without regard to case, or have two Unicode forms.
    for text in ("\u00e9", "\u00c5", "\u1e69", "\ud55c", "\u0439", "\uf9d0"):
        keys += [unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)]
    keys += ["\u212b", "\u212a", "K", "k", "\u0430", "\uff41", "\ufb01", "fi"]
    keys += ["\u00df", "ss", "SS"]
    keys += ["\u0130", "\u0131", "I", "i", "i\u0307", "\u03c3", "\u03c2", "\u03a3", "\u1e9e"]
    keys += ["x\u200b", "x\u200d", "x\ufeff", "\ufeffx", "\u202ex", "x\u00ad", "\ufffd", "\uffff"]
    keys += ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764", "\u2764\ufe0f"]
    keys += ["\U0010ffff", "\u0661", "\u05d0", "\u65e5\u672c", "telegram:123", "slack:C42:U7"]
    # Keys near every length limit of file names, and long keys that differ only at the end.
    keys += ["k" * size for size in (191, 199, 200, 201, 254, 255, 256, 900, 1023, 1024)]
    keys += ["K" * size for size in (66, 67, 85, 200, 1024)]
    keys += ["k" * 1023 + "K", "k" * 1022 + "kz", "z" + "k" * 1023, "../" * 341, "/" * 1024]
    keys += ["\u00e9" * 512, "e\u0301" * 341, "\U0001f600" * 256, ":" * 1024, "." * 1024]
    keys += map("".join, product("sS", "lL", "aA", "cC", "kK", [":C42", ":c42"]))
    return list(dict.fromkeys(keys))[:300]


once_values = st.sampled_from([None, None, "t1", "t2", "t3"])


def small_messages() -> SearchStrategy[dict[str, Any]]:
    """Generate one of a few messages, so that histories often begin with the same messages."""
    return st.sampled_from(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": 1},
            {"role": "user", "content": True},
            {"content": 1, "role": "user"},
            {"role": "tool", "content": "\ud800 \x00 \u2028", "tool_call_id": "c1"},
            {"role": "tool", "content": "\u00e9" * 3000},
            {},
        ]
    )


def summaries() -> SearchStrategy[str]:
    """Generate summaries: empty, short, difficult, or too long for the stored undo steps."""
    return st.sampled_from(["", "so far", "so good", "\udfff \x00", "long \u00e9 " * 1000])


def calls(
    name: str, *arguments: SearchStrategy[Any], **options: SearchStrategy[Any]
) -> SearchStrategy[Call]:
    """Generate calls to one method."""
    return st.builds(Call, st.just(name), *arguments, **options)


def operations() -> SearchStrategy[Call]:
    """Generate calls that write to a session of about ten messages. Stores reject some calls."""
    seqs = st.integers(-1, 14)
    batches = st.lists(small_messages(), max_size=3)
    return st.one_of(
        calls("add_message", st.just("user"), texts(), once=once_values),
        calls("add_full_message", small_messages() | messages(), once=once_values),
        calls("add_messages", batches, once=once_values),
        calls("set_history", batches),
        calls("set_summary", summaries()),
        calls("truncate_history", seqs),
        calls("hide", seqs, seqs),
        calls("show", seqs, seqs),
        calls("checkpoint", summary=summaries(), upto=seqs, expect_floor=st.none() | seqs),
        st.builds(
            lambda name, value: Call("set_meta", **{name: value}),
            st.sampled_from(["title", "tags"]),
            st.sampled_from([None, "x", ["\ud800"], {"a": 1}]),
        ),
        st.sampled_from([Call("pop"), Call("undo"), Call("undo"), Call("compact"), Call("clear")]),
    )
