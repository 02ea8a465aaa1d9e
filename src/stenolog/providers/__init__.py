"""Clients for language models: OpenAI-compatible servers, local models and scripted models."""

from typing import TYPE_CHECKING

from stenolog.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from stenolog.providers.chat_model import (
        ChatModel,
        CompletionFunction,
        Delta,
        StreamedAnswer,
        ToolCallDelta,
        Usage,
    )
    from stenolog.providers.local_model import LocalModel
    from stenolog.providers.openai_chat import OpenAIChat
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ChatModel": "stenolog.providers.chat_model",
            "CompletionFunction": "stenolog.providers.chat_model",
            "Delta": "stenolog.providers.chat_model",
            "LocalModel": "stenolog.providers.local_model",
            "OpenAIChat": "stenolog.providers.openai_chat",
            "StreamedAnswer": "stenolog.providers.chat_model",
            "ToolCallDelta": "stenolog.providers.chat_model",
            "Usage": "stenolog.providers.chat_model",
        },
    )

__all__ = [
    "ChatModel",
    "CompletionFunction",
    "Delta",
    "LocalModel",
    "OpenAIChat",
    "StreamedAnswer",
    "ToolCallDelta",
    "Usage",
]
