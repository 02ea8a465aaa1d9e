"""Redaction measured on a corpus: the share of secrets found, and of ordinary texts unchanged."""

import json
from collections.abc import Iterator
from typing import Any

from stenolog.redaction.redact import RedactedText, redact, redact_data
from support.redaction_corpus import SecretText, ordinary_texts, secret_texts

_LEFT = 8
"""Number of characters of a secret that must not be left."""


def _contexts(text: str) -> Iterator[tuple[str, Any]]:
    yield "text", text
    yield "fence", f"```sh\n{text}\n```"
    yield "quoted lines", "\n".join(f"    {line}" for line in text.split("\n"))
    yield "JSON value", {"content": text}
    yield "JSON text", json.dumps({"command": text})
    yield "JSON in JSON", json.dumps({"out": json.dumps({"stdout": text})})


def _is_left(case: SecretText, output: str) -> bool:
    size = min(_LEFT, len(case.secret))
    parts = (case.secret[at : at + size] for at in range(len(case.secret) - size + 1))
    return any(part in output for part in parts)


def test_every_secret_of_the_corpus_is_redacted() -> None:
    cases = secret_texts()
    missed = [
        (name, case.text)
        for case in cases
        for name, value in _contexts(case.text)
        if _is_left(case, json.dumps(redact_data(value).value, ensure_ascii=False))
    ]
    print(f"missed {len(missed)} of {len(cases)} secrets in 6 contexts")
    assert len(cases) >= 120
    assert missed == []


def test_no_ordinary_text_of_the_corpus_is_changed() -> None:
    texts = ordinary_texts()
    changed = [(text, redact(text).text) for text in texts if redact(text).count]
    changed += [
        (text, str(redact_data(value).value))
        for text in texts
        for value in (text, json.dumps({"command": text}))
        if redact_data(value).count
    ]
    print(f"changed {len(changed)} of {len(texts)} ordinary texts")
    assert len(texts) >= 120
    assert changed == []


def test_redacted_corpus_has_no_more_secrets() -> None:
    for case in secret_texts():
        once = redact(case.text).text
        assert redact(once) == RedactedText(once, 0)
