"""Recognition of secrets: by the name of their field, by their form, or by the words before them.

Each search takes linear time on any text: no value of a field is scanned twice, each pattern starts
only at the start of a run of its characters and uses possessive quantifiers, and matches that a
function has to check afterwards are short.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Final
from unicodedata import normalize

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern

# --- field names -----------------------------------------------------------------------------
# In a text, field names are found if they are quoted, as in JSON and programs. The quotes may be
# escaped several times, because arguments and results of tools are often JSON inside JSON.


class SecretKind(Struct, frozen=True):
    """A kind of secret with the names of its fields."""

    name: str
    field_pattern: str
    """Pattern of field names in lower case, with `_` between words."""
    safe_values: str = "(?!)"
    """Pattern of values that are not secrets."""
    min_digits: int = 0
    """Minimum number of digits of a number that is a secret; 0 if no number is a secret."""
    includes_nested: bool = True
    """Whether all values inside an object or list in a field of this kind are secrets."""


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern on first use: compiling is slow, and most texts have no field names."""
    return re.compile(pattern)


_PASS_PREFIXES: Final = """
    account admin api app auth basic bind client current db email ftp http imap key keystore ldap
    login mail mongo mqtt my mysql new old pg postgres proxy rabbitmq redis remote root server
    service smtp ssh sudo truststore user vpn wifi
"""
"""Words before `pass` that make it a password, unlike in `mountain_pass` or `boarding_pass`."""
_NON_SECRET_TOKENS: Final = (
    r"(?:.*_)?(?:next|prev|previous|page|paging|pagination|continuation|cursor|sync|start|end|stop"
    r"|resume|cancellation|eos|bos|pad|unk|mask|sep|cls)_?token"
)
"""Pattern of names of pagination tokens and special tokens of models, which are not secret."""
_FLAG_NAMES: Final = (
    r"(?:has|had|is|was|needs?|requires?|uses?|supports?|shows?|hides?|forgot|allows?|enables?)_.*"
)
_SECRET_KINDS: Final = (
    SecretKind(
        "password",
        r".*(?:password|passwd|passphrase|passcode|passwort|kennwort)s?(_hash)?|(?:.*_)?pwd",
        min_digits=4,
    ),
    SecretKind(
        "password", rf"(?:(?:.*_)?(?:{'|'.join(_PASS_PREFIXES.split())})_?)?pass|(?:.*_)?pw|passkey"
    ),
    SecretKind("password", r".*credentials?", "same-origin|include|omit"),
    SecretKind("private key", r".*private_?keys?"),
    SecretKind(
        "api key",
        r".*(?:api|access|signing|encryption|master|account|subscription|fernet|hmac)_?keys?",
    ),
    SecretKind("secret", r".*secrets?|.*secret_?(?:access_?)?keys?(?:_?base)?"),
    SecretKind("token", r".*token(?:_?value)?|(?:.*_)?(?:jwt|bearer|set_cookie|.+_cookies?)"),
    SecretKind("token", r"(?:x_)?auth_key|(?:php|j)?sess(?:ion)?id"),
    SecretKind("token", r"cookies?", r"[a-z]{1,12}(?: [a-z]{1,12}){0,3}"),
    SecretKind("token", r".*authorization", r"[a-z]{4,15}"),
    SecretKind("token", r"(?:x_)?auth", r"[a-z]{2,12}[0-9]?", includes_nested=False),
    SecretKind("pin", r"(?:.*_)?(?:pin|pin_code|otp)", min_digits=4),
    SecretKind("pin", r"(?:.*_)?(?:cvv|cvc)", min_digits=3),
)
_NON_SECRET_NAME: Final = lazy_pattern(f"{_NON_SECRET_TOKENS}|{_FLAG_NAMES}")
_MAX_NAME_LENGTH: Final = 64
"""Number of characters at the end of a field name that are checked."""
_NAME_SUFFIX: Final = lazy_pattern(r"\s*+(?:\([^()]{0,60}\)|@[\w.-]{1,60})\s*+\Z")
"""Pattern of a suffix in a field name, such as `(prod)` in `password (prod)`."""
_CAMEL_CASE: Final = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS: Final = lazy_pattern(r"[^a-z0-9]+")

_FIELD_PLACEHOLDER: Final = lazy_pattern(
    r"(?i)\s*+(?:\[redacted: [a-z ]{1,20}\]|\*++|•++|x{3,}+|\.\.\.|…|<[^<>\s]{1,40}>"
    r"|\$\{[^{}\s]{1,60}\}|string|null|none|nil|true|false|undefined|optional|required|yes|no)?\s*+"
)
"""Pattern of placeholders, references and types in place of a secret."""
_PIN_DIGITS: Final = lazy_pattern(r"\s*+[0-9]{3,8}\s*+")
_SCHEMA_TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
_SCHEMA_FIELDS: Final = ("properties", "$ref", "enum", "anyOf", "oneOf", "allOf")
_SCHEMA_VALUES: Final = ("value", "default", "const", "example")
"""Names of schema fields that contain values."""
_DESCRIPTION_FIELDS: Final = ("description", "title", "label", "placeholder")

_FIELD_NAME: Final = lazy_pattern(
    # A match starts at the first of several backslashes, so that each run is scanned once.
    r"(?<!\\)(?P<quote>\\{0,31}[\"'])(?P<name>[^\"'\\\n]{1,160})(?P=quote)\s*+(?:=>|[:=])\s*+"
)
_QUOTE: Final = lazy_pattern(r"(?P<escapes>\\{0,31})(?P<mark>[\"'])")
_BARE_NUMBER: Final = lazy_pattern(r"-?[0-9]{3,40}+(?![\w.\"'\\])")
_PUNCTUATION: Final = lazy_pattern(r"[\[\]{}]|(?<!\\)\\{0,31}[\"']")
_COLON: Final = lazy_pattern(r"\s*+:")
_LOGPROB_FIELD: Final = lazy_pattern(r"\s{0,8},\s{0,8}\\{0,31}[\"']logprob")
"""Pattern of the field after an output token of a model; such a token is not a secret."""

Span = tuple[int, int]


class SecretSpan(Struct, frozen=True):
    """The span of a secret in a text, and its replacement."""

    start: int
    end: int
    stub: str


@lru_cache(maxsize=4096)
def secret_kind(name: str) -> SecretKind | None:
    """Return the kind of secret that a field of this name contains, or None."""
    without_suffix = _NAME_SUFFIX.sub("", name[-2 * _MAX_NAME_LENGTH :])
    nfkc_name = without_suffix if without_suffix.isascii() else normalize("NFKC", without_suffix)
    normalized = _SEPARATORS.sub("_", _CAMEL_CASE.sub("_", nfkc_name[-_MAX_NAME_LENGTH:]).lower())
    normalized = normalized.strip("_").rstrip("0123456789_")
    if _NON_SECRET_NAME.fullmatch(normalized):
        return None
    return next(
        (kind for kind in _SECRET_KINDS if _compile(kind.field_pattern).fullmatch(normalized)), None
    )


def is_secret_value(kind: SecretKind, value: str) -> bool:
    """Return whether the value of a field of this kind is a secret and not a placeholder."""
    if kind.name == "pin":
        return _PIN_DIGITS.fullmatch(value) is not None
    return not (_FIELD_PLACEHOLDER.fullmatch(value) or _compile(kind.safe_values).fullmatch(value))


def is_secret_number(kind: SecretKind, value: str) -> bool:
    """Return whether a number in a field of this kind is a secret."""
    digits = value.removeprefix("-")
    has_digits = digits.isdecimal() and len(digits) >= kind.min_digits
    return kind.min_digits > 0 and has_digits and is_secret_value(kind, value)


def kind_of_nested_field(
    kind: SecretKind | None, name: str, *, has_schema: bool
) -> SecretKind | None:
    """Return the kind of a field in an object of this kind; None if its value is not secret.

    `has_schema`: the object is a schema, so only fields such as `default` can be secret.
    """
    if kind is None or not kind.includes_nested or name in _DESCRIPTION_FIELDS:
        return None
    return kind if not has_schema or name in _SCHEMA_VALUES else None


def is_schema(name: str, value: Any) -> bool:
    """Return whether an object with this field is a schema, which describes a type, not a value."""
    if name == "type":
        return isinstance(value, str) and value.lower() in _SCHEMA_TYPES
    return name in _SCHEMA_FIELDS


def stub_of(kind: SecretKind) -> str:
    """Return the replacement of a secret."""
    return f"[redacted: {kind.name}]"


def find_secret_fields(text: str) -> Iterator[SecretSpan]:
    """Yield the secrets of a text that follow the name of their field, in order."""
    position = 0
    while (match := _FIELD_NAME.search(text, position)) is not None:
        position = match.end()
        kind = secret_kind(match["name"])
        if kind is None:
            continue
        number = _BARE_NUMBER.match(text, position)
        if number is not None and is_secret_number(kind, number[0]):
            # Use the quotes of the name, so that JSON stays valid.
            stub = f"{match['quote']}{stub_of(kind)}{match['quote']}"
            yield SecretSpan(number.start(), number.end(), stub)
        spans, position = _find_value_spans(text, position, kind)
        for start, end in spans:
            if is_secret_value(kind, text[start:end]):
                yield SecretSpan(start, end, stub_of(kind))


def _find_value_spans(text: str, start: int, kind: SecretKind) -> tuple[list[Span], int]:
    """Return the spans of possibly secret strings in the value at `start`, and the value's end."""
    if text[start : start + 1] in ("[", "{"):
        return _find_nested_spans(text, start, kind) if kind.includes_nested else ([], start)
    quote = _QUOTE.match(text, start)
    if quote is None:
        return [], start
    end, quote_end = _find_quote_end(text, quote)
    return [] if _LOGPROB_FIELD.match(text, quote_end) else [(quote.end(), end)], quote_end


def _find_nested_spans(text: str, position: int, kind: SecretKind) -> tuple[list[Span], int]:
    """Return the spans of possibly secret strings in a list or object, and the end of the value."""
    depth, name, has_schema = 0, "", False
    spans = list[tuple[str, Span]]()
    while (match := _PUNCTUATION.search(text, position)) is not None:
        position = match.end()
        if match[0] in ("[", "{"):
            depth += 1
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth <= 0:
                break
        elif (quote := _QUOTE.match(text, match.start())) is not None:
            end, position = _find_quote_end(text, quote)
            quoted_text = text[quote.end() : end]
            if _COLON.match(text, position):
                name = quoted_text
                has_schema = has_schema or (name != "type" and is_schema(name, None))
            else:
                spans.append((name, (quote.end(), end)))
                has_schema = has_schema or is_schema(name, quoted_text)
    else:
        position = len(text)
    return [
        span for name, span in spans if kind_of_nested_field(kind, name, has_schema=has_schema)
    ], position


def _find_quote_end(text: str, quote: re.Match[str]) -> Span:
    """Return the end of a quoted text, and the end of its closing quote.

    A newline also ends the text. Each level of escapes doubles the backslashes before a quote and
    adds one. A quote with as many backslashes as the opening quote closes the text. A quote with
    more backslashes also closes the text if the additional ones are escaped backslashes at the end
    of the text; otherwise the quote is part of the text. A quote with fewer backslashes closes an
    outer text, so this text ends too.
    """
    escape_count, position = len(quote["escapes"]), quote.end()
    end_pattern = _QUOTE_OR_NEWLINE[quote["mark"]]
    while (match := end_pattern.search(text, position)) is not None:
        backslash_start = match.start()
        while backslash_start > position and text[backslash_start - 1] == "\\":
            backslash_start -= 1
        backslash_count = match.start() - backslash_start
        if match[0] == "\n" or backslash_count < escape_count:
            return backslash_start, backslash_start
        if (backslash_count - escape_count) % (2 * (escape_count + 1)) == 0:
            return match.start() - escape_count, match.end()
        position = match.end()
    return len(text), len(text)


_QUOTE_OR_NEWLINE: Final = {mark: lazy_pattern(rf"[{mark}\n]") for mark in "\"'"}


# --- forms of secrets ------------------------------------------------------------------------
# Each pattern is specific enough to ignore ordinary prose, hashes, ids and phone numbers.


class SecretPattern(Struct, frozen=True):
    """A kind of secret, with the pattern that finds it."""

    name: str
    pattern: re.Pattern[str]
    """The secret is the group `quoted`, `bare` or `value`, or else the whole match."""
    hints: tuple[str, ...]
    """Words in lower case; a text without any of these words has no secret of this kind."""
    check: Callable[[re.Match[str]], bool] = bool

    def may_occur_in(self, lower_case_text: str) -> bool:
        """Return whether a text in lower case may contain a secret of this kind."""
        return any(hint in lower_case_text for hint in self.hints)


def _secret_pattern(
    name: str, hints: str, pattern: str, check: Callable[[re.Match[str]], bool] = bool
) -> SecretPattern:
    """Return the pattern of a kind of secret. `hints` are words separated by spaces."""
    return SecretPattern(name, lazy_pattern(pattern), tuple(hints.split()), check)


def _key_pattern(
    name: str, hints: str, pattern: str, check: Callable[[re.Match[str]], bool] = bool
) -> SecretPattern:
    """Return the pattern of a key; a match must not start inside a longer word."""
    return _secret_pattern(name, hints, rf"(?<![A-Za-z0-9_-])(?:{pattern})", check)


_ALPHANUMERIC_RUN: Final = lazy_pattern("[A-Za-z0-9]{16}")
"""16 letters or digits in a row, which words such as `sk-learn-compatible-api` do not have."""


def _has_alphanumeric_run(match: re.Match[str]) -> bool:
    return _ALPHANUMERIC_RUN.search(match[0]) is not None


_CHARACTER_KIND_CHANGE: Final = lazy_pattern("[a-z][A-Z]|[0-9][A-Za-z]|[A-Za-z][0-9]|[A-Z]{2}[a-z]")
"""A change of case or between letters and digits; hyphenated words have few, random keys many."""


def _looks_random(match: re.Match[str]) -> bool:
    return len(_CHARACTER_KIND_CHANGE.findall(match[0])) > 2


def _is_credential(match: re.Match[str]) -> bool:
    """Return whether the text after `bearer` or `token` is a credential, not a word in prose."""
    value = match["value"]
    return any(map(str.isdigit, value)) or _ALPHANUMERIC_RUN.search(value) is not None


PRIVATE_KEY: Final = SecretPattern(
    "private key",
    # A truncated key extends to the end of the text.
    # The group `(?:…)*` is not possessive: Python before 3.11.3 matched one character too many.
    lazy_pattern(
        r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
        r"[^-]*+(?:-(?!----)[^-]*+)*(?:-----END [A-Z0-9 ]{1,80}-----)?"
    ),
    ("private key",),
)

_PUTTY_KEY: Final = _secret_pattern(
    "private key",
    "private-lines:",
    # The key is base64, so it ends before the line `Private-MAC`, which has a hyphen.
    r"Private-Lines:[ \t]{0,4}[0-9]{1,4}(?:\r?\n|\\n)"
    r"(?P<value>(?:[A-Za-z0-9+/=]{1,120}(?:\r?\n|\\n|\Z)){1,400})",
)

_KEY_PATTERNS: Final = (
    _key_pattern("api key", "sk-ant-", r"sk-ant-[A-Za-z0-9_-]{20,}+"),
    _key_pattern("api key", "sk-", r"sk-(?:proj|svcacct|admin|or-v1)-[A-Za-z0-9_-]{20,}+"),
    _key_pattern("api key", "sk-", r"sk-[A-Za-z0-9_-]{20,}+", _has_alphanumeric_run),
    _key_pattern("api key", "aiza", r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    _key_pattern("api key", "hf_", r"hf_[A-Za-z0-9]{30,}+"),
    _key_pattern("api key", "gsk_", r"gsk_[A-Za-z0-9]{40,}+"),
    _key_pattern("api key", "xai-", r"xai-[A-Za-z0-9]{40,}+"),
    _key_pattern("api key", "k_", r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}+"),
    _key_pattern("api key", "whsec_", r"whsec_[A-Za-z0-9+/=]{24,}+"),
    _key_pattern("api key", "sg.", r"SG\.[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),
    _key_pattern("access key", "ia", r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _key_pattern("private key", "age-secret-key-1", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}+"),
    _key_pattern("token", "gh", r"gh[pousr]_[A-Za-z0-9]{36,}+"),
    _key_pattern("token", "github_pat_", r"github_pat_[A-Za-z0-9_]{22,}+"),
    _key_pattern("token", "glpat-", r"glpat-[A-Za-z0-9_-]{20,}+"),
    # GitLab tokens must look random, because `glrt-` also occurs in texts on statistics.
    _key_pattern(
        "token",
        "glrt- gldt- glptt- glcbt- glft- glsoat- glimt- glagent-",
        r"gl(?:rt|dt|ptt|cbt|ft|soat|imt|agent)-[A-Za-z0-9_-]{20,}+",
        _looks_random,
    ),
    _key_pattern("token", "shp", r"shp(?:at|ca|pa|ss)_[A-Za-z0-9]{32,}+"),  # Shopify
    _key_pattern("token", "dapi", r"dapi[a-f0-9]{32}(?:-[0-9]{1,2})?(?![A-Za-z0-9])"),  # Databricks
    # HashiCorp Vault
    _key_pattern("token", "hvs. hvb. hvr.", r"(?<!\.)hv[sbr]\.[A-Za-z0-9_-]{20,}+", _looks_random),
    _key_pattern("token", "atatt3x", r"ATATT3x[A-Za-z0-9_=-]{20,}+"),  # Atlassian
    _key_pattern("api key", "pmak-", r"PMAK-[A-Za-z0-9]{20,}+(?:-[A-Za-z0-9]{20,}+)?"),  # Postman
    _key_pattern("token", "ntn_", r"ntn_[A-Za-z0-9]{30,}+"),  # Notion
    _key_pattern("api key", "lin_api_", r"lin_api_[A-Za-z0-9]{30,}+"),  # Linear
    _key_pattern("token", "sbp_", r"sbp_[A-Za-z0-9]{32,}+"),  # Supabase
    # Doppler
    _key_pattern("token", "dp.", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9._-]{30,}+"),
    _key_pattern("api key", "pplx-", r"pplx-[A-Za-z0-9]{32,}+"),  # Perplexity
    _key_pattern("token", "r8_", r"r8_[A-Za-z0-9]{30,}+"),  # Replicate
    _key_pattern("token", "dckr_", r"dckr_[po]at_[A-Za-z0-9_-]{20,}+"),  # Docker
    _key_pattern("api key", "rubygems_", r"rubygems_[A-Za-z0-9]{40,}+"),
    _key_pattern("token", "sntry", r"sntry[su]_[A-Za-z0-9_+/=-]{40,}+"),  # Sentry
    _key_pattern("api key", "nrak-", r"NRAK-[A-Za-z0-9]{20,}+"),  # New Relic
    _key_pattern(  # Token of a Discord bot: id in base64, time, signature
        "token",
        ".",
        r"(?<!\.)[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}+",
        _looks_random,
    ),
    _key_pattern(
        "token",
        "/api/webhooks/",
        r"discord(?:app)?\.com/api/webhooks/(?P<value>[0-9]{15,20}/[A-Za-z0-9_-]{30,}+)",
    ),
    _key_pattern(
        "token",
        "webhook.office.com",
        r"webhook\.office\.com/webhookb2/(?P<value>[A-Za-z0-9@/._-]{30,}+)",
    ),
    # Azure shared access signature.
    _secret_pattern("token", "sig=", r"(?<=[?&;])sig=(?P<value>[\w%+/=.~-]{20,}+)"),
    # These two patterns find the gateway's cookie and login links.
    _key_pattern("cookie", "steno", r"steno[a-z_-]{0,20}=(?P<value>[0-9]{6,20}\.[\w.-]{16,}+)"),
    _secret_pattern("token", "/login?code=", r"/login\?code=(?P<value>[\w.-]{8,}+)"),
    _key_pattern("token", "xox", r"xox[abcdeoprs]-[A-Za-z0-9-]{10,}+"),
    _key_pattern("token", "xapp-", r"xapp-[0-9]-[A-Za-z0-9-]{20,}+"),
    _key_pattern("token", "hooks.slack.com", r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}+"),
    _key_pattern("token", "ya29.", r"ya29\.[A-Za-z0-9_-]{20,}+"),
    _key_pattern("token", "gocspx-", r"GOCSPX-[A-Za-z0-9_-]{20,}+"),
    _key_pattern("token", "npm_", r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
    _key_pattern("token", "pypi-", r"pypi-[A-Za-z0-9_-]{50,}+"),
    _key_pattern("token", "dop_v1_", r"dop_v1_[0-9a-f]{64}(?![A-Za-z0-9])"),
    # Token of a Telegram bot. In URLs, the token follows the word `bot`.
    _key_pattern(
        "token", ":", r"(?:bot)?(?P<value>[0-9]{8,10}:[A-Za-z0-9_-]{35})(?![A-Za-z0-9_-])"
    ),
    # JSON web token: a header and a body that are both JSON objects.
    _key_pattern(
        "token", "eyj", r"eyJ[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{4,}+(?:\.[A-Za-z0-9_-]*+)?"
    ),
)

_HEADER_PATTERNS: Final = (
    _secret_pattern(
        "token",
        "bearer",
        r"(?i)\bbearer:?[ \t]{1,4}(?P<value>[\w.~+/=-]{16,}+)",
        _is_credential,
    ),
    _secret_pattern(
        "password",
        "basic",
        r"(?i)\bauthorization:[ \t]{0,4}basic[ \t]{1,4}(?P<value>[a-z0-9+/=]{8,}+)",
    ),
    _secret_pattern(
        "token",
        "authorization",
        r"(?i)\bauthorization:[ \t]{0,4}(?:token|apikey|key)[ \t]{1,4}"
        r"(?:token=)?[\"']?(?P<value>[\w.~+/=-]{8,}+)",
        _is_credential,
    ),
    _secret_pattern(
        "cookie",
        "set-cookie",
        r"(?i)(?<![\w-])set-cookie:[ \t]{0,4}[^\s=;,\"']{1,64}="
        r"(?P<value>(?!\[redacted)[^\s;,\"'\\]{1,4096}+)",
    ),
    _secret_pattern(
        "cookie",
        "cookie",
        r"(?i)(?<![\w-])cookie:[ \t]{0,4}(?P<value>[^\s=;,\"']{1,64}=(?!\[redacted)[^\s\"'\\]"
        r"[^\r\n\"'\\]{0,4096}+)",
    ),
    # This pattern finds the password in a URL: scheme://user:password@host.
    # The password may contain an @ or a slash, so it extends to the last @.
    # Text that starts with a port number is not a password.
    _secret_pattern(
        "password",
        "://",
        r"://[^\s/:@\[]{0,64}+:(?P<value>(?!\[redacted|[0-9]{1,5}(?:[/?#]|\Z))\S{1,256})@",
    ),
)

_OPTION_VALUE_REGEX: Final = (
    r"(?:(?P<quote>[\"'])(?P<quoted>[^\"'\n]{1,256})(?P=quote)|(?P<value>[^\s\"'`\\]{3,1024}+))"
)


def _is_option_value(match: re.Match[str]) -> bool:
    """Return whether the text after an option is its value and not the rest of a sentence."""
    value = match["quoted"] or match["value"].rstrip(".,;:!?)]}")
    if value.startswith("-") or _PLACEHOLDER.match(value) or value.startswith("$"):
        return False
    letters = value.replace("_", "").replace("-", "")
    return not (letters.isalpha() and (letters.islower() or letters.isupper()))


def _is_attached_password(match: re.Match[str]) -> bool:
    """Return whether the text directly after `-p` is a password and not a placeholder."""
    value = match["quoted"] or match["value"]
    return not (_PLACEHOLDER.match(value) or value[0] in "$%<-" or value.isupper())


def _is_curl_password(match: re.Match[str]) -> bool:
    text_before = match.string[max(0, match.start() - 300) : match.start()]
    return "curl" in text_before.rpartition("\n\n")[2] and not _PLACEHOLDER.match(match["value"])


_COMMAND_PATTERNS: Final = (
    _secret_pattern(
        "secret",
        "--",
        r"(?i)(?<![\w-])--(?:[a-z]{1,20}-){0,3}(?:password|passwd|passphrase|token|secret"
        rf"|(?:api|access|secret)-?key)[ \t]{{1,4}}{_OPTION_VALUE_REGEX}",
        _is_option_value,
    ),
    _secret_pattern(
        "password",
        "sshpass",
        rf"\bsshpass[ \t]{{1,4}}-p[ \t]{{0,4}}{_OPTION_VALUE_REGEX}",
        _is_option_value,
    ),
    _secret_pattern(
        "password",
        "mysql",
        rf"\bmysql[a-z]{{0,8}}\b[^\n|;&]{{0,200}}?[ \t]-p{_OPTION_VALUE_REGEX}",
        _is_attached_password,
    ),
    _secret_pattern(
        "password",
        "curl",
        r"(?<![\w-])(?:-u|--user)[ \t=]{0,4}[\"']?[^\s:\"'/]{1,64}:"
        r"(?P<value>[^\s\"'`\\]{1,256}+)",
        _is_curl_password,
    ),
    _secret_pattern(
        "password",
        "login",
        r"\bmachine\s{1,8}\S{1,128}+\s{1,8}login\s{1,8}\S{1,128}+"
        r"\s{1,8}password\s{1,8}(?P<value>(?!\[redacted)\S{1,256}+)",
    ),
    _secret_pattern(
        "access key",
        "accountkey= sharedaccesskey=",
        r"(?i)\b(?:account|sharedaccess)key=(?P<value>[a-z0-9+/=]{20,}+)",
    ),
)

_XML_ELEMENT: Final = lazy_pattern(
    r"<(?P<tag>[\w:.-]{1,64})(?:\s[^<>]{0,200})?>(?P<value>[^<>]{1,256})</(?P=tag)\s{0,4}>"
)


def _is_secret_element(match: re.Match[str]) -> bool:
    kind = secret_kind(match["tag"])
    return kind is not None and is_secret_value(kind, match["value"])


# --- secrets introduced by words -------------------------------------------------------------

_VALUE_REGEX: Final = (
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\"'`\n]{1,256})(?P=quote)|(?P<bare>\S{1,256}+))"
)

_PASSWORD: Final = lazy_pattern(
    r"(?i)(?:password|passwd|passphrase|passcode|pwd)"
    r"(?:(?<!redacted: password)\]|%5d|\*\*|__)?(?P<closed>[\"'`]?)"
    r"(?:\s{1,4}(?:for|of|on|to)(?:\s{1,4}[\w'.-]{1,24}){1,4}?)?"
    r"(?P<sep>\s{0,4}(?:=>|:=|=|:|\uff1a)\s{0,4}"
    r"|\s{1,4}(?:is|was|to)(?:\s{1,4}now)?(?:\s{0,4}:\s{0,4}|\s{1,4}))"
    rf"{_VALUE_REGEX}(?P<next>[ \t]{{0,4}}\w{{0,4}})"
)
# This pattern takes most of the search time, so it starts with the possible first letters.
_ASSIGNED_SECRET: Final = lazy_pattern(
    r"[sSkKtTpPcCmMпП密パ](?i:(?P<secret>(?<=s)ecret(?:_key_base)?)|(?P<key>(?<=k)ey)|(?P<token>(?<=t)oken)"
    r"|(?P<password>(?<=p)asswort|(?<=k)ennwort|(?<=c)ontrase[nñ]a|(?<=m)ot de passe|(?<=s)enha"
    r"|(?<=п)ароль|(?<=密)码|(?<=パ)スワード)"
    r")[\"'`]?(?P<sep>\s{0,4}(?:=>|:=|=|:|\uff1a)\s{0,4}|\s{1,4}(?i:is|ist|es|est)\s{1,4})"
    rf"{_VALUE_REGEX}"
)
_ASSIGNED_HINTS: Final = (
    *("secret", "key", "token", "passwort", "kennwort", "contrase", "mot de passe", "senha"),
    *("пароль", "密码", "パスワード"),
)
_KEY_PREFIX: Final = lazy_pattern(
    r"(?i)(?:api|access|private|secret|signing|encryption|fernet|master|hmac|jwt|aes)[_ -]?\Z"
)
_TOKEN_PREFIX: Final = lazy_pattern(r"(?i)(?:access|auth|refresh|api|bot|session|id)[_ -]?\Z")
_PIN: Final = lazy_pattern(
    r"(?i)(?<![^\W_])pin(?:[ _-](?:code|number))?[\"'`]?"
    r"(?:\s{0,4}[=:]\s{0,4}|\s{1,4}is(?:\s{0,4}:\s{0,4}|\s{1,4}))[\"'`]?(?P<value>[0-9]{4,8})\b"
)

_ASSIGNMENT_SIGNS: Final = ("=", ":", ":=", "=>")

_PLACEHOLDER: Final = lazy_pattern(
    # This pattern finds placeholders and references in place of a secret.
    r"(?i)\[(?:redacted|hidden|removed|masked|filtered|your|\.)|\*\*|••|\.\.\.|…|<[^<>\s]{1,40}>|<your\b"
    r"|\{|%[(sd]|\$[{(]|\$[A-Z_]{0,30}(?:pass|pwd|secret|token|key)|\([a-z]{1,30}\b|x{3,}\b|your[_-]"
    r"|os\.|env[.\[]|process\.|config[.\[]|settings\.|self\.|[\w.]{1,60}\("
)
_NUMBER_PATTERN: Final = lazy_pattern(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,4})?")
_PLACEHOLDER_WORDS: Final = """
    any bool boolean bytes changeme char false int nil none null number object optional passwd
    password pwd secret secretstr str string text true undefined varchar
"""
_PLACEHOLDERS: Final = frozenset(_PLACEHOLDER_WORDS.split())

_SENTENCE_WORD_LIST: Final = """
    a about again all also always an another any as at bad based been being but by case-sensitive
    complex correct different easy empty enough fine for from good gone hard here hers his
    important impossible in incorrect invalid it its just kept known less long lost mandatory mine
    missing more my necessary never new no none not now of off ok okay old on one only optional or
    our out over password passwords private public quite rather really required right safe same
    secret secure set short simple so something sound still strong sure temporary that the their
    theirs there this to too unique unknown unsafe up valid very weak what where which with without
    wrong your yours
"""
_SENTENCE_WORDS: Final = frozenset(_SENTENCE_WORD_LIST.split())
"""Words that often follow `password is` in ordinary sentences."""


def _is_password(match: re.Match[str]) -> bool:
    """Return whether the text after `password` is a password and not the rest of the sentence."""
    value = _value_text(match)
    if len(value) < 3 or _PLACEHOLDER.match(value) or value.lower() in _PLACEHOLDERS:
        return False
    if match["closed"] and _NUMBER_PATTERN.fullmatch(value):
        return False  # find_secret_fields has checked numbers after quoted field names
    if match["quoted"] is not None or "=" in match["sep"]:
        return True
    if not value.isalpha() and value.lower() not in _SENTENCE_WORDS:
        return "to" not in match["sep"].lower() or any(map(str.isdigit, value))
    word, next_word = value.lower(), match["next"].strip().lower()
    ends_clause = match["bare"][-1] in ".,;!?)" or next_word in ("", "and", "but")
    is_sentence_word = word in _SENTENCE_WORDS or word.endswith(("ed", "ing", "en", "ly"))
    return ends_clause and not is_sentence_word and "to" not in match["sep"].lower()


def _is_assigned_secret(match: re.Match[str]) -> bool:
    """Return whether the text after `api key` or similar words is a key: long, and not a word."""
    text_before = match.string[max(0, match.start() - 12) : match.start()]
    if match["key"] and not _KEY_PREFIX.search(text_before):
        return False
    if match["token"] and not _TOKEN_PREFIX.search(text_before):
        is_separate_word = not text_before[-1:].isascii() or not text_before[-1:].isalnum()
        if not is_separate_word or match["sep"].strip()[:1] not in ("=", ":"):
            return False
    value = _value_text(match)
    if len(value) < (4 if match["password"] else 8) or _PLACEHOLDER.match(value):
        return False
    if any(map(str.isdigit, value)):
        return any(map(str.isalpha, value))
    return match["sep"].strip() in _ASSIGNMENT_SIGNS and _ALPHANUMERIC_RUN.search(value) is not None


def _value_text(match: re.Match[str]) -> str:
    return match["quoted"] or match["bare"].strip("\"'`").rstrip(".,;:!?)]}")


# --- card numbers ----------------------------------------------------------------------------

_CARD_SEPARATOR_REGEX: Final = "[ \u00a0\u2009\u202f]{1,2}|[-.\u2010-\u2015]"
"""Separators between the groups of a card number: spaces, hyphens, dashes or dots."""
_CARD_NUMBER: Final = lazy_pattern(
    rf"(?<![\w+-])(?<![0-9]\.)(?:[0-9]{{14,19}}|[0-9]{{4}}({_CARD_SEPARATOR_REGEX})[0-9]{{4}}\1[0-9]{{4}}\1[0-9]{{4}}"
    rf"|3[0-9]{{3}}({_CARD_SEPARATOR_REGEX})[0-9]{{6}}\2[0-9]{{4,5}})(?!\w|\.[0-9]|-\w)"
)
_ISSUED_CARD_NUMBER: Final = lazy_pattern(
    r"4[0-9]{15}|(?:5[1-5]|2[2-7])[0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}"
    r"|(?:35|65|62)[0-9]{14}|6(?:011|4[4-9][0-9])[0-9]{12}|62[0-9]{17}"
)


def _is_card_number(match: re.Match[str]) -> bool:
    """Return whether a card issuer uses such numbers and the check digit (Luhn) is correct."""
    digits = re.sub("[^0-9]", "", match[0])
    if not _ISSUED_CARD_NUMBER.fullmatch(digits):
        return False
    luhn_values = [int(digit) * (2 if i % 2 else 1) for i, digit in enumerate(reversed(digits))]
    return sum(value - 9 * (value > 9) for value in luhn_values) % 10 == 0


SECRET_PATTERNS: Final = (  # guard: keys-redacted
    PRIVATE_KEY,
    _PUTTY_KEY,
    *_KEY_PATTERNS,
    *_HEADER_PATTERNS,
    *_COMMAND_PATTERNS,
    SecretPattern("secret", _XML_ELEMENT, ("</",), _is_secret_element),
    SecretPattern("secret", _ASSIGNED_SECRET, _ASSIGNED_HINTS, _is_assigned_secret),
    SecretPattern("pin", _PIN, ("pin",)),
    SecretPattern("card number", _CARD_NUMBER, tuple("3456"), _is_card_number),
    # Passwords come last: their check reads the text after the match, which may be another secret.
    SecretPattern("password", _PASSWORD, ("pass", "pwd"), _is_password),
)
"""All kinds of secrets in search order, the most specific first."""
