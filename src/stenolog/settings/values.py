"""The settings as values, and how secrets in them are masked.

Field docstrings are printed in the config file and the reference. Defaults and bounds are defined
only here. Every field can be written in TOML, which has no null: an
empty text or 0 stands for "not set".
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

HIDDEN: Final = "***"
"""Text that replaces a secret."""

# A timeout is a day at most, because some systems cannot wait longer.
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000_000)]

SECRET_FIELDS = ("key", "headers", "keys", "token", "secret")
"""Fields whose values are never shown."""
ADDRESS_FIELDS = ("sessions", "model", "models", "base_url", "reply_url")
"""Fields that may contain an address with a password."""

EMPTY_MAPPING: Mapping[str, str] = MappingProxyType({})


def masked_value(name: str, value: Any) -> Any:
    """Return the value of a field without secrets."""
    if name in SECRET_FIELDS:
        return dict.fromkeys(value, HIDDEN) if isinstance(value, Mapping) else value and HIDDEN
    if name in ADDRESS_FIELDS and isinstance(value, str):
        return mask_secrets(value)
    if name in ADDRESS_FIELDS and isinstance(value, tuple):
        return tuple(map(mask_secrets, value))
    return dict(value) if isinstance(value, Mapping) else value


class SettingsTable(Struct, frozen=True, kw_only=True):
    """A table of settings. Its `repr` contains no secrets."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), dict):
                force_setattr(self, name, MappingProxyType(value))

    def __repr__(self) -> str:
        values = {name: masked_value(name, getattr(self, name)) for name in self.__struct_fields__}
        fields = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"{type(self).__name__}({fields})"


class ContextSettings(SettingsTable, frozen=True, kw_only=True):
    """Options for requests to the model."""

    reserve: CountOrZero = 0
    """Tokens reserved for the answer. 0: a quarter of the context, at most 4,096."""
    reasoning: Literal["none", "newest", "all"] = "none"
    """Messages whose reasoning is sent back to the model: none, the newest turn, or all."""
    merge_user: bool = False
    """Merge consecutive user messages. Some servers reject consecutive user messages."""
    user_first: bool = False
    """Start with a user message, for servers that reject any other first message."""
    keep_fields: tuple[str, ...] = ()
    """Additional message fields to send. Many servers reject unknown fields."""


class AgentSettings(SettingsTable, frozen=True, kw_only=True):
    """An agent: its model, its sessions and its limits."""

    sessions: str = "./workspace"
    """Where sessions are stored, as with `-w`: a folder, `sqlite:FILE`, `postgresql://…`, or
    `memory:` for no storage. A relative path starts at the current folder."""
    model: str = ""
    """The model: `scripted`, `local`, `local:/path.gguf`, `ollama/NAME`, `openai/NAME`,
    `openrouter/NAME`, `http://host:port/v1#model`, or the NAME of a `[models.NAME]`. Empty: the
    first model found by a key in the environment, an Ollama on this machine, or local weights."""
    models: tuple[str, ...] = ()
    """Additional models that users may select with `/model`, in the format of `model`. Each
    `[models.NAME]` can be selected anyway."""
    max_context_tokens: Annotated[int, Meta(ge=2, le=1_000_000_000)] = 32_000
    """Maximum tokens of a request: system prompt, tools, memory, history and answer."""
    max_history_messages: Count = 50
    """Maximum number of visible messages. If there are more, the oldest are summarized."""
    system: str = ""
    """System prompt. Empty: a short default."""
    system_file: str = ""
    """File with the system prompt, instead of `system`. In a config file, a relative path starts at
    the folder of that file."""
    max_iterations: Annotated[int, Meta(ge=1, le=1_000)] = 25
    """Maximum number of model calls per turn. Each answer of the model may call tools."""
    tools: bool = True
    """Offer tools to the model. Some models and servers do not support tools."""
    tool_timeout: Seconds = 60.0
    """Maximum seconds for a tool."""
    tool_output_limit: Count = 20_000
    """Maximum characters of a tool's output. The rest is cut off."""
    routes: tuple[str, ...] = ()
    """Channels or senders that this agent answers, such as `telegram` or `telegram:123`. The agent
    of `[agent]` answers all others."""
    context: ContextSettings = field(default_factory=ContextSettings)


class MemorySettings(SettingsTable, frozen=True, kw_only=True):
    """Memory beyond a conversation."""

    consolidation: bool = True
    """Let the agent's model write notes about the conversation after each turn."""
    recall_tokens: CountOrZero = 1_500
    """Maximum tokens of notes and past messages that are shown to the model. 0: none."""
    half_life_days: Annotated[float, Meta(gt=0, le=1_000_000)] = 30.0
    """Age in days at which the recall score of a note or message is reduced by a quarter. The score
    is never reduced by more than half. Core facts do not age."""
    zone: str = ""
    """Time zone of the users, for words such as "yesterday", for example `Europe/Zurich`. Empty:
    the zone of this machine."""


class TelegramSettings(SettingsTable, frozen=True, kw_only=True):
    """The agent as a Telegram bot, while `steno serve` runs."""

    token: str = ""
    """Token of the bot, from @BotFather. Without token and token_env there is no bot."""
    token_env: str = ""
    """Environment variable with the token, such as `TELEGRAM_BOT_TOKEN`."""
    allow: tuple[str, ...] = ()
    """Users that are answered: ids such as `123456`, or names such as `@alice`. Empty: none."""
    scope: Literal["sender", "thread", "group"] = "sender"
    """How groups share sessions. `sender`: each user has a separate session; `thread`: each
    user has a session per topic; `group`: all users of a group share a session."""
    base_url: str = ""
    """Another server with Telegram's Bot API, such as `http://localhost:8081`."""


class ChannelSettings(SettingsTable, frozen=True, kw_only=True):
    """Options of all chat apps."""

    session_persistence: bool = True
    """Store the sessions of `steno serve`. false: all sessions of the gateway, including those of
    the HTTP API, are in memory until the process ends. `channels_config.session_persistence`, the
    name in zeroclaw, is accepted too."""
    telegram: TelegramSettings = field(default_factory=TelegramSettings)


class WebhookSettings(SettingsTable, frozen=True, kw_only=True):
    """A program that sends signed messages to `/webhooks/NAME`."""

    secret: str = ""
    """Shared secret for signatures: any text of at least 16 characters."""
    secret_env: str = ""
    """Environment variable with the secret, such as `STENO_HOOK_SECRET`."""
    allow: tuple[str, ...] = ()
    """Senders that are answered, by the name that the program sends. Empty: none."""
    reply_url: str = ""
    """Address for signed answers. Empty: the answer is the response to the message."""


class GatewaySettings(SettingsTable, frozen=True, kw_only=True):
    """The daemon that `steno serve` starts."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines can reach any address except a loopback address."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8_787
    """Port to listen on. 0: any free port."""
    hosts: tuple[str, ...] = ()
    """Additional host names of the gateway, such as `steno.example.org`. Requests with other host
    names are rejected. Browsers can sign in at these names."""
    origins: tuple[str, ...] = ()
    """Other origins whose web pages may use the gateway, such as `https://chat.example.org`."""
    token_file: str = ""
    """File with the access token, created at the first start. Empty: `gateway.token` in the folder
    of the user's config file."""
    store_anonymous: bool = False
    """Store each chat request that names no session in a new session."""
    max_turns: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Maximum number of requests that are answered at once. Further requests are rejected."""
    max_streams: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Maximum number of live streams that are open at once."""
    max_body: Annotated[int, Meta(ge=1_024, le=67_108_864)] = 16_777_216
    """Maximum bytes of a request."""
    shutdown_timeout: Seconds = 10.0
    """Seconds to wait for running answers on shutdown."""
    takeover: Seconds = 20.0
    """Seconds after which another gateway resumes the answer of a killed gateway."""


class RetentionSettings(SettingsTable, frozen=True, kw_only=True):
    """A rule that deletes or purges sessions. Without rules everything is kept.

    A rule applies to the sessions that meet all its conditions. A rule needs an age or a tag.
    """

    action: Literal["delete", "purge"] = "delete"
    """What the rule does. `delete` moves the session to the trash, `purge` permanently deletes
    sessions in the trash. A `purge` rule needs `older_than_days`."""
    older_than_days: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Sessions without changes for this many days; with `purge`, sessions deleted this many days
    ago. 0: any age."""
    tag: str = ""
    """Sessions with this tag. Empty: any."""
    spare_tag: str = "keep"
    """Sessions with this tag are never touched. Empty: no such tag."""


class ModelSettings(SettingsTable, frozen=True, kw_only=True):
    """A named model, for `agent.model`."""

    base_url: str = ""
    """Address of the server, such as `http://localhost:8080/v1`."""
    model: str = ""
    """Name of the model on the server. Without base_url: a model in the format of `agent.model`."""
    key: str = ""
    """API key. The file must then be readable only by its owner; prefer key_env."""
    key_env: str = ""
    """Environment variable with the API key, such as `OPENAI_API_KEY`."""
    timeout: Seconds = 120.0
    """Maximum seconds to wait for the next piece of an answer."""
    first_byte_timeout: Seconds = 300.0
    """Maximum seconds until the first piece of an answer: some servers load the model first."""
    retries: Annotated[int, Meta(ge=0, le=100)] = 4
    """Maximum number of retries if the server is busy or unreachable."""
    headers: Mapping[str, str] = EMPTY_MAPPING
    """Additional HTTP headers. They are treated as secrets."""


class Settings(SettingsTable, frozen=True, kw_only=True):
    """All settings. Their `repr` contains no secrets."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    models: Mapping[str, ModelSettings] = {}
    agents: Mapping[str, AgentSettings] = {}
    """Additional agents by name. Fields that are not set are taken from `agent`."""
    webhooks: Mapping[str, WebhookSettings] = {}
    """Programs that send messages, by name."""
    retention: Mapping[str, RetentionSettings] = {}
    """Retention rules by name."""
    keys: Mapping[str, str] = EMPTY_MAPPING
    """Environment variables for models and channels: each `…_API_KEY`, `OLLAMA_HOST`,
    `OLLAMA_CONTEXT_LENGTH`, `OPENAI_BASE_URL`, and those that a key_env, token_env or secret_env
    names."""


# --- secrets in addresses -------------------------------------------------------------------------


_PATH_PREFIXES: Final = ("jsonl:", "local:", "memory:", "sqlite:")
"""Prefixes of addresses that are paths, so that @ and : in them have no special meaning."""
_HOST_PATTERN: Final = re.compile(r"(?:\[[^\]@/?#]*\]|[^:@/?#]*)(?::\d*)?(?=[/?#]|$)")
"""Pattern of a host with an optional port and without a user, up to the path."""
# The pattern is anchored at the start of a name, so that each name is read only once.
_PARAMETER_NAME_PATTERN: Final = re.compile(r"(?<![^\s/?&#=])[^\s/?&#=]++(?==)")
_SECRET_NAME_PATTERN: Final = re.compile("pass|pwd|key|token|secret|auth|cred", re.IGNORECASE)
_WEB_VALUE_PATTERN: Final = re.compile("[^&#]*+")
# Outside of web addresses, # may be part of a password and does not end a value.
_OTHER_VALUE_PATTERN: Final = re.compile("[^&]*+")


def mask_secrets(address: str) -> str:
    """Return an address with masked secrets, such as `scheme://user:***@host/db?password=***`."""
    scheme, slashes, text_after_scheme = address.partition("://")
    if not slashes:
        scheme, text_after_scheme = "", address
    is_web = scheme.strip().lower() in ("http", "https")
    has_colon = ":" in text_after_scheme.partition("@")[0]
    if slashes or (has_colon and not address.startswith(_PATH_PREFIXES)):
        text_after_scheme = _mask_password(text_after_scheme, "?#" if is_web else "?")
    value_pattern = _WEB_VALUE_PATTERN if is_web else _OTHER_VALUE_PATTERN
    return f"{scheme}{slashes}{_mask_values(text_after_scheme, value_pattern)}"


def has_secret(address: str) -> bool:
    """Whether an address contains a secret."""
    return mask_secrets(address) != address


def has_user(address: str) -> bool:
    """Whether an address contains a user or a password before the host."""
    _, slashes, text_after_scheme = address.partition("://")
    return bool(slashes) and "@" in text_after_scheme and not _HOST_PATTERN.match(text_after_scheme)


def _mask_values(text: str, value_pattern: re.Pattern[str]) -> str:
    """Mask the value after each `name=` whose name suggests a secret, in linear time."""
    pieces, position = list[str](), 0
    for name in _PARAMETER_NAME_PATTERN.finditer(text):
        value_start = name.end() + 1
        if name.start() >= position and _SECRET_NAME_PATTERN.search(name[0]):
            pieces += [text[position:value_start], HIDDEN]
            match = value_pattern.match(text, value_start)
            position = match.end() if match else value_start
    return "".join([*pieces, text[position:]])


def _mask_password(text_after_scheme: str, end_characters: str) -> str:
    """Mask the password, or a user without a password, in the text after the scheme."""
    ends = (end for end, character in enumerate(text_after_scheme) if character in end_characters)
    end = next(ends, len(text_after_scheme))
    if "@" not in text_after_scheme[:end]:
        if "@" not in text_after_scheme or _HOST_PATTERN.match(text_after_scheme):
            return text_after_scheme
        # The text before the ? or # is not a host, so the ? or # is part of the password.
        end = len(text_after_scheme)
    credentials, _, host = text_after_scheme[:end].rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{user if colon else ''}{colon}{HIDDEN}@{host}{text_after_scheme[end:]}"
