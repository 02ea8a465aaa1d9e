"""Makes corpus.jsonl again, with exact counts, where a real tokenizer is installed.

    pip install rs-bpe && PYTHONPATH=tests python tests/tokens/make_corpus.py

Texts that were written by hand, or taken from this repository, are kept as they stand in the
file; the others are generated with fixed seeds. No test needs the tokenizer: they read the file.
"""

import json
from pathlib import Path
from typing import Any, Final

from tokens.generated import texts

CORPUS: Final = Path(__file__).with_name("corpus.jsonl")


def main() -> None:
    """Write the corpus: kept texts first, generated ones after them, each with its counts."""
    # Here and not above: the type checker and the tests go without the tokenizer.
    from rs_bpe.bpe import openai  # type: ignore[import-not-found]

    encodings = {"o200k": openai.o200k_base(), "cl100k": openai.cl100k_base()}
    kept = [row for row in _rows() if row["made"] != "generated"]
    found = [(row["class"], row["made"], row["text"]) for row in kept]
    found += [(kind, "generated", text) for kind, text in texts()]
    seen: dict[str, int] = {}
    with CORPUS.open("w", encoding="utf-8") as file:
        for kind, made, text in found:
            number = seen[kind] = seen.get(kind, -1) + 1
            row = {
                "class": kind,
                "half": "report" if number % 2 else "tune",
                "made": made,
                **{name: encoding.count(text) for name, encoding in encodings.items()},
                "text": text,
            }
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


def _rows() -> list[dict[str, Any]]:
    with CORPUS.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    main()
