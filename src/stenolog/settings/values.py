"""The settings as values. A field's docstring is what the config file and docs/settings.md say.

Defaults and bounds stand here and nowhere else. Every field can be written in TOML, which has no
null: where nothing is a choice, it is empty text or 0.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from stenolog.settings.secrets import HIDDEN, without_password

# Sleeping and waiting take no more than some systems' clocks do; nobody waits for a day.
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
CountOrNone = Annotated[int, Meta(ge=0, le=1_000_000_000)]

SECRET = ("key", "headers", "keys", "token", "secret")
"""The fields whose values are never shown."""
ADDRESSES = ("sessions", "model", "models", "base_url", "reply_url")
"""The fields that may hold an address, and a password in it."""

NOTHING: Mapping[str, str] = MappingProxyType({})


def masked(name: str, value: Any) -> Any:
    """The value of a field as it can be shown."""
    if name in SECRET:
        return dict.fromkeys(value, HIDDEN) if isinstance(value, Mapping) else value and HIDDEN
    if name in ADDRESSES and isinstance(value, str):
        return without_password(value)
    if name in ADDRESSES and isinstance(value, tuple):
        return tuple(map(without_password, value))
    return dict(value) if isinstance(value, Mapping) else value


def _told(self: Struct) -> str:
    fields = ((name, masked(name, getattr(self, name))) for name in self.__struct_fields__)
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


class ContextSettings(Struct, frozen=True, kw_only=True):
    """What goes to the model beside the numbers that every agent has."""

    reserve: CountOrNone = 0
    """Tokens kept free for the answer. 0: a quarter of the context, at most 4,096."""
    reasoning: Literal["none", "newest", "all"] = "none"
    """Whose reasoning is sent back to the model: no message's, that of the newest turn, or all."""
    merge_user: bool = False
    """Whether user messages in a row are sent as one, for servers that refuse two."""
    user_first: bool = False
    """Whether the first message sent must be a user's, for servers that refuse another."""
    keep_fields: tuple[str, ...] = ()
    """Further fields of messages to send. Many servers refuse a field that they do not know."""


class AgentSettings(Struct, frozen=True, kw_only=True):
    """An agent: its model, its sessions, and how far it may go."""

    sessions: str = "./workspace"
    """Where the sessions are kept, as with `-w`: a folder, `sqlite:FILE`,
    `postgresql://…`, or `memory:` for nowhere.
    A relative path starts at the current folder."""
    model: str = ""
    """The model: `scripted`, `local`, `local:/path.gguf`, `ollama/NAME`, `openai/NAME`,
    `openrouter/NAME`, `http://host:port/v1#model`, or the NAME of a `[models.NAME]`. Empty: what is
    found, by a key in the environment, an Ollama on this machine, or local weights."""
    models: tuple[str, ...] = ()
    """Further models that users may choose with `/model`, named as in `model`. Those that are
    `[models.NAME]` can be chosen anyway."""
    max_context_tokens: Annotated[int, Meta(ge=2, le=1_000_000_000)] = 32_000
    """Tokens that a request may have: system prompt, tools, memory, history and the answer."""
    max_history_messages: Count = 50
    """More messages than this are compacted, however short they are."""
    system: str = ""
    """The system prompt. Empty: a short one of our own."""
    system_file: str = ""
    """A file that holds the system prompt, instead of `system`. Named in a config file, a relative
    path starts at the folder of that file."""
    max_iterations: Annotated[int, Meta(ge=1, le=1_000)] = 25
    """How often the model is asked in one turn, which is how often it may call tools."""
    tools: bool = True
    """Whether the model is offered tools. Some models and servers take none."""
    tool_timeout: Seconds = 60.0
    """Seconds that a tool may take."""
    tool_output_limit: Count = 20_000
    """Characters of a tool's output that are kept; the rest of a longer one is cut off."""
    routes: tuple[str, ...] = ()
    """Who is answered by this agent: a channel, as in `telegram`, or one sender in it, as in
    `telegram:123`. All others are answered by the agent that `[agent]` describes."""
    context: ContextSettings = field(default_factory=ContextSettings)

    __repr__ = _told


class MemorySettings(Struct, frozen=True, kw_only=True):
    """What is remembered beyond a conversation."""

    consolidation: bool = True
    """Whether notes are made of what was said, after each turn, by the agent's model."""
    recall_tokens: CountOrNone = 1_500
    """Tokens of notes and past messages that are shown to the model. 0: none."""
    half_life_days: Annotated[float, Meta(gt=0, le=1_000_000)] = 30.0
    """After so many days what was said counts about half as much in recall. Facts do not age."""
    zone: str = ""
    """The time zone of the users, for words such as "yesterday": a name such as `Europe/Zurich`.
    Empty: that of this machine."""


class TelegramSettings(Struct, frozen=True, kw_only=True):
    """The agent as a Telegram bot, while `steno serve` runs."""

    token: str = ""
    """The bot's token, from @BotFather. Empty, and no token_env: there is no bot."""
    token_env: str = ""
    """The environment variable that holds the token, as in `TELEGRAM_BOT_TOKEN`."""
    allow: tuple[str, ...] = ()
    """Who is answered: ids of users, as in `123456`, or names, as in `@alice`. Empty: nobody."""
    scope: Literal["sender", "thread", "group"] = "sender"
    """Who shares a session: nobody; nobody, and each topic of a group apart; or all in a group."""
    base_url: str = ""
    """Another server that speaks Telegram's Bot API, as in `http://localhost:8081`."""

    __repr__ = _told


class ChannelSettings(Struct, frozen=True, kw_only=True):
    """What is true of all chat apps."""

    session_persistence: bool = True
    """Whether `steno serve` keeps sessions on disk. false: all sessions of the gateway, also those
    of the HTTP API, are in memory until the process ends. `channels_config.session_persistence`,
    the name in zeroclaw, is read too."""
    telegram: TelegramSettings = field(default_factory=TelegramSettings)


class WebhookSettings(Struct, frozen=True, kw_only=True):
    """A program that sends messages to `/webhooks/NAME`, each signed with a secret."""

    secret: str = ""
    """What both sides sign with: any text of at least 16 characters."""
    secret_env: str = ""
    """The environment variable that holds the secret, as in `STENO_HOOK_SECRET`."""
    allow: tuple[str, ...] = ()
    """Which senders are answered, by the name that the program gives them. Empty: nobody."""
    reply_url: str = ""
    """Where answers are sent, signed likewise. Empty: they are the response to each message."""

    __repr__ = _told


class GatewaySettings(Struct, frozen=True, kw_only=True):
    """The daemon that `steno serve` starts."""

    host: str = "127.0.0.1"
    """The address that is listened at. Any but a loopback one is reached by other machines."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8_787
    """The port. 0: any that is free."""
    hosts: tuple[str, ...] = ()
    """Further names that it is called by, as in `steno.example.org`; requests that call it by any
    other are refused. Browsers can log in at these names."""
    origins: tuple[str, ...] = ()
    """Web pages of other origins that may use it, as in `https://chat.example.org`."""
    token_file: str = ""
    """The file that holds the token of its users; made at the first start. Empty:
    `gateway.token` beside the user's config file."""
    store_anonymous: bool = False
    """Whether chat requests that name no session are kept, each in a session of its own."""
    max_turns: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Requests that may be answered at the same time; further ones are refused at once."""
    max_streams: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Live streams that may be open at the same time."""
    max_body: Annotated[int, Meta(ge=1_024, le=67_108_864)] = 16_777_216
    """Bytes that a request may have."""
    patience: Seconds = 10.0
    """Seconds that answers in flight have to end when it is asked to stop."""
    takeover: Seconds = 20.0
    """Seconds after which the answer that a killed gateway was making is made by another one."""


class RetentionSettings(Struct, frozen=True, kw_only=True):
    """A rule by which sessions are archived, deleted or purged. Without a rule all is kept.

    It takes the sessions of which everything that it says is true.
    """

    action: Literal["archive", "delete", "purge"] = "archive"
    """What is done: `archive` puts what was compacted into archives, `delete` puts the session
    into the trash, `purge` deletes for good what is in the trash, and never a session that is in
    use. A rule that says `purge` names an age, and may name a prefix; with anything else it takes
    nothing."""
    older_than_days: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Nobody changed the session for so many days; with `purge`, it was deleted so many days
    ago. 0: of any age."""
    keep_newest: CountOrNone = 0
    """There are so many that were changed later, of those with this prefix and tag. 0: any."""
    larger_than_mb: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Its live storage, without archives, has more than so many megabytes. 0: of any size."""
    tag: str = ""
    """It has this tag. Empty: any."""
    prefix: str = ""
    """Its key begins so, as in `telegram:`. Empty: any."""
    spare_tag: str = "keep"
    """Sessions with this tag are left alone. Empty: there is no such tag."""


class ModelSettings(Struct, frozen=True, kw_only=True):
    """A model with a name of your own, for `agent.model`."""

    base_url: str = ""
    """The server, as in `http://localhost:8080/v1`."""
    model: str = ""
    """What the server calls the model. Without a base_url: a model as `agent.model` names it."""
    key: str = ""
    """The API key. The file must then be readable by nobody else; key_env is the better way."""
    key_env: str = ""
    """The environment variable that holds the API key, as in `OPENAI_API_KEY`."""
    timeout: Seconds = 120.0
    """Seconds to wait for the next piece of an answer."""
    first_byte_timeout: Seconds = 300.0
    """Seconds to wait for the first piece of an answer: some servers load the model first."""
    retries: Annotated[int, Meta(ge=0, le=100)] = 4
    """How often a request is made again where the server is busy or cannot be reached."""
    headers: Mapping[str, str] = NOTHING
    """Further HTTP headers. They are treated as secrets."""

    __repr__ = _told


class CliSettings(Struct, frozen=True, kw_only=True):
    """How `steno chat` looks."""

    markdown: bool = True
    """Whether answers are laid out as Markdown in a terminal."""
    show_reasoning: bool = False
    """Whether the model's reasoning is shown, where it tells it."""


class Settings(Struct, frozen=True, kw_only=True):
    """All settings in force. Their text form holds no secret."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    cli: CliSettings = field(default_factory=CliSettings)
    models: Mapping[str, ModelSettings] = field(default_factory=lambda: MappingProxyType({}))
    agents: Mapping[str, AgentSettings] = field(default_factory=lambda: MappingProxyType({}))
    """Further agents by name; what one does not say itself is as `agent` says."""
    webhooks: Mapping[str, WebhookSettings] = field(default_factory=lambda: MappingProxyType({}))
    """Programs that send messages, by name."""
    retention: Mapping[str, RetentionSettings] = field(default_factory=lambda: MappingProxyType({}))
    """Rules by which sessions are archived, deleted or purged, by name."""
    keys: Mapping[str, str] = NOTHING
    """Of the environment, what opens models and channels: each `…_API_KEY`, `OLLAMA_HOST`,
    `OLLAMA_CONTEXT_LENGTH`, `OPENAI_BASE_URL`, and what a key_env, token_env or secret_env
    names."""

    __repr__ = _told
