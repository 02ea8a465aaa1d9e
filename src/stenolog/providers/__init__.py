"""Clients for language models: OpenAI-compatible servers, local models and scripted models."""

from typing import TYPE_CHECKING

from stenolog.lazy_loading import lazy_exports

if TYPE_CHECKING:
    from stenolog.providers.chat_model import ChatModel as ChatModel
    from stenolog.providers.chat_model import Delta as Delta
    from stenolog.providers.chat_model import StreamedAnswer as StreamedAnswer
    from stenolog.providers.chat_model import Usage as Usage
    from stenolog.providers.openai_chat import OpenAIChat as OpenAIChat
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stenolog.providers.chat_model": "ChatModel Delta StreamedAnswer Usage",
            "stenolog.providers.openai_chat": "OpenAIChat",
        },
    )
