"""Secrets out of what is given away, and how many there were."""

from typing import Any

from stenolog.memory.redaction import redact_data


class Sharing:
    """Takes secrets out of texts and of data, and counts them; where `wanted` is not set, none."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.count = 0
        """How many were taken out so far."""

    def __call__(self, text: str) -> str:
        """The text as it may be shared; where it is JSON, by the names of its fields, too."""
        return str(self.data(text))

    def data(self, value: Any) -> Any:
        """What is made of texts, lists and objects, as it may be shared."""
        if not self.wanted:
            return value
        found = redact_data(value)
        self.count += found.count
        return found.value

    def again(self, text: str) -> str:
        """The same for a text that is counted elsewhere."""
        return str(redact_data(text).value) if self.wanted else text
