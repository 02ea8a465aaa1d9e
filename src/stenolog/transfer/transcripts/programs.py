"""The programs whose transcripts can be read, by name."""

from collections.abc import Callable
from typing import Final

from stenolog.transfer.transcripts.aider import Aider
from stenolog.transfer.transcripts.chatgpt import ChatGPT
from stenolog.transfer.transcripts.claude_ai import ClaudeAI
from stenolog.transfer.transcripts.claude_code import ClaudeCode
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.gemini_cli import GeminiCLI
from stenolog.transfer.transcripts.llm_logs import LLMLogs
from stenolog.transfer.transcripts.open_webui import OpenWebUI
from stenolog.transfer.transcripts.opencode import OpenCode
from stenolog.transfer.transcripts.transcript import TranscriptReader

PROGRAMS: Final[dict[str, Callable[[], TranscriptReader]]] = {
    "claude-code": ClaudeCode,
    "codex": Codex,
    "chatgpt": ChatGPT,
    "llm": LLMLogs,
    "gemini-cli": GeminiCLI,
    "opencode": OpenCode,
    "claude-ai": ClaudeAI,
    "open-webui": OpenWebUI,
    "aider": Aider,
}
"""Reader of each program."""
