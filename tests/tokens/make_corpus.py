"""Counts the texts of corpus.jsonl again, where a real tokenizer is installed.

    pip install rs-bpe && python tests/tokens/make_corpus.py

To add a text, add a row with its class and text. No test needs the tokenizer: they read the file.
"""

import json
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).with_name("corpus.jsonl")


def main() -> None:
    """Write the corpus, each text with its counts, and every second text of a class to report."""
    # Here and not above: the type checker and the tests go without the tokenizer.
    from rs_bpe.bpe import openai  # type: ignore[import-not-found]

    encodings = {"o200k": openai.o200k_base(), "cl100k": openai.cl100k_base()}
    rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    seen: dict[str, int] = {}
    with CORPUS.open("w", encoding="utf-8") as file:
        for row in rows:
            number = seen[row["class"]] = seen.get(row["class"], -1) + 1
            counts = {name: encoding.count(row["text"]) for name, encoding in encodings.items()}
            half = "report" if number % 2 else "tune"
            new_row = {**row, "half": half, **counts}
            file.write(json.dumps(new_row, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
