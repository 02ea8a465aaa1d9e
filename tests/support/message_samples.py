"""Messages of every supported shape, and unsupported ones."""

from typing import Any, Final

Body = dict[str, Any]

_PNG: Final = "iVBORw0KGgo="
_URL: Final = "https://example.org/cat.png"


def _user(*parts: Any) -> Body:
    return {"role": "user", "content": list(parts)}


def _assistant(*parts: Any) -> Body:
    return {"role": "assistant", "content": list(parts)}


CHAT: Final[dict[str, Body]] = {
    "string": {"role": "user", "content": "Is it raining in Porto?"},
    "empty": {"role": "assistant", "content": None},
    "text parts": _user({"type": "text", "text": "one"}, {"type": "text", "text": "two"}),
    "plain strings": _user("one", "two"),
    "system": {"role": "developer", "content": "Be brief."},
    "image": _user(
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PNG}"}},
        {"type": "image_url", "image_url": {"url": _URL, "detail": "low"}},
    ),
    "audio": _user({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
    "file": _user(
        {"type": "file", "file": {"filename": "plan.pdf", "file_data": "data:;base64,JVBERg=="}}
    ),
    "video": _user({"type": "video_url", "video_url": {"url": "https://example.org/v.mp4"}}),
    "refusal part": _assistant({"type": "refusal", "refusal": "I cannot help with that."}),
    "refusal": {"role": "assistant", "content": None, "refusal": "I cannot help with that."},
    "spoken answer": {
        "role": "assistant",
        "content": None,
        "audio": {"id": "audio_1", "data": "UklGRg==", "transcript": "It is raining."},
    },
    "call": {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Porto"}'},
            }
        ],
    },
    "custom call": {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
        ],
    },
    "flat call": {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "name": "weather", "arguments": {"city": "Porto"}}],
    },
    "old call": {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Porto"}'},
    },
    "result": {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "rain"}'},
    "result of parts": {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}],
    },
    "old result": {"role": "function", "name": "weather", "content": '{"sky": "rain"}'},
    "reasoning content": {"role": "assistant", "content": "42", "reasoning_content": "Let me see."},
    "reasoning": {"role": "assistant", "content": "42", "reasoning": "Let me see."},
    "thinking field": {"role": "assistant", "content": "42", "thinking": "Let me see."},
    "reasoning details": {
        "role": "assistant",
        "content": "42",
        "reasoning_details": [
            {"type": "reasoning.text", "text": "Let me see."},
            {"type": "reasoning.encrypted", "data": "c2VjcmV0"},
        ],
    },
    "reasoning twice": {
        "role": "assistant",
        "content": "42",
        "reasoning": "Let me see.",
        "reasoning_details": [{"type": "reasoning.text", "text": "Let me see."}],
    },
    "thinking blocks": {
        "role": "assistant",
        "content": "42",
        "thinking_blocks": [{"type": "thinking", "thinking": "Let me see.", "signature": "c2ln"}],
    },
}

ANTHROPIC: Final[dict[str, Body]] = {
    "thinking": _assistant(
        {"type": "thinking", "thinking": "Let me see.", "signature": "c2ln"},
        {"type": "text", "text": "42"},
    ),
    "redacted thinking": _assistant(
        {"type": "redacted_thinking", "data": "c2VjcmV0"}, {"type": "text", "text": "42"}
    ),
    "tool use": _assistant(
        {"type": "text", "text": "I look it up."},
        {"type": "tool_use", "id": "u1", "name": "weather", "input": {"city": "Porto"}},
    ),
    "tool result": _user({"type": "tool_result", "tool_use_id": "u1", "content": "rain"}),
    "tool result of blocks": _user(
        {
            "type": "tool_result",
            "tool_use_id": "u1",
            "is_error": True,
            "content": [
                {"type": "text", "text": "rain"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": _PNG},
                },
            ],
        },
        {"type": "text", "text": "and now?"},
    ),
    "image base64": _user(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}}
    ),
    "image address": _user({"type": "image", "source": {"type": "url", "url": _URL}}),
    "document": _user(
        {
            "type": "document",
            "title": "Plan",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="},
        }
    ),
    "text document": _user(
        {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "The pass is closed."},
        }
    ),
    "document of blocks": _user(
        {
            "type": "document",
            "source": {
                "type": "content",
                "content": [{"type": "text", "text": "The pass is closed."}],
            },
        }
    ),
    "server tool": _assistant(
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "pass"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [
                {"type": "web_search_result", "title": "Passes", "url": "https://example.org/p"}
            ],
        },
        {"type": "text", "text": "It is closed.", "citations": [{"title": "Passes"}]},
    ),
    "mcp tool": _assistant(
        {"type": "mcp_tool_use", "id": "m1", "name": "find", "server_name": "s", "input": {"q": 1}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m1",
            "is_error": False,
            "content": [{"type": "text", "text": "nothing found"}],
        },
    ),
    "search result": _user(
        {
            "type": "search_result",
            "source": "https://example.org/p",
            "title": "Passes",
            "content": [{"type": "text", "text": "The pass is closed."}],
        }
    ),
}

RESPONSES: Final[dict[str, Body]] = {
    "input message": {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": _URL, "detail": "low"},
            {"type": "input_file", "filename": "plan.pdf", "file_id": "file_1"},
        ],
    },
    "output message": {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "A cat.", "annotations": []}],
    },
    "reasoning item": {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Let me see."}],
        "encrypted_content": "c2VjcmV0",
    },
    "function call": {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "weather",
        "arguments": '{"city": "Porto"}',
        "status": "completed",
    },
    "function call output": {
        "type": "function_call_output",
        "call_id": "c1",
        "output": '{"sky": "rain"}',
    },
    "custom tool call": {
        "type": "custom_tool_call",
        "call_id": "c1",
        "name": "shell",
        "input": "ls -l",
    },
    "custom tool call output": {
        "type": "custom_tool_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "total 0"}],
    },
    "web search call": {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "pass"},
    },
    "mcp call": {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "s",
        "name": "find",
        "arguments": '{"q": 1}',
        "output": "nothing found",
    },
    "image generation call": {
        "type": "image_generation_call",
        "id": "ig_1",
        "status": "completed",
        "result": _PNG,
    },
    "computer call output": {
        "type": "computer_call_output",
        "call_id": "c1",
        "output": {"type": "computer_screenshot", "image_url": _URL},
    },
    "item reference": {"type": "item_reference", "id": "msg_1"},
    "compaction": {"type": "compaction", "encrypted_content": "c2VjcmV0"},
}

ODD: Final[dict[str, Body]] = {
    "nothing": {},
    "unknown part": _user({"type": "place", "name": "Porto", "rank": 2**70}),
    "unknown part with text": _user({"type": "verse", "text": "Roses are red."}),
    "part without type": _user({"text": "one"}, {"name": "Porto"}, {"content": "two"}),
    "inline data": _user({"inline_data": {"mime_type": "image/png", "data": "A" * 1_200}}),
    "numbers": _user(1, None, True, 2.5),
    "lists in lists": _user([["deep"]], []),
    "part instead of parts": {"role": "user", "content": {"type": "text", "text": "one"}},
    "object instead of parts": {"role": "user", "content": {"city": "Porto"}},
    "number instead of parts": {"role": "user", "content": 7},
    "calls of wrong types": {"role": "assistant", "content": "x", "tool_calls": [7, {"a": 1}, []]},
    "no list of calls": {"role": "assistant", "content": "x", "tool_calls": "none"},
    "reasoning of a wrong type": {"role": "assistant", "content": "x", "reasoning": {"a": 1}},
    "types of wrong types": _user(
        {"type": "text", "text": 7},
        {"type": ["text"], "text": "one"},
        {"type": "image_url", "image_url": 7},
        {"type": "tool_result", "content": {"a": 1}},
        {"type": "input_audio", "input_audio": []},
    ),
    "other fields": {"role": "user", "content": "x", "name": "ana", "place": {"city": "Porto"}},
    "unknown role": {"role": "narrator", "content": "Once upon a time."},
}

SAMPLES: Final = {
    f"{shape}: {name}": body
    for shape, table in (
        ("chat", CHAT),
        ("anthropic", ANTHROPIC),
        ("responses", RESPONSES),
        ("odd", ODD),
    )
    for name, body in table.items()
}
